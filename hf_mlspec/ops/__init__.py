"""Who computes? The only door to compiled code: typed functions over the ``mlspec`` operators.

"float" below is float32, bfloat16 or float16; results have x's dtype. Every function raises TypeError or ValueError
for operands that do not fit, and KernelError without a kernel under MLSPEC_REQUIRE_KERNELS=1. The compiled kernels
give a row the same bits whatever the other rows, their number and the number of threads.
"""

from __future__ import annotations

from .adapters import adapted_linear, low_rank_added, low_rank_between
from .attention import ragged_attention, ragged_attention_rows, rope_write, rope_write_rows
from .choose import choose_rows
from .cuda_library import why_no_cuda_kernels
from .delta import delta_rows, sigmoid_gated
from .dense import bf16_linear, f32_linear
from .expert_plans import MOST_ROUTED, norm_route_row, plan_rows, route_rows
from .experts import (
    GATED_OUTPUTS,
    dense_expert_rows,
    int4_expert_rows,
    mxfp4_expert_rows,
    nested_expert_rows,
    plane_expert_rows,
    weighted_norm_rows,
    weighted_rows,
)
from .hadamard import gated_hadamard, hadamard_rows
from .int4 import int4_dequantize, int4_linear, int4_sums, prepack_int4, unprepack_int4
from .int4_int8 import int4_int8_linear, prepack_int4_int8, unprepack_int4_int8
from .library import KernelError, UnreadableLibrary, kernel_table, library_hash, why_not_compiled
from .lut import lut_linear, prepack_lut, unprepack_lut
from .mxfp4 import mxfp4_linear, prepack_mxfp4, unprepack_mxfp4
from .nested import nested_linear, nested_rows, prepack_nested, unprepack_nested
from .planes import bitplane_integers, bitplane_linear, bitplane_sums, prepack_planes, unprepack_planes
from .planes.choosing import bitplane_chosen, choose_of_prompt, choose_of_steps, chooses_on_device
from .round import round_lookup, round_open, round_push, round_settle, round_window
from .row_codes import Codes, CodesOf, gated_codes, int4_codes_linear, norm_codes, row_codes
from .rows import (
    activated,
    embed_rows,
    gated,
    gated_in_order,
    gated_pairs,
    ordered_rows,
    quantize_rows,
    rms_norm,
    rms_norm_in_order,
    silu_mul,
)
from .words import pack_awq_words, pack_gptq_words
from .zipper import (
    prepack_zipper,
    unprepack_zipper,
    zipper_high_joined,
    zipper_high_linear,
    zipper_high_sums,
    zipper_linear,
    zipper_low_linear,
    zipper_low_sums,
)
from .zipper_table import zipper_rows

__all__ = [
    "GATED_OUTPUTS",
    "MOST_ROUTED",
    "Codes",
    "CodesOf",
    "KernelError",
    "UnreadableLibrary",
    "activated",
    "adapted_linear",
    "bf16_linear",
    "bitplane_chosen",
    "bitplane_integers",
    "bitplane_linear",
    "bitplane_sums",
    "choose_of_prompt",
    "choose_of_steps",
    "choose_rows",
    "chooses_on_device",
    "delta_rows",
    "dense_expert_rows",
    "embed_rows",
    "f32_linear",
    "gated",
    "gated_codes",
    "gated_hadamard",
    "gated_in_order",
    "gated_pairs",
    "hadamard_rows",
    "int4_codes_linear",
    "int4_dequantize",
    "int4_expert_rows",
    "int4_int8_linear",
    "int4_linear",
    "int4_sums",
    "kernel_table",
    "library_hash",
    "low_rank_added",
    "low_rank_between",
    "lut_linear",
    "mxfp4_expert_rows",
    "mxfp4_linear",
    "nested_expert_rows",
    "nested_linear",
    "nested_rows",
    "norm_codes",
    "norm_route_row",
    "ordered_rows",
    "pack_awq_words",
    "pack_gptq_words",
    "plan_rows",
    "plane_expert_rows",
    "prepack_int4",
    "prepack_int4_int8",
    "prepack_lut",
    "prepack_mxfp4",
    "prepack_nested",
    "prepack_planes",
    "prepack_zipper",
    "quantize_rows",
    "ragged_attention",
    "ragged_attention_rows",
    "rms_norm",
    "rms_norm_in_order",
    "rope_write",
    "rope_write_rows",
    "round_lookup",
    "round_open",
    "round_push",
    "round_settle",
    "round_window",
    "route_rows",
    "row_codes",
    "sigmoid_gated",
    "silu_mul",
    "unprepack_int4",
    "unprepack_int4_int8",
    "unprepack_lut",
    "unprepack_mxfp4",
    "unprepack_nested",
    "unprepack_planes",
    "unprepack_zipper",
    "weighted_norm_rows",
    "weighted_rows",
    "why_no_cuda_kernels",
    "why_not_compiled",
    "zipper_high_joined",
    "zipper_high_linear",
    "zipper_high_sums",
    "zipper_linear",
    "zipper_low_linear",
    "zipper_low_sums",
    "zipper_rows",
]
