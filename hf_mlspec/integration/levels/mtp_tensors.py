"""Which tensors of a checkpoint are its MTP layer, and what are they called? Of three layouts.

    layout               as in                          tensors
    layers of its own    Qwen3-Next, Qwen3.5            mtp.fc, mtp.layers.0.*, mtp.norm, mtp.pre_fc_norm_*
    behind the last      DeepSeek-V3, GLM-4-MoE         model.layers.N.*, N the number of layers: enorm, hnorm, eh_proj
    speculators (0.9)    "speculators_model_type": mtp  mtp_layers.0.*: token_layernorm, hidden_layernorm, input_proj

transformers leaves them out when it loads the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .words import is_hub_name

# Beginnings of names behind those of a layout -> beginnings of names in `MtpHead`.
_OWN_LAYERS = {
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "fc.": "eh_proj.",
    "norm.": "post_norm.",
    "layers.0.": "block.",
    "embed_tokens.": "embed_tokens.",
    "lm_head.": "lm_head.",
}
_BEHIND_THE_LAST = {
    "enorm.": "enorm.",
    "hnorm.": "hnorm.",
    "eh_proj.": "eh_proj.",
    "shared_head.norm.": "post_norm.",
    "shared_head.head.": "lm_head.",
    "embed_tokens.": "embed_tokens.",
    "": "block.",
}
_SPECULATORS = {
    "token_layernorm.": "enorm.",
    "hidden_layernorm.": "hnorm.",
    "input_proj.": "eh_proj.",
    "final_layernorm.": "post_norm.",
    "": "block.",
}
_EXPERT = re.compile(r"^(.*\bexperts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
_BEGINS = "enorm.weight"  # every layout has it, and no other decoder layer


def folder_of(path: str, revision: str | None = None) -> Path:
    """Where the files of a folder or hub name lie. revision: of a hub name, None for the main one. ValueError for what
    is neither."""
    if Path(path).is_dir():
        return Path(path)
    if not is_hub_name(path):
        raise ValueError(f"{path!r} is no folder, which an MTP layer is read from: name one, as in 'mtp:FOLDER'")
    return Path(snapshot_download(path, revision=revision, allow_patterns=["*.json", "*.safetensors"]))


def read_mtp(folder: Path, layers: int, path: str) -> dict[str, Tensor]:
    """The tensors of the MTP layer in the safetensors files of a folder, by their names in `MtpHead`.

    layers: of the target. path: what messages call the folder. ValueError where there is no such layer, where there
    are several, and for damaged files.
    """
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as stored:
                names = list(stored.keys())
                _require_one(path, names, layers)
                own = {name: new for name in names if (new := _name(name, layers)) is not None}
                found |= {new: stored.get_tensor(name) for name, new in own.items()}
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or not whole ({error}); copy or download it again") from error
    if _BEGINS not in found:
        raise ValueError(
            f"{path!r} holds no MTP layer (mtp.*, model.layers.{layers}.* or mtp_layers.0.*): its checkpoint was made "
            "or saved without one; name a folder that has it, as in 'mtp:FOLDER'"
        )
    return found


def _layouts(layers: int) -> list[tuple[str, dict[str, str]]]:
    """How names of each layout begin, and what stands behind that."""
    behind = rf"(?:model\.)?(?:language_model\.)?layers\.{layers}\."
    return [(r"(?:model\.)?mtp\.", _OWN_LAYERS), (behind, _BEHIND_THE_LAST), (r"mtp_layers\.0\.", _SPECULATORS)]


def _name(name: str, layers: int) -> str | None:
    """What a tensor is called in `MtpHead`; None for one of another part of the model."""
    if name.endswith("rotary_emb.inv_freq"):
        return None
    for begins, words in _layouts(layers):
        match = re.match(begins, name)
        if match:
            rest = name[match.end() :]
            word = next((word for word in words if rest.startswith(word)), None)
            return rest if word is None else words[word] + rest[len(word) :]
    return None


def _require_one(path: str, names: Iterable[str], layers: int) -> None:
    second = re.compile(
        rf"(?:model\.)?(?:mtp\.layers\.1\.|mtp_layers\.1\.|(?:language_model\.)?layers\.{layers + 1}\.)"
    )
    name = next(filter(second.match, names), None)
    if name is not None:
        raise ValueError(f"{path!r} holds several MTP layers ({name}): checkpoints with one are read")


def join_experts(tensors: dict[str, Tensor], wanted: Iterable[str], path: str) -> dict[str, Tensor]:
    """With the experts of a layer side by side where the model holds them so: gate_up_proj `[experts, 2 x
    intermediate, hidden]` and down_proj `[experts, hidden, intermediate]`. ValueError for experts that are missing."""
    wanted, alone = set(wanted), {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.match(name)
        if match and f"{match[1]}.down_proj" in wanted:
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
        else:
            alone[name] = tensor
    for place, parts in experts.items():
        count = 1 + max(number for number, _ in parts)
        missing = [(n, word) for n in range(count) for word in ("gate_proj", "up_proj", "down_proj")
                   if (n, word) not in parts]  # fmt: skip
        if missing:
            raise ValueError(f"the MTP layer in {path!r} lacks {missing[0][1]} of expert {missing[0][0]} of {place}")
        pairs = [torch.cat([parts[n, "gate_proj"], parts[n, "up_proj"]]) for n in range(count)]
        alone[f"{place}.gate_up_proj"] = torch.stack(pairs)
        alone[f"{place}.down_proj"] = torch.stack([parts[n, "down_proj"] for n in range(count)])
    return alone
