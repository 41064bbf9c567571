"""On a GPU: does the compiled decoder send tokens through experts as the modules do, in captured rounds, too?"""

from __future__ import annotations

import pytest
import torch
from decoders import MIXTURES, Lanes, in_float64, random_model
from models import prompts
from torch import nn

import hf_mlspec
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.nn.experts import PackedExperts
from hf_mlspec.nn.switch import PrecisionSwitch

pytestmark = pytest.mark.usefixtures("kernels_are_required")
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "moe_intermediate_size": 64}
SHAPE |= {"shared_expert_intermediate_size": 96}
LENGTH = 60
NARROW = 0.05  # of the standard deviation of a router's logits: below, rounding decides where a token goes
CLASSES = ["mixtral", "olmoe", "qwen2-moe", "qwen3-moe"]


def on_gpu(name: str, **options) -> nn.Module:
    return random_model(name, torch.bfloat16, **{**SHAPE, **options}).cuda()


def packed_on_gpu(name: str, format: str, **options) -> nn.Module:
    model, switch = random_model(name, torch.bfloat16, **SHAPE), PrecisionSwitch(format)
    for path, module in list(model.named_modules()):
        if path.endswith(".experts"):
            model.set_submodule(path, PackedExperts.from_module(module, format, switch, path, **options))
    return model.eval().cuda()


def random_ids(batch: int, length: int = LENGTH) -> list[list[int]]:
    return torch.randint(1, 199, (batch, length), generator=torch.Generator().manual_seed(7)).tolist()


def exact_and_firm(model: nn.Module, ids: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits in float64, and which tokens come before any of their row whose experts a rounding error could change."""
    wide = in_float64(model).cuda()
    wide.set_experts_implementation("eager")
    narrow = torch.zeros(len(ids), len(ids[0]), dtype=torch.bool, device="cuda")

    def look(router: nn.Module, _, outputs) -> None:
        logits, chosen = outputs[0].view(*narrow.shape, -1), router.top_k
        if chosen < logits.shape[-1]:
            best = logits.sort(dim=-1, descending=True).values
            narrow.logical_or_(best[..., chosen - 1] - best[..., chosen] < NARROW * logits.std())

    for layer in wide.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(look)
    with torch.no_grad():
        logits = wide(torch.tensor(ids).cuda()).logits
    return logits, narrow.cumsum(dim=1) == 0


@pytest.mark.parametrize("name", MIXTURES)
def test_within_three_times_the_error_of_the_modules(name):
    """Where no choice of experts hangs on a rounding error."""
    model, ids = on_gpu(name), random_ids(12)
    with torch.no_grad():
        stock = model(torch.tensor(ids).cuda()).logits.double()
    exact, firm = exact_and_firm(model, ids)
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
    exact, firm = exact_and_firm(model, ids)
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


def test_a_long_prompt_is_what_its_tokens_are():
    """Thousands of tokens an expert, in items of many rows."""
    decoder = CudaDecoder(on_gpu("qwen3-moe", max_position_embeddings=2048))
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
    model = hf_mlspec.prepare(on_gpu(name), engine="cuda")
    inputs = {key: value.cuda() for key, value in prompts([5, 9, 40]).items()}
    options = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None, "pad_token_id": 0}
    alone = model.generate(**inputs, **options, assistant_models=[])
    chain = model.generate(**inputs, **options, assistant_models=levels, speculation_config={"num_draft_tokens": 3})
    assert torch.equal(chain, alone)
    stats = hf_mlspec.last_stats(model)
    assert stats.levels[0].drafted > 0
    assert stats.capture_seconds > 0
    one = {key: value[2:] for key, value in inputs.items()}
    assert torch.equal(model.generate(**one, **options, assistant_models=levels)[0, -40:], alone[2, -40:])


def test_a_captured_step_is_the_step_and_nothing_waits():
    decoder, rows = CudaDecoder(on_gpu("qwen2-moe")), random_ids(4)
    eager = Lanes(decoder, 4)
    eager.feed([row[:20] for row in rows])
    kv = eager.kv.clone()
    ids = torch.zeros(4, 9, dtype=torch.int32, device="cuda")
    starts, counts = (torch.zeros(4, dtype=torch.int32, device="cuda") for _ in range(2))
    pick = torch.arange(36, device="cuda")
    decoder.forward(ids, starts, counts, kv, pick=pick)  # libraries load outside of the capture
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            logits = decoder.forward(ids, starts, counts, kv, pick=pick)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for first, last in ((20, 29), (29, 30), (30, 37)):
        ids[:, : last - first] = torch.tensor([row[first:last] for row in rows], device="cuda")
        starts.fill_(first)
        counts.fill_(last - first)
        graph.replay()
        expected = torch.stack(eager.feed([row[first:last] for row in rows]))
        assert torch.equal(logits.view(4, 9, -1)[:, : last - first], expected), first
