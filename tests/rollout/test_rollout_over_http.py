"""The rollout function against a scripted engine on loopback: order, failures, aborts, filters,
gate, seeds."""

import contextlib
import json
import logging
import sys
import types
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support.fake_engine import FakeEngine, Fault, make_reply
from support.rollout_args import fresh_rollout_state, rollout_args, tokenizer_folder, write_prompts
from support.tiny_models import make_char_tokenizer

from slime.data.sample import Sample
from slime.exceptions import ConfigError, EngineError, RolloutDataError
from slime.gate import tools
from slime.gate.alignment import Codec
from slime.prompts.data_source import RolloutDataSourceWithBuffer
from slime.rollout import sglang_rollout
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sglang_rollout import generate_rollout, get_model_url
from slime.utils import http_utils
from slime.utils.async_utils import run

NUM_GPUS = 0
TOKENIZER = make_char_tokenizer()
END = TOKENIZER.eos_token_id


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


def number_of(prompt):
    """The number i of the prompt "p<i>=" that an engine was sent."""
    return int(TOKENIZER.decode(prompt.input_ids)[1:].split("=")[0])


def right_answer(prompt):
    return [*TOKENIZER(str(number_of(prompt)))["input_ids"], END]


def decode(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=True)


@pytest.fixture
def rig(tmp_path, model, monkeypatch):
    """rig(engine options..., **args) -> (engine, args, data source), cleaned up afterwards."""
    monkeypatch.setattr(http_utils, "FIRST_PAUSE_S", 0.01)
    with contextlib.ExitStack() as stack:

        def build(answer=right_answer, *, prompts=12, engine=None, **overrides):
            remote = stack.enter_context(FakeEngine(answer, decode=decode, **(engine or {})))
            stack.enter_context(fresh_rollout_state(remote.url))
            defaults = {
                "hf_checkpoint": model,
                "prompt_data": write_prompts(tmp_path / "p.jsonl", prompts),
                "rollout_skip_special_tokens": True,
            }
            args = rollout_args(**{**defaults, **overrides})
            return remote, args, RolloutDataSourceWithBuffer(args)

        yield build


def labels(groups):
    return [[sample.label for sample in group] for group in groups]


@pytest.mark.parametrize("group_requests", ["auto", "off"])
@pytest.mark.parametrize("arrays", [True, False])
def test_prompts_become_scored_groups_in_order(rig, group_requests, arrays):
    """One request per group or per sample, with numbers or arrays, gives the same scored groups in
    order."""
    engine, args, source = rig(rollout_group_requests=group_requests, rollout_return_arrays=arrays)
    output = generate_rollout(args, 0, source)
    assert labels(output.samples) == [["0", "0"], ["1", "1"], ["2", "2"], ["3", "3"]]
    for index, sample in enumerate(sample for group in output.samples for sample in group):
        answer = right_answer(
            types.SimpleNamespace(input_ids=TOKENIZER(sample.prompt)["input_ids"])
        )
        assert sample.index == index and sample.group_index == index // 2
        assert sample.tokens == TOKENIZER(sample.prompt)["input_ids"] + answer
        assert (sample.response, sample.reward, sample.valid) == (sample.label, 1, True)
        assert (sample.status, sample.weight_versions) == (Sample.Status.COMPLETED, ["1"])
        assert len(sample.rollout_log_probs) == sample.response_length == len(answer)
    assert len(engine.requests) == (4 if group_requests == "auto" else 8)
    assert output.dropped == {} and output.metrics["rollout/failed_samples"] == 0
    assert labels(generate_rollout(args, 1, source).samples)[0] == ["4", "4"]


def test_chat_messages_and_tools_are_rendered_once_with_the_generation_prompt(rig, tmp_path):
    """Message lists stay structured until they are sent; the ids that are sent are trained, with
    one BOS if any."""
    engine, args, _ = rig(lambda prompt: [END], rollout_batch_size=1, n_samples_per_prompt=1)
    path = tmp_path / "chat.jsonl"
    path.write_text('{"input": [{"role": "user", "content": "7"}], "label": "7"}\n')
    args.prompt_data = str(path)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    text = "<|im_start|>user\n7<|im_end|>\n<|im_start|>assistant\n"
    assert engine.requests[0]["input_ids"] == [TOKENIZER(text)["input_ids"]]
    assert output.samples[0][0].tokens == TOKENIZER(text)["input_ids"] + [END]


