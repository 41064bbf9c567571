"""Which tiny models and tokenizers do the tests decode with? All random, seeded, made in milliseconds."""

from __future__ import annotations

import copy
import string

import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DiffLlamaConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    Phi3Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hf_mlspec.nn.int4_int8 import Int4Int8Linear
from hf_mlspec.nn.linear import Int4Linear, Mxfp4Linear
from hf_mlspec.nn.nested import NestedLinear
from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.nn.switch import PrecisionSwitch
from hf_mlspec.nn.transforms import TransformedLinear
from hf_mlspec.nn.zipper import ZipperLinear

VOCAB = 64
PAD, EOS, BOS = 0, 1, 2
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 8,
    # Ten times the usual: flat logits would leave float32 rounding to decide which token is best.
    "initializer_range": 0.3,
}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
ARCHITECTURES = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "mistral": (MistralConfig, {"sliding_window": 7}),
    "gemma2": (Gemma2Config, {**_ALTERNATING, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8}),
    "gemma3": (Gemma3TextConfig, {**_ALTERNATING, "query_pre_attn_scalar": 8}),
    "phi3": (Phi3Config, {}),
    "gpt2": (GPT2Config, {}),
    "gpt_oss": (GptOssConfig, {**_ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTURES = {
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": (OlmoeConfig, {"num_experts": 5, "num_experts_per_tok": 2}),
    "qwen2_moe": (Qwen2MoeConfig, {**_EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": (Qwen3MoeConfig, {**_EXPERTS, "norm_topk_prob": True}),
}
ARCHITECTURES |= MIXTURES
# Of classes that not every supported release of transformers has.
_LATER = {
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", _ALTERNATING),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "exaone4": ("Exaone4Config", _ALTERNATING),
    "granite": ("GraniteConfig", {"residual_multiplier": 0.5, "logits_scaling": 2.0, "embedding_multiplier": 3.0}),
    "glm4": ("Glm4Config", {}),
    "cohere2": ("Cohere2Config", {**_ALTERNATING, "logit_scale": 0.5}),
    "arcee": ("ArceeConfig", {}),
    "nemotron": ("NemotronConfig", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 7}),
    "phi": ("PhiConfig", {}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "opt": ("OPTConfig", {"ffn_dim": 64}),
    "falcon": ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 64}),
    "hunyuan": ("HunYuanDenseV1Config", {}),
}
LATER = {
    name: (getattr(transformers, kind), own) for name, (kind, own) in _LATER.items() if hasattr(transformers, kind)
}
UNDESCRIBED = {"diffllama": (DiffLlamaConfig, {})}  # no compiled decoder knows it
_WINDOW = {"sliding_window": 8}
_HALF = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
# Kinds and options of models of whose layers some see a window, or whose config at least names one.
MODELS_WITH_WINDOWS = {
    "llama, a window in its config alone": ("llama", _WINDOW),
    "qwen2, none used": ("qwen2", {**_WINDOW, "use_sliding_window": False}),
    "qwen2, the second layer": ("qwen2", {**_WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "mistral": ("mistral", _WINDOW),
    "phi3": ("phi3", _WINDOW),
    "gemma2": ("gemma2", _HALF),
    "gemma3": ("gemma3", _HALF),
    "mixtral": ("mixtral", _WINDOW),
    **{
        name: pair
        for name, pair in {
            "granite, a window in its config alone": ("granite", _WINDOW),
            "starcoder2": ("starcoder2", _WINDOW),
            "cohere2": ("cohere2", _HALF),
            "exaone4": ("exaone4", _HALF),
            "olmo3": ("olmo3", _HALF),
            "smollm3": ("smollm3", {**_HALF, "use_sliding_window": True}),
        }.items()
        if pair[0] in LATER
    },
}
_GPT2_SHAPE = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}


def tiny(kind: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float64, **options) -> PreTrainedModel:
    """A random model of an architecture, in eval mode; options override its config.

    float64 by default: there a check of several positions at once and single steps agree on every token.
    """
    config_class, own = {**ARCHITECTURES, **LATER, **UNDESCRIBED}[kind]
    shape = {**_GPT2_SHAPE, "n_positions": 512} if kind == "gpt2" else _SHAPE
    if kind == "gpt2" and "max_position_embeddings" in options:
        options["n_positions"] = options.pop("max_position_embeddings")
    ids = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS}
    torch.manual_seed(seed)
    said = {**shape, **own, **ids, **options}
    if kind == "falcon":
        said.pop("head_dim", None)  # which its config computes
    config = config_class(**said)
    # The grouped matrix product that transformers prefers for experts knows no float64.
    special = {"experts_implementation": "eager"} if kind in ("gpt_oss", *MIXTURES) else {}
    if kind == "gemma2":  # the SDPA that transformers 5.17 would choose leaves the soft cap out
        special = {"attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, **special)
    if kind == "qwen2":
        randomize_biases(model)
    return model.eval()


def randomize_biases(model: PreTrainedModel) -> None:
    """Biases start at zero, where forgetting them would go unseen."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)


def near(model: PreTrainedModel, noise: float = 0.03, seed: int = 1) -> PreTrainedModel:
    """A model of its own that mostly agrees with `model`: its weights plus noise."""
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return other


def packed(model: PreTrainedModel, weights: str = "int4", *, keep_head: bool = True, **settings) -> PreTrainedModel:
    """The model itself, its linear layers packed in place and called by one switch; settings are the format's."""
    kind = {"int4": Int4Linear, "mxfp4": Mxfp4Linear, "nested": NestedLinear, "planes": PlanesLinear,
            "int4_int8": Int4Int8Linear, "zipper": ZipperLinear}[weights]  # fmt: skip
    switch = PrecisionSwitch(weights, num_planes=settings.get("num_planes", 8))
    if weights in ("int4", "planes"):
        settings = {"group_size": 32, **settings}
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) in (torch.nn.Linear, TransformedLinear) and not (keep_head and module is head):
            model.set_submodule(name, kind.from_linear(module, name=name, switch=switch, **settings))
    return model


def prompts(lengths: list[int], seed: int = 3, vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    """Left-padded random prompts: input_ids and attention_mask int64 `[batch, max(lengths)]`."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(3, vocab, (len(lengths), width), generator=generator)
    mask = torch.zeros_like(ids)
    for r, length in enumerate(lengths):
        mask[r, width - length :] = 1
    return {"input_ids": torch.where(mask.bool(), ids, PAD), "attention_mask": mask}


def letters(extra: int = 0) -> PreTrainedTokenizerFast:
    """A tokenizer of single characters, 64 tokens (and `extra` unused ones)."""
    characters = string.ascii_letters + " .,;:!?-'"
    words = ["<pad>", "<eos>", "<bos>", *characters]
    vocabulary = {word: i for i, word in enumerate(words + [f"<{i}>" for i in range(extra)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", padding_side="left"
    )


def alone(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **options) -> list[list[int]]:
    """What stock generate writes after every prompt, one unpadded prompt at a time: new tokens up to the end."""
    written = []
    for line, flags in zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True):
        prompt = line[flags][None]
        row = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **options)
        written.append(row[0, prompt.shape[1] :].tolist())
    return written


def together(model: PreTrainedModel, inputs: dict[str, torch.Tensor], levels: list, **options) -> list[list[int]]:
    """What a chain writes after every prompt of a batch: new tokens, without the filling after the end."""
    out = model.generate(**inputs, do_sample=False, assistant_models=levels, **options)
    width = inputs["input_ids"].shape[1]
    assert torch.equal(out[:, :width], inputs["input_ids"])
    return [_until_end(row) for row in out[:, width:].tolist()]


def _until_end(row: list[int]) -> list[int]:
    return row[: row.index(EOS) + 1] if EOS in row else row


def refused(error: type[Exception], words: str, inputs: dict, target: PreTrainedModel, **options) -> None:
    """The call of generate raises this error with these words, and no forward pass of the target has run."""
    forwards = []
    handle = target.register_forward_pre_hook(lambda *args: forwards.append(1))
    try:
        with pytest.raises(error, match=words):
            target.generate(**{**inputs, "max_new_tokens": 5, **options})
    finally:
        handle.remove()
    assert not forwards
