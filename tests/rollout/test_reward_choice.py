"""Which grader a row gets, which number of a reward counts, and labels that reach the grader as
they stand in the file."""

import json
import math
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`

from slime.data.rewards import reward_number
from slime.data.sample import Sample
from slime.exceptions import RolloutDataError
from slime.files import exact_json
from slime.files.jsonl import encode, read_jsonl
from slime.files.rollout_dump import read_rollout_dump, save_debug_rollout_data
from slime.gate.integrity_checks import reward_problem
from slime.metrics.rollout_metrics import RolloutMetricsConfig, eval_metrics
from slime.prompts.eval_config import build_eval_dataset_configs
from slime.prompts.prompt_files import read_rows
from slime.rollout.evaluation import eval_columns, fail_unusable_rewards
from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std

NUM_GPUS = 0
BIG = 123456789012345678901  # 21 digits: a 64-bit integer has at most 20


def test_in_evaluation_as_in_training_a_rows_own_type_goes_before_rm_type():
    """A row's own type precedes --rm-type in evaluation as in training; a type that the evaluation
    set names precedes both."""
    args = types.SimpleNamespace(rm_type="math")
    plain, named = build_eval_dataset_configs(
        args, [{"name": "a", "path": "p"}, {"name": "b", "path": "p", "rm_type": "f1"}]
    )
    (by_default,) = build_eval_dataset_configs(
        args, [{"name": "a", "path": "p"}], {"rm_type": "gpqa"}
    )
    row = {"rm_type": "dapo", "k": 1}
    assert plain.inject_metadata(row) == row and plain.rm_type == "math"
    assert (
        plain.inject_metadata({"k": 1})["rm_type"]
        == plain.inject_metadata({"rm_type": None})["rm_type"]
        == "math"
    )
    assert (
        named.inject_metadata(row)["rm_type"] == "f1"
        and by_default.inject_metadata(row)["rm_type"] == "gpqa"
    )


@pytest.mark.parametrize(
    ("key", "words"), [(None, "Choose one of them"), ("scroe", "no key 'scroe'")]
)
def test_a_reward_of_several_values_without_a_usable_key_is_named_with_its_keys_everywhere(
    key, words
):
    """A dict reward without a usable key gives training's message, with the keys, in evaluation,
    the dynamic filter and the sample too."""
    args = types.SimpleNamespace(reward_key=key, eval_reward_key=None)
    sample = Sample(index=7, reward={"score": 1.0, "acc": True})
    calls = [lambda: eval_columns(args, [sample]), lambda: check_reward_nonzero_std(args, [sample])]
    calls += [lambda: sample.get_reward_value(args)] if key else []
    for call in calls:
        with pytest.raises(
            RolloutDataError, match=rf"sample 7 .*\['acc', 'score'\].*{words}.*--eval-reward-key"
        ):
            call()
    good = types.SimpleNamespace(reward_key="acc", eval_reward_key="score")
    assert (
        eval_columns(good, [sample])["rewards"] == [1.0] and sample.get_reward_value(good) is True
    )


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        ("1.0", "reward is str, not a number"), ([1.0], "reward is list, not a number"), (math.nan, "reward is nan"), (math.inf, "reward is inf"),
        (torch.tensor([1.0]), "reward is Tensor, not a number"), (10**400, "reward is an integer beyond the range of a float"),
        ({"score": "1"}, "reward is str, not a number"), ({"score": None}, "reward is None"),
    ],
)  # fmt: skip
def test_evaluation_takes_no_reward_that_training_rejects(reward, sentence):
    """A reward that training rejects as bad_reward fails its sample in evaluation with the same
    message; it is not read as 1.0."""
    key = "score" if isinstance(reward, dict) else None
    args = types.SimpleNamespace(reward_key=key, eval_reward_key=None)
    bad, good = (
        Sample(index=7, reward=reward),
        Sample(index=8, reward={"score": 1} if key else np.float32(1.0)),
    )
    assert reward_problem(reward, key) == sentence
    fail_unusable_rewards(args, [bad, good])
    assert bad.status is Sample.Status.FAILED and bad.metadata["failure"] == f"reward: {sentence}"
    assert eval_columns(args, [bad, good]) == {
        "rewards": [1.0],
        "truncated": [False],
        "samples": [good],
    }


@pytest.mark.parametrize("reward", ["1.0", [1.0], torch.tensor([1.0])])
def test_a_reward_is_a_number_and_nothing_that_could_be_read_as_one(reward):
    """A reward is a number, also in what a user's evaluation function returns and in the dry run's
    call; a text of digits is none."""
    with pytest.raises(
        RolloutDataError, match="The reward of sample 1 is .*, which is not a number"
    ):
        reward_number(reward, None, index=1)
    config = RolloutMetricsConfig()
    with pytest.raises(RolloutDataError, match="The reward of sample 1 is"):
        eval_metrics(config, {"rewards": [1.0, reward]}, group_size=1)
    assert (
        eval_metrics(config, {"rewards": [1.0, torch.tensor(0), True, None]}, group_size=1)[""]
        == 2 / 3
    )


def test_an_integer_of_21_digits_is_the_same_number_in_the_prompt_file_the_sample_and_the_dump(
    tmp_path,
):
    """A label of 21 digits keeps all of them; as a float it is another number, and the right answer
    would score 0."""
    file = tmp_path / "p.jsonl"
    file.write_text(
        json.dumps({"input": "p", "label": BIG, "metadata": {"all": [BIG, -BIG, 0.5]}}) + "\n"
    )
    (row,) = read_rows(str(file))
    assert row.data["label"] == BIG and type(row.data["label"]) is int
    assert row.data["metadata"]["all"] == [BIG, -BIG, 0.5]
    save_debug_rollout_data(
        str(tmp_path / "{rollout_id}"),
        [Sample(label=BIG, metadata=row.data["metadata"])],
        rollout_id=0,
        evaluation=False,
    )
    (sample,) = read_rollout_dump(tmp_path / "0")
    assert sample.label == BIG and sample.metadata == row.data["metadata"]
    (tmp_path / "r.jsonl").write_bytes(encode({"label": BIG}))
    assert read_jsonl(tmp_path / "r.jsonl") == ([{"label": BIG}], 0)


def test_numbers_that_fit_and_what_json_lacks_are_treated_as_before():
    """Integers at the two borders of 64 bits and texts of digits stay as they are; a set is
    refused, also beside a long integer."""
    for value in (2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**30, "1" * 25, 1e30):
        assert exact_json.loads(exact_json.dumps({"a": [value]})) == {"a": [value]}
    for value in ({"a": {1}}, {"a": [BIG, {1}]}):
        with pytest.raises(TypeError):
            exact_json.dumps(value)
    with pytest.raises(exact_json.JSONDecodeError):
        exact_json.loads(b"1234567890123456789012,")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
