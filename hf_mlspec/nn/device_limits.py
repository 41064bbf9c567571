"""What do the kernels of a GPU not take of a model that the CPU takes?"""

from __future__ import annotations

import torch
from torch import nn

from ..ops.attention import CUDA_HEAD_DIM_STEP, CUDA_MAX_HEAD_DIM
from .architecture import Outline, UnknownArchitecture, linear_shape, table_dtype
from .linear import is_dense

ROW_BYTES = 16  # what the kernels load at once


def require_bfloat16(model: nn.Module, device: torch.device) -> None:
    """UnknownArchitecture for a model in another dtype than the kernels of a GPU take."""
    dtype = table_dtype(model.model.embed_tokens)
    if dtype != torch.bfloat16:
        raise UnknownArchitecture(f"its weights are {dtype}, on {device} load it in bfloat16")


def require_served(found: Outline) -> None:
    """UnknownArchitecture where the kernels of a GPU do not take a model's sizes."""
    sizes = found.sizes
    if sizes.head_dim > CUDA_MAX_HEAD_DIM or sizes.head_dim % CUDA_HEAD_DIM_STEP:
        raise UnknownArchitecture(
            f"its heads have {sizes.head_dim} elements, the attention kernel takes multiples of {CUDA_HEAD_DIM_STEP} "
            f"up to {CUDA_MAX_HEAD_DIM}"
        )
    modules = [item for block in found.blocks for item in block.modules.items()] + [("lm_head", found.head)]
    for name, module in modules:
        inputs = linear_shape(module, name)[0]
        if inputs * 2 % ROW_BYTES:
            raise UnknownArchitecture(f"its {name} has {inputs} inputs, the GPU kernels take multiples of 8")
        if is_dense(module) and module.weight.data_ptr() % ROW_BYTES:
            raise UnknownArchitecture(f"its {name} does not start at a multiple of {ROW_BYTES} bytes in memory")
