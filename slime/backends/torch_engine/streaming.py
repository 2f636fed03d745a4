"""The events of one streamed response: the response so far, as SGLang sends it, in time linear in
its length.

Each event holds the whole response, so they come less often as it grows: after one more token while
it is short, after a 64th of its length later. Text is decoded token by token, never from the
beginning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from slime.backends.torch_engine.protocol import ResponseOptions, meta_info, triples
from slime.backends.torch_engine.request import Request
from slime.backends.torch_engine.stop_strings import held_back
from slime.backends.torch_engine.tokenizer import EngineTokenizer

# An event follows once the response is longer by this share of what was sent, and by at least one
# token.
TOKENS_PER_NEW_TOKEN = 64
# Tokens that together show no whole character are decoded anew with the next ones up to this
# number.
LONGEST_CHARACTER = 16


@dataclasses.dataclass
class GrowingText:
    """The text of a growing list of ids. `decode` is called with the last few only: those whose
    text may still change, and as many before them as a tokenizer looks at.
    """

    decode: Callable[[list[int]], str]
    text: str = ""
    _ids: list[int] = dataclasses.field(default_factory=list)
    _context: int = 0  # the decoding window starts here
    _done: int = 0  # ids whose text is in `text`

    def extend(self, ids: list[int]) -> str:
        """Adds ids and returns the text so far, without the beginning of a character whose end is
        still to come.
        """
        for token in ids:
            self._ids.append(token)
            before, after = self._ids[self._context : self._done], self._ids[self._context :]
            known, new = self.decode(before), self.decode(after)
            is_whole = (
                not new.endswith("\ufffd") or len(self._ids) - self._done >= LONGEST_CHARACTER
            )
            if is_whole and len(new) >= len(known):
                self.text += new[len(known) :]
                self._context, self._done = self._done, len(self._ids)
        return self.text


class ResponseStream:
    """The events of one request."""

    def __init__(
        self, request: Request, options: ResponseOptions, tokenizer: EngineTokenizer | None
    ) -> None:
        self.request, self.options, self.tokenizer = request, options, tokenizer
        self._num_sent = 0
        skip = request.params.skip_special_tokens
        self._text = GrowingText(
            (lambda ids: "")
            if tokenizer is None
            else lambda ids: tokenizer.decode(ids, skip_special_tokens=skip)
        )

    def is_due(self) -> bool:
        """Whether enough has come since the last event."""
        new = len(self.request.live_tokens) - self._num_sent
        return new >= max(1, self._num_sent // TOKENS_PER_NEW_TOKEN)

    def event(self, *, now: float) -> dict[str, Any]:
        """The response so far. Text that may still change is held back."""
        request = self.request
        ids = list(request.live_tokens)
        text = self._text.extend(ids[self._num_sent :])
        self._num_sent = len(ids)
        held = held_back(text, () if request.params.no_stop_trim else request.params.stop)
        meta = meta_info(request, len(ids), None, ended_at=now)
        if self.options.return_logprob:
            meta["output_token_logprobs"] = triples(
                request.live_log_probs[: len(ids)], ids, self.options, self.tokenizer
            )
        return {"text": text[: len(text) - held], "output_ids": ids, "meta_info": meta}
