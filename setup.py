"""Which compiled libraries go into the package? _C for the CPU, where torch and a C++ compiler are at hand; _CUDA for
GPUs, where that torch is a CUDA one and nvcc is at hand, too. Both come from kernels_ext/.

Everything else about the project is in pyproject.toml. Without a library hf_mlspec runs on plain torch and says so.

    MLSPEC_REQUIRE_KERNELS=1, MLSPEC_REQUIRE_CUDA=1     a failed or impossible build of _C, of _CUDA is an error
    MLSPEC_CUDA_ARCHS="80;90a"          GPUs to build for; default: this machine's, without one what CUDA_ARCHS lists
    MLSPEC_KEEP_KERNELS=1               compile nothing: the _C of an earlier build stays, for an editable install; the
                                        torch must be of the same minor version
    MLSPEC_SANITIZE=address,undefined   _C with those sanitizers; the process that loads it then needs their runtime
                                        (LD_PRELOAD of libasan.so and libstdc++.so: .ci/run)
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
KERNELS = HERE / "kernels_ext"
CPU_LIBRARY, CUDA_LIBRARY = "hf_mlspec._C", "hf_mlspec._CUDA"
REQUIRED = {library: os.environ.get(variable) == "1" for library, variable in
            ((CPU_LIBRARY, "MLSPEC_REQUIRE_KERNELS"), (CUDA_LIBRARY, "MLSPEC_REQUIRE_CUDA"))}
SANITIZERS = os.environ.get("MLSPEC_SANITIZE", "")
X86_SETS = ("_avx2", "_avxvnni", "_avxvnniint8", "_avx512vnni", "_avx512bf16", "_amx")
CUDA_ARCHS = ("80", "89", "90a", "100", "120")
# Of wgmma and the copy engine: for 90a alone.
HOPPER_ONLY = re.compile(r"(bf16|int4|mxfp4|nested|planes|lut)_linear|attention_prefill")
NOT_IN_LIBRARY = {"prepack.cu"}  # for eval/bench_gpu_linear; the package packs in ops/tiles_cuda.py


def skip(library, reason):
    """Go on without a library, visibly; an error where it is required."""
    device = "CUDA" if library == CUDA_LIBRARY else "CPU"
    message = f"hf_mlspec: compiled {device} kernels are NOT built: {reason}"
    if REQUIRED[library]:
        variable = "MLSPEC_REQUIRE_CUDA" if library == CUDA_LIBRARY else "MLSPEC_REQUIRE_KERNELS"
        raise SystemExit(f"{message} ({variable}=1)")
    needed = "nvcc and a torch with CUDA" if library == CUDA_LIBRARY else "torch and a C++20 compiler"
    print(
        f"{message}\n  The package works on the slower plain-torch reference path. To build them, install {needed},\n"
        "  then run: pip install --no-build-isolation -e .",
        file=sys.stderr,
    )


def cpu_sources():
    paths = [*sorted((KERNELS / "bindings" / "cpu").glob("*.cpp")), *sorted((KERNELS / "cpu").rglob("*.cpp"))]
    if platform.machine().lower() not in ("x86_64", "amd64"):
        paths = [path for path in paths if not path.stem.endswith(X86_SETS)]
    return paths


def compiler_flags():
    """(compile, link). -O1 under sanitizers: their checks in -O3 code take the compiler minutes. Messages name sources
    by where they lie in the project, and in torch: two builds in two folders give the same bytes."""
    import torch

    prefixes = {str(HERE): "hf_mlspec", os.path.dirname(os.path.abspath(torch.__file__)): "torch"}
    places = [f"-ffile-prefix-map={folder}={name}" for folder, name in prefixes.items()]
    compile_args = ["-O3", "-std=c++20", "-fvisibility=hidden", "-Wall", "-g0", *places]
    if not SANITIZERS:
        return compile_args, []
    unknown = set(SANITIZERS.split(",")) - {"address", "undefined", "thread"}
    if unknown:
        raise SystemExit(f"MLSPEC_SANITIZE: {sorted(unknown)} unknown, choose from address, undefined, thread")
    sanitize = [f"-fsanitize={SANITIZERS}", "-fno-sanitize-recover=all"]
    if "undefined" in SANITIZERS:  # what these find, address finds, too; they double the time of compiling
        sanitize.append("-fno-sanitize=null,object-size,pointer-overflow,vptr")
    return [*compile_args, "-O1", "-g1", "-fno-omit-frame-pointer", *sanitize], sanitize


def runtime_of_torch():
    """The C++ runtime this process has loaded for torch. A compiler that would link a copy of its own into the library
    makes an error that passes from the one to the other end the process."""
    maps = Path("/proc/self/maps")
    if SANITIZERS or not maps.exists():
        return []
    found = re.findall(r"(/\S*/lib(?:stdc\+\+|gcc_s)\.so\S*)$", maps.read_text(), re.MULTILINE)
    return ["-shared-libgcc", *sorted(set(found), reverse=True)]


def extension(name, paths, compile_args, link_args, **options):
    from torch.utils.cpp_extension import CppExtension

    ext = CppExtension(
        name,
        [str(path.relative_to(HERE)) for path in paths],
        extra_compile_args=compile_args,
        extra_link_args=[*link_args, *runtime_of_torch()],
        depends=[str(path) for path in [*KERNELS.rglob("*.h"), *KERNELS.rglob("*.cuh"), *KERNELS.rglob("*.cu")]],
        **options,
    )
    ext.libraries.remove("torch_python")  # the libraries register operators only, so one build serves every Python
    return ext


def cuda_toolkit():
    """The folder of nvcc, headers and the static runtime; None where there is no nvcc."""
    found = shutil.which("nvcc")
    candidates = [os.environ.get("CUDA_HOME"), found and Path(found).resolve().parent.parent, "/usr/local/cuda"]
    folders = [Path(folder) for folder in candidates if folder]  # nvcc on the PATH may be a script that calls another
    whole = [folder for folder in folders if nvcc_of(folder).exists() and (folder / "include/cuda_runtime.h").exists()]
    return whole[0] if whole else None


def nvcc_of(toolkit):
    return toolkit / "bin" / "nvcc"


def cuda_archs(toolkit):
    """Names as in compute_90a: those of MLSPEC_CUDA_ARCHS, this machine's GPUs, or what nvcc knows of CUDA_ARCHS."""
    import torch

    asked = [arch for arch in re.split(r"[;, ]+", os.environ.get("MLSPEC_CUDA_ARCHS", "")) if arch]
    if bad := [arch for arch in asked if not re.fullmatch(r"[0-9]{2,3}[af]?", arch)]:
        raise SystemExit(f"MLSPEC_CUDA_ARCHS names {bad}: write it like {';'.join(CUDA_ARCHS)!r}")
    if not asked and torch.cuda.is_available():
        here = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
        asked = ["90a" if gpu == (9, 0) else f"{gpu[0]}{gpu[1]}" for gpu in sorted(here)]
    if not asked:
        known = subprocess.run([nvcc_of(toolkit), "--list-gpu-code"], capture_output=True, text=True, check=True)
        asked = [arch for arch in CUDA_ARCHS if f"sm_{arch.rstrip('a')}" in known.stdout.split()]
    return asked


