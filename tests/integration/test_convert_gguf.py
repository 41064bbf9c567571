"""Does a model of ours become a GGUF file that others read as the same weights, and is what cannot be said refused?"""

from __future__ import annotations

import json

import pytest
import torch
from refused_command import refusal
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

import hf_mlspec
from hf_mlspec import MLSpecConfig
from hf_mlspec.checkpoints.gguf_file import open_gguf
from hf_mlspec.checkpoints.gguf_metadata import tokenizer_metadata
from hf_mlspec.cli import main
from hf_mlspec.integration.levels.load import read_tokenizer
from hf_mlspec.integration.quantizer import gguf_saving
from hf_mlspec.integration.quantizer.convert import convert_folder
from tests import foreign_checkpoints
from tests.gguf_files import gguf
from tests.models import letters, prompts, tiny

VOCAB = 264
pytestmark = [pytest.mark.filterwarnings(f"ignore:{words}") for words in ("no compiled kernel", ".*module by")]
logging.disable_progress_bar()
PLANES = {"format": "bitplanes", "group_size": 32, "num_planes": 8}
INT4, MXFP4 = {"format": "int4", "group_size": 32}, {"format": "mxfp4"}
LLAMA31 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}


def byte_level() -> Tokenizer:
    """256 bytes, two words that merges make (transformers 5.17 cannot read a list of one), the beginning, the end and
    one for padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "an", "th"])}
    raw = Tokenizer(models.BPE(vocabulary, merges=[("a", "n"), ("t", "h")]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return raw


def tokenizer(raw: Tokenizer | None = None, **options) -> PreTrainedTokenizerFast:
    words = {"bos_token": "<begin>", "eos_token": "<end>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=raw or byte_level(), **words, **options)


def ours(folder, kind="llama", dtype=torch.bfloat16, settings=INT4, tokens=True, **shape) -> str:
    """A folder of this package, with a tokenizer."""
    own = tokenizer()
    ids = {"bos_token_id": own.bos_token_id, "eos_token_id": own.eos_token_id, "pad_token_id": own.pad_token_id}
    tiny(kind, dtype=dtype, vocab_size=VOCAB, **ids, **shape).save_pretrained(folder / "wide")
    model = AutoModelForCausalLM.from_pretrained(folder / "wide", quantization_config=MLSpecConfig(**settings))
    model.save_pretrained(folder / "ours")
    if tokens:
        own.save_pretrained(folder / "ours")
    return str(folder / "ours")


def wide(model) -> dict[str, torch.Tensor]:
    """All parameters, float32."""
    return {name: tensor.float() for name, tensor in model.dequantize(torch.float32).state_dict().items()}


def require_equal(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name].float())] == []


MODELS = {
    "llama": {}, "tied": {"tie_word_embeddings": True}, "biases": {"attention_bias": True, "mlp_bias": True},
    "llama 3.1": {"rope_parameters": LLAMA31}, "yarn": {"rope_parameters": YARN},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "qwen2": {"kind": "qwen2"}, "qwen3": {"kind": "qwen3", "rms_norm_eps": 1e-5},
}  # fmt: skip


@pytest.mark.parametrize("settings", [INT4, MXFP4], ids=["int4", "mxfp4"])
@pytest.mark.parametrize("name", MODELS)
def test_it_comes_back_as_the_same_model(tmp_path, name, settings):
    start, file = ours(tmp_path, settings=settings, **MODELS[name]), tmp_path / "there" / "x.gguf"
    done = convert_folder(start, str(file), "gguf")
    kind = "GGUF MXFP4" if settings is MXFP4 else "GGUF Q4_0"
    assert (done.source, done.to, done.layers, done.kept) == ("mlspec", "gguf", {kind: 14}, ["lm_head"])
    assert done.target_bytes == file.stat().st_size
    assert [path.name for path in file.parent.iterdir()] == ["x.gguf"]
    model, again = hf_mlspec.load(start), hf_mlspec.load(file)
    one, other = model.config.to_dict(), again.config.to_dict()
    told = {"initializer_range", "quantization_config", "dtype", "_name_or_path", "transformers_version"}
    assert {key: value for key, value in other.items() if one.get(key, value) != value and key not in told} == {}
    ids = [one.generate(**prompts([5, 9]), max_new_tokens=8, do_sample=False) for one in (model, again)]
    assert torch.equal(*ids)
    packed = [name for name in model.state_dict() if "weight_" in name]
    assert [name for name in packed if not torch.equal(model.state_dict()[name], again.state_dict()[name])] == []
    require_equal(wide(model), wide(again))


@pytest.mark.parametrize("group_size", [64, 128])
def test_larger_groups(tmp_path, group_size):
    shape = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    start = ours(tmp_path, settings={**INT4, "group_size": group_size}, **shape)
    convert_folder(start, str(tmp_path / "x.gguf"), "gguf")
    require_equal(wide(hf_mlspec.load(start)), wide(hf_mlspec.load(tmp_path / "x.gguf")))


@pytest.mark.parametrize("settings", [INT4, MXFP4, PLANES], ids=["int4", "mxfp4", "bitplanes"])
def test_the_gguf_package_reads_the_same_values(tmp_path, settings):
    """Its own reader and its own dequantization; heads of llama lie in llama.cpp's order."""
    start = ours(tmp_path, settings=settings)
    convert_folder(start, str(tmp_path / "x.gguf"), "gguf")
    reader, expected = gguf.GGUFReader(tmp_path / "x.gguf"), wide(hf_mlspec.load(start))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    assert len(stored) == len(expected) == 21
    for name, values in expected.items():
        tensor = stored[names.get_name(name, (".weight", ".bias"))]
        found = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        for end, heads in (("q_proj.weight", 4), ("k_proj.weight", 2)):
            if name.endswith(end):
                values = values.view(heads, 2, 4, 32).transpose(1, 2).reshape(-1, 32)
        assert torch.equal(found.view(values.shape), values), name
        assert tensor.data_offset % 32 == 0
    norm, table = stored["output_norm.weight"], stored["token_embd.weight"]
    assert (norm.tensor_type.name, table.tensor_type.name) == ("F32", "BF16")


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("settings", [INT4, MXFP4], ids=["int4", "mxfp4"])
def test_stock_transformers_reads_the_same_values(tmp_path, kind, settings):
    start = ours(tmp_path, kind=kind, settings=settings)
    convert_folder(start, str(tmp_path / "x.gguf"), "gguf")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", dtype=torch.float32)
    require_equal(wide(hf_mlspec.load(start)), stock.state_dict())


