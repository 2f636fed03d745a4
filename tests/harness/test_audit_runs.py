"""`slime audit` over a whole run: series over steps, weight versions, a tokenizer, a grader, other
rewards, several runs in a folder, and what the command prints.
"""

import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pytest
from support import audit_files as files

from slime import cli
from slime.exceptions import ConfigError
from slime.harness.audit import command
from slime.harness.audit.audit import AuditOptions, audit
from slime.harness.audit.findings import KINDS, Level
from slime.harness.audit.shapes import ReadOptions
from slime.testing import make_char_tokenizer

NUM_GPUS = 0


def problems(result):
    return {one.name for one in result.findings if one.level is not Level.INFO}


def found(result, name):
    (one,) = [one for one in result.findings if one.name == name]
    return one


def write_metrics(folder, values_by_name, key="rollout/step"):
    """metrics.jsonl as a run of ours writes it."""
    steps = max(map(len, values_by_name.values()))
    records = [
        {
            "step_key": key,
            "step": step,
            "metrics": {name: values[step] for name, values in values_by_name.items()},
        }
        for step in range(steps)
    ]
    files.write_lines(folder / "metrics.jsonl", records)


def noisy(values, seed=0, scale=0.01):
    rng = np.random.default_rng(seed)
    return (np.array(values, dtype=float) + rng.normal(0, scale, len(values))).tolist()


LEARNING = 0.9 / (1 + np.exp(-(np.arange(40) - 15) / 4))


@pytest.mark.parametrize(
    "values",
    [
        noisy(LEARNING, scale=0.03),
        noisy([0.5] * 40, scale=0.05),
        noisy(np.linspace(0.2, 0.8, 40), scale=0.02),
        [0.0] * 40,
        noisy([0.4] * 19 + [0.9] + [0.4] * 20, scale=0.02),
    ],
    ids=["learns", "noise", "slope", "zeros", "one odd step"],
)
@pytest.mark.parametrize(
    "name", ["rollout/raw_reward", "rollout/response_lengths", "train/grad_norm"]
)
def test_a_sound_series_has_no_jump_and_no_collapse(values, name, tmp_path):
    """A learning curve, noise, a slope and a single odd step are not what the alarms are for."""
    write_metrics(tmp_path, {name: values})
    assert problems(audit(tmp_path)) == set()


def test_a_collapse_names_the_step_it_begins_at(tmp_path):
    """The reward learns to 0.9 and falls from step 30 on; the sentence has both levels and the step."""
    fall = np.concatenate([LEARNING[:30], np.linspace(0.85, 0.05, 8), np.full(12, 0.05)])
    write_metrics(tmp_path, {"rollout/raw_reward": noisy(fall)})
    one = found(audit(tmp_path), "collapse")
    step = int(one.sentence.split("step ")[1].split()[0])
    assert one.sentence.startswith("reward fell from 0.8") and 28 <= step <= 33
    assert one.level is Level.WARNING


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("rollout/response_lengths", 400.0, 900.0),
        ("train/grad_norm", 0.3, 4.0),
        ("rollout/truncated", 0.02, 0.5),
        ("train/kl_loss", 0.01, 0.4),
        ("train/entropy_loss", 1.2, 0.2),
    ],
)
def test_a_jump_is_named_at_its_step(name, before, after, tmp_path):
    """A level that changes between two steps and stays is named at the first step of the new one."""
    values = noisy([before] * 20 + [after] * 20, scale=0.02 * min(before, after))
    write_metrics(tmp_path, {name: values})
    result = audit(tmp_path)
    (one,) = [one for one in result.findings if one.name in ("jump", "collapse")]
    assert one.level is Level.WARNING and "step 20" in one.sentence


def test_a_metric_that_is_no_number_is_named(tmp_path):
    """metrics.jsonl holds NaN as text; the first such step is named."""
    write_metrics(tmp_path, {"train/loss": [0.1, 0.2, "nan", "nan"]}, key="train/step")
    one = found(audit(tmp_path), "metric_not_finite")
    assert one.sentence == "train/loss was no number, first at step 2 (2 of 4 records)."


def test_samples_of_supervised_training_have_no_reward_to_be_constant(tmp_path):
    """Nothing was generated and nothing scored: reward 0 and the status "pending" are by design."""
    samples = [{**one, "reward": 0, "status": "pending"} for one in files.samples_of(0)]
    files.write_slime_rollout(tmp_path, 0, samples)
    assert problems(audit(tmp_path)) == set()
    files.write_slime_rollout(tmp_path, 0, [{**one, "status": "completed"} for one in samples])
    assert "constant_reward" in problems(audit(tmp_path))


