"""Can it be shown, later and elsewhere, that a chain of levels changed no token of its target?

A certificate is one JSON document ("mlspec-certificate/1", docs/certificate.md): which weights, kernels, versions and
prompts, how many tokens were compared, and every place where two decodings part. Its last entry is a digest over all
others, so that a document that was edited is refused.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..checkpoints.whole_file import written_whole
from ..integration.levels.load import hide_progress_bars, load_causal_lm, read_tokenizer
from . import certificate_badge as badge
from .certificate_identity import (
    combined,
    hash_configuration,
    hash_folder,
    hash_ids,
    hash_json,
    hash_parameters,
    kernels,
)
from .certificate_schema import HEAD, SCHEMA, agrees_with_itself, read_json, require_whole


@dataclass
class Check:
    """Result of `Certificate.check`.

    same:      what was hashed again and matches the certificate.
    different: what does not match, with both values. unchecked: what was not given and is therefore unknown.
    """

    same: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether nothing differs."""
        return not self.different

    def compare(self, what: str, there: str | None, here: str | None) -> None:
        """Hold a hash of the certificate against one taken now; None: there is none."""
        shown = [value[:16] if value else "none" for value in (there, here)]
        if there == here:
            self.same.append(f"{what} ({shown[0]})")
        else:
            self.different.append(f"{what}: {shown[0]} in the certificate, {shown[1]} here")


def check_place(path: str | os.PathLike[str]) -> None:
    """Raise ValueError unless a certificate can be written there: where an earlier one lies, or nothing."""
    badge.check_folder(path, "the certificate")
    if not Path(path).exists():
        return
    try:
        Certificate.load(path)
    except ValueError as error:
        raise ValueError(f"{str(path)!r} exists and is not a certificate ({error}): name another file") from error


