"""Which values may stand behind an option? Types for argparse, whose errors it puts behind the option's name."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Any


def positive(text: str) -> int:
    """An integer of 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


positive.__name__ = "integer"  # argparse: "invalid integer value"


def positives(text: str) -> list[int]:
    """Different integers of 1 or more, between commas."""
    values = [positive(part) for part in text.split(",")]
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"{text} names one number twice")
    return values


positives.__name__ = "list of integers"


def seed(text: str) -> int:
    """What torch.manual_seed takes."""
    value = int(text)
    if not 0 <= value < 2**64:
        raise argparse.ArgumentTypeError(f"{value} is not in 0 to 2**64 - 1")
    return value


def _from_zero(text: str, what: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is no {what} of 0 or more")
    return value


def gap(text: str) -> float:
    """A distance of two logits."""
    return _from_zero(text, "distance of two logits, a finite number")


gap.__name__ = "number"


def port(text: str) -> int:
    """A number of TCP; 0 stands for a free one."""
    value = int(text)
    if not 0 <= value < 2**16:
        raise argparse.ArgumentTypeError(f"{text} is no port, a number of 0 to 65535")
    return value


def seconds(text: str) -> float:
    """A time, longer than none."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is no time, a positive number of seconds")
    return value


def interval(text: str) -> float:
    """The least time between two events; 0 lets each come when it may."""
    return _from_zero(text, "time between events, a number of seconds")


def size(text: str) -> str:
    """Of a file, in the words of save_pretrained."""
    if not re.fullmatch(r"[1-9]\d*(\.\d+)?[KMGT]B", text):
        raise argparse.ArgumentTypeError(f"{text} is no size; write a number with KB, MB, GB or TB, such as 500MB")
    return text


def text(given: str) -> str:
    """Something, at least one character of it."""
    if not given:
        raise argparse.ArgumentTypeError("the text is empty; write one")
    return given


def model(given: str) -> str:
    """A folder or a file that is there, or what may be a name of the hub. Said before anything is imported: a command
    looks again."""
    local = given.startswith((".", "/", "~")) or given.count("/") != 1
    if local and not Path(given).exists():
        raise argparse.ArgumentTypeError(f"model folder {given!r} does not exist; give a folder written by "
                                         "save_pretrained")
    return given


def numbers(kind: type) -> Any:
    """A type: one number, or a list of those between commas."""

    def parse(text: str) -> Any:
        values = [kind(part) for part in text.split(",")]
        return values[0] if len(values) == 1 else values

    parse.__name__ = f"list of {kind.__name__}"
    return parse


def clip(word: str) -> float | str:
    """A number, or auto as it is."""
    return word if word == "auto" else float(word)
