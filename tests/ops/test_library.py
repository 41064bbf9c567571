"""Is it always known, and said, which kernel serves an op?"""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from instruction_sets import ISAS

from hf_mlspec import ops
from hf_mlspec.ops import library
from hf_mlspec.ops.operator import REFERENCES

TILES = torch.zeros(1, 1, 256, dtype=torch.uint8), torch.full((1, 1, 16), 127, dtype=torch.uint8)
OPERANDS = (torch.ones(1, 32), *TILES, 4, None, 16)
REFERENCE = library._fallback("mxfp4_linear", REFERENCES["mxfp4_linear"], composed_on_cpu=False)


@pytest.fixture
def nothing_said(monkeypatch):
    monkeypatch.setattr(library, "_warned", set())
    monkeypatch.delenv(library.REQUIRE_VARIABLE, raising=False)


def test_every_linear_with_a_kernel_for_gpus_says_which_of_two_serves_it():
    bindings = Path(__file__).resolve().parents[2] / "kernels_ext" / "bindings" / "cuda"
    texts = [path.read_text(encoding="utf-8") for path in bindings.glob("*.cpp")]
    registered = {name for text in texts for name in re.findall(r'm\.impl\("(\w+_linear)"', text)}
    one_for_all = {"zipper_high_linear"}
    others = {"bitplane_apart", "bitplane_chosen", "bitplane_part", "bitplane_sums", "int4_sums"}
    assert (registered - one_for_all) | others == library._HOPPER_OPS


def test_table_lists_every_op_on_every_device():
    table = ops.kernel_table()
    composed = {"adapted_linear", "bf16_rows_linear", "bitplane_apart", "bitplane_chosen", "bitplane_part",
                "bitplane_sums", "choose_of_prompt", "choose_of_steps", "embed_rows", "gated", "gated_codes",
                "gated_hadamard", "gated_in_order", "gated_pairs", "int4_codes_linear", "int4_sums", "low_rank_added",
                "low_rank_between", "norm_codes", "row_codes", "ordered_rows",
                "ragged_attention_rows", "rms_norm_in_order", "rope_write_rows", "round_lookup", "round_open",
                "round_push", "round_settle", "round_window", "zipper_high_joined", "dense_expert_rows",
                "int4_expert_rows", "mxfp4_expert_rows", "nested_expert_rows", "plan_rows", "plane_expert_rows",
                "route_rows",
                "norm_route_row", "weighted_norm_rows", "weighted_rows", "delta_rows", "sigmoid_gated"}  # fmt: skip
    every = {(op, device) for op in REFERENCES for device in ("cpu", "cuda")}
    assert sorted(row[:2] for row in table) == sorted(every - {(op, "cpu") for op in composed})
    on_cpu = {kernel for _, device, kernel in table if device == "cpu"}
    assert len(on_cpu) == 1  # one instruction set serves every op, or none does
    assert on_cpu <= {"reference"} if library.LOAD_ERROR else on_cpu <= set(ISAS)
    on_gpu = {kernel for _, device, kernel in table if device == "cuda"}
    assert on_gpu == {"reference"} if ops.why_no_cuda_kernels() else on_gpu <= {"sm_90a", "sm_80+", "reference"}


@pytest.mark.usefixtures("nothing_said")
def test_the_reference_path_says_so_once_and_names_the_remedy():
    with pytest.warns(RuntimeWarning, match=r"pip install --no-build-isolation -e \."):
        REFERENCE(*OPERANDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert REFERENCE(*OPERANDS).shape == (1, 4)


@pytest.mark.usefixtures("nothing_said")
def test_required_kernels_make_it_an_error(monkeypatch):
    monkeypatch.setenv(library.REQUIRE_VARIABLE, "1")
    with pytest.raises(ops.KernelError, match=r"no compiled kernel for mxfp4_linear on cpu.*MLSPEC_REQUIRE_KERNELS=1"):
        REFERENCE(*OPERANDS)


def test_no_library_and_a_broken_library_are_told(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "_PACKAGE", tmp_path)
    assert str(tmp_path) in library._load()
    (tmp_path / "_C.so").write_bytes(b"not a library")
    assert library._load().startswith("_C.so does not load")


def test_a_package_without_the_library_runs_on_the_reference_path():
    """In a process where loading fails: the op works, the table says reference."""
    code = (
        "import torch, warnings\n"
        "torch.ops.load_library = lambda path: (_ for _ in ()).throw(OSError('other torch'))\n"
        "from hf_mlspec import ops\n"
        "assert ops.kernel_table()[0][2] == 'reference', ops.kernel_table()\n"
        "packed, scale = torch.full((4, 16), 0x22, dtype=torch.uint8), torch.full((4, 1), 127, dtype=torch.uint8)\n"
        "tiles = ops.prepack_mxfp4(packed, scale)\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always')\n"
        "    y = [ops.mxfp4_linear(torch.ones(1, 32), *tiles, 4) for _ in range(3)]\n"
        "assert y[0].tolist() == [[32.0] * 4]\n"
        "assert len([w for w in said if 'reference path' in str(w.message)]) == 1, said\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != library.REQUIRE_VARIABLE}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
