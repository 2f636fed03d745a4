"""What a run writes and reads back, one `Target` each: how version N of it is saved, and which
version a restart finds. Versions are numbered 0, 1, 2 ...; every value in a file follows from the
version, so that reading proves that nothing of two versions is mixed.
"""

from __future__ import annotations

import abc
import argparse
import json
import re
from pathlib import Path

import numpy as np

from slime.data.run_ledger import RolloutEntry, SavedState, Start, StreamMark, TrainedEntry
from slime.data.sample import Sample
from slime.exceptions import SlimeError
from slime.files import tables
from slime.files.jsonl import JsonlWriter, read_jsonl
from slime.files.ledger_file import (
    FILE_NAME,
    LedgerWriter,
    handed_state_path,
    read_books,
    read_state,
    write_state,
)
from slime.files.rollout_dump import read_rollout_dump, save_debug_rollout_data
from slime.files.train_dump import TrainDumpWriter, read_train_dump
from slime.files.train_record import TensorOutline
from slime.gate.history import GateHistory
from slime.gate.statistics import GateStatistics
from slime.prompts.data_source import RolloutDataSourceWithBuffer
from slime.recording.manifest import ROLLOUT, TRAIN
from slime.recording.reader import Recording
from slime.recording.writer import PartWriter, clean_up
from slime.testing import make_args

NUM_SAMPLES = 6


class Mixed(AssertionError):
    """What was read is no version that was ever saved."""


def check(condition: bool, what: str) -> None:
    """`Mixed` unless the condition holds."""
    if not condition:
        raise Mixed(what)


class Target(abc.ABC):
    """One kind of file. `folder` is the only place that it touches."""

    name: str
    appends = False  # a crash may cost the end of what was appended last
    imports: tuple[str, ...] = ()  # modules that a fork should find loaded

    def prepare(self, folder: Path) -> None:  # noqa: B027 - most need nothing
        """Makes what a run is given: prompts, a model. No fault strikes here."""

    @abc.abstractmethod
    def write(self, folder: Path, version: int) -> None:
        """Saves `version` as a run does. An exception where the disk refuses it."""

    @abc.abstractmethod
    def read(self, folder: Path) -> int | None:
        """The version that a restart continues from, None where there is none. `Mixed` where its
        values are not those of that version; a `SlimeError` where a file is damaged.
        """


def samples_of(version: int) -> list[Sample]:
    """The samples of a version; sample i has i + 1 response tokens."""
    return [
        Sample(
            group_index=index // 2,
            index=index,
            prompt=f"prompt {index} of {version} é",
            tokens=[1000 * version + index] * (index + 3),
            response="x" * index,
            response_length=index + 1,
            reward=version + index / 8,
            rollout_log_probs=[-(version + index / 16)] * (index + 1),
            status=Sample.Status.COMPLETED,
            metadata={"version": version},
        )
        for index in range(NUM_SAMPLES)
    ]


class RolloutDump(Target):
    """--save-debug-rollout-data, written over the dump of an earlier attempt."""

    def __init__(self, suffix: str) -> None:
        self.name, self.suffix = f"rollout dump ({suffix})", suffix
        self.imports = ("pyarrow.parquet",) if suffix == "parquet" else ()

    def write(self, folder: Path, version: int) -> None:
        save_debug_rollout_data(
            f"{folder}/{{rollout_id}}.{self.suffix}",
            samples_of(version),
            rollout_id=7,
            evaluation=False,
        )

    def read(self, folder: Path) -> int | None:
        path = folder / f"7.{self.suffix}"
        if not path.exists():
            return None
        samples = read_rollout_dump(path)
        check(len(samples) == NUM_SAMPLES, f"{len(samples)} samples")
        version = samples[0].metadata.get("version")
        check(type(version) is int, f"version {version!r}")
        for found, expected in zip(samples, samples_of(version), strict=True):
            check(found.to_dict() == expected.to_dict(), f"sample {expected.index} of {version}")
        return version


