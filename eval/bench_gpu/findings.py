"""What does a GPU benchmark hand from group to group, and what does it find? Numbers with what they have to reach."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from eval.gpu_timing import PROBE_BYTES, read_bandwidth


@dataclass(frozen=True)
class Finding:
    """One number.

    what, contender: row and column of its table. target: what it has to reach, None for peers and for numbers without
    one; at_least: whether larger is better. share: of the read bandwidth. more: whatever else the line should keep.
    """

    group: str
    what: str
    contender: str
    value: float
    unit: str
    target: float | None = None
    at_least: bool = False
    share: float | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """None where there is no target."""
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return {**vars(self), "met": self.met}


@dataclass
class Bench:
    """What every group runs on.

    device: cuda, or cpu where --quick shows that everything runs. models: folder of code-21m and code-4m; data: of the
    prompts. quick: tiny shapes, the demo pair, few tokens. slow: the peers whose first call takes half a minute.
    missing: peers that could not take part, with the reason.
    """

    device: torch.device
    models: Path
    data: Path
    quick: bool = False
    slow: bool = False
    build: bool = False
    missing: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(cls, args: argparse.Namespace) -> Bench:
        data = args.data if args.data is not None else args.models.parent / "data"
        return cls(torch.device(args.device), args.models, data, args.quick, args.slow, args.build)

    @cached_property
    def probe(self) -> float:
        """Bytes a second that this device reads, measured once in this process."""
        return read_bandwidth(self.device, 1 << 26 if self.quick else PROBE_BYTES)

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{time.perf_counter() - self.started:6.1f} s] {text}", file=sys.stderr, flush=True)

    def free(self) -> None:
        """Give memory back before the next model is made; models hold themselves in cycles."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


Group = Callable[[Bench], Iterator[Finding]]
