"""Properties that hold for any input: conservation, order, identity, determinism, sums of parts;
and 10,000 mutations.
"""

import copy
import dataclasses
import importlib.util
import math
import random
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gate_mutations import JUNK, mutate
from support.gate_reference import reason_of
from support.gate_samples import reasons_of, sound_sample

from slime.data.reasons import NEVER_KEPT, REASONS
from slime.data.sample import Sample, Status
from slime.exceptions import RolloutDataError
from slime.gate import GateConfig, Level, MissingLogProbs, Policy, postprocess_output_data
from slime.gate import judge as gate_module
from slime.gate.config import FORMAT_PRESETS
from slime.gate.statistics import GateStatistics

NUM_GPUS = 0
CONFIG = GateConfig(
    min_response_tokens=2,
    max_response_tokens=30,
    context_length=40,
    vocab_size=50,
    repetition_window=8,
    repetition_max_period=2,
    missing_log_probs=MissingLogProbs.MARK,
    rewards_expected=True,
)
FLOATS = st.floats(-5, 0) | st.sampled_from([math.nan, math.inf, -math.inf, 0.5])


@st.composite
def well_formed_samples(draw):
    """Samples with the right types and every kind of defect."""
    prompt = draw(st.integers(0, 5))
    length = draw(st.integers(0, 35))
    ids = draw(st.lists(st.integers(-1, 51), min_size=prompt + length, max_size=prompt + length))
    if draw(st.booleans()):
        ids = [abs(i) % 50 for i in ids]
    count = length if draw(st.integers(0, 5)) else length + 1
    log_probs = draw(
        st.none()
        | st.lists(
            FLOATS if draw(st.booleans()) else st.floats(-5, 0), min_size=count, max_size=count
        )
    )
    return Sample(
        index=draw(st.integers(0, 1000)),
        group_index=draw(st.none() | st.integers(0, 3)),
        prompt=draw(st.sampled_from(["p", "q"])),
        tokens=draw(st.sampled_from([list, np.array]))(ids) if ids else [],
        response=draw(st.sampled_from(["", "text", "\u200b \ufeff", "<answer>"])),
        response_length=length,
        rollout_log_probs=log_probs,
        loss_mask=draw(st.none() | st.just([1] * length) | st.just([1] * (length + 2))),
        status=draw(st.sampled_from(list(Status))),
        finish_reason=draw(st.sampled_from([None, "stop", "length", "abort", "?"])),
        reward=draw(st.none() | FLOATS),
    )


@settings(max_examples=80, deadline=None)
@given(st.lists(well_formed_samples(), max_size=12))
def test_the_vectorised_gate_says_what_a_plain_loop_says(samples):
    """The vectorised gate gives the verdicts of a plain loop over samples."""
    assert reasons_of(postprocess_output_data(samples, CONFIG)) == [
        reason_of(sample, CONFIG) for sample in samples
    ]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(well_formed_samples(), max_size=12),
    st.sampled_from([Policy.MARK, Policy.DROP]),
    st.integers(0, 12),
)
def test_conservation_order_identity_and_sums_of_parts(samples, policy, cut):
    """The gate loses, moves and changes no sample, and parts that are judged apart add up to the
    whole."""
    config = GateConfig(policies=dict.fromkeys(REASONS, policy), rewards_expected=True)
    before = copy.deepcopy(samples)
    result = postprocess_output_data(samples, config)
    statistics = result.statistics
    assert statistics.total == len(samples) == statistics.kept + sum(statistics.dropped.values())
    assert all(
        out.tokens is samples[row].tokens
        for row, out in zip(result.raw_rows, result.samples, strict=True)
    )
    assert [out.index for out in result.samples] == [samples[row].index for row in result.raw_rows]
    assert result.raw_rows == sorted(result.raw_rows)
    assert all(out.valid for out in result.samples) or policy is Policy.MARK
    assert repr(before) == repr(samples)
    again = postprocess_output_data(samples, config)
    parts = [postprocess_output_data(part, config) for part in (samples[:cut], samples[cut:])]
    assert again.verdicts == result.verdicts == parts[0].verdicts + parts[1].verdicts
    merged = GateStatistics.merge([part.statistics for part in parts])
    assert (
        merged.counts == statistics.counts
        and merged.dropped == statistics.dropped
        and merged.groups() == statistics.groups()
    )


