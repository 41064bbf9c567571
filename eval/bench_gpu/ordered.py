"""What does an order of inputs (act-order) cost a step on the GPU, over the same int4 weights without one?

Both steps are captured and replayed in turn, so that what else the machine does falls on both.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from eval.bench_gpu.findings import Bench, Finding
from eval.bench_gpu.step import KEPT, Case, Step
from eval.gpu_timing import time_each
from eval.random_packed import ordered as with_orders
from eval.random_packed import random_int4_model
from hf_mlspec.engines.cuda.decoder import CudaDecoder

CASES = (Case("batch 1", 1, 1, 1.10), Case("batch 8", 8, 1, 1.10))  # targets: over the step without an order
TURNS, EACH = 9, 5


def ordered(bench: Bench) -> Iterator[Finding]:
    """Times of a step with an order over those without."""
    shape, kept = ("tiny", 24) if bench.quick else ("llama-3-8b", KEPT)
    model = random_int4_model(shape, bench.device)
    bench.say(f"ordered: {shape} made")
    plain = CudaDecoder(model)
    steps = [Step(plain, case, kept) for case in CASES]  # their tensors are those of the graphs
    replays = [one.captured() for one in steps]
    decoder = CudaDecoder(with_orders(model))
    for case, without in zip(CASES, replays, strict=True):
        ordered_step, ratios, times = Step(decoder, case, kept), [], []
        with_order = ordered_step.captured()
        for _ in range(TURNS):
            before = time_each(without, bench.device, EACH).median
            times.append(time_each(with_order, bench.device, EACH).median)
            ratios.append(times[-1] / before)
        more = {"least": min(ratios), "most": max(ratios), "ms_of_the_graph": statistics.median(times) * 1e3}
        yield Finding("ordered", f"{shape}, {case.name}", "with an order over without", statistics.median(ratios), "",
                      None if bench.quick else case.target, more=more)
