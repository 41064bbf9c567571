"""Which chain does a stream decode with: all its levels, or the target alone until a plan uses them?"""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import PreTrainedModel

from ...speculation.row_sampling import RowRule
from ..adaptive import chain_without_levels, let_choose
from ..config import SpeculationConfig
from ..known import given_of
from ..levels.resolve import resolve
from ..levels.row_wiring import RowWiring
from ..levels.wiring import Chain

FIRST_CAPACITY = 512  # slots a row of the caches has at first; they grow with the longest row
_SETTINGS = "stream"  # what is learned of a chain here is kept apart from that of calls


def chain_of(
    model: PreTrainedModel, tokenizer: Any, config: SpeculationConfig, rules: list[RowRule], levels: list,
    tokenizers: list | None, whole: bool = False,
) -> Chain:  # fmt: skip
    """The chain of these levels. Where they are known, it has the target alone until they are worth it; in captured
    rounds, and where it is to be whole from the beginning, it has all of them:
    then nobody's tokens wait until a level is built, and memory stays as it is. rules: of the rows, see `RowWiring`.
    """
    given = None if whole else given_of(levels, tokenizers, tokenizer, config, _SETTINGS)
    wiring = RowWiring(model, tokenizer, config, rules, FIRST_CAPACITY, given)
    resolved = partial(resolve, model, levels, tokenizers, config)
    return chain_without_levels(wiring, None, 0, resolved) or let_choose(wiring, resolved(), _SETTINGS)
