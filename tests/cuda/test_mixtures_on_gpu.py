"""On a GPU: does the compiled decoder send tokens through experts as the modules do, in captured rounds, too?"""

from __future__ import annotations

import pytest
import torch
from decoder_cases import check_captured_chain, check_captured_step, random_ids
from decoders import MIXTURES, Lanes, exact_and_firm, random_model
from torch import nn

from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.nn.experts import PackedExperts
from hf_mlspec.nn.switch import PrecisionSwitch

pytestmark = pytest.mark.usefixtures("kernels_are_required")
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "moe_intermediate_size": 64}
SHAPE |= {"shared_expert_intermediate_size": 96}
LENGTH = 60
CLASSES = ["mixtral", "olmoe", "qwen2-moe", "qwen3-moe", "gpt-oss", "glm4-moe", "glm4-moe-groups"]


def on_gpu(name: str, **options) -> nn.Module:
    return random_model(name, torch.bfloat16, **{**SHAPE, **options}).cuda()


def packed_on_gpu(name: str, format: str, **options) -> nn.Module:
    model, switch = random_model(name, torch.bfloat16, **SHAPE), PrecisionSwitch(format)
    for path, module in list(model.named_modules()):
        if path.endswith(".experts"):
            model.set_submodule(path, PackedExperts.from_module(module, format, switch, path, **options))
    return model.eval().cuda()


@pytest.mark.parametrize("name", MIXTURES)
def test_within_three_times_the_error_of_the_modules(name):
    """Where no choice of experts hangs on a rounding error."""
    model, ids = on_gpu(name), random_ids(12)
    with torch.no_grad():
        stock = model(torch.tensor(ids).cuda()).logits.double()
    exact, firm = exact_and_firm(model, torch.tensor(ids))
    assert firm.sum() >= 12
    out = torch.stack(Lanes(CudaDecoder(model), 12).feed(ids)).double()
    error, theirs = ((logits - exact)[firm].abs().mean() for logits in (out, stock))
    assert 0 < error <= 3 * theirs


@pytest.mark.parametrize("name", MIXTURES)
def test_bits_do_not_depend_on_who_else_visits_an_expert(name):
    """One by one, in checks of nine, alone, in a batch of 32, behind padding: the same bits."""
    decoder, ids = CudaDecoder(on_gpu(name)), random_ids(32)
    few = ids[:3]
    together = torch.stack(Lanes(decoder, 3).feed(few))
    assert together.isfinite().all()
    single = Lanes(decoder, 3)
    steps = [torch.stack(single.feed([row[i : i + 1] for row in few])) for i in range(LENGTH)]
    assert torch.equal(torch.cat(steps, dim=1), together)
    crowd = Lanes(decoder, 32, slots=256)
    pieces = [crowd.feed([row[first : first + 9] for row in ids], padding=first % 2) for first in range(0, LENGTH, 9)]
    assert torch.equal(torch.cat([piece[1] for piece in pieces]), together[1])
    assert torch.equal(Lanes(decoder, 1, slots=512).feed(ids[2:3], padding=7)[0], together[2])


