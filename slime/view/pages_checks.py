"""Pages of what is wrong: the gate's reasons and thresholds, an audit, a comparison."""

from __future__ import annotations

import collections
import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from slime.data.reasons import REASON_OF_VALUE, InvalidReason
from slime.data.sample import Sample, Status
from slime.exceptions import RolloutDataError, SlimeError
from slime.gate import tools
from slime.harness.run_records import RunRecords
from slime.view.catalog import FILES, Entry, RolloutRef
from slime.view.charts import histogram
from slime.view.pages_rollout import cell_text
from slime.view.pages_runs import options_of_entry
from slime.view.rollout_table import NUMBERS, TOKEN_STATISTICS, RolloutTable
from slime.view.site import Site, number_in, text_in
from slime.view.token_view import differing_part

EXAMPLES = 3  # of a reason
ROLLOUTS_SEARCHED = 3  # for examples, the newest first
MOST_FINDINGS = 200
MOST_EVIDENCE = 40
_STEP = re.compile(r"(step|evaluation) (\d{1,12})")


def gate_page(site: Site, request: Request) -> Response:
    """The gate of a run: reasons over time, with examples; alarms; texts that are not their tokens."""
    entry = site.entry(request)
    run = site.snapshot(entry)
    examples, notes = _examples(site, entry)
    rows = reason_rows(run.records)
    alarms = [one for one in run.marks if one.kind == "alarm"][::-1]
    return site.page(
        request,
        "gate.jinja",
        title=f"gate - {entry.name}",
        entry=entry,
        tab="gate",
        rows=[(row, examples.get(row["reason"], [])) for row in rows],
        others={name: found for name, found in examples.items() if name not in {r["reason"] for r in rows}},
        alarms=alarms[:200],
        notes=notes,
        misaligned=_misaligned(site, entry, examples.get(InvalidReason.MISALIGNED.value, [])),
        refs=[ref for ref in site.catalog.rollouts(entry)[::-1] if not ref.evaluation][:20],
        live=run.state.is_live,
    )  # fmt: skip


def reason_rows(records: RunRecords) -> list[dict[str, Any]]:
    """A row per reason that the gate ever had: samples of all rollouts, the first and the last of
    them, the largest share.
    """
    totals = dict(zip(*records.numbers("gate/total"), strict=True))
    found = []
    for name in sorted(records.series):
        if not name.startswith("gate/count/"):
            continue
        reason = name.removeprefix("gate/count/")
        counts = {s: v for s, v in zip(*records.numbers(name), strict=True) if v}
        if counts:
            shares = {s: v / totals[s] for s, v in counts.items() if totals.get(s)}
            worst = max(shares, key=lambda step: shares[step], default=None)
            found.append(
                {
                    "reason": reason,
                    "count": int(sum(counts.values())),
                    "first": min(counts),
                    "last": max(counts),
                    "worst": worst,
                    "share": shares.get(worst, math.nan) if worst is not None else math.nan,
                    "meaning": _meaning(reason),
                }
            )
    return sorted(found, key=lambda row: -row["count"])


def _meaning(reason: str) -> str:
    known = REASON_OF_VALUE.get(reason)
    return "" if known is None else f"{known.facts.meaning}. Look at: {known.facts.remedy}."


def _examples(site: Site, entry: Entry) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """(by reason some samples of the newest rollouts that have samples, what could not be read)."""
    found: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    notes = []
    refs = [ref for ref in site.catalog.rollouts(entry)[::-1] if not ref.evaluation]
    for ref in refs[:ROLLOUTS_SEARCHED]:
        try:
            table = site.rollouts.get(ref)
        except (SlimeError, OSError) as error:
            notes.append(str(error)[:400])
            continue
        for reason, rows in table.rows_by_reason().items():
            room = EXAMPLES - len(found[reason])
            if room <= 0:
                continue
            shown = rows[:room]
            texts = table.excerpts(shown, "response")
            found[reason] += [
                _example(table, ref, row, text) for row, text in zip(shown, texts, strict=True)
            ]
    return dict(found), notes


