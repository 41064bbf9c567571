"""Does a model keep the clip of its 4-bit activations: in every engine, in its folder, and in no other precision?"""

from __future__ import annotations

import pytest
import torch
from models import tiny
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec import MLSpecConfig, precision_switch
from hf_mlspec.calibration.clip import CLIPS, clip_divergences
from hf_mlspec.calibration.methods import ATOM_CLIP
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

ROWS = [torch.randint(3, 64, (40,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(4)]
IDS = torch.tensor(ROWS[:1])
SHAPE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "initializer_range": 0.1}
HOW = {"max_new_tokens": 12, "do_sample": False}
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel", "ignore:.*runs module by module")


def made(method: str, kind: str = "llama", **options):
    model = tiny(kind, dtype=torch.float32, **SHAPE)
    hf_mlspec.quantize(model, method, calibration=ROWS, **options)
    return model


@torch.no_grad()
def logits(model, word: str) -> torch.Tensor:
    with precision_switch(model).at(word):
        return model(IDS).logits


@pytest.mark.parametrize("method", ["rtn", "atom"])
@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_only_4_bit_activations_are_clipped_and_chains_stay_lossless(kind, method):
    plain, clipped = (made(method, kind, activation_clip=clip) for clip in (1.0, 0.7))
    for word in ("w4a16", "w4a8"):
        assert torch.equal(logits(plain, word), logits(clipped, word)), word
    assert not torch.equal(logits(plain, "w4a4"), logits(clipped, "w4a4"))
    alone, chain = (clipped.generate(IDS, assistant_models=levels, **HOW) for levels in ([], ["w4a4"]))
    assert torch.equal(alone, chain)


@pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
@pytest.mark.parametrize("method", ["rtn", "atom"])
def test_the_compiled_decoder_clips_as_the_modules_do(method):
    model = made(method, activation_clip=0.5)
    assert isinstance(decoder_of(model, "cpu"), CpuDecoder)
    with precision_switch(model).at("w4a4"):
        compiled = model.generate(IDS, assistant_models=[], **HOW)
        read = [compiled[:, : IDS.shape[1] + step] for step in range(HOW["max_new_tokens"])]
        with torch.no_grad():
            module = torch.stack([model(ids, use_cache=False).logits[0, -1] for ids in read])
    best = module.topk(2).values
    sure = best[:, 0] - best[:, 1] > 0.02 * module.abs().max()  # a sum in another order may turn ties
    assert sure.sum() >= 6
    assert torch.equal(compiled[0, IDS.shape[1] :][sure], module.argmax(-1)[sure])
    assert not torch.equal(module, torch.stack([plain_last(method, ids) for ids in read]))


def plain_last(method: str, ids: torch.Tensor) -> torch.Tensor:
    model = made(method, activation_clip=1.0)
    with precision_switch(model).at("w4a4"), torch.no_grad():
        return model(ids, use_cache=False).logits[0, -1]


@pytest.mark.parametrize(("method", "clip", "kept"), [("rtn", None, 1), ("gptq", 0.9, 0.9), ("atom", None, ATOM_CLIP)])
def test_it_is_saved_with_the_model(tmp_path, method, clip, kept):
    model = made(method, activation_clip=clip)
    assert precision_switch(model).activation_clip == kept
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert precision_switch(again).activation_clip == kept
    assert torch.equal(logits(again, "w4a4"), logits(model, "w4a4"))
    assert ("activation_clip" in model.config.quantization_config.to_dict()) == (kept != 1)


def test_without_a_method_too_and_every_copy_has_it(tmp_path):
    import copy

    tiny(dtype=torch.float32, **SHAPE).save_pretrained(tmp_path)
    config = MLSpecConfig(format="int4", activation_clip=0.8)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=config)
    assert precision_switch(copy.deepcopy(model)).activation_clip == 0.8
    assert "activation_clip=0.8" in repr(precision_switch(model))


def test_codes_are_chosen_behind_clipped_activations():
    """With 4 activation bits, blocks see what the clipped ones before them compute."""
    plain, clipped = (made("gptq", activation_bits=4, activation_clip=clip).state_dict() for clip in (1.0, 0.6))
    codes = [name for name in plain if name.endswith("weight_packed")]
    first, last = (name for name in codes if name.endswith("q_proj.weight_packed") and ".0." in name), codes[-1]
    assert all(torch.equal(plain[name], clipped[name]) for name in first)
    assert not torch.equal(plain[last], clipped[last])