class Certificate:
    """A losslessness certificate (docs/certificate.md). Made by `certify`, read by `Certificate.load`; immutable."""

    def __init__(self, content: dict[str, Any]) -> None:
        """content: everything but "sha256", as JSON values; ValueError where it is no certificate."""
        document = json.loads(json.dumps(content, allow_nan=False))
        self._document = document | {"sha256": hash_json(document)}
        require_whole(self._document, "this document")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Certificate:
        """Read a certificate; ValueError naming the file if it cannot be read, is another kind of document, or was
        changed after it was written.
        """
        said = f"certificate {str(path)!r}"
        try:
            document = read_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{said} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{said} is no JSON document: {error}") from error
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            schema = document.get("schema") if isinstance(document, dict) else None
            raise ValueError(f"{said} is no document of schema {SCHEMA!r} (its schema is {schema!r}); give a file "
                             "that mlspec verify --certificate wrote, or upgrade hf_mlspec")
        digest = hash_json({name: value for name, value in document.items() if name != "sha256"})
        if digest != document.get("sha256"):
            raise ValueError(f"{said} was changed after it was made: its content has SHA-256 {digest[:16]}..., it "
                             f"says {str(document.get('sha256'))[:16]}...; take the original, or verify again")
        require_whole(document, said)
        if not agrees_with_itself(document):
            raise ValueError(f"{said} contradicts itself: its result is not that of its runs; run mlspec verify again")
        loaded = cls.__new__(cls)
        loaded._document = document
        return loaded

    @property
    def lossless(self) -> bool:
        """Whether no token differs (except ties that `tolerate_ties` allows)."""
        return self._document["result"]["lossless"]

    @property
    def statement(self) -> str:
        """One line: ``lossless: 0 of 55,517 tokens differ from the target alone over ...``."""
        return badge.statement(self._document)

    def to_dict(self) -> dict[str, Any]:
        """The whole document, a copy; docs/certificate.md describes every entry."""
        return copy.deepcopy(self._document)

    def markdown(self) -> str:
        """The block for a model card: statement and table between two marking comments."""
        return badge.block(self._document)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document under a temporary name and rename it; ValueError if the path cannot be written, or is an
        existing file that is no certificate.
        """
        check_place(path)
        text = json.dumps(self._document, indent=1, ensure_ascii=False, allow_nan=False)
        with written_whole(Path(path).resolve()) as beside:
            beside.write_bytes((text + "\n").encode("utf-8"))

    def save_badge(self, path: str | os.PathLike[str]) -> None:
        """Put `markdown()` into a model card: it replaces an existing block, otherwise it is appended."""
        badge.place_block(path, self.markdown())

    def check(self, model: str | PreTrainedModel, levels: Sequence[Any] = (),
              prompts: Sequence[str] | None = None) -> Check:
        """Hash again and return what no longer matches the certificate.

        model: the target's folder, or the target itself. levels: those of the chain that are folders or models,
        matched by their names; the others are made from the target. prompts: their texts. Raises ValueError for a
        folder that cannot be read, or a level that the certificate does not name.
        """
        found, document = Check(), self._document
        _check_model(found, "target", document["target"], model, document["settings"]["dtype"])
        _check_levels(found, document, levels)
        device = document["machine"].get("device", "cpu")
        there, here = document["kernels"], kernels(device)
        found.compare("kernels", there["sha256"], here["sha256"])
        same = (there["instruction_set"], there["ops"]) == (here["instruction_set"], here["ops"])
        (found.same if same else found.different).append(
            f"instruction set {here['instruction_set']}" if same else
            f"instruction set: {there['instruction_set']} in the certificate, {here['instruction_set']} here")
        _check_prompts(found, document["prompts"], model, prompts)
        return found


def _check_levels(found: Check, document: dict[str, Any], levels: Sequence[Any]) -> None:
    given = [(_name(level), level) for level in levels]
    for entry, level in _matched(document["levels"], given):
        name = entry["name"]
        if entry["kind"] not in ("model", "model cast to mxfp4", HEAD):
            continue
        if level is None or (entry["kind"] == HEAD and not entry.get("weights_sha256")):
            found.unchecked.append(f"level {name}")
            continue
        folder = level.removeprefix("mtp:").removesuffix("@mxfp4") if isinstance(level, str) else level
        _check_model(found, f"level {name}", entry, folder, document["settings"]["dtype"])


def _matched(entries: list[dict[str, Any]], given: list[tuple[str, Any]]) -> list[tuple[dict[str, Any], Any]]:
    """Each entry with the level of its name, None where none was given; of two with one name the upper comes first."""
    left, pairs = list(given), []
    for entry in entries:
        place = next((place for place, (name, _) in enumerate(left) if name == entry["name"]), None)
        pairs.append((entry, None if place is None else left.pop(place)[1]))
    if left:
        raise ValueError(f"the certificate has no level {', '.join(name for name, _ in left)} besides its own: "
                         f"{', '.join(entry['name'] for entry in entries)}")
    return pairs


def _check_prompts(found: Check, entry: dict[str, Any], model: str | PreTrainedModel, prompts: Sequence[str] | None,
                   ) -> None:
    if prompts is None:
        found.unchecked.append("prompts")
        return
    found.compare("prompts", entry["sha256"], hash_json(list(prompts)))
    if isinstance(model, str | os.PathLike):
        ids = hash_ids(read_tokenizer(str(model)), prompts)
        found.compare("token ids of the prompts (tokenizer)", entry["ids_sha256"], ids)
    else:
        found.unchecked.append("tokenizer")


def _check_model(found: Check, what: str, entry: dict[str, Any], model: str | PreTrainedModel, dtype: str) -> None:
    if isinstance(model, str | os.PathLike) and entry.get("weights_sha256"):
        configs, weights = hash_folder(model)
        count = f"{len(weights)} file{'s' * (len(weights) > 1)}"
        found.compare(f"{what}: weights, {count}", entry["weights_sha256"], combined(weights))
        found.compare(f"{what}: configuration files", combined(entry["configuration_files"]), combined(configs))
        return
    if isinstance(model, str | os.PathLike):  # certified as a live model: its numbers, not its files, are known
        hide_progress_bars()
        model, _ = load_causal_lm(str(model), dtype)
    found.compare(f"{what}: parameters", entry["parameters_sha256"], hash_parameters(model))
    found.compare(f"{what}: configuration", entry["configuration_sha256"], hash_configuration(model))


def _name(level: Any) -> str:
    if not isinstance(level, str):
        path = getattr(getattr(level, "config", None), "_name_or_path", "")
        level = path or getattr(level, "name", type(level).__name__)
    return level.removeprefix("mtp:").rstrip("/").rpartition("/")[2]
