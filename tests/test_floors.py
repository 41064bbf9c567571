"""Does every file keep the layout of docs/architecture.md: its import rule, its sizes, its opening sentence?

`violations` reads one source text and names what breaks a rule; the first test applies it to every file of the
project, the others feed it synthetic sources and so prove that each rule can fail.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "hf_mlspec"
START = "mlspec_cli"  # reads a command line: until a command runs it imports the standard library alone
# Low to high; a room imports itself and what stands before it. "" is hf_mlspec/__init__.py: the public names.
FLOORS = [
    "demo_pair", "precision", "formats", "ops", "checkpoints", "nn", "engines", "calibration", "speculation",
    "routing", "integration", "", "evaluation", "serving", "batch", "cli",
]
APART = {"calibration": ("speculation",), "speculation": ("calibration",), "routing": ("speculation",),
         "serving": ("evaluation",)}
PRIVATE_ROOMS = {*FLOORS} - {"", "demo_pair", "evaluation"}  # `hf_mlspec.demo_pair` is a function, too
LM_EVAL_ALLOWED = "evaluation/harness"  # and whatever the name goes on with
TRANSFORMERS_ALLOWED = (
    "integration/", "evaluation/", "serving/", "nn/replace.py", "nn/nest.py", "nn/shards.py", "engines/modules/"
)
# Programs that time ops and decoders or measure formats, which are no public names: how a path begins, which rooms it
# may enter.
TIMES_ROOMS = {
    "eval/bench_kernels/contenders.py": ("hf_mlspec.ops", "hf_mlspec.formats"),
    "eval/bench_kernels/weights.py": ("hf_mlspec.ops", "hf_mlspec.formats"),
    "eval/bench_context/attention.py": ("hf_mlspec.ops", "hf_mlspec.formats"),
    "eval/cache_rotation/": ("hf_mlspec.formats",),
    "eval/nested_quality/": ("hf_mlspec.formats",),
    "eval/random_packed": ("hf_mlspec.formats", "hf_mlspec.nn"),
    "eval/bench_call/": ("hf_mlspec.speculation",),
    "eval/routing/": ("hf_mlspec.evaluation.tasks", "hf_mlspec.nn", "hf_mlspec.routing"),
    "eval/bench_planes/": ("hf_mlspec.nn", "hf_mlspec.ops", "hf_mlspec.routing"),
    "eval/list_architectures/": ("hf_mlspec.engines", "hf_mlspec.integration"),
    "eval/bench_architectures/": ("hf_mlspec.engines",),
    "eval/bench_gpu": ("hf_mlspec.ops", "hf_mlspec.formats", "hf_mlspec.nn", "hf_mlspec.engines"),
    "eval/bench_llama_cpp/": ("hf_mlspec.nn",),
    "eval/soak/": ("hf_mlspec.demo_pair", "hf_mlspec.nn"),
    "eval/bench_ranks/": ("hf_mlspec.engines",),
    "eval/bench_zipper/": ("hf_mlspec.ops", "hf_mlspec.formats", "hf_mlspec.nn"),
    "eval/rotations/": ("hf_mlspec.calibration",),
    "eval/zipper/": ("hf_mlspec.calibration", "hf_mlspec.evaluation.tasks", "hf_mlspec.formats", "hf_mlspec.nn"),
}
BANNED_WORDS = {"utils", "util", "helpers", "helper", "common", "misc", "base", "manager", "tools"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 350, 40


def room(module: str) -> str:
    """`hf_mlspec.speculation.drafters.ngram` -> `speculation`; `hf_mlspec` -> the empty string."""
    first = [*module.split("."), ""][1]
    return "cli" if first == "__main__" else first


def module_name(path: PurePosixPath) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree: ast.AST, path: PurePosixPath) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import, also those inside functions; `from a import b` gives `a.b`."""
    package = list(path.parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *filter(None, [node.module])])
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def import_violations(tree: ast.AST, path: PurePosixPath) -> Iterator[str]:
    inside = path.as_posix().removeprefix(f"{PACKAGE}/")
    here = room(module_name(path))
    if here not in FLOORS:
        yield f"room {here!r} is not in the import rule"
        return
    for line, name in imported_modules(tree, path):
        top = name.split(".")[0]
        if top == "transformers" and not inside.startswith(TRANSFORMERS_ALLOWED):
            yield f"line {line}: transformers may be imported only in {', '.join(TRANSFORMERS_ALLOWED)}"
        if top == "lm_eval" and not inside.startswith(LM_EVAL_ALLOWED):
            yield f"line {line}: lm_eval may be imported only in {LM_EVAL_ALLOWED}*.py"
        if top == PACKAGE:
            there = room(name)
            there = there if there in FLOORS else ""  # `from hf_mlspec import direct_cast`: a public name
            if FLOORS.index(there) > FLOORS.index(here):
                yield f"line {line}: {here or PACKAGE} imports {name}, which stands above it"
            elif there in APART.get(here, ()):
                yield f"line {line}: {here} imports {name}, which stands beside it"
        if top == START and here != "cli":
            yield f"line {line}: {here or PACKAGE} imports {name}, which stands above it"


