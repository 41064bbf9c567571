"""Are the GPU's matrix products right, and how near to the memory's speed are they, beside what else is installed?

Every product is checked before it is timed: fresh random activations, its output memory poisoned by what was freed
before, its result against float64. Weights go round through more than twice the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.bench_gpu.findings import Bench, Finding
from eval.gpu_timing import time_rotating
from eval.peers.gemlite_linear import gemlite_mxfp4
from eval.peers.missing import MissingPeer
from hf_mlspec import ops
from hf_mlspec.formats import activations, int4, mxfp4, packing

GROUP = 128  # of int4 weights
CALLS = 48  # of one graph
ROUNDING = 2.0**-7.99  # relative: one rounding to bfloat16
SUMMING = 4e-6  # of the sum of absolute products: float32 sums in any order
PEER_ERROR = 0.25  # root mean square, relative: a peer may round 4 bits again, a misread weight costs 1 or more
FOUR_BITS = {1: 11.0, 4: 11.0, 8: 11.5, 16: 12.0, 32: 15.0, 64: 22.0}  # microseconds at 8192 x 8192 on an H200
TARGETS = {
    "mxfp4 a16": FOUR_BITS,
    f"int4 g{GROUP} a16": FOUR_BITS,
    f"int4 g{GROUP} a8": {1: 11.0, 4: 11.0, 8: 11.0, 16: 11.5, 32: 13.0, 64: 18.0},
    "bf16": {1: 37.0, 4: 37.0, 8: 37.0, 16: 38.0, 32: 40.0, 64: 44.0, 256: 75.0, 288: 80.0},
}
TOKENS = (1, 4, 8, 16, 32, 64, 256, 288)
SLOW_BEYOND = {f"torch int4 g{GROUP}": 64, "gemlite mxfp4": 64}  # tokens; beyond them a peer is ten times cuBLAS


@dataclass
class Product:
    """One way to multiply. run(x, copy) -> y bfloat16 ``[n, out]``; values(x): what it really multiplies, float64."""

    name: str
    nbytes: int
    copies: int
    run: Callable[[Tensor, int], Tensor]
    dense: Tensor  # float32 [out, in]: what its weight stands for
    values: Callable[[Tensor], Tensor] = Tensor.double
    ours: bool = True


class WrongResult(Exception):
    """A product whose result is not that of its weight; its text is one sentence."""


def linear(bench: Bench) -> Iterator[Finding]:
    """Every product at every number of tokens: right first, then timed.

    A peer that fails or is wrong takes no part; one of ours is told at the end, by WrongResult, and the others go on.
    """
    size, tokens = (256, TOKENS[:3]) if bench.quick else (8192, TOKENS)
    wrong: list[str] = []
    for name, ours, make in products(size, size, bench.device):
        bench.say(f"linear: {name}")
        try:
            yield from of_product(bench, make(), tokens)
        except Exception as reason:  # of any kind: a peer's, or told below
            if ours:
                wrong.append(f"{name}: {reason}")
            else:
                bench.missing[name] = f"{name}: {reason}"
        bench.free()
    if wrong:
        raise WrongResult("; ".join(wrong))


def of_product(bench: Bench, product: Product, tokens: tuple[int, ...]) -> Iterator[Finding]:
    for count in tokens:
        if count > SLOW_BEYOND.get(product.name, count):
            continue
        x = torch.randn(count, product.dense.shape[1], device=bench.device).to(torch.bfloat16)
        worst = error(product, x)
        if not worst <= 1:
            raise WrongResult(f"{count} tokens: {worst:.3g} times the error allowed")
        yield timed(bench, product, x, worst)


def timed(bench: Bench, product: Product, x: Tensor, worst: float) -> Finding:
    value = microseconds(product, x)
    target = None if bench.quick else TARGETS.get(product.name, {}).get(len(x)) if product.ours else None
    more = {"tokens": len(x), "error_of_allowed": worst, "weight_bytes": product.nbytes, "copies": product.copies,
            "size": list(product.dense.shape)}
    what = f"{product.dense.shape[0]} x {product.dense.shape[1]}, M = {len(x)}"
    return Finding("linear", what, product.name, value, "us", target,
                   share=product.nbytes / value * 1e6 / bench.probe, more=more)


def rotation_bytes(device: torch.device) -> int:
    """More than twice the L2 cache, and at least 512 MiB on a GPU."""
    if device.type != "cuda":
        return 0
    return max(2 * torch.cuda.get_device_properties(device).L2_cache_size, 512 << 20)


def products(
    out_features: int, in_features: int, device: torch.device
) -> list[tuple[str, bool, Callable[[], Product]]]:
    """Name of each product, whether it is ours, and what makes it: MissingPeer where one is not installed."""
    shape, rotate = (out_features, in_features), rotation_bytes(device)
    return [
        ("bf16", True, lambda: _bf16(shape, device, rotate, ours=True)),
        ("mxfp4 a16", True, lambda: _mxfp4(shape, device, rotate, 16)),
        ("mxfp4 a8", True, lambda: _mxfp4(shape, device, rotate, 8)),
        (f"int4 g{GROUP} a16", True, lambda: _int4(shape, device, rotate, 16)),
        (f"int4 g{GROUP} a8", True, lambda: _int4(shape, device, rotate, 8)),
        ("torch bf16", False, lambda: _bf16(shape, device, rotate, ours=False)),
        (f"torch int4 g{GROUP}", False, lambda: _torch_int4(shape, device, rotate)),
        ("gemlite mxfp4", False, lambda: _gemlite(shape, device, rotate)),
    ]


def error(product: Product, x: Tensor) -> float:
    """The largest error of ours over what rounding and float32 sums allow (1 is the limit); of a peer, its relative
    root mean square error over what is taken for another way to round."""
    poison(x, product.dense.shape[0])
    got = product.run(x, 0).double()
    values, weight = product.values(x), product.dense.double()
    exact = values @ weight.T
    if not product.ours:
        return float((got - exact).norm() / exact.norm()) / PEER_ERROR
    allowed = exact.abs() * ROUNDING + (values.abs() @ weight.abs().T) * SUMMING
    return float(((got - exact).abs() / allowed).nan_to_num(nan=torch.inf).max())


def poison(x: Tensor, out_features: int) -> None:
    """Leave NaN in the memory that the next result of this size will be given."""
    torch.full((x.shape[0], out_features), torch.nan, dtype=torch.bfloat16, device=x.device)


def microseconds(product: Product, x: Tensor) -> float:
    """Median of 20 replays, a call."""
    calls = [lambda copy=copy: product.run(x, copy) for copy in range(product.copies)]
    return time_rotating(calls, x.device, CALLS if x.is_cuda else 2).microseconds


def copies_of(nbytes: int, rotate: int) -> int:
    return max(2, -(-rotate // nbytes))


def _bf16(shape: tuple[int, int], device: torch.device, rotate: int, ours: bool) -> Product:
    weight = torch.randn(shape, device=device, dtype=torch.bfloat16)
    weights = [weight, *(weight.clone() for _ in range(copies_of(weight.nbytes, rotate) - 1))]
    linear = ops.bf16_linear if ours else torch.nn.functional.linear
    name = "bf16" if ours else "torch bf16"
    return Product(name, weight.nbytes, len(weights), lambda x, copy: linear(x, weights[copy]), weight.float(),
                   ours=ours)


def _mxfp4(shape: tuple[int, int], device: torch.device, rotate: int, bits: int) -> Product:
    codes, scale = mxfp4.quantize(torch.randn(shape, device=device))
    nbytes = codes.nbytes + scale.nbytes
    tiles = [ops.prepack_mxfp4(codes, scale) for _ in range(copies_of(nbytes, rotate))]
    return Product(f"mxfp4 a{bits}", nbytes, len(tiles),
                   lambda x, copy: ops.mxfp4_linear(x, *tiles[copy], shape[0], activation_bits=bits),
                   mxfp4.dequantize(codes, scale), _multiplied(bits, mxfp4.BLOCK))


def _int4(shape: tuple[int, int], device: torch.device, rotate: int, bits: int) -> Product:
    codes, scale, _ = int4.quantize(torch.randn(shape, device=device), GROUP)
    nbytes = codes.nbytes + scale.nbytes
    tiles = [ops.prepack_int4(codes, scale) for _ in range(copies_of(nbytes, rotate))]
    return Product(
        f"int4 g{GROUP} a{bits}", nbytes, len(tiles),
        lambda x, copy: ops.int4_linear(x, *tiles[copy], shape[0], group_size=GROUP, activation_bits=bits),
        int4.dequantize(codes, scale, None), _multiplied(bits, GROUP))


def _multiplied(bits: int, group: int) -> Callable[[Tensor], Tensor]:
    """What a linear with these activation bits multiplies: x itself, or its codes times their scales."""
    if bits == 16:
        return Tensor.double

    def values(x: Tensor) -> Tensor:
        codes, scales = activations.quantize_rows(x, group, bits)
        return codes.double() * scales.double().repeat_interleave(group, 1)[:, : x.shape[1]]

    return values


def _torch_int4(shape: tuple[int, int], device: torch.device, rotate: int) -> Product:
    """torch's int4 weight-only product, bfloat16 activations."""
    if device.type != "cuda":
        raise MissingPeer("its packing measured here is the one for CUDA")
    codes, scale, _ = int4.quantize(torch.randn(shape, device=device), GROUP)
    nibbles = packing.unpack_nibbles(codes)
    # Its bytes hold the first of two elements in the high nibble; ours in the low one.
    packed = torch._convert_weight_to_int4pack((nibbles[:, ::2] << 4 | nibbles[:, 1::2]).to(torch.uint8), 8)
    rounded = scale.to(torch.bfloat16)
    table = torch.stack((rounded.T, torch.zeros_like(rounded.T)), dim=-1).contiguous()  # [in / group, out, 2]
    nbytes = packed.nbytes + table.nbytes
    weights = [(packed.clone(), table.clone()) for _ in range(copies_of(nbytes, rotate))]
    dense = (nibbles.float() - 8) * rounded.float().repeat_interleave(GROUP, 1)
    return Product(f"torch int4 g{GROUP}", nbytes, len(weights),
                   lambda x, copy: torch._weight_int4pack_mm(x, weights[copy][0], GROUP, weights[copy][1]), dense,
                   ours=False)


def _gemlite(shape: tuple[int, int], device: torch.device, rotate: int) -> Product:
    weight = torch.randn(shape, device=device, dtype=torch.bfloat16)
    dense = mxfp4.dequantize(*mxfp4.quantize(weight.float()))
    run, nbytes, copies = gemlite_mxfp4(dense.to(torch.bfloat16), lambda one: copies_of(one, rotate))
    return Product("gemlite mxfp4", nbytes, copies, run, dense, ours=False)