def _example(table: RolloutTable, ref: RolloutRef, row: int, text: str) -> dict[str, Any]:
    names = ("index", "reward", "length", "verdict", "detail")
    return {
        "ref": ref,
        "row": row,
        "text": text,
        **{name: cell_text(name, table.column(name)[row]) for name in names},
    }


def _misaligned(site: Site, entry: Entry, examples: Sequence[Mapping[str, Any]]) -> list[Any]:
    """(example, the parts of its text and of its decoded tokens around what differs)."""
    decode, _ = site.decoders.of(site.tokenizer_folders(entry))
    found = []
    for one in examples if decode is not None else ():
        sample = site.rollouts.get(one["ref"]).sample(one["row"])
        length = sample.get("response_length") or 0
        ids = list(sample.get("tokens") or [])[-length:] if length else []
        text = sample.get("engine_text") or sample.get("response") or ""
        parts = differing_part(text, decode(ids)) if decode is not None else None
        if parts is not None:
            found.append((one, parts))
    return found


def thresholds_page(site: Site, request: Request) -> Response:
    """A rollout against thresholds of length: what would be dropped at which."""
    entry, ref, table = site.table(request)
    options = options_of_entry(site.catalog, entry)
    suggestion, why = suggested(table)
    low = number_in(request, "low", _whole(options.get("gate_min_response_tokens")))
    high = number_in(request, "high", _whole(options.get("gate_max_response_tokens")))
    length, reward = table.column("length"), table.column("reward")
    outside = (length < low) | ((length > high) if high else np.zeros(len(length), dtype=bool))
    return site.page(
        request,
        "thresholds.jinja",
        title=f"thresholds of {ref.title} - {entry.name}",
        entry=entry,
        tab="rollouts",
        ref=ref,
        notes=table.problems,
        low=low,
        high=high,
        in_force=[
            (name, options.get(f"gate_{name}"))
            for name in ("min_response_tokens", "max_response_tokens", "context_margin")
            if options.get(f"gate_{name}") is not None
        ],
        suggestion=suggestion,
        why=why,
        num_rows=table.num_rows,
        dropped=int(outside.sum()),
        mean_dropped=_mean(reward[outside]),
        mean_kept=_mean(reward[~outside]),
        quantiles=_quantiles(length),
        histograms=[
            one
            for name in ("length", "reward", *(TOKEN_STATISTICS if table.has_token_statistics() else ()))
            if (one := histogram(name, NUMBERS[name][0], table.column(name), outside)) is not None
        ],
        expression=f"length < {low}" + (f" or length > {high}" if high else ""),
    )  # fmt: skip


def suggested(table: RolloutTable) -> tuple[tools.Suggestion | None, str]:
    """(thresholds measured on the rollout, why there are none)."""
    samples = []
    for length, status, finish in zip(
        table.column("length").tolist(), table.column("status"), table.column("finish"), strict=True
    ):
        if length == length and status:
            with contextlib.suppress(ValueError):
                one = Sample(response_length=int(length), status=Status(status))
                one.finish_reason = finish or None
                samples.append(one)
    try:
        return tools.suggest_thresholds(samples), ""
    except ValueError as error:
        return None, str(error)


def _whole(value: object) -> int:
    return value if type(value) is int else 0


