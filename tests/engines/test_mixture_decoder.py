"""Does the compiled decoder route and multiply experts as the model's modules do, whoever else is in the call?"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from decoders import MIXTURES, PACKED_MIXTURE, Lanes, exact_and_firm, random_model
from models import packed
from torch import nn
from warned import forget_warnings

import hf_mlspec
from hf_mlspec.engines.architecture import KNOWN, Mixture, UnknownArchitecture, outline
from hf_mlspec.engines.architecture.description import SHARED_UNWEIGHED
from hf_mlspec.engines.built import standing
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.engines.cuda.served import require_served
from hf_mlspec.engines.engine import Guess
from hf_mlspec.nn.experts import PackedExperts
from hf_mlspec.nn.nested import NestedLinear
from hf_mlspec.nn.nested_experts import NestedExperts
from hf_mlspec.nn.packed import PackedLinear
from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.nn.switch import PrecisionSwitch
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.precision import OWN_BITS, Bits

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")

LENGTH = 41
LAYER = "model.layers.1.mlp"


@pytest.fixture(autouse=True)
def nothing_said_yet():
    forget_warnings()


def runner_of(model: nn.Module, batch: int, bits: Bits = OWN_BITS) -> CpuEngine:
    runner = CpuEngine(model, CpuDecoder(model), capacity=LENGTH, bits=bits)
    runner.start(batch, torch.device("cpu"))
    return runner


def scored_together(model: nn.Module, ids: torch.Tensor, bits: Bits = OWN_BITS) -> torch.Tensor:
    rows = [row[:1] for row in ids.tolist()]
    return runner_of(model, len(ids), bits).feed(rows, Guess(ids[:, 1:], [ids.shape[1] - 1] * len(ids)))


def some_ids(rows: int = 2, seed: int = 5) -> torch.Tensor:
    return torch.randint(1, 199, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MIXTURES)
def test_within_twice_the_error_of_the_modules(name, dtype):
    """Where no choice of experts hangs on a rounding error; in float32 that is everywhere."""
    model, ids = random_model(name, dtype), some_ids(8)
    with torch.no_grad():
        stock = model(ids).logits.double()
    exact, firm = exact_and_firm(model, ids)
    firm = torch.ones_like(firm) if dtype == torch.float32 else firm
    assert firm.sum() >= 8
    error, theirs = ((logits - exact)[firm].abs().max() for logits in (scored_together(model, ids).double(), stock))
    assert 0 < error <= 2 * theirs


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MIXTURES)
def test_bits_do_not_depend_on_who_else_visits_an_expert(name, dtype, threads):
    """All at once, one by one, alone in the batch, beside a row of another length, and on any number of threads."""
    model, ids = random_model(name, dtype), some_ids()
    rows, before = ids.tolist(), torch.get_num_threads()
    together = scored_together(model, ids)
    torch.set_num_threads(threads)
    try:
        single = runner_of(model, 2)
        one_by_one = torch.stack([single.feed([row[: i + 1] for row in rows])[:, 0] for i in range(LENGTH)], dim=1)
        assert torch.equal(together, one_by_one)
        assert torch.equal(together[1:], scored_together(model, ids[1:]))
        ragged = runner_of(model, 2)
        ragged.feed([rows[0][:30], rows[1][:5]])
        logits = ragged.feed([rows[0][:31], rows[1][:6]], Guess(torch.tensor([rows[0][31:34], rows[1][6:9]]), [3, 2]))
        assert torch.equal(logits[0], together[0, 30:34])
        assert torch.equal(logits[1, :3], together[1, 5:8])
    finally:
        torch.set_num_threads(before)


def test_a_prompt_longer_than_one_pass():
    model = random_model("qwen3-moe", torch.bfloat16, max_position_embeddings=2048)
    ids = torch.randint(1, 199, (2, 700))
    runner, halves = runner_of(model, 2), runner_of(model, 2)
    whole = runner.feed(ids.tolist())
    halves.feed([row[:333] for row in ids.tolist()])
    assert torch.equal(whole, halves.feed(ids.tolist()))


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen2-moe", "qwen3-moe"])
def test_an_expert_that_nobody_chose_is_not_read(name):
    model, ids = random_model(name, torch.float32), some_ids()
    router, experts = model.get_submodule(LAYER).gate, model.get_submodule(LAYER).experts
    with torch.no_grad():
        router.weight[3] = 0
        lowest = scored_together(model, ids)
        router.weight[3] = -1e3 * router.weight[0]  # of two that point apart one wins where the other loses
        chosen = scored_together(model, ids)
    assert not torch.equal(lowest, chosen)
    few = ids[:1, :1]
    with torch.no_grad():
        router.weight.copy_(router.weight * 0)  # all equal: a token goes to the first ones
        expected = scored_together(model, few)
        experts.gate_up_proj[router.top_k :] = float("nan")
        experts.down_proj[router.top_k :] = float("nan")
    assert expected.isfinite().all()
    assert torch.equal(scored_together(model, few), expected)


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen2-moe", "qwen3-moe"])
def test_of_equal_experts_the_first_ones_are_chosen(name):
    """And a batch that all goes to the same experts is what its tokens are one by one."""
    model, ids = random_model(name, torch.float32), some_ids()
    router, experts = model.get_submodule(LAYER).gate, model.get_submodule(LAYER).experts
    with torch.no_grad():
        router.weight.copy_(router.weight[:1].expand_as(router.weight).clone())
        everyone = scored_together(model, ids)
        experts.down_proj[router.top_k :] = 0
        assert torch.equal(scored_together(model, ids), everyone)
        experts.down_proj[router.top_k - 1] = 0
        assert not torch.equal(scored_together(model, ids), everyone)


def test_weights_are_renormalized_where_the_router_says_so():
    for name in ("olmoe", "olmoe-renormalized"):
        model, ids = random_model(name, torch.float32), some_ids()
        before = scored_together(model, ids)
        for layer in model.model.layers:
            layer.mlp.gate.norm_topk_prob ^= True
        with torch.no_grad():
            stock = model(ids).logits
        after = scored_together(model, ids)
        assert (after - before).abs().max() > 1e-2
        torch.testing.assert_close(after, stock, atol=1e-4, rtol=1e-4)


def test_counts_of_experts_are_each_layers_own():
    model, ids = random_model("qwen3-moe", torch.float32), some_ids()
    block = model.get_submodule(LAYER)
    with torch.no_grad():
        for module, key in ((block.gate, "weight"), (block.experts, "gate_up_proj"), (block.experts, "down_proj")):
            setattr(module, key, nn.Parameter(getattr(module, key)[:4].clone(), requires_grad=False))
    block.gate.num_experts = block.experts.num_experts = 4
    model.get_submodule("model.layers.2.mlp").gate.top_k = 3
    with torch.no_grad():
        stock = model(ids).logits
    torch.testing.assert_close(scored_together(model, ids), stock, atol=1e-4, rtol=1e-4)


GROUPS = {"two of four": (4, 2, 2), "one of two": (2, 1, 3), "all of two": (2, 2, 3), "one of one": (1, 1, 8)}


@pytest.mark.parametrize(("groups", "looked_at", "chosen"), GROUPS.values(), ids=GROUPS)
def test_experts_are_chosen_in_the_best_groups(groups, looked_at, chosen):
    """As the modules choose them, and not as without groups; a draft with fewer experts looks at the same ones."""
    how = {"n_group": groups, "topk_group": looked_at, "num_experts_per_tok": chosen}
    model, ids = random_model("glm4-moe", torch.float32, **how), some_ids(4)
    for one in (model, hf_mlspec.fewer_experts(model, 1)):
        with torch.no_grad():
            stock = one(ids).logits
        found = scored_together(one, ids)
        torch.testing.assert_close(found, stock, atol=1e-4, rtol=1e-4)
    before = scored_together(model, ids)
    for layer in list(model.model.layers)[1:]:
        layer.mlp.gate.num_group = layer.mlp.gate.topk_group = 1
    assert torch.equal(scored_together(model, ids), before) == (groups == looked_at)


def test_a_bias_of_the_choice_weighs_nothing():
    """Of all experts it chooses them, and their weights are as without it."""
    model, ids = random_model("glm4-moe", torch.float32, num_experts_per_tok=8), some_ids()
    before = scored_together(model, ids)
    for layer in list(model.model.layers)[1:]:
        layer.mlp.gate.e_score_correction_bias.neg_()  # another order of the same experts
    torch.testing.assert_close(scored_together(model, ids), before, atol=1e-4, rtol=1e-4)
    model = random_model("glm4-moe", torch.float32)
    before = scored_together(model, ids)
    model.get_submodule(LAYER).gate.e_score_correction_bias.neg_()
    assert (scored_together(model, ids) - before).abs().max() > 1e-2


@pytest.mark.parametrize(("name", "part", "attribute"), [
    ("glm4-moe", "mlp.gate", "routed_scaling_factor"),
    ("glm4-moe", "mlp.gate", "topk_group"),
    ("glm4-moe", "mlp.gate", "num_group"),
    ("gpt-oss", "mlp.experts", "limit"),
    ("gpt-oss", "mlp.experts", "alpha"),
])  # fmt: skip
def test_what_routers_and_experts_say_is_noticed(name, part, attribute):
    model = random_model(name, torch.float32)
    before = standing(model)
    assert standing(model) == before
    owner = model.model.layers[-1].get_submodule(part)
    setattr(owner, attribute, getattr(owner, attribute) + 1)
    assert standing(model) != before


def test_another_bias_of_the_choice_is_noticed():
    model = random_model("glm4-moe", torch.float32)
    before, router = standing(model), model.model.layers[-1].mlp.gate
    router.e_score_correction_bias = router.e_score_correction_bias.neg()
    assert standing(model) != before


def some_nested(name: str) -> tuple[nn.Module, nn.Module]:
    """A mixture, and the same nested; two experts have a value without a field."""
    model = random_model(name, torch.bfloat16, **PACKED_MIXTURE)
    for block in model.model.layers:
        experts = block.mlp.experts
        with torch.no_grad():
            experts.down_proj[2, 7, 5], experts.gate_up_proj[0, 9, 3] = 2.0**-60, -(2.0**-58)
    plain = copy.deepcopy(model)
    return plain, hf_mlspec.nest(model)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ["qwen3-moe", "qwen2-moe", "gpt-oss"])
def test_nested_experts_are_the_dense_ones_bit_for_bit(name, threads):
    """The whole model nested, at 16 bits, whoever else is in the call."""
    plain, model = some_nested(name)
    ids, before = some_ids(8), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = scored_together(model, ids)
        assert torch.equal(together, scored_together(plain, ids))
        assert torch.equal(together[3:4], scored_together(model, ids[3:4]))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bits", [Bits(4, 16), Bits(4, 8)])
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_drafts_of_nested_experts_follow_their_values_and_keep_bits(name, bits):
    """Beside the model whose weights are the drafts'; one by one, alone in the batch."""
    _, model = some_nested(name)
    draft, ids = copy.deepcopy(model), some_ids(8)
    values = {}
    for path, own in draft.named_modules():
        if isinstance(own, NestedLinear):
            values[path, "weight"] = own.dequantized_draft(torch.bfloat16)
        elif isinstance(own, NestedExperts):
            drafts = {key: own.dequantized_draft(key, torch.bfloat16) for key in own.names}
            turned = own.original.transposed
            values |= {(path, key): dense.transpose(1, 2) if turned else dense for key, dense in drafts.items()}
    hf_mlspec.unnest(draft)
    for (path, key), dense in values.items():
        getattr(draft.get_submodule(path), key).data.copy_(dense)
    exact, firm = exact_and_firm(draft, ids)
    together = scored_together(model, ids, bits)
    error = (together.double() - exact)[firm].abs().mean() / exact[firm].abs().mean()
    assert firm.sum() >= 4
    assert error < (0.03 if bits.activation == 16 else 0.08)
    single = runner_of(model, 2, bits)
    steps = [single.feed([row[: i + 1] for row in ids[:2].tolist()])[:, 0] for i in range(LENGTH)]
    assert torch.equal(torch.stack(steps, dim=1), together[:2])
    assert torch.equal(scored_together(model, ids[5:6], bits), together[5:6])


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_the_decoder_of_devices_multiplies_nested_experts(name):
    """Its ops in plain torch: exactly the dense ones', and drafts near to the CPU decoder's."""
    plain, model = some_nested(name)
    ids = some_ids(2).tolist()
    together, dense = (torch.stack(Lanes(CudaDecoder(own), 2).feed(ids)) for own in (model, plain))
    assert torch.equal(together, dense)
    decoder = CudaDecoder(model)
    assert {tuple(bits) for bits in decoder.bit_choices} == {(16, 16), (4, 16), (4, 8)}
    for bits in (Bits(4, 16), Bits(4, 8)):
        draft = torch.stack(Lanes(decoder, 2).feed(ids, bits=bits)).double()
        beside = scored_together(model, torch.tensor(ids), bits).double()
        error = ((draft - beside).norm(dim=-1) / beside.norm(dim=-1)).median()
        assert error < 0.05