def test_series_are_made_of_samples_too(tmp_path):
    """Of a framework that writes samples alone, the collapse is found in the samples' rewards."""
    for step in range(24):
        samples = files.samples_of(step)
        for i, one in enumerate(samples):
            # after step 12 one sample of a group and no more is right
            one["reward"] = float(i % files.SIZE == 0 or (step < 12 and i % files.SIZE < 3))
        files.write_verl(tmp_path, step, samples)
    one = found(audit(tmp_path), "collapse")
    assert one.sentence == "reward fell from 0.75 to 0.25, from step 12 on."


def test_versions_that_are_old_or_go_back_are_named(tmp_path):
    """Samples five updates behind the newest of their step, and a step of older weights than before."""
    for step, version in ((0, 7), (1, 8), (2, 6)):
        samples = [files.slime_sample(one, version) for one in files.samples_of(step)]
        samples[3]["weight_versions"] = [str(version - 5), str(version)]
        files.write_slime_rollout(tmp_path, step, samples)
    result = audit(tmp_path)
    assert problems(result) == {"stale_weights", "versions_go_back"}
    assert "3 of 72 samples (4.2 %) in 3 steps" in found(result, "stale_weights").sentence
    (place,) = found(result, "versions_go_back").evidence
    assert place.where == "step 2" and place.note == "weights 6 after 8 at step 1"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_char_tokenizer().save_pretrained(folder)
    return str(folder)


def coded(text, tokenizer):
    """A sample of the text and its ids."""
    from slime.utils.processing_utils import shared_tokenizer

    return shared_tokenizer(tokenizer)(text, add_special_tokens=False)["input_ids"]


def write_coded(folder, tokenizer, change=None):
    samples = [files.slime_sample(one, 0) for one in files.samples_of(0)]
    for one in samples:
        ids = coded(one["response"].lower(), tokenizer)
        one["response"] = one["response"].lower()
        one.update(tokens=[4, 5, *ids], response_length=len(ids), loss_mask=[1] * len(ids))
        one["rollout_log_probs"] = [-0.5] * len(ids)
    if change is not None:
        change(samples)
    files.write_slime_rollout(folder, 0, samples)


def test_text_that_is_not_of_its_tokens_is_named(tmp_path, tokenizer):
    """With the tokenizer, ids of another response are an error; without it they cannot be known."""

    def change(samples):
        for name in ("tokens", "response_length", "loss_mask", "rollout_log_probs"):
            samples[0][name] = samples[1][name]

    write_coded(tmp_path / "sound", tokenizer)
    write_coded(tmp_path / "shifted", tokenizer, change)
    options = AuditOptions(tokenizer=tokenizer)
    assert problems(audit(tmp_path / "sound", options)) == set()
    one = found(audit(tmp_path / "shifted", options), "text_not_of_tokens")
    assert one.level is Level.ERROR and "mostly shifted_ids" in one.sentence
    assert problems(audit(tmp_path / "shifted")) == set()


@pytest.mark.parametrize(("grader", "wrong"), [("exact_match", {0, 1}), ("math", {0, 1})])
def test_a_grader_names_rewards_that_it_would_not_give(grader, wrong, tmp_path):
    """A right answer with reward 0 and a wrong one with reward 1 are both named, with their labels."""
    samples = files.samples_of(0)
    for i, one in enumerate(samples):
        answer = one["label"] if one["reward"] else "999"
        one["response"] = answer if grader == "exact_match" else f"It is \\boxed{{{answer}}} ({i})."
    for i in (0, 1):
        samples[i]["reward"] = 1 - samples[i]["reward"]
    files.write_verl(tmp_path, 0, samples)
    one = found(audit(tmp_path, AuditOptions(grader=grader)), "grader_disagrees")
    assert f"{grader} disagrees on 2 of 24 responses" in one.sentence
    assert {place.index for place in one.evidence} == wrong
    assert "grader_disagrees" not in problems(audit(tmp_path))


