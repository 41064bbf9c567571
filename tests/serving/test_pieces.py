"""Is text cut at its stops, and told apart as transformers' own parser tells it, however its tokens come?"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

pytest.importorskip("openai", reason="the packages of the extra serve are not installed")

from transformers import AutoTokenizer
from transformers.cli.serving.utils import (
    ReasoningText,
    ToolCall,
    build_response_parser,
    parse_assistant_message,
)

from hf_mlspec.serving.chat import Chat, Message
from hf_mlspec.serving.completions import Completions
from hf_mlspec.serving.messages import Facts
from hf_mlspec.serving.pieces import Cut, ParsedPieces

QWEN = SimpleNamespace(config=SimpleNamespace(model_type="qwen3"))  # transformers has a response template for it
FACTS = Facts("qwen3", 2**31, 258, False)
PLAIN = Facts("llama", 2048, 258, False)  # and none for it
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}\n</tool_call>'
ANSWERS = {
    "text": "Just a text.", "reasoning": "<think>\nHm, 3 < 4.\n</think>\n\nYes.", "call": CALL,
    "text and two calls": f"Well:\n{CALL}\n{CALL}", "all": f"<think>add?</think>I add.{CALL}",
}  # fmt: skip


def chunks(whole: list, chance: random.Random) -> list[list]:
    found, place = [], 0
    while place < len(whole):
        step = chance.randrange(1, 6)
        found.append(whole[place : place + step])
        place += step
    return found


@pytest.mark.parametrize("stops", [["ab"], ["aab", "b"], ["abab", "ba"], ["zz"], ["a"]])
def test_what_is_shown_is_the_text_before_the_stop_that_came_first(stops):
    chance = random.Random(0)
    for _ in range(200):
        text = "".join(chance.choice("abc") for _ in range(chance.randrange(12)))
        cut, shown = Cut(stops), ""
        ends = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
        expected = text[: min(ends)[1]] if ends else text
        for part in chunks(list(text), chance):
            shown += cut.add("".join(part))
            assert expected.startswith(shown)  # nothing of a stop was ever shown
        assert shown + cut.rest() == expected


@pytest.mark.parametrize("text", ANSWERS.values(), ids=ANSWERS)
def test_reasoning_and_tools_are_those_of_the_whole_answer(saved_model, text):
    tokenizer = AutoTokenizer.from_pretrained(saved_model)
    prompt, ids = (tokenizer(one)["input_ids"] for one in ("<|im_start|>assistant\n", text))
    content, reasoning, calls = parse_assistant_message(tokenizer, QWEN, ids, prompt, cleaned_content=text)
    chance = random.Random(1)
    for _ in range(10):
        pieces = ParsedPieces([], tokenizer._tokenizer, build_response_parser(tokenizer, QWEN, prompt))
        shown = [piece for part in chunks(ids, chance) for piece in pieces.add(part)] + pieces.rest()
        assert [piece for piece in shown if isinstance(piece, ToolCall)] == (calls or [])
        told = "".join(piece for piece in shown if isinstance(piece, ReasoningText))
        assert told.strip() == (reasoning or "").strip()
        plain = [piece for piece in shown if not isinstance(piece, ReasoningText | ToolCall)]
        assert "".join(plain).strip() == content.strip()
        message = Message("x-0")
        deltas = [message.add(piece) for piece in shown]
        assert len(message.whole()["message"].get("tool_calls", [])) == len(calls or [])
        assert message.ended("stop") == ("tool_calls" if calls else "stop")
        places = [call["index"] for delta in deltas for call in delta.get("tool_calls", [])]
        assert places == [*range(len(calls or []))]


def test_a_call_that_was_not_finished_is_none(saved_model):
    tokenizer = AutoTokenizer.from_pretrained(saved_model)
    prompt = tokenizer("<|im_start|>assistant\n")["input_ids"]
    pieces = ParsedPieces([], tokenizer._tokenizer, build_response_parser(tokenizer, QWEN, prompt))
    shown = pieces.add(tokenizer("Well." + CALL[:30])["input_ids"]) + pieces.rest()
    assert not any(isinstance(piece, ToolCall) for piece in shown)
    assert "".join(shown).strip() == "Well."


def test_answers_are_written_with_a_tokenizer_that_reads_no_prompts(saved_model):
    """Prompts are read in another thread meanwhile."""
    reading, writing = (AutoTokenizer.from_pretrained(saved_model) for _ in range(2))
    ids = reading("An answer.")["input_ids"]
    assert Chat(FACTS, reading, writing).pieces({}, ids, []).tokenizer is writing._tokenizer
    assert Chat(PLAIN, reading, writing).pieces({}, ids, []).text.tokenizer is writing
    assert Completions(PLAIN, reading, writing).pieces({}, ids, []).text.tokenizer is writing


def test_a_prompt_without_the_templates_anchor_is_not_part_of_the_answer(saved_model):
    tokenizer = AutoTokenizer.from_pretrained(saved_model)
    pieces = Chat(FACTS, tokenizer, tokenizer).pieces({}, tokenizer("a plain prompt\n")["input_ids"], [])
    shown = pieces.add(tokenizer("An answer.")["input_ids"]) + pieces.rest()
    assert "".join(shown) == "An answer."
