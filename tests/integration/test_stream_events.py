"""Does a stream with events hand out every token once, in time, and the same text as the completion?"""

from __future__ import annotations

import queue
import threading
import time

import pytest
import torch
from models import letters, near, tiny
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import hf_mlspec
from hf_mlspec import Completion, NewTokens, Request, generate_stream
from hf_mlspec.integration.stream.events import TextPieces

TARGET = tiny(seed=2, dtype=torch.bfloat16)
NEAR = near(TARGET, 0.05)
TEXT = "Grüße, мир! 🙂🙃 def naïve(x):\n    return '日本語'  # 한국\n\n"


def asked(count: int = 7, **options) -> list[Request]:
    return [Request([3 + n, 9, 20 - n], id=n, max_new_tokens=1 + 5 * n, **options) for n in range(count)]


def heard(requests, levels, **options) -> tuple[dict[int, list[NewTokens]], dict[int, Completion]]:
    """Events of every request, and its completion; no event may come behind that."""
    events, ended = {}, {}
    for item in generate_stream(TARGET, requests, assistant_models=levels, events=True, **options):
        if isinstance(item, Completion):
            ended[item.id] = item
        else:
            assert item.id not in ended
            events.setdefault(item.id, []).append(item)
    return events, ended


@pytest.mark.parametrize("levels", [[], ["mxfp4", NEAR], ["prompt_lookup"]], ids=["alone", "chain", "lookup"])
@pytest.mark.parametrize("tokenizer", [None, letters()], ids=["ids", "text"])
def test_events_are_the_completions_tokens_and_text_in_order(levels, tokenizer):
    options = {"max_batch": 3, "tokenizer": tokenizer}
    events, ended = heard(asked(eos_token_id=[11, 30]), levels, **options)
    without = generate_stream(TARGET, asked(eos_token_id=[11, 30]), assistant_models=levels, **options)
    assert {one.id: one.sequence for one in without} == {id: one.sequence for id, one in ended.items()}
    assert len(ended) == 7
    for id, one in ended.items():
        assert [token for event in events[id] for token in event.tokens] == one.new_tokens
        texts = [event.text for event in events[id]]
        assert texts == [None] * len(texts) if tokenizer is None else "".join(texts) == one.text
    assert max(map(len, events.values())) > 2  # they came as they were decoded


def test_an_event_comes_in_the_round_of_its_tokens_and_can_cancel_the_request():
    seen = []
    for item in generate_stream(TARGET, [Request([5, 6], max_new_tokens=40, eos_token_id=None)], events=True):
        seen.append(item)
        if len(seen) == 2:
            item.request.cancel()
    assert [type(item) for item in seen[:2]] == [NewTokens] * 2
    assert seen[-1].finish_reason == "cancelled"
    assert len(seen[-1].new_tokens) == sum(len(item.tokens) for item in seen[:-1]) < 40


def test_one_that_never_got_a_slot_has_no_events():
    events, ended = heard([Request([], id=0), Request([5], id=1, max_new_tokens=2)], [])
    assert (list(events), ended[0].finish_reason) == ([1], "error")


def test_a_queue_between_threads_is_a_source_that_never_blocks():
    """The pattern of docs/guide/streams.md."""
    waiting: queue.Queue[Request | None] = queue.Queue()

    def source():
        while True:
            try:
                item = waiting.get_nowait()
            except queue.Empty:
                yield None
                continue
            if item is None:
                return
            yield item

    def ask():
        for request in asked(4):
            waiting.put(request)
        waiting.put(None)

    thread = threading.Thread(target=ask)
    thread.start()
    events, ended = heard(source(), ["mxfp4"])
    thread.join()
    assert sorted(ended) == sorted(events) == [0, 1, 2, 3]


def by_spaces() -> PreTrainedTokenizerFast:
    """Words whose first space is not written, as in Llama 2's tokenizer."""
    words = ["▁def", "▁mean", "(", "▁a", "b", "▁", "<s>"]
    tokenizer = Tokenizer(tokenizer_models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="▁"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, bos_token="<s>")


