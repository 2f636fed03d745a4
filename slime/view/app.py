"""The addresses of the viewer."""

from __future__ import annotations

import functools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from slime.exceptions import SlimeError
from slime.view import pages_checks, pages_rollout, pages_runs, pages_training
from slime.view.catalog import Catalog
from slime.view.guard import Guard
from slime.view.live import Live
from slime.view.site import Missing, Site
from slime.view.templating import HERE

Page = Callable[[Site, Request], Response]

SAMPLE = "/run/{slug}/rollout/{key}/sample/{row}"
PAGES: Sequence[tuple[str, Page]] = (
    ("/", pages_runs.runs_page),
    ("/trends", pages_runs.trends_page),
    ("/api/trends", pages_runs.trends_data),
    ("/api/run/{slug}/step", pages_runs.train_step),
    ("/run/{slug}", pages_runs.run_page),
    ("/run/{slug}/rollouts", pages_rollout.rollouts_page),
    ("/run/{slug}/rollout/{key}", pages_rollout.rollout_page),
    ("/run/{slug}/rollout/{key}/group/{group}", pages_rollout.group_page),
    ("/run/{slug}/rollout/{key}/schedule", pages_training.schedule_page),
    ("/run/{slug}/rollout/{key}/gate", pages_checks.thresholds_page),
    (SAMPLE + ".json", pages_rollout.sample_json),
    (SAMPLE, pages_rollout.sample_page),
    ("/run/{slug}/gate", pages_checks.gate_page),
    ("/run/{slug}/timeline", pages_training.timeline_page),
    ("/api/run/{slug}/timeline", pages_training.timeline_data),
    ("/run/{slug}/audit", pages_checks.audit_page),
    ("/diff", pages_checks.diff_page),
)


def build_app(catalog: Catalog, *, token: str, host: str, port: int) -> Guard:
    """The viewer over what the catalog has, for whoever has the token."""
    site = Site(catalog)
    live = Live(site)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        site.is_warming = True
        threading.Thread(target=site.warm_up, name="warm-up", daemon=True).start()
        yield
        site.close()

    routes: list[BaseRoute] = [
        Route(path, functools.partial(_shown, site, page)) for path, page in PAGES
    ]
    routes += [
        Route("/live", live.endpoint),
        Mount("/static", StaticFiles(directory=HERE / "static")),
        Route("/{rest:path}", functools.partial(_shown, site, _missing)),
    ]
    return Guard(Starlette(routes=routes, lifespan=lifespan), token=token, host=host, port=port)


def _shown(site: Site, page: Page, request: Request) -> Response:
    try:
        return page(site, request)
    except (SlimeError, OSError) as error:
        return site.error(request, error)


def _missing(site: Site, request: Request) -> Response:
    raise Missing("There is no such page.")
