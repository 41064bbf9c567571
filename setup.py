"""Which compiled library goes into the package? One, from kernels_ext/, where torch and a C++ compiler are at hand.

Everything else about the project is in pyproject.toml. Without the library hf_mlspec runs on plain torch and says so;
MLSPEC_REQUIRE_KERNELS=1 makes a failed build an error.
"""

import os
import platform
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
REQUIRED = os.environ.get("MLSPEC_REQUIRE_KERNELS") == "1"


def skip(reason):
    """Go on without kernels, visibly; an error where they are required."""
    message = f"hf_mlspec: compiled kernels are NOT built: {reason}"
    if REQUIRED:
        raise SystemExit(f"{message} (MLSPEC_REQUIRE_KERNELS=1)")
    print(
        f"{message}\n  The package works on the slower plain-torch reference path. To build them, install torch\n"
        "  and a C++20 compiler, then run: pip install --no-build-isolation -e .",
        file=sys.stderr,
    )


def sources():
    paths = [HERE / "kernels_ext" / "bindings_cpu.cpp", *sorted((HERE / "kernels_ext" / "cpu").glob("*.cpp"))]
    if platform.machine().lower() not in ("x86_64", "amd64"):
        paths = [path for path in paths if not path.stem.endswith(("_avx2", "_avx512"))]
    return [str(path.relative_to(HERE)) for path in paths]


def extension():
    from torch.utils.cpp_extension import CppExtension

    openmp = [] if sys.platform == "darwin" else ["-fopenmp"]
    ext = CppExtension(
        "hf_mlspec._C",
        sources(),
        extra_compile_args=["-O3", "-std=c++20", "-fvisibility=hidden", "-Wall", "-g0", *openmp],
        extra_link_args=openmp,
        depends=[str(path) for path in (HERE / "kernels_ext").rglob("*.h")],
    )
    ext.libraries.remove("torch_python")  # the library registers operators only, so one build serves every Python
    return ext


def command():
    """torch's build_ext, whose failure is told and survived."""
    from torch.utils.cpp_extension import BuildExtension

    class BuildKernels(BuildExtension):
        def run(self):
            try:
                super().run()
            except (Exception, SystemExit) as error:  # compilers and ninja fail in many types; every one is shown
                skip(f"{type(error).__name__}: {error}")
                self.extensions = []  # nothing to copy or to install

    return BuildKernels.with_options(no_python_abi_suffix=True)


def build():
    try:
        return {"ext_modules": [extension()], "cmdclass": {"build_ext": command()}}
    except ImportError as error:
        skip(f"torch is not importable here ({error})")
        return {"cmdclass": {"build_ext": build_ext}}


setup(**build())
