"""Does kv_cache hold wherever a model generates, is saved or drafts, and is what goes against it said?"""

from __future__ import annotations

import json
import logging

import pytest
import torch
from models import near, prompts, tiny
from transformers import AutoModelForCausalLM, DynamicCache
from warned import forget_warnings

import hf_mlspec
from hf_mlspec.engines.choose import engine_of
from hf_mlspec.evaluation.certificate_subject import _format
from hf_mlspec.formats import CACHE_FORMATS
from hf_mlspec.formats.cache import INT8
from hf_mlspec.integration.costs.identity import key_of, model_of
from hf_mlspec.integration.costs.probe import _state_key
from hf_mlspec.integration.quantizer.convert import convert_folder
from hf_mlspec.integration.quantizer.examine import examine
from hf_mlspec.integration.scoring import token_logprobs
from hf_mlspec.nn.packed import PackedLinear
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.rounds.chain import bucket_of

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
OPTIONS = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
ALONE = hf_mlspec.MLSpecConfig(format=None, kv_cache="int8")
WORDS = pytest.mark.parametrize("word", CACHE_FORMATS)
ROW = {"int8": 12, "int4": 8, None: 16}  # bytes of 8 elements; of bfloat16 where there is no word
WIDE = {"hidden_size": 64, "head_dim": 16, "num_key_value_heads": 2}


def coded(seed: int = 2, dtype: torch.dtype = torch.bfloat16, word: str = "int8", **options):
    model = tiny(seed=seed, dtype=dtype, **options)
    model.config.quantization_config = hf_mlspec.MLSpecConfig(format=None, kv_cache=word)
    return model


def other(target):
    """A model like the target, without its word."""
    level = near(target, 0.05)
    del level.config.quantization_config
    return level


def written(model, inputs, **how) -> list[list[int]]:
    return model.generate(**inputs, **OPTIONS, **how)[:, inputs["input_ids"].shape[1] :].tolist()


@pytest.fixture
def folder(tmp_path):
    tiny(seed=2, dtype=torch.bfloat16, **WIDE).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("lengths", [[9], [9, 3, 17]], ids=str)
@pytest.mark.parametrize(
    "levels", [["mxfp4"], ["early_exit:1"], ["mxfp4", "near"], ["near"], ["prompt_lookup"]], ids=str
)
@pytest.mark.parametrize(("word", "how"), [
    ("int8", {}), ("int8", {"draft_cache": "int8"}), ("int8", {"shared_cache": False}),
    ("int8", {"engine": "cuda", "draft_cache": "int8"}), ("int4", {}), ("int4", {"draft_cache": "int8"}),
    ("int8", {"draft_cache": "int4"}),
], ids=str)  # fmt: skip
def test_a_chain_writes_what_the_target_alone_writes(lengths, levels, word, how):
    target, inputs = coded(word=word), prompts(lengths)
    given = [other(target) if level == "near" else level for level in levels]
    engine = {name: word for name, word in how.items() if name == "engine"}
    alone = written(target, inputs, assistant_models=[], speculation_config=engine)
    assert written(target, inputs, assistant_models=given, speculation_config=how) == alone
    held = [level.cache_bytes for level in hf_mlspec.last_stats(target).levels]
    layers = {"mxfp4": 2, "early_exit:1": 1, "near": 2, "prompt_lookup": 0}
    for level, size in zip(levels, held, strict=True):
        shares = level in ("mxfp4", "early_exit:1") and how.get("shared_cache", True)
        kept = how.get("draft_cache", None if level == "near" else word)  # views of the target keep its format
        rows = bucket_of(len(lengths)) if engine else len(lengths)
        assert size == (0 if shares else layers[level] * 2 * 2 * 256 * rows * ROW[kept])


@WORDS
def test_levels_that_see_a_part_of_the_codes(word):
    target, inputs = coded(word=word), prompts([150, 90])
    alone = written(target, inputs, assistant_models=[])
    for levels in (["mxfp4"], ["mxfp4", other(target)]):
        how = {"draft_window": 8, "draft_cache": word}
        assert written(target, inputs, assistant_models=levels, speculation_config=how) == alone
    engine = {"engine": "cuda"}
    alone = written(target, inputs, assistant_models=[], speculation_config=engine)
    assert written(target, inputs, assistant_models=["mxfp4"], speculation_config=how | engine) == alone


