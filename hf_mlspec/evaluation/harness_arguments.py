"""What may a user say about a model in lm-eval's --model_args? Read and checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import MLSpecConfig, SpeculationConfig
from ..integration.levels.chain_text import parse_levels
from ..integration.levels.load import DTYPES
from ..integration.levels.resolve import check_words
from ..integration.quantizer.packing import switch_of

_SPECULATION = tuple(field.name for field in fields(SpeculationConfig))
BATCH_SIZE = 8


@dataclass
class Arguments:
    """The arguments of MLSpecLM, which describes them; those of SpeculationConfig are in `speculation`."""

    pretrained: str | PreTrainedModel
    tokenizer: Any = None
    levels: str | list[Any] | None = None
    format: str | None = None
    group_size: int | None = None
    precision: str | None = None
    dtype: str | torch.dtype = "bfloat16"
    device: str | None = None
    batch_size: int | str = BATCH_SIZE
    max_batch_size: int | None = None
    max_length: int | None = None
    max_gen_toks: int = 256  # lm-eval's own default
    add_bos_token: bool | None = None
    prefix_token_id: int | None = None
    chat_template_args: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    think_end_token: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    seed: int = 1234
    journal: str | Path | None = None
    speculation: SpeculationConfig | dict[str, Any] | None = None

    @classmethod
    def of(cls, given: dict[str, Any]) -> Arguments:
        """Raises TypeError or ValueError for what is unknown or cannot be, naming it and what is possible."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(given) - known - {*_SPECULATION})
        if unknown:
            raise ValueError(f"unknown model argument {', '.join(unknown)}; there are "
                             f"{', '.join(sorted(known | {*_SPECULATION}))}")
        if "pretrained" not in given:
            raise ValueError("no model is named: add pretrained=FOLDER to the model arguments")
        options = {name: value for name, value in given.items() if name in _SPECULATION}
        own = {name: value for name, value in given.items() if name in known}
        if options and own.get("speculation") is not None:
            raise ValueError(f"{', '.join(sorted(options))} and speculation set the same options: use one of the two")
        return cls(**({"speculation": _per_level(options)} | own))

    def __post_init__(self) -> None:
        self.speculation = SpeculationConfig.of(self.speculation)
        self.levels = parse_levels(self.levels)
        check_words(self.levels)
        for name in ("num_draft_tokens", "confidence_threshold"):
            self.speculation.of_level(name, 0, len(self.levels)) if self.levels else None
        self.batch_size = _batch_size(self.batch_size, self.max_batch_size)
        for name in ("max_gen_toks", "max_length"):
            value = getattr(self, name)
            if value is not None and not _is_count(value):
                raise ValueError(f"{name} is {value!r}, it must be a positive integer")
        if self.dtype not in ("auto", *DTYPES, *DTYPES.values()):
            raise ValueError(f"dtype is {self.dtype!r}, it must be one of auto, {', '.join(DTYPES)}")
        if self.think_end_token is not None and not isinstance(self.think_end_token, str):
            raise ValueError(f"think_end_token is {self.think_end_token!r}, it must be a text")
        if not isinstance(self.seed, int):
            raise ValueError(f"seed is {self.seed!r}, it must be an integer")
        _require_folder_of(self.journal)
        if self.quantization is not None and self.precision is not None:
            switch_of(self.quantization).bits_of(self.precision)
        if not isinstance(self.pretrained, str):
            self._check_live()

    @property
    def quantization(self) -> MLSpecConfig | None:
        """How the model is packed while it loads; ValueError for settings that do not go together."""
        if self.format is None:
            if self.group_size is not None:
                raise ValueError(f"group_size={self.group_size} without a format: add format=int4, or leave it out")
            return None
        return MLSpecConfig(self.format, **({} if self.group_size is None else {"group_size": self.group_size}))

    @property
    def load_options(self) -> dict[str, Any]:
        """For from_pretrained, of models and tokenizers."""
        options = {"revision": self.revision, "trust_remote_code": self.trust_remote_code or None}
        return {name: value for name, value in options.items() if value is not None}

    def _check_live(self) -> None:
        if not isinstance(self.pretrained, PreTrainedModel):
            raise TypeError(f"pretrained is a {type(self.pretrained).__name__}, it must be a folder, a hub name or a "
                            "transformers model")
        if self.format is not None or self.load_options:
            raise ValueError("format, revision and trust_remote_code are for a model that is loaded; pretrained is a "
                             f"{type(self.pretrained).__name__} already: pass its folder, or leave them out")


def _require_folder_of(journal: str | Path | None) -> None:
    """No folder is created for a journal: with a typo a half-finished run would start again elsewhere."""
    folder = None if journal is None else Path(journal).parent
    if folder is not None and not folder.is_dir():
        raise ValueError(f"journal is {str(journal)!r}, and no folder {str(folder)!r} is there: make it, or name a "
                         "file elsewhere")


def _per_level(options: dict[str, Any]) -> dict[str, Any]:
    """Options of SpeculationConfig whose numbers per level may be joined by "+" ("12+5")."""
    read = dict(options)
    for name, kind in (("num_draft_tokens", int), ("confidence_threshold", float)):
        value = options.get(name)
        if isinstance(value, str):
            try:
                numbers = [kind(part) for part in value.split("+")]
            except ValueError as error:
                said = f'{name} is {value!r}, it must be a number, or one per level joined by "+"'
                raise ValueError(said) from error
            read[name] = numbers[0] if len(numbers) == 1 else numbers
    return read


def _batch_size(value: Any, most: Any) -> int:
    """A number, also as text; "auto" and "auto:N" are max_batch_size, or 8."""
    if isinstance(value, str) and value.partition(":")[0] == "auto":
        value = BATCH_SIZE if most is None else most
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if not _is_count(value):
        raise ValueError(f"batch_size is {value!r}, it must be a positive integer or auto")
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
