"""Does memory of a file go back to the system, and does all else stay?"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from eval.records.machine import memory_of_process
from hf_mlspec.calibration import freed
from hf_mlspec.calibration.freed import release_pages

SIZE = 32 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone says what a process holds of files")
def test_pages_of_a_file_are_given_back_and_read_again(tmp_path):
    file = tmp_path / "weights"
    np.arange(SIZE // 4, dtype=np.int32).tofile(file)
    with file.open("rb") as written:
        written.flush()
    held = torch.from_numpy(np.memmap(file, dtype=np.int32, mode="c"))
    wanted = held.sum()
    before = memory_of_process("RssFile")
    release_pages([held])
    assert memory_of_process("RssFile") < before - SIZE // 2
    assert held.sum() == wanted
    held[5] = 7  # a page of its own from here on, which the file does not know
    release_pages([held])
    assert held[5] == 7


def test_other_memory_stays():
    own, empty = torch.arange(1 << 20), torch.empty(0)
    before = memory_of_process("RssAnon")
    release_pages([own, empty])
    assert torch.equal(own, torch.arange(1 << 20))
    assert before is None or memory_of_process("RssAnon") > before - own.nbytes // 2


# Without what the package itself imports, which takes seconds.
_HELD = """
import sys
import torch

with open(sys.argv[1]) as source:
    exec(source.read())  # large_apart

def memory_of_process(key):
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(key))

SIZE = 32 << 20
torch.ones(SIZE // 4 - 4096)  # glibc by itself keeps apart what is larger than the largest that was freed
with large_apart():
    before = memory_of_process("RssAnon")
    kept = [(torch.ones(1 << 20), torch.ones(1 << 10)) for _ in range(8)]  # small ones between the large
    assert memory_of_process("RssAnon") > before + SIZE // 2, "nothing was taken"
    kept = [small for _, small in kept]
    assert memory_of_process("RssAnon") < before + SIZE // 8, "it was not given back"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone says what a process holds")
def test_large_tensors_are_given_back_as_soon_as_they_are_freed():
    """In a process of its own: this one may have room for them from before."""
    done = subprocess.run([sys.executable, "-c", _HELD, freed.__file__], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
