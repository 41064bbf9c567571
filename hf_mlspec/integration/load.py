"""Where does a model named by a folder come from, and what is said when it cannot be had?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOAD_ERRORS = (OSError, ValueError, KeyError, SafetensorError)  # of from_pretrained, for what is no checkpoint


def load_causal_lm(path: str, dtype: str = "float32", device: str = "cpu") -> tuple[Any, Any]:
    """The model (on `device`, in `dtype`, ready to generate) and the tokenizer of one folder or hub name.

    Raises ValueError, in one line, for a folder that is not there or holds no causal language model and tokenizer.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if looks_local and not Path(path).is_dir():
        raise ValueError(f"model folder {path!r} does not exist; give a folder written by save_pretrained")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype])
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    except LOAD_ERRORS as error:
        first_line = str(error).strip().splitlines()[0]
        raise ValueError(f"{path!r} holds no causal language model with its tokenizer: {first_line}") from error
    return model.to(device).eval(), tokenizer


def hide_progress_bars() -> None:
    """Keep transformers' loading bars out of a program's own output."""
    transformers.utils.logging.disable_progress_bar()
