"""Trainer against engine: exact numbers over trained tokens alone, at every split; `slime
consistency` shows where they come from."""

import io
import json
import math
import os

import numpy as np
import pytest
import torch

from slime import cli
from slime.data.batch import RolloutBatch, Stage
from slime.data.context_parallel import plan_response_layout
from slime.data.sample import Sample
from slime.files.rollout_dump import save_debug_rollout_data
from slime.files.train_dump import read_train_dump
from slime.files.train_dump_utils import Place, write_train_dump
from slime.harness import consistency_report as report_module
from slime.harness.consistency_report import (
    build_report,
    main,
    print_report,
    printable,
    rollout_of_step,
    worst_tokens,
)
from slime.metrics import contributions as c
from slime.metrics.consistency import (
    consistency_contributions,
    shift_contributions,
    shift_metric,
    shifted_by,
    staleness_contributions,
)
from slime.metrics.consistency_alarms import (
    ConsistencyLimits,
    consistency_alarms,
    find_consistency_problems,
    gap_of_same_weights,
)

NUM_GPUS = 0


def batch_of(trainer, engine, masks=None, *, prompts=None, sources=None):
    """A local batch; prompts of 2 tokens unless given."""
    lengths = [len(entry) for entry in trainer]
    prompts = prompts or [2] * len(lengths)
    batch = {
        "partition": list(range(len(lengths))),
        "tokens": [
            torch.arange(p + n) + 10 * i
            for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
        ],
        "loss_masks": [
            torch.tensor(mask, dtype=torch.int32) for mask in masks or [[1] * n for n in lengths]
        ],
        "response_lengths": lengths,
        "total_lengths": [p + n for p, n in zip(prompts, lengths, strict=True)],
        "log_probs": [torch.tensor(entry, dtype=torch.float32) for entry in trainer],
        "rollout_log_probs": [torch.tensor(entry, dtype=torch.float32) for entry in engine],
    }
    return batch | ({"source_names": sources} if sources else {})


def metrics_of(*batches, cp_size=1):
    """Reduced over the given ranks; with cp_size > 1 the batches are those of its
    ranks in order.
    """
    parts = [
        consistency_contributions(batch, cp_size=cp_size, cp_rank=i if cp_size > 1 else 0)
        for i, batch in enumerate(batches)
    ]
    return c.merge_all(parts)


def test_tool_output_between_sampled_tokens_does_not_count():
    """Log-probs 0.0 of a tool's tokens do not enter the gap: it is .02 / 3 and not 15 nats."""
    found = metrics_of(
        batch_of([[-1, -1, -30, -30, -30, -1]], [[-1, -1.02, 0, 0, 0, -1]], [[1, 1, 0, 0, 0, 1]])
    )
    assert found["logprob_abs_diff/mean"] == pytest.approx(0.02 / 3, rel=1e-5)
    assert found["logprob_abs_diff/max"] == pytest.approx(0.02, rel=1e-5)
    broken = metrics_of(batch_of([[-1, math.nan]], [[-1.5, math.inf]], [[1, 0]]))
    assert broken["logprob_abs_diff/mean"] == broken["logprob_abs_diff/max"] == 0.5


def test_without_a_trained_token_there_is_no_number_and_no_crash():
    """Without a trained token there is no gap, neither NaN nor a 0 that looks like agreement."""
    assert metrics_of(batch_of([[-1, -1]], [[-2, -2]], [[0, 0]])) == {}
    assert metrics_of(batch_of([[]], [[]])) == {}
    # a rank without samples, where there are fewer samples than ranks
    assert metrics_of(batch_of([], [])) == {}
    assert (
        consistency_contributions({"log_probs": [torch.zeros(1)], "loss_masks": [torch.ones(1)]})
        == {}
    )


