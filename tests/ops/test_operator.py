"""Does one definition give an op its schema, its checks, its fake result and its plain torch?"""

import pytest
import torch
from torch import Tensor

from hf_mlspec.ops import operator
from hf_mlspec.ops.operator import REFERENCES, Operands, schema_of

# What compiled libraries implement: a changed schema needs a library that was built anew.
SCHEMAS = [
    "adapted_linear(Tensor x, Tensor weight, Tensor? bias, Tensor between, Tensor up, Tensor first) -> Tensor",
    "bf16_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    "bf16_rows_linear(Tensor x, Tensor weight, Tensor? bias, int out_features) -> Tensor",
    "bitplane_apart(Tensor x, Tensor plane_tiles, Tensor scale_tiles, Tensor? resident, Tensor? fetched, int "
    "out_features, Tensor? bias, int group_size, int zero_doubled, int num_planes, int total_planes, int "
    "outputs_of_weight) -> Tensor",
    "bitplane_chosen(Tensor x, Tensor plane_tiles, Tensor scale_tiles, Tensor? resident, Tensor? fetched, Tensor "
    "widths, int out_features, Tensor? bias, int group_size, int zero_doubled, int total_planes, int "
    "outputs_of_weight) -> Tensor",
    "bitplane_integers(Tensor x, Tensor plane_tiles, Tensor scale_tiles, int out_features, Tensor? bias, int "
    "group_size, int activation_group, int activation_bits) -> Tensor",
    "bitplane_linear(Tensor x, Tensor plane_tiles, Tensor scale_tiles, int out_features, Tensor? bias, int "
    "group_size, int zero_doubled, int num_planes) -> Tensor",
    "bitplane_part(Tensor x, Tensor plane_tiles, Tensor scale_tiles, int out_features, Tensor? bias, int "
    "group_size, int zero_doubled, int num_planes, int total_planes, int outputs_of_weight) -> Tensor",
    "bitplane_sums(Tensor x, Tensor plane_tiles, Tensor scale_tiles, int out_features, int group_size, int "
    "zero_doubled, int num_planes) -> Tensor",
    "choose_of_prompt(Tensor x, Tensor(a!) mean, Tensor inner, Tensor inner_bias, Tensor outer, Tensor outer_bias, "
    "Tensor candidates, Tensor(b!) failed, Tensor(c!) arrived) -> Tensor",
    "choose_of_steps(Tensor x, Tensor starts, Tensor lengths, Tensor known, Tensor means, Tensor inner, Tensor "
    "inner_bias, Tensor outer, Tensor outer_bias, Tensor candidates, Tensor(a!) failed, Tensor(b!) arrived, float "
    "share) -> Tensor",
    "choose_rows(Tensor logits, float softcap, Tensor? seed, Tensor? streams, Tensor? positions) -> (Tensor, "
    "Tensor)",
    "cpu_isa() -> str",
    "cuda_linears(int device) -> str",
    "delta_rows(Tensor qkvz, Tensor? ba, Tensor taps, Tensor rate, Tensor shift, Tensor norm, float eps, "
    "Tensor starts, Tensor counts, Tensor marks, Tensor(a!) states, Tensor(b!) inputs, int[] sizes, int settles, "
    "int behind, Tensor? bias, Tensor? skip, int normed) -> Tensor",
    "dense_expert_rows(Tensor x, Tensor weight, Tensor? bias, Tensor experts, Tensor plan, float slope, float limit, "
    "int activation) -> Tensor",
    "embed_rows(Tensor ids, Tensor table, float scale) -> Tensor",
    "f32_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    "gated(Tensor gate_up, int activation) -> Tensor",
    "gated_codes(Tensor gate_up, int activation, Tensor? order, Tensor? matrix, int size, int inner, int group_size, "
    "int bits, float activation_clip, int outliers) -> (Tensor, Tensor)",
    "norm_codes(Tensor x, Tensor weight, float eps, Tensor? residual, Tensor? order, int group_size, int bits, "
    "float activation_clip, int outliers) -> (Tensor, Tensor, Tensor)",
    "row_codes(Tensor x, Tensor? order, Tensor? matrix, int size, int inner, int group_size, int bits, "
    "float activation_clip, int outliers) -> (Tensor, Tensor)",
    "int4_codes_linear(Tensor codes, Tensor scales, Tensor weight_tiles, Tensor scale_tiles, Tensor? zero_tiles, "
    "int out_features, Tensor? bias, int group_size, int outliers) -> Tensor",
    "gated_in_order(Tensor gate_up, int activation, Tensor order) -> Tensor",
    "gated_pairs(Tensor gate_up, float slope, float limit) -> Tensor",
    "gated_hadamard(Tensor gate_up, int activation, Tensor? matrix, int size, int inner) -> Tensor",
    "int4_expert_rows(Tensor x, Tensor weight_tiles, Tensor scale_tiles, Tensor? zero_tiles, Tensor? bias, Tensor "
    "experts, Tensor plan, int out_features, int group_size, int activation_bits, float activation_clip, float slope, "
    "float limit, int activation) -> Tensor",
    "mxfp4_expert_rows(Tensor x, Tensor weight_tiles, Tensor scale_tiles, Tensor? bias, Tensor experts, Tensor plan, "
    "int out_features, int activation_bits, float slope, float limit, int activation) -> Tensor",
    "norm_route_row(Tensor x, Tensor residual, Tensor weight, float eps, Tensor router, Tensor? bias, int "
    "num_experts, int chosen, int renormalize, Tensor? choice_bias, int groups, int chosen_groups, float scale) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    "ordered_rows(Tensor x, Tensor order) -> Tensor",
    "pack_awq(Tensor words) -> Tensor",
    "pack_gptq(Tensor words, Tensor? order) -> Tensor",
    "plan_rows(Tensor experts, int num_experts) -> Tensor",
    "hadamard_rows(Tensor x, Tensor? matrix, int size, int inner) -> Tensor",
    "low_rank_added(Tensor y, Tensor between, Tensor up, Tensor first) -> Tensor",
    "low_rank_between(Tensor x, Tensor down) -> Tensor",
    "lut_linear(Tensor x, Tensor plane_tiles, Tensor table_tiles, int out_features, Tensor? bias, int "
    "num_planes) -> Tensor",
    "int4_dequantize(Tensor weight_tiles, Tensor scale_tiles, Tensor? zero_tiles, int out_features, int "
    "group_size) -> Tensor",
    "int4_linear(Tensor x, Tensor weight_tiles, Tensor scale_tiles, Tensor? zero_tiles, int out_features, Tensor? "
    "bias, int group_size, int activation_bits, float activation_clip) -> Tensor",
    "int4_sums(Tensor x, Tensor weight_tiles, Tensor scale_tiles, Tensor? zero_tiles, int out_features, int "
    "group_size, int activation_bits) -> Tensor",
    "int4_int8_linear(Tensor x, Tensor weight_tiles, Tensor scale_tiles, int out_features, Tensor? bias, int "
    "activation_bits, float activation_clip) -> Tensor",
    "mxfp4_linear(Tensor x, Tensor weight_tiles, Tensor scale_tiles, int out_features, Tensor? bias, int "
    "activation_bits) -> Tensor",
    "nested_expert_rows(Tensor x, Tensor draft_tiles, Tensor exponent_tiles, Tensor low_tiles, Tensor codebook, "
    "Tensor? bias, Tensor experts, Tensor plan, int out_features, int weight_bits, int activation_bits, float slope, "
    "float limit, int activation) -> Tensor",
    "plane_expert_rows(Tensor x, Tensor plane_tiles, Tensor scale_tiles, Tensor? bias, Tensor experts, Tensor plan, "
    "int out_features, int group_size, int zero_doubled, int num_planes, float slope, float limit, int activation) -> "
    "Tensor",
    "nested_linear(Tensor x, Tensor draft_tiles, Tensor exponent_tiles, Tensor low_tiles, Tensor codebook, int "
    "out_features, Tensor? bias, int weight_bits, int activation_bits) -> Tensor",
    "nested_rows(Tensor ids, Tensor draft_tiles, Tensor exponent_tiles, Tensor low_tiles, int out_features, float "
    "scale) -> Tensor",
    "quantize_rows(Tensor x, int group_size, int bits, float activation_clip) -> (Tensor, Tensor)",
    "ragged_attention(Tensor q, Tensor keys, Tensor values, int[] starts, float scale, int window, float softcap, "
    "int draft_window) -> Tensor",
    "ragged_attention_rows(Tensor q, Tensor keys, Tensor values, Tensor starts, Tensor counts, float scale, int "
    "window, float softcap, int draft_window, Tensor? sinks) -> Tensor",
    "rms_norm(Tensor x, Tensor weight, float eps, Tensor? residual) -> (Tensor, Tensor)",
    "rms_norm_in_order(Tensor x, Tensor weight, float eps, Tensor? residual, Tensor order) -> (Tensor, Tensor)",
    "rope_write(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, int[] starts, Tensor(a!) keys, Tensor(b!) "
    "values) -> Tensor",
    "rope_write_rows(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, Tensor cos, Tensor sin, Tensor "
    "starts, Tensor counts, Tensor(a!) keys, Tensor(b!) values, int heads) -> Tensor",
    "round_lookup(Tensor(a!) tokens, Tensor(b!) lengths, Tensor active, Tensor ends, int min_ngram, int max_ngram) "
    "-> ()",
    "round_open(Tensor base, Tensor active, Tensor ends, int most, Tensor? script, Tensor? cursor, Tensor(a!) "
    "lengths, Tensor(b!) drafting, Tensor(c!) room) -> ()",
    "round_push(Tensor(a!) tokens, Tensor(b!) lengths, Tensor(c!) active, Tensor ends, Tensor chosen, Tensor "
    "confidence, float threshold, Tensor(d!) failed, int level) -> (Tensor, Tensor, Tensor)",
    "round_settle(Tensor(a!) tokens, Tensor(b!) base, Tensor lengths, Tensor(c!) active, Tensor ends, Tensor "
    "chosen, Tensor confidence, float threshold, Tensor? script, Tensor(d!)? cursor, Tensor(e!) record, "
    "Tensor(f!) failed, int level) -> ()",
    "round_window(Tensor tokens, Tensor base, Tensor lengths, Tensor active, int lead, int judged) -> (Tensor, "
    "Tensor, Tensor, Tensor, Tensor)",
    "route_rows(Tensor x, Tensor router, Tensor? bias, int num_experts, int chosen, int renormalize, Tensor? "
    "choice_bias, int groups, int chosen_groups, float scale) -> (Tensor, Tensor, Tensor)",
    "sigmoid_gated(Tensor x, Tensor gates) -> Tensor",
    "silu_mul(Tensor gate, Tensor up) -> Tensor",
    "weighted_norm_rows(Tensor rows, Tensor weights, Tensor? shared, Tensor residual, Tensor weight, float eps) -> "
    "(Tensor, Tensor)",
    "weighted_rows(Tensor rows, Tensor weights, Tensor? shared) -> Tensor",
    "zipper_high_joined(Tensor x, Tensor low, Tensor high, Tensor? bias, int[] outputs, int[] begins) -> Tensor",
    "zipper_high_linear(Tensor x, Tensor low, Tensor high, Tensor? bias) -> Tensor",
    "zipper_high_sums(Tensor x, Tensor high, Tensor(a!) sums) -> ()",
    "zipper_rows(Tensor ids, Tensor planes, Tensor step, Tensor places, int lowest, float scale) -> Tensor",
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=[schema.split("(")[0] for schema in SCHEMAS])
def test_schemas_are_those_that_libraries_implement(schema):
    op = schema.split("(")[0]
    assert str(getattr(torch.ops.mlspec, op).default._schema) == f"mlspec::{schema}"


