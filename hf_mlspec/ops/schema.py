"""Which operators exist? Signature, meaning and result shape of every op in the ``mlspec`` namespace."""

from __future__ import annotations

import torch

from ..formats.mxfp4 import BLOCK, INPUT_DTYPES

# name -> schema. C++ only adds implementations (TORCH_LIBRARY_IMPL), so Python and C++ cannot disagree about a
# signature.
SCHEMAS: dict[str, str] = {
    # x [..., in] float32/bfloat16/float16; weight_packed uint8 [out, in / 2]; weight_scale uint8 [out, in / 32];
    # bias [out] floating -> [..., out] in x.dtype, accumulated in float32.
    "mxfp4_linear": "(Tensor x, Tensor weight_packed, Tensor weight_scale, Tensor? bias) -> Tensor",
}
# The instruction set the compiled CPU kernels chose, e.g. "avx512"; implemented by the compiled library only.
CPU_ISA_SCHEMA = "cpu_isa() -> str"


def check_mxfp4_linear(
    x: torch.Tensor, weight_packed: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """TypeError or ValueError naming what does not fit, with the numbers."""
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"mxfp4_linear: x is {x.dtype}, expected float32, bfloat16 or float16")
    if weight_packed.dtype != torch.uint8 or weight_scale.dtype != torch.uint8:
        raise TypeError(
            f"mxfp4_linear: weight_packed is {weight_packed.dtype} and weight_scale {weight_scale.dtype}, both are "
            "torch.uint8"
        )
    packed, scale = list(weight_packed.shape), list(weight_scale.shape)
    if len(packed) != 2 or len(scale) != 2 or packed != [scale[0], scale[1] * (BLOCK // 2)]:
        raise ValueError(
            f"mxfp4_linear: weight_packed {packed} and weight_scale {scale} are not [out, in / 2] and [out, in / "
            f"{BLOCK}]"
        )
    if x.ndim == 0 or x.shape[-1] != packed[1] * 2:
        raise ValueError(f"mxfp4_linear: x has shape {list(x.shape)}, the weight takes in_features = {packed[1] * 2}")
    if bias is not None and list(bias.shape) != [packed[0]]:
        raise ValueError(f"mxfp4_linear: bias has shape {list(bias.shape)}, the weight has out_features = {packed[0]}")


def fake_mxfp4_linear(
    x: torch.Tensor, weight_packed: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The result's shape and dtype without computing it (torch.compile, meta tensors)."""
    check_mxfp4_linear(x, weight_packed, weight_scale, bias)
    return x.new_empty((*x.shape[:-1], weight_packed.shape[0]))
