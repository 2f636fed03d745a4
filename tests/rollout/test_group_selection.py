"""Which groups are kept, for both rollout functions: filters, aborts, fan-out, and when a rollout
that can keep nothing ends."""

import contextlib
import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support.fake_engine import FakeEngine, make_reply
from support.options import write_run_inputs
from support.rollout_args import fresh_rollout_state, rollout_args, tokenizer_folder, write_prompts
from support.tiny_models import make_char_tokenizer

from slime.data.sample import Sample
from slime.data.structure import iter_samples
from slime.exceptions import ConfigError, RolloutDataError
from slime.prompts.data_source import RolloutDataSourceWithBuffer
from slime.rollout import fully_async_rollout as fully_async
from slime.rollout import sglang_rollout
from slime.rollout.filter_hub.base_types import DynamicFilterOutput, call_dynamic_filter
from slime.rollout.group_selection import EngineAborts
from slime.rollout.sglang_rollout import GenerateState
from slime.rollout.turns import fork_sample
from slime.utils.arguments import parse_args

NUM_GPUS = 0
TOKENIZER = make_char_tokenizer()
END = TOKENIZER.eos_token_id
SYNCHRONOUS, FULLY_ASYNC = sglang_rollout.generate_rollout, fully_async.generate_rollout_fully_async
BOTH = pytest.mark.parametrize(
    "rollout", [SYNCHRONOUS, FULLY_ASYNC], ids=["synchronous", "fully_async"]
)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def rig(tmp_path, model):
    """rig(answer, **args) -> (engine, args, data source), cleaned up afterwards."""
    with contextlib.ExitStack() as stack:
        stack.callback(fully_async.stop_global_worker)

        def build(
            answer=None,
            *,
            prompts=100,
            engine=None,
            source=RolloutDataSourceWithBuffer,
            **overrides,
        ):
            remote = stack.enter_context(
                FakeEngine(answer or right_answer, decode=decode, **(engine or {}))
            )
            stack.enter_context(fresh_rollout_state(remote.url))
            args = rollout_args(
                **{
                    "hf_checkpoint": model,
                    "prompt_data": write_prompts(tmp_path / "p.jsonl", prompts),
                    "rollout_skip_special_tokens": True,
                    **overrides,
                }
            )
            return remote, args, source(args)

        yield build


def number_of(prompt):
    return int(TOKENIZER.decode(prompt.input_ids)[1:].split("=")[0])


def right_answer(prompt):
    return [*TOKENIZER(str(number_of(prompt)))["input_ids"], END]


def decode(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=True)


def labels(groups):
    return [next(iter_samples(group)).label for group in groups]


# --- one meaning of the filters -------------------------------------------------------------------


def keep_odd(args, samples, **kwargs):
    return DynamicFilterOutput(keep=int(samples[0].label) % 2 == 1, reason="even")


def remove_first(args, groups):
    for group in groups:
        group[0].remove_sample = True


SEEN = []


def see_all(args, all_groups, data_source):
    SEEN.extend(labels(all_groups))


@BOTH
def test_filters_and_hooks_of_groups_mean_the_same_in_both_rollout_functions(rig, rollout):
    """In both rollout functions only odd prompts are trained, the filtered even ones are replaced
    and counted, and the hook sees every group."""
    SEEN.clear()
    engine, args, source = rig(
        dynamic_sampling_filter_path=f"{__name__}.keep_odd", rollout_sample_filter_path=f"{__name__}.remove_first",
        rollout_all_samples_process_path=f"{__name__}.see_all",
    )  # fmt: skip
    output = rollout(args, 0, source)
    kept = labels(output.samples)
    assert len(kept) == 4 and all(int(label) % 2 == 1 for label in kept)
    assert all(
        [sample.remove_sample for sample in group] == [True, False] for group in output.samples
    )
    even = labels(group for _, group in output.dropped_groups)
    assert even and all(int(label) % 2 == 0 for label in even)
    assert output.dropped == {"dynamic_filter_even": 2 * len(even)}
    assert output.metrics["rollout/dynamic_filter/drop_even"] == len(even)
    assert {*kept, *even} <= set(SEEN)


