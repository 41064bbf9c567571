"""Is a name of which nobody knows a model told at once, without the minutes that loading it would try again?"""

from __future__ import annotations

import pytest
from huggingface_hub.errors import HfHubHTTPError
from models import tiny

from hf_mlspec.integration.levels import hub, load
from hf_mlspec.integration.levels.load import load_causal_lm, read_model
from hf_mlspec.integration.levels.resolve import check_words
from hf_mlspec.integration.levels.words import is_hub_name

NOBODY = "nobody/nothing-of-that-name"


@pytest.fixture(autouse=True)
def unasked(monkeypatch):
    monkeypatch.setattr(hub, "_silent", {})
    monkeypatch.setattr(hub, "_answered", set())


def answering(monkeypatch, error: Exception | None) -> list[float]:
    """The hub, which gives this error to every question; how long each of them would wait for it."""
    waits = []

    def ask(url: str, timeout: float) -> None:
        waits.append(timeout)
        if error is not None:
            raise error

    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "get_hf_file_metadata", ask)
    return waits


def test_offline_nobody_is_asked(monkeypatch):
    waits = answering(monkeypatch, AssertionError("asked"))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    words = rf"level '{NOBODY}' cannot be loaded as .*no such folder, and .* not to be asked \(HF_HUB_OFFLINE\)"
    with pytest.raises(ValueError, match=words):
        tiny().generate(max_new_tokens=2, assistant_models=[NOBODY, "ngram"])
    with pytest.raises(ValueError, match=words):
        check_words([NOBODY])
    with pytest.raises(ValueError, match="no such folder"):
        load_causal_lm(NOBODY)
    assert waits == []


def test_a_revision_that_the_cache_has_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    commit, held = "a" * 40, tmp_path / f"models--{NOBODY.replace('/', '--')}"
    for file, text in (("refs/second", commit), (f"snapshots/{commit}/config.json", "{}")):
        (held / file).parent.mkdir(parents=True)
        (held / file).write_text(text)
    assert hub.why_not_on_hub(NOBODY, "second") is None
    assert "not to be asked" in hub.why_not_on_hub(NOBODY, "third")
    assert "not to be asked" in hub.why_not_on_hub(NOBODY)
    monkeypatch.setattr(load, "why_not_on_hub", lambda *asked: f"of {asked}")
    with pytest.raises(ValueError, match=f"of .'{NOBODY}', 'second'"):
        read_model(NOBODY, "auto", revision="second")


def test_a_hub_that_does_not_answer_is_asked_once_and_briefly(monkeypatch):
    waits = answering(monkeypatch, OSError("no network"))
    words = rf"level '{NOBODY}' cannot be loaded as .*no such folder, and the model hub.*does not answer \(OSError\)"
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            tiny().generate(max_new_tokens=2, assistant_models=[f"{NOBODY}@mxfp4"])
    assert len(waits) == 1
    assert waits[0] <= 10


@pytest.mark.parametrize("error", [None, HfHubHTTPError.__new__(HfHubHTTPError)], ids=["there", "refused"])
def test_what_the_hub_says_of_a_name_is_left_to_whoever_loads_it(monkeypatch, error):
    waits = answering(monkeypatch, error)
    assert hub.why_not_on_hub(NOBODY) is None
    assert hub.why_not_on_hub(NOBODY) is None
    assert len(waits) == 1


@pytest.mark.parametrize(("path", "may_be"), [("a/b", True), ("./a/b", False), ("a", False), ("/a", False),
                                              ("~/a", False), ("a/b/c", False)])  # fmt: skip
def test_the_form_of_a_name(path, may_be):
    assert is_hub_name(path) == may_be
