"""How are other ways to multiply a high part of -1, 0 and 1 measured beside ours? Two C kernels, compiled here."""

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

SOURCE = Path(__file__).with_name("high_rows.cpp")
GROUP = 4


class _Rows:
    """step float32 ``[out, 1]`` of a high part int8 ``[out, in]`` of -1, 0 and 1."""

    def __init__(self, high: Tensor, step: Tensor):
        """MissingPeer without a compiler or AVX-512, and for other values or outputs than it takes."""
        self._library = load()
        if high.abs().max() > 1 or len(high) % 64:
            raise MissingPeer("takes values of -1, 0 and 1, and outputs in multiples of 64")
        self._step, (self._out, self._in) = step.flatten().contiguous(), high.shape

    def _called(self, function, x: Tensor, *tensors: Tensor) -> Tensor:
        y = torch.empty(len(x), self._out)
        pointers = [part.data_ptr() for part in (*tensors, self._step, x)]
        sizes = map(ctypes.c_int64, (len(x), self._in, self._out))
        function(*map(ctypes.c_void_p, pointers), *sizes, ctypes.c_void_p(y.data_ptr()))
        return y

    def _check(self, x: Tensor) -> Tensor:
        if len(x) != 1 and len(x) % 8:
            raise MissingPeer(f"takes 1 row or a multiple of 8, not {len(x)}")
        return x.contiguous()


class DenseTables(_Rows):
    """Two bit planes of two's complement; each group of each looks up one of 16 sums, in a register."""

    def __init__(self, high: Tensor, step: Tensor, copies: int):
        super().__init__(high, step)
        bits = 2 ** torch.arange(GROUP)
        planes = [((high.int() >> plane & 1).unflatten(1, (-1, GROUP)) * bits).sum(-1) for plane in (0, 1)]
        nibbles = torch.stack(planes, 1).unflatten(0, (-1, 2, 8))  # [out / 16, 2, 8, 2 planes, groups]
        packed = (nibbles[:, 0] | nibbles[:, 1] << 4).permute(0, 3, 2, 1).to(torch.uint8)
        self._patterns = [packed.contiguous().clone() for _ in range(copies)]
        self.nbytes = packed.numel() + self._step.nbytes

    def bind(self, x: Tensor):
        """x float32 ``[n, in]`` -> a call that takes the number of a copy and returns float32 ``[n, out]``."""
        x, patterns = self._check(x), self._patterns
        return lambda copy: self._called(self._library.mlspec_dense_tables, x, patterns[copy])

    def close(self) -> None:
        """Gives the memory back."""
        self._patterns = []


class SignedRows(_Rows):
    """Of each row the columns that are added, then those that are subtracted, two bytes each."""

    def __init__(self, high: Tensor, step: Tensor, copies: int):
        super().__init__(high, step)
        both = torch.stack([high > 0, high < 0], 1).flatten(0, 1)  # [2 out, in]
        columns = both.nonzero()[:, 1].to(torch.int32).to(torch.uint16)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), both.sum(1).cumsum(0)]).to(torch.int32)
        self._rows = [(starts.clone(), columns.clone()) for _ in range(copies)]
        self.nbytes = starts.nbytes + columns.nbytes + self._step.nbytes

    def bind(self, x: Tensor):
        """As `DenseTables.bind`."""
        x, rows = self._check(x), self._rows
        return lambda copy: self._called(self._library.mlspec_signed_rows, x, *rows[copy])

    def close(self) -> None:
        """Gives the memory back."""
        self._rows = []


@cache
def load() -> ctypes.CDLL:
    """The kernels, compiled for this machine."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise MissingPeer("no C++ compiler: set CXX")
    target = Path(tempfile.mkdtemp()) / "high_rows.so"
    command = [compiler, "-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", SOURCE, "-o", target]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingPeer(f"does not compile: {done.stderr.splitlines()[0] if done.stderr else done.returncode}")
    library = ctypes.CDLL(str(target))
    if not library.mlspec_has_avx512():
        raise MissingPeer("is written for AVX-512")
    return library
