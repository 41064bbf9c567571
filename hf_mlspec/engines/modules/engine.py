"""How does a model score tokens with its own modules, over a cache whose rows have lengths of their own?

The model classes of transformers spend a quarter of a millisecond a call on masks, output objects and argument merging
that a decoding loop does not need. For the architectures in PLAIN the same modules are called in the same order, so
that the result has the same bits; every other architecture goes through its own forward.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from ...nn.hooks import has_hooks
from ...nn.switch import precision_switch
from ...precision import OWN_BITS, Bits
from ..engine import Capabilities, Guess, Rows
from ..rows import CachedRows, cache_format_of, first_capacity, row_bytes
from .attention import Plan, TreePlan, planned
from .cache import RaggedCache
from .states import of_layers
from .tapping import tapping

# Embedding -> rotary -> layers -> norm -> head, nothing else in between, in transformers 5.17 to 5.23.
PLAIN = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)

Forward = Callable[[Tensor, Tensor, object, "slice | Tensor"], Tensor]


class ModuleEngine(CachedRows):
    """A model's modules over a ragged cache. See `Engine`.

    forward: the function that computes logits; `bare_forward(model)` or None for the model's own forward.
    capacity: tokens a row is expected to hold. num_embeddings: ids the model can embed; larger ones (padding rows
        that only the level above has) are read as the last. num_positions: positions of the model; only padding
        and rows whose logits are unused may exceed them.
    """

    name = "modules"
    can = Capabilities(by_module=True, tapped=True, trees=True)

    def __init__(
        self,
        model: nn.Module,
        *,
        follow: ModuleEngine | None = None,
        forward: Callable | None = None,
        capacity: int = 0,
        num_embeddings: int | None = None,
        num_positions: int | None = None,
        bits: Bits = OWN_BITS,
    ):
        self.model, self.follow, self.capacity = model, follow, first_capacity(capacity, num_positions)
        self.num_embeddings, self.num_positions = num_embeddings, num_positions
        self.forward, self.bits = forward or _own_forward(model), bits
        self.cache_format = cache_format_of(model)
        self.cache: RaggedCache | None = None
        self.lengths: list[int] = []
        self._ends: list[int] = []  # tokens of every row before the tree that was fed last
        self.forwards, self.seconds = 0, 0.0

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's weights."""
        return self.model.dtype

    @property
    def vocab_size(self) -> int:
        """Entries of the model's logits."""
        return self.model.config.get_text_config().vocab_size

    @property
    def max_positions(self) -> int | None:
        """Positions the model knows."""
        return self.num_positions

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values in all layers, on one device; 0 where the config does not say, and under autocast."""
        config = self.model.config.get_text_config()
        heads = of_layers(config, "num_key_value_heads")
        told = all(isinstance(own, int) for own in heads)
        if not told or is_spread(self.model) or torch.is_autocast_enabled(self.model.device.type):
            return 0
        sizes = [size or config.hidden_size // config.num_attention_heads for size in of_layers(config, "head_dim")]
        rows = zip(heads, sizes, strict=True)
        return sum(2 * own * row_bytes(size, self.dtype, self.cache_format) for own, size in rows)

    @property
    def bits(self) -> Bits:
        """What every packed layer is called at; OWN_BITS: what its switch says."""
        return self._bits

    @bits.setter
    def bits(self, bits: Bits) -> None:
        self._bits, self._switch = bits, None if bits == OWN_BITS else precision_switch(self.model)

    def start(self, batch: int, device: torch.device) -> None:
        """An empty cache for `batch` rows; a follower takes its leader's, which must have started."""
        self.device = device
        self.lengths = [0] * batch
        num_layers = self.model.config.get_text_config().num_hidden_layers
        self.cache = self.follow.cache if self.follow else None
        if not self.follow:
            self.cache = RaggedCache(num_layers, self.capacity, self.cache_format)

    def feed(self, rows: Rows, guess: Guess | None = None, alive: list[bool] | None = None) -> Tensor:
        """Score rows and guesses as `Engine.feed` does: logits `[batch, k + 1, vocab]`.

        Inactive rows are padded with one token that the cache does not keep.
        """
        alive = alive or [True] * len(rows)
        # A row's last token is always scored, cached or not: its logits are what the caller wants.
        self.lengths = [
            min(have, len(row) - 1) if on else have for row, have, on in zip(rows, self.lengths, alive, strict=True)
        ]
        missing = [len(row) - have if on else 1 for row, have, on in zip(rows, self.lengths, alive, strict=True)]
        lengths, width = (guess.lengths, guess.tokens.shape[1]) if guess else ([0] * len(rows), 0)
        if len(set(missing)) == 1:
            tokens = torch.tensor([row[-missing[0] :] for row in rows], device=self.device)
            if width:
                tokens = torch.cat([tokens, guess.tokens], dim=1)
        else:
            tokens = self._ragged(rows, missing, guess.tokens.tolist() if guess else [[]] * len(rows), width)
        counts = [m + n if on else 0 for m, n, on in zip(missing, lengths, alive, strict=True)]
        firsts = [m - 1 for m in missing]
        if guess is None or guess.parents is None:
            return self.step(tokens, counts, firsts, width + 1)
        self._ends = [have + m for have, m in zip(self.lengths, missing, strict=True)]
        own = [tree if on else [] for tree, on in zip(guess.parents, alive, strict=True)]
        plan = TreePlan(self.lengths, tokens.shape[1], self.device, missing, own)
        return self._step(tokens, counts, firsts, width + 1, plan)

    def keep(self, paths: list[list[int]]) -> None:
        """`Engine.keep`."""
        for r, (end, kept) in enumerate(zip(self._ends, paths, strict=True)):
            slots = [end + node for node in kept]
            if kept != list(range(len(kept))):
                self.cache.move(r, slots, end)
            if kept and self.tap is not None:
                self.tap.keep(r, slots, end)

    def _ragged(self, rows: Rows, missing: list[int], guesses: Rows, width: int) -> Tensor:
        longest = max(missing) + width
        fed = [row[len(row) - m :] + guess for row, m, guess in zip(rows, missing, guesses, strict=True)]
        return torch.tensor([line + [line[-1]] * (longest - len(line)) for line in fed], device=self.device)

    def step(self, tokens: Tensor, counts: list[int], first: list[int], kept: int) -> Tensor:
        """One forward pass over tokens `[batch, q]`, counts[r] of them valid; logits of `kept` from first[r] on."""
        return self._step(tokens, counts, first, kept, Plan(self.lengths, tokens.shape[1], self.device))

    def _step(self, tokens: Tensor, counts: list[int], first: list[int], kept: int, plan: Plan) -> Tensor:
        begin = time.perf_counter()
        if self.num_embeddings is not None:
            tokens = tokens.clamp(max=self.num_embeddings - 1)
        if min(first) == max(first):
            window, gather = slice(first[0], first[0] + kept), None
        else:
            wanted = torch.tensor(first)[:, None] + torch.arange(kept)
            wanted = wanted.clamp(max=tokens.shape[1] - 1)
            window, gather = torch.unique(wanted, return_inverse=True)
            window, gather = window.to(self.device), gather.to(self.device)
        positions, last = plan.positions, plan.last(counts)
        if self.num_positions is not None:
            last = min(last, self.num_positions - 1)
        if plan.end > last + 1:  # padding past it may have no embedding, or change all rotary frequencies
            positions = positions.clamp(max=last)
        with planned(plan), self._at_bits(), self._tapping(plan, counts):
            logits = self.forward(tokens, positions, self.cache, window)
        if gather is not None:
            logits = logits[torch.arange(len(first), device=logits.device)[:, None], gather.to(logits.device)]
        self.lengths = [have + count for have, count in zip(self.lengths, counts, strict=True)]
        self.forwards += 1
        self.seconds += time.perf_counter() - begin
        return logits

    def _tapping(self, plan: Plan, counts: list[int]) -> AbstractContextManager:
        return nullcontext() if self.tap is None else tapping(self.model, self.tap, plan, counts)

    def _at_bits(self) -> AbstractContextManager:
        return nullcontext() if self._switch is None else self._switch.at(self._bits)


