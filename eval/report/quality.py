"""What do the lines say about quality: scores, fidelity, perplexities, probabilities? Markdown tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from eval.records.markdown import count, distinct, fixed, groups, percent, table

Row = dict[str, Any]
PAPER_ORDER = ("w16a16", "w4a16", "qspec", "w4a8", "w4a4")  # of QSpec's Table 3; chains follow


def in_paper_order(labels: list[str]) -> list[str]:
    """W16A16, W4A16, QSpec, W4A4, then the others as they came."""
    def place(label: str) -> int:
        word = re.split(r"[^a-z0-9]", label.lower())[0]
        return PAPER_ORDER.index(word) if word in PAPER_ORDER else len(PAPER_ORDER)

    return sorted(labels, key=place)


def tasks(rows: list[Row]) -> Iterator[str]:
    """A row per system, a column per task and metric; another number of items is another column."""
    columns = distinct([{"c": (row["task"], row["metric"], row["items"])} for row in rows], "c")
    cells = {(row["label"], row["task"], row["metric"], row["items"]): row for row in rows}
    head = ["system", *(f"{task}, {metric}" + (f" ({items} items)" if items is not None else "")
                        for task, metric, items in columns)]
    labels = in_paper_order(distinct(rows, "label"))
    yield table(head, ([label, *(_score(cells.get((label, *column))) for column in columns)] for label in labels))
    yield "Scores with their standard errors.\n"
    compared = [row for row in rows if row["identical_items"] is not None]
    if compared:
        yield table(["system", "task", "items", "identical to the target alone", "seconds"],
                    ([row["label"], row["task"], row["items"], count(row["identical_items"]), count(row["seconds"])]
                     for row in _once(compared)), left=2)


def _once(rows: list[Row]) -> list[Row]:
    """A row a system and task: its metrics share their items."""
    return [found[0] for _, found in groups(rows, "label", "task", "items")]


def _score(row: Row | None) -> str | None:
    if row is None:
        return None
    error = "" if row["stderr"] is None else f" ± {_short(row['stderr'])}"
    return _short(row["value"]) + error


def _short(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.2f}"


def fidelity(rows: list[Row]) -> Iterator[str]:
    """A table per reference: the share of prompts written to the last token as the reference writes them."""
    for (reference, tokens), found in groups(rows, "reference", "max_new_tokens"):
        data = distinct(found, "data")
        cells = {(row["label"], row["data"]): row for row in found}
        length = "" if tokens is None else f", {tokens:.0f} new tokens"
        yield (f"Prompts whose ids equal those of {reference}{length}; in brackets the mean place of the first "
               "difference.\n")
        yield table(["system", *data, "tokens compared"], (
            [label, *(_equal(cells.get((label, name))) for name in data),
             count(sum(row["tokens"] or 0 for row in found if row["label"] == label) or None)]
            for label in in_paper_order(distinct(found, "label"))))


def _equal(row: Row | None) -> str | None:
    if row is None or not row["prompts"]:
        return None
    first = row["mean_first_difference"]
    text = f"{percent(row['equal'] / row['prompts'])} ({row['equal']} of {row['prompts']}"
    return text + (")" if first is None else f"; {first:.1f})")


def lossless(rows: list[Row]) -> Iterator[str]:
    yield table(["chain", "data", "batch", "prompts", "tokens compared", "prompts that differ"], (
        [label, data, batch, count(sum(row["prompts"] for row in found)),
         count(sum(row["tokens"] for row in found)), count(sum(row["differing"] for row in found))]
        for (label, data, batch), found in groups(rows, "label", "data", "batch")), left=2)


def perplexity(rows: list[Row]) -> Iterator[str]:
    labels = in_paper_order(distinct(rows, "label"))
    ordered = [row for label in labels for row in rows if row["label"] == label]
    yield table(["system", "data", "tokens", "token perplexity", "word perplexity", "bits per byte"], (
        [row["label"], row["data"], count(row["tokens"]), fixed(row["token_perplexity"], 3),
         fixed(row["word_perplexity"], 3), fixed(row["bits_per_byte"], 4)] for row in ordered), left=2)


def probabilities(rows: list[Row]) -> Iterator[str]:
    yield table(["system", "against", "data", "tokens", "Pearson's r"], (
        [row["label"], row["reference"], row["data"], count(row["tokens"]), fixed(row["pearson_r"], 4)]
        for row in rows), left=3)


def pairs(rows: list[Row]) -> Iterator[str]:
    """Both drafts' acceptance, their difference, and its lower bound."""
    yield table(["target", "data", "draft", "against", "prompts", "tokens", "acceptance", "of the other", "difference",
                 "lower bound", "required"], (
        [row["label"], row["data"], " ".join(_nested_word(row["draft"], row)), _nested_word(row["against"], row)[0],
         row["prompts"], count(row["tokens"]), fixed(row["acceptance"], 4), fixed(row["acceptance_against"], 4),
         fixed(row["difference"], 4), fixed(row["lower_bound"], 4), fixed(-row["margin"], 4)] for row in rows), left=4)
    yield ("Acceptance of every token on the target's own text; the bound holds at 95 %, one-sided, by a bootstrap "
           "over prompts.\n")


def _nested_word(word: str, row: Row) -> list[str]:
    return [word, row["codebook"]] if word.startswith("nested") else [word]


def nested(rows: list[Row]) -> Iterator[str]:
    """Escapes, bytes, and how far each draft is from the weights."""
    drafts = list(dict.fromkeys(draft for row in rows for draft in row["errors"]))
    yield table(["model", "", "weights", "escapes", "bytes / BF16", "at run time", *drafts, "same bits"], (
        [row["label"], row["tensor"], count(row["weights"]), count(row["escapes"]), fixed(row["bytes_ratio"], 4),
         fixed(row["run_time_ratio"], 4), *(fixed(row["errors"].get(draft), 4) for draft in drafts),
         "yes" if row["identical"] else "**no**"] for row in rows), left=2)
    yield "Relative error of the draft by codebook: sqrt(sum (w - d)^2 / sum w^2).\n"
