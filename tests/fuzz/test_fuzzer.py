"""Does the fuzzer find what it looks for, go on where it ended, and know which lines were reached?"""

from __future__ import annotations

import time

import pytest

pytest.importorskip("fastapi", reason="requests are read by the server; pip install 'hf-mlspec[serve]'")
pytest.importorskip("gguf", reason="tests of files write with it")

from tests.fuzz import harness, seeds
from tests.fuzz.__main__ import run
from tests.fuzz.corpus import FOLDER, read_corpus
from tests.fuzz.harness import Counts, Target, Wrong, feed, fuzz
from tests.fuzz.lines import Lines, lines_of
from tests.fuzz.state import State
from tests.fuzz.targets import TARGETS


def says(path) -> None:
    """A reader with faults of its own."""
    data = path.read_bytes()
    if data == b"ours":
        raise ValueError("this is no input")
    if data == b"foreign":
        int("x")
    if data == b"large":
        bytearray(64 << 20)
    if data == b"wrong":
        raise Wrong("another model")


@pytest.mark.parametrize(("data", "found"), [
    (b"ours", "ValueError"), (b"foreign", "ValueError"), (b"large", "more memory"), (b"good", None),
    (b"wrong", "another model"),
])  # fmt: skip
def test_the_harness_finds(tmp_path, data, found):
    """Errors that are raised outside of the package are findings, whatever their kind."""
    counts = Counts(inputs=63)  # the memory of the next one is looked at
    feed(Target("a reader", (b"good",), says), data, ".bin", tmp_path, counts)
    assert counts.inputs == 64
    assert [found in what for what in counts.findings] == ([] if found is None else [True])


def test_a_seed_repeats_its_inputs(tmp_path):
    found = []
    target = Target("a reader", seeds.batch_lines(), lambda path: found.append(path.read_bytes()))
    fuzz(target, tmp_path, seed=3, seconds=60, most=60)
    fuzz(target, tmp_path, seed=3, seconds=60, most=60)
    assert found[:60] == found[60:]
    assert len(set(found)) > 40


def test_an_input_that_goes_on_and_on_is_ended(monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "ENDS_SECONDS", 0.05)
    counts = fuzz(Target("a reader", (b"x",), lambda path: time.sleep(60)), tmp_path, seed=0, seconds=60, most=2)
    assert counts.inputs == 2
    assert [one.count for one in counts.findings.values()] == [2]


def test_inputs_that_reach_new_lines_join_the_pool(tmp_path):
    pool, lines = list(seeds.batch_lines()), Lines()
    before = len(pool), lines.share()[0]
    target = next(one for one in TARGETS if one.name == "batch line")
    fuzz(target, tmp_path, seed=1, seconds=60, most=2000, counts=Counts(), pool=pool, lines=lines)
    assert len(pool) > before[0]
    assert lines.share()[0] > before[1] == 0
    assert "hf_mlspec/routing/router.py" in lines.told()


def test_lines_are_those_of_functions_that_read():
    file = "hf_mlspec/batch/lines.py"
    text = (harness.ROOT / file).read_text().splitlines()
    found = {text[line - 1].strip() for line in lines_of(file)}
    assert "found = json.loads(text)" in found
    assert not any("_told" in line or line.startswith(("import", "class", "@")) for line in found)


def test_a_long_run_goes_on_where_it_ended(tmp_path):
    targets = [Target("a reader", (b"ours",), says, suffixes=(".bin",)), Target("drawn", (), says, drawn=True)]
    first = State(targets, tmp_path / "kept", Lines(), {"a reader": [b"ours"], "drawn": []})
    run(targets, 60, 30, 0, 5, first)
    again = State(targets, tmp_path / "kept", Lines(), {"a reader": [b"ours"], "drawn": []})
    assert again.counts == first.counts
    assert [counts.inputs for counts in again.counts.values()] == [30, 30]
    assert again.turns == first.turns
    run(targets, 60, 40, 35, 5, again)
    assert [counts.inputs for counts in again.counts.values()] == [40, 40]
    assert all(again.turns[name] > turns for name, turns in first.turns.items())


def test_the_corpus_is_small_and_read():
    held = [read_corpus(target.name) for target in TARGETS]
    assert 0 < sum(len(data) for inputs in held for data in inputs) < 200_000
    known = {target.name.replace(" ", "_") for target in TARGETS}
    assert {file.stem for file in FOLDER.iterdir()} <= known
