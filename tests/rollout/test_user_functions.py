"""Functions of users: they may edit what they are given, their errors show the stack, and their
time is limited."""

import asyncio
import contextlib
import copy
import logging
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support.chat_templates import bpe_tokenizer
from support.fake_engine import FakeEngine
from support.rollout_args import fresh_rollout_state, rollout_args, tokenizer_folder, write_prompts

from slime.data.sample import Sample
from slime.exceptions import RolloutDataError
from slime.plugins import failures, watched_calls
from slime.plugins.watched_calls import (
    WATCH_INTERVAL_S,
    CallTimeout,
    CallWatch,
    Step,
    call_within,
    last_words,
)
from slime.prompts.data_source import RolloutDataSourceWithBuffer, clone_for_group
from slime.rollout import sglang_rollout
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.async_utils import run

NUM_GPUS = 0


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def rig(tmp_path, model):
    """rig(answer, **args) -> (engine, args, data source), cleaned up afterwards."""
    failures._said.clear()
    with contextlib.ExitStack() as stack:

        def build(answer=lambda prompt: [5, 4], *, engine=None, **overrides):
            remote = stack.enter_context(FakeEngine(answer, **(engine or {})))
            stack.enter_context(fresh_rollout_state(remote.url))
            defaults = {
                "hf_checkpoint": model,
                "prompt_data": write_prompts(tmp_path / "p.jsonl", 20),
                "rm_type": "random",
            }
            args = rollout_args(**{**defaults, "max_failed_ratio": 1.0, **overrides})
            return remote, args, RolloutDataSourceWithBuffer(args)

        yield build


def samples_of(output):
    return [sample for group in output.samples for sample in group]


async def three_turns(args, sample, sampling_params):
    first = await sglang_rollout.generate(args, sample, sampling_params)
    return [first, copy.deepcopy(first), copy.deepcopy(first)]


async def fails_for_the_sixth(args, sample, **kwargs):
    return 1 / (sample.index - 5)


@pytest.mark.parametrize("evaluation", [False, True])
def test_an_attempt_of_several_samples_fails_once(rig, evaluation, tmp_path):
    """A failed attempt counts once in the failed share: one of eight with three samples is 0.125,
    and not 3 of 8."""
    options = {
        "custom_generate_function_path": f"{__name__}.three_turns",
        "custom_rm_path": f"{__name__}.fails_for_the_sixth",
    }
    options |= {
        "eval_prompt_data": ["one", write_prompts(tmp_path / "eval.jsonl", 8)],
        "max_failed_ratio": 0.125,
    }
    engine, args, source = rig(**options)
    output = generate_rollout(args, 0, source, evaluation=evaluation)
    assert (
        output.metrics["eval/one/failed_samples" if evaluation else "rollout/failed_samples"] == 3
    )
    args.max_failed_ratio = 0.12
    with pytest.raises(
        RolloutDataError, match="3 samples, 12.5 % of this rollout's 8 attempts, failed, more than"
    ):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args), evaluation=evaluation)


def test_failures_of_dropped_groups_are_a_share_of_all_that_was_sampled():
    """Failures are a share of everything sampled: 5 of 100 are 5 %, though a filter kept ten."""
    failed = Sample(index=0, status=Sample.Status.FAILED)
    counter = failures.FailureCounter(total=10, max_ratio=0.1)
    for _ in range(5):
        counter.add([[Sample()]] * 19 + [[failed]])
    assert counter.metrics() == {"rollout/failed_samples": 5, "rollout/failed_ratio": 0.05}
    with pytest.raises(
        RolloutDataError, match="11 of 106 samples of this rollout failed, more than"
    ):
        counter.add([[failed]] * 6)


# --- what they are given --------------------------------------------------------------------------


async def generate_with_one_more_stop(args, sample, sampling_params):
    sampling_params["stop"].append(f"mine-{sample.index}")
    sampling_params["stop_token_ids"].append(sample.index)
    return await sglang_rollout.generate(args, sample, sampling_params)


@pytest.mark.parametrize("evaluation", [False, True])
def test_sampling_parameters_are_each_samples_own(rig, evaluation, tmp_path):
    """A generate function that appends a stop string changes it for its own sample only."""
    engine, args, source = rig(
        custom_generate_function_path=f"{__name__}.generate_with_one_more_stop", rollout_stop=["###"], rollout_stop_token_ids=[3],
        eval_prompt_data=["one", write_prompts(tmp_path / "eval.jsonl", 4)],
    )  # fmt: skip
    generate_rollout(args, 0, source, evaluation=evaluation)
    sent = [body["sampling_params"] for body in engine.requests]
    assert len(sent) == (4 if evaluation else 8)
    assert all(len(params["stop"]) == len(params["stop_token_ids"]) == 2 for params in sent)
    assert args.rollout_stop == ["###"] and args.rollout_stop_token_ids == [3]
    state = sglang_rollout.GenerateState(args)
    state.sampling_params["stop"].append("x")  # a rollout function of a user's own gets these
    assert args.rollout_stop == ["###"]


