"""Do the kernels of a GPU write int8 keys and values as formats/cache/ says, and attend to what they stand for?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models import near, prompts, tiny
from ragged_cases import DEVICE, Case, exact, make
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_mlspec
from hf_mlspec import ops
from hf_mlspec.demo_pair import demo_prompts
from hf_mlspec.engines.choose import engine_of
from hf_mlspec.formats.cache.int8 import dequantize, quantize
from hf_mlspec.ops.attention import FIRST_SLOTS

SLOTS = 48
UNTOUCHED = 7
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "dtype": torch.bfloat16, "seed": 2}
OPTIONS = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
WORD = hf_mlspec.MLSpecConfig(format=None, kv_cache="int8")


def write(states: Tensor, cos: Tensor, sin: Tensor, starts: list[int], counts: list[int], norm: Tensor | None = None):
    """Keys and values after a step whose keys and values are `states`, bfloat16 `[batch, width, 2, kv_heads, dim]`."""
    batch, width, _, kv_heads, dim = states.shape
    qkv = torch.cat([torch.ones(batch, width, 1, dim), states.flatten(2, 3)], dim=2)
    qkv = qkv.bfloat16().flatten(2).to(DEVICE)
    lanes = [torch.full((batch, kv_heads, SLOTS, dim + 4), UNTOUCHED, dtype=torch.int8, device=DEVICE)
             for _ in range(2)]  # fmt: skip
    lengths = [torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in (starts, counts)]
    tables, norms = [t.to(DEVICE) for t in (cos, sin)], (None, None if norm is None else norm.to(DEVICE))
    ops.rope_write_rows(qkv, *norms, 1e-6, *tables, *lengths, *lanes, 1)
    return [lane.cpu() for lane in lanes]


def random_states(batch: int, width: int, kv_heads: int, dim: int) -> Tensor:
    random = torch.Generator().manual_seed(dim + width)
    size = 2.0 ** torch.randint(-20, 20, (batch, width, 2, kv_heads, 1), generator=random)
    return (torch.randn(batch, width, 2, kv_heads, dim, generator=random) * size).bfloat16()


@pytest.mark.parametrize(("dim", "half"), [(64, 32), (128, 64), (128, 16), (16, 3), (80, 5), (96, 48), (256, 128),
                                           (112, 0)])  # fmt: skip
@pytest.mark.parametrize("width", [1, 9, 17])
def test_codes_are_those_of_the_reference_bit_for_bit(dim, half, width):
    """A rotation by powers of two: its products are exact, so that a key is one float32 however it is added up."""
    states = random_states(3, width, 2, dim)
    random = torch.Generator().manual_seed(half)
    cos, sin = (2.0 ** torch.randint(-3, 1, (SLOTS, half), generator=random) for _ in range(2))
    starts, counts = [0, 17, SLOTS - width], [width, max(width - 1, 0), width + 3]
    written = write(states, cos, sin, starts, counts)
    expected = [torch.full_like(lane, UNTOUCHED) for lane in written]
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        real = min(count, width)
        slots = slice(start, start + real)
        keys, values = states[row, :real].float().unbind(1)  # [tokens, kv_heads, dim]
        a, b, rest = keys.split([half, half, dim - 2 * half], dim=-1)
        c, s = cos[slots, None], sin[slots, None]
        keys = torch.cat([a * c - b * s, b * c + a * s, rest], dim=-1)
        expected[0][row, :, slots] = quantize(keys).transpose(0, 1)
        expected[1][row, :, slots] = quantize(values).transpose(0, 1)
    assert torch.equal(written[0], expected[0])
    assert torch.equal(written[1], expected[1])


def test_rows_that_are_not_finite_tiny_or_zero():
    dim = 64
    rows = torch.randn(14, dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows[0, 3], rows[1, 63], rows[2, 0] = torch.nan, torch.inf, -torch.inf
    rows[3] = 0
    rows[4], rows[5], rows[6] = rows[4] * 2.0**-105, rows[5] * 2.0**-99, rows[6] * 2.0**-126
    rows[7, 5] = torch.finfo(torch.bfloat16).max
    rows[8], rows[8, 0] = 0, 2.0**-100
    rows[9], rows[9, 63] = 0, -(2.0**-101)
    rows[10], rows[10, 1], rows[11, 2:4] = 1.0, 2.0, torch.tensor([127.0, -127.0])  # ties to even
    rows[11, 4:] = torch.arange(60) / 2
    states = rows[None, :, None, None].expand(1, 14, 2, 1, dim)
    written = write(states, torch.ones(SLOTS, 0), torch.ones(SLOTS, 0), [0], [14])
    for lane in written:
        assert torch.equal(lane[0, 0, :14], quantize(rows))
        assert lane[0, 0, 14:].eq(UNTOUCHED).all()


def test_normed_and_rotated_keys_are_within_a_code():
    torch.manual_seed(0)
    dim, angle, norm = 128, torch.rand(SLOTS, 64) * 6, torch.rand(128) + 0.5
    states = torch.randn(2, 9, 2, 2, dim).bfloat16()
    written = write(states, angle.cos(), angle.sin(), [3, 20], [9, 9], norm=norm)
    lanes = [torch.full_like(lane, UNTOUCHED) for lane in written]
    qkv = torch.cat([torch.ones(2, 9, 2, dim), states.flatten(2, 3)], dim=2).bfloat16().flatten(2)
    lengths = [torch.tensor(n, dtype=torch.int32) for n in ([3, 20], [9, 9])]
    ops.rope_write_rows(qkv, None, norm, 1e-6, angle.cos(), angle.sin(), *lengths, *lanes, 2)
    assert torch.equal(written[1], lanes[1])
    ours, theirs = dequantize(written[0]), dequantize(lanes[0])
    # A norm that rounds the other way moves an element by a step of bfloat16, and a code by one.
    step = theirs.abs().amax(-1, keepdim=True) * (2.0**-7 + 1 / 127)
    inside = torch.zeros(2, 1, SLOTS, 1, dtype=torch.bool)
    inside[0, :, 3:12], inside[1, :, 20:29] = True, True
    assert ((ours - theirs).abs() <= step)[inside.expand_as(ours)].all()
    assert written[0][~inside.expand_as(written[0])].eq(UNTOUCHED).all()


def test_the_reference_gives_the_same_codes_here():
    """What is given back as plain keys and values is quantized by torch, on this device."""
    x = random_states(64, 9, 2, 128).float() * torch.rand(64, 9, 2, 2, 128)
    for one in (x, x.bfloat16()):
        here = quantize(one.to(DEVICE))
        assert torch.equal(here.cpu(), quantize(one))
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(dequantize(here, dtype).cpu(), dequantize(quantize(one), dtype))
            assert torch.equal(quantize(dequantize(here, dtype)), here)


def coded(case: Case) -> Case:
    """The same over codes: rows that were NaN get a scale of NaN, and codes that are none."""
    lanes = []
    for lane in (case.keys, case.values):
        rows = quantize(lane)
        rows[lane.isnan().any(-1)] = torch.tensor([-128, 127] * ((rows.shape[-1] - 4) // 2) + [0, 0, -64, 127],
                                                  dtype=torch.int8, device=rows.device)  # fmt: skip
        lanes.append(rows)
    return replace(case, keys=lanes[0], values=lanes[1])


def check(case: Case) -> Tensor:
    """Float64 over what the codes stand for, within the rounding of the result and of the weights, both bfloat16."""
    y = case.attend()
    expected, size = exact(replace(case, keys=dequantize(case.keys), values=dequantize(case.values)))
    error = (y.double().cpu() - expected).abs()
    bound = 2.0**-8 * expected.abs() + 2.0**-7 * size + 1e-6
    assert (error <= bound).all(), (error / bound).max()
    for row, count in enumerate(case.counts):
        assert y[row, max(count, 0) :].eq(0).all()
    return y


RULES = [{}, {"window": 5}, {"window": 70}, {"softcap": 5.0}, {"window": 300, "softcap": 20.0}, {"draft_window": 65},
         {"draft_window": 200, "window": 400}]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 9, 64])
def test_attention_against_float64(width, rule):
    counts = [width, width, 1, width, 2, width, width + 5, -1]
    check(coded(make([0, 63, 64, 511, 520, 200, 7, 3], counts, width, **rule)))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (14, 2, 64), (32, 1, 128), (6, 2, 96), (3, 1, 16),
                                                        (4, 2, 112), (8, 4, 256), (5, 1, 160), (40, 8, 80)])
@pytest.mark.parametrize("width", [1, 3, 20])
def test_shapes(heads, kv_heads, dim, width):
    check(coded(make([0, 100, 333], [width, max(1, width - 2), width], width, heads, kv_heads, dim, 400)))


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dim", [64, 112, 128])
def test_a_prompt(dim, rule):
    """Of so many tokens the codes are widened first on Hopper; the slots that are allocated are no multiple of 64."""
    check(coded(make([0, 130], [300, 250], 300, heads=8, kv_heads=1, dim=dim, slots=500, **rule)))


@pytest.mark.parametrize(
    ("dim", "heads", "rule"),
    [(128, 8, {}), (64, 14, {"window": 2100}), (96, 6, {"softcap": 6.0}), (256, 4, {}),
     (128, 32, {"draft_window": 600})],
)  # fmt: skip
def test_bits_depend_on_position_alone(dim, heads, rule):
    """One token, 2, 9, 64 and a piece of a prompt, in a batch and alone; behind the ends scales are NaN."""
    starts, width = [0, 2000, 4600, 4711], 330
    case = coded(make(starts, [width, width, width, 7], width, heads=heads, dim=dim, slots=5056, **rule))
    whole = case.attend()
    for first, count in ((0, 1), (37, 2), (100, 9), (321, 9), (200, 13), (64, 33), (66, 64), (5, 200)):
        taken, counts = slice(first, first + count), [max(0, min(count, n - first)) for n in case.counts]
        piece = replace(case, q=case.q[:, taken].contiguous(), starts=[s + first for s in starts], counts=counts)
        found = check(piece) if count == 1 else piece.attend()
        assert torch.equal(found, whole[:, taken]), (first, count)
        for r in (1, 2):
            one, length = slice(r, r + 1), starts[r] + first + count
            alone = Case(piece.q[one], case.keys[one, :, :length], case.values[one, :, :length], piece.starts[one],
                         counts[one], **rule)
            assert torch.equal(alone.attend(), whole[one, taken]), (first, count, r)


@pytest.mark.parametrize(("width", "dim"), [(1, 128), (1, 64), (9, 64), (33, 128), (3, 256)])
def test_bits_do_not_depend_on_the_batch_or_the_slots(width, dim):
    starts = [(37 * r * r) % 450 for r in range(33)]
    case = coded(make(starts, [width] * 33, width, dim=dim, slots=512))
    whole = case.attend()
    roomy = [torch.full((33, 2, 4096, dim + 4), 127, dtype=torch.int8, device=DEVICE) for _ in range(2)]
    for old, new in zip((case.keys, case.values), roomy, strict=True):
        new[:, :, :512] = old
    for r in range(33):
        one = slice(r, r + 1)
        alone = Case(case.q[one], case.keys[one], case.values[one], starts[one], [width])
        assert torch.equal(alone.attend(), whole[one]), r
        assert torch.equal(replace(alone, keys=roomy[0][one], values=roomy[1][one]).attend(), whole[one]), r


def test_who_sees_a_scale_of_nan_gets_nan_and_no_one_else_notices():
    """Token 4 of nine has a key, or a value, that was not finite: those before it, and behind it, in one tile."""
    case = coded(make([130], [9], 9))
    clean = case.attend()
    for lane in (case.keys, case.values):
        broken = lane.clone()
        broken[0, 0, 134, -4:] = torch.tensor([0, 0, -64, 127], dtype=torch.int8, device=DEVICE)
        y = replace(case, **{"keys" if lane is case.keys else "values": broken}).attend()
        assert torch.equal(y[:, :4], clean[:, :4])
        assert y[:, 4:, :4].isnan().all()  # the first key head's queries
        assert torch.equal(y[:, 4:, 4:], clean[:, 4:, 4:])


def test_lanes_cut_out_of_a_larger_tensor_and_lanes_that_do_not_fit():
    case = coded(make([30, 200], [4, 4], 4))
    whole = torch.full((3, 2, 2, 2, 640, 132), 127, dtype=torch.int8, device=DEVICE)
    whole[1, 0], whole[1, 1] = case.keys, case.values
    assert torch.equal(replace(case, keys=whole[1, 0], values=whole[1, 1]).attend(), case.attend())
    odd = [lane[:, :, :321].contiguous() for lane in (case.keys, case.values)]
    with pytest.raises(ValueError, match="must be multiples of 16"):
        replace(case, keys=odd[0], values=odd[1]).attend()
    with pytest.raises((TypeError, ValueError), match="values"):
        replace(case, values=case.values[..., :128].bfloat16().contiguous()).attend()
    assert FIRST_SLOTS == 64


def asked(lengths: list[int]) -> dict[str, Tensor]:
    return {name: tensor.cuda() for name, tensor in prompts(lengths).items()}


def pair():
    """A target that keeps int8 keys and values, and a draft that does not say so."""
    target, draft = (tiny(**SHAPE, max_position_embeddings=2048) for _ in range(2))
    draft = near(draft, 0.02)
    target.config.quantization_config = WORD
    return target.cuda(), draft.cuda()


def test_the_model_runs_in_compiled_steps_with_half_the_bytes(kernels_are_required):
    target, _ = pair()
    engine = engine_of(target)
    assert engine.name == "cuda"
    plain = tiny(**SHAPE, max_position_embeddings=2048).cuda()
    inputs = asked([9, 3])
    for model in (target, plain):
        model.generate(**inputs, **OPTIONS, assistant_models=[])
    bytes_ = [hf_mlspec.last_stats(model).target_cache_bytes for model in (target, plain)]
    assert bytes_[0] * 64 == bytes_[1] * 36


@pytest.mark.parametrize("lengths", [[9], [3, 17, 1], [700, 3]], ids=str)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_chain_writes_what_the_target_alone_writes(kernels_are_required, lengths, sampled):
    """In captured rounds and, as a processor reads tokens, step by step."""
    target, draft = pair()
    inputs = asked(lengths)
    for settings in ({}, {"repetition_penalty": 1.1}):
        texts = []
        for levels in ([], ["mxfp4"], [draft], ["mxfp4", draft]):
            torch.manual_seed(5)
            how = OPTIONS | {"do_sample": sampled, **settings}
            config = {"draft_cache": "int8"} if levels else {}
            texts.append(target.generate(**inputs, **how, assistant_models=levels, speculation_config=config).tolist())
        assert texts[1:] == texts[:1] * 3


@pytest.mark.parametrize("sampled", [False, True])
def test_a_plain_target_with_a_draft_over_codes(kernels_are_required, sampled):
    target, draft = pair()
    del target.config.quantization_config
    inputs, texts, sizes = asked([9, 40]), [], []
    for how in (None, {}, {"draft_cache": "int8"}, {"draft_cache": "int8", "draft_window": 16}):
        torch.manual_seed(3)
        levels = [] if how is None else [draft]
        texts.append(target.generate(**inputs, **OPTIONS | {"do_sample": sampled}, assistant_models=levels,
                                     speculation_config=how or {}).tolist())  # fmt: skip
        sizes += [level.cache_bytes for level in hf_mlspec.last_stats(target).levels]
    assert texts[1:] == texts[:1] * 3
    assert sizes[1] * 64 == sizes[0] * 36 == sizes[2] * 64


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("captured", [True, False])
def test_the_demo_pair_over_codes(kernels_are_required, sampled, captured):
    """Rows of real text in one batch; the target's cache, the draft's, or both hold codes."""
    folders = hf_mlspec.demo_pair()
    target, draft = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda() for folder in folders)
    tokenizer = AutoTokenizer.from_pretrained(folders[0], padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    inputs = tokenizer([one["text"] for one in demo_prompts()[:4]], return_tensors="pt", padding=True).to(DEVICE)
    slow = {} if captured else {"repetition_penalty": 1.1}
    settings = {"max_new_tokens": 96, "do_sample": sampled, "pad_token_id": tokenizer.pad_token_id, **slow}

    def texts(levels, **config):
        torch.manual_seed(7)
        return target.generate(**inputs, **settings, assistant_models=levels, speculation_config=config).tolist()

    plain = texts([])
    assert texts([draft], draft_cache="int8") == plain
    target.config.quantization_config = WORD
    alone = texts([])
    for levels in ([draft], ["mxfp4"], ["mxfp4", draft]):
        assert texts(levels, draft_cache="int8") == alone
        assert texts(levels) == alone


def test_past_key_values_go_out_and_come_back_as_the_same_codes(kernels_are_required):
    target, draft = pair()
    inputs = asked([150])
    how = {"return_dict_in_generate": True}
    whole = target.generate(**inputs, **OPTIONS, assistant_models=[], **how)
    first = target.generate(**inputs, **OPTIONS | {"max_new_tokens": 12}, assistant_models=[draft], **how)
    cache = first.past_key_values
    assert cache.layers[0].keys.dtype == torch.bfloat16
    rest = target.generate(first.sequences, attention_mask=torch.ones_like(first.sequences), past_key_values=cache,
                           **OPTIONS | {"max_new_tokens": 28}, assistant_models=["mxfp4"], **how)  # fmt: skip
    assert torch.equal(rest.sequences, whole.sequences)
    for one, other in zip(rest.past_key_values.layers, whole.past_key_values.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


def test_a_stream_keeps_prefixes_of_codes(kernels_are_required):
    target, draft = pair()
    row = asked([90])["input_ids"][0].tolist()
    rows = [row, row[:80] + row[:9], row[:50]]
    alone = []
    for one in rows:
        whole = target.generate(torch.tensor([one], device=DEVICE), **OPTIONS, assistant_models=[])
        alone.append(whole[0, len(one) :].tolist())
    target.generation_config.eos_token_id = None
    requests = [hf_mlspec.Request(one, max_new_tokens=40) for one in rows]
    done = list(hf_mlspec.generate_stream(target, requests, assistant_models=["mxfp4", draft], max_batch=1))
    assert [one.new_tokens for one in sorted(done, key=lambda one: requests.index(one.request))] == alone
