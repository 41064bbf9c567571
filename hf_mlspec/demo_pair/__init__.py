"""Where are the two small models and the prompts that the demo, the notebook and the tests run on?"""

from __future__ import annotations

import json
from pathlib import Path

_HERE = Path(__file__).resolve().parent
DEMO_TARGET, DEMO_DRAFT = _HERE / "target", _HERE / "draft"


def demo_pair() -> tuple[str, str]:
    """Folders of the demo target and of its tiny draft, as `from_pretrained` and `assistant_models` take them.

    Raises FileNotFoundError that names the missing file if the installation has no demo models.
    """
    for folder in (DEMO_TARGET, DEMO_DRAFT):
        if not (folder / "model.safetensors").is_file():
            raise FileNotFoundError(f"{folder / 'model.safetensors'} is missing: this copy of hf_mlspec came without "
                                    "its demo models; install it from a full checkout, or train them with "
                                    "eval/train_demo_pair")
    return str(DEMO_TARGET), str(DEMO_DRAFT)


def demo_prompts() -> list[dict[str, str]]:
    """The demo's prompts: dicts of "name", "kind" ("code" or "prose") and "text"."""
    return json.loads((_HERE / "prompts.json").read_text(encoding="utf-8"))
