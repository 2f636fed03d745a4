"""How fast `slime view` answers on a large recording, and what memory it takes.

    python tools/bench/bench_view.py [--samples 10000] [--tokens 2000] [--rollouts 2000] [--dir DIR]

Writes a run of that many rollouts with a recording, one rollout of which has that many samples (kept
in DIR where one is given), starts the viewer on it, and asks for each page as a browser does.
Exit status 1 where the first page takes 1 s, a click 300 ms, or the process 1 GiB. `server` is the
processor time that the viewer spent on the page: what a click takes on a machine that does nothing
else.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
import pyarrow
import yaml

from slime.files import tables
from slime.files.jsonl import JsonlWriter
from slime.recording import manifest

FIRST_S, CLICK_S, MEMORY_GIB = 1.0, 0.3, 1.0
ROOT = Path(__file__).resolve().parents[2]
WORDS = "the answer is seven because we add both numbers and carry one <b>so</b> it follows".split()
# columns of the samples part that are empty
NOTHING = (
    "reason", "detail", "dropped_by", "engine_text", "keep_mask", "changes", "kinds", "rest",
)  # fmt: skip
CLOCK = os.sysconf("SC_CLK_TCK")


# --- the recording --------------------------------------------------------------------------------


def build(root: Path, *, samples: int, tokens: int, rollouts: int) -> None:
    """A run of `rollouts` rollouts, the last of which has the samples; the others have 16 short
    ones.
    """
    run, recording = root / "run", root / "run" / "recording"
    recording.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump({"record": str(recording), "lr": 1e-6}))
    golden = ROOT / "tests" / "golden" / "run"
    shutil.copy(golden / "run_0000.json", recording)
    shutil.copytree(golden / "tokenizer", recording / "tokenizer")
    write_metrics(run / "metrics.jsonl", rollouts)
    small = root / "small"
    small.mkdir()
    write_rollout(small, 0, count=16, length=8)
    for number in range(rollouts - 1):
        folder = manifest.rollout_folder(recording, number)
        folder.mkdir()
        for path in small.glob("*.parquet"):
            os.link(path, folder / path.name)
        for writer in (manifest.ROLLOUT, manifest.TRAIN):
            listed = manifest.read_manifest(small, writer)
            assert listed is not None
            listed.rollout_id = number
            manifest.write_manifest(folder, listed)
    large = manifest.rollout_folder(recording, rollouts - 1)
    large.mkdir()
    write_rollout(large, rollouts - 1, count=samples, length=tokens)


def write_metrics(path: Path, rollouts: int) -> None:
    """Metrics as a run logs them: about 300 names by rollout, and eight optimizer steps of 15."""
    from slime.harness.run_records import FAMILIES

    shown = [names[0] for names in FAMILIES.values()]
    names = [*shown, "rollout/ledger/sampled", "rollout/ledger/trained", "schedule/num_steps"]
    names += [f"gate/ratio/reason_{i}" for i in range(14)]
    names += [f"gate/time/check_{i}" for i in range(270)]
    writer, draw = JsonlWriter(path), random.Random(0)
    for rollout in range(rollouts):
        values = {name: draw.random() for name in names}
        records = [{"step_key": "rollout/step", "step": rollout, "metrics": values}]
        for step in range(8 * rollout, 8 * rollout + 8):
            values = {f"train/metric_{i}": draw.random() for i in range(13)}
            values |= {"train/loss": draw.random(), "train/grad_norm": draw.random()}
            records.append({"step_key": "train/step", "step": step, "metrics": values})
        writer.write_all(records)
    writer.close()


def write_rollout(folder: Path, number: int, *, count: int, length: int) -> None:
    """The parts of a rollout of `count` samples with `length` response tokens, in groups of 8."""
    draw = np.random.default_rng(number)
    lengths = np.full(count, length)
    total, rows = count * length, np.arange(count)

    def per_token(values: np.ndarray) -> pyarrow.Array:
        return tables.list_column(values, lengths)

    reward = draw.integers(0, 2, count)
    engine = -draw.exponential(1.0, total)
    ids = per_token(draw.integers(4, 47, total).astype(np.int32))
    mask = per_token(np.ones(total, dtype=np.uint8))
    advantages = per_token(np.repeat(reward - 0.5, length).astype(np.float32))
    samples = {
        **facts_of(reward, lengths, draw),
        "tokens": ids,
        "loss_mask": per_token(np.ones(total, dtype=np.int32)),
        "rollout_log_probs": per_token(engine),
    }
    places = {
        "position": rows,
        "dp_rank": (rows % 8).astype(np.int32),
        "step": (rows * 4 // count).astype(np.int32),
        "micro_batch": (rows // 128).astype(np.int32),
    }
    columns = {
        "position": rows,
        "raw_row": rows,
        "sample_index": rows,
        "rewards": (reward - 0.5).astype(np.float32),
        "total_lengths": lengths,
        "tokens": ids,
        "loss_masks": mask,
    }
    trained = {
        **places,
        "log_probs": per_token((engine + draw.normal(0, 0.01, total)).astype(np.float32)),
        "rollout_log_probs": per_token(engine.astype(np.float32)),
        "advantages": advantages,
        "loss_masks": mask,
        "returns": advantages,
        "tokens": ids,
    }
    own = {"samples": samples, "columns": columns, "schedule": {**places, "raw_row": rows}}
    write_parts(folder, manifest.Manifest(number, manifest.ROLLOUT, run=0), own)
    write_parts(folder, manifest.Manifest(number, manifest.TRAIN, run=0), {"train": trained})


def facts_of(reward: np.ndarray, lengths: np.ndarray, draw: np.random.Generator) -> dict[str, Any]:
    """The columns of the samples part that hold one value per sample."""
    count = len(reward)
    rows = np.arange(count)
    texts = [" ".join(draw.choice(WORDS, max(1, int(lengths[0]) * 3 // 4))) for _ in range(64)]
    nothing, text = pyarrow.nulls(count, pyarrow.large_string()), pyarrow.large_string()

    def texts_of(values: list[str]) -> pyarrow.Array:
        return pyarrow.array(values, text)

    return {
        "raw_row": rows,
        "valid": np.ones(count, dtype=bool),
        "dropped": np.zeros(count, dtype=bool),
        **dict.fromkeys(NOTHING, nothing),
        "index": rows,
        "group_index": rows // 8,
        "rollout_id": pyarrow.nulls(count, pyarrow.int64()),
        "response_length": lengths,
        "prompt": texts_of([f"question {i // 8}: {texts[i // 8 % 64][:400]}" for i in rows]),
        "response": texts_of([f"{texts[i % 64]} {i}" for i in rows]),
        "finish_reason": texts_of(["stop"] * count),
        "status": texts_of(["completed"] * count),
        "label": texts_of([f'"{i // 8}"' for i in rows]),
        "reward": texts_of([f"{value}.0" for value in reward]),
        "metadata": texts_of(["{}"] * count),
        "weight_versions": texts_of(['["7"]'] * count),
    }


def write_parts(
    folder: Path, listed: manifest.Manifest, parts: Mapping[str, Mapping[str, Any]]
) -> None:
    """Writes the parts and their manifest."""
    listed.facts["complete"] = True
    for name, columns in parts.items():
        table, path = pyarrow.table(dict(columns)), folder / f"{name}.parquet"
        tables.write_table_to(path, table)
        size, found = path.stat().st_size, manifest.file_hash(path)
        listed.parts[name] = manifest.Part(name, path.name, size, found, 1, len(table))
    manifest.write_manifest(folder, listed)


# --- the viewer -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Viewer:
    """A running viewer and a connection to it."""

    process: subprocess.Popen[str]
    host: str
    cookie: str = ""

    def get(self, path: str) -> tuple[float, float, bytes]:
        """(seconds, seconds of its processor time, the page)."""
        before, started = self.cpu_seconds(), time.perf_counter()
        connection = http.client.HTTPConnection(self.host, timeout=120)
        connection.request("GET", path, headers={"Cookie": self.cookie})
        answer = connection.getresponse()
        body = answer.read()
        seconds = time.perf_counter() - started
        if not self.cookie:
            self.cookie = (answer.getheader("set-cookie") or "").partition(";")[0]
        elif answer.status != 200:
            raise SystemExit(f"{path}: {answer.status}: {body[:300]!r}")
        return seconds, self.cpu_seconds() - before, body

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK

    def peak_gib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 2**20


def start(root: Path) -> tuple[Viewer, str]:
    """(the viewer, the path with its token)."""
    command = [sys.executable, "-m", "slime.cli", "view", str(root), "--no-browser", "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert process.stdout is not None
    address = urlsplit(process.stdout.readline().strip())
    return Viewer(process, address.netloc), f"/?{address.query}"


def clicks(name: str, rollouts: int, samples: int) -> list[tuple[str, str]]:
    """(what, path) of what a reader asks for, one after the other."""
    run = f"/run/{name}"
    large = f"{run}/rollout/rollout-{rollouts - 1}"
    gap = quote("gap > 0.001 and reward == 1")
    return [
        ("overview", run),
        ("curves", f"/api/trends?run={name}"),
        ("rollouts", f"{run}/rollouts"),
        ("rollouts, last page", f"{run}/rollouts?page=19"),
        ("a small rollout", f"{run}/rollout/rollout-{rollouts // 2}"),
        ("the large rollout", large),
        ("its page 100", f"{large}?page=99"),
        ("sorted by reward", f"{large}?sort=reward&dir=desc"),
        ("sorted by label", f"{large}?sort=label&dir=desc"),
        ("filtered", f"{large}?filter={quote('reward == 1 and rank == 3')}"),
        ("searched", f"{large}?q=number%20{samples // 2}"),
        ("searched again", f"{large}?q=follows%2077"),
        ("groups", f"{large}?view=groups&sort=mean&dir=desc"),
        ("a group", f"{large}/group/{samples // 16}"),
        ("a sample", f"{large}/sample/{samples // 2}"),
        ("the next sample", f"{large}/sample/{samples // 2 + 1}"),
        ("another sample", f"{large}/sample/{samples - 1}?view=gap"),
        ("its JSON", f"{large}/sample/{samples - 1}.json"),
        ("schedule", f"{large}/schedule"),
        ("thresholds", f"{large}/gate?low=10&high=1500"),
        ("gate", f"{run}/gate"),
        ("gap of all samples", f"{large}?sort=gap&dir=desc"),
        ("filtered by gap", f"{large}?filter={gap}"),
    ]


def main() -> int:
    """Prints a line per page; returns 1 where a bound is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--dir", type=Path, default=None, help="Keeps the recording here.")
    options = parser.parse_args()
    root = options.dir or Path(tempfile.mkdtemp(prefix="bench-view-"))
    try:
        if not (root / "run" / "metrics.jsonl").is_file():
            shapes = {name: getattr(options, name) for name in ("samples", "tokens", "rollouts")}
            build(root, **shapes)
        return measure(root / "run", options)
    finally:
        if options.dir is None:
            shutil.rmtree(root)


