"""What does each process of a tensor-parallel model write? A program for torchrun: `ranks.py MODEL DRAFT [WORD]`.

Rank 0 prints one JSON object: by chain, the ids of all ranks. With `die` rank 1 ends on its way and says when; with
`odd` the errors of all ranks are told: of a model of other weights on rank 1, of such a draft, and of one with one
key head; with `parts-and-fails` mixtures and nested models are shared, and rank 1 fails in the middle of calls. On
GPUs, in bfloat16, with `gpus`, `gpus-parts` (the same mixtures and nested models) and `gpus-die`: rank 0 then says
when it was left alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from unittest import mock

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.distributed import DistributedConfig

import hf_mlspec
from hf_mlspec.engines.choose import engine_of
from hf_mlspec.nn.agreement import Exchange

SIZES = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "initializer_range": 0.2, "eos_token_id": None, "bos_token_id": None,
         "pad_token_id": 0}  # fmt: skip
SHARES_QWEN2 = "layers.*.mlp.experts" in Qwen2MoeConfig.base_model_tp_plan  # not in transformers 5.17
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
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def mixture_config(name: str):
    if name == "mixtral":
        return MixtralConfig(**SIZES, intermediate_size=128, num_local_experts=4, num_experts_per_tok=2)
    if name == "qwen2_moe":
        return Qwen2MoeConfig(**SIZES, intermediate_size=128, moe_intermediate_size=64, num_experts=4,
                              num_experts_per_tok=2, shared_expert_intermediate_size=128, mlp_only_layers=[1])
    return Qwen3MoeConfig(**SIZES, head_dim=16, intermediate_size=128, moe_intermediate_size=64, num_experts=4,
                          num_experts_per_tok=2, mlp_only_layers=[1])


def shared_model(config, shared: DistributedConfig, dtype: torch.dtype = torch.float32):
    """Random weights, the same on all ranks."""
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return type(whole).from_pretrained(None, config=config, state_dict=whole.state_dict(), dtype=dtype,
                                       distributed_config=shared).eval()  # fmt: skip


def parts(shared: DistributedConfig, dtype: torch.dtype = torch.float32) -> dict:
    """What all ranks write with mixtures, and with a dense model and a mixture that are nested. dtype: of mixtures;
    float32: also what transformers' own modules write, and what a GPU replays."""
    told = {}
    for name in ("mixtral", "qwen3_moe", *(["qwen2_moe"] if SHARES_QWEN2 else [])):
        config = mixture_config(name)
        model = shared_model(config, shared, dtype)
        found = {"engine": of_all(engine_of(model).name), "alone": of_all(written(model, []))}
        found["cast"] = of_all(written(model, ["mxfp4"]))
        found["together"] = of_all(together(model, ["mxfp4"]))
        found["packed experts"] = of_all(sum(type(one).__name__ == "PackedExperts"
                                             for one in hf_mlspec.direct_cast(model).modules()))  # fmt: skip
        if dtype == torch.float32:
            found["stock"] = of_all(written(model, None))
            hf_mlspec.prepare(model, engine="cuda")
            found["device"] = of_all(written(model, ["mxfp4"]))
        told[name] = found
    dense = LlamaConfig(**SIZES, intermediate_size=128, tie_word_embeddings=False)
    for name, config in (("nested", dense), ("nested mixture", mixture_config("mixtral"))):
        model = shared_model(config, shared, torch.bfloat16)
        found = {"alone": of_all(written(model, []))}
        hf_mlspec.nest(model)
        found["engine"] = of_all(engine_of(model).name)
        kinds = {type(one).__name__ for one in model.modules()}
        found["kinds"] = of_all(sorted(kind for kind in kinds if "Nested" in kind))
        for levels in ([], ["nested"], ["nested", "mxfp4"], ["mxfp4"]):
            found["+".join(levels) or "exact"] = of_all(written(model, levels))
        found["drafted"] = of_all(hf_mlspec.last_stats(model).levels[0].drafted)
        found["together"] = of_all(together(model, ["nested"]))
        told[name] = found
    return told


def require_parts(found: dict, engine: str) -> None:
    """What `parts` found is right, by this engine."""
    assert ("qwen2_moe" in found) == SHARES_QWEN2
    mixtures = [name for name in ("mixtral", "qwen2_moe", "qwen3_moe") if name in found]
    for name in mixtures:
        own = found[name]
        assert own["engine"] == [engine, engine]
        assert own["alone"][0] == own["alone"][1]
        for chain in ("stock", "cast", "together", "device"):
            assert own.get(chain, own["alone"]) == own["alone"], (name, chain)
    assert found["mixtral"]["packed experts"] == [2, 2]
    for name in mixtures[1:]:
        assert found[name]["packed experts"] == [1, 1]  # the other layer has an MLP
    for name, kinds in (("nested", ["NestedLinear"]), ("nested mixture", ["NestedExperts", "NestedLinear"])):
        own = found[name]
        assert own["engine"] == [engine, engine]
        assert own["kinds"] == [kinds, kinds]
        assert own["alone"][0] == own["alone"][1]
        for chain in ("exact", "nested", "nested+mxfp4", "mxfp4", "together"):
            assert own[chain] == own["alone"], (name, chain)
        assert own["drafted"][0] == own["drafted"][1] > 0


