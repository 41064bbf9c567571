"""Do the compiled decoders gather the inputs of layers that order them, wherever they pack activations?"""

from __future__ import annotations

import copy

import pytest
import torch
from decoders import in_float64, packed_layers, random_model
from models import packed, prompts
from torch import nn
from warned import forget_warnings

import hf_mlspec
from hf_mlspec import ops
from hf_mlspec.engines.architecture import UnknownArchitecture
from hf_mlspec.engines.choose import decoder_of, required_decoder
from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.engines.cuda.engine import CudaEngine
from hf_mlspec.engines.engine import Guess
from hf_mlspec.nn.switch import precision_switch
from hf_mlspec.nn.transforms import NONE, ORDER
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.precision import OWN_BITS, Bits

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")

LENGTH = 37
SHAPE = {"hidden_size": 160, "intermediate_size": 288, "head_dim": 48}  # pieces of 128 inputs, and shorter ones
SHARED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}  # which read the inputs of which
FORMATS = {
    "int4 symmetric": ("int4", {"symmetric": True}, ("w4a16", "w4a8", "w4a4")),
    "int4": ("int4", {"symmetric": False}, ("w4a16", "w4a8", "w4a4")),
    "mxfp4": ("mxfp4", {}, ("mxfp4", "mxfp4a8")),
    "planes": ("planes", {"num_planes": 8}, ("planes8", "planes5")),
}
LIKE_MODULES = {"w4a8": 0.03, "mxfp4a8": 0.03, "w4a4": 0.3}  # of the largest logit; others are within 0.02


@pytest.fixture(autouse=True)
def nothing_said_yet():
    forget_warnings()


def order_of(path: str, size: int) -> torch.Tensor:
    """A random one for each input of each layer."""
    block, _, leaf = path.rpartition(".")
    seed = sum(map(ord, f"{block}.{SHARED.get(leaf, leaf)}"))
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).int()


def ordered(name: str = "llama", weights: str = "int4", dtype: torch.dtype = torch.float32, **settings) -> nn.Module:
    """A model whose layers, the head among them, were packed with their columns in an order of their own."""
    model = random_model(name, dtype, **SHAPE, tie_word_embeddings=False)
    with torch.no_grad():
        for path, module in model.named_modules():
            if type(module) is nn.Linear:
                module.weight = nn.Parameter(module.weight[:, order_of(path, module.weight.shape[1])].contiguous())
    packed(model, weights, keep_head=False, **settings)
    for path, module in packed_layers(model):
        module.transform_(ORDER, {"order": order_of(path, module.in_features)})
    return model


def scored(
    model: nn.Module, ids: torch.Tensor, bits: Bits = OWN_BITS, decoder: CpuDecoder | CudaDecoder | None = None
) -> torch.Tensor:
    decoder = decoder or CpuDecoder(model)
    kind = CudaEngine if isinstance(decoder, CudaDecoder) else CpuEngine
    engine = kind(model, decoder, capacity=ids.shape[1], bits=bits)
    engine.start(len(ids), torch.device("cpu"))
    return engine.feed([row[:1] for row in ids.tolist()], Guess(ids[:, 1:], [ids.shape[1] - 1] * len(ids)))


