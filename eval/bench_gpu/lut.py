"""How long do products of lookup-table planes take on the GPU, beside int4 on the same shapes in the same process?

Checked and timed as those of eval/bench_gpu/products.py. Weights of random planes and tables: 4 planes as they are
stored for themselves, and 8, 5, 4 and 3 of a weight of 8.
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
from hf_mlspec.formats import LutWeight
from hf_mlspec.formats.lut import table_columns

SHAPES = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096))  # of Llama-3-8B: gate|up, down, q|k|v, o
TOKENS = (1, 8, 32)
INT4 = f"int4 g{products.GROUP} a16"
WIDTHS = ((4, 4), (8, 8), (5, 8), (4, 8), (3, 8))  # read, stored
OVER_INT4 = 1.3  # of its time, where 4 planes are read


def lut(bench: Bench) -> Iterator[Finding]:
    """int4, then lookup-table planes, shape by shape; WrongResult at the end where one of them is wrong."""
    shapes, tokens = (((256, 256), (200, 384)), TOKENS[:2]) if bench.quick else (SHAPES, TOKENS)
    wrong: list[str] = []
    for shape in shapes:
        of_int4: dict[int, float] = {}
        for name, make in _made(shape, bench.device, products.rotation_bytes(bench.device)):
            bench.say(f"lut: {shape[0]} x {shape[1]}, {name}")
            try:
                for found in products.of_product(bench, make(), tokens):
                    yield _judged(found, of_int4, bench.quick)
            except Exception as reason:  # of any kind: told below, and the other products go on
                wrong.append(f"{shape[0]} x {shape[1]}, {name}: {reason}")
            bench.free()
    if wrong:
        raise WrongResult("; ".join(wrong))


def _judged(found: Finding, of_int4: dict[int, float], quick: bool) -> Finding:
    """With the target of four planes and, beside the microseconds, how many times int4's they are."""
    count = found.more["tokens"]
    if found.contender == INT4:
        of_int4[count] = found.value
    base = of_int4.get(count)
    four = found.contender.startswith("4 ") and base is not None and not quick
    more = {**found.more, "over_int4": None if base is None else found.value / base}
    return dataclasses.replace(found, group="lut", target=OVER_INT4 * base if four else None, more=more)


def _made(
    shape: tuple[int, int], device: torch.device, rotate: int
) -> list[tuple[str, Callable[[], Product]]]:
    int4 = next((name, make) for name, _, make in products.products(*shape, device) if name == INT4)
    return [int4, *((name_of(read, stored), lambda read=read, stored=stored: _lut(shape, device, rotate, read, stored))
                    for read, stored in WIDTHS)]  # fmt: skip


def name_of(read: int, stored: int) -> str:
    return f"{read} of {stored} planes with tables"


def _lut(shape: tuple[int, int], device: torch.device, rotate: int, read: int, stored: int) -> Product:
    least = min(read, stored, 3) if stored > 4 else stored
    planes = torch.randint(0, 256, (stored, shape[0], shape[1] // 8), dtype=torch.uint8, device=device)
    weight = LutWeight(planes, torch.randn(shape[0], table_columns(stored, least), device=device).half())
    nbytes = planes.nbytes * read // stored + shape[0] * 2**read * 2
    first = ops.prepack_lut(*weight.parts)
    tiles = [first, *(tuple(map(torch.clone, first)) for _ in range(products.copies_of(nbytes, rotate) - 1))]

    def run(x: Tensor, copy: int) -> Tensor:
        return ops.lut_linear(x, *tiles[copy], shape[0], num_planes=read)

    return Product(name_of(read, stored), nbytes, len(tiles), run, weight.dequantize(torch.bfloat16, read).float())
