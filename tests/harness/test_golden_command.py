"""`slime golden`: a small recording is cut from a large one, checked, and recorded anew on request;
what must not leave the machine does not.
"""

import io
import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import orjson
import pytest
import yaml
from support.recordings import edit_run

from slime import cli
from slime.data import rewards
from slime.exceptions import ConfigError, RolloutDataError
from slime.harness import golden, golden_check
from slime.harness.diff.results import FieldResult, RolloutResult
from slime.harness.diff.stages import DiffStage
from slime.harness.golden_cut import Cut, cleaned_record, cut, put_part
from slime.recording.reader import Recording

NUM_GPUS = 0

RUN = Path(__file__).resolve().parents[1] / "golden" / "run"


@pytest.fixture
def one(tmp_path):
    """A golden run of rollout 1."""
    cut(RUN, tmp_path / "one", Cut(rollouts=[1]))
    return tmp_path / "one"


@pytest.fixture
def untrained(one):
    """The same without weights, so that nothing is trained again."""
    shutil.rmtree(one / "rollout_000001" / "weights")
    return one


def ddof_of_the_population(monkeypatch):
    """Another standard deviation, as a change of the code would bring it."""
    real = rewards.normalize_rewards

    def changed(*args, **kwargs):
        values, statistics = real(*args, **kwargs)
        return values * 1.1, statistics

    from slime.data import columns

    monkeypatch.setattr(columns, "normalize_rewards", changed)


def test_a_golden_run_is_a_recording_with_chosen_rollouts(one, capsys):
    """The rollout that was chosen, with parts and weights as they were, and no engine's replies."""
    cutting, source = Recording(one), Recording(RUN)
    assert cutting.rollouts == [1] and cutting.rollout(1).problems() == []
    for name in cutting.rollout(1).parts:
        assert (
            cutting.rollout(1).path(name).read_bytes() == source.rollout(1).path(name).read_bytes()
        )
    assert "replies" not in cutting.rollout(1) and cutting.rollout(1).has_weights
    notes = json.loads((one / "golden.json").read_text())
    assert notes["parts"]["1"]["rewards"] == ["samples", "columns"]
    assert notes["left_out"] == {} and (one / "reference").is_dir()  # weights before rollout 0
    assert golden.main(["check", str(one)]) == 0
    assert "0 differences" in capsys.readouterr().out


@pytest.mark.parametrize(
    "with_weights", [False, pytest.param(True, marks=pytest.mark.slow_layouts)]
)
def test_a_sample_of_whole_groups_is_consistent(with_weights, tmp_path, capsys):
    """Columns, schedule, metrics and, with weights, what training computes are those of the samples
    that stayed, and are checked."""
    source = tmp_path / "source"
    shutil.copytree(RUN, source)
    if not with_weights:
        shutil.rmtree(source / "rollout_000002" / "weights")
    words = ["new", str(source), "--out", str(tmp_path / "few"), "--samples", "13"]
    assert golden.main([*words, "--rollouts", "2"]) == 0
    rollout = Recording(tmp_path / "few").rollout(2)
    samples = rollout.judged_samples()
    groups = [one.group_index for one in Recording(RUN).rollout(2).judged_samples().samples]
    kept = {one.group_index for one in samples.samples}
    assert 0 < len(samples.samples) <= 13
    assert len(samples.samples) == sum(group in kept for group in groups)
    assert len(rollout.columns()[1]) == samples.num_batch
    assert rollout.problems() == [] and ("train" in rollout) is with_weights
    if with_weights:
        assert len(rollout.train().positions) == (rollout.schedule()["dp_rank"] >= 0).sum()


def test_texts_are_replaced_and_tokens_stay(tmp_path, capsys):
    """--strip-texts leaves no prompt, response or label; the gate and the baselines are still
    compared."""
    words = ["new", str(RUN), "--out", str(tmp_path / "plain"), "--strip-texts"]
    assert golden.main([*words, "--rollouts", "0"]) == 0
    samples = Recording(tmp_path / "plain").rollout(0).judged_samples().samples
    source = Recording(RUN).rollout(0).judged_samples().samples
    assert [one.tokens for one in samples] == [one.tokens for one in source]
    assert {one.label for one in samples} == {"text"}
    assert all(one.prompt.startswith("prompt ") for one in samples)
    assert all(not one.response or one.response.startswith("response ") for one in samples)
    content = b"".join(path.read_bytes() for path in (tmp_path / "plain").rglob("*.parquet"))
    assert b"forty" not in content
    out = capsys.readouterr().out
    assert "rollout 0 gate: equal" in out and "rollout 0 rewards: equal" in out
    assert "TRAIN" not in out