def some_ids(rows: int = 2) -> torch.Tensor:
    return torch.randint(1, 199, (rows, LENGTH), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("kind", [CpuDecoder, CudaDecoder])
@pytest.mark.parametrize("name", ["llama", "qwen2-windows", "gemma2", "phi3"])
@pytest.mark.parametrize("format", FORMATS)
def test_near_the_modules_and_float64_at_every_precision(name, format, kind):
    weights, settings, words = FORMATS[format]
    model, ids = ordered(name, weights, **settings), some_ids()
    with torch.no_grad():
        exact = in_float64(model)(ids).logits
        for word in words:
            with precision_switch(model).at(word):
                modules = model(ids).logits
                out = scored(model, ids, decoder=kind(model))
            largest = modules.abs().max()
            assert (out - modules).abs().max() < LIKE_MODULES.get(word, 0.02) * largest, word
            if word in ("w4a16", "mxfp4", "planes8"):
                assert (out - exact).abs().max() < 0.02 * largest, word


@pytest.mark.parametrize("weights", ["int4", "planes"])
def test_an_identity_changes_no_bit_and_is_not_gathered(weights):
    """As a transform it is left out; said to the compiled decoder itself, it is gathered to the same bits."""
    plain, ids = packed(random_model("qwen2-windows", torch.float32, **SHAPE), weights, keep_head=False), some_ids()
    same = copy.deepcopy(plain)
    for _, module in packed_layers(same):
        module.transform_(ORDER)
    gathered = CpuDecoder(copy.deepcopy(plain))
    head = gathered.handle
    for bits in gathered.bit_choices:
        want = scored(plain, ids, bits)
        assert torch.equal(scored(same, ids, bits), want)
        head.set_order("head", torch.arange(SHAPE["hidden_size"], dtype=torch.int32))
        for name, size in (("q", "hidden_size"), ("k", "hidden_size"), ("v", "hidden_size"), ("gate", "hidden_size"),
                           ("up", "hidden_size"), ("down", "intermediate_size")):  # fmt: skip
            head.set_order(name, torch.arange(SHAPE[size], dtype=torch.int32))
        head.set_order("o", torch.arange(4 * SHAPE["head_dim"], dtype=torch.int32))
        assert torch.equal(scored(plain, ids, bits, gathered), want)


@pytest.mark.parametrize("word", ["w4a16", "w4a8", "w4a4"])
def test_down_and_o_have_the_bits_of_layers_whose_outputs_were_ordered(word):
    """down after gate and up in its order, o after heads in its order: the same numbers meet the same columns."""
    dense = random_model("llama", torch.float32, **SHAPE)
    inner, heads, dim = order_of("down", SHAPE["intermediate_size"]).long(), torch.tensor([1, 0]), SHAPE["head_dim"]
    inside = order_of("v", dim).long()
    values = (heads[:, None] * dim + inside).flatten()
    queries = (heads[:, None] * 2 + torch.arange(2)).flatten()
    context = (queries[:, None] * dim + inside).flatten()
    moved = packed(copy.deepcopy(dense))
    for mine, other in zip(dense.model.layers, moved.model.layers, strict=True):
        own, attention = mine.mlp, mine.self_attn
        for layer in (own.gate_proj, own.up_proj):
            layer.weight.data = layer.weight.data[inner]
        attention.v_proj.weight.data = attention.v_proj.weight.data[values]
        keys = (heads[:, None] * dim + torch.arange(dim)).flatten()
        attention.k_proj.weight.data = attention.k_proj.weight.data[keys]
        asked = (queries[:, None] * dim + torch.arange(dim)).flatten()
        attention.q_proj.weight.data = attention.q_proj.weight.data[asked]
        other.mlp.down_proj.transform_(ORDER, {"order": inner.int()})
        other.self_attn.o_proj.transform_(ORDER, {"order": context.int()})
    ids, bits = some_ids(), Bits(4, int(word[3:]))
    assert torch.equal(scored(moved, ids, bits), scored(packed(dense), ids, bits))


@pytest.mark.parametrize("multiply", ["fused", "dequant"])
def test_bits_do_not_depend_on_the_grouping_or_the_threads(multiply):
    model, ids = ordered(dtype=torch.bfloat16), some_ids()
    precision_switch(model).multiply = multiply
    decoder, before = CpuDecoder(model), torch.get_num_threads()
    for bits in decoder.bit_choices:
        together = scored(model, ids, bits)
        engine = CpuEngine(model, decoder, capacity=LENGTH, bits=bits)
        engine.start(2, torch.device("cpu"))
        steps = [engine.feed([row[: i + 1] for row in ids.tolist()])[:, 0] for i in range(LENGTH)]
        assert torch.equal(together, torch.stack(steps, dim=1))
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert torch.equal(scored(model, ids[1:], bits), together[1:])
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("levels", [["w4a8"], ["w4a4"], ["w4a8", "w4a4"], ["early_exit:1"]], ids=str)
def test_a_chain_writes_what_the_target_alone_writes(levels):
    model, inputs = ordered(dtype=torch.bfloat16), prompts([5, 9])
    alone = model.generate(**inputs, do_sample=False, max_new_tokens=24, assistant_models=[])
    chain = model.generate(**inputs, do_sample=False, max_new_tokens=24, assistant_models=levels)
    assert torch.equal(chain, alone)
    prepared = hf_mlspec.prepare(model).generate(**inputs, do_sample=False, max_new_tokens=24)
    assert torch.equal(prepared, alone)
    assert decoder_of(model, "cpu") is not None


@pytest.mark.parametrize(("leaf", "group"), [("k_proj", "q, k, v"), ("up_proj", "gate, up")])
@pytest.mark.parametrize("how", ["another", "none"])
def test_projections_that_share_inputs_share_their_order_or_run_module_by_module(caplog, leaf, group, how):
    model = ordered()
    (layer,) = [module for path, module in packed_layers(model) if "layers.1." in path and path.endswith(leaf)]
    layer.transform_(*((NONE,) if how == "none" else (ORDER, {"order": order_of("else", layer.in_features)})))
    words = f"{group} projections order their inputs in different ways, and they share them"
    with pytest.raises(UnknownArchitecture, match=words):
        CpuDecoder(model)
    inputs = prompts([6])
    out = model.generate(**inputs, do_sample=False, max_new_tokens=8, assistant_models=["w4a8"])
    assert words in caplog.text
    hf_mlspec.restore(model)
    with torch.no_grad():
        first = in_float64(model)(inputs["input_ids"]).logits[0, -1]
    assert first[out[0, 6]] > first.max() - 0.02 * first.abs().max()


def test_a_changed_order_is_noticed():
    model, ids = ordered(), some_ids(1)
    first, before = decoder_of(model, "cpu"), scored(model, ids)
    assert decoder_of(model, "cpu") is first
    down = model.model.layers[0].mlp.down_proj
    down.transform_order.copy_(down.transform_order.flip(0))
    second = decoder_of(model, "cpu")
    assert second is not first
    assert not torch.equal(scored(model, ids, decoder=second), before)
    down.transform_(NONE)
    assert decoder_of(model, "cpu") is not second
    down.transform_(ORDER, {"order": order_of("model.layers.0.mlp.down_proj", down.in_features)})
    assert torch.equal(scored(model, ids, decoder=decoder_of(model, "cpu")), before)


def test_copies_and_shorter_models_keep_the_order():
    model, ids = ordered(dtype=torch.bfloat16), some_ids(1)
    assert torch.equal(scored(copy.deepcopy(model).to("cpu", torch.bfloat16), ids), scored(model, ids))
    short = hf_mlspec.early_exit(model, 1)
    order = short.model.layers[0].mlp.down_proj.transform_order
    assert order.data_ptr() == model.model.layers[0].mlp.down_proj.transform_order.data_ptr()
    with torch.no_grad():
        exact = in_float64(short)(ids).logits
    assert (scored(short, ids) - exact).abs().max() < 0.05 * exact.abs().max()


def test_the_decoder_for_gpus_gathers_where_something_is_ordered_and_nowhere_else(monkeypatch):
    gathered = []

    def counted(op):
        return lambda *operands: gathered.append(len(operands[-1])) or op(*operands)

    for name in ("ordered_rows", "gated_in_order", "rms_norm_in_order"):
        monkeypatch.setattr(ops, name, counted(getattr(ops, name)))
    plain = packed(random_model("llama", torch.float32, **SHAPE, tie_word_embeddings=False), "int4", keep_head=False)
    scored(plain, some_ids(1), decoder=CudaDecoder(plain))
    assert not gathered
    for _, module in packed_layers(plain):
        module.transform_(ORDER)
    scored(plain, some_ids(1), decoder=CudaDecoder(plain))  # identities
    assert not gathered
    model = ordered()
    scored(model, some_ids(1), decoder=CudaDecoder(model))
    hidden, inner, heads = SHAPE["hidden_size"], SHAPE["intermediate_size"], 4 * SHAPE["head_dim"]
    layers = model.config.num_hidden_layers
    assert sorted(set(gathered)) == sorted({hidden, inner, heads})
    assert gathered.count(inner) == gathered.count(heads) == layers
    assert gathered.count(hidden) == 2 * layers + 1  # by the norms in front of q, k, v; gate, up; the head


def test_in_captured_rounds_bits_do_not_depend_on_the_grouping():
    model, ids = ordered(dtype=torch.bfloat16), some_ids()
    decoder = CudaDecoder(model)
    for bits in decoder.bit_choices:
        together = scored(model, ids, bits, decoder)
        engine = CudaEngine(model, decoder, capacity=LENGTH, bits=bits)
        engine.start(2, torch.device("cpu"))
        steps = [engine.feed([row[: i + 1] for row in ids.tolist()])[:, 0] for i in range(LENGTH)]
        assert torch.equal(together, torch.stack(steps, dim=1))


@pytest.mark.parametrize("levels", [["w4a8"], ["w4a4"], ["w4a8", "w4a4"], ["early_exit:1"]], ids=str)
def test_a_captured_chain_writes_what_the_target_alone_writes(levels):
    model, inputs = hf_mlspec.prepare(ordered(dtype=torch.bfloat16), engine="cuda"), prompts([5, 9])
    options = {"do_sample": False, "max_new_tokens": 24}
    alone = model.generate(**inputs, **options, assistant_models=[])
    assert torch.equal(model.generate(**inputs, **options, assistant_models=levels), alone)
    assert hf_mlspec.last_stats(model).levels[0].drafted > 0
    assert isinstance(decoder_of(model, "cuda"), CudaDecoder)


@pytest.mark.parametrize(("leaf", "group"), [("k_proj", "q, k, v"), ("up_proj", "gate, up")])
def test_the_decoder_for_gpus_wants_one_order_of_shared_inputs(leaf, group):
    model = ordered()
    (layer,) = [module for path, module in packed_layers(model) if "layers.1." in path and path.endswith(leaf)]
    layer.transform_(ORDER, {"order": order_of("else", layer.in_features)})
    words = f"{group} projections order their inputs in different ways, and they share them"
    with pytest.raises(UnknownArchitecture, match=words):
        CudaDecoder(model)
    with pytest.raises(ValueError, match=words):
        required_decoder(model, "cuda")


def test_nested_weights_are_ordered_by_the_decoder_for_gpus():
    model, ids = packed(random_model("llama", torch.bfloat16, **SHAPE), "nested"), some_ids()
    down = model.model.layers[1].mlp.down_proj
    plain = scored(model, ids, decoder=CudaDecoder(model))
    order = order_of("down", SHAPE["intermediate_size"])
    down.transform_(ORDER, {"order": order})
    assert not torch.equal(scored(model, ids, decoder=CudaDecoder(model)), plain)
    for layer in (model.model.layers[1].mlp.gate_proj, model.model.layers[1].mlp.up_proj):
        layer.transform_(ORDER)  # identities change nothing
    with torch.no_grad():
        exact = in_float64(model)(ids).logits
    out = scored(model, ids, decoder=CudaDecoder(model))
    assert (out - exact).abs().max() < 0.05 * exact.abs().max()


def test_nested_weights_are_not_ordered():
    model = packed(random_model("llama", torch.bfloat16, **SHAPE), "nested")
    model.model.layers[1].mlp.down_proj.transform_(ORDER)
    CpuDecoder(model)  # an identity is nothing
    order = order_of("down", SHAPE["intermediate_size"])
    model.model.layers[1].mlp.down_proj.transform_(ORDER, {"order": order})
    with pytest.raises(UnknownArchitecture, match="its down orders the inputs of a nested weight"):
        CpuDecoder(model)
    with pytest.raises(ValueError, match=r"down\.order: only packed weights that are not nested order their inputs"):
        CpuDecoder(packed(random_model("llama", torch.bfloat16, **SHAPE), "nested")).handle.set_order("down", order)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda o: o.long(), r"down\.order is Long, expected Int"),
        (lambda o: o[:-1], r"down\.order has shape \[287\], expected contiguous \[288\]"),
        (lambda o: o.flip(0).repeat_interleave(2)[::2], "not contiguous"),
        (lambda o: o.index_fill(0, torch.tensor([3]), 288), r"down\.order\[3\] is 288, expected each of 288 inputs"),
        (lambda o: o.index_fill(0, torch.tensor([3]), -1), r"down\.order\[3\] is -1, expected each"),
        (lambda o: o.index_copy(0, torch.tensor([9]), o[:1]), r"down\.order\[9\] is \d+, expected each of 288"),
    ],
)
def test_the_compiled_decoder_takes_permutations_only(change, words):
    decoder = CpuDecoder(ordered())
    order = order_of("down", SHAPE["intermediate_size"])
    decoder.handle.set_order("down", order)
    with pytest.raises((ValueError, TypeError), match=words):
        decoder.handle.set_order("down", change(order))


def test_the_compiled_decoder_wants_one_order_of_shared_inputs():
    model = ordered()
    decoder = CpuDecoder(model)
    decoder.handle.set_order("up", order_of("else", SHAPE["hidden_size"]))
    with pytest.raises(ValueError, match="layer 2: q, k, v and gate, up need weights of one format, group, numbers"):
        scored(model, some_ids(1), decoder=decoder)
