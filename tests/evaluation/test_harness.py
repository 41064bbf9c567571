"""Does lm-eval get the answers of the model, in its order, whatever the levels and the batch size?"""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("lm_eval", reason="lm_eval is not installed (extra eval)")

from harness_tasks import TASKS, answers, evaluate, write_tasks
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from hf_mlspec.evaluation import MLSpecLM, request_key
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

GREEDY = ["t_generate", "t_choice", "t_text"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def alone(saved_model, tasks):
    lm = MLSpecLM(str(saved_model), dtype="float32", batch_size=3)
    return lm, evaluate(lm, tasks, list(TASKS))


def ask(lm: MLSpecLM, kind: str, arguments: list[tuple]) -> list:
    requests = [Instance(kind, {}, args, n, ("t", n, 1)) for n, args in enumerate(arguments)]
    return getattr(lm, kind)(requests, disable_tqdm=True)


def test_answers_are_those_of_lm_evals_own_model(saved_model, tasks, alone):
    theirs = evaluate(HFLM(str(saved_model), dtype="float32", device="cpu", batch_size=2), tasks, GREEDY)
    mine, ours = answers(alone[1]), answers(theirs)
    assert mine["t_generate"] == ours["t_generate"]
    assert any(len(one[0][0]) < 20 for one in mine["t_generate"])  # a stop was met
    for name in ("t_choice", "t_text"):
        for one, other in zip(mine[name], ours[name], strict=True):
            flat, expected = torch.tensor(one).double().flatten(), torch.tensor(other).double().flatten()
            torch.testing.assert_close(flat, expected, rtol=1e-4, atol=1e-3)
    for name in GREEDY:
        for metric, value in theirs["results"][name].items():
            if isinstance(value, float):
                assert alone[1]["results"][name][metric] == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("levels", ["mxfp4+ngram", ["early_exit:1", "prompt_lookup"]])
def test_levels_change_no_answer(saved_model, tasks, alone, levels):
    lm = MLSpecLM(str(saved_model), dtype="float32", levels=levels, num_draft_tokens="5+2", batch_size=4)
    results = evaluate(lm, tasks, list(TASKS))
    names = list(TASKS) if has_compiled_decoder() else GREEDY
    for name in names:
        assert answers(results)[name] == answers(alone[1])[name]
    assert lm.generations == alone[0].generations
    assert lm.speculation.levels[0].accepted > 0
    assert lm.speculation.new_tokens == sum(len(one["ids"]) for one in lm.generations.values())


def test_results_say_what_answered(alone):
    config = alone[1]["config"]
    assert config["levels"] == []
    assert config["model_dtype"] == "torch.float32"
    assert config["versions"]["torch"] == torch.__version__
    assert config["speculation"]["new_tokens"] == alone[0].speculation.new_tokens > 0


def test_a_generation_is_known_by_its_request(alone, saved_model):
    lm, results = alone
    sample = results["samples"]["t_generate"][0]
    arguments = tuple(sample["arguments"][0])
    found = lm.generations[request_key("generate_until", arguments)]
    tokenizer = AutoTokenizer.from_pretrained(saved_model)
    assert found["prompt_tokens"] == len(tokenizer.encode(arguments[0]))
    assert tokenizer.decode(found["ids"], skip_special_tokens=True).startswith(found["text"])


def test_every_request_has_settings_of_its_own(alone):
    lm = alone[0]
    free = ask(lm, "generate_until", [("abc", {"max_gen_toks": 12})])[0]
    assert len(free) == 12
    stops = [free[k : k + 2] for k in (2, 5, 8)]
    asked = [("abc", {"until": stop, "max_gen_toks": 12}) for stop in stops] + [("abc", {"max_gen_toks": 7})]
    asked.append(("abc", {"until": ["", "never"], "max_new_tokens": 3, "temperature": 0.0, "do_sample": True}))
    expected = [free[: free.index(stop)] for stop in stops] + [free[:7], free[:3]]
    assert ask(lm, "generate_until", asked) == expected
    ids = lm.generations[request_key("generate_until", asked[0])]["ids"]
    assert len(ids) == free.index(stops[0]) + len(stops[0])  # decoding went on no further


def test_a_stop_is_looked_for_in_the_new_text_only(alone):
    lm = alone[0]
    free = ask(lm, "generate_until", [("abc", {"max_gen_toks": 8})])[0]
    across = "c" + free[0]
    assert across not in free
    assert ask(lm, "generate_until", [("abc", {"max_gen_toks": 8, "until": [across]})]) == [free]


def test_sampled_answers_are_functions_of_the_request(alone, saved_model):
    asked = [("abc", {"do_sample": True, "temperature": 1.5, "max_gen_toks": 12})] * 3 + [
        ("abc", {"do_sample": True, "temperature": 1.5, "max_gen_toks": 12, "seed": 3})]
    first = ask(alone[0], "generate_until", asked)
    assert len(set(first)) == 4
    assert ask(alone[0], "generate_until", asked[::-1])[0] == first[3]
    assert ask(alone[0], "generate_until", asked[:2]) == first[:2]
    other = MLSpecLM(str(saved_model), dtype="float32", seed=5)
    again = ask(other, "generate_until", asked)
    assert again[3] == first[3]
    assert again[:3] != first[:3]


def test_what_does_not_fit_is_cut_on_the_left_and_said_once(saved_model, alone, caplog):
    lm = MLSpecLM(str(saved_model), dtype="float32", max_length=40)
    text, gen_kwargs = "abcdefghij" * 5, {"max_gen_toks": 10}
    with caplog.at_level(logging.WARNING, logger="hf_mlspec"):
        cut, short = ask(lm, "generate_until", [(text, gen_kwargs), ("ab", gen_kwargs)])
    said = [record.getMessage() for record in caplog.records if record.name.startswith("hf_mlspec.evaluation")]
    assert said == ["1 of 2 prompts do not fit max_length=40 with their new tokens: 20 tokens were cut off on the "
                    "left, at most 20 of one"]
    assert [cut, short] == ask(alone[0], "generate_until", [(text[20:], gen_kwargs), ("ab", gen_kwargs)])
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="hf_mlspec"):
        found = ask(lm, "loglikelihood", [(text, "xy"), ("ab", "xy")])
    assert [one.getMessage()[:41] for one in caplog.records] == ["1 of 2 contexts do not fit max_length=40 "]
    assert found == ask(alone[0], "loglikelihood", [((text + "xy")[-41:-2], "xy"), ("ab", "xy")])
    with pytest.raises(ValueError, match="up to 40 new tokens leave no room for a prompt within max_length=40"):
        ask(lm, "generate_until", [("ab", {"max_gen_toks": 40})])
    with pytest.raises(ValueError, match="a continuation has 41 tokens, more than max_length=40"):
        ask(lm, "loglikelihood", [("ab", "x" * 41)])


