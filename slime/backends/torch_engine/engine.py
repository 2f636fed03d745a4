"""The engine: one thread that admits requests, runs prefill and decode steps, and hands out what
has finished.

Requests join and leave at every step. Everything that touches weights or cache (updates, flushes)
runs in this thread between two steps, so a step never sees half a weight version.
"""

from __future__ import annotations

import collections
import concurrent.futures
import logging
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch

from slime.backends.torch_engine.kv_cache import PAGE_SIZE, PageAllocator, num_pages
from slime.backends.torch_engine.model_runner import ModelRunner, PrefillPrompt, decode_order
from slime.backends.torch_engine.prompt_cache import (
    Admission,
    PromptCache,
    PromptState,
    pages_to_copy,
)
from slime.backends.torch_engine.request import Request
from slime.backends.torch_engine.running_batch import RunningBatch
from slime.backends.torch_engine.sampler import draw_tokens
from slime.backends.torch_engine.step_spans import StepSpans
from slime.backends.torch_engine.stop_strings import find_stop
from slime.backends.torch_engine.tokenizer import EngineTokenizer
from slime.exceptions import EngineError
from slime.tracking.spans import current_writer

logger = logging.getLogger(__name__)

Notify = Callable[[list[Request], list[Request]], None]
IDLE_WAIT_SECONDS = 1.0
STOP_JOIN_SECONDS = 60.0


