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


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
