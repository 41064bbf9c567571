"""On a GPU: does a model of zipper weights decode compiled, draft for itself in a graph, and share its memory?"""

from __future__ import annotations

import pytest
import torch
from decoder_cases import check_captured_chain, check_levels, check_near_float64, random_ids
from decoders import joined_linears, random_model
from models import prompts
from torch import nn

import hf_mlspec
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.formats import ZipperWeight
from hf_mlspec.formats.zipper import MODES
from hf_mlspec.nn.switch import PrecisionSwitch
from hf_mlspec.nn.zipper import ZipperLinear

pytestmark = pytest.mark.usefixtures("kernels_are_required")
# Keys, values and gates fill tiles of 128 outputs; odd ones do not.
WHOLE = {
    "hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
ODD = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}


def on_gpu(
    name: str = "llama", shape: dict[str, int] = WHOLE, mode: str = "clamp", high_part: str = "device", **options
) -> nn.Module:
    """The model, its linears but the head with weights in two parts, called by one switch."""
    model, switch = random_model(name, torch.bfloat16, **shape, **options), PrecisionSwitch("zipper")
    head = model.get_output_embeddings()
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not head:
            weight = ZipperWeight.from_dense(module.weight.detach(), mode=mode, high_part=high_part)
            model.set_submodule(path, ZipperLinear(weight, module.bias, switch).eval())
    return model.cuda()


@pytest.mark.parametrize(
    ("name", "shape", "mode"),
    [("llama", WHOLE, "exact"), ("llama", ODD, "clamp"), ("phi3", WHOLE, "paper"), ("gemma3", WHOLE, "clamp")],
)
def test_both_levels_are_what_the_modules_compute_in_steps_with_the_same_bits(name, shape, mode):
    check_levels(on_gpu(name, shape, mode), ["zipper", "zipper-low"])


def test_low_parts_of_4_bits_meet_integers():
    """Product by product as in the modules. End to end bfloat16 alone decides where many integers fall: modules are
    .04 (8 bits) and .4 (4 bits) from float32 ones."""
    model = on_gpu(mode="paper")
    decoder, switch = CudaDecoder(model), hf_mlspec.precision_switch(model)
    for level in ("zippera8", "zipper-lowa8", "zippera4", "zipper-lowa4"):
        for multiply, modules in joined_linears(model, decoder):
            x = torch.randn(17, modules[0].in_features, device="cuda", dtype=torch.bfloat16)
            with torch.no_grad(), switch.at(level):
                expected = torch.cat([module(x) for module in modules], dim=-1).float()
                error = (multiply(x, switch.bits).float() - expected).norm()
            assert error <= 0.002 * expected.norm(), level  # sums of joined weights may be in another order
    check_levels(model, ["zippera8", "zipper-lowa8"], within=0.1)
    check_levels(model, ["zippera4", "zipper-lowa4"], within=None)
    switch.activation_bits = 8
    check_captured_chain(model, ["zipper-lowa8"])
    check_captured_chain(model, ["zippera4"])


def test_near_float64_with_both_parts():
    check_near_float64(on_gpu(mode="exact", tie_word_embeddings=False))


def test_weights_that_fill_their_tiles_are_not_held_twice():
    model = on_gpu()
    decoder = CudaDecoder(model)
    assert decoder.extra_bytes == 0
    attention = model.model.layers[0].self_attn
    splits = [module.weight_split for module in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert len({split.untyped_storage().data_ptr() for split in splits}) == 1
    assert CudaDecoder(model).extra_bytes == 0  # of the same memory
    assert splits[0].data_ptr() == attention.q_proj.weight_split.data_ptr()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("levels", [["zipper-low"], ["zipper-low", "prompt_lookup"]], ids=str)
def test_a_captured_chain_writes_what_the_target_alone_writes(levels, mode):
    check_captured_chain(on_gpu(mode=mode), levels)


@pytest.mark.parametrize("method", ["quarot", "smoothquant+gptq", "quarot+smoothquant"])
def test_calibrated_weights_decode_compiled_and_draft_for_themselves(method):
    model = random_model("llama", torch.bfloat16, **WHOLE).cuda()
    hf_mlspec.quantize(model, method, "zipper", calibration=random_ids(4), mode="clamp")
    check_levels(model, ["zipper", "zipper-low"])
    check_captured_chain(model, ["zipper-low"])


def test_modules_write_what_the_target_alone_writes_and_keep_what_they_held():
    model, inputs = on_gpu(), {name: value.cuda() for name, value in prompts([8, 5]).items()}
    options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
    model = hf_mlspec.prepare(model, engine="modules")
    written = model.generate(**inputs, **options, assistant_models=["zipper-low"])
    assert written.shape[1] == inputs["input_ids"].shape[1] + 24
    assert hf_mlspec.last_stats(model).levels[0].drafted > 0
    decoder = CudaDecoder(model)
    saved = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    assert decoder.num_layers == len(model.model.layers)
    back = model.cpu().state_dict()
    assert all(torch.equal(tensor, back[name]) for name, tensor in saved.items())
