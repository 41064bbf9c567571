"""How do transformers' logits processors see rows that grow by several tokens at once?"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.generation import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.logits_process import (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TopHLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkLogitsProcessor,
)

# These look at nothing but the scores of one position.
WARPERS = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
)
# These treat every line of ids and scores alike and by itself, so that they may be called with some rows only.
LINE_BY_LINE = (
    *WARPERS,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TopHLogitsWarper,
    WatermarkLogitsProcessor,
)
# These carry state from call to call, or run the model; a guess that is taken back would leave a trace in them.
STATEFUL = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)


class Prompts:
    """The prompts as generate got them, and as rows without padding.

    input_ids: int64 `[batch, width]`. attention_mask: `[batch, width]` or None. Masked tokens are left out of the
    rows: stock attention does not see them and stock position ids do not count them. filler: the token that stands
    behind the end of a row. grown: the rows as far as they are settled; who decodes lets these very lists grow.
    """

    def __init__(self, input_ids: Tensor, attention_mask: Tensor | None, filler: int = 0):
        self.input_ids, self.filler = input_ids, filler
        self._lines = lines = input_ids.tolist()
        if attention_mask is None:
            self.rows = lines
        else:
            check_mask(list(attention_mask.shape), input_ids)
            mask = attention_mask.tolist()
            self.rows = [
                [t for t, m in zip(line, flags, strict=True) if m] for line, flags in zip(lines, mask, strict=True)
            ]
        for number, row in enumerate(self.rows):
            if not row:
                raise ValueError(f"prompt {number} of the batch has no token that its attention_mask lets through")
        self.lengths = [len(row) for row in self.rows]
        self.grown = [list(row) for row in self.rows]
        self._masked = None if attention_mask is None else mask
        self.has_holes = attention_mask is not None and bool((attention_mask.diff(dim=1) < 0).any())

    def whole(self, number: int, row: list[int]) -> list[int]:
        """Padded prompt and generated tokens, as stock generate would hold them."""
        return self._lines[number] + row[self.lengths[number] :]

    def columns(self, number: int, count: int | None = None) -> list[int]:
        """Where the first `count` tokens of a row stand in what generate returns; without count, its prompt's."""
        width = self.input_ids.shape[1]
        flags = [1] * width if self._masked is None else self._masked[number]
        own = [column for column, flag in enumerate(flags) if flag]
        return own if count is None else (own + list(range(width, width + count)))[:count]

    def filled(self, generated: int, shown: dict[int, list[int]]) -> list[list[int]]:
        """All rows of the batch in the user's order, `generated` new tokens each, as stock generate would hold them.

        A row that has more is cut; one that ended before, or has not come so far, is filled. shown: rows, by number,
        that are more than what is settled of them.
        """
        width = self.input_ids.shape[1] + generated
        lines = [self.whole(number, shown.get(number, row))[:width] for number, row in enumerate(self.grown)]
        return [line + [self.filler] * (width - len(line)) for line in lines]


def check_mask(shape: list[int], input_ids: Tensor) -> None:
    """Raise ValueError unless an attention_mask of this shape has one flag for each token of input_ids."""
    if shape != list(input_ids.shape):
        raise ValueError(
            f"attention_mask has shape {shape} and input_ids {list(input_ids.shape)}: one flag per token is needed"
        )


def split_processors(processors: LogitsProcessorList, prompts: Prompts):
    """(warp, process) for `Sampler`: one of them is None, or both.

    A processor of transformers that treats every row alike is called with the rows in question only. All others, the
    user's own among them, are called as in stock generate: with all rows of the batch in its order, equally long
    (`Prompts.filled`). Scores of rows that are not in question are zeros, and what becomes of them is not looked at.

    Raises ValueError for processors whose state a rejected guess would spoil.
    """
    for processor in processors:
        if isinstance(processor, STATEFUL):
            raise ValueError(
                f"{type(processor).__name__} keeps state between tokens and cannot judge guesses that are "
                "taken back: generate without assistant_models, or without that option"
            )
    if not processors:
        return None, None
    if all(calls_like(p, WARPERS) for p in processors):
        return warp_of(processors), None

    def process(prefixes: list[list[int]], scores: Tensor, numbers: list[int]) -> Tensor:
        lines = [prompts.whole(number, prefix) for number, prefix in zip(numbers, prefixes, strict=True)]
        ids = torch.tensor(lines, device=scores.device)
        for processor in processors:
            if isinstance(processor, PrefixConstrainedLogitsProcessor):
                scores = _constrain(processor, ids, scores, numbers)
            elif _treats_rows_alike(processor):
                scores = processor(ids, scores)
            else:
                scores = _among_all(processor, prompts, prefixes, scores, numbers)
        return scores

    return None, process


def warp_of(processors: LogitsProcessorList):
    """The processors that look at scores alone, as one function over any leading shape; None if there are none."""
    warpers = [p for p in processors if calls_like(p, WARPERS)]
    if not warpers:
        return None

    def warp(scores: Tensor) -> Tensor:
        flat = scores.reshape(-1, scores.shape[-1])
        for warper in warpers:
            flat = warper(None, flat)
        return flat.view(scores.shape)

    return warp


def calls_like(one, kinds: tuple[type, ...]) -> bool:
    """Whether an object is of one of these classes, or of a subclass that is called the same way."""
    return any(isinstance(one, kind) and type(one).__call__ is kind.__call__ for kind in kinds)


def _treats_rows_alike(processor) -> bool:
    ignored = getattr(processor, "prompt_ignore_length", None)  # a repetition penalty may have one for each row
    return calls_like(processor, LINE_BY_LINE) and not isinstance(ignored, Tensor)


def _among_all(processor, prompts: Prompts, prefixes: list[list[int]], scores: Tensor, numbers: list[int]) -> Tensor:
    """Scores `[n, vocab]` of rows that have equally many new tokens, processed in their places of the whole batch."""
    generated = len(prefixes[0]) - prompts.lengths[numbers[0]]
    lines = prompts.filled(generated, dict(zip(numbers, prefixes, strict=True)))
    everyone = scores.new_zeros(len(lines), scores.shape[1])
    everyone[numbers] = scores
    return processor(torch.tensor(lines, device=scores.device), everyone)[numbers]


def _constrain(processor, ids: Tensor, scores: Tensor, numbers: list[int]) -> Tensor:
    """prefix_allowed_tokens_fn is asked with the row's number in the user's batch, whoever is scored together."""
    allowed = processor._prefix_allowed_tokens_fn
    lines = []
    for i, number in enumerate(numbers):
        of_row = PrefixConstrainedLogitsProcessor(lambda _, sent, number=number: allowed(number, sent), 1)
        lines.append(of_row(ids[i : i + 1], scores[i : i + 1]))
    return torch.cat(lines)
