"""How does a program that times parts by name run those that were asked for, tell their lines and keep them?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping

import torch


def run_parts(parts: Mapping[str, Callable[[argparse.Namespace], Iterator[dict]]], options: argparse.Namespace) -> int:
    """Print what ran where, then every line of options.part as it comes; all of them go to the file options.json, too,
    where that is given. Returns the exit status of a program."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    found = []
    for part in options.part:
        for line in parts[part](options):
            found.append({"part": part, **line})
            print("  ".join(f"{key} {_told(value)}" for key, value in found[-1].items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


def _told(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
