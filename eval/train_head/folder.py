"""How is a trained head kept? As the `speculators` package keeps one, with a card that says how it was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PreTrainedModel

from eval.train_head.head import Head

_VERSION = "0.9.0"  # of the package whose layout this is
_LAYER = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn", "mlp")


def save_head(head: Head, target: PreTrainedModel, folder: Path, card: dict[str, Any]) -> None:
    """config.json, model.safetensors in bfloat16, README.md and training.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(head, target), indent=2) + "\n")
    save_file(_tensors(head, target), str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "training.json").write_text(json.dumps(card, indent=2) + "\n")
    (folder / "README.md").write_text(_card(card))


def load_head(folder: Path, target: PreTrainedModel) -> Head:
    """A head that `save_head` kept, in float32 on the target's device."""
    config = json.loads((folder / "config.json").read_text())
    own = load_file(str(folder / "model.safetensors"))
    offsets = own.pop("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.long))
    own.pop("t2d", None)
    targets, embedding = offsets + torch.arange(len(offsets)), target.get_input_embeddings().weight
    layer = LlamaConfig(**config["transformer_layer_config"])
    table, width = embedding.detach().float().cpu(), target.config.get_text_config().hidden_size
    head = Head(layer, config["eagle_aux_hidden_state_layer_ids"], width, targets, table)
    head.load_state_dict({name.removeprefix("layers.0."): tensor.float() for name, tensor in own.items()})
    return head.to(target.device)


def _config(head: Head, target: PreTrainedModel) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    layer = head.config.to_diff_dict() | {"model_type": "llama"}
    layer["num_hidden_layers"] = 1
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": _VERSION,
        "draft_vocab_size": len(head.targets),
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": head.taps,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{k: v for k, v in proposal.items() if k != "accept_tolerance"}],
            "verifier": {
                "name_or_path": Path(target.config.name_or_path).name,
                "architectures": list(target.config.architectures or []),
            },
        },
    }


def _tensors(head: Head, target: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The embedding is the target's, and is left out."""
    own = {}
    for name, tensor in head.state_dict().items():
        inside = name.split(".")[0] in _LAYER
        own[f"layers.0.{name}" if inside else name] = tensor.detach().to("cpu", torch.bfloat16).contiguous()
    targets, vocab = head.targets.cpu(), target.config.get_text_config().vocab_size
    if len(targets) < vocab:
        own["d2t"] = targets - torch.arange(len(targets))
        own["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, targets, True)
    return own


def _card(card: dict[str, Any]) -> str:
    places = " | ".join(f"{share:.3f}" for share in card["accepted_by_position"])
    count = len(card["accepted_by_position"])
    made = (
        f"Made by `python -m eval.train_head` in {card['seconds']:.0f} s on {card['device']}: {card['steps']} steps "
        f"of {card['rows']} texts of {card['width']} tokens, seed {card['seed']}. It learned from {card['texts']} "
        f"texts ({card['tokens']} tokens) that the target wrote greedily behind beginnings of "
        f"{', '.join(card['sources'])}. Last loss {card['loss']:.3f}."
    )
    shares = (
        f"On {card['held_out']} texts it did not see, the share of drafted tokens that the target takes, by their "
        "place in a draft, where all before were taken:"
    )
    table = f"| {' | '.join(str(place + 1) for place in range(count))} |\n|{'--:|' * count}\n| {places} |"
    end = "It stands under the licence of its target. `training.json` has these numbers."
    return "\n\n".join([f"# An EAGLE-3 head for {card['target']}", made, shares, table, end]) + "\n"
