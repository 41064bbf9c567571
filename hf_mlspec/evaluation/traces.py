"""How many tokens did each level of a chain draft on real prompts, and how many were accepted, round by round?"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from .. import __version__
from ..engines.engine import Engine
from ..integration.call import run
from ..integration.config import SpeculationConfig
from ..integration.hook import prepare_call
from ..integration.levels.wiring import Chain
from ..integration.request import check_model, check_prompt_rows
from ..nn.switch import precision_switch
from ..speculation.draft import Drafter
from ..speculation.drafters.checked import CheckedDrafter
from ..speculation.drafters.cross_tokenizer import CrossTokenizerDrafter
from ..speculation.loop import Emit
from ..speculation.traces.file import rows_from_list, rows_to_list
from ..speculation.traces.recorder import TraceRecorder
from ..speculation.traces.trace import Trace, TracedLevel, TracedModel, TracedRow
from .journal import Journal


def record_trace(
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[str] | Sequence[list[int]],
    levels: Sequence[Any],
    *,
    max_new_tokens: int,
    speculation_config: SpeculationConfig | dict | None = None, assistant_tokenizers: Sequence[Any] | None = None,
    batch_size: int = 1,
    data: str = "", name: str | None = None, origin: dict[str, Any] | None = None,
    journal: Journal | None = None,
) -> Trace:
    """Decode every prompt greedily with the chain and record its rounds.

    The tokens are those of `generate`, on the same path and as fast; `hf_mlspec.last_stats` counts the same drafts.
    model, levels, speculation_config, assistant_tokenizers: as generate takes them. tokenizer: the target's; None
        if prompts are lists of token ids and no level has another vocabulary.
    batch_size: consecutive prompts decoded together, left-padded.
    data, name: names of the prompts and the target; name None: the target's folder.
    origin: further entries beside the versions, such as a commit.
    journal: keeps finished batches; those of an earlier run are not decoded again. Keys are row numbers.
    Raises ValueError for no prompts, an empty or too long one, counts out of range, and a level of another vocabulary
    that has levels below it (their rounds count other tokens), and a tree, before anything is decoded or as it comes.
    """
    rows = _encoded(tokenizer, prompts)
    _check_request(model, rows, max_new_tokens, batch_size)
    asked = _Asked(model, tokenizer, list(levels), assistant_tokenizers, SpeculationConfig.of(speculation_config))
    found: list[TracedRow] = []
    for start in range(0, len(rows), batch_size):
        found += _batch(asked, rows[start : start + batch_size], max_new_tokens, f"row {start}", journal)
    return Trace(
        target=described(model, name),
        levels=tuple(asked.described()),
        data=data,
        prompts_sha256=prompts_hash(rows),
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        rows=tuple(found),
        origin={**_versions(), "prepare": asked.config.prepare, **(origin or {})},
    )


def _versions() -> dict[str, str]:
    return {"hf_mlspec": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def prompts_hash(rows: Sequence[list[int]]) -> str:
    """SHA-256 of the prompts' token ids, written as a JSON list of lists without spaces."""
    return hashlib.sha256(json.dumps(list(rows), separators=(",", ":")).encode()).hexdigest()


