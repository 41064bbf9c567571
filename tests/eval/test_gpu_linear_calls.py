"""Are the structures of eval.bench_gpu_linear those of the kernels' header, field by field?"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from eval.bench_gpu_linear.calls import Linear, Prepack, Quantize

HEADER = Path(__file__).resolve().parents[2] / "kernels_ext" / "cuda" / "linear" / "linear.h"
KINDS = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float}


def fields_of(name: str) -> list[tuple[str, object]]:
    """Of a structure of the header: names and types."""
    text = re.sub(r"//.*", "", HEADER.read_text(encoding="utf-8")).replace("*", " *")
    body = re.search(r"typedef struct \{([^}]*)\} " + name + ";", text).group(1)
    found = []
    for kind, names in re.findall(r"(?:const )?(\w+)\s+([^;]+);", body):
        for one in re.sub(r"\s", "", names).split(","):
            word, count = re.fullmatch(r"\*?(\w+)(?:\[(\d+)\])?", one).groups()
            own = ctypes.c_void_p if one.startswith("*") else KINDS[kind]
            found.append((word, own * int(count) if count else own))
    return found


@pytest.mark.parametrize(("structure", "name"), [(Linear, "linear"), (Quantize, "quantize"), (Prepack, "prepack")])
def test_a_structure_has_the_fields_of_the_header(structure, name):
    assert [tuple(field) for field in structure._fields_] == fields_of(f"mlspec_cuda_{name}")
