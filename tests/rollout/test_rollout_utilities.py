"""The small pieces of the rollout side: retries, one loop, loading by name, hooks, filters,
evaluation datasets, plug-in signatures.
"""

import asyncio
import inspect
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support.fake_engine import FakeEngine, Fault
from support.rollout_args import fresh_rollout_state, rollout_args, tokenizer_folder, write_prompts

from slime.data.sample import Sample
from slime.exceptions import ConfigError, EngineError, RolloutDataError
from slime.prompts.eval_config import (
    EvalDatasetConfig,
    build_eval_dataset_configs,
    ensure_dataset_list,
)
from slime.rollout import engine_client
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.evaluation import merge_groups, number_attempts
from slime.rollout.filter_hub.base_types import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.filter_hub.dynamic_sampling_filters import (
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
)
from slime.rollout.group_loop import BatchBuilder
from slime.rollout.sample_hooks import apply_rollout_sample_hooks, set_current_rollout_id
from slime.rollout.scoring import ResponseGate
from slime.rollout.sglang_rollout import generate_rollout
from slime.train import planned_rollouts
from slime.utils import http_utils, misc
from slime.utils.async_utils import get_async_loop, run

NUM_GPUS = 0


# --- edges ----------------------------------------------------------------------------------------


def test_importing_the_rollout_side_is_fast_and_pulls_in_nothing_heavy():
    """Importing the rollout side is fast and loads neither torch nor ray nor transformers nor a
    tracker."""
    modules = "slime.rollout.sglang_rollout slime.rollout.rm_hub slime.prompts.data_source slime.utils.data slime.utils.misc".split()
    code = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\n" + (
        "print([m for m in 'torch ray transformers megatron sglang wandb sympy "
        "pyarrow'.split() if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_driver_of_a_run_starts_without_torch():
    """The driver, which only passes references on, does not pay for torch in time and memory."""
    code = "import sys, slime.train_async, slime.commands.session\n" + (
        "print([m for m in 'torch transformers megatron matplotlib'.split() if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_post_tries_again_after_5xx_and_never_after_4xx(monkeypatch):
    """post retries after 5xx with pauses that grow up to a cap, and never after 4xx."""
    monkeypatch.setattr(http_utils, "FIRST_PAUSE_S", 0.001)
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 3}}
    with FakeEngine() as engine:
        engine.faults += [Fault(status=500), Fault(close=True), Fault(status=502)]
        assert run(http_utils.post(engine.url + "/generate", body))["output_ids"] == [5, 6, 7]
        assert len(engine.requests) == 4
        engine.faults += [Fault(status=422)]
        with pytest.raises(EngineError, match="422") as error:
            run(http_utils.post(engine.url + "/generate", body))
        assert error.value.status == 422 and len(engine.requests) == 5
        engine.faults += [Fault(status=500)] * 3
        with pytest.raises(EngineError, match="500"):
            run(http_utils.post(engine.url + "/generate", body, max_retries=2))
        assert len(engine.requests) == 8
    assert [http_utils.pause_before_try(n) for n in (1, 2, 3, 99)] == [
        0.001,
        0.002,
        0.004,
        http_utils.LONGEST_PAUSE_S,
    ]


@pytest.mark.parametrize(("replies", "seen"), [((503, 500), 3), ((404,), 1), ((500,) * 9, 4)])
def test_get_tries_again_where_post_does(monkeypatch, replies, seen):
    """get retries 5xx, fails after four tries, and fails at once for 4xx."""
    monkeypatch.setattr(http_utils, "FIRST_PAUSE_S", 0.001)
    left, asked = list(replies), []

    async def answer(request):
        asked.append(request.path)
        return web.json_response({"status": "up"}, status=left.pop(0) if left else 200)

    async def ask():
        app = web.Application()
        app.router.add_get("/info", answer)
        server = TestServer(app)
        await server.start_server()
        try:
            return await http_utils.get(str(server.make_url("/info")))
        finally:
            await http_utils.close_session()
            await server.close()

    if len(replies) == 2:
        assert asyncio.run(ask()) == {"status": "up"}
    else:
        with pytest.raises(EngineError, match=str(replies[0])):
            asyncio.run(ask())
    assert asked == ["/info"] * seen


