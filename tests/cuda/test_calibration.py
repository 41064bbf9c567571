"""On a GPU: does calibration choose the codes that the CPU chooses, but for roundings, and does the model decode?"""

from __future__ import annotations

import re

import pytest
import torch
from decoders import random_model
from torch import nn
from turns import check_gradient_of_a_turn

import hf_mlspec
from hf_mlspec.integration.scoring import token_logprobs
from hf_mlspec.nn.packed import PackedLinear

DEVICE = "cuda"
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "tie_word_embeddings": False}


def calibrated(method: str, device: str) -> tuple[nn.Module, hf_mlspec.Calibrated]:
    model = random_model("llama", torch.bfloat16, **SHAPE).to(device)
    rows = torch.randint(1, 199, (8, 128), generator=torch.Generator().manual_seed(3)).tolist()
    report = hf_mlspec.quantize(model, method, calibration=rows, samples=8, tokens=128)
    assert report.layers
    assert all(parameter.device.type == device for parameter in model.parameters())
    return model, report


@torch.no_grad()
def loss(model: nn.Module, ids: torch.Tensor) -> float:
    ids = ids.to(model.device)
    return nn.functional.cross_entropy(model(ids).logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()).item()


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq", "smoothquant", "quarot+gptq", "atom+gptq"])
def test_the_gpu_chooses_as_the_cpu_does(method):
    (on_cpu, on_cpu_said), (on_gpu, on_gpu_said) = (calibrated(method, device) for device in ("cpu", "cuda"))
    ids = torch.randint(1, 199, (2, 64), generator=torch.Generator().manual_seed(5))
    assert any(isinstance(module, PackedLinear) for module in on_gpu.modules())
    for ours, theirs in zip(on_gpu_said.layers, on_cpu_said.layers, strict=True):  # a rounding turns those behind it
        assert (ours.block, ours.name) == (theirs.block, theirs.name)
        assert ours.sqnr == pytest.approx(theirs.sqnr, abs=0.5), ours.name
    if method == "rtn":
        for name, module in on_cpu.named_modules():
            if isinstance(module, PackedLinear):
                assert torch.equal(on_gpu.get_submodule(name).dequantized().cpu(), module.dequantized()), name
    assert loss(on_gpu, ids) == pytest.approx(loss(on_cpu, ids), abs=0.05)  # of 6.3: a rounding turns those behind
    how = {"max_new_tokens": 12, "do_sample": False}
    alone, chain = (on_gpu.generate(ids.cuda(), assistant_models=levels, **how) for levels in ([], ["w4a4"]))
    assert torch.equal(alone, chain)


@pytest.mark.parametrize("method", ["rtn", "atom"])
def test_clipped_activations_decode_as_plain_torch_has_them(method):
    """The decoder of the GPU at w4a4 beside the modules on the CPU."""
    model = random_model("llama", torch.bfloat16, **SHAPE)
    rows = torch.randint(1, 199, (8, 128), generator=torch.Generator().manual_seed(3)).tolist()
    hf_mlspec.quantize(model, method, calibration=rows, activation_clip=0.7)
    ids = torch.randint(1, 199, (2, 64), generator=torch.Generator().manual_seed(5))
    with hf_mlspec.precision_switch(model).at("w4a4"), torch.no_grad():
        plain = model(ids, use_cache=False).logits.float()
        model.to(DEVICE)
        on_gpu = model(ids.to(DEVICE), use_cache=False).logits.float().cpu()
        scored = torch.stack([row.logprobs for row in token_logprobs(model, ids.tolist())]).cpu()
    with hf_mlspec.precision_switch(model).at("w4a16"), torch.no_grad():
        other = model(ids.to(DEVICE), use_cache=False).logits.float().cpu()
    expected, far = (chances(one, ids) for one in (plain, other))
    assert (on_gpu - plain).norm() < (other - plain).norm()  # roundings turn codes, and random layers add that up
    assert (scored - expected[:, -scored.shape[1] :]).norm() < (far - expected).norm()
    how = {"max_new_tokens": 12, "do_sample": False}
    alone, chain = (model.generate(ids.to(DEVICE), assistant_models=levels, **how) for levels in ([], ["w4a4"]))
    assert torch.equal(alone, chain)


def chances(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the tokens behind the first."""
    return logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)


ROWS = torch.randint(1, 199, (8, 128), generator=torch.Generator().manual_seed(3)).tolist()


def test_a_rotation_is_learned_and_a_stopped_run_goes_on(tmp_path):
    model, file = random_model("llama", torch.bfloat16, **SHAPE).to(DEVICE), tmp_path / "R.bin"
    found = hf_mlspec.learn_rotation(model, file, calibration=ROWS, steps=3)
    assert (found.T @ found - torch.eye(256)).abs().max() < 1e-5
    how = {"calibration": ROWS, "rotations": file, "work_folder": tmp_path / "work"}
    hf_mlspec.quantize(model, "quarot+gptq", **how)
    (tmp_path / "work" / "block_0001.safetensors").unlink()
    again = random_model("llama", torch.bfloat16, **SHAPE).to(DEVICE)
    hf_mlspec.quantize(again, "quarot+gptq", **how)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    name = re.escape(torch.cuda.get_device_name())
    with pytest.raises(ValueError, match=f"holds blocks of a calibration with device '{name}', now it is 'a CPU, "):
        hf_mlspec.quantize(random_model("llama", torch.bfloat16, **SHAPE), "quarot+gptq", **how)


def test_a_turn_has_the_gradient_of_rotated_weights_but_for_what_turns_nothing():
    """As on a CPU (tests/calibration/test_learning.py)."""
    drawn = torch.randn(64, 64, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    check_gradient_of_a_turn(torch.linalg.qr(drawn.to(DEVICE))[0].float())


@pytest.mark.parametrize("method", ["gptq", "quarot+gptq"])
def test_the_share_of_memory_that_a_process_may_take_is_asked_for_first(method):
    model = random_model("llama", torch.bfloat16, **SHAPE).to(DEVICE)
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    whole = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 2**21) / whole)
    try:
        with pytest.raises(MemoryError, match=r"MiB beside the model, \d+ are free on cuda:0: "):
            hf_mlspec.quantize(model, method, calibration=ROWS)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, before)
