"""How is a mutant run? In a copy of the package and its tests, by a child of a process that has imported all of it.

The working tree is never written. Most mutants change the body of a function: a child gives every function made from
that body the mutant's code, and runs the tests. Others, which change a constant or a class, change the file in the
copy, and their children import the package anew; no bytecode is written meanwhile, so that none of a mutant stays.
"""

from __future__ import annotations

import compileall
import gc
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple, NoReturn

from .mutant import ROOT, Mutant

COPIED = ("hf_mlspec", "mlspec_cli", "tests", "eval", "kernels_ext")  # tests compile parts of the last
MOST_SECONDS = 300.0  # of the tests of one mutant
_OWN = ("hf_mlspec", "mlspec_cli", "tests", "eval")
_KILLED, _SURVIVED = 1, 0  # pytest's exit status: a test failed, all passed


class Outcome(NamedTuple):
    """killed_by: the first test that failed; "time" where they never ended; None where all passed. wrong: why nothing
    can be said: the tests were not there, or could not begin."""

    killed_by: str | None
    seconds: float
    wrong: str = ""


class Tree:
    """A copy of the package and its tests at a folder of its own."""

    def __init__(self, folder: Path):
        self.folder = folder

    def swaps(self, mutant: Mutant) -> dict[tuple[str, int], CodeType] | None:
        """What a mutant changes where that is bodies of functions alone: their new code, by name and line; else
        None."""
        path = str(self.folder / mutant.file)
        before = Path(path).read_text(encoding="utf-8")
        old, new = (compile(text, path, "exec") for text in (before, mutant.mutated(before)))
        found: dict[tuple[str, int], CodeType] = {}
        return found if _same_outside(old, new, found) else None

    def in_functions(self, mutant: Mutant) -> Outcome:
        """Of the tests of a mutant whose change `swaps` knows; this process has imported the package."""
        path, codes = str(self.folder / mutant.file), self.swaps(mutant)

        def swap() -> None:
            found = [one for one in gc.get_objects() if type(one) is FunctionType
                     and one.__code__.co_filename == path and _place(one.__code__) in codes]  # fmt: skip
            if {_place(one.__code__) for one in found} != set(codes):
                raise LookupError(f"no function of {mutant.file} has the code that mutant {mutant.name} changes")
            for one in found:
                one.__code__ = codes[_place(one.__code__)]

        return self.tested(mutant.node_ids, swap)

    def in_the_file(self, mutant: Mutant) -> Outcome:
        """Of the tests of any mutant; this process has not imported the package."""
        path = self.folder / mutant.file
        before = path.read_text(encoding="utf-8")
        path.write_text(mutant.mutated(before), encoding="utf-8")
        for stale in path.parent.glob(f"__pycache__/{path.stem}.*"):
            stale.unlink()
        try:
            return self.tested(mutant.node_ids)
        finally:
            path.write_text(before, encoding="utf-8")

    def tested(self, node_ids: list[str], change: Callable[[], None] = lambda: None) -> Outcome:
        """The outcome of these tests in a child, behind a change there."""
        begin, said = time.monotonic(), self.folder / "said.txt"
        child = os.fork()
        if not child:
            _run_tests(self.folder, node_ids, change, said)
        while time.monotonic() - begin < MOST_SECONDS:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return _outcome(os.waitstatus_to_exitcode(status), said, time.monotonic() - begin)
            time.sleep(0.02)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return Outcome("time", time.monotonic() - begin)


def _same_outside(old: CodeType, new: CodeType, changed: dict[tuple[str, int], CodeType]) -> bool:
    """Whether two codes of a module or class differ in bodies of functions alone, which are added to `changed`."""
    inner_old, inner_new = ([one for one in code.co_consts if isinstance(one, CodeType)] for code in (old, new))
    if len(inner_old) != len(inner_new):
        return False
    if _outside(old) != _outside(new):
        return False
    for one, other in zip(inner_old, inner_new, strict=True):
        if _is_function(one) and _is_function(other):
            if _told(one) != _told(other):
                if one.co_freevars != other.co_freevars or one.co_varnames[: one.co_argcount] != other.co_varnames[
                    : other.co_argcount
                ]:
                    return False
                changed[_place(one)] = other
        elif not _same_outside(one, other, changed):
            return False
    return True


