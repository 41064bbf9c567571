"""Do the head and the embedding of a zipper model become codes, and does every engine read them?"""

from __future__ import annotations

import json

import pytest
import torch
from models import prompts, tiny
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec import MLSpecConfig
from hf_mlspec.cli import main
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.formats import ZipperWeight
from hf_mlspec.formats.zipper import MODES
from hf_mlspec.integration.scoring import token_logprobs
from hf_mlspec.nn.coded_embedding import NoTableError
from hf_mlspec.nn.zipper import ZipperLinear
from hf_mlspec.nn.zipper_embedding import ZipperEmbedding
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
KINDS = [("llama", False), ("llama", True), ("gemma3", True)]


def dense(folder, kind="llama", tied=False):
    model = tiny(kind, seed=2, dtype=torch.bfloat16, tie_word_embeddings=tied, **SHAPE)
    model.save_pretrained(folder)
    return model


def packed(folder, kind="llama", tied=False, **options):
    dense(folder, kind, tied)
    config = MLSpecConfig("zipper", head_and_embedding=True, **options)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config).eval()


@pytest.mark.parametrize(("kind", "tied"), KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_packed_while_loading_saved_and_loaded_bit_for_bit(tmp_path, kind, tied, mode):
    model, wide = packed(tmp_path / "wide", kind, tied, mode=mode), dense(tmp_path / "again", kind, tied)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert (type(table), type(head)) == (ZipperEmbedding, ZipperLinear)
    assert model.config.tie_word_embeddings is False
    assert model.dtype == torch.bfloat16
    for end, weight in ((table, wide.get_input_embeddings().weight), (head, wide.get_output_embeddings().weight)):
        wanted = ZipperWeight.from_dense(weight.detach(), mode=mode)
        assert torch.equal(end.packed_weight().dequantize(), wanted.dequantize())
    ids = torch.tensor([[3, 5, 0], [3, 63, 7]])
    plain = table.dequantized_module(torch.bfloat16)
    assert torch.equal(table(ids), plain(ids))
    assert table.is_prepacked
    inputs = prompts([8, 5])
    alone = model.generate(**inputs, **GREEDY)
    model.save_pretrained(tmp_path / "packed")
    told = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert told["head_and_embedding"] is True
    assert told["modules_to_not_convert"] == []
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.bfloat16).eval()
    states = again.state_dict(), model.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert type(again.get_input_embeddings()) is ZipperEmbedding
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.generate(**inputs, **GREEDY), alone)
    with pytest.raises(NoTableError, match="no weight of its own"):
        again.resize_token_embeddings(70)


def test_a_folder_without_the_empty_tensor_loads(tmp_path):
    model, inputs = packed(tmp_path / "wide", tied=True), prompts([8, 5])
    model.save_pretrained(tmp_path / "packed")
    file = tmp_path / "packed" / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if not name.endswith("row_like")}
    assert len(kept) < len(load_file(file))
    save_file(kept, file, metadata={"format": "pt"})
    again, told = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", output_loading_info=True)
    assert not any(told["missing_keys"])
    assert (again.dtype, again.get_input_embeddings().row_like.device.type) == (torch.bfloat16, "cpu")
    assert torch.equal(again.eval().generate(**inputs, **GREEDY), model.generate(**inputs, **GREEDY))
    assert main(["inspect", str(tmp_path / "packed"), "--json"]) == 0


@pytest.mark.skipif(not has_compiled_decoder(), reason="no compiled library")
@pytest.mark.parametrize(("kind", "tied"), KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_both_decoders_read_the_rows_that_the_codes_are(tmp_path, kind, tied, mode):
    model = packed(tmp_path, kind, tied, mode=mode)
    assert decoder_of(model, "cpu") is not None
    rows = [list(range(3, 3 + n)) for n in (5, 12, 9)]
    scores = {word: token_logprobs(model, rows, precision=word) for word in ("zipper", "zipper-low")}
    table, ids = model.get_input_embeddings(), torch.tensor([rows[1]], dtype=torch.int32)
    flat = CudaDecoder(model)._embed(ids, torch.zeros(1, dtype=torch.int32), None)
    assert torch.equal(flat, table(ids.long())[0])
    model.set_input_embeddings(table.dequantized_module(torch.bfloat16))
    assert decoder_of(model, "cpu") is not None
    for word, found in scores.items():
        plain = token_logprobs(model, rows, precision=word)
        assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(found, plain, strict=True))
    assert not torch.equal(scores["zipper"][0].logprobs, scores["zipper-low"][0].logprobs)