@pytest.mark.parametrize("clip", [0, 0.05, 1.01, -0.5, float("nan"), True, "0.9"])
def test_what_is_no_share_is_refused_before_a_layer_is_packed(clip):
    model = tiny(dtype=torch.float32, **SHAPE)
    with pytest.raises(ValueError, match=r"MLSpecConfig: activation_clip is .*, expected 0\.1 to 1"):
        hf_mlspec.quantize(model, "rtn", calibration=ROWS, activation_clip=clip)
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear


def test_formats_without_4_bit_activations_have_none():
    with pytest.raises(ValueError, match=r"activation_clip is 0\.9, .* mxfp4 weights do not .* use int4 and "):
        MLSpecConfig(format="mxfp4", activation_clip=0.9)
    with pytest.raises(ValueError, match=r"activation_clip is 0\.9, but format=None packs no weights"):
        MLSpecConfig(format=None, kv_cache="int8", activation_clip=0.9)


def test_auto_takes_the_clip_of_the_least_divergence_and_keeps_the_codes(tmp_path):
    model, plain = made("gptq", activation_clip="auto"), made("gptq", activation_clip=1.0)
    found = model.config.quantization_config.calibration["clip_search"]
    assert list(found) == [f"{clip:g}" for clip in CLIPS]
    best = min(CLIPS, key=lambda clip: found[f"{clip:g}"])
    assert best != 1  # of this model and seed
    assert precision_switch(model).activation_clip == model.config.quantization_config.activation_clip == best
    assert all(torch.equal(one, other) for one, other in zip(
        model.state_dict().values(), plain.state_dict().values(), strict=True))  # fmt: skip
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert precision_switch(again).activation_clip == best


def test_divergences_are_those_of_the_definition_and_leave_the_model_as_it_was():
    model = made("rtn", activation_clip=0.7)
    rows = [torch.tensor([row]) for row in ROWS]
    found = clip_divergences(model, rows, (1.0, 0.7))
    assert precision_switch(model).activation_clip == 0.7
    sums = 0.0
    for ids in rows:
        with torch.no_grad(), precision_switch(model).at("w4a16"):
            wide = model(ids).logits[0].double().log_softmax(-1)
        with torch.no_grad(), precision_switch(model).at("w4a4"):
            narrow = model(ids).logits[0].double().log_softmax(-1)
        sums += float(torch.nn.functional.kl_div(narrow, wide, reduction="sum", log_target=True))
    assert found[0.7] == pytest.approx(sums / sum(map(len, ROWS)), rel=1e-4)
    assert found[1.0] != found[0.7]


def test_a_search_that_fails_leaves_the_model_as_it_was(monkeypatch):
    model = made("rtn", activation_clip=0.7)
    own, wanted = precision_switch(model), logits(model, "w4a4")
    forward, calls = type(model).forward, []

    def failing(*args, **options):
        calls.append(precision_switch(model).activation_clip)
        if len(calls) == 3:
            raise MemoryError("in the middle")
        return forward(*args, **options)

    monkeypatch.setattr(type(model), "forward", failing)
    with pytest.raises(MemoryError, match="in the middle"):
        clip_divergences(model, [IDS], (1.0, 0.9))
    monkeypatch.undo()
    assert calls == [0.7, 1.0, 0.9]
    assert precision_switch(model) is own
    assert torch.equal(logits(model, "w4a4"), wanted)


def test_a_killed_run_and_a_loaded_model_find_the_same_clip(tmp_path):
    whole = made("gptq", activation_clip="auto").config.quantization_config.calibration["clip_search"]
    made("gptq", activation_clip="auto", work_folder=tmp_path / "blocks")
    resumed = made("gptq", activation_clip="auto", work_folder=tmp_path / "blocks")
    assert resumed.config.quantization_config.calibration["clip_search"] == whole
    tiny(dtype=torch.float32, **SHAPE).save_pretrained(tmp_path / "dense")
    config = MLSpecConfig(method="gptq", calibration=ROWS, activation_clip="auto")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32, quantization_config=config)
    assert loaded.config.quantization_config.calibration["clip_search"] == whole


def test_auto_goes_with_a_method():
    with pytest.raises(ValueError, match="activation_clip is 'auto', which is searched on a text: add a method"):
        MLSpecConfig(format="int4", activation_clip="auto")