@WORDS
def test_the_word_changes_what_the_target_computes_and_how_much_it_holds(word):
    inputs = prompts([40])
    plain, model = tiny(seed=2, dtype=torch.float32), coded(dtype=torch.float32, word=word)
    scored = [token_logprobs(one, inputs["input_ids"].tolist())[0].logprobs for one in (plain, model)]
    off = (scored[0] - scored[1]).abs()
    assert 0 < off.max() < {"int8": 0.5, "int4": 5}[word]
    for one in (plain, model):
        written(one, inputs, assistant_models=[])
    sizes = [hf_mlspec.last_stats(one).target_cache_bytes for one in (plain, model)]
    assert sizes[1] * 32 == sizes[0] * ROW[word]


@pytest.mark.parametrize("engine", ["cpu", "modules"])
def test_plain_generate_keeps_the_word(engine, caplog):
    """Without levels and without prepare our loop decodes; greedy, sampled, and in a batch."""
    model, inputs = coded(dtype=torch.float32), prompts([9, 3])
    model.generate(**inputs, **OPTIONS)
    assert hf_mlspec.last_stats(model).target_cache_bytes == 2 * 2 * 2 * 256 * 2 * 12
    assert not caplog.records
    how = {"speculation_config": {"engine": engine}}
    assert written(model, inputs) == written(model, inputs, assistant_models=[], **how)
    sampled = {"max_new_tokens": 9, "do_sample": True}
    hf_mlspec.clear(model)
    model.generate(**inputs, **sampled)
    assert hf_mlspec.last_stats(model) is not None
    off = tiny(seed=2, dtype=torch.float32)
    off.generate(**inputs, **OPTIONS)
    assert hf_mlspec.last_stats(off) is None  # a model without the word is transformers'


def test_what_stock_decodes_is_said_once(caplog):
    forget_warnings()
    model, inputs = coded(dtype=torch.float32), prompts([9])
    plain = tiny(seed=2, dtype=torch.float32)
    for _ in range(2):
        beams = model.generate(**inputs, **OPTIONS, num_beams=2)
    assert torch.equal(beams, plain.generate(**inputs, **OPTIONS, num_beams=2))
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == ["LlamaForCausalLM keeps keys and values as int8, but transformers' own loop runs this call, "
                    "module by module, with keys and values as they are computed: num_beams is 2"]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", ["cpu", "modules", "cuda"])
@WORDS
def test_past_key_values_go_out_and_come_back_bit_for_bit(dtype, engine, word):
    model, inputs, record = coded(dtype=dtype, word=word), prompts([20, 20]), CACHE_FORMATS[word]
    how = {"assistant_models": [], "speculation_config": {"engine": engine}, "return_dict_in_generate": True}
    whole = model.generate(**inputs, **OPTIONS | {"max_new_tokens": 30}, **how)
    first = model.generate(**inputs, **OPTIONS | {"max_new_tokens": 12}, **how)
    cache = first.past_key_values
    assert cache.layers[0].keys.dtype == dtype
    assert all(torch.equal(record.dequantize(record.quantize(states), dtype), states)
               for layer in cache.layers for states in (layer.keys, layer.values))  # fmt: skip
    mask = torch.ones_like(first.sequences)
    second = model.generate(first.sequences, attention_mask=mask, past_key_values=cache,
                            **OPTIONS | {"max_new_tokens": 18}, **how)  # fmt: skip
    assert torch.equal(second.sequences, whole.sequences)
    for ours, theirs in zip(second.past_key_values.layers, whole.past_key_values.layers, strict=True):
        if engine != "modules":
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)
    wrong = DynamicCache()
    for index, layer in enumerate(cache.layers):
        wrong.update(layer.keys.to(torch.int8), layer.values.to(torch.int8), index)
    with pytest.raises(ValueError, match=r"past_key_values are torch\.int8"):
        model.generate(torch.cat([first.sequences] * 2, 1), attention_mask=torch.cat([mask] * 2, 1),
                       past_key_values=wrong, **OPTIONS, **how)  # fmt: skip


@WORDS
def test_streams_and_scores_use_it(word):
    model, inputs = coded(word=word), prompts([9, 9])
    alone = written(model, inputs, assistant_models=[])
    rows = inputs["input_ids"].tolist()
    requests = [hf_mlspec.Request(row, max_new_tokens=24) for row in rows]
    model.generation_config.eos_token_id = None
    done = list(hf_mlspec.generate_stream(model, requests, assistant_models=["mxfp4"], max_batch=1))
    assert [one.new_tokens for one in sorted(done, key=lambda one: requests.index(one.request))] == alone
    whole = token_logprobs(model, [rows[0] + alone[0]], num_scored=[24])[0]
    assert bool(whole.greedy.all())


