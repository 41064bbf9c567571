"""What does a folder with an EAGLE-3 head say: its sizes, the layers it reads, its tensors? Of either layout.

Two layouts are read. `speculators` (0.9): config.json with "speculators_model_type", the layer's config below
"transformer_layer_config", tensors "layers.0.*". SpecForge: one flat config of "LlamaForCausalLMEagle3", tensors
"midlayer.*". They count the layers whose hidden states are asked for differently: in the first, number k is what
layer k reads (0: the embedding), in the second what layer k gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from ...nn.head import HeadShape
from ..json_object import read_object

_SERVED = ("llama", "qwen3")
_FIXED_ROPES = ("default", "linear", "llama3", "yarn")  # whose tables do not depend on a row's length


@dataclass(frozen=True)
class HeadFolder:
    """config: of its layers. flags: rules of `HeadShape`. taps: None where it tells none: then they follow from the
    target. made_for: the name of the target that it tells, or "". vocab: tokens of the target that it was made for."""

    path: str
    config: PretrainedConfig
    flags: dict[str, Any]
    taps: tuple[int, ...] | None
    made_for: str
    target_hidden: int
    draft_vocab: int
    vocab: int

    def shape(self, taps: tuple[int, ...]) -> HeadShape:
        """Sizes and rules."""
        config, heads = self.config, self.config.num_attention_heads
        return HeadShape(
            hidden=config.hidden_size,
            target_hidden=self.target_hidden,
            taps=taps,
            vocab=self.vocab,
            draft_vocab=self.draft_vocab,
            num_layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate=config.intermediate_size,
            norm_eps=config.rms_norm_eps,
            head_norms=config.model_type == "qwen3",
            attention_bias=bool(getattr(config, "attention_bias", False)),
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            **self.flags,
        )

    def default_taps(self, layers: int) -> tuple[int, ...]:
        """What both layouts mean where none are told: an early, a middle and a late layer of so many."""
        return tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 0)}))


def read_head_folder(path: str) -> HeadFolder:
    """ValueError naming the folder for another kind of head, or a config that lacks or contradicts something."""
    said = read_object(Path(path) / "config.json")
    kind = said.get("speculators_model_type")
    if kind is not None and kind != "eagle3":
        raise ValueError(
            f"{path!r} holds a head of kind {kind!r}: those of EAGLE-3 ('eagle3') and MTP layers ('mtp') are read"
        )
    try:
        found = _speculators(path, said) if kind is not None else _specforge(path, said)
        _check_sizes(found)
    except (KeyError, TypeError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        raise ValueError(
            f"the config.json in {path!r} lacks or mistakes {error}: restore the one the head came with"
        ) from error
    return found


def _check_sizes(folder: HeadFolder) -> None:
    """ValueError for sizes of which no head can be made; that tensors have them is seen when they are read."""
    shape = folder.shape(())
    names = "hidden target_hidden vocab draft_vocab num_layers heads kv_heads head_dim intermediate"
    for name in names.split():
        if getattr(shape, name) < 1:
            raise ValueError(f"the head in {folder.path!r} has {name} {getattr(shape, name)}, which is at least 1: "
                             "restore the config.json it came with")  # fmt: skip
    if shape.head_dim % 2 or shape.heads % shape.kv_heads:
        raise ValueError(
            f"the head in {folder.path!r} has {shape.heads} heads of {shape.head_dim} elements and {shape.kv_heads} "
            "of keys and values, which rotate no pairs or leave heads over: restore the config.json it came with"
        )


def _speculators(path: str, said: dict[str, Any]) -> HeadFolder:
    layer = {**said["transformer_layer_config"]}
    config = _layer_config(path, layer.pop("model_type", "qwen3"), layer)
    flags = {
        name: bool(said.get(name)) for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    }
    verifier = (said.get("speculators_config") or {}).get("verifier") or {}
    hidden = said.get("target_hidden_size") or config.hidden_size
    ids = said.get("eagle_aux_hidden_state_layer_ids")
    taps = None if ids is None else _taps(path, ids, 0)
    own = _whole(said.get("draft_vocab_size", 32000))
    return HeadFolder(
        path, config, flags, taps, str(verifier.get("name_or_path") or ""), hidden, own, config.vocab_size
    )


def _specforge(path: str, said: dict[str, Any]) -> HeadFolder:
    told = said.get("eagle_config") or {}
    config = _layer_config(path, said.get("model_type", "llama"), {k: v for k, v in said.items() if k != "model_type"})
    ids = told.get("eagle_aux_hidden_state_layer_ids") or said.get("eagle_aux_hidden_state_layer_ids")
    taps = None if ids is None else _taps(path, ids, 1)
    flags = {
        name: bool(said.get(name)) for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    }
    hidden = said.get("target_hidden_size") or config.hidden_size
    own = _whole(said.get("draft_vocab_size") or config.vocab_size)
    made_for = str(said.get("target_model_name_or_path") or "")
    return HeadFolder(path, config, flags, taps, made_for, hidden, own, config.vocab_size)


def _whole(size: Any) -> int:
    if type(size) is not int:
        raise TypeError(f"draft_vocab_size, {size!r}")
    return size


def _layer_config(path: str, kind: str, values: dict[str, Any]) -> PretrainedConfig:
    if kind not in _SERVED:
        raise ValueError(f"{path!r} holds a head with layers of {kind!r}: those of {' and '.join(_SERVED)} are read")
    config = AutoConfig.for_model(kind, **values)
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _FIXED_ROPES:
        raise ValueError(f"{path!r} holds a head whose rotation is {rope!r}: {', '.join(_FIXED_ROPES)} are read")
    if config.hidden_act != "silu":
        raise ValueError(f"{path!r} holds a head whose activation is {config.hidden_act!r}: 'silu' is read")
    if "sliding_attention" in (getattr(config, "layer_types", None) or []):
        raise ValueError(f"{path!r} holds a head with a sliding window: heads that attend to all tokens are read")
    return config


def _taps(path: str, ids: Any, offset: int) -> tuple[int, ...]:
    whole = isinstance(ids, (list, tuple)) and ids and all(type(one) is int for one in ids)
    if not whole or list(ids) != sorted(set(ids)):
        raise ValueError(
            f"the head in {path!r} asks for the hidden states of layers {ids!r}: ascending numbers are read"
        )
    return tuple(one + offset for one in ids)


def read_tensors(path: str) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files, by the names of the `speculators` layout."""
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{path!r} holds no .safetensors file: convert the head's weights, or copy them beside its config"
        )
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as stored:
                found |= {_name(name): stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or not whole ({error}); copy or download it again") from error
    return found


def _name(name: str) -> str:
    name = name.removeprefix("model.")
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def targets_of(path: str, tensors: dict[str, Tensor], draft_vocab: int, vocab: int) -> Tensor | None:
    """int64 `[draft_vocab]`: which of the target's tokens each of the head's own is; None where they are the same.

    d2t holds what is to be added to a token of the head's; t2d, where it is there, which of the target's it knows.
    ValueError for maps that are missing, of other sizes, out of range, or that contradict each other.
    """
    if draft_vocab == vocab:
        return None
    if "d2t" not in tensors:
        raise ValueError(
            f"the head in {path!r} drafts {draft_vocab} of {vocab} tokens and has no map 'd2t' that says which"
        )
    offsets = tensors["d2t"].long()
    if tuple(offsets.shape) != (draft_vocab,):
        raise ValueError(
            f"'d2t' of the head in {path!r} has shape {list(offsets.shape)}, its vocabulary {draft_vocab} tokens"
        )
    found = offsets + torch.arange(draft_vocab)
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= vocab:
        raise ValueError(
            f"'d2t' of the head in {path!r} leads to tokens {low} to {high}, the target has 0 to {vocab - 1}"
        )
    if len(found.unique()) < draft_vocab:
        raise ValueError(f"'d2t' of the head in {path!r} leads to a token of the target more than once")
    _check_known(path, tensors.get("t2d"), found, vocab)
    return found


def _check_known(path: str, known: Tensor | None, found: Tensor, vocab: int) -> None:
    if known is None:
        return
    if tuple(known.shape) != (vocab,):
        raise ValueError(f"'t2d' of the head in {path!r} has shape {list(known.shape)}, the target {vocab} tokens")
    marked = known.bool()
    if int(marked.sum()) != len(found) or not bool(marked[found].all()):
        raise ValueError(
            f"'t2d' of the head in {path!r} marks {int(marked.sum())} tokens, and not the {len(found)} of 'd2t'"
        )
