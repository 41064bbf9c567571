"""How does a model in memory get codes that were chosen on calibration text? `quantize`, in place."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, MutableSequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer
from transformers.utils import logging

from ...calibration.blocks import blocks_of
from ...calibration.clip import at_clip, best_clip, clip_divergences
from ...calibration.coding import DAMPING
from ...calibration.families import feeds_of
from ...calibration.finished import FinishedBlocks
from ...calibration.freed import large_apart
from ...calibration.hidden_states import waiting_states
from ...calibration.matrices import read_rotations
from ...calibration.methods import ROW_SCALED, clip_of, format_of, method_for
from ...calibration.needed import bytes_of_states, memory_needed, memory_to_rotate, require_disk, require_memory
from ...calibration.pipeline import LayerReport, Plan, calibrate
from ...calibration.rotation import rotate_ends, turned_inputs
from ...calibration.samples import require_lengths
from ...calibration.stream_order import stream_order
from ...checkpoints.safetensors_file import checksums
from ...engines.memory import out_of_memory
from ...formats import options
from ...formats.int4_int8 import OUTLIERS
from ...nn.calibration import read_samples
from ...nn.castable import has_dense_weight, require_dense, require_finite_floats
from ...nn.expert_modules import is_experts
from ...nn.replace import attach_quantizer
from ...nn.transforms import HADAMARD, NONE, ORDER, TransformedLinear
from ...ops.library import kernel_of
from ..levels.resolve import clear
from ..request import max_positions, vocab_size
from .calibration_request import AUTO, SAMPLES, TOKENS, require_choices
from .calibration_text import rows_of
from .config import MLSpecConfig
from .packing import choose_kept, require_groups_fit, switch_of, warn_of_unpackable

_WITHOUT_ONLINE = ("call hf_mlspec.calibration.rotation.rotate(model, online=False) on the original model, then "
                   "quantize by rtn or gptq")  # fmt: skip


@dataclass(frozen=True)
class Calibrated:
    """What came of it. layers: one entry per packed layer. peak_bytes: the most that this process held so far, of the
    GPU's memory where the model is there; None where the system does not tell. record: what config.json says of it."""

    method: str
    layers: list[LayerReport]
    seconds: float
    peak_bytes: int | None
    record: dict[str, Any]


def quantize(
    model: PreTrainedModel, method: str = "gptq", format: str | None = None, *, calibration: Any,
    tokenizer: Any = None, samples: int = SAMPLES, tokens: int = TOKENS, seed: int = 0, group_size: int = 128,
    symmetric: bool = True, activation_bits: int = 16, search_bits: int | None = None, act_order: bool = False,
    damping: float = DAMPING, rotations: str | os.PathLike | None = None, skip_modules: list[str] | None = None,
    work_folder: str | os.PathLike | None = None, activation_clip: float | str | None = None, **format_options: Any,
) -> Calibrated:  # fmt: skip
    """Pack the linear layers of a dense causal language model in place, their codes chosen on calibration text.

    method: "rtn" (round to nearest), "gptq", "awq", "smoothquant", "awq+gptq", "smoothquant+gptq"; "quarot" (`rotate`
        by ``seed``, then round to nearest), "quarot+gptq" (rotated models take "rtn", "gptq"); for "int4-int8" "atom"
        (inputs by size, the last 128 int8), "quarot+atom" (the residual stream so, the rest rotated), and their
        "+gptq"; for "zipper" all but AWQ and Atom; "quarot+smoothquant" for it and "int4". format: None: the method's.
    calibration: the name of a text file, texts, a `datasets` object with a column "text", or rows of token ids. Of
        text, ``samples`` windows of ``tokens`` tokens are drawn by ``seed``; rows of ids are taken as they are.
    tokenizer: of the text. group_size, symmetric, activation_bits, skip_modules, activation_clip (None: the method's):
        as in MLSpecConfig. search_bits: activation bits that SmoothQuant's search assumes; None: these, 8 for 16.
    act_order: GPTQ goes through inputs by their size, and layers get the "order" transform. damping: GPTQ's.
    rotations: a file such as SpinQuant's R.bin, that "quarot" takes in place of Hadamard matrices.
    work_folder: finished blocks are kept there; the same call goes on behind them. Of a model on the CPU hidden states
        wait there, too, in a file that ends with the call. format_options: as there.

    The head, embeddings and norms keep their dtype. AWQ and SmoothQuant change norms; "quarot" changes all three, and
    unties the head: casts that share them are to be made anew. The model is saved and loaded as any packed one.
    TypeError, ValueError, MemoryError and OSError before the first block for what cannot work; ValueError in a block
    names it, MemoryError says how far it got, and the model is then packed in part: load it again."""
    own = _own(format_options, clip_of(method) if activation_clip in (None, AUTO) else activation_clip)
    config = MLSpecConfig(format or format_of(method), group_size, symmetric, activation_bits, skip_modules, **own)
    plan = _planned(model, method, config, {"seed": seed, "damping": damping, "act_order": act_order,
                                            "search_bits": search_bits, "rotations": rotations})  # fmt: skip
    rows = read_samples(rows_of(calibration, tokenizer, samples, tokens, seed), vocab_size(model), model.device)
    require_lengths(rows, max_positions(model))
    _require_memory(model, rows, plan, states_are_filed(model, work_folder))
    given = given_rotations(rotations)
    record = _record(plan, rows, seed, given)
    begin = time.perf_counter()
    layers = _through_blocks(model, rows, plan, config, {"seed": seed, **given}, record, work_folder)
    record |= _search_clip(model, rows, config) if activation_clip == AUTO else {}
    _attach(model, config, plan, record)
    return Calibrated(plan.method.word, layers, time.perf_counter() - begin, _peak(model.device), record)


