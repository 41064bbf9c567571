"""Do the processes of an evaluation that Ray starts know who they are, and what becomes of one that fails?"""

from __future__ import annotations

import importlib
import json
import os
import sys
from types import ModuleType

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed (extra eval)")

from harness_tasks import TASKS, write_tasks
from refused_command import refusal

from hf_mlspec.cli import main

try:
    import ray
except ModuleNotFoundError:
    ray = None


class Method:
    """A call of an actor: what it gives is computed when it is waited for."""

    def __init__(self, call):
        self.call = call

    def remote(self, *words):
        return lambda: self.call(*words)


class Actor:
    made: list

    def __init__(self, own, options):
        self.own, self.options, self.killed = own, options, False

    def __getattr__(self, name):
        return Method(getattr(self.own, name))


@pytest.fixture
def machines(monkeypatch):
    """`ray_ranks` over a Ray that runs its actors here, one after the other, and the list of them. gpus: of it."""
    fake, errors = ModuleType("ray"), ModuleType("ray.exceptions")
    for name in ("NodeDiedError", "OutOfMemoryError", "RayActorError", "WorkerCrashedError"):
        setattr(errors, name, type(name, (Exception,), {}))
    made, fake.gpus = [], 0

    class Remote:
        def __init__(self, kind):
            self.kind = kind

        def options(self, **options):
            self.told = options
            return self

        def remote(self, *words):
            made.append(Actor(self.kind(*words), self.told))
            return made[-1]

    fake.remote, fake.get = Remote, lambda call: call()
    fake.wait = lambda calls, num_returns: (calls[-1:], calls[:-1])  # the last one ends first
    fake.kill = lambda actor: setattr(actor, "killed", True)
    fake.init = fake.shutdown = lambda **_: None
    fake.cluster_resources = lambda: {"CPU": 4, "GPU": fake.gpus}
    fake.util = ModuleType("ray.util")
    fake.util.get_node_ip_address = lambda: "127.0.0.1"
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.exceptions", errors)
    for name in ("ray_workers", "ray_ranks"):
        monkeypatch.delitem(sys.modules, f"hf_mlspec.batch.{name}", raising=False)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # given back behind the test
        monkeypatch.delenv(name)
    found = importlib.import_module("hf_mlspec.batch.ray_ranks")
    yield found, made, fake
    for name in ("ray_workers", "ray_ranks"):
        sys.modules.pop(f"hf_mlspec.batch.{name}", None)


