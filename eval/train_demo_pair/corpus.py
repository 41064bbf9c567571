"""Which text of the installed Python packages trains the demo pair, under which licences, and which is held out?

A document is one source file, or the English inside it (docstrings and long strings of a module, an .md, .rst or .txt
file, a package's README in its metadata). Held out are all files of `HELD_OUT_PACKAGES` and, of the others, the files
whose name hashes below `HELD_OUT_SHARE`: the rule reads names only, so it is the same in every environment.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import inspect
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from eval.sources import PROSE_SUFFIXES, SKIPPED_FOLDERS, is_language, without_licence_header

# Import name -> licence, permissive ones only; what a package bundles from elsewhere is left out (SKIPPED_FOLDERS).
LICENCES = {
    "python": "PSF-2.0",
    "accelerate": "Apache-2.0", "aiohttp": "Apache-2.0", "anyio": "MIT", "attr": "MIT", "botorch": "MIT",
    "chex": "Apache-2.0", "click": "BSD-3-Clause", "coverage": "Apache-2.0", "cupy": "MIT", "dateutil": "Apache-2.0",
    "diffrax": "Apache-2.0", "e3nn": "MIT", "einops": "MIT", "equinox": "Apache-2.0", "etils": "Apache-2.0",
    "flax": "Apache-2.0", "fontTools": "MIT", "formulaic": "MIT", "fsspec": "BSD-3-Clause", "gpytorch": "MIT",
    "h5py": "BSD-3-Clause", "httpcore": "BSD-3-Clause", "httpx": "BSD-3-Clause", "huggingface_hub": "Apache-2.0",
    "humanize": "MIT", "imageio": "BSD-2-Clause", "jax": "Apache-2.0", "jinja2": "BSD-3-Clause",
    "joblib": "BSD-3-Clause", "lightning": "Apache-2.0", "lineax": "Apache-2.0", "markdown": "BSD-3-Clause",
    "matplotlib": "PSF-based (matplotlib)", "mesonbuild": "Apache-2.0", "mpmath": "BSD-3-Clause",
    "multipledispatch": "BSD-3-Clause", "narwhals": "MIT", "networkx": "BSD-3-Clause", "numba": "BSD-2-Clause",
    "numpy": "BSD-3-Clause", "numpyro": "Apache-2.0", "onnx": "Apache-2.0", "onnxscript": "MIT",
    "optax": "Apache-2.0", "optimistix": "Apache-2.0", "packaging": "Apache-2.0 OR BSD-2-Clause",
    "pandas": "BSD-3-Clause", "patsy": "BSD-2-Clause", "peft": "Apache-2.0", "PIL": "MIT-CMU", "pip": "MIT",
    "portalocker": "BSD-3-Clause", "psutil": "BSD-3-Clause", "pyarrow": "Apache-2.0", "pygments": "BSD-2-Clause",
    "pyparsing": "MIT", "_pytest": "MIT", "requests": "Apache-2.0", "rich": "MIT", "sacrebleu": "Apache-2.0",
    "scipy": "BSD-3-Clause", "seaborn": "BSD-3-Clause", "sentence_transformers": "Apache-2.0", "setuptools": "MIT",
    "simplejson": "MIT", "skimage": "BSD-3-Clause", "sklearn": "BSD-3-Clause", "sortedcontainers": "Apache-2.0",
    "statsmodels": "BSD-3-Clause", "sympy": "BSD-3-Clause", "tabulate": "MIT", "tensorboard": "Apache-2.0",
    "tifffile": "BSD-3-Clause", "timm": "Apache-2.0", "toolz": "BSD-3-Clause", "torch": "BSD-3-Clause",
    "torch_geometric": "MIT", "torchaudio": "BSD-2-Clause", "torchmetrics": "Apache-2.0",
    "torchvision": "BSD-3-Clause", "transformers": "Apache-2.0", "treescope": "Apache-2.0", "triton": "MIT",
    "typer": "MIT", "urllib3": "MIT", "werkzeug": "BSD-3-Clause", "xarray": "Apache-2.0", "yaml": "MIT",
}
HELD_OUT_PACKAGES = frozenset({"click", "jinja2", "joblib", "sortedcontainers", "tabulate"})
HELD_OUT_SHARE = 0.02
PACKAGE_BYTES = 14_000_000  # of one package at most, so that the largest do not drown the others
FILE_BYTES = (200, 300_000)


@dataclass(frozen=True)
class Document:
    """One text: ``name`` is "package/path/in/it", ``kind`` "code" or "prose"."""

    name: str
    kind: str
    text: str

    @property
    def package(self) -> str:
        return self.name.split("/")[0]

    @property
    def held_out(self) -> bool:
        return self.package in HELD_OUT_PACKAGES or unit_hash(self.name) < HELD_OUT_SHARE


def unit_hash(name: str) -> float:
    """``name`` -> [0, 1), the same in every environment."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def package_folders() -> dict[str, Path]:
    """Import name -> folder, of every listed package that is installed."""
    site, stdlib = Path(sysconfig.get_paths()["purelib"]), Path(sysconfig.get_paths()["stdlib"])
    folders = {name: stdlib if name == "python" else site / name for name in LICENCES}
    return {name: folder for name, folder in folders.items() if folder.is_dir()}


