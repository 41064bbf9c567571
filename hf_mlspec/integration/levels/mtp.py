"""How does the MTP layer of a checkpoint become a level: does it fit its target, and what does it share with it?"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ...engines.modules.attention import ATTENTION
from ...engines.modules.tapping import layers_of
from ...nn.cast import Cast
from ...nn.castable import has_dense_weight, linears_and_experts, unfit
from ...nn.hooks import own_tensor
from ...nn.mtp import MtpHead, MtpShape, OfTarget
from ...nn.replace import layer_list_name
from ...nn.shards import whole
from ..json_object import read_object
from ..request import vocab_size
from .heads import check_values
from .mtp_tensors import folder_of, join_experts, read_mtp

_TABLES = ("embed_tokens.weight", "lm_head.weight")
# Lists of a config with an entry for each layer: what one MTP layer has where the config does not tell.
_PER_LAYER = {"layer_types": "full_attention", "mlp_layer_types": "sparse"}


def own_folder(target: nn.Module) -> str:
    """The folder or hub name that a target was loaded from; ValueError where that is not known."""
    path = getattr(target.config, "_name_or_path", "") or ""
    if not path:
        raise ValueError(
            f"level 'mtp' reads the checkpoint of its target, and this {type(target).__name__} was loaded from none: "
            "name the folder, as in 'mtp:FOLDER'"
        )
    return path


def load_mtp(target: nn.Module, path: str, cast: dict | None) -> MtpHead:
    """The MTP layer of a folder or hub name for this target, in its dtype and on its device. cast: options of
    `direct_cast` for what it multiplies by; None leaves it as it is.

    ValueError, naming the folder, for a checkpoint without one, one of another target, and damaged files.
    """
    if getattr(target, "_tp_size", None):
        raise ValueError(
            f"level 'mtp': {type(target).__name__} is shared by processes, and its MTP layer cannot be: leave it out"
        )
    own_path = path == getattr(target.config, "_name_or_path", None)
    folder = folder_of(path, getattr(target.config, "_commit_hash", None) if own_path else None)
    _check_said(target, folder, path)
    layers = layers_of(target)
    config = block_config(target)
    with torch.device("meta"):
        head = _made(target, layers, config, path)
    tensors = read_mtp(folder, len(layers), path)
    own = join_experts({n: t for n, t in tensors.items() if n not in _TABLES}, head.state_dict(), path)
    _give(head, own, target, path)
    head.share(_of_target(target))
    _own_tables(head, tensors, target, path)
    head = head.to(next(target.parameters()).device).eval().requires_grad_(False)
    return head if cast is None else _cast(head, cast)


def block_config(target: nn.Module) -> PretrainedConfig:
    """The target's, for one layer: that of the MTP layer, of which mixtures are always one."""
    config = copy.deepcopy(target.config.get_text_config(decoder=True))
    for name, usual in _PER_LAYER.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, (getattr(config, f"mtp_{name}", None) or [usual])[:1])
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    if getattr(config, "mlp_only_layers", None):
        config.mlp_only_layers = []
    config.num_hidden_layers = 1
    config._attn_implementation_internal = ATTENTION  # a copy, that no other model has
    return config


def _check_said(target: nn.Module, folder: Path, path: str) -> None:
    """ValueError where the config.json of a speculators folder is of another target."""
    file = folder / "config.json"
    said = read_object(file) if file.is_file() else {}
    if "speculators_model_type" not in said:
        return
    config, kind = target.config.get_text_config(decoder=True), type(target).__name__
    layer = _object(said, "transformer_layer_config")
    verifier = _object(_object(said, "speculators_config"), "verifier").get("name_or_path")
    made_for = f", and was made for {verifier!r}" if verifier else ""
    told = {"model_type": config.model_type, "hidden_size": config.hidden_size, "vocab_size": vocab_size(target)}
    for name, expected in told.items():
        if layer.get(name, expected) != expected:
            raise ValueError(
                f"the MTP layer in {path!r} has {name} {layer[name]!r}{made_for}; this {kind} has {expected!r}: pass "
                "one of this target"
            )
    if said.get("num_nextn_predict_layers", 1) != 1:
        raise ValueError(
            f"{path!r} holds {said['num_nextn_predict_layers']!r} MTP layers: checkpoints with one are read"
        )


def _object(said: dict, name: str) -> dict:
    """An entry that is an object; what else a damaged config holds there says nothing."""
    found = said.get(name)
    return found if isinstance(found, dict) else {}


