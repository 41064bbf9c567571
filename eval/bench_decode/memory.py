"""How many bytes do a target and its levels hold and read, and what does a process that decodes with them hold?

`python -m eval.bench_decode.memory` is such a process: it reads one request as JSON and prints one line of JSON.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_mlspec
from eval.bench_decode.plan import Contender
from eval.bench_decode.takes import Decoder
from eval.plans.models import Models
from eval.plans.places import Places
from eval.plans.systems import System
from eval.plans.tables import PlanError
from eval.records import machine
from eval.records.fresh_process import in_fresh_process


def request(one: Contender, places: Places, rows: list[list[int]], max_new_tokens: int, device: str) -> dict[str, Any]:
    """What the fresh process is asked."""
    return {"contender": asdict(one), "places": {name: str(place) for name, place in asdict(places).items()},
            "rows": rows, "max_new_tokens": max_new_tokens, "threads": torch.get_num_threads(), "device": device}


def ask(asked: dict[str, Any]) -> dict[str, Any]:
    """The answer of a fresh process; PlanError with the last line it said where it failed."""
    try:
        return in_fresh_process(asked, "eval.bench_decode.memory")
    except RuntimeError as error:
        said = str(error).strip().splitlines()
        last = f" {said[-1].strip()}" if len(said) > 1 else ""
        raise PlanError(f"{said[0].partition(' failed:')[0]} failed:{last or ' it was killed or said nothing'}; what "
                        "was measured before is kept, so run again with memory to spare, or say memory = false in a "
                        "plan of another name") from error


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    """Bytes of weights, of keys and values when the last row ended, and resident at the peak of decoding."""
    one = Contender(**{**asked["contender"], "system": System(**asked["contender"]["system"])})
    places = Places(Path(asked["places"]["models"]), Path(asked["places"]["data"]), asked["places"]["demo"])
    loaded = Models(places, asked["device"]).load(one.system)
    loaded.model.generation_config.eos_token_id = None  # no row ends early: all contenders hold the same tokens
    decoder = Decoder(loaded, places, asked["max_new_tokens"])
    with machine.PeakMemory() as memory:
        take, _ = decoder.take(one, asked["rows"])
    kept = None
    if "target_cache_bytes" in take:
        kept = take["target_cache_bytes"] + sum(level["cache_bytes"] for level in take["levels"])
    weights = hf_mlspec.resident_bytes(loaded.model)
    weights += sum(adds(places.fill(level), loaded.model) for level in one.system.levels)
    return {"weights_bytes": weights, "kv_bytes": kept, "before_bytes": memory.before, "peak_bytes": memory.peak}


def adds(word: str, target: PreTrainedModel) -> int:
    """Bytes that a level holds beside its target's."""
    if word == "mxfp4":
        return hf_mlspec.resident_bytes(hf_mlspec.direct_cast(target, "mxfp4", cast_head=True), shared_with=target)
    level = _model_of(word, target)
    return 0 if level is None or level is target or _is_view(word) else hf_mlspec.resident_bytes(level)


def reads(word: str | None, target: PreTrainedModel) -> int:
    """Bytes of weights that one pass of a level reads, or of the target (None): all but the embedding's table, of
    which a token reads one row, be it numbers or codes; what is the output head's, too, is read whole."""
    level = target if word is None else _model_of(word, target)
    if level is None:
        return 0
    return hf_mlspec.resident_bytes(level) - _of_table(level) - _unread(word, level)


def _of_table(level: PreTrainedModel) -> int:
    """Bytes of the embedding alone. A nested one has none: it reads the head's."""
    embedding, head = level.get_input_embeddings(), level.get_output_embeddings()
    heads = {part.data_ptr() for part in (() if head is None else head.parameters())}
    return sum(part.nbytes for part in embedding.parameters() if part.data_ptr() not in heads)


def _unread(word: str | None, target: PreTrainedModel) -> int:
    """Bytes of the target's own weights that a draft inside them leaves alone: 12 of 16.25 bits of a nested weight,
    the planes behind the first few."""
    found = re.fullmatch(r"nested(?:4(?:a\d+)?)?|planes(\d)(?:a\d+)?", word or "")
    if found is None:
        return 0
    layers = [module for module in target.modules() if getattr(module, "format", None) in ("nested", "planes")
              and hasattr(module, "out_features")]
    return sum(layer.out_features * layer.in_features * (layer.num_planes - int(found[1]) if found[1] else 12) // 8
               for layer in layers)


def _is_view(word: str) -> bool:
    return word.startswith("early_exit:")


def _model_of(word: str, target: PreTrainedModel) -> PreTrainedModel | None:
    """The model behind a level's word: its weights are what counts here. None for lookups."""
    if word in ("prompt_lookup", "ngram"):
        return None
    if word == "mxfp4":
        return hf_mlspec.direct_cast(target, "mxfp4", cast_head=True)
    if _is_view(word):
        return hf_mlspec.early_exit(target, int(word.removeprefix("early_exit:")))
    folder = word.removesuffix("@mxfp4")
    if not Path(folder).is_dir():
        return target  # a precision of its own: the same weights
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype)
    return model if folder == word else hf_mlspec.direct_cast(model, "mxfp4", cast_head=True)


def main() -> int:
    asked = json.load(sys.stdin)
    torch.set_num_threads(asked["threads"])
    transformers.utils.logging.disable_progress_bar()
    print(json.dumps(measure(asked)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