@BOTH
def test_what_a_filter_dropped_is_used_up_in_the_data_position(rig, rollout, tmp_path):
    """After a resume neither the trained nor the dropped prompts are served again."""
    engine, args, source = rig(
        dynamic_sampling_filter_path=f"{__name__}.keep_odd", save=str(tmp_path / "run")
    )
    output = rollout(args, 0, source)
    fully_async.stop_global_worker()
    used = {
        group[0].group_index
        for group in [*output.samples, *(group for _, group in output.dropped_groups)]
    }
    untrained = {origin["group_index"] for origin in source.state_dict(0)["untrained"]}
    assert len(used) >= 7 and untrained == set(range(source.sample_group_index)) - used


def late_all(args, samples, **kwargs):
    return DynamicFilterOutput(keep=False, reason="late", keep_when_insufficient=True)


@BOTH
def test_a_filter_may_let_groups_stand_in_where_too_few_remain(rig, rollout):
    """Where too few groups pass, dropped ones fill the batch: of 6 groups without spread 2 are
    dropped and 4 are trained."""
    engine, args, source = rig(
        dynamic_sampling_filter_path=f"{__name__}.late_all", over_sampling_batch_size=6
    )
    output = rollout(args, 0, source)
    assert len(output.samples) == 4 and output.metrics["rollout/dynamic_filter/drop_late"] == 2


def test_the_fully_asynchronous_rollout_keeps_the_over_sampling_batch_in_flight(rig):
    """With --over-sampling-batch-size 7 and a batch of 4, at most 7 and more than 4 groups are at
    the engine."""
    engine, args, source = rig(over_sampling_batch_size=7, engine={"delay": lambda prompt: 0.2})
    FULLY_ASYNC(args, 0, source)
    assert 8 < engine.most_running <= 14


# --- rollouts that can keep nothing ---------------------------------------------------------------


@BOTH
def test_a_filter_that_keeps_nothing_ends_the_run_with_reasons_and_examples(rig, rollout, caplog):
    """Where the filter drops every group, the run ends at one dropped group more than allowed, with
    reasons and examples."""
    engine, args, source = rig(
        dynamic_sampling_filter_path="slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
        max_dropped_groups=8,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING), pytest.raises(RolloutDataError) as caught:
        rollout(args, 3, source)
    said = str(caught.value)
    assert (
        "rollout 3" in said
        and "dropped 9 groups (9 zero_std_1" in said
        and "kept 0 of the 4" in said
    )
    assert (
        "--max-dropped-groups 8" in said
        and "has the rewards [1, 1]" in said
        and "prompt 'p" in said
    )
    assert "dropped 8 groups" in caplog.text


@BOTH
def test_without_the_option_a_filter_may_drop_twenty_batches(rig, rollout):
    """Without the option a filter may drop 20 batches: with a batch of 1 the 21st dropped group
    ends the run."""
    engine, args, source = rig(
        dynamic_sampling_filter_path=f"{__name__}.keep_none", rollout_batch_size=1
    )
    with pytest.raises(
        RolloutDataError, match=r"dropped 21 groups \(21 dropped\).*--max-dropped-groups 20 allows"
    ):
        rollout(args, 0, source)


def keep_none(args, samples, **kwargs):
    return False


def test_a_batch_may_need_many_drops_within_the_limit(rig):
    """A batch that is filled within the limit of drops trains; the limit is per rollout."""
    engine, args, source = rig(
        dynamic_sampling_filter_path=f"{__name__}.keep_odd", max_dropped_groups=4
    )
    for rollout_id in range(3):
        assert len(SYNCHRONOUS(args, rollout_id, source).samples) == 4


# --- filters that go wrong ------------------------------------------------------------------------


def forgets_to_return(args, samples, **kwargs):
    DynamicFilterOutput(keep=True)


def returns_text(args, samples, **kwargs):
    return "keep"


def keeps_none(args, samples, **kwargs):
    return DynamicFilterOutput(keep=None)


def looks_up_what_is_not_there(args, *groups):
    return {"right": 1}["wrong"]


