"""Runs for the viewer's tests: metrics, a rollout dump, a copy of the shipped recording; and texts
that a page must not act on.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from slime.data.sample import Sample, Status
from slime.files import tables
from slime.files.jsonl import JsonlWriter
from slime.files.sample_table import sample_table

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "run"
HOSTILE = (
    "<script>fetch('/run')</script>",
    "</script><script>document.title='hacked'</script>",
    "<img src=x onerror=\"document.title='hacked'\">",
    '" onmouseover="document.title=1" x="',
    "' autofocus onfocus='document.title=1",
    "<a href=\"javascript:document.title='hacked'\">click</a>",
    "<div hx-get='/run' hx-trigger='load'>x</div>",
    "{{ 7 * 7 }}{% raw %}${7*7}#{7*7}",
    "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "\u202egnp.exe\u202c \u2066isolate\u2069 \u200bzero\ufeffwidth",
    "a\x00b\x01c\x7fd\x9be",
    "<!-- <style>body{display:none}</style> -->",
    "&lt;b&gt; &#60;script&#62;",
    "half an emoji \ud83d",
    "<svg/onload=alert(1)><math><mi//xlink:href='data:x,<script>'>",
    "line\r\nbreak\u2028separator",
    "x" * 3000,
)


def make_run(folder: Path, texts: tuple[str, ...] = ("four", "five"), *, rollouts: int = 3) -> Path:
    """A run folder with metrics of some rollouts, the last of which is not finite, and a dump of
    samples with the texts.
    """
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"lr": 1e-3, "seed": len(texts)}))
    metrics = JsonlWriter(folder / "metrics.jsonl")
    for step in range(rollouts):
        values = {
            "rollout/reward/mean": 0.1 * step if step + 1 < rollouts else "nan",  # as it is logged
            "rollout/ledger/sampled": 8,
            "rollout/ledger/trained": 8,
            "gate/ratio/truncated": 0.25,
        }
        record = {"step_key": "rollout/step", "step": step, "metrics": values}
        metrics.write(record)
        optimizer = {
            "train/loss": 1.0 - 0.1 * step,
            "train/weight_delta": 0.1,
            "train/update_skipped": float(step == 1),
        }
        metrics.write({"step_key": "train/step", "step": step, "metrics": optimizer})
    metrics.close()
    trace = JsonlWriter(folder / "trace" / "driver-1.jsonl")
    trace.write(
        {"type": "head", "version": 1, "process": texts[0], "role": "driver", "pid": 1, "host": "",
         "boot_id": "x", "clock_offset": 0}
    )  # fmt: skip
    for i, text in enumerate(texts):
        name = text.encode("utf-8", "replace").decode()
        span = {"name": name, "start": i * 10**9, "dur": 9 * 10**8, "thread": 1, "rollout": 0}
        trace.write(span)
    trace.close()
    dumps = folder / "dumps" / "rollout_data"
    dumps.mkdir(parents=True)
    tables.write_table(dumps / "0.parquet", sample_table(samples_of(texts)))
    return folder


def samples_of(texts: tuple[str, ...]) -> list[Sample]:
    """A sample per text, in groups of two, the text wherever a sample has one."""
    return [
        Sample(
            index=i,
            group_index=i // 2,
            prompt=text,
            response=text,
            tokens=[1, 2, 3, 4],
            response_length=2,
            label=text,
            reward=float(i),
            rollout_log_probs=[-0.5, -1.5],
            loss_mask=[1, 0],
            status=Status.COMPLETED,
            metadata={"source": text, text: text},
        )
        for i, text in enumerate(texts)
    ]


def copy_of_golden(target: Path) -> Path:
    """The shipped recording, without its weights."""
    shutil.copytree(GOLDEN, target, ignore=shutil.ignore_patterns("weights"))
    return target