def test_quantiles_and_both_kl_estimates_by_hand():
    """For trainer - engine = 0.5, -0.25, 0, 1, by hand: quantiles, k1 = mean(-d) and k3 = mean(e^d
    - 1 - d)."""
    found = metrics_of(batch_of([[-1.0, -2.0, -3.0, -1.0]], [[-1.5, -1.75, -3.0, -2.0]]))
    assert found["logprob_abs_diff/mean"] == 1.75 / 4 and found["logprob_abs_diff/max"] == 1.0
    assert found["logprob_abs_diff/p50"] == 0.375  # between 0.25 and 0.5
    # rank 2.7 of 0, .25, .5, 1
    assert found["logprob_abs_diff/p90"] == pytest.approx(0.5 + 0.7 * 0.5)
    assert found["logprob_kl/k1"] == -1.25 / 4
    by_hand = sum(math.exp(d) - 1 - d for d in (0.5, -0.25, 0.0, 1.0)) / 4
    assert found["logprob_kl/k3"] == pytest.approx(by_hand, rel=1e-15)


def test_parts_are_quarters_of_each_response_and_sources():
    """The gap is reported by quarter of the response and by source, because it disappears in the
    mean."""
    trainer = [[-1.0] * 8, [-1.0] * 4]
    engine = [[-1, -1, -1, -1, -1, -1, -2, -2], [-1, -1, -1, -4]]
    found = metrics_of(batch_of(trainer, engine, sources=["long", "short"]))
    assert [found[f"logprob_abs_diff/position/q{q}"] for q in (1, 2, 3, 4)] == [0, 0, 0, 5 / 3]
    assert (
        found["logprob_abs_diff/source/long"] == 0.25
        and found["logprob_abs_diff/source/short"] == 0.75
    )


def random_batch(seed, count=12):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 30, count).tolist()
    trainer = [(-rng.random(n) * 5).tolist() for n in lengths]
    engine = [(np.array(entry) + rng.normal(0, 0.1, len(entry))).tolist() for entry in trainer]
    masks = [rng.integers(0, 2, n).tolist() for n in lengths]
    return batch_of(
        trainer,
        engine,
        masks,
        prompts=rng.integers(1, 9, count).tolist(),
        sources=[f"set-{i % 3}" for i in range(count)],
    )


def test_the_numbers_are_the_same_over_one_and_over_three_ranks():
    """Means and quantiles over three ranks are those of one: neither means of means nor quantiles
    of quantiles."""
    whole = random_batch(0)
    expected = metrics_of(whole)
    parts = [{name: values[low : low + 5] for name, values in whole.items()} for low in (0, 5, 10)]
    assert metrics_of(*parts) == expected and len(expected) == 16


@pytest.mark.parametrize("cp_size", [2, 4])
def test_context_parallel_ranks_give_the_numbers_of_the_whole(cp_size):
    """Context-parallel ranks, each with its tokens of every response, give the numbers of the
    whole."""
    whole = random_batch(1)
    ranks = []
    for cp_rank in range(cp_size):
        layout = plan_response_layout(
            whole["total_lengths"], whole["response_lengths"], cp_size=cp_size, cp_rank=cp_rank
        )
        local = dict(whole)
        for name in ("log_probs", "rollout_log_probs"):
            local[name] = list(
                torch.cat(whole[name])[layout.response_indices].split(list(layout.local_lengths))
            )
        ranks.append(local)
    assert metrics_of(*ranks, cp_size=cp_size) == metrics_of(whole)


def test_the_alarm_says_how_much_and_what_to_look_at():
    """The alarm names the numbers, the option and what to look at."""
    metrics = {"rollout/logprob_abs_diff/mean": 0.25, "rollout/logprob_abs_diff/max": 3.0}
    text = consistency_alarms(metrics, ConsistencyLimits(0.1))["gap"]
    for part in (
        "0.25 nats",
        "largest 3",
        "--logprob-diff-alarm 0.1",
        "perf/weight_version",
        "temperature",
    ):
        assert part in text
    assert (
        consistency_alarms(metrics, ConsistencyLimits(0.25))
        == {}
        == consistency_alarms({}, ConsistencyLimits(0.1))
    )
    assert list(
        consistency_alarms({name: math.nan for name in metrics}, ConsistencyLimits(0.1))
    ) == ["gap"]


def reduced(parts):
    return {f"rollout/{name}": value for name, value in c.merge_all([parts]).items()}


