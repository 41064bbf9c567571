"""How does a trained model become a folder? Beside its name, which it gets when all of it is there."""

from __future__ import annotations

import json
import os
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def write(saved: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, report: dict, folder: Path) -> None:
    """Weights and configs as they are, for greedy decoding, tokenizer, and the report as training.json."""
    beside = folder.with_name(folder.name + ".part")
    saved.generation_config.do_sample = False
    saved.save_pretrained(beside)
    tokenizer.model_max_length = saved.config.max_position_embeddings
    tokenizer.save_pretrained(beside)
    tell(report, beside)
    os.replace(beside, folder)


def tell(report: dict, folder: Path) -> None:
    """The report as training.json of a folder, in place of what was told before."""
    (folder / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