def _made(target: nn.Module, layers: nn.ModuleList, config: PretrainedConfig, path: str) -> MtpHead:
    """A head without weights whose block is of the class of the target's last layer."""
    kind = type(layers[-1])
    try:
        block = kind(config, 0)
        norm = type(block.input_layernorm)
        norms = [norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)]
        shape = _shape(target, config, len(layers))
    except (AttributeError, TypeError, KeyError) as error:
        raise ValueError(
            f"no MTP layer can be made of {kind.__name__}, the layers of {type(target).__name__} ({error}): leave out "
            "the level"
        ) from error
    return MtpHead(shape, block, norms, config, path)


def _shape(target: nn.Module, config: PretrainedConfig, layers: int) -> MtpShape:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    key = value = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "kv_lora_rank", None):  # whose keys and values are kept head by head
        kv_heads, key, value = heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    return MtpShape((layers,), config.hidden_size, vocab_size(target), kv_heads, key, value)


def _of_target(target: nn.Module) -> OfTarget:
    total = target.config.get_text_config(decoder=True).num_hidden_layers
    decoder = target.get_submodule(layer_list_name(target, total, "MTP").rpartition(".")[0])
    norm, rotary = getattr(decoder, "norm", None), getattr(decoder, "rotary_emb", None)
    if norm is None or rotary is None:
        raise ValueError(
            f"the layers of {type(target).__name__} stand beside no norm and rotary_emb, which an MTP layer reads: "
            "leave out the level"
        )
    return OfTarget(norm, target.get_input_embeddings(), target.get_output_embeddings(), copy.deepcopy(rotary))


def _give(head: MtpHead, own: dict[str, Tensor], target: nn.Module, path: str) -> None:
    """Put tensors into the head, its parameters in the target's dtype; ValueError for those that do not fit it."""
    expected, parameters = head.state_dict(), dict(head.named_parameters())
    missing, more = sorted(expected.keys() - own.keys()), sorted(own.keys() - expected.keys())
    if missing:
        raise ValueError(f"the MTP layer in {path!r} lacks the tensor {missing[0]}: restore its files")
    if more:
        raise ValueError(f"the MTP layer in {path!r} holds {more[0]}, which no layer of {type(target).__name__} reads")
    for name, tensor in own.items():
        _require_fit(name, tensor, list(expected[name].shape), target, path)
    held = {name: tensor.to(target.dtype) if name in parameters else tensor for name, tensor in own.items()}
    head.load_state_dict(held, assign=True)
    left = [name for name, buffer in head.named_buffers() if buffer.is_meta]
    if left:
        raise ValueError(f"no MTP layer can be made for {type(target).__name__}: nothing fills its {left[0]}")


def _require_fit(name: str, tensor: Tensor, wanted: list[int], target: nn.Module, path: str) -> None:
    """ValueError for a tensor of another shape, and for values that no head has."""
    if list(tensor.shape) != wanted:
        raise ValueError(
            f"the MTP layer in {path!r} was made for another target: {name} is {list(tensor.shape)} there and "
            f"{wanted} by the config of this {type(target).__name__}"
        )
    check_values(name, tensor, path)


def _own_tables(head: MtpHead, tensors: dict[str, Tensor], target: nn.Module, path: str) -> None:
    """Embedding and output head of the checkpoint, where they differ from the target's."""
    tables = target.get_input_embeddings(), target.get_output_embeddings()
    wanted = [vocab_size(target), head.shape.hidden]
    for name, table in zip(_TABLES, tables, strict=True):
        stored = tensors.get(name)
        if stored is None:
            continue
        _require_fit(name, stored, wanted, target, path)
        stored = stored.to(target.dtype)
        held = own_tensor(table, "weight") if type(table) in (nn.Embedding, nn.Linear) else None
        if held is not None and held.shape == stored.shape and torch.equal(whole(held.detach()).cpu(), stored):
            continue
        setattr(head, name.partition(".")[0], _table(name, stored))


def _table(name: str, stored: Tensor) -> nn.Module:
    if name == "embed_tokens.weight":
        return nn.Embedding.from_pretrained(stored)
    made = nn.Linear(*reversed(stored.shape), bias=False, device="meta")
    made.weight = nn.Parameter(stored, requires_grad=False)
    return made


def _cast(head: MtpHead, options: dict) -> MtpHead:
    """The head with its linears and experts rounded to a format, as far as it can group their inputs; an output head
    that is the target's is rounded to one of its own."""
    cast = Cast.of(options["format"], options.get("rule", "ocp_floor"), options.get("activation_bits"), head.device)
    kept = dict(unfit(head, cast.group_size, cast.experts))
    for name, module in list(linears_and_experts(head)):
        if name not in kept and name != "lm_head":
            head.set_submodule(name, cast.layer(module, name))
    outputs = head.outputs
    if options.get("cast_head", True) and has_dense_weight(outputs) and outputs.in_features % cast.group_size == 0:
        head.lm_head = cast.layer(outputs, "lm_head")
    return head
