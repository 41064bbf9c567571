"""How long is one captured step of the Llama-3-8B shape, and how near to the time that reading its weights takes?

A step is what greedy decoding repeats: all layers, the head, the choice of a token; one token a row is fed back, as
in decoding, so that steps depend on each other. Keys and values of `KEPT` tokens a row are random; BF16 is timed
behind longer contexts, too (`LONG`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_mlspec
from eval.bench_gpu.findings import Bench, Finding
from eval.bench_gpu.models import random_model
from eval.bench_gpu.stock import compiled_step, eager_step, graph_step
from eval.gpu_timing import Timing, capture, synchronize, time_each
from hf_mlspec import ops
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.engines.cuda.states import DeltaStates
from hf_mlspec.engines.rows import new_kv
from hf_mlspec.ops.delta import AT_START

KEPT = 512  # tokens in the cache
UNROLL = 4  # steps in one graph
STOCK = "stock"


@dataclass(frozen=True)
class Case:
    """A batch of rows that feed `width` tokens each, and the milliseconds it may take."""

    name: str
    batch: int
    width: int
    target: float | None


BF16 = (Case("batch 1, 1 token", 1, 1, 4.5), Case("batch 1, 9 tokens", 1, 9, 4.75), Case("batch 8", 8, 1, 4.9),
        Case("batch 32", 32, 1, 6.0))  # fmt: skip
LONG = {  # by the tokens in the cache of each row
    4096: (Case("1 x 1 behind 4,096", 1, 1, None), Case("1 x 9 behind 4,096", 1, 9, None)),
    8192: (Case("8 x 1 behind 8,192", 8, 1, None), Case("8 x 9 behind 8,192", 8, 9, None)),
    2048: (Case("32 x 1 behind 2,048", 32, 1, None), Case("32 x 9 behind 2,048", 32, 9, None)),
    16384: (Case("1 x 1 behind 16,384", 1, 1, None), Case("1 x 9 behind 16,384", 1, 9, None)),
    32768: (Case("1 x 1 behind 32,768", 1, 1, None), Case("1 x 9 behind 32,768", 1, 9, None)),
}
CAST = (Case("batch 1, 1 token", 1, 1, 1.35),)
TINY = (Case("batch 1, 1 token", 1, 1, 0.080),)


class WrongStep(Exception):
    """A captured step that does not compute what the same calls compute one by one."""


class Step:
    """`UNROLL` steps of a decoder at fixed shapes; `tokens` int32 [UNROLL, batch, width]: what each of them chose."""

    def __init__(self, decoder: CudaDecoder, case: Case, kept: int, settles: int = AT_START):
        """settles: what becomes of states, as of `ops.delta_rows`."""
        device, (batch, width) = decoder.device, (case.batch, case.width)
        generator = torch.Generator().manual_seed(0)
        first = torch.randint(decoder.vocab_size, (batch, width), generator=generator, dtype=torch.int32)
        self.first = first.to(device)
        self.decoder, self.case, self.kept, self.settles = decoder, case, kept, settles
        self.ids = self.first.clone()
        self.starts = torch.zeros(batch, dtype=torch.int32, device=device)
        self.counts = torch.full((batch,), width, dtype=torch.int32, device=device)
        self.kv = new_kv(decoder, batch, kept + UNROLL * width)
        self.kv.normal_()
        self.states, self.fresh = delta_states(decoder, batch)
        self.tokens = torch.empty(UNROLL, batch, width, dtype=torch.int32, device=device)
        decoder.reserve_positions(kept + UNROLL * width)

    def __call__(self) -> None:
        self.ids.copy_(self.first)
        self.starts.fill_(self.kept)
        if self.states is not None:
            self.states.states.copy_(self.fresh)
            self.states.marks.copy_(self.starts)
        for at in range(UNROLL):
            how = {"states": self.states, "settles": self.settles}
            logits = self.decoder.forward(self.ids, self.starts, self.counts, self.kv, **how)
            chosen, _ = ops.choose_rows(logits, self.decoder.logit_softcap, None, None, None)
            self.tokens[at] = chosen.view_as(self.ids)
            self.ids.copy_(self.tokens[at])
            self.starts += self.case.width

    def captured(self) -> Callable[[], object]:
        """What repeats the steps; WrongStep where it chooses other tokens than the calls one by one."""
        self()
        expected = self.tokens.clone()
        replay = capture(self, self.decoder.device)
        self.tokens.fill_(-1)
        replay()
        synchronize(self.decoder.device)
        if not torch.equal(self.tokens, expected) or int(expected.min()) < 0:
            raise WrongStep(f"{self.case.name}: the captured step chooses {self.tokens.flatten()[:8].tolist()}, the "
                            f"same calls one by one {expected.flatten()[:8].tolist()}")
        return replay

    def timed(self) -> Timing:
        """Seconds of one step."""
        found = time_each(self.captured(), self.decoder.device)
        return Timing(found.median / UNROLL, found.least / UNROLL, found.repeats)


def delta_states(decoder: CudaDecoder, batch: int) -> tuple[DeltaStates | None, Tensor | None]:
    """States for rows of a decoder with recurrent layers, random, and a copy: every `UNROLL` steps begin with it."""
    sizes = decoder.sizes.delta
    if sizes is None:
        return None, None
    states = DeltaStates.new(sizes, decoder.num_recurrent, batch, decoder.dtype, decoder.device)
    states.states.normal_(std=0.1)
    states.inputs.normal_(std=0.1)
    return states, states.states.clone()


def step(bench: Bench) -> Iterator[Finding]:
    """Ours in BF16, its MXFP4 cast and the tiny draft, then stock transformers on the same weights."""
    shape, tiny, kept = ("tiny", "tiny", 24) if bench.quick else ("llama-3-8b", "tiny-2x512", KEPT)
    model = random_model(shape, bench.device)
    bench.say(f"step: {shape} made")
    yield from _stock(bench, model, shape, kept)
    yield from _ours(bench, model, shape, "BF16", BF16, kept, read_bytes(model))
    for behind, cases in {} if bench.quick else LONG.items():
        yield from _ours(bench, model, shape, "BF16", cases, behind, read_bytes(model))
        bench.free()
    cast = hf_mlspec.direct_cast(model, "mxfp4")
    bench.say("step: cast")
    yield from _ours(bench, cast, shape, "MXFP4 cast, head too", CAST, kept, hf_mlspec.resident_bytes(cast, model))
    del cast, model
    bench.free()
    draft = random_model(tiny, bench.device)
    yield from _ours(bench, draft, tiny, "BF16", TINY, kept, read_bytes(draft))


def read_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a step reads: all but an embedding that is not tied, of which it takes a row a token."""
    embedding = model.get_input_embeddings().weight
    tied = embedding.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    return sum(p.nbytes for p in model.parameters()) - (0 if tied else embedding.nbytes)