def test_members_of_a_group_share_no_container():
    """A reward function that pops from a label changes neither the other members' labels nor the
    next epoch's."""
    prompt = Sample(
        prompt=[{"role": "user"}],
        label={"answers": [1, 2]},
        metadata={"a": [1]},
        apply_chat_template_kwargs={"k": {"x": 1}},
    )
    first, second = clone_for_group(prompt), clone_for_group(prompt)
    first.label["answers"].pop()
    first.prompt[0]["role"] = "tool"
    first.metadata["a"].append(2)
    first.apply_chat_template_kwargs["k"]["x"] = 2
    assert second == clone_for_group(prompt) == prompt


def test_a_continued_response_of_a_custom_function_is_scored_by_the_text_of_all_its_ids(
    rig, tmp_path
):
    """A custom function's response that was aborted between the bytes of a character has the text
    of all its ids."""
    tokenizer = bpe_tokenizer("{{ messages }}")
    tokenizer.save_pretrained(tmp_path / "bpe")
    character = tokenizer("你", add_special_tokens=False)["input_ids"]
    assert len(character) == 3
    engine, args, source = rig(
        lambda prompt: character if len(prompt.input_ids) == 1 else character[2:],
        engine={"delay": lambda prompt: 5.0, "partial": lambda prompt: 2, "decode": tokenizer.decode},
        hf_checkpoint=str(tmp_path / "bpe"), rm_type="exact_match", partial_rollout=True,
        custom_generate_function_path="slime.rollout.sglang_rollout.generate",
    )  # fmt: skip
    state = sglang_rollout.GenerateState(args)
    sample = Sample(index=0, prompt="p", label="你")
    params = {**state.sampling_params, "skip_special_tokens": True}

    async def aborted_then_continued():
        task = asyncio.ensure_future(sglang_rollout.generate(args, sample, dict(params)))
        while not engine.running:
            await asyncio.sleep(0.01)
        await sglang_rollout.abort(args, 0)
        await task
        assert sample.status is Sample.Status.ABORTED and sample.response == "\ufffd"
        state.aborted = False
        engine.delay = lambda prompt: 0.0
        return await sglang_rollout.generate_and_rm(args, sample, dict(params))

    done = run(aborted_then_continued())
    assert done.tokens[-3:] == character and done.response == "你" and done.reward == 1


async def two_turns(args, sample, sampling_params):
    """A turn, what an environment answers (5 ids), and another turn."""
    await sglang_rollout.generate(args, sample, dict(sampling_params))
    if sample.status is Sample.Status.COMPLETED:
        sample.append_response_tokens(tokens=[9] * 5, trainable=False, text="00000")
        sample.status = Sample.Status.PENDING
        await sglang_rollout.generate(args, sample, dict(sampling_params))
    return sample


@pytest.mark.parametrize(
    ("limits", "length", "status", "requests"),
    [
        ({"rollout_max_response_len": 8}, 6, Sample.Status.TRUNCATED, 1),
        ({"rollout_max_response_len": 10}, 6, Sample.Status.TRUNCATED, 1),
        ({"rollout_max_response_len": 11}, 11, Sample.Status.TRUNCATED, 1),
        ({"rollout_max_response_len": 13}, 13, Sample.Status.TRUNCATED, 2),
        ({"rollout_max_response_len": 17}, 17, Sample.Status.COMPLETED, 2),
        (
            {"rollout_max_response_len": 99, "rollout_max_context_len": 12},
            6,
            Sample.Status.TRUNCATED,
            1,
        ),
    ],
)
def test_no_response_of_several_turns_is_longer_than_its_limit(
    rig, limits, length, status, requests
):
    """A response of several turns stays within its limit: what does not fit behind a turn is left
    out."""
    engine, args, source = rig(
        lambda prompt: [5] * 6, custom_generate_function_path=f"{__name__}.two_turns", rollout_batch_size=1, n_samples_per_prompt=1,
        gate_keep_truncated=True, engine={"decode": lambda ids: "1" * len(ids)}, **limits,
    )  # fmt: skip
    ((sample,),) = generate_rollout(args, 0, source).samples
    assert (sample.response_length, sample.status, len(engine.requests)) == (
        length,
        status,
        requests,
    )
    assert (
        len(sample.loss_mask) == len(sample.rollout_log_probs) == length
        and len(sample.tokens) == 3 + length
    )
    assert sum(sample.loss_mask) == length - (5 if length > 6 else 0)


