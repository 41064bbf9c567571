"""Does every block of code in the README and in the guide run as it stands there, and does every link lead somewhere?

A ```python or ```bash block runs unless a comment right above it says why not: `<!-- not run: reason -->`, or
`<!-- run where the kernels are built -->` on a machine without them. Python blocks of a page are one program, in their
order; the pages share a process, because importing takes longer than most of them. Bash blocks of a page are one
script, in a folder that holds nothing but `eval`, as the checkout does.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

ROOT = Path(__file__).resolve().parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"
GUIDE = sorted((DOCS / "guide").glob("*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), *sorted((ROOT / "notebooks").glob("*.md")),
             ROOT / "kernels_ext" / "README.md", ROOT / "eval" / "README.md",
             *sorted((ROOT / "hf_mlspec").rglob("*.md"))]
MOST_README_LINES, MOST_OWN_WORDS, MOST_PICTURE_BYTES = 150, 20, 100_000
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


def environment_in(tmp_path: Path) -> dict[str, str]:
    """The environment of a reader: `mlspec` and `python` are this interpreter's, wherever the package lies."""
    for name, arguments in (("mlspec", "-m mlspec_cli"), ("python", "")):
        script = tmp_path / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    (tmp_path / "eval").symlink_to(ROOT / "eval")
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    packages = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
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


ALL_PAGES = """
import contextlib, io, json, os, sys, traceback
written = {}
for name, (path, program) in json.load(open("pages.json")).items():
    os.mkdir(name)
    os.chdir(name)
    said, failure = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(said):
            exec(compile(program, path, "exec"), {"__name__": "__main__"})
    except BaseException:
        failure = traceback.format_exc()
    os.chdir("..")
    written[name] = [said.getvalue(), failure]
json.dump(written, open("written.json", "w"))
"""


def named(page: Path) -> str:
    """readme, guide/levels: what a page is called here."""
    return page.relative_to(DOCS).with_suffix("").as_posix() if DOCS in page.parents else page.stem


PYTHON_PAGES = [page for page in (README, *GUIDE) if runnable("python", page)]
BASH_PAGES = [page for page in (README, *GUIDE) if runnable("bash", page)]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What the programs of all pages print, and the traceback of one that fails, by page."""
    folder = tmp_path_factory.mktemp("pages")
    programs = {named(page).replace("/", "-"): (str(page), program_of(page)) for page in PYTHON_PAGES}
    (folder / "pages.json").write_text(json.dumps(programs), encoding="utf-8")
    (folder / "all_pages.py").write_text(ALL_PAGES, encoding="utf-8")
    run([sys.executable, "all_pages.py"], folder, environment_in(folder))
    return json.loads((folder / "written.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=named)
def test_python_blocks_of_a_page_run(written, page):
    _, failure = written[named(page).replace("/", "-")]
    assert failure == ""


def test_the_readme_prints_what_its_text_says(written):
    said, _ = written["README"]
    assert "def mean(values):" in said
    assert re.search(r"mxfp4: \d+ of \d+ tokens accepted", said)
    assert re.search(r"\d\.\d\d tokens per pass of the target", written["guide-levels"][0])


@pytest.mark.slow
@pytest.mark.parametrize("page", BASH_PAGES, ids=named)
def test_bash_blocks_of_a_page_run(tmp_path, page):
    script = "\n".join(block.code for block in runnable("bash", page))
    assert run(["bash", "-euo", "pipefail", "-c", script], tmp_path, environment_in(tmp_path))


def without_code(text: str) -> str:
    """The text with its code blocks and code spans left out: what stands there is no link and no heading."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(text: str) -> set[str]:
    """What `#...` can name in a Markdown page: its headings, in lower case, with hyphens for spaces."""
    found: dict[str, int] = {}
    names = set()
    for line in re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE).splitlines():
        if heading := re.fullmatch(r"#{1,6} (.+)", line):
            plain = re.sub(r"[^\w\- ]", "", heading[1].strip().lower()).replace(" ", "-")
            again = found.get(plain, 0)
            found[plain] = again + 1
            names.add(f"{plain}-{again}" if again else plain)
    return names


def dead_links(page: Path, text: str) -> list[str]:
    """Relative links of a page whose file or heading does not exist."""
    dead = []
    for link in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", without_code(text)):
        path, _, anchor = link.partition("#")
        there = (page.parent / path) if path else page
        if not there.exists() or (anchor and anchor not in anchors(there.read_text(encoding="utf-8"))):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", DOCUMENTS, ids=named)
