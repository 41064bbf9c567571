"""Do logits processors see and shape what they would in decoding token by token?"""

from __future__ import annotations

import pytest
import torch
import transformers
from models import alone, near, prompts, tiny
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from hf_mlspec import SpeculationConfig

TARGET = tiny(seed=2)
NEAR = near(TARGET, 0.02)
INPUTS = prompts([8, 5, 11])
FREE = alone(TARGET, INPUTS, max_new_tokens=30, eos_token_id=None)
CHAINS = [
    pytest.param({"assistant_models": []}, id="alone"),
    pytest.param({"assistant_models": [TARGET], "speculation_config": SpeculationConfig(8, 0.0)}, id="blocks"),
    pytest.param({"assistant_models": [NEAR, "early_exit:1"]}, id="model, first layers"),
    pytest.param({"assistant_models": [NEAR, "ngram"]}, id="model, table"),
    pytest.param({"assistant_models": ["prompt_lookup"]}, id="lookup"),
]


class Ladder(LogitsProcessor):
    """Depends on every token before a position: favours the one after their sum."""

    def __call__(self, input_ids, scores):
        favoured = (input_ids.sum(dim=1) + 1) % scores.shape[1]
        return scores.scatter_add(1, favoured[:, None], torch.full_like(scores[:, :1], 3.0))


def allowed_after(batch_id: int, sent: torch.Tensor) -> list[int]:
    """Every row has a set of its own, and the last token matters."""
    start = 3 + 10 * batch_id + int(sent[-1]) % 3
    return list(range(start, start + 12))


OPTIONS = {
    "repetition penalty": {"repetition_penalty": 1.7},
    "no repeated n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[FREE[0][2]], [FREE[0][4], FREE[0][5]], [9, 10, 11]]},
    "suppressed": {"suppress_tokens": [FREE[0][1], FREE[1][3], FREE[2][0]]},
    "suppressed at the begin": {"begin_suppress_tokens": [FREE[0][0], FREE[1][0]]},
    "forced end": {"forced_eos_token_id": 40},
    "least length": {"min_new_tokens": 9, "eos_token_id": [FREE[0][1], FREE[1][2]]},
    "growing will to end": {"exponential_decay_length_penalty": (4, 1.5)},
    "bias": {"sequence_bias": [[[FREE[0][3]], -8.0], [[12, 13], 5.0]]},
    "allowed tokens": {"prefix_allowed_tokens_fn": allowed_after},
    "the user's": {"logits_processor": LogitsProcessorList([Ladder()])},
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "logits_processor": [Ladder()]},
    "normalized": {"renormalize_logits": True, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_ids_are_stocks(name, chain):
    options = {"max_new_tokens": 30, "do_sample": False, **OPTIONS[name]}
    if isinstance(options.get("logits_processor"), list):
        options["logits_processor"] = LogitsProcessorList(options["logits_processor"])
    stock = TARGET.generate(**INPUTS, **options)
    assert torch.equal(TARGET.generate(**INPUTS, **options, **chain), stock)
    new = [row[: len(free)] for row, free in zip(stock[:, 11:].tolist(), FREE, strict=True)]
    assert new != FREE  # the option does something


@pytest.mark.parametrize("chain", CHAINS)
def test_a_constraint_is_asked_about_possible_prefixes_only(chain):
    """A trie has no answer behind a guess it forbids, nor behind the end: then it says so, and stock raises."""
    path = [20, 21, 20, 21, 22, 1]

    def trie(batch_id: int, sent: torch.Tensor) -> list[int]:
        new = sent[11:].tolist()
        return [path[len(new)]] if new == path[: len(new)] and len(new) < len(path) else []

    out = TARGET.generate(
        **INPUTS, do_sample=False, max_new_tokens=12, eos_token_id=1, prefix_allowed_tokens_fn=trie, **chain
    )
    assert out[:, 11:].tolist() == [path] * 3


def test_a_processor_sees_each_prefix_of_its_own_row():
    """Whole prefixes, padding included, as in stock; and each row's only."""
    prefixes: list[tuple[int, ...]] = []

    class Spy(LogitsProcessor):
        def __call__(self, input_ids, scores):
            prefixes.extend(map(tuple, input_ids.tolist()))
            return scores

    out = TARGET.generate(
        **INPUTS,
        do_sample=False,
        max_new_tokens=10,
        eos_token_id=None,
        logits_processor=LogitsProcessorList([Spy()]),
        assistant_models=[NEAR],
    )
    needed = {tuple(row[:n]) for row in out.tolist() for n in range(11, 21)}
    assert needed <= set(prefixes)


@pytest.mark.parametrize("option", [{"guidance_scale": 1.5}])
def test_processors_with_a_state_are_refused(option):
    with pytest.raises(ValueError, match=r"UnbatchedClassifierFreeGuidance\w+ keeps state.*without assistant_models"):
        TARGET.generate(**INPUTS, max_new_tokens=4, assistant_models=[NEAR], **option)


def test_the_middle_level_obeys_the_constraint_too():
    config = SpeculationConfig(num_draft_tokens=[6, 3], confidence_threshold=0.0)
    options = {"do_sample": False, "max_new_tokens": 20, "prefix_allowed_tokens_fn": allowed_after}
    out = TARGET.generate(
        **INPUTS,
        **options,
        return_dict_in_generate=True,
        assistant_models=[TARGET, "early_exit:1"],
        speculation_config=config,
    )
    # Unconstrained, the target itself as a level would be refused wherever the constraint bites.
    assert out.speculation.levels[0].acceptance == 1.0


FOUR = prompts([8, 5, 11, 7])
BY_NUMBER = torch.randn(4, 64, generator=torch.Generator().manual_seed(5)) * 4


class OfRow(LogitsProcessor):
    """A bias `[batch, vocab]`, row by row."""

    def __call__(self, input_ids, scores):
        return scores + BY_NUMBER


class OfTheRowsPrompt(LogitsProcessor):
    """Knows whose prompt stands in which line, and counts on all lines being there."""

    def __init__(self, input_ids):
        self.prompts = input_ids

    def __call__(self, input_ids, scores):
        assert torch.equal(input_ids[:, : self.prompts.shape[1]], self.prompts)
        assert len(scores) == len(self.prompts)
        return scores.scatter_add(1, self.prompts, torch.full_like(scores, 2.0))


class Cooler(TemperatureLogitsWarper):
    """A warper by its class only: it tells rows apart."""

    def __call__(self, input_ids, scores):
        return scores / torch.arange(1, 1 + len(input_ids))[:, None] + BY_NUMBER


OF_ROWS = {
    "the prompts' tokens": {"encoder_repetition_penalty": 1.5},
    "the prompts' n-grams": {"encoder_no_repeat_ngram_size": 2},
    "a bias of rows": {"logits_processor": LogitsProcessorList([OfRow()])},
    "prompts of rows": {"logits_processor": LogitsProcessorList([OfTheRowsPrompt(FOUR["input_ids"])])},
    "a warper's subclass": {"logits_processor": LogitsProcessorList([Cooler(0.5)])},
    "several": {"encoder_repetition_penalty": 1.5, "logits_processor": LogitsProcessorList([OfRow(), Ladder()])},
}
if transformers.__version__ >= "5.18":  # before, one length was for all rows
    lengths = RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=torch.tensor([5, 8, 0, 9]))
    OF_ROWS["an ignored length of each row"] = {"logits_processor": LogitsProcessorList([lengths])}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("ends", [[62], list(range(3, 64, 8))], ids=["together", "one by one"])
