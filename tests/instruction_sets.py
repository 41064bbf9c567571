"""How does a test run code with another instruction set of this CPU? In a process of its own: it is chosen once."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
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
"""


def run_on(isa: str, code: str, folder: Path) -> subprocess.CompletedProcess:
    """Python on `code`, with `folder` as sys.argv[1] and `isa` as sys.argv[2]."""
    return subprocess.run(
        [sys.executable, "-c", code, str(folder), isa],
        capture_output=True,
        text=True,
        env={**os.environ, "MLSPEC_CPU_ISA": isa},
    )


@lru_cache
def is_supported(isa: str) -> bool:
    """Whether this CPU has `isa`; asked without the imports of a test, and once."""
    said = run_on(isa, f"{PACKAGE}\nlibrary.kernel_of(\"bf16_linear\", \"cpu\")", Path()).stderr
    unknown = isa != "generic" and f"MLSPEC_CPU_ISA={isa} is unknown" in said
    return not unknown and f"MLSPEC_CPU_ISA={isa} is not supported by this CPU" not in said


def output_on(isa: str, code: str, folder: Path) -> str:
    """What `code` prints; the test is skipped where this CPU lacks `isa`."""
    if not is_supported(isa):
        pytest.skip(f"this CPU has no {isa}")
    result = run_on(isa, code, folder)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
