"""How does a head's folder become a level: does it fit its target, and what does it share with it?"""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ...engines.architecture.rotary import rope_tables
from ...engines.modules.tapping import layers_of
from ...nn.cast import Cast
from ...nn.castable import has_dense_weight
from ...nn.head import EagleHead, RopeTables
from ...nn.hooks import own_tensor
from ...nn.shards import whole
from ..request import vocab_size
from .head_folder import HeadFolder, read_head_folder, read_tensors, targets_of

# Tensors of one layer: names in a folder -> names in `HeadLayer`; several are joined, output by output.
_JOINED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "hidden_norm": ("hidden_norm",),
    "input_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
}
_OF_TARGET = ("d2t", "t2d", "embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")


def load_head(target: nn.Module, path: str, cast: dict | None) -> EagleHead:
    """The head of a folder or hub name for this target, in its dtype and on its device. cast: options
    of `direct_cast` for the linears of the head; None leaves them as they are.

    ValueError, naming the folder, for a head of another target, a kind that is not read, and damaged files.
    """
    if not Path(path).is_dir():
        path = snapshot_download(path, allow_patterns=["*.json", "*.safetensors"])
    folder = read_head_folder(path)
    _check_target(target, folder)
    taps = folder.taps if folder.taps is not None else folder.default_taps(len(layers_of(target)))
    tensors = read_tensors(path)
    targets = targets_of(path, tensors, folder.draft_vocab, folder.vocab)
    shape = folder.shape(taps)
    rope = rotation(folder)
    with torch.device("meta"):
        head = EagleHead(shape, rope, None, path)
    own = _own_tensors(head, tensors, folder)
    own["lm_head.weight"] = _output_rows(target, tensors, targets, folder)
    _give(head, own, path)
    head = head.to(target.dtype)
    head.targets = targets
    _embedding(head, target, tensors, folder)
    head = head.to(next(target.parameters()).device).eval().requires_grad_(False)
    return head if cast is None else _cast(head, cast)


def rotation(folder: HeadFolder) -> RopeTables:
    """Rotary tables by the number of positions, where the head's weights are put later. ValueError, naming the folder,
    for parameters of which there are none."""
    try:
        made = LlamaRotaryEmbedding(folder.config)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(
            f"the rotation of the head in {folder.path!r} cannot be made ({error}): restore the config.json it came "
            "with"
        ) from error
    return lambda positions: rope_tables(made, [None], positions)[0]


def _check_target(target: nn.Module, folder: HeadFolder) -> None:
    config, path, kind = target.config.get_text_config(decoder=True), folder.path, type(target).__name__
    made_for = f", and was made for {folder.made_for!r}" if folder.made_for else ""
    if folder.target_hidden != config.hidden_size:
        raise ValueError(
            f"the head in {path!r} reads hidden states of {folder.target_hidden} elements{made_for}; those of this "
            f"{kind} have {config.hidden_size}: pass a head of this target"
        )
    if folder.vocab != vocab_size(target):
        raise ValueError(
            f"the head in {path!r} was made for a target of {folder.vocab} tokens{made_for}; this {kind} has "
            f"{vocab_size(target)}: pass a head of this target"
        )
    count = len(layers_of(target))
    if folder.taps is not None and (folder.taps[0] < 0 or folder.taps[-1] > count):
        raise ValueError(
            f"the head in {path!r} asks for hidden states in front of layers {list(folder.taps)}{made_for}; this "
            f"{kind} has {count} layers: pass a head of this target"
        )


def _own_tensors(head: EagleHead, tensors: dict[str, Tensor], folder: HeadFolder) -> dict[str, Tensor]:
    """Tensors by their names in the module; ValueError for one that is missing, and for one that nothing reads."""
    left = {name: tensor for name, tensor in tensors.items() if name not in _OF_TARGET}
    left = {name: tensor for name, tensor in left.items() if not name.endswith("rotary_emb.inv_freq")}
    own = {}
    for name in head.state_dict():
        if name in ("lm_head.weight", "targets"):
            continue
        parts = _parts(name)
        missing = [part for part in parts if part not in left]
        if missing:
            raise ValueError(f"the head in {folder.path!r} lacks the tensor {missing[0]}: restore its files")
        own[name] = _side_by_side([left.pop(part) for part in parts], name, folder.path)
    if left:
        raise ValueError(f"the head in {folder.path!r} holds {min(left)}, which nothing in an EAGLE-3 head reads")
    return own


