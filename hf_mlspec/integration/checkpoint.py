"""Do a checkpoint's files fit the model that is about to load them? Asked before any of its memory is allocated."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ..formats.damage import require_values
from ..nn.packed import PackedLinear
from .safetensors_file import CHECKSUMS_KEY, StoredTensor, mapped, read_header, require_checksums

# Buffers of older checkpoints that transformers drops without a word.
_DROPPED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
_SHOWN = 4  # names in a message


@dataclass
class Checkpoint:
    """Safetensors files as their headers describe them."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    checksums: dict[Path, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def read(cls, files: Iterable[str | Path]) -> Checkpoint:
        """Every header of ``files``; ValueError naming a file that is truncated or damaged, or a tensor that two files
        hold."""
        found = cls()
        for file in map(Path, files):
            tensors, metadata = read_header(file)
            for tensor in tensors:
                if (other := found.tensors.setdefault(tensor.name, tensor)) is not tensor:
                    raise ValueError(f"{tensor.place} is also in {other.file}: remove the file that does not belong")
            found.checksums[file] = _checksums_of(file, metadata)
        return found

    def of(self, file: Path) -> list[StoredTensor]:
        """The tensors of one of the files."""
        return [tensor for tensor in self.tensors.values() if tensor.file == file]

    @property
    def place(self) -> str:
        """The file, or the folder and how many, for messages."""
        files = list(self.checksums)
        return str(files[0]) if len(files) == 1 else f"the {len(files)} files of {files[0].parent}"


def _checksums_of(file: Path, metadata: dict[str, str]) -> dict[str, str]:
    try:
        return dict(json.loads(metadata.get(CHECKSUMS_KEY, "{}")))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: its checksums cannot be read ({error})") from error


def require_packed(checkpoint: Checkpoint, model: PreTrainedModel, packed: set[str]) -> None:
    """What a packed ``model``, still without memory, is to load is there, fits, and is what was saved.

    packed: names of the 4-bit parameters in ``model.state_dict()``. ValueError (TypeError for a dtype) naming tensor,
    file and numbers for tensors that are missing, unknown, of another shape or dtype, whose bytes have another
    checksum, or with scales and zero points that no quantizer writes, and for files of different saves. Where the
    checkpoint was saved from another class (a base model without its head), only the packed tensors must be complete,
    as transformers has it.
    """
    _require_one_save(checkpoint)
    expected = model.state_dict()
    stored, merged = _by_name_in_model(checkpoint, model, expected)
    same_class = type(model).__name__ in (model.config.architectures or [type(model).__name__])
    _require_complete(checkpoint, stored, model, expected.keys() if same_class else packed)
    if same_class:
        _require_nothing_else(stored, model, expected.keys())
    for name, tensor in stored.items():
        if name in expected and name not in merged:
            _require_fit(tensor, expected[name], name in packed)
    for file, sums in checkpoint.checksums.items():
        require_checksums(file, checkpoint.of(file), sums)
    _require_packed_values(stored, packed)
    _require_whole_weights(stored, model)


def require_sources(checkpoint: Checkpoint, model: PreTrainedModel, sources: set[str]) -> None:
    """The weights that are to be quantized, by their names in ``model``, are in the files and of its shapes;
    ValueError naming one that is not."""
    expected = model.state_dict()
    stored, merged = _by_name_in_model(checkpoint, model, expected)
    _require_complete(checkpoint, stored, model, sources)
    for name in sources - merged:
        if name in stored:
            _require_fit(stored[name], expected[name], False)


def _require_one_save(checkpoint: Checkpoint) -> None:
    # Shards of another model may fit, each whole in itself; but every file lists the checksums of all tensors.
    lists = {file: sums for file, sums in checkpoint.checksums.items() if sums}
    first = next(iter(lists), None)
    for file, sums in lists.items():
        if sums != lists[first]:
            differ = sum(sums.get(name) != lists[first].get(name) for name in sums.keys() | lists[first].keys())
            raise ValueError(
                f"{file} and {first} are of different saves: the checksums they list differ for {differ} of "
                f"{len(sums)} tensors; restore the files that were saved together"
            )


