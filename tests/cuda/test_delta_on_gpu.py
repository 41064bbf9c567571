"""On a GPU: are gated delta nets those of the plain op and the modules, with the same bits alone and among others?"""

from __future__ import annotations

import pytest
import torch
from decoder_cases import check_captured_chain, random_ids
from decoders import HYBRIDS, Lanes, ragged_rows_agree, random_model
from delta_cases import CALLS, LENGTH, Rows, added_numbers, numbers

import hf_mlspec
from hf_mlspec import ops
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.engines.cuda.engine import CudaEngine
from hf_mlspec.engines.engine import Guess
from hf_mlspec.ops.delta import AT_END, AT_START, KEEP

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "mamba_d_head": 32}
PACKED = {**SHAPE, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "moe_intermediate_size": 64}
PACKED |= {"shared_intermediate_size": 256}
TOKENS = 200
LONG = [[1, 3, 128, 128], [2, 2, 64, 40], [1, 2, 32, 8], [1, 1, 256, 256], [4, 140, 64, 64]]

pytestmark = pytest.mark.usefixtures("kernels_are_required")


def on_gpu(name: str, **options):
    return random_model(name, torch.bfloat16, **{**SHAPE, **options}).cuda()


@pytest.mark.parametrize(("sizes", "taps"), [([2, 4, 12, 8], 4), ([1, 3, 128, 128], 4), ([2, 2, 64, 40], 2),
                                             ([1, 2, 160, 256], 8)], ids=str)  # fmt: skip
def test_tokens_are_those_of_the_plain_op_with_one_set_of_bits(sizes, taps):
    plain = Rows(*numbers(torch.bfloat16, sizes, taps), sizes).feed([0, 0], [LENGTH] * 2, AT_END)
    given = numbers(torch.bfloat16, sizes, taps, "cuda")
    rows = Rows(*given, sizes, behind=3 * (sizes[0] == 1))
    whole = Rows(*given, sizes).feed([0, 0], [LENGTH] * 2, AT_END)
    for r in range(2):
        assert float((whole[r].cpu().float() - plain[r]).norm() / plain[r].norm()) < 2e-3
    for starts, counts, settles in CALLS if taps == 4 else ():
        for r, found in enumerate(rows.feed(starts, counts, settles)):
            assert torch.equal(found, whole[r][starts[r] : starts[r] + counts[r]])


@pytest.mark.parametrize(("sizes", "normed"), [([2, 4, 12, 8], 16), ([1, 3, 128, 64], 192), ([2, 2, 16, 40], 20),
                                               ([1, 4, 256, 64], 64)], ids=str)  # fmt: skip
def test_tokens_of_mamba_are_those_of_the_plain_op_with_one_set_of_bits(sizes, normed):
    plain = Rows(*added_numbers(torch.bfloat16, sizes, normed=normed), sizes).feed([0, 0], [LENGTH] * 2, AT_END)
    given = added_numbers(torch.bfloat16, sizes, normed=normed, device="cuda")
    rows = Rows(*given, sizes, behind=3 * (sizes[0] == 1))
    whole = Rows(*given, sizes).feed([0, 0], [LENGTH] * 2, AT_END)
    for r in range(2):
        assert float((whole[r].cpu().float() - plain[r]).norm() / plain[r].norm()) < 2e-3
    for starts, counts, settles in CALLS:
        for r, found in enumerate(rows.feed(starts, counts, settles)):
            assert torch.equal(found, whole[r][starts[r] : starts[r] + counts[r]])


