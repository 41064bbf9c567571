"""What does a chain score on the tasks of lm-eval? Its own command line, with our model and our tasks in it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

_OWN_HELP = """Options of mlspec beside those of lm-eval, which follow:
  --data FOLDER       where the data of the mlspec_... tasks lie (sets MLSPEC_DATA)
  --model mlspec      is what --model is by default; its arguments:
                      --model_args pretrained=PATH levels=mxfp4+PATH format=int4 precision=w4a4 journal=FILE ...
  --include_path DIR  is looked through besides our own tasks
  --workers N         processes that share the documents, by Ray, each on a device of its own
  --ray ADDRESS       of a Ray cluster, or auto (default: where --workers is above 1, this machine alone)
  --batch_size N      rows at a time, 8 by default; --device is "cuda" by default where there is one, else "cpu"
"""


def run_eval(args: argparse.Namespace) -> int:
    if args.data is not None:
        if not Path(args.data).is_dir():
            raise ValueError(f"--data {args.data}: no such folder; name the data folder")
        os.environ["MLSPEC_DATA"] = str(Path(args.data).resolve())
    words = args.words
    helps = "-h" in words or "--help" in words or not words
    if helps:
        print(_OWN_HELP)
    try:
        from ..evaluation.harness_command import run
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "lm_eval":
            raise
        raise ValueError('lm_eval is not installed: pip install --no-build-isolation -e ".[eval]" in the folder of '
                         "hf_mlspec") from error
    if helps or (args.ray is None and (args.workers or 1) == 1):
        run(words)
        return 0
    return _by_ray(args)


def _by_ray(args: argparse.Namespace) -> int:
    """The same by several processes; what the first one prints is printed here."""
    if "WORLD_SIZE" in os.environ:
        raise ValueError("--workers and --ray start the processes themselves: leave accelerate launch or torchrun out")
    from ..evaluation.harness_command import check

    check(args.words)  # else each process would refuse them, when all have started
    try:
        from ..batch.ray_ranks import evaluated
    except ModuleNotFoundError as error:
        raise ValueError(str(error).replace("one worker in this process", "one process")) from error
    status, printed = evaluated(args.words, args.workers, args.ray)
    print(printed, end="")
    return status
