"""`slime view PATH...`: a local web page over runs and recordings, running or finished.

    slime view runs/                   every run below the folder
    slime view runs/a recordings/b     these; of others nothing is shown
    ssh -L 7860:127.0.0.1:7860 HOST    and `slime view` there: open the printed address here

The printed address holds a token; without it nothing is shown. It listens on this machine alone
unless --host says otherwise. Nothing is written, executed, or fetched from elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import secrets
import socket
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from slime.exceptions import ConfigError
from slime.view.catalog import Catalog

PORT = 7860
PORTS_TRIED = 50
NEEDED = ("starlette", "uvicorn", "pyarrow")


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until it is stopped. ConfigError for a folder that is not there, a port that cannot be
    had, or a package that is not installed.
    """
    options = _parser().parse_args(argv)
    check_packages()
    from slime.view.app import build_app

    catalog = Catalog(options.paths)
    listening = listen(options.host, options.port)
    port = listening.getsockname()[1]
    token = secrets.token_urlsafe(24)
    shown = f"[{options.host}]" if ":" in options.host else options.host
    address = f"http://{shown}:{port}/?token={token}"
    print(f"{address}\n{_reach(options.host)}, Ctrl-C stops", flush=True)
    if not options.no_browser and _has_display():
        webbrowser.open(address)
    serve(build_app(catalog, token=token, host=options.host, port=port), listening)
    return 0


def check_packages() -> None:
    """ConfigError naming the command that installs what is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"slime view needs {', '.join(missing)}: pip install 'slime-rl[viewer]'")


def listen(host: str, port: int) -> socket.socket:
    """A socket on the port, or on the next free one. ConfigError where there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    error: OSError | None = None
    for number in range(port, min(port + PORTS_TRIED, 65536)) if port else [0]:
        one = socket.socket(family, socket.SOCK_STREAM)
        if os.name == "posix":
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((host, number))
            one.listen(128)
        except OSError as problem:
            one.close()
            error = problem
            continue
        return one
    raise ConfigError(f"--host {host} --port {port}: no port could be had there: {error}")


def serve(app: object, listening: socket.socket) -> None:
    """Answers on a socket until it is stopped."""
    import uvicorn

    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        limit_concurrency=128,
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])


def _reach(host: str) -> str:
    if host in ("127.0.0.1", "localhost", "::1"):
        return "this computer only"
    return f"whoever reaches {host} and has the address, unencrypted"


def _has_display() -> bool:
    """Whether a browser that opens is one that the user sees, not one on the other end of ssh."""
    if os.environ.get("SSH_CONNECTION"):
        return False
    return sys.platform in ("darwin", "win32") or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slime view", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="Run folders, recordings, or folders above.",
    )
    parser.add_argument(
        "--port", type=int, default=PORT, help="Port; the next free one where it is taken."
    )
    parser.add_argument("--host", default="127.0.0.1", help="Address to listen on.")
    parser.add_argument("--no-browser", action="store_true", help="Only print the address.")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
