"""How is a model to be quantized, and what does config.json say of one that was?"""

from __future__ import annotations

import copy
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from ..formats.bitplanes import cast_of
from ..formats.codebooks import require_codebook_name
from ..formats.int4 import GROUP_SIZES
from ..formats.mxfp4 import require_rule
from ..nn.switch import CHOICES, require_activation_bits

QUANT_METHOD = "mlspec"
FORMAT_VERSION = 1  # of what is on disk (formats/weights.py); files that do not say are 1
_DEFAULTS = {"rule": "ocp_floor", "group_size": 128, "symmetric": True, "codebook": "lloyd_max", "num_planes": 8}
_OWN = {  # the settings that a format has
    "mxfp4": ("rule",),
    "int4": ("group_size", "symmetric"),
    "nested-bf16": ("codebook",),
    "bitplanes": ("num_planes", "group_size"),
}
WEIGHTS = {"mxfp4": "mxfp4", "int4": "int4", "nested-bf16": "nested", "bitplanes": "planes"}  # of a PrecisionSwitch


class MLSpecConfig(QuantizationConfigMixin):
    """Pack a model while it loads, into 4 bits or into planes of which fewer bits can be read, and describe one that
    was saved.

        import hf_mlspec
        model = AutoModelForCausalLM.from_pretrained(path, quantization_config=MLSpecConfig(format="int4"))
        model.save_pretrained(folder)  # loads again without a config, bit for bit the same

    Every ``nn.Linear`` becomes a packed layer as soon as its tensor was read (round to nearest, no calibration data),
    so memory holds the packed model and the tensor at hand, never the wide model. So do the fused expert weights of
    mixture-of-experts models (mxfp4 and int4). Embeddings, norms, biases, routers and the output head stay as they
    are.

    format: ``"mxfp4"`` (4.25 bits a weight; blocks of 32 with a power of two), ``"int4"`` (groups with a float16
        scale; 4.13 bits a weight at ``group_size=128``), ``"nested-bf16"`` (16.25 bits: exact BF16 whose first 4.25
        bits are a draft; what ``hf_mlspec.nest`` does, output head and tied embedding included, after the model was
        loaded) or ``"bitplanes"`` (as many bits as planes, and a float16 scale for each group; any number of the first
        planes is a draft). The bits are drawn in docs/formats.md.
    group_size: int4 and bitplanes: 32, 64 or 128 weights along in_features share a scale. It must divide the
        in_features of every layer that is packed (for mxfp4: 32), or loading stops before a tensor is read and names
        the layer. Layers that blocks of 32 do not divide stay BF16 in nested-bf16, which is said.
    symmetric: int4 only: codes mean -8 ... 7 times the scale; False stores a zero point per group as well.
    codebook: nested-bf16 only: the draft's levels, ``"lloyd_max"``, ``"mxfp4"`` or ``"fitted"`` (to each tensor).
    num_planes: bitplanes only: 1 to 8, or ``"int3"``, ``"int2"``, ``"ternary"`` (formats/bitplanes.py).
    activation_bits: what the layers compute with by default: 16 (bfloat16), for mxfp4 and int4 also 8, for int4 also 4
        (integers, one scale per token and group). It changes no weight: ``hf_mlspec.precision_switch(model)`` changes
        it at any time.
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
        group_size: int = _DEFAULTS["group_size"],
        symmetric: bool = _DEFAULTS["symmetric"],
        activation_bits: int = 16,
        skip_modules: list[str] | None = None,
        rule: str = _DEFAULTS["rule"],
        codebook: str = _DEFAULTS["codebook"],
        num_planes: int | str = _DEFAULTS["num_planes"],
        modules_to_not_convert: list[str] | None = None,
        format_version: int = FORMAT_VERSION,
        quant_method: str = QUANT_METHOD,
        **unknown: Any,
    ) -> None:
        _require_known(quant_method, format, format_version, unknown)
        own = {"rule": rule, "group_size": group_size, "symmetric": symmetric}
        own |= {"codebook": codebook, "num_planes": num_planes}
        _require_own(format, own)
        _require_values(format, own)
        self.quant_method, self.format, self.format_version = quant_method, format, format_version
        self.group_size, self.symmetric, self.rule = group_size, symmetric, rule
        self.codebook, self.num_planes = codebook, num_planes
        self.activation_bits = _require_activations(activation_bits, format)
        self.skip_modules = None if skip_modules is None else _names("skip_modules", skip_modules)
        self.modules_to_not_convert = _names("modules_to_not_convert", modules_to_not_convert or [])

    @property
    def format_settings(self) -> dict[str, Any]:
        """The settings that this format has, by name: rule, or group_size and symmetric ..."""
        return {name: getattr(self, name) for name in _OWN[self.format]}

    @property
    def bits_per_weight(self) -> float:
        """Bits a packed weight takes, scales and zero points included."""
        if self.format in ("mxfp4", "nested-bf16"):
            return (4 if self.format == "mxfp4" else 16) + 8 / 32
        if self.format == "bitplanes":
            return self.stored_planes + 16 / self.group_size
        return 4 + (16 if self.symmetric else 24) / self.group_size

    @property
    def stored_planes(self) -> int:
        """Bit-planes of a packed weight (format "bitplanes")."""
        return cast_of(self.num_planes).num_planes

    @property
    def weights(self) -> str:
        """What a PrecisionSwitch and ``PackedModule.format`` call the format."""
        return WEIGHTS[self.format]

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds: without the settings that the format does not have, and those left out."""
        foreign = set(_DEFAULTS) - set(_OWN[self.format])
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
        raise ValueError(f"MLSpecConfig: format {format!r} is unknown to this version, it has {_listed(_OWN)}")
    if unknown:
        raise ValueError(f"MLSpecConfig: unknown settings {sorted(unknown)}; the model may need a newer hf_mlspec")


