"""What does one call of generate leave in an n-gram table that later calls and other threads use too?"""

from __future__ import annotations

import threading

import pytest
import torch
from models import letters, prompts, tiny, together

import hf_mlspec
from hf_mlspec import NGram, SpeculationConfig
from hf_mlspec.nn.state import state_of

INPUTS = prompts([8])


@pytest.mark.parametrize("level", ["ngram", NGram(threshold=0.4)])
def test_a_calls_threshold_is_gone_with_the_call(level):
    target = tiny(seed=2)
    config = SpeculationConfig(confidence_threshold=0.99)
    together(target, INPUTS, [level], max_new_tokens=20, speculation_config=config)
    table = level if isinstance(level, NGram) else next(entry[1] for entry in state_of(target).levels.values())
    assert table.threshold == 0.4


def test_a_table_counts_one_vocabulary():
    target, other = tiny(seed=2, vocab_size=128), tiny(seed=3)
    options = {"tokenizer": letters(extra=64), "eos_token_id": None, "do_sample": True, "max_new_tokens": 40}
    torch.manual_seed(0)
    target.generate(**INPUTS, **options, assistant_models=["ngram"])
    tables = state_of(target).levels
    assert next(iter(tables.values()))[1].largest_token >= 64
    config = SpeculationConfig(confidence_threshold=0.0, common_vocabulary=False)
    chain = {"assistant_models": [other, "ngram"], "assistant_tokenizers": [letters(), None]}
    target.generate(**INPUTS, **options, **chain, speculation_config=config)
    assert len(tables) == 2
    assert hf_mlspec.last_stats(target).levels[1].drafted > 0
    far = NGram()
    far.learn([5, 100, 5, 100])
    with pytest.raises(ValueError, match="holds token 100, the model above it has 64"):
        target.generate(**INPUTS, **options, **{**chain, "assistant_models": [other, far]})


def test_threads_share_a_table():
    model = tiny(seed=2, dtype=torch.float32)
    inputs = [prompts([6] * rows, seed=rows) for rows in (1, 3)]
    failed = []

    def work(number: int) -> None:
        try:
            for _ in range(10):
                together(model, inputs[number], ["early_exit:1", "ngram"], max_new_tokens=12)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failed == []
