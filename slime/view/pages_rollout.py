"""Pages of one rollout: its samples as a table, its groups, one sample."""

from __future__ import annotations

import collections
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from slime.exceptions import ConfigError
from slime.view.charts import histogram, number_text
from slime.view.filters import HELP, filter_rows
from slime.view.rollout_table import (
    LONG,
    NUMBERS,
    TEXTS,
    TOKEN_STATISTICS,
    NotReady,
    RolloutTable,
)
from slime.view.site import Missing, Site, number_in, pager, text_in
from slime.view.templating import as_plain
from slime.view.token_view import MOST_TOKENS, UNITS, differing_part, tokens_of

PAGE_SIZE = 50
IDENTITIES = ("row", "index", "group", "rank", "step", "micro_batch")
HIDDEN = ("detail",)  # shown with the verdict
MOST_NEIGHBOURS = 64
EXCERPT_OF_GROUP = 1500


def rollouts_page(site: Site, request: Request) -> Response:
    """All rollouts of a run that have samples."""
    entry = site.entry(request)
    refs = site.catalog.rollouts(entry)[::-1]
    page = pager(request, len(refs), size=100)
    return site.page(
        request,
        "rollouts.jinja",
        title="Rollouts",
        entry=entry,
        tab="rollouts",
        refs=refs[page.first : page.last],
        pager=page,
    )


def rollout_page(site: Site, request: Request) -> Response:
    """The samples, or the groups, of a rollout."""
    entry, ref, table = site.table(request)
    chosen, error, pending = _chosen(table, request)
    sort = text_in(request, "sort", limit=40)
    if sort in TOKEN_STATISTICS and table.is_preparing and not table.has_token_statistics():
        sort, pending = "", "gap and advantage of each sample are being computed"
    view = "groups" if text_in(request, "view") == "groups" else "samples"
    before, after = site.neighbours(entry, ref)
    shared = {
        "title": f"{ref.title} - {entry.name}",
        "entry": entry,
        "tab": "rollouts",
        "ref": ref,
        "table": table,
        "before": before,
        "after": after,
        "q": text_in(request, "q"),
        "filter": text_in(request, "filter"),
        "filter_error": error,
        "filter_help": HELP,
        "view": view,
        "sort": sort,
        "pending": pending,
        "descending": text_in(request, "dir") == "desc",
        "num_chosen": int(chosen.sum()),
        "fates": fates(table, chosen),
        "histograms": [
            one
            for name in ("reward", "length")
            if (one := histogram(name, NUMBERS[name][0], table.column(name), chosen)) is not None
        ],
    }
    if view == "groups":
        return _groups(site, request, table, chosen, shared)
    return _samples(site, request, table, chosen, shared)


def _chosen(table: RolloutTable, request: Request) -> tuple[np.ndarray, str, str]:
    """(bool [N] of what filter and search leave, why the filter could not be read, what is not
    there yet).
    """
    chosen, error, pending = np.ones(table.num_rows, dtype=bool), "", ""
    expression, text = text_in(request, "filter", limit=600), text_in(request, "q")
    if expression.strip():
        names = [*table.column_names, *LONG]
        try:
            chosen &= filter_rows(expression, table.column, names, table.num_rows)
        except NotReady as problem:
            pending = str(problem)
        except ConfigError as problem:
            error = str(problem)
    if text:
        try:
            chosen &= table.search(text)
        except NotReady as problem:
            pending = str(problem)
    return chosen, error, pending


def _samples(
    site: Site, request: Request, table: RolloutTable, chosen: np.ndarray, shared: dict[str, Any]
) -> Response:
    rows = sorted_rows(table, np.flatnonzero(chosen), shared["sort"], shared["descending"])
    page = pager(request, len(rows), size=PAGE_SIZE)
    shown = rows[page.first : page.last].tolist()
    columns = [name for name in table.column_names if name not in (*HIDDEN, "row")]
    if not table.has_token_statistics():
        columns = [name for name in columns if name not in TOKEN_STATISTICS]
    same = constants(table, columns)
    columns = [name for name in columns if name not in same]
    values = {name: table.column(name)[shown] for name in columns}
    details = table.column("detail")[shown]
    responses = table.excerpts(shown, "response")
    cells = [
        {
            "row": row,
            "cells": [(name, cell_text(name, values[name][i])) for name in columns],
            "detail": details[i],
            "response": responses[i],
        }
        for i, row in enumerate(shown)
    ]
    return site.page(
        request,
        "rollout.jinja",
        columns=[(name, *_about(name)) for name in columns],
        rows=cells,
        same=same,
        pager=page,
        offers_statistics=not (table.has_token_statistics() or table.is_preparing)
        and TOKEN_STATISTICS[0] in table.column_names,
        **shared,
    )


