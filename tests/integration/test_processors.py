"""Do logits processors see and shape what they would in decoding token by token?"""

from __future__ import annotations

import pytest
import torch
from models import alone, near, prompts, tiny
from transformers import LogitsProcessor, LogitsProcessorList

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
