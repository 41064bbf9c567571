"""The form in which an architecture is described to the decoders: what its layers compute, and where its parts are.

A description holds words, names of attributes and places in a model's tree, no numbers and no code: sizes, scales and
weights are read from the model itself. Fields have more values than the decoders support today; `not_served` names the
first one that they do not support.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Per field: the words that both decoders take, and those that architectures use which have no decoder yet.
WORDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "norm": (("rms", "rms plus one"), ("layer",)),
    "head_norms": (("per head", "all heads"), ()),
    "residual": (("sequential",), ("parallel",)),
    "mlp": (("gated", "experts"), ("plain",)),
    "positions": (("rotary", "rotary by layer type"), ("learned",)),
    "rotation": (("halves",), ("pairs",)),
    "windows": (("none", "every layer", "by layer type"), ("chunks by layer type",)),
    "embedding_scale": (("none", "root of hidden"), ("embedding_multiplier",)),
}
# Fields that name what no decoder reads yet: anything but None is refused.
NOT_YET = ("layers_without_rotary", "residual_scale", "logit_scale", "sinks")
# Places where whoever builds a decoder looks for these parts.
FIXED = {"embedding": "model.embed_tokens", "rotary_embedding": "model.rotary_emb"}

NORMS = ("attention", "mlp", "attention_out", "mlp_out", "q", "k")
SEPARATE = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
FUSED = {
    "qkv": "self_attn.qkv_proj",
    "o": "self_attn.o_proj",
    "gate_up": "mlp.gate_up_proj",
    "down": "mlp.down_proj",
}
LINEARS = tuple(dict.fromkeys((*SEPARATE, *FUSED)))


SHARED = {name: f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The experts of a layer: where they are, and how tokens are weighted. Logits are ``router.weight x`` in float32,
    weights their softmax over all experts; a token goes to the largest.

    router, experts: places in a layer; a layer without the first is an MLP as `Description.linears` has it.
    chosen: attribute of the router, the number of experts of a token. renormalize: whether the weights of a token's
    experts are divided by their sum: an attribute of the router that says it, or what all of the class do.
    shared: places of gate, up and down of an expert that all tokens go to; {}: there is none. shared_gate: the place
    of a linear to one output, whose sigmoid is its weight.
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    chosen: str = "top_k"
    renormalize: str | bool = "norm_topk_prob"
    shared: Mapping[str, str] = field(default_factory=dict)
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True, kw_only=True)
class Description:
    """One class of models. Raises ValueError for an unknown word or part.

    Everything else is read from the weights: a linear with a bias adds it, a head that is tied to the embedding
    reads the same tensor, and as many elements of a head are rotated as the rotary tables have.

    class_name: of the model. package: the beginning of the module name of this class, and of the
    classes of its parts, if they are not transformers' own.
    norm: "rms" multiplies by the weight, "rms plus one" by 1 + weight (Gemma). Not yet "layer": mean and bias (GPT-2,
    Cohere).
    norms: places in a layer, by what they normalize. "attention", "mlp": their input; both decoders need these two.
    "attention_out", "mlp_out": their output, before it is added. Gemma has all four; the last two alone (OLMo 2) are
    not supported yet. "q", "k": queries and keys before they are rotated.
    head_norms: whether q and k are normed "per head" or over "all heads" at once (OLMoE).
    residual: "sequential": the MLP reads the sum with attention; not yet "parallel": both read one norm
    (Cohere).
    linears: places in a layer: q, k, v or all three as qkv; o; gate, up or both, concatenated, as gate_up;
    down. The decoders take all separate (SEPARATE's names) or both fused (FUSED's); not yet one of the two (GLM-4).
    mlp: "gated": down(activation(gate) * up); "experts": many of these in some or all layers, as `experts` describes
    them; not yet "plain": down(activation(up)) (GPT-2).
    unset: config entries that have to be None: what they ask for no decoder does (clip_qkv of OLMoE).
    attention: the place in a layer whose attributes are named below.
    activation, norm_eps: names of config entries.
    positions: "rotary": one table for all layers; "rotary by layer type": one for each (Gemma 3); not yet "learned"
    (GPT-2). rotation: an element and the one half a head further ("halves"), or its neighbour ("pairs", not yet:
    Cohere, GLM-4). layers_without_rotary: not yet; the config entry with a flag per layer (SmolLM3).
    windows: config.sliding_window applies in no layer, in every layer (Mistral), or "by layer type": where
    config.layer_types says sliding_attention or there is none; not yet "chunks by layer type" (Llama 4).
    sinks: not yet; the place in a layer of a logit per head that is part of the softmax (gpt-oss).
    embedding_scale: "root of hidden": embed_scale of the table where it has one, else sqrt(hidden), in the weights'
    dtype (Gemma); not yet "embedding_multiplier" (Granite).
    attention_scale, attention_softcap: attributes of the attention; a cap of None there is no cap.
    logit_softcap: a config entry. residual_scale, logit_scale: not yet; config entries (Granite, Cohere).
    embedding, layers, final_norm, rotary_embedding, head: places in the model.
    """

    class_name: str
    norm: str
    norms: Mapping[str, str]
    linears: Mapping[str, str]
    activation: str
    windows: str
    package: str = "transformers.models."
    head_norms: str = "per head"
    residual: str = "sequential"
    mlp: str = "gated"
    experts: Mixture | None = None
    unset: tuple[str, ...] = ()
    attention: str = "self_attn"
    norm_eps: str = "rms_norm_eps"
    positions: str = "rotary"
    rotation: str = "halves"
    layers_without_rotary: str | None = None
    sinks: str | None = None
    embedding_scale: str = "none"
    attention_scale: str = "scaling"
    attention_softcap: str | None = None
    logit_softcap: str | None = None
    residual_scale: str | None = None
    logit_scale: str | None = None
    embedding: str = FIXED["embedding"]
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    rotary_embedding: str = FIXED["rotary_embedding"]
    head: str = "lm_head"

    def __post_init__(self) -> None:
        for name, (served, later) in WORDS.items():
            self._require(name, [getattr(self, name)], (*served, *later))
        self._require("norms", self.norms, NORMS)
        self._require("linears", self.linears, LINEARS)
        if (self.mlp == "experts") != (self.experts is not None):
            said = f"mlp says {self.mlp!r} and experts {self.experts!r}"
            raise ValueError(f"{self.class_name}: {said}, give both or none")

    def _require(self, name: str, found, choices: tuple[str, ...]) -> None:
        odd = next((word for word in found if word not in choices), None)
        if odd is not None:
            raise ValueError(f"{self.class_name}: {name} says {odd!r}, choose from {', '.join(map(repr, choices))}")


def not_served(description: Description) -> str | None:
    """Which field asks for what the compiled decoders do not have, and what they have; None where they have it all."""
    for name, (served, _) in WORDS.items():
        word = getattr(description, name)
        if word not in served:
            return f"{name} {word!r}; the compiled decoder takes {' and '.join(map(repr, served))}"
    for name in NOT_YET:
        word = getattr(description, name)
        if word is not None:
            return f"{name} {word!r}; the compiled decoder has none"
    for name, place in FIXED.items():
        word = getattr(description, name)
        if word != place:
            return f"{name} {word!r}; the compiled decoder looks for it at {place!r}"
    norms, linears = set(description.norms), set(description.linears)
    if not norms >= {"attention", "mlp"} or len(norms & {"q", "k"}) == 1:
        return f"norms {_listed(norms)}; the compiled decoder takes attention and mlp, and both of q, k or none"
    if linears not in (set(SEPARATE), set(FUSED)):
        return f"linears {_listed(linears)}; the compiled decoder takes {_listed(SEPARATE)} or {_listed(FUSED)}"
    return None


def _listed(names) -> str:
    return ", ".join(sorted(names))