def _own(given: dict[str, Any], clip: float) -> dict[str, Any]:
    """Options of the format, and the clip of its activations; TypeError for what no format has."""
    if strange := sorted(set(given) - set(options())):
        raise TypeError(f"quantize got an unexpected keyword argument {strange[0]!r}")
    return {"activation_clip": clip, **given}


def _planned(model: PreTrainedModel, method: str, config: MLSpecConfig, choices: dict[str, Any]) -> Plan:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"quantize takes a transformers PreTrainedModel, not {type(model).__name__}")
    require_dense(model, "quantize")
    plan = plan_of(model, method, config, **choices)
    require_finite_floats(model, dict.fromkeys(plan.kept, "kept"), "quantize")
    warn_of_unpackable(model, config, set(plan.kept))
    return plan


def plan_of(
    model: PreTrainedModel, method: str, config: MLSpecConfig, *, seed: int, damping: float, act_order: bool,
    search_bits: int | None, rotations: str | os.PathLike | None,
) -> Plan:  # fmt: skip
    """How a dense model gets its codes; its weights need not be in memory yet. ValueError as of `quantize`, for all
    that classes, names and shapes tell."""
    chosen = method_for(method, config.format)
    require_choices(chosen, seed, damping, act_order, search_bits, rotations)
    there = {name: one for name, one in model.named_modules() if isinstance(one, TransformedLinear)}
    if other := sorted(name for name, one in there.items() if one.transform is not HADAMARD):
        raise ValueError(f"{other[0]} transforms its inputs ({there[other[0]].transform.word}), not as `rotate` does: "
                         "start from the original model")
    turned = turned_inputs(model, **given_rotations(rotations)) if chosen.rotates else list(there)
    if turned and not chosen.rotates and (chosen.scaling or chosen.reorders):
        what = "order" if chosen.reorders else "scales"
        raise ValueError(f"{turned[0]} has rotated inputs, whose {what} {method!r} cannot fold: use rtn or gptq")
    if act_order and turned:
        raise ValueError("act_order and rotations are two transforms of a layer's inputs: leave one out")
    experts = next((name for name, module in model.named_modules() if is_experts(module)), None)
    if experts is not None:
        raise ValueError(f"{experts} holds experts: calibration is of dense models; without a method they are packed")
    blocks_of(model)
    if chosen.scaling:
        feeds_of(type(model).__name__, chosen.scaling)
    row_scaled = config.format == ROW_SCALED
    kept = _kept(model, config, turned)
    bits = search_bits or min(config.activation_bits, 8)
    clip = clip_of(method) if config.activation_clip == AUTO else config.activation_clip or 1.0
    transform = HADAMARD if turned else ORDER if act_order or chosen.reorders else NONE
    return Plan(chosen, config.group_size, config.symmetric, config.activation_bits, bits, act_order, transform,
                frozenset(kept), damping, clip, config.format,
                config.format_settings if row_scaled else {})  # fmt: skip


