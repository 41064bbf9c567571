"""Is every line answered once, in order, whatever happens to workers, to the disk and to the process?"""

from __future__ import annotations

import asyncio
import json
import random
import resource
from pathlib import Path

import pytest

from hf_mlspec.batch.folder import OutputFolder
from hf_mlspec.batch.job import Job
from hf_mlspec.batch.source import Source
from hf_mlspec.batch.worker import WorkerLost

IDENTITY = {"weights": "w", "versions": {"torch": "2"}}


class Echo:
    """A worker that says what it was asked, and is lost when its `luck` says so."""

    def __init__(self, luck=lambda lines: False, identity=IDENTITY) -> None:
        self.luck, self.identity, self.life, self.loads, self.closed = luck, identity, 0, 0, False
        self.answered: list[int] = []

    async def load(self):
        self.loads += 1
        await asyncio.sleep(0)
        return self.identity

    async def answer(self, lines):
        life = self.life
        await asyncio.sleep(0)
        if self.luck(lines) or life != self.life:
            raise WorkerLost("killed")
        self.answered += [number for number, _ in lines]
        return [{"line": number, "response": {"body": {"usage": {"completion_tokens": 2}, "text": text.decode()}},
                 "error": None} for number, text in lines], ["extra"]  # fmt: skip

    def replace(self) -> None:
        self.life += 1

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def source(tmp_path) -> Source:
    file = tmp_path / "in.jsonl"
    file.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(47)))
    return Source(str(file))


def run(source: Source, place: Path, workers: list[Echo], told=lambda lines: None, size: int = 5):
    async def work(folder):
        return await Job(source.pieces(size), folder, workers, told).run()

    with OutputFolder(str(place), {"input": source.sha256}) as folder:
        return asyncio.run(work(folder))


def lines(place: Path) -> list[int]:
    return [json.loads(line)["line"] for file in sorted(place.glob("part-*.jsonl")) for line in file.open()]


def contents(place: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in place.glob("part-*")}


def test_workers_lost_at_random_lose_and_repeat_nothing(source, tmp_path):
    serial = run(source, tmp_path / "serial", [Echo()])
    assert (serial.lines, serial.failed, serial.lost, serial.new_tokens, serial.unread) == (47, 0, 0, 94, {"extra"})
    for seed in range(20):
        chance, left = random.Random(seed), [10]

        def luck(asked, chance=chance, left=left):
            dies = left[0] > 0 and chance.random() < 0.8
            left[0] -= dies
            return dies

        gained, workers = [], [Echo(luck) for _ in range(3)]
        summary = run(source, tmp_path / f"killed{seed}", workers, gained.append)
        assert left == [0]
        assert summary.lost > 2
        assert lines(tmp_path / f"killed{seed}") == list(range(1, 48))
        assert contents(tmp_path / f"killed{seed}") == contents(tmp_path / "serial")
        assert sum(gained) == summary.lines == 47
        assert all(worker.loads <= worker.life + 1 and worker.closed for worker in workers)


def test_a_worker_that_is_not_replaced_leaves_its_lines_to_others(source, tmp_path):
    class Gone(Echo):
        async def load(self):
            if self.life:
                await asyncio.Event().wait()  # no machine has room for it
            return await super().load()

    gone, other = Gone(lambda asked: True), Echo()
    summary = run(source, tmp_path / "out", [gone, other])
    assert lines(tmp_path / "out") == list(range(1, 48))
    assert (summary.lost, gone.answered) == (1, [])


def test_lines_that_end_every_worker_end_the_job_with_their_numbers(source, tmp_path):
    with pytest.raises(ValueError, match=r"1[12] workers were lost with lines 11 to 15 of the input, the last said"):
        run(source, tmp_path / "out", [Echo(lambda asked: asked[0][0] == 11) for _ in range(2)])
    assert run(source, tmp_path / "out", [Echo()]).before > 0


def test_a_run_goes_on_where_another_one_ended(source, tmp_path):
    class Full(Exception):
        pass

    def break_off(asked):
        if asked[0][0] >= 21:
            raise Full
        return False

    with pytest.raises(Full):
        run(source, tmp_path / "out", [Echo(break_off)])
    done = contents(tmp_path / "out")
    assert 3 <= len(done) <= 4
    (tmp_path / "out" / "part-00007.jsonl.0123456789abcdef").write_text("half a")  # of a process that was killed
    packed = tmp_path / "out" / "part-00000.jsonl.gz"  # of whoever reads the answers
    packed.write_text("packed")
    second = Echo()
    summary = run(source, tmp_path / "out", [second])
    assert summary.before == 5 * len(done)
    assert second.answered == list(range(summary.before + 1, 48))
    assert lines(tmp_path / "out") == list(range(1, 48))
    assert list((tmp_path / "out").glob("*.jsonl.*")) == [packed]
    again = run(source, tmp_path / "out", [third := Echo()])
    assert (again.before, again.lines, again.new_tokens, third.loads) == (47, 47, 94, 0)
    (tmp_path / "out" / "part-00002.jsonl").unlink()
    assert run(source, tmp_path / "out", [fourth := Echo()]).before == 42
    assert fourth.answered == [11, 12, 13, 14, 15]


def test_workers_that_differ_are_refused(source, tmp_path):
    with pytest.raises(ValueError, match=r'versions\.torch: "2" -> "3"'):
        run(source, tmp_path / "out", [Echo(), Echo(identity={**IDENTITY, "versions": {"torch": "3"}})])
    with pytest.raises(ValueError, match='weights: "w" -> "v"'):
        run(source, tmp_path / "out", [Echo(identity={**IDENTITY, "weights": "v"})])


def test_a_folder_belongs_to_one_job_and_to_one_process(tmp_path):
    with (OutputFolder(str(tmp_path / "out"), {"dtype": "float32"}),
          pytest.raises(ValueError, match="another process: wait for it, or name another OUTPUT")):
        OutputFolder(str(tmp_path / "out"), {"dtype": "float32"})
    with pytest.raises(ValueError, match='"float32" -> "bfloat16"'):
        OutputFolder(str(tmp_path / "out"), {"dtype": "bfloat16"})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("kept")
    with pytest.raises(ValueError, match="holds other files"):
        OutputFolder(str(tmp_path / "mine"), {})
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_full_disk_is_one_error_and_leaves_what_is_finished(source, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(asked):
        if asked[0][0] >= 11:  # from here on no file may grow past some bytes
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
        return False

    try:
        with pytest.raises(ValueError, match=r"part-0000\d.jsonl cannot be written: .*; make room, and give the same"):
            run(source, tmp_path / "out", [Echo(fill)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "out").glob("*.jsonl.*"))
    assert lines(tmp_path / "out") in ([*range(1, 6)], [*range(1, 11)])
    run(source, tmp_path / "out", [Echo()])
    assert lines(tmp_path / "out") == list(range(1, 48))
