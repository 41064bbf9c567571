"""How many tokens a second do the three ways give, where drafts are accepted as real ones were? Random weights, real
passes, the rounds of a trace."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

import hf_mlspec
from eval.plans.places import TRACES
from hf_mlspec.evaluation import ReplayResult, Trace, read_trace, replay, replay_captured, reschedule

from .models import in_two_parts, plain

LOW, MXFP4 = "code-76m-zipper-clamp-humaneval", "code-76m-mxfp4-humaneval"


class Way(NamedTuple):
    """high_part: of weights in two parts; None: bfloat16. trace: whose rounds, of eval/traces."""

    name: str
    high_part: str | None
    levels: tuple[str, ...]
    trace: str


WAYS = (
    Way("a: both parts, high on the host", "host", (), LOW),
    Way("c: drafts of the low part, high on the host", "host", ("zipper-low",), LOW),
    Way("b: both parts on the device", "device", (), LOW),
    Way("c: drafts of the low part, high on the device", "device", ("zipper-low",), LOW),
    Way("bfloat16 alone", None, (), LOW),
    Way("bfloat16, drafts in mxfp4", None, ("mxfp4",), MXFP4),
)


def lines(options: argparse.Namespace) -> Iterator[dict]:
    """One for each way, batch and number of drafted tokens a round; decode only. captured: a round is one graph, which
    that of a host's part is not."""
    for high_part in (None if place == "dense" else place for place in options.places):
        model = plain(options) if high_part is None else in_two_parts(options, high_part)
        if high_part == "host":
            hf_mlspec.prepare(model)  # graphs of drafts outlast the replay in which they are made
        for way in (way for way in WAYS if way.high_part == high_part):
            given = options.drafted if way.levels else options.drafted[:1]
            for batch, drafted in itertools.product(options.batch, given):
                yield {"way": way.name, "batch": batch, **_rate(options, model, way, batch, drafted)}
        del model
        torch.cuda.empty_cache()


def _rate(
    options: argparse.Namespace, model: torch.nn.Module, way: Way, batch: int, drafted: int
) -> dict[str, object]:
    trace = read_trace(TRACES / f"{way.trace}.json")
    trace = reschedule(_of_rows(trace, batch, options.tokens), [drafted])
    captured = way.high_part != "host"
    run = replay_captured if captured else replay
    trace = trace if way.levels else trace.alone()
    given = {"batch_size": batch, "max_new_tokens": options.tokens}
    run(model, trace, list(way.levels), **given | {"max_new_tokens": min(8, options.tokens)})  # graphs, pinned memory
    found: ReplayResult = run(model, trace, list(way.levels), **given)
    line: dict[str, object] = {"tokens_s": found.tokens_per_second, "captured": captured}
    if way.levels:
        level = found.stats.levels[0]
        line["drafted"] = drafted
        line["accepted_of_drafted"] = level.accepted / max(level.drafted, 1)
        line["tokens_per_pass"] = found.stats.tokens_per_target_pass
        line["round_ms"] = found.decode_seconds / max(level.rounds, 1) * 1e3
    return line


def _of_rows(trace: Trace, batch: int, tokens: int) -> Trace:
    """So many rows that write as many tokens, the first of them."""
    long = [number for number, row in enumerate(trace.rows) if row.new_tokens >= min(tokens, trace.max_new_tokens)]
    if len(long) < batch:
        found = f"{len(long)} rows of the trace have {tokens} tokens"
        raise ValueError(f"{trace.target.name}: {found}, a batch has {batch}")
    return trace.of_rows(long[:batch])
