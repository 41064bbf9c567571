"""Is generate of transformers left as it was, wherever our levels are not asked for?"""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys

import pytest
import torch
from models import alone, near, prompts, tiny
from transformers import GenerationConfig, GenerationMixin

import hf_mlspec

TARGET = tiny(seed=2)
NEAR = near(TARGET, 0.02)
INPUTS = prompts([8])
OPTIONS = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(autouse=True)
def _hook_in_place():
    yield
    hf_mlspec.enable()


def test_importing_enables():
    assert hf_mlspec.enabled()


def test_importing_touches_no_device_and_no_network():
    code = (
        "import socket; socket.socket.connect = None\n"
        "import torch; import hf_mlspec\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert hf_mlspec.enabled()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_enable_is_idempotent_and_disable_restores():
    hf_mlspec.disable()
    stock = GenerationMixin.generate, GenerationMixin._assisted_decoding
    assert not hf_mlspec.enabled()
    hf_mlspec.disable()
    assert (GenerationMixin.generate, GenerationMixin._assisted_decoding) == stock
    hf_mlspec.enable()
    once = GenerationMixin.generate, GenerationMixin._assisted_decoding
    hf_mlspec.enable()
    assert (GenerationMixin.generate, GenerationMixin._assisted_decoding) == once
    assert once[0].__wrapped__ is stock[0]
    hf_mlspec.disable()
    assert (GenerationMixin.generate, GenerationMixin._assisted_decoding) == stock


def test_a_wrapper_of_someone_else_stays_in_place():
    stock, hook = GenerationMixin.generate.__wrapped__, GenerationMixin.generate
    seen = []

    @functools.wraps(hook)
    def traced(self, *args, **kwargs):
        seen.append(1)
        return hook(self, *args, **kwargs)

    GenerationMixin.generate = traced
    try:
        first = TARGET.generate(**INPUTS, max_new_tokens=5, do_sample=False, assistant_models=[NEAR])
        hf_mlspec.disable()
        assert not hf_mlspec.enabled()
        with pytest.raises(ValueError, match="assistant_models"):
            TARGET.generate(**INPUTS, assistant_models=[NEAR])
        hf_mlspec.enable()
        again = TARGET.generate(**INPUTS, max_new_tokens=5, do_sample=False, assistant_models=[NEAR])
        assert torch.equal(first, again)
        assert len(seen) == 3
    finally:
        hf_mlspec.disable()
        GenerationMixin.generate = stock


def test_a_wrapper_that_names_no_arguments_may_stand_below():
    hf_mlspec.disable()
    stock = GenerationMixin.generate
    GenerationMixin.generate = lambda self, *a, **k: stock(self, *a, **k)
    try:
        hf_mlspec.enable()
        out = TARGET.generate(INPUTS["input_ids"], max_new_tokens=5, do_sample=False, assistant_models=[NEAR])
        assert torch.equal(out, TARGET.generate(**INPUTS, max_new_tokens=5, do_sample=False))
    finally:
        hf_mlspec.disable()
        GenerationMixin.generate = stock


def test_disabled_generate_knows_no_levels():
    hf_mlspec.disable()
    with pytest.raises(ValueError, match="assistant_models"):
        TARGET.generate(**INPUTS, assistant_models=[NEAR])


def test_the_signature_is_stocks():
    hf_mlspec.disable()
    stock = inspect.signature(GenerationMixin.generate)
    hf_mlspec.enable()
    assert inspect.signature(GenerationMixin.generate) == stock


def test_without_levels_generate_is_stock():
    calls = []
    stock = GenerationMixin.generate.__wrapped__

    def spy(self, *args, **kwargs):
        calls.append((args, kwargs))
        return stock(self, *args, **kwargs)

    hf_mlspec.disable()
    try:
        GenerationMixin.generate = spy
        hf_mlspec.enable()
        ids = INPUTS["input_ids"]
        TARGET.generate(ids, **OPTIONS)
    finally:
        hf_mlspec.disable()
        GenerationMixin.generate = stock
    assert calls == [((ids,), OPTIONS)]


@pytest.mark.parametrize(
    "options",
    [{}, {"assistant_model": NEAR}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 2}, {"do_sample": True}],
    ids=["greedy", "assistant", "lookup", "beams", "sample"],
)
def test_stock_modes_give_what_they_gave(options):
    written = []
    for switch in (hf_mlspec.enable, hf_mlspec.disable):
        switch()
        torch.manual_seed(0)
        written.append(TARGET.generate(**INPUTS, **{**OPTIONS, **options}).tolist())
    assert written[0] == written[1]


def test_custom_generate_form():
    reference = alone(TARGET, INPUTS, max_new_tokens=12)[0]
    hf_mlspec.disable()  # it needs no hook
    out = TARGET.generate(
        **INPUTS, **OPTIONS, custom_generate=hf_mlspec.generate, assistant_models=[NEAR, "early_exit:1"],
        speculation_config={"num_draft_tokens": 5}, return_dict_in_generate=True,
    )  # fmt: skip
    assert out.sequences[0, 8:].tolist() == reference
    assert [level.name for level in out.speculation.levels] == ["LlamaForCausalLM", "early_exit:1"]


def test_custom_generate_form_with_the_hook_and_in_a_batch():
    inputs = prompts([8, 3, 11])
    stock = TARGET.generate(**inputs, **OPTIONS)
    ours = TARGET.generate(**inputs, **OPTIONS, custom_generate=hf_mlspec.generate, assistant_models=[NEAR])
    assert torch.equal(ours, stock)
    assert torch.equal(TARGET.generate(**inputs, **OPTIONS, custom_generate=hf_mlspec.generate), stock)


def test_a_generation_config_by_name_and_by_position():
    config = GenerationConfig(**OPTIONS, eos_token_id=62, pad_token_id=0)
    stock = TARGET.generate(INPUTS["input_ids"], config)
    assert torch.equal(TARGET.generate(INPUTS["input_ids"], config, assistant_models=[NEAR]), stock)
    by_name = TARGET.generate(inputs=INPUTS["input_ids"], generation_config=config, assistant_models=[NEAR])
    assert torch.equal(by_name, stock)


def test_an_argument_given_twice_is_stocks_error():
    with pytest.raises(TypeError, match="multiple values"):
        TARGET.generate(INPUTS["input_ids"], inputs=INPUTS["input_ids"], assistant_models=[NEAR])


def test_the_callers_arguments_are_left_alone():
    ids, mask = INPUTS["input_ids"].clone(), INPUTS["attention_mask"].clone()
    config = GenerationConfig(max_new_tokens=12, do_sample=True, num_return_sequences=2)
    levels = [NEAR, "early_exit:1"]
    before = config.to_dict()
    TARGET.generate(ids, generation_config=config, attention_mask=mask, assistant_models=levels)
    assert torch.equal(ids, INPUTS["input_ids"])
    assert torch.equal(mask, INPUTS["attention_mask"])
    assert config.to_dict() == before
    assert levels == [NEAR, "early_exit:1"]


def test_without_inputs_it_begins_with_the_begin_token():
    stock = TARGET.generate(**OPTIONS)
    assert torch.equal(TARGET.generate(**OPTIONS, assistant_models=[NEAR]), stock)
