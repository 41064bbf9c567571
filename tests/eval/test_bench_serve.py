"""Does the benchmark of servers ask each contender the same, and count what is wrong or lost?"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal

import pytest
from programs import program

for needed in ("fastapi", "uvicorn", "openai", "prometheus_client", "psutil"):
    pytest.importorskip(needed)


@pytest.fixture
def bench(from_the_root):
    return program("bench_serve")


def test_the_stream_and_the_server_write_the_same(bench, tmp_path):
    out, core = tmp_path / "out.jsonl", str(min(os.sched_getaffinity(0)))
    assert bench.main(["--quick", "--clients", "2", "--only", "stream", "--only", "mlspec serve",
                       "--http-cpus", core, "--json", str(out)]) == 0  # fmt: skip
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["contender"] for row in rows] == ["stream", "mlspec serve"]
    assert [row["texts_alike"] for row in rows] == [6, 6]
    assert all(0 < row["first_p50_ms"] <= row["first_p99_ms"] and row["tokens_per_s"] > 0 for row in rows)
    assert rows[0]["tokens"] == rows[1]["tokens"]


def test_a_soak_counts_wrong_answers(bench, monkeypatch, tmp_path):
    out, right = tmp_path / "out.jsonl", bench.answers_alone
    monkeypatch.setattr(bench, "answers_alone", lambda *given: ["other", *right(*given)[1:]])
    assert bench.main(["--quick", "--requests", "2", "--clients", "2", "--soak", "3", "--json", str(out)]) == 1
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert row["asked"] == row["answered"] > row["wrong"] > 0
    assert (row["failed"], row["memory_mib"] > 0) == (0, True)


def test_limits_the_wrong_way_round(bench, capsys):
    with pytest.raises(SystemExit):
        bench.parse(["--shortest", "9", "--longest", "3"])
    assert "1 <= shortest <= longest" in capsys.readouterr().err


def test_memory_counts_while_all_clients_ask():
    from eval.bench_serve.soak import Soaked

    held = [(0.0, 50), (3.0, 100), (5.0, 102), (7.0, 100), (9.5, 60)]
    found = Soaked(seconds=10.0, until=9.0, waits=[0.1], memory=[(at, mib << 20) for at, mib in held]).figures()
    assert (found["memory_mib"], found["memory_moves"]) == (100, 0.02)
    short = Soaked(seconds=10.0, until=1.0, waits=[0.1], memory=[(0.0, 1 << 20)]).figures()
    assert (short["memory_mib"], short["memory_moves"]) == (1, 0)


def test_a_stream_is_no_server_to_soak(bench, capsys):
    with pytest.raises(SystemExit):
        bench.parse(["--soak", "3", "--only", "stream"])
    assert "--soak asks servers, and 'stream' is none" in capsys.readouterr().err


def test_sigterm_ends_a_soak_with_what_came_so_far(bench, monkeypatch):
    from eval.bench_serve import soak

    count = itertools.count(1)

    async def answered(port, model, prompt, limit, seen, number):
        await asyncio.sleep(0.01)
        seen.texts[0], seen.tokens[0] = "right", limit
        if next(count) == 9:  # not by a clock: in front of the handler it would end the tests
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(soak, "one_answer", answered)
    found = soak.soak(os.getpid(), 0, "", [("a", 3)], ["right"], 2, 60.0)
    assert found.seconds < 30
    assert found.asked == found.answered >= 9
    assert (found.wrong, found.failed) == (0, [])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
