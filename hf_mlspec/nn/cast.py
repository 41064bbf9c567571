"""What stands for a layer in a cast of its model?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..formats import Format, casts
from .castable import dense_weight
from .expert_kinds import experts_in
from .expert_modules import is_experts
from .hooks import own_tensor
from .nested_experts import NestedExperts
from .packed import PackedLinear
from .packed_formats import PACKINGS
from .switch import PrecisionSwitch, switch_for

_RULE = "ocp_floor"


@dataclass(frozen=True)
class Cast:
    """A format to cast to with its options, and the switch that all layers of one draft share."""

    record: Format
    options: dict[str, Any]
    switch: PrecisionSwitch

    @classmethod
    def of(cls, word: str, rule: str, activation_bits: int | None, device: torch.device) -> Cast:
        """ValueError for an unknown word or rule, or bits and rules that the format does not have."""
        known = casts()
        if not isinstance(word, str) or word not in known:
            raise ValueError(f"direct_cast: format {word!r} is not available, use one of {', '.join(known)}")
        record, cast = known[word]
        options = dict(cast.options)
        if "rule" in record.option_names:
            next(option for option in record.options if option.name == "rule").require(rule)
            options["rule"] = rule
        elif rule != _RULE:
            raise ValueError(f"direct_cast: rule is {rule!r}, {word} has none; leave it out")
        switch = switch_for(record, options)
        if record.reads_part and activation_bits not in (None, 16):
            raise ValueError(f"direct_cast: activation_bits is {activation_bits!r}, {word} takes 16 (bfloat16)")
        switch.activation_bits = record.cast_activations(device.type) if activation_bits is None else activation_bits
        return cls(record, options, switch)

    @property
    def group_size(self) -> int:
        """Weights along ``in`` that share a scale."""
        return self.record.group(**self.options)

    @property
    def experts(self) -> bool:
        """Whether modules of experts can be cast."""
        return self.record.experts

    @property
    def settings(self) -> dict:
        """Those of the MLSpecConfig that describes such a draft."""
        bits = self.switch.default_activation_bits
        return {"format": self.record.written, **self.options, "activation_bits": bits}

    def layer(self, module: nn.Module, name: str) -> nn.Module:
        """The packed layer of an nn.Linear, of a nested one (its exact weight) or of experts; the bias is shared."""
        if isinstance(module, NestedExperts):
            module = module.dequantized_module(torch.bfloat16)
        if is_experts(module):
            kind = experts_in(self.record.word)
            return kind.from_module(module, self.record.word, self.switch, name, **self.options)
        return self._linear(module, f"{name}.weight").train(module.training)

    def _linear(self, linear: nn.Module, name: str) -> PackedLinear:
        weight = self.record.weight.from_dense(dense_weight(linear), name=name, **self.options)
        bias = linear.bias
        if bias is not None and bias.is_meta:  # of an offloaded layer
            bias = nn.Parameter(own_tensor(linear, "bias"), requires_grad=False)
        return PACKINGS[self.record.word].linear(weight, bias, self.switch).transform_like_(linear)
