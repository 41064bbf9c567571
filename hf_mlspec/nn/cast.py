"""What stands for a layer in a cast of its model?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..formats import bitplanes, mxfp4
from ..formats.weights import BitPlaneWeight, Mxfp4Weight
from .bit_planes import BitPlaneLinear
from .castable import dense_weight
from .expert_modules import is_experts
from .experts import PackedExperts
from .linear import Mxfp4Linear
from .packed import PackedLinear
from .switch import PrecisionSwitch

FORMATS = ("mxfp4", *bitplanes.CASTS)
_RULE = "ocp_floor"


@dataclass(frozen=True)
class Cast:
    """A format to cast to, and the switch that all layers of one draft share."""

    format: str
    rule: str
    switch: PrecisionSwitch

    @classmethod
    def of(cls, format: str, rule: str, activation_bits: int | None, device: torch.device) -> Cast:
        """ValueError for an unknown format or rule, or bits and rules that the format does not have."""
        if not isinstance(format, str) or format not in FORMATS:
            raise ValueError(f"direct_cast: format {format!r} is not available, use one of {', '.join(FORMATS)}")
        mxfp4.require_rule(rule)
        if format == "mxfp4":
            default = 8 if device.type == "cpu" else 16
            bits = default if activation_bits is None else activation_bits
            return cls(format, rule, PrecisionSwitch("mxfp4", bits))
        if rule != _RULE:
            raise ValueError(f"direct_cast: rule is {rule!r}, {format} has none; leave it out")
        if activation_bits not in (None, 16):
            raise ValueError(f"direct_cast: activation_bits is {activation_bits!r}, {format} takes 16 (bfloat16)")
        return cls(format, rule, PrecisionSwitch("planes", num_planes=bitplanes.cast_of(format).num_planes))

    @property
    def group_size(self) -> int:
        """Weights along ``in`` that share a scale."""
        return mxfp4.BLOCK if self.format == "mxfp4" else bitplanes.CAST_GROUP

    @property
    def experts(self) -> bool:
        """Whether modules of experts can be cast."""
        return self.format == "mxfp4"

    @property
    def settings(self) -> dict:
        """Those of the MLSpecConfig that describes such a draft."""
        if self.format == "mxfp4":
            return {"format": "mxfp4", "rule": self.rule, "activation_bits": self.switch.default_activation_bits}
        return {"format": "bitplanes", "num_planes": self.format, "group_size": self.group_size}

    def layer(self, module: nn.Module, name: str) -> nn.Module:
        """The packed layer of an nn.Linear, of a nested one (its exact weight) or of experts; the bias is shared."""
        if is_experts(module):
            return PackedExperts.from_module(module, "mxfp4", self.switch, name, rule=self.rule)
        return self._linear(module, f"{name}.weight").train(module.training)

    def _linear(self, linear: nn.Module, name: str) -> PackedLinear:
        weight = dense_weight(linear)
        if self.format == "mxfp4":
            return Mxfp4Linear(Mxfp4Weight.from_dense(weight, self.rule, name), linear.bias, self.switch)
        return BitPlaneLinear(BitPlaneWeight.from_dense(weight, self.format, name=name), linear.bias, self.switch)