class TrainDump(Target):
    """--save-debug-train-data as safetensors."""

    name = "train dump"

    def write(self, folder: Path, version: int) -> None:
        values = self._values(version)
        outlines = [
            TensorOutline(name, array.dtype.name, array.shape) for name, array in values.items()
        ]
        header = {
            "rollout_id": 3,
            "rank": 0,
            "num_whole": NUM_SAMPLES,
            "left_out": {},
            "dp_shards": [],
            "fields": {"log_probs": "rows", "rewards": "number"},
        }
        writer = TrainDumpWriter(folder / "3.safetensors", header, outlines)
        try:
            for name, array in values.items():
                writer.write(name, array)
            writer.commit()
        finally:
            writer.abandon()

    def read(self, folder: Path) -> int | None:
        path = folder / "3.safetensors"
        if not path.exists():
            return None
        dump = read_train_dump(path)
        version = round(float(dump.sample_fields["rewards"][0]))
        values = self._values(version)
        check(np.array_equal(dump.sample_fields["rewards"], values["rewards"]), "rewards")
        check(
            np.array_equal(np.concatenate(dump.token_fields["log_probs"]), values["log_probs"]),
            "log_probs",
        )
        return version

    @staticmethod
    def _values(version: int) -> dict[str, np.ndarray]:
        lengths = np.arange(1, NUM_SAMPLES + 1)
        rows = np.arange(lengths.sum(), dtype=np.float32) + 1000 * version
        return {
            "log_probs": rows,
            "log_probs.offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            "rewards": np.full(NUM_SAMPLES, version, dtype=np.float32),
        }


