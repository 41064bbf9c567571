"""Are the GPU's linear kernels right, the same for any number of tokens, and how near to the memory's speed?

    python -m eval.bench_gpu_linear --library build/libmlspec_cuda.so [--check] [--time] [--out FILE]

Checks compare with float64 over poisoned outputs and fresh random inputs; times are replays of a CUDA graph over
weights that rotate through more than the L2 cache holds. One JSON line a measurement.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import statistics
import sys
from pathlib import Path

import torch

from hf_mlspec.formats import activations, int4, mxfp4

TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 256, 257, 512, 640)
# inputs: one chunk and less, no multiple of 128, many; outputs: no multiple of the tile or of 4, one tile, several.
SHAPES = (
    (128, 128), (200, 160), (131, 96), (1000, 2080), (384, 4096), (2050, 1024), (8192, 512), (10000, 2048),
    (1024, 14336),
)  # fmt: skip
TIMED_TOKENS = (1, 4, 8, 16, 32, 64, 128, 256)
VARIANTS = (111, 112, 211, 212, 412, 422, 812, 822, 1622)  # of launch_variant
CALLS = 48  # of one graph


class Linear(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("tiles", "x", "x_scales", "bias", "out")]
        + [(name, ctypes.c_int64) for name in ("num_tokens", "in_features", "out_features", "x_scale_stride")]
        + [(name, ctypes.c_int32) for name in ("group_size", "has_zeros", "int8_activations", "exponent_shift")]
        + [("overlap", ctypes.c_int32)]
        + [(name, ctypes.c_int32) for name in ("variant", "ranks", "ring_bytes", "stages_ahead")]
        + [("stream", ctypes.c_void_p)]
    )


class Prepack(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("weight", "scale", "zero", "tiles")]
        + [(name, ctypes.c_int64) for name in ("in_features", "out_features")]
        + [(name, ctypes.c_int32) for name in ("group_size", "exponent_shift", "mxfp4")]
        + [("stream", ctypes.c_void_p)]
    )


@dataclasses.dataclass(frozen=True)
class Op:
    name: str
    function: str
    group_size: int = 0
    zeros: bool = False
    int8: bool = False

    @property
    def mxfp4(self) -> bool:
        return self.function == "mxfp4"


OPS = (
    Op("bf16", "bf16"),
    Op("mxfp4", "mxfp4", 32),
    *(Op(f"int4 g{g}{'z' if z else ''} a{8 if a else 16}", "int4", g, z, a)
      for g in (128, 64, 32) for z in (False, True) for a in (False, True)),
)


@dataclasses.dataclass
class Weight:
    op: Op
    out_features: int
    in_features: int
    saved: list[torch.Tensor]  # weight, scale, zero as they are on disk
    exponent_shift: int = 0
    tiles: torch.Tensor | None = None

    def dequantized(self) -> torch.Tensor:
        if self.op.function == "bf16":
            return self.saved[0].double()
        if self.op.mxfp4:
            return mxfp4.dequantize(self.saved[0], self.saved[1]).double()
        return int4.dequantize(*self.saved).double()


def random_weight(op: Op, out_features: int, in_features: int, large_scales: bool = False) -> Weight:
    shape = (out_features, in_features)
    if op.function == "bf16":
        return Weight(op, *shape, [torch.randn(shape, device="cuda", dtype=torch.bfloat16)])
    codes = torch.randint(0, 256, (out_features, in_features // 2), dtype=torch.uint8, device="cuda")
    groups = (out_features, in_features // op.group_size)
    if op.mxfp4:
        first = 150 if large_scales else 116
        scale = torch.randint(first, first + 9, groups, dtype=torch.uint8, device="cuda")
        return Weight(op, *shape, [codes, scale], max(0, int(scale.max()) - 128))
    scale = (torch.rand(groups, device="cuda") * 0.02 + 0.001).half()
    zeros = [torch.randint(0, 16, groups, dtype=torch.uint8, device="cuda")] if op.zeros else []
    return Weight(op, *shape, [codes, scale, *zeros])


class Kernels:
    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        for name in ("bf16_linear", "int4_linear", "mxfp4_linear", "prepack_tiles", "unprepack_tiles"):
            getattr(self.library, f"mlspec_cuda_{name}").restype = ctypes.c_char_p
        self.library.mlspec_cuda_tile_bytes.restype = ctypes.c_int64

    def call(self, name: str, arguments: ctypes.Structure) -> None:
        problem = getattr(self.library, f"mlspec_cuda_{name}")(ctypes.byref(arguments))
        if problem is not None:
            raise RuntimeError(f"{name}: {problem.decode()}")

    def _prepack(self, weight: Weight, saved: list[torch.Tensor]) -> Prepack:
        pointers = [t.data_ptr() for t in saved] + [None] * (3 - len(saved))
        return Prepack(*pointers, None if weight.tiles is None else weight.tiles.data_ptr(), weight.in_features,
                       weight.out_features, weight.op.group_size, weight.exponent_shift, weight.op.mxfp4,
                       torch.cuda.current_stream().cuda_stream)  # fmt: skip

    def prepack(self, weight: Weight) -> None:
        size = self.library.mlspec_cuda_tile_bytes(ctypes.byref(self._prepack(weight, weight.saved)))
        weight.tiles = torch.full((size,), 0xEE, dtype=torch.uint8, device="cuda")
        self.call("prepack_tiles", self._prepack(weight, weight.saved))

    def unprepack(self, weight: Weight) -> list[torch.Tensor]:
        back = [torch.full_like(t, 77) for t in weight.saved]
        self.call("unprepack_tiles", self._prepack(weight, back))
        return back

    def linear(
        self, weight: Weight, x: Activations, out: torch.Tensor, bias: torch.Tensor | None = None, **choices: int
    ) -> None:
        arguments = Linear(
            tiles=weight.tiles.data_ptr(), x=x.data.data_ptr(), out=out.data_ptr(), num_tokens=x.data.shape[0],
            bias=None if bias is None else bias.data_ptr(),
            in_features=weight.in_features, out_features=weight.out_features, group_size=weight.op.group_size,
            has_zeros=weight.op.zeros, int8_activations=weight.op.int8, exponent_shift=weight.exponent_shift,
            stream=torch.cuda.current_stream().cuda_stream, **choices,
        )  # fmt: skip
        if x.scales is not None:
            arguments.x_scales, arguments.x_scale_stride = x.scales.data_ptr(), x.scales.shape[1]
        self.call(f"{weight.op.function}_linear", arguments)


@dataclasses.dataclass
class Activations:
    """What a linear reads: bfloat16, or int8 codes (order 0 8 1 9 .. of every 16) and scales [groups, tokens]."""

    data: torch.Tensor
    scales: torch.Tensor | None
    values: torch.Tensor  # float64

    @staticmethod
    def of(op: Op, x: torch.Tensor) -> Activations:
        if not op.int8:
            return Activations(x, None, x.double())
        codes, scales = activations.quantize_rows(x, op.group_size, 8)
        tokens, size = x.shape
        groups = -(-size // 128) * (128 // op.group_size)
        padded = torch.zeros(groups, -(-tokens // 4) * 4, device=x.device)
        padded[: scales.shape[1], :tokens] = scales.T
        order = codes.view(tokens, -1, 2, 8).transpose(2, 3).reshape(tokens, size).contiguous()
        values = codes.double() * scales.double().repeat_interleave(op.group_size, 1)[:, :size]
        return Activations(order, padded, values)

    def first(self, tokens: int) -> Activations:
        scales = self.scales
        if scales is not None:
            scales = torch.nn.functional.pad(scales[:, :tokens], (0, -tokens % 4)).contiguous()
        return Activations(self.data[:tokens].contiguous(), scales, self.values[:tokens])


def require(condition: bool, text: str) -> None:
    if not condition:
        raise AssertionError(text)


def checked_call(
    kernels: Kernels, weight: Weight, x: Activations, bias: torch.Tensor | None, **choices: int
) -> torch.Tensor:
    """The result, after a look at the memory behind it."""
    tokens, guard = x.data.shape[0], 512
    memory = torch.full((tokens * weight.out_features + guard,), float("nan"), dtype=torch.bfloat16, device="cuda")
    kernels.linear(weight, x, memory, bias, **choices)
    torch.cuda.synchronize()
    require(bool(memory[-guard:].isnan().all()), "wrote behind the output")
    return memory[:-guard].view(tokens, weight.out_features)


def check(kernels: Kernels, op: Op, shapes=SHAPES, tokens=TOKENS) -> float:
    """The largest error over what one rounding and float32 sums allow (1 is the limit)."""
    worst = 0.0
    for number, (outs, ins) in enumerate(shapes):
        if op.group_size and ins % op.group_size:
            continue
        weight = random_weight(op, outs, ins, large_scales=number == 1)
        kernels.prepack(weight)
        for saved, back in zip(weight.saved, kernels.unprepack(weight), strict=True):
            require(torch.equal(saved, back), f"{op.name} {outs} x {ins}: unprepack(prepack(w)) != w")
        bias = torch.randn(outs, dtype=torch.bfloat16, device="cuda") if number % 2 else None
        x = Activations.of(op, torch.randn(max(tokens), ins, device="cuda", dtype=torch.bfloat16))
        w = weight.dequantized()
        exact, size = x.values @ w.T, x.values.abs() @ w.abs().T
        if bias is not None:
            exact, size = exact + bias.double(), size + bias.double().abs()
        reference = None
        for variant in (0, *VARIANTS):
            for count in sorted(tokens, reverse=True) if variant == 0 else (1, 9, 77):
                if variant == 1622 and op.function == "int4":
                    continue
                where = f"{op.name} {outs} x {ins}, {count} tokens, variant {variant}"
                out = checked_call(kernels, weight, x.first(count), bias, variant=variant, overlap=count % 2)
                require(bool(out.isfinite().all()), f"{where}: not finite")
                if reference is None:
                    reference = out
                limit = exact[:count].abs() * 2**-7.99 + size[:count] * 4e-6
                error = float(((out.double() - exact[:count]).abs() / limit).max())
                worst = max(worst, error)
                require(error <= 1, f"{where}: error {error:.3f} of the allowed")
                same = torch.equal(out.view(torch.int16), reference[:count].view(torch.int16))
                require(same, f"{where}: bits differ from {max(tokens)} tokens")
    return worst


def check_chain(kernels: Kernels, op: Op, size: int = 2048, layers: int = 8, repeats: int = 20) -> None:
    """Each call reads what the call in front of it writes: starting early must not read it early."""
    weights = [random_weight(op, size, size) for _ in range(layers)]
    for weight in weights:
        kernels.prepack(weight)
    for count in (1, 8, 16, 64, 256):
        x = torch.randn(count, size, device="cuda", dtype=torch.bfloat16)
        outs = torch.empty(layers, count, size, device="cuda", dtype=torch.bfloat16)
        results = []
        for overlap in (0, *[1] * repeats):
            outs.fill_(float("nan"))
            for i, weight in enumerate(weights):
                read = outs[i - 1] if i else x
                kernels.linear(weight, Activations(read, None, read), outs[i], overlap=overlap)
            torch.cuda.synchronize()
            results.append(outs.clone())
        where = f"{op.name} chain of {layers}, {count} tokens"
        require(bool(results[0].isfinite().all()), f"{where}: not finite")
        for result in results[1:]:
            require(torch.equal(result, results[0]), f"{where}: overlap changes the result")


def replay_us(calls: list) -> tuple[float, float]:
    """Median and smallest of 20 replays, microseconds a call."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            calls[i % len(calls)]()
    times = []
    for _ in range(23):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    return statistics.median(times[3:]), min(times[3:])


