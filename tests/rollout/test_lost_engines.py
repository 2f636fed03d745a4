"""Requests of a run that outlives the loss of an engine: sent again elsewhere, or to its successor,
with the same body."""

import asyncio
import contextlib
import gc
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support.fake_engine import FakeEngine, Fault
from support.rollout_args import fresh_rollout_state, rollout_args, tokenizer_folder, write_prompts

from slime.exceptions import EngineError, NoEngineLeft
from slime.prompts.data_source import RolloutDataSourceWithBuffer
from slime.rollout import engine_client
from slime.rollout.engine_roster import EngineRoster
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.async_utils import run

NUM_GPUS = 0

BODY = {
    "input_ids": [5, 6],
    "sampling_params": {"max_new_tokens": 3, "sampling_seed": 7},
    "rid": "r0",
}


@contextlib.contextmanager
def roster_of(urls, look=lambda url: False, **options):
    """Requests go by the roster that is given; no engine is tried a second time."""
    roster = EngineRoster(urls, look, **{"wait_s": 5.0, **options})
    with fresh_rollout_state(urls[0]):
        engine_client.set_engines(urls, roster=roster)
        yield roster


def ask(**options):
    args = rollout_args(rollout_request_retries=0)
    return run(engine_client.request_generate(args, {**BODY, **options}))


def later(seconds, *actions):
    """Does `actions` from another thread, as the watch over the engines does."""

    def act():
        time.sleep(seconds)
        for action in actions:
            action()

    threading.Thread(target=act, daemon=True).start()


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_a_request_that_is_open_on_a_lost_engine_is_sent_to_another_with_the_same_body():
    """A frozen engine keeps its connection open: the request ends when the engine counts as lost,
    is no try of its own, and goes out again with its seed under a new id."""
    with FakeEngine(delay=lambda prompt: 60.0) as frozen, FakeEngine() as well:
        with roster_of([frozen.url, well.url]) as roster:
            later(0.3, lambda: wait_until(lambda: frozen.running), lambda: roster.show([well.url]))
            assert ask()["output_ids"] == [5, 6, 7]
            assert roster.take_num_resampled() == 1 and roster.take_num_resampled() == 0
    (first,), (second,) = frozen.requests, well.requests
    assert second == {**first, "rid": "r0-try1"}


def test_requests_wait_for_the_successor_of_the_only_engine():
    """With no engine there requests wait, and the successor gets them; whole groups count by their
    samples."""
    with FakeEngine() as dead, FakeEngine() as successor:
        found = []

        def look(url):
            found.append(url)
            roster.show([])
            later(0.3, lambda: roster.show([successor.url]))
            return True

        dead.faults.append(Fault(close=True))
        with roster_of([dead.url], look) as roster:
            ask(input_ids=[[5], [6]], sampling_params=[BODY["sampling_params"]] * 2, rid=["a", "b"])
            assert found == [dead.url] and roster.take_num_resampled() == 2
            assert roster.has_answered(successor.url) and not roster.has_answered(dead.url)
    assert successor.requests[0]["rid"] == ["a-try1", "b-try1"]


def test_an_error_of_an_engine_that_is_well_is_an_ordinary_failure():
    """An engine that answers its health check is not lost: its error uses up a try."""
    with FakeEngine() as engine, roster_of([engine.url]) as roster:
        engine.faults.append(Fault(status=500))
        with pytest.raises(EngineError, match="500"):
            ask()
        assert roster.take_num_resampled() == 0


def test_a_request_that_loses_five_engines_fails_alone():
    """What ends every engine that works on it must not end the run's engines for ever."""
    with FakeEngine() as engine, roster_of([engine.url], look=lambda url: True) as roster:
        engine.faults += [Fault(close=True)] * 5
        with pytest.raises(EngineError, match="5 engines were lost while they worked on this"):
            ask()
        assert roster.take_num_resampled() == 5
        assert ask()["output_ids"] == [5, 6, 7]


def test_a_wait_for_engines_that_do_not_come_back_ends_with_the_option():
    """Without a successor requests give up after --rollout-engine-start-timeout."""
    with FakeEngine() as engine, roster_of([engine.url], wait_s=0.2) as roster:
        roster.show([])
        with pytest.raises(NoEngineLeft, match="--rollout-engine-start-timeout 0.2 s"):
            ask()


def test_an_engine_that_cannot_be_replaced_ends_the_rollout_and_fails_no_sample(tmp_path, caplog):
    """The reason ends the run, however many samples --max-failed-ratio lets fail, and asyncio does
    not print a stack for every group that it ended."""
    args = rollout_args(
        hf_checkpoint=str(tokenizer_folder(tmp_path)),
        prompt_data=write_prompts(tmp_path / "p.jsonl", 4),
        max_failed_ratio=1.0,
    )
    with FakeEngine(delay=lambda prompt: 60.0) as engine, roster_of([engine.url]) as roster:
        later(
            0.0,
            lambda: wait_until(lambda: engine.running),
            lambda: roster.fail("engine 0 could not be replaced: the disk is full"),
            lambda: roster.show([]),
        )
        with pytest.raises(NoEngineLeft, match="could not be replaced: the disk is full"):
            generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_behind_a_router_every_loss_is_one_of_the_routers():
    """Requests go to the router while it has an engine; one that fails then was lost with it."""
    with (
        FakeEngine() as router,
        roster_of(["http://a", "http://b"], router_url=router.url) as roster,
    ):
        before = roster.num_losses(router.url)
        roster.show(["http://b"])
        assert roster.urls() == (router.url,) and roster.num_losses(router.url) == before + 1
        roster.show([])
        assert roster.urls() == ()


def test_a_cancelled_request_is_cancelled_on_its_engine_too():
    """A rollout that ends takes its requests with it; they are no loss."""
    with FakeEngine(delay=lambda prompt: 60.0) as engine, roster_of([engine.url]) as roster:

        async def cancelled():
            task = asyncio.ensure_future(engine_client.request_generate(rollout_args(), BODY))
            while not engine.running:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        run(cancelled())
        assert roster.take_num_resampled() == 0 and roster._open == {engine.url: set()}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