def nan_on_one(shared: DistributedConfig) -> dict:
    """What all ranks raise for a weight that cannot be nested on one of them, and whether the model is as before."""
    dense = LlamaConfig(**SIZES, intermediate_size=128, tie_word_embeddings=False)
    broken = shared_model(dense, shared, torch.bfloat16)
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight.to_local()[3, 5] = float("nan") if dist.get_rank() else 1.0
    before = [type(one).__name__ for one in broken.modules()]
    error = of_all(error_of(lambda: hf_mlspec.nest(broken)))
    return {"nan on one": error, "as before": of_all(before == [type(one).__name__ for one in broken.modules()])}


class Failing:
    """A function that on rank 1 fails the third time it is called."""

    def __init__(self, function=lambda *_, **__: False):
        self.function, self.left = function, 3

    def __call__(self, *words, **options):
        self.left -= 1
        if dist.get_rank() == 1 and not self.left:
            raise torch.OutOfMemoryError("no memory, says the test")
        return self.function(*words, **options)


def fails(path: str, shared: DistributedConfig) -> dict:
    """Of calls in which rank 1 fails: the errors, the seconds to them, and what the next call writes."""
    model = load(path, distributed_config=shared)
    expected = written(model, ["mxfp4"])
    ids = torch.tensor([PROMPTS[0]])
    decoder = engine_of(model).decoder

    def in_a_sum():
        parts = Failing(Exchange.parts)
        with mock.patch.object(Exchange, "parts", lambda exchange, own: parts(exchange, own)):
            written(model, ["mxfp4"])

    def before_a_step():
        with mock.patch.object(decoder, "call", Failing(decoder.call)):
            written(model, ["mxfp4"])

    def in_a_stream():
        with mock.patch.object(decoder, "call", Failing(decoder.call)):
            list(hf_mlspec.generate_stream(model, PROMPTS, max_new_tokens=24, assistant_models=["mxfp4"]))

    def by_the_caller():
        model.generate(ids, assistant_models=["mxfp4"], max_new_tokens=24,
                       stopping_criteria=[Failing(lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool))])

    def by_the_caller_in_a_stream():
        fails = Failing(lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool))
        requests = [hf_mlspec.Request(PROMPTS[0], stopping_criteria=[fails]), *PROMPTS[1:]]
        list(hf_mlspec.generate_stream(model, requests, max_new_tokens=24, assistant_models=["mxfp4"]))

    def on_all():
        model.generate(ids, assistant_models=["mxfp4"], max_new_tokens=24, num_beams=2)

    told = {}
    for call in (in_a_sum, before_a_step, in_a_stream, by_the_caller, by_the_caller_in_a_stream, on_all):
        began = time.time()
        error = error_of(call)
        told[call.__name__] = {"errors": of_all(error), "seconds": of_all(time.time() - began),
                               "right": of_all(written(model, ["mxfp4"]) == expected)}  # fmt: skip
    return told


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


def on_gpus(path: str, draft: str, word: str) -> dict:
    """What all ranks write, alone, in a batch and with levels; with `gpus-parts`, `parts`. With `gpus-die` rank 1
    ends, and rank 0, which says when, is left alone."""
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=torch.device("cuda", device))
    shared = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    if word == "gpus-parts":
        return parts(shared, torch.bfloat16)
    model = load(path, torch.bfloat16, distributed_config=shared)
    engine = engine_of(model)
    told = {"engine": engine.name, "by": type(engine.decoder.ranks).__name__, "alone": of_all(written(model, []))}
    told["batches"] = of_all(together(model, []))
    told["chains"] = [of_all(written(model, levels)) for levels in (["mxfp4"], [draft], ["mxfp4", draft])]
    if word == "gpus-die":
        if dist.get_rank() == 1:
            os._exit(9)
        print(json.dumps({"left alone": time.time()}), flush=True)
        try:
            written(model, [])
        except Exception:  # of the device: nothing that was on it can be taken down
            traceback.print_exc()
            os._exit(1)
    return told


def main(path: str, draft: str, word: str) -> None:
    if word.startswith("gpus"):
        told = on_gpus(path, draft, word)
        if dist.get_rank() == 0:
            print(json.dumps(told), flush=True)
        os._exit(0)  # a device error leaves nothing to be taken down
    dist.init_process_group("gloo")
    shared = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    if word in ("odd", "parts-and-fails"):
        told = odd(path, draft, shared) if word == "odd" else {
            "parts": parts(shared), **nan_on_one(shared), "fails": fails(path, shared)}  # fmt: skip
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
    chains = {"cast": ["mxfp4"], "draft": [draft], "both": ["mxfp4", draft], "exit": ["early_exit:1"],
              "int3": ["int3"]}
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
