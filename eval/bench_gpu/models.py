"""Which models does the GPU benchmark decode with? Shapes with random weights, made on the device, and real pairs."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_mlspec
from eval import targets
from eval.random_packed import GROUP


def random_model(shape: str, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """BF16, on the device from the start."""
    return targets.random_model(shape, str(device), seed)


def real_model(folder: Path, device: torch.device, quantized: bool = False) -> PreTrainedModel:
    """A model of a folder in BF16, or packed to int4 while it loads; ValueError where there is no such folder."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: --models names the folder in which {folder.name} lies")
    how = {"quantization_config": hf_mlspec.MLSpecConfig(format="int4", group_size=GROUP)} if quantized else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **how).to(device).eval()


def without_end(model: PreTrainedModel) -> PreTrainedModel:
    """The model, which no token ends: every contender then writes as many tokens."""
    model.generation_config.eos_token_id = None
    return model
