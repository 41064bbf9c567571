"""Does the description of an architecture say what its class computes, and is what it says what the decoders do?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers
from decoders import APART, CONFIGS, CPU_CONFIGS, HYBRIDS, MIXTURES, Lanes, capped, random_model
from torch import nn
from transformers import LlamaForCausalLM

import hf_mlspec
from hf_mlspec.engines.architecture import KNOWN, Description, UnknownArchitecture
from hf_mlspec.engines.architecture.description import CPU_WORDS, SEPARATE, WORDS
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.engines.engine import Guess
from hf_mlspec.engines.modules.states import _masks_windows
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")

LENGTH = 31
LLAMA = KNOWN["LlamaForCausalLM"]


class MadeUpForCausalLM(LlamaForCausalLM):
    """Of no package that a decoder knows."""


@pytest.fixture
def describe(monkeypatch):
    """Put an entry into the table for one test."""
    return lambda entry: monkeypatch.setitem(KNOWN, entry.class_name, entry)


def made_up(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = random_model("llama", dtype)
    model.__class__ = MadeUpForCausalLM
    return model


def by_the_cpu(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    runner = CpuEngine(model, CpuDecoder(model), capacity=LENGTH + 1)
    runner.start(1, torch.device("cpu"))
    return runner.feed([ids[0, :1].tolist()], Guess(ids[:, 1:], [ids.shape[1] - 1]))[0].double()


def by_a_device(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    decoder = CudaDecoder(model)
    return capped(Lanes(decoder, 1).feed(ids.tolist())[0], decoder)


DECODERS = {"cpu": by_the_cpu, "device": by_a_device}


def differences(model: nn.Module) -> list[float]:
    """How far both decoders' logits are from those of the modules, as a part of the largest."""
    ids = torch.randint(1, 199, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        stock = model(ids).logits[0].double()
    return [float((decode(model, ids) - stock).abs().max() / stock.abs().max()) for decode in DECODERS.values()]


def test_every_entry_has_a_model_that_the_decoders_are_compared_with():
    names = (*CPU_CONFIGS, *MIXTURES, *HYBRIDS, *APART)
    described = {type(random_model(name, torch.float32)).__name__ for name in names}
    assert described == {name for name in KNOWN if hasattr(transformers, name)}
    assert all(name == entry.class_name for name, entry in KNOWN.items())


def swapped(places: dict[str, str], one: str, other: str) -> dict[str, str]:
    return {**places, one: places[other], other: places[one]}


def without(places: dict[str, str], *names: str) -> dict[str, str]:
    return {name: place for name, place in places.items() if name not in names}


CAP_OF_LOGITS = {"final_logit_softcapping": 3.0}
CAPS = {"attn_logit_softcapping": 2.0, **CAP_OF_LOGITS}
FULL = {"layer_types": ["full_attention"] * 3}
CHANGES: dict[str, tuple[str, dict, Callable[[Description], Description]]] = {
    "llama, 1 + weight": ("llama", {}, lambda d: replace(d, norm="rms plus one")),
    "llama, norms swapped": ("llama", {}, lambda d: replace(d, norms=swapped(d.norms, "attention", "mlp"))),
    "llama, gate and up swapped": ("llama", {}, lambda d: replace(d, linears=swapped(d.linears, "gate", "up"))),
    "llama, eps": ("llama", {"more": 0.5}, lambda d: replace(d, norm_eps="more")),
    "llama, activation": ("llama", {"more": "relu"}, lambda d: replace(d, activation="more")),
    "llama, final norm": ("llama", {}, lambda d: replace(d, final_norm="model.layers.0.input_layernorm")),
    "llama, head": ("llama", {}, lambda d: replace(d, head="model.embed_tokens_as_linear")),
    "llama, a cap": ("llama", {"more": 1.0}, lambda d: replace(d, logit_softcap="more")),
    "llama, scale of attention": ("llama", {}, lambda d: replace(d, attention_scale="attention_dropout")),
    "mistral, windows": ("mistral", FULL, lambda d: replace(d, windows="by layer type")),
    "phi3, windows": ("phi3", {"sliding_window": 9, **FULL}, lambda d: replace(d, windows="by layer type")),
    "qwen2, windows": ("qwen2-windows", {}, lambda d: replace(d, windows="every layer")),
    "qwen3, no norms of heads": ("qwen3", {}, lambda d: replace(d, norms=without(d.norms, "q", "k"))),
    "gemma2, weight": ("gemma2", {}, lambda d: replace(d, norm="rms")),
    "gemma2, norms behind": ("gemma2", {}, lambda d: replace(d, norms=without(d.norms, "attention_out"))),
    "gemma2, no norm behind": ("gemma2", {}, lambda d: replace(d, norms=without(d.norms, "mlp_out"))),
    "gemma2, windows": ("gemma2", {}, lambda d: replace(d, windows="every layer")),
    "gemma2, scale": ("gemma2", {}, lambda d: replace(d, embedding_scale="none")),
    "gemma2, no cap": ("gemma2", CAPS, lambda d: replace(d, attention_softcap=None)),
    "gemma2, no cap of logits": ("gemma2", CAPS, lambda d: replace(d, logit_softcap=None)),
    "gemma3, weight": ("gemma3", {}, lambda d: replace(d, norm="rms")),
    "gemma3, no norms of heads": ("gemma3", {}, lambda d: replace(d, norms=without(d.norms, "q", "k"))),
    "gemma3, scale": ("gemma3", {}, lambda d: replace(d, embedding_scale="none")),
    "gemma3, no cap of logits": ("gemma3", CAP_OF_LOGITS, lambda d: replace(d, logit_softcap=None)),
    "olmo2, no norm behind": ("olmo2", {}, lambda d: replace(d, norms={**d.norms, "mlp": d.norms["mlp_out"]})),
    "olmo2, norms in front": (
        "olmo2",
        {},
        lambda d: replace(d, norms={"attention": d.norms["attention_out"], "mlp": d.norms["mlp_out"]}),
    ),
    "olmo2, no norms of heads": ("olmo2", {}, lambda d: replace(d, norms=without(d.norms, "q", "k"))),
    "olmo3, windows": ("olmo3", {}, lambda d: replace(d, windows="every layer")),
    "olmo, mean": ("olmo", {}, lambda d: replace(d, norm="rms")),
    "granite, embeddings": ("granite", {}, lambda d: replace(d, embedding_multiplier=None)),
    "granite, residuals": ("granite", {}, lambda d: replace(d, residual_scale=None)),
    "granite, logits": ("granite", {}, lambda d: replace(d, logit_divisor=None)),
    "hyperclovax, residuals": ("hyperclovax", {}, lambda d: replace(d, residual_scale=None)),
    "hyperclovax, logits": ("hyperclovax", {}, lambda d: replace(d, logit_scale=None)),
    "smollm3, all rotate": ("smollm3", {}, lambda d: replace(d, layers_without_rotary=None)),
    "exaone4, all rotate": ("exaone4", {}, lambda d: replace(d, layers_without_rotary=None)),
    "cohere2, all rotate": ("cohere2", {}, lambda d: replace(d, layers_without_rotary=None)),
    "cohere, halves": ("cohere", {}, lambda d: replace(d, rotation="halves")),
    "cohere, tables": ("cohere", {}, lambda d: replace(d, rotation="pairs")),
    "cohere, sequential": ("cohere", {}, lambda d: replace(d, residual="sequential")),
    "cohere, logits": ("cohere", {}, lambda d: replace(d, logit_scale=None)),
    "glm, halves": ("glm", {}, lambda d: replace(d, rotation="halves")),
    "glm4, tables": ("glm4", {}, lambda d: replace(d, rotation="pairs by columns")),
    "nemotron, weight": ("nemotron", {}, lambda d: replace(d, norm="layer")),
    "neox, heads": (
        "gpt-neox",
        {},
        lambda d: replace(d, linears={**without(d.linears, "qkv_by_head"), "qkv": d.linears["qkv_by_head"]}),
    ),
    "neox, norms swapped": ("gpt-neox", {}, lambda d: replace(d, norms=swapped(d.norms, "attention", "mlp"))),
    "falcon, norms swapped": ("falcon", {}, lambda d: replace(d, norms=swapped(d.norms, "attention", "mlp"))),
    "falcon, heads": (
        "falcon",
        {},
        lambda d: replace(d, linears={**without(d.linears, "qkv_by_head"), "qkv": d.linears["qkv_by_head"]}),
    ),
    "opt, offset": ("opt", {}, lambda d: replace(d, position_offset=1)),
    "biogpt, eps": ("biogpt", {}, lambda d: replace(d, norm_eps=0.5)),
    "biogpt, scale": ("biogpt", {}, lambda d: replace(d, embedding_scale="none")),
}
CHANGES = {name: change for name, change in CHANGES.items() if change[0] in CONFIGS}  # of this transformers


@pytest.mark.parametrize(("name", "options", "change"), CHANGES.values(), ids=CHANGES)
def test_what_an_entry_says_is_what_the_class_does(describe, name, options, change):
    """With the entry both decoders compute what the modules do; with one field changed neither does."""
    model = random_model(name, torch.float32, **options)
    if hasattr(model, "model"):
        model.model.embed_tokens_as_linear = nn.Linear(64, 199, bias=False).eval()
    assert max(differences(model)) < 1e-4
    describe(change(KNOWN[type(model).__name__]))
    assert min(differences(model)) > 1e-3


STRAY = {
    "a cap in a Gemma 3": ("gemma3", {"attn_logit_softcapping": 1.0}),
    "kinds of layers in a Mistral": ("mistral", FULL),
    "kinds of layers in a Phi-3": ("phi3", {"sliding_window": 9, **FULL}),
    "another activation in a Llama": ("llama", {"hidden_activation": "relu"}),
    "a cap of logits in a Qwen3": ("qwen3", {"final_logit_softcapping": 1.0}),
}


@pytest.mark.parametrize(("name", "options"), STRAY.values(), ids=STRAY)
def test_what_a_class_does_not_read_in_its_config_no_decoder_does(name, options):
    model = random_model(name, torch.float32, **options)
    assert max(differences(model)) < 1e-4
    prompt = torch.randint(3, 199, (1, 14), generator=torch.Generator().manual_seed(4))
    stock = model.generate(prompt, do_sample=False, max_new_tokens=20)
    hf_mlspec.prepare(model)
    assert torch.equal(model.generate(prompt, do_sample=False, max_new_tokens=20), stock)


def test_a_table_of_rotations_by_layer_type_is_each_layers_own():
    decoder = CudaDecoder(random_model("gemma3", torch.float32))
    assert [layer.rope for layer in decoder._layers] == [0, 0, 0]  # three layers are all of one kind
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    model = random_model("gemma3", torch.float32, layer_types=kinds)
    assert [layer.rope for layer in CudaDecoder(model)._layers] == [0, 1, 0]
    assert max(differences(model)) < 1e-4


def test_a_class_without_an_entry_is_refused_by_name(caplog):
    model = made_up()
    for word in ("cpu", "cuda"):
        assert decoder_of(model, word) is None
    assert caplog.text.count("MadeUpForCausalLM runs module by module: the compiled decoder does not know") == 1


def test_a_class_of_the_same_name_from_elsewhere_is_not_the_one_described():
    model = random_model("llama", torch.float32)
    model.__class__ = type("LlamaForCausalLM", (LlamaForCausalLM,), {})
    for decoder in (CpuDecoder, CudaDecoder):
        with pytest.raises(UnknownArchitecture, match="the compiled decoder does not know this class"):
            decoder(model)


def refused_by_both(model: nn.Module, words: str, *, exactly: bool = True) -> None:
    for decoder in (CpuDecoder, CudaDecoder):
        with pytest.raises(UnknownArchitecture) as error:
            decoder(model)
        assert str(error.value) == words or (not exactly and words in str(error.value))
    for word in ("cpu", "cuda"):
        assert decoder_of(model, word) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norms": {**LLAMA.norms, "mlp": "norm_2"}}, "norm_2, which its LlamaDecoderLayer does not have"),
        ({"linears": {**SEPARATE, "o": "self_attn.out"}}, "self_attn.out, which its LlamaDecoderLayer does not have"),
        ({"layers": "model.blocks"}, "model.blocks, which its LlamaForCausalLM does not have"),
        ({"head": "score"}, "score, which its LlamaForCausalLM does not have"),
        ({"attention": "attn"}, "attn, which its LlamaDecoderLayer does not have"),
        ({"activation": "act"}, "act as activation, which its LlamaConfig does not have"),
        ({"attention_scale": "scale"}, "scale as attention_scale, which its LlamaAttention does not have"),
    ],
)
def test_what_a_description_names_and_is_not_there_is_one_error(describe, caplog, change, words):
    describe(replace(LLAMA, **change))
    model = random_model("llama", torch.float32)
    refused_by_both(model, f"its description names {words}")
    assert caplog.text.count(f"LlamaForCausalLM runs module by module: its description names {words}") == 1


