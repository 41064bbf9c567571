"""The form in which an architecture is described to the decoders: what its layers compute, and where its parts are.

A description holds words, names of attributes and places in a model's tree, no numbers and no code: sizes, scales and
weights are read from the model itself. Fields have more values than the decoders support today; `not_served` names the
first one that they do not support.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Per field: the words that both decoders take, and those that architectures use which have no decoder yet.
# CPU_WORDS: what the decoder of the CPU takes, and that of GPUs does not yet.
WORDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "norm": (("rms", "rms plus one", "layer", "layer plus one"), ()),
    "head_norms": (("per head", "all heads"), ()),
    "residual": (("sequential", "parallel"), ()),
    "mlp": (("gated", "plain", "experts", "none"), ()),
    "positions": (("rotary", "rotary by layer type", "learned", "none"), ("biases by distance",)),
    "rotation": (("halves", "halves of single columns", "pairs", "pairs by columns"), ()),
    "windows": (("none", "every layer", "by layer type"), ()),
    "embedding_scale": (("none", "root of hidden"), ()),
    "head_gates": (("none", "behind each query"), ()),
    "heads": (("alike",), ()),
    "values": (("own",), ()),
}
CPU_WORDS = {
    "head_norms": ("per rotated head",),
    "windows": ("chunks by layer type",),
    "heads": ("by layer",),
    "values": ("own, or keys",),
}
# Fields that the decoder of GPUs does not read: an entry that sets one runs on CPUs alone.
CPU_FIELDS = ("value_norm", "shared_keys", "layer_inputs", "layer_scale", "temperature")
GATES = ("halves", "clamped pairs")  # of experts
SCORES = ("softmax", "sigmoid")  # of experts
WITHOUT_WINDOW = "those without a window"

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
HALF_FUSED = {**{name: SEPARATE[name] for name in "qkvo"}, "gate_up": "mlp.gate_up_proj", "down": "mlp.down_proj"}
PLAIN = {name: place for name, place in SEPARATE.items() if name != "gate"}
OF_ATTENTION = {"q", "k", "v", "o"}, {"qkv", "o"}, {"qkv_by_head", "o"}
OF_MLP = {"gated": ({"gate", "up", "down"}, {"gate_up", "down"}), "plain": ({"up", "down"},)}
LINEARS = (*dict.fromkeys((*SEPARATE, *FUSED)), "qkv_by_head")


SHARED = {name: f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
SHARED_UNWEIGHED = {name: f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The experts of a layer: where they are, and how tokens are weighted. Logits are ``router.weight x`` in float32,
    and the router's bias where it has one, weights their softmax over all experts; a token goes to the largest.

    router, experts: places in a layer; a layer without the first is an MLP as `Description.linears` has it.
    chosen: attribute of the router, the number of experts of a token. renormalize: whether the weights of a token's
    experts are divided by their sum, as in a softmax over these alone: an attribute of the router that says it, or
    what all of the class do. gate: "halves": gate before up, and the model's activation; "clamped pairs": both in
    turns, and what gpt-oss computes of them, with `alpha` and `limit` of its experts, which have biases and are
    [in, out].
    shared: places of gate, up and down of an expert that all tokens go to; {}: there is none. shared_gate: the place
    of a linear to one output, whose sigmoid is its weight; None: it has none, its weight is 1.
    scores: "softmax" of the logits, or "sigmoid" of each (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). Then these
    are attributes of the router: choice_bias is added to scores where experts are chosen; a token's experts lie in the
    chosen_groups best of groups, by the sum of the two best in each; scale multiplies the weights. None: a bias of 0,
    one group, a scale of 1.
    weighs_inputs: weights multiply what an expert reads, not what it gives; on the CPU. inputs_first: weights lie as
    [experts, in, out], in a module without the marks that transformers gives to its modules of experts (Llama 4).
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    chosen: str = "top_k"
    renormalize: str | bool = "norm_topk_prob"
    gate: str = "halves"
    shared: Mapping[str, str] = field(default_factory=dict)
    shared_gate: str | None = "mlp.shared_expert_gate"
    scores: str = "softmax"
    choice_bias: str | None = "e_score_correction_bias"
    groups: str | None = "num_group"
    chosen_groups: str | None = "topk_group"
    scale: str | None = "routed_scaling_factor"
    weighs_inputs: bool = False
    inputs_first: bool = False

    def __post_init__(self) -> None:
        for name, words in (("gate", GATES), ("scores", SCORES)):
            said = getattr(self, name)
            if said not in words:
                raise ValueError(f"Mixture: {name} says {said!r}, choose from {', '.join(map(repr, words))}")


@dataclass(frozen=True, kw_only=True)
class Delta:
    """Layers with a gated delta net (arXiv 2412.06464), or Mamba-2 (arXiv 2405.21060), in place of attention: those
    that have a module `net`.

    linears: places in a layer of qkv, z, b, a and out. grouped: qkv computes of each key head its query, key, values
    and gates, and b its b and a; z and a are not there (Qwen3-Next). taps: the convolution's weight. rate, shift,
    norm: A_log, what is added to a, and the norm before the gate. net: the module whose attributes `heads` say key
    heads, value heads, elements of each, and taps; activations: attributes that have to say silu.
    skip: of Mamba-2, D; None: a gated delta net. Then qkv computes gates, values, keys (B), queries (C) and time
    steps, and z, b and a are not there; a group is a key head, and the norm is behind the gate; limits: an attribute
    of the least and the largest time step, which have to bound nothing.
    """

    linears: Mapping[str, str]
    grouped: bool = False
    net: str = "linear_attn"
    heads: tuple[str, ...] = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel_size")
    taps: str = "linear_attn.conv1d.weight"
    rate: str = "linear_attn.A_log"
    shift: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm"
    activations: tuple[str, ...] = ("activation", "norm.activation")
    skip: str | None = None
    limits: str = "time_step_limit"


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """What every token brings for each layer (Gemma 4): a row of a table, and a linear of its embedding, normed.

    width: a config entry, elements for a layer; 0: there are none. within: the module that has the places table,
    projection and norm, and the attributes that the projection and the sum of both are multiplied by. gate, out,
    out_norm: places in a layer, which adds out_norm(out(activation(gate x) * its inputs)) behind its MLP.
    """

    width: str = "hidden_size_per_layer_input"
    within: str = "model"
    table: str = "embed_tokens_per_layer"
    projection: str = "per_layer_model_projection"
    projection_scale: str = "per_layer_model_projection_scale"
    norm: str = "per_layer_projection_norm"
    sum_scale: str = "per_layer_input_scale"
    gate: str = "per_layer_input_gate"
    out: str = "per_layer_projection"
    out_norm: str = "post_per_layer_input_norm"


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """Queries of layers that rotate nothing, at position p, times 1 + scale log(1 + floor((p + 1) / stretch)), as in
    Llama 4: attributes of the attention; flag: the one that says whether."""

    flag: str = "attn_temperature_tuning"
    scale: str = "attn_scale"
    stretch: str = "floor_scale"


@dataclass(frozen=True, kw_only=True)
class Description:
    """One class of models. Raises ValueError for an unknown word or part.

    Everything else is read from the weights: a linear with a bias adds it, a head that is tied to the embedding
    reads the same tensor, and as many elements of a head are rotated as the rotary tables have.

    class_name: of the model. package: the beginning of the module name of this class, and of the
    classes of its parts, if they are not transformers' own.
    norm: "rms" multiplies by the weight, "rms plus one" by 1 + weight (Gemma); "layer" takes the mean off first and
    may have a bias, or no weight (Cohere, GPT-2, OLMo), "layer plus one" multiplies by 1 + weight (Nemotron).
    norms: places in a layer, by what they normalize. "attention", "mlp": their input. "attention_out", "mlp_out":
    their output, before it is added. Each block has at least one: Gemma has all four, OLMo 2 the last two alone. "q",
    "k": queries and keys. A place that holds an nn.Identity has none.
    head_norms: whether q and k are normed "per head", over "all heads" at once (OLMo 2) or, on the CPU, "per rotated
    head": behind the rotation (HunYuan).
    head_norms_flag: a config entry that says whether there are norms of queries and keys (GLM-4-MoE).
    residual: "sequential": the MLP reads the sum with attention; "parallel": both read the sum before them, through
    norms of their own or one that both name (Cohere).
    residual_flag: a config entry that says whether it is parallel (GPT-NeoX); residual says what the entry has to be.
    linears: places in a layer: q, k, v or all three as qkv; o; gate, up or both, concatenated, as gate_up;
    down. qkv_by_head: queries, key and value of a key head, then those of the next (GPT-NeoX).
    mlp: "gated": down(activation(gate) * up); "plain": down(activation(up)) (Arcee); "experts": many gated
    ones in some or all layers, as `experts` describes them; "none" in any layer (Mamba-2).
    unset: config entries that have to be None or False: what they ask for no decoder does (clip_qkv of OLMoE).
    needed: config entries that have to be true, for the same reason.
    attention: the place in a layer whose attributes are named below; head_dim: the one that says how many elements a
    head has. kv_heads: a config entry, the number of key heads.
    activation: a config entry. norm_eps: a config entry, or the number.
    positions: "rotary": one table for all layers; "rotary by layer type": one for each (Gemma 3); "learned": a table
    whose rows are added to the embeddings (GPT-2), at position_embedding from row position_offset on; "none"
    (Mamba-2); not yet "biases by distance" (ALiBi).
    rotates: a config entry that says "rope" where "rotary" is meant, and where nothing is rotated something else
    (Granite hybrids).
    rotation: an element and the one half a head further ("halves"), or its neighbour: "pairs" where the model's tables
    hold the frequencies one behind the other twice (GLM-4), "pairs by columns" where they hold each twice (Cohere);
    "halves of single columns": halves, where they hold each once (gpt-oss).
    layers_without_rotary: the config entry with a flag per layer, which is true where a layer rotates (SmolLM3), or
    "those without a window", of a model with windows (EXAONE 4, Cohere 2).
    windows: masks of the class apply config.sliding_window in no layer, in every layer (Mistral), or "by layer
    type": where config.layer_types says sliding_attention or there is none; on the CPU also "chunks by layer type":
    where it says chunked_attention a token sees those of its own config.attention_chunk_size alone (Llama 4).
    heads: all layers' heads are "alike", or, on the CPU, a layer's own size, number of key heads and width of its MLP
    are read "by layer" (Gemma 4).
    values: each layer has its "own", or "own, or keys": where v is None they are what k computes. value_norm: the
    place in a layer of what norms the values of each head. On the CPU, as are the next four.
    shared_keys: the attribute of the attention that is true where a layer has no keys and values of its own, but
    reads those of the last layer of its kind before it that has some.
    layer_inputs: inputs of layers beside the residual stream; None: there are none. layer_scale: a buffer of a layer,
    the number that the stream is multiplied by behind it. temperature: of queries far back.
    head_gates: "behind each query": q computes of every head its query and a gate, by whose sigmoid what the head
    gives is multiplied (Qwen3-Next).
    delta: layers that are gated delta nets or Mamba-2; None: there are none.
    sinks: the place in a layer of a logit per head that is part of the softmax, and has no value (gpt-oss).
    embedding_scale: "root of hidden": embed_scale of the table where it has one, else sqrt(hidden), in the weights'
    dtype (Gemma). embedding_multiplier: a config entry (Granite).
    attention_scale, attention_softcap: attributes of the attention; a cap of None there is no cap.
    logit_softcap: a config entry. residual_scale: one that what each block adds is multiplied by, logit_scale and
    logit_divisor: those of the logits, before their cap (Cohere; Granite).
    text: the place of the text model in one that also sees images: what is beside it is not looked at.
    embedding, layers, final_norm, rotary_embedding, head: places in the model. "a | b" means the first that is there.
    """

    class_name: str
    norm: str
    norms: Mapping[str, str]
    linears: Mapping[str, str]
    activation: str
    windows: str
    package: str = "transformers.models."
    head_norms: str = "per head"
    head_norms_flag: str | None = None
    residual: str = "sequential"
    residual_flag: str | None = None
    mlp: str = "gated"
    experts: Mixture | None = None
    unset: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    attention: str = "self_attn"
    head_dim: str = "head_dim"
    kv_heads: str = "num_key_value_heads"
    norm_eps: str | float = "rms_norm_eps"
    positions: str = "rotary"
    rotation: str = "halves"
    layers_without_rotary: str | None = None
    rotates: str | None = None
    position_embedding: str | None = None
    position_offset: int = 0
    sinks: str | None = None
    head_gates: str = "none"
    heads: str = "alike"
    values: str = "own"
    value_norm: str | None = None
    shared_keys: str | None = None
    layer_inputs: LayerInputs | None = None
    layer_scale: str | None = None
    temperature: Temperature | None = None
    delta: Delta | None = None
    embedding_scale: str = "none"
    embedding_multiplier: str | None = None
    attention_scale: str = "scaling"
    attention_softcap: str | None = None
    logit_softcap: str | None = None
    residual_scale: str | None = None
    logit_scale: str | None = None
    logit_divisor: str | None = None
    text: str | None = None
    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    rotary_embedding: str = "model.rotary_emb"
    head: str = "lm_head"

    @property
    def has_layer_norms(self) -> bool:
        """Whether its norms take the mean off."""
        return self.norm.startswith("layer")

    def __post_init__(self) -> None:
        for name, (served, later) in WORDS.items():
            self._require(name, [getattr(self, name)], (*served, *CPU_WORDS.get(name, ()), *later))
        self._require("norms", self.norms, NORMS)
        self._require("linears", self.linears, LINEARS)
        if (self.positions == "learned") != (self.position_embedding is not None):
            said = f"positions says {self.positions!r} and position_embedding {self.position_embedding!r}"
            raise ValueError(f"{self.class_name}: {said}, a table belongs to learned positions alone")
        if (self.mlp == "experts") != (self.experts is not None):
            said = f"mlp says {self.mlp!r} and experts {self.experts!r}"
            raise ValueError(f"{self.class_name}: {said}, give both or none")

    def _require(self, name: str, found, choices: tuple[str, ...]) -> None:
        odd = next((word for word in found if word not in choices), None)
        if odd is not None:
            raise ValueError(f"{self.class_name}: {name} says {odd!r}, choose from {', '.join(map(repr, choices))}")


_OF = {"cpu": "of CPUs ", "cuda": "of GPUs "}


def not_served(description: Description, decoder: str) -> str | None:
    """Which field asks for what the decoder of the "cpu" or "cuda" engine does not have, and what it has; None where
    it has it all."""
    for name, (both, _) in WORDS.items():
        word, served = getattr(description, name), both + (CPU_WORDS.get(name, ()) if decoder == "cpu" else ())
        if word not in served:
            return f"{name} {word!r}; the compiled decoder {_OF[decoder]}takes {' and '.join(map(repr, served))}"
    own = next((name for name in CPU_FIELDS if getattr(description, name) is not None), None)
    if decoder == "cuda" and own is not None:
        return f"{own} {getattr(description, own)!r}; the compiled decoder of GPUs takes None"
    if decoder == "cuda" and description.experts is not None and description.experts.weighs_inputs:
        return "experts weigh what they read; the compiled decoder of GPUs weighs what they give"
    norms, linears = set(description.norms), set(description.linears)
    parts = ("attention",) if description.mlp == "none" else ("attention", "mlp")
    blocks = all(norms & {block, f"{block}_out"} for block in parts)
    if not blocks or len(norms & {"q", "k"}) == 1:
        return f"norms {_listed(norms)}; the compiled decoder takes one or two a block, and both of q, k or none"
    inner = ({*()},) if description.mlp == "none" else OF_MLP["plain" if description.mlp == "plain" else "gated"]
    outer = ({*()},) if description.mlp == "none" and description.delta is not None else OF_ATTENTION
    if linears not in [one | other for one in outer for other in inner]:
        ways = " or ".join(_listed(one) for one in OF_ATTENTION), " or ".join(_listed(one) for one in inner)
        return f"linears {_listed(linears)}; the compiled decoder takes {ways[0]}, and {ways[1]}"
    if description.residual == "parallel" and (norms & {"attention_out", "mlp_out"} or description.experts):
        return "residual 'parallel'; the compiled decoder takes no norms behind such blocks, and no experts in them"
    return None


def _listed(names) -> str:
    return ", ".join(sorted(names))
