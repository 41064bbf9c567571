"""How fast are the products of nested weights and of bit-planes on the GPU, and does their time follow what they read?

Checked and timed as those of eval/bench_gpu/products.py, BF16 and MXFP4 beside them in the same process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from eval.bench_gpu import products
from eval.bench_gpu.findings import Bench, Finding
from eval.bench_gpu.products import Product, WrongResult
from hf_mlspec import ops
from hf_mlspec.formats import nested
from hf_mlspec.formats import planes as bitplanes
from hf_mlspec.formats.nested import codebooks

PLANES, GROUP = 8, 128
COUNTS = (8, 4, 3, 2)  # all planes first: what fewer may take follows from their time
TOKENS = (1, 4, 8, 16, 32, 64)
DRAFT, EXACT = 11.5, 40.0  # microseconds at 8192 x 8192 on an H200, up to 16 tokens
MOST_TOKENS = 16  # of these requirements
OF_THEIR_SHARE, AND_US = 1.15, 3.0  # b planes: 1.15 b / 8 of the time of all eight, and 3 microseconds


def formats(bench: Bench) -> Iterator[Finding]:
    """BF16, MXFP4, the nested draft and exact, then planes; WrongResult at the end where one of them is wrong."""
    size, tokens = (256, TOKENS[:3]) if bench.quick else (8192, TOKENS)
    wrong, eight = [], {}
    for name, make in _made((size, size), bench.device, products.rotation_bytes(bench.device)):
        bench.say(f"formats: {name}")
        try:
            for found in products.of_product(bench, make(), tokens):
                count = found.more["tokens"]
                if name == _planes_name(PLANES):
                    eight[count] = found.value
                target = None if bench.quick else _target(name, count, eight.get(count))
                yield dataclasses.replace(found, group="formats", target=target)
        except Exception as reason:  # of any kind: told below, and the other products go on
            wrong.append(f"{name}: {reason}")
        bench.free()
    if wrong:
        raise WrongResult("; ".join(wrong))


def _target(name: str, tokens: int, of_eight: float | None) -> float | None:
    if tokens > MOST_TOKENS:
        return None
    planes = {_planes_name(count): count for count in COUNTS if count < PLANES}
    if name in planes and of_eight is not None:
        return OF_THEIR_SHARE * planes[name] / PLANES * of_eight + AND_US
    return {"nested draft a16": DRAFT, "nested exact": EXACT}.get(name)


def _made(
    shape: tuple[int, int], device: torch.device, rotate: int
) -> list[tuple[str, Callable[[], Product]]]:
    kept = {name: make for name, _, make in products.products(*shape, device) if name in ("bf16", "mxfp4 a16")}
    return [
        *kept.items(),
        ("nested draft a16", lambda: _nested(shape, device, rotate, 4)),
        ("nested exact", lambda: _nested(shape, device, rotate, 16)),
        *((_planes_name(count), lambda count=count: _planes(shape, device, rotate, count)) for count in COUNTS),
    ]


def _planes_name(count: int) -> str:
    return f"{count} of {PLANES} planes"


def _nested(shape: tuple[int, int], device: torch.device, rotate: int, bits: int) -> Product:
    weight = torch.randn(shape, device=device).to(torch.bfloat16)
    weight[weight.abs() < 2.0**-20] = 0.5  # no escapes: their rows are another product
    codebook = codebooks.codebook_of("lloyd_max", device)
    parts = nested.split(weight, codebook)
    read = (parts.packed, parts.scale) if bits == 4 else (parts.packed, parts.scale, parts.low, parts.high)
    nbytes = sum(part.nbytes for part in read)
    tiles = [ops.prepack_nested(*parts[:4]) for _ in range(products.copies_of(nbytes, rotate))]
    dense = weight.float() if bits == 16 else nested.dequantize_draft(parts.packed, parts.scale, codebook)

    def run(x: Tensor, copy: int) -> Tensor:
        return ops.nested_linear(x, *tiles[copy], codebook, shape[0], weight_bits=bits)

    return Product("nested exact" if bits == 16 else "nested draft a16", nbytes, len(tiles), run, dense)


def _planes(shape: tuple[int, int], device: torch.device, rotate: int, count: int) -> Product:
    parts = bitplanes.quantize(torch.randn(shape, device=device), PLANES, GROUP)
    nbytes = parts.planes.nbytes * count // PLANES + parts.scale.nbytes
    tiles = [ops.prepack_planes(parts.planes, parts.scale) for _ in range(products.copies_of(nbytes, rotate))]
    dense = bitplanes.dequantize(parts.planes, parts.scale, parts.zero_doubled, count)

    def run(x: Tensor, copy: int) -> Tensor:
        return ops.bitplane_linear(x, *tiles[copy], shape[0], group_size=GROUP, zero_doubled=parts.zero_doubled,
                                   num_planes=count)

    return Product(_planes_name(count), nbytes, len(tiles), run, dense)
