"""Is `mlspec eval` lm-eval's command line with our model, our tasks and our defaults in it?"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed (extra eval)")

from lm_eval import tasks as lm_eval_tasks

from hf_mlspec.cli import main
from hf_mlspec.evaluation import TASKS, harness_command

ROOT = Path(__file__).resolve().parents[1]
TASK = """task: t_cli
dataset_path: json
dataset_kwargs: {data_files: {test: %s/docs.json}}
test_split: test
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{q}}"
generation_kwargs: {until: ["z"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A folder with a task; lm-eval's own thousands, which take seconds to find, are left out."""
    monkeypatch.setattr(lm_eval_tasks.TaskManager.__init__, "__defaults__", (None, None, False, None))
    monkeypatch.delenv("MLSPEC_DATA", raising=False)
    (tmp_path / "docs.json").write_text(json.dumps([{"q": f"x{n}"} for n in range(4)]))
    (tmp_path / "t_cli.yaml").write_text(TASK % tmp_path)
    return tmp_path


@pytest.fixture
def executed(monkeypatch):
    """What lm-eval was asked to do, and is not."""
    asked: list[argparse.Namespace] = []
    monkeypatch.setattr(harness_command.HarnessCLI, "execute", lambda self, args: asked.append(args))
    return asked


def test_a_task_is_scored_and_its_results_are_written(saved_model, task, capsys):
    status = main(["eval", "--tasks", "t_cli", "--include_path", str(task), "--limit", "3", "--data", str(task),
                   "--output_path", str(task / "out"), "--log_samples", "--model_args", f"pretrained={saved_model}",
                   "levels=mxfp4+ngram", "num_draft_tokens=4+2", "dtype=float32", f"journal={task}/journal.jsonl"])
    assert status == 0
    assert "|t_cli|" in capsys.readouterr().out.replace(" ", "")
    assert os.environ["MLSPEC_DATA"] == str(task)
    (file,) = (task / "out").rglob("results_*.json")
    written = json.loads(file.read_text())
    assert written["config"]["levels"] == ["mxfp4", "ngram"]
    assert written["config"]["speculation"]["new_tokens"] > 0
    assert written["config"]["batch_size"] == 8
    assert len((task / "journal.jsonl").read_text().splitlines()) == 1 + 3


def test_our_defaults_stand_where_nothing_is_said(executed, tmp_path):
    assert main(["eval", "--tasks", "a,b"]) == 0
    assert main(["eval", "run", "--tasks", "a", "--model", "hf", "--device", "meta", "--batch_size", "2",
                 "--include_path", "x"]) == 0
    config = tmp_path / "run.yaml"
    config.write_text("model: dummy\ndevice: meta\ntasks: [a]\n")
    assert main(["eval", "--config", str(config), "--batch_size", "auto"]) == 0
    plain, said, from_file = executed
    assert (plain.model, plain.batch_size, plain.include_path) == ("mlspec", 8, [str(TASKS)])
    assert plain.device in ("cpu", "cuda")
    assert (said.model, said.device, said.batch_size, said.include_path) == ("hf", "meta", "2", [str(TASKS), "x"])
    assert (from_file.model, from_file.device, from_file.batch_size) == (None, None, "auto")


def test_subcommands_see_our_tasks(executed):
    assert main(["eval", "ls", "tasks"]) == main(["eval", "validate", "--tasks", "a"]) == 0
    assert [args.include_path for args in executed] == [[str(TASKS)], [str(TASKS)]]
    assert not hasattr(executed[0], "model")


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"]])
def test_help_is_ours_and_lm_evals(capsys, words):
    with pytest.raises(SystemExit) as left:
        main(["eval", *words])
    assert left.value.code == 0
    told = capsys.readouterr().out
    assert "--data FOLDER" in told
    assert ("--num_fewshot" if words[0] == "run" else "validate") in told


@pytest.mark.parametrize(("words", "told"), [
    (["--data", "no/such/folder"], "--data no/such/folder: no such folder; name the data folder"),
    (["--model_args", "pretrained=no/such/folder"], "model folder 'no/such/folder' does not exist; give a folder "
                                                    "written by save_pretrained"),
    (["--model_args", "levels=mxfp4"], "no model is named: add pretrained=FOLDER to the model arguments"),
    (["--model_args", "pretrained=x,level=mxfp4"], "unknown model argument level; there are "),
    (["--include_path", "/no/such"], "Tasks not found: t_cli"),
])
def test_an_error_is_one_line(task, capsys, words, told):
    assert main(["eval", "--tasks", "t_cli", "--include_path", str(task), *words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mlspec eval: ")]
    assert len(lines) == 1
    assert lines[0].startswith(f"mlspec eval: {told}")


def test_data_without_a_folder_is_one_line(capsys):
    with pytest.raises(SystemExit) as left:
        main(["eval", "--tasks", "x", "--data"])
    assert left.value.code == 2
    assert capsys.readouterr().err == "mlspec eval: --data: expected one argument; see mlspec eval --help\n"


@pytest.mark.parametrize(("words", "told"), [
    (["--bogus"], "unrecognized arguments: --bogus"), (["run", "--limit", "x"], "argument --limit"),
    (["--limt", "2", "--tasks", "a"], "unrecognized arguments: --limt 2"), (["ls", "nothing"], "argument")])
def test_what_lm_eval_does_not_know_is_one_line(capsys, words, told):
    with pytest.raises(SystemExit) as left:
        main(["eval", *words])
    assert left.value.code == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "mlspec eval" in line or "usage" in line]
    assert len(said) == 1
    assert said[0].startswith(f"mlspec eval: error: {told}")
    assert said[0].endswith("; see mlspec eval --help")


def test_an_interrupt_is_130(monkeypatch, capsys):
    def interrupted(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(harness_command, "run", interrupted)
    assert main(["eval", "--tasks", "x"]) == 130
    assert capsys.readouterr().err == "mlspec eval: interrupted\n"


def test_without_lm_eval_the_command_says_what_to_install(monkeypatch, capsys):
    for name in ("hf_mlspec.evaluation.harness_command", "hf_mlspec.evaluation.harness"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("hf_mlspec.evaluation.harness_command", None, raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["eval", "--tasks", "x"]) == 2
    told = capsys.readouterr().err
    assert told == ('mlspec eval: lm_eval is not installed: pip install --no-build-isolation -e ".[eval]" in the '
                    "folder of hf_mlspec\n")
    with pytest.raises(ModuleNotFoundError, match=r"lm_eval is not installed: pip install .*\[eval\]"):
        __import__("hf_mlspec.evaluation.harness")


def test_the_commands_do_not_load_what_only_evaluation_needs():
    """Beyond what transformers itself loads: 5.17 imports pandas and pyarrow."""
    names = {"lm_eval", "datasets", "evaluate", "optimum", "pandas", "pyarrow"}
    program = ("import sys, transformers.generation.utils, transformers.models.llama.modeling_llama; "
               "before = {*sys.modules}; import hf_mlspec.cli; "
               f"loaded = {names} & ({{*sys.modules}} - before); assert not loaded, loaded")
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_optimum_has_the_command():
    """From the source tree; an installed one holds the same file in optimum's folder."""
    command = [sys.executable, "-m", "optimum.commands.optimum_cli"]
    wrong = subprocess.run([*command, "mlspec", "eval", "--data", "no/such"], cwd=ROOT, capture_output=True, text=True,
                           check=False)
    assert wrong.returncode == 2
    assert wrong.stderr.splitlines()[-1] == "mlspec eval: --data no/such: no such folder; name the data folder"
    others = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "export" in others.stdout
    assert "mlspec" in others.stdout
