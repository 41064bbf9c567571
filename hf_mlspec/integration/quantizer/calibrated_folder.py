"""How does a folder with a model become a folder with codes chosen on calibration text, and how much worse is it?"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ...calibration.methods import method_for
from ...calibration.needed import bytes_of_states, require_disk
from ...calibration.samples import require_counts
from ...precision import Precision
from ..levels.load import read_model, read_tokenizer, require_device, require_folder
from ..levels.resolve import clear
from ..request import max_positions
from ..scoring import token_logprobs
from .calibrated import Calibrated, keep_in_cache, plan_of, quantize, states_are_filed
from .calibration_request import CHOICES, SAMPLES, TOKENS, require_choices
from .calibration_text import token_stream
from .config import MLSpecConfig
from .ends import put_ends, require_ends
from .folder import Quantized, bits_per_packed_weight, copy_tokenizer, measure, require_free, require_wide
from .learned_rotation import learn_rotation

WINDOW = 1024  # tokens of a row whose perplexity is measured, where the model has as many positions


@dataclass(frozen=True)
class CalibratedFolder:
    """quantized: sizes and seconds. calibrated: layers, time, memory. perplexity: by precision, "before" the model's
    own; empty where none was asked for. evaluated: tokens whose chance was measured, which the first of a window has
    none. learning_seconds: of a rotation, None where none was learned."""

    quantized: Quantized
    calibrated: Calibrated
    perplexity: dict[str, float]
    evaluated: int
    learning_seconds: float | None = None


def calibrate_folder(
    source: str, target: str, method: str, config: MLSpecConfig, *, calibration: str, evaluate: str | None = None,
    evaluate_tokens: int = 32768, max_shard_size: str = "5GB", dtype: str = "auto", overwrite: bool = False,
    device: str = "cpu", learn: bool = False, **options: Any,
) -> CalibratedFolder:  # fmt: skip
    """`quantize` the model in ``source`` and save it in ``target`` with its tokenizer.

    Finished blocks wait in ``target`` + ".blocks" until the model is saved; the same call goes on behind them.
    evaluate: a text file; perplexity of its first ``evaluate_tokens`` tokens, in windows that do not overlap, before
    and at every precision of the packed model. device: where all of this is computed. learn: a rotation, on the same
    samples, and write the file ``rotations``, unless it is there. options: of `quantize`. Raises as `quantize_folder`,
    `quantize` and `learn_rotation`.
    """
    choices = _choices(method, config, learn, options)
    require_device(device)
    require_folder(source)
    require_free(source, target, overwrite)
    require_wide(source)
    tokenizer = read_tokenizer(source)
    ids = None if evaluate is None else token_stream(evaluate, tokenizer, evaluate_tokens)
    begin = time.perf_counter()
    model = _read(source, dtype, device, config)
    folder = Path(f"{target.rstrip('/')}.blocks")
    learns = learn and not Path(options["rotations"]).exists()
    plan = plan_of(model, method, config, **{**choices, **({"rotations": None} if learns else {})})
    require_disk(model, folder, plan, _bytes_of_states(model, folder, options), saved=True)
    how = {"calibration": calibration, "tokenizer": tokenizer, **options}
    learning = _learn(model, config, how) if learns else None
    windows = [] if ids is None else _windows(ids, max_positions(model))
    perplexity = {"before": _perplexity(model, windows, None)} if windows else {}
    keep_in_cache(model, config)
    found = _quantized(model, method, config, folder, how)
    if windows:
        perplexity |= {word: _perplexity(model, windows, word) for word in _precisions(model)}
    sizes = _saved(model, config, source, target, max_shard_size, begin)
    shutil.rmtree(folder)
    return CalibratedFolder(sizes, found, perplexity, sum(len(row) - 1 for row in windows), learning)


def _quantized(
    model: PreTrainedModel, method: str, config: MLSpecConfig, folder: Path, how: dict[str, Any]
) -> Calibrated:  # fmt: skip
    names = "activation_bits", "skip_modules", "activation_clip"
    given = {name: getattr(config, name) for name in names} | config.format_settings | how
    found = quantize(model, method, config.format, work_folder=folder, **given)
    if config.head_and_embedding:
        put_ends(model, model.config.quantization_config)
    return found


def _read(source: str, dtype: str, device: str, config: MLSpecConfig) -> PreTrainedModel:
    model = read_model(source, dtype).to(device).eval()
    if config.head_and_embedding:
        require_ends(model, "head_and_embedding")
    return model


def _bytes_of_states(model: PreTrainedModel, folder: Path, options: dict[str, Any]) -> int:
    """Those that wait on the disk."""
    counts = options.get("samples", SAMPLES), options.get("tokens", TOKENS)
    require_counts(*counts)
    return bytes_of_states(model, math.prod(counts)) if states_are_filed(model, folder) else 0


def _choices(method: str, config: MLSpecConfig, learn: bool, options: dict[str, Any]) -> dict[str, Any]:
    """All options of methods; ValueError for what cannot be, and where nobody says where a learned rotation goes."""
    given = {name: options.get(name, own) for name, own in CHOICES.items()}
    require_choices(method_for(method, config.format), **given)
    if learn and given["rotations"] is None:
        raise ValueError("learn writes the file of a rotation: name it, rotations='R.bin'")
    return given


def _saved(
    model: PreTrainedModel, config: MLSpecConfig, source: str, target: str, max_shard_size: str, begin: float
) -> Quantized:  # fmt: skip
    """Write the model with its tokenizer. begin: when its loading began."""
    done = time.perf_counter()
    model.save_pretrained(target, max_shard_size=max_shard_size)
    copied = copy_tokenizer(source, Path(target))
    return Quantized(
        format=config.format, bits_per_packed_weight=bits_per_packed_weight(model), **measure(model),
        kept=model.config.quantization_config.modules_to_not_convert, copied=copied,
        quantize_seconds=done - begin, save_seconds=time.perf_counter() - done,
    )  # fmt: skip


def _learn(model: PreTrainedModel, config: MLSpecConfig, how: dict[str, Any]) -> float:
    """Write the file ``rotations``, learned on what the codes are chosen on; -> seconds."""
    began = time.perf_counter()
    names = "calibration", "tokenizer", "samples", "tokens", "seed"
    given = {name: how[name] for name in names if name in how}
    learn_rotation(model, how["rotations"], group_size=config.group_size, **given)
    return time.perf_counter() - began


def _precisions(model: PreTrainedModel) -> Iterator[str]:
    record = model.config.quantization_config.record
    for bits in record.bit_choices(record.stored_bits()):
        yield str(Precision(record.family, *bits))


def _windows(ids: list[int], positions: int | None) -> list[list[int]]:
    """Rows that do not overlap; ValueError for a text of fewer than 2 tokens."""
    size = min(WINDOW, positions or WINDOW)
    rows = [ids[first : first + size] for first in range(0, len(ids), size)]
    rows = [row for row in rows if len(row) > 1]
    if not rows:
        raise ValueError(f"the text to evaluate has {len(ids)} tokens, at least 2 are needed: give a longer one")
    return rows


def _perplexity(model: PreTrainedModel, rows: list[list[int]], precision: str | None) -> float:
    """Per token; the first token of each row is given."""
    with torch.inference_mode():
        scores = token_logprobs(model, rows, precision=precision)
    clear(model)
    total = sum(score.total for score in scores)
    return math.exp(-total / sum(len(score.logprobs) for score in scores))
