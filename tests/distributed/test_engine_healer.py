"""How a lost engine is replaced: what its successor gets, in which order, and when there is an end
to it. The engines are stand-ins whose calls are futures."""

import concurrent.futures
import contextlib
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support.fake_engine import FakeEngine

from slime.exceptions import EngineError, NoEngineLeft
from slime.ray import actors
from slime.ray.engine_healing import EngineHealer
from slime.ray.servers import PublishedWeights, RolloutServers

NUM_GPUS = 0

PUBLISHED = PublishedWeights("7", "sum7", buckets=("bucket a", "bucket b"))


class Engine:
    """An actor: `calls` are those that it got; `kill` ends its process, `freeze` keeps it from
    answering.
    """

    def __init__(self, number, **answers):
        self.number, self.calls = number, []
        self.answers = {
            "process": (0, "elsewhere"),
            "start": {"url": f"http://engine-{number}"},
            "end_weight_update": "sum7",
            "weight_version": "7",
            **answers,
        }
        self.open, self.is_frozen = [], False

    def __getattr__(self, method):
        return SimpleNamespace(remote=lambda *values: self.call(method, *values))

    def call(self, method, *values):
        self.calls.append((method, *values))
        ref = concurrent.futures.Future()
        self.open.append(ref)
        if method != "until_shutdown" and not self.is_frozen:
            answer = self.answers.get(method)
            if isinstance(answer, Exception):
                ref.set_exception(answer)
            elif answer == "dies":
                self.kill()
            else:
                ref.set_result(answer)
        return ref

    def kill(self):
        for ref in self.open:
            if not ref.done():
                ref.set_exception(ray.exceptions.ActorDiedError())

    def freeze(self):
        self.is_frozen = True


def wait(refs, num_returns, timeout):
    done, _ = concurrent.futures.wait(refs, timeout, concurrent.futures.FIRST_COMPLETED)
    ready = [ref for ref in refs if ref in done][:num_returns]
    return ready, [ref for ref in refs if ref not in ready]


def get(refs, timeout=None):
    try:
        return (
            [one.result(timeout) for one in refs]
            if isinstance(refs, list)
            else refs.result(timeout)
        )
    except concurrent.futures.TimeoutError:
        raise ray.exceptions.GetTimeoutError("no reply") from None


@pytest.fixture
def healing(monkeypatch):
    """healing(engines, successors, **options): a running healer and its servers."""
    monkeypatch.setattr("slime.ray.engine_healing.REMOTE_END_S", 0.0)
    monkeypatch.setattr(actors, "wait", wait)
    monkeypatch.setattr(actors, "get", get)
    monkeypatch.setattr(actors, "put", lambda value: value)
    monkeypatch.setattr(actors, "kill", lambda engine: engine.kill())
    lock = Engine("lock", acquire=True)
    args = SimpleNamespace(
        rollout_engine_start_timeout=5.0,
        rollout_health_check_interval=0.05,
        rollout_health_check_timeout=0.3,
        rollout_health_check_first_wait=0.0,
        step_timeout=5.0,
        release_train=False,
        recovery_interval=0,
        sglang_api_key=None,
    )
    started = []

    def make(engines, successors=(), urls=None, router=None, **options):
        left = list(successors)
        urls = urls or [f"http://engine-{engine.number}" for engine in engines]
        servers = RolloutServers(list(engines), urls, router)
        args.__dict__.update(options)
        healer = EngineHealer(args, servers, lock, lambda rank: left.pop(0))
        started.append(healer)
        threading.Thread(target=healer.watch, name="slime-engine-watch", daemon=True).start()
        return healer, servers

    yield make
    for healer in started:
        healer.stop()
    # else they go on with the real `ray.wait`, which connects to whatever cluster it finds
    for thread in threading.enumerate():
        if thread.name.startswith("slime-engine-"):
            thread.join(10)
            assert not thread.is_alive()


