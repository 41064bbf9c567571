"""Do streamers get the text of stock generate, in order, as it is settled?"""

from __future__ import annotations

import threading

import pytest
import torch
from models import letters, near, prompts, tiny
from transformers import TextIteratorStreamer, TextStreamer

from hf_mlspec import SpeculationConfig

TARGET = tiny(seed=2)
NEAR = near(TARGET, 0.02)
TOKENIZER = letters()
INPUTS = prompts([8])
OPTIONS = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": 62}
CHAINS = [
    pytest.param({"assistant_models": []}, id="alone"),
    pytest.param({"assistant_models": [TARGET], "speculation_config": SpeculationConfig(8, 0.0)}, id="blocks"),
    pytest.param({"assistant_models": [NEAR, "ngram"]}, id="model, table"),
]


class Recorder:
    def __init__(self):
        self.puts, self.ended = [], 0

    def put(self, value):
        self.puts.append(value)

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("skip_prompt", [True, False])
def test_printed_text(chain, skip_prompt, capsys):
    TARGET.generate(**INPUTS, **OPTIONS, streamer=TextStreamer(TOKENIZER, skip_prompt=skip_prompt))
    stock = capsys.readouterr().out
    TARGET.generate(**INPUTS, **OPTIONS, streamer=TextStreamer(TOKENIZER, skip_prompt=skip_prompt), **chain)
    assert capsys.readouterr().out == stock
    assert len(stock) > 20


@pytest.mark.parametrize("chain", CHAINS)
def test_iterated_text(chain):
    streamer = TextIteratorStreamer(TOKENIZER, skip_prompt=True, timeout=30)
    out = []
    call = {**INPUTS, **OPTIONS, "streamer": streamer, **chain}
    thread = threading.Thread(target=lambda: out.append(TARGET.generate(**call)))
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == TOKENIZER.decode(out[0][0, 8:])


@pytest.mark.parametrize("chain", CHAINS)
def test_what_is_put(chain):
    recorder = Recorder()
    out = TARGET.generate(**INPUTS, **OPTIONS, streamer=recorder, **chain)
    assert torch.equal(recorder.puts[0], INPUTS["input_ids"])
    assert all(value.dim() == 1 and value.device.type == "cpu" and len(value) for value in recorder.puts[1:])
    assert torch.equal(torch.cat(recorder.puts[1:]), out[0, 8:])
    assert recorder.ended == 1


def test_nothing_behind_the_end_is_put():
    free = TARGET.generate(**INPUTS, **OPTIONS)[0, 8:].tolist()
    recorder = Recorder()
    ends = {**OPTIONS, "eos_token_id": free[5]}
    TARGET.generate(**INPUTS, **ends, streamer=recorder, assistant_models=[TARGET])
    assert torch.cat(recorder.puts[1:]).tolist() == free[: free.index(free[5]) + 1]


def test_several_rows_are_refused_before_anything_runs():
    calls, recorder = [], Recorder()
    handle = TARGET.register_forward_hook(lambda *args: calls.append(1))
    with pytest.raises(ValueError, match=r"streamer with 2 rows.*one row.*generate_stream"):
        TARGET.generate(**prompts([8, 4]), **OPTIONS, streamer=recorder, assistant_models=[NEAR])
    sampled = {**OPTIONS, "do_sample": True, "num_return_sequences": 2}
    with pytest.raises(ValueError, match="streamer with 2 rows"):
        TARGET.generate(**INPUTS, **sampled, streamer=recorder, assistant_models=[NEAR])
    handle.remove()
    assert not calls
    assert not recorder.puts