@pytest.mark.parametrize("group_requests", ["auto", "off"])
def test_seeds_make_two_runs_identical_and_prompts_different(rig, group_requests):
    """Sampling is a function of run seed, member, sample and rollout, and not of batching or
    time."""
    seen = []
    for _ in range(2):
        engine, args, source = rig(
            sglang_enable_deterministic_inference=True,
            rollout_group_requests=group_requests,
            rollout_seed=7,
        )
        generate_rollout(args, 0, source)
        generate_rollout(args, 1, source)
        seeds = {}
        for request in engine.requests:
            lists = isinstance(request["input_ids"][0], list)
            for ids, params in zip(
                request["input_ids"] if lists else [request["input_ids"]],
                request["sampling_params"] if lists else [request["sampling_params"]],
                strict=True,
            ):
                seeds.setdefault(tuple(ids), []).append(params["sampling_seed"])
        seen.append({prompt: sorted(values) for prompt, values in seeds.items()})
    assert seen[0] == seen[1]
    flat = [seed for values in seen[0].values() for seed in values]
    assert len(flat) == 16 and len(set(flat)) == 16


def test_a_continued_response_does_not_repeat_its_first_random_numbers():
    """The segments of a response under partial rollout have different seeds."""
    args = rollout_args(sglang_enable_deterministic_inference=True)
    fresh, continued = Sample(index=3), Sample(index=3, response_length=5)
    seeds = [
        sglang_rollout.member_params(args, s, {}, 1, True)["sampling_seed"]
        for s in (fresh, continued, fresh)
    ]
    assert seeds[0] != seeds[1] and seeds[0] == seeds[2]
    args.sglang_enable_deterministic_inference = False
    assert sglang_rollout.member_params(args, fresh, {"top_p": 1.0}, 1, True) == {"top_p": 1.0}


@pytest.mark.parametrize("fault", [Fault(status=500), Fault(status=503), Fault(close=True)])
def test_a_passing_fault_is_tried_again_and_costs_nothing(rig, fault):
    """5xx answers and lost connections are retried; the retry replaces the sample and never adds
    one."""
    engine, args, source = rig()
    engine.faults += [fault, fault]
    output = generate_rollout(args, 0, source)
    assert (
        labels(output.samples) == [[str(i)] * 2 for i in range(4)]
        and output.metrics["rollout/failed_samples"] == 0
    )
    assert len(engine.requests) == 6


def test_a_timeout_is_tried_again_under_a_new_request_id(rig):
    """A request that timed out is retried under a new id, because the lost one may still run in the
    engine."""
    engine, args, source = rig(rollout_request_timeout=0.3, rollout_batch_size=1)
    engine.faults.append(Fault(hang=1.0))
    assert labels(generate_rollout(args, 0, source).samples) == [["0", "0"]]
    first, second = (request["rid"] for request in engine.requests)
    assert not set(first) & set(second)


def test_a_4xx_is_never_tried_again_and_only_the_culprit_fails(rig):
    """A group refused with 4xx is repeated member by member, and the member that is refused again
    fails alone."""
    engine, args, source = rig(max_failed_ratio=0.5, rollout_batch_size=1, n_samples_per_prompt=2)
    engine.faults += [Fault(status=400), Fault(status=400)]
    output = generate_rollout(args, 0, source)
    (group,) = output.samples
    assert sorted(sample.status.value for sample in group) == ["completed", "failed"]
    failed = next(sample for sample in group if sample.status is Sample.Status.FAILED)
    assert failed.reward is None and not failed.valid and failed.invalid_reason == "failed"
    assert "400" in failed.metadata["failure"] and failed.response_length == 0
    assert len(engine.requests) == 3 and output.metrics["rollout/failed_samples"] == 1


def test_too_many_failures_stop_the_run_with_their_reasons(rig):
    """A rollout with too many failed samples ends the run with their reasons."""
    engine, args, source = rig(
        lambda prompt: {"text": "", "output_ids": [1, 2], "meta_info": {"completion_tokens": 1, "output_token_logprobs": [[-1, 5]]}}
        if number_of(prompt) % 3 == 0
        else right_answer(prompt)
    )  # fmt: skip
    with pytest.raises(
        RolloutDataError, match=r"--max-failed-ratio 0.1.*2 output_ids and 1 log-probs"
    ):
        generate_rollout(args, 0, source)


def test_an_unreachable_engine_stops_the_run_after_its_retries(rig):
    """An unreachable engine ends the run after the retries, with its address."""
    engine, args, source = rig(rollout_request_retries=1)
    with fresh_rollout_state("http://127.0.0.1:9"):
        with pytest.raises(RolloutDataError, match="127.0.0.1:9"):
            generate_rollout(args, 0, source)


