"""Do the ops of a step compute what they say, a row for itself, and refuse what does not fit?"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_mlspec import ops
from hf_mlspec.formats.cache.int8 import dequantize, quantize
from hf_mlspec.formats.hadamard import hadamard_matrix
from hf_mlspec.ops import choose, library
from hf_mlspec.ops.rows import ACTIVATIONS

DTYPES = (torch.float32, torch.bfloat16)
STEP = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8}
SLOTS = 50
needs_kernel = pytest.mark.skipif(
    library.kernel_of("rms_norm", "cpu") == "reference", reason="the compiled library is not built"
)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def rotation(dtype: torch.dtype = torch.float32, width: int = 4, norms: bool = True) -> dict:
    """4 heads, 2 key heads of 16 elements, 12 of them rotated; rows at slots 0, 20 and 46, one at rest."""
    angle = seeded(SLOTS, 6, seed=3) * 3
    lanes = [torch.full((4, 2, SLOTS, 16), 7.0, dtype=dtype) for _ in range(2)]
    return {"qkv": seeded(4, width, 128).to(dtype), "q_norm": 1 + seeded(16, seed=1) / 4 if norms else None,
            "k_norm": 1 + seeded(16, seed=2) / 4 if norms else None, "eps": 1e-6, "cos": angle.cos(),
            "sin": angle.sin(), "starts": int32(0, 20, 46, 99), "counts": int32(width, 2, width, 0),
            "keys": lanes[0], "values": lanes[1], "heads": 4}  # fmt: skip


SINKS = torch.tensor([-2.0, 0.0, 1.0, 3.0])


def attention(dtype: torch.dtype = torch.float32, width: int = 4, **rule) -> dict:
    lanes = seeded(2, 4, 2, SLOTS, 16, seed=1).to(dtype)
    return {"q": seeded(4, width, 4, 16).to(dtype), "keys": lanes[0], "values": lanes[1],
            "starts": int32(0, 20, 46, 99), "counts": int32(width, 2, width, 0), "scale": 0.3,
            "window": 0, "softcap": 0.0, "draft_window": 0, "sinks": None, **rule}  # fmt: skip


def good(op: str) -> dict:
    """Operands that fit, by the names of the schema."""
    return {
        "embed_rows": {"ids": int32(1, 2), "table": torch.ones(5, 8), "scale": 2.0},
        "gated": {"gate_up": torch.ones(3, 8), "activation": 0},
        "gated_in_order": {"gate_up": seeded(3, 8), "activation": 0, "order": int32(3, 2, 1, 0)},
        "gated_hadamard": {"gate_up": seeded(3, 48), "activation": 0,
                           "matrix": hadamard_matrix(12).float(), "size": 24, "inner": 1},
        "gated_pairs": {"gate_up": seeded(3, 8), "slope": 1.7, "limit": 0.5},
        "ordered_rows": {"x": seeded(3, 8), "order": int32(*range(7, -1, -1))},
        "rms_norm_in_order": {"x": seeded(3, 8), "weight": torch.ones(8), "eps": 1e-5, "residual": None,
                              "order": int32(*range(7, -1, -1))},
        "rope_write_rows": rotation(),
        "ragged_attention_rows": attention(),
        "choose_rows": {"logits": seeded(2, 9), "softcap": 3.0, "seed": torch.tensor([5]), "streams": int32(0, 1),
                        "positions": int32(7, 8)},
    }[op]  # fmt: skip


OPS = ("embed_rows", "gated", "gated_hadamard", "gated_in_order", "gated_pairs", "ordered_rows", "rms_norm_in_order",
       "rope_write_rows", "ragged_attention_rows", "choose_rows")  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed_rows(dtype):
    table = seeded(6, 8).to(dtype)
    assert torch.equal(ops.embed_rows(int32(0, 5, 2), table, 1.0), table[[0, 5, 2]])
    assert torch.equal(ops.embed_rows(int32(-1, 6, 1), table, 1.0), table[[0, 5, 1]])
    scale = 11.3137
    exact = (table[[3]].double() * torch.tensor(scale).double()).to(torch.float32).to(dtype)
    assert torch.equal(ops.embed_rows(int32(3), table, scale), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "act"), [("silu", F.silu), ("gelu", F.gelu), ("relu", F.relu),
                                           ("gelu_pytorch_tanh", lambda x: F.gelu(x, approximate="tanh"))])
def test_gated(name, act, dtype):
    gate_up = (seeded(5, 14) * 3).to(dtype)
    y = ops.gated(gate_up, ACTIVATIONS[name])
    expected = act(gate_up[:, :7].float()) * gate_up[:, 7:].float()
    assert torch.allclose(y.float(), expected, rtol=STEP[dtype], atol=1e-6)
    assert torch.equal(ops.gated(gate_up[3:4], ACTIVATIONS[name]), y[3:4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_pairs(dtype):
    gate_up = (seeded(5, 14) * 3).to(dtype)
    gate_up[0, :4] = torch.tensor([9.0, 9.0, -9.0, -9.0])
    y = ops.gated_pairs(gate_up, 1.702, 2.0)
    gate, up = gate_up[:, ::2].float().clamp(max=2), gate_up[:, 1::2].float().clamp(-2, 2)
    assert torch.allclose(y.float(), (up + 1) * gate * torch.sigmoid(1.702 * gate), rtol=STEP[dtype], atol=1e-6)
    assert torch.equal(ops.gated_pairs(gate_up[3:4], 1.702, 2.0), y[3:4])
    gate_up[2, 6] = torch.nan
    assert ops.gated_pairs(gate_up, 1.702, 2.0).isnan().nonzero().tolist() == [[2, 3]]


def rotated(heads: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None) -> Tensor:
    """As modules compute it: x cos + rotate_half(x) sin on the first elements; heads `[heads, dim]`, in float64."""
    heads = heads.double()
    if norm is not None:
        heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-6) * norm.double()
    size = 2 * len(cos)
    turned, rest = heads[:, :size], heads[:, size:]
    half = torch.cat([-turned[:, size // 2 :], turned[:, : size // 2]], dim=-1)
    return torch.cat([turned * cos.double().repeat(2) + half * sin.double().repeat(2), rest], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ordered_rows(dtype):
    x, order = seeded(3, 40).to(dtype), torch.randperm(40, generator=torch.Generator().manual_seed(1)).int()
    assert torch.equal(ops.ordered_rows(x, order), x[:, order.long()])
    beyond = torch.tensor([-1, 40, *range(38)], dtype=torch.int32)
    assert torch.equal(ops.ordered_rows(x, beyond)[:, :2], x[:, [0, 39]])
    assert ops.ordered_rows(x[:0], order).shape == (0, 40)
    half = torch.randperm(20, generator=torch.Generator().manual_seed(2)).int()
    assert torch.equal(ops.gated_in_order(x, 1, half), ops.gated(x, 1)[:, half.long()])
    weight = seeded(40, seed=1).abs()
    for residual in (None, seeded(3, 40, seed=2).to(dtype)):
        normed, total = ops.rms_norm_in_order(x, weight, 1e-5, residual, order)
        plain, expected = ops.rms_norm(x, weight, 1e-5, residual)
        assert torch.equal(normed, plain[:, order.long()])
        assert torch.equal(total, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [True, False])
def test_rope_write_rows(dtype, norms):
    case = rotation(dtype, norms=norms)
    q = ops.rope_write_rows(*case.values())
    written = torch.zeros(4, SLOTS, dtype=torch.bool)
    for row, (start, count) in enumerate(zip([0, 20, 46], [4, 2, 4], strict=True)):
        written[row, start : start + count] = True
        for t in range(count):
            parts = case["qkv"][row, t].view(8, 16).split([4, 2, 2])
            angles = case["cos"][start + t], case["sin"][start + t]
            expected_q = rotated(parts[0], *angles, case["q_norm"])
            expected_k = rotated(parts[1], *angles, case["k_norm"])
            close = {"rtol": 2 * STEP[dtype], "atol": 4 * STEP[dtype]}
            assert torch.allclose(q[row, t].double(), expected_q, **close)
            assert torch.allclose(case["keys"][row, :, start + t].double(), expected_k, **close)
            assert torch.equal(case["values"][row, :, start + t], parts[2])
        assert q[row, count:].eq(0).all()
    assert q[3].eq(0).all()
    for lanes in (case["keys"], case["values"]):
        assert torch.equal(lanes.ne(7).any(dim=3).any(dim=1), written)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_codes(dtype):
    """What is written is the codes of what a plain cache would hold; what is read is what they stand for."""
    plain, case = rotation(dtype), rotation(dtype)
    plain |= {name: torch.full((4, 2, SLOTS, 16), 7.0) for name in ("keys", "values")}
    case |= {name: torch.full((4, 2, SLOTS, 20), 7, dtype=torch.int8) for name in ("keys", "values")}
    assert torch.equal(ops.rope_write_rows(*case.values()), ops.rope_write_rows(*plain.values()))
    for name in ("keys", "values"):
        written = plain[name].ne(7).any(dim=3)
        assert torch.equal(case[name][written], quantize(plain[name][written]))
        assert case[name][~written].eq(7).all()
    case = attention(dtype)
    lanes = {name: quantize(case[name]) for name in ("keys", "values")}
    y = ops.ragged_attention_rows(*(case | lanes).values())
    read = ops.ragged_attention_rows(*(case | {name: dequantize(lanes[name]) for name in lanes}).values())
    assert torch.allclose(y.float(), read.float(), rtol=0.02, atol=0.02)  # a kernel may round to bfloat16
    assert not torch.equal(y, ops.ragged_attention_rows(*case.values()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", [{}, {"window": 3}, {"softcap": 2.0}, {"window": 30, "softcap": 1.0},
                                  {"sinks": SINKS}, {"window": 3, "sinks": SINKS}])  # fmt: skip
def test_ragged_attention_rows(dtype, rule):
    case = attention(dtype, **rule)
    y = ops.ragged_attention_rows(*case.values())
    for row, (start, count) in enumerate(zip([0, 20, 46], [4, 2, 4], strict=True)):
        for t in range(count):
            slots = slice(max(0, start + t + 1 - (case["window"] or SLOTS)), start + t + 1)
            k, v = (case[name][row, :, slots].double().repeat_interleave(2, 0) for name in ("keys", "values"))
            scores = torch.einsum("hd,hsd->hs", case["q"][row, t].double(), k) * 0.3
            if case["softcap"]:
                scores = case["softcap"] * torch.tanh(scores / case["softcap"])
            if case["sinks"] is None:
                weights = scores.softmax(-1)
            else:
                weights = torch.cat([scores, SINKS[:, None].double()], dim=1).softmax(-1)[:, :-1]
            expected = torch.einsum("hs,hsd->hd", weights, v)
            rounded = 0.0 if dtype == torch.float32 else STEP[dtype] * torch.einsum("hs,hsd->hd", weights, v.abs())
            off = rounded + 2 * STEP[dtype] * expected.abs() + 1e-5  # rounded: a kernel may round weights to bfloat16
            assert ((y[row, t].double() - expected).abs() <= off).all()
        assert y[row, count:].eq(0).all()
    assert y[3].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "draft_window"), [(0, 1), (0, 64), (90, 5), (5, 90), (0, 1000)])
def test_a_draft_window_leaves_the_first_slots_and_the_last(dtype, window, draft_window):
    lanes = [seeded(3, 2, 300, 16, seed=seed).to(dtype) for seed in (1, 2)]
    rule = {"starts": int32(0, 150, 296), "counts": int32(3, 2, 3), "window": window, "draft_window": draft_window}
    case = attention(dtype, 3) | {"q": seeded(3, 3, 4, 16).to(dtype), "keys": lanes[0], "values": lanes[1]} | rule
    y = ops.ragged_attention_rows(*case.values())
    alone = [
        ops.ragged_attention(case["q"][one, :count].float(), lanes[0][one], lanes[1][one], [start], 0.3, window, 0.0,
                             draft_window)
        for one, start, count in ((slice(0, 1), 0, 3), (slice(1, 2), 150, 2), (slice(2, 3), 296, 3))
    ]  # fmt: skip
    for row, expected in enumerate(alone):
        assert torch.allclose(y[row, : expected.shape[1]].float(), expected[0], rtol=0.02, atol=0.02)
    hidden = [lane.clone() for lane in lanes]
    for lane in hidden:  # of the last row, what none of its tokens sees
        lane[2, :, 64 : max(64, 296 - draft_window + 1)] = 9
    assert torch.equal(ops.ragged_attention_rows(*(case | {"keys": hidden[0], "values": hidden[1]}).values())[2], y[2])


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["without sinks", "with sinks"])
def test_a_token_alone_has_the_same_bits(sinks, dtype):
    whole, query = rotation(dtype), attention(dtype, sinks=sinks)
    q, y = ops.rope_write_rows(*whole.values()), ops.ragged_attention_rows(*query.values())
    for row in range(3):
        for t in range(int(whole["counts"][row])):
            at = {"starts": whole["starts"][row : row + 1] + t, "counts": int32(1)}
            lanes = {name: rotation(dtype)[name][row : row + 1] for name in ("keys", "values")}
            alone = {**whole, **at, **lanes, "qkv": whole["qkv"][row : row + 1, t : t + 1]}
            assert torch.equal(ops.rope_write_rows(*alone.values())[0, 0], q[row, t])
            assert torch.equal(lanes["keys"][0, :, at["starts"][0]], whole["keys"][row, :, at["starts"][0]])
            lanes = {name: query[name][row : row + 1] for name in ("keys", "values")}
            alone = {**query, **at, **lanes, "q": query["q"][row : row + 1, t : t + 1]}
            assert torch.equal(ops.ragged_attention_rows(*alone.values())[0, 0], y[row, t])


@pytest.mark.parametrize("dtype", DTYPES)
def test_choose_rows_greedily(dtype):
    logits = (seeded(6, 300) * 4).to(dtype)
    logits[1], logits[2, [7, 9]], logits[3, 250], logits[4] = 1.0, 90.0, torch.nan, -torch.inf
    for cap in (0.0, 5.0):
        tokens, confidence = ops.choose_rows(logits, cap)
        assert tokens.dtype == torch.int32
        assert tokens[[1, 2, 3, 4]].tolist() == [0, 7, -1, 0]
        assert tokens[[0, 5]].tolist() == logits[[0, 5]].float().argmax(1).tolist()
        capped = cap * torch.tanh(logits.double() / cap) if cap else logits.double()
        expected = capped.softmax(1).gather(1, tokens.long().clamp(0)[:, None])[:, 0]
        assert torch.allclose(confidence[[0, 1, 2, 5]].double(), expected[[0, 1, 2, 5]], rtol=1e-5)
        assert confidence[3].isnan()
        assert cap or confidence[4].isnan()


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 63, 64, 65, 79, 80, 81, 300])
def test_the_largest_logit_is_found_in_every_place(size):
    """A row for every place: the last ones are beyond whole vectors."""
    tokens, confidence = ops.choose_rows(torch.eye(size) * 3, 0.0)
    assert tokens.tolist() == list(range(size))
    assert torch.allclose(confidence, torch.full((size,), 3.0).exp() / (torch.tensor(3.0).exp() + size - 1))


def test_philox_gives_the_published_words():
    """Known answers of Philox4x32-10: tests/kat_vectors of Random123."""
    ones = (1 << 32) - 1
    digits = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for counter, seed, words in (
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, -1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (digits, 0x299F31D0A4093822, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        found = choose.philox(tuple(torch.tensor([c]) for c in counter), torch.tensor([seed]))
        assert tuple(int(word) for word in found) == words


def test_noise_is_gumbel_and_a_function_of_its_place():
    noise = choose.gumbel_noise(torch.tensor([11]), int32(0, 0, 1), int32(0, 1, 0), 50_001)
    assert torch.equal(choose.gumbel_noise(torch.tensor([11]), int32(1), int32(0), 100), noise[2:, :100])
    assert noise.isfinite().all()
    assert torch.allclose(noise.mean(1), torch.full((3,), 0.57722), atol=0.02)
    assert torch.allclose(noise.var(1), torch.full((3,), 1.64493), atol=0.06)
    assert torch.corrcoef(noise).sub(torch.eye(3)).abs().max() < 0.02


def test_rows_with_seeds_of_their_own_and_rows_without_noise():
    logits, streams, positions = seeded(5, 300) * 4, int32(0, 1, -1, 0, -1), int32(7, 7, 8, 9, 9)
    seeds = torch.tensor([3, -5, 3, 1 << 40, 9])
    tokens, sure = ops.choose_rows(logits, 2.0, seeds, streams, positions)
    for r in range(5):
        one = slice(r, r + 1)
        noise = () if streams[r] < 0 else (seeds[one], streams[one], positions[one])
        alone = ops.choose_rows(logits[one], 2.0, *noise)
        assert (tokens[r], sure[r]) == (alone[0][0], alone[1][0])


def test_draws_follow_the_softmax():
    """Chi-square over 20000 draws of 7 tokens: 6 degrees of freedom, beyond 30 in 4 of 100000 tries."""
    count = 20_000
    logits = torch.linspace(-2, 2, 7)
    places = torch.zeros(count, dtype=torch.int32), torch.arange(count, dtype=torch.int32)
    tokens, confidence = ops.choose_rows(logits.repeat(count, 1), 0.0, torch.tensor([3]), *places)
    expected = logits.double().softmax(0)
    seen = torch.bincount(tokens.long(), minlength=7)
    assert ((seen - expected * count).square() / (expected * count)).sum() < 30
    assert torch.allclose(confidence, expected[tokens.long()].float())


def test_levels_with_the_same_noise_agree_more_often():
    near = seeded(2000, 20)
    places = torch.zeros(2000, dtype=torch.int32), torch.arange(2000, dtype=torch.int32)
    first, second = (ops.choose_rows(near + 0.1 * seeded(2000, 20, seed=s), 0.0, torch.tensor([1]), *places)[0]
                     for s in (1, 2))  # fmt: skip
    assert (first == second).float().mean() > 0.85


BAD = [
    ("embed_rows", {"ids": torch.tensor([1])}, TypeError, "ids is torch.int64, expected torch.int32"),
    ("embed_rows", {"ids": int32(1, 2)[None]}, ValueError, r"ids has shape \[1, 2\], expected \[n\]"),
    ("embed_rows", {"table": torch.ones(0, 8)}, ValueError, r"table has shape \[0, 8\]"),
    ("embed_rows", {"table": torch.ones(8, 5).T}, ValueError, "table .*not contiguous"),
    ("embed_rows", {"scale": float("inf")}, ValueError, "scale is inf"),
    ("gated", {"gate_up": torch.ones(3, 7)}, ValueError, r"gate_up has shape \[3, 7\]"),
    ("gated", {"gate_up": torch.ones(3, 8, dtype=torch.float16)}, TypeError, "gate_up is torch.float16"),
    ("gated_in_order", {"order": int32(1, 0)}, ValueError, r"order has shape \[2\], expected \[4\]"),
    ("gated_in_order", {"activation": 9}, ValueError, "activation is 9, choose one of"),
    ("gated_hadamard", {"activation": 9}, ValueError, "activation is 9, choose one of"),
    ("gated_hadamard", {"size": 48}, ValueError, "gated rows have 24 columns, size 48 times inner 1 does not divide"),
    ("gated_hadamard", {"size": 16}, ValueError, "size is 16, expected 12 times a power of two"),
    ("gated_hadamard", {"matrix": torch.ones(12, 11)}, ValueError, r"matrix has shape \[12, 11\]"),
    ("ordered_rows", {"x": torch.ones(2, 3, 8)}, ValueError, r"x has shape \[2, 3, 8\], expected \[n, width\]"),
    ("ordered_rows", {"x": torch.ones(3, 8, dtype=torch.float16)}, TypeError, "x is torch.float16"),
    ("ordered_rows", {"order": int32(1, 0)}, ValueError, r"order has shape \[2\], expected \[8\]"),
    ("ordered_rows", {"order": torch.arange(8)}, TypeError, "order is torch.int64, expected torch.int32"),
    ("ordered_rows", {"order": torch.zeros(16, dtype=torch.int32)[::2]}, ValueError, "not contiguous"),
    ("rms_norm_in_order", {"x": torch.ones(2, 3, 8)}, ValueError, r"x has shape \[2, 3, 8\], expected \[n, width\]"),
    ("rms_norm_in_order", {"order": int32(1, 0)}, ValueError, r"order has shape \[2\], expected \[8\]"),
    ("rms_norm_in_order", {"weight": torch.ones(7)}, ValueError, r"weight has shape \[7\], expected \[8\]"),
    ("gated", {"activation": 9}, ValueError, "activation is 9, choose one of .*'silu': 0"),
    ("rope_write_rows", {"heads": 5}, ValueError, r"qkv has shape \[4, 4, 128\], .*\[4, width, 144\] for 5 heads"),
    ("rope_write_rows", {"qkv": torch.ones(3, 4, 128)}, ValueError, r"qkv has shape \[3, 4, 128\]"),
    ("rope_write_rows", {"q_norm": torch.ones(8)}, ValueError, r"q_norm has shape \[8\], expected \[16\]"),
    ("rope_write_rows", {"k_norm": torch.ones(16).double()}, TypeError, "k_norm is torch.float64"),
    ("rope_write_rows", {"eps": -1.0}, ValueError, "eps is -1.0"),
    ("rope_write_rows", {"cos": torch.ones(9, 9)}, ValueError, r"cos has shape \[9, 9\].*rotary_dim up to 16"),
    ("rope_write_rows", {"sin": torch.ones(9, 6)}, ValueError, r"sin has shape \[9, 6\], expected \[50, 6\]"),
    ("rope_write_rows", {"starts": torch.tensor([0, 1, 2, 3])}, TypeError, "starts is torch.int64"),
    ("rope_write_rows", {"counts": int32(1, 2)}, ValueError, r"counts has shape \[2\], expected \[4\]"),
    ("rope_write_rows", {"values": torch.ones(4, 2, 49, 16)}, ValueError, r"values has shape \[4, 2, 49, 16\]"),
    ("rope_write_rows", {"starts": int32(0, 20, 47, 99)}, ValueError,
     "row 2 has its 4 tokens from slot 47 on, slots and positions are 0 to 49"),
    ("rope_write_rows", {"starts": int32(-1, 20, 40, 99)}, ValueError, "row 0 has its 4 tokens from slot -1 on"),
    ("ragged_attention_rows", {"q": torch.ones(4, 4, 3, 16)}, ValueError, "a multiple of 2 heads"),
    ("ragged_attention_rows", {"keys": torch.ones(4, 2, 16, SLOTS).mT}, ValueError, "last two axes"),
    ("ragged_attention_rows", {"keys": torch.ones(4, 2, SLOTS, 16, dtype=torch.float16)}, TypeError, "keys is"),
    ("ragged_attention_rows", {"scale": float("nan")}, ValueError, "scale is nan"),
    ("ragged_attention_rows", {"window": -1}, ValueError, "window is -1"),
    ("ragged_attention_rows", {"softcap": -2.0}, ValueError, "softcap is -2.0"),
    ("ragged_attention_rows", {"sinks": torch.ones(3)}, ValueError, r"sinks has shape \[3\], expected \[4\]"),
    ("gated_pairs", {"limit": 0.0}, ValueError, "slope is 1.7 and limit 0.0, expected finite numbers"),
    ("gated_pairs", {"gate_up": torch.ones(3, 7)}, ValueError, r"gate_up has shape \[3, 7\]"),
    ("ragged_attention_rows", {"draft_window": -1}, ValueError, "draft_window is -1"),
    ("ragged_attention_rows", {"starts": int32(0, 49, 40, 99)}, ValueError, "row 1 has its 2 tokens from slot 49 on"),
    ("choose_rows", {"logits": torch.ones(2, 0)}, ValueError, r"logits has shape \[2, 0\]"),
    ("choose_rows", {"logits": torch.ones(2, 9).half()}, TypeError, "logits is (torch.float16|Half)"),
    ("choose_rows", {"softcap": float("inf")}, ValueError, "softcap is inf"),
    ("choose_rows", {"streams": None}, ValueError, "positions and seed given alone"),
    ("choose_rows", {"seed": int32(5)}, TypeError, "seed is (torch.int32, expected torch.int64|Int, expected Long)"),
    ("choose_rows", {"seed": torch.tensor([5, 6, 7])}, ValueError, r"seed has shape \[3\], expected \[1\], or one"),
    ("choose_rows", {"positions": int32(1)}, ValueError, r"positions has shape \[1\], expected \[2\]"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "change", "error", "message"), BAD, ids=[f"{b[0]}-{'-'.join(b[1])}" for b in BAD])
def test_operands_that_do_not_fit(op, change, error, message):
    operands = {**good(op), **change}
    lanes = operands.get("keys"), operands.get("values")
    before = [t.clone() for t in lanes if t is not None]
    with pytest.raises(error, match=rf"{op}: .*({message})"):
        getattr(torch.ops.mlspec, op).default(*operands.values())
    if op == "rope_write_rows" and "starts" not in change:
        assert all(torch.equal(a, b) for a, b in zip(lanes, before, strict=True))


def test_no_rows():
    assert ops.embed_rows(int32(), torch.ones(2, 4), 1.0).shape == (0, 4)
    assert ops.gated(torch.ones(0, 8), 0).shape == (0, 4)
    assert [t.shape for t in ops.choose_rows(torch.ones(0, 4))] == [(0,), (0,)]
    assert ops.ragged_attention_rows(*{**attention(width=0), "counts": int32(1, 1, 1, 1)}.values()).numel() == 0
