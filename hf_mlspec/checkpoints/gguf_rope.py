"""How does the model of a GGUF file turn positions, in transformers' words?

Llama 3.1 and later divide low frequencies by a factor. llama.cpp has no words for that: the file holds a tensor
``rope_freqs.weight`` with a divisor for every frequency. With the three numbers that all of these models share, its
largest divisor is the factor; a tensor of other divisors is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .gguf_file import GgufFile

_FREQUENCIES = "rope_freqs.weight"
_LOW, _HIGH, _TRAINED = 1.0, 4.0, 8192  # low_freq_factor, high_freq_factor, positions before the scaling
_THETA = 10000.0  # of files that do not say
_DEFAULT = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0}  # transformers' model has no others
_IGNORED = {"finetuned"}  # says how the model was made


def rope_parameters(file: GgufFile, prefix: str, head_dim: int) -> dict[str, Any]:
    """transformers' ``rope_parameters``; ``prefix``: of the metadata, ``"llama."``. ValueError naming what scales
    positions in a way that transformers' model does not have."""
    theta = file.metadata.get(f"{prefix}rope.freq_base", _THETA)
    if not isinstance(theta, float) or not 1 < theta < math.inf:
        raise ValueError(f"{file.path}: {prefix}rope.freq_base is {theta!r:.100}, expected a number above 1")
    scaling = {key.removeprefix(f"{prefix}rope.scaling."): value for key, value in file.metadata.items()
               if key.startswith(f"{prefix}rope.scaling.") and key.rpartition(".")[2] not in _IGNORED}  # fmt: skip
    kind = scaling.pop("type", "none")
    own = _scaled(file, f"{prefix}rope.scaling.", kind, scaling)
    divisors = [name for name in file.tensors if "rope_freqs" in name or "rope_factors" in name]
    if divisors:
        if divisors != [_FREQUENCIES] or own["rope_type"] != "default":
            raise ValueError(f"{file.path}: {divisors[0]} beside rope.scaling.type {kind!r} cannot be read")
        own = _llama3(file, theta, head_dim)
    return {"rope_theta": theta, **own}


def _scaled(file: GgufFile, prefix: str, kind: object, scaling: dict[str, Any]) -> dict[str, Any]:
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"{file.path}: {prefix}type is {kind!r:.100}, known are none, linear and yarn")
    for key, expected in _DEFAULT.items():
        if scaling.pop(key, expected) != expected:
            raise ValueError(f"{file.path}: {prefix}{key} is not {expected}, which transformers' model does not have")
    trained = scaling.pop("original_context_length", None)
    if kind == "none":
        scaling.pop("factor", None)
        own: dict[str, Any] = {"rope_type": "default"}
    else:
        own = {"rope_type": kind, "factor": _number(file, f"{prefix}factor", scaling.pop("factor", None))}
    if kind == "yarn":
        own["original_max_position_embeddings"] = _number(file, f"{prefix}original_context_length", trained, int)
        for key, word in {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}.items():
            if key in scaling:
                own[word] = _number(file, prefix + key, scaling.pop(key))
    if scaling:
        key, value = next(iter(scaling.items()))
        raise ValueError(f"{file.path}: {prefix}{key} is {value!r:.100}, which this package does not know")
    return own


def _number(file: GgufFile, key: str, value: object, kind: type = float) -> Any:
    if type(value) is not kind or not 0 < value < 1 << 31:
        raise ValueError(f"{file.path}: {key} is {value!r:.100}, expected a number above 0")
    return value


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    stored = file.tensors[_FREQUENCIES]
    if stored.dtype != torch.float32 or stored.shape != (head_dim // 2,):
        what = f"{stored.ggml_type} {list(stored.values_shape)}"
        raise ValueError(f"{stored.place} is {what}, expected F32 [{head_dim // 2}], half a head")
    divisors = stored.load()
    factor = float(divisors.max())
    known = 1 <= factor < 1 << 20
    if not known or not torch.allclose(divisors, _divisors(theta, head_dim, factor), rtol=1e-5, atol=0):
        raise ValueError(
            f"{stored.place}: its divisors of frequencies are not those of Llama 3 with factor {factor:g}, "
            f"low_freq_factor {_LOW:g}, high_freq_factor {_HIGH:g} and {_TRAINED} positions, the only ones read"
        )
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": _LOW, "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _TRAINED,
    }  # fmt: skip


def rope_metadata(rope: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The inverse of `rope_parameters`, without divisors. ValueError for a ``rope_type`` that files cannot say."""
    kind = rope.get("rope_type", "default")
    found: dict[str, Any] = {f"{prefix}rope.freq_base": float(rope.get("rope_theta", _THETA))}
    if kind in ("default", "llama3"):
        return found
    if kind not in ("linear", "yarn"):
        known = "default, llama3, linear and yarn are"
        raise ValueError(f"rotary positions of type {kind!r} are not written as GGUF, {known}")
    scaling = f"{prefix}rope.scaling."
    found |= {f"{scaling}type": kind, f"{scaling}factor": float(rope["factor"])}
    if kind == "yarn" and "original_max_position_embeddings" in rope:
        found[f"{scaling}original_context_length"] = rope["original_max_position_embeddings"]
    named = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    return found | {f"{scaling}{key}": float(rope[word]) for word, key in named.items() if rope.get(word) is not None}


def rope_divisors(rope: Mapping[str, Any], head_dim: int) -> Tensor | None:
    """float32 ``[head_dim / 2]``, what rope_freqs.weight holds for Llama 3.1; None for other models."""
    if rope.get("rope_type") != "llama3":
        return None
    return _divisors(float(rope["rope_theta"]), head_dim, float(rope["factor"]))


def _divisors(theta: float, head_dim: int, factor: float) -> Tensor:
    """float32 ``[head_dim / 2]``: 1 for waves shorter than _TRAINED / _HIGH positions, ``factor`` for those longer
    than _TRAINED / _LOW, and between them the reciprocal of what goes from 1 to 1 / factor."""
    turns = _TRAINED / (2 * math.pi) / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    share = ((turns - _LOW) / (_HIGH - _LOW)).clamp(0, 1)
    return (1 / (share + (1 - share) / factor)).float()