def soon(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def methods(engine):
    return [call[0] for call in engine.calls if call[0] != "health"]


def test_the_successor_of_a_dead_engine_serves_the_published_weights_before_it_gets_requests(
    healing,
):
    """It takes every bucket and the checksum under the lock; the other engine goes on meanwhile."""
    dead, other, successor = Engine(0), Engine(1), Engine(2)
    healer, servers = healing([dead, other], [successor])
    healer.keep_published(PUBLISHED)
    dead.kill()
    soon(lambda: servers.engines == [successor, other])
    assert methods(successor) == [
        "until_shutdown", "start", "process", "begin_weight_update", "update_weights",
        "update_weights", "end_weight_update", "weight_version",
    ]  # fmt: skip
    told = [
        call[1:] for call in successor.calls if call[0] in ("update_weights", "end_weight_update")
    ]
    assert told == [("bucket a",), ("bucket b",), ("7", "sum7")]
    assert healer.roster.urls() == ("http://engine-2", "http://engine-1")
    assert servers.urls == ["http://engine-2", "http://engine-1"] and not servers.lost
    assert healer.metrics()["rollout/engines_restarted"] == 1
    assert healer.metrics()["rollout/engines_restarted"] == 0


class Router:
    """Notes its workers; `before_removal` is called when one is to leave."""

    url = "http://router"

    def __init__(self, workers):
        self.workers, self.before_removal = list(workers), lambda: None

    def remove_worker(self, url):
        self.before_removal()
        self.workers.remove(url)

    def add_worker(self, url, *, api_key):
        self.workers.append(url)


def test_a_lost_engine_leaves_the_router_before_its_requests_are_sent_again(healing):
    """The router would send them to the dead engine again, and a request may lose five engines
    only; the successor joins when it is ready."""
    dead, other, successor = Engine(0), Engine(1), Engine(2, start={"url": "http://engine-2"})
    router = Router(["http://engine-0", "http://engine-1"])
    healer, servers = healing([dead, other], [successor], router=router)
    seen = []
    router.before_removal = lambda: seen.append(healer.roster.num_losses(router.url))
    dead.kill()
    soon(lambda: servers.engines == [successor, other] and not servers.lost)
    assert seen == [0] and healer.roster.num_losses(router.url) == 1
    assert router.workers == ["http://engine-1", "http://engine-2"]


def test_a_frozen_engine_is_ended_and_replaced(healing):
    """No answer to a health check within the limit counts as death."""
    frozen, successor = Engine(0), Engine(1)
    healer, servers = healing([frozen], [successor])
    soon(lambda: ("health", 0.3) in frozen.calls)
    frozen.freeze()
    soon(lambda: servers.engines == [successor])
    assert healer.failures() == []


def test_word_of_a_death_that_comes_late_does_not_end_the_successor(healing):
    """Whoever names the process that died means that one, not the engine in its place."""
    dead, successor = Engine(0, process=(41, "elsewhere")), Engine(1, process=(42, "elsewhere"))
    healer, servers = healing([dead], [successor])
    healer.lost(0, "it has died", 41)
    soon(lambda: servers.engines == [successor] and not servers.lost)
    healer.lost(0, "it has died", 41)
    assert not servers.lost and healer.metrics()["rollout/engines_restarted"] == 1


def test_the_first_wait_puts_off_health_checks_and_not_deaths(healing):
    """--rollout-health-check-first-wait counts from an engine's start."""
    frozen, dead, successor = Engine(0), Engine(1), Engine(2)
    healer, servers = healing([frozen, dead], [successor], rollout_health_check_first_wait=60.0)
    frozen.freeze()
    dead.kill()
    soon(lambda: servers.engines == [frozen, successor])
    assert not any(call[0] == "health" for call in frozen.calls + dead.calls + successor.calls)


def test_weights_with_another_checksum_never_get_a_request(healing):
    """A successor whose weights are not the published ones ends the run."""
    dead, wrong = Engine(0), Engine(1, end_weight_update="sum8")
    healer, _ = healing([dead], [wrong])
    healer.keep_published(PUBLISHED)
    dead.kill()
    soon(healer.failures)
    assert "the checksum sum8, and version 7 has sum7" in healer.failures()[0]
    assert healer.roster.urls() == ()
    with pytest.raises(NoEngineLeft, match="sum8"):
        healer.begin_rollout()


def test_weights_on_a_disk_are_loaded_from_there(healing):
    """With --update-weight-transport disk the folder is what was published."""
    dead, successor = Engine(0), Engine(1, update_weights_from_disk="sum7")
    healer, servers = healing([dead], [successor])
    healer.keep_published(PublishedWeights("7", "sum7", folder="/weights/weight_v7"))
    dead.kill()
    soon(lambda: servers.engines == [successor])
    assert ("update_weights_from_disk", "/weights/weight_v7", "7") in successor.calls


def test_an_engine_that_dies_again_and_again_ends_the_run_with_its_reason(healing):
    """The third death without an answer in between is the last, also where it dies as it loads."""
    first, second, third = Engine(0), Engine(1, begin_weight_update="dies"), Engine(2, start="dies")
    healer, _ = healing([first], [second, third])
    healer.keep_published(PUBLISHED)
    first.kill()
    soon(healer.failures)
    assert healer.failures()[0].startswith(
        "engine 0 was lost 3 times in this rollout without an answer to any request in between; "
        "the last time: starting an engine again: the process of engine 0 died."
    )


def test_an_answer_in_between_begins_the_count_of_deaths_anew(healing):
    """An engine that answers after each start may be replaced for as long as it does."""
    engines = [Engine(number) for number in range(6)]
    healer, servers = healing(engines[:1], engines[1:])
    for before, after in zip(engines, engines[1:], strict=False):
        healer.roster._answered.add(servers.urls[0])
        before.kill()
        soon(lambda after=after: servers.engines == [after] and not servers.lost)
    assert healer.failures() == []


def test_a_new_rollout_begins_the_count_of_deaths_anew(healing):
    """Two deaths in each rollout are within the limit."""
    engines = [Engine(number) for number in range(5)]
    healer, servers = healing(engines[:1], engines[1:])
    for number in range(4):
        if number == 2:
            healer.begin_rollout()
        engines[number].kill()
        soon(lambda after=engines[number + 1]: servers.engines == [after] and not servers.lost)
    assert healer.failures() == []


def test_an_engine_that_dies_while_memory_is_given_back_is_replaced_afterwards(healing):
    """Training has the device then; its successor starts when engines get their memory again."""
    dead, successor = Engine(0), Engine(1)
    healer, servers = healing([dead], [successor])
    healer.fall_asleep()
    servers.release_memory(timeout_s=5.0)
    dead.kill()
    soon(lambda: servers.lost)
    time.sleep(0.1)
    assert successor.calls == []
    servers.resume_memory(timeout_s=5.0)  # of none
    healer.wake()
    soon(lambda: servers.engines == [successor])


def test_an_engine_that_freezes_while_memory_is_given_back_keeps_nobody_waiting(
    healing,
):
    """It is ended at once, so that the order to take its memory back ends too; only its successor
    waits for the device."""
    frozen, successor = Engine(0), Engine(1)
    healer, servers = healing([frozen], [successor])
    healer.fall_asleep()
    frozen.freeze()
    servers.resume_memory(timeout_s=5.0)
    assert servers.lost == {0} and successor.calls == []
    healer.wake()
    soon(lambda: servers.engines == [successor])


@pytest.mark.parametrize("option", [{"release_train": True}, {"recovery_interval": 1}])
def test_the_buckets_outlive_the_ranks_that_sent_them(healing, option):
    """With --release-train the ranks end while engines generate, with --recovery-interval they may
    at any time: the manager keeps copies."""
    dead, successor = Engine(0), Engine(1)
    healer, servers = healing([dead], [successor], **option)
    sent = concurrent.futures.Future()
    sent.set_result({"a": 1})
    healer.keep_published(PublishedWeights("7", "sum7", buckets=(sent,)))
    dead.kill()
    soon(lambda: servers.engines == [successor])
    assert ("update_weights", {"a": 1}) in successor.calls


def test_external_servers_are_used_while_they_answer_and_again_when_they_take_weights(healing):
    """A dead server's requests go to the others; the run ends where none is left."""
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(FakeEngine()) for _ in range(2))
        # a scripted engine has no /health
        healer, servers = healing([], urls=[first.url, second.url], rollout_health_check_interval=60.0,
                                  rollout_health_check_first_wait=60.0)  # fmt: skip
        healer.lost(0, "connection refused")
        assert healer.roster.urls() == (second.url,) and not healer.failures()
        assert servers.addresses() == {0: first.url, 1: second.url}
        healer.keep_published(PUBLISHED, [0, 1])
        assert healer.roster.urls() == (first.url, second.url)
        assert healer._look(second.url), "404 is no answer of a server that is well"
        healer.lost(0, "connection refused")
        assert healer.failures() == [
            "none of --rollout-external-engine-addrs is left; the last one, engine 0 "
            f"({first.url}), was lost: connection refused"
        ]