async def waits(args, *groups):
    return True


def copies_the_groups(args, groups, *source):
    return [list(group) for group in groups]


def returns_what_it_got(args, groups, *source):
    return groups


def puts_numbers_in(args, groups):
    groups[0][:] = [1, 2]


def puts_a_sample_in(args, groups):
    groups[0] = groups[0][0]


DYNAMIC, AT_THE_END, ALL = (
    "dynamic_sampling_filter_path",
    "rollout_sample_filter_path",
    "rollout_all_samples_process_path",
)
GONE_WRONG = [
    (DYNAMIC, "forgets_to_return", r"called for group \d+ \(prompt 'p\d+=.*rewards \[1, 1\]: it returned None \(NoneType\), where True"),
    (DYNAMIC, "returns_text", r"group \d+ \(.*it returned 'keep' \(str\), where True"),
    (DYNAMIC, "keeps_none", r"group \d+ \(.*it returned DynamicFilterOutput\(keep=None\), where True"),
    (DYNAMIC, "waits", r"group \d+ \(.*it returned <coroutine"),
    (DYNAMIC, "looks_up_what_is_not_there", r"raised KeyError: 'wrong' \(test_group_selection.py:\d+\) for group \d+ \(prompt 'p\d"),
    (AT_THE_END, "looks_up_what_is_not_there", r"raised KeyError: 'wrong' \(test_group_selection.py:\d+\) for the 4 groups of rollout 0"),
    (AT_THE_END, "copies_the_groups", r"returned list \(\[\[Sample.*which nothing reads: set sample.remove_sample in place"),
    (AT_THE_END, "puts_numbers_in", r"left int \(2\) where a group, a list of samples, is needed"),
    (AT_THE_END, "puts_a_sample_in", r"left Sample \(Sample.* where a group"),
    (ALL, "looks_up_what_is_not_there", r"raised KeyError: 'wrong' \(test_group_selection.py:\d+\) for the \d+ groups of rollout 0"),
    (ALL, "copies_the_groups", r"returned list \(\[\[Sample.*which nothing reads: it sees the groups"),
]  # fmt: skip


@BOTH
@pytest.mark.parametrize(
    ("option", "function", "words"),
    GONE_WRONG,
    ids=[f"{option}-{function}" for option, function, _ in GONE_WRONG],
)
@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_filter_that_goes_wrong_is_named_with_its_groups_and_what_it_returned(
    rig, rollout, option, function, words, caplog
):
    """A filter that raises, or returns no verdict, ends the run with its name, its groups and what
    it returned; the stack is logged once."""
    path = f"{__name__}.{function}"
    engine, args, source = rig(rollout_batch_order="submission", **{option: path})
    with pytest.raises(RolloutDataError, match=f"--{option.replace('_', '-')} {path}.*{words}"):
        rollout(args, 0, source)
    stacks = [
        record for record in caplog.records if record.exc_info and record.levelno >= logging.WARNING
    ]
    assert len(stacks) == (1 if function == "looks_up_what_is_not_there" else 0)


def test_what_a_function_in_place_returns_may_be_what_it_was_given(rig):
    """A function that works in place may `return groups`."""
    engine, args, source = rig(
        **{AT_THE_END: f"{__name__}.returns_what_it_got", ALL: f"{__name__}.returns_what_it_got"}
    )
    assert len(SYNCHRONOUS(args, 0, source).samples) == 4


@pytest.mark.parametrize(
    "value",
    [
        True,
        np.bool_(True),
        np.array(True),
        torch.tensor(True),
        1,
        DynamicFilterOutput(keep=torch.tensor(True)),
    ],
)
def test_a_truth_value_of_any_library_is_a_verdict(value):
    assert call_dynamic_filter(lambda: value).keep is True


