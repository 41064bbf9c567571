"""Do Python and the compiled kernels mean the same tiles? Each constant of kernels_ext/formats.h beside Python's."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import hf_mlspec.formats
import hf_mlspec.ops

HEADER = Path(__file__).resolve().parents[2] / "kernels_ext" / "formats.h"
# A constant of formats.h, Python's name of it, and words that the modules have, or lack, that may define it.
PAIRS = [
    ("kBlock", "BLOCK", {"mxfp4"}, set()),
    ("kBlock", "BLOCK", {"nested"}, {"ops"}),
    ("kGroupSizes", "GROUP_SIZES", {"int4"}, {"ops"}),
    ("kGroupSizes", "GROUP_SIZES", {"planes"}, {"ops"}),
    ("kLeastClip", "LEAST_CLIP", {"activations"}, set()),
    ("kMagnitudes", "MAGNITUDES", {"mxfp4"}, set()),
    ("kMaxPlanes", "MAX_PLANES", {"planes"}, set()),
    ("cpu_tiles::kTileOutputs", "TILE_OUTPUTS", {"ops"}, {"cuda"}),
    ("cpu_tiles::kTileBytes", "TILE_BYTES", {"ops"}, {"cuda"}),
    ("kOutliers", "OUTLIERS", {"int4", "int8"}, set()),
    ("cpu_tiles::kLowTileBytes", "LOW_BYTES", {"ops", "nested"}, {"cuda"}),
    ("cpu_tiles::kPlaneBytes", "PLANE_BYTES", {"ops", "planes"}, {"cuda"}),
    ("gpu_tiles::kCodeBytes", "CODE_BYTES", {"ops", "cuda"}, set()),
    ("gpu_tiles::kPairOutputs", "PAIR_OUTPUTS", {"ops", "cuda"}, set()),
    ("gpu_tiles::kPairInputs", "PAIR_INPUTS", {"ops", "cuda"}, set()),
    ("gpu_tiles::kPairDraftBytes", "DRAFT_BYTES", {"ops", "nested", "cuda"}, set()),
    ("gpu_tiles::kPairLowBytes", "LOW_BYTES", {"ops", "nested", "cuda"}, set()),
    ("gpu_tiles::kPlaneBytes", "PLANE_BYTES", {"ops", "planes", "cuda"}, set()),
]
# What has no name in Python: parts of those above, and what a tensor's shape says there.
ONLY_COMPILED = {
    "kDoubledMagnitudes", "kCodebookLevels", "gpu_tiles::kTileOutputs", "gpu_tiles::kTileInputs",
    "gpu_tiles::kFieldBytes", "gpu_tiles::kPairPlaneBytes",
}


def compiled_constants() -> dict[str, object]:
    """The constants of formats.h by name, those of an inner namespace as ``namespace::name``."""
    text = re.sub(r"//.*", "", HEADER.read_text())
    values: dict[str, object] = {}
    inner = ""
    for line in re.findall(r"^namespace \w+ \{|^\}|^inline constexpr [^;]+;", text, re.MULTILINE):
        if opened := re.match(r"namespace (\w+)", line):
            inner = "" if opened[1] == "mlspec" else f"{opened[1]}::"
        elif line == "}":
            inner = ""
        else:
            declared = line.removeprefix("inline constexpr ").split(" ", 1)[1].rstrip(";")
            for name, expression in re.findall(r"(k\w+)(?:\[\d*\])? = ((?:\{[^}]*\}|[^,{])+)", declared):
                values[inner + name] = evaluated(expression, values, inner)
    return values


def evaluated(expression: str, values: dict[str, object], inner: str) -> object:
    known = {name.removeprefix(inner): value for name, value in values.items() if "::" not in name.removeprefix(inner)}
    python = re.sub(r"(\d)f\b", r"\1", expression).replace("{", "(").replace("}", ",)").replace("/", "//")
    return eval(python, {"__builtins__": {}}, known)


def words_of(module: str) -> set[str]:
    """The rooms and words of a module's name; `bitplanes` is `planes`."""
    return set(re.split(r"[._]", module.replace("bitplane", "plane").replace("plane_", "planes_")))


def python_constants(name: str, having: set[str], lacking: set[str]) -> dict[str, object]:
    """Each value of that name which a module with such words defines or imports, by module."""
    found = {}
    for package in (hf_mlspec.ops, hf_mlspec.formats):
        names = [entry.name for entry in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
        for module in (package.__name__, *names):
            if having <= words_of(module) and not lacking & words_of(module):
                value = getattr(importlib.import_module(module), name, None)
                if value is not None:
                    found[module] = value
    return found


@pytest.mark.parametrize(("compiled", "name", "having", "lacking"), PAIRS)
def test_a_size_is_the_same_on_both_sides(compiled, name, having, lacking):
    expected, found = compiled_constants()[compiled], python_constants(name, having, lacking)
    assert found, f"no module of hf_mlspec.ops or formats with {sorted(having)} in its name defines {name}"
    assert {module: value for module, value in found.items() if tuple_of(value) != tuple_of(expected)} == {}


def tuple_of(value: object) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def test_every_compiled_constant_is_compared_or_said_to_have_no_other():
    assert set(compiled_constants()) == {pair[0] for pair in PAIRS} | ONLY_COMPILED


def test_the_doubled_magnitudes_are_twice_the_magnitudes():
    values = compiled_constants()
    assert values["kDoubledMagnitudes"] == tuple(2 * magnitude for magnitude in values["kMagnitudes"])
