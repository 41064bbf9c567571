"""Which request comes next? The caller's iterator, asked when a slot is free, and what becomes of its errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

from ...nn.shards import is_shared


class Arrivals:
    """The requests of a stream. exhausted: no more come. failure: what ended the source, kept until nothing is in
    flight; raised at once where processes share the model, as others may know nothing of it."""

    def __init__(self, source: Iterator, model: PreTrainedModel):
        self.source, self.exhausted, self.at_once = source, False, is_shared(model)
        self.failure: Exception | None = None

    def next(self) -> Any:
        """The next request, None where there is none now."""
        if self.exhausted:
            return None
        try:
            return next(self.source)
        except StopIteration:
            self.exhausted = True
        except Exception as error:  # of the caller's own source; an interrupt goes through at once
            if self.at_once:
                raise
            self.exhausted, self.failure = True, error
        return None

    def raise_failure(self) -> None:
        """What ended the source, if it was an error."""
        error, self.failure = self.failure, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback knows this frame
