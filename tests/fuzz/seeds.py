"""What do good inputs look like? Small ones of every kind, made by the writers of the package where it has one."""

from __future__ import annotations

import gzip
import json
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from hf_mlspec.calibration.finished import FinishedBlocks
from hf_mlspec.calibration.matrices import write_rotations
from hf_mlspec.checkpoints.safetensors_file import CHECKSUMS_KEY, DTYPES, checksums
from hf_mlspec.evaluation.certificate_identity import hash_json
from hf_mlspec.evaluation.certificate_schema import result_of
from hf_mlspec.formats import FORMATS
from hf_mlspec.routing.blocks import blocks_of
from hf_mlspec.routing.router import Router
from hf_mlspec.speculation.costs import PassCosts
from hf_mlspec.speculation.drafters.ngram import NGram
from tests.models import packed, tiny

from .gguf_seeds import by_path
from .own_weights import weights

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"device": "a processor", "threads": "2"}
JOURNAL = {"model": "tiny", "levels": ["mxfp4"]}
IDENTITY = {"method": "gptq", "text": "a text"}


def json_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


def safetensors() -> tuple[bytes, ...]:
    tensors = {
        "a.weight": torch.arange(32, dtype=torch.int32).view(4, 8), "b.scale": torch.ones(4, dtype=torch.bfloat16),
        "c": torch.zeros(0, 3), "d": torch.tensor(True),
    }  # fmt: skip
    kinds = {str(dtype): torch.zeros(2, dtype=dtype) for dtype in DTYPES.values()}
    return save(tensors, {"format": "pt", "mlspec_crc32": "{}"}), save({"x": torch.zeros(3)}), save({}), save(kinds)


def saved_weights() -> tuple[bytes, ...]:
    """A weight of each format, with its checksums, as a save has it."""
    found = []
    for word, weight in weights().items():
        named = zip(FORMATS[word].parts, weight.parts, strict=True)
        parts = {f"{word}.weight_{name}": part.contiguous() for name, part in named if part is not None}
        found.append(save(parts, {"format": "pt", CHECKSUMS_KEY: json.dumps(checksums(parts))}))
    return tuple(found)


def pickles() -> tuple[bytes, ...]:
    held = {"R1": torch.eye(4), "model.layers.0.self_attn.R2": torch.eye(2, dtype=torch.float64)}

    def old(path: Path) -> None:
        torch.save({"a": torch.zeros(3), "b": [1, "x"]}, path, _use_new_zipfile_serialization=False)

    return by_path(lambda path: torch.save(held, path)), by_path(old)


def rotations() -> tuple[bytes, ...]:
    return (by_path(lambda path: write_rotations(path, torch.eye(4), [torch.eye(2)])), *pickles()[:1])


def traces() -> tuple[bytes, ...]:
    """Of the traces with the fewest and the most levels the two shortest rows."""
    found = [json.loads(file.read_text()) for file in sorted((ROOT / "eval" / "traces").glob("*.json"))]
    found.sort(key=lambda trace: (len(trace["levels"]), len(trace["rows"])))
    return tuple(json_bytes(trace | {"rows": sorted(trace["rows"], key=lambda row: len(row["rounds"]))[:2]})
                 for trace in (found[0], found[-1]))  # fmt: skip


def certificates() -> tuple[bytes, ...]:
    run = {
        "batch_size": 1, "prompts": 2, "tokens_compared": 16, "mismatches": 1, "tolerated": 1, "tokens_per_pass": 1.5,
        "levels": [{"name": "mxfp4", "acceptance": 0.5}],
        "differences": [{"prompt": 0, "position": 3, "tolerated": True}],
    }  # fmt: skip
    document = {
        "schema": "mlspec-certificate/1", "created": "2026-01-01", "result": result_of([run]), "runs": [run],
        "target": {"name": "t", "parameters_sha256": "0", "configuration_sha256": "0", "decoding": {"how": "greedy"},
                   "weights_sha256": None, "configuration_files": [], "format": None},
        "levels": [{"name": "mxfp4", "kind": "cast"}], "machine": {"processor": "p"},
        "kernels": {"library": "l", "sha256": None, "instruction_set": "i", "ops": {}},
        "versions": {"hf_mlspec": "0", "torch": "2", "transformers": "5", "python": "3"},
        "prompts": {"name": None, "count": 2, "sha256": "0", "ids_sha256": "0"},
        "settings": {"dtype": "float32", "max_new_tokens": 8, "reference": "own", "tolerate_ties": 0.1},
    }  # fmt: skip
    return (mended_certificate(json_bytes(document)),)


def mended_certificate(data: bytes) -> bytes:
    """With the checksum of what it says now."""
    try:
        document = json.loads(data)
        rest = {name: value for name, value in document.items() if name != "sha256"}
        return json_bytes(rest | {"sha256": hash_json(rest)})
    except (ValueError, AttributeError, RecursionError):
        return data


def costs() -> dict:
    return PassCosts((1, 4, 16), (0.1, 0.2, 0.5), (0.0, 0.1, 0.0), 1e-5).to_dict()


