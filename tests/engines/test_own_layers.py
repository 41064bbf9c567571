"""What is compiled of layers that differ from each other (Gemma 4), or see stretches of a row (Llama 4)?"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from decoders import APART, random_model
from models import alone, packed, prompts, together

import hf_mlspec
from hf_mlspec.engines.architecture import UnknownArchitecture, outline
from hf_mlspec.engines.choose import decoder_of, engine_of
from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.integration.scoring import token_logprobs
from hf_mlspec.nn.linear import Int4Linear
from hf_mlspec.nn.switch import precision_switch
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

pytestmark = [
    pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built"),
    pytest.mark.skipif(not APART, reason="this transformers has none of these classes"),
    pytest.mark.filterwarnings("ignore:direct_cast"),
]
UNTIL = {"max_new_tokens": 12, "eos_token_id": 1}
LOOSE = {"num_draft_tokens": 3, "confidence_threshold": 0.0}
GEMMA = [name for name in APART if name.startswith("gemma4")]


def target(name: str, dtype: torch.dtype = torch.float32, **options):
    model = random_model(name, dtype, eos_token_id=1, tie_word_embeddings=False, **options)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 1, 0
    return model


def inputs(lengths: list[int]) -> dict[str, torch.Tensor]:
    return prompts(lengths, vocab=199)


@pytest.mark.parametrize("name", APART)
def test_alone_is_within_a_twentieth_of_a_deviation_of_transformers(name):
    model, row = target(name), inputs([33])["input_ids"][0]
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(row[None]).logits[0]
    right = torch.log_softmax(exact[:-1], -1).gather(1, row[1:, None])[:, 0]
    found = token_logprobs(model, [row.tolist()])[0].logprobs.double()
    assert float((found - right).abs().max()) < 0.05 * float(exact.std()) / 100
    assert engine_of(model).name == "cpu"


@pytest.mark.parametrize("levels", [["early_exit:1"], ["early_exit:3", "early_exit:1"], ["early_exit:2", "ngram"]],
                         ids="+".join)  # fmt: skip
@pytest.mark.parametrize("name", ["gemma4-shared", "gemma4-keys"])
def test_early_exits_draft_in_the_targets_cache(name, levels):
    model, asked = target(name), inputs([12, 9, 5, 1])
    assert together(model, asked, levels, speculation_config=LOOSE, **UNTIL) == alone(model, asked, **UNTIL)
    assert all(level.drafted for level in hf_mlspec.last_stats(model).levels)
    assert isinstance(decoder_of(model, "cpu"), CpuDecoder)


BLOCKS = {"hidden_size": 96, "intermediate_size": 160, "hidden_size_per_layer_input": 32}


@pytest.mark.parametrize("name", ["gemma4-keys", "gemma4-shared"])
def test_a_nested_target_drafts_for_itself(name):
    model = hf_mlspec.nest(target(name, torch.bfloat16, **BLOCKS))
    asked = inputs([12, 5, 1])
    written = together(model, asked, [], **UNTIL)
    assert together(model, asked, ["nested"], speculation_config=LOOSE, **UNTIL) == written
    assert hf_mlspec.last_stats(model).levels[0].drafted > 0
    assert isinstance(decoder_of(model, "cpu"), CpuDecoder)


@pytest.mark.parametrize("wide", [32, 2048])
def test_inputs_of_layers_that_are_dequantized_first(wide):
    """The linear of all layers' inputs has more outputs than any other, and a thread takes all of them at once."""
    sizes = {**BLOCKS, "hidden_size_per_layer_input": wide}
    model, row = packed(target("gemma4-inputs", torch.bfloat16, **sizes), symmetric=False), [5, 9, 23, 40, 7, 11]
    dense = copy.deepcopy(model)
    for place, layer in list(dense.named_modules()):
        if isinstance(layer, Int4Linear):
            linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=torch.bfloat16)
            linear.weight = torch.nn.Parameter(layer.dequantized(torch.bfloat16), requires_grad=False)
            dense.set_submodule(place, linear.eval())
    precision_switch(model).multiply = "dequant"
    before, found = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for one in (model, dense):
            engine = CpuEngine(one, CpuDecoder(one), capacity=32)
            engine.start(1, torch.device("cpu"))
            found.append(engine.score([row], [[12]], want_logits=True).logits)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("word", ["int8", "int4"])
