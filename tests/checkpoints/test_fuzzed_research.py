"""Do changed tensors of research checkpoints and of gpt-oss end in a clear error, or in what their numbers say?"""

import random

import numpy as np
import pytest
import torch

from hf_mlspec.checkpoints.atom import AtomReader
from hf_mlspec.checkpoints.gpt_oss import expert_tensors, read_experts
from hf_mlspec.checkpoints.qspec import sort_checkpoint
from hf_mlspec.checkpoints.quarot import sort_folder
from hf_mlspec.formats.mxfp4 import Mxfp4Weight
from tests.checkpoints.memory import stored
from tests.checkpoints.rotated_files import CONFIG, INDEXED, LAYER, SHAPES, folder, held, read
from tests.checkpoints.test_anyprecision import PARENT, READER, SEED, encoded, example
from tests.checkpoints.test_atom import permutation, quantized, randn
from tests.checkpoints.test_fuzzed_layers import FUZZED, changed
from tests.checkpoints.test_qspec_files import FUSED, QWEN, qwen_file

EXPERTS, OUTPUTS, INPUTS = 2, 4, 64


class AnyPrecision:
    """Planes and tables of one layer, at every width."""

    def whole(self):
        codes, tables = example(OUTPUTS, INPUTS)
        return {"qweight": encoded(codes.tolist(), PARENT), **{f"lut{bits}": lut for bits, lut in tables.items()}}

    def read(self, tensors):
        layer = READER.layer_of(stored(tensors, INPUTS, OUTPUTS))
        return [layer.dequantize(bits) for bits in layer.widths]

    def meant(self, tensors):
        words = tensors["qweight"].numpy().astype(np.int64) & 0xFFFFFFFF  # [planes, rows, T]
        bits = words[..., None] >> (31 - np.arange(32)) & 1  # [planes, rows, t, 8 s + j]
        count = words.shape[-1]
        bits = bits.reshape(*words.shape, 4, 8).transpose(0, 1, 3, 2, 4).reshape(*words.shape[:2], 32 * count)
        found = []
        for width in range(SEED, PARENT + 1):
            index = sum(bits[plane] << (width - 1 - plane) for plane in range(width))
            found.append(torch.gather(tensors[f"lut{width}"], 1, torch.from_numpy(index)))
        return found


class GptOss:
    """Blocks and scales of the experts of one projection."""

    def whole(self):
        chance = torch.Generator().manual_seed(0)
        blocks = torch.randint(0, 256, (EXPERTS, OUTPUTS, INPUTS // 32, 16), generator=chance, dtype=torch.uint8)
        scales = torch.randint(100, 150, (EXPERTS, OUTPUTS, INPUTS // 32), generator=chance, dtype=torch.uint8)
        return {"up_proj_blocks": blocks, "up_proj_scales": scales}

    def read(self, tensors):
        found = expert_tensors(stored(tensors, INPUTS, OUTPUTS), "up_proj", EXPERTS)
        if not found:
            return None
        parts = read_experts(*(one.load() for one in found.values()))
        return [Mxfp4Weight(packed, scale).dequantize() for packed, scale in zip(*parts, strict=True)]

    def meant(self, tensors):
        blocks, scales = tensors["up_proj_blocks"].numpy(), tensors["up_proj_scales"].numpy().astype(np.float64)
        codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes & 8, -1.0, 1.0)
        wide = (values * 2.0 ** (scales[..., None] - 127)).reshape(EXPERTS, OUTPUTS, INPUTS)
        return list(torch.from_numpy(wide).float())


class Rotated:
    """All linears of a folder of QuaRot or QSpec, or those that are named."""

    def __init__(self, sort, config, make):
        self.sort, self.config, self.make = sort, config, make

    def whole(self):
        return self.make()[0]

    def read(self, tensors, linears=tuple(SHAPES)):
        checkpoint = self.sort(held(tensors), self.config)
        plans = [checkpoint.reader.plan(checkpoint.layers[f"{LAYER}.{linear}"]) for linear in linears]
        return [read(plan).weight.dequantize() for plan in plans]

    def meant(self, tensors, linears=tuple(SHAPES)):
        tensors, found = dict(tensors), []
        for fused, parts in FUSED.items():
            for kind in ("weight", "weight_scales"):
                whole = tensors.pop(f"{LAYER}.{fused}.{kind}", None)
                if whole is not None:
                    rows = whole.split([SHAPES[part][0] for part in parts])
                    tensors |= {f"{LAYER}.{part}.{kind}": own for part, own in zip(parts, rows, strict=True)}
        for linear in linears:
            place = f"{LAYER}.{INDEXED.get(linear, linear)}"
            packed, scale = tensors[f"{place}.weight"].int(), tensors[f"{place}.weight_scales"]
            codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
            found.append(torch.where(codes > 7, codes - 16, codes).float() * scale.float())
        return found


class Atom:
    """One layer in Atom's order, which has integers and steps in every group."""

    def whole(self):
        values, _, _ = quantized(randn(8, 384, seed=2), "rtn", True)
        return {"weight": values, "input_order": permutation(384), "row_order": permutation(8, seed=1)}

    def read(self, tensors):
        reader, layer = AtomReader(), stored(tensors, 384, 8)
        if not reader.holds(layer):
            return None
        return [read(reader.plan(layer)).weight, reader.layer_of(layer).dequantize()]

    def meant(self, tensors):
        own = torch.empty_like(tensors["weight"])
        rows = tensors.get("row_order", torch.arange(8))
        own[rows[:, None], tensors["input_order"][None]] = tensors["weight"]
        return [own, own]


KINDS = {  # and how many times fewer trials those get that take longer
    "any-precision": (AnyPrecision(), 1),
    "gpt-oss": (GptOss(), 1),
    "quarot": (Rotated(sort_folder, CONFIG, folder), 8),
    "qspec": (Rotated(sort_checkpoint, QWEN, qwen_file), 8),
    "atom": (Atom(), 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_tensors(kind):
    (checkpoint, fewer), chance = KINDS[kind], random.Random(kind)
    whole, outcomes, messages = checkpoint.whole(), {"refused": 0, "read": 0}, []
    assert all(map(torch.equal, checkpoint.read(whole), checkpoint.meant(whole)))
    for _ in range(max(FUZZED // fewer, 1)):
        tensors = changed(whole, chance)
        try:
            found = checkpoint.read(tensors)
        except (ValueError, TypeError) as error:
            messages.append(str(error))
            outcomes["refused"] += 1
            continue
        if found is not None:
            outcomes["read"] += 1
            for own, expected in zip(found, checkpoint.meant(tensors), strict=True):
                assert torch.equal(own.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert min(outcomes.values()) > 20
    names = ("up_proj", LAYER, "model.embed_tokens", "lm_head", "model.norm")
    assert all(any(name in message for name in names) for message in messages)
