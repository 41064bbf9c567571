"""Which kernel serves which op? Defines the ops, loads the compiled libraries once, and never substitutes in silence.

That of the CPU at import; that of GPUs with the first op on a GPU, so that importing touches no device.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from . import (
    reference,
    reference_formats,
    reference_round,
    reference_step,
    schema,
    schema_formats,
    schema_round,
    schema_step,
)
from .cuda_library import BUILD_COMMAND, why_no_cuda_kernels

REQUIRE_VARIABLE = "MLSPEC_REQUIRE_KERNELS"

# Where an op's schema and fake result are, and where its plain torch.
_ROOMS = ((schema, reference), (schema_formats, reference_formats), (schema_step, reference_step),
          (schema_round, reference_round))  # fmt: skip
# On the CPU these are made of the ops of schema.py, whose kernels do the work, or keep a few integers: no kernel of
# their own is missing.
_COMPOSED_ON_CPU = frozenset(("bf16_rows_linear", *schema_step.SCHEMAS, *schema_round.SCHEMAS))

# Ops with kernels of their own for Hopper, beside those for every GPU.
_HOPPER_OPS = frozenset(
    {"bf16_linear", "bf16_rows_linear", "bitplane_linear", "int4_linear", "mxfp4_linear", "nested_linear"}
)

_PACKAGE = Path(__file__).resolve().parent.parent
_OPS = torch.library.Library("mlspec", "DEF")
_warned: set[tuple[str, str]] = set()


class KernelError(RuntimeError):
    """What the environment asks of the kernels (MLSPEC_REQUIRE_KERNELS, MLSPEC_CPU_ISA) cannot be had."""


def _define() -> None:
    for schemas, references in _ROOMS:
        for name, signature in schemas.SCHEMAS.items():
            _OPS.define(name + signature)
            compute = _fallback(name, getattr(references, name))
            _OPS.impl(name, compute, "CompositeExplicitAutograd")  # used where no kernel is registered
            torch.library.register_fake(f"mlspec::{name}", getattr(schemas, f"fake_{name}"), lib=_OPS)
    _OPS.define(schema.CPU_ISA_SCHEMA)
    _OPS.define(schema.CUDA_LINEARS_SCHEMA)


def _fallback(name: str, compute: Callable):
    def run_reference(x: torch.Tensor, *operands):
        if x.is_cuda and why_no_cuda_kernels(x.device) is None and _has_kernel(name, "CUDA"):
            return getattr(torch.ops.mlspec, name).default(x, *operands)  # this very call loaded the library
        if x.device.type != "cpu" or name not in _COMPOSED_ON_CPU:
            _announce_missing(name, x.device)
        return compute(x, *operands)

    return run_reference


def _announce_missing(op: str, device: torch.device) -> None:
    message = f"no compiled kernel for {op} on {device.type}: {_reason(op, device)}"
    if os.environ.get(REQUIRE_VARIABLE) == "1":
        raise KernelError(f"{message}; {REQUIRE_VARIABLE}=1 forbids the reference path")
    if not _warned:
        _warned.add((op, device.type))
        warnings.warn(f"{message}. Running the slower plain-torch reference path.", RuntimeWarning, stacklevel=4)


def _reason(op: str, device: torch.device) -> str:
    if device.type == "cuda":
        return why_no_cuda_kernels(device) or f"the CUDA library has none for {op}, move the model to the CPU"
    if device.type != "cpu":
        return "this version has kernels for cpu and cuda, move the model there or accept the reference path"
    return why_not_compiled() or f"the compiled library holds none; build it again with `{BUILD_COMMAND}`"


def _has_kernel(op: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"mlspec::{op}", key)


def why_not_compiled() -> str | None:
    """Why there is no compiled library, and the remedy; None where it is loaded."""
    return LOAD_ERROR and f"{LOAD_ERROR}; build it in the source tree with `{BUILD_COMMAND}`"


def _load() -> str | None:
    """Load hf_mlspec/_C*.so; None, or why there is no library."""
    found = [path for path in sorted(_PACKAGE.glob("_C*")) if path.suffix in (".so", ".dylib", ".pyd")]
    found = [path for path in found if path.name.split(".")[0] == "_C"]
    if not found:
        return f"no compiled library in {_PACKAGE}"
    try:
        torch.ops.load_library(found[0])
    except OSError as error:  # built for another torch or another machine: kept, and told with the first warning
        return f"{found[0].name} does not load ({error})"
    return None


def kernel_of(op: str, device: str) -> str:
    """On the CPU an instruction set (``"avx512vnni"``, ``"generic"``), on the current GPU ``"sm_90a"`` (Hopper's own
    kernels) or ``"sm_80+"``; ``"reference"`` where there is no kernel. KernelError for an unknown MLSPEC_CPU_ISA or
    MLSPEC_CUDA_KERNELS."""
    if device == "cuda" and why_no_cuda_kernels() is not None:
        return "reference"
    if not _has_kernel(op, {"cpu": "CPU", "cuda": "CUDA"}[device]):
        return "reference"
    try:
        if device == "cpu":
            return torch.ops.mlspec.cpu_isa()
        return torch.ops.mlspec.cuda_linears(torch.cuda.current_device()) if op in _HOPPER_OPS else "sm_80+"
    except RuntimeError as error:
        raise KernelError(str(error).splitlines()[0]) from error


def kernel_table() -> list[tuple[str, str, str]]:
    """(op, device, kernel) of every op, for ``mlspec info``. Without a kernel the last is ``"reference"``."""
    ops = [op for schemas, _ in _ROOMS for op in schemas.SCHEMAS]
    return [(op, device, kernel_of(op, device)) for op in ops for device in ("cpu", "cuda")
            if device != "cpu" or op not in _COMPOSED_ON_CPU]


_define()
LOAD_ERROR = _load()
