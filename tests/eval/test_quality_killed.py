"""Does eval/quality go on after any kill as if there was none?"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    pytest.skip("tomllib came with Python 3.11", allow_module_level=True)

from quality_toy import PLAN, ROOT, SYSTEMS, TASKS, arguments, lines

# A process that has imported everything and computed nothing, and forks one child per line it reads: each child is a
# run of its own, which the test kills. What is begun is appended to a log: the journal and the item.
NURSERY = """
import os, sys, time
import hf_mlspec
from eval.quality import __main__ as quality, scores as quality_scores, tasks as quality_tasks
from eval.plans import fidelity as quality_fidelity
from hf_mlspec.evaluation import harness, harness_generation, score_rows
import lm_eval.tasks

log = open(sys.argv[1], "ab", buffering=0)
stream, decode, scored = hf_mlspec.generate_stream, quality_fidelity.decode, quality_scores.scored
evaluate = quality_tasks.evaluate
now = None

def begun(item):
    log.write(f"{now} {item}\\n".encode())
    time.sleep(0.01)

def told_stream(model, requests, **options):
    def telling():
        for request in requests:
            begun(request.id)
            yield request
    return stream(model, telling() if now else requests, **options)

def told_decode(system, loaded, prompts, *, journal, **options):
    global now
    now = journal.path.name
    decode(system, loaded, prompts, journal=journal, **options)
    now = None

def told_scored(loaded, rows, *, journal, **options):
    left = [number for number in range(len(rows)) if str(number) not in journal]
    def telling(*args, **more):
        for place, scores in score_rows(*args, **more):
            log.write(f"{journal.path.name} {left[place]}\\n".encode())
            time.sleep(0.01)
            yield place, scores
    quality_scores.score_rows = telling
    return scored(loaded, rows, journal=journal, **options)

def told_evaluate(*args, journal, **options):
    global now
    now = journal.name
    found = evaluate(*args, journal=journal, **options)
    now = None
    return found

def slow_scores(*args, **options):
    for found in score_rows(*args, **options):
        time.sleep(0.01)
        yield found

hf_mlspec.generate_stream = harness_generation.generate_stream = told_stream
harness.score_rows, quality_tasks.evaluate = slow_scores, told_evaluate
quality_fidelity.decode, quality_scores.scored = told_decode, told_scored
for line in sys.stdin:
    child = os.fork()
    if not child:
        sys.stdout = open(sys.argv[2], "w")
        status = quality.main(line.split())
        sys.stdout.flush()
        os._exit(status)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Nursery:
    """The process of NURSERY, and what its children began."""

    def __init__(self, folder: Path):
        self.log, self.report = folder / "log", folder / "report"
        self.log.touch()
        self.process = subprocess.Popen(
            [sys.executable, "-c", NURSERY, str(self.log), str(self.report)], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])})

    def run(self, command: list[str], kill_after: int | None = None) -> tuple[int, list[tuple[str, str]]]:
        """One child, killed once it began so many items; -> its status and what it began."""
        before = len(self.begun())
        self.process.stdin.write(" ".join(command) + "\n")
        self.process.stdin.flush()
        child = int(self.process.stdout.readline())
        if kill_after is not None:
            deadline = time.monotonic() + 60
            while len(self.begun()) < before + kill_after and time.monotonic() < deadline and self._alive(child):
                time.sleep(0.003)
            time.sleep(random.random() * 0.05)
            if self._alive(child):
                os.kill(child, signal.SIGKILL)
        return int(self.process.stdout.readline()), self.begun()[before:]

    def begun(self) -> list[tuple[str, str]]:
        return [tuple(line.split()) for line in self.log.read_text().splitlines()]

    @staticmethod
    def _alive(child: int) -> bool:
        return Path(f"/proc/{child}/stat").exists() and " Z " not in Path(f"/proc/{child}/stat").read_text()


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    if not sys.platform.startswith("linux"):
        pytest.skip("needs fork, SIGKILL and /proc")
    found = Nursery(tmp_path_factory.mktemp("nursery"))
    yield found
    found.process.stdin.close()
    assert found.process.wait(60) == 0


def finished(folder: Path) -> set[tuple[str, str]]:
    """(journal, item) of everything on disk that a nursery tells of: all but scores inside lm-eval."""
    files = [file for file in (folder / "results" / "toy").glob("*.jsonl")
             if not re.match(r"answers-|requests-.*-mlspec_(piqa|wikitext2)", file.name)]
    return {(file.name, json.loads(line)["key"]) for file in files
            for line in file.read_bytes().rpartition(b"\n")[0].splitlines()[1:]}


KILLED = {
    "ids, windows, logprobs": (PLAN, 8, 12),
    "tasks": (SYSTEMS.partition('[[systems]]\nname = "W4A16"')[0] + TASKS.partition('[[tasks]]\ntask = "mlspec_wi')[0],
              4, 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", KILLED)
def test_killed_at_random_moments(plan, nursery, toy, saved_model, tmp_path_factory):
    """Nothing that was finished is begun again, and what comes out is what an undisturbed run says."""
    seed = random.randrange(2**32)
    print("seed", seed)  # shown where the test fails
    random.seed(seed)
    text, results, most = KILLED[plan]
    (toy / "plan.toml").write_text(text, encoding="utf-8")
    killed = 0
    for _ in range(40):
        before = finished(toy)
        status, begun = nursery.run(arguments(toy, saved_model), kill_after=random.randint(1, most))
        assert not before & set(begun)
        assert len(begun) == len(set(begun))
        assert status in (0, -signal.SIGKILL)
        if status == 0:
            break
        killed += 1
    assert status == 0
    assert killed >= 1
    report = nursery.report.read_text()
    assert f"{results} of {results} results." in report
    other = tmp_path_factory.mktemp("undisturbed")
    shutil.copytree(toy, other, dirs_exist_ok=True, ignore=shutil.ignore_patterns("results"))
    status, begun = nursery.run(arguments(other, saved_model))
    assert (status, nursery.report.read_text()) == (0, report)
    assert finished(other) == finished(toy) == set(begun)
    for kind in ("fidelity", "perplexity", "probabilities", "task"):
        assert sorted(map(json.dumps, lines(toy, kind))) == sorted(map(json.dumps, lines(other, kind)))