def test_errors_survive_pickling_as_ray_sends_them():
    """Errors keep their type and message through pickling, as Ray sends them."""
    import pickle

    error = pickle.loads(
        pickle.dumps(http_utils.HttpStatusError("POST x was answered with 404", 404, "body"))
    )  # noqa: S301
    assert (str(error), error.status, error.body) == ("POST x was answered with 404", 404, "body")


def test_addresses_and_engine_counts_come_from_the_options():
    """Engines that are set precede the router's address, and that precedes external ones; a retry
    goes to the next engine."""
    with fresh_rollout_state("http://a:1/", "http://b:2"):
        engines = engine_client.get_engines(None)
        assert engines.urls == ("http://a:1", "http://b:2")
        assert [engine_client.choose_url(engines, key) for key in (0, 1, 2, None)] == [
            engines.urls[i] for i in (0, 1, 0, 0)
        ]
    with fresh_rollout_state():
        args = rollout_args(sglang_router_ip="::1", sglang_router_port=9)
        assert engine_client.get_engines(args) == engine_client.Engines(
            ("http://[::1]:9",), is_router=True
        )
        args = rollout_args(rollout_external_engine_addrs=["h:1", "https://g"])
        assert engine_client.get_engines(args).urls == ("http://h:1", "https://g")
    count = http_utils.get_rollout_num_engines
    assert count(types.SimpleNamespace(rollout_num_engines=3)) == 3
    assert count(types.SimpleNamespace(rollout_num_gpus=8, rollout_num_gpus_per_engine=2)) == 4
    assert count(types.SimpleNamespace(rollout_num_gpus=None)) == 0


def test_run_uses_one_loop_gives_errors_back_and_cannot_wait_for_itself():
    """`run` uses one event loop, because an HTTP session belongs to a loop; it raises the
    coroutine's errors and refuses to be called on that loop."""

    async def loop():
        import asyncio

        return asyncio.get_running_loop()

    async def fail():
        raise KeyError("x")

    async def nested():
        return run(loop())

    assert run(loop()) is run(loop()) is get_async_loop()
    with pytest.raises(KeyError):
        run(fail())
    with pytest.raises(RuntimeError, match="await"):
        run(nested())


def test_functions_are_loaded_by_path_and_what_is_missing_is_named():
    """A plug-in path that does not exist is an error that names the missing part, and an error
    inside the plug-in is its own."""
    assert misc.load_function("slime.utils.misc.Box") is misc.Box
    for path, words in (
        ("os", "dotted"),
        ("no_such.f", "no module 'no_such'"),
        ("slime.utils.misc.nope", "has no 'nope'"),
    ):
        with pytest.raises(ConfigError, match=words):
            misc.load_function(path)


def test_small_helpers_do_what_their_names_say():
    """Small helpers with values that upstream's callers rely on."""
    due = misc.should_run_periodic_action
    assert [due(i, 2) for i in range(4)] == [False, True, False, True] and not due(1, None, 1, 2)
    assert (
        due(4, 100, num_rollout=5)
        and due(2, 100, num_rollout_per_epoch=3)
        and not due(3, 100, 3, 9)
    )
    assert misc.group_by([3, 1, 4, 1], key=lambda x: x % 2) == {1: [3, 1, 1], 0: [4]}
    box = misc.Box(7)
    with pytest.raises(AttributeError):
        box.inner = 8
    ids = [1, 2, -3]
    import base64

    raw = np.array(ids, dtype="<i4").tobytes()
    for value in (ids, np.array(ids), raw, base64.b64encode(raw).decode()):
        tensor = misc.decode_int32_meta_array({"b": value}, ["a", "b"])
        assert tensor.tolist() == ids and str(tensor.dtype) == "torch.int32"
    assert misc.decode_int32_meta_array({}, ["a"]) is None
    import torch

    named = [(str(i), torch.zeros(n)) for i, n in enumerate((2, 2, 9, 1))]
    assert [[n for n, _ in chunk] for chunk in misc.chunk_named_params_by_size(named, 20)] == [
        ["0", "1"],
        ["2"],
        ["3"],
    ]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert (
            not http_utils.is_port_available(port) and http_utils.find_available_port(port) != port
        )
    assert http_utils._wrap_ipv6("::1") == "[::1]" and http_utils._wrap_ipv6("h") == "h"

    class One(metaclass=misc.SingletonMeta):
        pass

    first = One()
    assert One() is first
    misc.SingletonMeta.clear_instances(One)
    assert One() is not first


