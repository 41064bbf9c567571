"""Does the CPU decoder add both parts of zipper weights as their modules do, and does each token stand alone?"""

from __future__ import annotations

import pytest
import torch
from decoders import joined_linears
from models import prompts, tiny
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec import MLSpecConfig
from hf_mlspec.engines.architecture import UnknownArchitecture
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.formats.zipper import MODES
from hf_mlspec.integration.scoring import token_logprobs
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.precision import Bits

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="no compiled library")
GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}


def zipper(folder, dtype=torch.float32, family="llama", **options):
    shape = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    tiny(family, seed=2, dtype=dtype, **shape).save_pretrained(folder)
    config = MLSpecConfig("zipper", **options)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config).eval()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", ["zipper", "zipper-low"])
def test_scores_are_those_of_the_modules(tmp_path, family, mode, precision):
    model = zipper(tmp_path, family=family, mode=mode)
    assert decoder_of(model, "cpu") is not None
    rows = [list(range(3, 3 + n)) for n in (5, 12, 9)]
    found = token_logprobs(model, rows, precision=precision)
    with hf_mlspec.precision_switch(model).at(precision):
        for row, scores in zip(rows, found, strict=True):
            logits = model(torch.tensor([row])).logits[0].float()
            expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(row[1:])[:, None])[:, 0]
            torch.testing.assert_close(scores.logprobs, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("family", "mode", "low_bits"), [
    ("llama", "paper", 4), ("gemma3", "paper", 4), ("llama", "exact", 4), ("gemma3", "clamp", 4),
    ("llama", "clamp", 2), ("qwen2", "paper", 3), ("llama", "exact", 3),
])  # fmt: skip
@pytest.mark.parametrize("precision", ["zippera8", "zippera4", "zipper-lowa8", "zipper-lowa4"])
def test_low_parts_meet_integers_as_in_the_modules(tmp_path, family, mode, low_bits, precision):
    model = zipper(tmp_path, family=family, mode=mode, low_bits=low_bits)
    rows = [list(range(3, 3 + n)) for n in (5, 12, 9)]
    found = token_logprobs(model, rows, precision=precision)
    wide = token_logprobs(model, rows, precision=precision.partition("a")[0])
    with hf_mlspec.precision_switch(model).at(precision):
        assert decoder_of(model, "cpu") is not None
        for row, scores, other in zip(rows, found, wide, strict=True):
            logits = model(torch.tensor([row])).logits[0].float()
            expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(row[1:])[:, None])[:, 0]
            torch.testing.assert_close(scores.logprobs, expected, rtol=2e-2, atol=2e-2)
            assert not torch.equal(scores.logprobs, other.logprobs)


