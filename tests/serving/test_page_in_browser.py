"""Does the page at / show an answer, each token in the colour of its level, in a browser?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

for needed in ("fastapi", "uvicorn", "openai", "prometheus_client"):
    pytest.importorskip(needed)
from browser import CHROMIUM, Browser  # noqa: E402
from servers import Running  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]
SPANS = "[...document.querySelectorAll('.answer span')].map((one) => [one.textContent, one.className, one.title])"


def ask(page: Browser, text: str, tokens: int, way: str = "text") -> None:
    """Fill in the form and send it."""
    page.run(f"at('way').value = {way!r}; at('tokens').value = {tokens}; at('text').value = {text!r}; "
             "at('ask').requestSubmit()")
    page.until("at('send').disabled === false && document.querySelector('.answer, .error') !== null")


def test_an_answer_and_the_levels_of_its_tokens(server):
    with Browser(f"http://127.0.0.1:{server.port}/") as page:
        page.until("document.querySelector('#model').textContent === 'demo'")
        ask(page, "def mean(values):", 40)
        body = {"prompt": "def mean(values):", "max_tokens": 40, "temperature": 0, "return_token_ids": True}
        status, found = server.ask("/v1/completions", body)
        spans, counts = page.run(SPANS), page.run("at('counts').textContent")
        assert status == 200
        assert "".join(text for text, _, _ in spans) == found["choices"][0]["text"]
        tokens, passes = int(counts.split()[0]), int(counts.split()[3])
        assert tokens == len(found["choices"][0]["token_ids"]) == 40
        assert 0 < passes <= tokens
        assert {(name, kind) for _, kind, name in spans} <= {  # one colour a level, the target's first
            ("the target", "level0"), *((page.run(f"levels[{n}]"), f"level{n}") for n in range(1, 4))}
        assert page.run("at('legend').children.length") == page.run("levels.length")
        if "PAGE_SCREENSHOT" in os.environ:
            page.screenshot(Path(os.environ["PAGE_SCREENSHOT"]))


def test_an_answer_is_stopped_and_what_is_wrong_is_told(server):
    with Browser(f"http://127.0.0.1:{server.port}/") as page:
        ask(page, "x", 5000)
        assert "it must be between 1 and 200" in page.run("document.querySelector('.error').textContent")
        page.run("at('tokens').value = 200; at('text').value = 'def f():'; at('ask').requestSubmit(); "
                 "at('stop').click()")
        page.until("at('send').disabled === false")
        assert page.run("at('stop').disabled")
        server.until(lambda: server.backend.running == 0)
        assert page.run("document.querySelectorAll('.error').length") == 1  # who stops is told nothing


def test_the_page_asks_for_a_key():
    with Running(levels=[], keys=["secret"]) as running, Browser(f"http://127.0.0.1:{running.port}/") as page:
        ask(page, "def f(x):", 3)
        assert "API key" in page.run("document.querySelector('.error').textContent")
        assert page.run("at('needs-key').hidden") is False
        page.run("at('key').value = 'secret'; at('talk').replaceChildren()")
        ask(page, "def f(x):", 3)
        assert page.run("document.querySelector('.answer').textContent")
