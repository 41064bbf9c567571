"""Does tests/cuda/sanitized.py tell tests that failed, or never ended, from tests that passed?"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

PLACE = Path(__file__).parent / "cuda" / "sanitized.py"


@pytest.fixture(scope="module")
def sanitized():
    spec = importlib.util.spec_from_file_location("sanitized", PLACE)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize(("said", "reports", "passed", "failed"), [
    ("12 passed, 3 skipped in 4.10s\n========= ERROR SUMMARY: 0 errors", 0, 12, False),
    ("12 passed in 4.10s\n========= ERROR SUMMARY: 7 errors", 7, 12, False),
    ("========= RACECHECK SUMMARY: 0 hazards displayed\n12 passed in 4.10s", 0, 12, False),
    ("1 failed, 11 passed in 4.10s\n========= ERROR SUMMARY: 0 errors", 0, 11, True),
    ("11 passed, 1 error in 4.10s\n========= ERROR SUMMARY: 0 errors", 0, 11, True),
    ("1 error in 4.10s\n========= ERROR SUMMARY: 0 errors", 0, 0, True),
    ("no tests ran in 0.01s\n========= ERROR SUMMARY: 0 errors", 0, 0, True),
    ("Fatal Python error: Segmentation fault\n========= ERROR SUMMARY: 0 errors", 0, 0, True),
    ("..\nended: out of time\n", "at least 0, not ended:", 0, False),
    ("========= Error: Race reported\nended: out of time\n", "at least 1, not ended:", 0, False),
])  # fmt: skip
def test_what_a_tool_said(sanitized, tmp_path, monkeypatch, said, reports, passed, failed):
    monkeypatch.setattr(sanitized, "_ended", lambda *_: said)
    tool = sanitized.Sanitizer(tmp_path)
    found = tool.look("rows", tmp_path / "rows.json", "memcheck", 1.0, math.inf)
    assert (found["reports"], found["passed"], found["failed"]) == (reports, passed, failed)


def test_every_family_has_tests(sanitized):
    """A test that got another name would be missing unseen; a family of none would be every test there is."""
    ids = sanitized.collected()
    for family, patterns in sanitized.FAMILIES.items():
        for pattern, most in patterns:
            assert len(sanitized.chosen(ids)[family]) > 0, family
            assert any(sanitized.re.search(pattern, one) for one in ids), f"{family}: {pattern}, {most}"
