"""What is behind a named level, when is it built, and whose settings count?"""

from __future__ import annotations

import copy
import gc
import logging
import threading
import time
import weakref
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from models import alone, letters, near, prompts, tiny

import hf_mlspec
from hf_mlspec import NGram, PromptLookup, SpeculationConfig
from hf_mlspec.formats import FORMATS, CastWord
from hf_mlspec.integration.config import NUM_DRAFT_TOKENS
from hf_mlspec.integration.levels import resolve as levels_module
from hf_mlspec.integration.levels import words
from hf_mlspec.integration.levels.load import load_level
from hf_mlspec.integration.levels.resolve import _cast_options, resolve
from hf_mlspec.integration.levels.words import Word, as_words, parse_level
from hf_mlspec.nn.state import ModelState, say_once, state_of
from hf_mlspec.precision import Precision

INPUTS = prompts([8])
OPTIONS = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}


@pytest.fixture
def target():
    return tiny(seed=2, dtype=torch.float32)


@pytest.fixture
def built(monkeypatch):
    """Names of what is built, in order."""
    calls = []
    for name in ("direct_cast", "early_exit", "NGram"):
        make = getattr(levels_module, name)

        def counted(*args, _make=make, _name=name, **kwargs):
            calls.append(_name)
            return _make(*args, **kwargs)

        monkeypatch.setattr(levels_module, name, counted)
    monkeypatch.setitem(levels_module._VIEWS, "early_exit", levels_module.early_exit)
    return calls


def write(target, *chain, **options):
    out = target.generate(**INPUTS, **{**OPTIONS, **options}, assistant_models=list(chain))
    return out, hf_mlspec.last_stats(target)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("mxfp4", Word("cast", cast="mxfp4")),
        ("int3", Word("cast", cast="int3")),
        ("ternary", Word("cast", cast="ternary")),
        ("nested", Word("precision", precision=Precision("nested", 16))),
        ("nested4a8", Word("precision", precision=Precision("nested", 4, 8))),
        ("planes4", Word("precision", precision=Precision("planes", 4))),
        ("prompt_lookup", Word("prompt_lookup")),
        ("ngram", Word("ngram")),
        ("early_exit:12", Word("early_exit", number=12)),
        ("someone/a-model", Word("load", path="someone/a-model")),
        ("someone/a-model@mxfp4", Word("load", path="someone/a-model", cast="mxfp4")),
        ("someone/a-model@int2", Word("load", path="someone/a-model", cast="int2")),
    ],
)
def test_words(text, word):
    assert parse_level(text) == word


def test_folders_are_words_too(tmp_path):
    assert parse_level(str(tmp_path)) == Word("load", path=str(tmp_path))
    assert parse_level(f"{tmp_path}@mxfp4") == Word("load", path=str(tmp_path), cast="mxfp4")
    odd = tmp_path / "a@mxfp4"
    odd.mkdir()
    with pytest.raises(ValueError, match="neither an existing folder"):
        parse_level(f"{tmp_path}/nothing@mxfp4")


def test_a_path_object_is_a_folder_whatever_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = ["a-model", "mxfp4", "ngram", "early_exit:x", "org/name", "org/a@mxfp4"]
    for name in named:
        Path(name).mkdir(parents=True)
    levels = as_words([*map(Path, named), tmp_path, "ngram", f"{tmp_path}@mxfp4"])
    assert [parse_level(level).kind for level in levels] == ["load"] * 7 + ["ngram", "load"]
    assert [parse_level(level).cast for level in levels] == [None] * 8 + ["mxfp4"]
    assert [Path(parse_level(level).path) for level in levels[:7]] == [*map(Path, named), tmp_path]
    for missing in (tmp_path / "none", Path("someone/a-model"), Path("planes4")):
        with pytest.raises(ValueError, match=r"level PosixPath.* is not an existing folder; pass a word"):
            as_words([missing])


def test_path_objects_are_levels_everywhere(target, tmp_path, built):
    """In a list with others, in every call that takes levels, and the same level as the string."""
    copy.deepcopy(target).save_pretrained(tmp_path)
    expected, stats = write(target, str(tmp_path), "mxfp4", "ngram")
    out, found = write(target, tmp_path, "mxfp4", "ngram")
    assert out.tolist() == expected.tolist()
    assert [level.name for level in found.levels] == [level.name for level in stats.levels]
    assert found.levels[0].name == tmp_path.name
    assert [key[0] for key in state_of(target).levels].count(str(tmp_path)) == 1
    row = INPUTS["input_ids"]
    (done,) = hf_mlspec.generate_stream(target, [row], assistant_models=[tmp_path, "ngram"], **OPTIONS)
    assert done.sequence == expected[0].tolist()
    compared = hf_mlspec.compare(target, letters(), ["what"], [tmp_path], max_new_tokens=4)
    assert compared.identical == 1
    candidates = hf_mlspec.ChainCandidateGenerator(target, [tmp_path])
    assert candidates.get_candidates(row)[0].shape[1] > 8