def is_spread(model: nn.Module) -> bool:
    """Whether accelerate put a model's layers on several devices."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1


def _own_forward(model: nn.Module) -> Callable:
    """The model's own forward as (tokens, positions, cache, kept) -> logits."""
    takes_kept = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(tokens: Tensor, positions: Tensor, cache: RaggedCache, kept) -> Tensor:
        options = {}
        if takes_kept and is_spread(model):
            # Tensors accelerate would take to the tokens, and the last norm may be elsewhere.
            options["logits_to_keep"] = kept if isinstance(kept, slice) else kept.tolist()
        elif takes_kept:
            index = torch.arange(tokens.shape[1], device=tokens.device)[kept] if isinstance(kept, slice) else kept
            options["logits_to_keep"] = index
        out = model(
            input_ids=tokens,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
            **options,
        )
        return out.logits if takes_kept else out.logits[:, kept]

    return forward


def bare_forward(model: nn.Module) -> Forward | None:
    """A function (tokens, positions, cache, kept) -> logits `[batch, kept, vocab]`, or None for other architectures.

    Only exact classes qualify, and only while their forward is not hooked or replaced: hooks (accelerate's offloading,
    a user's own) must keep firing.
    """
    if type(model) not in PLAIN or _is_altered(model) or _is_altered(model.model):
        return None
    base, head = model.model, model.lm_head
    layers = list(base.layers[: base.config.num_hidden_layers])

    def forward(tokens: Tensor, positions: Tensor, cache, kept) -> Tensor:
        hidden = base.embed_tokens(tokens)
        rotary = base.rotary_emb(hidden, position_ids=positions)
        for layer in layers:
            hidden = layer(
                hidden,
                attention_mask=None,
                position_embeddings=rotary,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
        return head(base.norm(hidden)[:, kept])

    return forward


def _is_altered(module: nn.Module) -> bool:
    return has_hooks(module) or "forward" in vars(module) or module.training