LATER = [(field, word) for field, (_, later) in WORDS.items() for word in later]
LATER += [
    ("norms", without(LLAMA.norms, "mlp")),
    ("norms", {**LLAMA.norms, "q": "self_attn.q_norm"}),
    ("linears", without(SEPARATE, "gate")),
    ("linears", {**without(SEPARATE, "q", "k"), "qkv": "self_attn.qkv_proj"}),
]


@pytest.mark.parametrize(("field", "word"), LATER, ids=[f"{field}-{i}" for i, (field, _) in enumerate(LATER)])
def test_a_field_that_no_decoder_has_is_refused_by_its_name(describe, field, word):
    describe(replace(LLAMA, **{field: word}))
    said = ", ".join(sorted(word)) if isinstance(word, dict) else repr(word)
    model = random_model("llama", torch.float32)
    for decoder in (CpuDecoder, CudaDecoder):
        with pytest.raises(UnknownArchitecture, match=f"its description says {field} {said}; the compiled decoder "):
            decoder(model)


ON_GPUS_LATER = [(field, word) for field, words in CPU_WORDS.items() for word in words]


@pytest.mark.parametrize(("field", "word"), ON_GPUS_LATER)
def test_a_word_that_the_decoder_of_the_cpu_alone_has_is_refused_by_the_other(describe, field, word):
    model = random_model("qwen3", torch.float32)
    describe(replace(KNOWN["Qwen3ForCausalLM"], **{field: word}))
    CpuDecoder(model)
    with pytest.raises(UnknownArchitecture, match=f"says {field} {word!r}; the compiled decoder of GPUs takes "):
        CudaDecoder(model)


