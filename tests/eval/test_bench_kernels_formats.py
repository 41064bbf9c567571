"""Does the kernel benchmark time nested weights and bit-planes beside our other formats, compared round by round?"""

from __future__ import annotations

import json

import pytest
import torch
from programs import program

pytestmark = pytest.mark.usefixtures("from_the_root")


@pytest.mark.parametrize(("op", "ours", "peers"), [
    ("nested_linear", ["nested draft x int8", "nested draft x bf16", "nested exact"],
     ["mxfp4 x int8", "mxfp4 x bf16", "bf16"]),
    ("bitplane_linear", [f"{count} of 8 planes x bf16" for count in (2, 3, 4, 8)], ["int4 g128 x bf16", "bf16"]),
    ("bitplane_integers", [f"zipper clamp, low part (5 bits) x {word}" for word in ("int8", "int4", "bf16")],
     [f"zipper paper, low part (4 bits) x {word}" for word in ("int8", "int4", "bf16")]),
])
def test_every_precision_is_right_and_timed(op, ours, peers, tmp_path):
    if not program("bench_kernels.samples").has_schedstat():
        pytest.skip("this system has no /proc/self/task/*/schedstat")
    out = tmp_path / "out.jsonl"
    asked = ["--op", op, "--m", "64", "--k", "128", "--n", "1,3", "--samples", "1", "--quick", "--threads", "1",
             "--rotate", "1", "--probe", "1", "--json", str(out)]
    with torch.inference_mode():
        assert program("bench_kernels").main(asked) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["contender"] for line in found if line["n"] == 3] == ours + peers
    for line in found:
        assert line["ours"] == (line["contender"] in ours)
        assert sorted(line["ratios"]) == (sorted(peers) if line["ours"] else [])
    errors = {line["contender"]: line["relative_error"] for line in found if line["n"] == 3}
    if op == "nested_linear":
        assert errors["nested exact"] < 0.01 < errors["nested draft x bf16"] < 0.12
    elif op == "bitplane_integers":
        assert errors[ours[2]] < errors[ours[0]] < 0.02 < errors[ours[1]] < 0.4
    else:
        in_order = [errors[name] for name in ours]
        assert in_order == sorted(in_order, reverse=True)
        assert in_order[-1] < 0.02


def test_bytes_are_those_of_what_is_read():
    contenders = program("bench_kernels.contenders")
    w = contenders.Weights(64, 128)
    sizes = {one.name: one.nbytes for one in contenders.contenders("nested_linear", w, None)}
    draft, exponents, low, _ = w.nested_tiles
    assert sizes["nested draft x int8"] == sizes["mxfp4 x int8"] == draft.nbytes + exponents.nbytes
    assert sizes["nested exact"] == draft.nbytes + exponents.nbytes + low.nbytes
    planes = {one.name: one.nbytes for one in contenders.contenders("bitplane_linear", w, None)}
    assert planes["8 of 8 planes x bf16"] == sum(part.nbytes for part in w.planes)
    assert planes["2 of 8 planes x bf16"] == w.planes[0].nbytes // 4 + w.planes[1].nbytes


def test_a_ratio_is_of_rounds_in_which_both_were_uncontended():
    Series = program("bench_kernels.samples").Series
    one, other = (Series(name, lambda: None, 1) for name in "ab")
    for mine, its, quiet in ((2.0, 1.0, True), (9.0, 1.0, False), (6.0, 3.0, True), (8.0, 8.0, True)):
        one.add(mine, quiet)
        other.add(its, True)
    assert one.over(other) == 2.0
    assert one.median() == 6.0
    assert one.contended == [9.0]
    assert Series("c", lambda: None, 1).over(Series("d", lambda: None, 1)) is None