@pytest.mark.parametrize("mode", ["exact", "clamp"])
def test_a_chain_writes_what_the_model_writes(tmp_path, mode):
    model, inputs = packed(tmp_path, tied=True, mode=mode), prompts([8, 5, 11])
    alone = model.generate(**inputs, **GREEDY, assistant_models=[])
    given = {"speculation_config": {"num_draft_tokens": 3}, "assistant_models": ["zipper-low"]}
    assert torch.equal(model.generate(**inputs, **GREEDY, **given), alone)
    assert hf_mlspec.last_stats(model).levels[0].drafted > 0
    dense(tmp_path / "draft").save_pretrained(tmp_path / "draft")
    given["assistant_models"].append(str(tmp_path / "draft"))
    assert torch.equal(model.generate(**inputs, **GREEDY, **given), alone)
    assert hf_mlspec.last_stats(model).levels[1].drafted > 0


def test_a_model_in_memory_and_one_that_was_calibrated(tmp_path):
    dense(tmp_path, tied=True)
    config = MLSpecConfig("zipper", mode="clamp")
    load = {"dtype": torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, **load).eval()
    before = model.state_dict()
    assert hf_mlspec.pack_head_and_embedding(model) is model
    table = model.get_input_embeddings()
    assert hf_mlspec.pack_head_and_embedding(model).get_input_embeddings() is table
    assert model.config.quantization_config.head_and_embedding
    kept = [name for name in before if "embed_tokens" not in name and "lm_head" not in name]
    assert all(torch.equal(before[name], model.state_dict()[name]) for name in kept)
    rows = [list(range(3, 40))] * 2
    config = MLSpecConfig("zipper", mode="paper", method="gptq", calibration=rows, head_and_embedding=True)
    chosen = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, **load).eval()
    assert type(chosen.get_input_embeddings()) is ZipperEmbedding
    assert chosen.config.quantization_config.modules_to_not_convert == []
    chosen.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", **load).eval()
    inputs = prompts([8])
    assert torch.equal(again.generate(**inputs, **GREEDY), chosen.generate(**inputs, **GREEDY))


def test_a_packed_model_becomes_dense_again(tmp_path):
    model = packed(tmp_path, "gemma3", tied=True)
    inputs = prompts([8])["input_ids"]
    wanted = model(inputs).logits.float()
    model.dequantize(dtype=torch.bfloat16)
    assert isinstance(model.get_input_embeddings(), torch.nn.Embedding)
    torch.testing.assert_close(model(inputs).logits.float(), wanted, rtol=3e-2, atol=6e-2)


@pytest.mark.parametrize("method", [False, True])
def test_the_command_line_packs_them(tmp_path, capsys, method):
    folder, out = hf_mlspec.demo_pair()[0], tmp_path / "out"
    words = ["quantize", folder, str(out), "--format", "zipper", "--mode", "paper", "--head-and-embedding", "--json"]
    words += ["--dtype", "bfloat16"]
    if method:
        (tmp_path / "text.txt").write_text("def add(a, b):\n    return a + b\n" * 100, encoding="utf-8")
        words += ["--method", "rtn", "--calibration", str(tmp_path / "text.txt"), "--samples", "1", "--tokens", "64"]
    assert main(words) == 0
    told = json.loads((out / "config.json").read_text())["quantization_config"]
    assert told["head_and_embedding"] is True
    capsys.readouterr()
    assert main(["inspect", str(out), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert "experts" not in json.dumps(shown["layers"])


@pytest.mark.parametrize(("settings", "words"), [
    ({"format": "int4"}, "format 'int4' keeps both"),
    ({"format": "zipper", "head_and_embedding": 1}, "head_and_embedding is 1, expected True or False"),
])
def test_configs_that_do_not_fit(settings, words):
    with pytest.raises(ValueError, match=words):
        MLSpecConfig(**{"head_and_embedding": True} | settings)


def test_models_that_do_not_fit(tmp_path):
    dense(tmp_path)
    config = MLSpecConfig("zipper", head_and_embedding=True)
    with pytest.raises(ValueError, match="rows of codes are bfloat16"):
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=config)
    with pytest.raises(ValueError, match="is not in zipper weights"):
        hf_mlspec.pack_head_and_embedding(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
    model = packed(tmp_path)
    with pytest.raises(IndexError, match="token 64 is outside"):
        model.get_input_embeddings()(torch.tensor([[64]]))
    model.save_pretrained(tmp_path / "packed")
    with pytest.raises(ValueError, match=r"load it with dtype=torch\.bfloat16"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
