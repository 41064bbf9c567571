"""What do int8 outliers, ordered inputs and online rotations cost a captured step, over int4 in groups of 128?

The 8B shape with random codes; steps as in eval/bench_gpu/step.py, all in one process. Apart: rows become integers in
a kernel of its own, not in the one that makes them, which the other steps of 8 and 4 activation bits do. Ordered:
inputs gathered at random, as Atom's are by their size. Rotated: o and down have the Hadamard matrices of QuaRot in
front; down rotated: down alone, as SpinQuant has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from transformers import PreTrainedModel

import hf_mlspec
from eval.bench_gpu.findings import Bench, Finding
from eval.bench_gpu.step import KEPT, Case, Step, WrongStep
from eval.random_packed import WIDE_ENOUGH, ordered, random_int4_model, random_outlier_model, rotated
from hf_mlspec.engines.choose import decoder_of

WORDS = ("w4a16", "w4a8", "w4a4")
CASES = (Case("batch 1", 1, 1, None), Case("batch 8", 8, 1, None), Case("batch 32", 32, 1, None))
OUTLIERS, ROTATED = 1.12, 1.05  # times of the same step in int4


def transforms(bench: Bench) -> Iterator[Finding]:
    """Milliseconds of int4, then of each of the others with their ratio."""
    shape, sizes = ("tiny", WIDE_ENOUGH) if bench.quick else ("llama-3-8b", {})
    made: list[tuple[str, float | None, Callable[[], PreTrainedModel]]] = [
        ("int4", None, lambda: random_int4_model(shape, bench.device, **sizes)),
        ("int4-int8", OUTLIERS, lambda: random_outlier_model(shape, bench.device, **sizes)),
        ("int4-int8, ordered", OUTLIERS, lambda: ordered(random_outlier_model(shape, bench.device, **sizes))),
        ("int4, rotated", ROTATED, lambda: rotated(random_int4_model(shape, bench.device, **sizes))),
        ("int4, down rotated", ROTATED,
         lambda: rotated(random_int4_model(shape, bench.device, **sizes), across_heads=False)),
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
            usual = decoder.codes
            for codes in (usual, False) if usual and word != "w4a16" else (usual,):
                decoder.codes, apart = codes, ", apart" if usual and not codes and word != "w4a16" else ""
                for case in CASES:
                    found = Step(decoder, case, 24 if bench.quick else KEPT).timed()
                    yield f"{shape}{word}{apart}, {case.name}", found.median * 1e3
            decoder.codes = usual