def test_words_are_built_once(target, built):
    for _ in range(3):
        write(target, "mxfp4", "early_exit:1", "ngram")
    assert built == ["direct_cast", "early_exit", "NGram"]
    write(tiny(seed=3, dtype=torch.float32), "mxfp4")
    assert built[3:] == ["direct_cast"]
    write(target, "mxfp4")
    assert len(built) == 4


def test_other_settings_build_another(target, built):
    changes = {"cast_rule": "ceil", "cast_head": False, "materialize": True, "cast_activation_bits": 16}
    for options in ({}, *({name: value} for name, value in changes.items()), {}):
        write(target, "mxfp4", speculation_config=options)
    assert built == ["direct_cast"] * 5


def test_activation_bits_reach_every_cast(target, tmp_path):
    target.save_pretrained(tmp_path)
    for word in ("mxfp4", f"{tmp_path}@mxfp4"):
        for given, used in ((None, 8), (8, 8), (16, 16)):
            hf_mlspec.clear(target)
            write(target, word, speculation_config={"cast_activation_bits": given})
            found = next(entry[1] for entry in state_of(target).levels.values())
            cast = found[0] if isinstance(found, tuple) else found
            bits = {module.activation_bits for module in cast.modules() if hasattr(module, "activation_bits")}
            assert bits == {used}


def test_what_a_cast_is_told_is_what_its_format_takes(monkeypatch):
    """Also of one that only its record knows: its words and options decide, not its name."""
    own = replace(FORMATS["mxfp4"], word="toy", written="toy", casts=(CastWord("toy"),), options=())
    monkeypatch.setitem(FORMATS, "toy", own)
    config = SpeculationConfig(cast_rule="ceil", cast_activation_bits=16)
    always = {"cast_head": True, "materialize": False}
    assert _cast_options(parse_level("mxfp4"), config) == {
        "format": "mxfp4", "rule": "ceil", "activation_bits": 16, **always
    }  # fmt: skip
    assert _cast_options(parse_level("toy"), config) == {"format": "toy", "activation_bits": 16, **always}
    for word in ("int3", "ternary"):
        assert _cast_options(parse_level(word), config) == {"format": word, **always}


def test_a_cast_without_a_choice_of_activations_goes_by_its_own():
    target = tiny(seed=2, dtype=torch.float32, hidden_size=64, head_dim=32)
    write(target, "int3", speculation_config={"cast_activation_bits": 8, "cast_rule": "ceil"})
    (cast,) = [entry[1] for entry in state_of(target).levels.values()]
    assert {module.activation_bits for module in cast.modules() if hasattr(module, "activation_bits")} == {16}


def test_clear_frees(target, built):
    write(target, "mxfp4", "early_exit:1")
    kept = [weakref.ref(entry[1]) for entry in state_of(target).levels.values()]
    hf_mlspec.clear(target)
    gc.collect()
    assert [reference() for reference in kept] == [None, None]
    hf_mlspec.clear(target)
    write(target, "mxfp4")
    assert built == ["direct_cast", "early_exit", "direct_cast"]


def test_a_target_that_is_gone_takes_its_levels_along():
    target = tiny(dtype=torch.float32)
    write(target, "mxfp4", "early_exit:1", "ngram")
    gone = weakref.ref(target)
    kept = [weakref.ref(entry[1]) for entry in state_of(target).levels.values()]
    del target
    gc.collect()
    assert gone() is None
    assert [reference() for reference in kept] == [None] * 3


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.load_state_dict(tiny(seed=9, dtype=torch.float32).state_dict()),
        lambda model: torch.nn.init.normal_(model.model.layers[0].mlp.up_proj.weight),
        lambda model: model.to(torch.bfloat16),
    ],
    ids=["loaded", "trained", "another dtype"],
)
def test_changed_weights_are_cast_anew(target, built, change):
    write(target, "mxfp4", "early_exit:1")
    change(target)
    write(target, "mxfp4", "early_exit:1")
    assert built == ["direct_cast", "early_exit"] * 2


