"""When do two levels speak the same vocabulary, and does a chain stay lossless where they do not?"""

from __future__ import annotations

import re

import pytest
import torch
from models import alone, letters, near, prompts, tiny, together

import hf_mlspec
from hf_mlspec.integration import config
from hf_mlspec.integration.levels.vocabulary import padding_apart, require_target_tokenizer, same_vocabulary

TARGET = tiny(seed=2)
TOKENIZER, OTHER = letters(), letters(extra=200)
INPUTS = prompts([8, 3, 12])


@pytest.mark.parametrize(
    ("size", "other", "expected"),
    [(151936, 152064, True), (32000, 32000, True), (32000, 32128, True), (50257, 50304, True), (32000, 50257, False),
     (64, 65, True), (64, 66, False), (100_000, 101_024, True), (100_000, 101_025, False)],
)  # fmt: skip
def test_padding_apart(size, other, expected):
    assert padding_apart(size, other) is expected
    assert padding_apart(other, size) is expected


def test_tokenizers_decide_where_both_are_known():
    assert same_vocabulary("level", 64, TOKENIZER, 64, TOKENIZER)
    assert same_vocabulary("level", 64, letters(), 900, TOKENIZER)
    assert not same_vocabulary("level", 64, OTHER, 64, TOKENIZER)


def test_two_tokenizers_are_compared_once(monkeypatch):
    tokenizer, other, reads = letters(), letters(), []
    for one in (tokenizer, other):
        monkeypatch.setattr(one, "get_vocab", lambda: reads.append(1) or {"a": 0})
    assert [same_vocabulary("level", 64, tokenizer, 64, other) for _ in range(3)] == [True] * 3
    assert len(reads) == 2


def with_added(count: int = 1):
    """The target's tokenizer with tokens added that it has no rows for, as transformers adds them to some families."""
    tokenizer = letters()
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|added {number}|>" for number in range(count)]})
    assert len(tokenizer) == 64 + count
    return tokenizer


def test_added_tokens_without_rows_make_no_other_vocabulary():
    assert same_vocabulary("level", 64, with_added(), 64, TOKENIZER)
    assert same_vocabulary("level", 64, TOKENIZER, 64, with_added(3))
    assert not same_vocabulary("level", 65, with_added(), 64, TOKENIZER)
    assert not same_vocabulary("level", 64, with_added(), 64, OTHER)


def test_a_target_whose_tokenizer_has_added_tokens_without_rows_decodes():
    draft, how = near(TARGET, 0.05), {"tokenizer": with_added(), "assistant_tokenizers": [letters()]}
    expected = alone(TARGET, INPUTS, max_new_tokens=12)
    assert together(TARGET, INPUTS, [draft], max_new_tokens=12, **how) == expected
    require_target_tokenizer(with_added(), 64)
    with pytest.raises(ValueError, match=r"65 tokens and the target's embedding 63 rows"):
        require_target_tokenizer(with_added(), 63)


def test_a_prompt_with_an_added_token_without_a_row_is_refused():
    tokenizer = with_added()
    ids = torch.tensor([[*tokenizer.convert_tokens_to_ids(["<|added 0|>"]), 5, 6]])
    levels, words = ["early_exit:1"], r"prompt 0 holds token 64, and LlamaForCausalLM embeds 0 to 63"
    with pytest.raises(ValueError, match=words):
        TARGET.generate(ids, max_new_tokens=3, assistant_models=levels, tokenizer=tokenizer)
    stream = hf_mlspec.generate_stream(TARGET, ["<|added 0|>"], assistant_models=levels, tokenizer=tokenizer)
    (completion,) = stream
    assert re.search(words, str(completion.error))


def test_sizes_decide_where_one_is_unknown():
    assert same_vocabulary("level", 64, None, 64, TOKENIZER)
    assert same_vocabulary("level", 64, OTHER, 64, None)
    with pytest.raises(ValueError, match=r"level small .*264.*64.*the tokenizer of small in assistant_tokenizers"):
        same_vocabulary("small", 264, None, 64, TOKENIZER)
    with pytest.raises(ValueError, match=r"needs tokenizer=<the target's tokenizer>"):
        same_vocabulary("small", 264, OTHER, 64, None)


