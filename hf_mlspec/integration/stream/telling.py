"""What is told of the requests of a stream, round by round, and when they end?"""

from __future__ import annotations

import torch

from ...speculation.checker import Verdict
from ...speculation.draft import Rows
from ...speculation.loop import Loop
from ..levels.wiring import Chain
from ..origins import Origins
from .events import NewTokens, TextPieces, token_logprobs
from .request import Admitted, Completion


class Telling:
    """Counts, streams and events of requests. live: by the number of their row.

    tokenizer: makes text of tokens, None: nobody asks for text. events: whether `told` of a round is asked for.
    """

    def __init__(self, chain: Chain, live: dict[int, Admitted], tokenizer, events: bool) -> None:
        self.live, self.tokenizer = live, tokenizer
        self._gained: dict[int, NewTokens] | None = {} if events else None  # of a round, by number
        self._origins = Origins(chain) if events else None
        self._pieces: dict[int, TextPieces] = {}

    @property
    def asks(self) -> bool:
        """Whether there are to be events."""
        return self._gained is not None

    def emit(self, loop: Loop, kept: Rows, verdict: Verdict) -> None:
        """Count and stream what every request gained in a round of this loop."""
        drafted_by = verdict.drafted_by
        for r, (number, tokens) in enumerate(zip(loop.numbers, kept, strict=True)):
            one = self.live[number]
            for _ in range(len(tokens) if drafted_by is None else bool(verdict.tokens[r])):
                one.stats.count_pass(1)
            one.stats.new_tokens += len(tokens)
            if drafted_by is not None:
                one.counts_of(drafted_by).settle([loop.drafted[r]], [verdict.accepted[r]])
            if tokens and one.request.streamer is not None:
                one.stream(torch.tensor(tokens))
            if self._gained is not None:
                event = self._gained[number] = NewTokens(one.request, list(tokens))
                event.levels = self._origins.of(r, len(tokens), verdict)
                if one.request.logprobs is not None:
                    event.logprobs = token_logprobs(verdict.logits[r], event.tokens, one.request.logprobs)
        if self._origins is not None:
            self._origins.forget()

    def told(self) -> list[NewTokens]:
        """What the requests gained in the last round; with it, of one that ended, the text that was held back."""
        gained, events = self._gained or {}, []
        for number in list(gained):
            one, event = self.live[number], gained.pop(number)
            if self.tokenizer is not None:
                pieces = self._pieces.setdefault(number, TextPieces(self.tokenizer))
                event.text = pieces.add(event.tokens)
                if one.finish_reason:
                    event.text += pieces.rest()
                    del self._pieces[number]
            if event.tokens or event.text:
                events.append(event)
        return events

    def complete(self, one: Admitted) -> Completion:
        """The end of a request."""
        one.end_stream()
        new = list(one.new_tokens)
        text = self.tokenizer.decode(new, skip_special_tokens=True) if self.tokenizer is not None else None
        whole = one.prompts.whole(0, one.row)
        return Completion(one.request, whole, new, one.finish_reason, one.error, one.stats, text)
