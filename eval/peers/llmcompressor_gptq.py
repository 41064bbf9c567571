"""How does llm-compressor's GPTQ choose the codes of a model, on the same rows as ours?"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from eval.peers.missing import MissingPeer


def require_llmcompressor() -> None:
    """MissingPeer where it is not installed."""
    if importlib.util.find_spec("llmcompressor") is None:
        raise MissingPeer("llmcompressor is not installed")


def llmcompressor_gptq(folder: Path, rows: list[list[int]], group_size: int, out: Path) -> None:
    """Write the model in ``folder``, its linears but the head in symmetric int4 groups, as compressed-tensors."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    recipe = GPTQModifier(ignore=["lm_head"], config_groups={"group_0": {"targets": ["Linear"], "weights": weights}})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    texts = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    oneshot(model=model, dataset=texts, recipe=recipe, num_calibration_samples=len(rows),
            max_seq_length=max(map(len, rows)), shuffle_calibration_samples=False)  # fmt: skip
    model.save_pretrained(out, save_compressed=True)
