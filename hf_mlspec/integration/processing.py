"""What do transformers' logits processors and stopping criteria see of rows that grow by several tokens at once?"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.generation import LogitsProcessorList, StoppingCriteriaList, logits_process
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from ..speculation.draft import Rows

# These look at nothing but the scores of one position.
WARPERS = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
)
# These treat every line of ids and scores alike and by itself, so that they may be called with some rows only.
LINE_BY_LINE = (
    *WARPERS,
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.TopHLogitsWarper,
    logits_process.WatermarkLogitsProcessor,
)
# These carry state from call to call, or run the model; a guess that is taken back would leave a trace in them.
STATEFUL = (
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    logits_process.SynthIDTextWatermarkLogitsProcessor,
)
COLDEST = 1e-30  # the least temperature: float32 logits divided by less are beyond numbers
_OF_ROW = (MaxTimeCriteria, StopStringCriteria)  # what they say of a row depends on nothing else of the batch


class Prompts:
    """The prompts as generate got them, and as rows without padding.

    input_ids: int64 `[batch, width]`. attention_mask: `[batch, width]` or None. Masked tokens are left out of the
    rows: stock attention does not see them and stock position ids do not count them. filler: the token after the end
    of a row. grown: the rows with the tokens committed so far; decoding appends to these lists.
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
                raise ValueError(f"prompt {number} of the batch has no token: its attention_mask is all 0")
        self.lengths = [len(row) for row in self.rows]
        self.grown = [list(row) for row in self.rows]
        self._masked = None if attention_mask is None else mask
        self.has_holes = attention_mask is not None and bool((attention_mask.long().diff(dim=1) < 0).any())

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
        whose tokens replace the committed ones.
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

    Raises ValueError for processors whose state a rejected token would corrupt, and for a temperature too small.
    """
    for processor in processors:
        if isinstance(processor, WARPERS[0]) and processor.temperature < COLDEST:
            raise ValueError(
                f"temperature is {processor.temperature}, it must be at least {COLDEST}: logits divided by less are "
                "beyond numbers; do_sample=False takes the likeliest token"
            )
        if isinstance(processor, STATEFUL):
            raise ValueError(
                f"{type(processor).__name__} keeps state between tokens and cannot process drafted tokens "
                "that are rejected later: generate without assistant_models, or without that option"
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


def temperature_of(processors: LogitsProcessorList) -> float | None:
    """What scores are divided by, where nothing else is done to them; None where something is."""
    if not processors:
        return 1.0
    only = processors[0]
    return only.temperature if len(processors) == 1 and type(only) is WARPERS[0] else None


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


class Stopping:
    """Tests every committed token: an end-of-sequence token or a stop string may be inside an accepted draft.

    Time limits and stop strings are tested whenever a row has a new token. All other criteria, the user's own, are
    called as in stock generate: once for each number of new tokens, with all rows of the batch in order and equally
    long (`Prompts.filled`), as soon as every active row has so many tokens. Another row may have more by then; it ends
    where stock generate would end it, and its later tokens are dropped (`cut`).
    """

    def __init__(self, criteria: StoppingCriteriaList, prompts: Prompts):
        ends = [c.eos_token_id for c in criteria if calls_like(c, (EosTokenCriteria,))]
        self.eos = {token for ids in ends for token in ids.flatten().tolist()}
        self._of_row = [c for c in criteria if calls_like(c, _OF_ROW)]
        self._of_batch = [c for c in criteria if not calls_like(c, (*_OF_ROW, EosTokenCriteria, MaxLengthCriteria))]
        self.prompts = prompts
        self._new: Rows = [[] for _ in prompts.rows]  # what counts of each row, as far as it was scanned
        self._ends: list[int | None] = [None] * len(prompts.rows)  # new tokens after which each row ended
        self._asked = 0  # new tokens up to which the criteria of the batch were asked

    @property
    def asks(self) -> bool:
        """Whether more than end-of-sequence tokens and lengths can end a row."""
        return bool(self._of_row or self._of_batch)

    def __call__(self, number: int, row: list[int], tokens: list[int]) -> tuple[int, bool]:
        """(committed tokens that count, whether the row is finished)."""
        count, finished = self._scan(number, row, tokens)
        new, had = self._new[number], len(row) - self.prompts.lengths[number]
        new += tokens[:count]
        if finished and self._ends[number] is None:
            self._ends[number] = had + count
        if self._of_batch:
            self._ask_about_all()
        end = self._ends[number]
        return (count, False) if end is None else (min(count, max(end - had, 0)), True)

    def ended(self, number: int) -> bool:
        """Whether a token or a criterion ended this row; one that reached its greatest length is not known here."""
        return self._ends[number] is not None

    def cut(self, rows: Rows) -> int:
        """Drop what the rows of the batch gained behind their ends; how many tokens that were."""
        dropped = 0
        for row, start, end in zip(rows, self.prompts.lengths, self._ends, strict=True):
            if end is not None:
                dropped += len(row) - len(row[: start + end])
                del row[start + end :]
        return dropped

    def _scan(self, number: int, row: list[int], tokens: list[int]) -> tuple[int, bool]:
        for count, token in enumerate(tokens, 1):
            if token in self.eos or (self._of_row and self._met(number, row + tokens[:count])):
                return count, True
        return len(tokens), False

    def _met(self, number: int, row: list[int]) -> bool:
        ids = torch.tensor([self.prompts.whole(number, row)], device=self.prompts.input_ids.device)
        return any(bool(criterion(ids, None).any()) for criterion in self._of_row)

    def _ask_about_all(self) -> None:
        """Ask about every number of new tokens that is complete."""
        while True:
            step = self._asked + 1
            going = [end is None or end >= step for end in self._ends]
            if not any(going) or any(on and len(new) < step for on, new in zip(going, self._new, strict=True)):
                return
            for number, met in enumerate(self._verdicts(step)):
                if met and going[number]:
                    self._ends[number] = step
            self._asked = step

    def _verdicts(self, step: int) -> list[bool]:
        prompts = self.prompts
        lines = zip(prompts.rows, self._new, self._ends, strict=True)
        shown = {number: row + new[:end] for number, (row, new, end) in enumerate(lines)}
        ids = torch.tensor(prompts.filled(step, shown), device=prompts.input_ids.device)
        met = torch.zeros(len(ids), dtype=torch.bool)
        for criterion in self._of_batch:
            met |= _verdict(criterion, ids)
        return met.tolist()


def _verdict(criterion, ids: Tensor) -> Tensor:
    """What a criterion says of each row, bool `[batch]`, or `[1]` where it says one thing of all."""
    verdict = torch.as_tensor(criterion(ids, None)).bool().cpu()
    if verdict.numel() not in (1, len(ids)):
        raise ValueError(
            f"{type(criterion).__name__} answered with shape {list(verdict.shape)} for {len(ids)} rows: a stopping "
            "criterion returns one bool, or a bool tensor [batch]"
        )
    return verdict.flatten()
