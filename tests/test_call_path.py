"""Through how many of the package's files and rooms does one call of generate go?

`python tests/test_call_path.py` prints the files in the order in which a call first enters them. docs/architecture.md
lists them, and what each is entered for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_mlspec
from hf_mlspec.integration import adaptive
from hf_mlspec.integration import call as call_file
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.controller import Controller

PACKAGE = str(Path(hf_mlspec.__file__).parent) + "/"
PROMPT = "def mean(values):\n"
# A first call builds levels and decoders. Captured rounds on a CPU run what a GPU replays without Python.
MOST_FILES = {"first": 76, "second": 35, "captured": 58, "chosen": 51}
MOST_MOVES = 72


@dataclass
class CallPath:
    """What a call entered: files in order of their first function call, and changes of room on calls and returns."""

    files: list[str] = field(default_factory=list)
    moves: list[tuple[str, str]] = field(default_factory=list)
    _room: str = ""

    def see(self, frame: FrameType | None, event: str, _: object) -> None:
        """To be set by sys.setprofile."""
        if event == "return":  # back in the caller, which may be several frames of other packages away
            frame = frame.f_back
            while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
                frame = frame.f_back
        if event not in ("call", "return") or frame is None or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        file = frame.f_code.co_filename.removeprefix(PACKAGE)
        if file not in self.files:
            self.files.append(file)
        room = file.split("/")[0]
        if room != self._room:
            self.moves.append((room, f"{event} {file}:{frame.f_code.co_name}"))
            self._room = room


def path_of(call: Callable[[], object]) -> CallPath:
    found = CallPath()
    sys.setprofile(found.see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def demo_call(**config: object) -> Callable[[], object]:
    """A chain of three levels on the demo pair, ready to be called again and again."""
    folder, draft = hf_mlspec.demo_pair()
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    inputs = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")
    options = {"assistant_models": ["mxfp4", draft], "max_new_tokens": 12, "do_sample": False}
    return lambda: target.generate(**inputs, **options, speculation_config=config or None)


@pytest.fixture(scope="module")
def paths() -> dict[str, CallPath]:
    if not has_compiled_decoder():
        pytest.skip("the compiled kernels are not built")
    call, captured = demo_call(num_draft_tokens=8), demo_call(engine="cuda", num_draft_tokens=8)
    captured()
    found = {"first": path_of(call), "second": path_of(call), "captured": path_of(captured)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_file, "let_choose", adaptive.let_choose)
        patch.setattr(Controller, "disproves_costs", False)  # whatever else the machine does meanwhile
        chosen = demo_call()
        chosen()
        return found | {"chosen": path_of(chosen)}


@pytest.mark.parametrize("which", MOST_FILES)
def test_a_call_enters_few_files(paths, which):
    assert len(paths[which].files) <= MOST_FILES[which], paths[which].files


def test_a_second_call_moves_little_between_rooms(paths):
    assert len(paths["second"].moves) <= MOST_MOVES, paths["second"].moves


def main() -> None:
    call, captured = demo_call(num_draft_tokens=8), demo_call(engine="cuda", num_draft_tokens=8)
    captured()
    for name, found in ("first", path_of(call)), ("second", path_of(call)), ("captured", path_of(captured)):
        print(f"{name} call: {len(found.files)} files, {len(found.moves)} moves between rooms")
        print("".join(f"    {file}\n" for file in found.files))
        if name == "second":
            print("".join(f"    {room:12} {step}\n" for room, step in found.moves))


if __name__ == "__main__":
    main()
