"""Is a packed format that a decoder has no slot for refused politely, by both decoders?"""

from __future__ import annotations

import pytest
import torch
from models import packed, tiny

from hf_mlspec.engines.architecture import UnknownArchitecture
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.engines.cpu import weights as cpu_weights
from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cuda import weights as cuda_weights
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

cpu = pytest.param("cpu", marks=pytest.mark.skipif(not has_compiled_decoder(), reason="no compiled kernels"))
DECODERS = {"cpu": CpuDecoder, "cuda": CudaDecoder}
NAMES = {"cpu": "CPU", "cuda": "CUDA"}


@pytest.fixture
def model():
    shape = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    return packed(tiny(seed=2, dtype=torch.bfloat16, **shape), "int4")


def test_both_decoders_read_the_same_formats_but_one():
    assert set(cuda_weights.SLOTS) == {"mxfp4", "int4", "int4_int8", "nested", "planes", "lut", "zipper"}
    assert set(cpu_weights.SLOTS) == {*cuda_weights.SLOTS}


@pytest.mark.parametrize("name", [cpu, "cuda"])
def test_a_format_without_a_slot_is_refused(model, name, monkeypatch, caplog):
    monkeypatch.delitem((cpu_weights if name == "cpu" else cuda_weights).SLOTS, "int4")
    words = f"linears are int4, which the {NAMES[name]} decoder does not read"
    with pytest.raises(UnknownArchitecture, match=words):
        DECODERS[name](model)
    assert decoder_of(model, name) is None
    assert f"LlamaForCausalLM runs module by module: its q{', k, v' if name == 'cuda' else ''} {words}" in caplog.text
