"""Where do the folders lie that a plan names {models}, {data} and {demo}, and the traces that are committed?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import hf_mlspec

TRACES = Path(__file__).parents[1] / "traces"


@dataclass(frozen=True)
class Places:
    """What {models}, {data} and {demo} (the demo target's folder; its draft is {demo}/../draft) stand for."""

    models: Path
    data: Path
    demo: str

    @classmethod
    def of(cls, models: Path, data: Path) -> Places:
        """With the demo pair that is installed."""
        return cls(models, data, str(hf_mlspec.demo_pair()[0]))

    def fill(self, text: str) -> str:
        """`text` with its places."""
        for name, place in vars(self).items():
            text = text.replace(f"{{{name}}}", str(place))
        return text
