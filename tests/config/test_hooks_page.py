"""docs/hooks.md has every extension point of the table, and its examples run."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from support.options import write_run_inputs

from slime.config.extension_points import EXTENSION_POINTS, problem_of
from slime.testing import call, make_args, make_sample
from slime.utils.arguments import parse_args

NUM_GPUS = 0

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "hooks.md").read_text()
SECTIONS = dict(re.findall(r"^## `(--[a-z-]+)`\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def example_of(point):
    """The function of the section's example: the last name that it defines in its own code."""
    (code,) = re.findall(r"```python\n(.*?)```", SECTIONS[point.flag], re.DOTALL)
    namespace = {"__name__": "hooks_page"}
    exec(compile(code, f"hooks.md {point.flag}", "exec"), namespace)
    (name,) = re.findall(r"^(?:async def|def|class) (\w+)", code, re.MULTILINE)
    return namespace[name]


def test_every_extension_point_has_its_section():
    """Every extension point has a section with its parameters and its task."""
    assert list(SECTIONS) == [point.flag for point in EXTENSION_POINTS.values()]
    for point in EXTENSION_POINTS.values():
        for words in (point.parameters, point.task, point.called, point.returns):
            assert words in SECTIONS[point.flag], (point.flag, words)


@pytest.mark.parametrize("option", EXTENSION_POINTS)
def test_every_example_can_be_called_as_its_option_is(option):
    """Every example passes the check that a run makes of a user's function."""
    assert problem_of(EXTENSION_POINTS[option], example_of(EXTENSION_POINTS[option])) is None


def test_the_examples_of_the_rollout_side_do_what_they_say():
    """The examples of the rollout side do what the page says, on two samples with label 4 and
    responses 4 and 5."""
    find = {option: example_of(point) for option, point in EXTENSION_POINTS.items()}
    args = make_args()
    samples = [
        make_sample("2+2=", text, label="4", index=i, reward=r)
        for i, (text, r) in enumerate((("4", 1.0), ("5", 0.0)))
    ]
    assert [call(find["custom_rm_path"], args, sample) for sample in samples] == [1.0, 0.0]
    call(find["rollout_sample_hook_path"], args, samples[0], rollout_id=0, evaluation=False)
    assert samples[0].metadata["answer_length"] == 1
    assert find["dynamic_sampling_filter_path"](args, samples).keep
    assert not find["dynamic_sampling_filter_path"](args, samples[:1]).keep
    buffer = [[1], [2], [3]]
    assert find["buffer_filter_path"](args, None, buffer, 2) == [[2], [3]] and buffer == [[1]]
    assert find["custom_reward_post_process_path"](args, samples) == ([1.0, 0.0], [0.5, -0.5])
    assert find["custom_convert_samples_to_train_data_path"](args, samples)["loss_masks"] == [
        [1],
        [1],
    ]
    find["rollout_sample_filter_path"](args, [samples])
    assert not samples[0].remove_sample


def test_the_pages_first_example_runs():
    """The page's unit test of a reward runs."""
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0], {})


def test_the_supervised_pages_options_are_a_run(tmp_path):
    """The YAML of docs/sft.md, with existing paths, is a valid run."""
    inputs = write_run_inputs(tmp_path)
    (block,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "sft.md").read_text(), re.DOTALL)
    (row,) = re.findall(r"```json\n(.*?)```", (DOCS / "sft.md").read_text(), re.DOTALL)
    (tmp_path / "data.jsonl").write_text(row)
    block = block.replace("path/to/model", inputs[1]).replace(
        "data.jsonl", str(tmp_path / "data.jsonl")
    )
    block = block.replace("save: checkpoints", f"save: {tmp_path}/checkpoints").replace(
        "model-{", f"{tmp_path}/model-{{"
    )
    (tmp_path / "sft.yaml").write_text(block)
    args = parse_args(
        [
            "--config",
            str(tmp_path / "sft.yaml"),
            "--run-dir",
            str(tmp_path / "run"),
            "--num-cpus",
            "8",
        ]
    )
    assert args.loss_type == "sft_loss" and args.rollout_batch_size == 128


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