# far enough apart that a machine with other work does not change which two are done first
DURATIONS = {0: 1.2, 1: 0.3, 2: 0.9, 3: 0.6}


@pytest.mark.parametrize(
    ("order", "expected"), [("submission", ["0", "1"]), ("completion", ["1", "3"])]
)
def test_which_groups_fill_the_batch_follows_the_declared_rule(rig, order, expected):
    """With durations 4, 1, 3, 2 and a batch of 2, order of submission gives {0, 1}; the fastest win
    only when asked for."""
    engine, args, source = rig(
        engine={"delay": lambda prompt: DURATIONS[number_of(prompt)]},
        rollout_batch_size=2, over_sampling_batch_size=4, rollout_batch_order=order,
    )  # fmt: skip
    output = generate_rollout(args, 0, source)
    assert [group[0].label for group in output.samples] == expected
    left = [str(i) for i in range(4) if str(i) not in expected]
    assert [group[0].label for group in source.buffer] == left
    assert all(
        sample.tokens == [] and sample.status is Sample.Status.PENDING
        for g in source.buffer
        for sample in g
    )


def slow_after(numbers):
    return {
        "delay": lambda prompt: 5.0 if number_of(prompt) in numbers else 0.0,
        "partial": lambda prompt: 1,
    }


def test_without_partial_rollout_an_aborted_group_goes_back_pristine(rig):
    """Without partial rollout an aborted group goes back without tokens; those of an old version
    would train beside new ones."""
    engine, args, source = rig(
        lambda p: [*TOKENIZER("12345678")["input_ids"]][:8], engine=slow_after({2, 3}), rollout_batch_size=2,
        over_sampling_batch_size=4,
    )  # fmt: skip
    output = generate_rollout(args, 0, source)
    assert engine.num_aborts == 1 and [group[0].label for group in source.buffer] == ["2", "3"]
    assert output.dropped == {"returned_pristine": 4}
    engine.delay, engine.weight_version = (lambda prompt: 0.0), "2"
    args.over_sampling_batch_size = 2
    again = generate_rollout(args, 1, source).samples
    assert labels(again) == [["2", "2"], ["3", "3"]]
    assert all(
        sample.weight_versions == ["2"] and sample.response_length == 8
        for group in again
        for sample in group
    )


@pytest.mark.parametrize("mask", [False, True])
def test_with_partial_rollout_an_aborted_group_goes_on_where_it_was(rig, mask):
    """With partial rollout a response goes on, segments keep their versions and log-probs, and an
    option masks the earlier policy's tokens."""
    engine, args, source = rig(
        lambda p: TOKENIZER("1234567")["input_ids"], engine=slow_after({2, 3}), rollout_batch_size=2,
        over_sampling_batch_size=4, partial_rollout=True, mask_offpolicy_in_partial_rollout=mask,
    )  # fmt: skip
    generate_rollout(args, 0, source)
    assert [s.response_length for group in source.buffer for s in group] == [1, 1, 1, 1]
    assert source.buffer[0][0].metadata["start_rollout_id"] == 0
    engine.delay, engine.weight_version = (lambda prompt: 0.0), "2"
    args.over_sampling_batch_size = 2
    samples = [sample for group in generate_rollout(args, 1, source).samples for sample in group]
    for sample in samples:
        assert sample.weight_versions == ["1", "2"] and sample.response_length == 8
        assert sample.loss_mask == [0 if mask else 1] + [1] * 7
        assert sample.rollout_log_probs == [-0.125] + [-(k + 1) / 8 for k in range(7)]
    assert [p["max_new_tokens"] for p in engine.requests[-1]["sampling_params"]] == [7, 7]


def test_an_abort_that_we_did_not_order_is_generated_again(rig):
    """A request that the engine ended by itself, as for a weight update, is generated again."""
    first = []

    def answer(prompt):
        if number_of(prompt) == 1 and len(first) < 1:
            first.append(prompt.rid)
            return make_reply([], "abort", prompt=prompt)
        return right_answer(prompt)

    engine, args, source = rig(answer)
    output = generate_rollout(args, 0, source)
    assert labels(output.samples) == [[str(i)] * 2 for i in range(4)]
    assert (
        all(sample.reward == 1 for group in output.samples for sample in group)
        and len(engine.requests) == 5
    )


def keep_odd(args, samples, **kwargs):
    return DynamicFilterOutput(keep=int(samples[0].label) % 2 == 1, reason="even")


