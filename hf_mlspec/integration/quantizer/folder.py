"""How does a folder with a model become a folder with its packed form?"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ...nn.packed import PackedLinear
from ..json_object import read_object
from ..levels.load import read_model, read_tokenizer, require_folder
from .config import MLSpecConfig
from .packing import packed_modules, packed_weights
from .source_config import is_gguf

# What belongs to a model and is not written by its own save_pretrained, as patterns in its folder.
_BESIDE_WEIGHTS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "spiece.model",
    "sentencepiece*", "chat_template*", "*.jinja", "preprocessor_config.json", "processor_config.json", "LICENSE*",
    "NOTICE*",
)  # fmt: skip


@dataclass(frozen=True)
class Quantized:
    """What came of it: bytes of the tensors before and after, weights, seconds."""

    format: str
    packed_modules: int
    packed_weights: int
    all_weights: int
    bits_per_packed_weight: float
    wide_bytes: int  # of the tensors, in the dtype the model was loaded in
    packed_bytes: int
    kept: list[str]
    copied: list[str]
    quantize_seconds: float
    save_seconds: float

    @property
    def bits_per_weight(self) -> float:
        """Average over the whole model, unpacked weights included."""
        return self.packed_bytes * 8 / self.all_weights


def quantize_folder(
    source: str, target: str, config: MLSpecConfig, *, max_shard_size: str = "5GB", dtype: str = "auto",
    overwrite: bool = False,
) -> Quantized:  # fmt: skip
    """Quantize the causal language model in ``source`` (a folder or hub name) while loading it, save it in ``target``,
    and copy the files of its tokenizer.

    dtype: of the tensors that are not packed, as in from_pretrained. Raises ValueError, before anything is loaded, for
    a source that is missing or already quantized and a target that is the source, a file, or not empty (without
    ``overwrite``); OSError if the disk is full. Existing files of ``target`` stay until all weights are written.
    """
    require_folder(source)
    require_free(source, target, overwrite)
    require_wide(source)
    begin = time.perf_counter()
    model = read_model(source, dtype, quantization_config=config)
    quantized = time.perf_counter()
    model.save_pretrained(target, max_shard_size=max_shard_size)
    copied = copy_tokenizer(source, Path(target))
    found = measure(model)
    return Quantized(
        format=config.format, bits_per_packed_weight=bits_per_packed_weight(model), **found,
        kept=model.config.quantization_config.modules_to_not_convert, copied=copied,
        quantize_seconds=quantized - begin, save_seconds=time.perf_counter() - quantized,
    )  # fmt: skip


def require_free(source: str, target: str, overwrite: bool) -> None:
    """ValueError for a target that is the source, a file, or not empty (without ``overwrite``)."""
    folder = Path(target)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{target!r} is a file; name a folder to write to")
    if folder.exists() and Path(source).exists() and folder.samefile(source):
        raise ValueError(f"{target!r} is the folder of the model itself; name another one")
    if folder.exists() and any(folder.iterdir()) and not overwrite:
        raise ValueError(f"folder {target!r} is not empty; name another one, or overwrite it (--overwrite)")


def require_wide(source: str) -> None:
    """ValueError for a folder whose model is quantized already."""
    file = Path(source) / "config.json"
    if not file.exists():
        return  # a hub name, or no model: loading says so
    stored = read_object(file).get("quantization_config")
    if stored:
        method = stored.get("quant_method") if isinstance(stored, dict) else stored
        raise ValueError(f"{source!r} is already quantized ({method}); give the folder of the original model")


def copy_tokenizer(source: str, target: Path) -> list[str]:
    """Copy what belongs to a model and is not written with its weights; -> the names of the files."""
    if is_gguf(source):
        try:
            tokenizer = read_tokenizer(str(Path(source).parent), gguf_file=Path(source).name)
        except ValueError:  # without the package that reads it, or one that is not in the file
            return []
        return sorted(Path(file).name for file in tokenizer.save_pretrained(target))
    if not Path(source).is_dir():
        return sorted(Path(file).name for file in read_tokenizer(source).save_pretrained(target))
    files = {file for pattern in _BESIDE_WEIGHTS for file in Path(source).glob(pattern) if file.is_file()}
    for file in files:
        shutil.copyfile(file, target / file.name)
    return sorted(file.name for file in files)


def measure(model: nn.Module) -> dict[str, int]:
    """Packed modules and weights, all weights, and bytes: as wide as the model's dtype, and as they are."""
    own = {id(tensor): tensor for tensor in model.parameters()}
    all_bytes, codes, modules = sum(t.nbytes for t in own.values()), 0, 0
    for _, module in packed_modules(model):
        modules += 1
        parts = [part for name in module.names for part in module.held(name) if part is not None]
        codes += packed_weights(module)
        own = {key: tensor for key, tensor in own.items() if not any(tensor is part for part in parts)}
    return {
        "packed_modules": modules,
        "packed_weights": codes,
        "all_weights": codes + sum(tensor.numel() for tensor in own.values()),
        "wide_bytes": codes * model.dtype.itemsize + sum(tensor.nbytes for tensor in own.values()),
        "packed_bytes": all_bytes,
    }


def bits_per_packed_weight(model: nn.Module) -> float:
    """Average over the packed modules that an MLSpecConfig made, scales included; 0 where it packs none."""
    config, bits, codes = model.config.quantization_config, 0.0, 0
    if config.format is None:
        return 0.0
    settings = config.format_settings
    for _, module in packed_modules(model):
        own = packed_weights(module)
        inputs = {"in_features": module.in_features} if isinstance(module, PackedLinear) else {}
        bits, codes = bits + own * module.record.bits_per_weight(**settings, **inputs), codes + own
    return bits / codes