BUFFERED = {
    "nothing": (lambda args, rollout_id, buffer, n: None, "returned None"),
    "a tuple": (lambda args, rollout_id, buffer, n: tuple(buffer), r"returned tuple \("),
    "samples": (
        lambda args, rollout_id, buffer, n: buffer.pop(),
        "returned a list with Sample .* which is no group",
    ),
    "half a group": (
        lambda args, rollout_id, buffer, n: [buffer.pop()[:1]],
        "returned a list with list .* which is no group",
    ),
    "too many": (
        lambda args, rollout_id, buffer, n: [buffer.pop(), buffer.pop()],
        "returned 2 groups",
    ),
    "without taking them out": (
        lambda args, rollout_id, buffer, n: buffer[:n],
        "returned a group that is still in the buffer",
    ),
    "raises": (
        lambda args, rollout_id, buffer, n: buffer["first"],
        "raised TypeError: .* for a buffer of 2 groups, of which 1 are wanted",
    ),
}


@pytest.mark.parametrize("kind", BUFFERED)
def test_a_buffer_filter_that_goes_wrong_is_named_with_what_it_returned(rig, kind):
    """A buffer filter that returns something wrong is refused with it; a group that stays in the
    buffer would train twice."""
    function, words = BUFFERED[kind]
    engine, args, source = rig(buffer_filter_path="slime.prompts.data_source.pop_first")
    source.add_samples(source.get_samples(2))
    source.buffer_filter = function
    with pytest.raises(
        RolloutDataError, match=f"--buffer-filter-path slime.prompts.data_source.pop_first {words}"
    ):
        source.get_samples(1)


@BOTH
def test_an_engine_that_aborts_everything_ends_the_run(rig, rollout):
    """Each group is tried 1 + --max-engine-aborts times; then its samples have failed with that
    reason, and the run ends."""
    engine, args, source = rig(
        lambda prompt: make_reply([], "abort", prompt=prompt), max_engine_aborts=2
    )
    with pytest.raises(
        RolloutDataError,
        match="aborted it 3 times without a new token, more than --max-engine-aborts 2 allows",
    ):
        rollout(args, 0, source)
    assert len(engine.requests) <= 3 * 12


def test_aborts_that_leave_new_tokens_are_progress():
    """Under partial rollout an abort that added tokens is progress; only a response that does not
    grow counts as stuck."""
    aborts = EngineAborts()
    assert [aborts.note("a", tokens) for tokens in (5, 9, 9, 9, 12)] == [1, 1, 2, 3, 1]
    assert [aborts.note("b", 0) for _ in range(3)] == [1, 2, 3]
    aborts.forget("b")
    assert aborts.note("b", 0) == 1


class Ten(RolloutDataSourceWithBuffer):
    """A data source of the user's own with ten groups and no more."""

    def get_samples(self, num_samples):
        groups = []
        for _ in range(num_samples):
            if self.buffer or self.sample_group_index < 10:
                groups += super().get_samples(1)
        return groups


@BOTH
def test_a_data_source_that_is_at_its_end_ends_the_run(rig, rollout):
    """A data source without enough groups for a batch ends the run with a message: ten groups make
    two batches of four."""
    engine, args, source = rig(source=Ten)
    for rollout_id in range(2):
        assert len(rollout(args, rollout_id, source).samples) == 4
    with pytest.raises(
        RolloutDataError,
        match="rollout 2: the data source has no more prompts; . of 4 groups are kept",
    ):
        rollout(args, 2, source)


def test_a_worker_that_was_stopped_is_not_waited_for(rig, monkeypatch):
    """A rollout whose worker something else has stopped ends with an error and does not wait."""
    engine, args, source = rig(engine={"delay": lambda prompt: 30.0})
    worker = fully_async._get_global_worker(args, source)
    worker.stop()
    monkeypatch.setattr(fully_async, "_get_global_worker", lambda args, buffer: worker)
    with pytest.raises(
        RolloutDataError, match="rollout 0: the asynchronous worker was stopped; 0 of 4"
    ):
        FULLY_ASYNC(args, 0, source)


# --- executions of several samples ----------------------------------------------------------------