@pytest.mark.parametrize("settings", [
    {"format": None}, {"format": "int4", "group_size": 32}, {"format": "mxfp4"}, {"format": "nested-bf16"},
    {"format": "bitplanes", "group_size": 32},
    {"format": None, "word": "int4"},
], ids=str)  # fmt: skip
def test_it_is_saved_and_comes_back(folder, tmp_path, settings):
    word = settings.get("word", "int8")
    settings = {name: value for name, value in settings.items() if name != "word"}
    model = load(folder, quantization_config=hf_mlspec.MLSpecConfig(**settings, kv_cache=word))
    inputs = prompts([9])
    alone = written(model, inputs)
    assert hf_mlspec.last_stats(model).target_cache_bytes == 2 * 2 * 2 * 256 * {"int8": 20, "int4": 12}[word]
    model.save_pretrained(tmp_path / "saved")
    stored = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert stored["kv_cache"] == word
    assert stored["format"] == settings["format"]
    again = load(tmp_path / "saved")
    assert again.config.quantization_config.kv_cache == word
    assert written(again, inputs) == alone
    assert written(again, inputs, assistant_models=["prompt_lookup"]) == alone
    packed = any(isinstance(module, PackedLinear) for module in again.modules())
    assert packed is (settings["format"] is not None)
    found = examine(str(tmp_path / "saved"))
    assert found.kv_cache == word
    assert found.title == "hf_mlspec"


def test_a_model_without_packed_weights_stays_one(folder, tmp_path):
    model = load(folder, quantization_config=ALONE)
    plain = load(folder)
    for name, weight in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight)
    model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "README.md").exists()
    names = {name for file in (tmp_path / "saved").glob("*.safetensors") for name in _names(file)}
    assert names == {name for file in folder.glob("*.safetensors") for name in _names(file)}
    cast = hf_mlspec.direct_cast(model)  # it is no quantized model
    assert cast.config.quantization_config.kv_cache == "int8"
    hf_mlspec.nest(model)
    assert model.config.quantization_config.kv_cache == "int8"
    assert model.config.quantization_config.format == "nested-bf16"
    nested = written(model, prompts([9]), assistant_models=["nested"])
    hf_mlspec.unnest(model)
    assert model.config.quantization_config.to_dict() == ALONE.to_dict()
    assert written(model, prompts([9])) == nested
    wide = load(folder, quantization_config=ALONE).dequantize()
    assert getattr(wide.config, "quantization_config", None) is None


def _names(file):
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def test_other_kinds_of_checkpoints_cannot_say_it(folder, tmp_path):
    config = hf_mlspec.MLSpecConfig(format="int4", group_size=32, kv_cache="int8")
    load(folder, quantization_config=config).save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"keeps keys and values as int8 \(kv_cache\), which a gptq"):
        convert_folder(str(tmp_path / "saved"), str(tmp_path / "out"), to="gptq")
    assert not (tmp_path / "out").exists()


def test_a_config_of_before_has_none(folder):
    model = load(folder, quantization_config=hf_mlspec.MLSpecConfig(format="int4", group_size=32))
    assert model.config.quantization_config.kv_cache is None
    assert "kv_cache" not in model.config.quantization_config.to_dict()
    model.config.quantization_config.kv_cache = "int8"  # and may be given one
    assert engine_of(model).cache_format is INT8


@pytest.mark.parametrize(("settings", "error", "said"), [
    ({"kv_cache": "int5"}, ValueError, "MLSpecConfig: kv_cache is 'int5', choose 'int8' or 'int4', or None"),
    ({"kv_cache": 8}, TypeError, "MLSpecConfig: kv_cache is 8, expected a word"),
    ({"format": None}, ValueError, "format is None and kv_cache is None: nothing is to be quantized"),
    ({"format": None, "kv_cache": "int8", "group_size": 32}, ValueError, "group_size is 32, but format=None packs no"),
    ({"format": None, "kv_cache": "int8", "activation_bits": 8}, ValueError, "activation_bits is 8, but format=None"),
    ({"format": None, "kv_cache": "int8", "skip_modules": ["o_proj"]}, ValueError, "skip_modules is"),
    ({"format": "none", "kv_cache": "int8"}, ValueError, "format 'none' is unknown"),
])  # fmt: skip
def test_bad_configs(settings, error, said):
    with pytest.raises(error, match=said):
        hf_mlspec.MLSpecConfig(**settings)


