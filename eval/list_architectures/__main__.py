"""Which causal language models of transformers run how? A row a class, for docs/guide/architectures.md.

python -m eval.list_architectures --write docs/guide/architectures.md

A class with a description is compiled, on a CPU and on a GPU where no field of it says otherwise. Of a class in
`small.SETTINGS` a small random model is run: chains over four rows have to write what transformers' generate writes of
each, or the program ends with the name of the class. Of every other class a model is made on the meta device and asked
what a chain needs: ids in and logits out, and rows at positions of their own, or a state that can be copied.
"""

from __future__ import annotations

import argparse
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_mlspec
from hf_mlspec.engines.architecture import KNOWN
from hf_mlspec.engines.architecture.description import not_served
from hf_mlspec.engines.architecture.families.wrappers import WRAPPERS
from hf_mlspec.engines.modules.states import attends_by_itself, keeps_state, row_by_row
from hf_mlspec.integration.request import check_model

from .small import PAD, SETTINGS, VOCAB, small

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
HEADER = ("Class", "Alone", "Chain", "Why not faster")
COMPILED, ON_THE_CPU = "compiled", "compiled on the CPU"
BY_MODULE, REFUSED = "module by module", "refused"
LENGTHS, NEW, CHAINS = (12, 9, 5, 1), 20, ([], ["prompt_lookup"], ["mxfp4"])
NO_DESCRIPTION = "it has no description"
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")


@dataclass(frozen=True)
class Row:
    """alone: the engine of a prepared model; chain: that of one as a target, or REFUSED."""

    name: str
    alone: str
    chain: str
    why: str

    def line(self) -> str:
        return f"| `{self.name}` | {self.alone} | {self.chain} | {self.why} |"


def classes() -> dict[str, str]:
    """Model type of every class, the first that names it."""
    found: dict[str, str] = {}
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        found.setdefault(name, kind)
    return dict(sorted(found.items()))


def described(name: str) -> Row | None:
    """The row of a class that has a description."""
    inside = [KNOWN[one] for one in WRAPPERS.get(name, {}).values()]
    own = inside or [KNOWN[name]] if inside or name in KNOWN else []
    if not own:
        return None
    beside = "prompts of text alone" if inside else ""
    why = [not_served(entry, "cuda") for entry in own]
    if all(why):
        return Row(name, ON_THE_CPU, ON_THE_CPU, "; ".join(filter(None, (beside, f"its description says {why[0]}"))))
    return Row(name, COMPILED, COMPILED, beside)


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask int64 `[4, 12]` of rows of mixed lengths, padded on the left."""
    ids = torch.randint(3, VOCAB, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    mask = torch.stack([torch.arange(max(LENGTHS)) >= max(LENGTHS) - length for length in LENGTHS]).long()
    return torch.where(mask.bool(), ids, PAD), mask


def ran(name: str, kind: str) -> Row:
    """The row of a class of SETTINGS without a description. RuntimeError where a chain or a prepared model writes
    other ids than transformers does of each prompt alone."""
    model = small(name, kind)
    try:
        check_model(model, "it")
    except (TypeError, ValueError) as error:
        return Row(name, "stock", REFUSED, _said(str(error), name))
    ids, mask = prompts()
    how = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    stock = [
        # A copy, because some classes leave a state behind in their modules.
        copy.deepcopy(model).generate(ids[r : r + 1, -length:], attention_mask=mask[r : r + 1, -length:], **how)[0]
        for r, length in enumerate(LENGTHS)
    ]
    for levels in (*CHAINS, None):
        given = {"assistant_models": levels, "speculation_config": {"num_draft_tokens": 4}}
        if levels is None:
            given = {}
            hf_mlspec.prepare(model)
        found = model.generate(ids, attention_mask=mask, **how, **given)
        for row, own in zip(found, stock, strict=True):
            if not torch.equal(row[-len(own) :], own):
                raise RuntimeError(f"{name} writes other ids with {levels} than transformers without")
    both = ", as a decoder (`is_decoder=True`)" if SETTINGS[name].get("is_decoder") else ""
    return Row(name, BY_MODULE, BY_MODULE, f"{why_row_by_row(model) or NO_DESCRIPTION}{both}")


def why_row_by_row(model: PreTrainedModel) -> str:
    """Why each row of a model takes passes of its own; "" where rows share them."""
    if not row_by_row(model):
        return ""
    for is_so, why in ((keeps_state, "a state"), (attends_by_itself, "an attention of its own")):
        if is_so(model):
            return f"row by row, for {why}"
    return "row by row, for the chunks or windows that its layers see"


def asked(name: str, kind: str) -> Row:
    """The row of a class without one."""
    try:
        config = CONFIG_MAPPING[kind]()
        for entry in _LAYERS:
            if isinstance(getattr(config, entry, None), int):
                _shorten(config, entry)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config).eval()
    except Exception as error:
        return Row(name, BY_MODULE, "not examined", f"no model on the meta device: {type(error).__name__}")
    try:
        check_model(model, "it")
    except (TypeError, ValueError) as error:
        if "meta device" not in str(error):
            return Row(name, "stock", REFUSED, _said(str(error), name))
    return Row(name, BY_MODULE, BY_MODULE, why_row_by_row(model) or NO_DESCRIPTION)


def _shorten(config, entry: str) -> None:
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        setattr(config, entry, 2)


def _said(error: str, name: str) -> str:
    return error.replace(f"it ({name}) ", "").partition(";")[0].partition(": load it")[0].replace("|", "/")


def rows() -> Iterator[Row]:
    for name, kind in classes().items():
        yield described(name) or (ran if name in SETTINGS else asked)(name, kind)


def table(found: list[Row]) -> str:
    counts = Counter(row.chain for row in found)
    summary = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    lines = [f"transformers {transformers.__version__}, {len(found)} classes: {summary}.", ""]
    lines += [f"| {' | '.join(HEADER)} |", "|---|---|---|---|", *(row.line() for row in found)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser("python -m eval.list_architectures", description=__doc__.partition("\n")[0])
    parser.add_argument("--write", type=Path, help="a page whose table is replaced")
    args = parser.parse_args()
    text = table(list(rows()))
    if args.write is None:
        print(text)
        return
    page = args.write.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    if not rest:
        raise SystemExit(f"{args.write} has no line {BEGIN!r} to put the table behind")
    after = rest.partition(END)[2]
    beside = args.write.with_suffix(".new")
    beside.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
    beside.replace(args.write)


if __name__ == "__main__":
    main()
