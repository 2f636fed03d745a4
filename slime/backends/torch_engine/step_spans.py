"""What the engine's thread does when, for --trace: one span per prompt pass, and one per stretch of
decode steps between two of them.

A span per decode step would be as many records as tokens; a stretch is cut after a second, so that
a run that is read while it goes on, or was killed, shows what the engine did until then.
"""

from __future__ import annotations

import time

from slime.tracking.spans import SpanWriter

LONGEST_STRETCH_S = 1.0
LONGEST_PAUSE_S = 0.005  # a longer one ends the stretch: the engine did something else


class StepSpans:
    """Adds the spans to `writer`; None: does nothing. For the engine's thread alone."""

    def __init__(self, writer: SpanWriter | None) -> None:
        self._span_writer = writer
        self._start = self._end = 0.0
        self._steps = self._tokens = self._most_rows = 0

    def prefill(self, started: float, *, num_requests: int, num_tokens: int) -> None:
        """Notes a pass over prompts that began at `started` (`time.perf_counter`) and ends now."""
        if self._span_writer is None:
            return
        self.end_stretch()
        attrs = {"requests": num_requests, "tokens": num_tokens}
        self._span_writer.add("prefill", started, time.perf_counter(), attrs=attrs)

    def decode(self, started: float, *, num_rows: int) -> None:
        """Notes a decode step over `num_rows` requests that began at `started` and ends now."""
        if self._span_writer is None:
            return
        if self._steps and (
            started - self._end > LONGEST_PAUSE_S or started - self._start > LONGEST_STRETCH_S
        ):
            self.end_stretch()
        if not self._steps:
            self._start = started
        self._end = time.perf_counter()
        self._steps += 1
        self._tokens += num_rows
        self._most_rows = max(self._most_rows, num_rows)

    def end_stretch(self) -> None:
        """Writes the stretch of decode steps that is under way, if one is."""
        if self._span_writer is None or not self._steps:
            return
        attrs = {"steps": self._steps, "tokens": self._tokens, "most_requests": self._most_rows}
        self._span_writer.add("decode", self._start, self._end, attrs=attrs)
        self._steps = self._tokens = self._most_rows = 0
