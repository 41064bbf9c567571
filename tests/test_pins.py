"""Does pip install the archives that .ci/pins.py names, and no others? Two small ones, without an index."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_SPEC = importlib.util.spec_from_file_location("pins", ROOT / ".ci" / "pins.py")
pins = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(pins)


def wheel(folder: Path, name: str, needs: str = "") -> Path:
    """A package with one line of Python."""
    path, about = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "WORD = 5\n")
        said = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n" + (f"Requires-Dist: {needs}\n" if needs else "")
        archive.writestr(f"{about}/METADATA", said)
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", f"{name}.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n")
    return path


def pip(folder: Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "install", "--no-index",
               "--find-links", str(folder), "--target", str(folder / "into")]  # fmt: skip
    return subprocess.run([*command, *words], capture_output=True, text=True, timeout=120)


def test_what_a_report_names_is_installed_and_an_archive_with_another_byte_is_not(tmp_path, capsys):
    wheel(tmp_path, "first_of_two", needs="second_of_two")
    second = wheel(tmp_path, "second_of_two")
    report, listed = tmp_path / "report.json", tmp_path / "pins.txt"
    done = pip(tmp_path, "--dry-run", "--ignore-installed", "--report", str(report), "first_of_two")
    assert done.returncode == 0, done.stderr
    assert pins.main([str(report)]) == 0
    listed.write_text(capsys.readouterr().out)
    assert [line.partition(" ")[0] for line in listed.read_text().splitlines()] == [
        "first_of_two==1.0", "second_of_two==1.0"]  # fmt: skip
    done = pip(tmp_path, "--require-hashes", "--no-deps", "-r", str(listed))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "into" / "second_of_two.py").exists()
    second.write_bytes(second.read_bytes() + b"\0")
    done = pip(tmp_path, "--require-hashes", "--no-deps", "--upgrade", "-r", str(listed))
    assert done.returncode != 0
    assert "second_of_two" in done.stderr.replace("second-of-two", "second_of_two")
    assert "hash" in done.stderr.lower()


def installed(**where) -> dict:
    about = {"name": "one", "version": "2"}
    return {"install": [{"metadata": about, "download_info": {"url": "file:///one", **where}}]}


def test_folders_are_left_out():
    assert pins.pins(installed(dir_info={"editable": True})) == []


@pytest.mark.parametrize(("report", "message"), [
    (installed(vcs_info={"vcs": "git"}), "one 2 has no SHA-256: it comes from file:///one"),
    (installed(archive_info={}), "one 2 has no SHA-256"), ({}, "it is no report of pip: KeyError"),
    ({"install": [5]}, "it is no report of pip: TypeError"), ([], "it is no report of pip: TypeError"),
])  # fmt: skip
def test_what_cannot_be_held_by_a_hash_is_said(tmp_path, report, message, capsys):
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert pins.main([str(tmp_path / "report.json")]) == 1
    assert message in capsys.readouterr().err


def test_a_report_that_is_not_there_is_said(tmp_path, capsys):
    assert pins.main([str(tmp_path / "none.json")]) == 1
    assert "No such file" in capsys.readouterr().err
