"""Do tensors whose shapes, dtypes, numbers or settings were changed become what they say, or end in an error?

An input is eight bytes: of them a generator is made, which changes the tensors of a good layer, what config.json says
of it, or both. Where only tensors were changed, what is read is compared with what their numbers mean, as the tests of
the readers decode them, apart from the readers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_mlspec.checkpoints.anyprecision import AnyPrecisionReader
from hf_mlspec.checkpoints.gpt_oss_original import config_of, is_original, parameters
from hf_mlspec.checkpoints.layer import HeldTensor, Reader
from hf_mlspec.checkpoints.pickles import WeightQuantizer
from hf_mlspec.checkpoints.quarot_pickle import sort_pickle
from hf_mlspec.checkpoints.readers import reader_for
from hf_mlspec.formats import FORMATS, PackedWeight
from tests.checkpoints.memory import stored, values
from tests.checkpoints.rotated_files import CONFIG, LAYER, SHAPES, hadamard12, held, integers, scales
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
from tests.checkpoints.test_fuzzed_research import KINDS as RESEARCH
from tests.checkpoints.test_fuzzed_research import Rotated
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


def _chance(data: bytes) -> random.Random:
    return random.Random(int.from_bytes(data, "little"))


def _changed(tensors: Tensors, chance: random.Random) -> Tensors:
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        tensors = changed(tensors, chance)
    return tensors


def _gpt_oss_linear(data: bytes) -> None:
    """Its linears are never quantized, whatever they hold."""
    reader = reader_for({"quant_method": "mxfp4"})
    layer = stored(_changed(RESEARCH["gpt-oss"][0].whole(), _chance(data)), INPUTS, OUTPUTS)
    if reader.holds(layer):
        raise Wrong("a linear of gpt-oss is held to be quantized")
    reader.plan(layer)


def _read(reader: Reader, tensors: Tensors, sizes: tuple[int, int] = (INPUTS, OUTPUTS)) -> Any:
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
        chance = _chance(data)
        at = int(chance.random() * len(cases))
        case, reader, tensors = cases[at], readers[at], cases[at].tensors
        if same := chance.random() < 0.75:
            tensors = _changed(tensors, chance)
        else:
            config = changed_values(case.config, chance)
            if not isinstance(config, dict):
                return
            sizes = (INPUTS, OUTPUTS) if chance.random() < 0.5 else (chance.choice((0, 1, 32, 96, 2**40)), OUTPUTS)
            _read(reader_for({**config, "quant_method": type(reader).method}), tensors, sizes)
            return
        found = _read(reader, tensors)
        if same and found is not None and case.meant is not None:
            expected = case.meant({name: t.int() if name.endswith("g_idx") else t for name, t in tensors.items()})
            _require_same([values(found, expected.values.dtype)], [expected.values])

    return read


def _require_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for own, other in zip(found, expected, strict=True):
        if own.shape != other.shape or not torch.equal(own.nan_to_num(7.0), other.nan_to_num(7.0)):
            raise Wrong(f"{list(own.shape)} differs from what its numbers mean")


def _of_research(name: str) -> Callable[[bytes], None]:
    """What reads one of the checkpoints of research projects, a linear of its own each time, or of gpt-oss."""
    checkpoint = RESEARCH[name][0]
    whole, several = checkpoint.whole(), isinstance(checkpoint, Rotated)

    def read(data: bytes) -> None:
        chance = _chance(data)
        linears = ((chance.choice(list(SHAPES)),),) if several else ()
        if several and chance.random() < 0.2:
            sizes = {"num_attention_heads": chance.choice((1, 5, 12, 20, 24)), "hidden_size": chance.choice((96, 192))}
            config = changed_values(checkpoint.config, chance) if chance.random() < 0.7 else sizes
            if isinstance(config, dict):
                checkpoint.sort(held(whole), {"model_type": checkpoint.config["model_type"], **config})
            return
        tensors = _changed(whole, chance)
        if (found := checkpoint.read(tensors, *linears)) is not None:
            _require_same(found, checkpoint.meant(tensors, *linears))

    return read


_PLANES = RESEARCH["any-precision"][0].whole()


def _any_precision_config(data: bytes) -> None:
    chance, whole = _chance(data), _PLANES
    config = changed_values({"anyprec": {"seed_precision": 3, "parent_precision": 5, "group_count": 1}}, chance)
    if isinstance(config, dict):
        _read(reader_for({**config, "quant_method": AnyPrecisionReader.method}), whole, (64, 4))


@cache
def simulated() -> dict[str, Any]:
    """What QuaRot pickles, with one layer of 3 bits and one that is not quantized."""
    state, quantizers = {}, {}
    for seed, (linear, shape) in enumerate(SHAPES.items()):
        name, scale = f"{LAYER}.{linear}", scales(shape[0], seed)
        state[f"{name}.weight"] = (integers(shape, seed).float() * scale.float()).half()
        quantizer = WeightQuantizer()
        zero = torch.full_like(scale, 8.0)
        quantizer.__setstate__({"_buffers": {"scale": scale, "zero": zero}, "bits": 4, "sym": linear[-6] != "k"})
        quantizers[f"{name}.module"] = quantizer
    del quantizers[f"{LAYER}.mlp.up_proj.module"]
    quantizers[f"{LAYER}.mlp.gate_proj.module"].__setstate__({"bits": 3})
    for norm in ("model.norm", f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm"):
        state[f"{norm}.weight"] = torch.zeros(1)
    for place in ("mlp.down_proj", "self_attn.o_proj"):
        state[f"{LAYER}.{place}.had_K"] = hadamard12().float()
    state["model.embed_tokens.weight"] = state["lm_head.weight"] = torch.ones(5, 192).half()
    state["lm_head.module.weight"] = state["lm_head.weight"]
    return {"w_quantizers": quantizers, "model": state}


def _simulated(data: bytes) -> None:
    chance, whole = _chance(data), simulated()
    state, quantizers, config = dict(whole["model"]), dict(whole["w_quantizers"]), CONFIG
    how = chance.random()
    if chance.random() < 0.2:  # a model that was not rotated
        norms = [name for name in state if "norm" in name]
        state |= dict.fromkeys(norms[: len(norms) - (how > 0.9)], torch.ones(192))
    if how < 0.5:
        state = _changed(state, chance)
    elif how < 0.85:
        name = chance.choice(list(quantizers))
        quantizer = WeightQuantizer()
        quantizer.__setstate__(dict(quantizers[name].__dict__))
        if chance.random() < 0.7:
            quantizer.__setstate__({"_buffers": dict(_changed(quantizer.__dict__["_buffers"], chance))})
        else:
            plain = {key: quantizer.__dict__[key] for key in ("bits", "sym")}
            other = changed_values(plain, chance)
            quantizer.__setstate__(other if isinstance(other, dict) else {"bits": other})
        quantizers[name] = quantizer if chance.random() < 0.9 else chance.choice((None, 3, {}))
    else:
        config = changed_values(CONFIG, chance)
        if not isinstance(config, dict):
            return
    whole = {"w_quantizers": quantizers, "model": state}
    if chance.random() < 0.02:
        del whole[chance.choice(list(whole))]
    found = sort_pickle(whole, Path("q.pt"), config)
    layer = found.layers[f"{LAYER}.{chance.choice(list(SHAPES))}"]
    if found.reader.holds(layer):
        plan = found.reader.plan(layer)
        read = plan.read({name: one.load() for name, one in plan.tensors.items()}).weight
        if isinstance(read, PackedWeight):
            wide = read.dequantize(torch.float32).to(layer.tensors["weight"].dtype)
            if not torch.equal(wide, layer.tensors["weight"].load()):
                raise Wrong("integers times their scales are not the weight that was pickled")


def _gpt_oss_names(data: bytes) -> None:
    """The original layout of gpt-oss: its config.json, and the names of its tensors."""
    chance = _chance(data)
    config, names = changed_values(_GPT_OSS, chance) if chance.random() < 0.6 else _GPT_OSS, list(_NAMES)
    for _ in range(chance.choice((0, 1, 2))):
        names.pop(chance.randrange(len(names)))
    if chance.random() < 0.2:
        names.append("block.7.x")
    if not isinstance(config, dict) or not is_original(config):
        return
    rows = 6 if chance.random() < 0.9 else chance.choice((0, 5, 7))
    tensors = {name: HeldTensor(f"{name} in f", _HELD[rows if ".qkv." in name else 0]) for name in names}
    found = parameters(tensors, config_of(config, "config.json"), "a folder")
    for name in ("q", "k", "v"):
        rows = found[f"model.layers.0.self_attn.{name}_proj.bias"]
        if tuple(rows.load().shape) != rows.shape or rows.dtype != torch.int64 or "qkv" not in rows.place:
            raise Wrong(f"{name} has other rows than it says")


_GPT_OSS = {
    "num_hidden_layers": 1, "num_experts": 2, "experts_per_token": 1, "vocab_size": 8, "hidden_size": 4,
    "intermediate_size": 4, "head_dim": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "sliding_window": 4,
    "initial_context_length": 16, "rope_theta": 1e4, "rope_scaling_factor": 2.0, "rope_ntk_alpha": 1.0,
    "rope_ntk_beta": 32.0, "swiglu_limit": 7.0,
}  # fmt: skip
_NAMES = (
    "embedding.weight", "norm.scale", "unembedding.weight", *(f"block.0.{name}" for name in (
        "attn.norm.scale", "attn.sinks", "attn.out.weight", "attn.out.bias", "mlp.norm.scale", "mlp.gate.weight",
        "mlp.gate.bias", "mlp.mlp1_weight.blocks", "mlp.mlp1_weight.scales", "mlp.mlp1_bias",
        "mlp.mlp2_weight.blocks", "mlp.mlp2_weight.scales", "mlp.mlp2_bias", "attn.qkv.weight", "attn.qkv.bias")),
)  # fmt: skip
_HELD = {rows: torch.arange(rows) for rows in (0, 5, 6, 7)}


@cache
def weights() -> dict[str, PackedWeight]:
    """One of every format."""
    torch.manual_seed(0)
    dense, found = torch.randn(8, 256).bfloat16(), {}
    for word, record in FORMATS.items():
        if record.why_not_quantized:
            parts = record.zeros((8, 256), torch.device("cpu"), num_planes=4, least_planes=2)
            parts = [torch.randint(0, 256, part.shape, dtype=torch.uint8) if part.dtype == torch.uint8
                     else torch.randn(part.shape).to(part.dtype) for part in parts]  # fmt: skip
            found[word] = record.weight(*parts, name="up_proj")
        else:
            found[word] = record.weight.from_dense(dense, name="up_proj")
    return found


def _own_weight(data: bytes) -> None:
    """A weight of one of our formats, with parts that were changed: what it validates has numbers, a row for each."""
    chance = _chance(data)
    word = chance.choice(list(weights()))
    weight, record = weights()[word], FORMATS[word]
    parts = {name: part for name, part in zip(record.parts, weight.parts, strict=True) if part is not None}
    parts = _changed(parts, chance)
    if any(parts.get(name) is None for name, part in zip(record.parts, weight.parts, strict=True) if part is not None):
        return  # a file that lacks a tensor never gets so far
    made = record.weight(*[parts.get(name) for name in record.parts], name="up_proj").validate(8, 256)
    for name, part in parts.items():
        if (check := record.value_check(name, part.dtype)) is not None:
            check("up_proj", name, part)
    if made.dequantize().shape != (8, 256):
        raise Wrong(f"{word} of another shape")


def targets() -> tuple[Target, ...]:
    """One for each kind of checkpoint, and one for our own formats."""
    found = {name: _of_cases(make) for name, make in (
        ("gptq layer", _gptq), ("awq layer", _awq), ("auto-round layer", _autoround),
        ("compressed layer", _compressed),
    )}  # fmt: skip
    found |= {f"{name} layer": _of_research(name) for name in RESEARCH}
    found |= {"any-precision config": _any_precision_config, "quarot pickle": _simulated,
              "gpt-oss names": _gpt_oss_names, "gpt-oss linear": _gpt_oss_linear,
              "own weight": _own_weight}  # fmt: skip
    return tuple(Target(name, (), read, ERRORS, suffixes=(), drawn=True) for name, read in found.items())


