"""Are the GPU's linear kernels right, and the same for any number of tokens, engine and way to be launched?

Against float64, over poisoned outputs with a guard behind them and fresh random inputs; activations against their
formula.
"""

from __future__ import annotations

import torch

from hf_mlspec.formats import activations

from .calls import OPS, Activations, Kernels, Op, Weight, expected_activations, random_saved

TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 144, 256, 257, 288, 300, 512, 640)
FEW_TOKENS = (1, 9, 17, 64, 65, 130, 288, 300)
# inputs: a chunk and less, no multiple of 64 or 128, many; outputs: no multiple of the tile or of 4, one tile, more;
# 4096 x 2048: clusters of 3 (4 bits); 17000: more tiles than blocks run at once, with whole turns of the ring and not.
SHAPES = (
    (128, 128), (200, 160), (131, 96), (1000, 2080), (384, 4096), (2050, 1024), (8192, 512), (10000, 2048),
    (1024, 14336), (4096, 2048), (17000, 1536), (17100, 640), (136, 4096),
)  # fmt: skip
FEW_SHAPES = (SHAPES[1], SHAPES[3], SHAPES[9], SHAPES[10])
BF16 = OPS[0]
BF16_SHAPES = ((77, 8), (131, 72), (1000, 2088), (4104, 1096))
VARIANTS = {
    "bf16": (112, 212, 412, 822, 1622, 3222, 3622),
    "mxfp4": (111, 113, 211, 212, 412, 822, 1622),
    "int4": (111, 113, 211, 212, 412, 822),
    "nested": (111, 113, 211, 212, 412, 822, 1622, 3222, 3622),
}
OF_EXACT_ALONE, OF_DRAFT_ALONE = (3222, 3622), (113, 212)  # of nested weights


def require(condition: bool, text: str) -> None:
    if not condition:
        raise AssertionError(text)


def checked_call(
    kernels: Kernels, weight: Weight, x: torch.Tensor, bias: torch.Tensor | None, **choices: int
) -> torch.Tensor:
    """The result, after a look at the memory behind it."""
    tokens, guard = x.shape[0], 512
    memory = torch.full((tokens * weight.out_features + guard,), float("nan"), dtype=torch.bfloat16, device="cuda")
    kernels.linear(weight, kernels.activations(weight.op, x), memory, bias, **choices)
    torch.cuda.synchronize()
    require(bool(memory[-guard:].isnan().all()), "wrote behind the output")
    return memory[:-guard].view(tokens, weight.out_features)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.view(integers), b.view(integers))


def random_bias(number: int, outs: int) -> torch.Tensor | None:
    dtype = (None, torch.bfloat16, torch.float32)[number % 3]
    return None if dtype is None else torch.randn(outs, dtype=dtype, device="cuda")


def has_variant(op: Op, variant: int) -> bool:
    """16 tokens of 4-bit weights: 211 with 16-bit activations, 212 with integers."""
    if op.function == "bf16":
        return True
    if op.weight_bits == 16:
        return variant not in OF_DRAFT_ALONE
    if variant in OF_EXACT_ALONE:
        return False
    return variant not in (211, 1622) if op.bits < 16 else variant != 212


def check_shape(kernels: Kernels, op: Op, number: int, outs: int, ins: int, tokens: tuple[int, ...]) -> float:
    weight = kernels.prepack(op, random_saved(op, outs, ins, large_scales=number % 4 == 1), ins)
    if op.function != "bf16":
        for saved, back in zip(weight.saved, kernels.unprepack(weight), strict=True):
            require(torch.equal(saved, back), f"{op.name} {outs} x {ins}: unprepack(prepack(w)) != w")
    bias = random_bias(number, outs)
    x = torch.randn(max(tokens), ins, device="cuda", dtype=torch.bfloat16)
    expected, values = expected_activations(op, x)
    given = kernels.activations(op, x)
    shape = f"{op.name} {outs} x {ins}"
    require(same_bits(given.data, expected.data), f"{shape}: codes differ from the formula's")
    if given.scales is not None:
        require(same_bits(given.scales, expected.scales), f"{shape}: scales differ from the formula's")
    w = weight.dequantized()
    exact, size = values @ w.T, values.abs() @ w.abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    cases = [(0, count) for count in sorted(tokens, reverse=True)]
    cases += [(v, count) for v in VARIANTS[op.function] if has_variant(op, v) for count in (1, 9, 77)]
    worst, reference = 0.0, None
    if op.weight_bits == 16:  # the bits of bfloat16
        plain = Weight(BF16, outs, ins, [], w.bfloat16())
        reference = checked_call(kernels, plain, x[: max(tokens)], bias)
    for variant, count in cases:
        where = f"{shape}, {count} tokens, variant {variant}"
        out = checked_call(kernels, weight, x[:count], bias, variant=variant, overlap=count % 2)
        require(bool(out.isfinite().all()), f"{where}: not finite")
        reference = out if reference is None else reference
        limit = exact[:count].abs() * 2**-7.99 + size[:count] * 4e-6
        error = float(((out.double() - exact[:count]).abs() / limit).max())
        worst = max(worst, error)
        require(error <= 1, f"{where}: error {error:.3f} of the allowed")
        require(same_bits(out, reference[:count]), f"{where}: bits differ from {max(tokens)} tokens")
    return worst


