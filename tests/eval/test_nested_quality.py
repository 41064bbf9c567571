"""Does the program count escapes, bytes and errors as the format has them, and say what is missed?"""

from __future__ import annotations

import json

import pytest
import torch
from programs import program


@pytest.fixture
def quality(from_the_root):
    return program("nested_quality")


def test_escapes_and_their_bytes_are_counted(quality):
    weight = torch.ones(4, 64, dtype=torch.bfloat16)
    weight[1, 3] = weight[1, 40] = 2.0**-40  # beside ones their exponent is out of reach
    found = quality.measure("w", weight).to_dict()
    assert (found["escapes"], found["identical"]) == (2, True)
    planes = 4 * 64 * 2 + 4 * 2 + 8
    assert found["nested_bytes"] == planes + 2 * (8 + 2)
    assert found["run_time_ratio"] == pytest.approx((planes + 64 * 2 + 8) / weight.nbytes)


def test_errors_are_those_of_the_draft(quality):
    """Ones are 32 units: the nearest level of lloyd_max is 30, E2M1 has 32, and a fitted codebook finds it."""
    found = quality.measure("w", torch.ones(2, 32, dtype=torch.bfloat16)).to_dict()["relative_errors"]
    assert found == pytest.approx({"lloyd_max": 2 / 32, "mxfp4": 0, "fitted": 0, quality.CAST: 0})


def test_a_model_is_the_sum_of_its_tensors(quality):
    torch.manual_seed(0)
    one, other = (quality.measure(name, torch.randn(8, 64).bfloat16()) for name in "ab")
    whole = quality.Found("all")
    whole.add(one)
    whole.add(other)
    assert whole.weights == 2 * 8 * 64
    error = whole.to_dict()["relative_errors"]["lloyd_max"]
    assert error == pytest.approx(((one.errors["lloyd_max"] + other.errors["lloyd_max"])
                                   / (one.square + other.square)) ** 0.5)


def test_the_demo_target_keeps_its_bits_and_needs_its_own_codebook(quality, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert quality.main(["--json", str(out)]) == 0
    *tensors, whole = (json.loads(line) for line in out.read_text().splitlines())
    assert whole["tensor"] == "all linears"
    assert whole["weights"] == sum(line["weights"] for line in tensors)
    assert whole["identical"]
    assert whole["relative_errors"]["fitted"] < 0.1 < whole["relative_errors"]["lloyd_max"] < 0.105
    assert whole["relative_errors"]["mxfp4"] == pytest.approx(whole["relative_errors"][quality.CAST], rel=0.01)
    assert "all linears" in capsys.readouterr().out
    assert quality.main(["--check"]) == 1  # its weights have long tails
    assert "lloyd_max: relative error 0.1016, at most 0.1 is required" in capsys.readouterr().err


def test_what_is_missed_is_said(quality):
    whole = {"identical": False, "escape_share": 0.002, "bytes_ratio": 1.01, "run_time_ratio": 1.03,
             "relative_errors": {"lloyd_max": 0.12}}
    said = " / ".join(quality.missed(whole))
    for words in ("other bits", "0.20%, at most 0.1%", "1.0300 x", "0.1200, at most 0.1"):
        assert words in said


def test_a_folder_without_a_model_is_named(quality, tmp_path, capsys):
    assert quality.main([str(tmp_path)]) == 2
    assert "holds no config.json" in capsys.readouterr().err