def test_dropped_groups_are_replaced_and_counted(rig):
    """Dropped groups are replaced and counted: for 4 groups without even prompts, prompts 0 to 7
    are used."""
    engine, args, source = rig(
        dynamic_sampling_filter_path=f"{__name__}.keep_odd", over_sampling_batch_size=4
    )
    output = generate_rollout(args, 0, source)
    assert [group[0].label for group in output.samples] == ["1", "3", "5", "7"]
    used = sum(output.dropped.values()) // 2
    assert output.dropped == {"dynamic_filter_even": 2 * used} and used >= 4
    assert output.metrics["rollout/dynamic_filter/drop_even"] == used
    reasons, groups = zip(*output.dropped_groups, strict=True)
    assert set(reasons) == {"dynamic_filter_even"} and labels(groups)[:4] == [
        [str(i)] * 2 for i in (0, 2, 4, 6)
    ]
    assert len(groups) == used and all(
        sample.reward == 1 and sample.response for group in groups for sample in group
    )
    # Groups beyond the batch are served next, whatever was fetched ahead.
    following = generate_rollout(args, 1, source).samples
    assert [group[0].label for group in following][0] in ("9", "8")


def test_a_filter_that_drops_nearly_everything_is_said_while_it_does(rig, caplog):
    """A filter that drops most groups is warned about while it does, because the rollout looks like
    a hanging engine."""
    engine, args, source = rig(
        dynamic_sampling_filter_path=f"{__name__}.keep_sixth", over_sampling_batch_size=4
    )
    with caplog.at_level(logging.WARNING):
        generate_rollout(args, 0, source)
    said = [
        record.getMessage()
        for record in caplog.records
        if "keep_sixth dropped" in record.getMessage()
    ]
    assert (
        len(said) == 2
        and "dropped 8 groups (8 not_a_sixth) and kept" in said[0]
        and "dropped 16 groups" in said[1]
    )


def keep_sixth(args, samples, **kwargs):
    return DynamicFilterOutput(keep=int(samples[0].label) % 6 == 5, reason="not_a_sixth")


def test_a_group_that_is_given_back_is_not_dropped(rig):
    """In order of submission, groups behind the batch's last one are served again and are not
    counted as dropped, whatever the filter returned."""
    engine, args, source = rig(
        engine={"delay": lambda prompt: 0.3 if number_of(prompt) == 1 else 0.0},
        dynamic_sampling_filter_path=f"{__name__}.keep_odd", over_sampling_batch_size=6, rollout_batch_size=1,
    )  # fmt: skip
    output = generate_rollout(args, 0, source)
    assert labels(output.samples) == [["1", "1"]] and output.dropped["dynamic_filter_even"] == 2
    assert [(reason, group[0].label) for reason, group in output.dropped_groups] == [
        ("dynamic_filter_even", "0")
    ]
    assert {"2", "4"} <= {group[0].label for group in source.buffer}


def take_out_first(args, groups):
    for group in groups:
        del group[0]


def replace_by_copies(args, groups):
    import copy

    groups[:] = copy.deepcopy(groups)


def test_samples_that_a_sample_filter_takes_out_are_counted(rig):
    """Samples that a sample filter deletes instead of setting `remove_sample` are counted as
    dropped; copies lose none."""
    engine, args, source = rig(rollout_sample_filter_path=f"{__name__}.take_out_first")
    output = generate_rollout(args, 0, source)
    assert labels(output.samples) == [["0"], ["1"], ["2"], ["3"]] and output.dropped == {
        "sample_filter": 4
    }
    assert [(reason, group[0].index) for reason, group in output.dropped_groups] == [
        ("sample_filter", i) for i in (0, 2, 4, 6)
    ]
    args.rollout_sample_filter_path = f"{__name__}.replace_by_copies"
    output = generate_rollout(args, 1, source)
    assert output.dropped == {} and output.dropped_groups == [] and len(labels(output.samples)) == 4


def test_only_valid_responses_see_the_reward_function(rig):
    """The reward function is called for valid responses only; an empty one is invalid and keeps
    reward None."""
    engine, args, source = rig(
        lambda prompt: [] if number_of(prompt) == 0 else right_answer(prompt)
    )
    samples = [sample for group in generate_rollout(args, 0, source).samples for sample in group]
    assert [sample.reward for sample in samples] == [None, None, 1, 1, 1, 1, 1, 1]
    assert [sample.invalid_reason for sample in samples[:2]] == ["empty", "empty"] and samples[
        2
    ].valid


