"""Does every changed tensor or header end in a clear error, or in exactly what its numbers say?"""

import os
import random

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hf_mlspec.checkpoints.autoround import AutoRoundReader
from hf_mlspec.checkpoints.awq import AwqReader
from hf_mlspec.checkpoints.compressed import CompressedReader
from hf_mlspec.checkpoints.gptq import GptqReader
from hf_mlspec.checkpoints.safetensors_file import read_header
from tests.checkpoints.memory import read, stored, values
from tests.foreign_checkpoints import AWQ_COLUMNS, Codes, autoround, awq, awq_rows, bit_stream, gptq, rounded

FUZZED = int(os.environ.get("MLSPEC_FUZZ", "4000"))  # of each kind; 100000 take two minutes
INPUTS, OUTPUTS = 64, 16
DTYPES = [torch.int32, torch.int64, torch.uint8, torch.float16, torch.bfloat16, torch.float32]


def nibbles(words: torch.Tensor) -> np.ndarray:
    """int32 [..., n] -> [..., 8 n], the lowest first."""
    wide = words.numpy().astype(np.int64) & 0xFFFFFFFF
    return (wide[..., None] >> np.arange(0, 32, 4) & 15).reshape(*words.shape[:-1], -1)


def meant_by_gptq(t):
    zero = nibbles(t["qzeros"])
    same = (zero == 7).all() or (zero == 8).all()
    zero = np.full_like(zero, 8) if same else nibbles(t["qzeros"] + 0x11111111)
    return Codes(nibbles(t["qweight"].t()), zero.T, t["scales"].t(), t["g_idx"].numpy())


def meant_by_awq(t):
    def columns(words):  # [n, out / 8] -> [out, n]
        mixed = nibbles(words).reshape(len(words), -1, 8)
        plain = np.empty_like(mixed)
        plain[..., list(AWQ_COLUMNS)] = mixed
        return plain.reshape(len(words), -1).T

    return Codes(columns(t["qweight"]), columns(t["qzeros"]), t["scales"].t(), np.arange(INPUTS) // 32)


def meant_by_awq_rows(t):
    groups = INPUTS // 32
    return Codes(nibbles(t["qweight"]), nibbles(t["qzeros"])[:, :groups], t["scales"][:, :groups],
                 np.arange(INPUTS) // 32)  # fmt: skip


def meant_by_autoround(t):
    return Codes(nibbles(t["qweight"].t()), nibbles(t["qzeros"]).T, t["scales"].t(), np.arange(INPUTS) // 32)


def meant_by_compressed(t):
    zero = nibbles(t["weight_zero_point"].t()).T
    return Codes(nibbles(t["weight_packed"]), zero, t["weight_scale"], t["weight_g_idx"].numpy())


def compressed(codes):
    return {
        "weight_packed": bit_stream(codes.code, 4), "weight_scale": codes.scale,
        "weight_zero_point": bit_stream(codes.zero.T, 4).t(), "weight_shape": torch.tensor([OUTPUTS, INPUTS]),
        "weight_g_idx": torch.from_numpy(codes.group.astype(np.int32)),
    }  # fmt: skip


# What a config promises is missed where it is missing.
SCHEME = {"symmetric": False, "actorder": "group", "group_size": 32, "num_bits": 4}
PROMISED = {"config_groups": {"group_0": {"weights": SCHEME}}}
KINDS = {
    "gptq": (GptqReader({"bits": 4, "group_size": 32, "desc_act": True}), lambda codes: gptq(codes, 4), meant_by_gptq),
    "awq": (AwqReader({"group_size": 32, "zero_point": True}), awq, meant_by_awq),
    "awq, gemv": (AwqReader({"group_size": 32, "version": "gemv"}), awq_rows, meant_by_awq_rows),
    "auto-round": (
        AutoRoundReader({"group_size": 32, "sym": False, "packing_format": "auto_round"}),
        lambda codes: autoround(codes, 4, "auto_round"), meant_by_autoround,
    ),
    "compressed-tensors": (CompressedReader(PROMISED), compressed, meant_by_compressed),
}


def changed(tensors, chance: random.Random):
    """One tensor missing, of another dtype, cut, turned, emptied, or with other numbers."""
    if not tensors:
        return tensors
    name = chance.choice(sorted(tensors))
    tensor, how = tensors[name].clone(), chance.randrange(8)
    if how == 0:
        return {key: own for key, own in tensors.items() if key != name}
    if how == 1:
        tensor = tensor.to(chance.choice(DTYPES))
    elif how == 2:
        tensor = tensor[: chance.randrange(tensor.shape[0] + 1)]
    elif how == 3:
        tensor = tensor.t() if tensor.ndim == 2 else tensor[None]
    elif how == 4:
        tensor = tensor.reshape(-1)
    else:
        flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
        for _ in range(chance.randrange(1, 4) if flat.numel() else 0):
            flat[chance.randrange(flat.numel())] = chance.randrange(256)
        tensor = flat.view(tensor.dtype).view(tensor.shape)
    return {**tensors, name: tensor}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_tensors(kind):
    reader, save, meant = KINDS[kind]
    chance, outcomes, messages = random.Random(kind), {"refused": 0, "read": 0}, []
    torch.manual_seed(0)
    whole = save(rounded(torch.randn(OUTPUTS, INPUTS), 4, 32, False, act_order=kind in ("gptq", "compressed-tensors")))
    for _ in range(FUZZED):
        tensors = changed(whole, chance)
        layer = stored(tensors, INPUTS, OUTPUTS)
        try:
            _, found = read(reader, layer) if reader.holds(layer) else (None, None)
        except (ValueError, TypeError) as error:
            messages.append(str(error))
            outcomes["refused"] += 1
            continue
        if found is not None:
            outcomes["read"] += 1
            expected = meant({name: t.int() if name == "weight_g_idx" else t for name, t in tensors.items()}).values
            assert torch.equal(values(found, expected.dtype), expected)
    assert min(outcomes.values()) > FUZZED // 20
    assert all("up_proj" in message for message in messages)


def test_headers(tmp_path):
    chance, file = random.Random(1), tmp_path / "x.safetensors"
    save_file({"a.qweight": torch.zeros(8, 16, dtype=torch.int32), "a.scales": torch.ones(2, 16)}, file)
    whole = file.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    messages = []
    for _ in range(FUZZED):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 5)):
            data[chance.randrange(length)] = chance.randrange(256)
        file.write_bytes(data[: chance.randrange(len(data) + 1)] if chance.random() < 0.2 else data)
        try:
            tensors, _ = read_header(file)
        except ValueError as error:
            messages.append(str(error))
        else:
            assert all(length <= one.begin <= one.end <= len(whole) for one in tensors if one.shape)
    assert len(messages) > FUZZED // 2
    assert all(str(file) in message for message in messages)
