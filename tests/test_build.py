"""Is a wheel one for every Python? Which sources does a machine compile, and which wheels do the workflows build?"""

from __future__ import annotations

import platform
import re
import runpy
from pathlib import Path

import pytest
import setuptools
import yaml
from setuptools import Distribution, Extension

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture
def build(monkeypatch) -> dict:
    """What setup.py defines."""
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    monkeypatch.chdir(ROOT)
    return runpy.run_path("setup.py")


def workflow(name: str) -> dict:
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))


def minor(requirement: str, text: str) -> tuple[int, int]:
    major, minor_version = re.search(rf"^\W*torch{requirement}(\d+)\.(\d+)", text, re.MULTILINE).groups()
    return int(major), int(minor_version)


def test_a_wheel_serves_every_python_of_its_platform(build):
    wheel = build["AnyPython"](Distribution({"name": "x", "ext_modules": [Extension("x._C", ["x.cpp"])]}))
    wheel.ensure_finalized()
    python, abi, platform_name = wheel.get_tag()
    assert (python, abi) == ("py3", "none")
    assert platform_name not in ("", "any")


def test_the_compiled_library_knows_no_python():
    """It may not ask the interpreter for anything: a wheel of one Python is loaded by another."""
    library = ROOT / "hf_mlspec" / "_C.so"
    if not library.exists():
        pytest.skip("the compiled kernels are not built")
    data = library.read_bytes()
    assert b"libtorch_python" not in data
    assert re.findall(rb"\0(_?Py[A-Z]?\w*_\w+)\0", data) == []  # names of functions, as PyObject_Call


def test_kernels_of_an_earlier_build_are_kept_for_an_editable_install_only(build, monkeypatch, tmp_path):
    monkeypatch.setenv("MLSPEC_KEEP_KERNELS", "1")
    monkeypatch.setitem(build["build"].__globals__, "HERE", tmp_path)
    (tmp_path / "hf_mlspec").mkdir()
    (tmp_path / "hf_mlspec" / "_CUDA.so").touch()
    with pytest.raises(SystemExit, match=r"no build has left hf_mlspec/_C\.so"):
        build["build"]()
    (tmp_path / "hf_mlspec" / "_C.so").touch()
    assert build["build"]() == {}
    monkeypatch.setattr("sys.argv", ["setup.py", "bdist_wheel"])
    with pytest.raises(SystemExit, match="an editable install"):
        build["build"]()


@pytest.mark.parametrize("machine", ["aarch64", "arm64", "x86_64", "AMD64"])
def test_a_machine_gets_the_kernels_that_it_can_compile(build, monkeypatch, machine):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    sources = build["cpu_sources"]()
    folders = [ROOT / "kernels_ext" / "cpu", ROOT / "kernels_ext" / "bindings" / "cpu"]
    every = {path for folder in folders for path in folder.rglob("*.cpp")}
    intrinsics = {path for path in every if "MLSPEC_TARGET" in path.read_text(encoding="utf-8")}
    assert len(intrinsics) > len(build["X86_SETS"])
    left_out = every - {*sources}
    assert left_out == (set() if machine in ("x86_64", "AMD64") else intrinsics)
    assert len(sources) == len({*sources})


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_have_jobs_with_steps_and_actions_of_a_major_version(path):
    jobs = workflow(path.name)["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert steps
    for step in steps:
        assert ("uses" in step) != ("run" in step), step
        assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]), step


def test_ci_runs_the_script_that_a_change_must_pass():
    [job] = workflow("ci.yml")["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}


def test_wheels_are_built_for_every_supported_minor_version_of_torch():
    built = workflow("wheels.yml")["jobs"]["wheel"]["strategy"]["matrix"]["torch"]
    oldest = minor(">=", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    newest = minor("==", (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert oldest[0] == newest[0]
    assert built == [f"{oldest[0]}.{number}" for number in range(oldest[1], newest[1] + 1)]


def test_wheels_bring_no_library_of_torch():
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    repair = settings[settings.index("repair-wheel-command") :]
    assert {*re.findall(r"--exclude (\S+)", repair)} == {
        "libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libc10.so"
    }