class _Asked:
    """What every batch of a recording is decoded with."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, levels: list, tokenizers: Any, config: SpeculationConfig
    ):
        self.model, self.tokenizer, self.levels, self.tokenizers = model, tokenizer, levels, tokenizers
        self.config, self._found = config, None
        if config.tree is not None:
            raise ValueError(f"tree is {config.tree}: a trace tells of drafts that are rows; leave tree out")
        for level in levels:
            if widths := getattr(level, "widths", None):
                raise ValueError(f"level {level.name} has widths {widths}: a trace tells of drafts that are rows")

    def record(self, rows: list[list[int]], max_new_tokens: int) -> list[TracedRow]:
        """One batch, decoded."""
        recorder = TraceRecorder()

        def watch(chain: Chain, emit: Emit) -> Emit:
            chain.controller = None  # a trace is of the lengths that its header names
            self._found = self._found or _levels(chain)
            return recorder.watch(chain.target, chain.drafter, [len(row) for row in rows], emit)

        self._run(rows, max_new_tokens, watch)
        return recorder.rows()

    def described(self) -> list[TracedLevel]:
        """The levels as they were wired; where every batch came from a journal, one token is decoded to see."""
        if self._found is None:
            self.record([[0]], 1)
        return self._found

    def _run(self, rows: list[list[int]], max_new_tokens: int, watch: Any) -> None:
        ends = self.model.generation_config.eos_token_id
        width = max(map(len, rows))
        ids = [[0] * (width - len(row)) + row for row in rows]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
        options = {"input_ids": torch.tensor(ids, device=self.model.device), "max_new_tokens": max_new_tokens,
                   "attention_mask": torch.tensor(mask, device=self.model.device), "do_sample": False,
                   "pad_token_id": (ends[0] if isinstance(ends, list) else ends) or 0}
        call = prepare_call(self.model, options)
        call.levels, call.tokenizers, call.config = self.levels, self.tokenizers, self.config
        call.tokenizer, call.watch = self.tokenizer, watch
        run(self.model, call)


def _batch(asked: _Asked, rows: list[list[int]], max_new_tokens: int, key: str, journal: Journal | None):
    if journal is not None and key in journal:
        return rows_from_list(journal[key])
    found = asked.record(rows, max_new_tokens)
    if journal is not None:
        journal.add(key, rows_to_list(found))
    return found


def _encoded(tokenizer: Any, prompts: Sequence[Any]) -> list[list[int]]:
    if isinstance(prompts, str) or not prompts:
        raise ValueError("there are no prompts to record on; give a list of texts or of lists of token ids")
    texts = [isinstance(prompt, str) for prompt in prompts]
    if any(texts) and tokenizer is None:
        raise ValueError("the prompts are texts and tokenizer is None: pass the target's tokenizer, or token ids")
    return [list(tokenizer(p).input_ids) if text else list(p) for p, text in zip(prompts, texts, strict=True)]


def _check_request(model: PreTrainedModel, rows: list[list[int]], max_new_tokens: int, batch_size: int) -> None:
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}: it must be a positive integer")
    check_model(model, "the target")
    check_prompt_rows(model, rows, max_new_tokens)


def _levels(chain: Chain) -> list[TracedLevel]:
    """The levels of a chain that was wired and not yet started; ValueError where their rounds could not be nested."""
    found, most = [], chain.num_draft_tokens
    for level, runner in zip(chain.levels, chain.runners, strict=True):
        inner = level.inner if isinstance(level, CrossTokenizerDrafter) else level
        if inner is not level and level is not chain.levels[-1]:
            raise ValueError(
                f"level {level.name} has another vocabulary and levels below it, whose rounds count other tokens than "
                "its drafts do: record it as the last level"
            )
        model = TracedModel(level.name) if runner is None else described(runner.model, level.name)
        found.append(TracedLevel(
            **vars(model), num_draft_tokens=most, confidence_threshold=_threshold(inner),
            in_target_cache=bool(getattr(level, "follows", False)),
            draft_window=0 if runner is None else runner.draft_window, draft_cache=_own_format(runner),
        ))
        most = inner.num_draft_tokens if isinstance(inner, CheckedDrafter) else 0
    return found


def _own_format(runner: Engine | None) -> str | None:
    """Of a level's own cache."""
    kept = None if runner is None or runner.follow is not None else runner.cache_format
    return None if kept is None else kept.word


def _threshold(level: Drafter) -> float:
    return float(getattr(level, "threshold", 0.0))


def described(model: nn.Module, name: str | None = None) -> TracedModel:
    """The shape of a causal language model."""
    config = model.config.get_text_config()
    sizes = {"layers": "num_hidden_layers", "hidden": "hidden_size", "intermediate": "intermediate_size",
             "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "vocab": "vocab_size"}
    path = getattr(model.config, "_name_or_path", "").rstrip("/").rpartition("/")[2]
    found = TracedModel(
        name or path or type(model).__name__, **{ours: getattr(config, theirs, None) for ours, theirs in sizes.items()}
    )
    try:
        switch = precision_switch(model)
    except ValueError:  # dense
        return dataclasses.replace(found, weights=str(model.dtype).removeprefix("torch."))
    return dataclasses.replace(found, weights=switch.weights, activation_bits=switch.activation_bits)