def _outside(code: CodeType) -> tuple:
    return code.co_code, code.co_names, [one for one in code.co_consts if not isinstance(one, CodeType)]


def _is_function(code: CodeType) -> bool:
    return bool(code.co_flags & 2)  # CO_NEWLOCALS: no class body


def _told(code: CodeType) -> tuple:
    """All of a code but its lines."""
    inner = tuple(_told(one) if isinstance(one, CodeType) else (type(one), one) for one in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, inner


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_name, code.co_firstlineno


def _run_tests(folder: Path, node_ids: list[str], change: Callable[[], None], said: Path) -> NoReturn:
    """In the child."""
    status = 70
    try:
        os.setpgid(0, 0)
        out = os.open(said, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(out, 1)
        os.dup2(out, 2)
        change()
        import pytest

        options = ["-x", "-q", "--no-header", "--tb=no", "-rf", "-p", "no:cacheprovider", "-p", "no:xdist"]
        status = int(pytest.main([*options, *node_ids]))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _outcome(status: int, said: Path, seconds: float) -> Outcome:
    lines = said.read_text(encoding="utf-8", errors="replace").splitlines()
    failed = [line.removeprefix("FAILED ").split(" - ")[0] for line in lines if line.startswith("FAILED ")]
    if status == _KILLED and failed:
        return Outcome(failed[0], seconds)
    if status == _SURVIVED and any(" passed" in line for line in lines):
        return Outcome(None, seconds)
    if status < 0 and status != -signal.SIGKILL:
        return Outcome(f"signal {-status}", seconds)
    return Outcome(None, seconds, f"pytest ended with {status}: {' | '.join(lines[-3:])}")


@contextmanager
def copied_tree() -> Iterator[Tree]:
    """A copy of the working tree, compiled to bytecode, in a temporary folder, which this process runs in from now on:
    what it imports of the package is the copy's."""
    with tempfile.TemporaryDirectory(prefix="mlspec-mutants-") as place:
        for name in COPIED:
            shutil.copytree(ROOT / name, Path(place) / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy2(ROOT / "pyproject.toml", place)
        compileall.compile_dir(place, quiet=2, workers=1)
        before = Path.cwd(), sys.path[:], sys.dont_write_bytecode
        os.chdir(place)
        os.environ |= {"PYTHONPATH": place, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        sys.dont_write_bytecode = True
        sys.path[:] = [place, *(one for one in sys.path if one and Path(one).resolve() != ROOT)]
        _import_others(place)
        try:
            yield Tree(Path(place))
        finally:
            os.chdir(before[0])
            sys.path[:], sys.dont_write_bytecode = before[1:]


def _import_others(place: str) -> None:
    """Import what the package and its tests import of others: that takes longer than most tests."""
    told = "import sys, hf_mlspec, hf_mlspec.evaluation, pytest, hypothesis, numpy, torch._dynamo; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", told], cwd=place, capture_output=True, text=True, check=True)
    for name in found.stdout.split():
        if name.split(".")[0] not in (*_OWN, "__main__"):
            with suppress(ImportError, AttributeError):  # some name modules that are made, not found
                importlib.import_module(name)


def import_package(node_ids: list[str]) -> None:
    """The package itself and the files of these tests, from the copy; behind this, files that change are not read
    again."""
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]  # of the working tree
    for name in ("hf_mlspec", "hf_mlspec.evaluation", "hf_mlspec.serving"):
        importlib.import_module(name)
    for file in Path("hf_mlspec").rglob("*.py"):
        name = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        if name.split(".")[1:2] in (["speculation"], ["engines"], ["integration"], ["ops"]):
            importlib.import_module(name)
    import pytest

    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
                     *sorted({one.split("::")[0] for one in node_ids})])  # fmt: skip