async def two_samples(args, sample, sampling_params):
    """An execution of two samples: the answer to the prompt, and a second one that starts from the
    ids 1, 2.
    """
    await sglang_rollout.generate(args, sample, dict(sampling_params))
    if sample.status is Sample.Status.ABORTED:
        return [sample, fork_sample(sample, [1, 2])]
    second = fork_sample(sample, [1, 2])
    if GenerateState(args).aborted:
        second.status = Sample.Status.ABORTED
    else:
        tokens = [*TOKENIZER("8")["input_ids"], END]
        second.append_response_tokens(tokens=tokens, log_probs=[-0.5, -0.5], text="8")
        second.status = Sample.Status.COMPLETED
    return [sample, second]


def as_numbers(member):
    return [
        (sample.index, sample.rollout_id, sample.response_length, sample.reward)
        for sample in member
    ]


def test_executions_of_several_samples_survive_partial_rollout(rig):
    """Finished executions stay as they are, aborted ones of several samples begin again, and each
    is trained once."""
    slow = {3}
    engine, args, source = rig(
        engine={"delay": lambda prompt: 5.0 if number_of(prompt) in slow else 0.3 * number_of(prompt), "partial": lambda prompt: 1},
        custom_generate_function_path=f"{__name__}.two_samples", partial_rollout=True, rollout_batch_size=2,
        over_sampling_batch_size=4, rollout_batch_order="completion",
    )  # fmt: skip
    first = SYNCHRONOUS(args, 0, source)
    assert labels(first.samples) == ["0", "1"] and labels(source.buffer) == ["2", "3"]
    assert all(len(member) == 2 for group in first.samples for member in group)
    assert [type(member) for member in source.buffer[1]] == [Sample, Sample]
    assert all(sample.response_length == 0 for sample in source.buffer[1])
    slow.clear()
    engine.weight_version = "2"
    again = SYNCHRONOUS(args, 1, source)
    assert labels(again.samples) == ["2", "3"]
    for group, index in zip(again.samples, (4, 6), strict=True):
        assert [as_numbers(member) for member in group] == [
            [(i, i, 2, 1), (i, i, 2, 0)] for i in (index, index + 1)
        ]
    assert [sample.weight_versions for sample in iter_samples(again.samples[1])] == [["2"], []] * 2


def test_a_finished_execution_of_several_samples_is_not_generated_again(rig):
    """A group that finished in rollout 0 and was not in its batch is used later with the tokens and
    rewards that it had."""
    engine, args, source = rig(
        custom_generate_function_path=f"{__name__}.two_samples", partial_rollout=True, rollout_batch_size=1,
        over_sampling_batch_size=2, engine={"delay": lambda prompt: 0.4 if number_of(prompt) == 0 else 0.0},
    )  # fmt: skip
    assert labels(SYNCHRONOUS(args, 0, source).samples) == ["0"]
    (waiting,) = source.buffer
    assert all(len(member) == 2 for member in waiting)
    source.load_state_dict({**source.state_dict(0), "rollout_id": 0})  # also over a resume
    sent = len(engine.requests)
    again = SYNCHRONOUS(args, 1, source)
    assert [as_numbers(member) for member in again.samples[0]] == [
        as_numbers(member) for member in waiting
    ]
    assert "p1=" not in {TOKENIZER.decode(body["input_ids"]) for body in engine.requests[sent:]}


@BOTH
@pytest.mark.parametrize("partial", [False, True])
def test_an_engine_that_ends_a_request_of_several_samples_costs_nothing(rig, rollout, partial):
    """An execution of several samples that the engine aborted begins again and is trained whole."""
    ended = []

    def answer(prompt):
        if number_of(prompt) == 1 and not ended:
            ended.append(prompt.rid)
            return make_reply([5], "abort", prompt=prompt)
        return right_answer(prompt)

    engine, args, source = rig(
        answer, custom_generate_function_path=f"{__name__}.two_samples", partial_rollout=partial, rollout_batch_size=2, prompts=2,
    )  # fmt: skip
    output = rollout(args, 0, source)
    groups = [group for group in output.samples if labels([group]) == ["1"]]
    if rollout is SYNCHRONOUS:
        assert labels(output.samples) == ["0", "1"]
    for group in groups:
        assert all([sample.response_length for sample in member] == [2, 2] for member in group)
        assert all(sample.reward is not None for sample in iter_samples(group))


# --- options --------------------------------------------------------------------------------------

