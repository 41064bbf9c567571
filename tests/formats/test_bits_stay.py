"""Are bits on disk and settings in config.json those that earlier versions wrote? Their digests are kept here."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

from hf_mlspec import MLSpecConfig
from hf_mlspec.formats import FORMATS, PackedWeight

GROUPS = {"group_size": 64}
BITS = {
    "mxfp4 ocp_floor": "16a9e5aec8422d65",
    "mxfp4 even_bump": "a3e16c6014c56775",
    "mxfp4 ceil": "64edceb39198836d",
    "int4": "82362bc0ef605535",
    "int4 asymmetric": "986109c1ece91045",
    "nested lloyd_max": "3cfb74490d800fa1",
    "nested mxfp4": "de725a90b02c1919",
    "nested fitted": "2008ce72ee848ae3",
    "planes 8": "8f79841db0ffc567",
    "planes 3": "4cc567680e8292f6",
    "planes int2": "020dfcacfdf4765b",
    "planes ternary": "a89ad11136f9c0ea",
}
OPTIONS = {
    **{f"mxfp4 {rule}": {"rule": rule} for rule in ("ocp_floor", "even_bump", "ceil")},
    "int4": GROUPS,
    "int4 asymmetric": {**GROUPS, "symmetric": False},
    **{f"nested {codebook}": {"codebook": codebook} for codebook in ("lloyd_max", "mxfp4", "fitted")},
    **{f"planes {count}": {"num_planes": count, **GROUPS} for count in (8, 3, "int2", "ternary")},
}
SETTINGS = {
    "mxfp4": {"rule": "ocp_floor"},
    "int4": {"group_size": 128, "symmetric": True},
    "nested-bf16": {"codebook": "lloyd_max"},
    "bitplanes": {"num_planes": 8, "group_size": 128},
}


def dense() -> torch.Tensor:
    """bfloat16 ``[48, 128]``, the same on every machine: multiples of 2^-9 within 1, and a row with escapes."""
    numbers = torch.arange(48 * 128, dtype=torch.int64) * 2654435761 % 4294967296 >> 16
    weight = ((numbers % 255 - 127).float() / 512).view(48, 128).bfloat16()
    weight[7] *= 2.0**-20
    weight[7, 5], weight[9, :32] = 64.0, 0.0
    weight[11, 3] = -(2.0**-40)
    return weight


def digest(weight: PackedWeight) -> str:
    told = hashlib.sha256()
    for part in weight.parts:
        if part is not None:
            told.update(f"{part.dtype} {list(part.shape)}".encode())
            told.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return told.hexdigest()[:16]


@pytest.mark.parametrize("case", BITS)
def test_bits_on_disk(case):
    weight = FORMATS[case.split()[0]].weight.from_dense(dense(), **OPTIONS[case])
    assert digest(weight.validate()) == BITS[case]


@pytest.mark.parametrize("written", SETTINGS)
def test_settings_in_a_config(written):
    settings = {"quant_method": "mlspec", "format": written, "format_version": 1, "activation_bits": 16}
    settings |= {"modules_to_not_convert": [], **SETTINGS[written]}
    assert json.loads(json.dumps(MLSpecConfig(written).to_dict())) == settings
    assert MLSpecConfig.from_dict(settings).to_dict() == settings


@pytest.mark.parametrize(("word", "written"), [("nested", "nested-bf16"), ("planes", "bitplanes")])
def test_a_format_is_written_as_before_whatever_it_was_called(word, written):
    assert MLSpecConfig(word).format == written
    assert MLSpecConfig(word).to_dict() == MLSpecConfig(written).to_dict()