def test_every_process_knows_who_it_is_and_the_first_one_is_heard(machines, monkeypatch):
    module, made, fake = machines
    fake.gpus, asked = 3, []

    def run(words):
        asked.append((words, *(os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"))))
        print(f"from {len(asked)}")

    monkeypatch.setattr("hf_mlspec.evaluation.harness_command.run", run)
    assert module.evaluated(["--tasks", "t"], None, None) == (0, "from 3\n")  # the first one ended last
    assert asked == [(["--tasks", "t"], "3", "0", "127.0.0.1")] * 3
    assert int(os.environ["MASTER_PORT"]) > 0
    assert [actor.own._rank for actor in made] == [0, 1, 2]
    assert all(actor.killed and actor.options["num_gpus"] == 1 for actor in made)


def test_one_that_fails_ends_all_and_is_named(machines, monkeypatch):
    module, made, _ = machines
    failing = iter([ValueError("no such folder\nand more")])
    monkeypatch.setattr("hf_mlspec.evaluation.harness_command.run", lambda words: (_ for _ in ()).throw(next(failing)))
    with pytest.raises(ValueError, match=r"^process 1 of 2 failed: ValueError: no such folder; what journals hold st"):
        module.evaluated([], 2, None)
    assert [actor.killed for actor in made] == [True, True]
    monkeypatch.setattr("hf_mlspec.evaluation.harness_command.run", lambda words: sys.exit(2))
    assert module.evaluated([], 2, None) == (2, "")  # as lm-eval's parser ends
    monkeypatch.setattr(module._Rank.kind, "meets", lambda _: 1 / 0)
    with pytest.raises(ValueError, match=r"^process 0 of 2 failed: ZeroDivisionError: division by zero; what jour"):
        module.evaluated([], 2, None)


def test_numbers_that_cannot_be_are_refused(machines, monkeypatch):
    module, made, fake = machines
    with pytest.raises(ValueError, match="Ray knows of no GPU: say with --workers how many"):
        module.evaluated([], None, "auto")
    fake.gpus = 2
    with pytest.raises(ValueError, match="--workers 3: Ray knows of 2 GPUs, and a process has one of its own"):
        module.evaluated([], 3, "auto")
    fake.gpus = 0
    with pytest.raises(ValueError, match="5 processes, each of which keeps a core: Ray knows of 4; give fewer"):
        module.evaluated([], 5, "auto")
    fake.gpus = 6
    with pytest.raises(ValueError, match="6 processes, each of which keeps a core: Ray knows of 4"):
        module.evaluated([], None, "auto")
    assert made == []


@pytest.mark.skipif(ray is not None, reason="Ray is installed: what its absence says cannot be seen")
def test_without_ray_its_extra_is_named(capsys, tmp_path):
    words = "--tasks", "t_choice", "--include_path", write_tasks(tmp_path), "--model_args", "pretrained=no/such/folder"
    assert "pip install 'hf-mlspec[ray]'" in refusal(capsys, "eval", "--workers", "2", *words)


@pytest.mark.parametrize(("words", "told"), [
    (["--tusks", "t"], "unrecognized arguments: --tusks"), (["--model_args", "pretrained=x"], "no task is named"),
    (["--tasks", "t_choice", "--model_args", "pretrained=x,levls=mxfp4"], "unknown model argument levls"),
    (["--tasks", "t_choice", "--model_args", "pretrained=x,levels=mxfp5"], "mxfp5"),
    (["--tasks", "t_choice"], "no model is named"),
])  # fmt: skip
def test_words_that_every_process_would_refuse_are_refused_before_one_is_started(
    capsys, machines, tmp_path, words, told
):  # fmt: skip
    """Ray's own start takes seconds, and what processes on other machines say comes late and from one of them."""
    _, made, fake = machines
    fake.init = lambda **_: pytest.fail("Ray was started")
    assert told in refusal(capsys, "eval", "--workers", "2", *words, "--include_path", write_tasks(tmp_path))
    assert made == []


def test_launchers_beside_it_are_refused(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "start the processes themselves" in refusal(capsys, "eval", "--ray", "auto", "--tasks", "t")


def test_help_starts_no_processes(capsys, monkeypatch):
    asked = []
    monkeypatch.setattr("hf_mlspec.evaluation.harness_command.run", asked.append)
    monkeypatch.setattr("hf_mlspec.cli.eval._by_ray", lambda args: pytest.fail("processes were started"))
    assert main(["eval", "--workers", "2", "--help"]) == 0
    assert asked == [["--help"]]
    assert "--workers N" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(ray is None, reason="Ray is not installed (extra ray)")
def test_two_processes_measure_what_one_measures(saved_model, tmp_path, capsys):
    folder = write_tasks(tmp_path)
    words = ["eval", "--tasks", ",".join(TASKS), "--include_path", str(folder), "--log_samples"]

    def measured(name: str, *more: str) -> tuple[dict, dict]:
        own = f"pretrained={saved_model},levels=mxfp4,dtype=float32,journal={tmp_path}/{name}.jsonl"
        assert main([*words, "--model_args", own, "--output_path", str(tmp_path / name), *more]) == 0
        assert "t_choice" in capsys.readouterr().out
        (results,) = (tmp_path / name).rglob("results_*.json")
        samples = {file.name.rsplit("_", 1)[0]: sorted((line["doc_id"], line["resps"]) for line in
                                                      map(json.loads, file.read_text().splitlines()))
                   for file in (tmp_path / name).rglob("samples_*.jsonl")}  # fmt: skip
        return json.loads(results.read_text())["results"], samples

    expected = measured("one")
    assert measured("two", "--workers", "2") == expected
    assert (tmp_path / "two.jsonl.rank1").is_file()
