"""Is the GPU engine right, how fast is it, and does it reach what it has to? One command checks and times everything.

    python -m eval.bench_gpu --models FOLDER --out gpu.jsonl               # all groups
    python -m eval.bench_gpu --only linear,step                            # these only
    python -m eval.bench_gpu --quick --device cpu                          # tiny shapes: shows that everything runs

linear   matrix products beside cuBLAS, torch's int4 and gemlite, each checked against float64 first
step     captured steps of the Llama-3-8B shape beside stock transformers: eager, in a CUDA graph, compiled (--slow)
chain    chains on that shape through captured rounds, acceptance replayed from recorded traces
pair     code-21m with code-4m beside stock generate, eager and compiled
exact    ids of chains against the target alone, HumanEval and GSM8K; a difference is a failure
qspec    one int4 model at 16 and 8 activation bits and both at once
formats  matrix products of nested weights and bit-planes beside BF16 and MXFP4
lut      matrix products of lookup-table planes beside int4, on the shapes of Llama-3-8B
ordered  steps of an int4 model whose layers order their inputs (act-order) over those of the same model without
nested   a nested target beside a plain one with an MXFP4 draft: steps, replayed chains, code-21m
planes   a target in 8 bit-planes that drafts with four, replayed, over its own and BF16 greedy decoding
nested_exact  ids of a nested code-21m and its chains against the plain model
startup  capturing, the first token, and with --build the extension
transforms  steps with int8 outliers, ordered inputs and online rotations over those of int4
experts  steps and prompts of mixtures of experts beside stock transformers, in BF16 and as MXFP4 casts
hybrid   steps and prompts of a Qwen3.5-27B shape beside stock transformers; code-hybrid's chains beside it alone
hybrid_chain  all layers of that shape: steps over their bytes, tokens that are run again, replayed chains
attention  of a layer, over bfloat16, int8 and int4 keys and values

FOLDER holds code-21m and code-4m; the prompts lie in ../data beside it or in --data. Every line of --out names machine
and commit; the tables of all groups come last, with shares of the memory's read bandwidth in this process. A group
that fails is reported and the others go on. Exit status 1 where a group failed, 2 where nothing can be run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from eval.bench_gpu.findings import Bench, Group
from eval.bench_gpu.report import document
from eval.records.writer import Results

GROUPS = {
    "linear": "eval.bench_gpu.products", "step": "eval.bench_gpu.step", "chain": "eval.bench_gpu.chain",
    "pair": "eval.bench_gpu.pair", "exact": "eval.bench_gpu.exact", "qspec": "eval.bench_gpu.qspec",
    "formats": "eval.bench_gpu.formats", "nested": "eval.bench_gpu.nested", "planes": "eval.bench_gpu.planes",
    "nested_exact": "eval.bench_gpu.nested_exact", "startup": "eval.bench_gpu.startup",
    "attention": "eval.bench_gpu.attention", "transforms": "eval.bench_gpu.transforms",
    "lut": "eval.bench_gpu.lut", "ordered": "eval.bench_gpu.ordered",
    "experts": "eval.bench_gpu.experts", "hybrid": "eval.bench_gpu.hybrid",
    "hybrid_chain": "eval.bench_gpu.hybrid_chain",
}  # fmt: skip


def groups(text: str) -> list[str]:
    """ "linear,step" -> both names, each once, in the order of GROUPS."""
    asked = [word.strip() for word in text.split(",")]
    unknown = next((word for word in asked if word not in GROUPS), None)
    if unknown is not None:
        raise argparse.ArgumentTypeError(f"{unknown!r} is no group: choose from {', '.join(GROUPS)}")
    return [name for name in GROUPS if name in asked]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=groups, default=list(GROUPS), metavar="GROUP,GROUP", help="(all)")
    parser.add_argument("--models", type=Path, default=Path("models"), metavar="FOLDER", help="(%(default)s)")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="prompts (data beside the models)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append a JSON line a number")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the tables there, too")
    parser.add_argument("--commit", help="of this tree, kept in every line where the tree is no checkout")
    parser.add_argument("--device", default="cuda", help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, the demo pair, few tokens")
    parser.add_argument("--slow", action="store_true", help="compiled peers on the large shape, too")
    parser.add_argument("--build", action="store_true", help="startup: build the extension anew, in a folder aside")
    return parser.parse_args(argv)


def obstacle(args: argparse.Namespace) -> str | None:
    """Why nothing can be run, None where something can."""
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        return "there is no CUDA device: run this on a GPU, or --quick --device cpu to see that everything runs"
    if args.device == "cpu" and not args.quick:
        return "--device cpu takes --quick: shapes of 8 billion weights are for a GPU"
    return None


def run_group(name: str, bench: Bench, keep: Any) -> str | None:
    """Run one group, keeping each number as it comes; the reason where it failed."""
    bench.say(name)
    try:
        group: Group = getattr(importlib.import_module(GROUPS[name]), name)
        with torch.no_grad():  # no inference mode: its tensors have no versions, by which changed weights are noticed
            for finding in group(bench):
                keep(finding)
                bench.say(f"{name}: {finding.what}, {finding.contender}: {finding.value:.4g} {finding.unit}")
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return None


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if (reason := obstacle(args)) is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    bench, lines, failures = Bench.of(args), [], {}
    with contextlib.ExitStack() as stack:
        results = stack.enter_context(Results(args.out, "bench_gpu", args.device)) if args.out else None

        def keep(finding) -> None:
            lines.append(finding.to_dict())
            if results is not None:
                results.add("gpu", {**lines[-1], "read_bandwidth": bench.probe, "commit": args.commit})

        for name in args.only:
            if (reason := run_group(name, bench, keep)) is not None:
                failures[name] = reason
            bench.free()
    text = document(lines, bench.missing, failures, bench.probe if lines else None)
    print(text)
    if args.table is not None:
        args.table.write_text(text, encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
