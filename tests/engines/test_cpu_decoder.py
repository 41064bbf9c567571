"""Does the compiled decoder compute what the model's modules do, and the same bits however tokens are grouped?"""

from __future__ import annotations

import copy

import pytest
import torch
from decoders import APART, CPU_CONFIGS, HYBRIDS, packed_model, random_model
from torch import nn
from warned import forget_warnings

import hf_mlspec
from hf_mlspec.engines.architecture import UnknownArchitecture
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.engines.engine import Guess
from hf_mlspec.nn.linear import Int4Linear, KernelLinear, Mxfp4Linear
from hf_mlspec.nn.state import is_prepared
from hf_mlspec.nn.switch import PrecisionSwitch, precision_switch
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.precision import OWN_BITS, Bits

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")

LENGTH = 41


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*CPU_CONFIGS, *APART])
def test_within_twice_the_error_of_the_modules(name, dtype):
    model = random_model(name, dtype)
    ids = torch.randint(1, 199, (2, LENGTH))
    with torch.no_grad():
        stock = model(ids).logits.double()
    out = scored_together(model, ids).double()
    with torch.no_grad():
        exact = model.double()(ids).logits
    assert (out - exact).abs().max() <= 2 * (stock - exact).abs().max()
    assert (stock - exact).abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*CPU_CONFIGS, *HYBRIDS, *APART])
def test_bits_do_not_depend_on_the_grouping(name, dtype):
    """All at once, one by one, alone in the batch, and beside a row of another length: the same bits."""
    model = random_model(name, dtype)
    ids = torch.randint(1, 199, (2, LENGTH))
    rows = ids.tolist()
    together = scored_together(model, ids)
    single = runner_of(model, 2)
    one_by_one = torch.stack([single.feed([row[: i + 1] for row in rows])[:, 0] for i in range(LENGTH)], dim=1)
    assert torch.equal(together, one_by_one)
    assert torch.equal(together[1:], scored_together(model, ids[1:]))
    ragged = runner_of(model, 2)
    ragged.feed([rows[0][:30], rows[1][:5]])
    logits = ragged.feed([rows[0][:31], rows[1][:6]], Guess(torch.tensor([rows[0][31:34], rows[1][6:9]]), [3, 2]))
    assert torch.equal(logits[0], together[0, 30:34])
    assert torch.equal(logits[1, :3], together[1, 5:8])


def test_prompts_longer_than_one_pass():
    model = random_model("llama", torch.bfloat16, max_position_embeddings=2048)
    ids = torch.randint(1, 199, (2, 700))
    runner = runner_of(model, 2)
    whole = runner.feed(ids.tolist())
    halves = runner_of(model, 2)
    halves.feed([row[:333] for row in ids.tolist()])
    assert torch.equal(whole, halves.feed(ids.tolist()))


@pytest.mark.parametrize("name", ["llama", "llama-tied-biases", "qwen3", "gemma3", "phi3"])
def test_a_cast_runs_fused_near_its_modules(name):
    shape = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
    cast = hf_mlspec.direct_cast(random_model(name, torch.float32, **shape), "mxfp4", activation_bits=16)
    ids = torch.randint(1, 199, (1, LENGTH))
    out = scored_together(cast, ids)
    with torch.no_grad():
        modules = cast(ids).logits
    scale = modules.abs().max()
    assert (out - modules).abs().max() < 0.02 * scale  # activations are rounded to bfloat16 before every linear
    eight = hf_mlspec.direct_cast(random_model(name, torch.float32, **shape), "mxfp4", activation_bits=8)
    assert 0 < (scored_together(eight, ids) - out).abs().max() < 0.2 * scale


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", ["llama", "llama-tied-biases", "qwen2-windows", "qwen3", "gemma3", "phi3"])
def test_int4_weights_run_fused_near_their_modules(name, symmetric):
    """At every width of activations, said by the call or by the switch, head packed or dense."""
    model = packed_model(name, symmetric=symmetric, keep_head=symmetric)
    ids = torch.randint(1, 199, (1, LENGTH))
    seen = []
    for bits, tolerance in ((16, 0.02), (8, 0.02), (4, 0.2)):
        out = scored_together(model, ids, Bits(4, bits))
        with precision_switch(model).at(bits), torch.no_grad():
            modules = model(ids).logits
            own = scored_together(model, ids)
        assert (out - modules).abs().max() < tolerance * modules.abs().max(), bits
        assert torch.equal(out, own)
        seen.append(out)
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.parametrize("weights", ["mxfp4", "int4"])
def test_bits_of_a_packed_model_do_not_depend_on_the_grouping(weights):
    model = packed_model("qwen3", weights)
    ids = torch.randint(1, 199, (2, LENGTH))
    for bits in CpuDecoder(model).bit_choices:
        together = scored_together(model, ids, bits)
        single = runner_of(model, 2, bits)
        steps = [single.feed([row[: i + 1] for row in ids.tolist()])[:, 0] for i in range(LENGTH)]
        assert torch.equal(together, torch.stack(steps, dim=1)), bits
        assert torch.equal(together[1:], scored_together(model, ids[1:], bits)), bits


