"""What is said of a model on a GPU that no kernels serve, before anything of it moves? Asked without a GPU."""

from __future__ import annotations

import pytest
import torch
from decoders import random_model
from warned import forget_warnings

import hf_mlspec
from hf_mlspec.engines import choose
from hf_mlspec.engines import prepare as preparing
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.nn.state import is_prepared
from hf_mlspec.ops import KernelError, cuda_library

LIBRARY = b"\x7fELF" + bytes(500) + b"hf_mlspec CUDA toolkit=13000 archs=80;90a\n" + bytes(500)
PROBLEMS = {
    "a torch without CUDA": ({}, "is built without CUDA; install a CUDA build of torch"),
    "no GPU": ({"torch": "13.0"}, "torch finds no CUDA GPU it can use; `nvidia-smi` shows GPUs and driver"),
    "no library": ({"torch": "13.0", "gpu": (9, 0)}, "no compiled library _CUDA.so in "),
    "another architecture": (
        {"torch": "13.0", "gpu": (12, 0), "library": LIBRARY, "driver": 13000},
        "_CUDA.so is built for sm_80, sm_90a, this GPU (a GPU) is sm_120; build it in the source tree",
    ),
    "an old driver": (
        {"torch": "13.0", "gpu": (9, 0), "library": LIBRARY, "driver": 12080},
        "_CUDA.so is built with CUDA 13.0, the driver knows CUDA up to 12.8; update the driver",
    ),
}


@pytest.fixture
def model(monkeypatch):
    """A model that says it lies on a GPU."""
    model, device = random_model("llama", torch.bfloat16), torch.device("cuda:0")
    monkeypatch.setattr(choose, "device_of", lambda _: device)
    monkeypatch.setattr(preparing, "_one_device", lambda _: device)
    forget_warnings()
    return model


def machine(monkeypatch, folder, *, torch_cuda=None, gpu=None, library=None, driver=0):
    """One whose torch, GPU, library and driver are these."""
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(cuda_library, "_driver_version", lambda: driver)
    monkeypatch.setattr(cuda_library, "_PACKAGE", folder)
    monkeypatch.setattr(cuda_library, "_loaded", [])
    monkeypatch.setattr(cuda_library, "_reasons", {})
    if library is not None:
        (folder / "_CUDA.so").write_bytes(library)


@pytest.mark.parametrize(("found", "words"), PROBLEMS.values(), ids=PROBLEMS)
def test_it_runs_module_by_module_and_prepare_says_why_not(monkeypatch, tmp_path, model, caplog, found, words):
    machine(monkeypatch, tmp_path, **{{"torch": "torch_cuda"}.get(name, name): one for name, one in found.items()})
    before = [parameter.data_ptr() for parameter in model.parameters()]
    for _ in range(2):
        assert decoder_of(model, "cuda") is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("LlamaForCausalLM runs module by module: ")
    assert words in said
    with pytest.raises(KernelError) as error:
        hf_mlspec.prepare(model)
    assert str(error.value).startswith("prepare needs the CUDA kernels: ")
    assert words in str(error.value)
    assert not is_prepared(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


def test_prepare_names_the_weight_of_another_dtype(monkeypatch, model):
    monkeypatch.setattr("hf_mlspec.ops.why_no_cuda_kernels", lambda device: None)
    model.model.layers[1].mlp.up_proj.half()
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight is torch\.float16 on cuda:0, where the "):
        hf_mlspec.prepare(model)
    assert not is_prepared(model)
