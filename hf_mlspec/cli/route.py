"""What does a router learn on a text, and how many planes does it read for given prompts?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..evaluation.certificate_badge import check_folder
from ..integration.levels.load import hide_progress_bars, read_tokenizer, require_folder
from ..integration.route_training import Choice, RoutedFolder, choices_of, load_planes, train_folder
from ..routing.training import RouterRecipe, Step
from .picture import require_picture
from .request import read_prompts, require_dtype
from .tables import say, show

_SHOWN_PROMPTS = 6  # columns of the table; the mean is of all


def run_route(args: argparse.Namespace) -> int:
    """`mlspec route train` and `mlspec route show`."""
    require_dtype(args.dtype)
    if args.plot is not None:
        require_picture(args.plot)
    hide_progress_bars()
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return _train(args) if args.action == "train" else _show(args)


def _train(args: argparse.Namespace) -> int:
    check_folder(args.out, "the router")
    if Path(args.out).is_dir():
        raise ValueError(f"--out {args.out!r} is a folder: name a file, such as router.safetensors")
    options = ("steps", "batch", "learning_rate", "query_tokens", "seed", "every", "hard_share")
    given = {name: getattr(args, name) for name in options if getattr(args, name) is not None}
    if args.widths is not None:
        given["widths"] = tuple(args.widths) if isinstance(args.widths, list) else (args.widths,)
    recipe = RouterRecipe(args.target_bits, **given)
    screen = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True, disable=args.json or not screen.is_terminal) as progress:
        task = progress.add_task("router", total=recipe.steps)

        def tell(step: Step) -> None:
            words = f"loss {step.loss:.4f}, bits {step.bits:.2f}"
            progress.update(task, completed=step.step + 1, description=words)

        found = train_folder(args.model, args.data, recipe, args.out, samples=args.samples, tokens=args.tokens,
                             group_size=args.group_size, dtype=args.dtype, device=args.device, progress=tell)
    if args.plot is not None:
        from .route_plot import draw_steps  # matplotlib is optional

        draw_steps(found.trained.steps, args.target_bits, args.plot)
    _tell_training(args, found)
    return 0


def _tell_training(args: argparse.Namespace, found: RoutedFolder) -> None:
    steps, router = found.trained.steps, found.trained.router
    if args.json:
        told = {"out": args.out, "teacher": found.teacher, "queries": found.queries, "tokens": found.tokens,
                "seconds": found.seconds, "bits": found.trained.bits, "widths": list(router.widths),
                "steps": [dataclasses.asdict(step) for step in steps]}
        print(json.dumps(told))
        return
    console = Console()
    rows = [("blocks", f"{len(router.names)}, each {list(router.widths)} planes"),
            ("taught by", found.teacher), ("on", f"{found.queries} queries of {found.tokens} tokens"),
            ("distance to the teacher", f"{steps[0].distillation:.4f} nats a token at first, "
                                        f"{steps[-1].distillation:.4f} at last "
                                        f"({'choices' if args.hard_share else 'mixtures'})"),
            ("bits of a weight", f"{found.trained.bits:.3f} on training queries, {args.target_bits:g} asked for"),
            ("seconds", f"{found.seconds:.1f}")]
    show(console, "router", ("", "value"), rows)
    say(console, f"written to {args.out}")
    if args.plot is not None:
        say(console, f"picture written to {args.plot}")


def _show(args: argparse.Namespace) -> int:
    require_folder(args.model)
    prompts = read_prompts(args.prompts, args.count)
    tokenizer = read_tokenizer(args.model)
    model = load_planes(args.model, args.dtype, args.device, group_size=args.group_size)
    choices = choices_of(model, args.router, [tokenizer(one)["input_ids"] for one in prompts])
    if args.plot is not None:
        from .route_plot import draw_choices

        draw_choices(choices, args.plot)
    if args.json:
        print(json.dumps([{"prompt": text, **dataclasses.asdict(one)}
                          for text, one in zip(prompts, choices, strict=True)]))
        return 0
    console = Console()
    shown = choices[:_SHOWN_PROMPTS]
    columns = ("block", *(f"prompt {index}" for index in range(len(shown))), f"mean of {len(choices)}")
    rows = [(_short(name), *(str(one.widths[name]) for one in shown), _mean(choices, name))
            for name in choices[0].widths]
    mean = statistics.fmean(one.bits for one in choices)
    rows.append(("bits of a weight", *(f"{one.bits:.2f}" for one in shown), f"{mean:.2f}"))
    show(console, "planes read", columns, rows)
    if args.plot is not None:
        say(console, f"picture written to {args.plot}")
    return 0


def _mean(choices: list[Choice], name: str) -> str:
    return f"{statistics.fmean(one.widths[name] for one in choices):.2f}"


def _short(name: str) -> str:
    """`model.layers.3.mlp` -> `3 mlp`."""
    *_, layer, part = name.split(".")
    return f"{layer} {part}"