def test_secrets_hosts_and_paths_stay_on_the_machine():
    """A run record is published with a golden run."""
    record = {
        "options": {
            "hf_checkpoint": "/home/me/models/secret-model",
            "wandb_key": "abc123",
            "my_api_key": "abc123",
            "sglang_host": "10.1.2.3",
            "reward_key": "score",
            "eval_prompt_data": ["set", "/data/eval.jsonl"],
            "rollout_stop": ["</think>"],
        },
        "options_yaml": "hf_checkpoint: /home/me/models/secret-model\nwandb_key: abc123\nlr: 0.1\n",
        "command": ["--wandb-key", "abc123"],
        "time": 12.0,
    }
    content = yaml.safe_load(record["options_yaml"])
    text = orjson.dumps(cleaned_record(record, content, {})).decode()
    for private in ("/home/me", "abc123", "10.1.2.3", "/data/"):
        assert private not in text
    cleaned = json.loads(text)["options"]
    assert cleaned["hf_checkpoint"] == "removed/secret-model" and cleaned["reward_key"] == "score"
    assert cleaned["rollout_stop"] == ["</think>"] and cleaned["sglang_host"] == "127.0.0.1"


def test_a_change_of_the_code_is_named_with_its_stage(one, monkeypatch, capsys):
    """Exit status 1, the stage first, then the sample; as JSON too."""
    ddof_of_the_population(monkeypatch)
    assert golden.main(["check", str(one)]) == 1
    out = capsys.readouterr().out
    assert "first cause: baseline" in out and "rollout 1 gate: equal" in out
    assert "rollout 1 rewards: DIFFERENT in rewards" in out
    assert golden.main(["check", str(one), "--json", "--stage", "rewards"]) == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["first_cause"] == "baseline" and report["first_difference"]["field"] == "rewards"


def test_code_that_fails_on_a_recorded_input_is_a_difference(one, monkeypatch, capsys):
    """An exception in a stage is exit status 1, named with the stage; the others are still run."""

    def broken(*args, **kwargs):
        raise IndexError("no group 7")

    from slime.data import columns

    monkeypatch.setattr(columns, "normalize_rewards", broken)
    assert golden.main(["check", str(one)]) == 1
    out = capsys.readouterr().out
    assert "first cause: baseline" in out and "IndexError: no group 7" in out
    assert "rollout 1 schedule: equal" in out


def test_a_mistyped_option_is_no_difference(one):
    """It was reported as a baseline that differs, with status 1."""
    with pytest.raises(ConfigError, match="--lrr"):
        golden.main(["check", str(one), "--stage", "rewards", "--lrr", "3"])


def test_what_is_not_made_again_is_noted(tmp_path, capsys):
    """A changed reward function of the user was equal without a word; --rescore calls it."""
    recorded = tmp_path / "rec"
    shutil.copytree(RUN, recorded, ignore=lambda folder, names: {golden_check.NOTES} & {*names})
    edit_run(recorded, lambda record: record["options"].update(custom_rm_path="json.dumps"))
    command = ["check", str(recorded), "--rollout", "1", "--stage", "rewards"]
    assert golden.main(command) == 0
    assert "rewards: scores of a reward function of yours are made again with --rescore" in (
        capsys.readouterr().out
    )
    assert golden.main([*command, "--rescore"]) == 1


def test_an_update_records_the_outputs_and_touches_no_input(untrained, monkeypatch, capsys):
    """After the difference was shown and agreed to, a check is green; samples, weights and options
    are the same bytes."""
    one = untrained
    inputs = [*sorted((one / "tokenizer").rglob("*")), one / "run_0000.json"]
    before = {path: path.read_bytes() for path in inputs if path.is_file()}
    tokens = [sample.tokens for sample in Recording(one).rollout(1).judged_samples().samples]
    ddof_of_the_population(monkeypatch)
    monkeypatch.setattr("builtins.input", lambda prompt: "n")
    assert golden.main(["update", str(one)]) == 1
    assert "nothing is changed" in capsys.readouterr().out
    assert golden.main(["update", str(one), "--yes"]) == 0
    out = capsys.readouterr().out
    assert out.index("first cause: baseline") < out.index("is updated")
    assert golden.main(["check", str(one)]) == 0
    assert {path: path.read_bytes() for path in before} == before
    after = Recording(one).rollout(1)
    assert after.problems() == []
    assert [sample.tokens for sample in after.judged_samples().samples] == tokens
    assert golden.main(["update", str(one)]) == 0
    assert "is up to date" in capsys.readouterr().out