def _mean(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _quantiles(values: np.ndarray) -> list[tuple[str, float]]:
    known = values[np.isfinite(values)]
    if not len(known):
        return []
    shares = (
        (0, "min"),
        (1, "p01"),
        (10, "p10"),
        (50, "p50"),
        (90, "p90"),
        (99, "p99"),
        (100, "max"),
    )
    return [(name, float(np.percentile(known, share))) for share, name in shares]


# --- an audit, a comparison -----------------------------------------------------------------------


def audit_page(site: Site, request: Request) -> Response:
    """What `slime audit` says of a run, or of any folder."""
    entry = site.entry(request)
    stamp = text_in(request, "again", limit=20) or "first"
    path = entry.recording or entry.path
    outcome = site.jobs.ask("audit", str(path), stamp=stamp)
    content = None if outcome is None else outcome.content
    keys = {ref.key for ref in site.catalog.rollouts(entry)} if entry.kind != FILES else set()
    findings = [] if content is None else content.get("findings", [])[:MOST_FINDINGS]
    return site.page(
        request,
        "audit.jinja",
        title=f"audit - {entry.name}",
        entry=entry,
        tab="audit",
        of=str(path),
        running=outcome is None,
        error="" if outcome is None else outcome.error,
        content=content,
        findings=[(one, _evidence(one, keys)) for one in findings],
        stamp=stamp,
        again=f"{number_in(request, 'again', 1) + 1}",
    )


def _evidence(finding: Mapping[str, Any], keys: set[str]) -> list[tuple[Mapping[str, Any], str]]:
    """(place, the key of its rollout or "")."""
    found = []
    for place in finding.get("evidence", [])[:MOST_EVIDENCE]:
        match = _STEP.search(str(place.get("where", "")))
        key = ""
        if match:
            key = f"{'eval' if match[1] == 'evaluation' else 'rollout'}-{match[2]}"
        found.append((place, key if key in keys else ""))
    return found


def diff_page(site: Site, request: Request) -> Response:
    """What `slime diff` says of two recordings, with the first differing sample of both."""
    recorded = [one for one in site.catalog.entries() if one.recording is not None]
    names = [text_in(request, side) for side in ("a", "b")]
    chosen = [next((one for one in recorded if one.slug == name), None) for name in names]
    rollout = text_in(request, "rollout", limit=12)
    values: dict[str, Any] = {"outcome": None, "running": False, "sides": None, "fields": []}
    a, b = chosen
    if a is not None and b is not None and a != b:
        words = ["diff", str(a.recording), str(b.recording)]
        if rollout.isdigit():
            words += ["--rollout", rollout]
        outcome = site.jobs.ask(*words, stamp=_stamp(site, a, b))
        values["running"] = outcome is None
        values["outcome"] = outcome
        if outcome is not None and outcome.content is not None:
            values["sides"] = _sides(site, (a, b), outcome.content.get("first_difference"))
            values["fields"] = _differing_fields(outcome.content)
    return site.page(
        request,
        "diff.jinja",
        title="Diff",
        entry=a if b is None or a == b else None,
        tab="diff",
        recorded=recorded,
        a=a,
        b=b,
        rollout=rollout,
        unrecorded=names[0] != "" and a is None,
        **values,
    )


def _stamp(site: Site, *entries: Entry) -> str:
    """Another one when a recording has grown."""
    return " ".join(str(len(site.catalog.rollouts(entry))) for entry in entries)


def _differing_fields(content: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(rollout, field) of every field that differs."""
    return [
        (name, field)
        for name, rollout in content.get("rollouts", {}).items()
        for field in rollout.get("fields", [])
        if field.get("entries")
    ][:MOST_FINDINGS]


def _sides(
    site: Site, entries: tuple[Entry, Entry], first: Mapping[str, Any] | None
) -> list[dict[str, Any]] | None:
    """The differing sample of both recordings; None where the difference is of no sample."""
    if not first:
        return None
    kind, _, number = str(first.get("rollout", "")).partition(" ")
    key = f"{'eval' if kind == 'evaluation' else 'rollout'}-{number}"
    sides: list[dict[str, Any]] = []
    for entry, row in zip(entries, (first.get("position_a"), first.get("position_b")), strict=True):
        ref = next((one for one in site.catalog.rollouts(entry) if one.key == key), None)
        if ref is None or not isinstance(row, int):
            return None
        try:
            table = site.rollouts.get(ref)
            sample = table.sample(row)
        except (RolloutDataError, IndexError):
            return None
        names = ("index", "group", "reward", "normalized", "length", "status", "verdict")
        facts = {name: cell_text(name, table.column(name)[row]) for name in names}
        text = sample.get("response") or ""
        sides.append({"entry": entry, "ref": ref, "row": row, "facts": facts, "text": text})
    parts = differing_part(sides[0]["text"], sides[1]["text"])
    for side, middle in zip(sides, (1, 2), strict=True):
        side["parts"] = None if parts is None else (parts[0], parts[middle], parts[3])
        side["differs"] = {
            n for n in sides[0]["facts"] if sides[0]["facts"][n] != sides[1]["facts"][n]
        }
    return sides  # fmt: skip