def cuda_objects(toolkit, archs, folder, extra=()):
    """Every .cu as an object file in `folder`, compiled side by side, with `extra` words for nvcc; what is newer than
    its sources stays."""
    hopper = [arch for arch in archs if arch == "90a"]
    sources = sorted(path for path in (KERNELS / "cuda").rglob("*.cu") if hopper or not HOPPER_ONLY.match(path.name))
    sources = [path for path in sources if path.name not in NOT_IN_LIBRARY]
    newest_header = max(path.stat().st_mtime for path in [KERNELS / "formats.h", *(KERNELS / "cuda").rglob("*.*h")])
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(path):
        target = folder / f"{path.stem}.o"
        if target.exists() and target.stat().st_mtime > max(newest_header, path.stat().st_mtime):
            return str(target)
        own = hopper if HOPPER_ONLY.match(path.name) else archs
        codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in own]
        command = [nvcc_of(toolkit), "-std=c++17", "-O3", *codes, "-Xcompiler", "-fPIC,-fvisibility=hidden",
                   f"--threads={len(own)}", *extra, "-c", path, "-o", target]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"nvcc {path.relative_to(HERE)}: exit status {done.returncode}\n{done.stderr}")
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, sources))


def cuda_extension():
    """Its .cu files are compiled by `command()`; None, and the reason told where it is asked for, without CUDA."""
    import torch

    toolkit = cuda_toolkit()
    if torch.version.cuda is None or toolkit is None:
        if REQUIRED[CUDA_LIBRARY]:
            skip(CUDA_LIBRARY, "nvcc is not found" if torch.version.cuda else "this torch is built without CUDA")
        return None
    runtimes = [*toolkit.glob("lib*/libcudart_static.a"), *toolkit.glob("targets/*/lib/libcudart_static.a")]
    if not runtimes:
        raise FileNotFoundError(f"{toolkit} holds nvcc but no libcudart_static.a: install the static CUDA runtime")
    archs = cuda_archs(toolkit)
    compile_args = [*compiler_flags()[0], f'-DMLSPEC_CUDA_ARCHS="{";".join(archs)}"']
    compile_args.append(f"-DMLSPEC_HOPPER={int('90a' in archs)}")
    # Static and hidden: the library then needs no toolkit where it runs, and does not meet torch's own runtime.
    link_args = [str(runtimes[0]), "-Wl,--exclude-libs,libcudart_static.a", "-lrt", "-ldl", "-lpthread"]
    sources = sorted((KERNELS / "bindings" / "cuda").glob("*.cpp"))
    ext = extension(CUDA_LIBRARY, sources, compile_args, link_args, include_dirs=[str(toolkit / "include")])
    ext.libraries.append("c10_cuda")
    ext.toolkit, ext.archs = toolkit, archs
    return ext


