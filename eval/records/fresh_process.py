"""How is something measured in a process of its own, whose peak of memory is that of this one thing?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# glibc then gives freed blocks back at once: the peak is what was in use, the same to 0.1 %, not what was kept.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def in_fresh_process(asked: dict[str, Any], program: str) -> dict[str, Any]:
    """The answer of `python -m program` to a request, both JSON.

    Raises RuntimeError with the end of what the process said where it failed.
    """
    done = subprocess.run([sys.executable, "-m", program], input=json.dumps(asked), text=True,
                          capture_output=True, cwd=Path(__file__).parents[2], env={**os.environ, **_ALLOCATOR})
    if done.returncode:
        name = asked["contender"]["name"]
        raise RuntimeError(f"the process that measures the memory of {name!r} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
