"""Metrics of a run: one JSONL file that every process appends to, and trackers that one process
feeds.

`log` in any process appends a record to <run dir>/metrics.jsonl. The primary process (the driver)
also feeds TensorBoard and W&B, with its own records directly and with the other processes' records
by following that file, so a tracker has one writer, the training processes never wait for a
network, and W&B's offline mode holds everything. Nothing here ends a run: what a full disk or a
dead tracker did not take is counted, said once, and repeated at the end.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from slime.exceptions import ConfigError, RolloutDataError
from slime.files.jsonl import JsonlTail, JsonlWriter, plain_value, read_jsonl
from slime.tracking import progress, spans
from slime.tracking.tensorboard_sink import TensorBoardSink, resolve_log_dir
from slime.tracking.wandb_sink import WandbSink

logger = logging.getLogger(__name__)

FILE_NAME = "metrics.jsonl"
FOLLOW_INTERVAL_S = 1.0
_configured_logger = False


class Sink(Protocol):
    """A tracker. `write` takes plain values; `metrics[step_key]` is the record's step. Either
    method may raise anything.
    """

    name: str

    def write(self, metrics: dict[str, Any], step_key: str) -> None: ...

    def close(self) -> None: ...


# Libraries whose INFO lines are about themselves, not about the run.
QUIET_LIBRARIES = (
    "megatron",
    "transformers",
    "torch",
    "urllib3",
    "asyncio",
    "filelock",
    "matplotlib",
)


def configure_logger(prefix: str = "", *, log_dir: str | os.PathLike[str] | None = None) -> None:
    """Sets where this process's log lines go, once; `prefix` names the process.

    With `log_dir`, everything from INFO on is in `<log_dir>/<prefix>.log` and only warnings reach
    the terminal; without it INFO does.
    """
    global _configured_logger
    if _configured_logger:
        return
    _configured_logger = True
    terminal = logging.StreamHandler()
    handlers: list[logging.Handler] = [terminal]
    if log_dir is not None:
        os.makedirs(log_dir, exist_ok=True)
        handlers.append(logging.FileHandler(os.path.join(log_dir, f"{prefix or os.getpid()}.log")))
        terminal.setLevel(logging.WARNING)
    logging.basicConfig(
        level=logging.INFO,
        format=f"[%(asctime)s{' ' + prefix if prefix else ''}] %(name)s: %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        handlers=handlers,
        force=True,
    )
    for name in QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    # Python warnings are for developers: they go to the file, not between the lines of the run.
    terminal.addFilter(lambda record: record.name != "py.warnings")


def log_dir_of(args: argparse.Namespace) -> str | None:
    """Where the processes of this run keep their log files; None without a run folder."""
    return os.path.join(os.path.abspath(args.run_dir), "logs") if args.run_dir else None


class StepAxes:
    """Keeps every series of a tracker from going back. A series is one metric on one step axis.

    Series that share an axis advance apart: a rollout is logged while the one before still trains,
    and critic and policy count the same steps one after the other. `before` holds records that an
    earlier process of this run has sent: they are not sent twice.
    """

    def __init__(self, before: list[dict[str, Any]] | None = None) -> None:
        # values of steps that are past in this process: a tracker would draw their line backwards
        self.late = 0
        self._last: dict[tuple[str, str], float] = {}
        for record in before or []:
            for name in record["metrics"]:
                series = (record["step_key"], name)
                self._last[series] = max(record["step"], self._last.get(series, record["step"]))
        self._from_before = set(self._last)

    def admit(self, metrics: dict[str, Any], step_key: str) -> dict[str, Any]:
        """Returns the step and the values that may be sent; {} where none may."""
        step = metrics[step_key]
        admitted = {step_key: step}
        for name, value in metrics.items():
            if name == step_key:
                continue
            series = (step_key, name)
            last = self._last.get(series)
            if last is None or step > last:
                self._last[series] = step
                self._from_before.discard(series)
            elif series in self._from_before:
                continue
            elif step < last:
                self.late += 1
                continue
            admitted[name] = value
        return admitted if len(admitted) > 1 or len(metrics) == 1 else {}


class Tracking:
    """This process's way to the metrics file and, in the primary process, to the trackers."""

    def __init__(
        self,
        run_dir: str | None,
        sinks: list[Sink] | None = None,
        *,
        before: list[dict[str, Any]] | None = None,
    ) -> None:
        self.lost: collections.Counter[str] = collections.Counter()
        self._sinks = sinks or []
        self._axes = StepAxes(before)
        self.process = uuid.uuid4().hex[:8]
        self.collectors: list[list[dict[str, Any]]] = []
        self._logged: dict[tuple[str, Any], set[str]] = {}
        self._lock = threading.Lock()
        self._writer = None if run_dir is None else JsonlWriter(Path(run_dir) / FILE_NAME)
        self._stop = threading.Event()
        self._follower: threading.Thread | None = None
        if self._sinks and self._writer is not None:
            self._tail = JsonlTail(self._writer.path, from_end=True)
            self._follower = threading.Thread(
                target=self._follow, name="metrics-follower", daemon=True
            )
            self._follower.start()

    def log(self, metrics: dict[str, Any], step_key: str) -> None:
        """Appends one record and, in the primary process, sends it on."""
        if step_key not in metrics:
            raise RolloutDataError(
                f"log: the step {step_key!r} is not among the metrics {sorted(metrics)[:8]}"
            )
        values = {name: plain_value(value) for name, value in metrics.items()}
        record: dict[str, Any] = {
            "time": time.time(),
            "process": self.process,
            "step_key": step_key,
            "step": values[step_key],
        }
        record["metrics"] = {name: value for name, value in values.items() if name != step_key}
        for collector in self.collectors:
            collector.append(
                {"step_key": step_key, "step": record["step"], "metrics": record["metrics"]}
            )
        if logged := self._logged.get((step_key, record["step"])):
            values = {name: value for name, value in values.items() if name not in logged}
            record["metrics"] = {
                name: value for name, value in record["metrics"].items() if name not in logged
            }
            if not record["metrics"]:
                return
        if self._writer is not None:
            if self.lost[FILE_NAME]:
                record["lost_before"] = self.lost[FILE_NAME]
            with self._lock:
                self._attempt(FILE_NAME, lambda: self._writer.write(record))
        self._send(values, step_key)

    def skip_logged(self, offset: int) -> None:
        """From now on `log` leaves out what the file holds from `offset` on."""
        if self._writer is None:
            return
        for record in JsonlTail(self._writer.path, offset=offset).read():
            if "step_key" in record:
                step = record["step_key"], record["step"]
                self._logged.setdefault(step, set()).update(record["metrics"])

    def close(self) -> None:
        """Sends what other processes wrote until now, closes the trackers, and says
        what was lost.
        """
        self._stop.set()
        if self._follower is not None:
            self._follower.join(timeout=30)
            self._forward()
        for sink in self._sinks:
            self._attempt(sink.name, sink.close)
        if self._writer is not None:
            self._writer.close()
        if self._axes.late:
            logger.warning(
                (
                    "%d values were not sent to %s: their series had reached a later step. %s has "
                    "them."
                ),
                self._axes.late,
                ", ".join(sink.name for sink in self._sinks),
                FILE_NAME,
            )
        if self.lost:
            losses = ", ".join(f"{count} by {name}" for name, count in sorted(self.lost.items()))
            logger.warning("metric records lost: %s. Training data is not affected.", losses)

    def _send(self, values: dict[str, Any], step_key: str) -> None:
        if not self._sinks:
            return
        with self._lock:
            admitted = self._axes.admit(values, step_key)
            if not admitted:
                return
            for sink in self._sinks:
                self._attempt(sink.name, lambda sink=sink: sink.write(admitted, step_key))

    def _attempt(self, name: str, action: Any) -> None:
        """Runs `action`; its failure is counted under `name` and said the first time."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a tracker may raise anything, and none of it may end a run
            if not self.lost[name]:
                logger.warning(
                    "%s failed to take a record (%s: %s); training goes on, lost ones are counted",
                    name,
                    type(error).__name__,
                    error,
                )
            self.lost[name] += 1

    def _follow(self) -> None:
        while not self._stop.wait(FOLLOW_INTERVAL_S):
            self._forward()

    def _forward(self) -> None:
        """Sends what other processes have appended since the last call."""
        for record in self._tail.read():
            if record.get("process") != self.process and "step_key" in record:
                self._send(
                    {**record["metrics"], record["step_key"]: record["step"]}, record["step_key"]
                )


_tracking: Tracking | None = None
_is_primary = False
_folders: set[str] = set()


def start_run_folder(args: argparse.Namespace) -> str:
    """Makes the run folder and returns its path. A run that does not resume (no --load) moves an
    older run's records aside, once per process.
    """
    run_dir = os.path.abspath(args.run_dir)
    if run_dir in _folders:
        return run_dir
    _folders.add(run_dir)
    os.makedirs(run_dir, exist_ok=True)
    if not args.load or args.finetune:
        number = len(list(Path(run_dir).glob("metrics.*.jsonl"))) + 1
        for name in (FILE_NAME, progress.FILE_NAME, spans.FOLDER):
            path = Path(run_dir) / name
            if path.exists():
                path.rename(path.with_suffix(f".{number}{path.suffix}"))
    _point_latest(run_dir)
    return run_dir


def _point_latest(run_dir: str) -> None:
    """Makes runs/latest a link to this run; does nothing on a file system without links."""
    parent, name = os.path.split(run_dir)
    if os.path.basename(parent) != "runs":
        return
    with contextlib.suppress(OSError):
        temporary = os.path.join(parent, f".latest-{os.getpid()}")
        os.symlink(name, temporary)
        os.replace(temporary, os.path.join(parent, "latest"))


def build_sinks(args: argparse.Namespace, run_dir: str) -> list[Sink]:
    """Returns the trackers that the options ask for. ConfigError for a missing package; a tracker
    that does not start is left out and said.
    """

    def start_tensorboard() -> Sink:
        root = os.environ.get("TENSORBOARD_DIR")
        return TensorBoardSink(
            resolve_log_dir(run_dir, args.tb_project_name, args.tb_experiment_name, root=root)
        )

    def start_wandb() -> Sink:
        return WandbSink(args, run_dir)

    sinks = []
    for wanted, name, start in (
        (args.use_tensorboard, "TensorBoard", start_tensorboard),
        (args.use_wandb, "W&B", start_wandb),
    ):
        if not wanted:
            continue
        try:
            sinks.append(start())
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - an unreachable tracker must not keep a run from starting
            logger.warning(
                "%s did not start (%s: %s); the run goes on without it",
                name,
                type(error).__name__,
                error,
            )
    return sinks


def init_tracking(args: argparse.Namespace, primary: bool = True, **kwargs: object) -> None:
    """Prepares `log` and `progress.report` in this process. The driver is primary: it alone feeds
    the trackers.

    Upstream's extra keyword arguments are accepted; nothing here needs them. Calling it again
    starts anew.
    """
    global _tracking, _is_primary
    if _tracking is not None:
        if _is_primary and not primary:
            return  # an actor in the driver's own process (--local) logs through the driver's
        _tracking.close()
    run_dir = os.path.abspath(args.run_dir)
    _is_primary = primary
    if primary:
        run_dir = start_run_folder(args)
        before = [
            record for record in read_jsonl(Path(run_dir) / FILE_NAME)[0] if "step_key" in record
        ]
        _tracking = Tracking(run_dir, build_sinks(args, run_dir), before=before)
    else:
        _tracking = Tracking(run_dir)
    progress.configure(run_dir)


def log(args: argparse.Namespace, metrics: dict[str, Any], step_key: str) -> None:
    """Logs one record whose step is `metrics[step_key]` ("train/step", "rollout/step", "eval/step",
    each an axis of its own).

    Values may be numbers, one-element tensors or text. In a process that did not call
    `init_tracking`, W&B's active run takes the record if `args.use_wandb`, and the metrics file if
    `args` names a run folder. RolloutDataError when the step is missing.
    """
    if _tracking is not None:
        _tracking.log(metrics, step_key)
        return
    if args.use_wandb:
        import wandb

        wandb.log(metrics)
    if hasattr(args, "run_dir") and args.run_dir:
        init_tracking(args, primary=False)
        log(args, metrics, step_key)


def skip_logged(offset: int) -> None:
    """From now on this process logs no value that the metrics file holds, from `offset` on, under
    the same step: it does again what a process before it has begun.
    """
    if _tracking is not None:
        _tracking.skip_logged(offset)


def process_name() -> str:
    """What names this process in the records that it logs; "" where it logs none."""
    return "" if _tracking is None else _tracking.process


@contextlib.contextmanager
def collected_metrics() -> Iterator[list[dict[str, Any]]]:
    """Yields a list that takes what this process logs inside the block: {"step_key", "step",
    "metrics"} of each record.
    """
    records: list[dict[str, Any]] = []
    tracking = _tracking
    if tracking is None:
        yield records
        return
    tracking.collectors.append(records)
    try:
        yield records
    finally:
        # two empty lists are equal: the one at hand is removed
        tracking.collectors[:] = [one for one in tracking.collectors if one is not records]


def finish_tracking(args: argparse.Namespace, *, primary: bool = True) -> bool:
    """Closes this process's files and trackers; returns whether it was the primary process, whose
    run folder is complete now.

    Safe to call twice or without `init_tracking`. An actor (not `primary`) leaves those of the
    driver open, which with --local are in its process.
    """
    global _tracking
    spans.stop_tracing()
    if _tracking is None or (_is_primary and not primary):
        return False
    tracking, _tracking = _tracking, None
    tracking.close()
    progress.configure(None)
    _folders.discard(os.path.abspath(args.run_dir))
    return _is_primary


def init_wandb_primary(args: Any) -> WandbSink | None:
    """Returns the W&B run of these options, started in this process; None without --use-wandb. A
    run of slime starts it by itself.
    """
    return WandbSink(args, os.path.abspath(args.run_dir)) if args.use_wandb else None


def init_wandb_secondary(args: Any, role: str | None = None) -> None:
    """Prepares `log` in a further process of the run: its records reach W&B through
    the primary process. `role` names log lines.
    """
    configure_logger(role or "")
    init_tracking(args, primary=False)