@pytest.mark.parametrize("mode", ["paper", "clamp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_decoder_of_devices_multiplies_what_the_modules_do(tmp_path, dtype, mode):
    """Bit for bit, at every precision."""
    model = zipper(tmp_path, dtype, mode=mode)
    decoder, switch = CudaDecoder(model), hf_mlspec.precision_switch(model)
    found = {}
    levels = ["zipper", "zipper-low"]
    levels += ["zippera8", "zipper-lowa8", "zippera4", "zipper-lowa4"] if mode == "paper" else []
    for level in levels:
        for number, (multiply, modules) in enumerate(joined_linears(model, decoder)):
            x = torch.randn(17, modules[0].in_features, generator=torch.Generator().manual_seed(3)).to(dtype)
            with torch.no_grad(), switch.at(level):
                expected = torch.cat([module(x) for module in modules], dim=-1)
                found[level, number] = multiply(x, switch.bits)
            assert torch.equal(found[level, number], expected), level
    for number in range(len(found) // len(levels)):
        own = [found[level, number] for level in levels]
        assert not any(torch.equal(one, other) for i, one in enumerate(own) for other in own[:i])


@pytest.mark.parametrize("mode", MODES)
def test_chains_over_integers_write_what_the_target_writes_alone(tmp_path, mode):
    model, inputs = zipper(tmp_path, torch.bfloat16, mode=mode, activation_bits=8), prompts([8, 5, 11])
    assert decoder_of(model, "cpu") is not None
    alone = model.generate(**inputs, **GREEDY, assistant_models=[])
    for levels in (["zipper-lowa8"], ["zippera4"], ["zipper-lowa8", "zipper-lowa4"], ["zipper-lowa4", "ngram"]):
        chain = model.generate(**inputs, **GREEDY, assistant_models=levels)
        assert torch.equal(chain, alone), levels
        assert hf_mlspec.last_stats(model).levels[0].drafted > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_chains_write_what_the_target_writes_alone(tmp_path, dtype, mode):
    model, inputs = zipper(tmp_path, dtype, mode=mode), prompts([8, 5, 11])
    alone = model.generate(**inputs, **GREEDY, assistant_models=[])
    for levels in (["zipper-low"], ["zipper-low", "ngram"], ["zipper-low", "early_exit:1"]):
        chain = model.generate(**inputs, **GREEDY, assistant_models=levels)
        assert torch.equal(chain, alone), levels
    assert hf_mlspec.last_stats(model).levels[0].drafted > 0
    one_by_one = [
        model.generate(input_ids=ids[mask.bool()][None], **GREEDY, assistant_models=[])[0, -24:]
        for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    assert torch.equal(torch.stack(one_by_one), alone[:, -24:])


@pytest.mark.parametrize(("mode", "low_bits"), [("clamp", 4), ("exact", 4), ("exact", 5), ("paper", 5)])
@pytest.mark.parametrize("words", [["zipper-lowa8"], ["zipper-lowa4", "ngram"], ["zippera8", "zipper-lowa8"]])
def test_targets_of_16_bits_draft_with_integers(tmp_path, mode, low_bits, words):
    model = zipper(tmp_path, torch.bfloat16, mode=mode, low_bits=low_bits, bits=7)
    inputs = prompts([8, 5, 11])
    alone = model.generate(**inputs, **GREEDY, assistant_models=[])
    assert torch.equal(model.generate(**inputs, **GREEDY, assistant_models=words), alone)
    assert hf_mlspec.last_stats(model).levels[0].drafted > 0


@pytest.mark.parametrize(("mode", "bits"), [
    ("clamp", 16), ("clamp", 8), ("clamp", 4), ("exact", 8), ("paper", 16), ("paper", 8), ("paper", 4),
])  # fmt: skip
def test_eight_rows_have_the_bits_of_one(tmp_path, mode, bits):
    model = zipper(tmp_path, torch.bfloat16, mode=mode, activation_bits=bits)
    row = list(range(3, 30))
    (alone,) = token_logprobs(model, [row])
    many = token_logprobs(model, [row[:n] for n in range(10, 27)], batch_size=17)
    for scores in many:
        assert torch.equal(scores.logprobs, alone.logprobs[: len(scores.logprobs)])


def test_bits_that_are_neither_part_are_refused(tmp_path):
    model = zipper(tmp_path, mode="clamp")
    with pytest.raises(ValueError, match="zipper weights"):
        hf_mlspec.precision_switch(model).require(Bits(5, 16))


@pytest.mark.parametrize("mode", ["exact", "clamp"])
def test_the_decoder_of_gpus_has_no_integers_for_low_parts_of_5_bits(tmp_path, mode):
    with pytest.raises(UnknownArchitecture, match="which the CUDA decoder does where the low part has 4 bits alone"):
        CudaDecoder(zipper(tmp_path, mode=mode, activation_bits=8))


def test_linears_that_are_cut_are_refused(tmp_path, caplog):
    model = zipper(tmp_path, family="phi3")
    assert decoder_of(model, "cpu") is None
    assert "computes several linears with a zipper weight, which is not cut" in caplog.text
