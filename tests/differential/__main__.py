"""Does every chain write what its target alone writes, and does that agree with float64? Random cases.

python -m tests.differential --minutes 5                    half of the time for cases, half for state machines
python -m tests.differential --cases 20000 --seed 3 --state FILE   goes on where an earlier run with that file stopped
python -m tests.differential --isas                         every instruction set of this CPU in turn
python -m tests.differential --threads --minutes 10         eight threads on one model that is changed in between
python -m tests.differential --replay 'CASE'                one case, as a failure prints it
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # models.py and its like
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="of all (5)")
    parser.add_argument("--cases", type=int, help="differential cases; no state machines without --machines")
    parser.add_argument("--machines", type=int, help="runs of state machines; no cases without --cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="a file with the counts so far; a run with it goes on behind them")
    parser.add_argument("--isas", action="store_true", help="a slice of the cases on each instruction set of this CPU")
    parser.add_argument("--threads", action="store_true", help="eight threads on one model, and nothing else")
    parser.add_argument("--replay", metavar="CASE", help="a case as JSON")
    return parser.parse_args()


def main() -> int:
    asked = parsed()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MLSPEC_CACHE"] = folder
        import torch
        import transformers

        torch.set_num_threads(1)
        transformers.utils.logging.disable_progress_bar()
        if asked.replay:
            from .case import run

            outcome = run(json.loads(asked.replay))
            print(outcome)
            return int(outcome.word == "wrong")
        return _long(asked, Path(folder))


def _long(asked: argparse.Namespace, folder: Path) -> int:
    from hf_mlspec.ops import library

    from . import runs

    library.kernel_of("bf16_linear", "cpu")  # where this CPU lacks the instruction set it is told now
    if asked.threads:
        return runs.threads(asked.seed, 60 * asked.minutes)
    state = asked.state or folder / "counts.json"
    both = asked.cases is None and asked.machines is None
    begin, seconds, failed = time.monotonic(), 60 * asked.minutes, 0
    if both or asked.cases is not None:
        end = begin + (seconds / 2 if both else seconds)
        how = runs.on_every_isa if asked.isas else runs.cases
        failed += how(asked.seed, asked.cases, end, state)
    if both or asked.machines is not None:
        failed += runs.machines(asked.seed, asked.machines, begin + seconds, state)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
