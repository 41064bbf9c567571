"""Do the mutants still fit the code, and do the tests of their rooms kill those that are quick?"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.mutants.cpu_kernels import MUTANTS as COMPILED
from tests.mutants.mutant import ROOT, Mutant, all_mutants
from tests.mutants.tree import Tree

MUTANTS = all_mutants()


def test_every_mutant_fits():
    """Its text is there once, and its tests are."""
    for mutant in MUTANTS:
        mutant.mutated((ROOT / mutant.file).read_text(encoding="utf-8"))
        for test in mutant.node_ids:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(encoding="utf-8"), test
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60
    assert 8 <= sum(mutant.quick for mutant in MUTANTS) <= 20


@pytest.mark.parametrize("old", ["no such text", "def "])
def test_a_mutant_of_other_text_is_an_error(old):
    mutant = Mutant("a name", "hf_mlspec/speculation/acceptance.py", old, "x", ())
    with pytest.raises(ValueError, match=r"holds \d+ times .*, expected once"):
        mutant.mutated((ROOT / mutant.file).read_text(encoding="utf-8"))


def test_bodies_of_functions_are_told_from_all_else(tmp_path):
    text = "SIZE = 3\nclass One:\n    def f(self, a):\n        return [a + 1 for _ in 'x']\n"
    (tmp_path / "code.py").write_text(text)
    tree = Tree(tmp_path)
    assert tree.swaps(Mutant("", "code.py", "SIZE = 3", "SIZE = 4", ())) is None
    assert tree.swaps(Mutant("", "code.py", "f(self, a)", "g(self, a)", ())) is None
    assert list(tree.swaps(Mutant("", "code.py", "a + 1", "a - 1", ()))) == [("f", 3)]


@pytest.mark.slow
def test_quick_mutants_die():
    """By `python -m tests.mutants --quick`, in a process of its own, which it forks."""
    done = subprocess.run([sys.executable, "-m", "tests.mutants", "--quick"], cwd=ROOT, capture_output=True, text=True,
                          timeout=900)  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "0 not" in done.stdout.splitlines()[-1]


def test_every_mutant_of_a_kernel_fits():
    """Its text is there once, its tests are, and what is compiled anew is the file or includes it."""
    for mutant, source in COMPILED:
        mutant.mutated((ROOT / mutant.file).read_text(encoding="utf-8"))
        assert source == mutant.file or mutant.file.endswith(".h"), mutant.name
        assert (ROOT / source).suffix == ".cpp"
        for test in mutant.node_ids:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(encoding="utf-8"), test
    names = {mutant.name for mutant, _ in COMPILED}
    assert len(names) == len(COMPILED) >= 20
    assert not names & {mutant.name for mutant in MUTANTS}
