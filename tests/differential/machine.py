"""Does a model write what an untouched twin writes, in whatever order it is prepared, nested, saved, cleared and used?

A Hypothesis state machine: rules are what users do with a model, and after each of them its tokens and its weights are
those of a twin that came to the same weights by the shortest way.
"""

from __future__ import annotations

import copy
import gc
import tempfile
import traceback
import weakref
from collections import Counter
from contextlib import suppress
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from models import near
from transformers import AutoModelForCausalLM, StoppingCriteriaList

import hf_mlspec
from hf_mlspec import Request, generate_stream
from hf_mlspec.nn.state import state_of

from .asks import options_of, prompts_of
from .interrupts import Bomb
from .twins import ASKS, EDITS, KINDS, SHAPE, Weights, answer, call, edit, formed, plain, same

asks = st.integers(0, len(ASKS) - 1)
WORDS = {
    "": ("mxfp4", "int3", "early_exit:1", "prompt_lookup", "ngram"),
    "nested": ("nested", "nested4a8", "mxfp4", "early_exit:1", "prompt_lookup"),
    "int4": ("w4a8", "w4a4", "early_exit:1", "prompt_lookup", "ngram"),
}
_LAST = ("prompt_lookup", "ngram")
counted: Counter = Counter()


class ModelMachine(RuleBasedStateMachine):
    """One model, what is known of its weights, and what was made of it at earlier times."""

    @initialize(kind=st.integers(0, len(KINDS) - 1))
    def begin(self, kind: int) -> None:
        self.model, self.weights = plain(kind), Weights(kind)
        self.engine: str | None = None  # of prepare, "" where it chose
        self.made: list[Any] = []
        counted["machine runs"] += 1

    def _step(self, name: str) -> None:
        counted["machine steps"] += 1
        counted[f"step {name}"] += 1

    @property
    def form(self) -> str:
        return self.weights.form[0] if self.weights.form else ""

    @rule(engine=st.sampled_from([None, "cpu", "cuda", "modules"]))
    def prepare(self, engine: str | None) -> None:
        self._step("prepare")
        if engine == "modules" and self.form:
            engine = None
        hf_mlspec.prepare(self.model, engine)
        self.engine = engine or ""

    @rule()
    def restore(self) -> None:
        self._step("restore")
        hf_mlspec.restore(self.model)
        self.engine = None
        assert same(self.model, self.weights)

    @precondition(lambda self: not self.form and KINDS[self.weights.kind][1] == "bfloat16")
    @rule(codebook=st.sampled_from(["lloyd_max", "mxfp4", "fitted"]))
    def nest(self, codebook: str) -> None:
        self._step("nest")
        self._formed(("nested", codebook))

    @precondition(lambda self: not self.form and KINDS[self.weights.kind][0] != "mixtral")
    @rule(method=st.sampled_from(["rtn", "gptq"]))
    def quantize(self, method: str) -> None:
        self._step("quantize")
        self._formed(("int4", method))

    def _formed(self, form: tuple[str, ...]) -> None:
        if self.engine == "modules":
            hf_mlspec.restore(self.model)
            self.engine = None
        formed(self.model, form)
        self.weights = self.weights._replace(form=form)
        assert same(self.model, self.weights)

    @precondition(lambda self: self.form == "nested")
    @rule()
    def unnest(self) -> None:
        self._step("unnest")
        hf_mlspec.unnest(self.model)
        self.weights = self.weights._replace(form=())
        assert same(self.model, self.weights)

    @precondition(lambda self: not self.form and len(self.weights.edits) < 2)
    @rule(number=st.integers(0, EDITS - 1))
    def edit(self, number: int) -> None:
        self._step("edit")
        edit(self.model, number)
        self.weights = self.weights._replace(edits=(*self.weights.edits, number))

    @rule(what=st.sampled_from(["cast", "int2", "exit", "near", "table"]))
    def make_a_level(self, what: str) -> None:
        """A level as an object, which may be used when the model has become another one."""
        self._step("make a level")
        if what in ("cast", "int2"):
            if self.form == "int4":
                return
            self.made.append(hf_mlspec.direct_cast(self.model, {"cast": "mxfp4"}.get(what, what)))
        elif what == "exit":
            self.made.append(hf_mlspec.early_exit(self.model, 1))
        elif what == "near":
            self.made.append(near(plain(self.weights.kind), 0.05))
        else:
            self.made.append(hf_mlspec.NGram(order=3))

    @rule(data=st.data(), ask=asks)
    def chain(self, data: st.DataObject, ask: int) -> None:
        self._step("chain")
        engine, words = self._chain(data)
        written = call(self.model, ask, **words)
        assert written == answer(self.weights, ask, engine), words

    @rule(data=st.data(), ask=asks, calls=st.integers(0, 4))
    def interrupted(self, data: st.DataObject, ask: int, calls: int) -> None:
        self._step("interrupted")
        _, words = self._chain(data)
        with suppress(KeyboardInterrupt):
            call(self.model, ask, stopping_criteria=StoppingCriteriaList([Bomb(calls)]), **words)

    @rule(ask=asks)
    def plain_generate(self, ask: int) -> None:
        """transformers' own loop, or of a prepared model its compiled steps."""
        self._step("generate")
        if self.engine == "modules":
            assert len(call(self.model, ask)) == len(ASKS[ask]["lengths"])
            return
        engine = None if self.engine is None else self.engine or "cpu"
        if engine is not None and "sample" in ASKS[ask]:
            return  # transformers draws in another way
        assert call(self.model, ask) == answer(self.weights, ask, engine)

    @rule(data=st.data(), max_batch=st.integers(1, 3), events=st.integers(0, 6))
    def stream(self, data: st.DataObject, max_batch: int, events: int) -> None:
        """Greedy requests of several asks at a time; some streams are closed before they end."""
        self._step("stream")
        engine, words = self._chain(data)
        chosen = data.draw(st.lists(st.sampled_from([0, 3, 5]), min_size=1, max_size=4))
        requests = [Request(prompts_of(ASKS[ask], SHAPE["vocab_size"])[0], id=(number, ask),
                            **options_of(ASKS[ask], None)) for number, ask in enumerate(chosen)]  # fmt: skip
        stream = generate_stream(self.model, requests, max_batch=max_batch, events=True, **words)
        for count, event in enumerate(stream):
            if isinstance(event, hf_mlspec.Completion):
                assert event.error is None
                (expected,) = answer(self.weights, event.id[1], engine)
                assert event.new_tokens == expected[: len(event.new_tokens)]
                assert not any(expected[len(event.new_tokens) :])
            if events and count == 4 * events:
                stream.close()
                break

    def _chain(self, data: st.DataObject) -> tuple[str, dict[str, Any]]:
        """The engine, and arguments: words and objects of any age as levels."""
        engine = data.draw(st.sampled_from(["cpu", "cpu", "cuda"]))
        words = st.sampled_from(WORDS[self.form])
        made = st.sampled_from(range(len(self.made))) if self.made else words
        drawn = data.draw(st.lists(st.one_of(words, made), max_size=3, unique=True))
        levels = [self.made[one] if isinstance(one, int) else one for one in drawn]
        last = [one for one in levels if one in _LAST or isinstance(one, hf_mlspec.NGram)][:1]
        levels = [one for one in levels if not (one in _LAST or isinstance(one, hf_mlspec.NGram))] + last
        if {"w4a8", "w4a4"} <= set(drawn):
            levels.remove("w4a4")
        if {"nested", "nested4a8"} <= set(drawn):
            levels.remove("nested4a8")
        config = {"engine": engine, "num_draft_tokens": data.draw(st.sampled_from([1, 3, 6]))}
        return engine, {"assistant_models": levels, "speculation_config": config}

    @rule(deep=st.booleans())
    def save_and_load(self, deep: bool) -> None:
        """The same weights from a folder, or in a deep copy; neither is prepared."""
        self._step("copy" if deep else "save and load")
        if deep:
            self.model = copy.deepcopy(self.model)
            hf_mlspec.restore(self.model)
        else:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                self.model.save_pretrained(folder)
                self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
            if KINDS[self.weights.kind][0] == "gemma2":
                self.model.set_attn_implementation("eager")
        self.engine = None
        assert same(self.model, self.weights)

    @rule(look=st.booleans())
    def clear(self, look: bool) -> None:
        self._step("clear")
        kept = [weakref.ref(built[1]) for built in state_of(self.model).levels.values()
                if isinstance(built[1], type(self.model))]  # fmt: skip
        hf_mlspec.clear(self.model)
        state = state_of(self.model)
        assert [*state.levels, *state.chains, *state.known] == []
        assert self.engine is not None or not state.decoders
        if look:
            gc.collect()
            assert all(one() is None for one in kept), "a level outlives clear"

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        assert same(self.model, self.weights)
        gone = [weakref.ref(self.model), *(weakref.ref(one) for one in self.made)]
        self.model, self.made = None, []
        if counted["machine runs"] % 4 == 0:
            gc.collect()
            assert all(one() is None for one in gone), "a model outlives its last user"


def run_machine(seed: str, runs: int, counts: Counter, *, steps: int = 10, shrinks: bool = True) -> str:
    """Run it so many times; what failed, with the steps that lead there, the fewest where it shrinks, or ""."""
    gc.freeze()  # what is imported by now is not looked at again
    counted.clear()
    how = settings(max_examples=runs, stateful_step_count=steps, deadline=None, database=None,
                   suppress_health_check=list(HealthCheck), print_blob=False,
                   phases=[Phase.generate, *[Phase.shrink] * shrinks])  # fmt: skip
    try:
        run_state_machine_as_test(hypothesis.seed(seed)(ModelMachine), settings=how)
    except Exception as error:
        return "".join(traceback.format_exception(error))
    finally:
        counts.update(counted)
    return ""
