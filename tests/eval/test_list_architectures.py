"""Does the page say of every class of transformers how it runs, as its description has it where there is one?"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import transformers

from eval.list_architectures.__main__ import (
    BEGIN,
    COMPILED,
    END,
    HEADER,
    ON_THE_CPU,
    REFUSED,
    asked,
    classes,
    described,
    ran,
)
from eval.list_architectures.small import SETTINGS
from hf_mlspec.engines.architecture import KNOWN, ON_THE_CPU_ALONE
from hf_mlspec.engines.architecture.families.wrappers import WRAPPERS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "architectures.md"
TABLE = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
ROWS = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| ([^|]*) \|$", TABLE, re.MULTILINE)
WRITTEN_WITH = re.search(r"transformers (\S+), (\d+) classes: (.+)\.\n", TABLE)


def test_every_described_class_stands_in_the_table_as_its_description_says():
    found = {name: rest for name, *rest in ROWS}
    assert set(found) >= set(KNOWN)
    for name in KNOWN:
        row = described(name)
        assert found[name] == [row.alone, row.chain, row.why]
        assert row.alone == (ON_THE_CPU if name in ON_THE_CPU_ALONE else COMPILED)


def test_no_class_without_a_description_is_called_compiled():
    assert {name for name, alone, *_ in ROWS if alone in (COMPILED, ON_THE_CPU)} == (
        set(KNOWN) | (set(WRAPPERS) & {name for name, *_ in ROWS})
    )
    assert len(KNOWN) >= 40


def test_the_line_above_counts_the_rows():
    counts = Counter(chain for _, _, chain, _ in ROWS)
    assert int(WRITTEN_WITH[2]) == len(ROWS)
    assert WRITTEN_WITH[3] == ", ".join(f"{count} {word}" for word, count in counts.most_common())
    assert f"| {' | '.join(HEADER)} |" in TABLE


@pytest.mark.skipif(WRITTEN_WITH[1] != transformers.__version__, reason="the table is of another transformers")
def test_it_names_every_class_of_this_transformers():
    assert [name for name, *_ in ROWS] == list(classes())


@pytest.mark.skipif(WRITTEN_WITH[1] != transformers.__version__, reason="the table is of another transformers")
@pytest.mark.parametrize("name", ["PersimmonForCausalLM", "Gemma3nForCausalLM"])
def test_what_it_says_of_a_class_without_a_description_is_found_again(name):
    row = asked(name, classes()[name])
    assert (name, row.alone, row.chain, row.why) in ROWS


FAST = ("BloomForCausalLM", "BartForCausalLM", "BertLMHeadModel", "XLNetLMHeadModel", "BltForCausalLM")


@pytest.mark.skipif(WRITTEN_WITH[1] != transformers.__version__, reason="the table is of another transformers")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS]
)
def test_a_class_that_runs_row_by_row_writes_what_it_writes_alone(name):
    row = ran(name, classes()[name])
    assert (name, row.alone, row.chain, row.why) in ROWS


def test_few_classes_are_refused_and_each_for_a_reason_of_transformers():
    refused = {name: why for name, _, chain, why in ROWS if chain == REFUSED}
    assert set(refused) == {"BltForCausalLM"}
    assert "gets no cache from transformers, whose generate does not run it" in refused["BltForCausalLM"]