def test_a_path_is_loaded_in_the_targets_dtype(tmp_path, target):
    copy.deepcopy(target).to(torch.bfloat16).save_pretrained(tmp_path)
    _, stats = write(target, str(tmp_path))
    assert stats.levels[0].acceptance > 0.5
    (model, tokenizer) = next(entry[1] for entry in state_of(target).levels.values())
    assert model.dtype == torch.float32
    assert not model.training
    assert tokenizer is None
    _, stats = write(target, f"{tmp_path}@mxfp4")
    assert stats.levels[0].drafted > 0


def test_the_tokenizer_beside_a_path_is_found(tmp_path, target):
    other = tiny(seed=2, dtype=torch.float32, vocab_size=264)
    other.save_pretrained(tmp_path)
    letters(extra=200).save_pretrained(tmp_path)
    out, stats = write(target, str(tmp_path), tokenizer=letters())
    assert out[0, 8:].tolist() == alone(target, INPUTS, max_new_tokens=20, eos_token_id=None)[0]
    assert stats.levels[0].drafted > 0


def test_a_folder_without_tokenizer_files_has_none(tmp_path):
    """Some tokenizer classes come back empty from such a folder."""
    target = tiny("gpt2", seed=2)
    copy.deepcopy(target).float().save_pretrained(tmp_path)
    _, stats = write(target, str(tmp_path), tokenizer=letters())
    assert stats.levels[0].acceptance > 0.9


def test_models_of_the_users_own_that_view_the_target(target):
    """A cast or an early exit of the target drafts in the target's cache; what merely shares embeddings does not."""
    for view in (hf_mlspec.direct_cast(target), hf_mlspec.early_exit(target, 1)):
        write(target, view)
        assert hf_mlspec.last_stats(target).levels[0].cache_bytes == 0
    stranger = tiny(seed=7, dtype=torch.float32, num_key_value_heads=4, num_hidden_layers=3)
    stranger.set_input_embeddings(target.get_input_embeddings())
    out, stats = write(target, stranger)
    assert stats.levels[0].cache_bytes > 0
    assert out[0, 8:].tolist() == alone(target, INPUTS, max_new_tokens=20, eos_token_id=None)[0]


def drafted_per_round(stats, index: int = 0) -> float:
    return stats.levels[index].drafted / stats.levels[index].rounds


def test_num_draft_tokens(target):
    same = copy.deepcopy(target)  # everything is accepted: rounds are full
    for count in (1, 3, 8):
        _, stats = write(
            target, same, speculation_config=SpeculationConfig(count, 0.0), max_new_tokens=10 * (count + 1)
        )
        assert stats.levels[0].drafted / stats.target_passes == count
    _, stats = write(target, same, speculation_config=SpeculationConfig(confidence_threshold=0.0), max_new_tokens=90)
    assert stats.levels[0].drafted / stats.target_passes == NUM_DRAFT_TOKENS


def test_num_draft_tokens_per_level(target):
    same, inner = copy.deepcopy(target), copy.deepcopy(target)
    config = SpeculationConfig(num_draft_tokens=[6, 2], confidence_threshold=0.0)
    _, stats = write(target, same, inner, speculation_config=config, max_new_tokens=70)
    assert stats.levels[0].drafted / stats.target_passes == 6
    assert stats.levels[1].drafted / stats.levels[0].forwards == 2


def test_a_threshold_of_none_lets_the_level_decide(target):
    level = near(target)
    level.generation_config.num_assistant_tokens = 3
    level.generation_config.assistant_confidence_threshold = 0.0
    _, stats = write(target, level, max_new_tokens=60)
    assert drafted_per_round(stats) > 2.7  # 3, but at the row's end
    config = SpeculationConfig(num_draft_tokens=5)
    _, stats = write(target, level, max_new_tokens=60, speculation_config=config)
    assert drafted_per_round(stats) > 4.5
    config = SpeculationConfig(num_draft_tokens=[None])
    assert drafted_per_round(write(target, level, max_new_tokens=60, speculation_config=config)[1]) <= 3


def test_a_threshold_shortens_drafts(target):
    level = near(target, 0.1)
    lengths = [
        drafted_per_round(
            write(target, level, speculation_config={"confidence_threshold": threshold}, max_new_tokens=60)[1]
        )
        for threshold in (0.0, 0.5, 0.99)
    ]
    assert lengths[0] > lengths[1] > lengths[2] > 0.9


