"""What do routed planes cost and keep, in the form of QAQ's Table 1: quality, latency and memory of five systems?

    python -m eval.routing.table --model FOLDER/code-21m --router router.safetensors --data FOLDER
    python -m eval.routing.table --quick

BF16, static 8 and 4 planes, and planes that the router picks, all in memory or streamed on a budget. WikiText-2 is
read in windows whose first half is the query and whose other half is scored; of PIQA's items the question is the
query, of WinoGrande's the text up to the option. Answers are compared by the sum of their tokens' log probabilities.
Of GSM8K the question is the query: the perplexity of its worked answer, and the share of questions behind which the
last number that the model writes is right. All but these shares is measured module by module. Seconds: of the
processor on a CPU, of the clock on a GPU; a pass is that over WikiText-2, the first token and the others are those of
generate. Memory: of weights on the device.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_mlspec
from eval.records import machine
from eval.sources import read_texts
from hf_mlspec.evaluation.tasks.choices import (
    HELLASWAG,
    arc_challenge,
    arc_easy,
    arc_sources,
    hellaswag,
    piqa,
    winogrande,
)
from hf_mlspec.evaluation.tasks.generation import gsm8k
from hf_mlspec.evaluation.tasks.scoring import number
from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.routing.blocks import blocks_of
from hf_mlspec.routing.passes import Routed
from hf_mlspec.routing.router import Router

_PROMPT = 64  # tokens of a prompt that is timed
_MADE = "A quiet street, and a dog that sleeps in front of the baker's door until noon. "


class Item(NamedTuple):
    """Answers as (query, what follows it), in ids, and which one is right."""

    answers: list[tuple[list[int], list[int]]]
    gold: int


class Question(NamedTuple):
    """Of GSM8K, in ids: the question and its worked answer; the answer as it is written."""

    ids: list[int]
    answer: list[int]
    written: str


class System(NamedTuple):
    """A way to compute. bits: what the switch says, or None. router: what picks, or None."""

    name: str
    model: Any
    bits: str | None = None
    router: Router | None = None

    def under(self, query: int, rows: int) -> AbstractContextManager:
        """A pass of rows whose first so many tokens are the query."""
        if self.router is not None:
            return Routed(self.router, blocks_of(self.model), [query] * rows).over(self.model)
        return nullcontext() if self.bits is None else hf_mlspec.precision_switch(self.model).at(self.bits)

    @torch.no_grad()
    def nats(self, rows: Tensor, query: int) -> Tensor:
        """int64 ``[rows, tokens]`` -> float32 ``[rows]``: of all that follows the query."""
        with self.under(query, len(rows)):
            logits = self.model(input_ids=rows, use_cache=False).logits[:, query - 1 : -1].float()
        return -F.log_softmax(logits, -1).gather(-1, rows[:, query:, None])[..., 0].sum(-1)

    def held(self) -> int:
        """Bytes of weights on the device; of static planes those that are read."""
        planes = [own for own in self.model.modules() if isinstance(own, PlanesLinear)]
        inside = {id(one) for own in planes for one in own.parameters()}
        rest = sum(one.nbytes for one in self.model.parameters() if id(one) not in inside)
        if planes and planes[0].source is not None:
            return rest + planes[0].source.used
        share = int(self.bits.removeprefix("planes")) / 8 if self.bits else 1.0
        for own in planes:
            parts = own.packed_weight()
            rest += int(parts.weight_planes.nbytes * share) + parts.weight_scale.nbytes
        return rest


def seconds_of(device: torch.device) -> Callable[[], float]:
    """The clock by which systems are compared."""
    if device.type == "cpu":
        return time.process_time

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def items_of(found: Sequence[dict[str, Any]], tokenizer: Any, count: int) -> list[Item]:
    """Of lm-eval's items, spread over all."""
    items = []
    for place in range(min(count, len(found))):
        item = found[place * len(found) // min(count, len(found))]
        pairs = [(item["prompt"], f" {choice}") for choice in item["choices"]] if "prompt" in item else [
            (choice, f" {item['continuation']}") for choice in item["choices"]]  # fmt: skip
        ids = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"] for text in pair) for pair in pairs]
        if all(query and after for query, after in ids):
            items.append(Item(ids, item["gold"]))
    return items


def accuracy(system: System, items: list[Item], device: torch.device) -> float:
    """Share of items whose right answer is the likeliest."""
    right = 0
    for item in items:
        nats = [
            float(system.nats(torch.tensor([query + after], device=device), len(query)))
            for query, after in item.answers
        ]
        right += min(range(len(nats)), key=nats.__getitem__) == item.gold
    return right / max(len(items), 1)


def questions_of(data: str, tokenizer: Any, count: int) -> list[Question]:
    """Of GSM8K's test set, the first so many."""
    items, found = gsm8k(data)["test"] if count else [], []
    for item in (items[n] for n in range(min(count, len(items)))):
        texts = item["prompt"], f" {item['target']}"
        ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        found.append(Question(*ids, item["target"]))
    return found


def worked(system: System, questions: list[Question], device: torch.device) -> float:
    """Perplexity of the worked answers."""
    rows = [(torch.tensor([own.ids + own.answer], device=device), len(own.ids)) for own in questions]
    nats = sum(float(system.nats(*row)) for row in rows)
    return math.exp(nats / sum(len(own.answer) for own in questions))


def right_numbers(system: System, questions: list[Question], tokenizer: Any, args: argparse.Namespace) -> float:
    """Share of questions behind which the last number that is written, greedily, is right. Of a routed system its
    model is to be routed."""
    right = 0.0
    for own in questions:
        ids = torch.tensor([own.ids], device=args.device)
        out = system.model.generate(ids, max_new_tokens=args.answer_tokens, do_sample=False, assistant_models=[])
        text = tokenizer.decode(out[0, len(own.ids) :], skip_special_tokens=True).partition("Question:")[0]
        right += number({"target": own.written}, [text])["flexible_match"]
    return right / len(questions)


def windows_of(text: str, tokenizer: Any, args: argparse.Namespace) -> Tensor:
    """int64 ``[windows, tokens]``, spread over a text. ValueError for one that is too short."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    count = min(args.windows, len(ids) // args.tokens)
    if not count:
        raise ValueError(f"a text of {len(ids)} tokens has no window of {args.tokens}: give a longer one")
    step = len(ids) // args.tokens // count * args.tokens
    return torch.tensor([ids[n * step : n * step + args.tokens] for n in range(count)], device=args.device)


def tasks_of(data: str, tokenizer: Any, count: int) -> dict[str, list[Item]]:
    """PIQA and WinoGrande, and ARC and HellaSwag where their files are."""
    reads = {"piqa": piqa, "winogrande": winogrande}
    for name, read, source in (("arc_easy", arc_easy, arc_sources("ARC-Easy")["test"]),
                               ("arc_challenge", arc_challenge, arc_sources("ARC-Challenge")["test"]),
                               ("hellaswag", hellaswag, HELLASWAG["test"])):  # fmt: skip
        if source.find(Path(data)) is not None:
            reads[name] = read
    return {name: items_of(read(data)["test"], tokenizer, count) for name, read in reads.items()}


def perplexity(system: System, windows: Tensor) -> float:
    """Of the second half of each window, behind the first."""
    query = windows.shape[1] // 2
    nats = torch.cat([system.nats(part, query) for part in windows.split(8)])
    return float((nats.mean() / (windows.shape[1] - query)).exp())


def measured(
    system: System, windows: Tensor, tasks: dict[str, list[Item]], args: argparse.Namespace, ptb: Tensor | None = None,
    questions: Sequence[Question] = (), tokenizer: Any = None,
) -> dict:  # fmt: skip
    """A line of the table."""
    now = seconds_of(args.device)
    begin = now()
    found = {"name": system.name, "perplexity": perplexity(system, windows), "pass_s": now() - begin}
    if ptb is not None:
        found["ptb"] = perplexity(system, ptb)
    found |= {name: accuracy(system, items, args.device) for name, items in tasks.items()}
    if questions:
        found["gsm8k_answers"] = worked(system, questions, args.device)
    if system.router is not None:
        hf_mlspec.route(system.model, system.router)
    times = {}
    with nullcontext() if system.bits is None else hf_mlspec.precision_switch(system.model).at(system.bits):
        if questions:
            found["gsm8k"] = right_numbers(system, questions, tokenizer, args)
        for tokens in (1, 1 + args.new_tokens):
            taken = []
            for row in windows[: args.repeats + 1, :_PROMPT]:
                begin = now()
                system.model.generate(row[None], max_new_tokens=tokens, do_sample=False, eos_token_id=None,
                                      pad_token_id=0, assistant_models=[])  # fmt: skip
                taken.append(now() - begin)
            times[tokens] = min(taken[1:])
    if system.router is not None:
        hf_mlspec.route(system.model, None)
    each = (times[1 + args.new_tokens] - times[1]) / args.new_tokens
    return found | {"first_token_ms": times[1] * 1e3, "token_ms": each * 1e3, "held_mb": system.held() / 1e6}


def systems(args: argparse.Namespace) -> Iterator[System]:
    """One after the other: the last one streams."""
    how = {"dtype": torch.bfloat16, "device_map": str(args.device)}
    yield System("BF16", AutoModelForCausalLM.from_pretrained(args.model, **how).eval())
    planes = hf_mlspec.MLSpecConfig(format="planes", group_size=args.group_size)
    model = AutoModelForCausalLM.from_pretrained(args.model, quantization_config=planes, **how).eval()
    router = args.router and Router.load(args.router, blocks_of(model))
    if router is None:
        rows = torch.randint(3, model.config.vocab_size, (8, 16), device=args.device)
        router = hf_mlspec.train_router(model, model, rows, hf_mlspec.RouterRecipe(4.5, steps=2, batch=4)).router
    static = System("static 8", model, "planes8")
    yield static
    yield System("static 4", model, "planes4")
    yield System("routed, all in memory", model, None, router)
    whole = static.held()
    dense = whole - sum(own.packed_weight().weight_planes.nbytes + own.packed_weight().weight_scale.nbytes
                        for own in model.modules() if isinstance(own, PlanesLinear))  # fmt: skip
    hf_mlspec.clear(model)
    hf_mlspec.stream_planes(model, max(1, int((whole - dense) * args.share)), top_planes=args.top_planes)
    yield System("routed, loaded on demand", model, None, router)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m eval.routing.table", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", metavar="FOLDER", help="dense (default: the demo target, with --quick)")
    parser.add_argument("--router", metavar="FILE", help="what mlspec route train wrote (--quick: one made here)")
    parser.add_argument("--data", metavar="FOLDER", help="with wikitext2, piqa, winogrande, gsm8k; arc and hellaswag "
                        "if you have them (tasks/README.md)")
    parser.add_argument("--ptb", type=Path, metavar="FILE", help="PTB's test text: its perplexity, too")
    parser.add_argument("--quick", action="store_true", help="the demo target and a made text: shows that it runs")
    numbers = {"items": 100, "answers": 20, "answer_tokens": 96, "windows": 64, "tokens": 128, "new_tokens": 32,
               "repeats": 3, "group_size": 128, "top_planes": 4}  # fmt: skip
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, metavar="N")
    parser.add_argument("--share", type=float, default=0.75, help="of the planes' bytes, the budget (%(default)s)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the lines, too")
    return parser


def main(words: list[str] | None = None) -> int:
    args = parser().parse_args(words)
    if args.quick:
        args.model, args.group_size = args.model or str(hf_mlspec.demo_pair()[0]), 32
    elif not (args.model and args.router and args.data):
        raise SystemExit("table: give --model, --router and --data, or --quick")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    text = _MADE * 400 if args.quick else "\n".join(read_texts(Path(args.data) / "wikitext2" / "test.txt"))
    windows = windows_of(text, tokenizer, args)
    ptb = args.ptb and windows_of("\n".join(read_texts(args.ptb)), tokenizer, args)
    tasks = {} if args.quick else tasks_of(args.data, tokenizer, args.items)
    questions = [] if args.quick else questions_of(args.data, tokenizer, args.answers)
    lines = [{"name": "machine", **machine.card(str(args.device))}]
    table = Table(title="routed planes", title_justify="left")
    for system in systems(args):
        lines.append(measured(system, windows, tasks, args, ptb, questions, tokenizer))
        print(json.dumps(lines[-1]), flush=True)
    for key in lines[1]:
        table.add_column(key)
    for one in lines[1:]:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in one.values()))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(lines, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
