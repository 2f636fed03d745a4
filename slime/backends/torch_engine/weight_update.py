"""A new weight version, from the first bucket to the switch. One update at a time; the running
version stays until the last check.

States: idle -> begin -> add* -> end -> idle. A second `begin` drops an unfinished update: its
sender is gone.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.backends.torch_engine.build import LoadedEngine
from slime.backends.torch_engine.weights import StagedWeights, decoder_checksum, read_weights
from slime.exceptions import ConfigError, EngineError
from slime.models.shape import read_model_shape

APPLY_TIMEOUT_SECONDS = 600.0


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (ConfigError, EngineError) as error:
        raise EngineError(f"weights refused, the old ones stay: {error}") from None


class WeightUpdater:
    """Blocking methods, to be called from worker threads (not from the engine thread, not from an
    event loop).
    """

    def __init__(self, loaded: LoadedEngine) -> None:
        self._loaded = loaded
        self._lock = threading.Lock()
        self._staged: StagedWeights | None = None
        self._version: str | None = None

    def begin(self, version: str) -> None:
        """Starts an update to `version`."""
        with self._lock:
            self._begin(version)

    def add(
        self, named: Mapping[str, Any], *, checksum: str | None = None, version: str | None = None
    ) -> None:
        """Takes one bucket of tensors or arrays by Hugging Face name. EngineError, with nothing
        taken, if one does not fit, if the bucket's checksum differs, or if another version is being
        updated.
        """
        with self._lock:
            staged = self._open(version)
            with _refusals():
                staged.add(named, checksum=checksum)

    def end(self, version: str, *, checksum: str | None = None, abort_running: bool = False) -> str:
        """Applies the update between two steps, all of it or nothing, and returns the checksum of
        the tensors that came.

        EngineError if a weight is missing or `checksum` (over all tensors) differs; the update is
        dropped then, the old weights stay.
        """
        with self._lock:
            staged = self._open(version)
            self._staged = self._version = None
            return self._apply(staged, version, checksum=checksum, abort_running=abort_running)

    def update_from_disk(
        self, folder: str, version: str | None, *, abort_running: bool = False
    ) -> str:
        """Loads all weights of a Hugging Face folder as `version` (None keeps the label) and
        returns their checksum.

        EngineError, and the old weights stay, if the folder cannot be read or does not fit.
        """
        if not os.path.isdir(folder):  # of Path it is an error for a name that is too long
            raise EngineError(
                f"model_path {folder[:300]!r} is not a folder on the engine's machine."
            )
        with self._lock:
            staged = self._new_staging(copy=False)
            with _refusals():
                if (Path(folder) / "config.json").exists():
                    self._check_config(folder)
                for name, tensor in read_weights(folder):
                    staged.add({name: tensor})
            return self._apply(staged, version, checksum=None, abort_running=abort_running)

    def checksum(self) -> str:
        """Returns the checksum of the weights in use."""
        return self._between_steps(lambda: decoder_checksum(self._loaded.decoder))

    def _check_config(self, folder: str) -> None:
        shape = self._loaded.decoder.config
        shape.check_same_computation(read_model_shape(folder), f"{folder}/config.json")

    def _begin(self, version: str) -> None:
        self._staged, self._version = self._new_staging(copy=True), version

    def _new_staging(self, *, copy: bool) -> StagedWeights:
        return StagedWeights(
            self._loaded.decoder, allowed_dtypes=self._loaded.allowed_dtypes, copy=copy
        )

    def _open(self, version: str | None) -> StagedWeights:
        if self._staged is None:
            raise EngineError("no weight update is open: begin one first (a failed end closes it).")
        if version is not None and version != self._version:
            raise EngineError(
                f"got weight version {version!r}, but the open update is to {self._version!r}."
            )
        return self._staged

    def _apply(
        self,
        staged: StagedWeights,
        version: str | None,
        *,
        checksum: str | None,
        abort_running: bool,
    ) -> str:
        with _refusals():
            received = staged.check(checksum)
        engine = self._loaded.engine
        if abort_running:
            engine.abort(all_requests=True)

        def switch() -> None:
            staged.apply()
            engine.set_weight_version(engine.weight_version if version is None else version)

        self._between_steps(switch)
        return received

    def _between_steps(self, function: Callable[[], Any]) -> Any:
        return self._loaded.engine.between_steps(function).result(timeout=APPLY_TIMEOUT_SECONDS)