class DataPosition(Target):
    """The data source's state beside a checkpoint, one file per rollout."""

    name = "data position"

    def prepare(self, folder: Path) -> None:
        rows = (json.dumps({"input": f"p{number}=", "label": str(number)}) for number in range(12))
        (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")

    def write(self, folder: Path, version: int) -> None:
        self._source(folder, version).save(version)

    def read(self, folder: Path) -> int | None:
        names = [path.stem for path in (folder / "run" / "rollout").glob("*.json")]
        if not names:
            return None
        version = max(int(re.sub(r"\D", "", name)) for name in names)
        source = self._source(folder, -1)
        source.load(version)
        expected = self._source(folder, version)
        check(
            source.state_dict(version) == expected.state_dict(version), f"position after {version}"
        )
        return version

    @staticmethod
    def _source(folder: Path, version: int) -> RolloutDataSourceWithBuffer:
        """A source after rollouts 0 .. `version`; one group of each is still out."""
        run = str(folder / "run")
        args = make_args(
            prompt_data=str(folder / "prompts.jsonl"),
            rm_type="exact_match",
            label_key="label",
            run_dir=None,
            save=run,
            load=run,
            rollout_shuffle=True,
        )
        source = RolloutDataSourceWithBuffer(args)
        for rollout_id in range(version + 1):
            groups = source.get_samples(3)
            source.commit(rollout_id, [group[0].group_index for group in groups[:2]])
        return source


class RecordedRollout(Target):
    """--record: the manager's and the ranks' parts, one rollout per version."""

    name = "recording"
    imports = ("pyarrow.parquet",)

    def prepare(self, folder: Path) -> None:
        (folder / "run_0000.json").write_text("{}")

    def write(self, folder: Path, version: int) -> None:
        import pyarrow

        clean_up(folder)  # as a run does before it records
        table = pyarrow.table({"version": [version] * NUM_SAMPLES})

        def write(path: Path) -> int:
            tables.write_table_to(path, table)
            return NUM_SAMPLES

        for name, parts in ((ROLLOUT, ("samples", "columns")), (TRAIN, ("train",))):
            writer = PartWriter(folder, name, run=0)
            writer.begin(version)
            for part in parts:
                writer.add(part, write)
            writer.finish(version=version)
            writer.close()
            if writer.failed:
                raise OSError("the recording has stopped")

    def read(self, folder: Path) -> int | None:
        recording, found = Recording(folder), None
        for number in recording.rollouts:
            rollout = recording.rollout(number)
            if problems := rollout.problems():
                raise SlimeError(" ".join(problems))
            for name in ("samples", "columns", "train"):
                if name in rollout:
                    values = rollout.table(name)["version"].to_pylist()
                    check(values == [number] * NUM_SAMPLES, f"{name} of {number}")
            facts = [one.facts for one in rollout.manifests.values()]
            if len(facts) == 2 and all(one.get("complete") for one in facts):
                found = number
        return found


class History(Target):
    """What the gate's drift check remembers, beside a checkpoint."""

    name = "gate history"

    def write(self, folder: Path, version: int) -> None:
        self._history(version).write(folder / "history.jsonl", version)

    def read(self, folder: Path) -> int | None:
        path = folder / "history.jsonl"
        if not path.exists():
            return None
        lines, _ = read_jsonl(path)
        version = lines[0].get("rollout_id") if lines else None
        check(type(version) is int, f"version {version!r}")
        history = GateHistory(window=3)
        if (problem := history.read(path, version)) is not None:
            raise SlimeError(problem)
        expected = self._history(version)
        for evaluation in (False, True):
            check(
                [one.to_history() for one in history.last(evaluation=evaluation)]
                == [one.to_history() for one in expected.last(evaluation=evaluation)],
                f"history of {version}",
            )
        return version

    @staticmethod
    def _history(version: int) -> GateHistory:
        history = GateHistory(window=3)
        for number in range(version + 1):
            for evaluation in (False, True):
                history.add(number, _statistics(number), evaluation=evaluation)
        return history


def _statistics(number: int) -> GateStatistics:
    return GateStatistics(
        codes=np.zeros(NUM_SAMPLES, dtype=np.int8),
        findings=np.zeros(NUM_SAMPLES, dtype=np.int8),
        lengths=np.full(NUM_SAMPLES, number, dtype=np.int32),
        group_ids=np.arange(NUM_SAMPLES, dtype=np.int64),
        rollout_ids=np.full(NUM_SAMPLES, -1, dtype=np.int64),
        prompt_digests=np.arange(NUM_SAMPLES, dtype=np.uint64),
        counts={"samples": NUM_SAMPLES},
        seconds={"judge": number / 8},
    )


class Metrics(Target):
    """metrics.jsonl and its like: appended to by every process."""

    name = "metrics"
    appends = True
    LINES = 3

    def write(self, folder: Path, version: int) -> None:
        writer = JsonlWriter(folder / "metrics.jsonl")
        try:
            for line in range(self.LINES):
                writer.write({"step": version, "line": line, "value": version / 8})
        finally:
            writer.close()

    def read(self, folder: Path) -> int | None:
        records, _ = read_jsonl(folder / "metrics.jsonl")
        counts: dict[int, int] = {}
        for record in records:
            version = record.get("step")
            check(type(version) is int and record.get("value") == version / 8, f"record {record}")
            counts[version] = counts.get(version, 0) + 1
        whole = [version for version, count in counts.items() if count == self.LINES]
        return max(whole, default=None)


class Books(Target):
    """The run's ledger: lines that are appended, and a state beside each checkpoint."""

    name = "ledger"
    appends = True

    def write(self, folder: Path, version: int) -> None:
        writer = LedgerWriter(folder)
        try:
            begun = [self._start()] if version == 0 else []
            writer.append([*begun, self._rollout(version), self._trained(version)])
            writer.sync()
        finally:
            writer.close()
        write_state(handed_state_path(folder, version), self._state(version))

    def read(self, folder: Path) -> int | None:
        found = None
        books = read_books(folder / FILE_NAME)
        check(not books.twice, f"twice: {books.twice}")
        for (start, version), entry in books.rollouts.items():
            check(start == "s" and entry == self._rollout(version), f"rollout {version}")
        for (start, version), entry in books.trained.items():
            check(start == "s" and entry == self._trained(version), f"training of {version}")
        for path in (folder / "rollout").glob("ledger_*.json"):
            version = int(re.sub(r"\D", "", path.stem))
            check(read_state(path) == self._state(version), f"state after {version}")
            if ("s", version) in books.rollouts and ("s", version) in books.trained:
                found = version if found is None else max(found, version)
        return found

    @staticmethod
    def _start() -> Start:
        return Start("s", 0.0, "run", 0, (), None, ())

    @staticmethod
    def _rollout(version: int) -> RolloutEntry:
        return RolloutEntry(
            start="s",
            rollout=version,
            time=version / 8,
            process="p",
            mark=StreamMark(version + 1, 0, version + 1, 100, 4),
            served=((0, version, version, 1),),
            again=(),
            is_told=True,
            planned={0: ((4 * version, 3),)},
            dropped={"truncated": ((4 * version + 3, 1),)},
            rows={},
            unnamed={},
            counts={"sampled": 4},
        )

    @staticmethod
    def _trained(version: int) -> TrainedEntry:
        return TrainedEntry("s", version, version / 8, "p", 3, {}, 0)

    @staticmethod
    def _state(version: int) -> SavedState:
        mark = StreamMark(version + 1, 0, version + 1, 100, 4)
        return SavedState(version, (("s", 0, version),), mark, ())


class Checkpoint(Target):
    """Model, optimizer, schedule and random states of one training rank, kept twice."""

    name = "checkpoint"
    imports = (
        "transformers",
        "torch.distributed",
        "slime.backends.megatron_utils.initialize",
        "slime.backends.megatron_utils.optimizer",
        "slime.backends.megatron_utils.checkpoint",
        "support.megatron_args",
    )

    def prepare(self, folder: Path) -> None:
        from support.tiny_models import make_tiny_checkpoint

        make_tiny_checkpoint(folder / "model")

    def write(self, folder: Path, version: int) -> None:
        import torch

        from slime.backends.megatron_utils.checkpoint import save_checkpoint

        with self._built(folder) as (args, model, optimizer, scheduler):
            with torch.no_grad():
                for parameter in model[0].parameters():
                    parameter.fill_(version + 0.5)
            optimizer.reload_model_params()
            scheduler.num_steps = 10 * version
            save_checkpoint(
                args, version, model, optimizer, scheduler, save_dir=str(folder / "save")
            )

    def read(self, folder: Path) -> int | None:
        import torch

        from slime.backends.megatron_utils.checkpoint import load_checkpoint
        from slime.backends.megatron_utils.checkpoint_files import TRACKER

        save = folder / "save"
        if not (save / TRACKER).exists():
            return None
        with self._built(folder) as (args, model, optimizer, scheduler):
            version = load_checkpoint(args, model, optimizer, scheduler, load_dir=str(save))
            for name, parameter in model[0].named_parameters():
                check(bool(torch.all(parameter == version + 0.5)), f"{name} of {version}")
            check(scheduler.num_steps == 10 * version, f"schedule of {version}")
        return version

    @staticmethod
    def _built(folder: Path):  # noqa: ANN205 - a context manager of (args, model, optimizer, scheduler)
        import torch.distributed as dist
        from support.megatron_worker import built

        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return built(folder / "model", keep_checkpoints=2)


class Careless(Target):
    """Writes its file in place: what the tool must find out, see `storage.prove`."""

    name = "careless"

    def write(self, folder: Path, version: int) -> None:
        (folder / "state").write_text(f"{version}" * 100)

    def read(self, folder: Path) -> int | None:
        text = (folder / "state").read_text()
        check(len(text) == 100 and len(set(text)) == 1, f"{len(text)} bytes")
        return int(text[0])


def all_targets() -> list[Target]:
    """Everything that is tried."""
    return [
        Checkpoint(),
        DataPosition(),
        RecordedRollout(),
        RolloutDump("jsonl"),
        RolloutDump("parquet"),
        TrainDump(),
        History(),
        Metrics(),
        Books(),
    ]


def targets_of(options: argparse.Namespace) -> list[Target]:
    """Those whose name holds one of --only's words."""
    return [
        target
        for target in all_targets()
        if not options.only or any(word in target.name for word in options.only)
    ]
