"""What does a certificate say of the target, its levels, the machine and the prompts?

A certificate is published, so folders and files go by their last part alone.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.generation import LogitsProcessorList

from .. import __version__
from ..engines.choose import why_by_module
from ..engines.engine import Engine
from ..integration.adaptive import let_choose
from ..integration.config import SpeculationConfig
from ..integration.costs.identity import processor_name
from ..integration.levels.resolve import Level
from ..integration.levels.wiring import Chain, Wiring
from ..integration.levels.words import parse_level
from ..integration.processing import Prompts
from ..nn.switch import precision_switch
from ..routing.engine import WHY_BY_MODULE, RoutedEngine
from .certificate_identity import combined, hash_configuration, hash_folder, hash_json, hash_parameters
from .certificate_schema import HEAD

COMPILED, BY_MODULE, LOOKUP = "compiled decoder", "module by module", "lookup"
_KINDS = {"cast": "cast of the target to mxfp4", "precision": "the target at a lower precision",
          "routed": "the target at the planes that a router picks",
          "early_exit": "first layers of the target", "experts": "the target with fewer experts a token",
          "prompt_lookup": LOOKUP, "ngram": LOOKUP, "lookups": LOOKUP}


def chain_of(model: PreTrainedModel, tokenizer: Any, config: SpeculationConfig, levels: list[Level]) -> Chain:
    """The chain as a call of generate wires it up: which runners serve, and how far each level drafts."""
    wiring = Wiring(model, tokenizer, config, processors=LogitsProcessorList(),
                    prompts=Prompts(torch.zeros(1, 1, dtype=torch.int64), None), capacity=1)
    return let_choose(wiring, levels, "")


def target_entry(model: PreTrainedModel, folder: str | None, chain: Chain, config: SpeculationConfig,
                 ) -> dict[str, Any]:
    """Name, class, format, hashes, and what decoded it."""
    return {"name": last_part(folder or model.config.name_or_path) or type(model).__name__, **_identity(model, folder),
            "format": _format(model), "decoding": _decoding(model, chain.target.runner, config)}


def level_entries(given: Sequence[Any], levels: list[Level], chain: Chain, config: SpeculationConfig,
                  ) -> list[dict[str, Any]]:
    """One entry a level, from the largest down; hashes only where a level has weights."""
    drafting = list(_drafting(chain, len(levels)))
    entries = []
    for asked, level, runner, (count, threshold) in zip(given, levels, chain.runners, drafting, strict=True):
        entry = {"name": last_part(level.name), "kind": _kind(asked, level)}
        if level.is_head:
            entry |= _of_files(level.model, _folder(asked)) | {"decoding": {"how": BY_MODULE, "reason": "a head"}}
        elif level.model is not None:
            entry |= {**_identity(level.model, _folder(asked)), "decoding": _decoding(level.model, runner, config)}
        if level.bits is not None:
            entry |= {"weight_bits": level.bits.weight, "activation_bits": level.bits.activation}
        entry |= {"num_draft_tokens": count, "confidence_threshold": threshold}
        entries.append(entry | ({} if runner is None else _view(runner, chain)))
    return entries


def prompts_entry(tokenizer: Any, prompts: Sequence[str], name: str | None) -> dict[str, Any]:
    """File name, count and hash of the texts; the hash of their ids stands for the tokenizer."""
    ids = [list(tokenizer(prompt).input_ids) for prompt in prompts]
    return {"name": last_part(name) if name else None, "count": len(prompts), "sha256": hash_json(list(prompts)),
            "tokens": sum(map(len, ids)), "ids_sha256": hash_json(ids)}


def versions() -> dict[str, str]:
    """Of everything whose release can change a bit."""
    return {"hf_mlspec": __version__, "torch": torch.__version__, "transformers": transformers.__version__,
            "python": platform.python_version()}


def machine(device: torch.device) -> dict[str, Any]:
    """Processor or GPU, system, cores and threads; no name of the machine."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    return {"processor": name, "device": device.type, "system": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def last_part(path: str) -> str:
    """A folder's or a file's own name; a hub name keeps its organization."""
    if path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).exists():
        return path
    return Path(path).name if set(path) - {".", "/"} else Path(path).resolve().name


def _identity(model: PreTrainedModel, folder: str | None) -> dict[str, Any]:
    """Hashes of the files, where the model is known to come from a folder, and of what is in memory."""
    return {**_of_files(model, folder), "configuration_sha256": hash_configuration(model)}


def _of_files(model: nn.Module, folder: str | None) -> dict[str, Any]:
    configs, weights = hash_folder(folder) if folder else ([], [])
    return {"class": type(model).__name__, "weight_files": weights,
            "weights_sha256": combined(weights) if weights else None, "configuration_files": configs,
            "parameters_sha256": hash_parameters(model)}


def _folder(asked: Any) -> str | None:
    """Where the level a user named was loaded from; None for a hub name, and for what was not loaded or comes with the
    target."""
    word = parse_level(asked) if isinstance(asked, str) else None
    return word.path if word is not None and word.path is not None and Path(word.path).is_dir() else None


def _kind(asked: Any, level: Level) -> str:
    if level.is_head:
        own = isinstance(asked, str) and parse_level(asked).path is None
        return "MTP layer of the target's checkpoint" if own else HEAD
    if not isinstance(asked, str):
        return "model" if level.model is not None else LOOKUP
    word = parse_level(asked)
    return _KINDS.get(word.kind) or ("model cast to mxfp4" if word.cast else "model")


def _format(model: PreTrainedModel) -> dict[str, Any] | None:
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return None
    settings = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    packs = settings.get("quant_method") == "mlspec" and settings.get("format") is not None
    bits = precision_switch(model).activation_bits if packs else None
    return json.loads(json.dumps({**settings, "activation_bits": bits}, default=str))


def _decoding(model: PreTrainedModel, runner: Engine, config: SpeculationConfig) -> dict[str, Any]:
    if not runner.can.by_module:
        return {"how": COMPILED, "reason": None}
    if isinstance(runner, RoutedEngine):
        return {"how": BY_MODULE, "reason": WHY_BY_MODULE}
    return {"how": BY_MODULE, "reason": why_by_module(model, name=config.engine, prepare=config.prepare)}


def _view(runner: Engine, chain: Chain) -> dict[str, Any]:
    """What a level sees of the tokens, and how its own cache holds them."""
    kept = None if runner.follow is not None else runner.cache_format
    window = None if chain.seen and runner.can.draft_window else runner.draft_window
    return {"draft_window": window, "draft_cache": None if kept is None else kept.word}


def _drafting(chain: Chain, count: int) -> Iterator[tuple[int | None, float | None]]:
    """Per level how many tokens it drafts at most (None: calls choose round by round, which captured rounds do not),
    and the probability below which it stops (None: no such rule)."""
    chosen = chain.controller is not None and not chain.target.runner.can.capturable
    limit = chain.num_draft_tokens
    for level in chain.levels[:count]:
        drafter = level if hasattr(level, "threshold") else getattr(level, "inner", level)  # across tokenizers
        yield None if chosen else limit, getattr(drafter, "threshold", None)
        limit = getattr(drafter, "num_draft_tokens", 0)