def due_after(num_prompts, *, batch, interval, **options):
    """The rollouts after which an action falls due, as the driver counts them."""
    args = types.SimpleNamespace(**options)
    per_epoch = misc.count_rollouts_per_epoch(num_prompts, batch, num_epoch=args.num_epoch)
    num_rollout, per_epoch = planned_rollouts(args, per_epoch)
    return [
        i
        for i in range(num_rollout)
        if misc.should_run_periodic_action(i, interval, per_epoch, num_rollout)
    ]


@pytest.mark.parametrize(
    ("num_prompts", "options", "expected"),
    [
        (5, {"num_rollout": 3}, [2]),  # fewer prompts than the batch of 8
        (20, {"num_rollout": 7}, [4, 6]),  # an epoch of 2 rollouts is no event of --num-rollout
        (20, {"num_epoch": 3}, [1, 3, 4, 5]),
        (20, {"num_epoch": 3, "num_rollout": 6}, [4, 5]),
    ],
)
def test_epochs_are_events_only_where_they_are_counted(num_prompts, options, expected):
    """With interval 5 an action is due after every 5th and the last rollout with --num-rollout, and
    with --num-epoch at each epoch's end as well."""
    assert (
        due_after(
            num_prompts, batch=8, interval=5, **{"num_rollout": None, "num_epoch": None, **options}
        )
        == expected
    )


def test_an_epoch_without_a_whole_batch_is_refused():
    """--num-epoch 1 with 5 prompts and batches of 8 is refused; it would run no rollout."""
    with pytest.raises(
        ConfigError,
        match=(
            "--num-epoch 1 runs nothing: the 5 prompts do not fill .* Use --rollout-batch-size 5 "
            "or less"
        ),
    ):
        misc.count_rollouts_per_epoch(5, 8, num_epoch=1)
    assert (
        misc.count_rollouts_per_epoch(5, 8, num_epoch=None) == 0
        and misc.count_rollouts_per_epoch(17, 8, num_epoch=1) == 2
    )
    with pytest.raises(ConfigError, match="--num-epoch 2 counts passes over prompts"):
        planned_rollouts(types.SimpleNamespace(num_rollout=None, num_epoch=2), None)


# --- order, filters, hooks ------------------------------------------------------------------------


def test_groups_that_finish_together_are_judged_in_one_pass_and_an_error_reaches_each():
    """Groups that finish together are judged in one pass of the gate, and its error reaches each of
    them."""
    passes = []

    def check(samples):
        passes.append(len(samples))
        if len(samples) == 1:
            raise ValueError("no verdict")
        return [True] * len(samples)

    gate = ResponseGate(check, lambda samples, verdicts: samples)

    async def three_groups():
        await asyncio.gather(*(gate.mark_batched([Sample()] * 2) for _ in range(3)))
        with pytest.raises(ValueError, match="no verdict"):
            await gate.mark_batched([Sample()])

    asyncio.run(three_groups())
    assert passes == [6, 1]


def test_what_lies_behind_the_batch_is_not_used_up_whether_it_had_finished_or_not():
    """Groups behind the batch are served again whether they had finished or not, so that two runs
    draw the same prompts next."""
    builder = BatchBuilder(target=2, in_order=True)
    for number, keep in ((0, True), (3, False), (1, False), (2, True)):
        builder.add(number, [number], keep=keep)
    assert builder.used(builder.batch()) == {0, 1, 2}


