"""Does every notebook run from its first cell to its last, and is it committed as a reader should see it?

notebooks/quickstart.ipynb is a text to try out and has no outputs; the numbered ones are stories, and a story without
its pictures is none: they are committed as they ran.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
STORIES = [path for path in NOTEBOOKS if path.name[0].isdigit()]
MAX_SECONDS, MAX_BYTES = 240, 400_000  # two minutes each on two cores of its own, twice that beside other tests
# An absolute path of a system or of a home folder; "/" alone is a division or part of a name.
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])(/(home|root|tmp|usr|opt|var|work|mnt|Users|private)/|[A-Z]:\\\\)")
named = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
stories = pytest.mark.parametrize("path", STORIES, ids=lambda path: path.name)


def violations(notebook: nbformat.NotebookNode) -> Iterator[str]:
    """What a reader of a committed story should not meet."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        yield "its cells did not run once each, from first to last"
    outputs = [output for cell in code for output in cell.outputs]
    if not any("image/png" in output.get("data", {}) for output in outputs):
        yield "no picture"
    for output in outputs:
        if output.output_type == "error":
            yield f"an error: {output.ename}"
        if output.get("name") == "stderr":
            yield f"noise on stderr: {output.text[:60]!r}"
        told = {kind: text for kind, text in output.get("data", {}).items() if kind != "image/png"}
        found = ABSOLUTE_PATH.search(json.dumps([told, output.get("text", "")]))
        if found:
            yield f"the path {found.string[found.start() : found.start() + 60]!r}"


def test_there_are_notebooks():
    assert len(STORIES) == 11
    assert len(NOTEBOOKS) > len(STORIES)


@pytest.mark.slow
@named
def test_notebook_runs(path, monkeypatch, tmp_path):
    if path in STORIES[1:] and not has_compiled_decoder():
        pytest.skip("without the compiled kernels the chains of this notebook take many minutes")
    if path.name.startswith("04"):
        pytest.importorskip("lm_eval", reason="notebook 04 needs the extra `eval`")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = [cell for cell in code if cell.outputs]
    place = {"metadata": {"path": str(tmp_path)}}
    began = time.monotonic()
    NotebookClient(notebook, timeout=300, kernel_name=notebook.metadata.kernelspec.name, resources=place).execute()
    seconds = time.monotonic() - began
    assert all(cell.execution_count for cell in code)
    assert all(cell.outputs for cell in shown)
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
    assert seconds < MAX_SECONDS


@stories
def test_a_story_is_committed_as_it_ran(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert list(violations(notebook)) == []
    assert path.stat().st_size < MAX_BYTES


def test_the_quickstart_is_committed_without_outputs():
    for cell in nbformat.read(ROOT / "notebooks" / "quickstart.ipynb", as_version=4).cells:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None


BREAKS_A_RULE = {
    "error": (dict(output_type="error", ename="ValueError", evalue="", traceback=[]), "an error: ValueError"),
    "stderr": (dict(output_type="stream", name="stderr", text="Loading weights"), "noise on stderr"),
    "path": (dict(output_type="stream", name="stdout", text="saved to /home/someone/x"), "the path '/home/someone/x"),
}


@pytest.mark.parametrize(("output", "message"), BREAKS_A_RULE.values(), ids=BREAKS_A_RULE)
def test_what_a_reader_should_not_meet_is_found(output, message):
    notebook = nbformat.read(STORIES[0], as_version=4)
    cell = next(cell for cell in notebook.cells if cell.cell_type == "code")
    cell.outputs.append(nbformat.from_dict(output))
    (found,) = violations(notebook)
    assert message in found


def test_cells_that_ran_twice_or_show_nothing_are_found():
    notebook = nbformat.read(STORIES[0], as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.execution_count, cell.outputs = 7, []
    assert list(violations(notebook)) == ["its cells did not run once each, from first to last", "no picture"]