@pytest.mark.parametrize("shift", (-2, -1, 1))
def test_log_probs_that_stand_one_token_off_are_recognised(shift):
    """Engine log-probs shifted by a token are found by their median against the trainer's
    neighbours, though the mean gap of 0.02 nats is below any threshold."""
    rng = np.random.default_rng(0)
    trainer = [(-0.05 * rng.random(40) - 0.001).tolist() for _ in range(6)]
    engine = [np.roll(entry, shift).tolist() for entry in trainer]
    masks = [[1] * 40 for _ in trainer]
    medians = c.merge_all([shift_contributions(batch_of(trainer, engine, masks))])
    assert shifted_by(medians) == shift and medians[str(shift)] < 1e-6 < medians["0"]
    metrics = reduced(
        consistency_contributions(batch_of(trainer, engine, masks))
        | {"logprob_shift": shift_metric(shift)}
    )
    assert metrics["rollout/logprob_abs_diff/mean"] < 0.03
    (text,) = consistency_alarms(metrics, ConsistencyLimits()).values()
    assert (
        "shifted by one token" if abs(shift) == 1 else "shifted by 2 tokens"
    ) in text and "weights, data type and temperature are right" in text


def test_what_is_only_noisy_or_only_rounded_is_not_called_shifted():
    """Noise, gaps below 1e-4 nats and responses of one token are not called shifted."""
    rng = np.random.default_rng(1)
    trainer = [(-3 * rng.random(40)).tolist() for _ in range(6)]
    for engine in (
        [(np.array(entry) + 0.3 * rng.random(40)).tolist() for entry in trainer],
        trainer,
    ):
        assert shifted_by(c.merge_all([shift_contributions(batch_of(trainer, engine))])) is None
    assert (
        shifted_by(c.merge_all([shift_contributions(batch_of([[-1.0], [-2.0]], [[-2.0], [-1.0]]))]))
        is None
    )
    assert shifted_by({}) is None and shift_contributions({}) == {}


def test_a_mask_that_is_one_token_off_is_seen():
    """A mask off by one is found: 1 of 4 sampled tokens is outside the loss, and 1 of 4 trained
    ones was never sampled."""
    found = reduced(
        consistency_contributions(
            batch_of([[-1, -2, -3, -1, -9]], [[-1, -2, -3, -1, 0.0]], [[0, 1, 1, 1, 1]])
        )
    )
    assert (
        found["rollout/mask/sampled_untrained"] == found["rollout/mask/trained_unsampled"] == 0.25
    )
    alarms = consistency_alarms(found, ConsistencyLimits(logprob_diff=10.0))
    assert (
        "25.0% of the sampled tokens do not train" in alarms["untrained"]
        and "they were not sampled" in alarms["unsampled"]
    )
    assert "untrained" not in consistency_alarms(found, ConsistencyLimits(10.0, untrained=1.0))


def test_masks_that_are_meant_are_no_alarm():
    """Tool tokens outside the loss, samples that do not train, certain tokens (log-prob 0 on both
    sides) and older tokens masked by option raise no alarm."""
    trainer, engine = (
        [[-1, -9, -2], [-1, -1, -1], [-1, 0.0, -1]],
        [[-1, 0.0, -2], [-1, -1, -1], [-1, 0.0, -1]],
    )
    found = reduced(
        consistency_contributions(batch_of(trainer, engine, [[1, 0, 1], [0, 0, 0], [1, 1, 1]]))
    )
    assert found["rollout/mask/sampled_untrained"] == found["rollout/mask/trained_unsampled"] == 0
    masked = reduced(consistency_contributions(batch_of([[-1, -1]], [[-1, -1]], [[0, 1]])))
    assert masked["rollout/mask/sampled_untrained"] == 0.5
    by_option = reduced(
        consistency_contributions(batch_of([[-1, -1]], [[-1, -1]], [[0, 1]]), masks_older=True)
    )
    assert "rollout/mask/sampled_untrained" not in by_option


