"""How were the demo target and its tiny draft made, and how often does a draft choose what the target chooses?

    python -m eval.train_demo_pair --out FOLDER --minutes 4.5 --compile    # the real thing: one GPU, about 8 minutes
    python -m eval.train_demo_pair --out FOLDER --smoke                    # every step, tiny: a CPU, about 2 minutes
    python -m eval.train_demo_pair --out hf_mlspec/demo_pair --measure     # acceptance on held-out text

Writes FOLDER/target, FOLDER/draft (each with the tokenizer), LICENSE-NOTE.md and training.json, which says how many
steps the minutes allowed; --target-steps, --written-batches and --draft-steps repeat them. The text is
corpus.py's, its tokens tokens.py's, the training models.py's, the measurement acceptance.py's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from eval.train_demo_pair import acceptance, corpus
from eval.train_demo_pair.models import Recipe, distil, new_model, smoke_recipe, train_target, write
from eval.train_demo_pair.tokens import Streams, encode, train_tokenizer

NOTE = """# Licence of the demo pair

The weights and the tokenizer in this folder were trained from scratch by `eval/train_demo_pair`; they are part of
hf_mlspec and stand under its licence (Apache-2.0). They contain no text of others, but can repeat short passages of
what they read: the Python sources, docstrings and documentation files of these packages, as one Python environment had
them installed, each under a permissive licence (bundled third-party folders were left out):

"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.train_demo_pair", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder that gets or holds target/ and draft/")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile the layers: twice as fast on a GPU")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, a few steps")
    parser.add_argument("--measure", action="store_true", help="train nothing, measure the pair in --out")
    for name, kind in (("minutes", float), ("target_steps", int), ("written_batches", int), ("draft_steps", int),
                       ("prompts", int), ("seed", int)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    return parser.parse_args()


def sample_texts(documents: list[corpus.Document], max_bytes: int) -> Iterator[str]:
    """Trained texts in the order of their hashes, up to ``max_bytes``."""
    for document in sorted(documents, key=lambda d: corpus.unit_hash(d.name + d.kind)):
        if not document.held_out and max_bytes > 0:
            max_bytes -= len(document.text)
            yield document.text


def make_pair(
    out: Path, documents: list[corpus.Document], recipe: Recipe, device: str, compile_layers: bool
) -> dict:
    """Trains both models and saves them; -> what training.json says."""
    torch.manual_seed(recipe.seed)
    tokenizer = train_tokenizer(sample_texts(documents, recipe.tokenizer_bytes), recipe.vocab_size, recipe.window)
    trained = {kind: [d.text for d in documents if d.kind == kind and not d.held_out] for kind in ("code", "prose")}
    streams = Streams(*(encode(tokenizer, texts, recipe.seed).to(device) for texts in trained.values()))
    print(f"{len(streams.code):,} tokens of code, {len(streams.prose):,} of prose", flush=True)
    report = {"recipe": asdict(recipe), "code_tokens": len(streams.code), "prose_tokens": len(streams.prose)}
    target = new_model(recipe.target, recipe, tokenizer, device)
    report["target"] = train_target(target, streams, recipe, compile_layers)
    save(target, tokenizer, out / "target")
    teacher = AutoModelForCausalLM.from_pretrained(out / "target", dtype=torch.bfloat16).to(device)  # as it was saved
    written, report["written_batches"] = write(teacher, streams, recipe)
    draft = new_model(recipe.draft, recipe, tokenizer, device)
    report["draft"] = distil(draft, teacher, streams, written, recipe, compile_layers)
    save(draft, tokenizer, out / "draft")
    return report


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """BF16 weights, configs and tokenizer; the live model keeps its float32 weights."""
    saved = LlamaForCausalLM(model.config).to(torch.bfloat16)
    saved.load_state_dict(model.state_dict())
    saved.generation_config.do_sample = False
    saved.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measure(folder: Path, documents: list[corpus.Document], prompts: int, device: str) -> str:
    """The table of acceptance.py for code and prose: the MXFP4 direct cast, and the tiny draft."""
    from hf_mlspec import direct_cast

    target, draft = (AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).to(device)
                     for name in ("target", "draft"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    drafts = {"MXFP4 cast": direct_cast(target, "mxfp4"), "tiny draft": draft}
    least = acceptance.HUMAN_TOKENS * 8  # characters: a token has about three
    rows = [acceptance.measure(target, drafts, tokenizer, kind,
                                    corpus.evaluation_documents(documents, kind, prompts, least))
            for kind in ("code", "prose")]
    return acceptance.table(rows)


def environment(device: str) -> dict[str, str]:
    name = torch.cuda.get_device_name() if device.startswith("cuda") else device
    return {"python": sys.version.split()[0], "torch": torch.__version__, "transformers": transformers.__version__,
            "device": name}


def main() -> None:
    options = arguments()
    given = {name: value for name in ("minutes", "target_steps", "written_batches", "draft_steps", "prompts", "seed")
             if (value := getattr(options, name)) is not None}
    recipe = replace(smoke_recipe() if options.smoke else Recipe(), **given)
    documents = corpus.collect(os.cpu_count() or 1, recipe.max_bytes)
    print(f"{len(documents):,} documents, {sum(len(d.text) for d in documents):,} characters", flush=True)
    if options.measure:
        print(measure(options.out, documents, recipe.prompts, options.device))
        return
    report = make_pair(options.out, documents, recipe, options.device, options.compile)
    report["environment"] = environment(options.device)
    report["sha256"] = {f"{name}/model.safetensors": hashlib.sha256(
        (options.out / name / "model.safetensors").read_bytes()).hexdigest() for name in ("target", "draft")}
    (options.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / "LICENSE-NOTE.md").write_text(NOTE + corpus.licence_note(documents))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
