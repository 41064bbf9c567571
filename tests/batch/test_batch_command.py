"""Are the answers of `mlspec batch` those of generate alone, in one process and through workers that are killed?"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import torch
from refused_command import refusal
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_mlspec
from hf_mlspec.batch.folder import OutputFolder
from hf_mlspec.batch.job import Job
from hf_mlspec.batch.source import Source
from hf_mlspec.batch.worker import Settings, WorkerLost
from hf_mlspec.cli import main

HAS_RAY = True
try:
    import ray  # noqa: F401
except ModuleNotFoundError:
    HAS_RAY = False
TARGET, DRAFT = map(str, hf_mlspec.demo_pair())


def prompts(count: int, new_tokens: int = 10) -> list[dict]:
    return [{"custom_id": f"r{number}", "prompt": f"def f{number}(x):\n    ", "max_tokens": new_tokens + number % 5,
             "return_token_ids": True} for number in range(count)]  # fmt: skip


def written(path: Path, lines: list) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def answers(place: Path) -> list[dict]:
    return [json.loads(line) for file in sorted(place.glob("part-*.jsonl")) for line in file.open()]


def command(*words: object) -> int:
    return main(["batch", *map(str, words), "--model", TARGET, "--num-draft-tokens", "4"])


class Alone:
    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(TARGET)

    def ids(self, line: dict, **options) -> list[int]:
        inputs = self.tokenizer(line["prompt"], return_tensors="pt")
        found = self.model.generate(**inputs, assistant_models=[], max_new_tokens=line["max_tokens"], **options)
        return found[0, inputs["input_ids"].shape[1] :].tolist()


def test_answers_are_those_of_generate_alone(tmp_path, capsys):
    asked, before = prompts(7), set(threading.enumerate())
    sampled = {"custom_id": "s", "url": "/v1/completions", "method": "POST",
               "body": {"prompt": "import ", "max_tokens": 8, "temperature": 0.8, "top_k": 40, "seed": 5,
                        "return_token_ids": True}}  # fmt: skip
    half = {"prompt": "half of a pair: \ud83d"}  # JSON, and no text
    file = written(tmp_path / "in.jsonl", [*asked, sampled, "not json", {**asked[0], "max_tokens": 0}, half])
    options = file, tmp_path / "out", "--level", f"mxfp4+{DRAFT}", "--lines-per-file", 3, "--slots", 4
    assert command(*options, "--json") == 2  # three lines have no answer
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert (told["lines"], told["failed"], told["lost_workers"]) == (11, 3, 0)
    assert "line 9: no JSON" in captured.err
    assert "line 10: max_tokens is 0" in captured.err
    assert r"line 11: a prompt cannot be read, is it whole? 'half of a pair: \ud83d'" in captured.err
    for thread in set(threading.enumerate()) - before:  # of a worker that is closed none goes on
        if thread.name.startswith("mlspec-"):
            thread.join(10)
            assert not thread.is_alive(), thread
    found, alone = answers(tmp_path / "out"), Alone()
    assert [answer["line"] for answer in found] == list(range(1, 12))
    assert [answer["custom_id"] for answer in found] == [*(line["custom_id"] for line in asked), "s", None, "r0", None]
    for line, answer in zip(asked, found[:7], strict=True):
        assert answer["response"]["body"]["choices"][0]["token_ids"] == alone.ids(line)
    torch.manual_seed(5)
    expected = alone.ids(sampled["body"], do_sample=True, temperature=0.8, top_k=40)
    assert found[7]["response"]["body"]["choices"][0]["token_ids"] == expected
    assert command(*options) == 2  # nothing is left to do
    assert "11 lines, 11 of them answered before" in capsys.readouterr().out


def test_another_job_in_the_folder_is_refused(tmp_path, capsys):
    file = written(tmp_path / "in.jsonl", prompts(1))
    with OutputFolder(str(tmp_path / "out"), {"input": "of another"}):
        pass
    said = refusal(capsys, "batch", file, tmp_path / "out", "--model", TARGET)
    assert "holds the results of another run" in said
    assert "name another OUTPUT" in said


@pytest.mark.parametrize(("words", "said"), [
    (("missing.jsonl", "out"), "cannot be read: No such file"),
    (("in.jsonl", "out", "--model", "/no/such"), "does not exist"),
    (("in.jsonl", "out", "--level", "nested"), "add --dtype bfloat16"),
    (("in.jsonl", "out", "--workers", 0), "0 is not 1 or more"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "in.jsonl", prompts(1))
    model = () if "--model" in words else ("--model", TARGET)
    assert said in refusal(capsys, "batch", *words, *model)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed: what its absence says cannot be seen")
def test_without_ray_several_workers_name_the_extra(tmp_path, capsys):
    file = written(tmp_path / "in.jsonl", prompts(1))
    assert "pip install 'hf-mlspec[ray]'" in refusal(capsys, "batch", file, tmp_path / "out", "--model", TARGET,
                                                     "--workers", 2)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed (extra ray)")
def test_three_workers_killed_ten_times_write_what_one_alone_writes(tmp_path):
    from hf_mlspec.batch.ray_workers import RayWorker, ray_cluster

    file = written(tmp_path / "in.jsonl", prompts(120, new_tokens=40))
    assert command(file, tmp_path / "serial", "--lines-per-file", 2, "--level", f"mxfp4+{DRAFT}") == 0
    settings = Settings(TARGET, "float32", "cpu", ["mxfp4", DRAFT], TARGET, slots=2,
                        config=hf_mlspec.SpeculationConfig(num_draft_tokens=4))
    killed: list[int] = []
    chance, kills = random.Random(3), []

    async def kill(workers) -> None:
        """SIGKILL to one at random of those that are there."""
        for worker in chance.sample(workers, len(workers)):
            with suppress(WorkerLost, TimeoutError):
                pid = await asyncio.wait_for(worker.pid(), 1)
                if pid not in killed:
                    killed.append(pid)
                    os.kill(pid, signal.SIGKILL)
                    return

    async def work(folder):
        workers, files = [RayWorker(settings, 1) for _ in range(3)], count(1)

        def written_one(lines: int) -> None:
            if len(killed) < 10 and next(files) % 2 == 0:
                kills.append(asyncio.create_task(kill(workers)))

        return await Job(Source(file).pieces(2), folder, workers, written_one).run()

    with OutputFolder(str(tmp_path / "killed"), {"input": "the same"}) as folder, ray_cluster(None, 3):
        summary = asyncio.run(work(folder))
    assert len(killed) == 10
    assert (summary.lines, summary.failed) == (120, 0)
    assert summary.lost >= 10  # Ray itself ends some where memory is short
    names = sorted(file.name for file in (tmp_path / "serial").glob("part-*"))
    assert len(names) == 60
    for name in names:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "serial" / name).read_bytes()
