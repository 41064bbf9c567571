"""In which order do the CUDA kernels read a weight of bit-planes? A permutation of what is on disk; nothing is lost.

    plane_tiles  uint8 [ceil(out / 128), ceil(in / 128), 2048 B]: of a pair of tiles, plane after plane [128
                 outputs][16 bytes of 8 inputs]
    scale_tiles  float16 [ceil(out / 128), in / group, 128]

Beyond the last output or input stand zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .tiles_cuda import PAIR_INPUTS, PAIR_OUTPUTS

PLANE_BYTES = PAIR_OUTPUTS * PAIR_INPUTS // 8


def is_packed(plane_tiles: Tensor) -> bool:
    """Whether a weight is in these tiles, not in those of the CPU, which have four axes."""
    return plane_tiles.ndim == 3


def stored_planes(plane_tiles: Tensor) -> int:
    """Planes of a weight in these tiles."""
    return plane_tiles.shape[2] // PLANE_BYTES


def shapes(out_features: int, in_features: int, num_planes: int, group_size: int) -> tuple[list[int], list[int]]:
    """Of plane_tiles and scale_tiles."""
    pairs, chunks = -(-out_features // PAIR_OUTPUTS), -(-in_features // PAIR_INPUTS)
    return [pairs, chunks, num_planes * PLANE_BYTES], [pairs, in_features // group_size, PAIR_OUTPUTS]


def in_features(plane_tiles: Tensor, scale_tiles: Tensor, group_size: int) -> int:
    """Of a weight in these tiles."""
    return scale_tiles.shape[1] * group_size


def pack(planes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Planes uint8 ``[B, out, in / 8]``, float16 ``[out, in / group]`` -> plane_tiles, scale_tiles."""
    missing = (0, -planes.shape[2] % (PAIR_INPUTS // 8), 0, -planes.shape[1] % PAIR_OUTPUTS)
    padded = torch.nn.functional.pad(planes, missing)
    chunks = padded.shape[2] * 8 // PAIR_INPUTS
    tiles = padded.view(len(planes), -1, PAIR_OUTPUTS, chunks, PAIR_INPUTS // 8).permute(1, 3, 0, 2, 4)
    scales = torch.nn.functional.pad(scale, (0, 0, 0, -len(scale) % PAIR_OUTPUTS))
    return tiles.flatten(2), scales.view(-1, PAIR_OUTPUTS, scale.shape[1]).transpose(1, 2).contiguous()


def unpack(plane_tiles: Tensor, scale_tiles: Tensor, out_features: int) -> tuple[Tensor, Tensor]:
    """The inverse of ``pack``, bit for bit."""
    tiles = plane_tiles.unflatten(-1, (-1, PAIR_OUTPUTS, PAIR_INPUTS // 8)).permute(2, 0, 3, 1, 4)
    planes = tiles.flatten(3).flatten(1, 2)[:, :out_features]
    scale = scale_tiles.transpose(1, 2).flatten(0, 1)[:out_features].contiguous()
    size = planes.shape[2] * 8
    groups = next(g for g in (32, 64, 128) if -(-scale.shape[1] * g // PAIR_INPUTS) * PAIR_INPUTS == size)
    return planes[:, :, : scale.shape[1] * groups // 8].contiguous(), scale
