"""How does a test run code with another instruction set of this CPU? In a process of its own: it is chosen once."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ISAS = ("generic", "avx2", "avxvnni", "avxvnniint8", "avx512vnni", "avx512bf16", "amx")
# hf_mlspec/__init__.py is left out: it imports transformers, which takes longer than the checks of ops.
PACKAGE = f"""
import sys, types, torch
package = types.ModuleType("hf_mlspec")
package.__path__ = [{find_spec("hf_mlspec").submodule_search_locations[0]!r}]
sys.modules["hf_mlspec"] = package
from hf_mlspec import ops
from hf_mlspec.ops import library
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
library.kernel_of("bf16_linear", "cpu")  # where this CPU lacks the instruction set it is told now
"""
_lacking: set[str] = set()


def run_on(isa: str, code: str, folder: Path) -> subprocess.CompletedProcess:
    """Python on `code`, with `folder` as sys.argv[1] and `isa` as sys.argv[2]."""
    return subprocess.run(
        [sys.executable, "-c", code, str(folder), isa],
        capture_output=True,
        text=True,
        env={**os.environ, "MLSPEC_CPU_ISA": isa},
    )


def is_lacking(isa: str, said: str) -> bool:
    """Whether a process ended because this CPU, or what is built for it, has no `isa`."""
    unknown = isa != "generic" and f"MLSPEC_CPU_ISA={isa} is unknown" in said
    return unknown or f"MLSPEC_CPU_ISA={isa} is not supported by this CPU" in said


def output_on(isa: str, code: str, folder: Path) -> str:
    """What `code` prints; the test is skipped where this CPU lacks `isa`."""
    result = run_on(isa, code, folder) if isa not in _lacking else None
    if result is None or (result.returncode and is_lacking(isa, result.stderr)):
        _lacking.add(isa)
        pytest.skip(f"this CPU has no {isa}")
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
