"""Does a journal keep every finished item, whenever the process is killed?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hf_mlspec.evaluation import Journal

ROOT = Path(__file__).resolve().parents[2]


def test_items_are_there_again(tmp_path):
    with Journal(tmp_path / "deep" / "a.jsonl", {"levels": ["mxfp4"]}) as journal:
        journal.add("a", {"ids": [1, 2]})
        journal.add("b", None)
    with Journal(tmp_path / "deep" / "a.jsonl", {"levels": ["mxfp4"]}) as again:
        assert again.items == {"a": {"ids": [1, 2]}, "b": None}
        assert "a" in again
        assert "c" not in again
        assert len(again) == 2


def test_an_item_twice_is_refused(tmp_path):
    with Journal(tmp_path / "a.jsonl", {}) as journal:
        journal.add("a", 1)
        with pytest.raises(ValueError, match="'a' is finished already"):
            journal.add("a", 1)
        with pytest.raises(TypeError, match=r"the key of an item is a str, got \('a', 1\)"):
            journal.add(("a", 1), 1)


@pytest.mark.parametrize("cut", range(1, 20))
def test_half_a_line_is_cut_off(tmp_path, cut):
    file = tmp_path / "a.jsonl"
    with Journal(file, {}) as journal:
        journal.add("a", 1)
        whole = file.stat().st_size
        journal.add("b", "some text")
    os.truncate(file, file.stat().st_size - cut)
    with Journal(file, {}) as journal:
        assert journal.items == {"a": 1}
        assert file.stat().st_size == whole
        journal.add("b", "other")
    assert Journal(file, {}).items == {"a": 1, "b": "other"}


def test_a_path_where_no_file_can_be(tmp_path):
    (tmp_path / "file").write_text("x")
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "file" / "a.jsonl", r"(Not a directory|File exists)")):
        with pytest.raises(ValueError, match=rf"{path} cannot be written as a journal \({why}\): name a file"):
            Journal(path, {})
    assert (tmp_path / "file").read_text() == "x"


def test_another_run_is_refused(tmp_path):
    Journal(tmp_path / "a.jsonl", {"levels": ["mxfp4"], "dtype": "bfloat16"}).close()
    with pytest.raises(ValueError, match=r'another run \(levels\[0\]: "mxfp4" -> "ngram"\): name another file, or'):
        Journal(tmp_path / "a.jsonl", {"levels": ["ngram"], "dtype": "bfloat16"})


def test_killed_in_its_first_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"asked": {"leve')
    with Journal(tmp_path / "a.jsonl", {"levels": []}) as journal:
        journal.add("a", 1)
    assert Journal(tmp_path / "a.jsonl", {"levels": []}).items == {"a": 1}


@pytest.mark.parametrize("text", ["not json\n", "not json", '{"x": 1}\n', "[]\n", '{"asked": {}}\n{"key": "a"}\n',
                                  '{"asked": {}}\n{"key": "a", "value": 1}\n{"key": "a", "value": 2}\n',
                                  '{"asked": {}}\n{"key": ["a"], "value": 1}\n',
                                  '{"asked": {}}\n' + "[" * 10**5 + "\n"])
def test_other_files_are_refused_and_kept(tmp_path, text):
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"a\.jsonl"):
        Journal(file, {})
    assert file.read_text() == text


@pytest.mark.skipif(os.name != "posix", reason="flock is of POSIX systems")
def test_two_writers_are_refused(tmp_path):
    with Journal(tmp_path / "a.jsonl", {}), pytest.raises(ValueError, match="another process"):
        Journal(tmp_path / "a.jsonl", {})


# The package is imported without what it imports itself: a process then begins to write at once.
WRITER = f"""
import sys, types
package = types.ModuleType("hf_mlspec")
package.__path__ = [{find_spec("hf_mlspec").submodule_search_locations[0]!r}]
sys.modules["hf_mlspec"] = package
from hf_mlspec.evaluation.journal import Journal
journal = Journal(sys.argv[1], {{}})
for number in range(len(journal), 10**6):
    journal.add(str(number), "x" * 5000)
    print(number, flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is of POSIX systems")
def test_killed_in_the_middle(tmp_path):
    file = tmp_path / "a.jsonl"
    for _ in range(3):
        command = [sys.executable, "-c", WRITER, str(file)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        last = [int(process.stdout.readline()) for _ in range(20)][-1]
        process.send_signal(signal.SIGKILL)
        last = max([last, *map(int, process.stdout.read().split())])
        process.wait()
        with Journal(file, {}) as journal:
            assert list(journal.items) == [str(number) for number in range(len(journal))]
            assert len(journal) in (last + 1, last + 2)  # one may be on disk and not yet told
    assert json.loads(file.read_text().splitlines()[0]) == {"asked": {}}