def in_parallel(compile_some):
    """distutils' compile, which takes one file after the other, on all cores."""

    def compile_all(sources, *args, **kwargs):
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda source: compile_some([source], *args, **kwargs), sources))
        return [path for paths in objects for path in paths]

    return compile_all


def command():
    """torch's build_ext, which compiles with ninja where it is found. A library that fails is told and survived, and
    leaves the other one alone."""
    from torch.utils.cpp_extension import BuildExtension

    class BuildKernels(BuildExtension):
        def build_extensions(self):
            self.built = []
            if not self.use_ninja:
                self.compiler.compile = in_parallel(self.compiler.compile)
            super().build_extensions()
            self.extensions = self.built  # to copy or to install

        def build_extension(self, ext):
            try:
                if ext.name == CUDA_LIBRARY:
                    folder = Path(self.build_temp).resolve() / "cuda" / "_".join(ext.archs)
                    ext.extra_objects = cuda_objects(ext.toolkit, ext.archs, folder)
                super().build_extension(ext)
                self.built.append(ext)
            except (Exception, SystemExit) as error:  # compilers and ninja fail in many types; every one is shown
                skip(ext.name, f"{type(error).__name__}: {error}")

        def run(self):
            try:
                super().run()
            except Exception as error:  # before any library: no compiler at all
                skip(CPU_LIBRARY, f"{type(error).__name__}: {error}")
                self.extensions = []

    return BuildKernels.with_options(no_python_abi_suffix=True)


class AnyPython(bdist_wheel):
    """The libraries know torch and no Python: one wheel a platform and a minor version of torch."""

    def get_tag(self):
        *_, platform_name = super().get_tag()
        return "py3", "none", platform_name


def build():
    if os.environ.get("MLSPEC_KEEP_KERNELS") == "1":
        if "bdist_wheel" in sys.argv:
            raise SystemExit("MLSPEC_KEEP_KERNELS=1 is for an editable install: wheels would lack them")
        if not list((HERE / "hf_mlspec").glob("_C.*")):
            raise SystemExit("MLSPEC_KEEP_KERNELS=1, but no build has left hf_mlspec/_C.so: install without it")
        return {}
    try:
        cpu = extension(CPU_LIBRARY, cpu_sources(), *compiler_flags())
    except ImportError as error:
        for library in (CPU_LIBRARY, CUDA_LIBRARY):
            if library == CPU_LIBRARY or REQUIRED[library]:
                skip(library, f"torch is not importable here ({error})")
        return {"cmdclass": {"build_ext": build_ext}}
    try:
        cuda = cuda_extension()
    except (Exception, SystemExit) as error:
        skip(CUDA_LIBRARY, f"{type(error).__name__}: {error}")
        cuda = None
    commands = {"build_ext": command(), "bdist_wheel": AnyPython}
    return {"ext_modules": [cpu, cuda] if cuda else [cpu], "cmdclass": commands}


setup(**build())
