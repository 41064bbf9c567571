"""Which model card does a packed model get if it has none?"""

from __future__ import annotations

import re
from pathlib import Path

from transformers import PreTrainedModel

from ...nn.packed import PackedModule
from .folder import bits_per_packed_weight

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(model: PreTrainedModel, name: str) -> str:
    """A stub to fill in: front matter as the hub reads it, how to load the model, and what its format is.

    name: what the card calls the model. The base model is named where the model was quantized from a hub name.
    """
    config, base = model.config.quantization_config, _base_model(model)
    front = ["library_name: transformers", "tags:", f"- {config.quant_method}", f"- {config.format}"]
    if model.can_generate():
        front.append("pipeline_tag: text-generation")
    if base is not None:
        front += [f"base_model: {base}", "base_model_relation: quantized"]
    lines = "\n".join(front)
    rows = "\n".join(f"| {key} | {value} |" for key, value in _format_rows(model))
    return f"""---
{lines}
---

# {name}

{f"[{base}](https://huggingface.co/{base})" if base else type(model).__name__} with weights in {config.format}, written
by hf_mlspec.

```python
import hf_mlspec  # makes the format known to transformers
from transformers import {_auto_class(model)}

model = {_auto_class(model)}.from_pretrained("{name}")
```

Without `import hf_mlspec`, loading stops with a size mismatch: the weights cannot be read as anything else.

| | |
|---|---|
{rows}
"""


def _base_model(model: PreTrainedModel) -> str | None:
    path = model.config.name_or_path
    quantized_here = not model.hf_quantizer.pre_quantized
    return path if quantized_here and _HUB_NAME.fullmatch(path) and not Path(path).exists() else None


def _auto_class(model: PreTrainedModel) -> str:
    return "AutoModelForCausalLM" if model.can_generate() else "AutoModel"


def _format_rows(model: PreTrainedModel) -> list[tuple[str, str]]:
    config = model.config.quantization_config
    packed = [module for module in model.modules() if isinstance(module, PackedModule)]
    settings = [(name.replace("_", " "), str(value)) for name, value in config.format_settings.items()]
    return [
        ("format", f"{config.format}, version {config.format_version}"),
        *settings,
        ("bits per packed weight", f"{bits_per_packed_weight(model):.4g}"),
        ("activation bits (default)", str(config.activation_bits)),
        *([("4-bit activations clipped at", f"{config.activation_clip:g} of the largest")]
          if config.activation_clip else []),
        *([("keys and values in the cache", config.kv_cache)] if config.kv_cache else []),
        ("packed modules", str(len(packed))),
        ("kept wide", ", ".join(f"`{name}`" for name in config.modules_to_not_convert) or "none of the linear layers"),
    ]