def test_links_lead_somewhere(page):
    assert dead_links(page, page.read_text(encoding="utf-8")) == []


def test_a_dead_link_is_found():
    text = "[a](CHANGELOG.md#changelog) [b](missing.md) [c](#here) [d](#levels) [e](https://x.y/z) `[f](g.md)`\n"
    assert dead_links(README, text) == ["missing.md", "#here"]
    assert anchors("# A `b`: c, d\n## A b c d\n```\n# no\n```\n") == {"a-b-c-d", "a-b-c-d-1"}


def missing(text: str) -> list[str]:
    """Programs, plans and pages that a text names and that do not exist."""
    programs = set(re.findall(r"python -m (eval(?:\.[a-z_]\w*)+)", text))  # NAME stands for any
    kinds = r"(?<![\w/.])((?:docs|eval/configs|eval/traces|tests)/[\w/.-]+\.(?:md|toml|json|py|csv))"
    files = set(re.findall(kinds, text))
    gone = [name for name in programs if importlib.util.find_spec(name) is None]
    return sorted(gone + [name for name in files if not (ROOT / name).exists()])


@pytest.mark.usefixtures("from_the_root")
@pytest.mark.parametrize("page", DOCUMENTS, ids=named)
def test_commands_and_files_that_are_named_exist(page):
    assert missing(page.read_text(encoding="utf-8")) == []


@pytest.mark.usefixtures("from_the_root")
def test_a_missing_program_is_found():
    text = "python -m eval.report and python -m eval.nothing, eval/configs/lossless.toml, docs/no.md"
    assert missing(text) == ["docs/no.md", "eval.nothing"]


def first_table(text: str) -> list[list[str]]:
    """The cells of a text's first table, its heading first."""
    lines = text.splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[begin:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [rows[0], *rows[2:]]


@pytest.mark.parametrize("page", [README, DOCS / "benchmarks.md"], ids=named)
def test_every_figure_of_the_first_table_has_a_command(page):
    heading, *rows = first_table(page.read_text(encoding="utf-8"))
    assert heading[-1] == "command"
    assert len(rows) >= 2
    assert [row for row in rows if not re.search(r"`python -m eval\.\w+", row[-1]) or len(row) != len(heading)] == []


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_README_LINES


def test_the_picture_shows_figures_of_the_benchmarks():
    figures = json.loads((DOCS / "figures" / "one_prompt.json").read_text(encoding="utf-8"))
    page = figures["source"].split(",")[0]
    lines = (ROOT / page).read_text(encoding="utf-8").replace("**", "").splitlines()
    for system in figures["systems"]:
        row = r"\|.*".join(rf"\| {speed} " for speed in system["tokens_per_second"])
        assert [line for line in lines if re.search(row, line)], system
    assert (DOCS / "figures" / "one_prompt.png").stat().st_size < MOST_PICTURE_BYTES


@pytest.mark.usefixtures("from_the_root")
def test_the_picture_has_a_bar_for_every_figure():
    pytest.importorskip("matplotlib")
    headline = importlib.import_module("eval.headline.__main__")
    figures = json.loads((DOCS / "figures" / "one_prompt.json").read_text(encoding="utf-8"))
    panels = headline.draw(figures).axes
    assert [one.get_title(loc="left") for one in panels] == figures["data"]
    drawn = [[bar.get_width() for bar in one.patches] for one in panels]
    speeds = [one["tokens_per_second"] for one in figures["systems"]]
    assert drawn == [list(column) for column in zip(*speeds, strict=True)]


def test_words_of_our_own_are_few():
    _, *rows = first_table((DOCS / "guide" / "glossary.md").read_text(encoding="utf-8"))
    assert len(rows) <= MOST_OWN_WORDS


def test_the_index_of_the_guide_names_every_page():
    index = (DOCS / "guide" / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in GUIDE if page.name != "README.md" and f"({page.name})" not in index] == []


def test_blocks_are_found_and_only_a_reason_skips_one():
    text = ("a\n```python\nx = 1\n```\n\n<!-- not run: it takes hours -->\n```bash\nsleep 9\n```\n<!-- not run: -->\n"
            "```bash\ntrue\n```\n```\nplain\n```\n")
    found = [(block.code, block.line, block.skipped) for block in blocks(text, "python", "bash")]
    assert found == [("x = 1", 3, None), ("sleep 9", 8, "it takes hours"), ("true", 12, None)]


def test_there_are_blocks_of_both_kinds():
    assert README in PYTHON_PAGES
    assert len(PYTHON_PAGES) >= 6
    assert len(BASH_PAGES) >= 3