def constants(table: RolloutTable, columns: Sequence[str]) -> dict[str, str]:
    """The value of each column that has the same in every row, which is shown once."""
    found = {}
    for name in columns:
        if name in ("index", "group", "reward", "length", "verdict"):
            continue
        values = table.column(name)
        if len(values) > 1 and bool((values == values[0]).all()):
            found[name] = cell_text(name, values[0])
    return found


def _about(name: str) -> tuple[str, str]:
    """(unit, meaning) of a column."""
    return NUMBERS.get(name) or ("", TEXTS.get(name, ""))


def cell_text(name: str, value: Any) -> str:
    """A cell of a column; nothing where there is no value."""
    if not isinstance(value, float | np.floating):
        return str(value)
    if np.isnan(value):
        return ""
    return str(int(value)) if name in IDENTITIES else number_text(float(value))


def sorted_rows(table: RolloutTable, rows: np.ndarray, name: str, descending: bool) -> np.ndarray:
    """The rows in the order of a column; those without a value come last, and equal ones stay in
    their order.
    """
    if name not in table.column_names:
        return rows
    values = table.column(name)[rows]
    if values.dtype == object:
        lacking = np.asarray(values == "", dtype=bool)
        rank_of = {text: rank for rank, text in enumerate(sorted(set(values)))}
        values = np.array([rank_of[text] for text in values], dtype=np.float64)
    else:
        lacking = np.isnan(values)
    order = np.argsort(-values if descending else values, kind="stable")
    order = np.concatenate((order[~lacking[order]], order[lacking[order]]))
    return rows[order]


def fates(table: RolloutTable, chosen: np.ndarray) -> list[tuple[str, int, int, float]]:
    """(verdict, samples, chosen ones, share) of every verdict, the trained ones first: they add up to
    all that were sampled.
    """
    verdicts = table.column("verdict")
    counts = collections.Counter(verdicts.tolist())
    inside = collections.Counter(verdicts[chosen].tolist())
    order = sorted(counts, key=lambda one: (not one.startswith(("trained", "kept")), -counts[one]))
    return [(name, counts[name], inside[name], counts[name] / table.num_rows) for name in order]


def _groups(
    site: Site, request: Request, table: RolloutTable, chosen: np.ndarray, shared: dict[str, Any]
) -> Response:
    groups = group_rows(table, chosen)
    name = shared["sort"] or "group"
    if groups and name in groups[0] and name != "prompt":
        groups.sort(
            key=lambda one: (
                one[name] is None,
                (-1 if shared["descending"] else 1) * (one[name] or 0),
            )
        )
    page = pager(request, len(groups), size=PAGE_SIZE)
    shown = groups[page.first : page.last]
    prompts = table.excerpts([one["first"] for one in shown], "prompt") if shown else []
    return site.page(
        request,
        "groups.jinja",
        groups=list(zip(shown, prompts, strict=True)),
        pager=page,
        **shared,
    )


def group_rows(table: RolloutTable, chosen: np.ndarray) -> list[dict[str, Any]]:
    """A row per group with a chosen sample: counts and rewards of all its samples."""
    group, reward, length = (table.column(name) for name in ("group", "reward", "length"))
    trained = np.array([one.startswith("trained") for one in table.column("verdict")])
    known = ~np.isnan(group)
    found = []
    order = np.argsort(group[known], kind="stable")
    rows = np.flatnonzero(known)[order]
    numbers, starts = np.unique(group[rows], return_index=True)
    for number, own in zip(numbers, np.split(rows, starts[1:]), strict=True):
        if not chosen[own].any():
            continue
        rewards = reward[own][np.isfinite(reward[own])]
        found.append(
            {
                "group": int(number),
                "first": int(own[0]),
                "samples": len(own),
                "trained": int(trained[own].sum()),
                "mean": float(rewards.mean()) if len(rewards) else None,
                "spread": float(rewards.std()) if len(rewards) else None,
                "lowest": float(rewards.min()) if len(rewards) else None,
                "highest": float(rewards.max()) if len(rewards) else None,
                "length": float(np.nanmean(length[own])) if (length[own] > 0).any() else None,
            }
        )
    return found


def group_page(site: Site, request: Request) -> Response:
    """The samples of one group, side by side."""
    entry, ref, table = site.table(request)
    number = _group_number(request)
    rows = np.flatnonzero(table.column("group") == number)[:MOST_NEIGHBOURS].tolist()
    if not rows:
        raise Missing(f"{ref.title} has no group {number}.")
    texts = table.texts_of(rows, "response")
    prompt = table.texts_of(rows[:1], "prompt")[0]
    return site.page(
        request,
        "group.jinja",
        title=f"group {number} - {ref.title}",
        entry=entry,
        tab="rollouts",
        ref=ref,
        number=number,
        prompt=prompt or "",
        members=[_member(table, row, text) for row, text in zip(rows, texts, strict=True)],
        limit=EXCERPT_OF_GROUP,
    )


