"""How is a model to be quantized, and what does config.json record of it?"""

from __future__ import annotations

import copy
import os
from types import EllipsisType
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from ...calibration.methods import format_of
from ...formats import FORMATS, Format, cache_format, format_named, options
from ...nn.switch import require_activation_bits, require_activation_clip
from ...nn.transforms import NONE, transform_named
from ...routing.plane_budget import TOP_PLANES, asked_to_stream
from ...routing.router import require_every
from .calibration_request import AUTO, OPTIONS, requested, steps_of
from .source_config import SourceConfig

QUANT_METHOD = "mlspec"
_PLANES = FORMATS["planes"]
FORMAT_VERSION = 1  # of what is on disk (docs/formats.md); files that do not say are 1


class MLSpecConfig(QuantizationConfigMixin):
    """Quantize a model while it loads, and describe a saved quantized model.

        import hf_mlspec
        model = AutoModelForCausalLM.from_pretrained(path, quantization_config=MLSpecConfig(format="int4"))
        model.save_pretrained(folder)  # loads again without a config, bit for bit the same

    Every ``nn.Linear`` becomes a packed layer as soon as its tensor is read (round to nearest, no calibration data),
    so memory holds the packed model and the current tensor, never the full-precision model. Fused expert weights of
    mixture-of-experts models are packed, too (mxfp4 and int4). Embeddings, norms, biases, routers and the output head
    are not changed.

    format: ``"mxfp4"`` (4.25 bits per weight; blocks of 32 with a power of two), ``"int4"`` (groups with a float16
        scale; 4.13 bits per weight at ``group_size=128``), ``"int4-int8"`` (groups of 128 and 128 int8 outliers, the
        last inputs), ``"nested-bf16"`` (16.25 bits: exact BF16, 4.25 bits of
        which are a draft; as ``hf_mlspec.nest`` after loading, output head and tied embedding included) or
        ``"bitplanes"`` (one bit per plane, and a float16 scale per group; any number of the first planes is a draft).
        docs/formats.md shows the bits. ``"nested"`` and ``"planes"`` are other words for the last two. Registered
        formats have words of their own. None, with ``kv_cache``: no weight is packed. Not given: that of the method,
        else ``"mxfp4"``.
    group_size: int4 and bitplanes: 32, 64 or 128 weights along in_features share a scale. It must divide the
        in_features of every packed layer (for mxfp4: 32); otherwise an error names the layer before a tensor is read.
        In nested-bf16 layers that 32 does not divide stay BF16, with a warning.
    symmetric: int4 only: codes mean -8 ... 7 times the scale; False stores a zero point per group as well.
    codebook: nested-bf16 only: magnitudes of the draft, ``"lloyd_max"``, ``"mxfp4"`` or ``"fitted"`` (to each tensor).
    bits, low_bits, mode, high_part: of format ``"zipper"``, a dense low part and a sparse high part
        (formats/zipper/codes.py): 6, 4, ``"exact"``, ``"paper"`` or ``"clamp"``, and ``"device"``.
    head_and_embedding: zipper only: the output head and the embedding become codes of the same split, too, rounded to
        nearest (`hf_mlspec.pack_head_and_embedding`). The model is loaded in bfloat16.
    num_planes: bitplanes only: 1 to 8, or ``"int3"``, ``"int2"``, ``"ternary"`` (formats/planes/codes.py). ``bits``
        is another word for it there.
    activation_bits: default bits of the layers' activations: 16 (bfloat16), for mxfp4, int4 and int4-int8 also 8, for
        the last two also 4 (integers, one scale per token and group). It changes no weight;
        ``hf_mlspec.precision_switch(model)`` can change it at any time.
    activation_clip: int4 and int4-int8: what the largest 4-bit code of an activation means, .1 to 1 as a share of its
        group's largest; what is beyond becomes it. It changes what 4 activation bits compute, and nothing else. None:
        1, with a method that method's own. "auto", with a method: searched, as of `hf_mlspec.quantize`.
    skip_modules: names or patterns of modules that are not packed, as transformers matches them
        (should_convert_module): the start of a name up to a dot, a regular expression, or the end of a name, such as
        ``["mlp.down_proj"]``. What transformers skips by default is skipped as well: the output head, modules tied to
        it, and the last module (``hf_mlspec.direct_cast`` can cast the head). A pattern that matches no module is an
        error.
    rule: mxfp4 only: the rounding rule, ``"ocp_floor"``, ``"even_bump"`` or ``"ceil"`` (formats/mxfp4.py).
    kv_cache: ``"int8"`` or ``"int4"``: keys and values are kept as 8- or 4-bit codes per token and key head
        (formats/cache/), in about a half or a quarter of the memory. This changes what the model computes, in every
        generate call, stream and score; chains over it still write what it writes alone. None: as the model computes
        them.

    router: planes only: a file of `mlspec route train`: in generate, each prompt picks how many planes each block
        reads for it (docs/guide/routing.md). It is saved with the model, as router.safetensors, and loaded with it.
    router_every: "prompt", the router chooses once for a prompt and what follows; "step", once more for each token
        behind the prompt; None: as the router was trained. It is saved in the router's file.
    plane_budget, top_planes, plane_folder: planes only: as of `hf_mlspec.stream_planes`, which is called on the loaded
        model. They are about this machine, so they are not saved; a packed folder refuses them by the name of the
        config's class: call `hf_mlspec.stream_planes` on what it loads to.
    transform: a transform of the layers' inputs (nn/transforms.py); only ``"none"`` can be chosen here. A model whose
        layers have another one is saved and loaded with it.
    method: int4, int4-int8 and zipper: the codes are chosen on a text, as `hf_mlspec.quantize` does it: "gptq",
        "quarot+gptq" ... The model is then loaded dense, and packed block by block. None: every tensor is rounded to
        nearest while it loads.
    smoothing, rotation: zipper only, other words for steps of the method: ``"auto"``, and ``"hadamard"`` or a file of
        matrices such as R.bin; then method is None, "rtn" or "gptq". They need a calibration, too.
    calibration: with ``method`` the text: a text file, texts, a `datasets` object with a column "text", or rows of
        token ids. Without: how the codes were chosen, for the reader of config.json; it changes nothing.
    tokenizer: of the text; None: that of the model's folder. samples, tokens, seed, damping, act_order, search_bits,
        rotations: with ``method``, as of `hf_mlspec.quantize`.
    others: options of registered formats.

    config.json also has ``format_version`` and ``modules_to_not_convert``, the full names of the linear layers and
    experts that were skipped: loading packs exactly the others.

    Raises ValueError, naming the setting and the possible values, for an unknown format, version, rule, group size,
    activation bits or setting, for a setting that the chosen format does not have, and for a method without a text and
    the reverse. A folder that is quantized already refuses a config with a method, by the name of its class.
    """

    def __new__(
        cls, *settings: Any, method: str | None = None, smoothing: str | None = None,
        rotation: str | os.PathLike | None = None, **others: Any,
    ) -> MLSpecConfig:  # fmt: skip
        if others.get("plane_budget") is not None:
            return super().__new__(MLSpecConfigWithPlaneBudget)
        plain = method is None and smoothing is None and rotation is None
        return super().__new__(cls if plain else MLSpecConfigWithMethod)

    def __init__(
        self,
        format: str | EllipsisType | None = ...,
        group_size: int = 128,
        symmetric: bool = True,
        activation_bits: int = 16,
        skip_modules: list[str] | None = None,
        rule: str = "ocp_floor", codebook: str = "lloyd_max",
        num_planes: int | str = 8,
        modules_to_not_convert: list[str] | None = None,
        format_version: int = FORMAT_VERSION, quant_method: str = QUANT_METHOD,
        transform: str = NONE.word, kv_cache: str | None = None,
        router: str | os.PathLike | None = None, calibration: Any = None,
        activation_clip: float | str | None = None, *,
        plane_budget: int | str | None = None, top_planes: int = TOP_PLANES, plane_folder: Any = None,
        method: str | None = None, smoothing: str | None = None, rotation: str | os.PathLike | None = None,
        router_every: str | None = None, head_and_embedding: bool = False, **others: Any,
    ) -> None:
        asked = {name: others.pop(name) for name in OPTIONS if name in others}
        method = steps_of(method, format, smoothing, rotation, asked)
        record = _require_known(quant_method, _asked(format, method), format_version, set(others) - set(options()))
        self.kv_cache = kv_cache if kv_cache is None else cache_format(kv_cache, "MLSpecConfig: kv_cache").word
        given = {"group_size": group_size, "symmetric": symmetric, "rule": rule, "codebook": codebook}
        given |= {"num_planes": _planes_of(record, num_planes, others), **others}
        if record is None:
            alone = {"activation_bits": (activation_bits, 16), "skip_modules": (skip_modules, None)}
            _require_nothing(kv_cache, alone | {name: (own, options()[name].default) for name, own in given.items()})
        else:
            _require_own(record, given)
        self.quant_method, self.format_version, self.format = quant_method, format_version, record and record.written
        self.activation_clip, self.router = _clip_of(activation_clip, record, method), _require_router(router, record)
        self.head_and_embedding = _require_ends(head_and_embedding, record)
        self.streaming = asked_to_stream(plane_budget, top_planes, plane_folder, record is _PLANES)
        self.transform, self.router_every = transform_named(transform).word, _require_every(router_every, router)
        for name, option in options().items():
            setattr(self, name, given.get(name, option.default))
        self.activation_bits = activation_bits if record is None else _require_activations(activation_bits, record)
        self.request, self.calibration = requested(method, self.format, calibration, asked)
        self.skip_modules = None if skip_modules is None else _names("skip_modules", skip_modules)
        self.modules_to_not_convert = _names("modules_to_not_convert", modules_to_not_convert or [])

    @staticmethod
    def for_checkpoint(name: str, **options: Any) -> QuantizationConfigMixin:
        """What reads a checkpoint of another library (GPTQ, AWQ, compressed-tensors ...) with this package:
        ``from_pretrained(name, quantization_config=MLSpecConfig.for_checkpoint(name))``. name: a folder or hub name.
        options: of AutoConfig.from_pretrained, such as revision; ``gguf_file``, for a GGUF file in the folder, is
        given to both. ValueError where it is not quantized, or in a way that is not read. `hf_mlspec.load` does both
        in one call.
        """
        return SourceConfig.of(name, **options)

    @property
    def record(self) -> Format | None:
        """What the format is; None where no weight is packed."""
        return None if self.format is None else format_named(self.format)

    @property
    def format_settings(self) -> dict[str, Any]:
        """The settings that this format has, by name: rule, or group_size and symmetric ..."""
        return {name: getattr(self, name) for name in self.record.option_names}

    @property
    def bits_per_weight(self) -> float:
        """Bits a packed weight takes, scales and zero points included; of 4,096 inputs where their number matters."""
        return self.record.bits_per_weight(**self.format_settings)

    @property
    def weights(self) -> str:
        """What a PrecisionSwitch and ``PackedModule.format`` call the format."""
        return self.record.word

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds: without the settings that the format does not have, and those left out."""
        packs = self.record is not None
        omitted = set(options()) - set(self.record.option_names if packs else ())
        omitted |= set() if packs else {"activation_bits", "modules_to_not_convert"}
        omitted |= {"kv_cache"} if self.kv_cache is None else set()
        omitted |= {name for name in ("router", "calibration", "skip_modules") if getattr(self, name) is None}
        omitted |= set() if self.head_and_embedding else {"head_and_embedding"}
        omitted |= {"activation_clip"} if self.activation_clip in (None, 1) else set()
        omitted |= {"transform"} if self.transform == NONE.word else set()
        omitted |= {"request", "streaming", "router_every"}
        told = {} if self.request is None else self.request.told()
        return told | {name: copy.deepcopy(value) for name, value in vars(self).items() if name not in omitted}


class MLSpecConfigWithMethod(MLSpecConfig):
    """What MLSpecConfig(method=...) is. transformers reads the config of a folder that is quantized already, and drops
    the one that was given with a warning, where both are of one class; here it refuses."""


class MLSpecConfigWithPlaneBudget(MLSpecConfig):
    """The same of MLSpecConfig(plane_budget=...)."""


def _asked(format: str | EllipsisType | None, method: Any) -> str | None:
    """The format, that of the method where none is given."""
    if format is not ...:
        return format
    if method is None:
        return "mxfp4"
    try:
        return format_of(method)
    except ValueError as error:
        raise ValueError(f"MLSpecConfig: {error}") from error


def _require_known(quant_method: str, format: str | None, version: int, unknown: set[str]) -> Format | None:
    if quant_method != QUANT_METHOD:
        raise ValueError(f"MLSpecConfig: quant_method is {quant_method!r}, expected {QUANT_METHOD!r}")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ValueError(f"MLSpecConfig: format_version is {version!r}, expected a number from 1 to {FORMAT_VERSION}")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"MLSpecConfig: format_version is {version}, this hf_mlspec reads up to {FORMAT_VERSION}: the model was "
            "written by a newer one, upgrade hf_mlspec"
        )
    record = format_named(format)
    if record is None and format is not None:
        known = _listed([record.written for record in FORMATS.values()])
        raise ValueError(f"MLSpecConfig: format {format!r} is unknown to this version, it has {known}")
    if unknown:
        raise ValueError(f"MLSpecConfig: unknown settings {sorted(unknown)}; the model may need a newer hf_mlspec")
    return record


def _require_nothing(kv_cache: str | None, given: dict[str, tuple[Any, Any]]) -> None:
    """given: settings of packed weights, and what each is where it is left out."""
    if kv_cache is None:
        raise ValueError(
            "MLSpecConfig: format is None and kv_cache is None: nothing is to be quantized; choose a format, a "
            "kv_cache, or load the model without quantization_config"
        )
    for name, (value, default) in given.items():
        if value != default:
            raise ValueError(
                f"MLSpecConfig: {name} is {value!r}, but format=None packs no weights; leave it out, or name a format"
            )


def _require_own(record: Format, given: dict[str, Any]) -> None:
    for name, value in given.items():
        option = options()[name]
        if name not in record.option_names:
            if value == option.default:
                continue
            having = [owner.written for owner in FORMATS.values() if name in owner.option_names]
            owners = " or ".join(f"format={written!r}" for written in having)
            raise ValueError(
                f"MLSpecConfig: {name} is {value!r}, but format {record.written!r} has no {name}; leave it out, or "
                f"use {owners}"
            )
        try:
            option.check(value, record.written)
        except ValueError as error:
            raise ValueError(f"MLSpecConfig: {error}") from error
    record.require_together(**given)


def _planes_of(record: Format | None, num_planes: int | str, others: dict[str, Any]) -> int | str:
    """``num_planes``, or the bits among the other settings, taken out of them; ValueError where both are given."""
    if record is not _PLANES or "bits" not in others:
        return num_planes
    bits = others.pop("bits")
    if num_planes not in (options()["num_planes"].default, bits):
        raise ValueError(f"MLSpecConfig: bits is {bits!r} and num_planes {num_planes!r}: give one of them")
    return bits


def _require_ends(asked: bool, record: Format | None) -> bool:
    """``asked``; ValueError for other words, and for a format whose embeddings stay as they are."""
    if type(asked) is not bool:
        raise ValueError(f"MLSpecConfig: head_and_embedding is {asked!r}, expected True or False")
    if asked and record is not FORMATS["zipper"]:
        told = None if record is None else record.written
        raise ValueError(
            f"MLSpecConfig: head_and_embedding is True, but format {told!r} keeps both: use it with format='zipper'"
        )
    return asked


def _require_every(every: str | None, router: Any) -> str | None:
    """``every``; ValueError for another word, and without a router."""
    if every is not None and require_every(every, "router_every") and router is None:
        raise ValueError(f"router_every is {every!r} and there is no router: name its file, router=FILE")
    return every


def _require_router(router: Any, record: Format | None) -> str | None:
    """``router`` as text; TypeError for what is no path, ValueError for other weights than bit-planes."""
    if router is None:
        return None
    if not isinstance(router, str | os.PathLike):
        raise TypeError(f"MLSpecConfig: router is {router!r}, it must be the path of a file of `mlspec route train`")
    if record is not _PLANES:
        raise ValueError(
            f"MLSpecConfig: router is {router!r}, and it picks bit-planes: use it with format={_PLANES.word!r}"
        )
    return os.fspath(router)


def _require_activations(bits: int, record: Format) -> int:
    if not record.reads_part:
        return require_activation_bits(bits, record.word)
    whole = record.bit_choices(8)
    known = [own.activation for own in whole if own.weight == whole[0].weight]
    if type(bits) is not int or bits not in known:
        ways = "16 (bfloat16)" if known == [16] else " or ".join(map(str, known)) + " bits"
        raise ValueError(
            f"MLSpecConfig: activation_bits is {bits!r}, {record.written} weights are multiplied at {ways}; "
            "the level of a draft selects fewer bits"
        )
    return bits


def _clip_of(clip: float | str | None, record: Format | None, method: Any) -> float | str | None:
    if clip is None or (clip == AUTO and method is not None):
        return clip
    if clip == AUTO:
        raise ValueError(f"MLSpecConfig: activation_clip is {AUTO!r}, which is searched on a text: add a method")
    if record is None:
        raise ValueError(f"MLSpecConfig: activation_clip is {clip!r}, but format=None packs no weights; leave it out")
    try:
        return require_activation_clip(clip, record.word)
    except ValueError as error:
        raise ValueError(f"MLSpecConfig: {error}") from error


def _names(setting: str, names: list[str]) -> list[str]:
    if not isinstance(names, list | tuple | set) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"MLSpecConfig: {setting} is {names!r}, expected a list of module names")
    return list(names)


def _listed(choices: Any) -> str:
    return " or ".join(repr(choice) for choice in choices)