def test_samples_of_older_weights_have_a_threshold_of_their_own():
    """For samples one update old the alarm is at 10 times the threshold of 0.1, so that 0.4 nats
    raise none and never stop the run; 0.2 at the same weights raises one."""
    ages = np.array([0.0, 1.0])
    batch = batch_of([[-1, -1], [-1, -1]], [[-1, -1], [-1.4, -1.4]])
    parts = consistency_contributions(batch, ages_N=ages) | staleness_contributions(ages)
    found = reduced(parts)
    assert found["rollout/logprob_abs_diff/weights/same"] == 0 == gap_of_same_weights(found)
    assert found["rollout/logprob_abs_diff/weights/older"] == pytest.approx(0.4)
    assert (found["rollout/staleness/mean"], found["rollout/staleness/max"]) == (0.5, 1.0)
    assert consistency_alarms(found, ConsistencyLimits()) == {}
    lost = consistency_alarms(
        {**found, "rollout/logprob_abs_diff/weights/older": 1.2}, ConsistencyLimits()
    )
    assert (
        "1.2 nats" in lost["gap of older weights"]
        and "times 10 for 1 updates" in lost["gap of older weights"]
    )
    broken = {**found, "rollout/logprob_abs_diff/weights/same": 0.2}
    assert (
        list(consistency_alarms(broken, ConsistencyLimits())) == ["gap"]
        and gap_of_same_weights(broken) == 0.2
    )
    older_alone = reduced(consistency_contributions(batch, ages_N=np.array([2.0, 1.0])))
    assert gap_of_same_weights(older_alone) is None
    assert gap_of_same_weights(
        reduced(consistency_contributions(batch, ages_N=np.array([np.nan, np.nan])))
    ) == pytest.approx(0.2)


def test_a_run_says_each_kind_of_alarm_once():
    """At the end each kind of alarm is one problem line with how often and where it began, and
    `slime train` returns 1."""
    series = {
        "rollout/logprob_abs_diff/mean": {0: 0.01, 1: 0.2, 2: "nan"},
        "rollout/logprob_abs_diff/max": {0: 0.1, 1: 0.5, 2: "nan"},
        "rollout/mask/sampled_untrained": {0: 0.0, 1: 0.0, 2: 0.36},
        "train/loss": {0: 9.0},
    }
    gap, untrained = find_consistency_problems(series, ConsistencyLimits())
    assert gap.startswith(
        "log-probs, 2 of 3 rollouts, first in 1: trainer and engine disagree by 0.2 nats"
    )
    assert untrained.startswith(
        "log-probs, 1 of 3 rollouts, first in 2: 36.0% of the sampled tokens do not train"
    )
    assert find_consistency_problems({"train/loss": {0: 1.0}}, ConsistencyLimits()) == []


def test_ages_count_rollouts_trained_since_a_version_went_out():
    """A version's age is the number of rollouts trained since it was published; a version from
    before the start is older than all of them, and an unknown one (-1) has no age."""
    from slime.backends.megatron_utils.weight_ages import WeightAges

    ages = WeightAges()
    assert np.isnan(ages.of(np.array([1, -1]))).all()
    ages.published(1)
    assert ages.of(np.array([1])).tolist() == [0.0]
    ages.trained()
    assert ages.of(np.array([1])).tolist() == [1.0]
    ages.published(2)
    assert ages.of(np.array([1, 2])).tolist() == [1.0, 0.0]
    ages.trained()
    assert ages.of(np.array([0, 1, 2])).tolist() == [3.0, 2.0, 1.0] and np.isnan(
        ages.of(np.array([-1]))[0]
    )


# --- slime consistency ----------------------------------------------------------------------------

GAPS = {(1, 2): 0.5, (0, 1): -0.25, (2, 0): 0.125}  # (sample, response token): trainer - engine


