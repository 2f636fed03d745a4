"""Sends mutated HTTP requests to a real engine and looks at what it makes of them.

    python tools/chaos/engine_http.py [--requests 100000] [--seed 0] [--first 0] [--connections 32]

The engine is `slime serve` in a process of its own with a tiny model. Every request comes from a
grammar (`http_grammar`) and from its number alone: a fault is seen again with the same --seed,
--first NUMBER and --requests 1. Status 0 where

* no answer was a 5xx (but the 503 by which /health_generate reports a pause), none showed a path or a
  stack, and every whole request was answered;
* nothing but /health was served without the key;
* /health, asked ten times a second, was answered within half a second: not counted is the time for
  which the server's threads waited for a processor;
* memory stayed within its bound, descriptors and threads as they were;
* a good request, repeated all the time and at the end, got the same bits.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import http.client
import itertools
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from chaos.http_client import Answer, Client, End  # noqa: E402
from chaos.http_grammar import KINDS, WAIT, Attack, Grammar, Victim  # noqa: E402
from chaos.vital_signs import VitalSigns, vital_signs, waits_for_processor  # noqa: E402

STALL_S = 0.5
PROBE_S = 0.1
KEEPER_S = 0.05
GOOD_EVERY = 251
GROWTH_BYTES = 256 * 2**20  # what large bodies may leave in the allocator's hands
SETTLE_S = 20.0
START_S = 120.0
EXECUTOR_THREADS = min(32, (os.cpu_count() or 1) + 4)  # asyncio starts them as it needs them
TOO_MANY = 100  # faults: no more attacks follow
GOOD = "good request"


@dataclasses.dataclass(frozen=True)
class Target:
    """A running engine: where it listens, what an attacker knows, its process and the thread of its
    event loop.
    """

    host: str
    port: int
    victim: Victim
    pid: int
    loop_thread: int


@dataclasses.dataclass
class Report:
    """What came of all attacks."""

    counts: dict[str, collections.Counter] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )
    faults: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    worst_probe_s: float = 0.0
    worst_stall_s: float = 0.0
    num_probes: int = 0
    before: VitalSigns | None = None
    after: VitalSigns | None = None
    peak_bytes: int = 0

    @property
    def num_requests(self) -> int:
        """Requests that were begun."""
        return sum(counts["requests"] for counts in self.counts.values())

    def lines(self) -> list[str]:
        """The table, and a line of figures."""
        columns = ("requests", "2xx", "4xx", "closed", "left", "silent")
        lines = [f"{'mutation':<20}" + "".join(f"{name:>10}" for name in columns)]
        for kind, counts in sorted(self.counts.items()):
            lines.append(f"{kind:<20}" + "".join(f"{counts[name]:>10}" for name in columns))
        assert self.before is not None and self.after is not None
        mib = 2**20
        lines.append(
            f"{self.num_requests} requests in {self.seconds:.1f} s "
            f"({self.num_requests / max(self.seconds, 1e-9):.0f}/s), {len(self.faults)} faults; "
            f"/health: {self.num_probes} probes, worst {self.worst_probe_s:.3f} s, "
            f"{self.worst_stall_s:.3f} s of it the server's; memory {self.before.resident // mib} -> "
            f"{self.after.resident // mib} MiB (peak {self.peak_bytes // mib}), descriptors "
            f"{self.before.descriptors} -> {self.after.descriptors}, threads "
            f"{self.before.threads} -> {self.after.threads}"
        )
        return lines


class Asker:
    """Asks the engine one thing after the other over a connection of its own."""

    def __init__(self, target: Target, timeout: float = 60.0) -> None:
        self._target, self._timeout = target, timeout
        self._connection = self._new()

    def _new(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(
            self._target.host, self._target.port, timeout=self._timeout
        )

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """(status, body). A connection that was closed meanwhile is opened again once."""
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {self._target.victim.key}",
        }
        for is_last in (False, True):
            try:
                self._connection.request(method, path, body, headers)
                response = self._connection.getresponse()
                return response.status, response.read()
            except (http.client.HTTPException, ConnectionError):
                self._connection.close()
                if is_last:
                    raise
                self._connection = self._new()
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


class Background:
    """Two threads beside the attacks: one asks /health ten times a second, one ends pauses."""

    def __init__(self, target: Target, report: Report) -> None:
        self._target, self._report = target, report
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._guarded, args=(action,), daemon=True)
            for action in (self._probe, self._keep_going)
        ]
        self.stalls: list[tuple[float, float]] = []  # (begin, seconds)

    def __enter__(self) -> Background:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _guarded(self, action: Callable[[Asker], None]) -> None:
        while not self._stopped.is_set():
            try:
                with contextlib.closing(Asker(self._target)) as asker:
                    action(asker)
            except (OSError, http.client.HTTPException) as error:
                name = action.__name__.strip("_")
                self._report.faults.append(f"{name}: {type(error).__name__}: {error}")
                self._stopped.wait(1.0)

    def _waited_s(self, before: dict[int, float]) -> float:
        """Seconds for which the machine was busy with something else: the server's thread waited
        for a processor, or another one did, which may have held the interpreter's lock.
        """
        waits = {
            thread: seconds - before.get(thread, 0.0)
            for thread, seconds in waits_for_processor(self._target.pid).items()
        }
        return waits.pop(self._target.loop_thread, 0.0) + max(waits.values(), default=0.0)

    def _probe(self, asker: Asker) -> None:
        report = self._report
        while not self._stopped.wait(PROBE_S):
            begun, waits = time.monotonic(), waits_for_processor(self._target.pid)
            status, _ = asker.ask("GET", "/health")
            seconds = time.monotonic() - begun
            stall = max(0.0, seconds - self._waited_s(waits))
            report.num_probes += 1
            report.worst_probe_s = max(report.worst_probe_s, seconds)
            report.worst_stall_s = max(report.worst_stall_s, stall)
            report.peak_bytes = max(report.peak_bytes, vital_signs(self._target.pid).resident)
            if status != 200:
                report.faults.append(f"/health answered {status}")
            if stall > STALL_S:
                self.stalls.append((begun, stall))

    def _keep_going(self, asker: Asker) -> None:
        while not self._stopped.wait(KEEPER_S):
            asker.ask("POST", "/continue_generation", b"{}")


class Judge:
    """Counts the ends of attacks and finds the faults."""

    def __init__(self, report: Report, expected: object) -> None:
        self._report, self._expected = report, expected
        self._begun: dict[int, tuple[float, Attack]] = {}
        self.large: list[tuple[float, float, int, str]] = []  # begin, end, number, what

    def begin(self, number: int, attack: Attack) -> None:
        """The attack is on its way."""
        if attack.is_heavy:
            self._begun[number] = (time.monotonic(), attack)

    def done(self, number: int, attack: Attack, end: End, answers: list[Answer]) -> None:
        """One exchange has ended."""
        counts = self._report.counts[attack.kind]
        counts["requests"] += len(attack.methods)
        for answer in answers:
            counts[f"{answer.status // 100}xx"] += 1
        if end is not End.ANSWERED:
            counts[end.value] += 1
        for place, answer in enumerate(answers):
            problem = self._problem(attack, place, answer)
            if problem:
                self._fault(number, attack, problem)
        if attack.must_answer and attack.after == WAIT and not answers:
            self._fault(number, attack, f"no answer: {end.value}")
        if attack.kind == GOOD and answers:
            self._compare(number, attack, answers[0])
        if attack.is_heavy:
            begun, _ = self._begun.pop(number)
            what = f"{attack.parts[0].partition(b'{')[2][:60]!r}, {len(attack.parts[0])} bytes"
            self.large.append((begun, time.monotonic(), number, what))

    def _problem(self, attack: Attack, place: int, answer: Answer) -> str | None:
        if answer.status >= 500:
            is_head = (
                not answer.body and attack.methods[min(place, len(attack.methods) - 1)] == "HEAD"
            )
            is_pause = answer.status == 503 and (b"generation is paused" in answer.body or is_head)
            return None if is_pause else f"status {answer.status}: {answer.body[:200]!r}"
        has_key = attack.keys[min(place, len(attack.keys) - 1)]
        if has_key is False and answer.status < 400:
            return f"status {answer.status} without the key"
        if b"Traceback" in answer.body or b'.py"' in answer.body:
            return f"the answer shows a stack: {answer.body[:200]!r}"
        return None

    def _compare(self, number: int, attack: Attack, answer: Answer) -> None:
        got = essence(answer.body) if answer.status == 200 else ("refused",)
        if got != self._expected and got[0] != "abort":
            self._fault(number, attack, f"another answer: {answer.status}, {answer.body[:300]!r}")

    def _fault(self, number: int, attack: Attack, problem: str) -> None:
        shown = b"".join(attack.parts)[:300]
        self._report.faults.append(f"request {number} ({attack.kind}): {problem}; sent {shown!r}")

    def name_stalls(self, stalls: list[tuple[float, float]]) -> None:
        """Each stall is a fault, with the large requests of its time."""
        for begun, seconds in stalls:
            at_work = [
                f"request {number} ({what})"
                for first, last, number, what in self.large
                if first <= begun + seconds and last >= begun
            ]
            self._report.faults.append(
                f"/health took {seconds:.2f} s of the server's time during "
                + ("; ".join(at_work) or "small requests")
            )


def essence(body: bytes) -> tuple:
    """What must be the same in each answer to the good request: how it ended, ids, log-probs."""
    found = json.loads(body)
    meta = found["meta_info"]
    return meta["finish_reason"]["type"], found["output_ids"], meta.get("output_token_logprobs")


def ask_good(target: Target, grammar: Grammar) -> tuple:
    """The essence of the good request's answer, asked alone."""
    with contextlib.closing(Asker(target)) as asker:
        asker.ask("POST", "/continue_generation", b"{}")
        status, body = asker.ask("POST", "/generate", grammar.good(1).body)
    if status != 200:
        raise AssertionError(f"the good request got {status}: {body[:300]!r}")
    return essence(body)


