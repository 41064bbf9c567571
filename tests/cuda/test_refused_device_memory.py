"""Does a captured chain go on, or end in one clear error, where requests for the GPU's memory are refused?

Some of the many that `python -m tests.faults.devices` tries.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(which("c++") is None, reason="there is no compiler")
def test_some_requests_of_a_captured_chain():
    command = [sys.executable, "-m", "tests.faults.devices", "--scene", "captured", "--most", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "4 refused requests" in done.stdout