def test_the_raw_snapshot_has_the_text_that_the_engine_sent(rig, tmp_path):
    """Rewards read the decoded tokens, and the snapshot keeps the engine's text, so that `align`
    finds a character that the detokenizer lost."""
    from slime.commands.gate import main, read_snapshot
    from slime.gate import Gate, GateConfig
    from slime.gate.snapshots import SnapshotWriter

    wrong = {"1": "I", "2": " 2\n"}  # of prompt 2 only outer whitespace differs, which is no fault
    engine, args, source = rig(gate_compare_text="off")
    engine.decode = lambda ids: wrong.get(decode(ids), decode(ids))
    samples = [sample for group in generate_rollout(args, 0, source).samples for sample in group]
    assert [sample.response for sample in samples[::2]] == ["0", "1", "2", "3"] and all(
        sample.reward == 1 for sample in samples
    )
    gate = Gate(GateConfig(), snapshots=SnapshotWriter(tmp_path))
    gate.run(samples, 0)
    gate.close()
    raw = read_snapshot(tmp_path / "raw_000000.parquet")
    assert [sample.response for sample in raw[::2]] == ["0", "I", " 2\n", "3"]
    assert [sample.metadata for sample in raw] == [{}] * 8 and samples[2].metadata == {
        "engine_text": "I"
    }
    found = tools.find_mismatches(raw, Codec(TOKENIZER))
    assert [(m.position, m.decoded, m.text) for m in found] == [(2, "1", "I"), (3, "1", "I")]
    assert [m.position for m in tools.find_mismatches(samples, Codec(TOKENIZER))] == [2, 3]
    assert (
        main(["align", str(tmp_path / "raw_000000.parquet"), "--hf-checkpoint", args.hf_checkpoint])
        == 1
    )


async def failing_reward(args, sample, **kwargs):
    if sample.index == 3:
        raise KeyError("no such answer")
    return 2.5


async def group_reward(args, samples, **kwargs):
    return [10.0 * samples[0].group_index + member for member in range(len(samples))]


def test_a_failing_reward_call_marks_its_sample_and_not_the_run(rig):
    """A failing reward call fails its sample, with reward None and the reason, and not the run."""
    engine, args, source = rig(custom_rm_path=f"{__name__}.failing_reward", max_failed_ratio=0.2)
    samples = [sample for group in generate_rollout(args, 0, source).samples for sample in group]
    assert [sample.reward for sample in samples] == [2.5, 2.5, 2.5, None, 2.5, 2.5, 2.5, 2.5]
    assert samples[3].status is Sample.Status.FAILED and samples[3].metadata[
        "reward_error"
    ].startswith("KeyError: 'no such answer' (test_rollout_over_http.py:")


def test_group_rewards_are_asked_once_per_group_with_its_members(rig):
    """A group reward is called once per group with its members in order: reward = 10 * prompt +
    member."""
    engine, args, source = rig(custom_rm_path=f"{__name__}.group_reward", group_rm=True)
    rewards = [
        [sample.reward for sample in group] for group in generate_rollout(args, 0, source).samples
    ]
    assert rewards == [[0.0, 1.0], [10.0, 11.0], [20.0, 21.0], [30.0, 31.0]]


def test_a_prompt_at_the_context_limit_is_not_sent(rig):
    """A prompt that leaves 0 tokens is truncated without a request; with room for one token, one is
    requested."""
    # "p0=" has 3 tokens
    engine, args, source = rig(rollout_max_context_len=3, prompts=4, rollout_batch_size=1)
    (group,) = generate_rollout(args, 0, source).samples
    assert engine.requests == [] and all(
        sample.status is Sample.Status.TRUNCATED for sample in group
    )
    engine, args, source = rig(rollout_max_context_len=4, prompts=4, rollout_batch_size=1)
    generate_rollout(args, 0, source)
    assert [params["max_new_tokens"] for params in engine.requests[0]["sampling_params"]] == [1, 1]


def test_requests_in_flight_stay_within_the_concurrency(rig):
    """No more requests are in flight than the concurrency allows."""
    for mode in ("on", "off"):
        engine, args, source = rig(
            engine={"delay": lambda prompt: 0.02}, sglang_server_concurrency=4, rollout_group_requests=mode, rollout_batch_size=8
        )  # fmt: skip
        generate_rollout(args, 0, source)
        assert engine.most_running == 4


