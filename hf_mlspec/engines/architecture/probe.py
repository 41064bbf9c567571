"""Is a class that nobody described one of the known forms? Its module names and a float32 probe tell.

A form fits by names where its description's places are there and read every parameter of the model. It fits by numbers
where, layer by layer, it computes in float32 what the model's own modules compute of random ids: once from the first
position on, and once far back, in two pieces through the model's own cache. Windows are made short for the time, so
that the ids reach past them. Classes with adapters, packed weights, experts, states or images are not asked.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.hooks import has_hooks
from .description import CPU_FIELDS, WITHOUT_WINDOW, Description
from .interpret import outline
from .known import KNOWN, RECOGNISED, form_of, layers_of, supposed
from .parts import Outline, UnknownArchitecture
from .plain import embedded, layer_output, logits_of
from .records import Passes, at, recorded
from .rotary import UNROTATED, text_config
from .scales import named

NEAR = 2e-5  # of the largest element, by which float32 sums of other orders may part
NEAR_ROUNDED = 8e-3  # embeddings of fewer bits, which some models scale before they are float32
_WINDOW = 7  # of layers with one, while a model is probed
# Parts of names of config entries: what they ask for, a few random ids do not show.
_UNSEEN = ("chunk", "temperature", "sparse", "compress", "block_size", "dilat", "clip", "clamp", "limit", "window",
           "local_att")  # fmt: skip
_SEEN = ("sliding_window", "max_window_layers")  # windows that are made short, and which layers have them
_CAPS = ("softcap", "soft_cap")
_HEAD_NORMS = {"q": "self_attn.q_norm", "k": "self_attn.k_norm"}


@dataclass(frozen=True)
class Evidence:
    """Which form fits a model, and how near: the largest difference, as a part of the largest element, of what a layer
    hands on and of logits. tokens: that were compared."""

    entry: Description
    like: str
    layers: int
    of_layers: float
    of_logits: float
    tokens: int

    def told(self, name: str) -> str:
        return (f"{name} has no description, and computes what {self.like} does ({_differs(self.entry, self.like)}): "
                f"in float32 its {self.layers} layers and this form part by {self.of_layers:.1e} of the largest "
                f"element, logits by {self.of_logits:.1e}, on {self.tokens} random ids")


def recognise(model: nn.Module) -> Evidence:
    """Which known form the class of a model has; it is described from now on, for configs like this one.
    UnknownArchitecture says why it has none, and which came nearest."""
    _require_own_forward(model)
    _require_seen(text_config(model))
    form, nearest = form_of(text_config(model)), None
    passes: dict[tuple, Passes] = {}
    with torch.no_grad(), _short_windows(model):
        for entry, like in _candidates(model):
            places = entry.embedding, entry.layers, entry.final_norm, entry.head
            try:
                with supposed(type(model), entry):
                    found = outline(model, next(model.parameters()).device)
                    if places not in passes:
                        passes[places] = recorded(model, entry)
                    evidence = _held_against(entry, like, model, found, passes[places])
            except Exception:  # a description of another class may ask its modules for anything
                continue
            if not isinstance(evidence, Evidence):
                nearest = min(nearest or evidence, evidence)
                continue
            RECOGNISED[type(model)] = entry, form, layers_of(text_config(model))
            return evidence
    told = "no known form has its modules" if nearest is None else nearest[1]
    raise UnknownArchitecture(f"its class has no description, and a probe recognises none in it: {told}")


def _held_against(
    entry: Description, like: str, model: nn.Module, found: Outline, passes: Passes
) -> Evidence | tuple[float, str]:
    """The evidence, or how far it is off and where."""
    folded = _folded(entry, model, found)
    loose = NEAR if found.embedding.dtype == torch.float32 else NEAR_ROUNDED
    worst = 0.0
    for ids, positions, layers, logits in passes:
        gap = _gap(embedded(found, ids, positions) * folded, layers[0][0])
        if gap > loose:
            return 1e3, f"the embeddings of {like} part by {gap:.1e} from its own"
        if any(not torch.equal(one[1], other[0]) for one, other in pairwise(layers)):
            return 1e3, "something is computed between its layers"
        if len(layers) != len(found.blocks):
            return 1e3, f"of its {len(found.blocks)} layers a pass goes through {len(layers)}"
        tables = _tables(found, positions)
        for index, (read, handed_on) in enumerate(layers):
            own = layer_output(found, index, read / folded, tables) * folded
            gap = _gap(own - read, handed_on - read)  # what the layer adds
            if not gap <= NEAR:
                return len(layers) - index + min(gap, 1.0), f"layer {index} of {like} parts by {gap:.1e} from its own"
            worst = max(worst, gap)
        of_logits = _gap(logits_of(found, layers[-1][1] / folded), logits)
        if not of_logits <= NEAR:
            return of_logits, f"logits of {like} part by {of_logits:.1e} from its own"
    tokens = sum(one[0].numel() for one in passes)
    return Evidence(entry, like, len(found.blocks), worst, of_logits, tokens)


def _gap(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a part of the largest element; infinite for other shapes."""
    if found.shape != expected.shape:
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def _folded(entry: Description, model: nn.Module, found: Outline) -> float:
    """What the outline divides the residual stream by (`scales.scale_blocks`)."""
    scale = 1.0 if entry.residual_scale is None else float(named(text_config(model), entry, "residual_scale"))
    return 1.0 if found.blocks and found.blocks[0].norms[2] is not None else scale