def test_sinks_that_a_layer_does_not_have_are_named(describe):
    model = random_model("llama", torch.float32)
    describe(replace(LLAMA, sinks="some_name"))
    for decoder in (CpuDecoder, CudaDecoder):
        words = "its description names some_name, which its LlamaDecoderLayer does"
        with pytest.raises(UnknownArchitecture, match=words):
            decoder(model)


def test_a_config_that_asks_for_what_a_description_leaves_out_is_refused_by_its_entry():
    for name, options, said in (
        ("cohere", {"use_qk_norm": True}, "use_qk_norm=True, and the compiled decoder has none"),
        ("gpt-neox", {"use_parallel_residual": False}, "use_parallel_residual=False, and the compiled decoder takes"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False, and the compiled decoder takes True"),
        ("opt", {"word_embed_proj_dim": 32}, "its embedding has 32 columns, and its layers 64"),
        ("falcon", {"alibi": True}, "alibi=True, and the compiled decoder has none"),
        ("falcon-every-head", {"parallel_attn": False}, "parallel_attn=False, and the compiled decoder takes True"),
        ("llama", {"sliding_window": 8}, "sliding_window=8: its cache forgets what is further back"),
    ):
        refused_by_both(random_model(name, torch.float32, **options), said, exactly=False)


def test_a_table_of_positions_in_another_dtype_is_refused():
    model = random_model("opt", torch.float32)
    model.model.decoder.embed_positions.bfloat16()
    refused_by_both(model, "its embedding of positions is torch.bfloat16, and that of tokens torch.float32")


def test_a_head_of_another_width_is_refused():
    model = random_model("opt", torch.float32)
    model.lm_head = nn.Linear(32, 199, bias=False).eval()
    refused_by_both(model, "its lm_head has 32 columns, and its layers 64")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("opt", {"word_embed_proj_dim": 32}, "its embedding has 32 columns"),
        ("falcon-every-head", {"alibi": True}, "its config says alibi=True"),
        ("falcon-every-head", {"parallel_attn": False}, "its config says parallel_attn=False"),
    ],
)
def test_what_no_decoder_reads_goes_on_module_by_module(caplog, name, options, said):
    model = random_model(name, torch.float32, **options)
    prompt = torch.randint(3, 199, (1, 9), generator=torch.Generator().manual_seed(4))
    stock = model.generate(prompt, do_sample=False, max_new_tokens=20)
    hf_mlspec.prepare(model)
    for levels in (None, [], ["prompt_lookup"]):
        assert torch.equal(model.generate(prompt, do_sample=False, max_new_tokens=20, assistant_models=levels), stock)
    assert caplog.text.count(f"{type(model).__name__} runs module by module: {said}") == 1


