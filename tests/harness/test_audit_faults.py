"""`slime audit`: every planted fault is named, in every shape that can show it, and the sound twin of
each file is passed over in silence.
"""

import copy
import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pytest
from support import audit_files as files

from slime.harness.audit.audit import AuditOptions, audit
from slime.harness.audit.findings import Level
from slime.harness.audit.json_lines import check_mapping
from slime.harness.audit.shapes import ReadOptions

NUM_GPUS = 0
SIZE = files.SIZE
STEPS = 2


def write_slime(folder, samples_by_step):
    for step, samples in samples_by_step.items():
        files.write_slime_rollout(folder, step, samples)
        files.write_slime_train(folder, step, samples)


def write_ours(folder, samples_by_step):
    from slime.data.sample import Sample
    from slime.files.rollout_dump import save_debug_rollout_data

    for step, samples in samples_by_step.items():
        template = str(folder / "rollout_data" / "{rollout_id}.jsonl")
        dumped = [Sample.from_dict(files.slime_sample(one, step)) for one in samples]
        save_debug_rollout_data(template, dumped, rollout_id=step, evaluation=False)


def write_recording(folder, samples_by_step):
    """The samples and train parts of a recording."""
    from slime.data.sample import Sample
    from slime.files import tables
    from slime.files.sample_table import sample_table
    from slime.files.train_table import train_table

    for step, samples in samples_by_step.items():
        place = folder / f"rollout_{step:06d}"
        place.mkdir()
        kept = [Sample.from_dict(files.slime_sample(one, step)) for one in samples]
        tables.write_table(place / "samples.parquet", sample_table(kept))
        header, tensors = train_tensors(step, samples)
        tables.write_table(place / "train.parquet", train_table(header, tensors))


def train_tensors(step, samples):
    """(header, tensors) of a train dump of one rank."""
    count = len(samples)
    rows = {
        "tokens": [[*one["prompt_ids"], *one["ids"]] for one in samples],
        "loss_masks": [one["mask"] for one in samples],
        "log_probs": [one["log_probs"] for one in samples],
        "rollout_log_probs": [one["rollout_log_probs"] for one in samples],
        "advantages": [[one["advantage"]] * len(one["ids"]) for one in samples],
    }
    numbers = {
        "partition": np.arange(count),
        "sample_indices": np.array([one["index"] for one in samples]),
        "response_lengths": np.array([len(one["ids"]) for one in samples]),
        "raw_reward": np.array([one["reward"] for one in samples]),
    }
    tensors = dict(numbers)
    for name, entries in rows.items():
        dtype = np.int32 if name in ("tokens", "loss_masks") else np.float32
        tensors[name] = np.concatenate([np.array(entry, dtype=dtype) for entry in entries])
        tensors[f"{name}.offsets"] = np.cumsum([0, *map(len, entries)])
    kinds = {
        **dict.fromkeys(numbers, "number"),
        **dict.fromkeys(rows, "rows"),
        "raw_reward": "whole",
    }
    shard = {"partition": list(range(count))}
    header = {
        "rollout_id": step,
        "rank": 0,
        "num_samples": count,
        "num_whole": count,
        "left_out": {},
    }
    return {**header, "dp_shards": [shard], "fields": kinds}, tensors


def each_step(write):
    def write_all(folder, samples_by_step):
        for step, samples in samples_by_step.items():
            write(folder, step, samples)

    return write_all


WRITERS = {
    "slime": write_slime,
    "ours": write_ours,
    "recording": write_recording,
    "verl": each_step(files.write_verl),
    "nemo-batch": each_step(functools.partial(files.write_nemo, batch=True)),
    "nemo-lines": each_step(functools.partial(files.write_nemo, batch=False)),
    "trl": each_step(files.write_trl),
    "mapped": lambda folder, steps: files.write_mapped(folder, steps),
}
TEXT = frozenset(WRITERS)
SPLIT_TEXT = TEXT - {"nemo-batch", "nemo-lines"}  # prompt and response apart
ADVANTAGE = TEXT - {"verl", "ours"}
TOKENS = frozenset({"slime", "recording", "nemo-batch", "nemo-lines", "mapped"})