def test_a_width_is_an_argument_of_the_call():
    int4, mxfp4 = packed_model(), packed_model(weights="mxfp4")
    assert CpuDecoder(int4).bit_choices == ((4, 16), (4, 8), (4, 4))
    assert CpuDecoder(mxfp4).bit_choices == ((4, 16), (4, 8))
    dense = random_model("llama", torch.float32)
    assert CpuDecoder(dense).bit_choices == ()
    for model, bits, words in (
        (int4, 5, "activation_bits is 5, choose 16, 8 or 4 for int4 weights, or 0"),
        (int4, -8, "activation_bits is -8, choose"),
        (mxfp4, 4, "activation_bits is 4, choose 16 or 8 for MXFP4 weights"),
        (dense, 8, "activation_bits is 8, and the decoder holds no packed weights"),
    ):
        one, other = runner_of(model, 1, Bits(activation=bits)), runner_of(model, 1)
        with pytest.raises(ValueError, match=words):
            one.score([[5]], [[]])
        with pytest.raises(ValueError, match=words):
            one.draft([[5]], [3], 0.0)
        for middle, tiny in ((one, other), (other, one)):
            with pytest.raises(ValueError, match=words):
                middle.draft_checked(tiny, [[5]], [3], num_draft_tokens=2, tiny_threshold=0.0, threshold=0.0)


def test_a_dense_head_has_no_width():
    """With every other weight the same, only what the layers hand to the head differs."""
    model = packed_model(keep_head=True)
    ids = torch.randint(1, 199, (1, 5))
    with torch.no_grad():
        for layer in model.model.layers:  # the layers add nothing: their precision cannot matter
            layer.self_attn.o_proj.weight_scale.zero_()
            layer.mlp.down_proj.weight_scale.zero_()
    assert torch.equal(scored_together(model, ids, Bits(activation=4)), scored_together(model, ids))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["llama-tied-biases", "phi3"])
def test_dequantized_first_it_is_the_model_with_those_dense_weights(name, threads, symmetric):
    """Bit for bit at 16 bits; narrower activations are multiplied as ever."""
    model = packed_model(name, dtype=torch.bfloat16, symmetric=symmetric, keep_head=False)
    dense = copy.deepcopy(model)
    for path, layer in list(dense.named_modules()):
        if isinstance(layer, Int4Linear):
            linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, dtype=torch.bfloat16)
            linear.weight = nn.Parameter(layer.dequantized(torch.bfloat16), requires_grad=False)
            linear.bias = layer.bias
            dense.set_submodule(path, linear.eval())
    ids = torch.randint(1, 199, (2, LENGTH))
    fused_kernel, coarse = scored_together(model, ids), scored_together(model, ids, Bits(activation=8))
    precision_switch(model).multiply = "dequant"
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(scored_together(model, ids), scored_together(dense, ids))
        single = torch.cat([scored_together(model, ids[r : r + 1]) for r in range(2)])
        assert torch.equal(single, scored_together(dense, ids))
    finally:
        torch.set_num_threads(before)
    assert not torch.equal(scored_together(model, ids), fused_kernel)  # its weights are not rounded to bfloat16
    assert torch.equal(scored_together(model, ids, Bits(activation=8)), coarse)


def test_what_a_switch_says_is_noticed():
    model = packed_model()
    switch, first = precision_switch(model), decoder_of(model, "cpu")
    assert decoder_of(model, "cpu") is first
    for change in (lambda: setattr(switch, "activation_bits", 8), lambda: setattr(switch, "multiply", "dequant")):
        before = decoder_of(model, "cpu")
        change()
        assert decoder_of(model, "cpu") is not before
    with switch.at("w4a4"):
        inside = decoder_of(model, "cpu")
    assert decoder_of(model, "cpu") is not inside


