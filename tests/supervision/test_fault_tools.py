"""The tools that break whole loops: their faults fire, and what they judge is judged right. The loops
themselves are broken by `make test-faults` and `make soak`.
"""

import asyncio
import errno
import http.client
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests")]

from chaos import cells, lineage, loops, proxy, soak, vital_signs  # noqa: E402

NUM_GPUS = 0


def test_orders_are_met_inside_of_any_python_process_of_a_run(tmp_path):
    """The first write below the folder is refused, once; other folders are spared; the clock is
    ahead while the order stands, and right again without it."""
    orders, run = tmp_path / "orders", tmp_path / "run"
    for folder in (orders, run):
        folder.mkdir()
    program = f"""
import json, os, time
def order(**words):
    open({str(orders / "tmp")!r}, "w").write(json.dumps(words))
    os.rename({str(orders / "tmp")!r}, {str(orders / "order.json")!r})
    time.sleep(0.15)
def tried(path):
    try:
        open(path, "w").close()
    except OSError as error:
        return error.errno
real = time.clock_gettime(time.CLOCK_REALTIME)
order(kind="disk", errno={errno.EIO}, below={str(run)!r}, name="iter", times=1)
found = [tried(path) for path in ({str(run / "other")!r}, {str(tmp_path / "iter")!r}, {str(run / "iter")!r}, {str(run / "iter")!r})]
order(kind="clock", seconds=3600)
found.append(round(time.time() - time.clock_gettime(time.CLOCK_REALTIME)))
found.append(round((time.time_ns() - time.clock_gettime_ns(time.CLOCK_REALTIME)) / 1e9))
os.remove({str(orders / "order.json")!r})
time.sleep(0.15)
found.append(round(time.time() - time.clock_gettime(time.CLOCK_REALTIME)))
print(json.dumps(found))
"""
    environment = {
        **os.environ,
        "PYTHONPATH": str(lineage.INSIDE),
        lineage.CHAOS_VARIABLE: str(orders),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [None, None, errno.EIO, None, 3600, 3600, 0]
    (fired,) = orders.glob("fired.*")
    assert fired.read_text().splitlines() == [f"open {run / 'iter'}", "clock 3600"]


@pytest.fixture(scope="module")
def server():
    """A server that answers everything with the same JSON; its port."""

    async def answer(reader, writer):
        while head := await reader.readuntil(b"\r\n\r\n"):
            body = await reader.readexactly(proxy._length(head))
            text = b'{"got": %d}' % len(body)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))

    loop, ready = asyncio.new_event_loop(), threading.Event()

    def run():
        asyncio.set_event_loop(loop)
        loop.set_exception_handler(lambda loop, context: None)  # connections that end
        ready.server = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", 0))
        ready.set()
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait(10)
    yield ready.server.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def test_the_proxy_breaks_what_it_is_told_to_and_nothing_else(server, monkeypatch):
    """Each mode, counted; other paths and later requests pass."""
    monkeypatch.setattr(proxy, "SLOW_S", 0.01)
    monkeypatch.setattr(proxy, "SILENT_S", 0.05)

    def ask(path):
        connection = http.client.HTTPConnection("127.0.0.1", breaking.port, timeout=5)
        try:
            connection.request("POST", path, b"12345")
            response = connection.getresponse()
            return response.status, response.read()
        except (http.client.HTTPException, ConnectionError) as error:
            return type(error).__name__, b""
        finally:
            connection.close()

    good = (200, b'{"got": 5}')
    with proxy.BreakingProxy("127.0.0.1", server) as breaking:
        assert ask("/generate") == good
        found = {}
        for mode in proxy.MODES:
            with breaking.broken(mode) as count:
                assert ask("/health") == good and count() == 0
                found[mode] = ask("/generate")
                assert count() == 1
        assert ask("/generate") == good
    assert found[proxy.SLOW] == good
    assert found[proxy.JUNK_JSON] == (200, proxy.JUNK) and found[proxy.WRONG_STATUS][0] == 500
    assert found[proxy.CUT] != good
    broken = (proxy.GARBAGE, proxy.REFUSE, proxy.SILENT)
    assert all(found[mode][0] not in (200, 500) for mode in broken), found


