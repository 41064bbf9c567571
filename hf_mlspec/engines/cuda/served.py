"""Which models do the kernels of a GPU take, and in which word is one that they do not take refused?"""

from __future__ import annotations

import torch
from torch import nn

from ...formats import CACHE_FORMATS, CacheFormat
from ...nn.adapters import base_of
from ...nn.linear import is_dense
from ...ops.attention import CUDA_HEAD_DIM_STEP, CUDA_MAX_HEAD_DIM
from .. import architecture
from ..architecture import NORMS, Outline, UnknownArchitecture, linear_shape, table_dtype
from .experts import require_served_experts

_ROW_BYTES = 16  # what the kernels load at once


def require_read(kept: CacheFormat | None, device: torch.device) -> None:
    """UnknownArchitecture for keys and values in codes that the kernels of a GPU do not read."""
    if kept is not None and not kept.on_gpus and device.type != "cpu":
        words = " or ".join(repr(word) for word, record in CACHE_FORMATS.items() if record.on_gpus)
        raise UnknownArchitecture(
            f"it is to keep keys and values as {kept.word}, and the kernels on {device} read {words} or keys and "
            "values as they are computed"
        )


def served_outline(model: nn.Module, device: torch.device) -> Outline:
    """UnknownArchitecture where the weights or sizes of a model on this device are not served."""
    architecture.require_known(model, device, "cuda")
    if device.type != "cpu":
        require_bfloat16(model, device)
    found = architecture.outline(model, device, "cuda")
    if device.type != "cpu":
        require_served(found)
    return found


def require_bfloat16(model: nn.Module, device: torch.device) -> None:
    """UnknownArchitecture for a model in another dtype than the kernels of a GPU take."""
    dtype = table_dtype(model.get_input_embeddings())
    if dtype != torch.bfloat16:
        raise UnknownArchitecture(f"its weights are {dtype}, on {device} load it in bfloat16")


def require_served(found: Outline) -> None:
    """UnknownArchitecture where the kernels of a GPU do not take a model's sizes."""
    sizes = found.sizes
    if sizes.rotates_pairs and any(block.norms[NORMS.index("q")] for block in found.blocks):
        raise UnknownArchitecture("it norms heads whose pairs are rotated, which the kernels of a GPU do not")
    if sizes.delta is not None and (sizes.delta.key_dim % 4 or sizes.delta.value_dim % 4):
        raise UnknownArchitecture(
            f"its delta nets have heads of {sizes.delta.key_dim} and {sizes.delta.value_dim} elements, the kernels of "
            "a GPU take multiples of 4"
        )
    if sizes.head_dim > CUDA_MAX_HEAD_DIM or sizes.head_dim % CUDA_HEAD_DIM_STEP:
        raise UnknownArchitecture(
            f"its heads have {sizes.head_dim} elements, the attention kernel takes multiples of {CUDA_HEAD_DIM_STEP} "
            f"up to {CUDA_MAX_HEAD_DIM}"
        )
    modules = [item for block in found.blocks for item in block.modules.items()] + [("lm_head", found.head)]
    for block in found.blocks:
        if block.experts is not None:
            require_served_experts(block.experts, _ROW_BYTES)
            modules += [(f"shared {name}", module) for name, module in block.experts.shared.items()]
    for name, module in modules:
        inputs, module = linear_shape(module, name)[0], base_of(module)
        if inputs * 2 % _ROW_BYTES:
            raise UnknownArchitecture(f"its {name} has {inputs} inputs, the GPU kernels take multiples of 8")
        if is_dense(module) and module.weight.data_ptr() % _ROW_BYTES:
            raise UnknownArchitecture(f"its {name} does not start at a multiple of {_ROW_BYTES} bytes in memory")