def test_the_tokenizer_comes_along(tmp_path):
    start = ours(tmp_path)
    tokenizer(chat_template="{{ messages }}").save_pretrained(start)
    convert_folder(start, str(tmp_path / "x.gguf"), "gguf")
    told = open_gguf(tmp_path / "x.gguf").metadata
    assert (told["tokenizer.ggml.model"], told["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert told["tokenizer.ggml.merges"] == ["a n", "t h"]
    words = told["tokenizer.ggml.tokens"]
    assert (len(words), words[256:262]) == (VOCAB, ["an", "th", "<begin>", "<end>", "<pad>", "[PAD261]"])
    assert list(told["tokenizer.ggml.token_type"]) == [1] * 258 + [3] * 3 + [5] * 3
    ids = [told[f"tokenizer.ggml.{word}_token_id"] for word in ("bos", "eos", "padding")]
    assert ids == [258, 259, 260]
    assert told["tokenizer.chat_template"] == "{{ messages }}"
    assert told["tokenizer.ggml.add_bos_token"] is False
    again, text = AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf"), "an can't, 1234"
    assert again(text).input_ids == AutoTokenizer.from_pretrained(start)(text).input_ids


def test_tokens_that_transformers_adds_are_left_out(tmp_path):
    """A model has no rows for them."""
    start, text = ours(tmp_path), "an can't <end>, 1234 <pad>"
    own = tokenizer(chat_template="{{ messages }}")
    own.save_pretrained(start)
    convert_folder(start, str(tmp_path / "x.gguf"), "gguf")
    found = read_tokenizer(str(tmp_path / "x.gguf"))
    assert len(found) == VOCAB
    assert len(AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf")) >= VOCAB
    assert found(text).input_ids == own(text).input_ids
    assert found.decode(found(text).input_ids) == own.decode(own(text).input_ids)
    assert (found.special_tokens_map, found.chat_template) == (own.special_tokens_map, own.chat_template)


def test_several_tokens_that_end_a_text_are_told(tmp_path):
    start = ours(tmp_path)
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    (tmp_path / "ours" / "config.json").write_text(json.dumps({**config, "eos_token_id": [259, 7]}))
    with pytest.warns(UserWarning, match=r"names one token that ends a text, here 259; \[7\] end texts"):
        convert_folder(start, str(tmp_path / "x.gguf"), "gguf")


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_by(pattern, ignore_merges=False, behavior="isolated", normalizer=None):
    raw = byte_level()
    model = json.loads(raw.to_str())
    model["model"]["ignore_merges"] = ignore_merges
    raw = Tokenizer.from_str(json.dumps(model))
    raw.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior), pre_tokenizers.ByteLevel(False, use_regex=False)])
    raw.normalizer = normalizer
    return raw