def _by_name_in_model(
    checkpoint: Checkpoint, model: PreTrainedModel, expected: dict[str, torch.Tensor]
) -> tuple[dict[str, StoredTensor], set[str]]:
    """Stored tensors by the names under which transformers will load them, and those names that several tensors will
    be merged into, of which one is given."""
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    found, merged = {}, set()
    for name, tensor in checkpoint.tensors.items():
        if name not in expected:
            name, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
            merged |= {name} if pattern is not None else set()
        found[name] = tensor
    return found, merged


def _require_complete(
    checkpoint: Checkpoint, stored: dict[str, StoredTensor], model: PreTrainedModel, names: Iterable[str]
) -> None:
    tied = model.all_tied_weights_keys
    partners = {**tied, **{source: target for target, source in tied.items()}}
    may_miss = _pattern(model._keys_to_ignore_on_load_missing)
    missing = [n for n in names if n not in stored and partners.get(n) not in stored and not may_miss.search(n)]
    if missing:
        raise ValueError(
            f"{len(missing)} tensors of {type(model).__name__} are missing from {checkpoint.place}: {_shown(missing)}"
            "; download or write the checkpoint again"
        )


def _require_nothing_else(stored: dict[str, StoredTensor], model: PreTrainedModel, names: Iterable[str]) -> None:
    may_be = _pattern([*(model._keys_to_ignore_on_load_unexpected or ()), *_DROPPED])
    known = {*names, *model.all_tied_weights_keys}
    unknown = [name for name in stored if name not in known and not may_be.search(name)]
    if unknown:
        first = stored[unknown[0]]
        raise ValueError(
            f"{len(unknown)} tensors belong to no part of {type(model).__name__} as config.json describes it: "
            f"{_shown(unknown)}, the first in {first.file}; restore the config.json that was saved with them"
        )


def _pattern(patterns: Iterable[str] | None) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns or ()) or r"(?!)")  # (?!) matches nothing


def _require_fit(stored: StoredTensor, expected: torch.Tensor, packed: bool) -> None:
    if stored.shape != tuple(expected.shape):
        fewer = len(stored.shape) == expected.ndim and stored.shape < tuple(expected.shape)
        raise ValueError(
            f"{stored.place} has shape {list(stored.shape)}, config.json makes it {list(expected.shape)}: it is "
            f"{'truncated' if fewer else 'of another model, or config.json is'}; restore the files saved together"
        )
    floats = stored.dtype is not None and stored.dtype.is_floating_point and expected.is_floating_point()
    if stored.dtype != expected.dtype and (packed or not floats):
        raise TypeError(f"{stored.place} is {stored.dtype}, config.json makes it {expected.dtype}")


def _require_packed_values(stored: dict[str, StoredTensor], packed: set[str]) -> None:
    by_file: dict[Path, list[StoredTensor]] = {}
    for name in packed & stored.keys():
        if name.endswith(("_scale", "_zero")):
            by_file.setdefault(stored[name].file, []).append(stored[name])
    for file, tensors in by_file.items():
        with mapped(file) as contents:
            for tensor in tensors:
                module, _, part = tensor.name.rpartition(".")
                try:
                    require_values(module, part, tensor.read(contents))
                except ValueError as error:
                    raise ValueError(f"{error} (in {file})") from error


def _require_whole_weights(stored: dict[str, StoredTensor], model: PreTrainedModel) -> None:
    """Of formats whose tensors say more together than each by itself: planes, codebooks, escapes."""
    for path, module in model.named_modules():
        if not isinstance(module, PackedLinear) or not module.record.stays_whole:
            continue
        held = {f"weight_{part}": stored.get(f"{path}.weight_{part}") for part in module.record.parts}
        try:
            weight = module.record.weight(**{name: _read(tensor) for name, tensor in held.items()}, name=path)
            weight.validate(module.out_features, module.in_features)
        except ValueError as error:
            files = sorted({str(tensor.file) for tensor in held.values() if tensor is not None})
            raise ValueError(f"{error} (in {', '.join(files)})") from error


def _read(tensor: StoredTensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    with mapped(tensor.file) as contents:
        return tensor.read(contents)


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
