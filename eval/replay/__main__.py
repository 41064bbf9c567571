"""How fast would a chain of these shapes decode, if its drafts were accepted as recorded? Random weights, real passes.

    python -m eval.replay --trace eval/traces/code-76m-mxfp4-humaneval.json --shape llama-1.1b --level mxfp4
    python -m eval.replay --trace FILE --shape llama-1.1b --level mxfp4 --level tiny-2x512 --batch 1,8 --json out.jsonl
    python -m eval.replay --trace FILE --shape llama-1.1b --format int4 --level w4a8
    python -m eval.replay --trace FILE --model FOLDER --level mxfp4                     # a model of your own
    python -m eval.replay --trace FILE --shape llama-3-8b --level mxfp4 --captured 8    # on a GPU, in captured rounds
    python -m eval.replay --trace FILE --shape llama-0.5b --level mxfp4 --prompt-tokens 8192 --draft-window 0,1024
    python -m eval.replay --quick                                                       # tiny shapes, few tokens

Contenders, each batch in turn: every trace under the levels, and the target alone, a token a pass, over the same rows.
Levels are words ("mxfp4", "w4a8"), folders, or names of shapes, one for each level of the traces. Numbers are
decode-only; ratios are of tokens a second on one batch, their geometric mean over batches and repeats. Seconds are
measured; acceptances are those of the trace, so lines carry "replayed": true and names end in "(replayed)".
--captured takes the draft length of every level (12,3): rounds of these lengths, as docs/traces.md derives them.
--prompt-tokens replaces the lengths of all prompts. With --draft-window the chain runs once with each of these windows
(0: levels see all tokens); all accept what the trace says, so that ratios are of seconds alone.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_mlspec
from eval.plans.options import counts
from eval.plans.places import TRACES
from eval.records.writer import Results
from eval.targets import OF_CHAINS, random_model
from hf_mlspec import SpeculationStats
from hf_mlspec.evaluation import ReplayResult, Trace, read_trace, replay, replay_captured, reschedule

ALONE = "target alone"
_NEW_TOKENS = 1024  # and guesses: more than any trace of eval/traces has


@dataclass
class Contender:
    """A trace, or the target alone over its rows, on one batch size."""

    name: str
    trace: Trace
    levels: list[Any]
    words: list[str]
    captured: bool = False
    how: dict[str, Any] = field(default_factory=dict)
    takes: list[ReplayResult] = field(default_factory=list)

    def take(self, model: PreTrainedModel, batch: int, rows: list[int], max_new_tokens: int | None) -> None:
        """Replay one batch."""
        way = replay_captured if self.captured else replay
        self.takes.append(way(model, self.trace, self.levels, batch_size=batch, rows=rows, name=self.name,
                              max_new_tokens=max_new_tokens, **self.how))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.replay", description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, nargs="+", default=[], metavar="FILE", help="what to replay")
    parser.add_argument("--shape", choices=sorted(OF_CHAINS), help="the target: random BF16 weights (llama-1.1b)")
    parser.add_argument("--model", help="the target: a folder instead of a shape")
    parser.add_argument("--format", choices=("int4", "mxfp4"), help="quantize the target")
    parser.add_argument("--level", action="append", default=[], help="one for each level of the traces, in order")
    parser.add_argument("--batch", type=counts, default=[1], help="(1)")
    parser.add_argument("--rows", type=int, help="rows of each trace to replay, rounded down to whole batches (all)")
    parser.add_argument("--repeats", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, help="fewer than were recorded")
    parser.add_argument("--captured", type=counts, metavar="N,N", help="captured rounds, drafting so many tokens")
    parser.add_argument("--prompt-tokens", type=int, help="as if every prompt had so many")
    parser.add_argument("--draft-window", type=windows, default=[None], metavar="N,N", help="of the levels (none)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="threads of this process (torch's own choice)")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, 2 rows, 12 tokens, once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one line a contender and batch size")
    args = parser.parse_args(argv)
    if args.quick:
        args.trace = args.trace or [TRACES / "code-76m-mxfp4-code-4m-humaneval.json"]
        args.level = args.level or ["mxfp4", "tiny"]
        args.shape = args.shape or (None if args.model else "tiny")
        args.rows, args.repeats, args.max_new_tokens = args.rows or 2, 1, args.max_new_tokens or 12
    if not args.trace:
        parser.error("--trace is missing: name a file of eval/traces")
    if args.model and args.shape:
        parser.error("--model and --shape: give one of them")
    for name in ("rows", "repeats", "threads", "prompt_tokens"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}, it must be at least 1")
    return args


def windows(text: str) -> list[int]:
    """An argparse type: `0,1024` -> [0, 1024]."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers of tokens such as 0,1024")
    return [int(part) for part in parts]


def load_target(args: argparse.Namespace) -> PreTrainedModel:
    if args.model is not None and not Path(args.model).is_dir():
        raise ValueError(f"--model: {args.model} is no folder")
    if args.format is None:
        if args.model is None:
            return random_model(args.shape or "llama-1.1b", args.device, 0, **room(args))
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(args.device).eval()
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            random_model(args.shape or "llama-1.1b", "cpu", 0, **room(args)).save_pretrained(folder)
        packing = hf_mlspec.MLSpecConfig(format=args.format)
        return AutoModelForCausalLM.from_pretrained(
            args.model or folder, dtype=torch.bfloat16, quantization_config=packing
        ).to(args.device).eval()


def room(args: argparse.Namespace) -> dict[str, int]:
    """Positions of shapes, where prompts are longer than recorded."""
    return {"max_position_embeddings": args.prompt_tokens + _NEW_TOKENS} if args.prompt_tokens else {}


