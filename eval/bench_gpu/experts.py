"""How long is a captured step of a mixture of experts, beside what reading its active weights takes, and stock's step?

Steps are those of eval/bench_gpu/step.py. Of a large shape a few layers are made and timed, and fewer of the same:
what a layer takes is the slope, the step of all layers is computed from both and says so. Active bytes: everything
but the experts, and of these as many as uniform routing sends the rows of a batch to. A mixture in gpt-oss's form is
timed as its files have it, too: experts in MXFP4 at 16 activation bits, all else as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

import hf_mlspec
from eval.bench_gpu.findings import Bench, Finding
from eval.bench_gpu.step import KEPT, Case, Step, WrongStep, cache_bytes, read_bytes
from eval.bench_gpu.stock import eager_step
from eval.gpu_timing import time_each
from eval.targets import GPT_OSS, MIXTURES, random_model
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.engines.rows import new_kv
from hf_mlspec.nn.expert_modules import is_experts
from hf_mlspec.nn.experts import PackedExperts
from hf_mlspec.nn.switch import PrecisionSwitch

BATCHES = (1, 8, 32)
PROMPT = 2048
STOCK_WAYS = ("batched_mm", "grouped_mm")


@dataclass(frozen=True)
class Shape:
    """layers: that are made, fewer: of a second timing; 0: all are made. targets: milliseconds at batch 1 in BF16 and
    as an MXFP4 cast, or of the MXFP4 of its own files, of all layers."""

    name: str
    layers: int = 0
    fewer: int = 0
    targets: tuple[float | None, float | None] = (None, None)


SHAPES = (Shape("moe-844m"), Shape("qwen3-30b-a3b", 12, 4, (3.3, 2.1)), Shape("gpt-oss-20b", 8, 4, (None, 2.0)),
          Shape("gpt-oss-120b", 6, 3, (None, 3.0)))  # fmt: skip
QUICK = (Shape("moe-tiny", 2, 1), Shape("gpt-oss-tiny", 2, 1))


def experts(bench: Bench) -> Iterator[Finding]:
    """Stock on the modules first, then ours in BF16, then its MXFP4 cast, shape by shape."""
    for shape in QUICK if bench.quick else SHAPES:
        sizes = {"num_hidden_layers": shape.layers} if shape.layers else {}
        model = random_model(shape.name, str(bench.device), **sizes)
        bench.say(f"experts: {shape.name} made")
        yield from _stock(bench, model, shape)
        yield from _ours(bench, model, shape, "BF16", shape.targets[0], read_bytes(model))
        yield from _prompt(bench, model, shape)
        cast = hf_mlspec.direct_cast(model, "mxfp4")
        bench.say("experts: cast")
        weights = hf_mlspec.resident_bytes(cast, model)
        own = shape.name in GPT_OSS
        yield from _ours(bench, cast, shape, "MXFP4 cast, head too", None if own else shape.targets[1], weights)
        del cast
        if own:
            pack_experts(model)
            yield from _ours(bench, model, shape, "experts in MXFP4", shape.targets[1], read_bytes(model))
        del model
        bench.free()


def pack_experts(model: PreTrainedModel) -> None:
    """Replace its experts by those in MXFP4, as its own files have them."""
    switch = PrecisionSwitch("mxfp4")
    for path, module in list(model.named_modules()):
        if is_experts(module):
            model.set_submodule(path, PackedExperts.from_module(module, "mxfp4", switch, path).eval())


def active_bytes(model: PreTrainedModel, weights: int, batch: int) -> float:
    """Of ``weights`` bytes, those that a step of so many rows reads where routing is uniform."""
    config = model.config
    held = [m for m in model.modules() if isinstance(m, PackedExperts) or is_experts(m)]
    routed = sum(p.nbytes for module in held for p in module.parameters())
    count = getattr(config, "num_experts", None) or config.num_local_experts
    untouched = (1 - config.num_experts_per_tok / count) ** batch
    return weights - routed * untouched


def _decoder(model: PreTrainedModel) -> CudaDecoder:
    decoder = decoder_of(model, "cuda")
    if decoder is None:
        raise WrongStep("there is no decoder for this model here; the warning above says why")
    return decoder


def _ours(
    bench: Bench, model: PreTrainedModel, shape: Shape, name: str, target: float | None, weights: int
) -> Iterator[Finding]:
    kept, total = 24 if bench.quick else KEPT, {**MIXTURES, **GPT_OSS}[shape.name]["num_hidden_layers"]
    decoder, layers = _decoder(model), model.config.num_hidden_layers
    fewer = _decoder(hf_mlspec.early_exit(model, shape.fewer)) if shape.fewer else None
    for batch in BATCHES:
        case = Case(f"batch {batch}", batch, 1, None)
        found = Step(decoder, case, kept).timed().median
        nbytes = active_bytes(model, weights, batch) + cache_bytes(decoder, case, kept)
        more = {"batch": batch, "kept": kept, "bytes": nbytes, "layers": layers}
        share = nbytes / found / bench.probe
        yield Finding("experts", f"{shape.name}, {layers} layers, {case.name}", name, found * 1e3, "ms", share=share,
                      target=target if batch == 1 and not shape.fewer else None, more=more)
        if fewer is not None:
            short = Step(fewer, case, kept).timed().median
            whole = found + (total - layers) * (found - short) / (layers - shape.fewer)
            yield Finding("experts", f"{shape.name}, {total} layers computed, {case.name}", name, whole * 1e3, "ms",
                          target=target if batch == 1 else None, more={**more, "fewer_ms": short * 1e3})


def _stock(bench: Bench, model: PreTrainedModel, shape: Shape) -> Iterator[Finding]:
    """`generate` with transformers' ways to multiply experts; those that do not run here are named."""
    kept, layers = 24 if bench.quick else KEPT, model.config.num_hidden_layers
    for way in STOCK_WAYS:
        for batch in BATCHES:
            prompt = torch.randint(model.config.vocab_size, (batch, kept), device=bench.device)
            try:
                model.set_experts_implementation(way)
                seconds = eager_step(model, prompt)
            except (RuntimeError, ValueError) as error:
                bench.missing[f"{shape.name} {way}"] = f"stock {way}: {' '.join(str(error).split())[:200]}"
                break
            yield Finding("experts", f"{shape.name}, {layers} layers, batch {batch}", f"stock generate, {way}",
                          seconds * 1e3, "ms", more={"batch": batch, "kept": kept, "layers": layers})
    bench.free()


def _prompt(bench: Bench, model: PreTrainedModel, shape: Shape) -> Iterator[Finding]:
    """A prompt of one row, its last logits."""
    length = 64 if bench.quick else PROMPT
    decoder, device = _decoder(model), bench.device
    ids = torch.randint(model.config.vocab_size, (1, length), device=device)
    starts, counts = torch.zeros(1, dtype=torch.int32, device=device), torch.tensor([length], device=device).int()
    pick, kv = torch.tensor([length - 1], device=device), new_kv(decoder, 1, length)
    decoder.reserve_positions(length)
    ways: dict[str, Callable[[], object]] = {
        "BF16": lambda: decoder.forward(ids.int(), starts, counts, kv, pick=pick),
        "stock generate, grouped_mm": lambda: model(ids, logits_to_keep=1, use_cache=True),
    }
    layers = model.config.num_hidden_layers
    for name, way in ways.items():
        seconds = time_each(way, device, 10).median
        yield Finding("experts", f"{shape.name}, {layers} layers, prompt of {length}", name, seconds * 1e3, "ms")