def _group_number(request: Request) -> int:
    try:
        return int(request.path_params["group"])
    except ValueError:
        raise Missing("A group is a number.") from None


def _member(table: RolloutTable, row: int, text: str | None) -> dict[str, Any]:
    shown = ("index", "reward", "normalized", "length", "status", "verdict", "detail")
    facts = {name: cell_text(name, table.column(name)[row]) for name in shown}
    return {"row": row, "text": text or "", **facts}


# --- one sample -----------------------------------------------------------------------------------


def sample_page(site: Site, request: Request) -> Response:
    """One sample, token by token."""
    entry, ref, table = site.table(request)
    row = _row_number(request, table)
    sample, trained = table.sample(row), table.trained(row)
    decode, note = site.decoders.of(site.tokenizer_folders(entry))
    tokens = tokens_of(sample, trained, decode, first=number_in(request, "from", 0))
    response = sample.get("response") or ""
    own = table.column_names if table.has_token_statistics() else [
        name for name in table.column_names if name not in TOKEN_STATISTICS
    ]  # fmt: skip
    siblings = table.group_rows(row)[:MOST_NEIGHBOURS]
    prompt = sample.get("prompt") or ""
    return site.page(
        request,
        "sample.jinja",
        title=f"sample {cell_text('index', table.column('index')[row])} - {ref.title}",
        entry=entry,
        tab="rollouts",
        ref=ref,
        table=table,
        row=row,
        facts=[(name, cell_text(name, table.column(name)[row]), *_about(name)) for name in own],
        prompt=prompt,
        turns=turns_of(prompt),
        response=response,
        differing=None if tokens.decoded is None else differing_part(response, tokens.decoded),
        tokens=tokens,
        window=MOST_TOKENS,
        token_data=_token_data(tokens),
        notes=[*table.problems, *tokens.notes, *([note] if note else [])]
        + (
            []
            if trained
            else ["it did not train, or no train part was recorded: no trainer's numbers"]
        ),
        siblings=_siblings(table, siblings),
        inputs=reward_inputs(sample),
        view=text_in(request, "view", limit=20),
    )


def _row_number(request: Request, table: RolloutTable) -> int:
    try:
        row = int(request.path_params["row"])
    except ValueError:
        row = -1
    if not 0 <= row < table.num_rows:
        raise Missing(f"{table.ref.title} has the samples 0 to {table.num_rows - 1}.")
    return row


def _token_data(tokens: Any) -> dict[str, Any]:
    return {
        "first": tokens.first,
        "ids": tokens.ids,
        "pieces": tokens.pieces,
        "mask": tokens.mask,
        "columns": tokens.columns,
        "units": {name: UNITS.get(name, "") for name in tokens.columns},
    }


def _siblings(table: RolloutTable, rows: Sequence[int]) -> list[dict[str, Any]]:
    texts = table.excerpts(rows, "response")
    return [_member(table, row, text) for row, text in zip(rows, texts, strict=True)]


def turns_of(prompt: str) -> list[tuple[str, str]] | None:
    """(role, content) of each message of a prompt that is a list of messages; None for a text."""
    if not prompt.startswith("["):
        return None
    try:
        messages = json.loads(prompt)
    except (ValueError, RecursionError):
        return None
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        return None
    return [(str(one.get("role", "?")), _content(one)) for one in messages]


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    calls = message.get("tool_calls")
    return text + (f"\n{json.dumps(calls, ensure_ascii=False)}" if calls else "")


def reward_inputs(sample: dict[str, Any]) -> list[tuple[str, str]]:
    """What the reward function was given, beside prompt and response, and what it returned."""
    return [
        (name, str(sample[name]))
        for name in ("label", "reward", "metadata", "finish_reason", "status")
        if sample.get(name) not in (None, "", "{}")
    ]


def sample_json(site: Site, request: Request) -> Response:
    """The sample's row, and what training had of it, as JSON."""
    _, ref, table = site.table(request)
    row = _row_number(request, table)
    content = {
        "rollout": ref.number,
        "evaluation": ref.evaluation,
        "row": row,
        "sample": as_plain(table.sample(row)),
        "trained": as_plain(table.trained(row)),
    }
    return JSONResponse(content, headers={"content-disposition": f"inline; filename={row}.json"})
