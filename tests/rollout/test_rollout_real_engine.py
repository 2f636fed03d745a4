"""The rollout against the embedded engine itself: the same client, the same API, real sampling."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support.gate_samples import plan_of
from support.rollout_args import fresh_rollout_state, rollout_args, write_prompts
from support.tiny_models import make_tiny_checkpoint

from slime.data.sample import Sample
from slime.gate import Gate, GateConfig
from slime.gate.snapshots import SnapshotWriter
from slime.prompts.data_source import RolloutDataSourceWithBuffer
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sglang_rollout import generate_rollout

NUM_GPUS = 0


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    from slime.backends.torch_engine.engine_config import EngineConfig
    from slime.backends.torch_engine.server_thread import EngineServerThread

    folder = str(make_tiny_checkpoint(tmp_path_factory.mktemp("model")))
    thread = EngineServerThread(
        EngineConfig(hf_checkpoint=folder, device="cpu", deterministic=True)
    )
    with thread as server:
        yield server.url, folder


def rollout(engine, tmp_path, **overrides):
    url, folder = engine
    args = rollout_args(
        hf_checkpoint=folder,
        prompt_data=write_prompts(tmp_path / "p.jsonl", 8),
        sglang_enable_deterministic_inference=True,
        **overrides,
    )
    with fresh_rollout_state(url):
        return generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)), args


def content(output):
    return [
        (s.tokens, s.rollout_log_probs, s.response, s.reward, s.finish_reason)
        for group in output.samples
        for s in group
    ]


def test_two_runs_and_every_way_of_asking_make_identical_samples(engine, tmp_path):
    """A sample is the same with one request per group or per sample, numbers or arrays, and any
    concurrency."""
    expected = content(rollout(engine, tmp_path)[0])
    assert len({tuple(tokens) for tokens, *_ in expected}) > 4
    for ways in (
        {},
        {"rollout_group_requests": "off"},
        {"rollout_return_arrays": True},
        {"sglang_server_concurrency": 1, "rollout_group_requests": "off"},
        {
            "custom_generate_function_path": "slime.rollout.sglang_streaming_rollout.generate_streaming"
        },
    ):
        got = content(rollout(engine, tmp_path, **ways)[0])
        assert [row[0] for row in got] == [row[0] for row in expected], ways
        assert [row[2:] for row in got] == [row[2:] for row in expected], ways
        for ours, theirs in zip(got, expected, strict=True):
            assert ours[1] == pytest.approx(theirs[1], abs=1e-6)


def test_samples_of_the_real_engine_fit_the_contract(engine, tmp_path):
    """Ids, log-probs and masks have one length; an ended response ends with an end token, and a cut
    one has the limit's length."""
    output, args = rollout(engine, tmp_path)
    for sample in (sample for group in output.samples for sample in group):
        assert len(sample.rollout_log_probs) == len(sample.loss_mask) == sample.response_length > 0
        assert all(
            log_prob <= 0 for log_prob in sample.rollout_log_probs
        ) and sample.weight_versions == ["0"]
        if sample.finish_reason == "length":
            assert (
                sample.status is Sample.Status.TRUNCATED
                and sample.response_length == args.rollout_max_response_len
            )
        else:
            assert sample.tokens[-1] in (2, 4)


def test_the_nucleus_comes_back_where_top_p_cuts(engine, tmp_path):
    """With top_p the reply has one nucleus per token that contains the sampled token, for the
    trainer's replay."""
    output, _ = rollout(engine, tmp_path, rollout_top_p=0.7)
    for sample in (sample for group in output.samples for sample in group):
        offsets, ids = (
            sample.rollout_top_p_token_offsets.tolist(),
            sample.rollout_top_p_token_ids.tolist(),
        )
        assert len(offsets) == sample.response_length + 1
        for position, token in enumerate(sample.tokens[-sample.response_length :]):
            assert token in ids[offsets[position] : offsets[position + 1]]


def keep_third(args, samples, **kwargs):
    return DynamicFilterOutput(keep=int(samples[0].label) % 3 == 0, reason="not_third")


def test_the_raw_snapshot_of_a_filtered_rollout_holds_every_response(engine, tmp_path):
    """With two of four prompts kept by a filter, the snapshot holds all responses token for token,
    the dropped ones with their reason."""
    import pyarrow.parquet as parquet

    options = {
        "rollout_batch_size": 2,
        "over_sampling_batch_size": 4,
        "dynamic_sampling_filter_path": f"{__name__}.keep_third",
    }
    output, _ = rollout(engine, tmp_path, **options)
    plain = content(rollout(engine, tmp_path)[0])  # the same four prompts without a filter
    gate = Gate(GateConfig(), snapshots=SnapshotWriter(tmp_path / "gate"))
    judged = gate.run(
        [s for group in output.samples for s in group], 0, dropped_groups=output.dropped_groups
    )
    gate.record_placement(0, judged.raw_rows, plan_of([[1, 0], [3, 2]], len(judged.raw_rows)))
    gate.close()
    rows = parquet.read_table(tmp_path / "gate" / "raw_000000.parquet").to_pylist()
    assert [(row["index"], row["dropped_by"]) for row in rows] == [
        *((index, None) for index in (0, 1, 6, 7)), *((index, "dynamic_filter_not_third") for index in (2, 3, 4, 5)),
    ]  # fmt: skip
    assert [row["tokens"] for row in sorted(rows, key=lambda row: row["index"])] == [
        tokens for tokens, *_ in plain
    ]
    place = parquet.read_table(tmp_path / "gate" / "place_000000.parquet").to_pylist()
    place.sort(key=lambda row: (row["dp_rank"], row["dp_position"]))
    assert [rows[p["raw_row"]]["index"] for p in place] == [1, 0, 7, 6]


def test_greedy_evaluation_takes_the_same_path_and_repeats(engine, tmp_path):
    """Greedy evaluation gives the same rewards, truncation and samples at every evaluation, in the
    dataset's order."""
    url, folder = engine
    path = write_prompts(tmp_path / "p.jsonl", 50)
    args = rollout_args(
        hf_checkpoint=folder,
        eval_prompt_data=["held_out", path],
        eval_temperature=0.0,
        rollout_global_dataset=False,
    )
    with fresh_rollout_state(url):
        one, two = (
            generate_rollout(args, i, RolloutDataSourceWithBuffer(args), evaluation=True)
            for i in range(2)
        )
    data = one.data["held_out"]
    assert [sample.label for sample in data["samples"]] == [str(i) for i in range(50)]
    assert len(data["rewards"]) == len(data["truncated"]) == 50
    assert [s.tokens for s in data["samples"]] == [
        s.tokens for s in two.data["held_out"]["samples"]
    ]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
