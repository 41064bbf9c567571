"""Does the chain write what the target alone writes, and where it does not, how close was the call?"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..nn.adapters import without_wrapper
from ..speculation.stats import LevelStats, PlanStats, SpeculationStats
from .config import SpeculationConfig
from .request import check_model, check_prompt_rows

# Of the answer that warms up: behind the first two a level could draft, and what passes cost here is measured.
_WARM_UP = 3


@dataclass
class Difference:
    """The first position at which two continuations of one prompt differ.

    position:             index among the new tokens; before it both are equal.
    expected, got:        token of the target alone and of the chain there; None if that one had already ended.
    top2, gap:            the target's two largest logits there, ``[(token id, logit), ...]``, largest first, and their
        difference, from one unpadded forward pass over prompt and common tokens in the model's dtype.
    top2_float64, gap_float64: the same from a float64 copy of the target. A tiny gap is a tie: the order of a sum
        decides which token is larger in the model's dtype.
    """

    position: int
    expected: int | None
    got: int | None
    top2: list[tuple[int, float]]
    gap: float
    top2_float64: list[tuple[int, float]]
    gap_float64: float


@dataclass
class Item:
    """One prompt: ids are new tokens up to and including the first end-of-sequence token."""

    index: int
    prompt_tokens: int
    ids: list[int]
    reference_ids: list[int] | None = None
    difference: Difference | None = None


@dataclass
class Comparison:
    """The result of `compare`.

    items:         one per prompt, in their order.
    speculation:   counts and seconds of the chain, summed over all calls of generate.
    chain_seconds: wall time inside generate with the chain; alone_seconds: with the target alone (0.0 if
                   `reference_ids` were given). Building levels and the streamer's own time are excluded.
    """

    items: list[Item] = field(default_factory=list)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    chain_seconds: float = 0.0
    alone_seconds: float = 0.0

    @property
    def differences(self) -> list[Difference]:
        return [item.difference for item in self.items if item.difference is not None]

    @property
    def identical(self) -> int:
        """Number of prompts that were compared and whose ids are equal."""
        return sum(item.reference_ids is not None and item.difference is None for item in self.items)

    @property
    def tokens_compared(self) -> int:
        """Tokens of the target alone up to the first difference, that position included."""
        return sum(item.difference.position + 1 if item.difference else len(item.reference_ids or [])
                   for item in self.items)

    def beyond_ties(self, gap: float) -> list[Difference]:
        """The differences where the two largest float64 logits are `gap` or more apart, or NaN."""
        return [difference for difference in self.differences if not difference.gap_float64 < gap]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, for JSON."""
        chain_tokens = sum(len(item.ids) for item in self.items)
        alone_tokens = sum(len(item.reference_ids or []) for item in self.items)
        return {"prompts": len(self.items), "identical": self.identical, "different": len(self.differences),
                "tokens_compared": self.tokens_compared, "chain_tokens": chain_tokens, "alone_tokens": alone_tokens,
                "chain_seconds": self.chain_seconds, "alone_seconds": self.alone_seconds,
                "speculation": self.speculation.to_dict(), "items": [dataclasses.asdict(item) for item in self.items]}


def accumulate(total: SpeculationStats, part: SpeculationStats) -> None:
    """Add the counts and seconds of one call of generate to those of earlier calls; of caches the largest counts."""
    if not total.levels:
        total.levels = [LevelStats(level.name) for level in part.levels]
    total.target_cache_bytes = max(total.target_cache_bytes, part.target_cache_bytes)
    for into, level in zip(total.levels, part.levels, strict=True):
        into.cache_bytes = max(into.cache_bytes, level.cache_bytes)
        for name in ("drafted", "accepted", "tested", "rounds", "forwards", "seconds", "prefill_seconds"):
            setattr(into, name, getattr(into, name) + getattr(level, name))
    counted = ("new_tokens", "target_passes", "row_passes", "seconds", "target_seconds", "prefill_seconds",
               "prefill_target_seconds", "prefill_draft_seconds", "prefill_tokens", "capture_seconds",
               "prompt_tokens", "prefix_tokens")
    for name in counted:
        setattr(total, name, getattr(total, name) + getattr(part, name))
    for plan, counts in part.plans.items():
        total.plans.setdefault(plan, PlanStats()).add(counts)


