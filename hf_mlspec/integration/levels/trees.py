"""Which level can draft trees, and who can check them? Asked before anything runs; see `SpeculationConfig.tree`."""

from __future__ import annotations

from ...engines.engine import Engine
from ...speculation.chain import Part
from ...speculation.checker import why_no_trees
from ...speculation.draft import Drafter
from ...speculation.drafters.lookup_tree import LookupTree
from ...speculation.drafters.ngram import NGram
from ...speculation.drafters.prompt_lookup import PromptLookup

_REMEDY = "leave tree out, and it drafts rows"


def tree_of(lookup: Drafter, widths: list[int]) -> LookupTree:
    """A lookup that drafts trees; ValueError for a drafter of the user's."""
    if isinstance(lookup, LookupTree):
        return LookupTree(lookup.lookups, widths, lookup.name)
    if isinstance(lookup, (PromptLookup, NGram)):
        return LookupTree([lookup], widths, lookup.name)
    raise ValueError(
        f"tree is {widths}, and level {lookup.name} is a drafter of yours: it proposes a tree where its Draft has "
        f"parents (speculation/draft.py), so {_REMEDY.replace('it drafts rows', 'it decides itself')}"
    )


def require_tree_level(part: Part, widths: list[int], above: Engine, name: str) -> None:
    """ValueError where the last level cannot draft a tree, or the level `name` above it cannot check one, with this
    engine."""
    said = f"tree is {widths}, and level {part.name}"
    if part.engine is not None and not part.engine.can.trees:
        raise ValueError(f"{said} {why_no_trees(part.engine)}, which goes through rows alone: {_REMEDY}")
    if part.across is not None:
        raise ValueError(f"{said} has another vocabulary than the level above, which translates rows alone: {_REMEDY}")
    if not above.can.trees:
        raise ValueError(
            f"{said} is checked by {name}, which {why_no_trees(above)}: it goes through rows alone; leave tree out, "
            'or choose engine="modules" or a CPU'
        )
