"""Do compiled ops refuse operands that do not fit as their references do? The cases of tests/ops, without an end."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from .harness import Target, Wrong

sys.path.append(str(Path(__file__).resolve().parents[1] / "ops"))  # its tests import each other as pytest has it

from test_fuzzed_operands import OPERANDS, changed_operands, outcome, said_of

from hf_mlspec.ops.operator import REFERENCES


def _reader(op: str):
    import torch

    kernel, reference = getattr(torch.ops.mlspec, op).default, REFERENCES[op]

    def read(data: bytes) -> None:
        operands = changed_operands(op, random.Random(int.from_bytes(data, "little")))
        if outcome(kernel, operands) != outcome(reference, operands):
            raise Wrong(f"{op} of {said_of(operands)}: only one of kernel and reference takes them")

    return read


def targets() -> tuple[Target, ...]:
    """One for each op."""
    return tuple(Target(f"op {op}", (), _reader(op), suffixes=(), drawn=True) for op in OPERANDS)
