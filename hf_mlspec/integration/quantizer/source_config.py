"""Which quantization_config did a checkpoint of another library come with, and is it one that is read?"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...checkpoints.anyprecision import AnyPrecisionReader
from ...checkpoints.gguf import GgufReader
from ...checkpoints.readers import is_readable, reader_for
from ..dtype import dtype_named
from ..json_object import read_object

SOURCE_METHOD = "mlspec-source"
GGUF_SOURCE_METHOD = "mlspec-gguf"
# Options of from_pretrained that say where a file is found.
_WHERE = (
    "cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token",
    "trust_remote_code",
)  # fmt: skip
# A config.json with one of them could have any file of this machine read.
_MADE_HERE = (GgufReader.method, SOURCE_METHOD, GGUF_SOURCE_METHOD)
_OLD_CONFIG = "quantize_config.json"  # of GPTQ folders whose config.json says nothing


class _Made(dict):
    """A ``quantization_config`` that was put together in memory: what is read from a JSON file is a plain dict."""


class SourceConfig(QuantizationConfigMixin):
    """A checkpoint of another library, to be read into the formats of this one.

    source: its ``quantization_config``. ValueError, naming the kind, for one that is not read. reader: reads it.
    """

    def __init__(self, source: Mapping[str, Any], **ignored: Any) -> None:
        source = source.to_dict() if isinstance(source, QuantizationConfigMixin) else source
        self.quant_method, self.source = SOURCE_METHOD, _Made(copy.deepcopy(dict(source)))
        self.reader = reader_for(self.source)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """What transformers calls for the ``quantization_config`` of a model's config. ValueError for one that was
        read from a file, as only this package makes them."""
        if not isinstance(config_dict.get("source"), _Made):
            _require_not_made_here(config_dict, "config.json")
        return super().from_dict(config_dict, *args, **options)

    def __deepcopy__(self, memo: dict) -> SourceConfig:
        """transformers copies configs often; a reader, which may hold the header of a file, has no state."""
        made = copy.copy(self)
        made.source = copy.deepcopy(self.source, memo)
        return made

    def to_dict(self) -> dict[str, Any]:
        """Without the reader."""
        return {"quant_method": self.quant_method, "source": copy.deepcopy(self.source)}

    @classmethod
    def of(cls, name: str, **options: Any) -> SourceConfig:
        """That of a folder or hub name, or of a GGUF file: its path, or ``gguf_file`` in the folder. options: of
        AutoConfig.from_pretrained, such as revision. ValueError where it is not quantized, or by something that is not
        read."""
        file = find_gguf(name, options)
        if file is not None:
            return GgufSourceConfig({"quant_method": GgufReader.method, "file": file})
        found = source_in(read_config(name, options), name)
        if found is None and not Path(name).is_dir():
            asked = {key: options[key] for key in _WHERE if key in options and key != "trust_remote_code"}
            found = _older(cached_file(name, _OLD_CONFIG, _raise_exceptions_for_missing_entries=False, **asked))
        if found is None:
            raise ValueError(
                f"{name!r} holds no quantization_config in its config.json and no {_OLD_CONFIG}: it is not quantized, "
                "load it as it is"
            )
        return cls(found)


class GgufSourceConfig(SourceConfig):
    """A GGUF file that from_pretrained is given as ``gguf_file``."""

    def __init__(self, source: Mapping[str, Any], **ignored: Any) -> None:
        super().__init__(source)
        self.quant_method = GGUF_SOURCE_METHOD


def find_gguf(name: str, options: Mapping[str, Any]) -> str | None:
    """The path of a GGUF file: ``name``, or the option ``gguf_file`` in that folder or hub name; None where neither is
    one. ValueError for a file that is not there."""
    file = options.get("gguf_file")
    if file is None:
        return name if is_gguf(name) else None
    if Path(name).is_dir():
        places = Path(name, options.get("subfolder") or "", file), Path(file)
        found = next((place for place in places if place.is_file()), None)
    else:
        asked = {key: options[key] for key in _WHERE if key in options and key != "trust_remote_code"}
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=False, **asked)
    if found is None:
        raise ValueError(f"{name!r} holds no {file}: name a GGUF file that is there as gguf_file")
    return os.fspath(found)


def require_no_other(asked: object, name: str | os.PathLike) -> None:
    """ValueError where a quantization_config is asked for beside that of a GGUF file."""
    if asked is not None:
        raise ValueError(
            f"{os.fspath(name)!r} is quantized already: leave quantization_config, {type(asked).__name__}, out"
        )


def read_config(name: str, options: Mapping[str, Any]) -> PreTrainedConfig:
    """The config of a folder or hub name, found as from_pretrained with these options finds it. ValueError naming a
    config.json that is damaged, or whose ``quantization_config`` or dtype is no such thing."""
    given = options.get("config")
    if isinstance(given, PreTrainedConfig):
        return copy.deepcopy(given)
    file = Path(name, options.get("subfolder") or "", "config.json")
    if file.is_file():
        told = read_object(file)
        _require_quantization(told.get("quantization_config"), str(file))
        for word in ("dtype", "torch_dtype"):
            dtype_named(told.get(word), f"{file}: {word}")
    return AutoConfig.from_pretrained(name, **{key: options[key] for key in _WHERE if key in options})


def source_in(config: PreTrainedConfig, name: str) -> dict[str, Any] | None:
    """The ``quantization_config`` of a folder or hub name as a dict, None where there is none. Older GPTQ folders have
    it in a file of its own; a hub is not asked for that. Any-Precision's settings are an entry of the config."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        found = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if found is None and getattr(config, AnyPrecisionReader.method, None) is not None:
        found = {"quant_method": AnyPrecisionReader.method, "anyprec": config.anyprec}
    if found is None:
        return _older(Path(name) / _OLD_CONFIG)
    if isinstance(found, QuantizationConfigMixin):
        return found.to_dict()
    _require_quantization(found, f"the config.json of {name!r}")
    return found


