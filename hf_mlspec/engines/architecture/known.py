"""Which architectures do the decoders know? One entry each; docs/guide/add_an_architecture.md says how to add one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .description import Description, not_served
from .families import behind, hybrids, layer_norms, mixtures, rms
from .parts import UndescribedClass

_ENTRIES = (*rms.ENTRIES, *behind.ENTRIES, *layer_norms.ENTRIES, *mixtures.ENTRIES, *hybrids.ENTRIES)
KNOWN: dict[str, Description] = {entry.class_name: entry for entry in _ENTRIES}
ON_THE_CPU_ALONE = tuple(name for name, entry in KNOWN.items() if not_served(entry, "cuda") is not None)

# Classes in which a probe recognised a known form, and the config that it was asked with, and of which layers: of a
# class, not of a model.
RECOGNISED: dict[type, tuple[Description, dict[str, Any], tuple[int, set[str]]]] = {}
_supposed: ContextVar[tuple[type, Description] | None] = ContextVar("supposed", default=None)
# Entries of a config that say nothing of what a layer computes, or say it layer by layer.
_NO_FORM = {"num_hidden_layers", "n_layer", "num_layers", "layer_types", "dtype", "torch_dtype", "architectures",
            "transformers_version", "quantization_config", "use_cache", "_name_or_path"}  # fmt: skip


def form_of(config: Any) -> dict[str, Any]:
    """What a config says of the form of its layers."""
    return {name: said for name, said in config.to_dict().items() if name not in _NO_FORM}


def layers_of(config: Any) -> tuple[int, set[str]]:
    """How many layers a config has, and of which kinds."""
    return config.num_hidden_layers, set(getattr(config, "layer_types", None) or ())


def recognised(kind: type, config: Any) -> Description:
    """What a probe found, or supposes, of a class and a config like this one, of no more layers and of no other kinds;
    UndescribedClass where it found nothing."""
    asked = _supposed.get()
    if asked is not None and asked[0] is kind:
        return asked[1]
    entry, form, (most, kinds) = RECOGNISED.get(kind, (None, None, (0, set())))
    count, own_kinds = layers_of(config) if entry is not None else (0, set())
    if entry is None or form != form_of(config) or count > most or not own_kinds <= kinds:
        raise UndescribedClass("the compiled decoder does not know this class")
    return entry


@contextmanager
def supposed(kind: type, entry: Description) -> Iterator[None]:
    """Inside, a class is taken for what an entry describes, in this thread."""
    token = _supposed.set((kind, entry))
    try:
        yield
    finally:
        _supposed.reset(token)
