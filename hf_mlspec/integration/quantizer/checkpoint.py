"""Do a checkpoint's files fit the model that is about to load them? Asked before any of its memory is allocated."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ...checkpoints.pickles import pickled_tensors
from ...checkpoints.safetensors_file import CHECKSUMS_KEY, StoredTensor, mapped, read_header, require_checksums
from ...formats.damage import ValueCheck
from ...nn.nested_experts import require_whole
from ...nn.packed import PackedLinear, PackedModule
from ..json_object import read_object

# Buffers of older checkpoints that transformers drops without a word.
_DROPPED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
PICKLED = ".bin"  # the ending of a state dict of torch.save
_SHOWN = 4  # names in a message
_MOST_DAMAGED = 2  # characters in which a damaged key still shows what it was
_INDEXES = ("*.safetensors.index*.json", "*.bin.index*.json")
_SIZES = ("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "max_position_embeddings")


@dataclass
class Checkpoint:
    """Safetensors files as their headers describe them, or state dicts of torch.save."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    checksums: dict[Path, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def read(cls, files: Iterable[str | Path]) -> Checkpoint:
        """Every header of ``files``; ValueError naming a file that is truncated or damaged, or a tensor that two files
        hold."""
        found = cls()
        for file in map(Path, files):
            tensors, metadata = (pickled_tensors(file), {}) if file.suffix == PICKLED else read_header(file)
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
    for key in metadata:
        if key != CHECKSUMS_KEY and _nearly(key, CHECKSUMS_KEY):
            raise ValueError(
                f"{file} is damaged: its metadata has {key!r} where {CHECKSUMS_KEY!r} was saved; download or write "
                "the checkpoint again"
            )
    try:
        sums = json.loads(metadata.get(CHECKSUMS_KEY, "{}"))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: its checksums cannot be read ({error})") from error
    if not isinstance(sums, dict) or not all(isinstance(value, str) for value in sums.values()):
        raise ValueError(
            f"{file} is damaged: its checksums cannot be read (its {CHECKSUMS_KEY} is no JSON object of texts); "
            "download or write the checkpoint again"
        )
    return sums


def _nearly(key: str, known: str) -> bool:
    return len(key) == len(known) and sum(a != b for a, b in zip(key, known, strict=True)) <= _MOST_DAMAGED


def require_own_shards(*folders: str | Path) -> None:
    """Every index in ``folders`` sends its tensors to weight files of its folder. ValueError naming index, tensor and
    entry where one is absolute, climbs out of the folder or is of another kind, and for an index that cannot be read.

    A hub name, which is no folder here, passes: the hub serves a repository's own files only.
    """
    for index in sorted({file for folder in folders for kind in _INDEXES for file in Path(folder).glob(kind)}):
        told = read_object(index)
        try:
            entries = told["weight_map"].items()
        except (KeyError, AttributeError) as error:
            raise ValueError(f"{index} is damaged: it holds no weight_map that can be read ({error!r})") from error
        kind = ".bin" if ".bin." in index.name else ".safetensors"
        for name, entry in entries:
            path = PurePath(entry) if isinstance(entry, str) else PurePath()
            if path.is_absolute() or ".." in path.parts or path.suffix != kind:
                raise ValueError(
                    f"{index} says that {name} lies in {entry!r}: a weight_map names {kind} files in the folder of "
                    "the index; restore the index that was saved with them"
                )


