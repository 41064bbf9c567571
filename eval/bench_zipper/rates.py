"""How many tokens a second do the three ways to use weights in two parts give, and drafts in MXFP4?"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

import hf_mlspec

from .models import in_two_parts, plain

RUNS, PROMPT = 3, 32


class Way(NamedTuple):
    """high_part: of weights in two parts; None: bfloat16."""

    name: str
    high_part: str | None
    levels: tuple[str, ...]


WAYS = (
    Way("a: both parts, high on the host", "host", ()),
    Way("b: both parts on the device", "device", ()),
    Way("c: drafts of the low part, high on the host", "host", ("zipper-low",)),
    Way("c: drafts of the low part, high on the device", "device", ("zipper-low",)),
    Way("bfloat16 alone", None, ()),
    Way("bfloat16, drafts in mxfp4", None, ("mxfp4",)),
)


def lines(options: argparse.Namespace) -> Iterator[dict]:
    """One for each way and batch. differing: rows whose tokens are not those of the target alone; round_ms: of one
    draft and check, prompts included."""
    for high_part in (None if place == "dense" else place for place in options.places):
        model = hf_mlspec.prepare(plain(options) if high_part is None else in_two_parts(options, high_part))
        alone: dict[int, torch.Tensor] = {}
        for way in (way for way in WAYS if way.high_part == high_part):
            for batch in options.batch:
                yield {"way": way.name, "batch": batch, **_rate(options, model, way, batch, alone)}
        del model
        torch.cuda.empty_cache()


def _rate(
    options: argparse.Namespace, model: PreTrainedModel, way: Way, batch: int, alone: dict[int, torch.Tensor]
) -> dict[str, object]:
    ids = torch.randint(0, model.config.vocab_size, (batch, PROMPT), generator=torch.Generator().manual_seed(1)).cuda()
    greedy = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": options.tokens}
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "assistant_models": list(way.levels), **greedy}
    if way.levels:
        given["speculation_config"] = {"num_draft_tokens": 4}
    written, seconds = model.generate(**given), []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model.generate(**given)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    found: dict[str, object] = {"tokens_s": batch * options.tokens / statistics.median(seconds)}
    if way.levels:
        level = hf_mlspec.last_stats(model).levels[0]
        found["accepted_of_drafted"] = level.accepted / max(level.drafted, 1)
        found["round_ms"] = statistics.median(seconds) / max(level.rounds, 1) * 1e3
        found["differing"] = int((written != alone[batch]).any(1).sum())
    else:
        alone[batch] = written
    return found