def test_every_op_is_listed():
    assert {schema.split("(")[0] for schema in SCHEMAS} == {*REFERENCES, "cpu_isa", "cuda_linears"}


def test_a_schema_follows_from_a_signature():
    def scaled(x: "Tensor", sums: "Tensor | None", y: "Tensor", starts: "list[int]", by: "float") -> "tuple[Tensor]":
        ...

    expected = "(Tensor x, Tensor(a!)? sums, Tensor(b!) y, int[] starts, float by) -> (Tensor)"
    assert schema_of(scaled, ("sums", "y")) == expected
    with pytest.raises(ValueError, match=r"scaled: it has no parameters \['z'\] to write to"):
        schema_of(scaled, ("z",))


def test_an_annotation_that_no_op_has_is_refused():
    def scaled(x: "Tensor", names: "list[str]") -> "None":
        ...

    with pytest.raises(KeyError, match=r"list\[str\]"):
        schema_of(scaled)


def test_what_is_defined_is_checked_faked_and_computed(monkeypatch):
    """Without a registration of its own in torch, which would stay: what is registered is called as torch would."""
    registered = []
    monkeypatch.setattr(operator, "REFERENCES", {})
    monkeypatch.setattr(operator.library, "define", lambda *parts: registered.append(parts) or "the op")

    def check(given: Operands) -> None:
        given.require_choice("by", (2, 3))

    @operator.operator(check, lambda given: given.x.new_empty(len(given.x)), writes=("x",), composed_on_cpu=True)
    def _scaled(x: "Tensor", by: "int") -> "Tensor":
        return x * by

    ((op, schema, reference, fake, composed_on_cpu),) = registered
    assert (_scaled, op, schema, composed_on_cpu) == ("the op", "scaled", "(Tensor(a!) x, int by) -> Tensor", True)
    assert reference is operator.REFERENCES["scaled"]
    assert reference(torch.ones(2), 3).tolist() == [3, 3]
    assert fake(torch.ones(2, 5), 3).shape == (2,)
    for function in (reference, fake):
        with pytest.raises(ValueError, match=r"scaled: by is 4, choose one of \[2, 3\]"):
            function(torch.ones(2), 4)
        with pytest.raises(ValueError, match=r"zip\(\) argument"):
            function(torch.ones(2))
