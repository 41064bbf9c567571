"""How does lm-eval's own command line run with our model and our tasks in it?"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from typing import Any, NoReturn

import torch
from lm_eval._cli import HarnessCLI
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.utils import setup_logging

from . import TASKS
from .harness import MODEL_NAME
from .harness_arguments import BATCH_SIZE, Arguments


def run(words: list[str]) -> None:
    """Run `lm-eval WORDS`: its subcommands, options and output. SystemExit as its parser raises it."""
    setup_logging()
    command, args = _read(words)
    command.execute(args)


def check(words: list[str]) -> None:
    """Refuse what `run` would refuse of these words before it loads a model. SystemExit as lm-eval's parser raises it,
    ValueError and TypeError for settings that do not go together and for arguments of a model of ours. Which tasks
    there are is left to `run`: lm-eval looks through all of them, for as long as a process takes to start."""
    _, args = _read(words)
    if args.command != "run":
        return
    with contextlib.redirect_stdout(io.StringIO()):  # what --config says is printed when it runs
        asked = EvaluatorConfig.from_cli(args)
    if not asked.tasks:
        raise ValueError("no task is named: add --tasks NAME, or tasks to the file of --config")
    if asked.model == MODEL_NAME:
        Arguments.of({"device": asked.device, "batch_size": asked.batch_size, **(asked.model_args or {})})


def _read(words: list[str]) -> tuple[HarnessCLI, argparse.Namespace]:
    """lm-eval's command line, and what it was told, with our tasks and our defaults in it."""
    command = HarnessCLI()
    if (parser := getattr(command, "_parser", None)) is not None:
        _say_errors_in_one_line(parser)
    before, sys.argv = sys.argv, ["mlspec eval", *words]
    try:
        args = command.parse_args()  # which reads sys.argv, and takes "run" as said where no subcommand is
    finally:
        sys.argv = before
    if hasattr(args, "include_path"):
        args.include_path = [str(TASKS), *([args.include_path] if args.include_path else [])]
    if args.command == "run":
        for name, value in _defaults(args).items():
            setattr(args, name, value)
    return command, args


def _say_errors_in_one_line(parser: argparse.ArgumentParser) -> None:
    """Of lm-eval's parser and of those of its subcommands, with what was typed before it and no usage."""
    def error(message: str) -> NoReturn:
        parser.exit(2, f"mlspec eval: error: {' '.join(message.split())}; see mlspec eval --help\n")

    parser.prog, parser.error = "mlspec eval", error
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                below.error = error


def _defaults(args: argparse.Namespace) -> dict[str, Any]:
    """What neither the command line nor the file of --config says, and where our defaults are not lm-eval's."""
    said = EvaluatorConfig.load_yaml_config(args.config) if args.config else {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ours = {"model": MODEL_NAME, "device": device, "batch_size": BATCH_SIZE}
    return {name: value for name, value in ours.items() if name not in said and getattr(args, name, None) is None}