def test_max_ngram_and_order_reach_their_levels(target, monkeypatch):
    seen = []
    monkeypatch.setattr(levels_module, "PromptLookup", lambda **kwargs: seen.append(kwargs) or PromptLookup(**kwargs))
    monkeypatch.setattr(levels_module, "NGram", lambda **kwargs: seen.append(kwargs) or NGram(**kwargs))
    write(target, "prompt_lookup", speculation_config={"max_ngram": 5})
    write(target, "ngram", speculation_config={"ngram_order": 6})
    assert seen == [{"max_ngram": 5}, {"order": 6}]


@pytest.mark.parametrize("positions", [1, 2, 3, 5, 12])
def test_a_draft_of_few_positions_slides_its_window(target, caplog, positions):
    short = tiny(seed=2, dtype=torch.float32, max_position_embeddings=positions)
    with caplog.at_level(logging.WARNING, "hf_mlspec"):
        out, stats = write(target, short, max_new_tokens=60)
        batch = prompts([3, 20, 9])
        rows = target.generate(**batch, **OPTIONS, assistant_models=[near(target, 0.1), short])
    assert out[0, 8:].tolist() == alone(target, INPUTS, max_new_tokens=60, eos_token_id=None)[0]
    assert rows[:, 20:].tolist() == alone(target, batch, max_new_tokens=20, eos_token_id=None)
    if positions > 1:
        assert stats.levels[0].drafted > 0
        assert [f"only {positions} positions" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("lengths", [[10], [3, 20, 9], [30, 14, 2]])
def test_learned_positions_are_never_left(lengths, caplog):
    target = tiny("gpt2", max_position_embeddings=64)
    short = tiny("gpt2", max_position_embeddings=16)
    inputs = prompts(lengths)
    reference = alone(target, inputs, max_new_tokens=30, eos_token_id=None)
    for chain in ([short], [short, near(short)], [near(target), short], [near(target), short, "ngram"]):
        out = target.generate(
            **inputs, max_new_tokens=30, do_sample=False, eos_token_id=None, assistant_models=chain,
            speculation_config={"confidence_threshold": 0.0},
        )  # fmt: skip
        assert out[:, max(lengths) :].tolist() == reference
    # A level that checks cannot slide: what it holds of a row would no longer be the row.
    assert any("has only 16 positions: no drafts" in record.getMessage() for record in caplog.records)


def test_the_targets_last_position_is_used():
    target = tiny("gpt2", max_position_embeddings=40)
    inputs = prompts([28, 3, 12])
    reference = alone(target, inputs, max_new_tokens=12, eos_token_id=None)
    for chain in ([near(target)], [near(target, 0.3), "early_exit:1"]):
        out = target.generate(
            **inputs, max_new_tokens=12, do_sample=False, eos_token_id=None, assistant_models=chain,
            speculation_config=SpeculationConfig(11, 0.0),
        )  # fmt: skip
        assert out[:, 28:].tolist() == reference


@pytest.mark.parametrize("prepared", [False, True])
def test_clear_frees_all_that_is_kept_and_a_prepared_target_stays_prepared(prepared):
    target = tiny(dtype=torch.bfloat16)
    if prepared:
        hf_mlspec.prepare(target)
    expected, _ = write(target, "mxfp4", "ngram")
    state = state_of(target)
    say_once(target, "is slow")
    assert state.levels
    assert state.last_stats is hf_mlspec.last_stats(target)
    hf_mlspec.clear(target)
    left = {one.name for one in fields(state) if getattr(state, one.name) != getattr(ModelState(), one.name)}
    assert left == ({"prepared", "decoders"} if prepared else set())
    assert hf_mlspec.last_stats(target) is None
    assert torch.equal(write(target, "mxfp4", "ngram")[0], expected)


def test_threads_that_begin_together_load_a_level_once(tmp_path, monkeypatch):
    tiny(seed=3).save_pretrained(tmp_path)
    target, loads, start = tiny(seed=2), [], threading.Barrier(3)

    def slow(target, path, cast):
        loads.append(path)
        time.sleep(0.2)
        return load_level(target, path, cast)

    monkeypatch.setattr(levels_module, "load_level", slow)
    found = []

    def call():
        start.wait()
        found.append(resolve(target, [str(tmp_path)], None, SpeculationConfig())[0].model)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1
    assert len(found) == 3
    assert all(model is found[0] and model.device.type == "cpu" for model in found)


def test_a_file_of_a_level_that_is_cut_short_is_named(tmp_path):
    tiny(seed=3).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors \([\d,]+ bytes\) is damaged or not whole.*download it"):
        resolve(tiny(seed=2), [str(tmp_path)], None, SpeculationConfig())


def test_every_word_for_a_view_is_made_and_every_view_has_its_word():
    assert levels_module._VIEWS.keys() == words._VIEWS.keys()