FULLY_ASYNC_PATH = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
NONZERO_STD = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            f"--n-samples-per-prompt 1 --dynamic-sampling-filter-path {NONZERO_STD}",
            "--n-samples-per-prompt 1 makes groups of one: it would drop every group",
        ),
        (
            (
                f"--rollout-function-path {FULLY_ASYNC_PATH} --n-samples-per-prompt 1 "
                f"--dynamic-sampling-filter-path {NONZERO_STD}"
            ),
            "it would drop every group",
        ),
        (
            f"--rollout-function-path {FULLY_ASYNC_PATH} --eval-interval 1 --eval-prompt-data a b",
            (
                "Give --eval-function-path slime.rollout.sglang_rollout.generate_rollout, or leave "
                "out "
                "--eval-interval"
            ),
        ),
        (
            (
                "--rollout-function-path slime.rollout.sft_rollout.generate_rollout "
                "--eval-interval 1 "
                "--eval-prompt-data a b"
            ),
            "which slime.rollout.sft_rollout.generate_rollout does not make",
        ),
        (
            (
                "--rollout-function-path slime.rollout.sft_rollout.generate_rollout "
                "--apply-chat-template"
            ),
            "remove --apply-chat-template",
        ),
        (
            f"--rollout-function-path {FULLY_ASYNC_PATH} --rollout-batch-order submission",
            "--rollout-batch-order submission cannot hold with the fully asynchronous rollout",
        ),
        (
            (
                "--custom-rm-path slime.rollout.on_policy_distillation.reward_func --rm-url "
                "http://127.0.0.1:9 --eval-interval 1 --eval-prompt-data a b"
            ),
            "asks the teacher for log-probs. Give --rm-type",
        ),
        ("--max-dropped-groups -1", "--max-dropped-groups must be >= 0, it is -1. Use 0."),
        ("--max-engine-aborts -1", "--max-engine-aborts must be >= 0, it is -1. Use 3."),
        ("--abort-timeout 0", "--abort-timeout must be in (0, 1e9], it is 0.0. Use 60.0."),
    ],
)
def test_what_cannot_end_well_is_refused_at_start(words, message, tmp_path):
    """Combinations of options that would fail after minutes, or never end, are refused at the
    start."""
    given = write_run_inputs(tmp_path)
    if "--custom-rm-path" in words:  # in place of the reward type
        place = given.index("--rm-type")
        given = given[:place] + given[place + 2 :]
    with pytest.raises(ConfigError) as caught:
        parse_args([*given, *words.split()])
    assert message in str(caught.value)


@pytest.mark.parametrize("missing", ["--rollout-max-response-len", "--rm-type"])
def test_the_options_of_the_fully_asynchronous_rollout_are_checked_like_the_others(
    missing, tmp_path
):
    """The options that the fully asynchronous rollout needs are required at parsing."""
    words = [*write_run_inputs(tmp_path), "--rollout-function-path", FULLY_ASYNC_PATH]
    place = words.index(missing)
    with pytest.raises(ConfigError, match=f"{missing} is missing"):
        parse_args(words[:place] + words[place + 2 :])


def test_every_function_that_a_rule_names_exists():
    """Every function that a rule names can be imported."""
    from slime.config.derive import FULLY_ASYNC
    from slime.config.rules import rollout as rules
    from slime.utils.misc import load_function

    for path in (rules.SYNCHRONOUS, FULLY_ASYNC, rules.SUPERVISED, rules.NONZERO_STD):
        assert callable(load_function(path))


def test_the_order_of_the_batch_follows_from_the_rollout_function(tmp_path):
    """By default the batch is in order of submission for the synchronous rollout and of completion
    for the asynchronous one; the option overrides both."""
    words = write_run_inputs(tmp_path)
    assert parse_args(words).rollout_batch_order == "submission"
    assert (
        parse_args([*words, "--rollout-function-path", FULLY_ASYNC_PATH]).rollout_batch_order
        == "completion"
    )
    assert (
        parse_args([*words, "--rollout-batch-order", "completion"]).rollout_batch_order
        == "completion"
    )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
