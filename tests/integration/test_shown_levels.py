"""Is every token of a stream shown once, in the colour of its level, in a notebook and on a terminal?"""

from __future__ import annotations

import html
import io
import re
import sys
from types import SimpleNamespace

import pytest
import rich
import torch
from models import near, tiny
from rich.console import Console
from transformers import AutoTokenizer

import hf_mlspec
from hf_mlspec import NewTokens, Request
from hf_mlspec.integration.stream import shown as module
from hf_mlspec.integration.stream.shown import Shown, show_levels

TARGET = tiny(seed=2, dtype=torch.bfloat16, vocab_size=4096)
NEAR = near(TARGET, 0.05)
TOKENIZER = AutoTokenizer.from_pretrained(hf_mlspec.demo_pair()[0])


def events(**options):
    requests = [Request([5, 6, 7 + n], id=n, max_new_tokens=9) for n in range(3)]
    return hf_mlspec.generate_stream(TARGET, requests, tokenizer=TOKENIZER, assistant_models=[NEAR], max_batch=2,
                                     do_sample=False, eos_token_id=[], **options)


@pytest.fixture
def cell(monkeypatch):
    """What a notebook was given to show, each time."""
    pictures = []
    handle = SimpleNamespace(update=lambda one: pictures.append(one._repr_html_()))
    display = SimpleNamespace(display=lambda one, display_id: pictures.append(one._repr_html_()) or handle)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=1),
                                                                display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return pictures


def test_a_notebook_shows_every_token_and_its_level(cell, monkeypatch):
    monkeypatch.setattr(module, "_EVERY", 0.0)
    told = list(show_levels(events(events=True), TOKENIZER))
    done = {one.id: one for one in told if isinstance(one, hf_mlspec.Completion)}
    assert len(done) == 3
    assert len(cell) == len(told) + 2  # the empty one, one an event, and the last
    texts = re.findall(r"<pre[^>]*>(.*?)</pre>", cell[-1], re.DOTALL)
    plain = [re.sub(r"<[^>]*>", "", text) for text in texts]
    assert sorted(map(html.unescape, plain)) == sorted(one.text for one in done.values())
    names = {level or "the target" for one in told if isinstance(one, NewTokens) for level in one.levels}
    assert len(names) == 2
    assert {html.unescape(name) for name in re.findall(r'title="([^"]*)"', cell[-1])} == names | {"the target"}
    for one in done.values():
        assert f"{one.speculation.new_tokens} tokens in {one.speculation.target_passes} passes" in cell[-1]


def test_text_is_text_and_no_markup():
    shown, request = Shown(TOKENIZER), Request("x")
    ids = TOKENIZER("</pre><b>&")["input_ids"]
    shown.add(NewTokens(request, ids, None, ["<level>"] * len(ids)))
    found = shown._repr_html_()
    assert "<b>" not in found
    assert "&lt;level&gt;" in found
    assert shown.texts() == ["</pre><b>&"]


def test_a_terminal_shows_the_same(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = Shown(TOKENIZER)
    for event in events(events=True):
        shown.add(event)
    console = Console(width=200, color_system="truecolor", force_terminal=True)
    with console.capture() as caught:
        console.print(shown)
    assert "\x1b[48;5;166m" in caught.get()  # of the first level
    plain = re.sub("\x1b[^m]*m", "", caught.get())
    assert all(word in plain for text in shown.texts() for word in text.split())


@pytest.fixture
def screen(monkeypatch):
    """A terminal of six lines."""
    monkeypatch.setenv("TERM", "xterm")
    own = Console(file=io.StringIO(), width=80, height=6, force_terminal=True, force_jupyter=False)
    monkeypatch.setattr(rich, "_console", own)
    monkeypatch.setattr(module, "_EVERY", 0.0)
    return own.file


def plain(screen):
    """What was written there, without colours and moves."""
    return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", screen.getvalue())


def test_a_terminal_shows_each_token_as_it_comes(screen):
    request = Request("x")
    said = [NewTokens(request, TOKENIZER(word)["input_ids"], None, ["level"]) for word in "abc"]
    for number, _ in enumerate(show_levels(said, TOKENIZER), start=1):
        assert [line.strip() for line in plain(screen).splitlines() if line.strip()][-1] == "abc"[:number]


def test_a_text_longer_than_the_screen_shows_its_end_and_then_all(screen):
    ids = TOKENIZER("\n".join(f"line{n}." for n in range(20)))["input_ids"]
    stream = show_levels([NewTokens(Request("x"), ids, None, ["level"] * len(ids))], TOKENIZER)
    next(stream)
    assert "line19." in plain(screen)
    assert "line10." not in plain(screen)
    list(stream)
    assert all(f"line{n}." in plain(screen) for n in range(20))


def test_a_stream_whose_reader_leaves_is_closed(cell):
    stream = show_levels(events(events=True), TOKENIZER)
    next(stream)
    stream.close()
    assert cell


class Asking:
    """A streamer that is told which levels drafted."""

    def __init__(self):
        self.tokens, self.levels = [], []

    def put_levels(self, levels):
        self.levels += levels

    def put(self, value):
        self.tokens.append(value.flatten().tolist())

    def end(self):
        pass


@pytest.mark.parametrize("levels", [[], [NEAR], ["mxfp4", NEAR]])
def test_a_streamer_of_generate_may_ask_for_levels(levels):
    asking, request = Asking(), Request([5, 6, 7], max_new_tokens=24)
    options = {"assistant_models": levels, "speculation_config": {"num_draft_tokens": 3}, "do_sample": False}
    out = TARGET.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=24, eos_token_id=[], streamer=asking, **options)
    events = list(hf_mlspec.generate_stream(TARGET, [request], events=True, eos_token_id=[], **options))
    assert [token for tokens in asking.tokens for token in tokens] == out[0].tolist()
    assert asking.levels == [level for one in events[:-1] for level in one.levels]
    assert len(asking.levels) == 24
    assert len(set(asking.levels)) == len(levels) + 1
    counts = hf_mlspec.last_stats(TARGET).levels
    if levels:  # of what a level drafted, the target took what it is said to have drafted, or its guesses below
        assert sum(name is not None for name in asking.levels) == counts[0].accepted
    TARGET.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=9, **options)  # nobody asks now
    assert len(asking.levels) == 24


def test_what_is_no_stream():
    with pytest.raises(TypeError, match=r"str is nothing that generate_stream yields.*events=True"):
        list(show_levels(["text"], TOKENIZER))
