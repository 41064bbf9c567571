"""Do the groups of nested targets and bit-planes compare what they say, and does a difference fail?"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from programs import program

from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

pytestmark = pytest.mark.usefixtures("from_the_root")
compiled = pytest.mark.skipif(not has_compiled_decoder(), reason="takes minutes without the compiled kernels")


def bench():
    Bench = program("bench_gpu.findings").Bench
    return Bench(torch.device("cpu"), Path("models"), Path("data"), quick=True)


def by_name(found) -> dict[tuple[str, str], float]:
    return {(line.what, line.contender): line.value for line in found}


def test_every_group_has_a_title_and_a_program():
    shell, report = program("bench_gpu"), program("bench_gpu.report")
    for name, module in shell.GROUPS.items():
        assert name in report.TITLES
        assert name in shell.__doc__
        assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("module", ["bench_gpu.nested", "bench_gpu.planes"])
def test_every_chain_has_its_traces(module):
    chains, traces = program(module).CHAINS, program("bench_gpu.chain").TRACES
    assert chains
    for one in chains:
        for data in ("humaneval", "gsm8k"):
            assert (traces / f"{one.trace}-{data}.json").is_file()
        assert {len(lengths) for lengths in one.lengths} == {one.levels}


def test_every_target_of_planes_is_measured():
    planes = program("bench_gpu.planes")
    assert {*planes.OVER_OWN, *planes.OVER_BF16} == {one.name for one in planes.CHAINS}


def test_planes_are_compared_with_their_own_greedy_decoding(monkeypatch):
    planes = program("bench_gpu.planes")
    monkeypatch.setattr(planes, "CHAINS", planes.CHAINS[:1])
    found = list(planes.planes(bench()))
    values = by_name(found)
    assert [line.contender for line in found][:4] == ["BF16", "8 planes", "4 planes", "2 planes"]
    sizes = [line.more["bytes"] for line in found[1:4]]
    per_plane = (sizes[0] - sizes[1]) / 4
    assert sizes[1] - sizes[2] == 2 * per_plane > 0
    for data in ("HumanEval", "GSM8K"):
        what = f'["planes4"], {data}, batch 1 (replayed)'
        for name in ("own greedy", "BF16 greedy"):
            expected = values[what, "tokens/s"] / values[what, f"{name}, tokens/s"]
            assert values[what, f"x {name}"] == pytest.approx(expected)
    assert {line.target for line in found} == {None}


@compiled
def test_nested_chains_are_compared_with_those_of_the_cast(monkeypatch):
    nested = program("bench_gpu.nested")
    monkeypatch.setattr(nested, "CHAINS", nested.CHAINS[:1])
    found = list(nested.nested(bench()))
    values = by_name(found)
    ratios = [line for line in found if line.contender == "nested x mxfp4"]
    assert len(ratios) == 2 + 2  # two data sets, then the pair with and without the tiny model
    for line in ratios:
        sides = values[line.what, "nested, tokens/s"] / values[line.what, "mxfp4, tokens/s"]
        assert line.value == pytest.approx(sides)
    steps = {line.contender: line.more["bytes"] for line in found if line.unit == "ms" and "1 token" in line.what}
    assert steps["nested, draft"] == steps["MXFP4 cast"] < steps["BF16"] < steps["nested, exact"]


@compiled
def test_a_nested_target_that_writes_other_ids_fails(monkeypatch):
    exact, nested_exact = program("bench_gpu.exact"), program("bench_gpu.nested_exact")
    real = exact._decoded

    def decoded(bench, model, rows, case, batch):
        found = real(bench, model, rows, case, batch)
        if case.name == '["nested"]' and batch == 1:
            found[next(iter(found))] = [-1]
        return found

    monkeypatch.setattr(exact, "_decoded", decoded)
    found = []
    with pytest.raises(exact.Differences, match=r'\["nested"\], batch 1: 1 of \d prompts differ'):
        found.extend(nested_exact.nested_exact(bench()))
    assert found[0].more["reference"]
    assert not any(line.more["reference"] for line in found[1:])
    assert [line.value for line in found if line.what != '["nested"]'] == [0] * 5
    assert sum(line.value for line in found) == 1


def test_products_of_formats_are_right_and_a_wrong_one_is_told(monkeypatch):
    formats = program("bench_gpu.formats")
    names = ["bf16", "mxfp4 a16", "nested draft a16", "nested exact", *(f"{n} of 8 planes" for n in (8, 4, 3, 2))]
    assert list(dict.fromkeys(line.contender for line in formats.formats(bench()))) == names
    real = formats.ops.nested_linear
    monkeypatch.setattr(formats.ops, "nested_linear", lambda *operands, **how: real(*operands, **how) * 1.02)
    found = []
    with pytest.raises(formats.WrongResult, match=r"nested draft a16: 1 tokens: .* nested exact: 1 tokens: "):
        found.extend(formats.formats(bench()))
    assert {line.contender for line in found} == {*names} - {"nested draft a16", "nested exact"}


def test_what_planes_may_take_follows_from_all_of_them():
    target = program("bench_gpu.formats")._target
    assert target("4 of 8 planes", 8, 20.0) == pytest.approx(1.15 * 10 + 3)
    assert target("4 of 8 planes", 32, 20.0) is None
    assert target("8 of 8 planes", 1, 20.0) is None
    assert (target("nested draft a16", 16, None), target("nested exact", 1, None)) == (11.5, 40.0)
