"""What does a forward pass of a decoder take inside a captured round? Some are captured together and replayed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ... import ops
from ...engines.capturing import wait_for
from ...engines.cuda.decoder import CudaDecoder
from ...engines.cuda.states import DeltaStates
from ...engines.cuda.steps import Recording, recorded
from ...engines.engine import Engine
from ...engines.memory import out_of_memory
from ...engines.rows import new_kv, up_to_growth
from ...speculation.costs import LONG, TOKENS

POSITIONS = LONG + TOKENS[-1]  # of the longest row that is timed
PASSES = 4  # in one graph, so that launching it and waiting for it is a small part of its time


def replays(engine: Engine) -> Callable[[int, int], None]:
    """A function `run(tokens, slots)` for `speculation.costs.measure`: PASSES passes of the engine's decoder over so
    many tokens of a row behind so many slots, each with the choice of its tokens. Shapes are captured as they come; on
    a CPU they run as they are.
    """
    decoder, bits, forward = engine.decoder, engine.bits, engine.decoder.forward
    decoder.reserve_positions(POSITIONS)
    slots = up_to_growth(min(POSITIONS, engine.max_positions or POSITIONS))
    kv, states = new_kv(decoder, 1, slots, engine.kept_in), _states(decoder)
    graphs: dict[tuple[int, int], tuple[Recording | None, Callable[[], None]]] = {}

    def passes(count: int, slots: int) -> Callable[[], None]:
        ids = torch.ones(1, count, dtype=torch.int32, device=decoder.device)
        starts, counts = (torch.full((1,), n, dtype=torch.int32, device=decoder.device) for n in (slots, count))

        def run() -> None:
            _begin(states, starts)
            for _ in range(PASSES):
                ops.choose_rows(forward(ids, starts, counts, kv, bits=bits, states=states), decoder.logit_softcap)

        return run

    def run(count: int, slots: int) -> None:
        key = count, slots
        if decoder.device.type != "cuda":
            return passes(count, slots)()
        if key not in graphs:
            once = passes(count, slots)
            once()
            try:
                graphs[key] = recorded(once, decoder.device, sources=decoder.plane_sources), once
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                graphs[key] = None, once
        graph, once = graphs[key]
        once() if graph is None else graph.replay()
        wait_for(decoder.device)

    return run


def _states(decoder: CudaDecoder) -> DeltaStates | None:
    """Of the row that is timed."""
    if not decoder.num_recurrent:
        return None
    return DeltaStates.new(decoder.sizes.delta, decoder.num_recurrent, 1, decoder.dtype, decoder.device)


def _begin(states: DeltaStates | None, starts: Tensor) -> None:
    """They count as those behind so many tokens, whatever comes out: the cost is the same."""
    if states is not None:
        states.marks.copy_(starts)
