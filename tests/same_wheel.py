"""Do two builds of a wheel give the same bytes? Each in a folder of its own, with files of other times.

python -m tests.same_wheel          as a release is built: minutes, twice
python -m tests.same_wheel --few    with a few of the kernels, which no program could load: a minute
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "kernels_ext", "hf_mlspec", "mlspec_cli",
         "optimum")  # fmt: skip
EPOCH = 1750000000
# One that meets torch, whose macros name the file they are in, and kernels of two instruction sets.
FEW = ("bindings/cpu/words.cpp", "cpu/rows/row_ops_generic.cpp", "cpu/rows/row_ops_avx2.cpp")


def built(folder: Path, age: float, few: bool) -> Path:
    """The wheel, built from a copy in `folder` whose files are `age` seconds old."""
    folder.mkdir(parents=True)
    for name in PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(source, folder / name)
    for path in folder.rglob("*.cpp") if few else ():
        if path.relative_to(folder / "kernels_ext").as_posix() not in FEW:
            path.unlink()
    for path in folder.rglob("*"):
        os.utime(path, (EPOCH + 1e7 - age, EPOCH + 1e7 - age))
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH), "MLSPEC_REQUIRE_KERNELS": "1"}
    command = [sys.executable, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", "made"]
    subprocess.run(command, cwd=folder, env=environment, check=True)
    return next((folder / "made").glob("*.whl"))


def differences(one: Path, other: Path) -> list[str]:
    """What two wheels do not have in common."""
    found = [] if one.name == other.name else [f"names: {one.name}, {other.name}"]
    with zipfile.ZipFile(one) as first, zipfile.ZipFile(other) as second:
        if (order := first.namelist()) != second.namelist():
            return [*found, f"members: {sorted(set(order) ^ set(second.namelist())) or 'in another order'}"]
        for name in order:
            a, b = first.getinfo(name), second.getinfo(name)
            if first.read(name) != second.read(name):
                found.append(f"{name}: its bytes")
            elif (a.date_time, a.external_attr) != (b.date_time, b.external_attr):
                found.append(f"{name}: its time or mode")
    if not found and one.read_bytes() != other.read_bytes():
        found.append("the archive's own bytes")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.same_wheel", description=__doc__.splitlines()[0])
    parser.add_argument("--few", action="store_true", help="a few of the kernels")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlspec-wheels-") as place:
        wheels = [built(Path(place) / name, age, options.few)
                  for name, age in (("one", 0.0), ("another/of_a_longer_name", 86400.0))]  # fmt: skip
        found = differences(*wheels)
        for line in found:
            print(line)
        for wheel in wheels:
            print(hashlib.sha256(wheel.read_bytes()).hexdigest(), wheel.stat().st_size, wheel.name)
    print("the same bytes" if not found else f"{len(found)} differences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
