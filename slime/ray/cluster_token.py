"""The token of a private Ray cluster: whoever connects to it must have it."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray import _raylet

MODE, PATH, VALUE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"


@contextlib.contextmanager
def token_authentication(folder: str) -> Iterator[None]:
    """Inside, clusters that this process starts ask for a token of their own, which lies in
    `folder` for this user alone and which Ray hands to the processes of the cluster.

    Without it Ray keeps one token for all clusters in the home folder, and its earlier versions
    none. A RAY_AUTH_MODE of the environment stays in force, and so does a token beside it.
    """
    if os.environ.get(MODE, "token") != "token" or {PATH, VALUE} & os.environ.keys():
        yield
        return
    token = Path(folder, "token")
    descriptor = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32))
    before = os.environ.get(MODE)
    os.environ |= {MODE: "token", PATH: str(token)}
    _read_again()
    try:
        yield
    finally:
        del os.environ[PATH], os.environ[MODE]
        if before is not None:
            os.environ[MODE] = before
        _read_again()


def _read_again() -> None:
    """Ray has read the environment as it was imported."""
    compiled: Any = _raylet  # without stubs
    compiled.Config.initialize("")
    compiled.AuthenticationTokenLoader.instance().reset_cache()