@pytest.mark.parametrize("format", ["int4", "mxfp4", "nested", "planes"])
def test_a_shared_expert_in_every_format(format):
    dtype = torch.bfloat16 if format == "nested" else torch.float32
    model = packed(random_model("qwen2-moe", dtype, **PACKED_MIXTURE, shared_expert_intermediate_size=64), format)
    ids = some_ids(8)
    exact, firm = exact_and_firm(model, ids)
    found = scored_together(model, ids).double()
    error = ((found - exact).norm(dim=-1) / exact.norm(dim=-1))[firm]
    assert len(error) > 5
    assert float(error.median()) < 0.02


@pytest.mark.parametrize("experts", [False, True], ids=["dense experts", "int4 experts"])
def test_int4_that_is_dequantized_first_is_the_model_with_those_dense_weights(experts):
    """Shared experts and routed ones, whose activations lie as dense kernels read them."""
    shape = {**PACKED_MIXTURE, "shared_expert_intermediate_size": 64}
    model, ids = packed(random_model("qwen2-moe", torch.bfloat16, **shape), "int4"), some_ids(8)
    switch = next(module.switch for module in model.modules() if isinstance(module, PackedLinear))
    for path, module in list(model.named_modules()) if experts else []:
        if path.endswith(".experts"):
            own = PackedExperts.from_module(module, "int4", switch, path, group_size=32)
            model.set_submodule(path, own.eval())
    switch.multiply = "dequant"
    exact, firm = exact_and_firm(model, ids)
    found = scored_together(model, ids)
    error = ((found.double() - exact).norm(dim=-1) / exact.norm(dim=-1))[firm]
    assert len(error) > 5
    assert float(error.median()) < 0.02
    single = runner_of(model, 2)
    steps = [single.feed([row[: i + 1] for row in ids[:2].tolist()])[:, 0] for i in range(LENGTH)]
    assert torch.equal(torch.stack(steps, dim=1), found[:2])
    switch.multiply = "fused"
    assert not torch.equal(scored_together(model, ids), found)


