"""How do 4-bit codes share a byte?

    byte i of a row:   bits 7..4 = code 2i+1 | bits 3..0 = code 2i          (low nibble first)

Example: codes 1, 2, 3, 10 -> bytes 0x21, 0xA3. The same order as gpt-oss, compressed-tensors and libxsmm's row-major
files; GGUF differs (it pairs element j with j + 16 of a block).
"""

from __future__ import annotations

import torch

LARGEST_CODE = 15


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 ``[..., n]`` -> uint8 bytes ``[..., n / 2]``; ValueError when n is odd."""
    _require_uint8("codes", codes)
    if codes.shape[-1] % 2:
        raise ValueError(
            f"pack_nibbles: the last axis holds {codes.shape[-1]} codes, two share a byte: pad it to an even number"
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 bytes ``[..., n / 2]`` -> uint8 codes 0..15 ``[..., n]``."""
    _require_uint8("packed", packed)
    return torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(-2)


def _require_uint8(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype != torch.uint8:
        raise TypeError(f"{name} is {tensor.dtype}, nibbles are packed in torch.uint8")
    if tensor.ndim == 0:
        raise ValueError(f"{name} is a scalar, it must have at least one axis")
