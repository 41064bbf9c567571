"""How are texts of one length cut from a file, what does a stream write, and what does a prompt leave in a cache?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

import hf_mlspec


def texts_of(prompts: Sequence[str], tokenizer: Any, tokens: int, count: int, shared: int = 0) -> list[str]:
    """At most `count` texts of so many tokens or a few more or less: pieces of the joined prompts, none twice.

    shared: tokens, the first ones of every text, that are the file's first.
    """
    whole, own = "\n\n".join(prompts), tokens - shared
    starts = [begin for begin, _ in tokenizer(whole, return_offsets_mapping=True).offset_mapping] + [len(whole)]
    places = range(shared, len(starts) - own, own)[:count]
    return [whole[: starts[shared]] + whole[starts[at] : starts[at + own]] for at in places]


def streamed(model: PreTrainedModel, tokenizer: Any, prompts: Sequence[str], levels: list[str], *,
             max_new_tokens: int, slots: int, speculation_config: dict[str, Any],
             reference_ids: Sequence[list[int]]) -> dict[str, Any]:
    """The prompts as one stream of so many slots, as `hf_mlspec.Comparison.to_dict` says it of calls of generate.

    A row that takes the place of another keeps the tokens that both begin with. Gaps of differences are not measured.
    """
    requests = [hf_mlspec.Request(list(tokenizer(prompt).input_ids), id=number)
                for number, prompt in enumerate(prompts)]
    written = {}
    for one in hf_mlspec.generate_stream(model, requests, max_batch=slots, assistant_models=levels, do_sample=False,
                                         tokenizer=tokenizer, speculation_config=speculation_config,
                                         max_new_tokens=max_new_tokens):  # fmt: skip
        if one.error is not None:
            raise one.error
        written[one.id] = one.new_tokens
    items = [_item(index, written[index], expected) for index, expected in enumerate(reference_ids)]
    compared = (item["difference"]["position"] + 1 if item["difference"] else len(item["reference_ids"])
                for item in items)
    return {"prompts": len(items), "tokens_compared": sum(compared), "items": items,
            "speculation": hf_mlspec.last_stats(model).to_dict()}


def _item(index: int, got: list[int], expected: list[int]) -> dict[str, Any]:
    ends = min(len(got), len(expected))
    at = next((at for at in range(ends) if got[at] != expected[at]), ends)
    difference = None
    if got != expected:
        one, other = (ids[at] if at < len(ids) else None for ids in (expected, got))
        difference = {"position": at, "expected": one, "got": other, "gap": math.inf, "gap_float64": math.inf}
    return {"index": index, "reference_ids": expected, "difference": difference}


def caches(model: PreTrainedModel, rows: Sequence[list[int]], batch_size: int, levels: list[str],
           speculation_config: dict[str, Any]) -> Iterator[list[torch.Tensor]]:
    """Of every row the keys and values of its prompt as a call for one new token returns them, layer by layer.

    Rows are decoded so many at a time, the shorter ones padded.
    """
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in batch], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch], device=model.device)
        cache = DynamicCache()
        model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False, pad_token_id=0,
                       past_key_values=cache, assistant_models=levels, speculation_config=speculation_config)
        for r, row in enumerate(batch):
            yield [states[r, :, width - len(row) :] for layer in cache.layers for states in (layer.keys, layer.values)]


def differing(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> tuple[int, int]:
    """How many numbers are compared, and how many of them have other bits."""
    kind = {2: torch.int16, 4: torch.int32}[one[0].itemsize]
    pairs = [(a.contiguous().view(kind), b.contiguous().view(kind)) for a, b in zip(one, other, strict=True)]
    return sum(a.numel() for a, _ in pairs), sum(int((a != b).sum()) for a, b in pairs)