def measure(run: Path, options: argparse.Namespace) -> int:
    viewer, first = start(run)
    late = []
    try:
        viewer.get(first)
        print(f"{'page':24}{'seconds':>9}{'server':>9}{'kB':>8}   load {os.getloadavg()[0]:.1f}")
        asked = [("all runs", "/"), *clicks(run.name, options.rollouts, options.samples)]
        for place, (what, path) in enumerate(asked):
            seconds, server, page = viewer.get(path)
            after = seconds
            while b"of this large rollout" in page.lower():
                time.sleep(0.1)
                more, _, page = viewer.get(path)
                after += 0.1 + more
            if place == 0:
                since = time.perf_counter() - seconds
                while b"being read" in page:
                    time.sleep(0.2)
                    page = viewer.get(path)[2]
                read_after = time.perf_counter() - since
            bound = FIRST_S if place == 0 else CLICK_S
            if seconds > bound:
                late.append(what)
            note = "   late" if seconds > bound else ""
            note += f"   whole after {after:.1f} s" if after > seconds else ""
            print(f"{what:24}{seconds:9.3f}{server:9.2f}{len(page) / 1000:8.0f}{note}")
        print(f"numbers of the run after {read_after:.1f} s")
        peak = viewer.peak_gib()
        print(f"memory at its peak: {peak:.2f} GiB")
        before = viewer.cpu_seconds()
        time.sleep(5)
        print(f"idle: {(viewer.cpu_seconds() - before) / 5:.1%} of a core")
    finally:
        viewer.process.terminate()
        viewer.process.wait(timeout=10)
    return int(bool(late) or peak > MEMORY_GIB)


if __name__ == "__main__":
    raise SystemExit(main())
