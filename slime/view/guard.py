"""Who may see the pages: whoever has the token, from this address, in a page of our own.

A request is refused for another method than GET, a Host that this server does not have (a name
that an attacker's page points at this machine), an Origin of another site, and without the token.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LONGEST_QUERY = 4096  # bytes
LONGEST_PATH = 1024
HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        b"connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
    (b"cache-control", b"no-store"),
)
STATIC_CACHE = (b"cache-control", b"private, max-age=86400")


def names_of_host(host: str) -> tuple[frozenset[str], bool]:
    """(names that a Host header may have, whether any IP address may stand there): those of
    loopback, and of the address that is listened on.
    """
    names = {*LOOPBACK, host.lower()}
    try:
        is_any = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_any = False
    if host not in LOOPBACK:
        own = socket.gethostname().lower()
        names |= {own, own.split(".")[0], socket.getfqdn().lower()}
    return frozenset(names), is_any


def host_name(header: str) -> str:
    """The name in a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.rpartition(":")[0].lower() if ":" in header else header.lower()


class Guard:
    """Lets a request through to the pages, or answers it itself."""

    def __init__(self, app: App, *, token: str, host: str, port: int) -> None:
        self.app, self.token = app, token
        self.names, self.any_address = names_of_host(host)
        self.cookie = f"slime_view_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = {
            key.decode("latin-1").lower(): value.decode("latin-1")
            for key, value in scope["headers"]
        }
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _answer(send, *refusal)
            return
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = next((value for name, value in query if name == "token"), None)
        if given is not None and self._is_token(given):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            await self._welcome(send, scope["path"], rest)
        elif given is None and self._is_token(self._cookie_of(headers)):
            await self.app(scope, receive, _with_headers(send, scope["path"]))
        else:
            await _answer(
                send, 401, "Open the address that `slime view` printed: it holds the token."
            )

    def _refusal(self, scope: Scope, headers: Mapping[str, str]) -> tuple[int, str] | None:
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "These pages are only read: GET."
        if len(scope["query_string"]) > LONGEST_QUERY or len(scope["path"]) > LONGEST_PATH:
            return 414, "The address is too long."
        host = headers.get("host", "")
        if not self._is_own(host):
            return 421, "This server does not have that name."
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return 403, "A page of another site asked for this."
        site = headers.get("sec-fetch-site", "none")
        if site not in ("none", "same-origin") and headers.get("sec-fetch-mode") != "navigate":
            return 403, "A page of another site asked for this."
        return None

    def _is_own(self, host: str) -> bool:
        name = host_name(host)
        if name in self.names:
            return True
        if not self.any_address:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())

    def _cookie_of(self, headers: Mapping[str, str]) -> str:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return ""
        return "" if found is None else found.value

    async def _welcome(self, send: Send, path: str, query: str) -> None:
        """Keeps the token in a cookie, and out of the address."""
        target = quote("/" + path.lstrip("/")) + (f"?{query}" if query else "")
        cookie = f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"
        more = (
            (b"location", target.encode("ascii")),
            (b"set-cookie", cookie.encode("ascii")),
        )
        await _answer(send, 303, "", more)


async def _answer(
    send: Send, status: int, text: str, more: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    body = f"{text}\n".encode()
    own = ((b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body)))
    await send(
        {"type": "http.response.start", "status": status, "headers": [*own, *HEADERS, *more]}
    )
    await send({"type": "http.response.body", "body": body})


def _with_headers(send: Send, path: str) -> Send:
    cached = STATIC_CACHE if path.startswith("/static/") else None

    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            known = {key.lower() for key, _ in message["headers"]}
            added = [one for one in HEADERS if cached is None or one[0] != cached[0]]
            added += [] if cached is None else [cached]
            message["headers"] = [
                *message["headers"],
                *(one for one in added if one[0] not in known),
            ]
        await send(message)

    return sending
