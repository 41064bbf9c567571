"""How long do the GPU's linear kernels take, alone and as the linears of a decoder's step?

Replays of a CUDA graph over weights that rotate through more than the L2 cache holds: medians, microseconds a call.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from .calls import Kernels, Op, Weight, random_saved

CALLS = 48  # of one graph
LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # q|k|v, o, gate|up, down: [out, in]
LLAMA_8B_HEAD, LLAMA_8B_LAYERS = (128256, 4096), 32


def replay_us(record: Callable[[], None], repeats: int = 20) -> tuple[float, float]:
    """Median and least time of a graph of what ``record`` enqueues, microseconds."""
    record()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        record()
    times = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times[3:]), min(times[3:])


def calls_us(calls: list[Callable[[], None]]) -> tuple[float, float]:
    """Microseconds of one call, where ``calls`` take turns."""

    def record() -> None:
        for i in range(CALLS):
            calls[i % len(calls)]()

    median, least = replay_us(record)
    return median / CALLS, least / CALLS


def read_bandwidth() -> float:
    """Bytes a second of torch's float32 sum over 4 GiB."""
    data = torch.ones(1 << 30, device="cuda")
    median, _ = calls_us([lambda: data.sum()])
    return data.numel() * 4 / median * 1e6


def weight_bytes(weight: Weight) -> int:
    more = weight.more.numel() if weight.op.weight_bits == 16 else 0
    return weight.tiles.numel() * weight.tiles.element_size() + more


def time_op(
    kernels: Kernels, op: Op, size: tuple[int, int], tokens: tuple[int, ...], variants: list[dict], probe: float
) -> list[dict]:
    outs, ins = size
    first = kernels.prepack(op, random_saved(op, outs, ins), ins)
    weights = [first.copy() for _ in range(max(2, -(-512 * 2**20 // weight_bytes(first))))]
    lines = []
    for count in tokens:
        x = kernels.activations(op, torch.randn(count, ins, device="cuda", dtype=torch.bfloat16))
        out = torch.empty(count, outs, dtype=torch.bfloat16, device="cuda")
        for variant in variants:
            calls = [lambda w=w, v=variant, x=x, o=out: kernels.linear(w, x, o, **v) for w in weights]
            try:
                median, least = calls_us(calls)
            except RuntimeError as problem:
                print(op.name, variant, problem, flush=True)
                continue
            share = weight_bytes(first) / median * 1e6 / probe
            lines.append({"op": op.name, "out": outs, "in": ins, "tokens": count, **variant, "us": round(median, 2),
                          "least_us": round(least, 2), "share": round(share, 3)})  # fmt: skip
    return lines


def time_cublas(size: tuple[int, int], tokens: tuple[int, ...], probe: float) -> list[dict]:
    outs, ins = size
    weights = [torch.randn(outs, ins, device="cuda", dtype=torch.bfloat16) for _ in range(6)]
    lines = []
    for count in tokens:
        x = torch.randn(count, ins, device="cuda", dtype=torch.bfloat16)
        median, least = calls_us([lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in weights])
        share = outs * ins * 2 / median * 1e6 / probe
        lines.append({"op": "cublas", "out": outs, "in": ins, "tokens": count, "us": round(median, 2),
                      "least_us": round(least, 2), "share": round(share, 3)})  # fmt: skip
    return lines


class Step:
    """The linears of a Llama-3-8B step over weights of their own, with small kernels between them or not."""

    def __init__(self, kernels: Kernels, op: Op) -> None:
        self.kernels, self.op = kernels, op
        saved = {size: random_saved(op, *size) for size in (*LLAMA_8B, LLAMA_8B_HEAD)}
        layer = [kernels.prepack(op, saved[size], size[1]) for size in LLAMA_8B]
        self.layers = [[weight.copy() for weight in layer] for _ in range(LLAMA_8B_LAYERS)]
        self.head = kernels.prepack(op, saved[LLAMA_8B_HEAD], LLAMA_8B_HEAD[1])

    def milliseconds(self, tokens: int, small: bool, linears: bool = True, **choices: int) -> float:
        """small: one kernel in front of q|k|v, two in front of o, one in front of gate|up, down and the head."""
        x = {ins: torch.randn(tokens, ins, device="cuda", dtype=torch.bfloat16) for ins in (4096, 14336)}
        read = {ins: self.kernels.activations(self.op, value) for ins, value in x.items()}
        out = torch.empty(tokens * LLAMA_8B_HEAD[0], dtype=torch.bfloat16, device="cuda")
        between_op = Op("between", "int4", 128, bits=8)
        between = {ins: self.kernels.empty_activations(between_op, tokens, ins) for ins in x}

        def call(weight: Weight, kernels_before: int) -> None:
            for _ in range(kernels_before if small else 0):
                self.kernels.quantize(between_op, x[weight.in_features], between[weight.in_features], 1)
            if linears:
                self.kernels.linear(weight, read[weight.in_features], out, overlap=1, **choices)

        def record() -> None:
            for layer in self.layers:
                for weight, before in zip(layer, (1, 2, 1, 1), strict=True):
                    call(weight, before)
            call(self.head, 1)

        return replay_us(record)[0] / 1000


def time_step(kernels: Kernels, op: Op, tokens: tuple[int, ...], choices: list[dict]) -> list[dict]:
    step = Step(kernels, op)
    lines = []
    for count in tokens:
        only = round(step.milliseconds(count, True, linears=False), 3)
        for choice in choices:
            alone, both = (round(step.milliseconds(count, small, **choice), 3) for small in (False, True))
            lines.append({"op": op.name, "step": "llama 8b", "tokens": count, **choice, "linears_ms": alone,
                          "with_small_kernels_ms": both, "small_kernels_ms": only})  # fmt: skip
            print(lines[-1], flush=True)
    return lines
