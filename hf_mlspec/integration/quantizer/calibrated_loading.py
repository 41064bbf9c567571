"""How does from_pretrained give a model codes that are chosen on a text? It is loaded dense, and then calibrated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...calibration.samples import require_lengths
from ...nn.calibration import read_samples
from ...nn.castable import has_dense_weight
from ...nn.replace import detach_quantizer
from ..levels.load import read_tokenizer
from ..request import max_positions, vocab_size
from .calibrated import keep_in_cache, plan_of, quantize
from .calibration_text import rows_of
from .checkpoint import Checkpoint, require_sources
from .config import QUANT_METHOD, MLSpecConfig


def prepare_to_calibrate(model: PreTrainedModel, config: MLSpecConfig, checkpoint: Checkpoint | None) -> list[Tensor]:
    """The calibration rows, int64 ``[1, tokens]`` each, for a dense model that has no memory yet.

    The tokenizer of the model's folder is read where the calibration is text and ``config`` has none. ValueError and
    TypeError as `hf_mlspec.quantize` raises them: for models that have no such method, layers that groups do not
    divide, a text that is too short or of another vocabulary; and naming weights that the files do not hold.
    """
    request = config.request
    with torch.device("cpu"):  # transformers builds the model under "meta"
        plan = plan_of(model, request.method.word, config, **request.choices)
        rows = rows_of(
            request.text, request.option("tokenizer"), request.option("samples"), request.option("tokens"),
            request.option("seed"), lambda: _tokenizer_of(model),
        )  # fmt: skip
        samples = read_samples(rows, vocab_size(model), torch.device("cpu"))
    require_lengths(samples, max_positions(model))
    if checkpoint is not None:
        linears = {name for name, module in model.named_modules() if has_dense_weight(module)}
        require_sources(checkpoint, model, {f"{name}.weight" for name in linears - plan.kept})
    return samples


def calibrate_loaded(model: PreTrainedModel, config: MLSpecConfig, samples: list[Tensor]) -> None:
    """Pack a dense model that was just loaded, as `hf_mlspec.quantize` does. samples: of `prepare_to_calibrate`.
    ValueError for weights that were not loaded."""
    missing = [
        name for name, tensor in model.named_parameters()
        if not (tensor.is_meta or getattr(tensor, "_is_hf_initialized", False))
    ]  # fmt: skip
    if missing:
        raise ValueError(
            f"{len(missing)} weights of the model to calibrate were not among what was loaded, the first is "
            f"{missing[0]}: give the whole checkpoint"
        )
    detach_quantizer(model)  # it is dense; `quantize` gives it the quantizer of a packed model
    keep_in_cache(model, config)
    skipped = [*(config.skip_modules or ()), *config.modules_to_not_convert]
    request = config.request
    quantize(
        model, request.method.word, config.format, calibration=samples, activation_bits=config.activation_bits,
        skip_modules=skipped or None, activation_clip=config.activation_clip, **config.format_settings,
        **request.choices,
    )  # fmt: skip
    model.add_model_tags([QUANT_METHOD, config.format])


def _tokenizer_of(model: PreTrainedModel) -> Any:
    """That of the folder or hub name, at the revision that the model is of."""
    name, revision = model.config.name_or_path, getattr(model.config, "_commit_hash", None)
    place = {} if revision is None or Path(name).is_dir() else {"revision": revision}
    try:
        return read_tokenizer(name, **place)
    except ValueError as error:
        raise ValueError(
            f"calibration is text, and {error}; or give MLSpecConfig(tokenizer=...), or rows of token ids"
        ) from error
