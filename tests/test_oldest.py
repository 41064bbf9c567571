"""Which test files does .ci/run spare the oldest transformers? Those alone that never meet it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / ".ci" / "apart_from_transformers.py"
if not PROGRAM.exists():
    pytest.skip("no .ci here: the tests came without the checkout", allow_module_level=True)
SCAN = runpy.run_path(str(PROGRAM))


@pytest.fixture
def apart(monkeypatch):
    """Whether a test file with this text in this folder of tests/ would be spared."""
    inside = SCAN["is_apart"].__globals__
    real, listed = inside["tree_of"], inside["imported_by"]

    def ask(text: str, folder: str = ".") -> bool:
        file = ROOT / "tests" / folder / "test_that_is_not_there.py"
        parsed = SCAN["ast"].parse(text)
        monkeypatch.setitem(inside, "tree_of", lambda other: parsed if other == file else real(other))
        monkeypatch.setitem(inside, "imported_by", lambda other: (
            list(SCAN["imports_of"](parsed, other)) if other == file else listed(other)))
        return SCAN["is_apart"](file)

    return ask


@pytest.mark.parametrize("text", [
    "import transformers", "def test(): from transformers import AutoConfig", "import hf_mlspec",
    "from hf_mlspec import generate", "from hf_mlspec.nn.replace import direct_cast", "import lm_eval",
    "from models import tiny", "import subprocess", "import importlib", "import a_package_nobody_knows",
    "from hf_mlspec.evaluation import *", "from hf_mlspec.evaluation import certify", "def test(saved_model): pass",
    "from typing import TYPE_CHECKING\nif not TYPE_CHECKING:\n    import transformers",
    "import pytest\n@pytest.mark.usefixtures('saved_model')\ndef test(): pass"])
def test_whoever_meets_transformers_is_not_spared(apart, text):
    assert not apart(text)


@pytest.mark.parametrize("text", [
    "import torch", "from hf_mlspec.formats import mxfp4", "from hf_mlspec import NGram",
    "from hf_mlspec.speculation.drafters.ngram import NGram", "def test(tmp_path): pass",
    "from hf_mlspec.evaluation import what_changed",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transformers"])
def test_whoever_does_not_is(apart, text):
    assert apart(text)


def test_a_fixture_of_the_folder_counts(apart):
    assert not apart("def test(tiny_model): pass", "nn")
    assert not apart("def test(runners): pass", "integration")
    assert apart("def test(linear): pass", "nn")


def test_whose_processes_were_read_is_there_and_no_other_file_starts_any():
    assert [file for file in SCAN["READ"] if not file.is_file()] == []
    assert SCAN["is_apart"](ROOT / "tests" / "evaluation" / "test_journal.py")
    assert not SCAN["is_apart"](ROOT / "tests" / "test_no_network.py")


def test_some_files_are_spared_and_others_are_not():
    spared = {name for name in ("formats/test_mxfp4.py", "formats/test_bits_stay.py", "integration/test_levels.py",
                                "speculation/test_decode.py", "engines/test_module_engine.py")
              if SCAN["is_apart"](ROOT / "tests" / name)}
    assert spared == {"formats/test_mxfp4.py", "speculation/test_decode.py"}
