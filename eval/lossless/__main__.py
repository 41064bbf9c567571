"""Do the chains write what the target alone writes, on HumanEval and GSM8K, at every batch size of a plan?

Decodes every prompt with every chain of a TOML file and holds the ids against the target alone, a batch at a time:

    python -m eval.lossless PLAN.toml --models FOLDER --data FOLDER                # everything, one process
    python -m eval.lossless PLAN.toml --models FOLDER --data FOLDER --shard 0/2    # half of the batches (then 1/2)
    python -m eval.lossless PLAN.toml --models FOLDER --data FOLDER --report       # the table of what is done so far

In the plan (eval/configs/lossless.toml; Python 3.11 or later) {models} and {data} stand for these folders and {demo}
for the demo target; a table [quantize] holds settings of MLSpecConfig, and the target is quantized while it loads (a
kv_cache without a format: the cache alone);
with reference = "plain" the ids are held against those of the model as it is in its folder, another object in memory.
A table [[data]] with `tokens` asks for `count` texts of that length, cut from the file's prompts; with stream = true
they are one stream of as many slots as the batch size, whose requests begin with `shared` equal tokens, held against
the target alone with each of them. `--caches` compares what prompts leave in the target's cache alone and in batches.
Each finished batch is one JSON line under `results/`; a run that is started again goes on where it stopped. What the
target alone wrote is kept there too and decoded once per batch, however many chains follow.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_mlspec
from eval.lossless.contexts import caches, differing, streamed, texts_of
from eval.plans.places import Places
from eval.records.progress import Bars
from eval.records.writer import OTHER_RESULTS
from eval.rows import padded
from hf_mlspec.evaluation import read_prompts, what_changed

TIE = 1e-5  # two float64 logits closer than this are a tie: float32 sums in another order may turn it around


@dataclass(frozen=True)
class Unit:
    """One batch of one data file decoded with one chain."""

    data: str
    batch_size: int
    batch: int
    chain: tuple[str, ...]

    @property
    def reference_key(self) -> tuple[str, int, int]:
        return self.data, self.batch_size, self.batch


def read_plan(path: Path) -> dict[str, Any]:
    """The TOML file; results are kept under its own words, so that folders may move between runs."""
    plan = tomllib.loads(path.read_text(encoding="utf-8"))
    missing = {"name", "target", "dtype", "max_new_tokens", "batch_sizes", "data", "chains"} - set(plan)
    if missing:
        sys.exit(f"{path}: no {', '.join(sorted(missing))}")
    if plan.get("reference", "own") not in ("own", "plain"):
        sys.exit(f'{path}: reference is {plan["reference"]!r}, choose "own", the target alone, or "plain"')
    return plan


def prompts_of(data: dict[str, Any], places: Places, tokenizer: Any) -> list[str]:
    """The prompts of a data set of the plan; exits where its file is not what it must be."""
    file = places.fill(data["file"])
    try:
        found = read_prompts(file, None if "tokens" in data else data["count"])
    except ValueError as error:
        sys.exit(str(error))
    if "tokens" in data:
        found = texts_of(found, tokenizer, data["tokens"], data["count"], data.get("shared", 0))
    if len(found) < data["count"]:
        sys.exit(f"{file} holds {len(found)} prompts, the plan asks for {data['count']}")
    return found


def units(plan: dict[str, Any], shard: int, shards: int) -> Iterator[Unit]:
    """Batches of this shard; all chains of a batch follow one another, so that they share one decode of the target."""
    number = 0
    for batch_size in plan["batch_sizes"]:
        for data in plan["data"]:
            for batch in range(1 if data.get("stream") else -(-data["count"] // batch_size)):
                if number % shards == shard:
                    for chain in plan["chains"]:
                        yield Unit(data["name"], batch_size, batch, tuple(chain))
                number += 1


class Store:
    """Finished batches and what the target alone wrote, as JSON lines; one file per shard, all are read."""

    def __init__(self, folder: Path, plan: dict[str, Any], shard: str) -> None:
        self.file = folder / f"{plan['name']}-{shard.replace('/', '-of-')}.jsonl"
        names = ("target", "dtype", "max_new_tokens", "quantize", "reference", "speculation")
        self.asked = {name: plan[name] for name in names if name in plan}
        self.done: dict[Unit, dict[str, Any]] = {}
        self.references: dict[tuple[str, int, int], list[list[int]]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(folder.glob(f"{plan['name']}-[0-9]*-of-*.jsonl")):  # not of NAME-more
            text = file.read_text(encoding="utf-8")
            if text and not text.endswith("\n"):
                sys.exit(f"{file} ends in the middle of a line, as an interrupted write leaves it: remove that line")
            for line in text.splitlines():
                self._take(json.loads(line), file)

    def _take(self, entry: dict[str, Any], file: Path) -> None:
        if entry["asked"] != self.asked:
            sys.exit(f"{file} holds the results of another plan ({what_changed(entry['asked'], self.asked)}): "
                     f"{OTHER_RESULTS}, or remove this file")
        unit = Unit(entry["data"], entry["batch_size"], entry["batch"], tuple(entry["chain"]))
        self.done[unit] = entry
        if "reference_ids" in entry:
            self.references[unit.reference_key] = entry["reference_ids"]

    def add(self, unit: Unit, found: dict[str, Any]) -> None:
        items = found.pop("items")
        entry = {"asked": self.asked, "data": unit.data, "batch_size": unit.batch_size, "batch": unit.batch,
                 "chain": list(unit.chain), **found,
                 "differences": [{"prompt": unit.batch * unit.batch_size + item["index"], **item["difference"]}
                                 for item in items if item["difference"]]}
        if unit.reference_key not in self.references:
            self.references[unit.reference_key] = [item["reference_ids"] for item in items]
            entry["reference_ids"] = self.references[unit.reference_key]
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(entry) + "\n")
        self.done[unit] = entry


def load(plan: dict[str, Any], folder: str, device: str, *, plain: bool = False) -> PreTrainedModel:
    """The target on the device, quantized there while it loads where the plan says so; `plain`: as in its folder."""
    how = {}
    if "quantize" in plan and not plain:
        how["quantization_config"] = hf_mlspec.MLSpecConfig(**{"format": None, **plan["quantize"]})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, plan["dtype"]), device_map=device, **how)
    return model.eval()


def written_alone(model: PreTrainedModel, tokenizer: Any, prompts: list[str], plan: dict[str, Any]) -> list[list[int]]:
    """The new ids of each prompt, up to its end, by the model alone, in compiled steps where the plan prepares."""
    rows = [tokenizer(prompt).input_ids for prompt in prompts]
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]  # [None] where nothing ends a row
    width, pad = max(map(len, rows)), next(id for id in (tokenizer.pad_token_id, *ends, 0) if id is not None)
    written = model.generate(
        **padded(rows, model.device, pad), max_new_tokens=plan["max_new_tokens"], do_sample=False, pad_token_id=pad,
        assistant_models=[], speculation_config={"prepare": plan.get("prepare", True)})[:, width:].tolist()
    return [row[: next((at + 1 for at, id in enumerate(row) if id in ends), len(row))] for row in written]


def run(plan: dict[str, Any], places: Places, store: Store, shard: int, shards: int, device: str) -> None:
    """Decode what is not done yet."""
    left = [unit for unit in units(plan, shard, shards) if unit not in store.done]
    if not left:
        return
    target = places.fill(plan["target"])
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = {data["name"]: prompts_of(data, places, tokenizer) for data in plan["data"]}
    model, plain = load(plan, target, device), None
    if plan.get("reference") == "plain":
        plain = load(plan, target, device, plain=True)
    streams = {data["name"] for data in plan["data"] if data.get("stream")}
    with Bars() as progress:
        task = progress.add_task(plan["name"], total=len(left))
        for unit in left:
            levels = [places.fill(level) for level in unit.chain]
            decode = _as_stream if unit.data in streams else _in_batch
            found = decode(unit, model, plain, tokenizer, prompts[unit.data], levels, plan, store)
            store.add(unit, found)
            if different := store.done[unit]["differences"]:
                print(f"{unit}: {different}", flush=True)
            progress.advance(task)


def _settings(plan: dict[str, Any]) -> dict[str, Any]:
    return {"prepare": plan.get("prepare", True), **plan.get("speculation", {})}


def _in_batch(unit: Unit, model: PreTrainedModel, plain: PreTrainedModel | None, tokenizer: Any, prompts: list[str],
              levels: list[str], plan: dict[str, Any], store: Store) -> dict[str, Any]:
    """One batch by generate, held against the target alone in the same batch."""
    batch = prompts[unit.batch * unit.batch_size :][: unit.batch_size]
    reference = store.references.get(unit.reference_key)
    if reference is None and plain is not None:
        reference = written_alone(plain, tokenizer, batch, plan)
    return hf_mlspec.compare(
        model, tokenizer, batch, levels, max_new_tokens=plan["max_new_tokens"], batch_size=unit.batch_size,
        speculation_config=_settings(plan), warm_up=False, reference_ids=reference).to_dict()


def _as_stream(unit: Unit, model: PreTrainedModel, plain: PreTrainedModel | None, tokenizer: Any, prompts: list[str],
               levels: list[str], plan: dict[str, Any], store: Store) -> dict[str, Any]:
    """All prompts as one stream, held against the target alone with each of them."""
    reference = next((ids for (data, *_), ids in store.references.items() if data == unit.data), None)
    if reference is None:
        reference = [written_alone(plain or model, tokenizer, [prompt], plan)[0] for prompt in prompts]
    return streamed(model, tokenizer, prompts, levels, max_new_tokens=plan["max_new_tokens"], slots=unit.batch_size,
                    speculation_config=_settings(plan), reference_ids=reference)


def compare_caches(plan: dict[str, Any], places: Places, device: str) -> int:
    """Print, a line per data set, chain and batch size, how many numbers of prompts' caches differ from those of the
    same prompts alone; -> how many do in all."""
    target = places.fill(plan["target"])
    model, tokenizer, total = load(plan, target, device), AutoTokenizer.from_pretrained(target), 0
    print("| chain | data | batch | prompts | numbers compared | differ |\n|---|---|--:|--:|--:|--:|")
    for data in (data for data in plan["data"] if not data.get("stream")):
        texts = prompts_of(data, places, tokenizer)
        rows = [list(tokenizer(text).input_ids[number % 8 :]) for number, text in enumerate(texts)]  # of many lengths
        alone = list(caches(model, rows, 1, [], _settings(plan)))
        for chain in ([], *plan["chains"]):
            for batch_size in plan["batch_sizes"]:
                levels = [places.fill(level) for level in chain]
                found = caches(model, rows, batch_size, levels, _settings(plan))
                pairs = itertools.starmap(differing, zip(alone, found, strict=True))
                compared, differ = map(sum, zip(*pairs, strict=True))
                print(f"| {_names(chain)} | {data['name']} | {batch_size} | {len(rows)} | {compared} | {differ} |",
                      flush=True)
                total += differ
    return total


def report(plan: dict[str, Any], store: Store) -> Iterator[str]:
    """The Markdown table, then each difference with its float64 gap."""
    quantized = "".join(f", {name} {value}" for name, value in plan.get("quantize", {}).items())
    against = ", against the plain model" if plan.get("reference") == "plain" else ""
    yield (f"Target `{Path(plan['target']).name}`, {plan['dtype']}{quantized}{against}, {plan['max_new_tokens']} new "
           f"tokens, greedy; a difference whose float64 gap is below {TIE:g} is a tie.\n")
    yield "| chain | data | batch | prompts | tokens compared | differ | of these ties | acceptance | tokens / pass |"
    yield "|---|---|--:|--:|--:|--:|--:|---|--:|"
    listed = []
    for chain in plan["chains"]:
        for data in plan["data"]:
            for batch_size in plan["batch_sizes"]:
                done = [entry for unit, entry in store.done.items()
                        if (unit.chain, unit.data, unit.batch_size) == (tuple(chain), data["name"], batch_size)]
                if done:
                    yield _row(chain, data, batch_size, done)
                    listed += [(chain, data, batch_size, d) for entry in done for d in entry["differences"]]
    yield f"\n{len(listed)} difference{'s' * (len(listed) != 1)}" + (":" if listed else ".")
    for chain, data, batch_size, d in listed:
        yield (f"- {_names(chain)}, {data['name']}, batch {batch_size}, prompt {d['prompt']}, "
               f"new token {d['position']}: alone {d['expected']}, chain {d['got']}, gap {d['gap']:.2g}, "
               f"in float64 {d['gap_float64']:.2g}")


def _row(chain: list[str], data: dict[str, Any], batch_size: int, done: list[dict[str, Any]]) -> str:
    differences = [d for entry in done for d in entry["differences"]]
    counts = [entry["speculation"] for entry in done]
    accepted = ", ".join(f"{_acceptance([c['levels'][level] for c in counts]):.3f}" for level in range(len(chain)))
    prompts = sum(entry["prompts"] for entry in done)
    whole = f"{prompts}" if prompts == data["count"] else f"{prompts} of {data['count']}"
    passes = sum(c["new_tokens"] for c in counts) / sum(c["row_passes"] for c in counts)
    return (f"| {_names(chain)} | {data['name']} | {batch_size} | {whole} | "
            f"{sum(entry['tokens_compared'] for entry in done)} | {len(differences)} | "
            f"{sum(d['gap_float64'] < TIE for d in differences)} | {accepted} | {passes:.2f} |")


def _acceptance(counts: list[dict[str, Any]]) -> float:
    return sum(c["accepted"] for c in counts) / max(1, sum(c["tested"] for c in counts))


def _names(chain: list[str]) -> str:
    return " <- ".join("demo target" if level == "{demo}" else Path(level).name for level in chain) or "target alone"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.lossless", description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path, help="TOML file: target, chains, data files, batch sizes")
    parser.add_argument("--models", type=Path, default=Path("models"), help="what {models} stands for in the plan")
    parser.add_argument("--data", type=Path, default=Path("data"), help="what {data} stands for in the plan")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="only every N-th batch, from the I-th")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the JSON lines")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="threads of this process; with N shards: cores / N")
    parser.add_argument("--caches", action="store_true", help="compare what prompts leave in caches, and stop")
    parser.add_argument("--report", action="store_true", help="print the Markdown table and stop")
    args = parser.parse_args(argv)
    plan = read_plan(args.plan)
    places = Places.of(args.models, args.data)
    store = Store(args.results, plan, args.shard)
    if args.report:
        print("\n".join(report(plan, store)))
        return 0
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.caches:
        return 1 if compare_caches(plan, places, args.device) else 0
    shard, shards = map(int, args.shard.split("/"))
    run(plan, places, store, shard, shards, args.device)
    return 1 if any(d["gap_float64"] >= TIE for entry in store.done.values() for d in entry["differences"]) else 0


if __name__ == "__main__":
    sys.exit(main())