def _require_own(format: str, settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if name not in _OWN[format] and value != _DEFAULTS[name]:
            owners = " or ".join(f"format={owner!r}" for owner, names in _OWN.items() if name in names)
            raise ValueError(
                f"MLSpecConfig: {name} is {value!r}, but format {format!r} has no {name}; leave it out, or use "
                f"{owners}"
            )


def _require_values(format: str, settings: dict[str, Any]) -> None:
    require_rule(settings["rule"])
    if not isinstance(settings["codebook"], str):
        raise ValueError(f"MLSpecConfig: codebook is {settings['codebook']!r}, expected a name")
    require_codebook_name(settings["codebook"])
    group_size, num_planes = settings["group_size"], settings["num_planes"]
    if type(group_size) is not int or group_size not in GROUP_SIZES:
        raise ValueError(f"MLSpecConfig: group_size is {group_size!r}, {format} has {_listed(GROUP_SIZES)}")
    if not isinstance(settings["symmetric"], bool):
        raise ValueError(f"MLSpecConfig: symmetric is {settings['symmetric']!r}, choose True or False")
    try:
        cast_of(num_planes)
    except (TypeError, ValueError) as error:
        raise ValueError(f"MLSpecConfig: num_planes is {num_planes!r}: {error}") from error


def _require_activations(bits: int, format: str) -> int:
    if format in CHOICES:
        return require_activation_bits(bits, format)
    if bits != 16:
        raise ValueError(
            f"MLSpecConfig: activation_bits is {bits!r}, {format} weights are multiplied at 16 (bfloat16); what a "
            "draft reads of them is said by the level"
        )
    return bits


def _names(setting: str, names: list[str]) -> list[str]:
    if not isinstance(names, list | tuple | set) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"MLSpecConfig: {setting} is {names!r}, expected a list of module names")
    return list(names)


def _listed(choices: Any) -> str:
    return " or ".join(repr(choice) for choice in choices)