def _kept(model: PreTrainedModel, config: MLSpecConfig, turned: list[str]) -> set[str]:
    """Full names of the layers that stay as they are."""
    defaults = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules, add_default_skips=True)
    kept = choose_kept(model, config, defaults)
    if lost := sorted(kept & set(turned)):
        raise ValueError(f"{lost[0]} has rotated inputs, which no dense layer of a checkpoint says: do not skip it, "
                         f"or {_WITHOUT_ONLINE}")  # fmt: skip
    require_groups_fit(model, config, kept, dict.fromkeys(turned, _WITHOUT_ONLINE))
    names = [f"{where}.{name}" for where, block in blocks_of(model)
             for name, module in block.named_modules() if has_dense_weight(module)]  # fmt: skip
    if kept.issuperset(names):
        patterns = [*(config.skip_modules or ()), *config.modules_to_not_convert]
        raise ValueError(f"skip_modules={patterns} leaves nothing to pack of the {len(names)} linear layers in the "
                         f"blocks of {type(model).__name__}: skip fewer")  # fmt: skip
    return kept


def states_are_filed(model: PreTrainedModel, work_folder: str | os.PathLike | None) -> bool:
    """Whether hidden states wait in a file of the work folder: a GPU's would have to be copied."""
    return work_folder is not None and model.device.type == "cpu"


def _require_memory(model: PreTrainedModel, rows: list[Tensor], plan: Plan, filed: bool) -> None:
    needed = memory_needed(model, rows, plan.method.needs_hessians, filed)
    if plan.method.rotates:  # its head of its own stays
        needed += model.get_output_embeddings().weight.nbytes
        require_memory(memory_to_rotate(model), model.device, "use a method without quarot")
    require_memory(needed, model.device)


def _search_clip(model: PreTrainedModel, rows: list[Tensor], config: MLSpecConfig) -> dict[str, Any]:
    """Set the best clip; -> the divergence at each, as config.json has them."""
    training = model.training
    found = clip_divergences(model.eval(), rows)
    model.train(training)
    config.activation_clip = best_clip(found)
    at_clip(model, config.activation_clip)
    clear(model)
    return {"clip_search": {f"{clip:g}": divergence for clip, divergence in found.items()}}


def _attach(model: PreTrainedModel, config: MLSpecConfig, plan: Plan, record: dict[str, Any]) -> None:
    settings = {**config.to_dict(), "modules_to_not_convert": sorted(plan.kept), "calibration": record}
    settings.pop("skip_modules", None)
    attach_quantizer(model, {**settings, "transform": plan.transform.word})


def keep_in_cache(model: PreTrainedModel, config: MLSpecConfig) -> None:
    """Let a dense model keep keys and values as ``config`` says, before it is calibrated: what reads them then sees
    them so."""
    if config.kv_cache is not None:
        attach_quantizer(model, {"format": None, "kv_cache": config.kv_cache})


def _through_blocks(
    model: PreTrainedModel, rows: list[Tensor], plan: Plan, config: MLSpecConfig, rotation: dict[str, Any],
    record: dict[str, Any], folder: str | os.PathLike | None,
) -> list[LayerReport]:  # fmt: skip
    """With what waits in the work folder, if there is one."""
    if folder is None:
        return _run(model, rows, plan, config, rotation, None, [])
    filed = states_are_filed(model, folder)
    states = bytes_of_states(model, sum(row.numel() for row in rows)) if filed else 0
    require_disk(model, folder, plan, states)
    finished = FinishedBlocks(folder, _identity(model, plan, record))
    with waiting_states(folder if filed else None, states) as hidden:
        return _run(model, rows, plan, config, rotation, finished, hidden)