@pytest.mark.parametrize("added", [False, True], ids=["delta", "mamba"])
@pytest.mark.parametrize("sizes", LONG, ids=str)
def test_long_prompts_have_the_bits_of_steps(sizes, added):
    """Of 64 tokens and more, up to states that are behind some of them."""
    kinds = [lambda **how: added_numbers(torch.bfloat16, sizes, normed=sizes[3], **how),
             lambda **how: numbers(torch.bfloat16, sizes, **how)]  # fmt: skip
    qkvz, ba, net = kinds[not added](device="cuda")
    more = 5  # times LENGTH
    qkvz, ba = (None if all is None else all.repeat(1, more, 1) for all in (qkvz, ba))
    total = more * LENGTH
    whole = Rows(qkvz, ba, net, sizes).feed([0, 0], [total, total - 3], AT_END)
    pieces = Rows(qkvz, ba, net, sizes)
    for start in range(0, total, 7):
        counts = [max(0, min(7, total - start)), max(0, min(7, total - 3 - start))]
        for r, found in enumerate(pieces.feed([start] * 2, counts, AT_END)):
            assert torch.equal(found, whole[r][start : start + counts[r]]), (start, r)
    parts = Rows(qkvz, ba, net, sizes, behind=5)
    for r, found in enumerate(parts.feed([0, 0], [90, 70], AT_END)):
        assert torch.equal(found, whole[r][: (90, 70)[r]])
    for r, found in enumerate(parts.feed([88, 69], [total - 88, 65], AT_END)):
        assert torch.equal(found, whole[r][(88, 69)[r] :][: (total - 88, 65)[r]])


@pytest.mark.parametrize("added", [False, True], ids=["delta", "mamba"])
def test_a_token_of_many_rows_has_the_bits_that_it_has_in_two(added):
    """More tokens are run again than blocks look for, and a lane has as many columns as suit so many heads."""
    sizes = [2, 4, 64, 32]
    given = (added_numbers if added else numbers)(torch.bfloat16, sizes, device="cuda")
    few, many = steps_of(*given, sizes, 2), steps_of(*given, sizes, 600)
    for one, two in zip(few, many, strict=True):
        assert torch.equal(two, one.repeat(300, 1, 1))
        assert not one.isnan().any()


