"""Do tensors whose shapes, dtypes, numbers or settings were changed become what they say, or end in an error?

An input is eight bytes: of them a generator is made, which changes the tensors of a good layer, what config.json says
of it, or both. Where only tensors were changed, what is read is compared with what their numbers mean, as the tests of
the readers decode them, apart from the readers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_mlspec.checkpoints.layer import Reader
from hf_mlspec.checkpoints.readers import reader_for
from tests.checkpoints.memory import stored, values
from tests.checkpoints.test_fuzzed_layers import (
    INPUTS,
    OUTPUTS,
    changed,
    compressed,
    meant_by_autoround,
    meant_by_awq,
    meant_by_awq_rows,
    meant_by_compressed,
    meant_by_gptq,
)
from tests.foreign_checkpoints import autoround, awq, awq_four_rows, awq_rows, bit_stream, gptq, rounded

from .harness import Target, Wrong
from .mutate import changed_values

Tensors = Mapping[str, Tensor]
ERRORS = (ValueError, TypeError)


@dataclass(frozen=True)
class Case:
    """A good layer. config: ``quantization_config``. meant: of changed tensors, what they mean; None: not compared."""

    config: Mapping[str, Any]
    tensors: Tensors
    meant: Callable[[Tensors], Any] | None = None


def _codes(bits: int = 4, size: int = 32, symmetric: bool = False, act_order: bool = False) -> Any:
    torch.manual_seed(0)
    return rounded(torch.randn(OUTPUTS, INPUTS), bits, size, symmetric, act_order=act_order)


def _gptq() -> list[Case]:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
    cases = [Case(config, gptq(_codes(act_order=True), 4), meant_by_gptq)]
    for bits, size, symmetric, version in ((2, 32, False, 1), (3, 64, True, 2), (8, -1, True, 1), (4, 16, False, 2)):
        said = {"bits": bits, "group_size": size, "sym": symmetric, "dynamic": {"x": {}} if bits == 8 else None,
                "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}  # fmt: skip
        cases.append(Case(said, gptq(_codes(bits, size, symmetric), bits, version, index=bits != 8)))
    return cases


def _awq() -> list[Case]:
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    unzeroed = {name: tensor for name, tensor in awq(_codes(symmetric=True)).items() if name != "qzeros"}
    rows = {name: tensor for name, tensor in awq_rows(_codes(symmetric=True)).items() if name != "qzeros"}
    return [
        Case(config, awq(_codes()), meant_by_awq), Case(config | {"group_size": 16}, awq(_codes(size=16))),
        Case(config | {"zero_point": False}, unzeroed),
        Case(config | {"version": "gemv"}, awq_rows(_codes()), meant_by_awq_rows),
        Case(config | {"version": "gemv", "zero_point": False}, rows),
        Case(config | {"version": "gemv", "group_size": 16}, awq_rows(_codes(size=16), spare=1)),
        Case(config | {"version": "gemv_fast"}, awq_four_rows(_codes())),
        Case(config | {"version": "gemv_fast"}, awq_four_rows(_codes(), spare=8)),
    ]  # fmt: skip


def _autoround() -> list[Case]:
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "packing_format": "auto_round",
              "rotation_config": {}, "data_type": "int", "act_bits": 16}  # fmt: skip
    less = config | {"packing_format": "auto_round:auto_gptq", "sym": True, "data_type": "int"}
    words = config | {"packing_format": "auto_round:auto_awq", "group_size": -1, "sym": True,
                      "extra_config": {"up_proj": {"bits": 4}, "(": {"bits": 2}, "down.*": {"bits": 16}}}  # fmt: skip
    signs = autoround(_codes(5, 32, True), 5, "auto_round")
    signs["scales"] = signs["scales"].clone()
    signs["scales"][0, :3], signs["scales"][1, 2:5] = -signs["scales"][0, :3], 0
    return [
        Case(config, autoround(_codes(), 4, "auto_round"), meant_by_autoround),
        Case(less, autoround(_codes(symmetric=True), 4, "auto_round:auto_gptq")),
        Case(words, awq(_codes(size=-1, symmetric=True))),
        Case(config | {"bits": 5, "extra_config": {"proj": {"bits": 5, "sym": True}}}, signs),
        Case(config | {"bits": 16}, autoround(_codes(), 4, "auto_round")),
    ]  # fmt: skip


def _compressed() -> list[Case]:
    scheme = {"symmetric": False, "actorder": "group", "group_size": 32, "num_bits": 4}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized",
              "sparsity_config": {"format": "dense"}, "quantization_status": "compressed", "transform_config": {},
              "config_groups": {"group_0": {"weights": scheme}}}  # fmt: skip
    plain = config | {"config_groups": {"group_0": {"weights": {"symmetric": True, "group_size": None}}}}
    old = compressed(_codes(act_order=False))
    points = _codes().zero - 8
    old |= {"weight_zero_point": torch.from_numpy(points.astype("int8"))}
    channel = {"weight_packed": bit_stream(_codes(6, -1, True).code, 6), "weight_scale": _codes(6, -1, True).scale}
    mx = {"weight_packed": torch.full((OUTPUTS, INPUTS // 2), 0x21, dtype=torch.uint8),
          "weight_scale": torch.full((OUTPUTS, INPUTS // 32), 120, dtype=torch.uint8)}  # fmt: skip
    return [
        Case(config, compressed(_codes(act_order=True)), meant_by_compressed), Case(plain, old), Case(plain, channel),
        Case(plain, channel | {"weight_scale": torch.ones(1)}),
        Case({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "version": "0.14.1"}, mx),
        Case({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "version": "0.13.0"}, mx),
        Case(config, mx | {"weight_global_scale": torch.ones(1)}),
    ]  # fmt: skip


def chance_of(data: bytes) -> random.Random:
    return random.Random(int.from_bytes(data, "little"))


def changed_tensors(tensors: Tensors, chance: random.Random) -> Tensors:
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        tensors = changed(tensors, chance)
    return tensors


def read_layer(reader: Reader, tensors: Tensors, sizes: tuple[int, int] = (INPUTS, OUTPUTS)) -> Any:
    layer = stored(tensors, *sizes)
    if not reader.holds(layer):
        return None
    plan = reader.plan(layer)
    if not plan.read_as or plan.bits_per_weight < 0:
        raise Wrong("a plan that says nothing of itself")
    return plan.read({name: one.load() for name, one in plan.tensors.items()})


def _of_cases(make: Callable[[], list[Case]]) -> Callable[[bytes], None]:
    """What reads one of the layers, changed, or with other settings."""
    cases = make()
    readers = [reader_for(case.config) for case in cases]

    def read(data: bytes) -> None:
        chance = chance_of(data)
        at = int(chance.random() * len(cases))
        case, reader, tensors = cases[at], readers[at], cases[at].tensors
        if same := chance.random() < 0.75:
            tensors = changed_tensors(tensors, chance)
        else:
            config = changed_values(case.config, chance)
            if not isinstance(config, dict):
                return
            sizes = (INPUTS, OUTPUTS) if chance.random() < 0.5 else (chance.choice((0, 1, 32, 96, 2**40)), OUTPUTS)
            read_layer(reader_for({**config, "quant_method": type(reader).method}), tensors, sizes)
            return
        found = read_layer(reader, tensors)
        if same and found is not None and case.meant is not None:
            expected = case.meant({name: t.int() if name.endswith("g_idx") else t for name, t in tensors.items()})
            require_same([values(found, expected.values.dtype)], [expected.values])

    return read


def require_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for own, other in zip(found, expected, strict=True):
        if own.shape != other.shape or not torch.equal(own.nan_to_num(7.0), other.nan_to_num(7.0)):
            raise Wrong(f"{list(own.shape)} differs from what its numbers mean")


def targets() -> tuple[Target, ...]:
    """One for each kind of checkpoint that becomes a model."""
    found = {name: _of_cases(make) for name, make in (
        ("gptq layer", _gptq), ("awq layer", _awq), ("auto-round layer", _autoround),
        ("compressed layer", _compressed),
    )}  # fmt: skip
    return tuple(Target(name, (), read, ERRORS, suffixes=(), drawn=True) for name, read in found.items())