def read_bandwidth() -> float:
    """Bytes a second of torch's float32 sum over 4 GiB."""
    data = torch.ones(1 << 30, device="cuda")
    median, _ = replay_us([lambda: data.sum()])
    return data.numel() * 4 / median * 1e6


def time_op(
    kernels: Kernels, op: Op, size: tuple[int, int], tokens: tuple[int, ...], variants: list[dict], probe: float
) -> list[dict]:
    outs, ins = size
    first = random_weight(op, outs, ins)
    kernels.prepack(first)
    copies = max(2, -(-512 * 2**20 // first.tiles.numel()))
    weights = [dataclasses.replace(first, tiles=first.tiles.clone()) for _ in range(copies)]
    lines = []
    for count in tokens:
        x = Activations.of(op, torch.randn(count, ins, device="cuda", dtype=torch.bfloat16))
        out = torch.empty(count, outs, dtype=torch.bfloat16, device="cuda")
        for variant in variants:
            try:
                calls = [lambda w=w, v=variant, x=x, o=out: kernels.linear(w, x, o, **v) for w in weights]
                median, least = replay_us(calls)
            except RuntimeError as problem:
                print(op.name, variant, problem, flush=True)
                continue
            share = first.tiles.numel() / median * 1e6 / probe
            lines.append({"op": op.name, "out": outs, "in": ins, "tokens": count, **variant, "us": round(median, 2),
                          "least_us": round(least, 2), "share": round(share, 3)})  # fmt: skip
    return lines


def time_cublas(size: tuple[int, int], tokens: tuple[int, ...], probe: float) -> list[dict]:
    outs, ins = size
    weights = [torch.randn(outs, ins, device="cuda", dtype=torch.bfloat16) for _ in range(6)]
    lines = []
    for count in tokens:
        x = torch.randn(count, ins, device="cuda", dtype=torch.bfloat16)
        median, least = replay_us([lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in weights])
        share = outs * ins * 2 / median * 1e6 / probe
        lines.append({"op": "cublas", "out": outs, "in": ins, "tokens": count, "us": round(median, 2),
                      "least_us": round(least, 2), "share": round(share, 3)})  # fmt: skip
    return lines


def table(lines: list[dict], tokens: tuple[int, ...]) -> str:
    rows: dict[str, dict[int, str]] = {}
    for line in lines:
        keys = ("overlap", "variant", "ranks", "ring_bytes", "stages_ahead")
        variant = " ".join(f"{k}={line[k]}" for k in keys if k in line)
        name = f"{line['op']} {line['out']}x{line['in']} {variant}"
        rows.setdefault(name, {})[line["tokens"]] = f"{line['us']:.1f} ({line['share']:.2f})"
    width = max(map(len, rows))
    head = " ".join(f"{'M=' + str(t):>13}" for t in tokens)
    body = (f"{name:{width}} " + " ".join(f"{cells.get(t, '-'):>13}" for t in tokens) for name, cells in rows.items())
    return "\n".join([f"{'us (share of read bandwidth)':{width}} {head}", *body])


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--few", action="store_true", help="check few shapes and tokens: for a sanitizer")
    parser.add_argument("--check-size", help="check this one OUTxIN and few tokens: for a slower sanitizer")
    parser.add_argument("--ops", default="bf16,mxfp4,int4 g128 a16,int4 g128 a8", help="that are timed")
    parser.add_argument("--check-ops", default=",".join(op.name for op in OPS))
    parser.add_argument("--tokens", default=",".join(map(str, TIMED_TOKENS)))
    parser.add_argument("--sizes", default="8192x8192")
    parser.add_argument("--variants", default='[{"overlap": 0}, {"overlap": 1}]', help="JSON")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    a = parse_arguments(arguments)
    kernels = Kernels(a.library)
    by_name = {op.name: op for op in OPS}
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    failed = False
    cases = (SHAPES[1:3] + SHAPES[4:5], (1, 9, 33, 65, 130)) if a.few else (SHAPES, TOKENS)
    if a.check_size:
        cases = ((tuple(map(int, a.check_size.split("x"))),), (1, 9, 77))
    for name in a.check_ops.split(",") if a.check else ():
        try:
            print(f"check {name}: worst error {check(kernels, by_name[name], *cases):.3f} of the allowed", flush=True)
            if not by_name[name].int8 and not a.few and not a.check_size:
                check_chain(kernels, by_name[name])
        except AssertionError as problem:
            failed = True
            print(f"FAILED {problem}", flush=True)
    if a.time:
        probe = read_bandwidth()
        print(f"read bandwidth {probe / 1e12:.2f} TB/s", flush=True)
        tokens = tuple(map(int, a.tokens.split(",")))
        lines = []
        for text in a.sizes.split(","):
            size = tuple(map(int, text.split("x")))
            lines += time_cublas(size, tokens, probe)
            for name in a.ops.split(","):
                lines += time_op(kernels, by_name[name], size, tokens, json.loads(a.variants), probe)
        print(table(lines, tokens), flush=True)
        if a.out:
            a.out.write_text("".join(json.dumps({"read_bandwidth": probe, **line}) + "\n" for line in lines))
    sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
