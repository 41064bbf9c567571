"""Does every chain write the ids of the target alone on the GPU, whatever the batch? Counted prompt by prompt.

The reference is the target alone, captured, at the largest batch: the other batches of the target alone are compared
with it as well, so that a number of prompts without a difference also says that ids do not depend on the batch.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

import hf_mlspec
from eval.bench_gpu.decoding import counts_of
from eval.bench_gpu.findings import Bench, Finding
from eval.bench_gpu.models import real_model
from eval.bench_gpu.prompts import folders, texts, tokenizer_of
from eval.rows import padded

NEW_TOKENS = 256
BATCHES = (32, 8, 1)  # the first makes the reference
SECONDS_AT_ONE = 10.0  # a case at batch 1 stops taking prompts after so long


class Differences(Exception):
    """Chains that do not write what their target alone writes; its text names each and its first prompts."""


@dataclass(frozen=True)
class Case:
    """A target and one chain of levels over it; name: how the table calls it."""

    name: str
    levels: list[Any]
    config: dict[str, Any]


def exact(bench: Bench) -> Iterator[Finding]:
    """All chains over the BF16 target, then QSpec over its int4 form; Differences at the end where there were any."""
    folder, draft_folder = folders(bench)
    prompts = [text for found in texts(bench).values() for text in found]
    tokenizer, wrong = tokenizer_of(folder), []
    draft = real_model(draft_folder, bench.device)
    dense = [Case("alone", [], {}), Case("[draft]", [draft], {"num_draft_tokens": 5}),
             Case('["mxfp4"]', ["mxfp4"], {"num_draft_tokens": 8}),
             Case('["mxfp4", draft]', ["mxfp4", draft], {"num_draft_tokens": [8, 3]})]
    packed = [Case("w4a16 alone", [], {}), Case('["w4a8"]', ["w4a8"], {"num_draft_tokens": 3})]
    for quantized, cases in ((False, dense), (True, packed)):
        model = real_model(folder, bench.device, quantized)
        yield from of_target(bench, (model, tokenizer), prompts, cases, wrong, {})
        del model
        bench.free()
    if wrong:
        raise Differences("; ".join(wrong))


def of_target(
    bench: Bench, subject: tuple[PreTrainedModel, Any], prompts: list[str], cases: list[Case], wrong: list[str],
    reference: dict[int, list[int]], batches: tuple[int, ...] = BATCHES, group: str = "exact",
) -> Iterator[Finding]:
    """Every case at every batch against `reference`, new ids by number of the prompt; an empty one is filled by the
    first case at the first batch, which is to be a target alone. wrong: gets a sentence for a case that differs."""
    rows = [list(subject[1](text).input_ids) for text in prompts]
    for batch in tuple(dict.fromkeys(min(size, 2) for size in batches)) if bench.quick else batches:
        for case in cases:
            begin = time.perf_counter()
            found = _decoded(bench, subject[0], rows, case, batch)
            seconds = time.perf_counter() - begin
            makes_it = not reference
            reference |= found if makes_it else {}
            differing = sorted(number for number, ids in found.items() if ids != reference[number])
            if differing:
                wrong.append(f"{case.name}, batch {batch}: {len(differing)} of {len(found)} prompts differ, first "
                             f"{differing[:4]}")
            tokens = sum(map(len, found.values()))
            name, target = (f"{case.name}: the reference", None) if makes_it else (case.name, 0.0)
            yield Finding(group, name, f"batch {batch}", len(differing), f"of {len(found)}", target,
                          more={"batch": batch, "prompts": len(found), "of": len(rows), "tokens": tokens,
                                "seconds": seconds, "reference": makes_it, "differing": differing[:32],
                                **({} if case.levels == [] else counts_of(hf_mlspec.last_stats(subject[0])))})


def _decoded(
    bench: Bench, model: PreTrainedModel, rows: list[list[int]], case: Case, batch: int
) -> dict[int, list[int]]:
    """Number of a prompt -> its new ids up to its end; at batch 1 as many prompts as the time allows, of all files."""
    order, found, begin = list(range(len(rows))), {}, time.perf_counter()
    random.Random(0).shuffle(order)
    for start in range(0, len(order), batch):
        if batch == 1 and time.perf_counter() - begin > SECONDS_AT_ONE:
            bench.say(f"exact: {case.name}, batch 1: {len(found)} of {len(rows)} prompts in the time there is")
            break
        numbers = order[start : start + batch]
        inputs = padded([rows[number] for number in numbers], bench.device)
        written = model.generate(
            **inputs, max_new_tokens=12 if bench.quick else NEW_TOKENS, do_sample=False, pad_token_id=0,
            assistant_models=case.levels, speculation_config=case.config or None,
        )[:, inputs["input_ids"].shape[1] :].tolist()
        found |= {number: until_end(ids, ends_of(model)) for number, ids in zip(numbers, written, strict=True)}
    return found


def ends_of(model: PreTrainedModel) -> list[int]:
    """Ids that end a row."""
    found = model.generation_config.eos_token_id
    return [] if found is None else [found] if isinstance(found, int) else list(found)


def until_end(ids: list[int], ends: list[int]) -> list[int]:
    """Up to the first end, included; what follows is padding."""
    return ids[: next((at + 1 for at, id in enumerate(ids) if id in ends), len(ids))]