def numbered(
    grammar: Grammar, seed: int, first: int, count: int, kinds: Sequence[str]
) -> Iterator[tuple[int, Attack]]:
    """Attacks with their numbers, until `count` requests were drawn."""
    drawn = 0
    for number in itertools.count(first):
        if drawn >= count:
            return
        if number % GOOD_EVERY == GOOD_EVERY - 1:
            attack = Attack(GOOD, (grammar.good(1).rendered(),), must_answer=True, keys=(True,))
        else:
            attack = grammar.attack(random.Random(f"{seed}-{number}"), kinds)
        drawn += len(attack.methods)
        yield number, attack


def attack_engine(
    target: Target,
    *,
    requests: int,
    seed: int,
    first: int = 0,
    connections: int = 32,
    kinds: Sequence[str] = (),
) -> Report:
    """Sends `requests` mutated requests of all or some kinds; the report has every fault."""
    report, grammar = Report(), Grammar(target.victim)
    expected = ask_good(target, grammar)
    judge = Judge(report, expected)
    report.before = settled(target, None)
    client = Client((target.host, target.port), connections, judge.begin, judge.done)
    started = last_line = time.monotonic()

    def attacks() -> Iterator[tuple[int, Attack]]:
        for number, attack in numbered(grammar, seed, first, requests, kinds):
            if len(report.faults) >= TOO_MANY:
                return
            yield number, attack

    def progress() -> None:
        nonlocal last_line
        now = time.monotonic()
        if now - last_line > 30:
            last_line = now
            print(f"{report.num_requests} requests, {len(report.faults)} faults", file=sys.stderr)

    with Background(target, report) as background:
        try:
            client.run(attacks(), progress)
        finally:
            client.close()
            report.seconds = time.monotonic() - started
    judge.name_stalls(background.stalls)
    try:
        if ask_good(target, grammar) != expected:
            report.faults.append("the good request has another answer at the end")
    except AssertionError as error:
        report.faults.append(str(error))
    report.after = settled(target, report.before)
    report.faults += growth(report)
    return report


