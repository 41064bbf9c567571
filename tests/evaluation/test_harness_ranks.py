"""Do several processes of lm-eval measure what one measures, and does one go on with the journals of several?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed (extra eval)")

from harness_tasks import TASKS, answers, evaluate, write_tasks

from hf_mlspec.evaluation import MLSpecLM
from hf_mlspec.evaluation.harness_ranks import Ranks, in_turn, journals
from hf_mlspec.evaluation.journal import Journal

TESTS = Path(__file__).resolve().parent
RUN = """
import json, sys
from pathlib import Path
from harness_tasks import TASKS, answers, evaluate
from hf_mlspec.evaluation import MLSpecLM
lm = MLSpecLM(sys.argv[1], dtype="float32", levels="mxfp4", batch_size=3, journal=sys.argv[3])
found = evaluate(lm, Path(sys.argv[2]), list(TASKS))
if lm.rank == 0:
    told = {"results": found["results"], "answers": answers(found)}
    Path(sys.argv[4]).write_text(json.dumps(told, default=str))
else:
    assert found is None
"""


def test_lists_are_taken_from_in_turn():
    assert in_turn([[0, 3, 6], [1, 4], [2, 5]]) == list(range(7))
    assert in_turn([{"a": {"m": [0, 2]}}, {"a": {"m": [1]}}]) == {"a": {"m": [0, 1, 2]}}
    assert in_turn([{"a": [0]}, {}]) == {"a": [0]}


def test_a_process_has_a_journal_and_a_gpu_of_its_own(tmp_path, monkeypatch):
    one = Ranks()
    assert (one.rank, one.size, one.gathered({"a": [1]}, 0)) == (0, 1, [{"a": [1]}])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert one.device("cuda") == "cuda"
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    fourth = Ranks()
    assert fourth.journal(tmp_path / "j.jsonl") == tmp_path / "j.jsonl.rank3"
    assert [fourth.device(name) for name in (None, "cuda", "cpu", "cuda:0")] == ["cuda:1", "cuda:1", "cpu", "cuda:0"]


def test_a_journal_borrows_what_another_one_holds(tmp_path):
    with Journal(tmp_path / "j.rank1", {"a": 1}) as other:
        other.add("x", 1)
        other.add("y", 2)
        with open(tmp_path / "j.rank1", "ab") as file:
            file.write(b'{"key": "half')  # as it is being written
        with Journal(tmp_path / "j", {"a": 1}) as journal:
            journal.add("x", 3)
            assert journals(tmp_path / "j") == [tmp_path / "j", tmp_path / "j.rank1"]
            journal.borrow(tmp_path / "j.rank1")
            assert journal.items == {"x": 3, "y": 2}
            assert journal.path == tmp_path / "j"
    with Journal(tmp_path / "k", {"a": 2}) as journal, pytest.raises(ValueError, match=r"j\.rank1 holds the res"):
        journal.borrow(tmp_path / "j.rank1")
    (tmp_path / "empty").touch()
    with Journal(tmp_path / "k", {"a": 2}) as journal:
        journal.borrow(tmp_path / "empty")
        assert len(journal) == 0


@pytest.mark.slow
def test_three_processes_measure_what_one_measures(saved_model, tmp_path):
    folder = write_tasks(tmp_path)
    one = MLSpecLM(str(saved_model), dtype="float32", levels="mxfp4", batch_size=3, journal=str(tmp_path / "one"))
    expected = evaluate(one, folder, list(TASKS))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "--no-python",
               sys.executable, "-c", RUN, str(saved_model), str(folder), str(tmp_path / "j"), str(tmp_path / "told")]
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(command, check=True, timeout=500, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    told = json.loads((tmp_path / "told").read_text())
    assert told["results"] == json.loads(json.dumps(expected["results"], default=str))
    assert told["answers"] == json.loads(json.dumps(answers(expected)))
    assert [place.name for place in journals(tmp_path / "j")] == ["j", "j.rank1", "j.rank2"]
    again = MLSpecLM(str(saved_model), dtype="float32", levels="mxfp4", batch_size=3, journal=str(tmp_path / "j"))
    lines = (tmp_path / "j").read_text()
    assert evaluate(again, folder, list(TASKS))["results"] == expected["results"]
    assert (tmp_path / "j").read_text() == lines  # nothing was asked again
