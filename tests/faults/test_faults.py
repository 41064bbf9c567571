"""Is a file whole, or as it was, whichever write, flush or rename fails, and whenever the process is killed?"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch

pytest.importorskip("gguf", reason="seeds of the readers are written with it")

from hf_mlspec.checkpoints.whole_file import written_whole
from hf_mlspec.evaluation.journal import Journal
from hf_mlspec.evaluation.line_file import LineFile
from tests.faults.shim import WORDS, Faults, failing
from tests.faults.writers import FIRST, WRITERS

MOST_OPERATIONS = 60
every_writer = pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)


def files(folder) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*")}


def error_of(writer, folder, faults) -> Exception | None:
    """What the write of a new version raises; None where it goes through."""
    with failing(faults):
        try:
            writer.write(folder, FIRST + 1)
        except (OSError, ValueError) as error:
            return error
    return None


@every_writer
@pytest.mark.parametrize(("torn", "full"), [(False, False), (True, False), (True, True)],
                         ids=["fails", "tears", "the disk is full from there on"])
@pytest.mark.parametrize("before", [True, False], ids=["over another", "new"])
def test_every_operation_fails_once(writer, torn, full, before, tmp_path):
    """What is there afterwards is whole: the version before, or, where all but the last flush was done, the new one.
    The error is the fault's own, or one that says it; nothing else is left, and the next write does all."""
    at, operations = 1, 0
    while at < MOST_OPERATIONS:
        folder = tmp_path / str(at)
        folder.mkdir()
        if before:
            writer.write(folder, FIRST)
        left = files(folder)
        faults = Faults(folder, at, torn, full)
        error = error_of(writer, folder, faults)
        if error is None:
            assert not faults.failed, f"operation {at} failed unseen: {faults.said}"
            operations = faults.count
            break
        assert WORDS in f"{error} {error.__cause__}", faults.said
        assert writer.read(folder) in (*((FIRST,) if before else (None,)), FIRST + 1), faults.said
        odd = {name for name in files(folder) - left if not name.startswith(("model", "work", "out", "journal"))}
        assert odd <= {"trace.json", "profile.json", "table", "R.bin", "router.safetensors", "certificate.json"}
        writer.write(folder, FIRST + 1)
        assert writer.read(folder) == FIRST + 1
        assert not [name for name in files(folder) if ".tmp" in name or ".saving-" in name or "/." in name]
        at += 1
    assert operations >= 2  # or the shim sees nothing


@pytest.mark.parametrize("left", ["calibration.json.0123456789abcdef", "another file"])
def test_a_calibration_that_was_killed_at_its_beginning_begins_again(left, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / left).write_text("{")
    if left == "another file":
        with pytest.raises(ValueError, match="holds something else"):
            WRITERS["finished blocks"].write(tmp_path, FIRST)
    else:
        WRITERS["finished blocks"].write(tmp_path, FIRST)
        assert WRITERS["finished blocks"].read(tmp_path) == FIRST


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664, None], ids=str)
def test_a_file_keeps_its_permissions(mode, tmp_path):
    """A new one has those of any new file."""
    path, usual = tmp_path / "file", tmp_path / "usual"
    usual.touch()
    if mode is not None:
        path.touch()
        path.chmod(mode)
    with written_whole(path) as beside:
        beside.write_text("new")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", mode or usual.stat().st_mode & 0o777)
    assert files(tmp_path) == {"file", "usual"}


def test_a_journal_goes_on_behind_a_line_that_failed(tmp_path):
    """In the same process: half of the line, or all of it later, would damage what follows."""
    for at in range(1, 6):
        for torn in (False, True):
            path = tmp_path / f"{at}{torn}"
            with Journal(path, {"a": 1}) as journal:
                journal.add("first", 1)
                with failing(Faults(tmp_path, at, torn)):
                    try:
                        journal.add("second", 2)
                        done = True
                    except OSError:
                        done = False
                assert ("second" in journal) == done
                journal.add("third", 3)
                if not done:
                    journal.add("second", 2)
            with Journal(path, {"a": 1}) as journal:
                assert set(journal.items) == {"first", "second", "third"}


def test_nothing_follows_half_a_line_that_could_not_be_taken_back(tmp_path, monkeypatch):
    lines = LineFile(tmp_path / "lines")

    def fail(*_):
        raise OSError("no flush")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        lines._out.close()
        lines._out = Stuck(open(tmp_path / "lines", "a+b", buffering=0))  # noqa: SIM115
        with pytest.raises(OSError, match="stuck"):
            lines.append({"a": 1})
    with pytest.raises(OSError, match="half a line ends this file"):
        lines.append({"b": 2})
    lines.close()


class Stuck:
    """A file that can be written and not cut."""

    def __init__(self, file):
        self._file = file

    def __getattr__(self, name):
        return getattr(self._file, name)

    def truncate(self, length):
        raise OSError("stuck")


@pytest.mark.slow
@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_killed_at_any_time(writer, tmp_path):
    """A child writes one version after the other and is killed; what it left is whole, and at least as new as what it
    told of."""
    torch.set_num_threads(1)
    chance = random.Random(4)
    version = FIRST
    for _ in range(20):
        told, tell = os.pipe()
        child = os.fork()
        if not child:
            _write_on(writer, tmp_path, version, tell)
        os.close(tell)
        os.read(told, 1)  # the first one is written
        time.sleep(chance.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        written = version + sum(len(part) for part in iter(lambda told=told: os.read(told, 4096), b""))
        os.close(told)
        found = writer.read(tmp_path)
        assert found is not None
        assert written <= found <= written + 1
        version = found + 1 if found < 200 else FIRST
        if version == FIRST and writer.grows:
            return


def _write_on(writer, folder, version: int, tell: int) -> None:
    try:
        while True:
            writer.write(folder, version)
            os.write(tell, b".")
            version += 1
    finally:
        os._exit(1)
