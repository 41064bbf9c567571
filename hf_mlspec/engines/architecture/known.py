"""Which architectures do the decoders know? One entry each; docs/guide/add_an_architecture.md says how to add one."""

from __future__ import annotations

from .description import Description, not_served
from .families import behind, hybrids, layer_norms, mixtures, rms

_ENTRIES = (*rms.ENTRIES, *behind.ENTRIES, *layer_norms.ENTRIES, *mixtures.ENTRIES, *hybrids.ENTRIES)
KNOWN: dict[str, Description] = {entry.class_name: entry for entry in _ENTRIES}
ON_THE_CPU_ALONE = tuple(name for name, entry in KNOWN.items() if not_served(entry, "cuda") is not None)