def told_of(raw):
    ids = {"bos": 1, "eos": 2, "padding": None}
    return tokenizer_metadata(json.loads(raw.to_str()), VOCAB, ids)


def test_how_text_is_cut_has_a_name():
    named = {("gpt-2", byte_level()), ("dbrx", split_by(LLAMA3)), ("llama-bpe", split_by(LLAMA3, True)),
             ("qwen2", split_by(LLAMA3.replace("{1,3}", ""), normalizer=normalizers.NFC()))}  # fmt: skip
    assert [word for word, raw in named if told_of(raw)["tokenizer.ggml.pre"] != word] == []


def test_tokens_that_are_added_to_a_text():
    raw = byte_level()
    first, second = raw.id_to_token(1), raw.id_to_token(2)
    both = f"{first} $A {second}"
    for single, told in ((f"{first} $A", (True, False)), (both, (True, True)), ("$A", (False, False))):
        special = [(token, raw.token_to_id(token)) for token in (first, second)]
        raw.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
        found = told_of(raw)
        assert (found["tokenizer.ggml.add_bos_token"], found["tokenizer.ggml.add_eos_token"]) == told
    raw.post_processor = processors.TemplateProcessing(
        single=f"{second} $A", special_tokens=[(second, raw.token_to_id(second))])
    with pytest.raises(ValueError, match=r"adds \['.'\] to a text"):
        told_of(raw)


@pytest.mark.parametrize(("raw", "message"), [
    (split_by(r"\w+"), r"cuts text by '\\\\w\+'"),
    (split_by(LLAMA3, behavior="removed"), "cuts text by another kind of expression"),
    (split_by(LLAMA3, normalizer=normalizers.NFKC()), "normalizes text by NFKC"),
    (letters().backend_tokenizer, "is WordLevel"),
    (Tokenizer(models.BPE({"a": 0}, merges=[], byte_fallback=True)), "is BPE with byte_fallback")])
def test_tokenizers_that_cannot_be_said(raw, message):
    with pytest.raises(ValueError, match=f"the tokenizer {message}.*which is not written as GGUF"):
        told_of(raw)