@pytest.mark.parametrize(("word", "error", "said"), [
    ("int5", ValueError, "draft_cache is 'int5', choose 'int8'"), (True, TypeError, "draft_cache is True"),
])  # fmt: skip
def test_bad_words_for_drafts(word, error, said):
    with pytest.raises(error, match=said):
        hf_mlspec.SpeculationConfig(draft_cache=word)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("captured", [True, False])
def test_a_plain_target_with_drafts_over_codes_on_steps_of_a_gpu(sampled, captured):
    """Here over the CPU's ops, in what captured rounds replay and, as a processor reads tokens, step by step."""
    target, texts, sizes = tiny(seed=2, dtype=torch.bfloat16), [], []
    level, inputs = near(target, 0.05), prompts([9, 40])
    slow = {} if captured else {"repetition_penalty": 1.2}
    codes = {"draft_cache": "int8"}
    for how in (None, {}, codes, codes | {"draft_window": 8}, {"draft_cache": "int4"}):
        torch.manual_seed(1)
        out = target.generate(**inputs, **OPTIONS | {"do_sample": sampled, **slow},
                              assistant_models=[] if how is None else [level],
                              speculation_config={"engine": "cuda", **(how or {})})  # fmt: skip
        texts.append(out.tolist())
        sizes += [level.cache_bytes for level in hf_mlspec.last_stats(target).levels]
    assert texts[1:] == texts[:1] * 4
    assert sizes[1] * 16 == sizes[0] * 12 == sizes[2] * 16
    assert sizes[3] * 16 == sizes[0] * 8


def test_costs_of_one_are_not_those_of_the_other():
    model = tiny(seed=2, dtype=torch.bfloat16)
    plain = engine_of(model)
    kept, other_kept = engine_of(coded()), engine_of(coded(word="int4"))
    assert len({model_of(one) for one in (plain, kept, other_kept)}) == 3
    assert len({key_of(one) for one in (plain, kept, other_kept)}) == 3
    assert len({_state_key(one, False) for one in (plain, kept, other_kept)}) == 3
    follower = engine_of(tiny(seed=2, dtype=torch.bfloat16))
    alone = model_of(follower)
    follower.follow = kept
    assert model_of(follower) != alone  # it reads codes


def test_a_certificate_says_so(folder):
    alone = load(folder, quantization_config=ALONE)
    assert _format(alone) == {**ALONE.to_dict(), "activation_bits": None}
    packed = load(folder, quantization_config=hf_mlspec.MLSpecConfig(format="mxfp4", kv_cache="int8"))
    assert _format(packed)["kv_cache"] == "int8"
    assert _format(packed)["activation_bits"] == 16


def test_a_level_that_cannot_have_the_codes_says_so(monkeypatch):
    """As on a GPU, whose kernels do not read 4-bit codes."""
    target, inputs = coded(), prompts([9])

    def refuses(engine, kept):
        raise ValueError(f"the kernels here read no {kept.word}")

    monkeypatch.setattr("hf_mlspec.engines.rows.CachedRows.keep_in", refuses)
    with pytest.raises(ValueError, match=r"draft_cache is 'int4', which level .* cannot have: the kernels here read"):
        written(target, inputs, assistant_models=[other(target)], speculation_config={"draft_cache": "int4"})


def test_heads_of_a_level_that_the_codes_do_not_take_are_said_of_the_option():
    odd = tiny(seed=2, dtype=torch.bfloat16, kind="gpt2", n_embd=18, n_head=2)
    with pytest.raises(ValueError, match=r"draft_cache is 'int4', which level .* cannot have: .* and heads have 9"):
        written(coded(), prompts([9]), assistant_models=[odd], speculation_config={"draft_cache": "int4"})


def test_heads_that_a_format_does_not_take_are_named_before_weights_are_loaded(tmp_path):
    odd = {"kind": "gpt2", "n_embd": 18, "n_head": 2}  # rotary embeddings have even ones
    tiny(seed=2, dtype=torch.bfloat16, **odd).save_pretrained(tmp_path / "odd")
    with pytest.raises(ValueError, match=r"MLSpecConfig: kv_cache is 'int4', which this model cannot have: .* 9"):
        load(tmp_path / "odd", quantization_config=hf_mlspec.MLSpecConfig(format=None, kv_cache="int4"))
