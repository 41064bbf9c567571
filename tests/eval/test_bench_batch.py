"""Are lines a second those of the longer file alone, and is what cannot be said in one line?"""

from __future__ import annotations

import pytest

from eval.bench_batch.__main__ import main, measured, parse, rate


def test_starting_is_not_counted():
    def run(args, workers, lines):
        return 30.0 + lines / (4 * workers)

    told = []
    measured(parse(["--workers", "1,2", "--lines", "10,50", "--repeats", "2"]), run, told.append)
    assert [line["lines_per_second"] for line in told[:-1]] == [4.0, 8.0, 4.0, 8.0]
    assert told[-1] == {"kind": "ratio", "1": 1.0, "2": 2.0}


def test_what_cannot_be_is_one_error(capsys, tmp_path):
    with pytest.raises(ValueError, match=r"50 lines took 1\.0 s and 10 lines 2\.0 s"):
        rate((10, 2.0), (50, 1.0))
    with pytest.raises(SystemExit):
        main(["--lines", "5,5"])
    assert "the smaller one first" in capsys.readouterr().err