def settled(target: Target, before: VitalSigns | None) -> VitalSigns:
    """The engine's needs once connections are closed."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        found = vital_signs(target.pid)
        if before is None or found.descriptors <= before.descriptors:
            return found
        if time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def growth(report: Report) -> list[str]:
    """A sentence for each need of the engine that has grown."""
    before, after = report.before, report.after
    assert before is not None and after is not None
    found = []
    if after.descriptors > before.descriptors:
        found.append(f"descriptors grew from {before.descriptors} to {after.descriptors}")
    if after.threads > before.threads + EXECUTOR_THREADS:
        found.append(f"threads grew from {before.threads} to {after.threads}")
    if after.resident > before.resident + GROWTH_BYTES:
        found.append(f"memory grew by {(after.resident - before.resident) // 2**20} MiB")
    return found


def victim_of(host: str, port: int, key: str, folder: Path) -> Victim:
    """What is to be known of a running engine. Its weights must be those of `folder`."""
    target = Target(host, port, Victim(key, str(folder), b"", ""), 0, 0)
    with contextlib.closing(Asker(target)) as asker:
        status, body = asker.ask("GET", "/weights_checksum")
    if status != 200:
        raise SystemExit(f"the engine does not tell the checksum of its weights: {body!r}")
    weights = (folder / "model.safetensors").read_bytes()
    return Victim(key, str(folder), weights, json.loads(body)["checksum"])


@contextlib.contextmanager
def served(folder: Path, model: Path, *, key: str) -> Iterator[Target]:
    """`slime serve` with a model, its log below `folder`."""
    words = [sys.executable, "-m", "slime.backends.torch_engine.serve", "--hf-checkpoint", model]
    words += ["--port", "0", "--deterministic", "--context-length", "128"]
    environment = {
        **os.environ,
        "SLIME_API_KEY": key,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    log = folder / "engine.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            list(map(str, words)), env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        port = _port_of(process, log)
        victim = victim_of("127.0.0.1", port, key, model)
        yield Target("127.0.0.1", port, victim, process.pid, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port_of(process: subprocess.Popen, log: Path) -> int:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("serving ") and "http://127.0.0.1:" in line:
                return int(line.split("http://127.0.0.1:")[1].split(",")[0])
        time.sleep(0.1)
    raise SystemExit(f"the engine does not serve:\n{log.read_text()[-3000:]}")


def main(argv: list[str] | None = None) -> int:
    """Status 0 where no fault was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first attack")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=(), help="default: all")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended
    from slime.testing.tiny_models import make_tiny_checkpoint

    with (
        tempfile.TemporaryDirectory() as folder,
        served(
            Path(folder), make_tiny_checkpoint(Path(folder) / "model"), key=secrets.token_hex(16)
        ) as target,
    ):
        report = attack_engine(
            target,
            requests=options.requests,
            seed=options.seed,
            first=options.first,
            connections=options.connections,
            kinds=options.kinds,
        )
    print(*report.faults[:20], *report.lines(), sep="\n")
    return 1 if report.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
