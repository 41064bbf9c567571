"""What did a GPU benchmark find, as one Markdown document? A table a group, targets beside what was measured."""

from __future__ import annotations

from typing import Any

from eval.records.markdown import distinct, table

TITLES = {
    "linear": "Matrix products (share of the read bandwidth)",
    "step": "A captured step (share of the read bandwidth)",
    "chain": "Chains of random weights through captured rounds, acceptance replayed from recorded traces",
    "pair": "A real pair, batch 1",
    "exact": "Chains against the target alone: prompts that differ",
    "qspec": "QSpec: one int4 model at several activation widths",
    "formats": "Products of nested weights and bit-planes (share of the read bandwidth)",
    "lut": "Products of lookup-table planes beside int4 (share of the read bandwidth)",
    "experts": "Mixtures of experts, a captured step and prompts (share of the read bandwidth)",
    "hybrid": "Gated delta nets in three layers of four: captured steps and prompts, and a real model",
    "hybrid_chain": "A hybrid with all its layers: steps, tokens that are run again, replayed chains",
    "ordered": "Steps of an int4 model with an order of inputs (act-order) over those without",
    "nested": "A nested target beside a plain one with a separate MXFP4 draft",
    "planes": "A target in 8 bit-planes, batch 1",
    "nested_exact": "A nested target against the plain one: prompts that differ",
    "startup": "Start-up",
    "attention": "A layer's attention, 8B shape: rows x tokens at slots (share of the read bandwidth)",
    "transforms": "A captured step with outliers, ordered and rotated inputs over int4 in groups of 128",
}


def document(
    lines: list[dict[str, Any]], missing: dict[str, str], failures: dict[str, str], probe: float | None
) -> str:
    """The lines of `Finding.to_dict` group by group, then what took no part and what failed."""
    parts = []
    if probe is not None:
        parts.append(f"Read bandwidth in this process: {probe / 1e12:.2f} TB/s (float32 sum).\n")
    for group in distinct(lines, "group"):
        parts += [f"### {TITLES[group]}\n", group_table([line for line in lines if line["group"] == group])]
    parts += [f"- no part taken: {reason}" for reason in missing.values()]
    parts += [f"- **{group} failed**: {' '.join(reason.split())}" for group, reason in failures.items()]
    return "\n".join(parts)


def group_table(lines: list[dict[str, Any]]) -> str:
    """A row a `what`, a column a contender; a cell holds value and share, and a target where there is one."""
    contenders = distinct(lines, "contender")
    found = {(line["what"], line["contender"]): line for line in lines}
    rows = [[what, *(shown(found.get((what, name))) for name in contenders)] for what in distinct(lines, "what")]
    return table(["", *contenders], rows)


def shown(line: dict[str, Any] | None) -> str | None:
    if line is None:
        return None
    text = f"{line['value']:.{digits(line['value'])}f} {line['unit']}".rstrip()
    if line["share"] is not None:
        text += f" ({line['share']:.2f})"
    if line["target"] is not None:
        sign = ">=" if line["at_least"] else "<="
        text += f"; {sign} {line['target']:g}: {'met' if line['met'] else 'MISSED'}"
    return text


def digits(value: float) -> int:
    """Three or four significant ones, none behind the point of large numbers and of counts."""
    if value == int(value) or abs(value) >= 1000:
        return 0
    return 1 if abs(value) >= 20 else 2 if abs(value) >= 1 else 3