def test_weights_of_several_rewards_are_found(tmp_path):
    """TRL with reward_weights: the weighted sum that the advantages follow is named."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    right, short = rng.integers(0, 2, 24).astype(float), rng.random(24)
    columns = {
        "prompt": [files.prompt_of(0, i // 4) for i in range(24)],
        "completion": [files.response_of(0, i) for i in range(24)],
        "right": right,
        "short": short,
        "advantage": files.grpo(right + 0.25 * short, epsilon=1e-4),
    }
    pq.write_table(pa.table(columns), tmp_path / "completions_00000.parquet")
    result = audit(tmp_path)
    assert problems(result) == set()
    assert "of 1 x right + 0.25 x short in 1 of 1 step." in found(result, "advantage_rule").sentence


def test_rejected_samples_are_outside_the_baseline(tmp_path):
    """A dump of ours says which samples the gate rejected: GRPO over the others is found, and a
    rejected empty response is for information."""
    samples = [files.slime_sample(one, 0) for one in files.samples_of(0)]
    raw = files.samples_of(0)
    samples[0].update(valid=False, invalid_reason="empty", response="", reward=None)
    rewards = np.array([one["reward"] or 0.0 for one in samples])
    advantages = np.concatenate([[0.0], files.grpo(rewards[1:4], size=3), files.grpo(rewards[4:])])
    for one, value in zip(raw, advantages, strict=True):
        one["advantage"] = float(value)
    files.write_slime_rollout(tmp_path, 0, samples)
    files.write_slime_train(tmp_path, 0, raw)
    result = audit(tmp_path)
    assert problems(result) == set()
    assert found(result, "empty_response").level is Level.INFO
    assert "GRPO" in found(result, "advantage_rule").sentence


def test_train_dumps_of_one_file_are_read(tmp_path):
    """Upstream's later train dump is one file with a dictionary per sample; raw rewards are of the
    whole batch, in the order of `partition`."""
    import torch

    raw = files.samples_of(0)
    samples = [
        {
            "tokens": torch.tensor([*one["prompt_ids"], *one["ids"]]),
            "response_lengths": len(one["ids"]),
            "loss_masks": torch.ones(len(one["ids"]), dtype=torch.int32),
            "advantages": torch.full((len(one["ids"]),), one["advantage"]),
            "log_probs": torch.tensor(one["log_probs"]),
            "rollout_log_probs": torch.tensor(one["rollout_log_probs"]),
            "sample_indices": one["index"],
            "partition": i,
        }
        for i, one in enumerate(raw)
    ]
    content = {"format_version": 2, "rollout_id": 0, "rank": 0, "samples": samples, "dp_shards": []}
    torch.save({**content, "raw_reward": [one["reward"] for one in raw]}, tmp_path / "0.pt")
    result = audit(tmp_path)
    assert result.shapes == {"slime-pt-train": 1} and problems(result) == set()
    assert "follow GRPO" in found(result, "advantage_rule").sentence


@pytest.mark.parametrize("moved", [False, True])
def test_our_train_dump_is_joined_to_our_rollout_dump(moved, tmp_path):
    """Sample by sample by index; one that has another sample's tokens is a broken record."""
    from harness.test_audit_faults import train_tensors, write_ours

    from slime.files.train_dump import TrainDumpWriter
    from slime.files.train_record import TensorOutline

    samples = files.samples_of(0)
    write_ours(tmp_path, {0: samples})
    header, tensors = train_tensors(0, samples)
    if moved:
        tensors["sample_indices"] = np.roll(tensors["sample_indices"], 1)
    (tmp_path / "train_data").mkdir()
    outlines = [TensorOutline(name, str(one.dtype), one.shape) for name, one in tensors.items()]
    writer = TrainDumpWriter(tmp_path / "train_data" / "0.safetensors", header, outlines)
    for name, values in tensors.items():
        writer.write(name, values)
    writer.commit()
    result = audit(tmp_path)
    assert result.columns["log_probs"] == len(samples)
    assert problems(result) >= {"broken_record"} if moved else problems(result) == set()


def test_evaluations_are_apart_from_training_steps(tmp_path):
    """An evaluation's dump is counted as one, and changes no series and no group finding."""
    files.write_slime_rollout(tmp_path, 0, files.samples_of(0))
    path = files.write_slime_rollout(tmp_path / "e", 0, files.samples_of(1))
    path.rename(tmp_path / "rollout_data" / "eval_0.pt")
    result = audit(tmp_path / "rollout_data")
    assert (result.steps, result.evaluations) == (1, 1) and problems(result) == set()
    assert all(len(one.values) == 1 for one in result.series)


