"""Which lines of the readers did no input reach?

Lines count that run when a reader runs: those of functions, without what defines them. Of files that read and do other
things, too, the functions are named that read.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = "hf_mlspec"
ALL = ("",)
# File -> beginnings of the names of the functions that read.
ROOMS: dict[str, tuple[str, ...]] = {
    **{f"{_PACKAGE}/checkpoints/{name}.py": ALL for name in (
        "anyprecision", "atom", "autoround", "awq", "compressed", "gguf", "gguf_blocks", "gguf_file", "gpt_oss",
        "gpt_oss_original", "gptq", "grids", "layer", "llama_shape", "pickles", "qspec", "quarot", "quarot_pickle",
        "readers", "scales",
    )},
    f"{_PACKAGE}/checkpoints/codes.py": ("unpack", "as_bytes", "require", "order_of", "gathered"),
    f"{_PACKAGE}/checkpoints/gguf_names.py": (
        "architecture_of", "hf_name", "_places", "_possible", "config_of", "_Metadata", "_shortest", "_vocab", "_bias",
        "parameters", "_shapes", "row_orders", "_order",
    ),
    f"{_PACKAGE}/checkpoints/gguf_rope.py": ("rope_parameters", "_"),
    f"{_PACKAGE}/checkpoints/rotation.py": ("order_of", "is_power", "require", "stored"),
    f"{_PACKAGE}/checkpoints/safetensors_file.py": (
        "StoredTensor", "read_header", "_stored", "_require", "_damaged", "mapped", "require_checksums", "_crc",
    ),
    f"{_PACKAGE}/formats/damage.py": ALL,
    f"{_PACKAGE}/calibration/finished.py": (
        "FinishedBlocks.__init__", "FinishedBlocks._is_empty", "FinishedBlocks.read", "_is_other", "_stored",
        "_require_same",
    ),
    f"{_PACKAGE}/calibration/matrices.py": ("read_rotations",),
    f"{_PACKAGE}/speculation/traces/file.py": ("trace_from", "read_trace", "_row", "_round", "_traced", "_null",
                                               "_typed", "_is", "_short"),
    f"{_PACKAGE}/speculation/traces/trace.py": ("Trace.__post_init__", "_check"),
    f"{_PACKAGE}/speculation/costs.py": ("PassCosts.from_dict",),
    f"{_PACKAGE}/speculation/memory.py": ("Memory.from_dict", "_index"),
    f"{_PACKAGE}/evaluation/certificate.py": ("Certificate.load",),
    f"{_PACKAGE}/evaluation/certificate_schema.py": ALL,
    f"{_PACKAGE}/evaluation/journal.py": ("Journal._read", "Journal._take", "Journal._parse", "Journal._check"),
    f"{_PACKAGE}/evaluation/prompts.py": ALL,
    f"{_PACKAGE}/evaluation/tasks/files.py": ("records", "whole_record", "lines", "_record", "Record"),
    f"{_PACKAGE}/integration/costs/file.py": ("read", "differences"),
    f"{_PACKAGE}/integration/costs/known_file.py": ("_says_all", "_is_level", "_is_count", "as_tuple"),
    f"{_PACKAGE}/integration/costs/learned.py": ("Learned.read",),
    f"{_PACKAGE}/integration/json_object.py": ALL,
    f"{_PACKAGE}/integration/levels/head_folder.py": ("read_head_folder", "_check_sizes", "_speculators",
                                                        "_specforge", "_whole", "_layer_config", "_taps"),
    f"{_PACKAGE}/integration/levels/words.py": ("parse_level", "_is_there", "is_head_folder", "head_kind", "_is_cast",
                                                "_says_enough"),
    f"{_PACKAGE}/integration/quantizer/checkpoint.py": ("Checkpoint", "_checksums_of", "_nearly",
                                                        "require_own_shards"),
    f"{_PACKAGE}/integration/quantizer/source_config.py": ("_require_quant", "_require_method", "_require_not"),
    f"{_PACKAGE}/integration/dtype.py": ("dtype_named",),
    f"{_PACKAGE}/routing/router.py": ("Router.load", "Router._fill", "require_file", "require_widths", "_said",
                                      "require_shapes", "require_weights"),
    f"{_PACKAGE}/speculation/drafters/ngram.py": ("NGram.load",),
    f"{_PACKAGE}/speculation/drafters/ngram_table.py": ("NGramTable.load_tensors", "_check"),
    f"{_PACKAGE}/serving/asked.py": ALL,
    f"{_PACKAGE}/serving/completions.py": ("Completions.prompts", "Completions._ids", "_all"),
    f"{_PACKAGE}/serving/chat.py": ("Chat.prompts", "_check_messages"),
    f"{_PACKAGE}/serving/endpoint.py": ("Endpoint.answer", "Endpoint._every", "Endpoint._read", "Endpoint._room"),
    f"{_PACKAGE}/serving/app.py": ("_body", "Keys.require", "_answered"),
    f"{_PACKAGE}/batch/lines.py": ("read_line", "_enveloped", "_simple"),
    f"{_PACKAGE}/batch/source.py": ("Source.__init__", "Source.pieces", "Source._json"),
    "eval/plans/tables.py": ALL,
    "eval/records/writer.py": ("read_results", "_whole", "_parse"),
}  # fmt: skip


class Lines:
    """Lines that no input reached, by file."""

    def __init__(self) -> None:
        self.all = {str(ROOT / file): lines_of(file) for file in ROOMS}
        self.left = {file: set(lines) for file, lines in self.all.items()}
        self.reached = 0

    def begin(self) -> int:
        """From now on, in this thread; -> how many lines were reached before."""
        sys.settrace(self._call)
        return self.reached

    def end(self) -> int:
        """No further; -> how many lines were reached."""
        sys.settrace(None)
        return self.reached

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        left = self.left.get(frame.f_code.co_filename)
        if not left:
            return None
        self._reach(left, frame.f_code.co_firstlineno)
        return self._line

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self._reach(self.left[frame.f_code.co_filename], frame.f_lineno)
        return self._line

    def _reach(self, left: set[int], line: int) -> None:
        if line in left:
            left.discard(line)
            self.reached += 1

    @property
    def texts(self) -> str:
        """What tells these files from others."""
        return hashlib.sha256(b"".join(Path(file).read_bytes() for file in sorted(self.all))).hexdigest()

    def forget(self, left: dict[str, list[int]]) -> None:
        """Go on where an earlier run ended."""
        for file, lines in left.items():
            self.left[str(ROOT / file)] &= set(lines)

    def told(self) -> dict[str, list[int]]:
        """What is left, by file."""
        return {file: lines for file, lines in self.told_all().items() if lines}

    def told_all(self) -> dict[str, list[int]]:
        """The same, with the files that were reached whole."""
        return {str(Path(file).relative_to(ROOT)): sorted(lines) for file, lines in self.left.items()}

    def share(self) -> tuple[int, int]:
        """Lines that were reached, and all."""
        count = sum(map(len, self.all.values()))
        return count - sum(map(len, self.left.values())), count


@cache
def lines_of(file: str) -> frozenset[int]:
    """The lines of a file's functions that read."""
    path = ROOT / file
    module = compile(path.read_text(encoding="utf-8"), str(path), "exec")
    return frozenset(line for code, name in _functions(module, "") if name.startswith(ROOMS[file])
                     for line in _lines(code))  # fmt: skip


def _functions(code: CodeType, outer: str) -> Iterator[tuple[CodeType, str]]:
    """Functions within functions belong to those; bodies of classes run once, when they are imported."""
    for inner in code.co_consts:
        if not isinstance(inner, CodeType):
            continue
        name = f"{outer}.{inner.co_name}" if outer else inner.co_name
        if inner.co_flags & inspect.CO_OPTIMIZED and not _is_empty(inner):  # a function
            yield inner, name
        yield from _functions(inner, name)


def _is_empty(code: CodeType) -> bool:
    """Whether a function is of a protocol: it has a docstring, and does nothing."""
    done = [(step.opname, step.argval) for step in dis.get_instructions(code) if step.opname != "RESUME"]
    return done in ([("LOAD_CONST", None), ("RETURN_VALUE", None)], [("RETURN_CONST", None)])


def _lines(code: CodeType) -> set[int]:
    return {line for _, _, line in code.co_lines() if line is not None}
