"""Does a long prompt get through several threads while other programs want the cores?

A prompt of more than 512 tokens is read in several passes of one call, of which the last asks for a token. A thread
that lost its core between two passes must not take the next one's questions for those of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys, time, torch
import hf_mlspec
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
torch.set_num_threads(2)
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=1, max_position_embeddings=4096)
model = LlamaForCausalLM(config).bfloat16().eval()
prompt = torch.randint(0, 64, (1, 3000))
written, end = set(), time.monotonic() + 6
while time.monotonic() < end:
    ids = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2, do_sample=False,
                         assistant_models=[], pad_token_id=0)
    written.add(tuple(ids[0, -2:].tolist()))
print(len(written))
"""


@pytest.mark.slow
@pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
def test_passes_do_not_run_into_each_other():
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120,
                              check=False)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1"]  # the same tokens every time
