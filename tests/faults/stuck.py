"""Does a model serve one thread while another is stuck in the middle of a call, and does that one end well later?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import hf_mlspec

from .scenes import CONFIG, NEW, PAIR, Scene, Written, generated

PATIENCE = 60.0  # seconds


class Stuck(LogitsProcessor, StoppingCriteria):
    """Waits in its call number `at`, once, until it is let go: a processor, a criterion and a streamer in one."""

    def __init__(self, at: int):
        self.left, self.reached, self.let_go = at, threading.Event(), threading.Event()

    def turn(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.reached.set()
            self.let_go.wait(PATIENCE)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.turn()
        return scores if scores is not None else False

    def put(self, value: Any) -> None:
        self.turn()

    def end(self) -> None: ...


def _one(inputs: dict) -> dict:
    return {name: value[:1] for name, value in inputs.items()}


def _by_stream(scene: Scene, levels: list, stuck: Stuck) -> list[Written]:
    """A stream whose caller does not come back for the next tokens."""
    rows = PAIR["input_ids"].tolist(), PAIR["attention_mask"].tolist()
    requests = [[token for token, on in zip(*one, strict=True) if on] for one in zip(*rows, strict=True)]
    found: dict[int, list[int]] = {}
    for one in hf_mlspec.generate_stream(
        scene.models[0], [hf_mlspec.Request(row, id=n) for n, row in enumerate(requests)], assistant_models=levels,
        speculation_config=CONFIG, max_new_tokens=NEW, eos_token_id=None, events=True,
    ):  # fmt: skip
        stuck.turn()
        if isinstance(one, hf_mlspec.Completion):
            found[one.id] = one.new_tokens
    return [Written(found[number]) for number in sorted(found)]


# How a call gets stuck, and which of the reference's rows it writes.
PLACES: dict[str, tuple[Callable[[Scene, list, Stuck], list[Written]], int]] = {
    "processor": (lambda scene, levels, stuck: generated(
        scene.models[0], levels, logits_processor=LogitsProcessorList([stuck])), 2),
    "criterion": (lambda scene, levels, stuck: generated(
        scene.models[0], levels, stopping_criteria=StoppingCriteriaList([stuck])), 2),
    "streamer": (lambda scene, levels, stuck: generated(
        scene.models[0], levels, _one(PAIR), streamer=stuck), 1),
    "caller of a stream": (_by_stream, 2),
}  # fmt: skip


def beside_one_that_is_stuck(scene: Scene, levels: list, place: str, at: int) -> str | None:
    """What is wrong with the scene's own act beside a call that is stuck at `place`, or with that call. None: nothing;
    "never reached" where its call number `at` never came."""
    stuck, found = Stuck(at), {}
    call, rows = PLACES[place]

    def run(name: str, do: Callable[[], list[Written]]) -> threading.Thread:
        def work() -> None:
            try:
                found[name] = do()
            except BaseException as error:
                found[name] = error

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    first = run("stuck", lambda: call(scene, levels, stuck))
    while not stuck.reached.wait(0.005) and first.is_alive():
        pass
    if not stuck.reached.is_set():
        return "never reached" if isinstance(found.get("stuck"), list) else f"ended with {found.get('stuck')!r}"
    try:
        second = run("beside", scene.act)
        second.join(PATIENCE / 2)
        if second.is_alive():
            return "beside it nothing goes on"
    finally:
        stuck.let_go.set()
        first.join(PATIENCE)
    if not isinstance(found["beside"], list):
        return f"beside it: {found['beside']!r}"
    if wrong := scene.wrong(found["beside"]):
        return f"beside it: {wrong}"
    if not isinstance(found.get("stuck"), list):
        return f"it ended with {found.get('stuck')!r}"
    if found["stuck"] != scene.reference[:rows]:
        return f"it wrote {found['stuck']}"
    return None
