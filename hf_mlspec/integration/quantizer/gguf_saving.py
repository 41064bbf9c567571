"""How is a model of packed layers saved as a GGUF file? What the file will say is read back before one is begun."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ...checkpoints.gguf_file import GgufFile, open_gguf
from ...checkpoints.gguf_header import NewTensor, header, planned, size_of, write_tensor
from ...checkpoints.gguf_metadata import architecture_for, model_metadata, tokenizer_metadata
from ...checkpoints.gguf_names import Architecture, config_of, ggml_name, parameters, row_orders
from ...checkpoints.gguf_writer import TITLE, block_rows, ggml_type_of
from ...nn.linear import is_dense
from .foreign_saving import plain_weight
from .packing import packed_modules, packed_parameters
from .saving import staging

_FLOATS = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "MXFP4": 38}  # of llama.cpp: what most weights are
_QUANTIZATION_VERSION = 2
# Words of a configuration that change no product, or that the tokenizer decides.
_FREE = {
    "architectures", "dtype", "transformers_version", "initializer_range", "use_cache", "attention_dropout",
    "pretraining_tp", "max_window_layers", "bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path",
}  # fmt: skip


def save_gguf(
    model: PreTrainedModel, file: Path, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, str], list[str]]:
    """Write a model of packed linear layers, and its tokenizer, as one GGUF file; -> the types of the layers, by name,
    and the dense linear layers.

    The file is written beside and renamed; one that is there is replaced. Raises ValueError naming layer and reason,
    before anything is written, for what GGUF cannot say; OSError if the disk is full.
    """
    name, architecture = architecture_for(model.config.to_dict())
    if type(model).__name__ != architecture.cls:
        raise ValueError(f"{type(model).__name__} is not written as GGUF, {name} is {architecture.cls}")
    types = {own: _type_of(own, module) for own, module in packed_modules(model)}
    if not types:
        raise ValueError(f"{type(model).__name__} holds no packed layer that {TITLE} files could hold")
    metadata, divisors = model_metadata(model.config.to_dict(), file.stem)
    metadata |= {"general.file_type": _FILE_TYPES[Counter(types.values()).most_common(1)[0][0]],
                 "general.quantization_version": _QUANTIZATION_VERSION}  # fmt: skip
    metadata |= _tokenizer(model, tokenizer)
    tensors = _tensors(model, architecture, types, {}, divisors)
    described = planned(file, metadata, tensors)
    parameters(described)
    _require_same_config(model, described)
    orders = {own: torch.argsort(order) for own, order in row_orders(described).items()}
    _write(file, metadata, _tensors(model, architecture, types, orders, divisors))
    kept = sorted(own for own, module in model.named_modules(remove_duplicate=False) if is_dense(module))
    return types, kept


def _type_of(name: str, module: torch.nn.Module) -> str:
    weight, order = plain_weight(name, module, TITLE)
    if order is not None:
        raise ValueError(f"{name} orders its inputs (act-order), which {TITLE} cannot say; convert to gptq")
    return ggml_type_of(weight)


def _write(file: Path, metadata: Mapping[str, Any], tensors: list[NewTensor]) -> None:
    with staging(file.absolute().parent, size_of(metadata, tensors)) as staged:
        with (staged / file.name).open("wb") as opened:
            opened.write(header(metadata, tensors))
            for tensor in logging.tqdm(tensors, desc="Writing tensors", unit="tensor", leave=False):
                write_tensor(opened, tensor)
        parameters(open_gguf(staged / file.name))


def _tensors(
    model: PreTrainedModel, architecture: Architecture, types: Mapping[str, str], orders: Mapping[str, Tensor],
    divisors: Tensor | None,
) -> list[NewTensor]:  # fmt: skip
    """orders: layer name -> int64 ``[out]``, stored row i is row ``order[i]`` of the layer and of its bias."""
    found, packed = [], packed_parameters(model)
    if divisors is not None:
        found.append(NewTensor("rope_freqs.weight", "F32", tuple(divisors.shape), lambda: [divisors], divisors))
    for name, parameter in model.named_parameters():
        if name not in packed:
            kind = "F32" if parameter.ndim == 1 else _FLOATS.get(parameter.dtype)
            if kind is None or parameter.dtype not in _FLOATS:
                raise ValueError(f"{name} is {parameter.dtype}: GGUF files hold bfloat16, float16 and float32")
            rows = orders.get(name.rpartition(".")[0])
            chunks = partial(_plain, parameter, torch.float32 if kind == "F32" else parameter.dtype, rows)
            found.append(NewTensor(ggml_name(architecture, name), kind, tuple(parameter.shape), chunks))
    for name, kind in types.items():
        module = model.get_submodule(name)
        shape = (module.out_features, module.in_features)
        chunks = partial(_blocks, name, module, kind, orders.get(name))
        found.append(NewTensor(ggml_name(architecture, f"{name}.weight"), kind, shape, chunks))
    return found


def _plain(parameter: Tensor, dtype: torch.dtype, rows: Tensor | None) -> list[Tensor]:
    values = parameter.detach().cpu().to(dtype)
    return [values if rows is None else values.index_select(0, rows)]


def _blocks(name: str, module: torch.nn.Module, kind: str, rows: Tensor | None) -> Iterator[Tensor]:
    weight, _ = plain_weight(name, module, TITLE)
    return block_rows(weight, kind, rows)


def _require_same_config(model: PreTrainedModel, described: GgufFile) -> None:
    """ValueError naming the first word of the configuration that the file would not give again."""
    own = model.config.to_dict()
    again = AutoConfig.for_model(**config_of(described)).to_dict()
    for key, value in again.items():
        if key in own and key not in _FREE and own[key] != value:
            raise ValueError(f"the model's {key} is {own[key]!r:.200}: GGUF files cannot say that, but {value!r:.200}")


def _tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(tokenizer).__name__} has no tokenizer.json, which GGUF files are written from")
    ids, ends = {}, model.config.eos_token_id
    for name, short in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        configured = getattr(model.config, f"{short}_token_id", None)
        chosen = getattr(tokenizer, f"{short}_token_id", None)
        number = chosen if chosen is not None else configured
        ids[name] = number if isinstance(number, int) and 0 <= number < model.config.vocab_size else None
    others = sorted(set(ends if isinstance(ends, list) else [ends]) - {None, ids["eos"]})
    if others:
        warnings.warn(
            f"a GGUF file names one token that ends a text, here {ids['eos']}; {others} end texts of this model, too",
            stacklevel=2,
        )
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    return tokenizer_metadata(json.loads(backend.to_str()), model.config.vocab_size, ids, template)
