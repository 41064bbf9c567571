"""What does an installed hf_mlspec bring in? A software bill of materials on standard output: CycloneDX 1.6, as JSON.

    python .ci/sbom.py > sbom.json                         what is installed here, by the metadata of the packages
    python .ci/sbom.py --extra serve --extra eval          with extras
    pip install --report report.json ...; python .ci/sbom.py --report report.json
                                                           with the SHA-256 of every archive that pip says it installed

The same packages give the same bytes: components are sorted, the serial number is made of what they are, and the time
is SOURCE_DATE_EPOCH's, or left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import uuid
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = "hf-mlspec"


def requirements(found: metadata.Distribution, extras: frozenset[str]) -> dict[str, frozenset[str]]:
    """Names of what a distribution needs here, with the extras that it asks of them."""
    asked: dict[str, frozenset[str]] = {}
    for line in found.requires or ():
        one = Requirement(line)
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            name = canonicalize_name(one.name)
            asked[name] = asked.get(name, frozenset()) | frozenset(one.extras)
    return asked


def closure(root: str, extras: frozenset[str]) -> tuple[dict[str, metadata.Distribution], dict[str, list[str]]]:
    """All that `root` needs, by name, and what each of them needs itself. LookupError for what is not installed."""
    found: dict[str, metadata.Distribution] = {}
    needs: dict[str, set[str]] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(canonicalize_name(root), extras)]
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise LookupError(f"{name} is not installed here, and {root} needs it: install it first, or leave out the "
                              "extra that asks for it") from None
        asked = requirements(found[name], wanted)
        needs.setdefault(name, set()).update(asked)
        waiting += asked.items()
    return found, {name: sorted(own) for name, own in sorted(needs.items())}


def hashes(report: Path) -> dict[str, str]:
    """The SHA-256 of the archive of every package that a report of pip names."""
    said = {}
    for one in json.loads(report.read_text(encoding="utf-8"))["install"]:
        own = one.get("download_info", {}).get("archive_info", {})
        if value := (own.get("hashes") or {}).get("sha256"):
            name, version = one["metadata"]["name"], one["metadata"]["version"]
            said[f"{canonicalize_name(name)}@{version}"] = value
    return said


def licenses(found: metadata.Distribution) -> list[dict]:
    """As the package says: an SPDX expression, or words."""
    said = found.metadata
    if expression := said.get("License-Expression"):
        return [{"expression": expression}]
    names = [line.split(" :: ")[-1] for line in said.get_all("Classifier") or () if line.startswith("License :: ")]
    own = said.get("License") or ""
    if not names and own and len(own) < 100 and "\n" not in own:
        names = [own]
    return [{"license": {"name": name}} for name in sorted(set(names))]


def component(name: str, found: metadata.Distribution, sums: dict[str, str]) -> dict:
    """One package."""
    version = found.version
    public = version.partition("+")[0]  # torch's builds differ in what stands behind the plus
    own = {"type": "library", "bom-ref": f"{name}@{version}", "name": name, "version": version,
           "purl": f"pkg:pypi/{name}@{version.replace('+', '%2B')}"}  # fmt: skip
    if said := found.metadata.get("Summary"):
        own["description"] = said
    if told := licenses(found):
        own["licenses"] = told
    if value := sums.get(f"{name}@{version}") or sums.get(f"{name}@{public}"):
        own["hashes"] = [{"alg": "SHA-256", "content": value}]
    return own


def bill(root: str, extras: frozenset[str], sums: dict[str, str], epoch: str | None) -> dict:
    """The document."""
    found, needs = closure(root, extras)
    refs = {name: f"{name}@{one.version}" for name, one in found.items()}
    name = canonicalize_name(root)
    parts = [component(own, one, sums) for own, one in sorted(found.items()) if own != name]
    tools = {"components": [{"type": "application", "name": "sbom.py", "version": found[name].version}]}
    about: dict = {"tools": tools, "component": component(name, found[name], sums) | {"type": "application"}}
    if epoch is not None:
        when = datetime.datetime.fromtimestamp(int(epoch), datetime.timezone.utc)
        about = {"timestamp": when.strftime("%Y-%m-%dT%H:%M:%SZ"), **about}
    said = json.dumps([parts, about], sort_keys=True)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json", "bomFormat": "CycloneDX", "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, said)}", "version": 1, "metadata": about,
        "components": parts,
        "dependencies": [{"ref": refs[own], "dependsOn": [refs[one] for one in of]} for own, of in needs.items()],
    }  # fmt: skip


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sbom.py", description=__doc__.splitlines()[0])
    parser.add_argument("--package", default=ROOT, help=f"whose needs are listed ({ROOT})")
    parser.add_argument("--extra", action="append", default=[], help="an extra of it; may be given several times")
    parser.add_argument("--report", type=Path, help="a report of pip (--report), whose hashes are told")
    options = parser.parse_args(words)
    try:
        sums = hashes(options.report) if options.report else {}
        document = bill(options.package, frozenset(options.extra), sums, os.environ.get("SOURCE_DATE_EPOCH"))
    except (LookupError, OSError, ValueError) as error:
        print(f"sbom.py: {error}", file=sys.stderr)
        return 1
    print(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
