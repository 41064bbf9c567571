"""Are random streams exact, and does the program that says so notice a wrong token?"""

from __future__ import annotations

import pytest
from programs import program

from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="module by module ties may fall either way")


@pytest.fixture
def exact(from_the_root):
    return program("stream_exact")


def test_thirty_random_streams(exact):
    counts = exact.run(30, seed=1)
    assert (counts["streams"], counts["mismatches"]) == (30, 0)
    assert counts["prefix tokens"] > 0
    assert counts["cancelled"] > 0
    assert counts["length"] + counts["stop"] > 100


@pytest.mark.slow
def test_a_thousand_random_streams(exact):
    counts = exact.run(1000, seed=2)
    assert (counts["streams"], counts["mismatches"]) == (1000, 0)


def test_a_wrong_token_is_a_mismatch(exact, monkeypatch, capsys):
    right = exact.alone
    monkeypatch.setattr(exact, "alone", lambda *given: [*right(*given)[:-1], -1])
    assert exact.main(["--streams", "1"]) == 1
    assert "instead of" in capsys.readouterr().out


def test_a_target_needs_its_draft(exact, capsys):
    with pytest.raises(SystemExit):
        exact.parse(["--model", "folder"])
    assert "--draft" in capsys.readouterr().err