def run(folder, shape, samples_by_step, **options):
    folder.mkdir(parents=True, exist_ok=True)
    WRITERS[shape](folder, samples_by_step)
    mapping = check_mapping(files.MAPPING, folder) if shape == "mapped" else None
    return audit(folder, AuditOptions(read=ReadOptions(mapping=mapping), **options))


def problems(result) -> set[str]:
    return {one.name for one in result.findings if one.level is not Level.INFO}


def sound_steps():
    return {step: files.samples_of(step) for step in range(STEPS)}


@pytest.mark.parametrize("shape", WRITERS)
def test_a_sound_run_has_no_problem(shape, tmp_path):
    """A tool that warns of a sound run is switched off: no error and no warning on any shape."""
    result = run(tmp_path, shape, sound_steps())
    assert problems(result) == set(), [one.sentence for one in result.findings]
    assert result.exit_status == 0 and result.unreadable == []
    assert result.samples == STEPS * files.GROUPS * SIZE and result.steps == STEPS


@pytest.mark.parametrize("shape", sorted(ADVANTAGE))
def test_the_estimator_of_a_sound_run_is_named(shape, tmp_path):
    """The advantages of the sound files are GRPO's with the group's standard deviation."""
    (rule,) = [
        one for one in run(tmp_path, shape, sound_steps()).findings if one.name == "advantage_rule"
    ]
    assert rule.sentence == (
        "Advantages follow GRPO (group mean, divided by the group's std) in 2 of 2 steps."
    )


# --- faults: each changes the samples of a step ---------------------------------------------------


def set_text(one, text):
    """Gives a sample another text, and as many ids as it has words."""
    one["response"] = text
    length = len(text.split())
    for name in ("ids", "mask", "rollout_log_probs", "log_probs"):
        filled = {"ids": 77, "mask": 1}.get(name, -1.0)
        one[name] = [*one[name][:length], *[filled] * (length - len(one[name]))]


def empty(samples):
    for i in (1, 6):
        set_text(samples[i], "")


def cut(samples):
    for i in (1, 6, 7):
        samples[i].update(status="truncated", finish="length")


def looping(samples):
    set_text(samples[3], "I see. " + "and so on, " * 60)


def duplicates(samples):
    for i in (1, 2):
        copied = samples[0]
        for name in ("response", "ids", "mask", "rollout_log_probs", "log_probs"):
            samples[i][name] = copied[name]
        samples[i].update(reward=copied["reward"])
    renormalize(samples)


def crossed(samples):
    for name in ("response", "ids", "mask", "rollout_log_probs", "log_probs"):
        samples[5][name] = samples[0][name]


def garbled(samples):
    samples[2]["response"] += " caf\ufffd"


def echoed(samples):
    samples[9]["response"] = samples[9]["prompt"] + " " + samples[9]["response"]


def ran_on(samples):
    samples[4]["response"] += "<|im_end|><|im_start|>user and now?"


def uneven(samples):
    del samples[-1]
    renormalize(samples[: -(SIZE - 1)])
    rewards = np.array([one["reward"] for one in samples[-(SIZE - 1) :]])
    for one, value in zip(samples[-(SIZE - 1) :], files.grpo(rewards, size=SIZE - 1), strict=True):
        one["advantage"] = float(value)