def start_violations(tree: ast.Module, path: PurePosixPath) -> Iterator[str]:
    """`mlspec --help` answers at once: what takes time is imported in functions, and of the package only its cli."""
    inside = {id(node) for function in ast.walk(tree) if isinstance(function, ast.FunctionDef)
              for node in ast.walk(function)}
    at_once = ast.Module([node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)
                          and id(node) not in inside], [])
    for line, name in imported_modules(at_once, path):
        if name.split(".")[0] not in {START, *sys.stdlib_module_names}:
            yield f"line {line}: {name} is imported before a command runs"
    for line, name in imported_modules(tree, path):
        if name.split(".")[0] == PACKAGE and room(name) != "cli":
            yield f"line {line}: {START} knows of {PACKAGE} only its cli, not {name}"


def compiled_op_violations(tree: ast.AST, path: PurePosixPath) -> Iterator[str]:
    if path.as_posix().startswith(f"{PACKAGE}/ops/"):
        return
    for node in ast.walk(tree):
        written = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Call) else ""
        if written.endswith("ops.mlspec") or written.startswith("getattr(torch.ops, 'mlspec'"):
            yield f"line {node.lineno}: torch.ops.mlspec may appear only in {PACKAGE}/ops/"


def size_violations(tree: ast.AST, source: str) -> Iterator[str]:
    if (lines := len(source.splitlines())) > MAX_FILE_LINES:
        yield f"{lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"line {node.lineno}: function {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"


def opening_violations(tree: ast.Module) -> Iterator[str]:
    if not tree.body:
        return  # an empty __init__.py answers nothing
    first = (ast.get_docstring(tree) or "").split("\n\n")[0]
    if not first.strip():
        yield "opens with no sentence saying which question it answers"
    elif first.rstrip()[-1] not in ".?:":
        yield f"its opening is no sentence: {first!r}"


def name_violations(path: PurePosixPath) -> Iterator[str]:
    for part in path.with_suffix("").parts:
        if BANNED_WORDS & set(part.lower().split("_")):
            yield f"{part!r} says nothing about what is inside"


def class_violations(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and (node.name.startswith("Base") or node.name.endswith("Manager")):
            yield f"line {node.lineno}: class {node.name} is named after a pattern, not after what it is"


def public_name_violations(tree: ast.AST, path: PurePosixPath) -> Iterator[str]:
    """Programs and notebooks use what `hf_mlspec` exports, as any user would; its rooms are not theirs to enter."""
    rooms = next((rooms for start, rooms in TIMES_ROOMS.items() if path.as_posix().startswith(start)), ())
    for line, name in imported_modules(tree, path):
        if name.startswith(rooms):
            continue
        parts = name.split(".")
        named = parts[1:] if parts[1:2] != ["evaluation"] else parts[2:]  # its names are public as those above are
        enters_room = len(named) > 1 or (len(named) == 1 and room(name) in PRIVATE_ROOMS)
        if parts[0] == PACKAGE and (enters_room or "._" in name):
            yield f"line {line}: {name} is no public name of {PACKAGE}"


def violations(path: PurePosixPath, source: str) -> list[str]:
    """Every rule that the file at `path` (relative to the project) breaks with this text."""
    tree = ast.parse(source)
    if path.parts[0] == START:
        return [*start_violations(tree, path), *size_violations(tree, source), *opening_violations(tree),
                *name_violations(path), *class_violations(tree)]
    if path.parts[0] != PACKAGE:
        return [*size_violations(tree, source), *opening_violations(tree), *name_violations(path),
                *public_name_violations(tree, path)]
    return [*import_violations(tree, path), *compiled_op_violations(tree, path), *size_violations(tree, source),
            *opening_violations(tree), *name_violations(path), *class_violations(tree)]


def project_sources() -> list[PurePosixPath]:
    found = [path for top in (PACKAGE, START, "eval") for path in sorted((ROOT / top).rglob("*.py"))]
    return [PurePosixPath(path.relative_to(ROOT).as_posix()) for path in found]


@pytest.mark.parametrize("path", project_sources(), ids=str)
def test_every_source_keeps_the_rules(path):
    assert violations(path, (ROOT / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.name)
def test_every_notebook_uses_public_names(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert list(public_name_violations(ast.parse(code), PurePosixPath("notebooks", path.name))) == []


def test_the_package_is_found():
    assert len(project_sources()) > 10


def test_no_two_test_files_have_one_name():
    """pytest imports them by their names alone, and stops at the second one."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


OPENING = '"""What is this?"""\n'
BREAKS_A_RULE = {
    "upward import": ("formats/x.py", OPENING + "from hf_mlspec.nn import linear\n", "stands above"),
    "upward relative import": ("formats/x.py", OPENING + "from ..speculation.draft import Draft\n", "stands above"),
    "upward import in a function": ("ops/x.py", OPENING + "def f():\n    from ..nn.linear import L\n", "stands above"),
    "public names from inside": ("integration/x.py", OPENING + "import hf_mlspec\n", "stands above"),
    "relative import of the package": ("nn/x.py", OPENING + "from .. import cli\n", "stands above"),
    "calibration from engines": ("engines/x.py", OPENING + "from ..calibration.fold import fold\n", "stands above"),
    "speculation beside": ("calibration/x.py", OPENING + "from ..speculation import draft\n", "stands above"),
    "routing beside": ("routing/x.py", OPENING + "from ..speculation import draft\n", "stands beside"),
    "routing from below": ("speculation/x.py", OPENING + "from ..routing.router import R\n", "stands above"),
    "calibration beside": ("speculation/x.py", OPENING + "from ..calibration import fold\n", "stands beside"),
    "unknown room": ("attic/x.py", OPENING, "not in the import rule"),
    "transformers in formats": ("formats/x.py", OPENING + "import transformers.utils\n", "only in integration/"),
    "transformers in the loop": ("speculation/loop.py", OPENING + "import transformers\n", "only in integration/"),
    "the start of the command line": ("evaluation/x.py", OPENING + "import mlspec_cli\n", "stands above"),
    "lm_eval": ("integration/x.py", OPENING + "import lm_eval\n", "lm_eval"),
    "compiled op outside ops": ("nn/x.py", OPENING + "y = torch.ops.mlspec.linear(x)\n", "torch.ops.mlspec"),
    "compiled op by getattr": ("nn/x.py", OPENING + "y = getattr(torch.ops, 'mlspec')\n", "torch.ops.mlspec"),
    "long file": ("nn/x.py", OPENING + "x = 1\n" * MAX_FILE_LINES, "351 lines"),
    "long function": ("nn/x.py", OPENING + "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES, "41 lines"),
    "no opening": ("nn/x.py", "x = 1\n", "no sentence"),
    "opening that is no sentence": ("nn/x.py", '"""linear layers"""\n', "no sentence"),
    "file name": ("nn/cache_utils.py", OPENING, "says nothing"),
    "folder name": ("nn/common/x.py", OPENING, "says nothing"),
    "class name": ("nn/x.py", OPENING + "class CacheManager: ...\n", "named after a pattern"),
}
KEEPS_THE_RULES = {
    "downward import": ("integration/x.py", OPENING + "import transformers\nfrom ..nn.linear import Mxfp4Linear\n"),
    "import within a room": ("speculation/drafters/x.py", OPENING + "from ..draft import Draft\nfrom .x import N\n"),
    "compiled op in ops": ("ops/x.py", OPENING + "y = torch.ops.mlspec.linear(x)\n"),
    "lm_eval in the harness": ("evaluation/harness_x.py", OPENING + "import lm_eval\nfrom .. import direct_cast\n"),
    "the command line": ("cli/x.py", OPENING + "import hf_mlspec\nfrom .tables import table\nfrom .. import ops\n"
                         "from mlspec_cli import main\n"),
    "public names": ("__init__.py", OPENING + "from .integration.generate import enable\n"),
    "largest file": ("nn/x.py", OPENING + "x = 1\n" * (MAX_FILE_LINES - 1)),
    "largest function": ("nn/x.py", OPENING + "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1)),
}


@pytest.mark.parametrize(("name", "source", "expected"), BREAKS_A_RULE.values(), ids=BREAKS_A_RULE)
def test_a_broken_rule_is_found(name, source, expected):
    found = violations(PurePosixPath(PACKAGE, name), source)
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(("name", "source"), KEEPS_THE_RULES.values(), ids=KEEPS_THE_RULES)
def test_a_kept_rule_is_not_reported(name, source):
    assert violations(PurePosixPath(PACKAGE, name), source) == []


@pytest.mark.parametrize(("statement", "expected"), [
    ("import torch", "before a command runs"), ("if x:\n    from rich import box", "before a command runs"),
    ("def f():\n    from hf_mlspec.nn.nest import nest", "only its cli"),
    ("def f():\n    import hf_mlspec", "only its cli")])
def test_a_heavy_import_of_the_start_is_found(statement, expected):
    (found,) = violations(PurePosixPath(START, "x.py"), OPENING + statement + "\n")
    assert expected in found


def test_the_start_imports_the_command_line_when_it_runs():
    source = "import argparse\nfrom .start import main\ndef f():\n    from hf_mlspec.cli import run\n    import rich\n"
    assert violations(PurePosixPath(START, "x.py"), OPENING + source) == []


@pytest.mark.parametrize("statement", ["from hf_mlspec.nn.linear import X", "from hf_mlspec import formats",
                                       "from hf_mlspec.evaluation.journal import Journal",
                                       "import hf_mlspec.cli", "from hf_mlspec import _hidden"])
def test_a_program_entering_a_room_is_found(statement):
    assert len(violations(PurePosixPath("eval", "x.py"), OPENING + statement + "\n")) == 1


def test_only_programs_that_time_a_room_enter_it():
    statement = OPENING + "from hf_mlspec.engines.choose import decoder_of\nfrom hf_mlspec import ops\n"
    assert violations(PurePosixPath("eval", "bench_gpu", "step.py"), statement) == []
    assert len(violations(PurePosixPath("eval", "bench_kernels", "contenders.py"), statement)) == 1
    assert len(violations(PurePosixPath("eval", "bench_decode", "run.py"), statement)) == 2
    entering = OPENING + "from hf_mlspec.speculation.loop import decode\n"
    assert len(violations(PurePosixPath("eval", "bench_gpu", "step.py"), entering)) == 1


def test_a_program_using_public_names_is_not_reported():
    source = OPENING + "import hf_mlspec\nimport transformers\nfrom hf_mlspec import direct_cast\n"
    source += "from hf_mlspec.evaluation import Journal\n"
    assert violations(PurePosixPath("eval", "x.py"), source) == []
