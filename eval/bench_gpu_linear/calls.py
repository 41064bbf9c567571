"""How are the GPU's linear kernels called without torch's dispatcher? The C structures of linear.h, filled in."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import torch

from hf_mlspec.formats import activations, int4, mxfp4, nested
from hf_mlspec.formats.nested import codebooks
from hf_mlspec.ops.nested import tiles_cuda as tiles_nested_cuda


class Linear(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("tiles", "more", "codebook", "tables", "x", "x_scales", "bias", "out")]
        + [("exponent_shift", ctypes.c_void_p)]
        + [(name, ctypes.c_int64) for name in ("num_tokens", "in_features", "out_features", "x_scale_stride")]
        + [("outputs_of_weight", ctypes.c_int64)]
        + [(name, ctypes.c_int32) for name in ("group_size", "has_zeros", "outliers")]
        + [(name, ctypes.c_int32) for name in ("tile_stride", "zero_doubled", "num_planes", "absent_planes")]
        + [("num_apart", ctypes.c_int32), ("apart", ctypes.c_void_p * 7)]
        + [("widths", ctypes.c_void_p), ("num_widths", ctypes.c_int64)]
        + [(name, ctypes.c_int32) for name in ("table_columns", "weight_bits", "activation_bits")]
        + [("activation_clip", ctypes.c_float)]
        + [(name, ctypes.c_int32) for name in ("bias_is_float32", "out_is_float32")]
        + [(name, ctypes.c_void_p) for name in ("partial", "between", "up", "first")]
        + [(name, ctypes.c_int64) for name in ("low_ranks", "low_rank")]
        + [(name, ctypes.c_int32) for name in ("overlap", "variant", "ranks", "ring_bytes", "stages_ahead")]
        + [("stream", ctypes.c_void_p)]
    )


class Quantize(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("x", "codes", "scales")]
        + [(name, ctypes.c_int64) for name in ("num_tokens", "in_features", "scale_stride")]
        + [(name, ctypes.c_int32) for name in ("group_size", "bits", "outliers")]
        + [("clip", ctypes.c_float)]
        + [(name, ctypes.c_int32) for name in ("for_linear", "overlap")]
        + [("stream", ctypes.c_void_p)]
    )


class Prepack(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("weight", "scale", "zero", "tiles", "exponent_shift")]
        + [(name, ctypes.c_int64) for name in ("in_features", "out_features")]
        + [(name, ctypes.c_int32) for name in ("group_size", "mxfp4")]
        + [("stream", ctypes.c_void_p)]
    )


@dataclasses.dataclass(frozen=True)
class Op:
    """One linear: a format of weights and the bits of the activations it is called with."""

    name: str
    function: str
    group_size: int = 0
    zeros: bool = False
    bits: int = 16
    weight_bits: int = 0  # nested: 16 or 4

    @property
    def mxfp4(self) -> bool:
        return self.function == "mxfp4"


OPS = (
    Op("bf16", "bf16"),
    Op("mxfp4", "mxfp4", 32),
    Op("mxfp4 a8", "mxfp4", 32, bits=8),
    *(Op(f"int4 g{g}{'z' if z else ''} a{bits}", "int4", g, z, bits)
      for g in (128, 64, 32) for z in (False, True) for bits in (16, 8)),
    Op("int4 g128 a4", "int4", 128, bits=4),
    Op("nested", "nested", 32, weight_bits=16),
    Op("nested4", "nested", 32, weight_bits=4),
    Op("nested4 a8", "nested", 32, bits=8, weight_bits=4),
)  # fmt: skip


@dataclasses.dataclass
class Weight:
    op: Op
    out_features: int
    in_features: int
    saved: list[torch.Tensor]  # weight, scale, zero as they are on disk; nested: nibbles, scale, low, high
    tiles: torch.Tensor  # bf16: the weight
    exponent_shift: torch.Tensor | None = None  # int32 [1]
    more: torch.Tensor | None = None  # nested: the tiles of low bits
    codebook: torch.Tensor | None = None

    def dequantized(self) -> torch.Tensor:
        """float64 [out, in]."""
        if self.op.function == "bf16":
            return self.saved[0].double()
        if self.op.mxfp4:
            return mxfp4.dequantize(self.saved[0], self.saved[1]).double()
        if self.op.weight_bits == 16:
            return nested.join(*self.saved).double()
        if self.op.weight_bits == 4:
            return nested.dequantize_draft(*self.saved[:2], self.codebook).double()
        return int4.dequantize(*self.saved).double()

    def copy(self) -> Weight:
        more = self.more.clone() if self.op.weight_bits == 16 else self.more
        return dataclasses.replace(self, tiles=self.tiles.clone(), more=more)


def random_saved(op: Op, out_features: int, in_features: int, large_scales: bool = False) -> list[torch.Tensor]:
    if op.function == "bf16":
        return [torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16)]
    if op.function == "nested":
        weight = torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16)
        weight *= 2.0**20 if large_scales else 1.0  # beyond the largest exponent without a shift
        return list(nested.split(weight, codebooks.codebook_of(codebooks.DEFAULT, weight.device))[:4])
    codes = torch.randint(0, 256, (out_features, in_features // 2), dtype=torch.uint8, device="cuda")
    groups = (out_features, in_features // op.group_size)
    if op.mxfp4:
        first = 150 if large_scales else 116
        return [codes, torch.randint(first, first + 9, groups, dtype=torch.uint8, device="cuda")]
    scale = (torch.rand(groups, device="cuda") * 0.02 + 0.001).half()
    zeros = [torch.randint(0, 16, groups, dtype=torch.uint8, device="cuda")] if op.zeros else []
    return [codes, scale, *zeros]


@dataclasses.dataclass
class Activations:
    """What a linear reads: bfloat16, or int8 codes (order 0 8 1 9 .. of every 16) and scales [groups, tokens]."""

    data: torch.Tensor
    scales: torch.Tensor | None = None


class Kernels:
    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        linears = ("bf16_linear", "int4_linear", "mxfp4_linear", "nested_linear")
        others = ("quantize_rows", "prepack_tiles")
        for name in (*linears, *others, "unprepack_tiles"):
            getattr(self.library, f"mlspec_cuda_{name}").restype = ctypes.c_char_p
        self.library.mlspec_cuda_tile_bytes.restype = ctypes.c_int64
        self.library.mlspec_cuda_bf16_partial_bytes.restype = ctypes.c_int64

    def call(self, name: str, arguments: ctypes.Structure) -> None:
        problem = getattr(self.library, f"mlspec_cuda_{name}")(ctypes.byref(arguments))
        if problem is not None:
            raise RuntimeError(f"{name}: {problem.decode()}")

    def _move(
        self, name: str, op: Op, saved: list[torch.Tensor], ins: int, tiles: torch.Tensor, shift: torch.Tensor
    ) -> None:
        pointers = [t.data_ptr() for t in saved] + [None] * (3 - len(saved))
        self.call(name, Prepack(*pointers, tiles.data_ptr(), shift.data_ptr(), ins, saved[0].shape[0], op.group_size,
                                op.mxfp4, torch.cuda.current_stream().cuda_stream))  # fmt: skip

    def prepack(self, op: Op, saved: list[torch.Tensor], in_features: int) -> Weight:
        outs = saved[0].shape[0]
        if op.function == "bf16":
            return Weight(op, outs, in_features, saved, saved[0])
        if op.function == "nested":
            tiles, exponents, low = tiles_nested_cuda.pack(*saved)
            codebook = codebooks.codebook_of(codebooks.DEFAULT, tiles.device)
            return Weight(op, outs, in_features, saved, tiles, exponents, low, codebook)
        zero = saved[2].data_ptr() if op.zeros else None
        size = self.library.mlspec_cuda_tile_bytes(
            ctypes.byref(Prepack(None, None, zero, None, None, in_features, outs, op.group_size, op.mxfp4, None))
        )
        tiles = torch.full((size,), 0xEE, dtype=torch.uint8, device="cuda")
        shift = torch.full((1,), -7, dtype=torch.int32, device="cuda")
        self._move("prepack_tiles", op, saved, in_features, tiles, shift)
        return Weight(op, outs, in_features, saved, tiles, shift)

    def unprepack(self, weight: Weight) -> list[torch.Tensor]:
        if weight.op.function == "nested":
            return list(
                tiles_nested_cuda.unpack(weight.tiles, weight.exponent_shift, weight.more, weight.out_features)
            )
        back = [torch.full_like(t, 77) for t in weight.saved]
        self._move("unprepack_tiles", weight.op, back, weight.in_features, weight.tiles, weight.exponent_shift)
        return back

    def linear(
        self, weight: Weight, x: Activations, out: torch.Tensor, bias: torch.Tensor | None = None, **choices: int
    ) -> None:
        arguments = Linear(
            tiles=weight.tiles.data_ptr(), weight_bits=weight.op.weight_bits,
            more=None if weight.more is None else weight.more.data_ptr(),
            codebook=None if weight.codebook is None else weight.codebook.data_ptr(),
            x=x.data.data_ptr(), out=out.data_ptr(), num_tokens=x.data.shape[0],
            bias=None if bias is None else bias.data_ptr(),
            bias_is_float32=bias is not None and bias.dtype == torch.float32,
            exponent_shift=None if weight.exponent_shift is None else weight.exponent_shift.data_ptr(),
            in_features=weight.in_features, out_features=weight.out_features, group_size=weight.op.group_size,
            has_zeros=weight.op.zeros, activation_bits=weight.op.bits,
            stream=torch.cuda.current_stream().cuda_stream, **choices,
        )  # fmt: skip
        if x.scales is not None:
            arguments.x_scales, arguments.x_scale_stride = x.scales.data_ptr(), x.scales.shape[1]
        if weight.op.function == "bf16":
            room = self.library.mlspec_cuda_bf16_partial_bytes(ctypes.byref(arguments))
            partial = torch.empty(room, dtype=torch.uint8, device="cuda")  # the stream frees it behind the call
            arguments.partial = partial.data_ptr() if room else None
        self.call(f"{weight.op.function}_linear", arguments)

    def empty_activations(self, op: Op, tokens: int, size: int) -> Activations:
        """Poisoned."""
        if op.bits == 16:
            return Activations(torch.full((tokens, size), float("nan"), dtype=torch.bfloat16, device="cuda"))
        groups = -(-size // 128) * (128 // op.group_size)
        scales = torch.full((groups, -(-tokens // 4) * 4), float("nan"), device="cuda")
        return Activations(torch.full((tokens, size), 99, dtype=torch.int8, device="cuda"), scales)

    def quantize(self, op: Op, x: torch.Tensor, to: Activations, overlap: int = 0) -> None:
        """bfloat16 x [tokens, in] as the linear's activations; 16 bits: nothing to do."""
        self.call("quantize_rows", Quantize(
            x.data_ptr(), to.data.data_ptr(), to.scales.data_ptr(), *x.shape, to.scales.shape[1], op.group_size,
            op.bits, 0, 1.0, 1, overlap, torch.cuda.current_stream().cuda_stream))  # fmt: skip

    def quantize_plain(self, x: torch.Tensor, group_size: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.full(x.shape, 99, dtype=torch.int8, device="cuda")
        scales = torch.full((x.shape[0], -(-x.shape[1] // group_size)), -1.0, device="cuda")
        self.call("quantize_rows", Quantize(
            x.data_ptr(), codes.data_ptr(), scales.data_ptr(), *x.shape, 0, group_size, bits, 0, 1.0, 0, 0,
            torch.cuda.current_stream().cuda_stream))  # fmt: skip
        return codes, scales

    def activations(self, op: Op, x: torch.Tensor) -> Activations:
        if op.bits == 16:
            return Activations(x)
        to = self.empty_activations(op, *x.shape)
        self.quantize(op, x, to)
        return to


def expected_activations(op: Op, x: torch.Tensor) -> tuple[Activations, torch.Tensor]:
    """What quantize_rows must give, by the formula on the CPU, and its values in float64."""
    if op.bits == 16:
        return Activations(x), x.double()
    tokens, size = x.shape
    codes, scales = (t.to(x.device) for t in activations.quantize_rows(x.cpu(), op.group_size, op.bits))
    padded = torch.zeros(-(-size // 128) * (128 // op.group_size), -(-tokens // 4) * 4, device=x.device)
    padded[: scales.shape[1], :tokens] = scales.T
    order = codes.view(tokens, -1, 2, 8).transpose(2, 3).reshape(tokens, size).contiguous()
    return Activations(order, padded), codes.double() * scales.double().repeat_interleave(op.group_size, 1)[:, :size]
