"""Which operands may a linear have? The checks of fakes and references; the compiled bindings say the same words.

TypeError for a dtype, ValueError for a shape, a number or a layout; each names the op, the operand and the numbers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..formats.int4 import GROUP_SIZES
from ..formats.mxfp4 import BLOCK
from . import tiles_cuda
from .tiles import TILE_BYTES, TILE_OUTPUTS

FLOAT32, INT8 = torch.float32, torch.int8
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def on_one_device(check: Callable[..., None]) -> Callable[..., None]:
    """``check``, after its tensors were found on one device."""
    op, names = check.__name__.removeprefix("check_"), tuple(inspect.signature(check).parameters)

    @functools.wraps(check)
    def check_devices_too(*operands) -> None:
        tensors = [(n, t) for n, t in zip(names, operands, strict=True) if isinstance(t, Tensor)]
        first, home = tensors[0]
        for name, tensor in tensors:
            if tensor.device != home.device:
                where = f"{name} is on {tensor.device}, {first} on {home.device}"
                raise ValueError(f"{op}: {where}; move them to one device")
        check(*operands)

    return check_devices_too


@on_one_device
def check_mxfp4_linear(
    x: Tensor, weight_tiles: Tensor, scale_tiles: Tensor, out_features: int, bias: Tensor | None, activation_bits: int
) -> None:
    op = "mxfp4_linear"
    if _in_cuda_order(weight_tiles):
        bytes_of_pair = tiles_cuda.pair_bytes(BLOCK, mxfp4=True)
        in_features = _check_pairs(op, weight_tiles, scale_tiles, out_features, BLOCK, bytes_of_pair)
        check_part(op, "scale_tiles", scale_tiles, torch.uint8, [1, in_features // BLOCK, 4])
    else:
        in_features = _check_tiles(op, weight_tiles, out_features)
        check_part(op, "scale_tiles", scale_tiles, torch.uint8, [*weight_tiles.shape[:2], TILE_OUTPUTS])
    check_choice(op, "activation_bits", activation_bits, (8, 16))
    check_rows(op, x, bias, in_features, out_features)


@on_one_device
def check_int4_linear(
    x: Tensor,
    weight_tiles: Tensor,
    scale_tiles: Tensor,
    zero_tiles: Tensor | None,
    out_features: int,
    bias: Tensor | None,
    group_size: int,
    activation_bits: int,
) -> None:
    op = "int4_linear"
    in_features = _check_int4(op, weight_tiles, scale_tiles, zero_tiles, out_features, group_size)
    check_choice(op, "activation_bits", activation_bits, (4, 8, 16))
    check_rows(op, x, bias, in_features, out_features)


@on_one_device
def check_int4_dequantize(
    weight_tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None, out_features: int, group_size: int
) -> None:
    _check_int4("int4_dequantize", weight_tiles, scale_tiles, zero_tiles, out_features, group_size)


@on_one_device
def check_bf16_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _check_dense("bf16_linear", x, weight, bias, torch.bfloat16)


@on_one_device
def check_f32_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _check_dense("f32_linear", x, weight, bias, torch.float32)


@on_one_device
def check_quantize_rows(x: Tensor, group_size: int, bits: int) -> None:
    op = "quantize_rows"
    check_float(op, "x", x)
    if x.ndim == 0:
        raise ValueError(f"{op}: x is a scalar, it must have at least one axis")
    check_choice(op, "group_size", group_size, GROUP_SIZES)
    check_choice(op, "bits", bits, (4, 8))


def _check_tiles(op: str, tiles: Tensor, out_features: int) -> int:
    """in_features of 4-bit weight tiles."""
    check_dtype(op, "weight_tiles", tiles, torch.uint8)
    if tiles.ndim != 3 or tiles.shape[2] != TILE_BYTES:
        raise ValueError(
            f"{op}: weight_tiles has shape {list(tiles.shape)}, expected [out / 16, in / {BLOCK}, {TILE_BYTES}] from "
            "prepack"
        )
    if out_features < 0 or -(-out_features // TILE_OUTPUTS) != tiles.shape[0]:
        raise ValueError(
            f"{op}: out_features is {out_features}, weight_tiles hold {tiles.shape[0]} tiles of {TILE_OUTPUTS}"
        )
    _check_contiguous(op, "weight_tiles", tiles)
    return tiles.shape[1] * BLOCK


def _in_cuda_order(tiles: Tensor) -> bool:
    return tiles.is_cuda and tiles_cuda.is_packed(tiles)


def _check_pairs(
    op: str, tiles: Tensor, scale_tiles: Tensor, out_features: int, group_size: int, bytes_of_pair: int
) -> int:
    """in_features of 4-bit weight tiles in the order of GPUs, which the shape of scale_tiles tells."""
    check_dtype(op, "weight_tiles", tiles, torch.uint8)
    if scale_tiles.ndim != 3:
        raise ValueError(f"{op}: scale_tiles has shape {list(scale_tiles.shape)}, expected 3 axes from prepack")
    in_features = scale_tiles.shape[1] * group_size
    pairs, chunks = -(-max(out_features, 0) // tiles_cuda.PAIR_OUTPUTS), -(-in_features // tiles_cuda.PAIR_INPUTS)
    if out_features < 0 or list(tiles.shape) != [pairs, chunks, bytes_of_pair]:
        raise ValueError(
            f"{op}: weight_tiles has shape {list(tiles.shape)}, expected {[pairs, chunks, bytes_of_pair]} from prepack"
            f" on a GPU for out_features = {out_features}, in_features = {in_features}, groups of {group_size}"
        )
    _check_contiguous(op, "weight_tiles", tiles)
    return in_features


def _check_int4(
    op: str, tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None, out_features: int, group_size: int
) -> int:
    """in_features of an int4 weight in tiles."""
    check_choice(op, "group_size", group_size, GROUP_SIZES)
    if _in_cuda_order(tiles):
        bytes_of_pair = tiles_cuda.pair_bytes(group_size, zero_tiles is not None)
        in_features = _check_pairs(op, tiles, scale_tiles, out_features, group_size, bytes_of_pair)
        groups = [0, in_features // group_size, TILE_OUTPUTS]
    else:
        in_features = _check_tiles(op, tiles, out_features)
        groups = [tiles.shape[0], in_features // group_size, TILE_OUTPUTS]
    if in_features % group_size:
        raise ValueError(f"{op}: group_size {group_size} does not divide in_features = {in_features}")
    check_part(op, "scale_tiles", scale_tiles, torch.float16, groups)
    if zero_tiles is not None:
        check_part(op, "zero_tiles", zero_tiles, torch.uint8, groups)
    return in_features


def check_part(op: str, name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    check_dtype(op, name, tensor, dtype)
    check_shape(op, name, tensor, shape)
    _check_contiguous(op, name, tensor)


def _check_dense(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
    if weight.ndim != 2:
        raise ValueError(f"{op}: weight has shape {list(weight.shape)}, expected [out, in]")
    check_part(op, "weight", weight, dtype, weight.shape)
    check_rows(op, x, bias, weight.shape[1], weight.shape[0])


def check_rows(op: str, x: Tensor, bias: Tensor | None, in_features: int, out_features: int) -> None:
    check_float(op, "x", x)
    if x.ndim == 0 or x.shape[-1] != in_features:
        raise ValueError(f"{op}: x has shape {list(x.shape)}, the weight takes in_features = {in_features}")
    if bias is not None:
        check_float(op, "bias", bias)
        check_shape(op, "bias", bias, (out_features,))


def check_float(op: str, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _FLOATS:
        raise TypeError(f"{op}: {name} is {tensor.dtype}, expected float32, bfloat16 or float16")


def check_dtype(op: str, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{op}: {name} is {tensor.dtype}, expected {dtype}")


def check_shape(op: str, name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    if list(tensor.shape) != list(shape):
        raise ValueError(f"{op}: {name} has shape {list(tensor.shape)}, expected {list(shape)}")


def check_same(op: str, name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.dtype != like.dtype:
        raise TypeError(f"{op}: {name} is {tensor.dtype}, {like_name} is {like.dtype}")
    check_shape(op, name, tensor, like.shape)


def _check_contiguous(op: str, name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"{op}: {name} of shape {list(tensor.shape)} is not contiguous (strides {list(tensor.stride())}); call "
            ".contiguous() once and keep the result"
        )


def check_choice(op: str, name: str, value: int, choices: Sequence[int]) -> None:
    if value not in choices:
        raise ValueError(f"{op}: {name} is {value}, choose one of {list(choices)}")