# --- what they raise ------------------------------------------------------------------------------


async def reward_with_a_slip(args, sample, **kwargs):
    return {"right": 1}["wrong"]


async def generate_with_a_slip(args, sample, sampling_params):
    return {"right": 1}["wrong"]


def hook_with_a_slip(args, sample, **kwargs):
    return {"right": 1}["wrong"]


async def group_reward_with_a_slip(args, samples, **kwargs):
    return {"right": 1}["wrong"]


@pytest.mark.parametrize(
    ("options", "stage", "function"),
    [
        ({"custom_rm_path": "reward_with_a_slip"}, "reward", "reward_with_a_slip"),
        (
            {"custom_rm_path": "group_reward_with_a_slip", "group_rm": True},
            "reward",
            "group_reward_with_a_slip",
        ),
        (
            {"custom_generate_function_path": "generate_with_a_slip"},
            "generation",
            "generate_with_a_slip",
        ),
        ({"rollout_sample_hook_path": ["hook_with_a_slip"]}, "sample hook", "hook_with_a_slip"),
        (
            {"rollout_sample_hook_path": ["hook_with_a_slip"], "rollout_group_requests": "off"},
            "generation",
            "hook_with_a_slip",
        ),
    ],
)
def test_an_exception_shows_its_stack_once(rig, caplog, options, stage, function):
    """Eight samples that fail for one cause log one stack with file, line and function, and each
    reason names file and line."""
    here = {
        name: [f"{__name__}.{one}" for one in value] if isinstance(value, list) else value
        for name, value in options.items()
    }
    here = {
        name: f"{__name__}.{value}" if name.startswith("custom") else value
        for name, value in here.items()
    }
    engine, args, source = rig(**here)
    with caplog.at_level(logging.WARNING):
        failed = samples_of(generate_rollout(args, 0, source))
    assert len(failed) == 8 and all(sample.status is Sample.Status.FAILED for sample in failed)
    reasons = {sample.metadata["failure"] for sample in failed}
    assert len(reasons) == 1 and reasons.pop().startswith(
        f"{stage}: KeyError: 'wrong' (test_user_functions.py:"
    )
    stacks = [record for record in caplog.records if record.exc_info]
    assert (
        len(stacks) == 1
        and f"in {function}" in caplog.text
        and "test_user_functions.py" in caplog.text
    )


def test_distinct_causes_each_show_their_stack(caplog):
    """Two lines that raise are two causes with a stack each, even with the same message."""
    failures._said.clear()
    with caplog.at_level(logging.WARNING):
        for text in ("a", "b"):
            for slip in (lambda text=text: {}[text], lambda text=text: [][len(text)]):
                try:
                    slip()
                except LookupError as error:
                    failures.log_cause("reward", Sample(index=1), error)
    assert [record.getMessage().split(" raised ")[1] for record in caplog.records] == [
        "KeyError; the stack, once for this cause:", "IndexError; the stack, once for this cause:",
    ]  # fmt: skip


# --- they come back -------------------------------------------------------------------------------


async def waits_for_ever_for_odd(args, sample, **kwargs):
    if sample.index % 2:
        await asyncio.Event().wait()
    return 1.0


async def group_waits_for_ever(args, samples, **kwargs):
    await asyncio.Event().wait()


def test_a_reward_that_waits_for_ever_costs_its_sample_only(rig):
    """A reward that never returns fails its sample at the time limit, and the run goes on."""
    engine, args, source = rig(
        custom_rm_path=f"{__name__}.waits_for_ever_for_odd", reward_timeout=0.3
    )
    samples = samples_of(generate_rollout(args, 0, source))
    assert [sample.reward for sample in samples] == [1.0, None] * 4
    assert samples[1].metadata["failure"] == (
        f"reward: the reward function {__name__}.waits_for_ever_for_odd for sample 1 did not "
        "return within --reward-timeout 0.3 s. "
        "Give what it waits for a limit, or raise --reward-timeout."
    )


async def generates_for_ever_for_odd(args, sample, sampling_params):
    if sample.index % 2:
        await asyncio.Event().wait()
    return await sglang_rollout.generate(args, sample, sampling_params)


