"""Is a line of results there again after any cut, and is no other file taken for results?"""

from __future__ import annotations

import pytest
import torch

from eval.records.writer import Results, ResultsError, read_results


def test_a_line_that_was_cut_is_written_again(tmp_path):
    file = tmp_path / "r.jsonl"
    with Results(file, "run") as results:
        results.add("task", {"system": "a", "value": 1}, asked={"limit": 1})
        results.add("task", {"system": "b", "value": 2}, asked={"limit": 1})
    whole = file.read_bytes()
    for cut in range(1, len(whole.splitlines(keepends=True)[1]), 7):
        file.write_bytes(whole[:-cut])
        assert [row["system"] for row in read_results(file)] == ["a"]
        with Results(file, "run") as results:
            assert results.find("task", {"limit": 1}, system="b") is None
            assert results.find("task", {"limit": 1}, system="a")["value"] == 1
            results.add("task", {"system": "b", "value": 2}, asked={"limit": 1})
        assert [row["system"] for row in read_results(file)] == ["a", "b"]
    with Results(file, "run") as results:
        with pytest.raises(ResultsError, match="limit: 1 -> 2"):
            results.find("task", {"limit": 2}, system="a")
        with pytest.raises(ResultsError, match="another process"):
            Results(file, "run")
    row = read_results(file)[0]
    assert row["name"] == "run"
    assert row["machine"]["torch"] == torch.__version__


@pytest.mark.parametrize("text", ["hello", "hello\n", "[]\n", '{"a": 1}\n', '{"kind": "x"}\nhello\n'])
def test_other_files_are_no_results(tmp_path, text):
    file = tmp_path / "r.jsonl"
    file.write_text(text)
    with pytest.raises(ResultsError, match=r"r\.jsonl"):
        Results(file, "run")
    assert file.read_text() == text
