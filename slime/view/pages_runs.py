"""Pages of whole runs: all of them side by side, one of them, its curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from slime.exceptions import SlimeError
from slime.harness.run_records import FAMILIES, eval_sets
from slime.recording import manifest
from slime.recording.reader import LARGEST_RUN_RECORD
from slime.view.catalog import FILES, Catalog, Entry
from slime.view.charts import chart_data, spark
from slime.view.run_data import Snapshot, name_of_label, rollout_of_train_step
from slime.view.run_rows import READING
from slime.view.site import Site, number_in, pager, text_in

MOST_RUNS = 100  # on one page
MOST_OVERLAID = 8
MOST_DIFFERING = 40
# options that say where a run stood, not what it did
PLACES = frozenset((
    "run_dir", "record", "save", "load", "dump_details", "wandb_dir", "tensorboard_dir", "log_dir",
    "wandb_group", "resumed_from", "derived", "as_requested",
))  # fmt: skip


def runs_page(site: Site, request: Request) -> Response:
    """All runs."""
    entries = site.catalog.entries()
    wanted = text_in(request, "q").casefold()
    chosen = [entry for entry in entries if wanted in entry.name.casefold()]
    page = pager(request, len(chosen), size=MOST_RUNS)
    rows = [
        site.rows.row(entry, patient=not site.is_warming)
        for entry in chosen[page.first : page.last]
    ]
    differing = differing_options(site.catalog, [row.entry for row in rows])
    return site.page(
        request,
        "runs.jinja",
        title="Runs",
        rows=rows,
        differing=differing,
        pager=page,
        q=text_in(request, "q"),
        reading=any(row.state.word == READING for row in rows),
        left_out=site.catalog.left_out,
        roots=[str(root) for root in site.catalog.roots],
        live=any(row.state.is_live for row in rows),
    )


def options_of_entry(catalog: Catalog, entry: Entry) -> Mapping[str, Any]:
    """The options of a run, or of the first start of a recording; {} where none can be read."""
    config = catalog.config(entry.path)
    if config or entry.recording is None:
        return config
    try:
        numbers = manifest.run_numbers(entry.recording)
        path = manifest.run_path(entry.recording, numbers[0])
        options = manifest.read_json(path, limit=LARGEST_RUN_RECORD).get("options")
        return options if isinstance(options, dict) else {}
    except (SlimeError, OSError, IndexError):
        return {}


def differing_options(catalog: Catalog, entries: Sequence[Entry]) -> list[tuple[str, list[str]]]:
    """(option, its value in each run) of what all of them have and is not the same in all."""
    every = [options_of_entry(catalog, entry) for entry in entries]
    known = [one for one in every if one]
    if len(known) < 2:
        return []
    names = sorted(set.intersection(*map(set, known)) - PLACES)
    rows = []
    for name in names:
        values = [_short(one.get(name)) if one else "" for one in every]
        if len({repr(one.get(name)) for one in known}) > 1:
            rows.append((name, values))
    return rows[:MOST_DIFFERING]


def _short(value: Any) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"


def run_page(site: Site, request: Request) -> Response:
    """One run: state, problems, metrics, its rollouts."""
    entry = site.entry(request)
    if entry.kind == FILES:
        refs = site.catalog.rollouts(entry)
        return site.page(
            request, "files.jinja", title=entry.name, entry=entry, tab="overview", refs=refs
        )
    run = site.snapshot(entry)
    refs = site.catalog.rollouts(entry)[::-1]
    page = pager(request, len(refs))
    return site.page(
        request,
        "run.jinja",
        title=entry.name,
        entry=entry,
        tab="overview",
        run=run,
        rows=[
            (label, *cells, spark(run.records, name_of_label(run.records, label)))
            for label, *cells in run.summary.rows
        ],
        refs=[
            (ref, _facts(run, ref.number, ref.evaluation)) for ref in refs[page.first : page.last]
        ],
        pager=page,
        options=sorted(options_of_entry(site.catalog, entry).items(), key=lambda one: str(one[0])),
        live=run.state.is_live,
    )


def _facts(run: Snapshot, number: int, evaluation: bool) -> dict[str, Any]:
    """What is known of a rollout from the run's numbers."""
    series = run.records.series
    if evaluation:
        return {name: series.get(f"eval/{name}", {}).get(number) for name in eval_sets(run.records)}
    names = {
        "reward": run.records.first_of(FAMILIES["reward"]),
        "length": run.records.first_of(FAMILIES["length"]),
        "sampled": "rollout/ledger/sampled",
        "trained": "rollout/ledger/trained",
    }
    return {label: series.get(name or "", {}).get(number) for label, name in names.items()}


def trends_page(site: Site, request: Request) -> Response:
    """Curves of one or several runs."""
    entries = _chosen(site, request)
    others = [one for one in site.catalog.entries() if one.kind != FILES and one not in entries]
    runs = [site.snapshot(one) for one in entries]
    return site.page(
        request,
        "trends.jinja",
        title="Trends",
        entry=entries[0] if len(entries) == 1 else None,
        tab="trends",
        entries=entries,
        others=others,
        runs=runs,
        live=any(one.state.is_live for one in runs),
    )


def trends_data(site: Site, request: Request) -> Response:
    """The curves as JSON."""
    entries = _chosen(site, request)
    runs = [(entry.name, site.snapshot(entry)) for entry in entries]
    return JSONResponse(
        {
            "runs": [{"name": entry.name, "slug": entry.slug} for entry in entries],
            "charts": chart_data(runs, only=request.query_params.getlist("chart")),
            "versions": [run.version for _, run in runs],
        }
    )


def train_step(site: Site, request: Request) -> Response:
    """The rollout of an optimizer step, for a click on a curve."""
    entry = site.entry(request)
    step = number_in(request, "step", 0)
    return JSONResponse({"rollout": rollout_of_train_step(site.snapshot(entry).records, step)})


def _chosen(site: Site, request: Request) -> list[Entry]:
    slugs = list(dict.fromkeys(request.query_params.getlist("run")))[:MOST_OVERLAID]
    if not slugs:
        slugs = [one.slug for one in site.catalog.entries() if one.kind != FILES][:1]
    return [site.entry_named(slug) for slug in slugs]
