"""What does a call with levels and no lengths take beyond the call of the target alone? Calls of 8, 32 and 128 tokens.

    python -m eval.bench_call                                              # the demo pair
    python -m eval.bench_call --target FOLDER --draft FOLDER --device cuda --tokens 8 32 256

Contenders take turns on the same prompts, one row each, each time beginning with another one. On a GPU, where graphs
of two chains are kept, the target alone takes turns with one contender at a time. Exit status 1: ids differ.

--choosing tells instead how much of the time of all calls went to choosing plans and to telling the controller of
rounds: most calls begin with what an earlier one chose, and choose nothing.
On a GPU both happen while the device is at a round: there the goal is for what a choice takes beyond that round.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_mlspec
from hf_mlspec.speculation.controller import Controller

_ALONE = "alone"
_TO_LEARN = 6  # calls that are not counted: costs are measured, plans found, and on a GPU graphs captured


@dataclass
class Turns:
    """Calls of all contenders on the same prompts: seconds of each, rounds of each plan; calls whose ids differ."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    plans: dict[str, Counter[str]] = field(default_factory=dict)
    differing: int = 0

    def ratio(self, name: str) -> float:
        """Seconds of the target alone over those with levels, the median over prompts."""
        return median([alone / own for alone, own in zip(self.seconds[_ALONE], self.seconds[name], strict=True)])

    def more(self, name: str) -> float:
        """Seconds that levels take more, the median over prompts."""
        return median([own - alone for alone, own in zip(self.seconds[_ALONE], self.seconds[name], strict=True)])


def call(
    model: PreTrainedModel, ids: torch.Tensor, levels: list[Any], tokens: int, clock: Callable[[], float]
) -> tuple[float, torch.Tensor]:
    begin = clock()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), assistant_models=levels, max_new_tokens=tokens,
                         do_sample=False, eos_token_id=None, pad_token_id=0)  # fmt: skip
    if ids.device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - begin, out


def take_turns(
    model: PreTrainedModel, prompts: list[torch.Tensor], contenders: dict[str, list[Any]], tokens: int, repeats: int,
    clock: Callable[[], float],
) -> Turns:
    """So many calls of every contender, behind those from which they learn."""
    found, names = Turns(), list(contenders)
    found.seconds, found.plans = {name: [] for name in names}, {name: Counter() for name in names}
    for turn in range(-_TO_LEARN, repeats):
        ids, written = prompts[turn % len(prompts)], []
        for place in range(len(names)):
            name = names[(place + turn) % len(names)]
            seconds, out = call(model, ids, contenders[name], tokens, clock)
            written.append(out)
            if turn >= 0:
                found.seconds[name].append(seconds)
                told = hf_mlspec.last_stats(model).plans
                found.plans[name].update({words: plan.rounds for words, plan in told.items()})
        found.differing += not all(torch.equal(one, other) for one, other in pairwise(written))
    return found


def table() -> Table:
    return Table("new tokens", "levels", "alone ms", "with levels ms", "more ms", "auto / alone", "plans")


def add_rows(out: Table, tokens: int, found: Turns) -> None:
    for name in found.seconds:
        if name != _ALONE:
            own, alone = (f"{1e3 * median(found.seconds[one]):.2f}" for one in (name, _ALONE))
            plans = ", ".join(f"{words} ({rounds})" for words, rounds in found.plans[name].most_common(3))
            more, ratio = f"{1e3 * found.more(name):+.2f}", f"{found.ratio(name):.3f}"
            out.add_row(str(tokens), name, alone, own, more, ratio, plans)


@contextmanager
def timed(names: tuple[str, ...], spent: dict[str, float]) -> Iterator[None]:
    """Inside, the seconds in these methods of controllers are added up, and as "waited" those of choices beyond a
    round that is expected to run meanwhile."""
    before = {name: getattr(Controller, name) for name in names}

    def watched(name: str) -> Callable[..., Any]:
        def run(*given: Any, **options: Any) -> Any:
            round_seconds, begin = given[0].forecast.seconds, perf_counter()
            try:
                return before[name](*given, **options)
            finally:
                took = perf_counter() - begin
                spent[name] += took
                spent["waited"] += max(took - round_seconds, 0.0) if name == "choose" else 0.0

        return run

    try:
        for name in names:
            setattr(Controller, name, watched(name))
        yield
    finally:
        for name, method in before.items():
            setattr(Controller, name, method)


