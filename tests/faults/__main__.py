"""Does a model write right tokens, or end in one clear error, and is it usable then, whatever fails inside?

python -m tests.faults --each 60 --journal FILE           60 of every kind in every scene; goes on where it was cut
python -m tests.faults --only interrupt --scene stream    the kinds, and the scenes, with this text in their name
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
MOST_SECONDS = 240  # of one fault: then its process ends, and that is a finding
SEED = 29


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=60, help="of each kind in a scene, fewer of costly ones (60)")
    parser.add_argument("--only", metavar="TEXT", default="", help="kinds with this text in their name")
    parser.add_argument("--scene", metavar="TEXT", default="", help="scenes with this text in their name")
    parser.add_argument("--journal", type=Path, help="where what was tried is kept, and what is not tried again")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options)
    with tempfile.TemporaryDirectory(prefix="mlspec-faults-") as folder:
        return watch(options, Path(folder))


def watch(options: argparse.Namespace, folder: Path) -> int:
    """Run workers until all is tried: one that dies is a finding, and the next goes on behind it."""
    journal, doing = options.journal or folder / "journal", folder / "doing"
    environment = {
        "OMP_NUM_THREADS": "1", **os.environ, "LD_PRELOAD": str(refusing_library(folder)),
        "MLSPEC_FAULTS_FOLDER": str(folder), "MLSPEC_CACHE": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    own = ["--each", str(options.each), "--only", options.only, "--scene", options.scene, "--journal", str(journal)]
    while True:
        doing.unlink(missing_ok=True)  # there while a fault is tried
        done = subprocess.run([sys.executable, "-m", "tests.faults", "--worker", *own], env=environment)
        if not doing.exists():
            return done.returncode
        from hf_mlspec.evaluation.journal import Journal

        with Journal(journal, asked(options.each)) as kept:
            kept.add(doing.read_text(), f"finding: its process ended with {done.returncode}")


def asked(each: int) -> dict:
    """The settings that a journal's faults depend on."""
    return {"faults of each": each, "seed": SEED}


def refusing_library(folder: Path) -> Path:
    """The library that refuses memory, to be preloaded."""
    made = folder / "refused.so"
    source = HERE.parent / "ops" / "refused_memory.cpp"
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-o", str(made)]
    subprocess.run(["c++", *flags, str(source), "-ldl"], check=True)
    return made


def work(options: argparse.Namespace) -> int:
    """Try all that the journal has not."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    import torch
    from transformers.utils.logging import disable_progress_bar

    from hf_mlspec.evaluation.journal import Journal

    from .kinds import Finding, all_faults
    from .scenes import SCENES

    torch.set_num_threads(1)
    disable_progress_bar()
    each, doing, scenes = options.each, Path(os.environ["MLSPEC_FAULTS_FOLDER"]) / "doing", {}
    with Journal(options.journal, asked(each)) as journal:
        for faults in all_faults():
            title = f"{faults.kind} in {faults.name}"
            if options.only not in faults.kind or options.scene not in faults.name:
                continue
            begun, words = time.monotonic(), Counter()
            scene = scenes.get(faults.scene_of) or scenes.setdefault(faults.scene_of, SCENES[faults.scene_of]())
            for at in chosen(faults.count(scene), max(each // faults.cost, 1), title):
                key = f"{title}, {at}"
                if key not in journal:
                    doing.write_text(key)
                    faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
                    try:
                        word = faults.inject(scene, at)
                    except Finding as finding:
                        word = f"finding: {finding}"
                        print(f"{key}: {word}", flush=True)
                        scene = scenes[faults.scene_of] = SCENES[faults.scene_of]()
                    finally:
                        faulthandler.cancel_dump_traceback_later()
                    journal.add(key, word)
                    doing.unlink()
                words[journal[key].split(":")[0]] += 1
            print(f"{title}: {json.dumps(words)}, {time.monotonic() - begun:.0f} s", flush=True)
        return told(journal.items)


def chosen(count: int, each: int, title: str) -> list[int]:
    """So many numbers from 1 to `count`, one drawn from each of as many equal parts; all where they are few."""
    if count <= each:
        return list(range(1, count + 1))
    chance = random.Random(f"{SEED} {title}")
    return [chance.randrange(count * part // each, count * (part + 1) // each) + 1 for part in range(each)]


def told(items: dict[str, str]) -> int:
    """The table of all that was tried."""
    kinds: dict[str, Counter] = {}
    for key, word in items.items():
        kinds.setdefault(key.split(" in ")[0], Counter())[word.split(":")[0]] += 1
    for kind, words in kinds.items():
        parts = ", ".join(f"{count:,} {word}" for word, count in sorted(words.items()))
        print(f"{kind:24} {sum(words.values()):6,}  {parts}")
    findings = [f"{key}: {word}" for key, word in items.items() if word.startswith("finding")]
    for line in findings:
        print(line)
    never = sum(word == "never" for word in items.values())
    print(f"{len(items) - never:,} faults, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
