"""What does a level word or path stand for: which model or table, which vocabulary, which cache?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import nn

from ...engines.built import device_of, drop_outdated, fingerprint, walking_anew
from ...engines.choose import move_weights
from ...formats import casts
from ...nn.adapters import without_wrapper
from ...nn.castable import holds_draft
from ...nn.fewer_experts import fewer_experts
from ...nn.head import EagleHead
from ...nn.mtp import MtpHead
from ...nn.nest import nest
from ...nn.packed import PackedModule
from ...nn.replace import direct_cast, early_exit, is_view
from ...nn.state import ModelState, state_of
from ...precision import Bits, Precision
from ...routing.router import Router
from ...speculation.draft import Drafter
from ...speculation.drafters.lookup_tree import LookupTree
from ...speculation.drafters.ngram import NGram
from ...speculation.drafters.prompt_lookup import PromptLookup
from ...speculation.rounds.chain import let_go
from ..config import SpeculationConfig
from ..request import check_device, check_model, vocab_size
from ..streamed import drop_fetches
from .heads import load_head
from .load import load_level, require_config
from .lower_precision import check_descent, lower_precision
from .mtp import load_mtp, own_folder
from .routing import draft_router
from .words import LOOKUPS, Word, as_words, head_kind, is_head_folder, parse_level

Built = TypeVar("Built")
# One level is built at a time: what transformers sets while it loads a model, such as the device of new parameters, it
# sets for all threads.
_BUILDING = threading.RLock()
_VIEWS = {"early_exit": early_exit, "experts": fewer_experts}  # how those of words.py are made of the target


@dataclass
class Level:
    """A level before it is wired up: a model, or a drafter that needs none.

    shape_of_target: its keys and values fit the target's cache. tokenizer: None where it is unknown or irrelevant.
    bits: of a level that is the target itself at fewer bits (QSpec, nested weights, bit-planes), else None. router: of
    a level that is the target, whose planes a router picks for each prompt.
    """

    name: str
    model: nn.Module | None = None
    drafter: Drafter | None = None
    shape_of_target: bool = False
    tokenizer: object | None = None
    bits: Bits | None = None
    router: Router | None = None

    @property
    def is_head(self) -> bool:
        """Whether it drafts from hidden states of the levels above."""
        return isinstance(self.model, (EagleHead, MtpHead))


def resolve(
    target: nn.Module,
    levels: list,
    tokenizers: list | None,
    config: SpeculationConfig,
    state: ModelState | None = None,
) -> list[Level]:
    """The levels a user named, checked, in order from the one below the target.

    state: what is kept of the target, where the caller has it.
    """
    state = state or state_of(target)
    _check_lists(levels, tokenizers)
    tokenizers = tokenizers if tokenizers is not None else [None] * len(levels)
    levels = as_words(levels)
    words = _read_words(levels)  # before anything is built
    if config.router is not None and "routed" not in levels:
        raise ValueError("speculation_config has a router for no level: name one, assistant_models=['routed']")
    device = next(target.parameters()).device
    resolved = []
    vocabulary = vocab_size(target)  # of the nearest model above
    for index, (level, word, tokenizer) in enumerate(zip(levels, words, tokenizers, strict=True)):
        found = _resolve(target, level, word, config, vocabulary, state)
        found.tokenizer = tokenizer or found.tokenizer
        if found.is_head:
            _check_above(resolved, index, found)
        elif found.model is not None:
            check_model(found.model, f"level {index} ({found.name})")
            check_device(found.model, f"level {index} ({found.name})", device)
            vocabulary = vocab_size(found.model)
        resolved.append(found)
    bits = [level.bits for level in resolved]
    if any(own is not None for own in bits):
        check_descent(target, bits, levels)
    return resolved


def _read_words(levels: list) -> list[Word | None]:
    """Every level that is a word; ValueError for an unknown one, and for one below a level that cannot check it."""
    words = [parse_level(level) if isinstance(level, str) else None for level in levels]
    _check_order(levels, words)
    return words


def check_words(levels: list) -> None:
    """What can be known of levels before a target is loaded: ValueError for a word that is unknown, out of order or
    names a folder without a model."""
    for level, word in zip(levels, _read_words(levels), strict=True):
        if word is not None and word.path is not None:
            require_config(word.path, f"level {level!r}")


def _check_lists(levels: list, tokenizers: list | None) -> None:
    """Raise TypeError or ValueError unless there is a list of levels, and one of as many tokenizers or none."""
    if isinstance(levels, (str, nn.Module)) or not isinstance(levels, (list, tuple)):
        raise TypeError(
            f"assistant_models takes a list of levels, got {type(levels).__name__}: write "
            "assistant_models=[level, ...]"
        )
    if tokenizers is None:
        return
    if not isinstance(tokenizers, (list, tuple)) or len(tokenizers) != len(levels):
        raise ValueError(
            f"assistant_tokenizers takes one entry per level (None where it is the target's): got "
            f"{len(tokenizers) if isinstance(tokenizers, (list, tuple)) else type(tokenizers).__name__} for "
            f"{len(levels)} levels"
        )
    for index, tokenizer in enumerate(tokenizers):
        if tokenizer is not None and not hasattr(tokenizer, "get_vocab"):
            raise TypeError(f"assistant_tokenizers[{index}] is a {type(tokenizer).__name__}, not a tokenizer or None")


def _check_order(levels: list, words: list[Word | None]) -> None:
    """Raise ValueError if a level stands below one that cannot check it."""
    for index, (level, word) in enumerate(zip(levels[:-1], words, strict=False)):
        if isinstance(level, Drafter) or (word is not None and _drafts_only(word)):
            name = level if isinstance(level, str) else level.name
            raise ValueError(
                f"level {index} ({name}) cannot check drafts, so no level can be below it: put it last, after the "
                f"{len(levels) - index - 1} that follow it"
            )
        if word is not None and word.kind in ("cast", *_VIEWS) and levels[index + 1] == level:
            raise ValueError(
                f"level {index + 1} ({level}) is level {index} once more: it would cost as much and add nothing; "
                "leave one of the two out"
            )


def _drafts_only(word: Word) -> bool:
    return word.kind in (*LOOKUPS, "mtp") or (word.kind == "load" and is_head_folder(word.path))


def _check_above(above: list[Level], index: int, head: Level) -> None:
    """ValueError where a level above a head does not write the hidden states that the head reads."""
    most = head.model.shape.taps[-1]
    for at, level in enumerate(above):
        if not level.shape_of_target:
            raise ValueError(
                f"level {index} ({head.name}) reads hidden states of the target, and level {at} ({level.name}) above "
                "it is another model: put the head below the target or a level of its own weights"
            )
        layers = getattr(level.model.config.get_text_config(decoder=True), "num_hidden_layers", most)
        if layers < most:
            raise ValueError(
                f"level {index} ({head.name}) reads hidden states in front of layer {most}, and level {at} "
                f"({level.name}) above it has {layers} layers: leave that level out"
            )


def _move_weights_first(target: nn.Module, config: SpeculationConfig, state: ModelState) -> None:
    """A decoder on a GPU puts weights side by side, and the first product puts nested ones in tiles; views built
    before that would be built anew in the next call."""
    if "cuda" in (device_of(target).type, config.engine, state.engine):
        move_weights(target, name=config.engine, prepare=config.prepare)
    for module in target.modules():
        if isinstance(module, PackedModule):
            module.prepack_()


def _resolve(target: nn.Module, level, word: Word | None, config: SpeculationConfig, vocabulary: int, state) -> Level:
    if word is not None:
        return _from_word(target, level, word, config, vocabulary, state)
    if isinstance(level, nn.Module):
        level = without_wrapper(level, "a level")
        return Level(_name(level), model=level, shape_of_target=is_view(level, target))
    if isinstance(level, Drafter):
        largest = getattr(level, "largest_token", -1)
        if largest >= vocabulary:
            raise ValueError(
                f"level {level.name} holds token {largest}, the model above it has {vocabulary}: it was made with "
                "another tokenizer"
            )
        return Level(level.name, drafter=level)
    raise TypeError(f"a level is a model, a path, a word or a drafter such as NGram, got {type(level).__name__}")


def _from_word(
    target: nn.Module, text: str, word: Word, config: SpeculationConfig, vocabulary: int, state: ModelState
) -> Level:
    if word.kind == "prompt_lookup":
        return Level(text, drafter=PromptLookup(max_ngram=config.max_ngram))
    if word.kind in ("ngram", "lookups"):
        key = ("ngram", config.ngram_order, vocabulary)  # one table counts one vocabulary
        table = _keep(state, key, lambda: None, lambda: NGram(order=config.ngram_order))
        if word.kind == "ngram":
            return Level(text, drafter=table)
        return Level(text, drafter=LookupTree([PromptLookup(max_ngram=config.max_ngram), table]))
    if word.kind == "precision":
        bits = lower_precision(target, text, _precision(word, config))
        return Level(text, model=target, shape_of_target=True, bits=bits)
    if word.kind == "routed":
        return Level(text, model=target, shape_of_target=True, router=draft_router(target, config, state))
    if word.kind == "cast":
        key = _cast_key(text, config)
        model = _keep_view(state, key, target, config, lambda: direct_cast(target, **_cast_options(word, config)))
        return Level(text, model=model, shape_of_target=True)
    if word.kind in _VIEWS:
        model = _keep_view(state, text, target, config, lambda: _VIEWS[word.kind](target, word.number))
        return Level(text, model=model, shape_of_target=True)
    return _loaded(target, text, word, config, state)


def _loaded(target: nn.Module, text: str, word: Word, config: SpeculationConfig, state: ModelState) -> Level:
    """A level that is read from a folder: a model or a head."""
    place, cast = next(target.parameters()), _cast_options(word, config) if word.cast else None
    kind = "mtp" if word.kind == "mtp" else head_kind(word.path)
    path = word.path or own_folder(target)

    def load() -> tuple[nn.Module, object | None]:
        if kind is None:
            return load_level(target, path, cast)
        return (load_mtp if kind == "mtp" else load_head)(target, path, cast), None

    def made_for() -> tuple:
        """What a loaded level depends on: a head also on the tables that it shares."""
        return place.device, target.dtype, *(_tables(target) if kind is not None else ())

    key = _cast_key(text, config) if word.cast else (text, path)
    model, tokenizer = _keep(state, key, made_for, load)
    name = text.partition("@")[0] if word.kind == "mtp" and word.path is None else Path(path).name or text
    return Level(f"{name}@{word.cast}" if word.cast else name, model=model, tokenizer=tokenizer)


def _cast_key(text: str, config: SpeculationConfig) -> tuple:
    return text, config.cast_head, config.materialize, config.cast_rule, config.cast_activation_bits


def _tables(target: nn.Module) -> tuple:
    """Which embedding and which output layer a target has now: others after it was resized."""
    both = target.get_input_embeddings(), target.get_output_embeddings()
    return tuple((id(table), tuple(getattr(getattr(table, "weight", None), "shape", ()))) for table in both)


def _precision(word: Word, config: SpeculationConfig) -> Precision | None:
    """What a word asks for; "nested" leaves the activations to the config, as casts do."""
    if word.precision == Precision("nested", 16) and config.cast_activation_bits is not None:
        return Precision("nested", 4, config.cast_activation_bits)
    return word.precision


def _cast_options(word: Word, config: SpeculationConfig) -> dict:
    """How `direct_cast` is called for a word that names a cast: with the rule where its format has rules, and with the
    activations where it has a choice of them."""
    options = {"format": word.cast, "cast_head": config.cast_head, "materialize": config.materialize}
    record, _ = casts()[word.cast]
    if "rule" in record.option_names:
        options["rule"] = config.cast_rule
    if len(record.activations) > 1:
        options["activation_bits"] = config.cast_activation_bits
    return options


def _name(model: nn.Module) -> str:
    path = getattr(getattr(model, "config", None), "_name_or_path", "") or ""
    return path.rstrip("/").rpartition("/")[2] or type(model).__name__


def _keep(state: ModelState, key, fingerprint: Callable[[], object], build: Callable[[], Built]) -> Built:
    """Build once per target; again only where the fingerprint of what it was built from is another one."""
    kept = state.levels.get(key)
    if kept is None or kept[0] != fingerprint():
        with _BUILDING:
            kept = state.levels.get(key)  # another thread may have built it by now
            if kept is None or kept[0] != fingerprint():
                with walking_anew():
                    built = build()
                kept = state.levels[key] = fingerprint(), built  # building may move weights
    return kept[1]


def _keep_view(
    state: ModelState, key, target: nn.Module, config: SpeculationConfig, build: Callable[[], nn.Module]
) -> nn.Module:
    """`_keep` for what shares the target's weights. Where a kept one is found, nothing is moved: a target whose first
    call on a GPU comes after one elsewhere moves its weights in that call, and its views are built in the next."""

    def moved_and_built() -> nn.Module:
        _move_weights_first(target, config, state)
        return build()

    return _keep(state, key, lambda: fingerprint(target), moved_and_built)


def draws_on_nested(level: str) -> bool:
    """Whether a word drafts with the target's own nested weights."""
    precision = parse_level(level).precision
    return precision is not None and precision.family == "nested"


def nested_for(target: nn.Module, levels: list[str]) -> nn.Module:
    """The target, nested in place if a level word needs it and it is not nested yet."""
    if any(map(draws_on_nested, levels)) and not any(map(holds_draft, target.modules())):
        nest(target)
    return target


def clear(model: nn.Module) -> None:
    """Free everything kept for the next call of generate on this model; that call builds it again.

    This frees levels built from words (casts, early exits, n-gram tables) with their decoders; graphs and caches of
    captured rounds; the model's decoders, but a valid one of `hf_mlspec.prepare`; GPU weights of a model moved away;
    counts; streamed planes on their way. Models passed as levels are left alone. Warnings are given again.
    """
    model = without_wrapper(model, "clear")
    let_go(model)
    drop_fetches(model)
    drop_outdated(model)
    state_of(model).clear()
