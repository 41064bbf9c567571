"""Which compiled library goes into the package? One, from kernels_ext/, where torch and a C++ compiler are at hand.

Everything else about the project is in pyproject.toml. Without the library hf_mlspec runs on plain torch and says so;
MLSPEC_REQUIRE_KERNELS=1 makes a failed build an error. MLSPEC_SANITIZE=address,undefined builds with those sanitizers;
the process that loads the library then needs their runtime (LD_PRELOAD of libasan.so and libstdc++.so: .ci/run).
"""

import os
import platform
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
REQUIRED = os.environ.get("MLSPEC_REQUIRE_KERNELS") == "1"
SANITIZERS = os.environ.get("MLSPEC_SANITIZE", "")
X86_SETS = ("_avx2", "_avxvnni", "_avxvnniint8", "_avx512vnni", "_avx512bf16", "_amx")


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
    kernels = HERE / "kernels_ext"
    paths = [*sorted(kernels.glob("bindings_*.cpp")), *sorted((kernels / "cpu").glob("*.cpp"))]
    if platform.machine().lower() not in ("x86_64", "amd64"):
        paths = [path for path in paths if not path.stem.endswith(X86_SETS)]
    return [str(path.relative_to(HERE)) for path in paths]


def compiler_flags():
    """(compile, link). -O1 under sanitizers: their checks in -O3 code take the compiler minutes."""
    compile_args = ["-O3", "-std=c++20", "-fvisibility=hidden", "-Wall", "-g0"]
    if not SANITIZERS:
        return compile_args, []
    unknown = set(SANITIZERS.split(",")) - {"address", "undefined", "thread"}
    if unknown:
        raise SystemExit(f"MLSPEC_SANITIZE: {sorted(unknown)} unknown, choose from address, undefined, thread")
    sanitize = [f"-fsanitize={SANITIZERS}", "-fno-sanitize-recover=all"]
    if "undefined" in SANITIZERS:  # what these find, address finds, too; they double the time of compiling
        sanitize.append("-fno-sanitize=null,object-size,pointer-overflow,vptr")
    return [*compile_args, "-O1", "-g1", "-fno-omit-frame-pointer", *sanitize], sanitize


def extension():
    from torch.utils.cpp_extension import CppExtension

    compile_args, link_args = compiler_flags()
    ext = CppExtension(
        "hf_mlspec._C",
        sources(),
        extra_compile_args=compile_args,
        extra_link_args=link_args,
        depends=[str(path) for path in (HERE / "kernels_ext").rglob("*.h")],
    )
    ext.libraries.remove("torch_python")  # the library registers operators only, so one build serves every Python
    return ext


def in_parallel(compile_some):
    """distutils' compile, which takes one file after the other, on all cores."""
    from concurrent.futures import ThreadPoolExecutor

    def compile_all(sources, *args, **kwargs):
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda source: compile_some([source], *args, **kwargs), sources))
        return [path for paths in objects for path in paths]

    return compile_all


def command():
    """torch's build_ext, which compiles with ninja where it is found, and whose failure is told and survived."""
    from torch.utils.cpp_extension import BuildExtension

    class BuildKernels(BuildExtension):
        def build_extensions(self):
            if not self.use_ninja:
                self.compiler.compile = in_parallel(self.compiler.compile)
            super().build_extensions()

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
