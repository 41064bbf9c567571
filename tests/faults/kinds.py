"""Which kinds of faults are there, how many of each can come in a scene, and what follows from one?"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from . import poison
from .interrupts import counter, interrupted
from .scenes import SCENES, Scene, Written
from .stuck import PLACES, beside_one_that_is_stuck

_MEMORY = "bad_alloc", "allocate memory", "out of memory", "not enough memory", "no memory"
_OF_WEIGHTS = "lm_head.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.v_proj.weight"
_OF_MODULES = "chain of modules", "stream of modules"
_COMPILED = "compiled chain", "stream", "sampled chain"
_COSTS = {"compiled chain": 1, "sampled chain": 1, "chain of modules": 3, "stream of modules": 5, "nest, unnest": 5}


class Faults:
    """Faults of one kind in one scene. count: how many there are, told by a run without one. inject: the `at`-th, from
    1; it says how that ended in a word, and raises `Finding` where something is wrong. cost: what one takes, in times
    of the cheapest scene: fewer are tried where they cost more."""

    def __init__(self, kind: str, name: str, count: Callable[[Scene], int], inject: Callable[[Scene, int], str]):
        self.kind, self.name, self._count, self._inject = kind, name, count, inject
        self.scene_of = name.split(":")[0]
        self.cost = _COSTS.get(self.scene_of, 2)

    def count(self, scene: Scene) -> int:
        return self._count(scene)

    def inject(self, scene: Scene, at: int) -> str:
        """"never" where it did not come, "error" where the call ended with one, "went on" where it did not."""
        word = self._inject(scene, at)
        if spoiled := scene.spoiled():
            raise Finding(f"{word}; {spoiled}")
        return word


class Finding(Exception):
    """A fault led to what it must not."""


# ---- no memory --------------------------------------------------------------------------------------------------


def memory() -> ctypes.CDLL:
    """The preloaded library that refuses memory."""
    path = next(one for one in os.environ.get("LD_PRELOAD", "").split() if "refused" in one)
    return ctypes.CDLL(path)


@contextmanager
def refusing(who: str, at: int) -> Iterator[Callable[[], int]]:
    """Refuse request number `at` (from 1) of "library" or "tensors"; yields how many came so far."""
    made = memory()
    set_to, left = {
        "library": (made.refuse_after, made.requests_left),
        "tensors": (made.refuse_tensor_after, made.tensor_requests_left),
    }[who]
    left.restype = ctypes.c_long
    set_to.argtypes = [ctypes.c_long]
    set_to(at - 1)
    try:
        yield lambda: at - 1 - left()
    finally:
        set_to(-1)


def _count_requests(who: str, scene: Scene) -> int:
    with refusing(who, 1 << 40) as came:
        scene.act()
        return came()


def _refuse(who: str, scene: Scene, at: int) -> str:
    with refusing(who, at) as came:
        found, error = _tried(scene.act)
        refused = came() >= at
    if not refused:
        return "never" if error is None and not scene.wrong(found) else _complain(f"without a fault {error!r} {found}")
    return _judged(scene, found, error, lambda one: any(word in str(one) for word in _MEMORY))


# ---- interrupts -------------------------------------------------------------------------------------------------


def _counter() -> ctypes.PyDLL:
    return counter(Path(os.environ["MLSPEC_FAULTS_FOLDER"]))


def _count_bytecodes(scene: Scene) -> int:
    return interrupted(_counter(), 0, scene.act)[2]


def _interrupt(scene: Scene, at: int) -> str:
    found, ended, count = interrupted(_counter(), at, scene.act)
    if ended:
        return "error"
    if count < at:
        return "never"
    return "went on" if not scene.wrong(found) else _complain(f"the interrupt is lost: {scene.wrong(found)}")


# ---- NaN --------------------------------------------------------------------------------------------------------


def _hidden(which: int, whole: bool, scene: Scene, at: int) -> Any:
    return poison.hidden(scene.models[which], at, whole=whole)


def _weight(which: int, name: str, scene: Scene, at: int) -> Any:
    return poison.weight(scene.models[which], at, name)


def _count_passes(spoiling: Callable[[Scene, int], Any], scene: Scene) -> int:
    with spoiling(scene, 0) as passes:
        scene.act()
        return passes.count


def _spoil(spoiling: Callable[[Scene, int], Any], scene: Scene, at: int) -> str:
    with spoiling(scene, at) as passes:
        found, error = _tried(scene.act)
        came = passes.count >= at
    if not came:
        return "never"
    return _judged(scene, found, error, lambda one: isinstance(one, FloatingPointError))


# ---- stuck threads ----------------------------------------------------------------------------------------------


def _stick(place: str, scene: Scene, at: int) -> str:
    levels = [scene.models[1]] if scene.models[1:] else ["mxfp4"]
    wrong = beside_one_that_is_stuck(scene, levels, place, at)
    if wrong == "never reached":
        return "never"
    return _complain(wrong) if wrong else "went on"


def _complain(what: str) -> str:
    raise Finding(what)


def _tried(act: Callable[[], list[Written]]) -> tuple[list[Written] | None, Exception | None]:
    try:
        return act(), None
    except Exception as error:
        return None, error


def _judged(scene: Scene, found: list[Written] | None, error: Exception | None, fits: Callable[[Any], bool]) -> str:
    errors = [error] if error is not None else [one.error for one in found or () if one.error is not None]
    for one in errors:
        chain = [one]
        while (before := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(before)
        if not any(map(fits, chain)):
            raise Finding(f"an odd error, {one!r}")
    if found is not None and (wrong := scene.wrong(found)):
        raise Finding(wrong)
    return "error" if errors else "went on"


def all_faults() -> list[Faults]:
    """Of every kind, in every scene where it can come."""
    found = []
    for name in SCENES:
        found.append(Faults("interrupt", name, _count_bytecodes, _interrupt))
        for who in ("tensors", "library")[: 1 if name in _OF_MODULES else 2]:
            found.append(Faults(f"no memory: {who}", name, partial(_count_requests, who), partial(_refuse, who)))
    for name in _OF_MODULES:
        for which, who in enumerate(("target", "level")):
            for whole in (True, False):
                do = partial(_hidden, which, whole)
                said = f"{name}: {who}, {'all' if whole else 'one element'}"
                found.append(Faults("NaN", said, partial(_count_passes, do), partial(_spoil, do)))
    for name in _COMPILED:
        for which, who in enumerate(("target", "level") if name != "sampled chain" else ("target",)):
            for weight in _OF_WEIGHTS:
                do, said = partial(_weight, which, weight), f"{name}: {who}, {weight}"
                found.append(Faults("NaN", said, partial(_count_passes, do), partial(_spoil, do)))
    for name in ("chain of modules", "compiled chain"):
        for place in PLACES:
            found.append(Faults("stuck thread", f"{name}: {place}", lambda _: 12, partial(_stick, place)))
    return found


