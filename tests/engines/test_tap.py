"""Does a tap hold what transformers calls hidden states, whoever feeds, and does it know which of them are new?"""

from __future__ import annotations

import pytest
import torch
from decoders import random_model
from lora import add_lora
from models import tiny

from hf_mlspec.engines.choose import engine_of
from hf_mlspec.engines.modules.attention import ragged_attention_on
from hf_mlspec.engines.tap import Tap
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

ROWS = [[5, 9, 13, 7, 21, 30], [11, 4, 8]]
ENGINES = [
    "modules",
    pytest.param(
        "cpu", marks=pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
    ),
]


def expected(model, row: list[int], layers: list[int]) -> torch.Tensor:
    """`[tokens, layers, hidden]`; the last entry of transformers' hidden states is normed, so its input is hooked."""
    last = []
    hook = model.model.layers[-1].register_forward_hook(
        lambda module, inputs, output: last.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.no_grad():
        found = list(model(torch.tensor([row]), output_hidden_states=True).hidden_states)
    hook.remove()
    found[-1] = last[0]
    return torch.stack([found[layer][0] for layer in layers], dim=1)


def tapped(model, name: str, layers: list[int], rows=ROWS):
    """An engine with a tap, started."""
    made = engine_of(model, name=name)
    made.tap = Tap(layers, model.config.hidden_size, model.dtype)
    made.start(len(rows), torch.device("cpu"))
    made.tap.start(len(rows), 1, torch.device("cpu"))
    return made


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "olmoe", "phi"])
def test_the_tap_holds_what_every_layer_reads(kind, name):
    model = tiny(kind, dtype=torch.float32)
    layers = [0, 1, 2]
    made = tapped(model, name, layers)
    with torch.inference_mode(), ragged_attention_on([model] if name == "modules" else []):
        made.feed(ROWS)
        assert (made.tap.first, made.tap.end) == ([0, 0], [6, 3])
        made.lengths = [4, 3]  # two tokens of the first row are taken back, and others come
        rows = [[*ROWS[0][:4], 40, 41, 42], [*ROWS[1], 17]]
        made.feed(rows)
    assert (made.tap.end, made.tap.read(0), made.tap.read(0), made.tap.read(1)) == ([7, 4], 0, 7, 0)
    for r, row in enumerate(rows):
        torch.testing.assert_close(made.tap.states[r, : len(row)], expected(model, row, layers), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
@pytest.mark.parametrize("threads", [1, 3])
def test_a_tap_of_layers_that_keep_states_with_adapters_beside_them(threads):
    model, layers = random_model("qwen3.5", torch.float32), [0, 1, 2, 3]
    add_lora(model, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
    rows = [torch.arange(5, 150).tolist(), [*ROWS[1], 17]]
    torch.set_num_threads(threads)
    try:
        made = tapped(model, "cpu", layers)
        made.feed([rows[0][:140], [*rows[1][:3], 90, 91]])
        made.lengths = [100, 3]
        logits = made.feed(rows)
    finally:
        torch.set_num_threads(1)
    for r, row in enumerate(rows):
        found, alone = made.tap.states[r, : len(row)], tapped(model, "cpu", layers, [row])
        torch.testing.assert_close(found, expected(model, row, layers), rtol=1e-3, atol=1e-3)
        assert torch.equal(alone.feed([row])[0], logits[r])
        assert torch.equal(alone.tap.states[0, : len(row)], found)


@pytest.mark.parametrize("name", ENGINES)
def test_a_row_that_rests_keeps_its_states(name):
    model = tiny(dtype=torch.bfloat16)
    made = tapped(model, name, [1])
    with torch.inference_mode(), ragged_attention_on([model] if name == "modules" else []):
        made.feed(ROWS)
        before = made.tap.states[0, :6].clone()
        made.feed([[*ROWS[0], 3], [*ROWS[1], 9]], alive=[False, True])
    assert made.tap.end == [6, 4]
    assert torch.equal(made.tap.states[0, :6], before)


@pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
def test_a_tap_changes_no_bit_of_what_is_scored():
    model = tiny(dtype=torch.bfloat16)
    plain = engine_of(model, name="cpu")
    plain.start(2, torch.device("cpu"))
    made = tapped(model, "cpu", [0, 2])
    assert torch.equal(plain.feed(ROWS), made.feed(ROWS))


def test_rows_move_join_and_leave():
    tap = Tap([0], 4, torch.float32)
    tap.start(2, 8, torch.device("cpu"))
    tap.wrote([0, 0], [5, 3])
    tap.states[0], tap.states[1] = 1.0, 2.0
    tap.select([1])
    assert (tap.end, float(tap.states[0, 0, 0, 0])) == ([3], 2.0)
    tap.admit(2)
    assert (tap.end, len(tap.states)) == ([3, 0, 0], 3)
    tap.wrote([3, 4, 0], [1, 2, 0])  # the second row's first four were fed elsewhere
    assert (tap.first, tap.end) == ([0, 4, 0], [4, 6, 0])
    tap.reserve(3, 600)
    assert (tap.states.shape[1] >= 600, float(tap.states[0, 0, 0, 0])) == (True, 2.0)
    tap.forget(0)
    assert tap.end == [0, 6, 0]


@pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
@pytest.mark.parametrize(("layers", "shape", "words"), [
    ([0, 3], (1, 256, 2, 32), "ascending numbers of 0 to 2"),
    ([1, 1], (1, 256, 2, 32), "ascending numbers"),
    ([1], (1, 256, 2, 32), "tap_states has shape"),
    ([1], (1, 2, 1, 32), "reaches 6 tokens, tap_states has 2 slots"),
])  # fmt: skip
def test_the_compiled_decoder_refuses_what_it_would_write_beside(layers, shape, words):
    made = engine_of(tiny(dtype=torch.float32), name="cpu")
    made.start(1, torch.device("cpu"))
    call = made.cache.kv, ROWS[0], [6], [0], [1], False, False, 0, 0, 0, [], []
    with pytest.raises((IndexError, ValueError), match=words):
        made.decoder.handle.score_tapped(*call, layers, torch.zeros(shape))


@pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
def test_a_pass_that_fails_leaves_no_states_behind_its_beginning(monkeypatch):
    engine = engine_of(tiny(dtype=torch.float32), name="cpu")
    engine.start(1, torch.device("cpu"))
    engine.tap = Tap((1,), 32, torch.float32)
    engine.tap.start(1, 8, torch.device("cpu"))
    engine.score([ROWS[0][:4]], [[]])
    assert engine.tap.end == [4]

    def fails(*_):
        raise OSError("planes")

    monkeypatch.setattr(engine.decoder, "call", fails)
    engine.lengths = [2]
    with pytest.raises(OSError, match="planes"):
        engine.score([ROWS[0]], [[]])
    assert engine.tap.end == [2]
