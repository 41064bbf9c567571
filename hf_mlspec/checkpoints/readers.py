"""Which reader does a checkpoint get? READERS has one for every ``quant_method`` that is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .anyprecision import AnyPrecisionConfig, AnyPrecisionReader
from .autoround import AutoRoundReader
from .awq import AwqReader
from .compressed import CompressedReader
from .gguf import GgufReader
from .gguf_file import open_gguf
from .gguf_names import row_orders
from .gpt_oss import GptOssReader
from .gptq import GptqReader
from .layer import Reader


def _gguf(config: Mapping[str, Any]) -> GgufReader:
    """Of a config that names its file, which is opened here and nowhere else."""
    file = open_gguf(config["file"])
    return GgufReader(row_orders(file), file)


def _anyprecision(config: Mapping[str, Any]) -> AnyPrecisionReader:
    return AnyPrecisionReader(AnyPrecisionConfig.of_config(config))


READERS: dict[str, Callable[[Mapping[str, Any]], Reader]] = {
    GptqReader.method: GptqReader,
    AwqReader.method: AwqReader,
    AutoRoundReader.method: AutoRoundReader,
    CompressedReader.method: CompressedReader,
    GgufReader.method: _gguf,
    GptOssReader.method: GptOssReader,
    AnyPrecisionReader.method: _anyprecision,
}
# What stock transformers needs to load such a checkpoint, by import name.
PACKAGES = {
    "gptq": ("optimum", "gptqmodel"),
    "awq": ("gptqmodel",),
    "auto-round": ("auto_round",),
    "compressed-tensors": ("compressed_tensors",),
}


def method_of(config: object) -> str:
    """The ``quant_method`` of a quantization_config; an older GPTQ folder names none and has ``bits``. "" without."""
    if not isinstance(config, Mapping):
        return ""
    method = config.get("quant_method")
    method = getattr(method, "value", method)
    if method is None and "bits" in config and ("desc_act" in config or "sym" in config):
        return GptqReader.method
    return str(method or "")


def is_readable(config: object) -> bool:
    """Whether a quantization_config is of a kind that is read."""
    return method_of(config) in READERS


def reader_for(config: Mapping[str, Any]) -> Reader:
    """The reader of a checkpoint with this ``quantization_config``. ValueError, naming it, for a kind that is not read
    or a variant of one."""
    method = method_of(config)
    if method not in READERS:
        known = ", ".join(sorted(READERS))
        raise ValueError(f"quant_method {method!r} is not read: {known} are")
    return READERS[method](config)
