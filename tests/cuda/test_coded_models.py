"""Do models on a GPU whose keys and values are codes write what they write alone, with any levels?"""

from __future__ import annotations

import pytest
import torch
from coded_cases import FORMATS
from models import near, prompts, tiny
from ragged_cases import DEVICE
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_mlspec
from hf_mlspec.demo_pair import demo_prompts
from hf_mlspec.engines.choose import engine_of
from hf_mlspec.formats.cache import INT4, INT8, CacheFormat

WORDS = [record.word for record in FORMATS]
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "dtype": torch.bfloat16, "seed": 2}
OPTIONS = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
KEPT = {INT8: 36, INT4: 20}  # bytes of a head's 32 elements, 64 as bfloat16


def settings_of(record: CacheFormat) -> hf_mlspec.MLSpecConfig:
    return hf_mlspec.MLSpecConfig(format=None, kv_cache=record.word)


def asked(lengths: list[int]) -> dict[str, Tensor]:
    return {name: tensor.cuda() for name, tensor in prompts(lengths).items()}


def pair(record: CacheFormat):
    """A target that keeps keys and values as codes, and a draft that does not say so."""
    target, draft = (tiny(**SHAPE, max_position_embeddings=2048) for _ in range(2))
    draft = near(draft, 0.02)
    target.config.quantization_config = settings_of(record)
    return target.cuda(), draft.cuda()


@pytest.mark.parametrize("record", FORMATS, ids=WORDS)
def test_the_model_runs_in_compiled_steps_with_fewer_bytes(record, kernels_are_required):
    target, _ = pair(record)
    engine = engine_of(target)
    assert engine.name == "cuda"
    plain = tiny(**SHAPE, max_position_embeddings=2048).cuda()
    inputs = asked([9, 3])
    for model in (target, plain):
        model.generate(**inputs, **OPTIONS, assistant_models=[])
    bytes_ = [hf_mlspec.last_stats(model).target_cache_bytes for model in (target, plain)]
    assert bytes_[0] * 64 == bytes_[1] * KEPT[record]


@pytest.mark.parametrize("lengths", [[9], [3, 17, 1], [700, 3]], ids=str)
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("record", FORMATS, ids=WORDS)
def test_a_chain_writes_what_the_target_alone_writes(record, kernels_are_required, lengths, sampled):
    """In captured rounds and, as a processor reads tokens, step by step."""
    target, draft = pair(record)
    inputs = asked(lengths)
    for settings in ({}, {"repetition_penalty": 1.1}):
        texts = []
        for levels in ([], ["mxfp4"], [draft], ["mxfp4", draft]):
            torch.manual_seed(5)
            how = OPTIONS | {"do_sample": sampled, **settings}
            config = {"draft_cache": record.word} if levels else {}
            texts.append(target.generate(**inputs, **how, assistant_models=levels, speculation_config=config).tolist())
        assert texts[1:] == texts[:1] * 3


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("record", FORMATS, ids=WORDS)
def test_a_plain_target_with_a_draft_over_codes(record, kernels_are_required, sampled):
    target, draft = pair(record)
    del target.config.quantization_config
    inputs, texts, sizes = asked([9, 40]), [], []
    for how in (None, {}, {"draft_cache": record.word}, {"draft_cache": record.word, "draft_window": 16}):
        torch.manual_seed(3)
        levels = [] if how is None else [draft]
        texts.append(target.generate(**inputs, **OPTIONS | {"do_sample": sampled}, assistant_models=levels,
                                     speculation_config=how or {}).tolist())  # fmt: skip
        sizes += [level.cache_bytes for level in hf_mlspec.last_stats(target).levels]
    assert texts[1:] == texts[:1] * 3
    assert sizes[1] * 64 == sizes[0] * KEPT[record] == sizes[2] * 64


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("record", FORMATS, ids=WORDS)
def test_the_demo_pair_over_codes(record, kernels_are_required, sampled, captured):
    """Rows of real text in one batch; the target's cache, the draft's, or both hold codes."""
    folders = hf_mlspec.demo_pair()
    target, draft = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda() for folder in folders)
    tokenizer = AutoTokenizer.from_pretrained(folders[0], padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    inputs = tokenizer([one["text"] for one in demo_prompts()[:4]], return_tensors="pt", padding=True).to(DEVICE)
    slow = {} if captured else {"repetition_penalty": 1.1}
    settings = {"max_new_tokens": 96, "do_sample": sampled, "pad_token_id": tokenizer.pad_token_id, **slow}

    def texts(levels, **config):
        torch.manual_seed(7)
        return target.generate(**inputs, **settings, assistant_models=levels, speculation_config=config).tolist()

    plain = texts([])
    assert texts([draft], draft_cache=record.word) == plain
    target.config.quantization_config = settings_of(record)
    alone = texts([])
    for levels in ([draft], ["mxfp4"], ["mxfp4", draft]):
        assert texts(levels, draft_cache=record.word) == alone
        assert texts(levels) == alone


@pytest.mark.parametrize("record", FORMATS, ids=WORDS)
def test_past_key_values_go_out_and_come_back_as_the_same_codes(record, kernels_are_required):
    target, draft = pair(record)
    inputs = asked([150])
    how = {"return_dict_in_generate": True}
    whole = target.generate(**inputs, **OPTIONS, assistant_models=[], **how)
    first = target.generate(**inputs, **OPTIONS | {"max_new_tokens": 12}, assistant_models=[draft], **how)
    cache = first.past_key_values
    assert cache.layers[0].keys.dtype == torch.bfloat16
    rest = target.generate(first.sequences, attention_mask=torch.ones_like(first.sequences), past_key_values=cache,
                           **OPTIONS | {"max_new_tokens": 28}, assistant_models=["mxfp4"], **how)  # fmt: skip
    assert torch.equal(rest.sequences, whole.sequences)
    for one, other in zip(rest.past_key_values.layers, whole.past_key_values.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


@pytest.mark.parametrize("record", FORMATS, ids=WORDS)
def test_a_stream_keeps_prefixes_of_codes(record, kernels_are_required):
    target, draft = pair(record)
    row = asked([90])["input_ids"][0].tolist()
    rows = [row, row[:80] + row[:9], row[:50]]
    alone = []
    for one in rows:
        whole = target.generate(torch.tensor([one], device=DEVICE), **OPTIONS, assistant_models=[])
        alone.append(whole[0, len(one) :].tolist())
    target.generation_config.eos_token_id = None
    requests = [hf_mlspec.Request(one, max_new_tokens=40) for one in rows]
    done = list(hf_mlspec.generate_stream(target, requests, assistant_models=["mxfp4", draft], max_batch=1))
    assert [one.new_tokens for one in sorted(done, key=lambda one: requests.index(one.request))] == alone
