"""Which archives did pip install? A requirements file on standard output that lets pip install no others.

    pip install --dry-run --ignore-installed --report report.json -e ".[dev]" -c constraints.txt
    python .ci/pins.py report.json > pins.txt
    pip install --require-hashes --no-deps -r pins.txt && pip install --no-deps --no-build-isolation -e .

It holds for the machine, the Python and the index that the report comes of: torch, say, has an archive for each kind
of device under one version. So none of these files is part of the project.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def pins(report: dict) -> list[str]:
    """A line for each package of a report of pip, by name, but for folders: what is installed from sources at hand.
    ValueError where there is no hash to hold it by."""
    lines = []
    for one in report["install"]:
        about, where = one["metadata"], one["download_info"]
        if "dir_info" in where:
            continue
        value = where.get("archive_info", {}).get("hashes", {}).get("sha256")
        if value is None:
            raise ValueError(f"{about['name']} {about['version']} has no SHA-256: it comes from {where.get('url')}")
        lines.append(f"{about['name']}=={about['version']} --hash=sha256:{value}")
    return sorted(lines, key=str.lower)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pins.py", description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, help="what pip's --report has written")
    options = parser.parse_args(words)
    try:
        lines = pins(json.loads(options.report.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = f"it is no report of pip: {error!r}" if not isinstance(error, (OSError, ValueError)) else error
        print(f"pins.py: {options.report}: {said}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