@pytest.mark.parametrize(("options", "message"), [
    ({"settings": {**INT4, "symmetric": False}}, r"q_proj: row \d+, group 0 has the zero point .*symmetric=True"),
    ({"settings": {"format": "bitplanes", "group_size": 32, "num_planes": 3}}, "bit-planes are 0 at 3"),
    ({"kind": "gemma2"}, "models of kind 'gemma2' are not written as GGUF, but llama, qwen2, qwen3"),
    ({"kind": "mistral"}, "models of kind 'mistral' are not written"),
    ({"hidden_act": "gelu"}, "the model's hidden_act is 'gelu': GGUF files cannot say that, but 'silu'"),
    ({"rope_parameters": {**LLAMA31, "low_freq_factor": 2.0}}, "the model's rope_parameters is"),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "positions of type 'dynamic'"),
    ({"kind": "qwen2", "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}, "the model's .*slid"),
    ({"tokens": False}, "holds no tokenizer that can be read")])
def test_what_cannot_be_said_is_refused_and_nothing_is_written(tmp_path, options, message):
    start = ours(tmp_path, **options)
    with pytest.raises(ValueError, match=message):
        convert_folder(start, str(tmp_path / "there" / "x.gguf"), "gguf")
    assert not (tmp_path / "there").exists()


def test_act_order_is_refused(tmp_path):
    model, layers = tiny(dtype=torch.float32, head_dim=16), {}
    for index, (name, linear) in enumerate(foreign_checkpoints.linears(model).items()):
        codes = foreign_checkpoints.rounded(linear.weight, 4, 32, True, index, True)
        layers[name] = foreign_checkpoints.gptq(codes, 4)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True}
    start = foreign_checkpoints.write(tmp_path / "theirs", model, layers, config)
    letters().save_pretrained(start)
    with pytest.raises(ValueError, match=r"orders its inputs \(act-order\), which GGUF cannot say; convert to gptq"):
        convert_folder(str(start), str(tmp_path / "x.gguf"), "gguf")


def test_a_gguf_file_is_written_into_our_format_and_back(tmp_path):
    """Negative scales, too, as ggml's own quantizer writes them."""
    convert_folder(ours(tmp_path), str(tmp_path / "x.gguf"), "gguf")
    with pytest.raises(ValueError, match="is a GGUF file already; copy it"):
        convert_folder(str(tmp_path / "x.gguf"), str(tmp_path / "y.gguf"), "gguf")
    convert_folder(str(tmp_path / "x.gguf"), str(tmp_path / "a"))
    tokenizer().save_pretrained(tmp_path / "a")
    convert_folder(str(tmp_path / "a"), str(tmp_path / "y.gguf"), "gguf")
    one, other = (open_gguf(tmp_path / name).tensors for name in ("x.gguf", "y.gguf"))
    assert {name: tensor.ggml_type for name, tensor in one.items()} == {
        name: tensor.ggml_type for name, tensor in other.items()}  # fmt: skip
    assert all(torch.equal(tensor.load(), other[name].load()) for name, tensor in one.items())


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    start, file = ours(tmp_path), tmp_path / "x.gguf"
    file.write_bytes(b"mine")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_saving, "write_tensor", full)
    with pytest.raises(OSError, match="unchanged"):
        convert_folder(start, str(file), "gguf", overwrite=True)
    assert file.read_bytes() == b"mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "wide", "x.gguf"]


def test_the_command(tmp_path, capsys):
    start, file = ours(tmp_path), tmp_path / "x.gguf"
    assert main(["convert", start, str(file), "--to", "gguf"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{start}: mlspec to gguf"
    assert "  14 layers: GGUF Q4_0" in lines
    assert "  files beside the weights: none, the tokenizer is in the file" in lines
    assert lines[-1] == f"written to {file}"
    before = file.read_bytes()
    assert f"'{file}' exists; name another file" in refusal(capsys, "convert", start, file, "--to", "gguf")
    assert "is a folder; name the file to write" in refusal(capsys, "convert", start, tmp_path, "--to", "gguf")
    assert "let it end in .gguf" in refusal(capsys, "convert", start, tmp_path / "x", "--to", "gguf")
    assert file.read_bytes() == before
    assert main(["convert", start, str(file), "--to", "gguf", "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == {"GGUF Q4_0": 14}
    assert main(["inspect", str(file)]) == 0
