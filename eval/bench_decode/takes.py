"""What does it cost one contender to decode one batch? Tokens, seconds, and where in the chain they were spent."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from transformers import AutoModelForCausalLM

import hf_mlspec
from eval.bench_decode.contenders import Clock
from eval.bench_decode.plan import ALONE, Contender
from eval.plans.models import Loaded
from eval.records import machine
from eval.rows import ends_of, new_ids, padded

_WARMING_TOKENS = 8
Take = dict[str, Any]


class Decoder:
    """A loaded target that decodes batches in every contender's way; models of levels are loaded once."""

    def __init__(self, loaded: Loaded, places, max_new_tokens: int) -> None:
        self.model, self.places, self.max_new_tokens = loaded.model, places, max_new_tokens
        self.ends = ends_of(self.model)
        self._assistants: dict[str, Any] = {}

    def warm(self, one: Contender, rows: list[list[int]]) -> None:
        """A few tokens that nobody counts."""
        self._decode(one, rows, min(_WARMING_TOKENS, self.max_new_tokens))

    def take(self, one: Contender, rows: list[list[int]]) -> tuple[Take, list[list[int]]]:
        """What the batch cost, as JSON, and the new ids of every row up to its end-of-sequence token."""
        begin = time.perf_counter()
        out, clock = self._decode(one, rows, self.max_new_tokens)
        seconds = time.perf_counter() - begin
        sequences = out if clock is not None else out.sequences
        ids = new_ids(sequences, max(map(len, rows)), self.ends)
        tokens = sum(map(len, ids))
        take: Take = {"tokens": tokens, "seconds": seconds}
        if clock is not None:
            first = clock.count[1]
            return take | {"decode_tokens": tokens - first, "decode_seconds": clock.at[-1] - clock.at[1]}, ids
        return take | _spent(out.speculation, len(rows)), ids

    def _decode(self, one: Contender, rows: list[list[int]], max_new_tokens: int):
        """Of stock generate: ids int64 `[batch, width]` and the clock of its tokens; of ours: its output and None."""
        inputs = {name: tensor.to(self.model.device) for name, tensor in padded(rows).items()}
        settings = {**inputs, "max_new_tokens": max_new_tokens, "do_sample": False,
                    "pad_token_id": min(self.ends, default=0)}
        if one.way in ("stock", "assisted"):
            more = {"assistant_model": self._assistant(one)} if one.way == "assisted" else {}
            clock = Clock()
            return self.model.generate(**settings, **more, streamer=clock), clock
        levels = [self.places.fill(level) for level in one.system.levels]
        config = hf_mlspec.SpeculationConfig(**one.system.speculation)
        return self.model.generate(**settings, assistant_models=levels, speculation_config=config,
                                   return_dict_in_generate=True), None

    def _assistant(self, one: Contender):
        folder = self.places.fill(one.system.levels[0])
        if folder not in self._assistants:
            draft = AutoModelForCausalLM.from_pretrained(folder, dtype=self.model.dtype).to(self.model.device).eval()
            config = draft.generation_config
            config.num_assistant_tokens_schedule = "constant"
            if one.system.num_draft_tokens is not None:
                config.num_assistant_tokens = one.system.num_draft_tokens
            if one.system.confidence_threshold is not None:
                config.assistant_confidence_threshold = one.system.confidence_threshold
            self._assistants[folder] = draft
        return self._assistants[folder]


class Decoders:
    """One target, plain and nested, each with its decoder: a contender is decoded by that of its format."""

    def __init__(self, by_format: dict[str | None, Decoder]) -> None:
        self.by_format = by_format

    def warm(self, one: Contender, rows: list[list[int]]) -> None:
        self.by_format[one.system.format].warm(one, rows)

    def take(self, one: Contender, rows: list[list[int]]) -> tuple[Take, list[list[int]]]:
        return self.by_format[one.system.format].take(one, rows)


def _spent(stats: hf_mlspec.SpeculationStats, rows: int) -> Take:
    """Decode-only: without the pass that read the prompts, and what levels drafted before it."""
    levels = [{"name": level.name, "drafted": level.drafted, "tested": level.tested, "accepted": level.accepted,
               "forwards": level.forwards, "seconds": level.seconds - level.prefill_seconds,
               "cache_bytes": level.cache_bytes}
              for level in stats.levels]
    return {
        "decode_tokens": stats.new_tokens - stats.prefill_tokens,
        "decode_seconds": stats.seconds - stats.prefill_seconds,
        "target_seconds": stats.target_seconds - stats.prefill_target_seconds,
        "target_passes": stats.target_passes - 1, "row_passes": stats.row_passes - rows,
        "target_cache_bytes": stats.target_cache_bytes, "levels": levels,
    }


def unit(
    decoder: Decoder | Decoders, field_: list[Contender], rows: list[list[int]], first: int, probe: machine.ReadProbe
) -> Take:
    """Every contender on one batch in turn, beginning with the `first`-th, each after a read of memory.

    Returns takes by contender, those of ours with the number of rows that differ from what the target alone wrote.
    """
    reads, takes, ids = [], {}, {}
    start = first % len(field_)
    for one in field_[start:] + field_[:start]:
        begin = time.perf_counter()
        probe()
        reads.append(probe.nbytes / (time.perf_counter() - begin))
        takes[one.name], ids[one.name] = decoder.take(one, rows)
    for one in (one for one in field_ if one.way in ("chain", "alone") and one.name != ALONE):
        takes[one.name]["rows_differing"] = sum(differing(ids[one.name], ids[ALONE]))
    return {"probe_bytes_per_second": statistics.median(reads), "rows": len(rows), "takes": takes}


def differing(got: list[list[int]], expected: list[list[int]]) -> Iterator[bool]:
    """Row by row."""
    return (a != b for a, b in zip(got, expected, strict=True))