def test_a_long_text_is_scored_in_windows(saved_model):
    lm = MLSpecLM(str(saved_model), dtype="float32", max_length=16)
    theirs = HFLM(str(saved_model), dtype="float32", device="cpu", batch_size=1, max_length=16)
    texts = [("hello world " * 9,), ("x",), ("",)]
    expected = ask(theirs, "loglikelihood_rolling", texts)
    assert ask(lm, "loglikelihood_rolling", texts) == pytest.approx(expected, rel=1e-5, abs=1e-4)


def test_an_empty_context_is_the_end_token(alone, saved_model):
    theirs = HFLM(str(saved_model), dtype="float32", device="cpu")
    expected = ask(theirs, "loglikelihood", [("", "ab")])[0]
    assert ask(alone[0], "loglikelihood", [("", "ab")])[0] == (pytest.approx(expected[0], rel=1e-5), expected[1])
    assert len(ask(alone[0], "generate_until", [("", {"max_gen_toks": 4})])[0]) > 0
    with pytest.raises(ValueError, match="continuation is empty"):
        ask(alone[0], "loglikelihood", [("a", "")])


def test_a_continuation_that_merges_into_its_context_is_named(saved_model):
    """A tokenizer that writes context and continuation with no more tokens than the context alone."""
    lm = MLSpecLM(str(saved_model), dtype="float32")
    lm.tok_encode = lambda text, **_: [5, 6] if text.startswith("ab") else [7, 8]
    with pytest.raises(ValueError, match=r"^task t, document 1: the continuation 'cd' has no token of its own behind "
                                         r"the context, which ends with 'ab': .* begin the continuation with a space"):
        ask(lm, "loglikelihood", [("", "z"), ("ab", "cd")])


def test_lm_evals_cache_answers(saved_model, tasks, alone, tmp_path):
    pytest.importorskip("sqlitedict", reason="sqlitedict is not installed")
    cache = str(tmp_path / "cache")
    first = evaluate(MLSpecLM(str(saved_model), dtype="float32"), tasks, GREEDY, use_cache=cache)
    lm = MLSpecLM(str(saved_model), dtype="float32")
    lm.generate_until = lm.loglikelihood = lm.loglikelihood_rolling = None  # nothing is left to ask it
    assert answers(evaluate(lm, tasks, GREEDY, use_cache=cache)) == answers(first) == {
        name: answers(alone[1])[name] for name in GREEDY}


def test_four_bits_and_their_precisions(saved_model, tasks):
    settings = {"dtype": "bfloat16", "format": "int4", "group_size": 32}
    found = {}
    for name, more in {"w4a16": {}, "same": {"precision": "w4a16"}, "w4a4": {"precision": "w4a4"},
                       "qspec": {"levels": "w4a4"}}.items():
        lm = MLSpecLM(str(saved_model), **settings, **more)
        found[name] = answers(evaluate(lm, tasks, ["t_generate", "t_choice"], limit=4))
        assert lm.get_model_info()["format"] == "int4"
    if has_compiled_decoder():
        assert found["qspec"] == found["w4a16"]
    assert found["same"] == found["w4a16"]
    assert found["w4a4"]["t_choice"] != found["w4a16"]["t_choice"]


def test_a_live_model_and_its_chat_template(saved_model, alone):
    model = AutoModelForCausalLM.from_pretrained(saved_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(saved_model)
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.chat_template = turns + "{% if thinking %}!{% endif %}"
    lm = MLSpecLM(model, tokenizer, levels=["mxfp4"], chat_template_args={"thinking": True})
    assert lm.apply_chat_template([{"role": "user", "content": "hi"}]) == "<user>hi!"
    assert lm.chat_template(True) == tokenizer.chat_template
    assert lm.tokenizer_name == str(saved_model).replace("/", "__")
    asked = [("abc", {"max_gen_toks": 9})]
    assert ask(lm, "generate_until", asked) == ask(alone[0], "generate_until", asked)
    assert ask(MLSpecLM(model, levels=[]), "generate_until", asked) == ask(alone[0], "generate_until", asked)
