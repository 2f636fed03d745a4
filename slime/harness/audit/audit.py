"""The audit of a path: reads it step by step, lets every family of findings look, and gathers what
they say.
"""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path

from slime.exceptions import ConfigError
from slime.gate.alignment import Codec, codec_of
from slime.gate.config import GateConfig
from slime.harness.audit.advantage_findings import AdvantageFindings
from slime.harness.audit.findings import (
    Evidence,
    Family,
    Finding,
    Level,
    finding,
    plural,
    ranked,
)
from slime.harness.audit.graders import Grader
from slime.harness.audit.group_findings import GroupFindings, RewardFindings
from slime.harness.audit.log_prob_findings import LogProbFindings
from slime.harness.audit.mask_findings import MaskFindings, VersionFindings
from slime.harness.audit.reading import Found, find_sources, read_metrics, read_tables
from slime.harness.audit.series_findings import Series, SeriesFindings
from slime.harness.audit.shapes import ReadOptions
from slime.harness.audit.text_findings import TextFindings
from slime.utils import processing_utils


@dataclasses.dataclass(frozen=True)
class AuditOptions:
    """What an audit is told beside the path. tokenizer: a folder. grader: one of our reward
    types.
    """

    read: ReadOptions = ReadOptions()
    tokenizer: str | None = None
    grader: str | None = None


@dataclasses.dataclass(frozen=True)
class Audit:
    """What an audit found. columns: what the samples had, by name: samples with it."""

    path: str
    shapes: dict[str, int]
    files: int
    steps: int
    evaluations: int
    samples: int
    columns: dict[str, int]
    findings: list[Finding]
    series: list[Series]
    unreadable: list[tuple[str, str]]
    skipped: list[tuple[str, str]]
    notes: list[str]

    @property
    def exit_status(self) -> int:
        """1 where a finding is an error or a warning, else 0."""
        return int(any(one.level is not Level.INFO for one in self.findings))


def audit(path: Path, options: AuditOptions = AuditOptions()) -> Audit:
    """Audits a file or a folder. ConfigError where nothing in it can be read, and for a tokenizer or
    grader that does not exist.
    """
    codec = _codec(options.tokenizer)
    series = SeriesFindings()
    families: list[Family] = [
        TextFindings(codec),
        GroupFindings(),
        RewardFindings(None if options.grader is None else Grader(options.grader)),
        AdvantageFindings(),
        LogProbFindings(),
        MaskFindings(codec),
        VersionFindings(),
        series,
    ]
    found = find_sources(path, options.read)
    shapes: collections.Counter[str] = collections.Counter()
    columns: collections.Counter[str] = collections.Counter()
    steps: set[tuple[str, int, bool]] = set()
    files: set[str] = set()
    samples = 0
    for table in read_tables(found, options.read):
        shapes[table.shape] += 1
        steps.add((table.run, table.step, table.is_evaluation))
        files.update(table.files)
        samples += len(table)
        columns.update(_columns(table))
        for family in families:
            family.look(table)
    for name, metrics in read_metrics(found):
        shapes["metrics"] += 1
        files.add(name)
        series.look_at_metrics(name, metrics)
    if not files:
        raise ConfigError(_nothing(path, found))
    findings = [one for family in families for one in family.findings()]
    if found.unreadable:
        findings.append(_unreadable(found))
    evaluations = sum(is_evaluation for _, _, is_evaluation in steps)
    return Audit(
        path=str(path),
        shapes=dict(shapes),
        files=len(files),
        steps=len(steps) - evaluations,
        evaluations=evaluations,
        samples=samples,
        columns=dict(columns),
        findings=ranked(findings),
        series=series.series(),
        unreadable=found.unreadable,
        skipped=found.skipped,
        notes=found.notes,
    )


def _codec(tokenizer: str | None) -> Codec | None:
    if tokenizer is None:
        return None
    return codec_of(processing_utils.shared_tokenizer(tokenizer), GateConfig())


def _columns(table) -> dict[str, int]:
    """How many samples have each column."""
    counts = {
        "prompt": sum(map(bool, table.prompts)),
        "response": sum(map(bool, table.responses)),
        "label": sum(label is not None for label in table.labels),
        "reward": int(table.has_reward_N.sum()),
        "group": int((table.group_N >= 0).sum()),
        "advantage": 0
        if table.advantage_N is None
        else int((table.advantage_N == table.advantage_N).sum()),
        "weight version": int((table.version_high_N >= 0).sum()),
    }
    for name in ("tokens", "masks", "rollout_log_probs", "log_probs"):
        column = getattr(table, name)
        counts[name] = 0 if column is None else int((column.lengths > 0).sum())
    return counts


def _unreadable(found: Found) -> Finding:
    first, why = found.unreadable[0]
    return finding(
        "unreadable_file",
        Level.WARNING,
        f"{plural(len(found.unreadable), 'file')} could not be read, or not to the end: {first}: "
        f"{why}.",
        [Evidence(name, note=why) for name, why in found.unreadable],
        share=len(found.unreadable) / (len(found.sources) + len(found.unreadable)),
    )


def _nothing(path: Path, found: Found) -> str:
    lines = [f"{path} has nothing that can be audited."]
    for title, entries in (
        ("could not be read", found.unreadable),
        ("of no known shape", found.skipped),
    ):
        if entries:
            name, why = entries[0]
            lines.append(f"{plural(len(entries), 'file')} {title}, for instance {name}: {why}")
    if len(lines) == 1:
        lines.append(
            "It has no .pt, .jsonl, .parquet or .safetensors file of a known shape; see docs/audit.md."
        )
    return "\n".join(lines)