def write_run(folder, *, means=(0.01, 0.02), dumps=True, gaps=GAPS, **config):
    """A run folder of two rollouts; the dumps of rollout 1 hold three samples with indices 100,
    101, 102 of 4 tokens and the given gaps.
    """
    folder.mkdir(exist_ok=True)
    lines = []
    for step, mean in enumerate(means):
        metrics = {
            f"rollout/logprob_abs_diff/{name}": mean * factor
            for name, factor in (("mean", 1), ("p50", 0.5), ("max", 10))
        }
        metrics |= {
            "rollout/logprob_kl/k1": -mean,
            "rollout/logprob_abs_diff/source/arithmetic": mean,
        }
        metrics = {
            name: value if math.isfinite(value) else str(value) for name, value in metrics.items()
        }
        lines.append(
            {
                "time": 1.0 + step,
                "process": "a",
                "step_key": "rollout/step",
                "step": step,
                "metrics": metrics,
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if dumps:
        config = {"dump_details": str(folder / "dumps"), **config}
        write_dumps(folder / "dumps", gaps)
    (folder / "config.yaml").write_text(
        "".join(f"{name}: {json.dumps(value)}\n" for name, value in config.items())
    )
    return folder


def write_dumps(folder, gaps):
    engine = [[-1.0 - i - j / 4 for j in range(4)] for i in range(3)]
    trainer = [
        [value + gaps.get((i, j), 0.0) for j, value in enumerate(entry)]
        for i, entry in enumerate(engine)
    ]
    masks = [[1, 1, 1, 0]] * 3
    trainer[2][3] = 99.0  # masked
    entries = batch_of(trainer, engine, masks, sources=["arithmetic"] * 3) | {
        "sample_indices": [100, 101, 102]
    }
    batch = RolloutBatch(entries, stage=Stage.LOCAL, info={"num_whole": 3})
    header = {"rollout_id": 1, "rank": 0}
    write_train_dump(
        folder / "train_data/1.safetensors",
        batch,
        header=header,
        place=Place(),
        gather=lambda v: [v],
        share=lambda v: [v],
    )
    samples = [
        Sample(index=100 + i, tokens=[0] * 6, response_length=4, weight_versions=[str(7 + i)])
        for i in range(3)
    ]
    save_debug_rollout_data(
        str(folder / "rollout_data/{rollout_id}.jsonl"), samples, rollout_id=1, evaluation=False
    )


def test_worst_tokens_come_with_their_place_and_origin(tmp_path):
    """The worst tokens come largest first, without masked ones, with everything needed to find them
    again."""
    report = build_report(write_run(tmp_path / "run"), top=2)
    assert report.step == 1, "the rollout with the largest mean"
    first, second = report.tokens
    assert (first.sample_index, first.response_token, first.response_length, first.token_id) == (
        101,
        2,
        4,
        14,
    )
    assert (first.trainer, first.engine, first.difference) == (-2.0, -2.5, 0.5)
    assert (first.source, first.weight_versions, first.position_in_batch, first.rank) == (
        "arithmetic",
        ["8"],
        1,
        0,
    )
    assert (second.sample_index, second.difference) == (100, -0.25)
    assert "no text" in report.note


def test_the_text_around_a_token_is_decoded_and_cannot_drive_the_terminal(tmp_path, monkeypatch):
    """The text around a token is decoded, and sampled escape sequences are shown escaped."""
    monkeypatch.setattr(
        report_module,
        "decoder_of",
        lambda folder: (lambda ids: "".join(f"<{i}>" if i != 14 else "\x1b[2J" for i in ids), None),
    )
    stream = io.StringIO()
    print_report(build_report(write_run(tmp_path / "run"), top=1), stream=stream)
    assert "<10><11><12><13>[\\x1b[2J]<15>" in stream.getvalue() and "\x1b" not in stream.getvalue()
    assert printable("a\nb\u202ec\u00e9") == "a\\nb\\u202ec\u00e9"


def test_a_log_prob_that_is_no_number_is_the_worst(tmp_path):
    """A NaN log-prob is listed first."""
    write_dumps(tmp_path, {(0, 0): math.nan, (1, 1): 50.0})
    tokens = worst_tokens(read_train_dump(tmp_path / "train_data/1.safetensors"), top=2)
    assert [(token.sample_index, token.response_token) for token in tokens] == [(100, 0), (101, 1)]
    report = build_report(write_run(tmp_path / "run", means=(math.nan, 0.01), dumps=False))
    assert report.step == 0 and report.has_alarm


def test_exit_status_tells_agreement_alarm_and_no_run_apart(tmp_path, capsys):
    """The exit status is 0 for agreement, 1 for an alarm, 2 without a run."""
    calm = write_run(tmp_path / "calm")
    assert cli.main(["consistency", str(calm)]) == 0
    out = capsys.readouterr().out
    assert "no alarm: every mean is at most 0.1" in out and "ALARM" not in out
    loud = write_run(tmp_path / "loud", means=(0.01, 0.3), dumps=False)
    assert main([str(loud)]) == 1
    out = capsys.readouterr().out
    assert (
        "ALARM step 1: trainer and engine disagree by 0.3 nats" in out
        and "the run wrote no train dumps" in out
    )
    assert main([str(loud), "--step", "0"]) == 0
    assert main([str(loud), "--threshold", "0.5"]) == 0
    assert main([str(write_run(tmp_path / "strict", dumps=False, logprob_diff_alarm=0.015))]) == 1
    capsys.readouterr()
    assert main([str(tmp_path / "absent")]) == 2
    assert "metrics.jsonl is missing" in capsys.readouterr().err
    assert main([str(calm), "--step", "9"]) == 2
    assert "has no rollout 9" in capsys.readouterr().err
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / "metrics.jsonl").write_text("")
    assert main([str(tmp_path / "absent")]) == 2


def test_json_has_the_table_and_the_tokens(tmp_path, capsys):
    """--json has the table and the tokens."""
    assert main([str(write_run(tmp_path / "run")), "--json", "--top", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [step["metrics"]["rollout/logprob_abs_diff/mean"] for step in found["steps"]] == [
        0.01,
        0.02,
    ]
    assert [token["difference"] for token in found["worst_tokens"]] == [0.5, -0.25, 0.125]
    assert found["alarm"] is False and found["threshold"] == 0.1


def test_a_terminal_gets_tables_and_a_file_plain_columns(tmp_path):
    """A terminal gets tables, and a file plain columns with whole rows."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    report = build_report(write_run(tmp_path / "run", means=(0.01, 0.2)))
    terminal, plain = Terminal(), io.StringIO()
    print_report(report, stream=terminal)
    print_report(report, stream=plain)
    assert "\u2502" in terminal.getvalue() and "\u2502" not in plain.getvalue()
    lines = plain.getvalue().splitlines()
    assert lines[1].split() == ["step", "mean", "p50", "p90", "p99", "max", "k1", "k3"]
    assert lines[3].split() == ["1", "0.2", "0.1", "-", "-", "2", "-0.2", "-", "ALARM"]
    assert any(line.split() == ["source/arithmetic", "0.2"] for line in lines)


def test_a_damaged_dump_does_not_hide_the_table(tmp_path):
    """A damaged dump is reported, and the table of metrics is shown."""
    run = write_run(tmp_path / "run")
    path = run / "dumps/train_data/1.safetensors"
    os.truncate(path, path.stat().st_size - 3)
    report = build_report(run)
    assert len(report.steps) == 2 and report.tokens == [] and "cut short" in report.note


def test_a_replay_finds_the_versions_in_the_dump_it_was_given(tmp_path):
    """A replay finds weight versions in the dump that it reads, because it writes no samples."""
    run = write_run(tmp_path / "run")
    dumps = run / "dumps"
    paths = {
        "save_debug_train_data": f"{dumps}/train_data/{{rollout_id}}.safetensors",
        "load_debug_rollout_data": f"{dumps}/rollout_data/{{rollout_id}}.jsonl",
    }
    (run / "config.yaml").write_text(
        "".join(f"{name}: {json.dumps(path)}\n" for name, path in paths.items())
    )
    assert build_report(run).tokens[0].weight_versions == ["8"]


def test_the_step_axis_is_translated_where_it_counts_optimizer_steps():
    """With --wandb-always-use-train-step rollout 3 of two steps each is found at step 6."""
    sizes = {"global_batch_size": 16, "rollout_batch_size": 8, "n_samples_per_prompt": 4}
    assert rollout_of_step(6, {"wandb_always_use_train_step": True, **sizes}) == 3
    assert rollout_of_step(6, {"wandb_always_use_train_step": False, **sizes}) == 6


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
