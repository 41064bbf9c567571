"""How fast is a model whose planes are in a file, and how much memory does its process hold?"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM

import hf_mlspec
from eval.records.machine import memory_of_process


def lines(options: argparse.Namespace) -> Iterator[dict]:
    """All planes in memory, then a budget; greedy, alone and with the top planes as a draft."""
    folder = hf_mlspec.demo_pair()[0] if options.model is None else options.model
    with tempfile.TemporaryDirectory() as packed:
        planes = hf_mlspec.MLSpecConfig(format="planes", group_size=32)
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=planes).save_pretrained(packed)
        found = []
        for child in ("resident", "streamed"):
            command = [sys.executable, "-m", "eval.bench_planes", "--child", child, "--model", packed]
            command += ["--budget", options.budget, "--top-planes", str(options.top_planes)]
            command += ["--tokens", str(options.tokens)]
            command += ["--engine", options.engine] if options.engine else []
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
            found.append(json.loads(done.stdout.splitlines()[-1]))
            yield {key: value for key, value in found[-1].items() if key != "ids"}
        yield {"ids_equal": found[0]["ids"] == found[1]["ids"]}


def measured(options: argparse.Namespace) -> dict:
    """In this process: tokens/s, ids, and anonymous memory beyond that of the imports."""
    before = memory_of_process("RssAnon")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    loaded = memory_of_process("RssAnon")
    if options.child == "streamed":
        hf_mlspec.stream_planes(model, options.budget, top_planes=options.top_planes)
    ids = torch.arange(5, 37)[None]
    how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": options.tokens}
    how["return_dict_in_generate"] = True
    config = hf_mlspec.SpeculationConfig(engine=options.engine, num_draft_tokens=4)
    found = {"name": options.child, "loaded_bytes": loaded - before}
    for name, levels in (("alone", []), ("drafts", [f"planes{options.top_planes}"])):
        begin = time.perf_counter()
        out = model.generate(ids, assistant_models=levels, speculation_config=config, **how)
        found |= {f"{name}_tokens_s": options.tokens / (time.perf_counter() - begin), "ids": out.sequences.tolist()}
        if (planes := out.speculation.planes) is not None:
            found |= {f"{name}_{key}": value for key, value in vars(planes).items()}
    return found | {"held_bytes": memory_of_process("RssAnon") - before}
