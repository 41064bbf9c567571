"""How does a checkpoint of one kind become one of another kind, with the same values?"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from ...checkpoints.readers import READERS, method_of, reader_for
from ...checkpoints.writers import WRITERS
from ..levels.load import read_model, read_tokenizer, require_folder
from .blank import quantization_of
from .config import QUANT_METHOD
from .folder import copy_tokenizer, measure, require_free
from .foreign_saving import save_as
from .gguf_saving import save_gguf
from .packing import packed_modules
from .source_config import is_gguf
from .source_layers import layer_settings, settings_of

GGUF = "gguf"
TARGETS = (QUANT_METHOD, *WRITERS, GGUF)


@dataclass(frozen=True)
class Converted:
    """What came of it.

    source, to: quant_method of either. layers: how many linear layers were written in which way. kept: those that are
    dense. source_bytes, target_bytes: of the weight files; None for a source that is no folder. packed_weights,
    all_weights: numbers, not bytes. copied: files beside the weights.
    """

    source: str
    to: str
    layers: dict[str, int]
    packed_weights: int
    all_weights: int
    source_bytes: int | None
    target_bytes: int
    kept: list[str]
    copied: list[str]
    load_seconds: float
    save_seconds: float


def convert_folder(
    source: str, target: str, to: str = QUANT_METHOD, *, max_shard_size: str = "5GB", overwrite: bool = False
) -> Converted:
    """Read the quantized causal language model in ``source`` (a folder, hub name or GGUF file) and save it in
    ``target`` as ``to`` has it, one of TARGETS, with its tokenizer: "mlspec" from other libraries' checkpoints,
    "compressed-tensors" and "gptq" from those and from this package's own, and "gguf", where ``target`` is one file,
    from all but GGUF files. No value changes, and what a folder of this package computes beside its weights
    (kv_cache, activation_bits, activation_clip) is refused by its name, not dropped.

    Raises ValueError, before anything is written: for a source that is missing, unquantized, of a kind that is not
    read, or of this package's format already; a target as in `quantize_folder`; and, naming layer and reason, for what
    ``to`` cannot say. OSError if the disk is full. Existing files of ``target`` stay until all weights are written.
    """
    if to not in TARGETS:
        raise ValueError(f"checkpoints are not written as {to!r}, but as {', '.join(TARGETS)}")
    require_folder(source)
    (_require_free_file if to == GGUF else require_free)(source, target, overwrite)
    method = require_quantized(source)
    if method == to == GGUF:
        raise ValueError(f"{source!r} is a GGUF file already; copy it")
    if method == to == QUANT_METHOD:
        raise ValueError(f"{source!r} is in the format of this package already; copy the folder")
    if method == QUANT_METHOD:
        _require_sayable(source, to)
    begin = time.perf_counter()
    model = read_model(source, "auto")
    loaded, found = time.perf_counter(), measure(model)
    save = {QUANT_METHOD: _save_ours, GGUF: _save_gguf}.get(to, _save_foreign)
    layers, copied, kept = save(model, source, Path(target), to, max_shard_size)
    return Converted(
        source=method, to=to, layers=dict(layers), packed_weights=found["packed_weights"],
        all_weights=found["all_weights"], source_bytes=_weight_bytes(source), target_bytes=_weight_bytes(target) or 0,
        kept=kept, copied=copied, load_seconds=loaded - begin, save_seconds=time.perf_counter() - loaded,
    )  # fmt: skip


def require_quantized(source: str) -> str:
    """The quant_method of a folder or hub name. ValueError where it is not quantized, or in a way that is not read."""
    found = quantization_of(source)
    method = method_of(found)
    if found is None:
        raise ValueError(f"{source!r} is not quantized; mlspec quantize packs it")
    if method != QUANT_METHOD:
        reader_for(found)
    return method


def _require_sayable(source: str, to: str) -> None:
    """ValueError for what a folder of this package computes beside its weights, which no other checkpoint says."""
    told = quantization_of(source)
    kept_in, bits, clip = (told.get(name) for name in ("kv_cache", "activation_bits", "activation_clip"))
    does = {
        "kv_cache": kept_in is not None and f"keeps keys and values as {kept_in}",
        "activation_bits": bits not in (None, 16) and f"multiplies activations of {bits} bits",
        "activation_clip": clip not in (None, 1) and f"clips activations at {clip} of their largest",
    }
    for name, words in does.items():
        if words:
            raise ValueError(
                f"{source!r} {words} ({name}), which a {to} checkpoint cannot say: take {name} out of the "
                "quantization_config in its config.json, and it is written without"
            )


def _save_ours(
    model: PreTrainedModel, source: str, target: Path, to: str, max_shard_size: str
) -> tuple[Counter[str], list[str], list[str]]:
    layers = {name: _described(layer_settings(module)) for name, module in packed_modules(model)}
    if not layers:
        raise ValueError(f"no format of this package holds a layer of {source!r} exactly: it would be written dense")
    if settings_of(model) is None:
        first, other = next(iter(layers)), next(name for name in layers if layers[name] != next(iter(layers.values())))
        raise ValueError(
            f"{other} becomes {layers[other]}, {first} {layers[first]}: a folder of this package has one format for "
            "all packed layers; load the original checkpoint, which works layer by layer"
        )
    model.save_pretrained(target, max_shard_size=max_shard_size)
    kept = model.config.quantization_config.modules_to_not_convert
    return Counter(layers.values()), copy_tokenizer(source, target), kept


def _described(settings: tuple[tuple[str, object], ...]) -> str:
    (_, word), *others = settings
    return ", ".join([str(word), *(f"{name} {value}" for name, value in others)])


def _save_foreign(
    model: PreTrainedModel, source: str, target: Path, to: str, max_shard_size: str
) -> tuple[Counter[str], list[str], list[str]]:
    if method_of(quantization_of(source)) not in READERS:
        model._weight_conversions = None  # its dense parts get the names that transformers gives such a model
    copied: list[str] = []

    def beside(staged: Path) -> None:
        copied.extend(copy_tokenizer(source, staged))

    kinds, kept = save_as(model, WRITERS[to], target, max_shard_size, beside)
    return Counter(map(str, kinds.values())), copied, kept


def _save_gguf(
    model: PreTrainedModel, source: str, target: Path, to: str, max_shard_size: str
) -> tuple[Counter[str], list[str], list[str]]:
    types, kept = save_gguf(model, target, read_tokenizer(source))
    return Counter(f"GGUF {kind}" for kind in types.values()), [], kept


def _require_free_file(source: str, target: str, overwrite: bool) -> None:
    """ValueError for a target that is a folder, is not named as GGUF files are, or exists (without ``overwrite``)."""
    file = Path(target)
    if file.is_dir():
        raise ValueError(f"{target!r} is a folder; name the file to write, such as {str(file / 'model.gguf')!r}")
    if file.suffix != ".gguf":
        raise ValueError(f"{target!r} is no name of a GGUF file; let it end in .gguf")
    if file.exists() and not overwrite:
        raise ValueError(f"{target!r} exists; name another file, or overwrite it (--overwrite)")


def _weight_bytes(folder: str) -> int | None:
    """Of the safetensors files, or of a GGUF file; None where it is neither."""
    if is_gguf(folder):
        return Path(folder).stat().st_size
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) if Path(folder).is_dir() else None
