"""Do the compiled kernels serve this GPU, and if not, why? Nothing touches a device before a tensor lies on one."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import re
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import torch

UNREADABLE = "unreadable: "  # begins what stands for the hash of a library that could not be read
BUILD_COMMAND = "pip install --no-build-isolation -e ."

_PACKAGE = Path(__file__).resolve().parent.parent
# What kernels_ext/bindings/cuda/linear.cpp leaves in the library for whoever has not loaded it.
_DESCRIPTION = re.compile(rb"hf_mlspec CUDA toolkit=(\d+) archs=([0-9a-z;]+)\n")
_loading = threading.Lock()
_loaded: list[Built] = []  # the one library, once it is loaded,
_hashes: list[str] = []  # and what it holds
_reasons: dict[int, str | None] = {}  # device index -> why no kernels serve it


class Built(NamedTuple):
    """What a library was compiled for: toolkit 13000 for CUDA 13.0, architectures such as ``("80", "90a")``."""

    path: Path
    toolkit: int
    archs: tuple[str, ...]

    def serves(self, capability: tuple[int, int]) -> bool:
        """Code for sm_XY runs on every X.Z with Z >= Y, that for sm_XYa on X.Y alone."""
        for arch in self.archs:
            major, minor = int(arch.rstrip("af")[:-1]), int(arch.rstrip("af")[-1])
            exact = arch.endswith(("a", "f"))
            if major == capability[0] and (minor == capability[1] if exact else minor <= capability[1]):
                return True
        return False


def why_no_cuda_kernels(device: torch.device | int | None = None) -> str | None:
    """Why compiled kernels do not serve a GPU (None: the current one), with the remedy; None where they do, and are
    loaded."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch"
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU it can use; `nvidia-smi` shows GPUs and driver"
    index = device.index if isinstance(device, torch.device) else device
    index = torch.cuda.current_device() if index is None else index
    if index not in _reasons:
        with _loading:
            _reasons[index] = _load_for(torch.cuda.get_device_capability(index), torch.cuda.get_device_name(index))
    return _reasons[index]


def serves(tensor: torch.Tensor) -> bool:
    """Whether the compiled CUDA kernels serve a tensor's device."""
    return tensor.is_cuda and why_no_cuda_kernels(tensor.device) is None


def built_library() -> Built | None:
    """The CUDA library in the package, loaded or not; None where there is none. ValueError for one not of ours."""
    found = [path for path in sorted(_PACKAGE.glob("_CUDA*")) if path.suffix in (".so", ".pyd")]
    if not found:
        return None
    with found[0].open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        described = _DESCRIPTION.search(content)
        if described is None:
            raise ValueError(f"{found[0]} does not say what it was built for")
        toolkit, archs = int(described[1]), described[2].decode()
    return Built(found[0], toolkit, tuple(archs.split(";")))


def content_hash(path: Path) -> str:
    """Of a file's bytes; why it has none, where it cannot be read.

    Taken when a library is loaded: what lies on disk later may be another build than the one in this process.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return f"{UNREADABLE}{error}"


def loaded_hash() -> str:
    """Of the CUDA library that this process has loaded; "" where it has none."""
    return _hashes[0] if _hashes else ""


def _load_for(capability: tuple[int, int], name: str) -> str | None:
    """Load the library if it has kernels for a GPU of that capability; None, or why it is not of use."""
    again = f"build it in the source tree with `{BUILD_COMMAND}`"
    try:
        built = _loaded[0] if _loaded else built_library()
    except (OSError, ValueError) as error:
        return f"{error}; {again}"
    if built is None:
        return f"no compiled library _CUDA.so in {_PACKAGE}; {again}, which needs nvcc"
    driver = _driver_version()
    if driver and driver // 1000 < built.toolkit // 1000:
        return (f"{built.path.name} is built with CUDA {_version(built.toolkit)}, the driver knows CUDA up to "
                f"{_version(driver)}; update the driver, or build with nvcc of CUDA {driver // 1000}")
    if not built.serves(capability):
        here = f"{capability[0]}{capability[1]}"
        asked = "90a" if here == "90" else here
        return (f"{built.path.name} is built for sm_{', sm_'.join(built.archs)}, this GPU ({name}) is sm_{here}; "
                f"{again} and MLSPEC_CUDA_ARCHS={asked}")
    if not _loaded:
        try:
            torch.ops.load_library(built.path)
        except OSError as error:  # built for another torch
            return f"{built.path.name} does not load ({error}); {again}"
        _hashes.append(content_hash(built.path))
        _loaded.append(built)
    return None


def _driver_version() -> int:
    """The newest CUDA the driver knows, as 1000 * major + 10 * minor; 0 where it cannot be asked."""
    version = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0
    except OSError:
        return 0


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
