"""Does a GGUF file load as a model of packed layers, decode what its weights say, and serve as a level?"""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen3Config

import hf_mlspec
from hf_mlspec.integration.levels.load import read_tokenizer
from hf_mlspec.nn.linear import Int4Linear, Mxfp4Linear
from hf_mlspec.nn.packed import PackedLinear
from hf_mlspec.nn.planes import PlanesLinear
from tests.checkpoints.test_gguf_names import SIZES, metadata_of, tensors_of
from tests.gguf_files import gguf, write

pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel", "ignore:.*runs module by module")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 3]])
KINDS = {"Q4_0": Int4Linear, "Q8_0": PlanesLinear, "MXFP4": Mxfp4Linear, "F16": torch.nn.Linear}
MODELS = {"llama": (LlamaConfig, {}), "qwen3": (Qwen3Config, {"head_dim": 128, "tie_word_embeddings": True})}


def blocks_of(kind, data):
    """MXFP4 is quantized by ours: the package has no quantizer of it."""
    return gguf.quants.quantize(data, gguf.GGMLQuantizationType[kind])


def written(folder, kind, architecture="llama", seed=0):
    config, options = MODELS[architecture]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(**{**SIZES, **options}), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    metadata = metadata_of(model.config, architecture)
    return write(folder / "x.gguf", tensors_of(model, architecture, kind), metadata, architecture)


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16"])
def test_logits_are_those_of_stock_transformers(kind, architecture, tmp_path):
    """Which dequantizes everything to float32."""
    path = written(tmp_path, kind, architecture)
    stock = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ours = hf_mlspec.load(path, dtype=torch.float32)
    assert type(ours.model.layers[0].mlp.up_proj) is KINDS[kind]
    packed = [module for module in ours.modules() if isinstance(module, PackedLinear)]
    assert len(packed) == (0 if kind == "F16" else 15 if architecture == "llama" else 14)
    with torch.inference_mode():
        expected = stock.double()(IDS).logits
        for module in packed:
            module.materialize(torch.float32)
        assert (ours(IDS).logits.double() - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_it_is_a_target_and_a_level(kind, tmp_path):
    path = written(tmp_path, kind)
    target = hf_mlspec.load(path)
    assert target.dtype == torch.bfloat16
    alone = target.generate(IDS, assistant_models=[], max_new_tokens=12, do_sample=False)
    own = "w4a8" if kind == "Q4_0" else "planes4"
    for levels in ([own], [str(path)], ["prompt_lookup"]):
        assert torch.equal(target.generate(IDS, assistant_models=levels, max_new_tokens=12, do_sample=False), alone)


def test_it_is_saved_as_ours(tmp_path):
    model = hf_mlspec.load(written(tmp_path, "Q4_0"))
    model.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    with torch.inference_mode():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_damage_is_named_before_a_model_is_made(tmp_path, monkeypatch):
    path = written(tmp_path, "Q4_0")
    path.write_bytes(path.read_bytes()[:-64])
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("it was made first"))
    with pytest.raises(ValueError, match=r"x.gguf is damaged"):
        hf_mlspec.load(path)


def test_a_file_that_is_none_is_named(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"something else, and long enough to hold a header")
    with pytest.raises(ValueError, match=r"x.gguf is damaged"):
        hf_mlspec.load(tmp_path / "x.gguf")


def test_the_tokenizer_is_read_from_the_file(tmp_path, monkeypatch):
    path, asked = written(tmp_path, "Q4_0"), []

    def from_pretrained(place, **options):
        asked.append((place, options))
        raise OSError("there is none")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    with pytest.raises(ValueError, match=r"x\.gguf' holds no tokenizer that can be read: there is none"):
        read_tokenizer(str(path))
    assert asked == [(str(tmp_path), {"gguf_file": "x.gguf"})]