def flat(samples):
    for i, one in enumerate(samples):
        one["reward"] = float(i // SIZE % 2)
    samples[0]["reward"] = 1.0
    renormalize(samples)


def mixed(samples):
    samples[5]["prompt"] = samples[0]["prompt"]


def renormalize(samples):
    rewards = np.array([one["reward"] for one in samples])
    for one, value in zip(samples, files.grpo(rewards), strict=True):
        one["advantage"] = float(value)


def set_advantages(samples, values):
    for one, value in zip(samples, values, strict=True):
        one["advantage"] = float(value)


def rewards_in(samples):
    return np.array([one["reward"] for one in samples])


def noise_advantages(samples):
    set_advantages(samples, np.random.default_rng(5).normal(size=len(samples)))


def batch_mean(samples):
    rewards = rewards_in(samples)
    set_advantages(samples, rewards - rewards.mean())


def wrong_group_size(samples):
    set_advantages(samples, files.grpo(rewards_in(samples), size=3))


def shifted_rewards(samples):
    set_advantages(samples, files.grpo(np.roll(rewards_in(samples), 1)))


def interleaved(samples):
    set_advantages(
        samples, np.concatenate([files.grpo(rewards_in(samples))[r::2] for r in range(2)])
    )


def unknown_order(samples):
    values = files.grpo(rewards_in(samples))
    set_advantages(samples, np.random.default_rng(1).permutation(values))


def outlier(samples):
    samples[8]["advantage"] = 3.0


def negated(samples):
    set_advantages(samples, -files.grpo(rewards_in(samples)))


def infinite_advantage(samples):
    samples[8]["advantage"] = math.inf


def reward_nan(samples):
    samples[8]["reward"] = math.nan
    samples[8]["advantage"] = 0.0


def all_zero(samples):
    for one in samples:
        one.update(reward=0.0, advantage=0.0)


def conflict(samples):
    right = next(i for i in range(SIZE) if samples[i]["reward"] == 1)
    wrong = next(i for i in range(SIZE) if samples[i]["reward"] == 0)
    for i in (right, wrong):
        set_text(samples[i], "The answer is 7.")


def same_answer(samples):
    for i in range(SIZE):
        set_text(samples[i], f"Way {i} of doing it. The answer is \\boxed{{7}}")


def shifted_log_probs(samples):
    for one in samples:
        one["rollout_log_probs"] = [*one["rollout_log_probs"][1:], -0.3]


def temperature(samples, *, value=0.7):
    rng = np.random.default_rng(3)
    for one in samples:
        logits = rng.normal(0, 2.5, size=(len(one["ids"]), 64))
        chosen = np.array([rng.choice(64, p=softmax(row / value)) for row in logits])
        rows = np.arange(len(chosen))
        one["log_probs"] = np.log([softmax(row) for row in logits])[rows, chosen].tolist()
        one["rollout_log_probs"] = np.log([softmax(row / value) for row in logits])[
            rows, chosen
        ].tolist()


def softmax(row):
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def weights(samples):
    rng = np.random.default_rng(3)
    for one in samples:
        moved = np.array(one["log_probs"]) + rng.normal(0, 0.4, size=len(one["ids"]))
        one["rollout_log_probs"] = moved.clip(max=0).tolist()


def positive(samples):
    samples[2]["rollout_log_probs"][3] = 0.7


def nan_log_prob(samples):
    samples[2]["log_probs"][3] = math.nan


def tool_tokens(samples, *, mask):
    for one in samples:
        one["ids"] += [900, 901, 902, 903, 904, 905]
        one["mask"] += [mask] * 6
        one["rollout_log_probs"] += [0.0] * 6
        one["log_probs"] += [-3.0] * 6


def gap_at_masked(samples):
    tool_tokens(samples, mask=0)
    for one in samples:
        one["rollout_log_probs"][-6:] = [-0.5] * 6


def mask_over_prompt(samples):
    for i in (3, 4):
        samples[i]["mask"] = [0, 0, 0, *samples[i]["mask"]]


def masked(samples):
    for i in (3, 4, 5):
        samples[i]["mask"] = [0] * len(samples[i]["mask"])


def odd_mask(samples):
    samples[3]["mask"][2] = 5


def short_log_probs(samples):
    del samples[3]["rollout_log_probs"][-2:]


FAULTS: list[tuple[str, Callable, frozenset]] = [
    ("empty_response", empty, TEXT - {"nemo-batch", "nemo-lines"}),
    ("cut_response", cut, frozenset({"slime", "ours", "recording", "mapped"})),
    ("looping_response", looping, TEXT),
    ("duplicate_in_group", duplicates, TEXT),
    ("duplicate_across_groups", crossed, TEXT),
    ("broken_characters", garbled, TEXT),
    ("prompt_in_response", echoed, SPLIT_TEXT),
    ("special_tokens_in_text", ran_on, TEXT),
    ("unequal_groups", uneven, TEXT),
    ("groups_without_spread", flat, TEXT),
    ("mixed_groups", mixed, frozenset({"slime", "ours", "recording", "mapped"})),
    ("unknown_advantages", noise_advantages, ADVANTAGE),
    ("batch_baseline", batch_mean, ADVANTAGE),
    ("misattributed_baseline", wrong_group_size, ADVANTAGE),
    ("misattributed_baseline", shifted_rewards, ADVANTAGE),
    ("misattributed_baseline", interleaved, ADVANTAGE),
    ("misattributed_baseline", unknown_order, ADVANTAGE),
    ("advantage_outliers", outlier, ADVANTAGE),
    ("negated_advantages", negated, ADVANTAGE),
    ("advantage_not_finite", infinite_advantage, ADVANTAGE),
    ("reward_not_finite", reward_nan, TEXT),
    ("constant_reward", all_zero, TEXT),
    ("conflicting_rewards", conflict, SPLIT_TEXT),
    ("conflicting_answers", same_answer, SPLIT_TEXT),
    ("shifted_log_probs", shifted_log_probs, TOKENS),
    ("other_temperature", temperature, TOKENS),
    ("other_temperature", functools.partial(temperature, value=1.4), frozenset({"mapped"})),
    ("other_weights", weights, TOKENS),
    ("positive_log_prob", positive, TOKENS | {"ours"}),
    ("log_prob_not_finite", nan_log_prob, TOKENS),
    ("trained_unsampled_tokens", functools.partial(tool_tokens, mask=1), TOKENS),
    ("gap_at_masked_tokens", gap_at_masked, TOKENS),
    ("mask_length", mask_over_prompt, frozenset({"slime", "ours", "recording", "mapped"})),
    ("all_masked", masked, TOKENS | {"ours"}),
    ("mask_values", odd_mask, frozenset({"slime", "ours", "recording", "mapped"})),
    ("column_length", short_log_probs, frozenset({"ours", "mapped"})),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "plant", "shape"),
    [
        pytest.param(name, plant, shape, id=f"{name}-{getattr(plant, '__name__', 'tool')}-{shape}")
        for name, plant, shapes in FAULTS
        for shape in sorted(shapes)
    ],
)
def test_a_planted_fault_is_named(name, plant, shape, tmp_path):
    """Each fault is named, and where it is in some samples, one of them is shown."""
    steps = copy.deepcopy(sound_steps())
    plant(steps[1])
    if name in ("constant_reward", "groups_without_spread"):
        plant(steps[0])
    result = run(tmp_path, shape, steps)
    assert name in problems(result), [one.sentence for one in result.findings]
    assert result.exit_status == 1
    (found,) = [one for one in result.findings if one.name == name]
    if name not in ("constant_reward", "groups_without_spread"):
        assert any(place.where == "step 1" for place in found.evidence)


