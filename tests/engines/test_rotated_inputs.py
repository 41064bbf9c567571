"""Do the compiled decoders rotate the inputs of o_proj and down_proj, in steps, prompts and exact chains?"""

from __future__ import annotations

import pytest
import torch
from decoders import in_float64, random_model
from models import packed, prompts
from torch import nn

import hf_mlspec
from hf_mlspec.calibration.rotation import rotate
from hf_mlspec.engines.architecture import UnknownArchitecture
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.engines.cuda.engine import CudaEngine
from hf_mlspec.engines.engine import Guess
from hf_mlspec.formats.hadamard import Hadamard, fitting_hadamard
from hf_mlspec.nn.packed import PackedLinear
from hf_mlspec.nn.switch import precision_switch
from hf_mlspec.nn.transforms import HADAMARD, record_of
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
LENGTH = 37
SHAPE = {"hidden_size": 160, "intermediate_size": 288, "head_dim": 48}  # 288 = 36 * 8
FORMATS = {
    "int4": ("int4", {}, ("w4a16", "w4a8", "w4a4")),
    "mxfp4": ("mxfp4", {}, ("mxfp4", "mxfp4a8")),
    "planes": ("planes", {}, ("planes8", "planes5")),
    "nested": ("nested", {}, ("nested", "nested4", "nested4a8")),
}
LIKE_MODULES = {"w4a8": 0.03, "mxfp4a8": 0.03, "w4a4": 0.3}  # of the largest logit; others are within 0.02


def rotated(name: str, weights: str, dtype: torch.dtype = torch.float32, **settings) -> nn.Module:
    """A packed model whose o_proj and down_proj want rotated inputs."""
    model = packed(random_model(name, dtype, **SHAPE), weights, **settings)
    for path, module in model.named_modules():
        if isinstance(module, PackedLinear):
            module.transform_(HADAMARD)
            if path.endswith("down_proj"):
                module.transform_(HADAMARD, record_of(fitting_hadamard(module.in_features)))
            if path.endswith("o_proj"):
                module.transform_(HADAMARD, record_of(Hadamard(4, 1, module.in_features // 4)))
    return model


def scored(model: nn.Module, ids: torch.Tensor, decoder: CpuDecoder | CudaDecoder) -> torch.Tensor:
    kind = CudaEngine if isinstance(decoder, CudaDecoder) else CpuEngine
    engine = kind(model, decoder, capacity=ids.shape[1])
    engine.start(len(ids), torch.device("cpu"))
    return engine.feed([row[:1] for row in ids.tolist()], Guess(ids[:, 1:], [ids.shape[1] - 1] * len(ids)))


def some_ids(rows: int = 2) -> torch.Tensor:
    return torch.randint(1, 199, (rows, LENGTH), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("kind", [CpuDecoder, CudaDecoder])
@pytest.mark.parametrize(("name", "format"), [*(("llama", format) for format in FORMATS), ("gemma2", "int4"),
                                              ("phi3", "int4"), ("qwen2-windows", "mxfp4")], ids=str)  # fmt: skip
def test_near_the_modules_and_float64_at_every_precision(name, format, kind):
    weights, settings, words = FORMATS[format]
    dtype = torch.bfloat16 if weights == "nested" else torch.float32
    model, ids = rotated(name, weights, dtype, **settings), some_ids()
    with torch.no_grad():
        exact = in_float64(model)(ids).logits
        for word in words:
            with precision_switch(model).at(word):
                modules = model(ids).logits.float()
                out = scored(model, ids, kind(model)).float()
            largest = modules.abs().max()
            bound = 0.1 if weights == "nested" else LIKE_MODULES.get(word, 0.02)
            assert (out - modules).abs().max() < bound * largest, word
            if word in ("w4a16", "mxfp4", "planes8", "nested"):
                assert (out - exact).abs().max() < 0.06 * exact.abs().max(), word


@pytest.mark.parametrize("threads", [1, 3])
def test_bits_of_a_token_depend_on_no_other_token_and_on_no_thread(threads):
    model, ids = rotated("llama", "int4"), some_ids(3)
    decoder, own = CpuDecoder(model), torch.get_num_threads()
    together = scored(model, ids, decoder)
    try:
        torch.set_num_threads(threads)
        for row in range(3):
            assert torch.equal(scored(model, ids[row : row + 1], decoder), together[row : row + 1])
        assert torch.equal(scored(model, ids[:, :5], decoder), together[:, :5])
    finally:
        torch.set_num_threads(own)


@pytest.mark.parametrize("levels", [["w4a8"], ["w4a4"], ["w4a4", "prompt_lookup"], ["early_exit:1"]], ids=str)
def test_chains_write_what_the_target_alone_writes(levels):
    model = rotated("llama", "int4", torch.bfloat16)
    inputs = prompts([5, 9, 20])
    options = {"do_sample": False, "max_new_tokens": 32, "eos_token_id": None, "pad_token_id": 0}
    alone = model.generate(**inputs, **options, assistant_models=[])
    chain = model.generate(**inputs, **options, assistant_models=levels, speculation_config={"num_draft_tokens": 3})
    assert torch.equal(chain, alone)
    assert hf_mlspec.last_stats(model).levels[0].drafted > 0


@pytest.mark.parametrize("decoder", ["cpu", "cuda"])
def test_a_dense_rotated_model_runs_compiled(decoder):
    model = random_model("qwen3", torch.float32)
    ids = some_ids()
    with torch.no_grad():
        before = model(ids).logits
        rotate(model, seed=1)
        made = decoder_of(model, "cpu") if decoder == "cpu" else CudaDecoder(model)
        assert made is not None
        assert (scored(model, ids, made) - before).norm() < 1e-4 * before.norm()


def test_another_record_makes_another_decoder_and_other_places_are_refused():
    model, ids = rotated("llama", "int4"), some_ids()
    first = decoder_of(model, "cpu")
    assert decoder_of(model, "cpu") is first
    down = model.model.layers[0].mlp.down_proj
    before = scored(model, ids, first)
    down.transform_(HADAMARD, record_of(Hadamard(32)))
    second = decoder_of(model, "cpu")
    assert second is not first
    assert not torch.equal(scored(model, ids, second), before)
    model.model.layers[0].mlp.up_proj.transform_(HADAMARD, record_of(Hadamard(32)))
    for kind in (CpuDecoder, CudaDecoder):
        with pytest.raises(UnknownArchitecture, match=r"its (up|gate, up) rotates its inputs; a compiled decoder rot"):
            kind(model)


def test_the_compiled_decoder_names_what_it_cannot_rotate():
    decoder = CpuDecoder(rotated("llama", "int4"))
    with pytest.raises(ValueError, match=r"up\.hadamard: o and down have rotated inputs"):
        decoder.handle.set_hadamard("up", None, 32, 1)
    with pytest.raises(ValueError, match=r"down\.hadamard: x has 288 columns, size 64 times inner 1 does not divide"):
        decoder.handle.set_hadamard("down", None, 64, 1)
    with pytest.raises(ValueError, match=r"down\.order: its inputs are rotated"):
        decoder.handle.set_order("down", torch.arange(288, dtype=torch.int32))