def package_files(package: str, folder: Path) -> list[tuple[str, Path]]:
    """(name, path) of a package's texts, in the order of their hashes, up to `PACKAGE_BYTES`."""
    named = []
    for path in folder.rglob("*"):
        inside = path.relative_to(folder)
        if (path.suffix == ".py" or path.suffix in PROSE_SUFFIXES) and not SKIPPED_FOLDERS & set(inside.parts):
            named.append((f"{package}/{inside.as_posix()}", path))
    chosen, total = [], 0
    for name, path in sorted(named, key=lambda pair: unit_hash(pair[0])):
        size = path.stat().st_size
        if FILE_BYTES[0] <= size <= FILE_BYTES[1] and total + size <= PACKAGE_BYTES:
            chosen.append((name, path))
            total += size
    return chosen


def read_documents(named: tuple[str, Path]) -> list[Document]:
    """The documents of one file: its code without a licence header, and its prose; none where it holds data tables."""
    name, path = named
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return []  # a test file written in another encoding on purpose
    if path.suffix in PROSE_SUFFIXES:
        return [Document(name, "prose", text)] if is_language(text, 0.75) else []
    text = without_licence_header(text)
    found = [Document(name, "code", text)] if is_language(text, 0.6) else []
    prose = "\n\n".join(long_strings(text))
    return [*found, Document(name, "prose", prose)] if len(prose) >= FILE_BYTES[0] else found


def long_strings(code: str) -> list[str]:
    """Docstrings and other strings of prose in a source text, dedented, each of at least 160 characters."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes in other people's strings
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return []  # a test file that is broken on purpose
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [inspect.cleandoc(s) for s in strings if len(s) >= 160 and " " in s and is_language(s, 0.75)]


def readmes(packages: Iterable[str]) -> list[Document]:
    """The README each package carries in its metadata."""
    by_import = importlib.metadata.packages_distributions()
    found = []
    for package in packages:
        for distribution in sorted(set(by_import.get(package, []))):
            body = importlib.metadata.metadata(distribution).get_payload()
            if isinstance(body, str) and is_language(body, 0.7):
                found.append(Document(f"{package}/README", "prose", body))
    return found


def collect(processes: int, max_bytes: int | None = None) -> list[Document]:
    """All documents, each text once (the first in the order of names), up to ``max_bytes`` in the order of hashes."""
    folders = package_folders()
    files = [named for package, folder in folders.items() for named in package_files(package, folder)]
    if max_bytes is not None:
        files = sorted(files, key=lambda named: unit_hash(named[0]))[: max(1, max_bytes // 12_000)]
    # fork: a spawned child would import torch and transformers first, which it does not need.
    with get_context("fork").Pool(processes) as pool:
        documents = [d for some in pool.imap_unordered(read_documents, files, chunksize=64) for d in some]
    documents += readmes(folders)
    # Trained text first: a text that is in both halves is not held out.
    documents.sort(key=lambda d: (d.held_out, d.name, d.kind))
    unique = {hashlib.sha256(d.text.encode()).digest(): d for d in reversed(documents)}
    return list(reversed(unique.values()))


def evaluation_documents(documents: list[Document], kind: str, count: int, least_chars: int) -> list[Document]:
    """``count`` held-out documents of ``least_chars`` or more in the order of their hashes, at most 3 of a package.

    At most a quarter of a document's long lines may stand in trained documents: packages copy code from each other.
    """
    trained: set[int] = set()
    for document in documents:
        if not document.held_out:
            trained.update(map(hash, long_lines(document.text)))
    chosen, per_package = [], Counter()
    for document in sorted((d for d in documents if d.held_out and d.kind == kind), key=lambda d: unit_hash(d.name)):
        lines = long_lines(document.text)
        copied = sum(hash(line) in trained for line in lines)
        if len(document.text) >= least_chars and 4 * copied <= len(lines) and per_package[document.package] < 3:
            per_package[document.package] += 1
            chosen.append(document)
    return chosen[:count]


def long_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if len(line.strip()) > 30]


def licence_note(documents: list[Document]) -> str:
    """The table of LICENSE-NOTE.md: package, version, licence, trained bytes."""
    by_import = importlib.metadata.packages_distributions()
    sizes = Counter()
    for document in documents:
        if not document.held_out:
            sizes[document.package] += len(document.text.encode())
    rows = []
    for package in sorted(sizes, key=str.lower):
        names = by_import.get(package, [])
        version = sysconfig.get_python_version() if package == "python" else ""
        version = importlib.metadata.version(names[0]) if names else version
        rows.append(f"| {package} | {version} | {LICENCES[package]} | {sizes[package] / 1e6:.2f} |")
    return "\n".join(["| package | version | licence | MB of text |", "|---|---|---|---|", *rows, ""])
