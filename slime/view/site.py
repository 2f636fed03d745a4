"""What all pages share: the folders, the readers, the templates, and how an error is shown."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from slime.exceptions import ConfigError, RolloutDataError, SlimeError
from slime.view.catalog import FILES, Catalog, Entry, RolloutRef
from slime.view.jobs import Jobs
from slime.view.rollout_library import RolloutLibrary
from slime.view.rollout_table import RolloutTable
from slime.view.run_data import RunLibrary, Snapshot
from slime.view.run_rows import RunRows
from slime.view.templating import environment
from slime.view.token_view import Decoders


class Site:
    """The parts of a running viewer."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.runs = RunLibrary(catalog)
        self.rows = RunRows(catalog, self.runs)
        self.rollouts = RolloutLibrary()
        self.decoders = Decoders()
        self.jobs = Jobs()
        self.is_warming = False
        self._is_closed = False
        self.templates = environment()
        self.templates.globals["url"] = url

    def warm_up(self) -> None:
        """Reads the runs and loads what pages need, before somebody asks."""
        try:
            for module in ("pyarrow.compute", "pyarrow.parquet"):
                importlib.import_module(module)
            for name in self.templates.list_templates():
                self.templates.get_template(name)
            for entry in self.catalog.entries():
                if entry.kind != FILES and not self._is_closed:
                    with contextlib.suppress(SlimeError, OSError):
                        self.rows.row(entry, patient=True)
        finally:
            self.is_warming = False

    def close(self) -> None:
        self._is_closed = True
        self.jobs.close()
        self.rollouts.close()

    # --- what an address names --------------------------------------------------------------------

    def entry(self, request: Request) -> Entry:
        """The run in the address. `Missing` where there is none."""
        return self.entry_named(request.path_params["slug"])

    def entry_named(self, slug: str) -> Entry:
        found = self.catalog.find(slug)
        if found is None:
            raise Missing(f"There is no run {slug[:80]!r} in the given folders.")
        return found

    def snapshot(self, entry: Entry) -> Snapshot:
        """The run as it is now."""
        return self.runs.get(entry).now()

    def ref(self, request: Request) -> tuple[Entry, RolloutRef]:
        entry = self.entry(request)
        try:
            return entry, self.catalog.find_rollout(entry, request.path_params["key"])
        except RolloutDataError as error:
            raise Missing(str(error)) from error

    def table(self, request: Request) -> tuple[Entry, RolloutRef, RolloutTable]:
        """The rollout in the address, and its samples."""
        entry, ref = self.ref(request)
        return entry, ref, self.rollouts.get(ref)

    def neighbours(self, entry: Entry, ref: RolloutRef) -> tuple[str | None, str | None]:
        """The keys of the rollouts before and after, of the same kind of data."""
        keys = [one.key for one in self.catalog.rollouts(entry) if one.evaluation == ref.evaluation]
        place = keys.index(ref.key)
        before = keys[place - 1] if place else None
        return before, keys[place + 1] if place + 1 < len(keys) else None

    def tokenizer_folders(self, entry: Entry) -> list[Path]:
        """Where the run's tokenizer may be: recorded, or the folder that its options name, if that
        is one of those that may be read.
        """
        found = []
        if entry.recording is not None:
            found.append(entry.recording / "tokenizer")
        named = self.catalog.config(entry.path).get("hf_checkpoint")
        if isinstance(named, str) and named and self.catalog.contains(Path(named)):
            found.append(Path(named))
        return [one for one in found if self.catalog.contains(one / "tokenizer.json")]

    # --- answers ----------------------------------------------------------------------------------

    def page(
        self, request: Request, template: str, *, status: int = 200, **values: Any
    ) -> Response:
        """A page of a template."""

        def request_query(**changes: object) -> str:
            return query_with(request, changes)

        known = {
            "request_query": request_query,
            "path": request.url.path,
            "entry": None,
            "tab": "",
            "live": False,
            **values,
        }
        text = self.templates.get_template(template).render(known)
        return HTMLResponse(text.encode("utf-8", "backslashreplace"), status_code=status)

    def error(self, request: Request, error: Exception) -> Response:
        """What is shown instead of a page."""
        status = 404 if isinstance(error, Missing) else 200
        if request.url.path.startswith("/api/"):
            return JSONResponse({"error": str(error)}, status_code=status)
        return self.page(
            request, "error.jinja", status=status, message=str(error), title="Not shown"
        )


class Missing(ConfigError):
    """An address that names nothing."""


def query_with(request: Request, changes: Mapping[str, object]) -> str:
    """The query of a request with some values changed; 0 and "" leave one out."""
    pairs = [
        (name, value) for name, value in request.query_params.multi_items() if name not in changes
    ]
    pairs += [(name, str(value)) for name, value in changes.items() if value not in (None, "", 0)]
    return f"?{urlencode(pairs)}" if pairs else "?"


def number_in(request: Request, name: str, default: int, *, low: int = 0, high: int = 10**9) -> int:
    """A whole number of the query, within bounds."""
    try:
        return max(low, min(high, int(request.query_params.get(name, default))))
    except ValueError:
        return default


def text_in(request: Request, name: str, *, limit: int = 500) -> str:
    """A text of the query."""
    return request.query_params.get(name, "")[:limit]


def url(*parts: object, **query: object) -> str:
    """An address of this site: the parts with slashes, and a query of what is not empty."""
    path = "/" + "/".join(quote(str(part), safe="~") for part in parts)
    pairs = [
        (name, one)
        for name, value in query.items()
        for one in (value if isinstance(value, list | tuple) else [value])
        if one not in (None, "", 0) or (name == "group" and one == 0)
    ]
    return path + (f"?{urlencode(pairs)}" if pairs else "")


@dataclasses.dataclass(frozen=True)
class Pager:
    """A page of many rows. number: from 0."""

    number: int
    size: int
    total: int

    @property
    def first(self) -> int:
        return self.number * self.size

    @property
    def last(self) -> int:
        return min(self.total, self.first + self.size)

    @property
    def num_pages(self) -> int:
        return max(1, -(-self.total // self.size))


def pager(request: Request, total: int, *, size: int = 50) -> Pager:
    """The page that a request asks for; the last one where it asks for a later one."""
    last = max(0, -(-total // size) - 1)
    return Pager(min(number_in(request, "page", 0), last), size, total)