def test_experts_that_are_dequantized_first_run_by_module_on_a_gpu():
    model = packed_mixture("qwen3-moe", "int4", group_size=32)
    model.get_submodule(LAYER).experts.switch.multiply = "dequant"
    with pytest.raises(UnknownArchitecture, match="its experts multiply by 'dequant', which the CUDA decoder does"):
        CudaDecoder(model)


def test_a_shared_expert_whose_planes_are_streamed_runs_by_module():
    model = random_model("qwen2-moe", torch.float32, **PACKED_MIXTURE, shared_expert_intermediate_size=64)
    packed(model, "planes")
    for linear in model.modules():
        if isinstance(linear, PlanesLinear) and linear.out_features > 1:
            linear.source = Streamed()
    with pytest.raises(UnknownArchitecture, match="its shared expert has a sparse part, rows with escapes, or planes"):
        CpuDecoder(model)


class Streamed:
    """Of planes that are always there the first is said to be."""

    top = 1

    def resident(self, linears):
        return [(*linear.prepack_().parts("weight")[:2], linear.out_features) for linear in linears]


def test_groups_without_enough_experts_and_a_broken_bias_are_named():
    model = random_model("glm4-moe", torch.float32, n_group=4, topk_group=1, num_experts_per_tok=3)
    with pytest.raises(ValueError, match="layer 1 sends each token to 3 of 8 experts in 1 of 4 groups: n_group"):
        CpuDecoder(model)
    model = random_model("glm4-moe", torch.float32)
    model.get_submodule(LAYER).gate.e_score_correction_bias[5] = float("nan")
    with pytest.raises(ValueError, match="bias of the router's choice of layer 1 holds NaN or Inf for expert 5"):
        CpuDecoder(model)