def _side_by_side(parts: list[Tensor], name: str, path: str) -> Tensor:
    """Tensors of one parameter, output by output."""
    shapes = [list(part.shape) for part in parts]
    if any(not shape or shape[1:] != shapes[0][1:] for shape in shapes):
        raise ValueError(
            f"the weights in {path!r} do not fit its config.json: the parts of {name} are {shapes} there, and cannot "
            "lie side by side"
        )
    return torch.cat(parts)


def _parts(name: str) -> list[str]:
    """What a folder calls the tensors of one parameter."""
    words = name.split(".")
    if words[0] != "layers":
        return [name]
    return [f"layers.{words[1]}.{part}.{words[3]}" for part in _JOINED[words[2]]]


def _output_rows(target: nn.Module, tensors: dict[str, Tensor], targets: Tensor | None, folder: HeadFolder) -> Tensor:
    """The head's output weight: its own, or those rows of the target's that it drafts."""
    if "lm_head.weight" in tensors:
        return tensors["lm_head.weight"]
    outputs = target.get_output_embeddings()
    weight = own_tensor(outputs, "weight") if hasattr(outputs, "weight") else None
    if weight is None or weight.is_meta or folder.config.hidden_size != folder.target_hidden or weight.ndim != 2:
        raise ValueError(f"the head in {folder.path!r} has no lm_head.weight, and the target's cannot stand for it")
    weight = whole(weight.detach()).cpu()
    return weight if targets is None else weight[targets]


def _give(head: EagleHead, own: dict[str, Tensor], path: str) -> None:
    expected = head.state_dict()
    for name, tensor in own.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"the weights in {path!r} do not fit its config.json: {name} is {list(tensor.shape)} there and "
                f"{list(expected[name].shape)} by the config"
            )
        check_values(name, tensor, path)
    head.load_state_dict(own, strict=False, assign=True)


def check_values(name: str, tensor: Tensor, path: str) -> None:
    """ValueError for a tensor of a head of another dtype than a model's, and for one with NaN or Inf."""
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{name} of the head in {path!r} is {tensor.dtype}: convert it to float32 or bfloat16")
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name} of the head in {path!r} holds NaN or Inf: repair or download it again")


def _embedding(head: EagleHead, target: nn.Module, tensors: dict[str, Tensor], folder: HeadFolder) -> None:
    """The target's own table, unless the folder holds another one."""
    table, width = target.get_input_embeddings(), folder.config.hidden_size
    stored = tensors.get("embed_tokens.weight")
    if stored is None:
        if width != folder.target_hidden:
            raise ValueError(
                f"the head in {folder.path!r} lacks the tensor embed_tokens.weight, {width} wide: restore its files"
            )
        head.share_embedding(table)
        return
    if tuple(stored.shape) != (folder.vocab, width):
        raise ValueError(
            f"the weights in {folder.path!r} do not fit its config.json: embed_tokens.weight is {list(stored.shape)} "
            f"there and {[folder.vocab, width]} by the config"
        )
    check_values("embed_tokens.weight", stored, folder.path)
    stored = stored.to(head.dtype)
    weight = own_tensor(table, "weight").detach() if type(table) is nn.Embedding else None
    if weight is not None and weight.shape == stored.shape and torch.equal(whole(weight).cpu(), stored):
        head.share_embedding(table)
    else:
        head.embed_tokens = nn.Embedding.from_pretrained(stored)


def _cast(head: EagleHead, options: dict) -> EagleHead:
    """The head with every linear whose inputs its format can group rounded to it."""
    cast = Cast.of(options["format"], options.get("rule", "ocp_floor"), options.get("activation_bits"), head.device)
    for name, module in list(head.named_modules()):
        outputs = name == "lm_head" and not options.get("cast_head", True)
        if has_dense_weight(module) and module.in_features % cast.group_size == 0 and not outputs:
            head.set_submodule(name, cast.layer(module, name))
    return head