def test_packed_layers_that_do_not_go_together_are_refused():
    model = packed_model()
    attention = model.model.layers[1].self_attn
    q = attention.q_proj
    attention.q_proj = Int4Linear.from_linear(nn.Linear(96, 128), switch=q.switch, group_size=32).eval()
    CpuDecoder(model)
    attention.q_proj = Mxfp4Linear.from_linear(nn.Linear(96, 128)).eval()
    with pytest.raises(UnknownArchitecture, match="q, k, v projections have weights of different formats"):
        CpuDecoder(model)
    attention.q_proj = q
    attention.o_proj.switch = PrecisionSwitch("int4", multiply="dequant")
    with pytest.raises(UnknownArchitecture, match="multiply in 2 ways: dequant, fused"):
        CpuDecoder(model)


def test_prepare_shares_every_weight_and_restore_forgets():
    model = random_model("llama", torch.bfloat16)
    before = hf_mlspec.resident_bytes(model)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    assert hf_mlspec.prepare(model) is model
    assert is_prepared(model)
    assert pointers == [parameter.data_ptr() for parameter in model.parameters()]
    assert hf_mlspec.resident_bytes(model) == before
    for _ in range(2):  # the second time there is nothing to undo
        assert hf_mlspec.restore(model) is model
        assert not is_prepared(model)
    with pytest.raises(TypeError, match="restore takes a model, not a str"):
        hf_mlspec.restore("model")


def prune(mlp: nn.Module) -> None:
    """To 32 inner features; the modules' in_features and out_features stay behind, as pruning leaves them."""
    for linear in (mlp.gate_proj, mlp.up_proj):
        linear.weight = nn.Parameter(linear.weight[:32].detach().clone())
    mlp.down_proj.weight = nn.Parameter(mlp.down_proj.weight[:, :32].detach().clone())


def transpose_in_memory(module: nn.Module) -> None:
    module.weight = nn.Parameter(module.weight.detach().t().contiguous().t())


def test_changed_weights_are_noticed():
    model = random_model("llama", torch.float32)
    first = decoder_of(model, "cpu")
    assert decoder_of(model, "cpu") is first
    with torch.no_grad():
        model.model.norm.weight.mul_(2)  # norms are kept as float32 copies
    second = decoder_of(model, "cpu")
    assert second is not first
    model.model.layers[0].input_layernorm.weight.data.mul_(2)  # counted by no version
    assert decoder_of(model, "cpu") is not second


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.train(), "training mode"),
        (lambda m: m.model.layers[1].mlp.register_forward_hook(lambda *a: None), "forward hooks"),
        (lambda m: m.double(), "float64"),
        (lambda m: m.model.layers[0].self_attn.__setattr__("q_proj", nn.Identity().eval()), "Identity"),
        (lambda m: m.model.__setattr__("norm", nn.RMSNorm(64).eval()), "normalization.RMSNorm"),
        (lambda m: m.model.embed_tokens.double(), "embedding is torch.float64"),
        (lambda m: m.model.layers[2].mlp.down_proj.double(), "down is torch.float64"),
        (lambda m: prune(m.model.layers[1].mlp), "gate of layer 1 maps 64 to 32 features"),
        (lambda m: transpose_in_memory(m.model.embed_tokens), "embedding is not contiguous"),
        (lambda m: transpose_in_memory(m.model.layers[1].self_attn.o_proj), "o is not contiguous"),
    ],
)
def test_what_the_decoder_would_get_wrong_it_does_not_take(change, reason, caplog):
    model = random_model("llama", torch.float32)
    change(model)
    with pytest.raises(UnknownArchitecture, match=reason):
        CpuDecoder(model)
    assert decoder_of(model, "cpu") is None
    assert reason in caplog.text


def test_a_model_that_was_pruned_alike_everywhere_runs_fused():
    model = random_model("llama", torch.float32)
    for layer in model.model.layers:
        prune(layer.mlp)
    ids = torch.randint(1, 199, (1, LENGTH))
    with torch.no_grad():
        torch.testing.assert_close(scored_together(model, ids), model(ids).logits, atol=1e-4, rtol=1e-4)


def test_an_unknown_architecture_is_served_linear_by_linear(tiny_model, caplog):
    model = tiny_model("diffllama", torch.bfloat16)
    ids = torch.randint(1, 100, (1, 9))
    with torch.no_grad():
        stock = model(ids).logits
    hf_mlspec.prepare(model)
    assert type(model.model.layers[0].self_attn.q_proj) is KernelLinear
    assert "DiffLlamaForCausalLM" in caplog.text
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, stock, atol=0.05)
    hf_mlspec.restore(model)
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
