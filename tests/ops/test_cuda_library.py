"""Is it known, without a GPU and without loading it, which GPUs a compiled library serves, and said why not?"""

import pytest
import torch

from hf_mlspec.ops import cuda_library
from hf_mlspec.ops.cuda_library import Built

HOPPER = (9, 0)


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A folder for a library, on a machine whose driver knows CUDA 13.0 and which has loaded nothing."""
    monkeypatch.setattr(cuda_library, "_PACKAGE", tmp_path)
    monkeypatch.setattr(cuda_library, "_loaded", [])
    monkeypatch.setattr(cuda_library, "_driver_version", lambda: 13000)
    return tmp_path


def write_library(folder, toolkit=13000, archs="80;90a"):
    content = f"hf_mlspec CUDA toolkit={toolkit} archs={archs}\n".encode()
    (folder / "_CUDA.so").write_bytes(b"\x7fELF" + bytes(5000) + content + bytes(5000))


@pytest.mark.parametrize(("archs", "served", "not_served"), [
    ("80", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0)]),
    ("89", [(8, 9)], [(8, 0), (8, 6)]),
    ("90a", [(9, 0)], [(9, 1), (10, 0)]),
    ("100;120", [(10, 0), (10, 3), (12, 0), (12, 1)], [(9, 0), (11, 0), (8, 9)]),
])
def test_which_gpus_an_architecture_runs_on(archs, served, not_served):
    built = Built(None, 13000, tuple(archs.split(";")))
    assert all(built.serves(gpu) for gpu in served)
    assert not any(built.serves(gpu) for gpu in not_served)


def test_a_library_says_what_it_was_built_for(package):
    assert cuda_library.built_library() is None
    write_library(package)
    assert cuda_library.built_library() == (package / "_CUDA.so", 13000, ("80", "90a"))


def test_no_library(package):
    reason = cuda_library._load_for(HOPPER, "H200")
    assert reason.startswith(f"no compiled library _CUDA.so in {package}; build it in the source tree with `pip ")


def test_a_library_for_other_gpus_names_both(package):
    write_library(package, archs="80;90a")
    reason = cuda_library._load_for((12, 0), "RTX 5090")
    assert "_CUDA.so is built for sm_80, sm_90a, this GPU (RTX 5090) is sm_120" in reason
    assert reason.endswith("and MLSPEC_CUDA_ARCHS=120")


def test_a_driver_older_than_the_toolkit(package, monkeypatch):
    write_library(package)
    monkeypatch.setattr(cuda_library, "_driver_version", lambda: 12080)
    reason = cuda_library._load_for(HOPPER, "H200")
    assert "built with CUDA 13.0, the driver knows CUDA up to 12.8; update the driver" in reason


def test_a_file_that_is_no_library_of_ours_or_does_not_load(package):
    (package / "_CUDA.so").write_bytes(bytes(100))
    assert "does not say what it was built for; build it" in cuda_library._load_for(HOPPER, "H200")
    write_library(package)
    assert cuda_library._load_for(HOPPER, "H200").startswith("_CUDA.so does not load (")


@pytest.mark.skipif(torch.version.cuda is not None, reason="for a torch without CUDA")
def test_a_torch_without_cuda():
    assert cuda_library.why_no_cuda_kernels().endswith("is built without CUDA; install a CUDA build of torch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_a_machine_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert cuda_library.why_no_cuda_kernels().startswith("torch finds no CUDA GPU it can use; `nvidia-smi` shows")
    assert not cuda_library.serves(torch.ones(1))
