"""Which test files never meet transformers, and so say nothing about a release of it? Prints `--ignore=FILE` for each.

A file meets it that imports it, or a name of a module that does, however far away and wherever the import stands, but
for types alone; or a fixture that does; or what may start anything: another process, an import by name, `import
hf_mlspec` as a whole, a package that is not in FREE. So a new file is left out only where its own imports show that it
may be, or where READ says that its processes were looked at.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS = ("hf_mlspec", "mlspec_cli", "eval", "tests")
# Neither imports transformers nor runs what is not read here.
FREE = {"torch", "numpy", "scipy", "safetensors", "hypothesis", "pytest", "gguf", "rich", "yaml", "tokenizers",
        "accelerate", "tqdm", *sys.stdlib_module_names} - {"subprocess", "multiprocessing", "importlib", "runpy"}
STARTERS = {"subprocess", "multiprocessing", "importlib", "runpy"}
# What these start was read: programs of the sandbox, a journal alone, ops alone, setup.py, this file.
READ = {ROOT / place for place in (
    "hf_mlspec/evaluation/sandbox.py", "hf_mlspec/evaluation/sandbox_process.py", "tests/instruction_sets.py",
    "tests/evaluation/test_journal.py", "tests/evaluation/test_sandbox.py", "tests/engines/test_cache_memory.py",
    "tests/test_oldest.py")}  # fmt: skip


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports_of(node: ast.AST, file: Path) -> Iterator[tuple[str, str | None, str]]:
    """(module, the name taken from it or None, the name it has here) of every import inside."""
    package = file.relative_to(ROOT).parts[:-1]
    typed = {id(part) for one in ast.walk(node) if isinstance(one, ast.If) and ast.unparse(one.test) == "TYPE_CHECKING"
             for line in one.body for part in ast.walk(line)}  # fmt: skip
    for one in ast.walk(node):
        if id(one) in typed:
            continue
        if isinstance(one, ast.Import):
            yield from ((alias.name, None, alias.asname or alias.name.split(".")[0]) for alias in one.names)
        elif isinstance(one, ast.ImportFrom):
            above = package[: len(package) - one.level + 1] if one.level else ()
            module = ".".join([*above, *filter(None, [one.module])])
            yield from ((module, alias.name, alias.asname or alias.name) for alias in one.names)


@cache
def imported_by(file: Path) -> list[tuple[str, str | None, str]]:
    return list(imports_of(tree_of(file), file))


@cache
def file_of(module: str, beside: Path) -> Path | None:
    """Where a module of ours is written; modules of tests are found beside the file that asks, and in tests/."""
    path = Path(*module.split("."))
    folders = [ROOT] if path.parts[0] in OURS else [beside.parent, ROOT / "tests"]
    for folder in folders:
        for file in (folder / path.with_suffix(".py"), folder / path / "__init__.py"):
            if file.exists():
                return file
    return None


@cache
def homes_in(package: Path) -> dict[str, str]:
    """Of a package whose names are imported when they are asked for: which module has which, as its _HOMES say."""
    for node in tree_of(package).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["_HOMES"]:
            return ast.literal_eval(node.value)
    return {}


def met(module: str, name: str | None, beside: Path, seen: set) -> bool:
    """Whether an import leads to transformers."""
    inner = file_of(f"{module}.{name}", beside) if name else None
    file = inner or file_of(module, beside)
    if file is None:
        top = module.split(".")[0]
        if top in STARTERS:
            return beside not in READ
        return (top not in FREE) if top not in OURS else not (ROOT / Path(*module.split("."))).is_dir()
    if file.name == "__init__.py" and inner is None and name:  # one name of a package: from where it has it
        if home := homes_in(file).get(name):
            place = f"hf_mlspec{home}" if home.startswith(".") else f"{module}.{home}"
            return met(place, name, file, seen)
        for origin, taken, own in imported_by(file):
            if own == name:
                return met(origin, taken, file, seen)
    return meets(file, seen)


def meets(file: Path, seen: set) -> bool:
    if file in seen:  # asked already, further out
        return False
    seen.add(file)
    return any(met(module, name, file, seen) for module, name, _ in imported_by(file))


@cache
def fixtures_that_meet(conftest: Path) -> set[str]:
    """Names in a conftest.py that lead to transformers: what it imports, and functions that use or import such."""
    tree, found = tree_of(conftest), set()
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    rest = ast.Module([node for node in tree.body if node not in functions], [])
    found |= {own for module, name, own in imports_of(rest, conftest) if met(module, name, conftest, set())}
    size = -1
    while size != len(found):
        size = len(found)
        for function in functions:
            used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            used |= {argument.arg for argument in function.args.args}
            imported = any(met(*one[:2], conftest, set()) for one in imports_of(function, conftest))
            if imported or used & found:
                found.add(function.name)
    return found


def words_of(tree: ast.Module) -> set:
    """Every name by which a test could ask for a fixture, among others."""
    constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return constants | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}


def is_apart(file: Path) -> bool:
    conftests = [folder / "conftest.py" for folder in file.parents if ROOT / "tests" in (folder, *folder.parents)]
    fixtures = set().union(*(fixtures_that_meet(conftest) for conftest in conftests if conftest.exists()))
    return not meets(file, set()) and not words_of(tree_of(file)) & fixtures


if __name__ == "__main__":
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        if is_apart(file):
            print(f"--ignore={file.relative_to(ROOT)}")
