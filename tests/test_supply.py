"""Does the bill of materials name all that an installation brings in, and do builds hold no path of their machine?"""

from __future__ import annotations

import importlib.util
import json
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_SPEC = importlib.util.spec_from_file_location("sbom", ROOT / ".ci" / "sbom.py")
sbom = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(sbom)


def written(capsys, *words: str) -> dict:
    assert sbom.main(list(words)) == 0
    return json.loads(capsys.readouterr().out)


def test_a_bill_names_every_package_once_and_what_it_needs(capsys):
    said = written(capsys)
    names = [one["name"] for one in said["components"]]
    assert (said["bomFormat"], said["specVersion"]) == ("CycloneDX", "1.6")
    assert {"torch", "transformers", "safetensors", "numpy", "huggingface-hub"} <= set(names)
    assert names == sorted(set(names))
    assert "pytest" not in names
    for one in said["components"]:
        assert one["version"] == metadata.version(one["name"])
        assert one["purl"].startswith(f"pkg:pypi/{one['name']}@")
    refs = {one["bom-ref"] for one in [*said["components"], said["metadata"]["component"]]}
    assert {one["ref"] for one in said["dependencies"]} == refs
    assert {ref for one in said["dependencies"] for ref in one["dependsOn"]} <= refs
    of = {one["ref"].split("@")[0]: [ref.split("@")[0] for ref in one["dependsOn"]] for one in said["dependencies"]}
    assert {"torch", "transformers"} <= set(of["hf-mlspec"])
    assert "tokenizers" in of["transformers"]


def test_the_same_packages_give_the_same_bytes(capsys, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1750000000")
    first, second = written(capsys), written(capsys)
    assert first == second
    assert first["metadata"]["timestamp"] == "2025-06-15T15:06:40Z"
    assert written(capsys, "--extra", "test")["serialNumber"] != first["serialNumber"]


def test_hashes_are_those_of_pips_report(tmp_path, capsys):
    version = metadata.version("safetensors")
    report = {"install": [{"metadata": {"name": "Safetensors", "version": version},
                           "download_info": {"archive_info": {"hashes": {"sha256": "ab" * 32}}}}]}  # fmt: skip
    (tmp_path / "report.json").write_text(json.dumps(report))
    said = written(capsys, "--report", str(tmp_path / "report.json"))
    told = {one["name"]: one.get("hashes") for one in said["components"]}
    assert told["safetensors"] == [{"alg": "SHA-256", "content": "ab" * 32}]
    assert told["torch"] is None


@pytest.mark.parametrize(("words", "message"), [
    (["--package", "no-such-package"], "no-such-package is not installed here"),
    (["--report", "no such file"], "No such file"),
])  # fmt: skip
def test_what_cannot_be_listed_is_said(words, message, capsys):
    assert sbom.main(words) == 1
    assert message in capsys.readouterr().err


def test_constraints_name_one_version_of_everything_that_is_needed(capsys):
    """Also of what the extras of tests bring in: nothing is left to the day of an installation."""
    here = f"transformers=={metadata.version('transformers')}"  # the oldest supported one has a file of its own
    texts = [path.read_text() for path in sorted(ROOT.glob("constraints*.txt"))]
    lines = next((text for text in texts if here in text), texts[-1]).splitlines()
    pinned = [line.partition("==")[0].lower() for line in lines if "==" in line and not line.startswith("#")]
    needed = {one["name"] for one in written(capsys, "--extra", "test")["components"]}
    own = {"pip", "setuptools"}
    missing = sorted(name for name in needed - own if name not in {sbom.canonicalize_name(pin) for pin in pinned})
    assert not [name for name in missing if not name.startswith("nvidia")], missing
