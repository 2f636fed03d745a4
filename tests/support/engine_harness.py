"""Runs requests on a real engine without HTTP: `EngineHarness` drives the engine's own loop in its
own thread.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np

from slime.backends.torch_engine.build import load_engine
from slime.backends.torch_engine.engine_config import EngineConfig
from slime.backends.torch_engine.request import Request
from slime.backends.torch_engine.sampling_params import parse_sampling_params

RUN_TIMEOUT = 60.0


class EngineHarness:
    """A loaded engine and a way to wait for requests. Context manager; the engine thread ends with
    it.
    """

    def __init__(self, folder: str | Path, **config: Any) -> None:
        self.loaded = load_engine(EngineConfig(str(folder), **config), notify=self._notify)
        self.engine = self.loaded.engine
        self._condition = threading.Condition()
        self._num_finished = 0

    def __enter__(self) -> EngineHarness:
        self.engine.start()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.engine.stop()

    def _notify(self, finished: list[Request], progressed: list[Request]) -> None:
        with self._condition:
            self._num_finished += len(finished)
            self._condition.notify_all()

    def request(
        self, prompt: list[int], *, seed: int = 0, score_from: int | None = None, **params: Any
    ) -> Request:
        """Returns a request for `prompt`; params are sampling parameters."""
        parsed = parse_sampling_params(params, vocab_size=self.loaded.decoder.config.vocab_size)
        limit = min(parsed.max_new_tokens, self.loaded.context_length - len(prompt))
        tokens = np.array(prompt, dtype=np.int32)
        return Request(
            rid=f"r{seed}",
            prompt=tokens,
            params=parsed,
            seed=seed,
            limit=limit,
            score_from=score_from,
        )

    def run(self, requests: list[Request]) -> list[Request]:
        """Submits `requests` together and returns them finished."""
        self.engine.submit(requests)
        return self.wait(requests)

    def wait(self, requests: list[Request]) -> list[Request]:
        """Returns `requests` once all have finished."""
        with self._condition:
            done = self._condition.wait_for(
                lambda: all(r.finish_reason for r in requests), timeout=RUN_TIMEOUT
            )
        assert done, (
            f"{sum(r.finish_reason is None for r in requests)} of {len(requests)} requests did not "
            "finish"
        )
        return requests