def choosing(model: PreTrainedModel, prompts: list[torch.Tensor], contenders: dict[str, list[Any]], rows: int,
             tokens: int, repeats: int) -> Table:  # fmt: skip
    """What choosing takes of the rounds of calls of so many rows, all together, behind those from which they learn."""
    on_device = model.device.type == "cuda"
    out = Table("rows", "new tokens", "levels", "choosing %", "beyond a round %", "telling %", "goal")
    told = ("observe", "observe_off", "observe_inner")
    for name, levels in contenders.items():
        taken, seconds = dict.fromkeys(("choose", *told, "waited"), 0.0), 0.0
        for turn in range(-_TO_LEARN, repeats):
            spent: dict[str, float] = dict.fromkeys(("choose", *told, "waited"), 0.0)
            ids = prompts[turn % len(prompts)].repeat(rows, 1)
            with timed(("choose", *told), spent):
                call(model, ids, levels, tokens, perf_counter)
            if turn >= 0:
                seconds += hf_mlspec.last_stats(model).seconds
                taken = {one: before + spent[one] for one, before in taken.items()}
        telling = sum(taken[one] for one in told)
        chosen, waited, telling = (100 * one / seconds for one in (taken["choose"], taken["waited"], telling))
        met = (waited if on_device else chosen + telling) <= 1
        out.add_row(str(rows), str(tokens), name, *(f"{share:.2f}" for share in (chosen, waited, telling)),
                    "met" if met else "missed")  # fmt: skip
    return out


def read(args: argparse.Namespace) -> tuple[PreTrainedModel, list[torch.Tensor], dict[str, list[Any]]]:
    """The target, prompts, and what stands below the target in each contender."""
    folders = hf_mlspec.demo_pair() if args.target is None else (args.target, args.draft)
    how = {"dtype": getattr(torch, args.dtype), "device_map": args.device}
    target, draft = (AutoModelForCausalLM.from_pretrained(folder, **how).eval() for folder in folders)
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    told = json.loads((Path(hf_mlspec.demo_pair()[0]).parent / "prompts.json").read_text(encoding="utf-8"))
    prompts = [tokenizer(one["text"], return_tensors="pt").input_ids.to(args.device) for one in told]
    return target, prompts, {_ALONE: [], "draft": [draft], "mxfp4 and draft": ["mxfp4", draft]}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_call", description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="a folder; without one, the demo pair")
    parser.add_argument("--draft", help="a folder, of the same vocabulary")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--thread-time", action="store_true", help="of one thread on a CPU, where other programs run")
    parser.add_argument("--choosing", type=int, nargs="+", metavar="ROWS", help="the share of choosing, by rows")
    args = parser.parse_args(argv)
    if (args.target is None) != (args.draft is None):
        parser.error("--target and --draft go together")
    clock = thread_time if args.thread_time else perf_counter
    torch.set_num_threads(args.threads)
    target, prompts, contenders = read(args)
    if args.choosing:
        del contenders[_ALONE]
        for rows in args.choosing:
            for tokens in args.tokens:
                Console(width=150).print(choosing(target, prompts, contenders, rows, tokens, args.repeats))
        return 0
    out, differing = table(), 0
    alone = {_ALONE: contenders.pop(_ALONE)}
    groups = [{name: below} for name, below in contenders.items()] if args.device != "cpu" else [contenders]
    for tokens in args.tokens:
        for group in groups:
            found = take_turns(target, prompts, alone | group, tokens, args.repeats, clock)
            differing += found.differing
            add_rows(out, tokens, found)
    Console(width=150).print(out)
    print(f"calls whose ids differ: {differing}")
    return int(differing > 0)


if __name__ == "__main__":
    raise SystemExit(main())