def by_bytes() -> PreTrainedTokenizerFast:
    """Words, and bytes for what they lack, of which one too many changes the characters before it."""
    words = ["the", "▁cat", "▁sat", *(f"<0x{byte:02X}>" for byte in (0x0A, 0xC3, 0xA9))]
    tokenizer = Tokenizer(tokenizer_models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="the"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", ["bytes", "spaces", "words and bytes"])
def test_pieces_of_text_are_the_text(kind, size):
    if kind == "bytes":
        tokenizer = AutoTokenizer.from_pretrained(hf_mlspec.demo_pair()[0])
        tokens = tokenizer(TEXT)["input_ids"]
    elif kind == "spaces":
        tokenizer, tokens = by_spaces(), [0, 1, 6, 2, 3, 6, 6, 1, 4, 5, 1, 4, 6, 3, 2]
    else:
        tokenizer, tokens = by_bytes(), [0, 3, 1, 4, 5, 2, 4, 5, 4, 5, 3, 0]
    pieces = TextPieces(tokenizer)
    said = [pieces.add(tokens[start : start + size]) for start in range(0, len(tokens), size)]
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    assert all("\ufffd" not in piece for piece in said)
    assert "".join(said) + pieces.rest() == whole
    assert pieces.rest() == ""
    assert sum(map(bool, said)) > 2 or size == 7


def test_a_character_that_stays_incomplete_is_said_at_the_end():
    tokenizer = AutoTokenizer.from_pretrained(hf_mlspec.demo_pair()[0])
    tokens = tokenizer("a🙂")["input_ids"][:-1]
    pieces = TextPieces(tokenizer)
    said = "".join(pieces.add([token]) for token in tokens)
    whole = tokenizer.decode(tokens)
    assert said == "a"
    assert said + pieces.rest() == whole
    assert whole.endswith("\ufffd")


def test_a_byte_that_spoils_what_was_said_silences_nothing_behind_it():
    tokenizer, tokens = by_bytes(), [0, 3, 4, 1, 2, 1, 2]
    pieces = TextPieces(tokenizer)
    said = "".join(pieces.add([token]) for token in tokens) + pieces.rest()
    assert said.startswith("the\n")
    assert said.endswith(" cat sat cat sat")


def test_the_time_of_whoever_listens_is_not_the_requests():
    stream = generate_stream(TARGET, [Request([5, 6], max_new_tokens=1)], events=True)
    assert isinstance(next(stream), NewTokens)
    time.sleep(0.5)
    assert next(stream).speculation.seconds < 0.5


@pytest.mark.parametrize("levels", [[], [NEAR], ["mxfp4", NEAR], ["prompt_lookup"]],
                         ids=["alone", "one", "two", "lookup"])
def test_an_event_says_which_level_drafted_each_token(levels):
    events, ended = heard(asked(), levels, max_batch=3)
    names = {getattr(level, "name", None) for one in ended.values() for level in one.speculation.levels}
    drafted = dict.fromkeys(range(7), 0)
    for id, line in events.items():
        for event in line:
            assert len(event.levels) == len(event.tokens)
            assert None not in event.levels[:-1]  # only the last token of a round is the target's own
            drafted[id] += len([level for level in event.levels if level is not None])
    for id, one in ended.items():
        accepted = sum(level.accepted for level in one.speculation.levels)
        assert drafted[id] <= accepted <= drafted[id] + 1  # a stop may take the last ones
    if len(levels) == 1:
        assert {level for line in events.values() for event in line for level in event.levels} <= {None, *names}
    if len(levels) == 2:  # both levels wrote some: the upper one its corrections
        found = {level for line in events.values() for event in line for level in event.levels}
        assert len(found - {None}) == 2


@pytest.mark.parametrize("levels", [[], ["mxfp4", NEAR]], ids=["alone", "chain"])
def test_log_probabilities_are_those_of_the_targets_own_logits(levels):
    requests = [*asked(5, logprobs=4), Request([4, 9, 20], id=5, max_new_tokens=12)]
    requests.append(Request([4, 9, 20], id=6, max_new_tokens=9, logprobs=0, do_sample=True, temperature=0.3, seed=1))
    events, ended = heard(requests, levels, max_batch=3)
    without, _ = heard(asked(5), levels, max_batch=3)
    for id in range(5):
        assert [t for e in events[id] for t in e.tokens] == [t for e in without[id] for t in e.tokens]
    assert all(event.logprobs == [] for event in events[5])
    for id in (0, 1, 2, 3, 4, 6):
        one, told = ended[id], [entry for event in events[id] for entry in event.logprobs]
        assert [entry.token for entry in told] == one.new_tokens
        with torch.no_grad():
            logits = TARGET(torch.tensor([one.sequence])).logits[0, -len(told) - 1 : -1].float()
        expected = torch.log_softmax(logits, -1)
        for entry, line in zip(told, expected, strict=True):
            assert abs(entry.logprob - line[entry.token].item()) < 0.1  # bfloat16, module by module
            assert len(entry.top) == (0 if id == 6 else 4)
            assert [value for _, value in entry.top] == sorted((value for _, value in entry.top), reverse=True)


@pytest.mark.parametrize(("count", "error"),
                         [(-1, ValueError), (10**6, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_number_of_log_probabilities_that_is_none_ends_its_request(count, error):
    (done,) = generate_stream(TARGET, [Request([5, 6], max_new_tokens=2, logprobs=count)])
    assert isinstance(done.error, error)
    assert "logprobs" in str(done.error)
