"""Is a block of one calibration never taken for one of another, whoever shares the work folder?"""

from __future__ import annotations

import pytest
import torch

from hf_mlspec.calibration.finished import FinishedBlocks

BLOCK = {"weight": torch.zeros(2, 2, dtype=torch.uint8)}


def test_who_loses_the_folder_before_the_first_block_writes_none(tmp_path):
    first = FinishedBlocks(tmp_path / "work", {"damping": 0.1})
    second = FinishedBlocks(tmp_path / "work", {"damping": 0.2})
    with pytest.raises(ValueError, match=r"work' holds blocks of a calibration with damping 0\.2, now it is 0\.1"):
        first.write(0, BLOCK, [])
    assert 0 not in second
    second.write(0, BLOCK, [])
    assert 0 in second


def test_a_folder_with_a_block_is_taken_by_no_other(tmp_path):
    FinishedBlocks(tmp_path / "work", {"damping": 0.1}).write(0, BLOCK, [])
    with pytest.raises(ValueError, match=r"with damping 0\.1, now it is 0\.2"):
        FinishedBlocks(tmp_path / "work", {"damping": 0.2})
    assert 0 in FinishedBlocks(tmp_path / "work", {"damping": 0.1})
