"""What `slime diff` takes: two large rollouts, and two long recordings.

    python tools/bench/bench_diff.py large [--samples 8192] [--tokens 2000] [--folder F]
    python tools/bench/bench_diff.py other [--samples 8192] [--tokens 2000] [--folder F]
    python tools/bench/bench_diff.py many RECORDING [--rollouts 200] [--folder F]

`large` makes two rollouts of that many samples with that many tokens, equal but for one log-prob of
the trainer, with replies as an engine sends them. In `other` every response token, log-prob, text
and reward of the second differs. `many` copies the first rollout of a recording that often, twice,
the second time with another time in every part. The comparison runs in a process of its own:
seconds from its start to its end, CPU seconds, and its peak memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson
import pyarrow

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slime.data.sample import Sample  # noqa: E402
from slime.files import tables  # noqa: E402
from slime.files.field_table import FieldRows, field_table  # noqa: E402
from slime.files.sample_table import sample_table  # noqa: E402
from slime.files.train_table import train_table  # noqa: E402
from slime.recording import manifest  # noqa: E402

PROMPT = 200


def make_large(root: Path, num_samples: int, num_tokens: int, *, side: str) -> None:
    """One recorded rollout. `side`: "a", "b" with another log-prob of sample 5000, or "other" with
    other responses to the same prompts.
    """
    changed = side == "b"
    rng = np.random.default_rng(0)
    folder = root / "rollout_000000"
    folder.mkdir(parents=True)
    record = {"format": manifest.FORMAT, "options": {}, "versions": {}, "code": "x"}
    manifest.run_path(root, 0).write_text(json.dumps(record))
    responses = num_tokens - PROMPT
    tokens = rng.integers(0, 150_000, (num_samples, num_tokens), dtype=np.int32)
    rng = np.random.default_rng(1) if side == "other" else rng
    if side == "other":
        tokens[:, PROMPT:] = rng.integers(0, 150_000, (num_samples, responses), dtype=np.int32)
    engine = -rng.random((num_samples, responses), dtype=np.float32)
    parts: dict[str, Callable[[Path], int | None]] = {}

    def table(made: pyarrow.Table) -> Callable[[Path], int]:
        return lambda path: (tables.write_table_to(path, made), len(made))[1]

    parts["replies"] = lambda path: write_replies(path, tokens, engine, side=side)
    parts["samples"] = table(samples_of(tokens, engine))
    lengths = np.full(num_samples, responses, dtype=np.int64)
    ones = np.ones(num_samples * responses, dtype=np.uint8)
    columns = [
        FieldRows("tokens", "rows", tokens.reshape(-1), np.full(num_samples, num_tokens)),
        FieldRows("loss_masks", "rows", ones, lengths),
        FieldRows("rollout_log_probs", "rows", engine.reshape(-1), lengths),
        FieldRows("rewards", "number", rng.random(num_samples, dtype=np.float32)),
    ]
    rows = np.arange(num_samples, dtype=np.int64)
    extra = {"raw_row": rows, "sample_index": rows}
    parts["columns"] = table(field_table(columns, num_rows=num_samples, extra=extra))
    parts["train"] = table(trained(tokens, engine, changed=changed))
    for writer in (manifest.ROLLOUT, manifest.TRAIN):
        listed = manifest.Manifest(0, writer, 0, facts={"complete": True})
        for name, write in parts.items():
            file, owner = manifest.PARTS[name]
            if owner == writer:
                path = folder / file
                num_rows = write(path)
                listed.parts[name] = manifest.Part(
                    name,
                    file,
                    path.stat().st_size,
                    manifest.file_hash(path),
                    manifest.SCHEMAS[name],
                    num_rows,
                )
        manifest.write_manifest(folder, listed)


def samples_of(tokens: np.ndarray, engine: np.ndarray) -> pyarrow.Table:
    """The samples part, with texts of two characters per token."""
    responses = engine.shape[1]
    samples = [
        Sample(
            index=row,
            group_index=row // 8,
            prompt="a prompt " * 20,
            response=text_of(tokens[row]),
            tokens=tokens[row],
            response_length=responses,
            loss_mask=np.ones(responses, dtype=np.int64),
            rollout_log_probs=engine[row].astype(np.float64),
            reward=float(tokens[row, -1] % 3),
            session_id=f"{row // 8}-{row}",
        )
        for row in range(len(tokens))
    ]
    table = sample_table(samples)
    verdicts = {
        "raw_row": pyarrow.array(np.arange(len(tokens), dtype=np.int64)),
        "valid": pyarrow.array([True] * len(tokens)),
        "dropped_by": pyarrow.array([None] * len(tokens), pyarrow.large_string()),
    }
    for name, column in verdicts.items():
        table = table.append_column(name, column)
    return table


def text_of(tokens: np.ndarray) -> str:
    """Two letters for each token of the response."""
    letters = np.stack((tokens[PROMPT:] % 26, tokens[PROMPT:] // 26 % 26), axis=1)
    return (letters + ord("a")).astype(np.uint8).tobytes().decode()


def write_replies(path: Path, tokens: np.ndarray, engine: np.ndarray, *, side: str) -> int:
    """One reply per sample, with the log-prob and id of every token, and times of this run."""
    with open(path, "wb") as file:
        for row, (ids, log_probs) in enumerate(zip(tokens, engine, strict=True)):
            meta = {
                "id": f"{side}-e3cd-{row}",
                "e2e_latency": time.perf_counter(),
                "output_token_logprobs": [
                    [one, token, None]
                    for one, token in zip(log_probs.tolist(), ids[PROMPT:].tolist(), strict=True)
                ],
            }
            record = {
                "url": f"http://127.0.0.1:{4000 + len(side)}/generate",
                "status": 200,
                "request": {
                    "input_ids": ids[:PROMPT].tolist(),
                    "sampling_params": {"sampling_seed": row},
                    "rid": f"{side}-e3cd-{row}",
                },
                "reply": {"text": text_of(ids), "meta_info": meta},
            }
            file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
    return len(tokens)


def trained(tokens: np.ndarray, engine: np.ndarray, *, changed: bool) -> pyarrow.Table:
    """The train part: eight fields per response token."""
    num, responses = engine.shape
    lengths = np.full(num, responses, dtype=np.int64)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    names = "log_probs ref_log_probs rollout_log_probs kl entropy advantages returns".split()
    tensors: dict[str, np.ndarray] = {"partition": np.arange(num)}
    rng = np.random.default_rng(1)
    for name in names:
        values = engine.reshape(-1).copy()
        values += rng.random(len(values), dtype=np.float32)
        tensors[name], tensors[f"{name}.offsets"] = values, offsets
    if changed:
        tensors["log_probs"][offsets[min(5000, num - 1)] + 17] += 1e-6
    tensors["tokens"] = tokens.reshape(-1)
    tensors["tokens.offsets"] = np.arange(num + 1) * tokens.shape[1]
    header = {
        "rollout_id": 0,
        "rank": 0,
        "cp_size": 1,
        "num_whole": num,
        "dp_shards": [{"partition": list(range(num))}],
        "left_out": {},
        "fields": {"partition": "number", **dict.fromkeys([*names, "tokens"], "rows")},
    }
    return train_table(header, tensors)


def make_many(recording: Path, root: Path, num_rollouts: int) -> None:
    """The first rollout of the recording, that often, each part with bytes of its own."""
    root.mkdir(parents=True)
    shutil.copy(manifest.run_path(recording, 0), root)
    source = manifest.rollout_folder(recording, manifest.recorded_rollouts(recording)[0])
    for number in range(num_rollouts):
        folder = manifest.rollout_folder(root, number)
        shutil.copytree(source, folder)
        for writer in manifest.WRITERS:
            found = manifest.read_manifest(folder, writer)
            if found is None:
                continue
            found = dataclasses.replace(found, rollout_id=number)
            for name, part in found.parts.items():
                path = folder / part.file
                if path.suffix == ".parquet":
                    stamp = f"{root} {number}"
                    tables.write_table(path, tables.read_table(path), {"stamp": stamp})
                found.parts[name] = dataclasses.replace(
                    part, num_bytes=path.stat().st_size, blake2b=manifest.file_hash(path)
                )
            manifest.write_manifest(folder, found)


def measure(a: Path, b: Path) -> None:
    """Runs `slime diff` in a process of its own and prints what it took."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    begun = time.perf_counter()
    found = subprocess.run(
        [sys.executable, "-m", "slime.cli", "diff", str(a), str(b)],
        env=environment,
        text=True,
        capture_output=True,
    )
    seconds = time.perf_counter() - begun
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak, busy = used.ru_maxrss / 2**20, used.ru_utime + used.ru_stime
    print(found.stdout[:1500] + found.stderr[-1500:])
    print(
        f"status {found.returncode}, {seconds:.1f} s, {busy:.1f} CPU seconds, peak {peak:.2f} GiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("large", "other", "many"))
    parser.add_argument("recording", type=Path, nargs="?")
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        sides = [folder / name for name in ("a", "other" if options.what == "other" else "b")]
        for side in sides:
            if side.exists():
                continue
            if options.what != "many":
                make_large(side, options.samples, options.tokens, side=side.name)
            elif options.recording is None:
                parser.error("many needs a recording")
            else:
                make_many(options.recording, side, options.rollouts)
        measure(*sides)


if __name__ == "__main__":
    main()
