"""Who may talk to an engine: clients with its key, and no web page.

A page that is open in a browser on this machine reaches loopback too. It cannot read the key, and a
browser marks what it sends: with the page's origin, with the name that the page took for the
address (DNS rebinding), and, unless it has asked before, with a form's content type.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from aiohttp import web

from slime.backends.torch_engine.http_json import error_response
from slime.utils.misc import is_loopback

# Load balancers and the router probe without a key.
OPEN_PATHS = ("/health",)
CONTENT_TYPES = ("application/json", "application/octet-stream")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RequestGuard:
    """The checks before every handler of a server that listens on `host`. `api_key` None or "" asks
    for none.
    """

    def __init__(self, host: str, api_key: str | None) -> None:
        self._key = api_key or None
        # Beyond loopback the server has names that it cannot know, and always a key.
        self._names = (host.strip("[]").lower(), "localhost") if is_loopback(host) else None

    def has_key(self, request: web.Request) -> bool:
        """Whether the request has the key, or none is asked for."""
        if self._key is None:
            return True
        given = request.headers.get("Authorization", "")
        return hmac.compare_digest(
            given.encode(errors="surrogateescape"), f"Bearer {self._key}".encode()
        )

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers 403, 401 or 415 with the reason, or lets the request through."""
        problem = self._problem_of_sender(request)
        if problem is not None:
            return error_response(403, problem)
        if request.path not in OPEN_PATHS and not self.has_key(request):
            return error_response(
                401, "the Authorization header must be `Bearer KEY` with this engine's API key."
            )
        problem = _problem_of_body(request)
        if problem is not None:
            return error_response(415, problem)
        return await handler(request)

    def _problem_of_sender(self, request: web.Request) -> str | None:
        headers = request.headers
        if "Origin" in headers or headers.get("Sec-Fetch-Site", "none") != "none":
            return "requests of web pages are refused: leave out Origin and Sec-Fetch-Site."
        host = headers.get("Host")
        if self._names is None or host is None:  # HTTP/1.0; no browser leaves it out
            return None
        name = _name_of(host)
        if name in self._names or is_loopback(name):
            return None
        return (
            f"the Host header names {name[:100]!r}, and this server is reached as "
            f"{' or '.join(self._names)} only."
        )


def _name_of(host: str) -> str:
    """The Host header without its port, brackets and final dot."""
    text = host.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def _problem_of_body(request: web.Request) -> str | None:
    if request.method != "POST" or not request.can_read_body:
        return None
    given = request.headers.get("Content-Type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind in CONTENT_TYPES or kind.endswith("+json"):
        return None
    return (
        f"the Content-Type is {given[:100]!r}, expected application/json (weights: "
        "application/octet-stream)."
    )