@pytest.mark.parametrize("apart", [False, True])
def test_two_runs_in_a_folder_keep_what_was_trained_of_each(tmp_path, apart):
    """A warm-up and the run after it, of the same steps: what the trainers wrote of both was taken
    for one step of its own, whose groups and advantages were those of neither."""
    for name, step in (("warm-up", 0), ("main", 1)):
        samples = files.samples_of(step)  # other samples, and both are step 0 of their run
        files.write_slime_rollout(tmp_path / name, 0, samples)
        files.write_slime_train(tmp_path / name, 0, samples)
    if apart:  # in folders of names of one's own a step of which there is one belongs together
        shutil.rmtree(tmp_path / "main")
        for kind in ("rollout_data", "train_data"):
            (tmp_path / "warm-up" / kind).rename(tmp_path / f"my-{kind}")
    result = audit(tmp_path)
    assert problems(result) == set() and not result.notes, result.findings
    assert result.samples == (1 if apart else 2) * files.GROUPS * files.SIZE
    assert result.columns["log_probs"] == result.columns["reward"] == result.samples


def test_two_runs_in_a_folder_have_series_of_their_own(tmp_path):
    """Steps of one number in two folders are two runs, not one."""
    for run in ("a", "b"):
        for step in range(2):
            files.write_verl(tmp_path / run, step, files.samples_of(step))
    result = audit(tmp_path)
    assert result.steps == 4
    assert {one.name for one in result.series} >= {"reward (a)", "reward (b)"}


def test_the_command_prints_findings_and_their_remedy(tmp_path, capsys):
    """What is wrong, where, a sample, and what to do; status 1 for problems, 0 without."""
    samples = files.samples_of(0)
    files.write_trl(tmp_path, 0, samples)
    assert cli.main(["audit", str(tmp_path)]) == 0
    capsys.readouterr()
    values = [one["advantage"] for one in samples]
    for one, value in zip(samples, values[1:] + values[:1], strict=True):
        one["advantage"] = value
    files.write_trl(tmp_path, 0, samples)
    assert cli.main(["audit", str(tmp_path), "--top", "1"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert "24 samples, 1 step in 1 file (trl)" in shown[0]
    assert shown[2] == "ERROR  misattributed_baseline"
    assert shown[3].startswith("  Advantages are those of GRPO") and "shifted by +1" in shown[3]
    assert shown[4].startswith("    step 0, group of prompt 0, sample ")
    assert any(line.startswith("  look at: group by id") for line in shown)
    assert shown[-1] == "1 error, 0 warnings, 0 for information."


def test_the_json_has_every_finding_with_its_evidence(tmp_path, capsys):
    """One object, with what a program needs to show the finding elsewhere."""
    files.write_verl(tmp_path, 0, [{**one, "reward": 1.0} for one in files.samples_of(0)])
    assert command.main([str(tmp_path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    names = [one["name"] for one in report["findings"]]
    assert names == ["constant_reward", "groups_without_spread"]
    assert report["findings"][0] == {
        "name": "constant_reward",
        "family": "rewards",
        "level": "warning",
        "sentence": "All 24 rewards are 1: nothing is learned.",
        "share": 1.0,
        "remedy": next(kind.remedy for kind in KINDS if kind.name == "constant_reward"),
        "evidence": [],
    }
    assert report["shapes"] == {"verl": 1} and report["columns"]["reward"] == 24


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "there is no nowhere"),
        ([".", "--top", "-1"], "--top -1 must not be negative"),
        ([".", "--html", "no/such/page.html"], "there is no such folder"),
        ([".", "--grader", "maths"], "Did you mean math"),
        ([".", "--grader", "random"], "looks at no label"),
        ([".", "--mapping", "keys.txt"], "unknown column 'answer'"),
        ([".", "--mapping", "list.txt"], "must hold one JSON object"),
        ([".", "--tokenizer", "./none"], "does not exist"),
        (["."], "nothing that can be audited"),
    ],
)
def test_a_command_line_that_cannot_be_is_one_sentence(words, said, tmp_path, monkeypatch, capsys):
    """Status 2 and what to change."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys.txt").write_text('{"answer": "a"}')
    (tmp_path / "list.txt").write_text("[1]")
    assert command.main(words) == 2
    assert said in capsys.readouterr().err


def test_a_mapping_that_misses_its_keys_says_which(tmp_path):
    """The file's own keys are listed."""
    path = files.write_lines(tmp_path / "run.jsonl", [{"question": "a", "text": "b"}])
    options = AuditOptions(read=ReadOptions(mapping={"response": "answer", "prompt": "question"}))
    with pytest.raises(ConfigError, match=r"no answer in the first line \(it has question, text\)"):
        audit(path, options)


def test_every_kind_of_finding_is_in_the_page():
    """docs/audit.md lists what the code can find."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
    assert [kind.name for kind in KINDS if f"| `{kind.name}` |" not in page] == []


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