def test_groups_spread_over_engines_by_their_number_and_stay_together(rig, tmp_path):
    """A group goes to one engine, for its prefix cache, chosen by the group's number alone."""
    one, args, source = rig()
    with FakeEngine(right_answer, decode=decode) as two, fresh_rollout_state(one.url, two.url):
        generate_rollout(args, 0, source)
        asked = [
            [TOKENIZER.decode(request["input_ids"][0]) for request in e.requests]
            for e in (one, two)
        ]
    assert [sorted(prompts) for prompts in asked] == [["p0=", "p2="], ["p1=", "p3="]]


async def fan_out(args, sample, sampling_params, evaluation=False):
    import copy

    parts = []
    for part in range(2):
        one = copy.deepcopy(sample)
        one.rollout_id = sample.index
        one.response, one.status = f"{sample.label}", Sample.Status.COMPLETED
        one.tokens = [1]
        one.append_response_tokens(tokens=[10 + part], log_probs=[-0.5])
        parts.append(one)
    return parts


def rename(args, sample, *, rollout_id=None, evaluation=False):
    sample.metadata["seen_in"] = rollout_id


def test_a_custom_generate_function_may_return_several_samples_and_hooks_see_each(rig):
    """A generate function may return several samples per member; they share its rollout id, and
    hook and scorer see each."""
    engine, args, source = rig(
        custom_generate_function_path=f"{__name__}.fan_out", rollout_sample_hook_path=[f"{__name__}.rename"],
        gate_text_source="engine",
    )  # fmt: skip
    output = generate_rollout(args, 5, source)
    assert [len(member) for group in output.samples for member in group] == [2] * 8
    parts = [part for group in output.samples for member in group for part in member]
    assert [part.rollout_id for part in parts] == [index for index in range(8) for _ in range(2)]
    assert (
        all(part.reward == 1 and part.metadata["seen_in"] == 5 for part in parts)
        and engine.requests == []
    )


@pytest.mark.parametrize(("events", "kept"), [(2, 2), (0, None)])
def test_a_stream_that_breaks_off_keeps_the_tokens_that_arrived(events, kept, model):
    """A connection lost in the middle of a stream keeps the tokens that arrived."""
    from aiohttp import web

    from slime.rollout.sglang_streaming_rollout import generate_streaming

    async def scenario():
        async def stream(request):
            response = web.StreamResponse()
            await response.prepare(request)
            for count in range(1, events + 1):
                reply = make_reply(list(range(5, 5 + count)))
                reply["meta_info"]["finish_reason"] = None
                await response.write(b"data: " + json.dumps(reply).encode() + b"\n\n")
            request.transport.close()
            return response

        app = web.Application()
        app.router.add_post("/generate", stream)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        args = rollout_args(hf_checkpoint=model)
        sample = Sample(prompt="p1=", label="1")
        try:
            with fresh_rollout_state(f"http://127.0.0.1:{runner.addresses[0][1]}"):
                return await generate_streaming(
                    args, sample, dict(sglang_rollout.GenerateState(args).sampling_params)
                )
        finally:
            await runner.cleanup()

    if kept is None:
        with pytest.raises(EngineError):
            run(scenario())
        return
    sample = run(scenario())
    assert sample.response_length == kept and sample.status is Sample.Status.ABORTED
    assert sample.rollout_log_probs == [-0.125, -0.25]


def test_one_sample_alone_raises_what_went_wrong(rig):
    """`generate` and `generate_and_rm`, called by custom code, raise the error."""
    engine, args, source = rig()
    engine.faults.append(Fault(status=404))
    params = dict(sglang_rollout.GenerateState(args).sampling_params)
    sample = Sample(prompt="p1=", label="1")
    with pytest.raises(EngineError, match="404"):
        run(sglang_rollout.generate_and_rm(args, sample, dict(params)))
    done = run(sglang_rollout.generate_and_rm(args, sample, params))
    assert done is sample and done.reward == 1 and params["max_new_tokens"] == 8
    with pytest.raises(AssertionError, match="completed"):
        run(sglang_rollout.generate(args, sample, params))
    assert get_model_url(args, "any", "/health") == engine.url + "/health"


def test_without_any_limit_or_engine_the_options_to_give_are_named(rig):
    """A missing length limit or engine is an error with the options to give, before anything is
    sent."""
    engine, args, source = rig(rollout_max_response_len=None)
    with pytest.raises(ConfigError, match="--rollout-max-response-len"):
        generate_rollout(args, 0, source)
    with fresh_rollout_state():
        with pytest.raises(ConfigError, match="no engine"):
            get_model_url(args, "m")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