async def hook_for_ever_for_odd(args, sample):
    if sample.index % 2:
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (
            {"custom_generate_function_path": "generates_for_ever_for_odd"},
            f"the generate function {__name__}.generates_for_ever_for_odd",
        ),
        ({"rollout_sample_hook_path": "hook_for_ever_for_odd"}, "the sample hooks"),
        (
            {"rollout_sample_hook_path": "hook_for_ever_for_odd", "rollout_group_requests": "off"},
            "the sample hooks",
        ),
    ],
)
def test_a_generate_function_or_hook_that_waits_for_ever_costs_its_sample_only(rig, options, what):
    """A generate function or hook that never returns fails its sample at --generate-timeout with a
    reason that names it."""
    named = {
        name: value if value == "off" else f"{__name__}.{value}" for name, value in options.items()
    }
    engine, args, source = rig(generate_timeout=0.3, **named)
    samples = samples_of(generate_rollout(args, 0, source))
    assert [sample.status is Sample.Status.FAILED for sample in samples] == [False, True] * 4
    assert (
        f"{what} for sample 1 did not return within --generate-timeout 0.3 s"
        in samples[1].metadata["failure"]
    )


def test_a_group_reward_that_waits_for_ever_names_its_samples(rig):
    """A group reward that never returns fails the group's samples, and the reason names them."""
    engine, args, source = rig(
        custom_rm_path=f"{__name__}.group_waits_for_ever",
        group_rm=True,
        reward_timeout=0.3,
        rollout_batch_size=1,
    )
    failed = samples_of(generate_rollout(args, 0, source))
    assert all(
        "group_waits_for_ever for samples 0, 1 did not return" in sample.metadata["failure"]
        for sample in failed
    )


RELEASE = threading.Event()


async def blocks_its_loop(args, sample, **kwargs):
    RELEASE.wait(20)
    return 1.0


async def generate_what_was_asked_for(args, sample, sampling_params):
    return args.returned


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "NoneType ('None')"),
        ([], "an empty list"),
        ("abc", "str ('abc')"),
        ([Sample(), None], "NoneType"),
    ],
)
def test_a_generate_function_that_returns_no_sample_is_named_with_what_it_returned(returned, said):
    """A generate function that returns None, a text or an empty list is an error that names it and
    what it returned."""
    path = f"{__name__}.generate_what_was_asked_for"
    args = rollout_args(custom_generate_function_path=path)
    args.returned = returned
    with pytest.raises(TypeError) as caught:
        run(sglang_rollout._call_generate(args, Sample(index=3), {}, False))
    assert f"the generate function {path} returned {said}" in str(
        caught.value
    ) and "Return the sample or a non-empty list" in str(caught.value)


@pytest.mark.parametrize("fully_async", [False, True])
def test_a_reward_that_blocks_the_event_loop_ends_the_run_with_function_sample_and_line(
    rig, fully_async
):
    """A reward that blocks the event loop ends the run with function, sample and line; later calls
    of the process get a new loop."""
    from slime.rollout import fully_async_rollout

    RELEASE.clear()
    engine, args, source = rig(custom_rm_path=f"{__name__}.blocks_its_loop", reward_timeout=0.5)
    rollout = fully_async_rollout.generate_rollout_fully_async if fully_async else generate_rollout
    started = time.monotonic()
    try:
        with pytest.raises(CallTimeout) as caught:
            rollout(args, 0, source)
        assert time.monotonic() - started < 8
        said = str(caught.value)
        assert (
            f"the reward function {__name__}.blocks_its_loop for sample 0 has held its event loop"
            in said
        )
        assert (
            "more than --reward-timeout 0.5 allows" in said
            and "in blocks_its_loop" in said
            and "test_user_functions.py:" in said
        )
        assert run(asyncio.sleep(0, "alive")) == "alive"
    finally:
        RELEASE.set()
        fully_async_rollout.stop_global_worker()


def test_a_step_that_was_reported_is_not_reported_to_the_next_caller():
    """A blocked step that was reported is not reported again to a later rollout of the process."""
    watch = CallWatch()
    release = threading.Event()

    def blocks():
        watch.begin(Step("f", "--o", 0.1, time.monotonic()))
        release.wait(20)
        watch.end()

    thread = threading.Thread(target=blocks)
    thread.start()
    deadline = time.monotonic() + 20
    with pytest.raises(CallTimeout):
        while time.monotonic() < deadline:
            watch.raise_overdue()
            time.sleep(0.05)
    time.sleep(2.5 * WATCH_INTERVAL_S)  # still blocked
    watch.raise_overdue()
    release.set()
    thread.join()


def test_calls_that_take_turns_do_not_use_up_each_others_time():
    """Each call's limit counts its own time: twelve calls of 0.1 s on one loop all pass a limit of
    0.5 s."""

    async def computes():
        await asyncio.sleep(0)
        time.sleep(0.1)
        await asyncio.sleep(0.01)
        return 1

    async def all_of_them():
        return await asyncio.gather(
            *(call_within(computes(), what="f", option="--o", timeout_s=0.5) for _ in range(12))
        )

    assert run(all_of_them()) == [1] * 12


