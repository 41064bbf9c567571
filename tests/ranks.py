"""What does each process of a tensor-parallel model write? A program for torchrun: `ranks.py MODEL DRAFT [die]`.

Rank 0 prints one JSON object: by chain, the ids of all ranks; with `die` rank 1 ends on its way and says when.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_mlspec

PROMPTS = [[5, 17, 40, 3], [9, 9, 2, 61, 30, 11, 7], [100, 4]]


def load(path: str, **options):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()


def written(model, levels: list, **options) -> list[list[int]]:
    return [model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                           assistant_models=levels, max_new_tokens=24, **options)[0].tolist()
            for prompt in PROMPTS]  # fmt: skip


def of_all(found):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    return every


def main(path: str, draft: str, die: bool) -> None:
    dist.init_process_group("gloo")
    shared = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    model = load(path, distributed_config=shared)
    told = {"alone": of_all(written(model, []))}
    while die:
        if dist.get_rank() == 1:
            print(json.dumps({"died": time.time()}), flush=True)
            os._exit(9)
        written(model, ["mxfp4"])
    told["stock"] = of_all(written(model, None))
    chains = {"cast": ["mxfp4"], "draft": [draft], "both": ["mxfp4", draft], "exit": ["early_exit:1"]}
    for name, levels in chains.items():
        told[name] = of_all(written(model, levels))
    told["passes"] = of_all(hf_mlspec.last_stats(model).target_passes)
    torch.manual_seed(3)
    told["sampled"] = of_all(written(model, ["mxfp4"], do_sample=True))
    torch.manual_seed(3)
    told["sampled alone"] = of_all(written(model, [], do_sample=True))
    logits = hf_mlspec.direct_cast(model)(torch.tensor([PROMPTS[1]])).logits
    whole = hf_mlspec.direct_cast(load(path))(torch.tensor([PROMPTS[1]])).logits
    told["gap of casts"] = float((logits - whole).abs().max() / whole.abs().max())
    packed = load(path, distributed_config=shared, quantization_config=hf_mlspec.MLSpecConfig(format="mxfp4"))
    told["packed"] = of_all(written(packed, []))
    told["packed whole"] = of_all(
        written(load(path, quantization_config=hf_mlspec.MLSpecConfig(format="mxfp4")), []))
    if dist.get_rank() == 0:
        print(json.dumps(told), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], "die" in sys.argv)