def steps_of(qkvz, ba, net, sizes: list[int], rows: int) -> list[torch.Tensor]:
    """What three calls of rows give: a prompt of 3, a draft of 9, and a token behind both with a state of 3."""
    qkvz, ba = (None if all is None else all.repeat(rows // 2, 1, 1) for all in (qkvz, ba))
    *net, bias, skip, normed = net
    states = torch.zeros(rows, *sizes[1:], device="cuda")
    inputs = torch.zeros(rows, 16, net[0].shape[1] + 2 * sizes[1], dtype=torch.bfloat16, device="cuda")
    number, found = lambda n: torch.full((rows,), n, dtype=torch.int32, device="cuda"), []
    for start, count, mark, settles in ((0, 3, 0, AT_END), (3, 9, 3, KEEP), (12, 1, 3, AT_START)):
        own, beside = (None if all is None else all[:, start : start + count].contiguous() for all in (qkvz, ba))
        kept = number(start), number(count), number(mark), states, inputs
        more = bias, skip, normed or sizes[3]
        found.append(ops.delta_rows(own, beside, *net, *kept, sizes, settles, 0, *more))
    return [*found, states.flatten(1, 2)]


def test_a_row_without_its_state_is_not_a_number():
    rows = Rows(*numbers(torch.bfloat16, device="cuda"))
    rows.feed([0, 0], [20, 10], AT_END)
    lost, found = rows.feed([19, 10], [1, 1], KEEP)
    assert lost.isnan().all()
    assert not found.isnan().any()


def test_gates():
    x, gates = torch.randn(5, 24).bfloat16(), torch.randn(5, 40).bfloat16()[:, 16:]
    found = ops.sigmoid_gated(x.cuda(), gates.cuda()[:, :24])
    assert float((found.cpu().float() - ops.sigmoid_gated(x, gates)).abs().max()) < 0.02


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_step_is_near_the_modules_in_float32(name):
    ids = random_ids(2, TOKENS)
    with torch.no_grad():
        stock = on_gpu(name).float()(torch.tensor(ids).cuda()).logits
    found = torch.stack(Lanes(CudaDecoder(on_gpu(name)), 2, slots=256).feed(ids))
    best = stock.gather(2, found.argmax(-1, keepdim=True))[..., 0]
    assert float(((stock.max(-1).values - best) / stock.std(-1)).median()) <= 0.05
    assert float((found - stock).norm() / stock.norm()) < 0.2


@pytest.mark.parametrize("name", HYBRIDS)
def test_bits_do_not_depend_on_the_grouping(name):
    decoder, ids = CudaDecoder(on_gpu(name)), random_ids(33, TOKENS)
    together = torch.stack(Lanes(decoder, 3, slots=256).feed(ids[:3]))
    single = Lanes(decoder, 3, slots=256)
    steps = [torch.stack(single.feed([row[i : i + 1] for row in ids[:3]])) for i in range(TOKENS)]
    assert torch.equal(torch.cat(steps, dim=1), together)
    crowd = Lanes(decoder, 33, slots=256)
    pieces = [crowd.feed([row[first : first + 9] for row in ids], padding=first % 2) for first in range(0, TOKENS, 9)]
    assert torch.equal(torch.cat([piece[1] for piece in pieces]), together[1])
    ragged = Lanes(decoder, 3, slots=256)
    ragged_rows_agree(ragged, ids, together, 140, 19)


def engine_over(model, decoder: CudaDecoder, rows: int, follow: CudaEngine | None = None) -> CudaEngine:
    made = CudaEngine(model, decoder, follow=follow, capacity=256)
    made.start(rows, decoder.device)
    return made


def test_rows_that_are_taken_back_go_on_as_if_they_had_not_been():
    """Drafts by steps in the target's own states, checks of five tokens of which fewer are kept: captured from the
    third round on."""
    model = on_gpu("qwen3.5")
    decoder, rows = CudaDecoder(model), [row[:n] for row, n in zip(random_ids(3), (40, 9, 1), strict=True)]
    leader = engine_over(model, decoder, 3)
    follower = engine_over(model, decoder, 3, leader)
    leader.feed(rows)
    leader.lengths = [len(row) - 1 for row in rows]
    for round in range(12):
        follower.lengths = list(leader.lengths)
        drafted = [follower.feed(rows)[:, 0].argmax(-1)]
        for _ in range(4):
            drafted.append(follower.step(drafted[-1][:, None], [1] * 3, [0] * 3, 1)[:, 0].argmax(-1))
        tokens = torch.stack(drafted, dim=1)
        best = leader.feed(rows, Guess(tokens, [5] * 3)).argmax(-1).tolist()
        assert [line[:5] for line in best] == tokens.tolist()
        kept = [round % 6, 5 - round % 6, 2]
        rows = [row + line[: n + 1] for row, line, n in zip(rows, best, kept, strict=True)]
        leader.lengths = [len(row) - 1 for row in rows]
    alone = torch.cat([engine_over(model, decoder, 1).feed([row])[0] for row in rows])
    assert torch.equal(leader.feed(rows)[:, 0], alone)


@pytest.mark.parametrize("levels", [["mxfp4"], ["prompt_lookup"], ["mxfp4", "prompt_lookup"]], ids=str)
@pytest.mark.parametrize("name", HYBRIDS)
def test_captured_chains_write_what_the_target_alone_writes(name, levels):
    check_captured_chain(on_gpu(name, **PACKED), levels)


@pytest.mark.parametrize("levels", [["copy"], ["mxfp4", "copy"]], ids=str)
def test_a_draft_with_states_of_its_own_is_captured(levels):
    """A copy of the target drafts what that takes."""
    model, draft = on_gpu("qwen3.5", **PACKED), on_gpu("qwen3.5", **PACKED)
    check_captured_chain(model, [draft if word == "copy" else word for word in levels])
    if len(levels) == 1:
        assert hf_mlspec.last_stats(model).levels[0].acceptance > 0.9
