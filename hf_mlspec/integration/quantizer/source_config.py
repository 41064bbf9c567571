"""Which quantization_config did a checkpoint of another library come with, and is it one that is read?"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.utils import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...checkpoints.readers import is_readable, reader_for

SOURCE_METHOD = "mlspec-source"
_OLD_CONFIG = "quantize_config.json"  # of GPTQ folders whose config.json says nothing


class SourceConfig(QuantizationConfigMixin):
    """A checkpoint of another library, to be read into the formats of this one.

    source: its ``quantization_config``. ValueError, naming the kind, for one that is not read.
    """

    def __init__(self, source: Mapping[str, Any], **ignored: Any) -> None:
        source = source.to_dict() if isinstance(source, QuantizationConfigMixin) else source
        reader_for(source)
        self.quant_method, self.source = SOURCE_METHOD, copy.deepcopy(dict(source))

    @classmethod
    def of(cls, name: str) -> SourceConfig:
        """That of a folder or hub name. ValueError where it is not quantized, or by something that is not read."""
        found = source_of(name)
        if found is None:
            raise ValueError(
                f"{name!r} holds no quantization_config in its config.json and no {_OLD_CONFIG}: it is not quantized, "
                "load it as it is"
            )
        return cls(found)


def source_of(name: str) -> dict[str, Any] | None:
    """The ``quantization_config`` of a folder or hub name as a dict, None where there is none."""
    config = AutoConfig.from_pretrained(name)
    found = getattr(config, "quantization_config", None)
    if found is None:
        found = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if found is None:
        old = cached_file(name, _OLD_CONFIG, _raise_exceptions_for_missing_entries=False)
        found = json.loads(Path(old).read_bytes()) if old is not None else None
    return found.to_dict() if isinstance(found, QuantizationConfigMixin) else found


def loading_options(name: str) -> dict[str, Any]:
    """What from_pretrained takes to read the checkpoint of a folder or hub name with the readers of this package; {}
    where it is none of theirs."""
    found = source_of(name)
    if found is None or not is_readable(found):
        return {}
    config = AutoConfig.from_pretrained(name)
    config.quantization_config = {"quant_method": SOURCE_METHOD, "source": found}
    return {"config": config}


def is_gguf(name: str | os.PathLike) -> bool:
    """Whether ``name`` is a file that ends as GGUF files do."""
    path = Path(name)
    return path.suffix.lower() == ".gguf" and path.is_file()