def test_more_experts_a_token_than_there_are_is_one_error():
    model = random_model("qwen3-moe", torch.float32)
    model.get_submodule(LAYER).gate.top_k = 7
    words = r"layer 1 sends each token to 7 experts and has 6: choose 1 to 6 as the config's num_experts_per_tok"
    with pytest.raises(ValueError, match=words):
        model.generate(some_ids()[:, :5], assistant_models=["mxfp4"], max_new_tokens=4)


def spoilt(name: str, linear: str, row: int, value: float) -> nn.Module:
    """A random model with this value in a row of a linear of its second layer's experts."""
    model = random_model(name, torch.bfloat16)
    with torch.no_grad():
        model.get_submodule(f"{LAYER}.{linear}").weight[row, 7] = value
    return model


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_router_is_named_with_layer_and_expert(value):
    model = spoilt("mixtral", "gate", 3, value)
    words = r"the router of layer 1 holds NaN or Inf in its row of expert 3: .*restore the checkpoint"
    with pytest.raises(ValueError, match=words):
        model.generate(some_ids()[:, :5], assistant_models=["prompt_lookup"], max_new_tokens=4)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_broken_gate_of_a_shared_expert_is_named_with_its_layer(value):
    model = spoilt("qwen2-moe", "shared_expert_gate", 0, value)
    words = r"the gate of the shared expert of layer 1 holds NaN or Inf: .*restore the checkpoint"
    with pytest.raises(ValueError, match=words):
        CpuDecoder(model)


