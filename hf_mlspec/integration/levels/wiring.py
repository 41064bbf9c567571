"""How do named levels become one chain: who checks whom, in which cache, with which limits?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from torch import nn
from transformers.generation import LogitsProcessorList

from ...engines.choose import engines_of
from ...engines.engine import Engine
from ...engines.ranks import require_alike_on_ranks
from ...formats import cache_format
from ...nn.shards import is_shared
from ...nn.state import ModelState, say_once, state_of
from ...precision import Bits
from ...routing.engine import routed_engine
from ...routing.router import Router
from ...speculation.chain import Chain, Part
from ...speculation.draft import Drafter
from ...speculation.drafters.cross_tokenizer import CrossTokenizerDrafter
from ...speculation.drafters.lookup_tree import LookupTree
from ...speculation.drafters.ngram import NGram
from ...speculation.drafters.prompt_lookup import PromptLookup
from ...speculation.drafters.self_precision import at_lower_precision
from ...speculation.sampling import Sampler
from ..config import (
    CONFIDENCE_THRESHOLD,
    CONFIDENCE_THRESHOLD_ACROSS_TOKENIZERS,
    NUM_DRAFT_TOKENS,
    SpeculationConfig,
    check_num_draft_tokens,
    check_threshold,
)
from ..processing import Prompts, split_processors, warp_of
from ..request import head_size, max_positions, router_of, vocab_size
from .head_wiring import engine_with_head, head_engine
from .lower_precision import drafting_defaults, require_engine
from .resolve import Level
from .trees import require_tree_level, tree_of
from .vocabulary import require_target_tokenizer, same_vocabulary

if TYPE_CHECKING:
    from ..costs.known_file import Given


@dataclass
class _Above:
    """What a level needs to know of the level that checks it."""

    tokenizer: object | None
    vocab_size: int
    is_targets: bool  # its vocabulary is the target's


class Wiring:
    """Builds the chain of one call of generate.

    seed: of the noise of a call that samples. state: what is kept of the target, where the caller has it. given: what
    the call was given, where its levels may be known (integration/known.py). began: when building the levels did;
    building: the seconds that it took, once it has ended.
    """

    def __init__(
        self,
        target: nn.Module,
        tokenizer,
        config: SpeculationConfig,
        *,
        seed: int | None = None,
        processors: LogitsProcessorList,
        prompts: Prompts,
        capacity: int,
        ends: frozenset[int] = frozenset(),
        keep_logits: bool = True,
        state: ModelState | None = None,
        given: Given | None = None,
    ):
        self.config, self.seed, self.processors, self.prompts = config, seed, processors, prompts
        self.warp, self.process = split_processors(processors, prompts)
        self.model, self.tokenizer, self.capacity, self.ends = target, tokenizer, capacity, ends
        self.vocab_size, self.keep_logits = vocab_size(target), keep_logits
        # Processes that share a target must draft alike, and each would measure, or know, costs of its own.
        self.is_shared = is_shared(target)
        given = None if self.is_shared else given
        self.state, self.given, self.asked = state or state_of(target), given, given and given.asked
        self.began, self.building = perf_counter(), 0.0

    def build(self, levels: list[Level]) -> Chain:
        """`chooses` then says whether the lengths of drafts are left to a controller: nobody named one, nor a
        threshold."""
        engines = iter(self._engines_over(levels))
        target = Part("the target", next(engines), self._sampler())
        return Chain.of(target, self._below(target.engine, levels, engines), keep_logits=self.keep_logits)

    def build_below(self, chain: Chain, levels: list[Level]) -> None:
        """Put levels below the target of a chain that was built without any, and is at work."""
        _, *engines = self._engines_over(levels)
        chain.add(self._below(chain.target.runner, levels, iter(engines)))

    def _below(self, leader: Engine | None, levels: list[Level], engines: Iterator[Engine]) -> list[Part]:
        """The levels below a target with the engine `leader`; engines: of those that have a model."""
        self.count, self.chooses = len(levels), bool(levels) and not self.is_shared
        if levels:
            require_target_tokenizer(self.tokenizer, self.vocab_size)
        parts, above, over, most = [], _Above(self.tokenizer, self.vocab_size, True), [leader], _num_layers(self.model)
        for index, level in enumerate(levels):
            if level.drafter is not None:
                parts.append(Part(level.name, drafter=self._lookup(level, index)))
            elif level.is_head:
                parts.append(self._head(level, index, over, above))
            else:
                part, above = self._part(level, index, above, next(engines))
                if _num_layers(level.model) > most:
                    leader = None  # an early exit above it writes the cache of its own layers alone
                most = _num_layers(level.model)
                leader = self._follow(level, part.engine, leader)  # None from where a level has a cache of its own
                self._set_window(level, part.engine)
                over.append(part.engine)
                parts.append(part)
            parts[-1].num_draft_tokens = self._num_draft_tokens(level, index)
            if self.config.tree is not None and index + 1 == self.count:
                self._let_branch(parts, over)
        return parts

    def _let_branch(self, parts: list[Part], over: list[Engine]) -> None:
        """The last level drafts trees, of as many depths as the option has where no number is given."""
        part, widths = parts[-1], list(self.config.tree)
        checks = over[-2] if part.engine is over[-1] else over[-1]
        require_tree_level(part, widths, checks, parts[-2].name if len(parts) > 1 else "the target")
        if part.drafter is not None:
            part.drafter = tree_of(part.drafter, widths)
        else:
            part.tree = widths
        self.chooses = False
        if self.config.of_level("num_draft_tokens", self.count - 1, self.count) is None:
            part.num_draft_tokens = len(widths)

    def _part(self, level: Level, index: int, above: _Above, engine: Engine) -> tuple[Part, _Above]:
        """A level with a model, in the vocabulary of the level above it, and what the level below it is to know."""
        size = vocab_size(level.model)
        same = level.shape_of_target or self._same_vocabulary(level, size, above)
        by_vocabulary = not same and self._by_vocabulary(last=index + 1 == self.count)
        in_targets, own = above.is_targets and same, above.vocab_size if same else size
        part = Part(
            level.name,
            engine,
            self._sampler(own) if in_targets else self._guesser(own, shares_noise=above.is_targets and by_vocabulary),
            threshold=self._threshold(level, index, same),
            max_positions=None if level.shape_of_target else engine.max_positions,
            across=None if same else self._across(level, above, size, by_vocabulary),
        )
        return part, _Above(above.tokenizer if same else level.tokenizer, own, in_targets)

    def _head(self, level: Level, index: int, over: list[Engine], above: _Above) -> Part:
        """A head, which reads what the engines of all levels above it write of their hidden states."""
        engine = head_engine(level, over, self.capacity)
        if self.config.draft_cache is not None:
            self._keep_in(level, engine)
        self._set_window(level, engine)
        sampler = self._sampler(above.vocab_size)
        return Part(level.name, engine, sampler, threshold=self._threshold(level, index, True))

    def _follow(self, level: Level, engine: Engine, leader: Engine | None) -> Engine | None:
        """Let a level of the target's shape draft in its checker's cache (invariant 4); the engine, if it does."""
        if level.bits is not None:
            require_engine(level.model, level.name, level.bits, engine)
            engine = at_lower_precision(engine, level.bits)
        shares = level.shape_of_target and level.router is None  # a router chooses in a prefill of its own
        alike = leader is not None and (engine.name, engine.can.stateful) == (leader.name, leader.can.stateful)
        if not (alike and shares and self.config.shared_cache):
            if self.config.draft_cache is not None:
                self._keep_in(level, engine)
            return None
        engine.follow = leader
        return engine

    def _keep_in(self, level: Level, engine: Engine) -> None:
        """Give a level's own cache the format that was asked for."""
        word = self.config.draft_cache
        try:
            kept = cache_format(word, "draft_cache")
            size = level.model.shape.head_dim if level.is_head else head_size(level.model)
            if size is not None:
                kept.width(size)
            engine.keep_in(kept)
        except ValueError as error:
            raise ValueError(f"draft_cache is {word!r}, which level {level.name} cannot have: {error}") from error

    def _set_window(self, level: Level, engine: Engine) -> None:
        """Let a level see only a part of the cache, where that is asked for."""
        window = self.config.draft_window or 0
        if window and not engine.can.draft_window:
            why = "it is a head" if level.is_head else "it runs module by module"
            say_once(self.model, f"draft_window is {window}, and level {level.name} sees all tokens: {why}")
            window = 0
        engine.draft_window = window

    def _same_vocabulary(self, level: Level, size: int, above: _Above) -> bool:
        return same_vocabulary(level.name, size, level.tokenizer, above.vocab_size, above.tokenizer)

    def _lookup(self, level: Level, index: int) -> Drafter:
        """A level without a model: it drafts in whatever vocabulary stands above it."""
        threshold = self.config.of_level("confidence_threshold", index, self.count)
        self.chooses &= threshold is None
        drafter = level.drafter
        if isinstance(drafter, (NGram, PromptLookup, LookupTree)):
            drafter = drafter.fork()  # a table is everyone's; rows, and its threshold, are this call's
        self.chooses &= not getattr(drafter, "widths", None)  # which lookups merge into a tree is fixed
        for table in drafter.lookups if isinstance(drafter, LookupTree) else [drafter]:
            if isinstance(table, NGram):
                table.threshold = table.threshold if threshold is None else threshold
        return drafter

    def _by_vocabulary(self, last: bool) -> bool:
        """Whether a level with another tokenizer drafts in the common vocabulary."""
        asked = self.config.common_vocabulary
        return self.seed is not None and last if asked is None else asked

    def _across(self, level: Level, above: _Above, size: int, by_vocabulary: bool) -> Callable[[Drafter], Drafter]:
        return partial(
            CrossTokenizerDrafter,
            tokenizer=above.tokenizer,
            inner_tokenizer=level.tokenizer,
            by_text=not by_vocabulary,
            inner_vocab_size=size,
            vocab_size=above.vocab_size,
            name=level.name,
        )

    def _engines_over(self, levels: list[Level]) -> list[Engine]:
        with_models = [level for level in levels if level.drafter is None and not level.is_head]
        self.has_head = any(level.is_head for level in levels)
        if self.is_shared:
            require_alike_on_ranks(self.model, [level.model for level in with_models])
        return self._engines([self.model, *(level.model for level in with_models)],
                             [router_of(self.model), *(level.router for level in with_models)])  # fmt: skip

    def _engines(self, models: list[nn.Module], routers: list[Router | None]) -> list[Engine]:
        """Engines over target and levels, with a router or without. The one that the config names is a must for the
        target."""
        plain = [model for model, router in zip(models, routers, strict=True) if router is None]
        found = engines_of(
            plain,
            [max_positions(model) for model in plain],
            name=engine_with_head(self.model, self.config) if self.has_head else self.config.engine,
            prepare=self.config.prepare,
            required=self.config.engine is not None and routers[0] is None,
            capacity=self.capacity,
        ) if plain else []  # fmt: skip
        for place, (model, router) in enumerate(zip(models, routers, strict=True)):
            if router is not None:
                found.insert(place, self._routed(model, router, is_target=place == 0))
        return found

    def _routed(self, model: nn.Module, router: Router, *, is_target: bool) -> Engine:
        """The engine of a model whose planes a router picks; what a level's passes cost is told by its average."""
        name = self.config.engine if is_target else None
        made = routed_engine(
            model, router, name=name, prepare=self.config.prepare, capacity=self.capacity,
            num_positions=max_positions(model),
        )  # fmt: skip
        if not is_target:
            made.bits = Bits(min(router.widths, key=lambda width: abs(width - router.average)), 16)
        return made

    def _sampler(self, vocab_size: int | None = None) -> Callable[[], Sampler]:
        """How the sampler of a level in the target's vocabulary is made; vocab_size: None for the target itself."""
        return partial(
            Sampler,
            vocab_size or self.vocab_size,
            seed=self.seed,
            warp=self.warp,
            process=self.process,
            prompt_lengths=self.prompts.lengths,
            ends=self.ends,
        )

    def _guesser(self, vocab_size: int, shares_noise: bool) -> Callable[[], Sampler]:
        """How that of a level in another vocabulary is made, whose processors look at no token ids.

        shares_noise: it drafts tokens of the target's, so that a token has the target's noise. Others guess greedily.
        """
        if self.seed is None or not shares_noise:
            return partial(Sampler, vocab_size)
        return partial(Sampler, vocab_size, seed=self.seed, warp=warp_of(self.processors))

    def _num_draft_tokens(self, level: Level, index: int) -> int:
        given = self.config.of_level("num_draft_tokens", index, self.count)
        self.chooses &= given is None
        if level.bits is not None:  # the target's own generation_config speaks of its assistants
            return drafting_defaults(self.model, level.bits)[0] if given is None else given
        if given is None:
            given = getattr(getattr(level.model, "generation_config", None), "num_assistant_tokens", None)
            check_num_draft_tokens(given, f"generation_config.num_assistant_tokens of level {level.name} is {given!r}")
            self.chooses &= given is None
        return NUM_DRAFT_TOKENS if given is None else given

    def _threshold(self, level: Level, index: int, same: bool) -> float:
        given = self.config.of_level("confidence_threshold", index, self.count)
        self.chooses &= given is None
        if level.bits is not None:
            return drafting_defaults(self.model, level.bits)[1] if given is None else given
        if given is None:
            settings = getattr(level.model, "generation_config", None)
            given = getattr(settings, "assistant_confidence_threshold", None)
            check_threshold(
                given, f"generation_config.assistant_confidence_threshold of level {level.name} is {given!r}"
            )
            self.chooses &= given is None
        default = CONFIDENCE_THRESHOLD if same else CONFIDENCE_THRESHOLD_ACROSS_TOKENIZERS
        return default if given is None else given


def _num_layers(model: nn.Module) -> int:
    """Of a model's decoder, as its config says."""
    return getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0)