def cache_bytes(decoder: CudaDecoder, case: Case, kept: int) -> int:
    """Bytes of keys and values that a step of this case reads."""
    sizes = decoder.sizes
    return 2 * decoder.num_layers * case.batch * sizes.kv_heads * sizes.head_dim * kept * 2


def _ours(
    bench: Bench, model: PreTrainedModel, shape: str, name: str, cases: tuple[Case, ...], kept: int, weights: int
) -> Iterator[Finding]:
    decoder = decoder_of(model, "cuda")
    if decoder is None:
        raise WrongStep(f"{name}: there is no decoder for this model here; the warning above says why")
    for case in cases:
        found = Step(decoder, case, kept).timed()
        nbytes = weights + cache_bytes(decoder, case, kept)
        target = None if bench.quick else case.target
        yield Finding("step", f"{shape}, {case.name}", name, found.median * 1e3, "ms", target,
                      share=nbytes / found.median / bench.probe,
                      more={"batch": case.batch, "width": case.width, "kept": kept, "bytes": nbytes,
                            "least_ms": found.least * 1e3, "extra_bytes": decoder.extra_bytes})


def _stock(bench: Bench, model: PreTrainedModel, shape: str, kept: int) -> Iterator[Finding]:
    """transformers' own ways on the same weights, before ours joins any of them."""
    ways: list[tuple[str, Callable[[PreTrainedModel, Tensor], float], tuple[int, ...]]] = [
        ("generate", eager_step, (1, 32)), ("forward in a CUDA graph", graph_step, (1, 32)),
    ]  # fmt: skip
    if bench.slow:
        ways.append(("generate, static cache, compiled", compiled_step, (1,)))
    generator = torch.Generator().manual_seed(0)
    for name, way, batches in ways:
        for batch in batches:
            bench.say(f"step: stock {name}, batch {batch}")
            prompt = torch.randint(model.config.vocab_size, (batch, kept), generator=generator).to(bench.device)
            seconds = way(model, prompt)
            case = f"{shape}, " + ("batch 1, 1 token" if batch == 1 else f"batch {batch}")
            more = {"batch": batch, "kept": kept}
            yield Finding("step", case, f"{STOCK} {name}", seconds * 1e3, "ms", more=more)
            bench.free()
