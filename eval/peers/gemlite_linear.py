"""How is gemlite's weight-only MXFP4 product measured beside us? Its Triton kernels tune themselves at first."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from eval.peers.missing import MissingPeer


def gemlite_mxfp4(
    weight: Tensor, copies_of: Callable[[int], int]
) -> tuple[Callable[[Tensor, int], Tensor], int, int]:
    """weight bfloat16 ``[out, in]`` on a GPU -> run(x, copy), the bytes of one packed weight, how many there are.

    MissingPeer where gemlite is not installed, is a version without MXFP4, or there is no GPU.
    """
    if not weight.is_cuda:
        raise MissingPeer("its kernels need a GPU")
    if importlib.util.find_spec("gemlite") is None:
        raise MissingPeer("gemlite is not installed")
    from gemlite import helper

    if not hasattr(helper, "A16W4_MXFP"):
        raise MissingPeer("this version has no A16W4_MXFP")
    linear = torch.nn.Linear(*weight.shape[::-1], bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)

    def packed() -> torch.nn.Module:
        return helper.A16W4_MXFP(device=str(weight.device), dtype=torch.bfloat16).from_linear(linear, del_orig=False)

    first = packed()
    nbytes = first.W_q.nbytes + first.scales.nbytes
    layers = [first, *(packed() for _ in range(copies_of(nbytes) - 1))]
    return lambda x, copy: layers[copy](x), nbytes, len(layers)