OnItem = Callable[[Item, Comparison], None]


def compare(
    model: Any, tokenizer: Any, prompts: Sequence[str], levels: Sequence[Any], *, max_new_tokens: int,
    batch_size: int = 1, assistant_tokenizers: Sequence[Any] | None = None, speculation_config: Any = None,
    reference: Literal["ours", "stock"] = "ours", reference_ids: Sequence[list[int]] | None = None,
    streamer: Any = None, warm_up: bool = True, on_item: OnItem | None = None,
) -> Comparison:
    """Decode every prompt greedily with the chain, then with the target alone, and compare the ids.

    model, tokenizer: the target; levels, assistant_tokenizers, speculation_config: as generate takes them.
    prompts: texts. max_new_tokens: new tokens per prompt.
    batch_size: consecutive prompts decoded together, left-padded, with an attention mask.
    reference: "ours" is `assistant_models=[]`, our own loop without levels, prepared like the chain's target;
        "stock" is transformers' own loop (a target given to `hf_mlspec.prepare` decodes in ours there too).
    reference_ids: `Item.reference_ids` of an earlier call, used instead of decoding again.
    streamer: receives the chain's tokens as they are committed; batch_size 1 only.
    warm_up: decode three tokens of the first prompt both ways first, so that the seconds exclude building levels, and
        measuring what passes cost on a machine that does not know.
    on_item: called with each item and the comparison so far: after the chain wrote it, and again once it is compared.

    Raises ValueError for no prompts, a prompt without tokens or with too many, and arguments out of range, before
    anything is decoded.
    """
    model = without_wrapper(model, "compare")
    _validate(prompts, max_new_tokens, batch_size, reference, reference_ids, streamer)
    rows = [list(tokenizer(prompt).input_ids) for prompt in prompts]
    check_model(model, "the target")
    check_prompt_rows(model, rows, max_new_tokens)
    chain = {"assistant_models": list(levels), "assistant_tokenizers": assistant_tokenizers, "tokenizer": tokenizer,
             "speculation_config": speculation_config}
    prepare = {"prepare": SpeculationConfig.of(speculation_config).prepare}
    alone = {"assistant_models": [], "speculation_config": prepare} if reference == "ours" else {}
    run = _Run(model, tokenizer, rows, max_new_tokens, batch_size, on_item)
    if warm_up:
        run.warm_up([chain] if reference_ids is not None else [chain, alone])
    run.write_with_chain(chain, None if streamer is None else _TimedStreamer(streamer))
    if reference_ids is not None:
        run.compare_from(0, reference_ids)
    else:
        run.write_alone(alone)
    return run.comparison


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first token that only one has or that differs; None where both are equal."""
    for position, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return position
    return None if len(expected) == len(got) else min(len(expected), len(got))


class _Run:
    """One comparison under way: the prompts as ids, the model, and what is known so far."""

    def __init__(self, model: Any, tokenizer: Any, rows: list[list[int]], max_new_tokens: int, batch_size: int,
                 on_item: OnItem | None) -> None:
        self.model, self.rows, self.max_new_tokens = model, rows, max_new_tokens
        self.starts = range(0, len(rows), batch_size)
        self.batch_size = batch_size
        self.eos = _eos_ids(model)
        self.pad = next(id for id in (tokenizer.pad_token_id, *self.eos, 0) if id is not None)
        self.on_item = on_item or (lambda item, comparison: None)
        self.comparison = Comparison()
        self.precise: Any = None  # the float64 copy, made at the first difference

    def warm_up(self, ways: list[dict[str, Any]]) -> None:
        for how in ways:
            self._generate(self.rows[:1], how, min(_WARM_UP, self.max_new_tokens))

    def write_with_chain(self, how: dict[str, Any], streamer: _TimedStreamer | None) -> None:
        how = how if streamer is None else {**how, "streamer": streamer}
        for start in self.starts:
            rows = self.rows[start : start + self.batch_size]
            written, seconds, stats = self._generate(rows, how, self.max_new_tokens)
            self.comparison.chain_seconds += seconds - (streamer.take_seconds() if streamer else 0.0)
            if stats is not None:
                accumulate(self.comparison.speculation, stats)
            for offset, (row, ids) in enumerate(zip(rows, written, strict=True)):
                item = Item(start + offset, len(row), ids)
                self.comparison.items.append(item)
                self.on_item(item, self.comparison)

    def write_alone(self, how: dict[str, Any]) -> None:
        for start in self.starts:
            rows = self.rows[start : start + self.batch_size]
            written, seconds, _ = self._generate(rows, how, self.max_new_tokens)
            self.comparison.alone_seconds += seconds
            self.compare_from(start, written)

    def compare_from(self, start: int, references: Sequence[list[int]]) -> None:
        """Hold the items from `start` on against what the target alone wrote for them."""
        for item, expected in zip(self.comparison.items[start:], references, strict=False):
            item.reference_ids = list(expected)
            position = first_difference(expected, item.ids)
            if position is not None:
                item.difference = self._look_closer(self.rows[item.index], item, position)
            self.on_item(item, self.comparison)

    def _look_closer(self, prompt: list[int], item: Item, position: int) -> Difference:
        if self.precise is None:
            self.precise = _in_float64(self.model)
        prefix = prompt + item.ids[:position]
        top2, exact = _two_best(self.model, prefix), _two_best(self.precise, prefix)
        expected, got = (ids[position] if position < len(ids) else None for ids in (item.reference_ids, item.ids))
        return Difference(position, expected, got, top2, top2[0][1] - top2[1][1], exact, exact[0][1] - exact[1][1])

    def _generate(self, rows: list[list[int]], how: dict[str, Any], max_new_tokens: int,
                  ) -> tuple[list[list[int]], float, SpeculationStats | None]:
        """New ids of each row, wall seconds, and the chain's counts (None from transformers' own loop)."""
        width = max(map(len, rows))
        ids = torch.tensor([[self.pad] * (width - len(row)) + row for row in rows], device=self.model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self.model.device)
        started = time.perf_counter()
        output = self.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens,
                                     do_sample=False, pad_token_id=self.pad, return_dict_in_generate=True, **how)
        written = output.sequences[:, width:].tolist()
        seconds = time.perf_counter() - started
        return [_until_end(row, self.eos) for row in written], seconds, getattr(output, "speculation", None)


class _TimedStreamer:
    """A streamer that knows how long showing took, which is no part of decoding."""

    def __init__(self, streamer: Any) -> None:
        self.streamer, self.seconds = streamer, 0.0
        if hasattr(streamer, "put_levels"):
            self.put_levels = streamer.put_levels

    def put(self, value: Any) -> None:
        started = time.perf_counter()
        self.streamer.put(value)
        self.seconds += time.perf_counter() - started

    def end(self) -> None:
        started = time.perf_counter()
        self.streamer.end()
        self.seconds += time.perf_counter() - started

    def take_seconds(self) -> float:
        taken, self.seconds = self.seconds, 0.0
        return taken


def _in_float64(model: Any) -> Any:
    """A copy that computes in float64; packed weights become the numbers they stand for."""
    wide = copy.deepcopy(model)
    return (wide.dequantize(dtype=torch.float64) if getattr(model, "is_quantized", False) else wide).double()


@torch.inference_mode()
def _two_best(model: Any, ids: list[int]) -> list[tuple[int, float]]:
    logits = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0, -1]
    best = logits.double().topk(2)
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def _eos_ids(model: Any) -> list[int]:
    eos = model.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _until_end(ids: list[int], eos: list[int]) -> list[int]:
    """Without the padding that follows the end of a row that stopped before the others."""
    return ids[: next((i + 1 for i, id in enumerate(ids) if id in eos), len(ids))]


def _validate(prompts: Sequence[str], max_new_tokens: int, batch_size: int, reference: str,
              reference_ids: Sequence[list[int]] | None, streamer: Any) -> None:
    if isinstance(prompts, str) or not prompts:
        raise ValueError("there are no prompts to compare on; give a list of at least one text")
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be 1 or more")
    if reference not in ("ours", "stock"):
        raise ValueError(f'reference is {reference!r}; it is "ours" or "stock"')
    if reference_ids is not None and len(reference_ids) != len(prompts):
        raise ValueError(f"{len(reference_ids)} reference_ids for {len(prompts)} prompts; give one list per prompt")
    if streamer is not None and batch_size > 1:
        raise ValueError(f"a streamer writes one text at a time and batch_size is {batch_size}; leave one of them out")
