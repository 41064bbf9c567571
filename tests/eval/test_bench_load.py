"""Do the large files of `eval.bench_load` hold what their kinds say, and does it time both sides of the same codes?"""

from __future__ import annotations

import pytest
import torch

import hf_mlspec
from eval.bench_load import __main__ as program
from eval.bench_load.written import KINDS, write, write_ours


@pytest.mark.parametrize("kind", KINDS)
def test_ours_has_the_weights_of_theirs(kind, tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    nbytes = write(theirs, kind, 1, True)
    assert write_ours(theirs, ours) == pytest.approx(nbytes, rel=0.2)
    layers = [hf_mlspec.load(folder, dtype=torch.bfloat16).model.layers[0].mlp.down_proj for folder in (theirs, ours)]
    assert layers[0].format == layers[1].format == "int4"
    assert torch.equal(*(layer.dequantized() for layer in layers))
    assert layers[0].dequantized().std() > 0.001
    found = program.measure(theirs)
    assert found["seconds"] > 0
    assert found["held"] > nbytes / 2


@pytest.mark.parametrize("wrong", [["--gigabytes", "0"], ["--repeats", "0"], ["--threads", "0"]])
def test_numbers_that_measure_nothing_are_refused(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        program.main(wrong)
    assert "must be above 0" in capsys.readouterr().err
