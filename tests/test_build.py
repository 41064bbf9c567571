"""Is a wheel one for every Python, and does it hold what the package needs at run time?"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import setuptools
from setuptools import Distribution, Extension

ROOT = Path(__file__).resolve().parents[1]


def test_a_wheel_serves_every_python_of_its_platform(monkeypatch):
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    monkeypatch.chdir(ROOT)
    build = runpy.run_path("setup.py")
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
