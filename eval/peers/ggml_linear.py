"""How is ggml (llama.cpp, ik_llama.cpp) measured beside us? Its library, built elsewhere, behind a small C harness."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from eval.peers.missing import MissingPeer

SOURCE = Path(__file__).with_name("ggml_linear.cpp")


class GgmlLinear:
    """`copies` copies of a weight in ggml's type `kind`: `slab`, float32 ``[rows, in]``, repeated to `out` rows."""

    def __init__(self, folder: Path | None, kind: str, slab: Tensor, out: int, copies: int):
        """MissingPeer where the library is not there, does not build, or does not know the type or this shape."""
        self._library = load(folder)
        slab = slab.contiguous()
        self._handle = self._library.mlspec_ggml_open(
            kind.encode(), slab.data_ptr(), slab.shape[0], out, slab.shape[1], copies, torch.get_num_threads()
        )
        if not self._handle:
            raise MissingPeer(f"this ggml has no type {kind!r} for {out} x {slab.shape[1]}")
        self._out = out
        self.nbytes = self._library.mlspec_ggml_weight_bytes(self._handle)

    def bind(self, x: Tensor):
        """x float32 ``[n, in]`` -> a call that takes the number of a copy and returns float32 ``[n, out]``."""
        x = x.contiguous()
        if self._library.mlspec_ggml_input(self._handle, x.data_ptr(), x.shape[0]):
            raise MissingPeer(f"ggml has no memory for {x.shape[0]} rows")
        run, handle, shape = self._library.mlspec_ggml_run, self._handle, (x.shape[0], self._out)
        kind = ctypes.c_float * (shape[0] * shape[1])

        def call(copy: int) -> Tensor:
            found = run(handle, copy)
            if not found:
                raise RuntimeError("ggml_graph_compute failed")
            return torch.frombuffer(kind.from_address(found), dtype=torch.float32).view(shape)

        return call

    def close(self) -> None:
        """Gives the memory back."""
        self._library.mlspec_ggml_close(self._handle)
        self._handle = None


@cache
def load(folder: Path | None) -> ctypes.CDLL:
    """The harness, compiled against the ggml.h and libggml.so found under `folder`."""
    if folder is None:
        raise MissingPeer("no --ggml FOLDER with ggml.h and libggml.so below it")
    header, library = _find(folder, "ggml.h"), _find(folder, "libggml.so")
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        raise MissingPeer("no C++ compiler for the harness")
    with tempfile.TemporaryDirectory() as made:
        target = Path(made) / "ggml_linear.so"
        command = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", SOURCE, f"-I{header.parent}", library,
                   f"-Wl,-rpath,{library.parent}", "-o", target]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if done.returncode:
            raise MissingPeer(f"the harness does not build against {header}: {done.stderr.strip()[-300:]}")
        return _typed(ctypes.CDLL(str(target)))


def _find(folder: Path, name: str) -> Path:
    found = sorted(folder.resolve().rglob(name), key=lambda path: len(path.parts))
    if not found:
        raise MissingPeer(f"no {name} below {folder}")
    return found[0]


def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.mlspec_ggml_open.restype = pointer
    library.mlspec_ggml_open.argtypes = [ctypes.c_char_p, pointer, number, number, number, ctypes.c_int, ctypes.c_int]
    library.mlspec_ggml_weight_bytes.restype = number
    library.mlspec_ggml_weight_bytes.argtypes = [pointer]
    library.mlspec_ggml_input.argtypes = [pointer, pointer, number]
    library.mlspec_ggml_run.restype = pointer
    library.mlspec_ggml_run.argtypes = [pointer, ctypes.c_int]
    library.mlspec_ggml_close.argtypes = [pointer]
    library.mlspec_ggml_close.restype = None
    return library
