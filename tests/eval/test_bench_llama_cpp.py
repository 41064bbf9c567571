"""A mixture in gpt-oss's form beside llama.cpp: is the file whole, and are steps of ours timed?"""

from __future__ import annotations

import json

import gguf
import pytest
from programs import program
from transformers import GptOssConfig

from eval.targets import GPT_OSS


def test_the_file_holds_what_llama_cpp_reads(tmp_path):
    config = GptOssConfig(**GPT_OSS["gpt-oss-tiny"])
    program("bench_llama_cpp.gguf_shape").write(config, tmp_path / "shape.gguf")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "shape.gguf").tensors}
    types = {name.split(".")[-2]: found[name].tensor_type.name for name in found if name.endswith("weight")}
    assert {name for name, kind in types.items() if kind == "MXFP4"} == {
        "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}  # fmt: skip
    assert {name for name, kind in types.items() if kind == "BF16"} == {
        "token_embd", "output", "attn_q", "attn_k", "attn_v", "attn_output"}  # fmt: skip
    assert found["blk.1.ffn_down_exps.weight"].shape.tolist() == [64, 64, 8]
    assert found["blk.1.ffn_down_exps.bias"].shape.tolist() == [64, 8]
    assert len(found) == 3 + 2 * 19


def test_steps_of_ours_are_timed_at_both_widths(capsys):
    assert program("bench_llama_cpp").main(["--quick", "--threads", "1"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    shape, steps = lines[0], [line for line in lines if line["what"] == "step"]
    assert [step["contender"] for step in steps] == ["ours, 16 activation bits", "ours, 8 activation bits"]
    assert all(step["ms"] > 0 and step["prompt_ms"] > 0 for step in steps)
    assert shape["active_bytes"] < shape["bytes"]


@pytest.mark.parametrize(("given", "message"), [
    (["--llama", "nowhere"], "--llama nowhere is no file: build eval/peers/llama_steps.cpp"),
    (["--threads", "0"], "at least 1"), (["--work", "nowhere"], "--work nowhere is no folder"),
])  # fmt: skip
def test_what_cannot_run_is_named(given, message, capsys):
    with pytest.raises(SystemExit):
        program("bench_llama_cpp").main(given)
    assert message in capsys.readouterr().err