class PretendLineage:
    """A run that prints `lines` when it is broken, and ends with `status` or trains on."""

    def __init__(self, *, status=None, lines=(), left=(), culprits=()):
        self.loop, self.status = SimpleNamespace(name="pretend"), status
        self.run = SimpleNamespace(
            lines=[], finish=lambda timeout: status, close=lambda: None, text=lambda: "",
            named_after=lambda role, begun: None,
        )  # fmt: skip
        self._lines, self._left, self._culprits = lines, left, culprits
        self.is_running = True

    def struck(self, _):
        self.run.lines += [(time.monotonic(), line) for line in self._lines]
        self.is_running = self.status is None
        return "struck"

    def is_alive(self):
        return self.is_running

    def wait_for_rollouts(self, count, *, timeout_s):
        return self.is_running

    def close_run(self):
        self.is_running = False

    def left(self):
        return list(self._left)

    def culprits(self):
        return list(self._culprits)


@pytest.mark.parametrize(
    "facts, cell, problems",
    [
        ({"status": 1, "lines": ["error: engine 0 has died"]}, {"named": "engine 0 "}, []),
        ({"status": 1, "lines": ["error: no"]}, {"named": "engine 0 "}, ["does not name"]),
        ({"status": -11, "lines": ["error: engine 0 has"]}, {"named": "engine 0 "}, ["status -11"]),
        ({"status": 1, "left": ["/tmp/x"]}, {}, ["left behind"]),
        ({"status": 1, "culprits": ["sample 7 lost"]}, {}, ["sample 7 lost"]),
        ({}, {"expects": cells.GOES_ON}, []),
        ({"status": 1}, {"expects": cells.GOES_ON}, ["has ended"]),
        (
            {"lines": ["actor rank 0 (process 7) is frozen"]},
            {"expects": cells.GOES_ON, "is_harmless": True},
            ["a false alarm"],
        ),
    ],
    ids=["good end", "other name", "crash", "left", "lost", "goes on", "ends", "false alarm"],
)
def test_what_a_fault_led_to_is_judged(facts, cell, problems, monkeypatch):
    monkeypatch.setattr(loops, "LONGEST_S", 0.0)
    pretend = PretendLineage(**facts)
    breaker = loops.Breaker(pretend, random.Random(0))
    breaker.break_by(cells.Cell("fault", "part", pretend.struck, **cell))
    breaker.finish()
    (row,) = breaker.rows
    assert len(row.problems) == len(problems), row.problems
    assert all(word in found for word, found in zip(problems, row.problems, strict=True))
    assert row.lost == ("1 culprits" if "culprits" in facts else "nothing")


def test_a_fault_that_does_not_fire_is_a_problem(monkeypatch):
    monkeypatch.setattr(loops, "LONGEST_S", 0.0)
    breaker = loops.Breaker(PretendLineage(), random.Random(0))

    def strike(_):
        raise AssertionError("the fault did not fire")

    breaker.break_by(cells.Cell("fault", "part", strike))
    assert breaker.rows[0].problems == ["AssertionError: the fault did not fire"]


def test_a_soak_finds_what_grows_and_nothing_else():
    """2 MB in 1,000 rollouts grow, half of one and a sawtooth do not; one descriptor more does."""
    samples = []
    for rollout in range(0, 2001, 50):
        figures = {
            "memory": 10**8 + 2_000 * rollout,
            "descriptors": 9 + rollout // 900,
            "threads": 5,
        }
        other = {
            "memory": 10**8 + 500 * rollout + rollout % 7 * 10**5,
            "descriptors": 9 + rollout % 3,
        }
        samples.append({"rollout": rollout, "processes": {"a": figures, "b": other}})
    growing = {(t.process, t.what) for t in soak.trends_of(samples) if t.is_growth}
    assert growing == {("a", "memory"), ("a", "descriptors")}


def test_the_vital_signs_of_a_process_are_read(tmp_path):
    before = vital_signs.vital_signs(os.getpid())
    with open(tmp_path / "x", "w"):
        after = vital_signs.vital_signs(os.getpid())
    assert after.descriptors == before.descriptors + 1 and before.threads >= 1
    assert 0 < vital_signs.private_bytes(os.getpid()) <= before.resident * 2
    assert threading.get_native_id() in vital_signs.waits_for_processor(os.getpid())
    with open(f"/dev/shm/slime-fault-tools-{os.getpid()}", "w") as file:
        assert file.name in vital_signs.shared_files([os.getpid()])
    os.unlink(file.name)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
