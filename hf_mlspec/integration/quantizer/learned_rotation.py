"""How does a model get a file of a rotation that was learned on a text? `learn_rotation`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ...calibration.learning import RATE, STEPS, learned_rotation
from ...calibration.matrices import write_rotations
from ...calibration.needed import memory_to_learn, require_memory
from ...calibration.rotation import turned_inputs
from ...calibration.samples import require_lengths
from ...formats.int4 import require_group_size
from ...nn.calibration import read_samples
from ...nn.castable import require_dense
from ..request import max_positions, vocab_size
from .calibration_request import SAMPLES, TOKENS, require_seed
from .calibration_text import rows_of


def learn_rotation(
    model: PreTrainedModel, file: str | os.PathLike, *, calibration: Any, tokenizer: Any = None,
    samples: int = SAMPLES, tokens: int = TOKENS, seed: int = 0, group_size: int = 128, steps: int = STEPS,
    rate: float = RATE,
) -> Tensor:  # fmt: skip
    """Learn the rotation of a dense model's residual stream that loses least to int4 activations, and write it.

    SpinQuant (arXiv 2405.16406): only an orthogonal matrix moves, from the one that "quarot" takes by ``seed``. file:
    where it goes, for ``quantize(..., "quarot+gptq", rotations=file)``. calibration, tokenizer, samples, tokens, seed,
    group_size: as of `quantize`. steps: of the gradient, each on two of the samples. rate: radians of the first step,
    less and less behind it. -> float64 ``[hidden_size, hidden_size]``; the model stays as it is.

    Beside the model, a float32 copy of it is held, and the activations of one sample. TypeError, ValueError, OSError
    and MemoryError before the first step for what cannot work, as of `quantize`.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"learn_rotation takes a transformers PreTrainedModel, not {type(model).__name__}")
    if torch.is_inference_mode_enabled():
        raise ValueError("learn_rotation needs gradients: call it outside of torch.inference_mode")
    require_dense(model, "learn_rotation")
    turned_inputs(model)
    require_group_size(group_size, model.config.hidden_size)
    _require_numbers(seed, steps, rate)
    place = Path(file)
    if place.is_dir() or not place.absolute().parent.is_dir():
        raise OSError(f"{str(place)!r} cannot be written: name a file in a folder that exists")
    rows = read_samples(rows_of(calibration, tokenizer, samples, tokens, seed), vocab_size(model), model.device)
    require_lengths(rows, max_positions(model))
    for index, row in enumerate(rows):
        if row.shape[1] < 2:
            raise ValueError(f"sample {index} has one token: nothing follows it; give longer ones")
    require_memory(memory_to_learn(model, rows), model.device, "give samples of fewer tokens")
    how = {"group_size": group_size, "seed": seed, "steps": steps, "rate": rate}
    with logging.tqdm(total=steps, desc="Learning a rotation", unit="step", leave=False) as bar:
        found = learned_rotation(model, rows, **how, progress=lambda step: bar.update())
    write_rotations(place, found.float())
    return found


def _require_numbers(seed: int, steps: int, rate: float) -> None:
    require_seed(seed)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps is {steps!r}, it must be a whole number of at least 1")
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < 1:
        raise ValueError(f"rate is {rate!r}, it must be a number between 0 and 1")