def test_an_engine_that_cannot_be_started_again_ends_the_run_with_the_reason(healing):
    """What keeps the successor from starting is the reason."""
    dead, broken = Engine(0), Engine(1, start=EngineError("cannot listen on port 4000"))
    healer, _ = healing([dead], [broken])
    dead.kill()
    soon(healer.failures)
    assert healer.failures() == ["engine 0 could not be replaced: cannot listen on port 4000"]


def test_a_process_that_does_not_end_is_an_error(healing, monkeypatch):
    """A second engine must not start beside one that still has the port and the memory."""
    module = "slime.ray.engine_healing"
    for name, value in {"END_S": 0.05, "started_at": lambda pid: 1}.items():
        monkeypatch.setattr(f"{module}.{name}", value)
    monkeypatch.setattr(f"{module}.this_node", lambda: "elsewhere")
    killed = []
    monkeypatch.setattr(f"{module}.os.kill", lambda *what: killed.append(what))
    undead = Engine(0, process=(4711, "elsewhere"))
    healer, _ = healing([undead], [])
    healer.lost(0, "a request failed")
    soon(healer.failures)
    assert killed == [(4711, 9)]
    assert healer.failures() == [
        "engine 0 could not be replaced: its process 4711 did not end within 0.05 s"
    ]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