def test_chunks_are_invisible(monkeypatch):
    """A batch cut into chunks of 1, 7 and all samples has the same verdicts and counts."""
    samples = [sound_sample(i, length=5 + i % 9) for i in range(60)]
    for i in range(0, 60, 7):
        samples[i].rollout_log_probs[i % 5] = math.nan
    results = []
    for chunk_samples in (1, 7, 8192):
        monkeypatch.setattr(gate_module, "CHUNK_SAMPLES", chunk_samples)
        results.append(postprocess_output_data(samples, GateConfig()))
    assert results[0].verdicts == results[1].verdicts == results[2].verdicts
    assert (
        results[0].statistics.counts == results[1].statistics.counts == results[2].statistics.counts
    )


def _is_trainable(out: Sample) -> bool:
    """Whether nothing of a valid sample can break the trainer or poison a gradient."""
    log_probs = out.rollout_log_probs
    return (
        0 < out.response_length <= len(out.tokens)
        and all(0 <= token < 10**6 for token in out.tokens)
        and math.isfinite(out.reward)
        and (
            log_probs is None
            or (len(log_probs) == out.response_length and all(math.isfinite(v) for v in log_probs))
        )
        and (out.loss_mask is None or len(out.loss_mask) == out.response_length)
    )


def test_ten_thousand_mutations_end_as_a_verdict():
    """10,000 malformed samples end in a verdict: none raises, and every valid one can train."""
    rng = random.Random(7)
    config = GateConfig(
        format=FORMAT_PRESETS["answer"],
        vocab_size=10**6,
        rewards_expected=True,
        repetition_window=8,
    )
    samples = [
        mutate(rng, sound_sample(i % 50, response="<answer>4</answer>")) for i in range(10_000)
    ]
    start = time.process_time()
    result = postprocess_output_data(samples, config)
    statistics = result.statistics
    assert statistics.total == 10_000 == statistics.kept + sum(statistics.dropped.values())
    assert len({reason for reason, count in statistics.dropped.items() if count}) >= 8
    assert all(_is_trainable(out) for out in result.samples if out.valid is True)
    assert statistics.to_record() and statistics.to_metrics() and statistics.summary()
    kept = {reason: Policy.KEEP for reason in REASONS if reason not in NEVER_KEPT}
    lax = postprocess_output_data(
        samples, dataclasses.replace(config, policies=kept, level=Level.LENIENT)
    )
    assert lax.statistics.kept > statistics.kept and all(
        _is_trainable(out) for out in lax.samples if out.valid is True
    )
    alone = rng.sample(range(10_000), 300)
    assert [postprocess_output_data([samples[i]], config).verdicts[0] for i in alone] == [
        result.verdicts[i] for i in alone
    ]
    assert time.process_time() - start < 10


def test_mutated_trajectories_of_other_engines_end_as_a_verdict_or_name_the_item():
    """A malformed trajectory ends in a verdict or in an error that names its position and never is
    a bare KeyError."""
    rng = random.Random(11)
    errors = 0
    for i in range(1500):
        raw = {
            "prompt": [1, 2],
            "response": "r",
            "response_tokens": [3, 4],
            "logprobs": [-1.0, -1.0],
            "finish_reason": "stop",
        }
        for _ in range(rng.randint(1, 2)):
            key = rng.choice(list(raw))
            if rng.random() < 0.3:
                raw.pop(key)
            else:
                raw[key] = rng.choice(JUNK)
        try:
            result = postprocess_output_data(
                [sound_sample(0), raw], GateConfig(adapter="trajectory")
            )
            assert result.statistics.total == 2
        except RolloutDataError as error:
            errors += 1
            assert "input 1" in str(error), (i, raw)
    assert 0 < errors < 1500


def test_the_benchmark_compares_loop_and_gate_on_the_same_samples(capsys):
    """The benchmark prints the speed-up over a loop and the share of an iteration, and judges its
    limit on what it measured. No time is asserted here."""
    path = Path(__file__).resolve().parents[2] / "tools" / "bench" / "gate.py"
    spec = importlib.util.spec_from_file_location("bench_gate", path)
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    broken = bench.bench_checks(160, 40)
    printed = capsys.readouterr().out
    ratios = [float(text) for text in re.findall(r"loop / gate +([0-9.]+) x", printed)]
    shares = re.search(r"share of a 60 s iteration: loop ([0-9.]+) %, gate ([0-9.]+) %", printed)
    assert len(ratios) == 3 and min(ratios) > 0 and shares is not None
    too_slow = any("faster than the loop" in line for line in broken)
    assert too_slow == (ratios[0] < 5) or abs(ratios[0] - 5) < 0.1, (ratios, broken)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