@large_apart()
def _run(
    model: PreTrainedModel, rows: list[Tensor], plan: Plan, config: MLSpecConfig, rotation: dict[str, Any],
    finished: FinishedBlocks | None, hidden: MutableSequence[Tensor],
) -> list[LayerReport]:  # fmt: skip
    training, blocks, done = model.training, len(blocks_of(model)), 0
    clear(model)  # what was compiled or cast from the dense weights
    bar = logging.tqdm(total=blocks, desc=f"Calibrating {plan.method.word}", unit="block", leave=False)

    def progress(index: int) -> None:
        nonlocal done
        done = index + 1
        bar.update()

    try:
        with bar:
            if plan.method.rotates and plan.method.reorders:
                rotation = {**rotation, "residual": stream_order(model.eval(), rows)}
            options = {"progress": progress,
                       "rotated": rotate_ends(model, **rotation)[1] if plan.method.rotates else None,
                       "hidden": hidden}  # fmt: skip
            return calibrate(model.eval(), rows, plan, switch_of(config), finished, **options)
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or out_of_memory(error)):
            raise
        raise MemoryError(_exhausted(model.device, done, blocks, finished)) from error
    finally:
        model.train(training)


def _exhausted(device: torch.device, done: int, blocks: int, finished: FinishedBlocks | None) -> str:
    """What to do where a block needs more than is left: others took some, or the estimate was too small. done: blocks
    that were passed; with a work folder, those that it holds count."""
    kept = done if finished is None else sum(index in finished for index in range(blocks))
    what = f"no memory is left on {device} behind {kept} of {blocks} blocks: free some"
    if finished is None:
        return f"{what} and load the model again, or give fewer samples or tokens"
    return (f"{what} and repeat the call, which goes on behind the blocks in {str(finished.folder)!r}, or remove that "
            "folder and give fewer samples or tokens")


def given_rotations(file: str | os.PathLike | None) -> dict[str, Any]:
    """What `rotate` is called with for a file of rotations."""
    if file is None:
        return {}
    residual, heads = read_rotations(file)
    return {"residual": residual, **({} if heads is None else {"heads": heads})}


def _record(plan: Plan, rows: Iterable[Tensor], seed: int, given: dict[str, Any]) -> dict[str, Any]:
    """What config.json says: method and text; nothing reads it."""
    told: dict[str, Any] = {"method": plan.method.word}
    if plan.method.coding == "gptq":
        told |= {"damping": plan.damping, "act_order": plan.act_order}
    if plan.method.reorders:
        told["outliers"] = OUTLIERS
    if plan.method.rotates:
        told["seed"] = seed
    if given:
        matrices = [given["residual"], *given.get("heads", ())]
        told["rotations_sha256"] = _hash(checksums({str(index): one for index, one in enumerate(matrices)}))
    if plan.method.scaling == "smoothquant":
        told["search_bits"] = plan.search_bits
    lists = [row.flatten().tolist() for row in rows]
    return {**told, "samples": len(lists), "tokens": sum(map(len, lists)), "text_sha256": _hash(lists)}


def _identity(model: PreTrainedModel, plan: Plan, record: dict[str, Any]) -> dict[str, Any]:
    """What the bits of the result depend on; the weights before they are rotated."""
    settings = replace(plan, kept=frozenset())
    own = {name: getattr(settings, name) for name in ("group_size", "symmetric", "activation_bits")}
    records = {name: tensor for name, tensor in model.named_buffers() if ".transform_" in name}
    tensors = {**dict(model.named_parameters()), **records}  # a rotated model has no state_dict
    weights = _hash(sorted(checksums(tensors).items()))
    own = own if not plan.row_scaled else {"activation_bits": plan.activation_bits, "format": plan.format,
                                          **plan.options}  # fmt: skip
    own |= {} if plan.activation_clip == 1 else {"activation_clip": plan.activation_clip}
    own |= {"device": _arithmetic(model.device), "kept": sorted(plan.kept), "dtype": str(model.dtype)}
    return {**record, **own, "weights": weights}


def _arithmetic(device: torch.device) -> str:
    """In which order sums are added up there: a GPU by its name; a CPU by the instruction sets of our kernels and of
    torch, whatever its name: with other ones codes differ (docs/benchmarks/calibration.md)."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    return f"a CPU, kernels {kernel_of('bf16_linear', 'cpu')}, torch {torch.backends.cpu.get_cpu_capability()}"


def _hash(told: Any) -> str:
    """SHA-256, in hexadecimal digits, of what JSON can tell."""
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _peak(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ModuleNotFoundError:  # only POSIX has it
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