def test_another_machine_has_a_tolerance(one, monkeypatch, capsys):
    """Another processor, or another version of torch, moves the last bits: floats are compared with
    a tolerance there, digests of weights not at all, and a fault is still one."""
    real = rewards.normalize_rewards

    def last_bits(factor):
        def changed(*args, **kwargs):
            values, statistics = real(*args, **kwargs)
            return values * factor, statistics

        return changed

    from slime.data import columns

    monkeypatch.setattr(columns, "normalize_rewards", last_bits(1 + 1e-6))
    words = ["check", str(one), "--stage", "rewards"]
    assert golden.main(words) == 1
    monkeypatch.setattr(golden_check, "this_machine", lambda: {"processor": "another"})
    assert golden.main(words) == 0
    monkeypatch.setattr(columns, "normalize_rewards", last_bits(1.01))
    assert golden.main(words) == 1
    digests = RolloutResult("rollout 1 train")
    digests.fields.append(FieldResult(DiffStage.WEIGHTS, "weights", "after", 1))
    golden_check.allow_digests(digests)
    assert digests.identical


def test_what_cannot_be_is_said(untrained, tmp_path, monkeypatch):
    """Status 2 with the reason: a folder that exists, too few samples, a rollout that is not
    there, another format, a damaged part."""
    one = untrained
    with pytest.raises(ConfigError, match="exists. Give a new folder"):
        cut(RUN, one)
    with pytest.raises(ConfigError, match="--samples 2 is less than the first group"):
        cut(RUN, tmp_path / "two", Cut(samples=2))
    with pytest.raises(RolloutDataError, match="has no rollout 7; it has 0, 1, 2"):
        cut(RUN, tmp_path / "seven", Cut(rollouts=[7]))
    with pytest.raises(ConfigError, match="--rollouts three is no list of numbers"):
        golden.main(["new", str(RUN), "--out", str(tmp_path / "x"), "--rollouts", "three"])
    with pytest.raises(ConfigError, match="does not know --lr"):
        golden.main(["update", str(one), "--lr", "1"])
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(ConfigError, match="nobody to ask"):
        golden.main(["update", str(damaged_schedule(one))])
    (one / "golden.json").write_text('{"format": "slime-golden-9"}')
    with pytest.raises(RolloutDataError, match="slime-golden-9"):
        golden.main(["check", str(one)])
    assert not list(tmp_path.glob(".*"))  # nothing half-made stays


def test_damage_of_the_recording_is_no_difference_of_the_code(one, capsys):
    """Status 2 and the file, where a digit of a recorded metric was changed."""
    path = one / "rollout_000001" / "steps.jsonl"
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    assert cli.main(["golden", "check", str(one)]) == 2
    printed = capsys.readouterr()
    assert "steps.jsonl is damaged" in printed.err and "DIFFERENT" not in printed.out


def test_a_long_cut_tells_what_it_does(tmp_path, monkeypatch, capsys):
    """A recording of hundreds of rollouts was cut in silence for minutes; a short one stays silent."""
    words = ["new", str(RUN), "--rollouts", "0", "--out"]
    monkeypatch.setattr(golden, "INTERVAL_S", 600.0)
    assert golden.main([*words, str(tmp_path / "short")]) == 0
    assert "slime golden: " not in capsys.readouterr().err
    monkeypatch.setattr(golden, "INTERVAL_S", 0.0)
    assert golden.main([*words, str(tmp_path / "long")]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "slime golden: verifying rollout 0",
        "slime golden: cutting rollout 0",
    ]
    assert "slime golden: checked the stage metrics of rollout 0" in lines


def damaged_schedule(folder):
    """The golden run with the schedule of another rollout."""
    copy = folder.parent / "damaged"
    shutil.copytree(folder, copy)
    put_part(copy / "rollout_000001", "schedule", RUN / "rollout_000002" / "schedule.parquet")
    return copy


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
