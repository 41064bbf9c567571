"""Is every folder of eval/ a program that says how it is called or a room that programs share, and none a circle?"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from programs import program

ROOT = Path(__file__).resolve().parents[2]
EVAL = ROOT / "eval"
PROGRAMS = sorted(file.parent.name for file in EVAL.glob("*/__main__.py"))
MODULES = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
           for file in EVAL.rglob("*.py")}
PAGES = [ROOT / "README.md", EVAL / "README.md", ROOT / "kernels_ext" / "README.md", *ROOT.glob("docs/**/*.md"),
         *EVAL.glob("configs/*.toml"), *EVAL.rglob("*.py")]


def imports(module: str) -> set[str]:
    """The modules of eval/ that one imports, inside functions, too."""
    found, package = set(), module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*above, *filter(None, [node.module])])
            found |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
    return found & MODULES.keys() - {"eval"}


def circles(graph: dict[str, set[str]]) -> set[str]:
    """What is left when whatever imports nothing that is left has been taken away, again and again."""
    left = dict(graph)
    while free := [name for name, found in left.items() if not found & left.keys()]:
        for name in free:
            del left[name]
    return set(left)


def rooms() -> dict[str, set[str]]:
    """The folders and files of eval/, and what each imports of the others."""
    found: dict[str, set[str]] = {}
    for module in MODULES.keys() - {"eval"}:
        here = module.split(".")[1]
        found.setdefault(here, set()).update({name.split(".")[1] for name in imports(module)} - {here})
    return found


def test_no_module_imports_itself_by_way_of_others():
    assert circles({module: imports(module) - {module} for module in MODULES}) == set()
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"a", "b", "c"}


def test_no_folder_imports_itself_by_way_of_others():
    assert circles(rooms()) == set()


def test_tests_of_programs_are_short_and_stand_here():
    assert [file.name for file in ROOT.glob("tests/eval/*.py") if len(file.read_text().splitlines()) > 350] == []
    assert [file.name for file in ROOT.glob("tests/test_*.py") if "from programs import" in file.read_text()] == []


def test_nobody_imports_a_program_but_its_caller():
    assert [(module, name) for module in MODULES for name in imports(module) if name.endswith("__main__")] == []


def test_programs_share_rooms_and_not_one_another():
    found = {(name, other) for name, others in rooms().items() for other in others if other in PROGRAMS}
    assert found == {("record_traces", "acceptance")}  # one writes the traces of a plan, the other counts them


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_says_how_it_is_called(name, from_the_root, monkeypatch, capsys):
    try:
        main = program(name).main
    except ModuleNotFoundError as error:
        if error.name == "tomllib":
            pytest.skip("tomllib came with Python 3.11")
        raise
    monkeypatch.setattr(sys, "argv", ["__main__.py", "--help"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    assert f"usage: python -m eval.{name} " in capsys.readouterr().out


def test_every_program_has_its_line_in_the_readme():
    text = (EVAL / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| `(\w+)` \| [^|]+\? \| `python -m eval\.(\w+)[^|]*` \| [^|]+ \| [^|]+ \|$", text)
    assert rows == [(name, name) for name in PROGRAMS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_of_eval_is_there(page):
    text = page.read_text(encoding="utf-8")
    missing = [name for name in re.findall(r"python -m eval\.([a-z][\w.]*\w)", text)
               if name not in PROGRAMS and f"eval.{name}" not in MODULES]
    missing += [name for name in re.findall(r"(?<![\w/-])eval/[\w/*+.-]*\w", text) if not any(ROOT.glob(name))]
    assert missing == []