def _older(file: str | os.PathLike | None) -> dict[str, Any] | None:
    if file is None or not Path(file).is_file():
        return None
    found = read_object(file)
    _require_method(found, str(file))
    return found


def _require_quantization(found: object, where: str) -> None:
    """ValueError unless the ``quantization_config`` of a config.json, or None, is an object with a word for its
    quant_method, and of a kind that stands in files."""
    if found is None:
        return
    if not isinstance(found, dict):
        raise ValueError(
            f"{where} is damaged: its quantization_config is {found!r:.60}, an object was expected; restore the file "
            "that was saved with the weights"
        )
    _require_method(found, where)


def _require_method(found: Mapping[str, Any], where: str) -> None:
    method = found.get("quant_method")
    if not isinstance(method, str | None):
        raise ValueError(
            f"{where} is damaged: its quant_method is {method!r:.60}, a word was expected; restore the file that was "
            "saved with the weights"
        )
    _require_not_made_here(found, where)


def _require_not_made_here(found: Mapping[str, Any], where: str) -> None:
    if found.get("quant_method") in _MADE_HERE:
        raise ValueError(
            f"{where} has a quantization_config of quant_method {found['quant_method']!r}, which is made in memory "
            "and stands in no file: restore the config.json that was saved with the weights; a GGUF file is named as "
            "gguf_file"
        )


def loading_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What from_pretrained takes beside ``options`` to read the checkpoint of a folder or hub name with the readers of
    this package; {} where it is none of theirs."""
    if options.get("quantization_config") is not None:
        return {}
    config = read_config(name, options)
    found = source_in(config, name)
    if found is None or not is_readable(found):
        return {}
    config.quantization_config = {"quant_method": SOURCE_METHOD, "source": _Made(found)}
    return {"config": config}


def is_gguf(name: str | os.PathLike) -> bool:
    """Whether ``name`` is a file that ends as GGUF files do."""
    path = Path(name)
    return path.suffix.lower() == ".gguf" and path.is_file()
