"""Which run-time options does a chain have? They are read here and nowhere else."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

from ..engines.choose import ENGINES
from ..engines.trees import MOST_NODES, width_at
from ..formats import cache_format, casts, options
from ..routing.router import Router, require_every

NUM_DRAFT_TOKENS = 8  # ML-SpecQD, section 4
NUM_DRAFT_TOKENS_AT_LOWER_PRECISION = 3  # QSpec's gamma
DRAFT_WINDOW = 1024  # where it is chosen; wider ones cost little beside the weights, narrower ones draft worse
CONFIDENCE_THRESHOLD = 0.4
CONFIDENCE_THRESHOLD_ACROSS_TOKENIZERS = 0.65
QSPEC_ACTIVATION_BITS = 8  # 4 bits cost the same in every kernel there is, and draft worse


@dataclass
class SpeculationConfig:
    """Options of `model.generate(..., assistant_models=[...], speculation_config=SpeculationConfig(...))`.

    num_draft_tokens: tokens a level drafts before the level above checks them; one number for all levels or one per
        level. None: chosen round by round for all levels, none at all included (docs/guide/auto.md). Where they cannot
        be chosen, in captured rounds on a GPU, with a threshold, or where a level's generation_config names either:
        the level's own `generation_config.num_assistant_tokens`, else 8; 3 if the level is the target with all its
        weight bits and fewer activation bits, as in QSpec. On a GPU a level above another one drafts in whole rounds
        of that one: as many as reach the number, a single one from 16 rows on.
    tree: the last level drafts a tree instead of a row, which the level above checks in one pass
        (docs/guide/trees.md): the most tokens that it proposes behind a token, by depth, as in [3, 2, 1]; one behind
        the last of these depths, to `num_draft_tokens`, which is as many as there are depths where it is None. Lengths
        are then not chosen. None: drafts are rows.
    confidence_threshold: a level stops drafting after a token whose probability is below this, 0 <= t < 1, 0 turns it
        off; one for all levels or one per level. A number fixes the lengths of drafts, as does one in a level's
        generation_config. None: the level's own `generation_config.assistant_confidence_threshold`, else 0.4, or 0.65
        for a level with another tokenizer, and 0 if the level is the target with all its weight bits and fewer
        activation bits, also where lengths are chosen.
    shared_cache: levels of the target's own shape ("nested", "planes4", "mxfp4", "int3", "w4a8", "early_exit:N",
        "experts:N", direct casts of the target) draft in the target's KV cache, and the check overwrites what they
        wrote; below an "early_exit:N" with fewer layers than theirs, or with False, they have one of their own.
    draft_cache: "int8", "int4": levels with a cache of their own keep keys and values as 8- or 4-bit codes per token
        and key head (formats/cache/), in about half or a quarter of the memory; they draft other tokens now and then,
        and the target writes what it writes. Levels in the target's cache follow the target's (MLSpecConfig.kv_cache).
        None: as the level's own model says.
    draft_window: how many of the last tokens levels see, besides the first 64 of a row; the target always sees all, so
        that this changes time, never a token. 0: levels see all, too. None: where lengths are chosen and rows are
        longer than 1360 tokens, rounds in which levels see the last 1024 are weighed against those in which they see
        all; else 0. Only levels in compiled code, on a CPU or a GPU, have a window: where a number is given, those
        that run module by module give one warning and see all.
    cast_rule: rounding rule of "mxfp4" levels: "ocp_floor" (OCP MX v1.0 and the paper), "even_bump" or "ceil".
    cast_head: quantize the output head of "mxfp4", "int3", "int2" and "ternary" levels too.
    cast_activation_bits: activation bits of "mxfp4", "PATH@mxfp4" and "nested" levels: 8 (int8, a scale per token and
        block of 32: the paper's kernel) or 16 (bfloat16: nearer to the target, slower); None: 8 on a CPU, else 16.
        Other casts ("int3", "int2", "ternary") always use bfloat16.
    materialize: keep dequantized weights next to the packed ones of cast levels: faster where no kernel is built, but
        with the memory of a full copy.
    max_ngram: longest suffix that "prompt_lookup" looks for, in tokens.
    ngram_order: longest n-gram of the table behind "ngram", in tokens, at least 2.
    prepare: on the CPU, and in bfloat16 on a GPU, run target and levels through compiled, batch-invariant steps if the
        architecture is known. The chain then always returns the same ids as the prepared target alone, sampled
        ones for the same seed. On a GPU a round of all levels is one CUDA graph, unless a level
        is a lookup or has another vocabulary, or a logits processor reads tokens; its memory is kept for the next call
        (`hf_mlspec.clear` frees it). False: module by module, except models given to `hf_mlspec.prepare`.
    engine: what runs target and levels: None, the fastest that supports the model on its device; "modules", the
        model's own modules; "cpu", one compiled call per step; "cuda", kernels that fit into a CUDA graph (for a model
        on the CPU the same steps with CPU ops). KernelError or ValueError if it cannot run the target; a level that it
        cannot run goes module by module, with one warning. None for a target prepared with `hf_mlspec.prepare(model,
        engine=...)` means that engine.
    profile: a file of `mlspec tune` with the times of forward passes on this machine; None: those kept in the cache
        folder, or measured in the first call. A file of another machine or version is ignored, with one warning.
    router: of the level "routed": a file of `mlspec route train`, or what `train_router` returned. For each prompt it
        picks the planes that the draft reads; the check reads all, so that this changes time, never a token.
    router_every: "prompt", that router chooses once for a prompt and what is drafted behind it; "step", once more for
        each drafted token; None: as it was trained.
    common_vocabulary: a level with another tokenizer drafts only tokens of both vocabularies, when sampling with the
        target's noise (True), or drafts text that is encoded again, always its likeliest tokens (False); None: True
        when sampling, False when greedy.

    Raises TypeError or ValueError that names the option and the values it accepts.
    """

    num_draft_tokens: int | list[int | None] | None = None
    confidence_threshold: float | list[float | None] | None = None
    shared_cache: bool = True
    draft_cache: str | None = None
    draft_window: int | None = None
    cast_rule: str = "ocp_floor"
    cast_head: bool = True
    cast_activation_bits: int | None = None
    materialize: bool = False
    max_ngram: int = 3
    ngram_order: int = 4
    common_vocabulary: bool | None = None
    prepare: bool = True
    engine: str | None = None
    profile: str | os.PathLike | None = None
    router: str | os.PathLike | Router | None = None
    router_every: str | None = None
    tree: list[int] | None = None

    def __post_init__(self):
        for value in _as_list(self.num_draft_tokens):
            check_num_draft_tokens(value, f"num_draft_tokens is {self.num_draft_tokens!r}")
        if self.tree is not None:
            _check_tree(self.tree, _as_list(self.num_draft_tokens)[-1:])
        for value in _as_list(self.confidence_threshold):
            check_threshold(value, f"confidence_threshold is {self.confidence_threshold!r}")
        for name, least in (("max_ngram", 1), ("ngram_order", 2)):
            value = getattr(self, name)
            if not _is_count(value, least):
                raise ValueError(f"{name} is {value!r}, it must be an integer of at least {least}")
        if self.draft_window is not None and not (_is_count(self.draft_window, 0) and self.draft_window < 1 << 31):
            raise ValueError(
                f"draft_window is {self.draft_window!r}, it must be an integer: the last tokens levels see, 0 for all"
            )
        for name in ("shared_cache", "cast_head", "materialize", "prepare", "common_vocabulary"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name == "common_vocabulary"):
                raise TypeError(f"{name} is {value!r}, it must be True or False")
        if self.engine is not None and self.engine not in ENGINES:
            raise ValueError(f"engine is {self.engine!r}, choose one of {', '.join(ENGINES)} or None for the fastest")
        if self.draft_cache is not None:
            cache_format(self.draft_cache, "draft_cache")
        if self.cast_rule != type(self).cast_rule:
            options()["rule"].require(self.cast_rule)
        if self.profile is not None and not isinstance(self.profile, (str, os.PathLike)):
            raise TypeError(f"profile is {self.profile!r}, it must be the path of a file that `mlspec tune` wrote")
        if self.profile is not None and not os.path.isfile(self.profile):
            path = os.fspath(self.profile)
            raise ValueError(f"profile {path!r} is no file: write it with `mlspec tune MODEL --output FILE`")
        if self.router is not None and not isinstance(self.router, (str, os.PathLike, Router)):
            raise TypeError(f"router is {self.router!r}, it must be the path of a file of `mlspec route train`")
        if self.router_every is not None and require_every(self.router_every, "router_every") and self.router is None:
            raise ValueError(f"router_every is {self.router_every!r} and there is no router: name its file, "
                             "router=FILE")  # fmt: skip
        bits = self.cast_activation_bits
        if bits is not None and (not _is_count(bits, 1) or bits not in _cast_activations()):
            raise ValueError(f"cast_activation_bits is {bits!r}, it must be 8 (int8), 16 (bfloat16) or None")

    @classmethod
    def of(cls, value: SpeculationConfig | dict | str | None) -> SpeculationConfig:
        """The config itself, one made of a dict, or the defaults: None or "auto"."""
        if value is None or value == "auto":
            return cls()
        if isinstance(value, dict):
            unknown = sorted(set(value) - {f.name for f in fields(cls)})
            if unknown:
                raise ValueError(
                    f"speculation_config has no option {', '.join(unknown)}; "
                    f"it has {', '.join(f.name for f in fields(cls))}"
                )
            return cls(**value)
        if not isinstance(value, cls):
            given = repr(value) if isinstance(value, str) else type(value).__name__
            raise TypeError(f'speculation_config must be a SpeculationConfig, a dict or "auto", got {given}')
        return value

    def of_level(self, option: str, index: int, count: int):
        """The value of a per-level option for level `index` of `count`, or None where it is silent."""
        value = getattr(self, option)
        if not isinstance(value, (list, tuple)):
            return value
        if len(value) != count:
            raise ValueError(
                f"{option} has {len(value)} entries for {count} levels: give one number, or one per level"
            )
        return value[index]


def _cast_activations() -> set[int]:
    """Activation bits that a cast to any format can ask for."""
    return {bits for record, _ in casts().values() for bits in record.activations}


def _as_list(value) -> list:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def check_num_draft_tokens(value, said: str) -> None:
    """Raise ValueError unless value is None or a positive integer; `said` begins the message: the option and its
    value.
    """
    if value is not None and not _is_count(value, 1):
        raise ValueError(f"{said}: a level drafts a positive number of tokens, an integer")


def _check_tree(tree, num_draft_tokens: list) -> None:
    """Raise TypeError or ValueError unless these are widths of a tree that fits so many draft tokens, [] or [None]:
    any number."""
    if not isinstance(tree, (list, tuple)):
        raise TypeError(f"tree is {tree!r}: it takes the most tokens behind one, by depth, a list such as [3, 2, 1]")
    if not tree or not all(_is_count(width, 1) for width in tree):
        raise ValueError(f"tree is {tree!r}: every depth has a positive number of tokens, as in [3, 2, 1]")
    depth = (num_draft_tokens or [None])[0] or len(tree)
    if depth < len(tree):
        raise ValueError(
            f"tree is {tree!r}, {len(tree)} deep, and num_draft_tokens is {depth}: ask for {len(tree)} or more, or "
            "leave depths out"
        )
    nodes, width = 0, 1
    for place in range(depth):
        width *= width_at(tree, place)
        nodes += width
    if nodes > MOST_NODES:
        raise ValueError(
            f"tree is {tree!r} with drafts of up to {depth} tokens, {nodes} tokens in all, and at most {MOST_NODES} "
            "are checked together: ask for fewer"
        )


def check_threshold(value, said: str) -> None:
    """Raise ValueError unless value is None or a number in [0, 1); `said` begins the message: the option and its
    value.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (number and 0 <= value < 1):
        raise ValueError(f"{said}: a threshold is a probability in [0, 1), and 0 turns it off")


def _is_count(value, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
