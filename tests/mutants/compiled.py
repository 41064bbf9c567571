"""Does every mutant of the kernels die? Each is compiled into one object, linked, and the tests of its room run.

python -m tests.mutants.compiled                   all; objects of an up-to-date build are taken from build/, or made
python -m tests.mutants.compiled --built CHECKOUT  objects from another checkout whose kernels are the same
python -m tests.mutants.compiled --only rotated    those whose name or file has this text
"""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from .cpu_kernels import MUTANTS, KernelMutant
from .mutant import ROOT
from .tree import Outcome, Tree, copied_tree

COMPILER = next(filter(shutil.which, ("c++", "g++", "clang++")), None)
_FLAGS = ["-O3", "-std=c++20", "-fvisibility=hidden", "-g0", "-fPIC", "-DNDEBUG"]  # setup.py has them, too


class Build:
    """A copy of package, tests and kernels, and an object of every source. built: a checkout that may have them."""

    def __init__(self, tree: Tree, built: Path):
        from torch.utils.cpp_extension import include_paths, library_paths

        self.tree, folder = tree, tree.folder
        self.folder, self.objects = folder, folder / "objects"
        self._includes = [f"-I{path}" for path in include_paths()]
        self._libraries = [*(f"-L{path}" for path in library_paths()), "-lc10", "-ltorch_cpu", "-ltorch"]
        cpu = folder / "kernels_ext"
        self.sources = sorted([*(cpu / "bindings" / "cpu").glob("*.cpp"), *(cpu / "cpu").rglob("*.cpp")])
        earlier = _up_to_date(built)
        for source in self.sources:
            own = self.object_of(source)
            own.parent.mkdir(parents=True, exist_ok=True)
            kept = earlier / source.relative_to(folder).with_suffix(".o") if earlier else None
            if kept is not None and kept.exists():
                shutil.copy2(kept, own)
            else:
                print(f"compiling {source.relative_to(folder)}", flush=True)
                self.compile(source)

    def object_of(self, source: Path) -> Path:
        return self.objects / source.relative_to(self.folder).with_suffix(".o")

    def compile(self, source: Path) -> None:
        command = [COMPILER, *_FLAGS, *self._includes, "-c", str(source), "-o", str(self.object_of(source))]
        subprocess.run(command, check=True, capture_output=True, text=True)

    def link(self) -> None:
        """The library of the objects takes the place of the copy's."""
        made = self.folder / "_C.so"
        objects = [str(self.object_of(source)) for source in self.sources]
        subprocess.run([COMPILER, "-shared", *objects, *self._libraries, "-o", str(made)], check=True)
        os.replace(made, self.folder / "hf_mlspec" / "_C.so")

    def of(self, one: KernelMutant) -> Outcome:
        """The outcome of a mutant; behind it the object is the one before."""
        path, source = self.folder / one.mutant.file, self.folder / one.source
        before, kept = path.read_text(encoding="utf-8"), self.object_of(source).read_bytes()
        path.write_text(one.mutant.mutated(before), encoding="utf-8")
        try:
            self.compile(source)
            self.link()
            return self.tree.tested(one.mutant.node_ids)
        finally:
            path.write_text(before, encoding="utf-8")
            self.object_of(source).write_bytes(kept)


def _up_to_date(built: Path) -> Path | None:
    """The objects of a checkout, where its kernels are this one's and none is newer than its object; else None."""
    found = sorted((built / "build").glob("temp.*/kernels_ext"))
    if not found:
        return None
    files = [path.relative_to(ROOT) for path in (ROOT / "kernels_ext").rglob("*") if path.suffix in (".cpp", ".h")]
    own = [path for path in files if "cuda" not in path.parts]
    if any(not (built / path).exists() or not filecmp.cmp(ROOT / path, built / path, shallow=False) for path in own):
        return None
    if shutil.which("ninja") and (found[0].parent / "build.ninja").exists():
        said = subprocess.run(["ninja", "-n", "-C", str(found[0].parent)], capture_output=True, text=True).stdout
        return found[0].parent if "no work to do" in said else None
    newest = max((built / path).stat().st_mtime for path in own)
    objects = [path.stat().st_mtime for path in found[0].rglob("*.o")]
    return found[0].parent if objects and min(objects) > newest else None


def run(mutants: list[KernelMutant], built: Path) -> int:
    """Tell the outcome of each; how many are alive."""
    alive = []
    with copied_tree() as tree:
        build = Build(tree, built)
        build.link()
        whole = tree.tested(sorted({test for one in mutants for test in one.mutant.node_ids}))
        if whole.wrong or whole.killed_by:
            raise ValueError(f"without a mutant the tests fail, so nothing follows from them: {whole}")
        print(f"all of their tests pass without a mutant, {whole.seconds:.0f} s", flush=True)
        for number, one in enumerate(mutants, 1):
            begin = time.monotonic()
            try:
                outcome = build.of(one)
            except subprocess.CalledProcessError as error:
                outcome = Outcome(None, 0.0, f"it does not compile: {error.stderr[-400:]}")
            killed = f"killed by {outcome.killed_by}" if outcome.killed_by else "SURVIVES"
            what = outcome.wrong or killed
            seconds = time.monotonic() - begin
            print(f"{number:3}/{len(mutants)} {seconds:6.1f} s  {one.mutant.name}: {what}", flush=True)
            if outcome.killed_by is None:
                alive.append(one.mutant.name)
    names = f": {', '.join(alive)}" if alive else ""
    print(f"{len(mutants)} mutants, {len(mutants) - len(alive)} killed, {len(alive)} not{names}")
    return len(alive)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.compiled", description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="TEXT", help="mutants whose name or file has this text")
    parser.add_argument("--built", type=Path, default=ROOT, metavar="CHECKOUT", help="whose objects are taken")
    options = parser.parse_args()
    if COMPILER is None:
        print("there is no C++ compiler here", file=sys.stderr)
        return 2
    only = options.only
    mutants = [one for one in MUTANTS if only is None or only in one.mutant.name or only in one.mutant.file]
    if not mutants:
        print(f"no mutant is named {only!r}", file=sys.stderr)
        return 2
    return 1 if run(mutants, options.built.resolve()) else 0


if __name__ == "__main__":
    sys.exit(main())
