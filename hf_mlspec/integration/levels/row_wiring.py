"""How are levels wired where every row of the batch was asked for something else?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from transformers import PreTrainedModel
from transformers.generation import LogitsProcessorList

from ...speculation.row_sampling import RowRule, RowSampler
from ...speculation.sampling import Sampler
from ..config import SpeculationConfig
from ..costs.known_file import Given
from .wiring import Wiring


class RowWiring(Wiring):
    """Builds a chain whose rows have rules of their own: `rules`, one per row, are kept in step by the caller.

    capacity: slots a row of the caches has at first.
    """

    def __init__(
        self, target: PreTrainedModel, tokenizer, config: SpeculationConfig, rules: list[RowRule], capacity: int,
        given: Given | None = None,
    ):  # fmt: skip
        super().__init__(
            target,
            tokenizer,
            config,
            processors=LogitsProcessorList(),
            prompts=None,
            capacity=capacity,
            keep_logits=False,
            given=given,
        )
        self.rules = rules

    def _sampler(self, vocab_size: int | None = None) -> Callable[[], Sampler]:
        """Levels in another vocabulary, which the rows' noise and processors do not speak, guess greedily."""
        return partial(RowSampler, self.vocab_size, self.rules, judges=vocab_size is None)
