"""In which ways is a prompt decoded, and what does each of them cost? Stock, assisted, the target alone, chains."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.generation import BaseStreamer

import hf_mlspec
from eval.records import machine
from eval.records.progress import Bars
from eval.rows import ends_of, new_ids
from eval.targets import MIXTURES, random_start

STOCK_EXPERTS = ("eager", "batched_mm", "grouped_mm")
STOCK, ASSISTED, ALONE = "stock greedy", "stock assisted", "target alone, prepared"


class Clock(BaseStreamer):
    """When did tokens come? The prompt comes first, then the first tokens, which end the prefill."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.count: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.at.append(time.perf_counter())
        self.count.append(value.numel())

    def end(self) -> None:
        """Nothing to flush."""


@dataclass
class Take:
    """One prompt decoded once: tokens and seconds of the whole call, and after its first tokens."""

    tokens: int
    seconds: float
    decode_tokens: int
    decode_seconds: float

    @property
    def rate(self) -> float | None:
        """Decode-only tokens a second; None where the first tokens were all."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens else None

    @property
    def rate_with_prefill(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Contender:
    """A way to decode one prompt, and what was measured of it."""

    name: str
    decode: Callable[..., Any]
    takes: list[Take] = field(default_factory=list)
    counts: list[hf_mlspec.SpeculationStats] = field(default_factory=list)
    ends: frozenset[int] = frozenset()  # ids that end a row; what follows them is padding
    rss: tuple[int | None, int | None] = (None, None)  # before and at the peak of its first call

    def take(self, inputs: dict[str, torch.Tensor]) -> None:
        """Decode a batch, and count its tokens up to the end of each row."""
        clock, begin = Clock(), time.perf_counter()
        out = self.decode(inputs, clock)
        seconds = time.perf_counter() - begin
        if not isinstance(out, torch.Tensor):
            self.counts.append(out.speculation)
        if clock.at:
            tokens, first = sum(clock.count[1:]), clock.count[1]
            if len(inputs["input_ids"]) > 1:
                tokens = sum(len(row) for row in new_ids(out, inputs["input_ids"].shape[1], self.ends))
            self.takes.append(Take(tokens, seconds, tokens - first, clock.at[-1] - clock.at[1]))
            return
        stats = out.speculation
        self.takes.append(Take(stats.new_tokens, seconds, stats.new_tokens - stats.prefill_tokens,
                               stats.seconds - stats.prefill_seconds))


def stock(model: PreTrainedModel, settings: dict[str, Any], **more: Any):
    return lambda inputs, clock: model.generate(**inputs, **settings, **more, streamer=clock)


def ours(model: PreTrainedModel, levels: list[Any], settings: dict[str, Any], config: dict[str, Any]):
    """The compiled steps of a prepared target, which a call with levels prepares by itself."""

    def decode(inputs, clock):
        streamer = clock if len(inputs["input_ids"]) == 1 else None  # one row streams; many tell their own seconds
        return model.generate(
            **inputs, **settings, assistant_models=levels, streamer=streamer, return_dict_in_generate=True,
            speculation_config=hf_mlspec.SpeculationConfig(prepare=True, **config),
        )

    return decode


def stock_by(way: str, model: PreTrainedModel, settings: dict[str, Any]):
    """As `stock`, by one of transformers' implementations of experts."""
    decode = stock(model, settings)

    def by(inputs, clock):
        model.set_experts_implementation(way)
        return decode(inputs, clock)

    return by


def chains(
    target: PreTrainedModel, tokenizer, asked: list[list[str]], args: argparse.Namespace
) -> list[Contender]:
    """Stock greedy, stock assisted by the first model among the levels (which stock refuses for targets that keep a
    state), the target alone, every chain."""
    ends = ends_of(target)
    settings = {"max_new_tokens": args.max_new_tokens, "do_sample": False, "pad_token_id": min(ends, default=0)}
    config = {"num_draft_tokens": args.num_draft_tokens, "confidence_threshold": args.threshold}
    found = [Contender(STOCK, stock(target, settings), ends=ends)]
    words = [split_level(level, args)[0] for levels in asked for level in levels]
    folder = next((word for word in words if Path(word).is_dir()), None)
    if folder is not None and args.batch_size == 1 and not target._is_stateful:
        draft = AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype).eval()
        tokenizers = {}
        if draft.config.vocab_size != target.config.vocab_size:
            tokenizers = {"tokenizer": tokenizer, "assistant_tokenizer": AutoTokenizer.from_pretrained(folder)}
        draft.generation_config.num_assistant_tokens = args.num_draft_tokens
        draft.generation_config.assistant_confidence_threshold = args.threshold
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        found.append(Contender(ASSISTED, stock(target, settings, assistant_model=draft, **tokenizers)))
    found.append(Contender(ALONE, ours(target, [], settings, config)))
    for levels in asked:
        words, counts, thresholds = zip(*(split_level(level, args) for level in levels), strict=True)
        name = ", ".join(Path(level).name if "/" in level else level for level in levels)
        chain = {"num_draft_tokens": list(counts), "confidence_threshold": list(thresholds)}
        found.append(Contender(f"[{name}]", ours(target, list(words), {**settings, "tokenizer": tokenizer}, chain)))
    return found


def split_level(text: str, args: argparse.Namespace) -> tuple[str, int, float]:
    """`LEVEL=12` or `LEVEL=12:0.2`: a level, the tokens it drafts, its threshold; else the defaults of the run."""
    word, equals, numbers = text.rpartition("=")
    count, _, threshold = numbers.partition(":")
    if not equals or not count.isdecimal():
        return text, args.num_draft_tokens, args.threshold
    return word, int(count), float(threshold) if threshold else args.threshold


def of_shape(shape: str, max_new_tokens: int) -> tuple[PreTrainedModel, list[Contender], dict[str, torch.Tensor]]:
    """A random model: stock, prepared, and its MXFP4 cast, head included, as a target of its own. A mixture by all
    ways that stock has to multiply experts, its own choice first."""
    target, ids = random_start(shape)
    cast = hf_mlspec.direct_cast(target, "mxfp4", cast_head=True)
    settings = {"max_new_tokens": max_new_tokens, "do_sample": False}
    found = [Contender(STOCK, stock(target, settings))]
    if shape in MIXTURES:
        chosen = target.config._experts_implementation
        found = [Contender(STOCK, stock_by(chosen, target, settings))]
        others = [way for way in STOCK_EXPERTS if way != chosen]
        found += [Contender(f"{STOCK}, {way}", stock_by(way, target, settings)) for way in others]
    found += [Contender(ALONE, ours(target, [], settings, {})),
             Contender("MXFP4 cast alone, prepared", ours(cast, [], settings, {}))]
    return target, found, ids


def measure(contenders: list[Contender], prompts: list[Any], repeats: int, probe: machine.ReadProbe) -> float:
    """Every contender on every batch in turn, after one warming call each; -> the probe's median bytes a second."""
    reads = []
    for one in contenders:
        one.takes, one.counts = [], []
        with machine.PeakMemory() as held:
            one.take(prompts[0])
        one.rss = held.before, held.peak
        one.takes.clear()
        one.counts.clear()
    with Bars() as progress:
        bar = progress.add_task("batches", total=repeats * len(prompts))
        for inputs in prompts * repeats:
            begin = time.perf_counter()
            probe()
            reads.append(probe.nbytes / (time.perf_counter() - begin))
            for one in contenders:
                one.take(inputs)
            progress.advance(bar)
    return statistics.median(reads)
