"""What does a GGUF file have to say so that a reader finds this configuration, and this tokenizer?

`model_metadata` is the inverse of gguf_names.config_of. Whether nothing of a configuration is lost is seen by reading
the file's header back, not here.

A tokenizer is that of a tokenizer.json: byte-level BPE, which llama.cpp calls "gpt2". How text is cut before merges
are applied is a name that llama.cpp knows; a tokenizer that cuts it in another way is refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .gguf_names import ARCHITECTURES, Architecture
from .gguf_rope import rope_divisors, rope_metadata

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # types of tokens
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
# Expression that cuts text, whether a word of the vocabulary is taken without merges -> llama.cpp's name.
_CUTS = {
    (None, False): "gpt-2",  # the expression of ByteLevel itself
    (_HEAD + r"\p{N}{1,3}" + _TAIL, True): "llama-bpe",
    (_HEAD + r"\p{N}{1,3}" + _TAIL, False): "dbrx",
    (_HEAD + r"\p{N}" + _TAIL, False): "qwen2",
}


def architecture_for(config: Mapping[str, Any]) -> tuple[str, Architecture]:
    """ggml's name of config.json's ``model_type``, and the architecture; ValueError naming it and those known."""
    kind = config.get("model_type")
    for name, architecture in ARCHITECTURES.items():
        if architecture.model_type == kind:
            return name, architecture
    raise ValueError(f"models of kind {kind!r} are not written as GGUF, but {', '.join(ARCHITECTURES)}")


def model_metadata(config: Mapping[str, Any], name: str) -> tuple[dict[str, Any], Tensor | None]:
    """Metadata for a config.json, and the divisors of rotary frequencies (tensor rope_freqs.weight) that some models
    have. name: of the model, for people. ValueError for an architecture or rotary positions that cannot be said."""
    word, _ = architecture_for(config)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    sizes = {
        "context_length": config["max_position_embeddings"], "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads, "attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "attention.key_length": head_dim, "attention.value_length": head_dim, "rope.dimension_count": head_dim,
        "vocab_size": config["vocab_size"], "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
    }  # fmt: skip
    rope = config.get("rope_parameters") or {}
    found = {"general.architecture": word, "general.type": "model", "general.name": name}
    found |= {f"{word}.{key}": value for key, value in sizes.items()} | rope_metadata(rope, f"{word}.")
    return found, rope_divisors(rope, head_dim)


def tokenizer_metadata(
    stored: Mapping[str, Any], vocab_size: int, ids: Mapping[str, int | None], chat_template: str | None = None
) -> dict[str, Any]:
    """Metadata for the contents of a tokenizer.json.

    vocab_size: rows of the embedding; those without a token are named, and marked unused. ids: of ``bos``, ``eos`` and
    ``padding``, None where there is none. ValueError naming what llama.cpp's byte-level BPE does not have.
    """
    model = stored["model"]
    cut = _cut_name(stored)
    tokens, kinds = _tokens(stored, vocab_size)
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": cut,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": array("i", kinds),
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
    }
    found |= {f"tokenizer.ggml.{name}_token_id": number for name, number in ids.items() if number is not None}
    found |= _added_around(stored, {name: tokens[number] for name, number in ids.items() if number is not None})
    return found | ({"tokenizer.chat_template": chat_template} if chat_template else {})


def _refused(what: str) -> ValueError:
    return ValueError(
        f"the tokenizer {what}, which is not written as GGUF, but byte-level BPE that cuts text as GPT-2, Llama 3 or "
        "Qwen2 do; convert the model to compressed-tensors or gptq, which keep the tokenizer's own files"
    )


def _cut_name(stored: Mapping[str, Any]) -> str:
    model = stored["model"]
    odd = [key for key in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "dropout", "unk_token")
           if model.get(key)]  # fmt: skip
    if model.get("type") != "BPE" or odd:
        raise _refused(f"is {model.get('type')}" + (f" with {odd[0]}" if odd else ""))
    normalizer = (stored.get("normalizer") or {}).get("type")
    first = stored.get("pre_tokenizer") or {}
    steps = first.get("pretokenizers") or [first]
    cuts, last = steps[:-1], steps[-1]
    whole = not cuts and last.get("use_regex", True)
    split = len(cuts) == 1 and cuts[0].get("type") == "Split" and not last.get("use_regex", True)
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space") or not (whole or split):
        raise _refused(f"cuts text by {[step.get('type') for step in steps]}")
    pattern = None if whole else cuts[0].get("pattern", {}).get("Regex")
    if split and (pattern is None or cuts[0].get("behavior") != "Isolated" or cuts[0].get("invert")):
        raise _refused("cuts text by another kind of expression")
    name = _CUTS.get((pattern, bool(model.get("ignore_merges"))))
    if name is None:
        raise _refused(f"cuts text by {pattern!r}")
    if normalizer is not None and (normalizer, name) != ("NFC", "qwen2"):
        raise _refused(f"normalizes text by {normalizer}")
    return name


def _tokens(stored: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    kinds = [_UNUSED] * vocab_size
    added = {token["content"]: token for token in stored.get("added_tokens") or []}
    numbers = stored["model"]["vocab"] | {content: token["id"] for content, token in added.items()}
    for token, number in numbers.items():
        if number >= vocab_size:
            raise ValueError(f"the tokenizer has token {number}, {token!r:.50}, the model has {vocab_size}")
        own = added.get(token)
        if own is not None and (own.get("lstrip") or own.get("rstrip") or own.get("single_word")):
            raise _refused(f"has token {token!r:.50}, which takes the spaces around it or is found only between words")
        tokens[number] = token
        kinds[number] = _NORMAL if own is None else _CONTROL if own.get("special") else _USER_DEFINED
    return tokens, kinds


def _added_around(stored: Mapping[str, Any], special: Mapping[str, str]) -> dict[str, bool]:
    """Whether the first and the last token of a text are added to it."""
    step = stored.get("post_processor") or {}
    steps = [own for own in step.get("processors", [step]) if own and own.get("type") != "ByteLevel"]
    before, after = [], []
    for own in steps:
        if own.get("type") != "TemplateProcessing":
            raise _refused(f"ends with {own.get('type')}")
        names = [part.get("SpecialToken", {}).get("id") for part in own["single"]]
        middle = names.index(None)
        before, after = names[:middle] + before, after + names[middle + 1 :]
    if before not in ([], [special.get("bos")]) or after not in ([], [special.get("eos")]):
        raise _refused(f"adds {[*before, *after]} to a text")
    return {"tokenizer.ggml.add_bos_token": bool(before), "tokenizer.ggml.add_eos_token": bool(after)}