def check(kernels: Kernels, op: Op, shapes=SHAPES, tokens=TOKENS) -> float:
    """The largest error over what one rounding and float32 sums allow (1 is the limit)."""
    shapes = (*shapes, *BF16_SHAPES) if op.function == "bf16" and len(shapes) > 1 else shapes
    return max(
        check_shape(kernels, op, number, outs, ins, tokens)
        for number, (outs, ins) in enumerate(shapes)
        if not op.group_size or ins % op.group_size == 0
    )


def run_chain(
    kernels: Kernels, weights: list[Weight], buffers: list[Activations], outs: torch.Tensor, overlap: int
) -> None:
    """outs[i + 1] = weights[i] outs[i]; every call reads what the call in front of it wrote."""
    for i, weight in enumerate(weights):
        read = Activations(outs[i])
        if weight.op.bits != 16:
            read = buffers[i]
            kernels.quantize(weight.op, outs[i], read, overlap)
        kernels.linear(weight, read, outs[i + 1], overlap=overlap)


def check_chain(kernels: Kernels, op: Op, size: int = 2048, layers: int = 8, repeats: int = 20) -> None:
    """Starting before the kernel in front has written must not read it early, launched one by one or from a graph."""
    weights = [kernels.prepack(op, random_saved(op, size, size), size) for _ in range(layers)]
    for count in (1, 8, 16, 64, 256):
        outs = torch.empty(layers + 1, count, size, device="cuda", dtype=torch.bfloat16)
        outs[0] = torch.randn(count, size, device="cuda")
        buffers = [kernels.empty_activations(op, count, size) for _ in weights]
        run_chain(kernels, weights, buffers, outs, 0)
        torch.cuda.synchronize()
        expected = outs.clone()
        where = f"{op.name} chain of {layers}, {count} tokens"
        require(bool(expected.isfinite().all()), f"{where}: not finite")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run_chain(kernels, weights, buffers, outs, 1)
        for repeat in range(repeats):
            outs[1:].fill_(float("nan"))
            if repeat % 2:
                graph.replay()
            else:
                run_chain(kernels, weights, buffers, outs, 1)
            torch.cuda.synchronize()
            require(same_bits(outs, expected), f"{where}: overlap changes the result")


def check_quantize(kernels: Kernels) -> None:
    """Rows in their own order: special values, short groups, every group size, both numbers of bits."""
    for size in (5, 32, 100, 2048, 4104):
        x = torch.randn(37, size, dtype=torch.bfloat16) * torch.logspace(-30, 30, 37).unsqueeze(1).bfloat16()
        x[3], x[4, 0], x[5, -1], x[6, size // 2], x[7] = 0.0, float("nan"), float("inf"), float("-inf"), 1e-38
        x[8, :2] = torch.tensor([-0.0, 3e38]).bfloat16()
        for group_size in (32, 64, 128):
            for bits in (8, 4):
                expected = activations.quantize_rows(x, group_size, bits)
                given = kernels.quantize_plain(x.cuda(), group_size, bits)
                for name, a, b in zip(("codes", "scales"), given, expected, strict=True):
                    same = torch.equal(a.cpu().nan_to_num(-1.0), b.nan_to_num(-1.0))
                    require(same, f"quantize_rows {size} wide, groups of {group_size}, {bits} bits: {name} differ")