def test_processors_that_tell_rows_apart_see_the_whole_batch(name, chain, ends):
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0, **OF_ROWS[name]}
    stock = TARGET.generate(**FOUR, **options)
    assert torch.equal(TARGET.generate(**FOUR, **options, **chain), stock)


def test_processors_that_tell_rows_apart_and_num_return_sequences():
    options = {"max_new_tokens": 12, "do_sample": True, "top_k": 1, "eos_token_id": 62}
    inputs = prompts([8, 5])
    options |= {"encoder_repetition_penalty": 1.5, "logits_processor": LogitsProcessorList([OfRow()])}
    # The rows repeated beforehand: transformers 5.17 penalizes the copies by the tokens of other prompts.
    stock = TARGET.generate(**{name: rows.repeat_interleave(2, dim=0) for name, rows in inputs.items()}, **options)
    assert torch.equal(TARGET.generate(**inputs, **options, num_return_sequences=2, assistant_models=[NEAR]), stock)


def test_what_a_processor_that_tells_rows_apart_is_shown():
    """All rows, equally long; behind the end of a row, or where it has not come so far, the padding."""
    seen: list[list[list[int]]] = []

    class Spy(LogitsProcessor):
        def __call__(self, input_ids, scores):
            assert scores.shape == (3, 64)
            seen.append(input_ids.tolist())
            return scores

    options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": [FREE[0][2], FREE[1][7]], "pad_token_id": 0}
    out = TARGET.generate(
        **INPUTS, **options, logits_processor=LogitsProcessorList([Spy()]), assistant_models=[NEAR]
    ).tolist()
    for lines in seen:
        for line, row in zip(lines, out, strict=True):
            settled = [t for t in line[11:] if t]
            assert line[:11] == row[:11]
            assert not any(line[11 + len(settled) :])
    for width in range(11, len(out[0])):  # every prefix that stock asks about was asked about
        for r in range(3):
            if width == 11 or out[r][width]:
                assert any(lines[r] == out[r][:width] for lines in seen if len(lines[r]) == width)


@pytest.mark.parametrize("chain", CHAINS)
def test_where_every_token_is_forbidden_the_chain_goes_on_as_the_target_alone(chain):
    """The largest of equal scores, all -inf, is the first token; what follows is asked about like everything else."""

    class Nothing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] % 3 == 0:
                return torch.full_like(scores, float("-inf"))
            return scores.scatter(1, input_ids[:, -1:], 50.0)

    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": 62, "pad_token_id": 62}
    options |= {"logits_processor": LogitsProcessorList([Nothing()])}
    stock = TARGET.generate(**INPUTS, **options)
    assert torch.equal(TARGET.generate(**INPUTS, **options, **chain), stock)
    assert (stock[:, 11:] == 0).sum() > 6