def profiles() -> tuple[bytes, ...]:
    return (json_bytes({"mlspec_profile": 1, "machine": MACHINE, "models": {"0" * 8: {"name": "tiny", **costs()}}}),)


def learned() -> tuple[bytes, ...]:
    counted = {"levels": [0, -1], "counted": [[1.0, 2.0]] * 4}
    memory = {"pairs": [counted], "ratios": [{"rounds": [[0], 4, 1], "counted": [1.0, 2.0]}]}
    return (json_bytes({"mlspec_learned": 1, "machine": MACHINE, "memory": memory}),)


def journals() -> tuple[bytes, ...]:
    lines = [{"asked": JOURNAL}, {"key": "a", "value": [1, 2]}, {"key": "b", "value": None}]
    whole = b"".join(json_bytes(line) + b"\n" for line in lines)
    return whole, whole[:-7], b""


def batch_lines() -> tuple[bytes, ...]:
    body = {"prompt": "x", "max_tokens": 4, "seed": 3, "stop": ["a"], "logit_bias": {"3": 1.5}}
    return (
        json_bytes({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}), json_bytes(body),
        json_bytes({"messages": [{"role": "user", "content": "hello"}], "temperature": 0.5}),
    )  # fmt: skip


def requests() -> tuple[bytes, ...]:
    common = {"model": "demo", "n": 2, "seed": 1, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "stop": ["x"],
              "max_tokens": 5, "logprobs": 2, "stream": True, "stream_options": {"include_usage": True},
              "logit_bias": {"7": -3}, "user": "u", "return_token_ids": True, "presence_penalty": 0}  # fmt: skip
    chat = {"messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": [
        {"type": "text", "text": "hello"}]}, {"role": "assistant", "content": "yes", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}],
        "tools": [{"type": "function", "function": {"name": "f"}}], "logprobs": True, "top_logprobs": 3,
        "max_completion_tokens": 4}  # fmt: skip
    bodies = [{"prompt": "x", **common}, {"prompt": [[1, 2], "y"]}, {**common, **chat}, {"prompt": [3] * 90},
              {"prompt": [3] * 60, "max_tokens": 50}, {"prompt": "x", "logit_bias": {"99999999": 1}, "stream": True},
              {"messages": [{"role": "user", "content": "hello"}], "stream": True, "return_levels": True,
               "return_token_ids": True, "logprobs": True, "model": "demo"}]  # fmt: skip
    return tuple(map(json_bytes, bodies))


def prompts() -> tuple[bytes, ...]:
    lines = [{"prompt": "one"}, {"question": {"stem": "two"}}, {"turns": ["three", "four"]}, {"text": "five"}]
    plain = json_bytes(lines), b"\n".join(map(json_bytes, lines)), b"plain\ntext\r\n", json_bytes({"problem": "six"})
    return *plain, gzip.compress(plain[0]), gzip.compress(plain[2])


def task_records() -> tuple[bytes, ...]:
    lines = [{"prompt": "one", "answer": 1}, {"prompt": "two"}]
    return b"".join(json_bytes(line) + b"\n" for line in lines), json_bytes(lines[0]), json_bytes({"prompt": 3})


def plans() -> tuple[bytes, ...]:
    """The smaller half of those in eval/configs: most of a larger one is more of the same."""
    found = sorted((file.read_bytes() for file in (ROOT / "eval" / "configs").glob("*.toml")), key=len)
    systems = [text for text in found if b"[[system" in text]
    return *found[: len(found) // 2], *systems[:4]


@cache
def routed() -> tuple[Any, list]:
    """A router and the blocks of its model."""
    model = packed(tiny(dtype=torch.float32), "planes")
    blocks = list(blocks_of(model))
    return Router(blocks), blocks


def routers() -> tuple[bytes, ...]:
    return (by_path(lambda path: routed()[0].save(path)),)


def ngrams() -> tuple[bytes, ...]:
    ngram = NGram(order=3)
    ngram.learn([1, 2, 3, 1, 2, 4, 1, 2, 3])
    return by_path(ngram.save), by_path(NGram(order=2).save)


def blocks() -> tuple[bytes, ...]:
    with tempfile.TemporaryDirectory() as folder:
        kept = FinishedBlocks(Path(folder) / "work", IDENTITY)
        kept.write(0, {"q.weight": torch.arange(16, dtype=torch.uint8)}, [{"layer": "q"}])
        return ((Path(folder) / "work" / "block_0000.safetensors").read_bytes(),)


def identities() -> tuple[bytes, ...]:
    return (json_bytes(IDENTITY),)


def quantization_configs() -> tuple[bytes, ...]:
    own = {"quant_method": "mlspec", "format": "int4", "group_size": 64, "symmetric": True, "activation_bits": 8,
           "format_version": 1, "modules_to_not_convert": ["lm_head"], "kv_cache": "int8"}  # fmt: skip
    return tuple(map(json_bytes, (
        own, own | {"format": "bitplanes", "num_planes": 4}, own | {"format": "mxfp4"},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True,
         "packing_format": "auto_round:auto_gptq", "extra_config": {"lm_head": {"bits": 16}}},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"], "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True,
                                                           "strategy": "group", "group_size": 32}}}},
        {"quant_method": "mxfp4"}, {"quant_method": "another"}, {"bits": 4, "group_size": 32, "desc_act": False},
        {"quant_method": "anyprecision", "seed_precision": 3, "parent_precision": 4, "group_count": 1},
    )))  # fmt: skip