def test_positions_past_the_learned_ones_are_one_error():
    for decoder in (CpuDecoder, CudaDecoder):
        built = decoder(random_model("opt", torch.float32))
        built.reserve_positions(256)
        with pytest.raises(ValueError, match="reaches 257 positions, and the model has learned embeddings of 256"):
            built.reserve_positions(257)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm": "rsm"}, "LlamaForCausalLM: norm says 'rsm', choose from 'rms', 'rms plus one', 'layer', "),
        ({"norms": {"before": "x"}}, "LlamaForCausalLM: norms says 'before', choose from 'attention', 'mlp', "),
        ({"linears": {"fc": "x"}}, "LlamaForCausalLM: linears says 'fc', choose from 'q', 'k', 'v', 'o', "),
    ],
)
def test_a_word_that_does_not_exist_is_an_error_where_it_is_written(change, words):
    with pytest.raises(ValueError, match=words):
        replace(LLAMA, **change)


def test_an_entry_is_all_that_another_class_needs(describe):
    """Both decoders serve it, and write the ids that its modules write."""
    model = made_up()
    prompt = torch.randint(3, 199, (1, 9), generator=torch.Generator().manual_seed(4))
    stock = model.generate(prompt, do_sample=False, max_new_tokens=20)
    describe(replace(LLAMA, class_name="MadeUpForCausalLM", package=__name__))
    assert max(differences(model)) < 1e-4
    lanes, fed, written = Lanes(CudaDecoder(model), 1), prompt.tolist(), []
    while len(written) < 20:
        written.append(int(lanes.feed(fed)[0][-1].argmax()))
        fed = [written[-1:]]
    assert [*prompt[0].tolist(), *written] == stock[0].tolist()
    hf_mlspec.prepare(model)
    assert isinstance(decoder_of(model, "cpu"), CpuDecoder)
    assert torch.equal(model.generate(prompt, do_sample=False, max_new_tokens=20), stock)


