"""What replaces a module of experts? One tensor of 4-bit codes per projection, multiplied expert by expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import ops
from ..formats import Parts
from ..ops.products import sliced_linear
from .expert_modules import ExpertModule
from .packed import PackedModule, require_switch
from .switch import PrecisionSwitch

MOST_PLANNED = 1024  # experts of a layer: MLSPEC_CUDA_MOST_EXPERTS
PLANNED = ("mxfp4", "int4", "nested", "planes")  # formats whose experts ops multiply all at once


class PackedExperts(PackedModule):
    """The experts of a layer in MXFP4, int4 or another format that can hold experts; called, like what it replaces, by
    the model's own routing block.

    For every projection X of transformers' expert modules (gate_up_proj or up_proj, and down_proj), out-major also
    where the dense module was not:

        parameter    on disk, in state_dict()      in tiles, from the first forward on (ops/tiles.py)
        X_packed     [experts, out, in / 2]        [experts, ceil(out / 16), in / 32, 256]
        X_scale      [experts, out, in / group]    [experts, ceil(out / 16), in / group, 16]
        X_zero       as X_scale, int4 only         as X_scale; None when symmetric
        X_bias       [experts, out], the very parameter of the original, where it has one

    The gating (act_fn, _apply_gate and what it reads), norms and every other attribute are the original's own. A
    token's experts are summed in float32 in the order of its routing, whatever else is in the call.
    """

    disk_axes = 3

    def __init__(
        self,
        module: nn.Module,
        format: str = "mxfp4",
        switch: PrecisionSwitch | None = None,
        name: str = "experts",
        **options: Any,
    ) -> None:
        """The shape of ``module``, its packed parameters on the meta device: `from_module` and `empty` fill them.

        options: of the format. ValueError naming ``name`` when the module is not understood or a group does not
        divide its in_features.
        """
        super().__init__(require_switch(switch, format, name))
        self.format, self.original = format, ExpertModule.of(module, name)
        self.names, self.options = tuple(self.original.sizes), options
        for key, (_, in_features) in self.original.sizes.items():
            self.record.require_fit(in_features, f"{name}.{key}", **options)
            self._register_parts(key, self._zeros(key, torch.device("meta")))
            self.register_buffer(f"{key}_dense", None, persistent=False)
        self.original.carry_over(module, self)
        self.train(module.training)

    @classmethod
    def from_module(
        cls, module: nn.Module, format: str = "mxfp4", switch: PrecisionSwitch | None = None, name: str = "experts",
        **options: Any,
    ) -> PackedExperts:  # fmt: skip
        """Quantize the experts of ``module``; biases are shared. ValueError naming ``name`` and the expert for NaN or
        Inf, or when the module is not understood."""
        experts = cls(module, format, switch, name, **options)
        for key in experts.names:
            tensors = experts.quantized(key, getattr(module, key).detach(), name)
            experts._register_parts(key, tuple(tensors.get(f"{key}_{part}") for part in experts.record.parts))
        return experts

    @classmethod
    def empty(
        cls, module: nn.Module, format: str = "mxfp4", switch: PrecisionSwitch | None = None, name: str = "experts",
        **options: Any,
    ) -> PackedExperts:  # fmt: skip
        """The shape of ``module`` with values of 0 on its device (meta while a checkpoint loads)."""
        experts = cls(module, format, switch, name, **options)
        for key in experts.names:
            experts._register_parts(key, experts._zeros(key, getattr(module, key).device))
        return experts

    def quantized(
        self, key: str, dense: torch.Tensor, name: str = "experts", **options: Any
    ) -> dict[str, torch.Tensor]:
        """The tensors on disk of projection ``key`` by name, from ``dense`` in the original's layout, ``[experts, out,
        in]`` or ``[experts, in, out]``; one expert is in flight at a time.
        options: of the format, where they are not the module's.

        ValueError naming ``name``, the projection and the expert for another shape, NaN, Inf, or a scale that the
        format cannot hold.
        """
        out_in = self.original.sizes[key]
        shape = [self.original.num_experts, *(out_in[::-1] if self.original.transposed else out_in)]
        if list(dense.shape) != shape:
            raise ValueError(f"{name}.{key} has shape {list(dense.shape)}, expected {shape}")
        settings = {**self.options, **options}

        def quantize(expert: int, matrix: torch.Tensor) -> Parts:
            matrix = matrix.T.contiguous() if self.original.transposed else matrix
            return self.record.weight.from_dense(matrix, name=f"{name}.{key} of expert {expert}", **settings).parts

        parts = zip(self.record.parts, stack_experts(quantize, (dense,)), strict=True)
        return {f"{key}_{part}": tensor for part, tensor in parts if tensor is not None}

    @property
    def group_size(self) -> int:
        """Weights along the inputs that share a scale, the same in every projection."""
        key = self.names[-1]
        return self.original.sizes[key][1] // self._parameters[f"{key}_scale"].shape[2]

    @property
    def symmetric(self) -> bool:
        """Whether there are no zero points."""
        return self._parameters.get(f"{self.names[-1]}_zero") is None

    def validate(self, name: str = "experts") -> PackedExperts:
        """Itself, or the error of the format's weight for the first expert's that is damaged."""
        for key in self.names:
            self.validate_parts(key, self._on_disk(key), name)
        return self

    def validate_parts(self, key: str, disk: Parts, name: str) -> None:
        """Of projection ``key`` on disk: ValueError or TypeError naming what is damaged, and the expert."""
        for expert in range(self.original.num_experts):
            weight = self.record.weight(*_of_expert(disk, expert), name=f"{name}.{key} of expert {expert}")
            weight.validate(*self.original.sizes[key])

    def dequantized(self, key: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Projection ``key`` as ``[experts, out, in]`` in ``dtype``."""
        return stack_experts(lambda _, *parts: (self.record.weight(*parts).dequantize(dtype),), self._on_disk(key))[0]

    def dequantized_module(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The module that was replaced, with the rounded weights in ``dtype`` and in its own layout."""
        module = self.original.kind.__new__(self.original.kind)
        nn.Module.__init__(module)
        self.original.carry_over(self, module)
        for key in self.names:
            dense = self.dequantized(key, dtype)
            dense = dense.transpose(1, 2).contiguous() if self.original.transposed else dense
            module.register_parameter(key, nn.Parameter(dense, requires_grad=False))
        return module.train(self.training)

    def materialize(self, dtype: torch.dtype) -> PackedExperts:
        """Keep the weights in ``dtype`` next to the codes, as PackedLinear.materialize."""
        for key in self.names:
            setattr(self, f"{key}_dense", self.dequantized(key, dtype))
        return self

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states ``[tokens, hidden]``; the experts of each token, int ``[tokens, k]`` (one beyond the last
        contributes nothing: another process has it), and their weights -> ``[tokens, hidden]``. On a GPU the host does
        not wait for the routing."""
        if hidden_states.is_cuda and self._fits_plans(hidden_states):
            return self._planned(hidden_states, top_k_index, top_k_weights)
        tokens, top_k = top_k_index.shape
        experts, slots = top_k_index.reshape(-1).sort(stable=True)  # slot = token * top_k + place in its routing
        counts = torch.bincount(experts, minlength=self.original.num_experts).tolist()
        outputs = hidden_states.new_zeros(tokens * top_k, hidden_states.shape[-1])
        first = 0
        for expert, count in enumerate(counts[: self.original.num_experts]):
            if count:
                own = slots[first : first + count]
                outputs[own] = self._expert(expert, hidden_states[own // top_k])
                first += count
        weighted = outputs.view(tokens, top_k, -1).float() * top_k_weights.float().unsqueeze(-1)
        total = weighted[:, 0]
        for place in range(1, top_k):  # a sum over an axis may order its terms by the shape
            total = total + weighted[:, place]
        return total.to(hidden_states.dtype)

    def _fits_plans(self, x: torch.Tensor) -> bool:
        """Whether ops multiply all experts that tokens chose at once (ops/expert_plans.py)."""
        plain = x.dtype == torch.bfloat16 and self.switch.multiply == "fused" and not self.is_lent
        kept = any(self._buffers[f"{key}_dense"] is not None for key in self.names)
        fits = self.original.num_experts <= MOST_PLANNED and x.shape[-1] % 8 == 0
        return plain and fits and not kept and self.format in PLANNED

    def _planned(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        experts = chosen.int().contiguous()
        plan = ops.plan_rows(experts, self.original.num_experts)
        out = self._run(lambda key, rows: self._multiply_planned(key, rows, experts, plan), x.contiguous())
        here = (experts < self.original.num_experts).view(-1, 1)  # rows of others were not written
        return ops.weighted_rows(out.where(here, 0), weights.float().contiguous(), None)

    def _multiply_planned(self, key: str, x: torch.Tensor, experts: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
        bias = self._parameters[f"{key}_bias"].detach().contiguous() if self.has_bias else None
        tiles, rows = self.prepack_().parts(key), self._rows(key)
        if self.format == "mxfp4":
            return ops.mxfp4_expert_rows(x, *tiles, bias, experts, plan, rows, self.activation_bits)
        how = self.group_size, self.activation_bits, self.switch.activation_clip
        return ops.int4_expert_rows(x, *tiles, bias, experts, plan, rows, *how)

    def _expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return self._run(lambda key, rows: self._multiply(key, expert, rows), x)

    def _run(self, multiply: Callable[[str, torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        up, down = self.names
        projected = multiply(up, x)
        gated = self.original.kind._apply_gate(self, projected) if self.has_gate else self.act_fn(projected)
        out = multiply(down, gated.contiguous())
        return self.post_expert_norm(out) if getattr(self, "has_post_expert_norm", False) else out

    def _multiply(self, key: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        bias = self._parameters[f"{key}_bias"][expert] if self.has_bias else None
        dense = self._buffers[f"{key}_dense"]
        if dense is not None and dense.dtype == x.dtype:
            return sliced_linear(x, dense[expert], bias)
        return self._product(x, self._for_product(key, expert), self._rows(key), bias)

    def _for_product(self, key: str, expert: int) -> Parts:
        """An expert's weight as a product reads it: in tiles, which the parameters are from the first call on."""
        if not self.is_prepacked:
            if self.is_lent and self.packing.prepack is not None:
                return self.packing.prepack(*_of_expert(self.parts(key), expert))
            self.prepack_()
        return _of_expert(self.held(key), expert)

    def _rows(self, key: str) -> int:
        return self.original.sizes[key][0]

    def _in_tiles(self, name: str) -> Parts:
        return stack_experts(lambda _, *parts: self.packing.prepack(*parts), self.parts(name))

    def _on_disk(self, name: str) -> Parts:
        held, in_tiles = self._in_one_layout(name)
        if not in_tiles:
            return held
        return stack_experts(lambda _, *parts: self.packing.unprepack(*parts, self._rows(name)), held)

    def _zeros(self, key: str, device: torch.device) -> Parts:
        shape = (self.original.num_experts, *self.original.sizes[key])
        return self.record.zeros(shape, device, **self.options)

    def extra_repr(self) -> str:
        sizes = ", ".join(f"{key}={list(sizes)}" for key, sizes in self.original.sizes.items())
        return f"{self.original.num_experts} x ({sizes}), format={self.format}, activation_bits={self.activation_bits}"


def _of_expert(parts: Parts, expert: int) -> Parts:
    cut = [None if part is None else part[expert] for part in parts]
    return cut if type(parts) is tuple else type(parts)(*cut)


def stack_experts(convert: Callable[..., Parts], tensors: Parts) -> Parts:
    """``convert(expert, *its tensors)`` for every expert, the results stacked along a new first axis."""
    stacks: Parts = ()
    for expert in range(len(tensors[0])):
        results = convert(expert, *_of_expert(tensors, expert))
        if not stacks:
            stacks = tuple(None if r is None else r.new_empty(len(tensors[0]), *r.shape) for r in results)
        for stack, result in zip(stacks, results, strict=True):
            if stack is not None:
                stack[expert] = result
    return stacks