def indexes() -> tuple[bytes, ...]:
    places = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
    return (json_bytes({"metadata": {"total_size": 8}, "weight_map": places}),)


def heads() -> tuple[bytes, ...]:
    layer = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "model_type": "llama",
             "head_dim": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "rms_norm_eps": 1e-6,
             "max_position_embeddings": 512}  # fmt: skip
    sizes = {"draft_vocab_size": 64, "target_hidden_size": 32}
    return json_bytes(sizes | {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "transformer_layer_config": layer,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "speculators_config": {"verifier": {"name_or_path": "a/target", "architectures": ["LlamaForCausalLM"]}},
    }), json_bytes(sizes | layer | {"architectures": ["LlamaForCausalLMEagle3"],
                                    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}})  # fmt: skip


def head_tensors() -> tuple[bytes, ...]:
    known = torch.zeros(12, dtype=torch.bool)
    known[[0, 2, 5, 7]] = True
    return (save({"d2t": torch.tensor([0, 1, 3, 4]), "t2d": known, "midlayer.x": torch.ones(2)}),)


def model_configs() -> tuple[bytes, ...]:
    """Of models that are quantized, that research projects wrote, and of none of these."""
    plain = {"model_type": "llama", "dtype": "bfloat16", "hidden_size": 32}
    return tuple(map(json_bytes, (
        plain | {"quantization_config": {"quant_method": "gptq", "bits": 4}}, plain | {"torch_dtype": "torch.float16"},
        plain | {"model_type": "llama_quarot"}, plain | {"quantization_config": {"quant_method": "mlspec-source"}},
    )))  # fmt: skip


def known_chains() -> tuple[bytes, ...]:
    """What another process says of a chain of two levels."""
    level = {"name": "mxfp4", "model": "0" * 8, "prior": 0.7, "own_cache": False, "joined": True, "most_slots": 64,
             "twin": None}  # fmt: skip
    chain = {"names": ["mxfp4"], "kinds": [[True, 512]], "levels": [level, level | {"twin": 0}], "seen": 3,
             "key": ["a", [1, 2]], "follows": True, "captured": False, "seconds": 1.5}  # fmt: skip
    return (json_bytes({"mlspec_known": 1, "machine": MACHINE, "chain": chain}),)


def reports() -> tuple[bytes, ...]:
    """What a process says that ran a generated program; RT is the token of one that passed."""
    return b"R" + json_bytes({"kind": "failed", "detail": "AssertionError"}), b"R", b"RT", b""


def results() -> tuple[bytes, ...]:
    machine = {"processor": "p", "cores": 2, "torch": "2"}
    lines = [
        {"kind": "perplexity", "name": "a", "asked": {"x": 1}, "system": "s", "data": "d", "tokens": 3},
        {"kind": "task", "name": "b", "machine": machine, "system": "s", "task": "t", "metric": "m", "value": 0.5},
        {"kind": "probabilities", "system": "s", "reference": "r", "data": "d", "points": [[0.1, 0.2]]},
    ]  # fmt: skip
    return b"".join(json_bytes(line) + b"\n" for line in lines), json_bytes(lines[0])


def texts() -> tuple[bytes, ...]:
    return b"def f(x):\n    return x\n", "naïve Ψ\n# a key\n".encode(), b"\xff\xfe", b"", b"a\0b"


def orders() -> tuple[bytes, ...]:
    """A file of Atom's orders, of a model of two widths."""
    held = {f"layers.0.{name}.input": torch.arange(4 if "down" in name else 2) for name in ATOM_LINEARS}
    return (by_path(lambda path: torch.save(held, path)),)


ATOM_CONFIG = {"num_hidden_layers": 1, "hidden_size": 2, "intermediate_size": 4, "num_attention_heads": 1}
ATOM_LINEARS = (*(f"self_attn.{name}_proj" for name in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def tables() -> tuple[bytes, ...]:
    """Parquet files with a column of prompts."""
    import pyarrow
    from pyarrow import parquet

    found = pyarrow.table({"prompt": ["one", "two"], "max_tokens": [1, 2]})
    return (by_path(lambda path: parquet.write_table(found, path)),)


def words() -> tuple[bytes, ...]:
    levels = b"w4a16", b"mxfp4", b"nested", b"PATH@int4", b"w16a4kv8", b"int3", b"experts:4", b"early_exit:2", b"qspec"
    return *levels, b"mtp@mxfp4", b"ngram", b"a/b", b"a,b", b"4GiB", b"500 MB", struct.pack("<q", 3)