FORMATS = {"mxfp4": {}, "int4": {"group_size": 32}, "int4 with zeros": {"group_size": 32, "symmetric": False}}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", CLASSES)
def test_packed_experts_follow_their_values_and_keep_bits(name, format):
    model, ids = packed_on_gpu(name, format.split()[0], **FORMATS[format]), random_ids(16)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    exact, firm = exact_and_firm(model, torch.tensor(ids))
    assert firm.sum() >= 16
    decoder = CudaDecoder(model)
    for bits in decoder.bit_choices:
        together = torch.stack(Lanes(decoder, 16).feed(ids, bits=bits))
        error = (together.double() - exact)[firm].abs().mean() / exact[firm].abs().mean()
        assert error < {16: 0.03, 8: 0.06, 4: 0.4}[bits.activation], bits
        single = Lanes(decoder, 2)
        steps = [torch.stack(single.feed([row[i : i + 1] for row in ids[:2]], bits=bits)) for i in range(LENGTH)]
        assert torch.equal(torch.cat(steps, dim=1), together[:2]), bits
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key]), key


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_a_long_prompt_is_what_its_tokens_are(name):
    """Thousands of tokens an expert, in items of many rows; windows and sinks in the kernel for prompts."""
    decoder = CudaDecoder(on_gpu(name, max_position_embeddings=2048))
    ids = random_ids(2, 1500)
    whole = torch.stack(Lanes(decoder, 2, slots=2048).feed(ids))
    pieces = Lanes(decoder, 2, slots=2048)
    parts = [torch.stack(pieces.feed([row[first : first + 100] for row in ids])) for first in range(0, 1500, 100)]
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_an_expert_that_takes_all_tokens_and_those_that_nobody_chose():
    model, ids = on_gpu("qwen3-moe"), random_ids(9)
    mlp = model.get_submodule("model.layers.1.mlp")
    with torch.no_grad():
        mlp.gate.weight.zero_()  # all equal: every token goes to the first two
    expected = torch.stack(Lanes(CudaDecoder(model), 9).feed(ids))
    alone = Lanes(CudaDecoder(model), 1).feed(ids[4:5])[0]
    assert torch.equal(alone, expected[4])
    with torch.no_grad():
        mlp.experts.gate_up_proj[2:] = torch.nan
        mlp.experts.down_proj[2:] = torch.nan
    assert torch.equal(torch.stack(Lanes(CudaDecoder(model), 9).feed(ids)), expected)
    assert expected.isfinite().all()


def test_a_broken_router_is_named_with_layer_and_expert():
    model = on_gpu("mixtral")
    with torch.no_grad():
        model.get_submodule("model.layers.1.mlp").gate.weight[3, 7] = torch.nan
    with pytest.raises(ValueError, match="the router of layer 1 holds NaN or Inf in its row of expert 3"):
        CudaDecoder(model)


LEVELS = [["mxfp4"], ["experts:1"], ["mxfp4", "experts:1"], ["early_exit:1"], ["prompt_lookup"]]


@pytest.mark.parametrize("levels", LEVELS, ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_a_captured_chain_writes_what_the_target_alone_writes(name, levels):
    check_captured_chain(on_gpu(name), levels)


def test_its_own_mxfp4_drafts_for_itself_in_captured_rounds():
    """As gpt-oss is loaded: experts in MXFP4, all else as it is."""
    for levels in (["mxfp4a8"], ["experts:1"], ["prompt_lookup"]):
        check_captured_chain(packed_on_gpu("gpt-oss", "mxfp4"), levels)


@pytest.mark.parametrize("name", ["qwen2-moe", "gpt-oss", "glm4-moe-groups"])
def test_a_captured_step_is_the_step_and_nothing_waits(name):
    check_captured_step(CudaDecoder(on_gpu(name)))


@pytest.mark.parametrize("format", ["mxfp4", "int4"])
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_packed_experts_of_modules_wait_for_no_routing(name, format):
    """A token's bits are its own, and those of a routing that names experts of other processes are finite."""
    options = {} if format == "mxfp4" else {"group_size": 32}
    experts = packed_on_gpu(name, format, **options).get_submodule("model.layers.1.mlp.experts").prepack_()
    count, draw = experts.original.num_experts, torch.Generator().manual_seed(1)
    x = torch.randn(33, 128, generator=draw).bfloat16().cuda()
    chosen = torch.rand(33, count, generator=draw).argsort(-1)[:, :2].cuda()
    weights = torch.rand(33, 2, generator=draw).cuda()
    experts(x, chosen, weights)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = experts(x, chosen, weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.isfinite().all()
    assert found.abs().max() > 0
    experts._fits_plans = lambda x: False
    expected = experts(x, chosen, weights)
    del experts._fits_plans
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6 * float(expected.abs().max()))
    assert torch.equal(experts(x[5:6], chosen[5:6], weights[5:6]), found[5:6])
    chosen[::3, 0] = count
    here = experts(x, chosen, weights)
    assert here.isfinite().all()
    assert torch.equal(here[1], found[1])
