"""In which ways does one 4-bit model decode a batch, and what does each call of it cost?"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_mlspec
from eval.records import machine
from eval.rows import padded

ALONE, DEQUANT = "w4a16", "w4a16 dequant"
LIKE_ALONE = ("w4a8", "w4a4")  # the int4 model alone, called with coarser activations
PAPER_GAMMA = 3  # QSpec, section 4
_WARMING_TOKENS = 8


@dataclass(frozen=True)
class Contender:
    """A way to decode: the BF16 or the int4 model, at some activation bits, alone or with one level that drafts.

    reference: the contender alone whose ids this one promises to write; None for an arithmetic of its own.
    multiply: how 16-bit calls multiply int4 weights, by the fused kernel or "dequant" (see PrecisionSwitch).
    levels: words for `assistant_models`; gamma: tokens per draft, None where nothing is drafted.
    """

    name: str
    reference: str | None = None
    levels: tuple[str, ...] = ()
    gamma: int | None = None
    quantized: bool = True
    activation_bits: int = 16
    multiply: str = "fused"
    shared_cache: bool = True
    threshold: float = 0.0


def alone() -> list[Contender]:
    """Every arithmetic without a draft, all in the same compiled loop."""
    return [
        Contender("w16a16", quantized=False),
        Contender("w4a8", activation_bits=8),
        Contender("w4a4", activation_bits=4),
        Contender(ALONE, ALONE),
        Contender(DEQUANT, DEQUANT, multiply="dequant"),
    ]


def drafting(drafts: list[str], threshold: float) -> list[Contender]:
    """Every way to draft for the int4 model, gamma still open; `threshold` is that of the ordinary drafts."""
    found = [
        Contender("QSpec dequant, w4a8", DEQUANT, ("w4a8",), multiply="dequant"),
        Contender("QSpec w4a8", ALONE, ("w4a8",)),
        Contender("QSpec w4a4", ALONE, ("w4a4",)),
        Contender("QSpec w4a8, own cache", ALONE, ("w4a8",), shared_cache=False),
    ]
    return found + [Contender(f"[{short(draft)}]", ALONE, (draft,), threshold=threshold) for draft in drafts]


def contenders(gammas: list[int], drafts: list[str], threshold: float) -> list[Contender]:
    """All of them, those with a draft once per gamma; neighbours mostly share the arithmetic of the target."""
    found = drafting(drafts, threshold)
    return alone() + [replace(one, gamma=gamma) for one in found for gamma in gammas]


def short(word: str) -> str:
    """A level's name in tables: the last part of a path."""
    return Path(word).name if "/" in word else word


def typical(gammas: list[int]) -> int:
    """The paper's gamma where it was asked for, else the first."""
    return PAPER_GAMMA if PAPER_GAMMA in gammas else gammas[0]


@dataclass
class Take:
    """One batch decoded once. All but `ids` and `stats` are decode-only: without the pass that reads the prompts, and
    without what a draft of its own cache did before it.

    ids: new tokens of every row, filled up to the longest. passes, target_seconds: of the target; forwards,
    draft_seconds: of the draft.
    """

    tokens: int
    seconds: float
    passes: int
    row_passes: int
    target_seconds: float
    forwards: float
    draft_seconds: float
    ids: list[list[int]]
    stats: hf_mlspec.SpeculationStats

    @property
    def rate(self) -> float | None:
        """Tokens a second of the whole batch; None where the first tokens were all."""
        return self.tokens / self.seconds if self.tokens else None

    @classmethod
    def of(cls, stats: hf_mlspec.SpeculationStats, ids: list[list[int]]) -> Take:
        early = any(level.cache_bytes for level in stats.levels)  # drafts with a cache of their own start first
        share = 1 - 1 / stats.target_passes if early else 1.0  # of its rounds, the first is no part of decoding
        return cls(
            stats.new_tokens - stats.prefill_tokens, stats.seconds - stats.prefill_seconds, stats.target_passes - 1,
            stats.row_passes - len(ids), stats.target_seconds - stats.prefill_target_seconds,
            share * sum(level.forwards for level in stats.levels),
            sum(level.seconds - level.prefill_seconds for level in stats.levels), ids, stats,
        )


class Target:
    """A model's BF16 and int4 form, each loaded when a contender first asks for it.

    quantization: settings of MLSpecConfig that quantize while loading; None for a folder that is quantized already.
    """

    def __init__(self, folder: str, quantization: dict[str, Any] | None):
        self.folder, self.quantization = folder, quantization
        self.quantize_seconds: float | None = None
        self._mode: tuple | None = None

    @cached_property
    def bfloat16(self) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.bfloat16).eval()

    @cached_property
    def int4(self) -> PreTrainedModel:
        begin = time.perf_counter()
        how = {} if self.quantization is None else {
            "quantization_config": hf_mlspec.MLSpecConfig(format="int4", **self.quantization)
        }
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.bfloat16, **how).eval()
        self.quantize_seconds = time.perf_counter() - begin
        return model

    def decode(self, one: Contender, inputs: dict[str, torch.Tensor], max_new_tokens: int) -> Take:
        """`inputs`: input_ids and attention_mask int64 `[batch, width]`, left-padded."""
        model = self._in_mode(one, inputs)
        config = hf_mlspec.SpeculationConfig(
            num_draft_tokens=one.gamma, confidence_threshold=one.threshold, shared_cache=one.shared_cache
        )
        out = self._generate(model, inputs, max_new_tokens, list(one.levels), config)
        return Take.of(out.speculation, out.sequences[:, inputs["input_ids"].shape[1] :].tolist())

    def _in_mode(self, one: Contender, inputs: dict[str, torch.Tensor]) -> PreTrainedModel:
        """The contender's model, switched to its arithmetic; what that switch costs is paid by two tokens of nobody's.
        """
        model = self.int4 if one.quantized else self.bfloat16
        mode = one.quantized, one.activation_bits, one.multiply
        if one.quantized:
            switch = hf_mlspec.precision_switch(model)
            switch.activation_bits, switch.multiply = one.activation_bits, one.multiply
        if mode != self._mode:
            self._generate(model, inputs, 2, [], hf_mlspec.SpeculationConfig())
            self._mode = mode
        return model

    def _generate(self, model, inputs, max_new_tokens, levels, config):
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        return model.generate(
            **inputs, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=ends[0] or 0,
            assistant_models=levels, speculation_config=config, return_dict_in_generate=True,
        )


def measure(
    target: Target, found: list[Contender], batches: list[list[list[int]]], *, max_new_tokens: int, repeats: int,
    probe: machine.ReadProbe,
) -> tuple[dict[Contender, list[Take]], list[float]]:
    """Every contender on every batch in turn, each time another one first; the probe's bytes a second before each.

    Returns the takes, a round of all batches behind the other, so that the n-th takes of two contenders are a pair.
    """
    takes: dict[Contender, list[Take]] = {one: [] for one in found}
    reads, inputs = [], [padded(rows) for rows in batches]
    for one in found:
        target.decode(one, inputs[0], min(_WARMING_TOKENS, max_new_tokens))
    for number in track(range(repeats * len(inputs)), description=f"batch {len(batches[0])}"):
        begin = time.perf_counter()
        probe()
        reads.append(probe.nbytes / (time.perf_counter() - begin))
        first = number % len(found)
        for one in found[first:] + found[:first]:
            takes[one].append(target.decode(one, inputs[number % len(inputs)], max_new_tokens))
    return takes, reads
