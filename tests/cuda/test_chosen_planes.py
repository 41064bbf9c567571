"""On a GPU: do products read as many planes as the device says, and does a router choose there as on a CPU?"""

from __future__ import annotations

import pytest
import torch
from test_routed_decoder import DEVICE, ROWS, demo, drawn_router, generated

import hf_mlspec
from hf_mlspec import ops
from hf_mlspec.engines.choose import built_decoder
from hf_mlspec.engines.engine import Guess
from hf_mlspec.formats.planes import zeros_doubled
from hf_mlspec.ops.operator import REFERENCES
from hf_mlspec.ops.planes import tiles_cuda
from hf_mlspec.ops.planes.choosing import ChooserWeights, chooses_on_device
from hf_mlspec.routing.compiled_engine import RoutedCudaEngine
from hf_mlspec.routing.host_choice import Scorers

pytestmark = pytest.mark.usefixtures("kernels_are_required")


@pytest.fixture(scope="module", autouse=True)
def _on_device():
    if not chooses_on_device(torch.device(DEVICE, torch.cuda.current_device())):
        pytest.skip("products that read widths from the device are for Hopper")


def weight(planes, out, width, group, seed=0):
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (planes, out, width // 8), dtype=torch.uint8, generator=generator)
    scale = (torch.rand(out, width // group, generator=generator) / 64 + 0.01).half()
    return ops.prepack_planes(bits.to(DEVICE), scale.to(DEVICE))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("planes", "out", "width"), [(8, 320, 512), (8, 4096, 1024), (8, 40000, 1024), (5, 200, 384)])
def test_a_token_has_the_bits_of_a_product_at_its_width(planes, out, width, group):
    tiles = weight(planes, out, width, group)
    how = {"group_size": group, "zero_doubled": sum(zeros_doubled(planes)) // 2}
    for tokens in (1, 3, 8, 17, 40, 200):
        x = torch.randn(tokens, width, device=DEVICE, dtype=torch.bfloat16)
        own = torch.randint(1, planes + 1, (tokens,), device=DEVICE, dtype=torch.int32)
        found = ops.bitplane_chosen(x, *tiles, own, out, **how)
        for width_of in own.unique().tolist():
            wanted = ops.bitplane_linear(x, *tiles, out, **how, num_planes=width_of)
            assert found[own == width_of].equal(wanted[own == width_of]), (tokens, width_of)
            alike = torch.tensor([width_of], device=DEVICE, dtype=torch.int32)
            assert ops.bitplane_chosen(x, *tiles, alike, out, **how).equal(wanted), (tokens, width_of)


@pytest.mark.parametrize(("out", "width", "group"), [(320, 512, 32), (4096, 1024, 128), (40000, 1024, 64)])
def test_planes_that_lie_apart_are_read_as_far_as_the_device_says(out, width, group):
    top, zero = 4, sum(zeros_doubled(8)) // 2
    tiles, scales = weight(8, out, width, group)
    halves = tiles.unflatten(2, (2, tiles.shape[2] // 2))
    behind = halves.shape[3] - (8 - top) * tiles_cuda.PLANE_BYTES
    low = halves[..., behind:].unflatten(-1, (8 - top, tiles_cuda.PLANE_BYTES))
    low, tops = low.permute(3, 0, 1, 2, 4).flatten(1).contiguous(), halves[..., :behind].flatten(2).contiguous()
    how = {"group_size": group, "zero_doubled": zero, "total_planes": 8}
    for tokens in (1, 8, 20, 200):
        x = torch.randn(tokens, width, device=DEVICE, dtype=torch.bfloat16)
        for there, apart in ((4, ()), (6, (low[:2],)), (7, (None, low[:3])), (8, (low[:1], low[1:].clone()))):
            for own in (*range(1, 9), 0):  # 0: one for each token
                widths = torch.randint(1, 9, (tokens,)) if own == 0 else torch.tensor([own])
                found = ops.bitplane_chosen(x, tops, scales, widths.to(DEVICE, torch.int32), out, apart=apart, **how)
                for width_of in widths.clamp(max=there).unique().tolist():
                    wanted = ops.bitplane_linear(
                        x, tiles, scales, out, num_planes=width_of, group_size=group, zero_doubled=zero
                    )
                    which = (widths.clamp(max=there) == width_of).expand(tokens)
                    assert found[which].equal(wanted[which]), (tokens, there, own)


@pytest.fixture(scope="module")
def chooser():
    """Of 700 features, whose scores are far apart."""
    torch.manual_seed(1)
    parts = torch.randn(32, 700), torch.randn(32), torch.randn(5, 32), torch.randn(5)
    candidates = torch.tensor([2, 3, 4, 6, 8], dtype=torch.int32)
    return [part.to(DEVICE) for part in parts] + [candidates.to(DEVICE)]


def with_room(parts):
    failed, arrived = (torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (1, 4096))
    return ChooserWeights(*parts, failed, arrived)


def on_cpu(name, *operands):
    return REFERENCES[name](*(own.cpu() if isinstance(own, torch.Tensor) else own for own in operands))


def test_prompts_choose_what_they_choose_on_the_cpu(chooser):
    own, chosen = with_room(chooser), set()
    for tokens in (1, 2, 63, 64, 65, 300, 5000):
        x = torch.randn(tokens, 700, device=DEVICE, dtype=torch.bfloat16) * tokens**0.5
        mean = torch.empty(700, device=DEVICE)
        found = ops.choose_of_prompt(x, mean, own)
        torch.testing.assert_close(mean, x.float().mean(0), rtol=1e-4, atol=1e-5)
        assert found.tolist() == on_cpu("choose_of_prompt", x, torch.empty(700), *own).tolist()
        assert ops.choose_of_prompt(x, mean, own).tolist() == found.tolist()
        chosen.update(found.tolist())
    assert len(chosen) > 1
    assert not own.arrived.any()
    assert not own.failed.any()
    x[3, 5] = float("nan")
    assert ops.choose_of_prompt(x, mean, own).tolist() == [8]
    assert own.failed.tolist() == [1]


def test_steps_choose_for_themselves_behind_their_query(chooser):
    own = with_room(chooser)
    x = torch.randn(3 * 17, 700, device=DEVICE, dtype=torch.bfloat16)
    means = torch.randn(3, 700, device=DEVICE) / 4
    starts, lengths, known = (torch.tensor(own, dtype=torch.int32, device=DEVICE)
                              for own in ([5, 0, 90], [9, 2**31 - 1, 90], [3, 6, 4]))  # fmt: skip
    found = ops.choose_of_steps(x, starts, lengths, known, means, own, 0.5)
    assert found.tolist() == on_cpu("choose_of_steps", x, starts, lengths, known, means, *own, 0.5).tolist()
    assert found[:4].tolist() == [3] * 4
    assert set(found[17:34].tolist()) == {6}
    assert len(set(found.tolist())) > 2
    for row, begin in ((0, 5), (2, 90)):
        for at in range(17):
            token, which = x[row * 17 + at][None], slice(row, row + 1)
            place = torch.tensor([begin + at], dtype=torch.int32, device=DEVICE)
            of_row = lengths[which], known[which], means[which].contiguous()
            alone = ops.choose_of_steps(token, place, *of_row, own, 0.5)
            assert alone.tolist() == found[row * 17 + at : row * 17 + at + 1].tolist()
    assert not own.arrived.any()


@pytest.fixture(scope="module")
def router():
    made = drawn_router(inner_std=0.5).choosing("step")
    made.step_share = 0.7
    return made


@pytest.mark.parametrize("levels", [["planes2"], ["prompt_lookup"]])
def test_a_chain_over_steps_that_choose_writes_what_they_write(router, levels):
    model = hf_mlspec.route(demo(), router)
    config = {"num_draft_tokens": 3, "engine": "cuda"}
    together = generated(model, assistant_models=levels, speculation_config=config)
    assert together == generated(model, assistant_models=[], speculation_config={"engine": "cuda"})
    for row, wanted in zip(ROWS, together, strict=True):
        assert generated(model, [row], assistant_models=levels, speculation_config=config) == [wanted]
    assert together != generated(hf_mlspec.route(model, router, every="prompt"), assistant_models=[])
    whole = sum(own.nbytes for own in model.parameters())
    hf_mlspec.route(model, router)
    hf_mlspec.stream_planes(model, int(whole * 0.95))
    assert generated(model, assistant_models=[]) == together


def test_steps_that_choose_become_graphs_and_a_check_reads_what_they_read(router):
    model = hf_mlspec.route(demo(), router)
    engine, row, found = RoutedCudaEngine(model, built_decoder(model, "cuda"), router), list(ROWS[0]), []
    assert engine._on_device
    engine.start(1, torch.device(DEVICE))
    with torch.inference_mode():
        for _ in range(9):
            found.append(engine.feed([row])[0, -1].clone())
            row.append(int(found[-1].argmax()))
        assert len(engine._steps._steps) == 1
        engine.start(1, torch.device(DEVICE))
        engine.feed([row[: len(ROWS[0])]])
        guess = row[len(ROWS[0]) + 1 : -1]
        many = engine.feed([row[: len(ROWS[0]) + 1]], Guess(torch.tensor([guess], device=DEVICE), [len(guess)]))
    assert many[0].equal(torch.stack(found[1:]))


def test_a_prompt_chooses_the_same_with_and_without_the_host(router):
    model, own = demo(), router.choosing("prompt")
    decoder = built_decoder(model, "cuda")
    for row in ROWS:
        chosen = []
        for on_device in (True, False):
            engine = RoutedCudaEngine(model, decoder, own)
            engine._on_device, engine._scorers = on_device, Scorers(own, decoder.device)
            engine.start(1, torch.device(DEVICE))
            with torch.inference_mode():
                engine.feed([row])
            chosen.append(engine.chosen[0])
        assert chosen[0] == chosen[1]


def test_a_prompt_of_nan_is_an_error_that_names_the_block(router):
    model = hf_mlspec.route(demo(), router)
    table = model.get_input_embeddings().weight
    before, table.data[7] = table.data[7].clone(), float("nan")
    for _ in range(2):
        with pytest.raises(FloatingPointError, match=r"layers\.0\.self_attn"):
            generated(model, [[5, 7, 9]], assistant_models=[])
    table.data[7] = before  # the head's, too
    assert generated(model, ROWS[1:2], assistant_models=[])
