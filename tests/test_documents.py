"""Does every block of code in the README and in the guide run as it stands there?

A ```python or ```bash block runs unless a comment right above it says why not: `<!-- not run: reason -->`, or
`<!-- run where the kernels are built -->` on a machine without them. Python blocks of a page share one interpreter, in
their order; a bash block runs in a folder that holds nothing but `eval`, as the checkout does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

README = Path(__file__).resolve().parents[1] / "README.md"
GUIDE = sorted((README.parent / "docs" / "guide").glob("*.md"))
FENCE = re.compile(r"(?P<above>[^\n]*)\n```(?P<language>\w*)\n(?P<code>.*?)\n```\n", re.DOTALL)


@dataclass
class Block:
    """code starts on this line of its page; skipped is the reason why it is not run."""

    language: str
    code: str
    line: int
    skipped: str | None


def blocks(text: str, *languages: str) -> list[Block]:
    """Code blocks of these languages, in their order."""
    found = []
    for match in FENCE.finditer(text):
        if match["language"] in languages:
            above = match["above"].strip()
            reason = re.fullmatch(r"<!-- not run: (.+) -->", above)
            skipped = reason and reason[1]
            if above == "<!-- run where the kernels are built -->" and not has_compiled_decoder():
                skipped = "the compiled kernels are not built"
            line = text[: match.start("code")].count("\n") + 1
            found.append(Block(match["language"], match["code"], line, skipped))
    return found


def runnable(language: str, page: Path = README) -> list[Block]:
    return [block for block in blocks(page.read_text(encoding="utf-8"), language) if block.skipped is None]


@pytest.fixture
def environment(tmp_path):
    """The environment of a reader: `mlspec` and `python` are this interpreter's, wherever the package lies."""
    for name, arguments in (("mlspec", "-m hf_mlspec"), ("python", "")):
        script = tmp_path / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    (tmp_path / "eval").symlink_to(README.parent / "eval")
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    packages = os.pathsep.join([str(README.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PATH": path, "PYTHONPATH": packages, "OMP_NUM_THREADS": "1"}


def run(command: list[str], tmp_path: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def program_of(page: Path) -> str:
    """The Python blocks of a page as one program, whose lines are the page's: a traceback names them."""
    lines = [""] * len(page.read_text(encoding="utf-8").splitlines())
    for block in runnable("python", page):
        code = block.code.splitlines()
        lines[block.line - 1 : block.line - 1 + len(code)] = code
    return "\n".join(lines)


def test_python_blocks_run(tmp_path, environment):
    program = tmp_path / "readme.py"
    program.write_text(program_of(README), encoding="utf-8")
    written = run([sys.executable, str(program)], tmp_path, environment)
    assert "def mean(values):" in written
    assert re.search(r"mxfp4: \d+ of \d+ tokens accepted", written)
    assert re.search(r"\d\.\d\d tokens per pass of the target", written)


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.stem)
def test_python_blocks_of_the_guide_run(tmp_path, environment, page):
    program = tmp_path / f"{page.stem}.py"
    program.write_text(program_of(page), encoding="utf-8")
    run([sys.executable, str(program)], tmp_path, environment)


@pytest.mark.parametrize("block", runnable("bash"), ids=lambda block: f"line {block.line}")
def test_bash_block_runs(tmp_path, environment, block):
    assert run(["bash", "-euo", "pipefail", "-c", block.code], tmp_path, environment)


@pytest.mark.parametrize("page", [README, *GUIDE], ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8"))
    assert links or page != README
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_blocks_are_found_and_only_a_reason_skips_one():
    text = ("a\n```python\nx = 1\n```\n\n<!-- not run: it takes hours -->\n```bash\nsleep 9\n```\n<!-- not run: -->\n"
            "```bash\ntrue\n```\n```\nplain\n```\n")
    found = [(block.code, block.line, block.skipped) for block in blocks(text, "python", "bash")]
    assert found == [("x = 1", 3, None), ("sleep 9", 8, "it takes hours"), ("true", 12, None)]


def test_the_readme_has_blocks_of_both_kinds():
    assert len(runnable("python")) >= 3
    assert len(runnable("bash")) >= 2
