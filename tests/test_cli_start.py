"""Does mlspec start at once where nothing is computed, and end with the right status whatever ends it?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

import hf_mlspec
import mlspec_cli.start
from hf_mlspec import cli
from mlspec_cli import main

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "transformers", "numpy", "rich", "hf_mlspec")
LIGHT = f"""
import sys
from mlspec_cli import main
try:
    main(sys.argv[1:])
finally:
    loaded = [name for name in {HEAVY} if name in sys.modules]
    assert not loaded, loaded
"""


def python(*words: str, **options) -> subprocess.CompletedProcess:
    """What an interpreter of its own says, whose output is not a terminal."""
    packages = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT, **options}
    environment = {**os.environ, "PYTHONPATH": packages, "PYTHONUNBUFFERED": ""}  # output is written at the end
    return subprocess.run([sys.executable, *words], env=environment, check=False, **options)


@pytest.mark.parametrize(("words", "status", "said"), [
    (["--help"], 0, "write a packed form of a model"), (["--version"], 0, f"mlspec {hf_mlspec.__version__}\n"),
    (["generate", "--help"], 0, "--prompt-file"), (["quantize", "--help"], 0, "--max-shard-size"),
    (["dance"], 2, "mlspec: there is no command 'dance': demo | quantize | convert | inspect | verify | generate | "
                     "batch | serve | tune | route | eval | info;"),
    (["genrate", "--model", "x"], 2, "mlspec: there is no command 'genrate': perhaps generate; see mlspec --help"),
    ([], 2, "mlspec: no command is given; there are demo | quantize"),
    (["verify", "x", "--lvel", "mxfp4"], 2, "mlspec verify: unknown words --lvel mxfp4; see mlspec verify --help\n"),
    (["info", "--jso=n"], 2, "mlspec info: ")])
def test_nothing_heavy_is_imported_before_a_command_runs(words, status, said):
    ran = python("-c", LIGHT, *words)
    assert ran.returncode == status, ran.stderr
    assert said in (ran.stdout if status == 0 else ran.stderr)
    assert status == 0 or ran.stderr.count("\n") == 1 + ran.stderr.startswith("Traceback")


def test_the_module_is_the_command():
    assert python("-m", "mlspec_cli", "--version").stdout == f"mlspec {hf_mlspec.__version__}\n"


SLOW_IMPORT = """
import sys, types
class Slow:
    def find_spec(self, name, *_):
        if name == "hf_mlspec":
            import time
            print("importing", flush=True)
            try:
                while True:  # a signal that comes just before a sleep is seen behind it
                    time.sleep(0.1)
            except BaseException as error:  # as some libraries do around an import of their own
                raise RuntimeError("an import failed") from error
sys.meta_path.insert(0, Slow())
from mlspec_cli import main
sys.exit(main(["info"]))
"""


def test_an_interrupt_during_imports_is_quiet():
    def as_in_a_terminal() -> None:  # where the tests run in the background the signal may be ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)

    running = subprocess.Popen([sys.executable, "-c", SLOW_IMPORT], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, preexec_fn=as_in_a_terminal)
    assert running.stdout.readline() == "importing\n"
    running.send_signal(signal.SIGINT)
    try:
        _, said = running.communicate(timeout=600)  # the import has no end: whatever ends was interrupted
    finally:
        running.kill()
    assert (running.returncode, said) == (130, "mlspec: interrupted\n")


def test_a_signal_handler_that_is_there_stays(monkeypatch, capsys):
    monkeypatch.setattr(cli, "run", lambda args: 0)
    before = signal.getsignal(signal.SIGINT)
    try:
        for handler in (signal.SIG_IGN, signal.default_int_handler):
            signal.signal(signal.SIGINT, handler)
            assert main(["info"]) == 0
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_reader_that_goes_away_is_no_difference():
    """Python leaves with 120 there."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ran = python("-m", "mlspec_cli", "--help", stdout=writer)
    finally:
        os.close(writer)
    assert (ran.returncode, ran.stderr) == (141, "")


# A plain install has neither a server's packages nor those of evaluation, and the first command runs in it.
EXTRAS = ("fastapi", "uvicorn", "httptools", "uvloop", "openai", "prometheus_client", "ray", "lm_eval", "matplotlib",
          "sklearn", "scipy", "peft")  # fmt: skip
ENDS = f"""
import os, sys
sys.modules |= dict.fromkeys({EXTRAS!r})
from mlspec_cli import main
print(main(["info"]), file=sys.stderr)  # its output goes to a full disk
sys.stdout.flush()  # what is left, to where it was sent then
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
sys.stdout = open(1, "w", closefd=False)
sys.exit(main(["info"]))
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_command_without_extras_whose_output_goes_to_a_full_disk_and_then_to_nobody():
    """rich leaves with 1 in the end. In one process: to import everything takes seconds."""
    with open("/dev/full", "w") as full:
        ran = python("-c", ENDS, stdout=full)
    said, status = ran.stderr.splitlines()
    assert said.startswith("mlspec info: ")
    assert said.endswith("No space left on device")
    assert (status, ran.returncode) == ("2", 141)


@pytest.mark.parametrize(("error", "status", "said"), [
    (BrokenPipeError(), 141, ""), (KeyboardInterrupt(), 130, "mlspec info: interrupted\n"),
    (ZeroDivisionError("never seen"), 70, "ZeroDivisionError: never seen\n"),
    (FileNotFoundError(2, "No such file or directory", "a/b"), 2, "mlspec info: a/b: No such file or directory\n"),
    (ValueError("MLSpecConfig: format is 5"), 2, "mlspec info: format is 5\n")])
def test_every_end_has_its_status(monkeypatch, capsys, error, status, said):
    def fail(args):
        raise error

    monkeypatch.setattr(mlspec_cli.start, "_let_go_of_output", lambda: None)
    monkeypatch.setitem(cli._COMMANDS, "info", fail)
    assert main(["info"]) == status
    assert capsys.readouterr().err.endswith(said)


def test_the_shell_is_told_what_could_come_next(monkeypatch):
    asked = []
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    monkeypatch.setitem(sys.modules, "argcomplete", types.SimpleNamespace(autocomplete=asked.append))
    monkeypatch.setattr(cli, "run", lambda args: 0)
    assert main(["info"]) == 0
    assert [parser.prog for parser in asked] == ["mlspec"]
    monkeypatch.setitem(sys.modules, "argcomplete", None)  # not installed
    assert main(["info"]) == 0
    assert "PYTHON_ARGCOMPLETE_OK" in Path(mlspec_cli.__file__).read_text(encoding="utf-8")[:1024]
