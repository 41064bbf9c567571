"""On a GPU: what must a decoder of packed weights write, at each of its levels, whatever the format?"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from decoders import Lanes, in_float64
from models import prompts
from torch import nn

import hf_mlspec
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.nn.switch import precision_switch
from hf_mlspec.precision import Bits

LENGTH = 60


def random_ids(batch: int, length: int = LENGTH) -> list[list[int]]:
    return torch.randint(1, 199, (batch, length), generator=torch.Generator().manual_seed(7)).tolist()


def check_levels(model: nn.Module, levels: list[str], within: float | None = 0.04) -> None:
    """Each is what the modules compute, but for a share ``within`` of it (None: that is not asked), in steps with the
    same bits; and the model's tensors stay."""
    ids, before = random_ids(2), {key: tensor.clone() for key, tensor in model.state_dict().items()}
    decoder, switch = CudaDecoder(model), precision_switch(model)
    for level in levels:
        with torch.no_grad(), switch.at(level):
            modules, bits = model(torch.tensor(ids).cuda()).logits.float(), switch.bits
        together = torch.stack(Lanes(decoder, 2, slots=128).feed(ids, bits=bits))
        error = (together.float() - modules).abs().mean()
        assert within is None or error < within * modules.abs().mean(), level
        single = Lanes(decoder, 2, slots=128)
        steps = [torch.stack(single.feed([row[i : i + 1] for row in ids], bits=bits)) for i in range(LENGTH)]
        assert torch.equal(torch.cat(steps, dim=1), together), level
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key]), key


def check_near_float64(model: nn.Module) -> None:
    ids = random_ids(2)
    with torch.no_grad():
        exact = in_float64(model).cuda()(torch.tensor(ids).cuda()).logits
    out = torch.stack(Lanes(CudaDecoder(model), 2, slots=128).feed(ids))
    assert (out - exact).abs().max() < 0.05 * exact.abs().max()


def check_bits_of_rows(decoder: CudaDecoder, levels: Iterable[Bits]) -> None:
    """At each of these bits a row has its own: in a batch of 16, one by one, alone, in checks of nine."""
    ids = random_ids(16)
    for bits in levels:
        together = torch.stack(Lanes(decoder, 16).feed(ids, bits=bits))
        assert together.isfinite().all()
        single = Lanes(decoder, 2)
        steps = [torch.stack(single.feed([row[i : i + 1] for row in ids[:2]], bits=bits)) for i in range(LENGTH)]
        assert torch.equal(torch.cat(steps, dim=1), together[:2]), bits
        nine = Lanes(decoder, 1, slots=256)
        pieces = [nine.feed([ids[5][first : first + 9]], bits=bits)[0] for first in range(0, LENGTH, 9)]
        assert torch.equal(torch.cat(pieces), together[5]), bits


def check_captured_chain(model: nn.Module, levels: list[str]) -> None:
    """Its rows, three together and one alone, are what the target alone writes."""
    model = hf_mlspec.prepare(model, engine="cuda")
    inputs = {name: value.cuda() for name, value in prompts([5, 9, 40]).items()}
    options = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None, "pad_token_id": 0}
    alone = model.generate(**inputs, **options, assistant_models=[])
    chain = model.generate(**inputs, **options, assistant_models=levels, speculation_config={"num_draft_tokens": 3})
    assert torch.equal(chain, alone)
    stats = hf_mlspec.last_stats(model)
    assert stats.levels[0].drafted > 0
    assert stats.capture_seconds > 0
    one = {name: value[2:] for name, value in inputs.items()}
    assert torch.equal(model.generate(**one, **options, assistant_models=levels)[0, -40:], alone[2, -40:])


def check_captured_step(decoder: CudaDecoder) -> None:
    """Captured once, replayed at other lengths, with other tokens: the bits of plain calls. Nothing waits."""
    rows, eager = random_ids(4), Lanes(decoder, 4)
    eager.feed([row[:20] for row in rows])
    kv = eager.kv.clone()
    ids = torch.zeros(4, 9, dtype=torch.int32, device="cuda")
    starts, counts = (torch.zeros(4, dtype=torch.int32, device="cuda") for _ in range(2))
    pick = torch.arange(36, device="cuda")
    decoder.forward(ids, starts, counts, kv, pick=pick)  # libraries load outside of the capture
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            logits = decoder.forward(ids, starts, counts, kv, pick=pick)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for first, last in ((20, 29), (29, 30), (30, 37)):
        ids[:, : last - first] = torch.tensor([row[first:last] for row in rows], device="cuda")
        starts.fill_(first)
        counts.fill_(last - first)
        graph.replay()
        expected = torch.stack(eager.feed([row[first:last] for row in rows]))
        assert torch.equal(logits.view(4, 9, -1)[:, : last - first], expected), first
    assert torch.equal(kv[..., :37, :], eager.kv[..., :37, :])
