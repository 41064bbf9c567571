"""How does a test see a warning that was given once already?"""

from __future__ import annotations

from hf_mlspec.nn import state


def forget_warnings() -> None:
    """Everything may be said again, of every model."""
    for one in list(state.states.values()):
        one.warnings.clear()