@pytest.mark.parametrize("name", [name for name in KNOWN if hasattr(transformers, name)])
def test_windows_are_said_of_the_classes_that_mask_them(name):
    others = "none", "chunks by layer type"
    assert _masks_windows(getattr(transformers, name)) == (KNOWN[name].windows not in others)


def test_transposed_weights_are_laid_out_in_place_and_saved_as_they_were(tmp_path):
    model = random_model("gpt2", torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    size = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    decoder = decoder_of(model, "cpu")
    weight = model.transformer.h[0].attn.c_attn.weight
    assert not weight.is_contiguous()
    assert weight.t().is_contiguous()
    assert sum(parameter.untyped_storage().nbytes() for parameter in model.parameters()) == size
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert decoder_of(model, "cpu") is decoder
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(torch.equal(before[name], value) for name, value in again.state_dict().items())
    weight.data.t()[0, 0] += 1  # the view is the parameter
    assert weight[0, 0] == before["transformer.h.0.attn.c_attn.weight"][0, 0] + 1


@pytest.mark.parametrize("flag", ["scale_attn_by_inverse_layer_idx", "add_cross_attention"])
def test_a_gpt2_of_another_kind_is_left_to_its_modules(flag):
    with pytest.raises(UnknownArchitecture, match=f"its config says {flag}=True"):
        CpuDecoder(random_model("gpt2", torch.float32, **{flag: True}))
