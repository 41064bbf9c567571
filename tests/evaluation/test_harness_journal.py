"""Is nothing asked twice, whenever a run was killed, and are answers of another system never taken for its own?"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("lm_eval", reason="lm_eval is not installed (extra eval)")

from harness_tasks import TASKS, answers, evaluate, write_tasks

from hf_mlspec.evaluation import MLSpecLM, harness_generation
from hf_mlspec.evaluation import harness as harness_module
from hf_mlspec.evaluation.harness_requests import generation_keys

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys, time
from harness_tasks import TASKS, evaluate
from pathlib import Path
from hf_mlspec.evaluation import Journal, MLSpecLM
add = Journal.add
def slowly(self, key, value):  # so that there is a moment at which to be killed
    add(self, key, value)
    time.sleep(0.02)
Journal.add = slowly
lm = MLSpecLM(sys.argv[1], dtype="float32", levels="mxfp4", batch_size=3, journal=sys.argv[3])
evaluate(lm, Path(sys.argv[2]), list(TASKS))
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture
def asked(monkeypatch):
    """What models are asked: by kind, the number of requests."""
    counts = {"generated": 0, "scored": 0}
    true_stream, true_rows = harness_generation.generate_stream, harness_module.score_rows

    def stream(model, requests, **options):
        counts["generated"] += len(requests)
        return true_stream(model, requests, **options)

    def rows(model, some, **options):
        counts["scored"] += len(some)
        return true_rows(model, some, **options)

    monkeypatch.setattr(harness_generation, "generate_stream", stream)
    monkeypatch.setattr(harness_module, "score_rows", rows)
    return counts


def system(saved_model, journal, **more) -> MLSpecLM:
    return MLSpecLM(str(saved_model), **({"dtype": "float32", "levels": "mxfp4", "journal": journal} | more))


def table(results) -> dict:
    return {name: {key: value for key, value in line.items() if key != "alias"}
            for name, line in results["results"].items()}


def keys(journal: Path) -> list[str]:
    whole = journal.read_bytes().rpartition(b"\n")[0]
    return [json.loads(line)["key"] for line in whole.splitlines()[1:]]


def test_a_finished_run_asks_nothing_again(saved_model, tasks, tmp_path, asked):
    journal = tmp_path / "journal.jsonl"
    lm = system(saved_model, journal)
    first = evaluate(lm, tasks, list(TASKS))
    assert asked == {"generated": 10 + 20, "scored": 30 + len(asked_windows(lm, first))}
    before = dict(asked)
    again = system(saved_model, journal, batch_size=2)  # of which no answer depends
    results = evaluate(again, tasks, list(TASKS))
    assert asked == before
    assert (answers(results), table(results)) == (answers(first), table(first))
    assert again.generations == lm.generations
    assert len(set(keys(journal))) == len(keys(journal)) == 10 + 20 + 30 + 10


def asked_windows(lm: MLSpecLM, results) -> list:
    return [window for sample in results["samples"]["t_text"] for window in lm._windows(sample["doc"]["t"])]


def test_greedy_requests_that_are_the_same_are_asked_once(saved_model, tasks, asked):
    lm = system(saved_model, None)
    task = TASKS["t_generate"] + "repeats: 3\n"
    (tasks / "thrice.yaml").write_text((tasks / "t_generate.yaml").read_text().replace("t_generate", "thrice")
                                       + task.splitlines()[-1] + "\n")
    results = evaluate(lm, tasks, ["thrice"])
    assert asked["generated"] == 10
    assert all(len(one[0]) == 3 and len(set(one[0])) == 1 for one in answers(results)["thrice"])


def test_a_killed_run_goes_on_where_it_was(saved_model, tasks, tmp_path, asked):
    journal = tmp_path / "journal.jsonl"
    least = random.SystemRandom().randrange(3, 55)  # another moment in every run of the tests
    command = [sys.executable, "-c", RUN, str(saved_model), str(tasks), str(journal)]
    running = subprocess.Popen(command, cwd=ROOT, env=environment())
    until = time.monotonic() + 240
    while (not journal.exists() or journal.read_bytes().count(b"\n") <= least) and running.poll() is None:
        assert time.monotonic() < until, "the run under test finishes no request"
        time.sleep(0.005)
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL, "it ended before it was killed"
    finished = keys(journal)
    assert least <= len(finished) < 70
    results = evaluate(system(saved_model, journal), tasks, list(TASKS))
    done = keys(journal)
    assert done[: len(finished)] == finished
    assert len(set(done)) == len(done) == 70
    generated = sum(1 for key in done[len(finished):] if key in generation_keys_of(results))
    assert asked["generated"] == generated
    whole = evaluate(system(saved_model, None), tasks, list(TASKS))
    assert (answers(results), table(results)) == (answers(whole), table(whole))


def generation_keys_of(results) -> set[str]:
    found = set()
    for name, repeats in (("t_generate", 1), ("t_sample", 2)):
        arguments = [tuple(sample["arguments"][0]) for sample in results["samples"][name]]
        found |= set(generation_keys([one for one in arguments for _ in range(repeats)]))
    return found


def environment() -> dict[str, str]:
    paths = [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(("more", "words"), [
    ({"levels": "mxfp4+ngram"}, "levels: "), ({"dtype": "bfloat16"}, 'dtype: "float32" -> "bfloat16"'),
    ({"num_draft_tokens": 3}, "speculation.num_draft_tokens: null -> 3"),
    ({"max_length": 100}, "max_length: null -> 100"),
    ({"format": "int4", "group_size": 32, "levels": "ngram"}, "weights: "), ({"seed": 7}, "seed: 1234 -> 7"),
])
def test_answers_of_another_system_are_refused(saved_model, tmp_path, more, words):
    system(saved_model, tmp_path / "j")
    with pytest.raises(ValueError, match="holds the results of another run") as refused:
        system(saved_model, tmp_path / "j", **more)
    assert words in str(refused.value)


def test_weights_that_changed_are_another_system(saved_model, tmp_path):
    lm = system(saved_model, tmp_path / "j")
    with_other = lm.model
    with_other.model.layers[0].mlp.down_proj.weight.data[3, 5] += 0.5
    with pytest.raises(ValueError, match="weights: "):
        MLSpecLM(with_other, lm.tokenizer, levels="mxfp4", journal=tmp_path / "j")


def test_a_level_that_changed_is_another_system(saved_model, tmp_path):
    level = tmp_path / "level"
    shutil.copytree(saved_model, level)
    system(saved_model, tmp_path / "j", levels=str(level))
    moved = tmp_path / "elsewhere" / "level"
    shutil.copytree(level, moved)
    system(saved_model, tmp_path / "j", levels=str(moved))  # the same one in another place
    tensors = load_file(level / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + torch.tensor(0.25)
    save_file(tensors, level / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"\(levels\[0\].weights: "):
        system(saved_model, tmp_path / "j", levels=str(level))