# --- what may be claimed: a fault, and the sound file that looks like it --------------------------


def audit_train_alone(folder, samples):
    files.write_slime_train(folder, 0, samples)
    return audit(folder)


def reindexed(first, gap):
    """Sound samples whose indices begin at `first`, with `gap` left out between groups."""
    samples = files.samples_of(0)
    for i, one in enumerate(samples):
        one["index"] = first + i + gap * (i // SIZE)
    return samples


@pytest.mark.parametrize(("first", "gap"), [(2, 0), (5, SIZE)])
def test_raw_rewards_belong_to_the_samples_of_the_rollout(first, gap, tmp_path):
    """Upstream keeps those of the whole batch on each rank: a filter leaves gaps in the indices."""
    write_slime(tmp_path, {0: reindexed(first, gap)})
    assert problems(audit(tmp_path)) == set()


def test_a_reward_of_another_sample_is_a_broken_record(tmp_path):
    """Among samples whose indices have gaps too."""
    samples = reindexed(5, SIZE)
    files.write_slime_rollout(tmp_path, 0, samples)
    right = samples[0]["reward"]
    files.write_slime_train(tmp_path, 0, [{**samples[0], "reward": 1 - right}, *samples[1:]])
    (found,) = [one for one in audit(tmp_path).findings if one.name == "broken_record"]
    (place,) = found.evidence
    assert place.note.endswith(
        f"has reward {1 - right:g} under this sample's index, the rollout {right:g}"
    )


def test_without_a_rollout_rewards_are_placed_by_indices_without_gaps_alone(tmp_path):
    """What is not certain is left out, and nothing is said of it."""
    sure = audit_train_alone(tmp_path / "sure", reindexed(2, 0))
    assert [one.name for one in sure.findings] == ["advantage_rule"]
    unsure = audit_train_alone(tmp_path / "unsure", reindexed(5, SIZE))
    assert unsure.columns["reward"] == 0 and problems(unsure) == set()


def neighbours_on_ranks(samples):
    values = rewards_in(samples)
    for rank in range(2):
        values[rank::2] = files.grpo(values[rank::2])
    set_advantages(samples, values)


def half_size(samples):
    set_advantages(samples, files.grpo(rewards_in(samples), size=SIZE // 2))


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (half_size, "over 2 rows in a row, which are not the groups"),
        (wrong_group_size, "over 3 rows in a row, which are not the groups"),
        (neighbours_on_ranks, "over 4 rows in a row of each of 2 ranks, which are not the groups"),
        (shifted_rewards, "of other samples' rewards: shifted by -1"),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1.7])
def test_a_fault_of_the_normalized_rewards_is_named(plant, said, scale, tmp_path):
    """A trainer that records what it was given, and whitens it, is told from its rewards too."""
    samples = files.samples_of(0)
    plant(samples)
    for one in samples:
        one["normalized"] = one["advantage"]
        one["advantage"] = scale * one["advantage"] + scale - 1
    write_slime(tmp_path, {0: samples})
    (found,) = [one for one in audit(tmp_path).findings if one.name == "misattributed_baseline"]
    assert found.level is Level.ERROR and found.evidence and said in found.sentence


def test_normalized_rewards_of_a_penalty_are_no_other_samples(tmp_path):
    """What a function after the reward changed follows no rule, and is no one else's."""
    samples = files.samples_of(0)
    for i, one in enumerate(samples):
        one["normalized"] = one["advantage"] = one["advantage"] - 0.01 * i
    write_slime(tmp_path, {0: samples})
    assert problems(audit(tmp_path)) == {"unknown_advantages"}


def twice(samples):
    """The prompt of the first group comes again, in the second and in the last."""
    for i in (*range(SIZE, 2 * SIZE), *range(len(samples) - SIZE, len(samples))):
        for name in ("prompt", "prompt_ids", "label"):
            samples[i][name] = samples[0][name]


@pytest.mark.parametrize("shape", ["trl", "verl", "nemo-batch", "nemo-lines"])
def test_groups_of_one_prompt_are_told_apart(shape, tmp_path):
    """Where the file names no group, a prompt that came twice is two groups in a row."""
    steps = sound_steps()
    twice(steps[1])
    assert problems(run(tmp_path, shape, steps)) == set()


@pytest.mark.parametrize("shape", ["trl", "nemo-batch"])
@pytest.mark.parametrize("plant", [half_size, shifted_rewards])
def test_a_wrong_baseline_is_named_where_prompts_tell_the_groups(plant, shape, tmp_path):
    """Half of each group is no group, also where no file says so; nor are other samples' rewards."""
    steps = sound_steps()
    plant(steps[1])
    if plant is shifted_rewards:
        twice(steps[1])
    assert "misattributed_baseline" in problems(run(tmp_path, shape, steps))


def write_nemo_lines(folder, samples, change):
    """Lines of NeMo-RL with the mask [T] of each sample changed by change(i, mask)."""
    import json

    path = files.write_nemo(folder, 0, samples, batch=False)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for i, line in enumerate(lines):
        change(i, line["token_loss_mask"][0])
    files.write_lines(path, lines)
    return audit(path)


def test_a_mask_that_begins_late_moves_no_sample_to_another_group(tmp_path):
    """The first response tokens look like the prompt's end; they differ within a group."""

    def late(i, mask):
        mask[3] = 0

    result = write_nemo_lines(tmp_path, files.samples_of(0), late)
    assert problems(result) == set() and result.columns["group"] == result.samples


def test_a_mask_over_the_prompt_is_named_and_no_baseline_with_it(tmp_path):
    """Nobody sampled the first token of a sequence."""

    def over_prompt(i, mask):
        mask[:3] = [1, 1, 1]

    result = write_nemo_lines(tmp_path, files.samples_of(0), over_prompt)
    assert problems(result) == {"broken_record"}


def test_a_row_without_a_trained_token_is_of_its_prompt(tmp_path):
    """It counts in the baseline of the samples that begin as it does."""

    def masked_out(i, mask):
        if i in (1, 6):
            mask[:] = [0] * len(mask)

    result = write_nemo_lines(tmp_path, files.samples_of(0), masked_out)
    assert problems(result) == {"all_masked"}
    assert "advantage_rule" in {one.name for one in result.findings}


def write_messages(folder, samples):
    """TRL's completions as it writes conversations."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = files.write_trl(folder, 0, samples)
    table = pq.read_table(path).to_pydict()
    table["prompt"] = [
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": text}]
        for text in table["prompt"]
    ]
    table["completion"] = [[{"role": "assistant", "content": one}] for one in table["completion"]]
    pq.write_table(pa.table(table), path)
    return audit(path)


@pytest.mark.parametrize(
    ("plant", "name"), [(empty, "empty_response"), (echoed, "prompt_in_response"), (None, None)]
)
def test_messages_are_read_as_their_content(plant, name, tmp_path):
    """A role before it would make an empty completion text, and hide a prompt that it repeats."""
    samples = files.samples_of(0)
    if plant is not None:
        plant(samples)
    assert problems(write_messages(tmp_path, samples)) == ({name} if name else set())


@pytest.mark.parametrize("taken", [0.0, 1.0])
def test_a_sample_that_no_reward_function_scored_is_no_other_fault(taken, tmp_path):
    """TRL takes 0 for it; whatever it was, its group's advantages are compared with nothing."""
    samples = files.samples_of(0)
    samples[8]["reward"] = taken
    renormalize(samples)
    samples[8]["reward"] = None
    result = run(tmp_path, "trl", {0: samples})
    assert problems(result) == {"reward_not_finite"}
    assert "advantage_rule" in {one.name for one in result.findings}


def test_rollout_and_trainer_that_differ_in_what_was_cut_are_named(tmp_path):
    """The cut response is a finding of its own."""
    samples = [{**one, "truncated": 0} for one in files.samples_of(0)]
    write_slime(tmp_path / "sound", {0: samples})
    assert problems(audit(tmp_path / "sound")) == set()
    cut(samples)
    write_slime(tmp_path / "cut", {0: samples})
    assert problems(audit(tmp_path / "cut")) == {"broken_record", "cut_response"}


def test_a_train_dump_of_supervised_training_alone_has_no_constant_reward(tmp_path):
    """It has raw rewards of 0, and no advantages."""
    import torch

    audit_train_alone(tmp_path, [{**one, "reward": 0.0} for one in files.samples_of(0)])
    for path in (tmp_path / "train_data").iterdir():
        content = torch.load(path)
        del content["rollout_data"]["advantages"]
        torch.save(content, path)
    assert problems(audit(tmp_path)) == set()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
