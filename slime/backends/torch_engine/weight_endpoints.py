"""Weight updates over HTTP: from a folder, or as safetensors bytes in one or more parts. Nothing is
ever unpickled.
"""

from __future__ import annotations

import asyncio

from aiohttp import web
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from slime.backends.torch_engine.build import LoadedEngine
from slime.backends.torch_engine.http_json import (
    arriving,
    error_response,
    json_response,
    read_json_body,
)
from slime.backends.torch_engine.sampling_params import BadRequest, shown
from slime.backends.torch_engine.weight_update import WeightUpdater

# A safetensors header names every tensor: room for it besides the weights themselves.
HEADER_BYTES = 16 * 2**20
READ_BYTES = 2**20


class WeightEndpoints:
    """Handlers of /update_weights_from_disk, /update_weights_from_tensor, /get_weight_version and
    /weights_checksum.
    """

    def __init__(self, loaded: LoadedEngine, updater: WeightUpdater) -> None:
        self._loaded = loaded
        self._updater = updater

    async def from_disk(self, request: web.Request) -> web.Response:
        """Body: {model_path, weight_version?, abort_all_requests? (false), flush_cache? (always
        done)}.
        """
        body = await read_json_body(request)
        folder = body.get("model_path")
        if not isinstance(folder, str) or not folder:
            raise BadRequest(f"model_path is {shown(folder)}, expected a Hugging Face folder.")
        version = _version(body.get("weight_version"))
        aborts = _boolean("abort_all_requests", body.get("abort_all_requests", False))
        _boolean("flush_cache", body.get("flush_cache", True))
        checksum = await asyncio.to_thread(
            self._updater.update_from_disk, folder, version, abort_running=aborts
        )
        return self._done(checksum)

    async def from_tensor(self, request: web.Request) -> web.Response:
        """Body: safetensors bytes. Query: weight_version, begin (true), end (true), checksum (of
        this part), total_checksum (at end).
        """
        query = request.query
        version = _version(query.get("weight_version"))
        if version is None:
            raise BadRequest(
                "weight_version is missing from the query: the label of the weights that this body "
                "is part of."
            )
        begins, ends = (_query_boolean(name, query.get(name, "true")) for name in ("begin", "end"))
        aborts = _query_boolean("abort_all_requests", query.get("abort_all_requests", "false"))
        limit = self._loaded.decoder.num_bytes * 2 + HEADER_BYTES
        if request.content_length is not None and request.content_length > limit:
            return error_response(
                413,
                (
                    f"the body has {request.content_length} bytes; weights of this model have at "
                    "most "
                    f"{limit}."
                ),
            )
        raw = bytearray()
        while block := await arriving(request.content.read(READ_BYTES)):
            raw += block
            if len(raw) > limit:
                return error_response(
                    413,
                    f"the body has more than {limit} bytes, more than the weights of this model.",
                )
        if begins:
            await asyncio.to_thread(self._updater.begin, version)
        await asyncio.to_thread(self._add, raw, query.get("checksum"), version)
        if not ends:
            return json_response(
                {
                    "success": True,
                    "message": "part taken",
                    "weight_version": self._loaded.engine.weight_version,
                }
            )
        total = query.get("total_checksum")
        checksum = await asyncio.to_thread(
            self._updater.end, version, checksum=total, abort_running=aborts
        )
        return self._done(checksum)

    def _add(self, raw: bytearray, checksum: str | None, version: str) -> None:
        try:
            named = load_safetensors(bytes(raw)) if raw else {}
        except (SafetensorError, ValueError, KeyError) as error:
            raise BadRequest(f"the body is not safetensors: {error}") from None
        self._updater.add(named, checksum=checksum, version=version)

    def _done(self, checksum: str) -> web.Response:
        engine = self._loaded.engine
        return json_response(
            {
                "success": True,
                "message": "weights updated",
                "weight_version": engine.weight_version,
                "checksum": checksum,
                "num_paused_requests": engine.load()["running"] if engine.is_paused else 0,
            }
        )

    async def checksum(self, request: web.Request) -> web.Response:
        """The checksum of the weights in use, as slime/files/checksum.py defines it."""
        checksum = await asyncio.to_thread(self._updater.checksum)
        return json_response(
            {"checksum": checksum, "weight_version": self._loaded.engine.weight_version}
        )

    async def version(self, request: web.Request) -> web.Response:
        """The label of the weights in use."""
        return json_response({"weight_version": self._loaded.engine.weight_version})


def add_weight_routes(app: web.Application, loaded: LoadedEngine, updater: WeightUpdater) -> None:
    """Adds the weight endpoints to `app`."""
    endpoints = WeightEndpoints(loaded, updater)
    app.router.add_post("/update_weights_from_disk", endpoints.from_disk)
    app.router.add_post("/update_weights_from_tensor", endpoints.from_tensor)
    app.router.add_get("/get_weight_version", endpoints.version)
    app.router.add_get("/weight_version", endpoints.version)
    app.router.add_get("/weights_checksum", endpoints.checksum)


def _version(value: object) -> str | None:
    if value is None or (isinstance(value, str) and 0 < len(value) <= 256):
        return value
    raise BadRequest(f"weight_version is {shown(value)}, expected a text of 1 to 256 characters.")


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"{name} is {shown(value)}, expected true or false.")
    return value


def _query_boolean(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false", "1", "0"):
        raise BadRequest(f"{name} is {shown(value)}, expected true or false.")
    return value.lower() in ("true", "1")