def require_plain(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    """Check that tensors stored unquantized have the shapes that config.json gives them in ``model``, which has no
    packed modules yet; ValueError with tensor, file, both shapes and the setting. It comes first because errors about
    packed modules of wrong sizes are less clear.
    """
    expected = model.state_dict()
    held = {name: tensor for name, tensor in checkpoint.tensors.items() if name in expected}
    plain = {name: t for name, t in held.items() if t.dtype is not None and t.dtype.is_floating_point}
    _require_fit([(tensor, expected[name], False) for name, tensor in plain.items()], model)


def require_packed(
    checkpoint: Checkpoint, model: PreTrainedModel, packed: set[str], *, headers_only: bool = False
) -> None:
    """What a packed ``model``, still without memory, is to load is there, fits, and is what was saved.

    packed: names of the 4-bit parameters in ``model.state_dict()``. ValueError (TypeError for a dtype) naming tensor,
    file and numbers for tensors that are missing, unknown, of another shape or dtype, whose bytes have another
    checksum, or with scales and zero points that no quantizer writes, and for files of different saves. Where the
    checkpoint was saved from another class (a base model without its head), only the packed tensors must be complete,
    as transformers has it. One warning for tensors that no file lists a checksum of: every save lists all.
    headers_only: look at no byte of a tensor, and so at no checksum and no value.
    """
    sums = _require_one_save(checkpoint)
    expected = model.state_dict()
    stored, merged = _by_name_in_model(checkpoint, model, expected)
    same_class = type(model).__name__ in (model.config.architectures or [type(model).__name__])
    _require_complete(checkpoint, stored, model, expected.keys() if same_class else packed)
    if same_class:
        _require_nothing_else(stored, model, expected.keys())
    fitting = [name for name in stored if name in expected and name not in merged]
    _require_fit([(stored[name], expected[name], name in packed) for name in fitting], model)
    if headers_only:
        return
    for file in checkpoint.checksums:
        require_checksums(file, checkpoint.of(file), sums)
    _require_packed_values(stored, model)
    _require_whole_weights(stored, model)
    _warn_of_unchecked(checkpoint, sums)


def require_sources(checkpoint: Checkpoint, model: PreTrainedModel, sources: set[str]) -> None:
    """The weights that are to be quantized, by their names in ``model``, are in the files and of its shapes;
    ValueError naming one that is not."""
    expected = model.state_dict()
    stored, merged = _by_name_in_model(checkpoint, model, expected)
    _require_complete(checkpoint, stored, model, sources)
    held = [name for name in stored if name in sources - merged]
    _require_fit([(stored[name], expected[name], False) for name in held], model)


def stored_dtype(name: str) -> torch.dtype | None:
    """Of the first table among the safetensors files of a folder; None for another name, or where there is none."""
    for file in sorted(Path(name).glob("*.safetensors")):
        for tensor in read_header(file)[0]:
            if "embed" in tensor.name and tensor.dtype is not None and tensor.dtype.is_floating_point:
                return tensor.dtype
    return None


def require_named(checkpoint: Checkpoint, model: PreTrainedModel, ignored: set[str]) -> None:
    """The files hold what ``model`` has names for, and nothing else but ``ignored``; ValueError naming what is missing
    or unknown. A model of another class than was saved (without its head, or with another) is what transformers makes
    of it."""
    if type(model).__name__ not in (model.config.architectures or [type(model).__name__]):
        return
    expected = model.state_dict()
    stored, _ = _by_name_in_model(checkpoint, model, expected)
    _require_complete(checkpoint, stored, model, expected.keys())
    _require_nothing_else({name: stored[name] for name in stored if name not in ignored}, model, expected.keys())


def _require_one_save(checkpoint: Checkpoint) -> dict[str, str]:
    """The checksums that the files agree on."""
    # Shards of another model may fit, each whole in itself; but every file lists the checksums of all tensors.
    lists = {file: sums for file, sums in checkpoint.checksums.items() if sums}
    first = next(iter(lists), None)
    for file, sums in lists.items():
        if sums != (other := lists[first]):
            differ = sorted(name for name in sums.keys() | other.keys() if sums.get(name) != other.get(name))
            named = next((name for name in differ if ".transform_" in name), differ[0])
            raise ValueError(
                f"{file} and {first} are of different saves: the checksums they list differ for {len(differ)} of "
                f"{len(sums)} tensors, {named} among them; restore the files that were saved together"
            )
    return lists.get(first, {})


def _warn_of_unchecked(checkpoint: Checkpoint, sums: dict[str, str]) -> None:
    unknown = [tensor for tensor in checkpoint.tensors.values() if tensor.name not in sums]
    if unknown:
        warnings.warn(
            f"the metadata of {checkpoint.place} has no CRC-32 ({CHECKSUMS_KEY}) of {len(unknown)} of its "
            f"{len(checkpoint.tensors)} tensors, the first is {unknown[0].place}: whether their bytes are those that "
            "were saved was not checked; quantize the model again or, if you trust the files, save what was loaded",
            stacklevel=2,
        )


def _by_name_in_model(
    checkpoint: Checkpoint, model: PreTrainedModel, expected: dict[str, torch.Tensor]
) -> tuple[dict[str, StoredTensor], set[str]]:
    """Stored tensors by the names under which transformers will load them, and those names that several tensors will
    be merged into, of which one is given."""
    conversions = conversions_of(model)
    found, merged = {}, set()
    for name, tensor in checkpoint.tensors.items():
        if name not in expected:
            name, pattern = rename_source_key(name, *conversions, model.base_model_prefix, expected)
            merged |= {name} if pattern is not None else set()
        found[name] = tensor
    return found, merged


def conversions_of(model: PreTrainedModel) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """What transformers does to the names and the tensors of files of ``model``."""
    entries = get_model_conversion_mapping(model)
    renamings = [entry for entry in entries if isinstance(entry, WeightRenaming)]
    return renamings, [entry for entry in entries if isinstance(entry, WeightConverter)]


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


def _require_fit(found: list[tuple[StoredTensor, torch.Tensor, bool]], model: PreTrainedModel) -> None:
    """Stored tensors, what ``model`` expects, and whether it is packed."""
    wrong = [entry for entry in found if entry[0].shape != tuple(entry[1].shape)]
    if len(wrong) == 1 and wrong[0][2]:
        stored, expected, _ = wrong[0]
        fewer = len(stored.shape) == expected.ndim and stored.shape < tuple(expected.shape)
        raise _misfit(stored, expected, f"it is {'truncated' if fewer else 'of another model, or config.json is'}")
    if wrong:
        explained = ((one, _settings_behind(*one[:2], model)) for one in wrong)
        (stored, expected, _), settings = next((entry for entry in explained if entry[1]), (wrong[0], ""))
        raise _misfit(
            stored, expected, f"{settings}{len(wrong)} of {len(found)} tensors differ, config.json is of another model"
        )
    for stored, expected, packed in found:
        floats = stored.dtype is not None and stored.dtype.is_floating_point and expected.is_floating_point()
        if stored.dtype != expected.dtype and (packed or not floats):
            raise TypeError(f"{stored.place} is {stored.dtype}, config.json makes it {expected.dtype}")


def _misfit(stored: StoredTensor, expected: torch.Tensor, why: str) -> ValueError:
    return ValueError(
        f"{stored.place} has shape {list(stored.shape)}, config.json makes it {list(expected.shape)}: {why}; restore "
        "the files saved together"
    )


def _settings_behind(stored: StoredTensor, expected: torch.Tensor, model: PreTrainedModel) -> str:
    """The settings of config.json that give ``expected`` a size which is not the stored one, as in "hidden_size is 64
    there, "; empty where none does."""
    config = model.config.get_text_config()
    sizes = {name: getattr(config, name, None) for name in _SIZES}
    for heads in ("num_attention_heads", "num_key_value_heads"):
        count, width = getattr(config, heads, None), getattr(config, "head_dim", None)
        sizes[f"{heads} x head_dim"] = count * width if count and width else None
    pairs = zip(stored.shape, expected.shape, strict=False)
    wanted = {size for held, size in pairs if held != size and size > 1}
    names = [name for name, size in sizes.items() if size in wanted]
    return f"{' or '.join(names)} is {sizes[names[0]]} there, " if names else ""


def _require_packed_values(stored: dict[str, StoredTensor], model: PreTrainedModel) -> None:
    by_file: dict[Path, dict[str, tuple[StoredTensor, ValueCheck]]] = {}
    for name, check in _value_checks(stored, model):
        by_file.setdefault(stored[name].file, {})[name] = stored[name], check
    for file, checks in by_file.items():
        with mapped(file) as contents:
            for tensor, check in checks.values():
                module, _, tensor_name = tensor.name.rpartition(".")
                try:
                    check(module, tensor_name, tensor.read(contents))
                except ValueError as error:
                    raise ValueError(f"{error} (in {file})") from error


def _value_checks(stored: dict[str, StoredTensor], model: PreTrainedModel) -> Iterator[tuple[str, ValueCheck]]:
    """Of every stored part of a packed module, and of its transform, what is looked for in it."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name in module.names if isinstance(module, PackedModule) else ():
            for part, tensor in zip(module.record.parts, module.held(name), strict=True):
                key = f"{path}.{name}_{part}"
                check = module.record.value_check(part, tensor.dtype) if tensor is not None and key in stored else None
                if check is not None:
                    yield key, check
        if isinstance(module, PackedLinear) and module.transform.check is not None:
            keys = [f"{path}.transform_{name}" for name in module.transform_tensors()]
            check = module.transform.check(module.in_features)
            yield from ((key, check) for key in keys if key in stored)


def _require_whole_weights(stored: dict[str, StoredTensor], model: PreTrainedModel) -> None:
    """Of formats whose tensors say more together than each by itself: planes, codebooks, escapes."""
    for path, module in model.named_modules():
        for key in module.names if isinstance(module, PackedModule) and module.record.stays_whole else ():
            held = [stored.get(f"{path}.{key}_{part}") for part in module.record.parts]
            try:
                require_whole(module, key, module.record.weight.PARTS(*map(_read, held)), path)
            except ValueError as error:
                files = sorted({str(tensor.file) for tensor in held if tensor is not None})
                raise ValueError(f"{error} (in {', '.join(files)})") from error


def _read(tensor: StoredTensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    with mapped(tensor.file) as contents:
        return tensor.read(contents)


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