def test_in_order_of_submission_an_early_finisher_waits_for_its_predecessors():
    """In order of submission an early finisher waits; order of completion would prefer short
    answers."""
    builder = BatchBuilder(target=2, in_order=True)
    builder.add(1, ["g1"], keep=True)
    builder.add(3, ["g3"], keep=True)
    assert builder.batch() is None  # two are kept, but group 0 may still come
    builder.add(0, ["g0"], keep=False)
    assert builder.batch() is None
    builder.add(2, ["g2"], keep=True)
    assert builder.batch() == [1, 2]
    other = BatchBuilder(target=2, in_order=False)
    other.add(3, ["g3"], keep=True)
    other.add(1, ["g1"], keep=True)
    assert other.batch() == [3, 1]


def group(*rewards, valid=None):
    valid = valid or [True] * len(rewards)
    return [Sample(reward=reward, valid=ok) for reward, ok in zip(rewards, valid, strict=True)]


@pytest.mark.parametrize(
    ("samples", "keep", "reason"),
    [
        (group(1, 0, 0, 0), True, None), (group(1, 1, 1, 0), True, None), (group(1, 1, 1, 1), False, "zero_std_1"),
        (group(0.1 + 0.2, 0.3, 0.3, 0.3), False, "zero_std_0.3"), (group(None, None), False, "no_rewards"),
        (group(1, float("nan"), 1), False, "zero_std_1"), (group(1, 0, valid=[True, False]), False, "zero_std_1"),
        ([group(1, 1), group(0)], True, None), ([group(1, 0), group(1, 0)], False, "zero_std_0.5"),
        ([Sample(reward=r, rollout_id=i // 2) for i, r in enumerate([1, 0, 0, 1])], False, "zero_std_0.5"),
    ],
)  # fmt: skip
def test_a_group_is_kept_whole_or_dropped_whole_by_the_spread_of_its_usable_rewards(
    samples, keep, reason
):
    """A group is kept or dropped as a whole by the spread of its usable rewards; None, NaN and
    invalid members do not count, and an execution of several samples has its mean."""
    args = types.SimpleNamespace(reward_key=None)
    output = check_reward_nonzero_std(args, samples)
    assert output.keep is keep and (reason is None or output.reason.startswith(reason))
    assert check_reward_nonzero_std_with_fallback(args, samples).keep_when_insufficient is not keep


def test_filter_outputs_are_wrapped_and_counted():
    """A filter may return a bare bool."""
    assert call_dynamic_filter(None, 1).keep and not call_dynamic_filter(lambda a: False, 1).keep
    keep_late = DynamicFilterOutput(False, "r", keep_when_insufficient=True)
    drop = [
        should_drop_dynamic_filter_output(keep_late, remaining_batch_size=n, target_data_size=4)
        for n in (5, 4)
    ]
    assert drop == [True, False]
    gatherer = MetricGatherer()
    for reason in ("a", "a", None, "b"):
        gatherer.on_dynamic_filter_drop(reason)
    assert gatherer.collect() == {
        "rollout/dynamic_filter/drop_a": 2,
        "rollout/dynamic_filter/drop_b": 1,
    }


def hook_sync(args, sample, *, rollout_id=None, evaluation=False):
    sample.metadata["sync"] = (rollout_id, evaluation)


async def hook_async(args, sample):
    return Sample(index=sample.index + 100, metadata=dict(sample.metadata))


def hook_bad(args, sample):
    return 3


def test_hooks_run_in_order_on_every_nested_sample():
    """Hooks run in order on every nested sample, sync or async, with the keywords they name;
    without hooks the same object is returned."""
    set_current_rollout_id(9)
    value = [[Sample(index=0)], Sample(index=1)]
    args = types.SimpleNamespace(
        rollout_sample_hook_path=[f"{__name__}.hook_sync", f"{__name__}.hook_async"]
    )
    out = run(apply_rollout_sample_hooks(args, value, evaluation=True))
    assert out[0][0].index == 100 and out[1].index == 101 and out[1].metadata == {"sync": (9, True)}
    assert run(apply_rollout_sample_hooks(types.SimpleNamespace(), value)) is value
    args.rollout_sample_hook_path = [f"{__name__}.hook_bad"]
    with pytest.raises(TypeError, match="expected Sample or None"):
        run(apply_rollout_sample_hooks(args, value))


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("slime.rollout.sglang_rollout.generate_rollout", "args rollout_id data_source evaluation"),
        ("slime.rollout.sft_rollout.generate_rollout", "args rollout_id data_buffer evaluation"),
        ("slime.rollout.fully_async_rollout.generate_rollout_fully_async", "args rollout_id data_buffer evaluation"),
        ("slime.rollout.sglang_rollout.generate", "args sample sampling_params"),
        ("slime.rollout.sglang_rollout.generate_and_rm", "args sample sampling_params evaluation"),
        ("slime.rollout.sglang_rollout.generate_and_rm_group", "args group sampling_params evaluation"),
        ("slime.rollout.rm_hub.async_rm", "args sample kwargs"),
        ("slime.rollout.rm_hub.batched_async_rm", "args samples kwargs"),
        ("slime.prompts.data_source.pop_first", "args rollout_id buffer num_samples"),
        ("slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std", "args samples kwargs"),
        ("slime.rollout.on_policy_distillation.reward_func", "args sample kwargs"),
        ("slime.rollout.on_policy_distillation.post_process_rewards", "args samples kwargs"),
        ("slime.utils.data.filter_long_prompt", "samples tokenizer processor max_length"),
    ],
)  # fmt: skip
def test_plug_in_points_have_upstreams_parameter_names(path, parameters):
    """Extension points have upstream's parameter names, because plug-ins call and replace them by
    keyword."""
    assert list(inspect.signature(misc.load_function(path)).parameters) == parameters.split()


def test_bare_results_of_rollout_functions_are_wrapped():
    """A rollout function may return a bare list of groups or a dict of datasets."""
    train = call_rollout_fn(lambda args, evaluation: [[1]], None, evaluation=False)
    assert train == RolloutFnTrainOutput(samples=[[1]]) and train.dropped == {}
    assert call_rollout_fn(
        lambda args, evaluation: {"d": {}}, None, evaluation=True
    ) == RolloutFnEvalOutput(data={"d": {}})


# --- evaluation -----------------------------------------------------------------------------------


def test_an_evaluation_set_takes_its_own_values_then_the_defaults_then_the_options():
    """Each field of an evaluation set is its own value, else the defaults', else the option's;
    unknown keys are refused."""
    args = types.SimpleNamespace(
        eval_temperature=0.5,
        rollout_top_p=0.9,
        rollout_stop=["x"],
        eval_min_new_tokens=2,
        input_key="q",
    )
    one, two = build_eval_dataset_configs(
        args,
        [{"name": "a", "path": "p", "temperature": 0.1}, {"name": "b", "path": "q"}],
        {"top_p": 0.8, "rm_type": "f1"},
    )
    assert (
        one.temperature,
        one.top_p,
        one.rm_type,
        one.stop,
        one.min_new_tokens,
        one.input_key,
    ) == (
        0.1,
        0.8,
        "f1",
        ["x"],
        2,
        "q",
    )
    assert two.temperature == 0.5 and one.cache_key != two.cache_key
    assert one.inject_metadata({"rm_type": "old", "k": 1}) == {"rm_type": "f1", "k": 1}
    for raw, defaults, words in (
        ([{"name": "a", "path": "p"}], {"temperatur": 1}, "temperatur"),
        ([{"name": "a", "path": "p", "n_sample": 1}], {}, "n_sample"),
        ([{"name": "a"}], {}, "no path"), ([{"path": "p"}], {}, "no name"),
        ([{"name": "a", "path": "p", "min_eval_samples": 0}], {}, "must be > 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            build_eval_dataset_configs(args, raw, defaults)
    assert ensure_dataset_list({"a": {"path": "p"}, "b": "q"}) == [
        {"path": "p", "name": "a"},
        {"path": "q", "name": "b"},
    ]
    assert ensure_dataset_list(None) == []
    with pytest.raises(TypeError):
        ensure_dataset_list(3)
    assert EvalDatasetConfig(name="a", path="p", metadata_overrides={"x": 2}).inject_metadata(
        {"x": 1}
    ) == {"x": 2}


def test_evaluation_scores_every_dataset_with_its_sampling_and_counts_failures(tmp_path):
    """Each of two datasets is sampled with its own parameters, two samples a prompt; failed samples
    are counted and in no list."""
    path = write_prompts(tmp_path / "p.jsonl", 10)
    config = tmp_path / "eval.yaml"
    config.write_text(
        f"eval:\n  defaults: {{temperature: 0.25}}\n  datasets:\n    - {{name: one, path: {path}, "
        f"n_samples_per_eval_prompt: 2}}\n"
        f"    - {{name: two, path: '{path}@[:3]', temperature: 0.75, max_response_len: 2}}\n"
    )
    bad = {"text": "", "meta_info": {"completion_tokens": 1, "output_token_logprobs": []}}
    with FakeEngine(lambda p: bad if p.number == 4 else [5] * (p.number % 3 + 1)) as engine:
        with fresh_rollout_state(engine.url):
            args = rollout_args(
                hf_checkpoint=tokenizer_folder(tmp_path / "tok"), eval_config=str(config), rm_type="random", n_samples_per_eval_prompt=1
            )  # fmt: skip
            output = generate_rollout(args, 3, None, evaluation=True)
    assert [len(output.data[name]["samples"]) for name in ("one", "two")] == [19, 3]
    assert output.metrics == {"eval/one/failed_samples": 1, "eval/two/failed_samples": 0}
    assert {p["temperature"] for r in engine.requests[:1] for p in r["sampling_params"]} == {0.25}
    assert {
        (p["temperature"], p["max_new_tokens"]) for p in engine.requests[-1]["sampling_params"]
    } == {(0.75, 2)}
    data = output.data["one"]
    assert (
        len(data["rewards"]) == len(data["truncated"]) == 19 and data["samples"][0].group_index == 0
    )
    assert [s.index for s in data["samples"]] == [i for i in range(20) if i != 4]


async def text_for_prompt_2(args, sample, **kwargs):
    return "1.0" if sample.index == 2 else 1


def test_a_reward_that_is_a_text_fails_its_sample_in_evaluation(tmp_path):
    """A reward that is a text fails its sample in evaluation: it is counted and in no list."""
    path = write_prompts(tmp_path / "p.jsonl", 4)
    with FakeEngine(lambda p: [5]) as engine, fresh_rollout_state(engine.url):
        args = rollout_args(
            hf_checkpoint=tokenizer_folder(tmp_path / "tok"), eval_prompt_data=["one", path], max_failed_ratio=0.25,
            custom_rm_path=f"{__name__}.text_for_prompt_2",
        )  # fmt: skip
        output = generate_rollout(args, 0, None, evaluation=True)
        args.max_failed_ratio = 0.1
        with pytest.raises(
            RolloutDataError,
            match="1 of 4 samples .* failed, .*Reasons: 1 x reward: reward is str, not a number",
        ):
            generate_rollout(args, 0, None, evaluation=True)
    assert (
        output.metrics == {"eval/one/failed_samples": 1}
        and output.data["one"]["rewards"] == [1.0] * 3
    )


def test_the_samples_of_an_attempt_have_one_number():
    """Samples of one attempt have one attempt number, also where an attempt emits two, or a list
    names its rollouts."""
    two, one = [Sample(index=0), Sample(index=0)], Sample(index=1)
    named = [Sample(index=2, rollout_id=7) for _ in range(3)]
    number_attempts([[two, one], [named, [Sample(index=3)]]])
    assert (
        [s.rollout_id for s in two] == [-1, -1]
        and one.rollout_id is None
        and {s.rollout_id for s in named} == {7}
    )


def test_an_evaluation_that_cannot_be_is_refused(tmp_path):
    """An evaluation without data, half a pair of arguments, and a broken file are refused by
    name."""
    for overrides, words in (
        ({}, "nothing to evaluate"), ({"eval_prompt_data": ["a", "b", "c"]}, "pairs"), ({"eval_config": str(tmp_path / "no.yaml")}, "no.yaml"),
    ):  # fmt: skip
        with fresh_rollout_state("http://127.0.0.1:9"), pytest.raises(ConfigError, match=words):
            generate_rollout(rollout_args(**overrides), 0, None, evaluation=True)
    assert [len(merged) for merged in merge_groups([[1, 2], [3], [4, 5], [6]], size=3)] == [3, 3]


def test_a_teachers_log_probs_are_those_of_the_response(tmp_path):
    """The teacher's log-probs are the last response_length entries after the first, which has
    none."""
    from slime.rollout.on_policy_distillation import post_process_rewards

    entries = [[None, 1, None], [-1.0, 2, None], [-2.0, 3, None], [-3.0, 4, None]]
    sample = Sample(response_length=2, reward={"meta_info": {"input_token_logprobs": entries}})
    assert post_process_rewards(rollout_args(), [sample]) == ([0.0], [0.0])
    assert sample.teacher_log_probs == [-2.0, -3.0]
    with pytest.raises(RolloutDataError, match="3 log-probs for 9"):
        post_process_rewards(rollout_args(), [Sample(response_length=9, reward=sample.reward)])


def test_client_and_scripted_engine_together_cost_under_a_millisecond_per_sample(tmp_path):
    """1024 tiny samples, with client, gate, reward and the scripted engine in one process, take
    less than a millisecond each."""
    with FakeEngine(lambda prompt: [5, 6, 4]) as engine, fresh_rollout_state(engine.url):
        from slime.prompts.data_source import RolloutDataSourceWithBuffer

        args = rollout_args(
            hf_checkpoint=tokenizer_folder(tmp_path / "tok"), prompt_data=write_prompts(tmp_path / "p.jsonl", 200),
            rollout_batch_size=128, n_samples_per_prompt=8,
        )  # fmt: skip
        source = RolloutDataSourceWithBuffer(args)
        seconds = []
        for rollout_id in range(4):
            start = time.process_time()
            generate_rollout(args, rollout_id, source)
            seconds.append(time.process_time() - start)
    assert min(seconds[1:]) / 1024 < 0.001, (
        f"{min(seconds) / 1024 * 1e3:.2f} ms of CPU per sample with the engine's share"
    )


def test_the_worked_example_of_the_group_loop_is_true():
    """Three groups fill a batch of one as the head of group_loop.py says, in either order."""
    ordered, completed = BatchBuilder(1, in_order=True), BatchBuilder(1, in_order=False)
    expected = (
        (2, True, None, ([2], {2})),
        (0, False, None, ([2], {0, 2})),
        (1, True, ([1], {0, 1}), ([2], {0, 2})),
    )
    for number, keep, *answers in expected:
        for builder, answer in zip((ordered, completed), answers, strict=True):
            builder.add(number, [], keep)
            chosen = builder.batch()
            assert (None if chosen is None else (chosen, builder.used(chosen))) == answer


def test_only_engines_get_the_key(monkeypatch):
    """A reward model or another server of the user's is not told the key of the run's engines."""
    monkeypatch.setattr(http_utils, "_settings", http_utils.HttpSettings(api_key="the-key"))
    with (
        FakeEngine(lambda p: [5]) as engine,
        FakeEngine(lambda p: [5]) as reward_model,
        fresh_rollout_state(engine.url),
    ):
        for server in (engine, reward_model):
            body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
            run(http_utils.post(f"{server.url}/generate", body, max_retries=0))
    assert engine.headers[0]["Authorization"] == "Bearer the-key"
    assert "Authorization" not in reward_model.headers[0]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
