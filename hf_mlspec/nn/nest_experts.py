"""How do the experts of a layer become nested, in their own memory where they may, and dense again after an error?"""

from __future__ import annotations

from torch import Tensor, nn

from ..formats import NestedWeight
from .castable import part_of_experts, require_finite_float
from .nest_in_place import NestingInPlace, can_nest_in_place
from .nest_plan import Plan
from .nest_swap import AnySwap, ExpertSwap
from .nested_experts import NestedExperts, rows_kept_whole, too_many_escapes
from .shards import Laid, is_sharded, mesh_of, split_experts
from .switch import PrecisionSwitch


def require_finite_experts(model: nn.Module, plan: Plan) -> None:
    """ValueError naming projection and expert for NaN or Inf."""
    for path in plan.experts:
        own = part_of_experts(model.get_submodule(path))
        for key in NestedExperts(own, name=path).names:
            require_finite_float(f"{path}.{key}", getattr(own, key).detach(), "nest")


def nest_experts(
    model: nn.Module, path: str, paths: list[str], codebook: str, switch: PrecisionSwitch,
    done: list[AnySwap],
) -> str | None:  # fmt: skip
    """Why the experts at ``path`` stay as they are after all; after an error they are as they were."""
    given = model.get_submodule(path)
    dense, shared = part_of_experts(given), is_sharded(given)
    nested = NestedExperts(dense, "nested", switch, path)
    requires_grad = any(getattr(dense, key).requires_grad for key in nested.names)
    # Both projections or neither: a module is in tiles as a whole.
    own = not (shared or nested.original.transposed)
    own = own and all(can_nest_in_place(dense, 1, key) for key in nested.names)
    ways = {key: _Projection(dense, nested, key, codebook, f"{path}.{key}", own) for key in nested.names}
    for key, way in ways.items():
        if why := too_many_escapes(way.escapes, nested.original.num_experts, *nested.original.sizes[key]):
            return f"{key}: {why}"
    laid = {key: Laid.of(getattr(given, key)) for key in nested.names} if shared else None
    swap = ExpertSwap(paths, requires_grad, laid=laid)
    try:
        for key, way in ways.items():
            nested.hold_rows_(key, way.parts())
        if shared:
            split_experts(nested, mesh_of(model))
        done.append(swap)
        swap.put_nested(model, nested)
    except BaseException:
        if model.get_submodule(path) is given:  # else they are nested, and undone like those before them
            for way in ways.values():
                way.restore()
        raise
    return None


class _Projection:
    """One projection of all experts on its way, in its own memory or beside it."""

    def __init__(
        self, dense: nn.Module, nested: NestedExperts, key: str, codebook: str, name: str, own: bool
    ) -> None:  # fmt: skip
        """Reads the weight and changes nothing. own: in its own memory."""
        rows = nested.rows_of(dense, key)
        self._rows, self._shape = rows if own else None, (nested.original.num_experts, *nested.original.sizes[key])
        self._in_place = NestingInPlace(rows, codebook, name) if own else None
        self._parts = None if own else NestedWeight.from_dense(rows, codebook, name).parts

    @property
    def escapes(self) -> Tensor | None:
        """Places of escapes, as on disk."""
        return self._parts.escape_index if self._in_place is None else self._in_place.index

    def parts(self) -> tuple[Tensor | None, ...]:
        """As `NestedExperts.hold_rows_` takes them."""
        if self._in_place is None:
            return self._parts
        if not len(self.escapes):
            return self._in_place.tiles()
        chosen = rows_kept_whole(self.escapes, *self._shape)
        index = chosen.unsqueeze(2).expand(-1, -1, self._shape[2])
        exact = self._rows.view(self._shape).gather(1, index)  # a copy, before the rows give way to tiles
        return self._in_place.tiles()._replace(escape_index=chosen, escape_value=exact)

    def restore(self) -> None:
        if self._in_place is not None:
            self._in_place.restore()
