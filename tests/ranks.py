"""What does each process of a tensor-parallel model write? A program for torchrun: `ranks.py MODEL DRAFT [WORD]`.

Rank 0 prints one JSON object: by chain, the ids of all ranks. With `die` rank 1 ends on its way and says when; with
`odd` the errors of all ranks are told: of a model of other weights on rank 1, of such a draft, and of one with one
key head. On GPUs, in bfloat16, with `gpus` and `gpus-die`: rank 0 then says how long it waited.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import hf_mlspec
from hf_mlspec.engines.choose import engine_of

PROMPTS = [[5, 17, 40, 3], [9, 9, 2, 61, 30, 11, 7], [100, 4]]


def load(path: str, dtype: torch.dtype = torch.float32, **options):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options).eval()


def written(model, levels: list, **options) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=model.device)
        found += model.generate(ids, attention_mask=torch.ones_like(ids), assistant_models=levels, max_new_tokens=24,
                                **options).tolist()  # fmt: skip
    return found


def of_all(found):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    return every


def together(model, levels: list) -> list[list[int]]:
    """All prompts as one batch."""
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS], device=model.device)
    mask = (torch.arange(longest) >= longest - torch.tensor(list(map(len, PROMPTS)))[:, None]).long().to(ids.device)
    out = model.generate(ids, attention_mask=mask, assistant_models=levels, max_new_tokens=24, pad_token_id=0)
    return [row[longest - len(prompt):].tolist() for row, prompt in zip(out, PROMPTS, strict=True)]


def error_of(call) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "none"


def odd(path: str, draft: str, shared: DistributedConfig) -> dict:
    """What all ranks raise for models that they cannot share."""
    model, own = (load(path, distributed_config=shared) for _ in range(2))
    drafting = load(draft)
    with torch.no_grad():
        model.model.norm.weight[3] += dist.get_rank()
        drafting.model.layers[0].mlp.up_proj.weight[2, 5] += dist.get_rank()
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                         num_attention_heads=4, num_key_value_heads=1)  # fmt: skip
    torch.manual_seed(0)
    single = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=LlamaForCausalLM(config).state_dict(),
                                              distributed_config=shared).eval()
    return {"weights": of_all(error_of(lambda: written(model, []))),
            "draft": of_all(error_of(lambda: written(own, [drafting]))),
            "heads": of_all(error_of(lambda: written(single, [])))}


def on_gpus(path: str, draft: str, dies: bool) -> dict:
    """What all ranks write, alone, in a batch and with levels; with `dies`, the error of rank 0 when 1 is gone."""
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=torch.device("cuda", device))
    shared = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    model = load(path, torch.bfloat16, distributed_config=shared)
    engine = engine_of(model)
    told = {"engine": engine.name, "by": type(engine.decoder.ranks).__name__, "alone": of_all(written(model, []))}
    told["batches"] = of_all(together(model, []))
    told["chains"] = [of_all(written(model, levels)) for levels in (["mxfp4"], [draft], ["mxfp4", draft])]
    if dies and dist.get_rank() == 1:
        os._exit(9)
    if dies:
        began = time.time()
        try:
            written(model, [])
        except Exception as error:  # of the device
            told = {"waited": time.time() - began, "error": str(error)}
    return told


def main(path: str, draft: str, word: str) -> None:
    if word.startswith("gpus"):
        told = on_gpus(path, draft, word == "gpus-die")
        if dist.get_rank() == 0:
            print(json.dumps(told), flush=True)
        os._exit(0)  # a device error leaves nothing to be taken down
    dist.init_process_group("gloo")
    shared = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    if word == "odd":
        told = odd(path, draft, shared)
        if dist.get_rank() == 0:
            print(json.dumps(told), flush=True)
        return
    model = load(path, distributed_config=shared)
    told = {"alone": of_all(written(model, [])), "engine": of_all(engine_of(model).name)}
    while word == "die":
        if dist.get_rank() == 1:
            print(json.dumps({"died": time.time()}), flush=True)
            os._exit(9)
        written(model, ["mxfp4"])
    told["stock"] = of_all(written(model, None))
    chains = {"cast": ["mxfp4"], "draft": [draft], "both": ["mxfp4", draft], "exit": ["early_exit:1"]}
    for name, levels in chains.items():
        told[name] = of_all(written(model, levels))
    told["together"] = [of_all(together(model, levels)) for levels in ([], ["mxfp4", draft])]
    told["passes"] = of_all(hf_mlspec.last_stats(model).target_passes)
    stream = hf_mlspec.generate_stream(model, PROMPTS, max_batch=2, max_new_tokens=24, assistant_models=[draft])
    told["stream"] = of_all(sorted(one.sequence for one in stream))
    hf_mlspec.prepare(model, engine="cuda")  # what a GPU replays, op by op
    told["device"] = [of_all(written(model, levels)) for levels in ([], ["mxfp4", draft])]
    hf_mlspec.restore(model)
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
    main(sys.argv[1], sys.argv[2], "".join(sys.argv[3:]))
