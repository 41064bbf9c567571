"""How are torch's own matrix products measured beside us? bfloat16, int4 weight-only with bfloat16 activations, and
sparse rows."""

from __future__ import annotations

import torch
from torch import Tensor

from eval.peers.missing import MissingPeer


class TorchBf16:
    """torch.nn.functional.linear on bfloat16."""

    def __init__(self, weight: Tensor, copies: int):
        """weight bfloat16 ``[out, in]``."""
        self._weights = [weight.clone() for _ in range(copies)]
        self.nbytes = weight.nbytes

    def bind(self, x: Tensor):
        """x float32 ``[n, in]`` -> a call that takes the number of a copy and returns bfloat16 ``[n, out]``."""
        x, weights = x.to(torch.bfloat16), self._weights
        return lambda copy: torch.nn.functional.linear(x, weights[copy])

    def close(self) -> None:
        """Gives the memory back."""
        self._weights = []


class TorchCsr:
    """torch's product of sparse rows (CSR), float32; x lies as it wants it."""

    def __init__(self, weight: Tensor, copies: int):
        """weight float32 ``[out, in]``, mostly zeros."""
        sparse = weight.to_sparse_csr()
        self._weights = [sparse.clone() for _ in range(copies)]
        self.nbytes = sum(part.nbytes for part in (sparse.crow_indices(), sparse.col_indices(), sparse.values()))

    def bind(self, x: Tensor):
        """x float32 ``[n, in]`` -> a call that takes the number of a copy and returns float32 ``[n, out]``."""
        columns, weights = x.T.contiguous(), self._weights
        return lambda copy: (weights[copy] @ columns).T

    def close(self) -> None:
        """Gives the memory back."""
        self._weights = []


class TorchInt4:
    """torch's int4 weight-only product (aten::_weight_int4pack_mm_for_cpu), bfloat16 activations."""

    def __init__(self, codes: Tensor, scales: Tensor, group_size: int, copies: int):
        """codes uint8 ``[out, in]`` with zero point 8; scales float16 ``[out, in / group_size]``.

        MissingPeer for a shape its packing refuses.
        """
        try:
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
        except RuntimeError as error:
            raise MissingPeer(f"torch int4: {str(error).splitlines()[0]}") from None
        scale = scales.T.to(torch.bfloat16)
        table = torch.stack((scale, torch.zeros_like(scale)), dim=-1).contiguous()  # [in / group, out, 2]
        self._packed = [packed.clone() for _ in range(copies)]
        self._tables = [table.clone() for _ in range(copies)]
        self._group = group_size
        self.nbytes = packed.nbytes + table.nbytes

    def bind(self, x: Tensor):
        """x float32 ``[n, in]`` -> a call that takes the number of a copy and returns bfloat16 ``[n, out]``."""
        x, packed, tables, group = x.to(torch.bfloat16), self._packed, self._tables, self._group
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        return lambda copy: multiply(x, packed[copy], group, tables[copy])

    def close(self) -> None:
        """Gives the memory back."""
        self._packed, self._tables = [], []