class Engine:
    """Generates for many requests at once. `notify(finished, progressed)` is called in the engine
    thread after each step; progressed are the streaming requests that have new tokens. Public
    methods may be called from any thread unless they say otherwise.
    """

    def __init__(
        self,
        runner: ModelRunner,
        batch: RunningBatch,
        *,
        tokenizer: EngineTokenizer | None,
        weight_version: str,
        prompt_cache: bool,
        max_waiting: int,
        notify: Notify,
    ) -> None:
        self.runner = runner
        self.weight_version = weight_version
        self.total_generated = 0
        self.total_steps = 0
        self._batch = batch
        self._tokenizer = tokenizer
        self._notify = notify
        self._max_waiting = max_waiting
        self._keeps_prompts = prompt_cache
        self._allocator = PageAllocator(runner.cache.total_pages)
        self._prompts = PromptCache(self._allocator, vocab_size=runner.decoder.config.vocab_size)
        self._admission = Admission(self._allocator, self._prompts)
        self._waiting: collections.deque[Request] = collections.deque()
        self._commands: collections.deque[tuple[Callable[[], Any], concurrent.futures.Future]] = (
            collections.deque()
        )
        self._condition = threading.Condition()
        self._aborted_rids: set[str] = set()
        self._aborted_requests: set[Request] = set()
        self._aborts_all = False
        self._is_paused = False
        self._is_stopping = False
        self._failure: str | None = None
        self._failure_stack: str | None = None
        self._finished: list[Request] = []
        self._progressed: list[Request] = []
        self._spans = StepSpans(current_writer())
        self._thread = threading.Thread(target=self._loop, name="slime-engine", daemon=True)

    def start(self) -> None:
        """Starts the engine thread."""
        self._thread.start()

    def stop(self) -> None:
        """Aborts everything and ends the engine thread."""
        with self._condition:
            self._aborts_all = True
            self._is_stopping = True
            self._condition.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=STOP_JOIN_SECONDS)

    @property
    def failure(self) -> str | None:
        """Why the engine thread ended, None while it runs: what any client may read."""
        return self._failure

    @property
    def failure_stack(self) -> str | None:
        """The stack of `failure`, with paths of this machine: for the run's own processes."""
        return self._failure_stack

    @property
    def is_paused(self) -> bool:
        """True between pause and resume."""
        return self._is_paused

    @property
    def total_pages(self) -> int:
        """Pages that sequences and cached prompts can have together."""
        return self.runner.cache.total_pages - 1

    def longest_response(self, prompt_length: int) -> int:
        """Returns the response tokens that the whole cache has room for after a prompt of
        `prompt_length` (negative: not even that).
        """
        spare = self.total_pages - num_pages(prompt_length) + prompt_length // PAGE_SIZE
        return spare * PAGE_SIZE - prompt_length

    def load(self) -> dict[str, int]:
        """Returns counts of running and waiting requests, of cached prompts, and of tokens that the
        pages in use have room for.
        """
        return {
            "running": len(self._batch.rows),
            "waiting": len(self._waiting),
            "cached_prompts": len(self._prompts),
            "tokens": (self.total_pages - self._allocator.num_free) * PAGE_SIZE,
        }

    def submit(self, requests: list[Request]) -> None:
        """Queues `requests`, in order. EngineError if the engine has stopped or too many wait."""
        with self._condition:
            self._check_alive()
            if len(self._waiting) + len(requests) > self._max_waiting:
                raise EngineError(
                    f"{len(self._waiting)} requests wait already, at most {self._max_waiting} may. "
                    "Send fewer at once."
                )
            self._waiting.extend(requests)
            self._condition.notify_all()

    def abort(self, rid: str | None = None, *, all_requests: bool = False) -> None:
        """Ends the requests called `rid`, or all, before the next step, with the tokens they have
        by then.
        """
        with self._condition:
            self._aborts_all = self._aborts_all or all_requests
            if rid is not None:
                self._aborted_rids.add(rid)
            self._condition.notify_all()

    def abort_requests(self, requests: list[Request]) -> None:
        """Ends exactly these requests, because their client is gone."""
        with self._condition:
            self._aborted_requests.update(
                request for request in requests if request.finish_reason is None
            )
            self._condition.notify_all()

    def pause(self) -> None:
        """Stops stepping; running requests keep their place, new ones wait."""
        with self._condition:
            self._is_paused = True
            self._condition.notify_all()

    def resume(self) -> None:
        """Goes on after `pause`."""
        with self._condition:
            self._is_paused = False
            self._condition.notify_all()

    def between_steps(self, function: Callable[[], Any]) -> concurrent.futures.Future:
        """Returns a future of `function()`, run in the engine thread between two steps, also while
        paused.
        """
        future: concurrent.futures.Future = concurrent.futures.Future()
        with self._condition:
            self._check_alive()
            self._commands.append((function, future))
            self._condition.notify_all()
        return future

    def set_weight_version(self, version: str) -> None:
        """Labels tokens from now on. Cached prompts belong to the old weights and are forgotten.
        Call it in `between_steps` only.
        """
        self.weight_version = version
        self._prompts.clear()
        for slot in self._batch.rows.tolist():
            self._batch.requests[slot].note_version(version, int(self._batch.generated[slot]))

    def flush_cache(self) -> int:
        """Forgets cached prompts and returns how many there were. Call it in
        `between_steps` only.
        """
        return self._prompts.clear()

    def release_memory(self) -> bool:
        """Gives the cache's memory back and pauses; False, and nothing happens, while requests run
        or wait. Call it in `between_steps` only.
        """
        if self._waiting or len(self._batch.rows):
            return False
        self._is_paused = True
        self._prompts.clear()
        self.runner.cache.release()
        if self.runner.decoder.device.type == "cuda":
            torch.cuda.empty_cache()
        return True

    def resume_memory(self) -> None:
        """Takes the memory again and goes on. Call it in `between_steps` only."""
        self.runner.cache.allocate()
        self._is_paused = False

    def _check_alive(self) -> None:
        if self._failure or self._is_stopping:
            raise EngineError(f"the engine has stopped: {self._failure or 'it was shut down'}")

    # Everything below runs in the engine thread.

    def _loop(self) -> None:
        try:
            while True:
                with self._condition:
                    while not self._has_work():
                        self._spans.end_stretch()
                        self._condition.wait(IDLE_WAIT_SECONDS)
                    is_stopping = self._is_stopping
                self._run_commands()
                self._take_aborts()
                if not self._is_paused and not is_stopping:
                    self._step()
                self._deliver()
                if is_stopping:
                    self._spans.end_stretch()
                    return
        except Exception as error:  # noqa: BLE001 - the thread ends here, whatever broke
            logger.exception("The engine ends.")
            # Whatever broke, no request may wait for ever; /health says why from now on.
            with self._condition:
                self._failure = f"{type(error).__name__}. The engine's log has the stack."
                self._failure_stack = traceback.format_exc()
            self._fail_everything()
            self._deliver()

    def _has_work(self) -> bool:
        if (
            self._is_stopping
            or self._commands
            or self._aborted_rids
            or self._aborted_requests
            or self._aborts_all
        ):
            return True
        return not self._is_paused and bool(self._waiting or len(self._batch.rows))

    def _run_commands(self) -> None:
        while self._commands:
            function, future = self._commands.popleft()
            if not future.set_running_or_notify_cancel():
                continue  # whoever asked has gone
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - it is raised where the result is awaited
                future.set_exception(error)

    def _deliver(self) -> None:
        if self._finished or self._progressed:
            finished, self._finished = self._finished, []
            progressed, self._progressed = self._progressed, []
            self._notify(finished, progressed)

    def _fail_everything(self) -> None:
        running = [request for request in self._batch.requests if request is not None]
        with self._condition:
            waiting = list(self._waiting)
            self._waiting.clear()
        for request in running + waiting:
            request.error = self._failure
            self._conclude(request, {"type": "abort", "message": "the engine failed"})
        while self._commands:
            future = self._commands.popleft()[1]
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineError(f"the engine has stopped: {self._failure}"))

    def _take_aborts(self) -> None:
        with self._condition:
            rids, gone, everything = self._aborted_rids, self._aborted_requests, self._aborts_all
            if not rids and not gone and not everything:
                return
            self._aborted_rids, self._aborted_requests, self._aborts_all = set(), set(), False

            def is_meant(request: Request) -> bool:
                return everything or request.rid in rids or request in gone

            dropped = [request for request in self._waiting if is_meant(request)]
            kept = [request for request in self._waiting if not is_meant(request)]
            self._waiting.clear()
            self._waiting.extend(kept)
        for request in dropped:
            self._conclude(request, _aborted())
        slots = [slot for slot in self._batch.rows.tolist() if is_meant(self._batch.requests[slot])]
        self._finish({slot: _aborted() for slot in slots})

    def _step(self) -> None:
        self._admit()
        if len(self._batch.rows):
            self._decode()
        self.total_steps += 1

    def _admit(self) -> None:
        """Runs the prompts of as many waiting requests as slots and pages allow, and samples their
        first token.
        """
        if not self._waiting or not self._batch.num_free:
            return
        with self._condition:
            chosen = self._admission.choose(self._waiting, num_slots=self._batch.num_free)
        if not chosen:
            return
        started = time.perf_counter()
        chosen = [(request, state) for request, state in chosen if self._placed(request)]
        self._run_prompts(chosen)
        going, prefilled_at = [], time.monotonic()
        for request, state in chosen:
            request.prefilled_at = prefilled_at
            request.input_log_probs = state.scores
            if request.limit > 0:
                going.append((request.slot, cast(torch.Tensor, state.logits)))
        self._finish({request.slot: _length(0) for request, _ in chosen if request.limit == 0})
        if going:
            slots = np.array([slot for slot, _ in going], dtype=np.int64)
            self._batch.join(slots)
            self._sample(slots, [logits for _, logits in going])
        if self._keeps_prompts:
            self._prompts.trim()
        else:
            self._prompts.clear()
        num_tokens = sum(len(request.prompt) - request.cached_tokens for request, _ in chosen)
        self._spans.prefill(started, num_requests=len(chosen), num_tokens=num_tokens)

    def _placed(self, request: Request) -> bool:
        """Gives the request its slot. One that cannot have it fails alone; the others of the step
        go on.
        """
        request.started_at = time.monotonic()
        request.note_version(self.weight_version, 0)
        try:
            self._batch.place(request)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one request ends that request only
            self._refuse(request, error)
            return False
        return True

    def _refuse(self, request: Request, error: Exception) -> None:
        logger.error("Request %s failed; others go on.", request.rid, exc_info=error)
        request.error = (
            f"the request could not be served: {type(error).__name__}. The engine's "
            "log has the stack."
        )
        if request.slot >= 0:
            self._batch.remove(np.array([request.slot], dtype=np.int64))
        self._allocator.release(cast(np.ndarray, request.pages))
        request.pages = None
        self._conclude(request, {"type": "abort", "message": "the request could not be served"})

    @torch.inference_mode()
    def _run_prompts(self, chosen: list[tuple[Request, PromptState]]) -> None:
        states = list(dict.fromkeys(state for _, state in chosen if state.logits is None))
        if states:
            results = self.runner.prefill(
                [PrefillPrompt(s.tokens, s.pages, s.score_from) for s in states]
            )
            for state, result in zip(states, results, strict=True):
                state.logits, state.scores = result.logits, result.scores
        sources, targets = pages_to_copy(chosen)
        if len(sources):
            device = self.runner.decoder.device
            self.runner.cache.copy_pages(
                torch.from_numpy(sources).to(device), torch.from_numpy(targets).to(device)
            )

    def _decode(self) -> None:
        batch, started = self._batch, time.perf_counter()
        rows = batch.rows[decode_order(batch.lengths[batch.rows])]
        for start in range(0, len(rows), self.runner.max_decode_rows):
            part = rows[start : start + self.runner.max_decode_rows]
            logits = self.runner.decode(
                batch.last_tokens[part], batch.lengths[part], batch.page_table[part]
            )
            batch.lengths[part] += 1
            self._sample(part, logits)
        self._spans.decode(started, num_rows=len(rows))

    @torch.inference_mode()
    def _sample(self, rows: np.ndarray, logits: torch.Tensor | list[torch.Tensor]) -> None:
        """Draws the next token of `rows` and finishes those that end with it. A list of logits (one
        row each) is stacked in blocks.
        """
        if isinstance(logits, list):
            size = self.runner.max_decode_rows
            for start in range(0, len(rows), size):
                block = self.runner.pad_rows(torch.stack(logits[start : start + size]))
                self._sample(rows[start : start + size], block)
            return
        parameters = self._batch.sampling_batch(rows)
        sampled = draw_tokens(logits, parameters)
        self._batch.append(rows, sampled, parameters)
        self.total_generated += len(rows)
        self._stream_tokens(rows, sampled.tokens, sampled.log_probs)
        self._finish(self._ended(rows, sampled.log_probs))

    def _stream_tokens(self, rows: np.ndarray, tokens: np.ndarray, log_probs: np.ndarray) -> None:
        for place in np.flatnonzero(self._batch.streams[rows]).tolist():
            request = self._batch.requests[rows[place]]
            # Log-probs first: a reader takes as many of each as there are tokens.
            request.live_log_probs.append(float(log_probs[place]))
            request.live_tokens.append(int(tokens[place]))
            self._progressed.append(request)

    def _ended(self, rows: np.ndarray, log_probs: np.ndarray) -> dict[int, dict[str, Any]]:
        """Returns the finish reason by slot of the rows that end with the token just drawn."""
        batch = self._batch
        reasons: dict[int, dict[str, Any]] = {}
        for slot in rows[~np.isfinite(log_probs)].tolist():
            batch.requests[slot].error = (
                "the model gave log-probs that are not finite, with weight version "
                f"{self.weight_version}"
            )
            reasons[slot] = {"type": "abort", "message": "log-probs are not finite"}
        for slot in rows[batch.ended_by_token(rows)].tolist():
            reasons.setdefault(slot, {"type": "stop", "matched": int(batch.last_tokens[slot])})
        for slot in rows[batch.has_stops[rows]].tolist():
            if slot not in reasons:
                try:
                    reason = self._stop_reason(slot)
                except Exception as error:  # noqa: BLE001 - a text that cannot be decoded ends its own request only
                    logger.error(
                        "Request %s failed; others go on.", batch.requests[slot].rid, exc_info=error
                    )
                    batch.requests[
                        slot
                    ].error = f"its stop strings could not be looked for: {type(error).__name__}"
                    reason = {"type": "abort", "message": "stop strings could not be looked for"}
                if reason is not None:
                    reasons[slot] = reason
        for slot in rows[batch.ended_by_length(rows)].tolist():
            reasons.setdefault(slot, _length(int(batch.limits[slot])))
        return reasons

    def _stop_reason(self, slot: int) -> dict[str, Any] | None:
        batch = self._batch
        request = cast(Request, batch.requests[slot])
        count = int(batch.generated[slot])
        if count < request.params.min_new_tokens:
            return None
        last = int(batch.last_tokens[slot])
        if last in request.params.stop_token_ids:
            return {"type": "stop", "matched": last}
        if not request.params.stop:
            return None
        stop = find_stop(
            batch.outputs[slot, :count], request.params.stop, decode=self._decode_for_stops
        )
        return None if stop is None else {"type": "stop", "matched": stop}

    def _decode_for_stops(self, ids: np.ndarray) -> str:
        tokenizer = cast(EngineTokenizer, self._tokenizer)  # requests with stop texts need one
        return tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def _finish(self, reasons: dict[int, dict[str, Any]]) -> None:
        if not reasons:
            return
        batch = self._batch
        for slot, reason in reasons.items():
            request = cast(Request, batch.requests[slot])
            count = int(batch.generated[slot])
            request.output_ids = batch.outputs[slot, :count].copy()
            request.output_log_probs = batch.log_probs[slot, :count].copy()
            self._give_back(request)
            self._conclude(request, reason)
        batch.remove(np.array(list(reasons), dtype=np.int64))

    def _give_back(self, request: Request) -> None:
        """Releases the request's pages. After an error those that nobody holds any more are
        cleared, the cached prompts' with them: NaN in a page would reach its next holder, even
        through masked positions. A page that siblings share stays as it is until the last of them
        ends.
        """
        pages, request.pages = cast(np.ndarray, request.pages), None
        if request.error is None:
            self._allocator.release(pages)
            return
        suspect = np.unique(np.concatenate((pages, self._prompts.held_pages())))
        self._prompts.clear()
        self._allocator.release(pages)
        free = suspect[self._allocator.are_free(suspect)]
        self.runner.cache.clear_pages(torch.from_numpy(free).to(self.runner.decoder.device))

    def _conclude(self, request: Request, reason: dict[str, Any]) -> None:
        if not request.versions:
            request.note_version(self.weight_version, 0)
        request.finish_reason = reason
        request.finished_at = time.monotonic()
        self._finished.append(request)


def _aborted() -> dict[str, Any]:
    return {"type": "abort", "message": "aborted on request"}


def _length(limit: int) -> dict[str, Any]:
    return {"type": "length", "length": limit}
