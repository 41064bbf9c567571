"""What do int8 outliers, ordered inputs and online rotations cost a captured step, over int4 in groups of 128?

The 8B shape with random codes; steps as in eval/bench_gpu/step.py, all in one process. Ordered: inputs gathered at
random, as Atom's are by their size. Rotated: o and down have the Hadamard matrices of QuaRot in front.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from transformers import PreTrainedModel

import hf_mlspec
from eval.bench_gpu.findings import Bench, Finding
from eval.bench_gpu.models import random_int4_model, random_outlier_model
from eval.bench_gpu.step import KEPT, Case, Step, WrongStep
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.formats.hadamard import fitting_hadamard
from hf_mlspec.nn.packed import PackedLinear
from hf_mlspec.nn.transforms import HADAMARD, ORDER, record_of

WORDS = ("w4a16", "w4a8", "w4a4")
CASES = (Case("batch 1", 1, 1, None), Case("batch 8", 8, 1, None), Case("batch 32", 32, 1, None))
OUTLIERS, ROTATED = 1.12, 1.05  # times of the same step in int4
SHARED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}  # which read the inputs of which
WIDE_ENOUGH = {"hidden_size": 256, "intermediate_size": 384}  # of a tiny shape: int4-int8 takes multiples of 128


def transforms(bench: Bench) -> Iterator[Finding]:
    """Milliseconds of int4, then of each of the others with their ratio."""
    shape, sizes = ("tiny", WIDE_ENOUGH) if bench.quick else ("llama-3-8b", {})
    made: list[tuple[str, float | None, Callable[[], PreTrainedModel]]] = [
        ("int4", None, lambda: random_int4_model(shape, bench.device, **sizes)),
        ("int4-int8", OUTLIERS, lambda: random_outlier_model(shape, bench.device, **sizes)),
        ("int4-int8, ordered", OUTLIERS, lambda: ordered(random_outlier_model(shape, bench.device, **sizes))),
        ("int4, rotated", ROTATED, lambda: rotated(random_int4_model(shape, bench.device, **sizes))),
    ]
    plain: dict[str, float] = {}
    for name, most, make in made:
        bench.say(f"transforms: {name}")
        model = make()
        for what, milliseconds in _steps(bench, f"{shape}, ", model):
            yield Finding("transforms", what, name, milliseconds, "ms")
            if most is None:
                plain[what] = milliseconds
            else:
                target = None if bench.quick else most
                yield Finding("transforms", what, f"{name} / int4", milliseconds / plain[what], "x", target)
        del model
        bench.free()


def _steps(bench: Bench, shape: str, model: PreTrainedModel) -> Iterator[tuple[str, float]]:
    for word in WORDS:
        with hf_mlspec.precision_switch(model).at(word):
            decoder = decoder_of(model, "cuda")
            if decoder is None:
                raise WrongStep(f"{word}: there is no decoder for this model here; the warning above says why")
            for case in CASES:
                found = Step(decoder, case, 24 if bench.quick else KEPT).timed()
                yield f"{shape}{word}, {case.name}", found.median * 1e3


def _packed(model: PreTrainedModel) -> Iterator[tuple[str, PackedLinear]]:
    return ((path, module) for path, module in model.named_modules() if isinstance(module, PackedLinear))


def ordered(model: PreTrainedModel) -> PreTrainedModel:
    """The model, each layer's inputs gathered in an order of its own, or of those that share them."""
    for path, module in _packed(model):
        block, _, leaf = path.rpartition(".")
        seed = sum(map(ord, f"{block}.{SHARED.get(leaf, leaf)}"))
        order = torch.randperm(module.in_features, generator=torch.Generator().manual_seed(seed)).int()
        module.transform_(ORDER, {"order": order.to(module.weight_scale.device)})
    return model


def rotated(model: PreTrainedModel) -> PreTrainedModel:
    """The model with Hadamard matrices in front of o, across heads, and of down."""
    heads = model.config.num_attention_heads
    for path, module in _packed(model):
        if path.endswith("o_proj"):
            how = fitting_hadamard(heads, module.in_features // heads)
        elif path.endswith("down_proj"):
            how = fitting_hadamard(module.in_features)
        else:
            continue
        record = {name: tensor.to(module.weight_scale.device) for name, tensor in record_of(how).items()}
        module.transform_(HADAMARD, record)
    return model
