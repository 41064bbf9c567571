"""Where do the model and the tokenizer behind the harness come from, and what do its answers depend on?"""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .. import precision_switch
from ..formats import FORMATS
from ..integration.levels.load import DTYPES, read_model, read_tokenizer, require_folder
from ..integration.levels.words import parse_level
from .certificate_identity import combined, hash_configuration, hash_folder, hash_json, hash_parameters, kernels
from .harness_arguments import Arguments

_ARITHMETIC = ("torch", "transformers")  # packages that decide bits; what makes prompts is in the keys of requests
_SETTINGS = ("precision", "max_length", "add_bos_token", "prefix_token_id", "think_end_token", "seed", "max_gen_toks")


def load_model(asked: Arguments) -> PreTrainedModel:
    """The model, packed while it loads where a format is given; a live one as it is. ValueError where it cannot be."""
    if not isinstance(asked.pretrained, str):
        model = asked.pretrained
    else:
        require_folder(asked.pretrained)
        place = _device(asked.device)
        config = asked.quantization
        options = asked.load_options | ({} if config is None else {"quantization_config": config})
        model = read_model(asked.pretrained, DTYPES.get(asked.dtype, asked.dtype), **options)
        found = getattr(model.config, "quantization_config", None)
        if config is not None and getattr(found, "format", None) != config.format:
            raise ValueError(f"{asked.pretrained!r} is not stored as {asked.format}, but packed: leave format out")
        model = (model if model.device == place else model.to(place)).eval()
    if asked.precision is not None:
        _check_precision(model, asked.precision)
    return model


def _check_precision(model: PreTrainedModel, precision: str) -> None:
    try:
        switch = precision_switch(model)
    except ValueError as error:
        *others, last = [record.written for record in FORMATS.values()]
        raise ValueError(f"precision={precision} is what is read of packed weights: add format={', '.join(others)} or "
                         f"{last} ({error})") from error
    switch.bits_of(precision)


def _device(device: str | None) -> torch.device:
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error


def load_tokenizer(asked: Arguments) -> Any:
    """The one that was given, or that of the model's folder. ValueError where there is none."""
    if asked.tokenizer is not None and not isinstance(asked.tokenizer, str):
        return asked.tokenizer
    model = asked.pretrained
    place = asked.tokenizer or (model if isinstance(model, str) else model.config.name_or_path)
    if not place:
        raise ValueError(f"pretrained is a {type(model).__name__} from no folder: pass its tokenizer as well")
    require_folder(place)
    return read_tokenizer(place, **asked.load_options)


def identity(model: PreTrainedModel, tokenizer: Any, asked: Arguments) -> dict[str, Any]:
    """What the answers depend on, for a journal: no paths, and nothing that may change while answers do not."""
    return {
        **chain_identity(model, tokenizer, asked.levels),
        "speculation": vars(asked.speculation),
        "dtype": str(model.dtype).removeprefix("torch."),
        **{name: getattr(asked, name) for name in _SETTINGS},
    }


def chain_identity(model: PreTrainedModel, tokenizer: Any, levels: Iterable[Any]) -> dict[str, Any]:
    """What answers of a target with these levels depend on, whatever asks for them."""
    compiled = kernels(model.device.type)
    return {
        "weights": hash_parameters(model),
        "configuration": hash_configuration(model),
        "tokenizer": tokenizer_hash(tokenizer),
        "levels": [level_identity(level) for level in levels],
        "device": model.device.type,
        "kernels": {"instruction_set": compiled["instruction_set"], "sha256": compiled["sha256"]},
        "versions": versions(),
    }


def describe(model: PreTrainedModel, asked: Arguments) -> dict[str, Any]:
    """What lm-eval writes of the model beside its results."""
    config = getattr(model.config, "quantization_config", None)
    return {
        "model_num_parameters": model.num_parameters(),
        "model_dtype": str(model.dtype),
        "levels": [level_name(level) for level in asked.levels],
        "format": getattr(config, "format", None),
        "precision": asked.precision,
        "speculation_config": vars(asked.speculation),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of the packages whose arithmetic it is."""
    from .. import __version__

    return {"hf_mlspec": __version__, **{name: version(name) for name in _ARITHMETIC}}


def level_name(level: Any) -> str:
    """A level as tables print it: a word, the last part of a path, or the name of what was passed."""
    if isinstance(level, str):
        return level.rstrip("/").rpartition("/")[2]
    config = getattr(level, "config", None)
    return getattr(level, "name", None) or getattr(config, "name_or_path", None) or type(level).__name__


def level_identity(level: Any) -> Any:
    """The name, and the hash of the weights behind it where they are at hand."""
    if isinstance(level, nn.Module):
        return {"level": type(level).__name__, "weights": hash_parameters(level)}
    word = parse_level(level) if isinstance(level, str) else None
    if word is None or word.path is None or not Path(word.path).is_dir():
        return level_name(level)
    return {"level": level_name(level), "weights": combined(hash_folder(word.path)[1])}


def tokenizer_hash(tokenizer: Any) -> str:
    """Of what it makes of texts, without what calls leave on it."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    said = tokenizer.get_vocab() if fast is None else json.loads(fast.to_str())
    passing = ("padding", "truncation")  # of the last call
    return hash_json([type(tokenizer).__name__, {name: said[name] for name in said if name not in passing}])