def test_what_no_decoder_reads_runs_by_module_and_is_named(caplog):
    model = random_model("qwen3-moe", torch.float32)
    router = model.get_submodule(LAYER).gate
    router.weight = nn.Parameter(torch.cat([router.weight, router.weight[:1]]).detach(), requires_grad=False)
    assert decoder_of(model, "cpu") is None
    assert r"the router of layer 1 has weights of shape [7, 64] for 6 experts of 64 elements" in caplog.text
    model = random_model("olmoe", torch.float32, clip_qkv=3.0)
    with pytest.raises(UnknownArchitecture, match=r"its config says clip_qkv=3\.0, and the compiled decoder has none"):
        CpuDecoder(model)
    wide = random_model("mixtral", torch.float32)
    wide.get_submodule(LAYER).experts.double()
    with pytest.raises(UnknownArchitecture, match=r"its experts' gate_up_proj is torch.float64; the compiled decoder"):
        CpuDecoder(wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MIXTURES)
def test_the_decoder_of_gpus_computes_the_same_and_keeps_bits(name, dtype):
    """On the CPU through its ops: within the error of the modules, and one by one the same bits."""
    model, ids = random_model(name, dtype), some_ids(8)
    with torch.no_grad():
        stock = model(ids).logits.double()
    exact, firm = exact_and_firm(model, ids)
    firm = torch.ones_like(firm) if dtype == torch.float32 else firm
    decoder = CudaDecoder(model)
    out = torch.stack(Lanes(decoder, 8).feed(ids.tolist()))
    error, theirs = ((logits - exact)[firm].abs().max() for logits in (out.double(), stock))
    assert 0 < error <= 2 * theirs
    single = Lanes(decoder, 2)
    rows = ids[2:4].tolist()
    steps = [torch.stack(single.feed([row[i : i + 1] for row in rows])) for i in range(LENGTH)]
    assert torch.equal(torch.cat(steps, dim=1), out[2:4])
    assert torch.equal(Lanes(decoder, 1).feed(rows[:1], padding=3)[0], out[2])


