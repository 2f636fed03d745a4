"""One generation request: its parameters, and the tokens and log-probs generated so far."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np

from slime.backends.torch_engine.sampling_params import SamplingParams


@dataclasses.dataclass(eq=False)
class Request:
    """`limit` is the number of response tokens at which it ends for length. Fields after
    `score_from` belong to the engine thread until `finish_reason` is set.
    """

    rid: str
    prompt: np.ndarray
    params: SamplingParams
    seed: int
    limit: int
    stream: bool = False
    score_from: int | None = None

    submitted_at: float = dataclasses.field(default_factory=time.monotonic)
    started_at: float | None = None
    prefilled_at: float | None = None
    finished_at: float | None = None
    slot: int = -1
    pages: np.ndarray | None = None
    cached_tokens: int = 0
    versions: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    input_log_probs: np.ndarray | None = None
    live_tokens: list[int] = dataclasses.field(default_factory=list)
    live_log_probs: list[float] = dataclasses.field(default_factory=list)
    kept_token_ids: list[np.ndarray] = dataclasses.field(default_factory=list)
    output_ids: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    output_log_probs: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros(0, dtype=np.float32)
    )
    finish_reason: dict[str, Any] | None = None
    error: str | None = None

    def note_version(self, version: str, num_tokens: int) -> None:
        """Records that tokens from index `num_tokens` on are sampled under `version`."""
        if self.versions and self.versions[-1][1] == num_tokens:
            self.versions.pop()
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, num_tokens))

    def version_segments(self, num_tokens: int) -> list[list[Any]]:
        """Returns [[version, tokens sampled under it], ...] of the first `num_tokens` response
        tokens.
        """
        ends = [start for _, start in self.versions[1:]] + [num_tokens]
        segments: list[list[Any]] = [
            [version, end - start]
            for (version, start), end in zip(self.versions, ends, strict=True)
        ]
        return [segment for segment in segments if segment[1] > 0]
