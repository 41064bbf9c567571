"""Do compiled ops refuse operands that do not fit as their references do? The cases of tests/ops, without an end.

python -m tests.fuzz.operands --each 100000    of every op; by itself it is light enough for a sanitized library
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hf_mlspec.ops.operator import REFERENCES

from .harness import Counts, Target, Wrong, fuzz

sys.path.append(str(Path(__file__).resolve().parents[1] / "ops"))  # its tests import each other as pytest has it

from test_fuzzed_operands import OPERANDS, changed_operands, outcome, said_of

_TURN = 20.0  # seconds of an op before the next one


def _reader(op: str) -> Callable[[bytes], None]:
    kernel, reference = getattr(torch.ops.mlspec, op).default, REFERENCES[op]

    def read(data: bytes) -> None:
        operands = changed_operands(op, random.Random(int.from_bytes(data, "little")))
        if outcome(kernel, operands) != outcome(reference, operands):
            raise Wrong(f"{op} of {said_of(operands)}: only one of kernel and reference takes them")

    return read


def targets() -> tuple[Target, ...]:
    """One for each op."""
    return tuple(Target(f"op {op}", (), _reader(op), suffixes=(), drawn=True) for op in OPERANDS)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.operands")
    parser.add_argument("--each", type=int, default=100_000, help="operands of every op (100000)")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts = {target: Counts() for target in targets()}
    end, turn = time.monotonic() + 60 * options.minutes, 0
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end and any(one.inputs < options.each for one in counts.values()):
            turn += 1
            for target, one in counts.items():
                seed = f"{options.seed} {target.name} {turn}"
                fuzz(target, Path(folder), seed=seed, seconds=min(_TURN, max(end - time.monotonic(), 0)),
                     most=options.each, counts=one)  # fmt: skip
            told = ", ".join(f"{target.name[3:]} {one.inputs:,}" for target, one in counts.items())
            print(f"{sum(one.inputs for one in counts.values()):,} operands: {told}", flush=True)
    found = [(target.name, one) for target, each in counts.items() for one in each.findings.values()]
    for name, one in found:
        print(f"{name} ({one.count}): {one.what}: {one.said}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