@pytest.mark.parametrize("format", ["mxfp4", "int4", "int4 with zeros"])
def test_packed_experts_are_those_of_the_cpu_decoder_to_the_one_of_gpus(format):
    model, ids = packed_mixture("qwen2-moe", format.split()[0], **FORMATS[format]), some_ids(4)
    for bits in CpuDecoder(model).bit_choices:
        expected = scored_together(model, ids, bits)
        out = torch.stack(Lanes(CudaDecoder(model), 4).feed(ids.tolist(), bits=bits))
        assert (out - expected).abs().mean() < 0.02 * expected.abs().mean(), bits


SIZES = {
    "its experts' down_proj has 36 inputs, the GPU": ("qwen3-moe", {"moe_intermediate_size": 36, "head_dim": 32}),
    "its heads have 24 elements": ("qwen3-moe", {}),
    "its shared down has 33 inputs, the GPU": ("qwen2-moe-mixed", {"intermediate_size": 176}),
}


@pytest.mark.parametrize("words", SIZES)
def test_sizes_that_kernels_of_gpus_do_not_take_are_named(words):
    name, options = SIZES[words]
    with pytest.raises(UnknownArchitecture, match=words):
        require_served(outline(random_model(name, torch.bfloat16, **options)))
    require_served(outline(random_model("qwen3-moe", torch.bfloat16, head_dim=32)))


CHANGES = {
    "mixtral, not renormalized": ("mixtral", {}, Mixture(renormalize=False)),
    "olmoe, renormalized": ("olmoe", {}, Mixture(renormalize=True)),
    "qwen2-moe, nothing shared": ("qwen2-moe", {}, Mixture()),
    "qwen3-moe, not renormalized": ("qwen3-moe", {}, Mixture(renormalize=False)),
    "qwen3-moe, all chosen": ("qwen3-moe", {}, Mixture(chosen="num_experts")),
    "glm4-moe, softmax": ("glm4-moe", {}, Mixture(shared=SHARED_UNWEIGHED, shared_gate=None)),
    "glm4-moe, nothing shared": ("glm4-moe", {}, Mixture(scores="sigmoid")),
}


@pytest.mark.parametrize(("name", "options", "mixture"), CHANGES.values(), ids=CHANGES)
def test_what_an_entry_says_of_experts_is_what_the_class_does(monkeypatch, name, options, mixture):
    model, ids = random_model(name, torch.float32, **options), some_ids()
    with torch.no_grad():
        stock = model(ids).logits
    torch.testing.assert_close(scored_together(model, ids), stock, atol=1e-4, rtol=1e-4)
    entry = KNOWN[type(model).__name__]
    monkeypatch.setitem(KNOWN, entry.class_name, replace(entry, experts=mixture))
    assert (scored_together(model, ids) - stock).abs().max() > 1e-2