def _tables(found: Outline, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
    if found.rotation.kinds == [UNROTATED]:
        ones = torch.ones(*positions.shape, found.sizes.rotary_dim // 2, device=positions.device)
        return [(ones, torch.zeros_like(ones))]
    return [(cos[positions], sin[positions]) for cos, sin in found.rotation.tables(int(positions.max()) + 1)]


def _candidates(model: nn.Module) -> Iterator[tuple[Description, str]]:
    """Descriptions that read all parameters of the model, those that are known as they are in front, and of which
    known class. Each once: beside the first that it is made of."""
    found: list[Description] = []
    for entry, like in _made(model):
        if entry not in found:
            found.append(entry)
            yield entry, like


def _made(model: nn.Module) -> Iterator[tuple[Description, str]]:
    """The same, some more than once."""
    name, package = type(model).__name__, type(model).__module__.partition(".")[0]
    capped = {name for name, said in text_config(model).to_dict().items() if said and any(w in name for w in _CAPS)}
    fitting = []
    for like, entry in KNOWN.items():
        if _is_plain(entry):
            own = replace(entry, class_name=name, package=package)
            if capped <= {own.attention_softcap, own.logit_softcap}:
                fitting += [(one, like) for one in (own, _with_head_norms(own)) if one and _reads_all(one, model)]
    yield from fitting
    has_window = getattr(text_config(model), "sliding_window", None) is not None
    windows = ["by layer type", "every layer", "none"] if has_window else [None]
    for entry, like in fitting:
        for norm in (entry.norm, _other_norm(entry.norm)):
            for rotation in dict.fromkeys((entry.rotation, "halves", "pairs", "pairs by columns")):
                for window in windows:
                    for unrotated in {entry.layers_without_rotary, WITHOUT_WINDOW if window else None}:
                        changed = {"norm": norm, "rotation": rotation, "layers_without_rotary": unrotated}
                        changed |= {"windows": window} if window else {}
                        yield replace(entry, **changed), like


def _is_plain(entry: Description) -> bool:
    """Whether `plain.py` computes all that an entry may ask for."""
    beside = entry.experts, entry.delta, entry.sinks, *(getattr(entry, name) for name in CPU_FIELDS)
    words = entry.head_gates, entry.heads, entry.values
    return all(own is None for own in beside) and words == ("none", "alike", "own") and "chunks" not in entry.windows


def _other_norm(norm: str) -> str:
    kind = norm.partition(" ")[0]
    return kind if norm.endswith("plus one") else f"{kind} plus one"


def _with_head_norms(entry: Description) -> Description | None:
    return None if "q" in entry.norms else replace(entry, norms={**entry.norms, **_HEAD_NORMS})


def _reads_all(entry: Description, model: nn.Module) -> bool:
    """Whether its places are in the model and hold all of its parameters."""
    places = [entry.embedding, entry.final_norm, entry.head, entry.position_embedding]
    try:
        layers = at(model, entry.layers)
        found = [at(model, place) for place in places if place]
        found += [at(layer, place) for layer in layers for place in (*entry.linears.values(), *entry.norms.values())]
    except (AttributeError, TypeError):
        return False
    read = {id(parameter) for module in found for parameter in module.parameters()}
    return all(id(parameter) in read for parameter in model.parameters())


def _require_own_forward(model: nn.Module) -> None:
    """UnknownArchitecture for a class, of the model or of a part, that changes what one of transformers computes."""
    for path, module in model.named_modules():
        kinds = type(module).__mro__
        known = next((at for at, kind in enumerate(kinds) if kind.__module__.startswith("transformers.models.")), 0)
        changed = [kind for kind in kinds[:known] if any(inspect.isfunction(own) for own in vars(kind).values())]
        if changed:
            place = f"its {path}" if path else "it"
            raise UnknownArchitecture(f"{place} is a {changed[0].__name__}, which changes what "
                                      f"{kinds[known].__name__} computes")
        if has_hooks(module):
            raise UnknownArchitecture(f"its {path or 'model'} has forward hooks")


def _require_seen(config: Any) -> None:
    """UnknownArchitecture where a config asks for what rows of a few tokens do not show."""
    for name, said in config.to_dict().items():
        unseen = any(word in name for word in _UNSEEN) and not any(word in name for word in _SEEN)
        if unseen and said not in (None, False, 0):
            raise UnknownArchitecture(f"its class has no description, and its config says {name}={said!r}, which a "
                                      "probe of short rows does not see")


@contextmanager
def _short_windows(model: nn.Module) -> Iterator[None]:
    """Inside, layers with a window see _WINDOW tokens."""
    holders = [text_config(model), *model.modules()]
    kept = [(one, said) for one in {id(one): one for one in holders}.values()
            if isinstance(said := getattr(one, "sliding_window", None), int) and said > _WINDOW]
    for one, _ in kept:
        one.sliding_window = _WINDOW
    try:
        yield
    finally:
        for one, said in kept:
            one.sliding_window = said


def _differs(entry: Description, like: str) -> str:
    """What an entry says otherwise than the one it was made of."""
    known = KNOWN[like]
    names = [name for name in vars(known) if name not in ("class_name", "package")]
    found = [f"{name} {getattr(entry, name)!r}" for name in names if getattr(entry, name) != getattr(known, name)]
    return ", ".join(found) or "as it is described"
