"""Can a hub name be a model's? Asked once and briefly: most wrong names are folders misspelt."""

from __future__ import annotations

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError

_SECONDS = 5  # to wait for the hub; its own clients try again for more than a minute
_reached: set[str] = set()  # names that the hub, or its cache, knows something of


def is_hub_name(path: str) -> bool:
    """Whether a text can be the name of a model on the hub, by its form."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~"))


def require_on_hub(name: str) -> None:
    """ValueError for a hub name of which the hub's cache has no config.json where the hub is not to be asked
    (HF_HUB_OFFLINE) or does not answer. What the hub itself says of a name is told by whoever loads it."""
    if name in _reached or isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    if (why := _why_not_asked(name)) is not None:
        raise ValueError(f"folder {name!r} does not exist; as the name of a model on the hub it is not in the hub's "
                         f"cache, and {why}")
    _reached.add(name)


def _why_not_asked(name: str) -> str | None:
    """None where the hub has answered, whatever it said."""
    if constants.HF_HUB_OFFLINE:
        return "the hub is not to be asked (HF_HUB_OFFLINE)"
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_SECONDS)
    except HfHubHTTPError as error:
        return None if error.response is not None else "the hub does not answer"
    except Exception as error:  # whatever the client below has for a network that is not there
        return f"the hub does not answer ({type(error).__name__})"
    return None
