"""What is installed, on what machine, and which kernel serves which op?"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from .. import ops
from ..calibration.methods import WORDS, formats_of
from ..checkpoints.readers import READERS
from ..engines.architecture import KNOWN, ON_THE_CPU_ALONE
from ..engines.architecture.families.wrappers import WRAPPERS
from ..formats import FORMATS, Format
from ..integration.costs.file import CACHE_VARIABLE, cache_folder
from ..integration.hook import enabled
from ..integration.quantizer.source import missing_packages
from ..integration.stream.prompts import PREFILL_CHUNK
from ..ops.compiled_decoder import has_compiled_decoder
from ..precision import Precision
from ..routing.plane_budget import TOP_PLANES
from ..routing.plane_slots import SLOTS
from ..routing.router import WIDTHS
from .inspect import run_inspect
from .serve import SERVER_PACKAGES
from .tables import show

VARIABLES = ("MLSPEC_REQUIRE_KERNELS", "MLSPEC_CPU_ISA", "MLSPEC_CUDA_KERNELS", CACHE_VARIABLE)
VERSIONS_OF = ("hf-mlspec", "torch", "transformers", "accelerate", "optimum", "safetensors", "tokenizers", "numpy")


def run_info(args: argparse.Namespace) -> int:
    if args.folder is not None:
        return run_inspect(args)
    kernels, problem = _kernels()
    found = {"versions": {"python": platform.python_version(), **{name: _version(name) for name in VERSIONS_OF}},
             "devices": _devices(),
             "kernels": [{"op": op, "device": device, "kernel": kernel} for op, device, kernel in kernels],
             "kernels_problem": problem,
             "cuda_problem": ops.why_no_cuda_kernels(),
             "formats": {record.written: _precisions(record) for record in FORMATS.values()},
             "routers": {"widths": list(WIDTHS), "of": "bit-planes, a width per block and prompt; compiled on GPUs, "
                                                      "module by module on CPUs"},
             "streamed_planes": {"to": ["cpu (from a file)", "cuda (from pinned host memory, or a file)"],
                                 "top_planes": TOP_PLANES, "fetched_ahead": SLOTS},
             "methods": {word: ", ".join(formats_of(word)) for word in WORDS},
             "checkpoints": {method: _stock(method) for method in READERS},
             "compiled_decoder": sorted(KNOWN) if has_compiled_decoder() else [],
             "compiled_on_the_cpu_alone": sorted(ON_THE_CPU_ALONE),
             "compiled_text_models_of": sorted(WRAPPERS) if has_compiled_decoder() else [],
             "heads": "EAGLE-3 (folders of speculators and SpecForge), MTP layers (level mtp, folders of speculators)",
             "server": _installed("serve", SERVER_PACKAGES),
             "batch_workers": _installed("ray", ("ray",)),
             "streams": f"prompts in chunks of {PREFILL_CHUNK} tokens, kept prefixes (prefix_cache): compiled models",
             "hook": "on" if enabled() else "off",
             "costs_folder": str(cache_folder() / "costs"),
             "learned_folder": str(cache_folder() / "learned"),
             **{name: os.environ.get(name, "not set") for name in VARIABLES}}
    if args.json:
        print(json.dumps(found))
        return 0
    _show_all(found, problem)
    if args.kernels:
        rows = [(f"{op} on {device}", kernel) for op, device, kernel in kernels]
        show(Console(), "kernels", ("", "kernel"), rows)
    return 0


def _summary(kernels: list[dict[str, str]]) -> list[tuple[str, str]]:
    """How many ops each kernel serves, by device."""
    counts = Counter((entry["device"], entry["kernel"]) for entry in kernels)
    return [(f"on {device}", f"{kernel}: {count} ops") for (device, kernel), count in counts.most_common()]


def _show_all(found: dict[str, Any], problem: str | None) -> None:
    """Tables of what was found, the kernels counted."""
    console = Console()
    show(console, "versions", ("", "version"), list(found["versions"].items()))
    show(console, "devices", ("", "what"), list(found["devices"].items()))
    problems = [row for row in (("problem", problem), ("problem on cuda", found["cuda_problem"])) if row[1]]
    show(console, "kernels (--kernels: of every op)", ("", "kernel"), [*_summary(found["kernels"]), *problems])
    show(console, "weight formats", ("", "read at"), list(found["formats"].items()))
    show(console, "methods that choose codes on a text", ("", "of format"), list(found["methods"].items()))
    others = list(found["checkpoints"].items())
    show(console, "checkpoints that hf_mlspec.load reads", ("", "in from_pretrained"), others)
    state = [("whole decoders compiled", _classes(found["compiled_decoder"])),
             ("of these on a CPU, not on a GPU", _classes(found["compiled_on_the_cpu_alone"])),
             ("the text models inside of", _classes(found["compiled_text_models_of"])),
             ("generate takes assistant_models", found["hook"]),
             ("routers (mlspec route)", f"{found['routers']['of']}: {', '.join(map(str, WIDTHS))} planes"),
             ("planes streamed (plane_budget)", f"{', '.join(found['streamed_planes']['to'])}: {TOP_PLANES} stay"),
             ("trained heads that can draft", found["heads"]),
             ("mlspec serve", found["server"]),
             ("mlspec batch --workers, --ray", found["batch_workers"]),
             ("streams (generate_stream)", found["streams"]),
             ("costs of forward passes are kept in", found["costs_folder"]),
             ("what calls learned is kept in", found["learned_folder"]),
             *((name, found[name]) for name in VARIABLES)]
    show(console, "state", ("", "value"), state)


def _installed(extra: str, packages: Sequence[str]) -> str:
    """Whether the packages of an extra are installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"lacks {', '.join(missing)}: pip install 'hf-mlspec[{extra}]'" if missing else "can run"


def _classes(names: list[str]) -> str:
    short = [name.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration") for name in names]
    return ", ".join(short) or "none"


def _stock(method: str) -> str:
    """Who reads such a checkpoint in from_pretrained."""
    missing = missing_packages(method)
    return f"this package: stock transformers lacks {', '.join(missing)}" if missing else "stock transformers"


def _precisions(record: Format) -> str:
    """The words for what can be read of weights in a format, the finest first."""
    return ", ".join(str(Precision(record.family, *bits)) for bits in record.bit_choices(record.stored_bits()))


def _kernels() -> tuple[list[tuple[str, str, str]], str | None]:
    """The kernel of every op, and why there are none or only plain torch."""
    try:
        return ops.kernel_table(), ops.why_not_compiled()
    except ops.KernelError as error:
        return [], str(error)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed: run from its source tree" if name == "hf-mlspec" else "not installed"


def _devices() -> dict[str, str]:
    found = {"cpu": f"{platform.machine()}, {os.cpu_count()} logical cores, {torch.get_num_threads()} threads"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        found[f"cuda:{index}"] = f"{properties.name}, {memory}, sm_{properties.major}{properties.minor}"
    return found
