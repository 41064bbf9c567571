"""How is a model to be quantized, and what does config.json say of one that was?"""

from __future__ import annotations

import copy
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from ..formats.int4 import GROUP_SIZES
from ..formats.mxfp4 import require_rule
from ..nn.switch import CHOICES, require_activation_bits

QUANT_METHOD = "mlspec"
FORMAT_VERSION = 1  # of what is on disk (formats/weights.py); files that do not say are 1
_DEFAULT_GROUP_SIZE, _DEFAULT_RULE = 128, "ocp_floor"
_OWN = {"mxfp4": ("rule",), "int4": ("group_size", "symmetric")}  # settings that only this format has


class MLSpecConfig(QuantizationConfigMixin):
    """Quantize a model to 4 bits while it loads, and describe one that was saved.

        import hf_mlspec
        model = AutoModelForCausalLM.from_pretrained(path, quantization_config=MLSpecConfig(format="int4"))
        model.save_pretrained(folder)  # loads again without a config, bit for bit the same

    Every ``nn.Linear`` becomes a packed layer as soon as its tensor was read (round to nearest, no calibration data),
    so memory holds the packed model and the tensor at hand, never the wide model. So do the fused expert weights of
    mixture-of-experts models. Embeddings, norms, biases, routers and the output head stay as they are.

    format: ``"mxfp4"`` (4.25 bits a weight; blocks of 32 with a power of two) or ``"int4"`` (groups with a float16
        scale; 4.13 bits a weight at ``group_size=128``). The bits are drawn in docs/formats.md.
    group_size: int4 only: 32, 64 or 128 weights along in_features share a scale. It must divide the in_features of
        every layer that is packed (for mxfp4: 32), or loading stops before a tensor is read and names the layer.
    symmetric: int4 only: codes mean -8 ... 7 times the scale; False stores a zero point per group as well.
    activation_bits: what the layers compute with by default: 16 (bfloat16), 8, or for int4 also 4 (integers, one scale
        per token and group). It changes no weight: ``hf_mlspec.precision_switch(model)`` changes it at any time.
    skip_modules: names or patterns of modules to keep wide, as transformers matches them (should_convert_module): the
        start of a name up to a dot, a regular expression, or the end of a name, such as ``["mlp.down_proj"]``. What
        transformers keeps by default is kept as well: the output head, what is tied to it, and the last module
        (``hf_mlspec.direct_cast`` can cast the head). A pattern that fits no module is an error.
    rule: mxfp4 only: the rounding rule, ``"ocp_floor"``, ``"even_bump"`` or ``"ceil"`` (formats/mxfp4.py).

    In config.json are also ``format_version`` and ``modules_to_not_convert``, the full names of the linear layers and
    experts that were kept: loading packs all others and takes no part in the choice again.

    ValueError, naming the setting and what is possible, for a format, version, rule, group size, activation bits or
    setting this version does not know, and for a setting that the chosen format does not have.
    """

    def __init__(
        self,
        format: str = "mxfp4",
        group_size: int = _DEFAULT_GROUP_SIZE,
        symmetric: bool = True,
        activation_bits: int = 16,
        skip_modules: list[str] | None = None,
        rule: str = _DEFAULT_RULE,
        modules_to_not_convert: list[str] | None = None,
        format_version: int = FORMAT_VERSION,
        quant_method: str = QUANT_METHOD,
        **unknown: Any,
    ) -> None:
        _require_known(quant_method, format, format_version, unknown)
        _require_own(format, {"rule": rule, "group_size": group_size, "symmetric": symmetric})
        require_rule(rule)
        if type(group_size) is not int or group_size not in GROUP_SIZES:
            raise ValueError(f"MLSpecConfig: group_size is {group_size!r}, int4 has {_listed(GROUP_SIZES)}")
        if not isinstance(symmetric, bool):
            raise ValueError(f"MLSpecConfig: symmetric is {symmetric!r}, choose True or False")
        self.quant_method, self.format, self.format_version = quant_method, format, format_version
        self.group_size, self.symmetric, self.rule = group_size, symmetric, rule
        self.activation_bits = require_activation_bits(activation_bits, format)
        self.skip_modules = None if skip_modules is None else _names("skip_modules", skip_modules)
        self.modules_to_not_convert = _names("modules_to_not_convert", modules_to_not_convert or [])

    @property
    def format_settings(self) -> dict[str, Any]:
        """The settings only this format has, by name: rule, or group_size and symmetric."""
        return {name: getattr(self, name) for name in _OWN[self.format]}

    @property
    def bits_per_weight(self) -> float:
        """Bits a packed weight takes, scales and zero points included."""
        if self.format == "mxfp4":
            return 4 + 8 / 32
        return 4 + (16 if self.symmetric else 24) / self.group_size

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds: without the settings that the format does not have, and those left out."""
        foreign = {name for format, names in _OWN.items() if format != self.format for name in names}
        omitted = foreign | ({"skip_modules"} if self.skip_modules is None else set())
        return {name: copy.deepcopy(value) for name, value in vars(self).items() if name not in omitted}


def _require_known(quant_method: str, format: str, version: int, unknown: dict[str, Any]) -> None:
    if quant_method != QUANT_METHOD:
        raise ValueError(f"MLSpecConfig: quant_method is {quant_method!r}, expected {QUANT_METHOD!r}")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ValueError(f"MLSpecConfig: format_version is {version!r}, expected a number from 1 to {FORMAT_VERSION}")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"MLSpecConfig: format_version is {version}, this hf_mlspec reads up to {FORMAT_VERSION}: the model was "
            "written by a newer one, upgrade hf_mlspec"
        )
    if not isinstance(format, str) or format not in _OWN:
        raise ValueError(f"MLSpecConfig: format {format!r} is unknown to this version, it has {_listed(CHOICES)}")
    if unknown:
        raise ValueError(f"MLSpecConfig: unknown settings {sorted(unknown)}; the model may need a newer hf_mlspec")


def _require_own(format: str, settings: dict[str, Any]) -> None:
    defaults = {"rule": _DEFAULT_RULE, "group_size": _DEFAULT_GROUP_SIZE, "symmetric": True}
    for owner, names in _OWN.items():
        for name in names:
            if owner != format and settings[name] != defaults[name]:
                raise ValueError(
                    f"MLSpecConfig: {name} is {settings[name]!r}, but format {format!r} has no {name}; leave it out, "
                    f"or use format={owner!r}"
                )


def _names(setting: str, names: list[str]) -> list[str]:
    if not isinstance(names, list | tuple | set) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"MLSpecConfig: {setting} is {names!r}, expected a list of module names")
    return list(names)


def _listed(choices: Any) -> str:
    return " or ".join(repr(choice) for choice in choices)