def test_heads_normed_together_are_described_as_such(monkeypatch):
    model = random_model("olmoe", torch.float32)
    entry = KNOWN["OlmoeForCausalLM"]
    monkeypatch.setitem(KNOWN, entry.class_name, replace(entry, head_norms="per head"))
    with pytest.raises(UnknownArchitecture, match="q norm of layer 0 has 64 elements, 16 are those of per head"):
        CpuDecoder(model)
    with pytest.raises(ValueError, match="mlp says 'gated' and experts Mixture"):
        replace(entry, mlp="gated")


def packed_mixture(name: str, format: str, dtype: torch.dtype = torch.float32, **options) -> nn.Module:
    """A random mixture with packed experts, everything else dense."""
    model = random_model(name, dtype, **PACKED_MIXTURE, shared_expert_intermediate_size=64)
    switch = PrecisionSwitch(format)
    for path, module in list(model.named_modules()):
        if path.endswith(".experts"):
            model.set_submodule(path, PackedExperts.from_module(module, format, switch, path, **options))
    return model.eval()


FORMATS = {"mxfp4": {}, "int4": {"group_size": 32}, "int4 with zeros": {"group_size": 32, "symmetric": False}}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss", "glm4-moe"])
def test_packed_experts_follow_their_values(name, format):
    """At 16 activation bits the error of rounding activations to bfloat16; at 8 somewhat more."""
    model, ids = packed_mixture(name, format.split()[0], **FORMATS[format]), some_ids(16)
    exact, firm = exact_and_firm(model, ids)
    assert firm.sum() >= 8
    scale = exact[firm].abs().max()
    seen = []
    for bits, tolerance in ((16, 0.02), (8, 0.05)):
        out = scored_together(model, ids, Bits(4, bits))
        assert (out - exact)[firm].abs().max() < tolerance * scale, bits
        seen.append(out)
    assert not torch.equal(*seen)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["qwen2-moe", "gpt-oss"])
def test_bits_of_packed_experts_do_not_depend_on_the_grouping(name, format):
    model, ids = packed_mixture(name, format.split()[0], **FORMATS[format]), some_ids()
    for bits in CpuDecoder(model).bit_choices:
        together = scored_together(model, ids, bits)
        single = runner_of(model, 2, bits)
        steps = [single.feed([row[: i + 1] for row in ids.tolist()])[:, 0] for i in range(LENGTH)]
        assert torch.equal(together, torch.stack(steps, dim=1)), bits
        assert torch.equal(together[1:], scored_together(model, ids[1:], bits)), bits


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss", "glm4-moe"])
def test_a_cast_reads_the_experts_where_its_own_are(name):
    """One copy of the codes, in tiles; the cast's logits are those of its dense values."""
    model = random_model(name, torch.float32, **PACKED_MIXTURE, shared_expert_intermediate_size=64)
    cast, ids = hf_mlspec.direct_cast(model, "mxfp4", activation_bits=16), some_ids(8)
    experts = cast.get_submodule(LAYER).experts
    assert type(experts) is PackedExperts
    decoder = decoder_of(cast, "cpu")
    assert isinstance(decoder, CpuDecoder)
    assert experts.is_prepacked
    assert decoder_of(cast, "cpu") is decoder
    exact, firm = exact_and_firm(cast, ids)
    assert (scored_together(cast, ids) - exact)[firm].abs().max() < 0.02 * exact[firm].abs().max()
    saved = cast.state_dict()
    assert saved[f"{LAYER}.experts.down_proj_packed"].ndim == 3


def test_experts_that_change_are_read_anew():
    model, ids = random_model("mixtral", torch.float32), some_ids()
    first, decoder = scored_together(model, ids), decoder_of(model, "cpu")
    with torch.no_grad():
        model.get_submodule(LAYER).gate.weight.mul_(-1)
    assert decoder_of(model, "cpu") is not decoder
    assert not torch.equal(scored_together(model, ids), first)