def contenders(args: argparse.Namespace, traces: dict[str, Trace]) -> list[list[Contender]]:
    """Per trace the target alone over its rows, then its chain, with each window."""
    levels = [random_model(word, args.device, 1 + at, **room(args)) if word in OF_CHAINS else word
              for at, word in enumerate(args.level)]
    words = [Path(word).name if "/" in word else word for word in args.level]
    found = []
    for trace in traces.values():
        rows = range(min(args.rows or len(trace.rows), len(trace.rows)))
        trace = trace.of_rows(list(rows))
        if args.captured:
            trace = reschedule(trace, args.captured, prompt_tokens=args.prompt_tokens)
        elif args.prompt_tokens:
            trace = replace(trace, rows=tuple(replace(row, prompt_tokens=args.prompt_tokens) for row in trace.rows))
        captured, chain = bool(args.captured), f"[{', '.join(words)}]"
        found.append([Contender(ALONE, trace.alone(), [], [], captured)])
        for window in args.draft_window:
            how = {} if window is None else {"speculation_config": {"draft_window": window}}
            name = chain if window is None else f"{chain}, window {window or 'none'}"
            found[-1].append(Contender(name, trace, levels, words, captured, how))
    return found


def measure(model: PreTrainedModel, found: list[Contender], batch: int, args: argparse.Namespace) -> None:
    """Every contender on every whole batch in turn, after one warming batch each."""
    for one in found:
        one.take(model, batch, list(range(batch)), 2 if one.trace.max_new_tokens > 1 else None)
        one.takes.clear()
    starts = range(0, len(found[0].trace.rows) - batch + 1, batch)
    for number in track(range(args.repeats * len(starts)), description=f"batch {batch}", console=_stderr()):
        start = starts[number % len(starts)]
        for one in found:
            one.take(model, batch, list(range(start, start + batch)), args.max_new_tokens)


def line_of(one: Contender, alone: Contender, batch: int) -> dict[str, Any]:
    """A result of kind "decode"."""
    stats = [take.stats for take in one.takes]
    seconds = [take.decode_seconds for take in one.takes]
    tokens = sum(s.new_tokens - s.prefill_tokens for s in stats)
    passes = sum(s.row_passes - take.rows for s, take in zip(stats, one.takes, strict=True))
    ratios = [take.tokens_per_second / base.tokens_per_second
              for take, base in zip(one.takes, alone.takes, strict=True)
              if take.tokens_per_second and base.tokens_per_second]
    return {
        "contender": one.takes[0].name, "levels": one.words, "data": one.trace.data, "batch": batch,
        "num_draft_tokens": [level.num_draft_tokens for level in one.trace.levels] or None,
        "confidence_threshold": [level.confidence_threshold for level in one.trace.levels] or None,
        "decode_tokens": tokens, "tokens_per_second": tokens / sum(seconds) if tokens else None,
        "over": {f"{ALONE} (replayed)": statistics.geometric_mean(ratios)} if ratios else {},
        "seconds": split(stats, len(one.words)), "bandwidth_share": None,
        "tokens_per_pass": tokens / passes if passes else None,
        "fused_rounds": one.takes[0].fused_rounds,
        **({"rescheduled": one.trace.origin["rescheduled"]} if "rescheduled" in one.trace.origin else {}),
        "recorded_on": [one.trace.target.name, *(level.name for level in one.trace.levels)],
    }


def split(stats: list[SpeculationStats], levels: int) -> dict[str, Any]:
    """Decode-only seconds: in the target's passes, in those of each level, in neither."""
    found = [sum(s.levels[at].seconds - s.levels[at].prefill_seconds for s in stats) for at in range(levels)]
    whole = sum(s.seconds - s.prefill_seconds for s in stats)
    target = sum(s.target_seconds - s.prefill_target_seconds for s in stats)
    return {"total": whole, "target": target, "levels": found, "other": whole - target - sum(found)}


def table(lines: list[dict[str, Any]], target: str) -> Table:
    out = Table("trace of", "data", "batch", "contender", "tokens/s", "x target alone", "tokens / pass", "ms a token",
                title=f"{target}: replayed, decode-only")
    for line in lines:
        speed, over = line["tokens_per_second"], next(iter(line["over"].values()), math.nan)
        out.add_row(" <- ".join(line["recorded_on"]), line["data"], str(line["batch"]), escape(line["contender"]),
                    "-" if speed is None else f"{speed:.1f}", f"{over:.2f}",
                    "-" if line["tokens_per_pass"] is None else f"{line['tokens_per_pass']:.2f}",
                    "-" if speed is None else f"{1000 * line['batch'] / speed:.2f}")
    return out


def _stderr() -> Console:
    return Console(stderr=True)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All lines; nothing is computed for a trace, a level or a batch that cannot be."""
    traces = {str(file): read_trace(file) for file in args.trace}
    least = min(min(args.rows or len(trace.rows), len(trace.rows)) for trace in traces.values())
    if max(args.batch) > least:
        raise ValueError(f"a batch of {max(args.batch)} needs as many rows, and {least} are to be replayed: raise "
                         "--rows, or take a trace of more prompts")
    model = load_target(args)
    found, lines = contenders(args, traces), []
    for batch in args.batch:
        for group in found:
            measure(model, group, batch, args)
            lines += [line_of(one, group[0], batch) for one in group]
            for one in group:
                one.takes = []
    return lines


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    name = args.shape or (Path(args.model).name if args.model else "llama-1.1b")
    name += f" {args.format}" if args.format else ""
    try:
        lines = run(args)
        if args.json:
            with Results(args.json, f"replay of {name}", args.device) as results:
                for line in lines:
                    results.add("decode", {"target": name, **line}, replayed=True)
    except (ValueError, OSError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Console(width=None if Console().is_terminal else 200).print(table(lines, name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
