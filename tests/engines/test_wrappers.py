"""Does the text model of one that also sees images run compiled, and are images left to the modules?"""

from __future__ import annotations

import copy

import pytest
import torch
from decoders import Lanes
from wrappers import WRAPPERS, random_wrapper

import hf_mlspec
from hf_mlspec.engines.architecture import UnknownArchitecture
from hf_mlspec.engines.choose import engine_of
from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.formats import FORMATS
from hf_mlspec.integration.scoring import token_logprobs
from hf_mlspec.integration.seen import _LEVELS as seen_words
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

pytestmark = [
    pytest.mark.skipif(not has_compiled_decoder(), reason="no compiled kernels"),
    pytest.mark.filterwarnings("ignore:direct_cast"),
]
IMAGE = 190


@pytest.fixture(params=WRAPPERS)
def model(request):
    return random_wrapper(request.param)


def prompts() -> dict[str, torch.Tensor]:
    """Two rows, one of them padded."""
    ids = torch.randint(3, 180, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, :4], mask[0, :4] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def written(model, **options) -> list[list[int]]:
    return model.generate(**prompts(), max_new_tokens=10, do_sample=False, **options).tolist()


def test_text_is_compiled_and_is_what_the_modules_say(model):
    assert engine_of(model).name == "cpu"
    row = prompts()["input_ids"][1]
    exact = copy.deepcopy(model).double()(input_ids=row[None]).logits[0]
    right = torch.log_softmax(exact[:-1], -1).gather(1, row[1:, None])[:, 0].float()
    torch.testing.assert_close(token_logprobs(model, [row.tolist()])[0].logprobs, right, atol=2e-4, rtol=2e-4)
    logits = Lanes(CudaDecoder(model), 1).feed([row.tolist()])[0].double()
    torch.testing.assert_close(logits, exact, atol=2e-3, rtol=2e-3)


def test_chains_write_what_the_target_writes(model):
    stock = written(model)
    for levels in ([], ["mxfp4"], ["early_exit:1", "prompt_lookup"]):
        assert written(model, assistant_models=levels) == stock
    hf_mlspec.prepare(model)
    assert written(model) == stock


def test_what_a_processor_says_of_text_is_no_obstacle():
    model = random_wrapper("gemma3")
    stock, kinds = written(model), torch.zeros(2, 12, dtype=torch.int64)
    assert written(model, assistant_models=["prompt_lookup"], token_type_ids=kinds) == stock
    hf_mlspec.prepare(model)
    assert written(model, token_type_ids=kinds) == stock
    with pytest.raises(ValueError, match="model inputs token_type_ids are not supported with assistant_models"):
        written(model, assistant_models=["prompt_lookup"], token_type_ids=kinds + 1)


def seen(name: str) -> dict[str, torch.Tensor]:
    """A prompt with one image of four tokens."""
    draw, begin, ends = torch.Generator().manual_seed(2), [5, 9, 192], [193, 17, 23, 60]
    ids = torch.tensor([[*begin, *[IMAGE] * 4, *ends]])
    if name.startswith("qwen"):  # 4 x 4 patches, of which 2 x 2 are a token: positions behind it are 2 less
        return {"input_ids": ids, "pixel_values": torch.randn(16, 1176, generator=draw),
                "image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": (ids == IMAGE).int()}  # fmt: skip
    more = {"gemma3": {"token_type_ids": (ids == IMAGE).long()}, "mistral3": {"image_sizes": torch.tensor([[28, 28]])}}
    return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 28, 28, generator=draw), **more.get(name, {})}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_prompt_with_an_image_is_read_by_modules_and_goes_on_compiled(name):
    """Logits are those of transformers, so that positions behind an image are right, too."""
    model = random_wrapper(name)
    how = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    stock = model.generate(**seen(name), **how)
    other = model.generate(**{**seen(name), "pixel_values": -seen(name)["pixel_values"]}, **how)
    assert not torch.allclose(stock.logits[0], other.logits[0], atol=1e-2)
    assert engine_of(model).name == "cpu"
    for levels in ([], ["mxfp4"], ["early_exit:1", "prompt_lookup"]):
        found = model.generate(**seen(name), **how, assistant_models=levels)
        assert torch.equal(found.sequences, stock.sequences)
        assert found.past_key_values is None
        for own, their in zip(found.logits, stock.logits, strict=True):
            torch.testing.assert_close(own, their, atol=2e-4, rtol=2e-4)
    hf_mlspec.prepare(model)
    assert torch.equal(model.generate(**seen(name), **how).sequences, stock.sequences)
    assert hf_mlspec.last_stats(model).target_passes == 10


