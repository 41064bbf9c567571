"""Does every row of a batch get its own answer, however the others fare?"""

from __future__ import annotations

import pytest
import torch
from models import EOS, PAD, alone, near, prompts, tiny, together
from transformers import GenerationConfig

import hf_mlspec
from hf_mlspec import SpeculationConfig
from hf_mlspec.integration.hook import _expand

TARGET = tiny(seed=4)
NEAR = near(TARGET, 0.02)
CHAINS = [[], [NEAR], ["early_exit:1"], [NEAR, "early_exit:1"], [NEAR, "ngram"]]
IDS = ["alone", "model", "first layers", "model, first layers", "model, table"]


@pytest.mark.parametrize("chain", CHAINS, ids=IDS)
def test_rows_end_at_different_times(chain):
    lengths = [3, 17, 9, 1, 12, 6, 30, 2]
    inputs = prompts(lengths)
    free = alone(TARGET, inputs, max_new_tokens=25, eos_token_id=None)
    # A token most rows write somewhere ends them there.
    ends = max(range(3, 64), key=lambda token: len({row.index(token) for row in free if token in row}))
    reference = alone(TARGET, inputs, max_new_tokens=25, eos_token_id=ends)
    assert len({len(row) for row in reference}) > 3
    out = TARGET.generate(
        **inputs, do_sample=False, max_new_tokens=25, eos_token_id=ends, pad_token_id=PAD, assistant_models=chain
    )
    new = out[:, max(lengths) :].tolist()
    assert [row[: len(line)] for row, line in zip(new, reference, strict=True)] == reference
    assert all(set(row[len(line) :]) <= {PAD} for row, line in zip(new, reference, strict=True))
    assert out.shape[1] == max(lengths) + max(map(len, reference))


def test_filling_after_the_end_is_stocks():
    inputs = prompts([3, 17, 9, 5])
    for pad in (PAD, 7):
        options = {"do_sample": False, "max_new_tokens": 25, "eos_token_id": [5, 9], "pad_token_id": pad}
        stock = TARGET.generate(**inputs, **options)
        assert torch.equal(TARGET.generate(**inputs, **options, assistant_models=[NEAR]), stock)


def test_a_row_does_not_depend_on_the_others():
    inputs = prompts([5, 11, 8])
    config = SpeculationConfig(confidence_threshold=0.0)
    together_ = together(TARGET, inputs, [NEAR, "early_exit:1"], max_new_tokens=20, speculation_config=config)
    for number in range(3):
        flags = inputs["attention_mask"][number].bool()
        one = {name: value[number : number + 1, flags] for name, value in inputs.items()}
        assert together(TARGET, one, [NEAR], max_new_tokens=20) == together_[number : number + 1]


@pytest.mark.parametrize("place", ["keyword", "generation_config", "position"])
def test_num_return_sequences_repeats_rows(place):
    inputs = prompts([6, 4])
    options = {"num_return_sequences": 3, "do_sample": True, "max_new_tokens": 8, "eos_token_id": None}
    torch.manual_seed(7)
    if place == "keyword":
        out = TARGET.generate(**inputs, **options, assistant_models=[])
    elif place == "generation_config":
        out = TARGET.generate(**inputs, generation_config=GenerationConfig(**options), assistant_models=[])
    else:
        mask = inputs["attention_mask"]
        out = TARGET.generate(
            inputs["input_ids"], GenerationConfig(**options), attention_mask=mask, assistant_models=[]
        )
    torch.manual_seed(7)
    repeated = {name: value.repeat_interleave(3, dim=0) for name, value in inputs.items()}
    options.pop("num_return_sequences")
    assert torch.equal(out, TARGET.generate(**repeated, **options, assistant_models=[]))
    assert len({tuple(row) for row in out.tolist()}) > 2


def test_num_return_sequences_adds_no_keyword_beside_a_generation_config():
    config = GenerationConfig(do_sample=True, num_return_sequences=3)
    passed_on = _expand(TARGET, {**prompts([6, 4]), "generation_config": config})
    assert "num_return_sequences" not in passed_on  # transformers deprecates the mixture
    assert (passed_on["generation_config"].num_return_sequences, config.num_return_sequences) == (1, 3)
    assert len(passed_on["input_ids"]) == 6


def test_num_return_sequences_with_a_draft():
    inputs = prompts([6, 4])
    torch.manual_seed(7)
    out = TARGET.generate(
        **inputs, num_return_sequences=3, do_sample=True, max_new_tokens=8, assistant_models=[NEAR, "ngram"]
    )
    assert out.shape[0] == 6
    assert torch.equal(out[:3, :6], inputs["input_ids"][:1].expand(3, -1))
    assert torch.equal(out[3:, :6], inputs["input_ids"][1:].expand(3, -1))


def test_one_row_in_a_large_batch_of_equal_prompts():
    inputs = {name: value.expand(16, -1) for name, value in prompts([7]).items()}
    rows = together(TARGET, inputs, [NEAR], max_new_tokens=15)
    assert rows == alone(TARGET, prompts([7]), max_new_tokens=15) * 16
    stats = hf_mlspec.last_stats(TARGET)
    assert stats.new_tokens == sum(map(len, rows))
    assert stats.row_passes == 16 * stats.target_passes


def test_eos_right_after_the_prompt():
    inputs = prompts([5, 8])
    first = alone(TARGET, inputs, max_new_tokens=1, eos_token_id=None)
    for chain in CHAINS:
        out = TARGET.generate(
            **inputs, do_sample=False, max_new_tokens=9, eos_token_id=first[0] + first[1], assistant_models=chain
        )
        assert out[:, 8:].tolist() == first


def test_one_new_token():
    inputs = prompts([5, 8])
    for chain in CHAINS:
        assert together(TARGET, inputs, chain, max_new_tokens=1) == alone(TARGET, inputs, max_new_tokens=1)


def test_without_a_pad_token_the_end_fills():
    inputs = prompts([5, 8, 3])
    target = tiny(seed=4, pad_token_id=None)
    target.generation_config.pad_token_id = None
    stock = target.generate(**inputs, do_sample=False, max_new_tokens=25, eos_token_id=EOS + 4)
    ours = target.generate(
        **inputs, do_sample=False, max_new_tokens=25, eos_token_id=EOS + 4, assistant_models=["early_exit:1"]
    )
    assert torch.equal(ours, stock)


def test_autocast_with_rows_of_different_lengths():
    model = tiny(dtype=torch.float32)
    batch = prompts([5, 11, 8])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model.generate(**batch, max_new_tokens=8, do_sample=False, assistant_models=["mxfp4"])
    assert out.shape[0] == 3
    assert torch.equal(out[:, : batch["input_ids"].shape[1]], batch["input_ids"])