@pytest.mark.parametrize("name", ["gemma4-keys", "gemma4-shared", "llama4"])
def test_keys_and_values_in_codes(name, word):
    """Of layers with shorter heads a slot holds less than there is room for; rows and batches write the same."""
    model, asked = target(name), inputs([14, 9, 2])
    model.config.quantization_config = hf_mlspec.MLSpecConfig(format=None, kv_cache=word)
    hf_mlspec.prepare(model)
    rows = [model.generate(row[mask.bool()][None], do_sample=False, **UNTIL)[0, int(mask.sum()) :].tolist()
            for row, mask in zip(asked["input_ids"], asked["attention_mask"], strict=True)]  # fmt: skip
    hf_mlspec.restore(model)
    assert together(model, asked, ["prompt_lookup"], speculation_config=LOOSE, **UNTIL) == rows


@pytest.mark.parametrize("name", ["gemma4-keys", "gemma4-shared", "llama4"])
def test_a_returned_cache_has_the_sizes_of_each_layer(name):
    model, ids = target(name), inputs([9])["input_ids"]
    how = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "eos_token_id": None}
    stock = model.generate(ids, **how)
    found = model.generate(ids, **how, assistant_models=["prompt_lookup"])
    assert torch.equal(found.sequences, stock.sequences)
    held = [[one for one in cache.layers if one.keys is not None]
            for cache in (found.past_key_values, stock.past_key_values)]  # fmt: skip
    for own, their in zip(*held, strict=True):
        seen = own.keys[:, :, -their.keys.shape[2] :], own.values[:, :, -their.keys.shape[2] :]
        torch.testing.assert_close(seen, (their.keys, their.values), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gemma4-shared", "llama4"])
def test_rows_of_a_stream_write_what_they_write_alone(name):
    model, asked = target(name), inputs([12, 9, 5, 1])
    rows = [row[mask.bool()].tolist() for row, mask in zip(asked["input_ids"], asked["attention_mask"], strict=True)]
    until = {"max_new_tokens": 10, "eos_token_id": 1}
    requests = [hf_mlspec.Request(row, id=number, **until) for number, row in enumerate(rows)]
    done = hf_mlspec.generate_stream(model, requests, assistant_models=["prompt_lookup"], max_batch=2)
    written = {one.id: list(one.new_tokens) for one in done}
    assert [written[number] for number in range(4)] == alone(model, asked, **until)


@pytest.mark.parametrize("name", ["gemma4-shared", "llama4"])
def test_a_tree_of_guesses_scores_what_its_branches_do(name):
    model = target(name)
    row, branch, other = [5, 9, 23, 40, 7, 11, 60], [12, 77], [13, 80]
    engines = [CpuEngine(model, CpuDecoder(model), capacity=32) for _ in range(3)]
    for engine in engines:
        engine.start(1, torch.device("cpu"))
        engine.score([row], [[]])
    tree = engines[0].score([row], [[12, 13, 77, 80]], want_logits=True, parents=[[-1, -1, 0, 1]]).logits
    for engine, path, places in ((engines[1], branch, [0, 1, 3]), (engines[2], other, [0, 2, 4])):
        assert torch.equal(tree[places], engine.score([row], [path], want_logits=True).logits)


def test_stretches_that_end_within_later_blocks_of_slots():
    """Attention goes through 64 slots at a time; here queries of one call see different stretches of several."""
    model, row = target("llama4", attention_chunk_size=70), inputs([200])["input_ids"][0]
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(row[None]).logits[0]
    engine, at, found = CpuEngine(model, CpuDecoder(model), capacity=256), 0, []
    engine.start(1, torch.device("cpu"))
    for count in (1, 69, 3, 67, 60):
        known, guess = row[: at + 1].tolist(), row[at + 1 : at + count].tolist()
        found.append(engine.score([known], [guess], want_logits=True))
        at += count
    apart = torch.cat([one.logits for one in found])
    assert float((apart.double() - exact).abs().max()) < 1e-4 * float(exact.std())
    engine.start(1, torch.device("cpu"))
    assert torch.equal(engine.score([row[:1].tolist()], [row[1:].tolist()], want_logits=True).logits, apart)


@pytest.mark.parametrize("name", APART)
def test_the_decoder_of_gpus_refuses_them_by_name(name):
    model = target(name)
    said = "head_norms 'per rotated head'" if name.startswith("llama4") else "heads 'by layer'"
    with pytest.raises(UnknownArchitecture, match=f"its description says {said}; the compiled decoder of GPUs takes "):
        CudaDecoder(model)
    assert decoder_of(model, "cuda") is None


@pytest.mark.parametrize("name", GEMMA)
def test_a_scale_of_a_layer_that_changes_is_noticed(name):
    model, ids = target(name), inputs([9])["input_ids"]
    first = decoder_of(model, "cpu")
    assert decoder_of(model, "cpu") is first
    with torch.no_grad():
        model.model.layers[1].layer_scalar.mul_(0.5)
        stock = model.generate(ids, do_sample=False, **UNTIL)
    assert decoder_of(model, "cpu") is not first
    assert torch.equal(model.generate(ids, do_sample=False, assistant_models=[], **UNTIL), stock)


def test_a_mixture_beside_the_mlp_goes_module_by_module():
    model = target("gemma4", enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32)
    with pytest.raises(UnknownArchitecture, match="its config says enable_moe_block=True, and the compiled decoder"):
        CpuDecoder(model)
    asked = inputs([9, 4])
    assert together(model, asked, ["prompt_lookup"], **UNTIL) == alone(model, asked, **UNTIL)


def test_heads_that_differ_are_not_rotated():
    with pytest.raises(ValueError, match="heads of Gemma4ForCausalLM differ from layer to layer, which no rotation"):
        hf_mlspec.calibration.rotation.rotate(target("gemma4"), residual=False)


def test_layers_that_contradict_their_weights_are_named():
    model = target("gemma4-shared")
    model.model.layers[2].self_attn.is_kv_shared_layer = False
    with pytest.raises(UnknownArchitecture, match=r"names self_attn\.k_proj, which its Gemma4TextDecoderLayer does"):
        outline(model)
    model = target("gemma4-inputs")
    model.model.embed_tokens_per_layer.weight = torch.nn.Parameter(torch.zeros(100, 96))
    with pytest.raises(UnknownArchitecture, match=r"its inputs of layers have shape \[100, 96\]: 96 columns of 4"):
        outline(model)
    model = target("llama4")
    model.model.layers[0].feed_forward.experts.down_proj = torch.nn.Parameter(torch.zeros(5, 41, 64))
    with pytest.raises(UnknownArchitecture, match=r"weights of shapes .* which do not fit together"):
        outline(model)


def test_prompts_of_text_in_the_wrapper_of_gemma_4(model_with_eyes):
    ids = torch.randint(3, 180, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, :4], mask[0, :4] = 0, 0
    how = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
    stock = model_with_eyes.generate(ids, **how)
    assert engine_of(model_with_eyes).name == "cpu"
    for levels in ([], ["mxfp4"], ["early_exit:1", "prompt_lookup"]):
        assert torch.equal(model_with_eyes.generate(ids, **how, assistant_models=levels), stock)
    hf_mlspec.prepare(model_with_eyes)
    assert torch.equal(model_with_eyes.generate(ids, **how), stock)


@pytest.fixture
def model_with_eyes():
    torch.manual_seed(0)
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "vocab_size": 200, "sliding_window": 7}
    text |= {"vocab_size_per_layer_input": 200, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2}
    text |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 2.0}
    text |= {"max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    eye = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    eye |= {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4}
    config = transformers.Gemma4Config(text_config=text, vision_config=eye, audio_config=None)
    model = transformers.Gemma4ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2) if parameter.ndim == 1 else parameter.mul_(4)
    return model.float().eval()
