"""How long does attention over a layer's bfloat16, int8 and int4 keys and values take, at what share of the bandwidth?

One layer of the Llama-3-8B shape. Layers take turns, so that no cache of the GPU holds what is read. The result over
codes is compared first with float64 over what they stand for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.bench_gpu.findings import Bench, Finding
from eval.bench_gpu.products import WrongResult
from eval.gpu_timing import time_rotating
from hf_mlspec import ops
from hf_mlspec.formats import CACHE_FORMATS

HEADS, KV_HEADS, DIM = 32, 8, 128
# Rows, tokens of each, slots in front of them; the last one is a chunk of a prompt.
CASES = ((1, 1, 8192), (1, 9, 8192), (1, 1, 32768), (1, 9, 32768), (8, 1, 8192), (8, 9, 8192), (32, 1, 2048),
         (32, 1, 8192), (1, 2048, 6144))  # fmt: skip
QUICK = ((2, 3, 70),)
READ = 1 << 29  # bytes of all layers that take turns, ten times what a GPU's cache holds
CALLS = 24  # in one graph
DECODED = 64  # tokens of a call up to which it is bound by memory, so that a share of its speed says something


@dataclass(frozen=True)
class Layer:
    """Operands of one call; keys and values in one format."""

    q: Tensor
    keys: Tensor
    values: Tensor
    starts: Tensor
    counts: Tensor

    def attend(self) -> Tensor:
        rule = DIM**-0.5, 0, 0.0, 0
        return ops.ragged_attention_rows(self.q, self.keys, self.values, self.starts, self.counts, *rule)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


def attention(bench: Bench) -> Iterator[Finding]:
    """Microseconds of a layer, bf16 and then each format; WrongResult where a result is not what codes stand for."""
    for batch, width, context in QUICK if bench.quick else CASES:
        what = f"{batch} x {width} at {context}"
        for word in ("bf16", *(word for word, record in CACHE_FORMATS.items() if record.on_gpus)):
            layers = made(batch, width, context, word, bench.device, 0 if bench.quick else READ)
            if word != "bf16":
                require_right(layers[0], word, what)
            found = time_rotating([one.attend for one in layers], bench.device, 2 if bench.quick else CALLS)
            share = layers[0].nbytes / found.median / bench.probe if width <= DECODED else None
            more = {"bytes": layers[0].nbytes, "least": found.least * 1e6}
            yield Finding("attention", what, word, found.microseconds, "us", share=share, more=more)
            del layers
            bench.free()


def made(batch: int, width: int, context: int, word: str, device: torch.device, read: int) -> list[Layer]:
    """Layers of random keys and values, as many as `read` bytes of bfloat16 are, two at least."""
    slots = context + width - (context + width) % -4
    shape = batch, KV_HEADS, slots, DIM
    count = max(2, -(-read // (4 * batch * KV_HEADS * slots * DIM)))
    lengths = [torch.full((batch,), n, dtype=torch.int32, device=device) for n in (context, width)]
    layers = []
    for seed in range(count):
        random = torch.Generator(device).manual_seed(seed)
        q = torch.randn(batch, width, HEADS, DIM, generator=random, device=device).bfloat16()
        lanes = [torch.randn(shape, generator=random, device=device).bfloat16() for _ in range(2)]
        if word != "bf16":
            lanes = [CACHE_FORMATS[word].quantize(lane) for lane in lanes]
        layers.append(Layer(q, *lanes, *lengths))
    return layers


def require_right(layer: Layer, word: str, what: str) -> None:
    """The last token of the first row, beside float64."""
    found, position = layer.attend()[0, -1].double(), int(layer.starts[0]) + layer.q.shape[1]
    lanes = [CACHE_FORMATS[word].dequantize(lane[0, :, :position], torch.float32).double()
             for lane in (layer.keys, layer.values)]  # fmt: skip
    keys, values = (lane.repeat_interleave(HEADS // KV_HEADS, 0) for lane in lanes)
    weights = (torch.einsum("hd,hsd->hs", layer.q[0, -1].double(), keys) * DIM**-0.5).softmax(-1)
    expected, size = (torch.einsum("hs,hsd->hd", weights, one) for one in (values, values.abs()))
    error = ((found - expected).abs() / (2.0**-8 * expected.abs() + 2.0**-7 * size + 1e-6)).max()
    if not error <= 1:
        raise WrongResult(f"attention over {word}, {what}: {float(error):.2f} of the error that is allowed")
