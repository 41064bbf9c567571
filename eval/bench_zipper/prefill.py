"""How long does a prompt take in each way, in the form of ZipperQuant's prefill tables?"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

import hf_mlspec

from .models import in_two_parts, plain

RUNS = 3
KINDS = (("bfloat16", None, None), ("paper, device", "paper", "device"), ("exact, device", "exact", "device"),
         ("clamp, device", "clamp", "device"), ("clamp, host", "clamp", "host"))  # fmt: skip


def lines(options: argparse.Namespace) -> Iterator[dict]:
    """One for each kind of weights, batch and length of prompts: milliseconds to the first token."""
    for name, mode, high_part in KINDS:
        given = argparse.Namespace(**vars(options) | {"mode": mode})
        model = hf_mlspec.prepare(plain(given) if mode is None else in_two_parts(given, high_part))
        for length in (32,) if options.quick else options.prompts:
            for batch in options.batch:
                yield {"weights": name, "batch": batch, "prompt": length, "prefill_ms": _first(model, batch, length)}
        del model
        torch.cuda.empty_cache()


def _first(model: PreTrainedModel, batch: int, length: int) -> float:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (batch, length), generator=draw).cuda()
    seconds = []
    for _ in range(RUNS + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=1, pad_token_id=0)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:]) * 1e3
