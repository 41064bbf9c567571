"""Can a hub name be a model's? Asked once and briefly: most wrong names are folders misspelt."""

from __future__ import annotations

import time

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError

_WAIT = 5  # seconds for the hub to answer; what loads models asks again and again, for more than a minute
_STANDS = 60  # seconds that a missing answer is not asked for again
_silent: dict[str, tuple[float, str]] = {}  # when a name was asked for, and what was in the way
_answered: set[str] = set()


def why_not_on_hub(name: str, revision: str | None = None) -> str | None:
    """Why nothing can be known of a hub name: the hub's cache has no config.json of it, and the hub is not to be asked
    (HF_HUB_OFFLINE) or does not answer. None where one of them says something, whatever that is. revision: of the
    model, None for the main one."""
    if name in _answered or isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
        return None
    if constants.HF_HUB_OFFLINE:
        return _said("is not to be asked (HF_HUB_OFFLINE)")
    asked, why = _silent.get(name, (0.0, ""))
    if why and time.monotonic() - asked < _STANDS:
        return why
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_WAIT)
    except HfHubHTTPError:
        pass  # of what is missing there, whoever loads it tells
    except Exception as error:  # whatever the client below has for a network that is not there
        _silent[name] = time.monotonic(), _said(f"does not answer ({type(error).__name__})")
        return _silent[name][1]
    _answered.add(name)
    return None


def _said(what: str) -> str:
    return f"there is no such folder, and the model hub, whose cache does not have it, {what}"
