"""Which kernel serves which op? Puts ops into torch, loads the compiled libraries once, never substitutes in silence.

That of the CPU at import; that of GPUs with the first op on a GPU, so that importing touches no device.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from . import cuda_library
from .cuda_library import BUILD_COMMAND, UNREADABLE, content_hash, why_no_cuda_kernels

REQUIRE_VARIABLE = "MLSPEC_REQUIRE_KERNELS"

# Ops with kernels of their own for Hopper, beside those for every GPU.
_HOPPER_OPS = frozenset(
    {"adapted_linear", "bf16_linear", "bf16_rows_linear", "bitplane_apart", "bitplane_chosen", "bitplane_linear",
     "bitplane_part", "bitplane_sums", "int4_codes_linear", "int4_int8_linear", "int4_linear", "int4_sums",
     "lut_linear", "mxfp4_linear", "nested_linear"}
)  # fmt: skip

_PACKAGE = Path(__file__).resolve().parent.parent
_OPS = torch.library.Library("mlspec", "DEF")
_defined: dict[str, bool] = {}  # op -> whether the CPU needs no kernel of its own for it
_warned: set[tuple[str, str]] = set()


class KernelError(RuntimeError):
    """What the environment asks of the kernels (MLSPEC_REQUIRE_KERNELS, MLSPEC_CPU_ISA) cannot be had."""


class UnreadableLibrary(OSError):
    """A compiled library was loaded and its file could not be read, so that nothing tells it from another build."""


def define(op: str, schema: str, reference: Callable, fake: Callable, composed_on_cpu: bool) -> torch._ops.OpOverload:
    """``torch.ops.mlspec.<op>``, which runs ``reference`` where no kernel is registered (ops/operator.py)."""
    _OPS.define(op + schema)
    _OPS.impl(op, _fallback(op, reference, composed_on_cpu), "CompositeExplicitAutograd")
    torch.library.register_fake(f"mlspec::{op}", fake, lib=_OPS)
    _defined[op] = composed_on_cpu
    return getattr(torch.ops.mlspec, op).default


def _fallback(op: str, reference: Callable, composed_on_cpu: bool) -> Callable:
    def run_reference(x: torch.Tensor, *operands):
        if x.is_cuda and why_no_cuda_kernels(x.device) is None and _has_kernel(op, "CUDA"):
            return getattr(torch.ops.mlspec, op).default(x, *operands)  # this very call loaded the library
        if x.device.type != "cpu" or not composed_on_cpu:
            _announce_missing(op, x.device)
        return reference(x, *operands)

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


def built_library() -> Path | None:
    """The file hf_mlspec/_C*.so; None where there is none."""
    found = [path for path in sorted(_PACKAGE.glob("_C*")) if path.suffix in (".so", ".dylib", ".pyd")]
    return next((path for path in found if path.name.split(".")[0] == "_C"), None)


def library_hash(device: str) -> str:
    """Of the compiled library for the "cpu" or for "cuda" as this process loaded it, whatever lies on disk by now; ""
    where none is loaded. UnreadableLibrary for one that could not be read when it was loaded."""
    found = _HASH if device == "cpu" else cuda_library.loaded_hash()
    if found.startswith(UNREADABLE):
        why = found.removeprefix(UNREADABLE)
        said = f"the compiled library for {device} cannot be read ({why})"
        raise UnreadableLibrary(f"{said}; build it again with `{BUILD_COMMAND}`")
    return found


def _load() -> str | None:
    """Load it; None, or why there is no library."""
    found = built_library()
    if found is None:
        return f"no compiled library in {_PACKAGE}"
    try:
        torch.ops.load_library(found)
    except OSError as error:  # built for another torch or another machine: kept, and told with the first warning
        return f"{found.name} does not load ({error})"
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
    return [(op, device, kernel_of(op, device)) for op, composed_on_cpu in _defined.items()
            for device in ("cpu", "cuda") if device != "cpu" or not composed_on_cpu]  # fmt: skip


# The instruction set the compiled CPU kernels chose, e.g. "avx512vnni"; implemented by the compiled library only.
_OPS.define("cpu_isa() -> str")
# The linear kernels that serve a GPU, "sm_90a" or "sm_80+"; implemented by the compiled CUDA library only.
_OPS.define("cuda_linears(int device) -> str")
LOAD_ERROR = _load()
_HASH = "" if LOAD_ERROR else content_hash(built_library())