CALLS = {
    "generate": lambda **how: TARGET.generate(**INPUTS, max_new_tokens=3, assistant_models=["early_exit:1"], **how),
    "stream": lambda **how: hf_mlspec.generate_stream(TARGET, ["what"], assistant_models=["early_exit:1"], **how),
    "stream alone": lambda **how: hf_mlspec.generate_stream(TARGET, ["what"], **how),
    "compare": lambda **how: hf_mlspec.compare(TARGET, how["tokenizer"], ["what"], ["early_exit:1"], max_new_tokens=3),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_tokenizer_of_more_tokens_than_the_target_embeds_is_refused(call):
    with pytest.raises(ValueError, match=r"tokenizer has 264 tokens and the target's embedding 64 rows.* own tok"):
        CALLS[call](tokenizer=OTHER)


def test_a_target_alone_reads_a_tokenizer_for_stop_strings_only():
    how = {"max_new_tokens": 3, "do_sample": False, "tokenizer": OTHER, "stop_strings": ["zz"]}
    assert torch.equal(TARGET.generate(**INPUTS, **how, assistant_models=[]), TARGET.generate(**INPUTS, **how))


@pytest.mark.parametrize("rows", [64, 65, 128])
def test_fewer_tokens_than_rows_are_the_rule(rows, recwarn):
    require_target_tokenizer(TOKENIZER, rows)
    require_target_tokenizer(None, 8)
    require_target_tokenizer(object(), 8)
    assert not [warning for warning in recwarn if "tokenizer" in str(warning.message)]


def test_far_fewer_tokens_than_rows_are_said():
    large = tiny(seed=2, vocab_size=129)
    with pytest.warns(UserWarning, match=r"has 64 tokens and the target's embedding 129 rows, more than twice"):
        out = together(large, INPUTS, ["early_exit:1"], max_new_tokens=5, tokenizer=TOKENIZER)
    assert out == alone(large, INPUTS, max_new_tokens=5)


def padded(rows: int):
    """The target with more or fewer rows of padding in its vocabulary."""
    level = near(TARGET, 0.0)
    level.resize_token_embeddings(rows, mean_resizing=False)
    return level


@pytest.mark.parametrize("rows", [63, 64, 65])
@pytest.mark.parametrize("do_sample", [True, False])
def test_padding_rows_just_work(rows, do_sample):
    level = padded(rows)
    for chain in ([level], [level, "early_exit:1"], ["early_exit:1", level], [level, "prompt_lookup"]):
        torch.manual_seed(1)
        out = TARGET.generate(**INPUTS, max_new_tokens=20, do_sample=do_sample, assistant_models=chain)
        assert out.max() < 64
        if not do_sample:
            assert together(TARGET, INPUTS, chain, max_new_tokens=20) == alone(TARGET, INPUTS, max_new_tokens=20)
    TARGET.generate(**INPUTS, max_new_tokens=20, do_sample=False, assistant_models=[level])
    # 63 rows lack a token that the target writes.
    assert hf_mlspec.last_stats(TARGET).levels[0].acceptance > (0.9 if rows > 63 else 0.5)


def test_prompt_tokens_a_level_does_not_know():
    """Ids of the target's padding rows reach a level with fewer rows as its last one: no error, no effect."""
    target = padded(66)
    level = tiny(seed=2, vocab_size=65)
    inputs = {"input_ids": torch.tensor([[5, 65, 6, 65, 7]]), "attention_mask": torch.ones(1, 5, dtype=torch.long)}
    assert together(target, inputs, [level], max_new_tokens=15) == alone(target, inputs, max_new_tokens=15)


@pytest.mark.parametrize("common", [None, True, False])
@pytest.mark.parametrize("chain", ["one", "above a model", "above first layers", "below a model"])
def test_another_tokenizer_is_lossless(chain, common):
    stranger = tiny(seed=2, vocab_size=264)
    chains = {
        "one": ([stranger], [OTHER]),
        "above a model": ([stranger, near(stranger)], [OTHER, OTHER]),
        "above first layers": ([stranger, near(TARGET)], [OTHER, TOKENIZER]),
        "below a model": ([near(TARGET), stranger], [None, OTHER]),
    }
    levels, tokenizers = chains[chain]
    options = {"tokenizer": TOKENIZER, "assistant_tokenizers": tokenizers}
    if common and len(levels) > 1 and chain != "below a model":
        options |= {"max_new_tokens": 15, "speculation_config": {"common_vocabulary": True}}
        with pytest.raises((TypeError, ValueError), match="common vocabulary"):
            together(TARGET, INPUTS, levels, **options)
        return
    written = together(
        TARGET, INPUTS, levels, max_new_tokens=15, **options, speculation_config={"common_vocabulary": common}
    )
    assert written == alone(TARGET, INPUTS, max_new_tokens=15)
    assert hf_mlspec.last_stats(TARGET).levels[0].drafted > 0


def test_the_threshold_is_stricter_across_tokenizers():
    level = tiny(seed=2, vocab_size=264, initializer_range=0.05)  # unsure of everything
    together(TARGET, prompts([8]), [level], max_new_tokens=15, tokenizer=TOKENIZER, assistant_tokenizers=[OTHER])
    assert config.CONFIDENCE_THRESHOLD_ACROSS_TOKENIZERS == 0.65 > config.CONFIDENCE_THRESHOLD == 0.4
    stats = hf_mlspec.last_stats(TARGET).levels[0]
    assert stats.forwards == stats.rounds  # one token a round: the first was below the threshold