@pytest.mark.parametrize("engine", ["cuda", "modules"])
def test_images_and_other_engines(engine):
    """What a GPU computes, op by op, and a cache of the modules."""
    model, how = random_wrapper("qwen2.5-vl"), {"max_new_tokens": 8, "do_sample": False}
    stock = model.generate(**seen("qwen2.5-vl"), **how)
    given = {"assistant_models": ["mxfp4"], "speculation_config": {"engine": engine}}
    assert torch.equal(model.generate(**seen("qwen2.5-vl"), **how, **given), stock)


def test_calls_with_images_that_are_refused(caplog):
    model, asked = random_wrapper("gemma3"), seen("gemma3")
    how = {"max_new_tokens": 4, "do_sample": False}
    draft = random_wrapper("gemma3")
    for given, said in (
        ({"assistant_models": [draft]}, "levels with a cache of their own read no images"),
        ({"assistant_models": ["mxfp4"], "speculation_config": {"shared_cache": False}}, "shared_cache=False: levels"),
    ):
        with pytest.raises(ValueError, match=said):
            model.generate(**asked, **how, **given)
    two = {name: torch.cat([value, value]) for name, value in asked.items()}
    with pytest.raises(ValueError, match="is decoded alone with levels, without padding: pass one row a call"):
        model.generate(**two, **how, assistant_models=["mxfp4"])
    cut = {name: value[:, :7] if value.ndim == 2 else value for name, value in asked.items()}
    with pytest.raises(ValueError, match="has to end in a token of text"):
        model.generate(**cut, **how, assistant_models=["mxfp4"])
    stock = model.generate(**two, **how)
    hf_mlspec.prepare(model)
    assert torch.equal(model.generate(**two, **how), stock)
    assert "pass one row a call" in caplog.text


def test_levels_of_every_format_may_draft_behind_an_image():
    words = [word for record in FORMATS.values() for word in (*record.level_words, "mxfp4a8", "w4a8", "planes3")]
    assert "zipper-low" in words
    assert [word for word in words if not seen_words.fullmatch(word)] == []


@pytest.mark.parametrize("name", ["gemma3", "qwen3-vl", "mistral3"])
def test_a_token_of_an_image_that_is_not_there(name):
    model = random_wrapper(name)
    ids = torch.tensor([[5, 9, 3], [5, IMAGE, 3]])
    with pytest.raises(ValueError, match=r"row 1 of input_ids holds token 190, the image_token_i\w+ of .* no image"):
        model.generate(ids, max_new_tokens=3, assistant_models=["prompt_lookup"])


def test_what_lies_beside_the_text_is_not_looked_at():
    model = random_wrapper("gemma3")
    model.model.vision_tower.register_forward_hook(lambda *_: None)
    assert engine_of(model).name == "cpu"
    model.model.register_forward_hook(lambda *_: None)
    with pytest.raises(UnknownArchitecture, match=r"has forward hooks \(its module model\)"):
        CpuDecoder(model)


def test_a_text_model_that_no_description_has():
    model = random_wrapper("llava")
    model.model.language_model.__class__ = type("OddModel", (type(model.model.language_model),), {})
    with pytest.raises(UnknownArchitecture, match="does not know the OddModel in it"):
        CpuDecoder(model)
