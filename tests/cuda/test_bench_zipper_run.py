"""On a GPU: does eval.bench_zipper time every part of small shapes?"""

from __future__ import annotations

import json

from eval.bench_zipper.__main__ import PARTS, main


def test_every_part_is_timed(tmp_path):
    out = tmp_path / "found.json"
    assert main(["--quick", "--tokens", "12", "--batch", "1", "2", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert {line["part"] for line in found} == set(PARTS)
    for line in found:
        assert all(value > 0 for key, value in line.items() if key.endswith(("_us", "_s", "times_smaller")))
    assert all(line.get("differing", 0) == 0 for line in found)