def test_a_limited_call_hands_on_results_errors_and_cancellation():
    """A call with a time limit passes on results, errors and cancellation."""

    async def raises():
        await asyncio.sleep(0)
        raise KeyError("mine")

    cancelled = []

    async def notes_cancellation():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def scenario():
        with pytest.raises(KeyError, match="mine"):
            await call_within(raises(), what="f", option="--o", timeout_s=5)
        task = asyncio.ensure_future(
            call_within(notes_cancellation(), what="f", option="--o", timeout_s=5)
        )
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(CallTimeout):
            await call_within(notes_cancellation(), what="f", option="--o", timeout_s=0.05)
        await asyncio.sleep(0.01)
        return await call_within(asyncio.sleep(0.01, "result"), what="f", option="--o", timeout_s=5)

    assert run(scenario()) == "result" and cancelled == [True, True]


def test_a_call_under_a_debugger_is_not_ended():
    """A call is not ended while a debugger stands in it."""
    watch = watched_calls.CallWatch()
    # not overdue to the watching thread
    step = watched_calls.Step("f", "--o", 1.0, time.monotonic() + 3600)
    watch.begin(step)
    watch._note_overdue(threading.get_ident(), step, 2.0)
    with pytest.raises(CallTimeout, match="f has held its event loop for 2 s"):
        watch.raise_overdue()
    code = compile("watch._note_overdue(ident, step, 2.0)", "/usr/lib/python3/pdb.py", "exec")
    watch.begin(step)
    exec(code, {"watch": watch, "ident": threading.get_ident(), "step": step})
    watch.raise_overdue()
    watch.end()


HELD = """
import asyncio, re, sys
from slime.plugins import watched_calls
from slime.utils.async_utils import run
watched_calls.HELD_GRACE_S = 0.5
watched_calls.WATCH.record_in(sys.argv[1])

async def matches_for_ever():
    re.match(r"(a+)+$", "a" * 60 + "b")

run(watched_calls.call_within(matches_for_ever(), what="the reward function mine.f for sample 7", option="--reward-timeout", timeout_s=0.5))
"""


def test_a_call_that_holds_the_interpreter_ends_its_process_and_leaves_its_name(tmp_path):
    """A call that holds the interpreter, such as a backtracking regular expression, ends its
    process, and the driver reports function, sample and stack."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(HELD), str(tmp_path)],
        timeout=60,
        check=False,
        capture_output=True,
    )
    assert done.returncode == 1
    said = last_words(tmp_path)
    assert said.startswith(
        "the reward function mine.f for sample 7 kept the interpreter to itself for more than "
        "--reward-timeout 0.5 s"
    )
    (stacks,) = tmp_path.glob("*.stacks")
    assert "in matches_for_ever" in stacks.read_text() and str(stacks) in said
    watched_calls.CallWatch().record_in(tmp_path)  # the next run in this folder
    assert last_words(tmp_path) is None and last_words(None) is None


def test_a_distilled_policy_is_evaluated_by_its_reward_type(rig, tmp_path):
    """In on-policy distillation evaluation scores with --rm-type and does not ask the teacher,
    whose reply is no score."""
    engine, args, source = rig(
        lambda prompt: [5, 4], custom_rm_path="slime.rollout.on_policy_distillation.reward_func", rm_url="http://127.0.0.1:9",
        rm_type="exact_match", eval_prompt_data=["one", write_prompts(tmp_path / "eval.jsonl", 4)], engine={"decode": lambda ids: "2"},
    )  # fmt: skip
    output = generate_rollout(args, 0, None, evaluation=True)
    assert output.data["one"]["rewards"] == [0, 0, 1, 0] and output.metrics == {
        "eval/one/failed_samples": 0
    }


def test_the_report_of_a_distilled_run_does_not_ask_for_rewards_that_are_zero_by_construction():
    """The report of a distilled run does not call a constant reward a problem."""
    from slime.harness.report import checks_for

    assert checks_for(rollout_args()).reward
    path = "slime.rollout.on_policy_distillation.post_process_rewards"
    assert not checks_for(rollout_args(custom_reward_post_process_path=path)).reward


def test_functions_with_a_limit_of_their_own_keep_it():
    """A teacher's call is bounded by --rm-timeout and not by the general limit, because its queue
    may be long."""
    from slime.rollout.on_policy_distillation import reward_func

    assert reward_func.bounds_itself


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
