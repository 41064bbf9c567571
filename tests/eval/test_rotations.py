"""Does `eval.rotations` make a line of every method with GPTQ for each damping?"""

from __future__ import annotations

import pytest
from programs import program

pytestmark = pytest.mark.usefixtures("from_the_root")


@pytest.mark.parametrize(("dampings", "expected"), [
    (None, ("rtn", "gptq", "quarot+gptq")),
    ([0.01, 0.1], ("rtn", "gptq, damping 0.01", "gptq, damping 0.1", "quarot+gptq, damping 0.01",
                   "quarot+gptq, damping 0.1"))])  # fmt: skip
def test_methods_with_gptq_have_a_line_for_each_damping(dampings, expected):
    assert program("rotations").damped(("rtn", "gptq", "quarot+gptq"), dampings) == expected


def test_the_damping_of_a_line_is_that_of_its_codes(saved_model, tmp_path):
    from transformers import AutoTokenizer

    files = ["--text", str(tmp_path), "--humaneval", str(tmp_path), "--model", str(saved_model)]
    args = program("rotations").parse([*files, "--group-size", "32", "--dampings", ".01", "--samples", "1"])
    tokenizer, ids = AutoTokenizer.from_pretrained(saved_model), [[3, 4, 5] * 20]
    made = [program("rotations").int4_model(args, name, ids, tokenizer) for name in ("gptq", "gptq, damping 0.01")]
    told = [model.config.quantization_config.calibration["damping"] for model in made]
    turned = program("rotations").int4_model(args, "quarot+gptq, down alone", ids, tokenizer)
    layer = turned.model.layers[0]
    assert layer.mlp.down_proj.transform_hadamard.tolist() != [1, 1, 1]
    assert layer.self_attn.o_proj.transform_hadamard.tolist() == [1, 1, 1]
    assert turned.config.quantization_config.calibration["method"] == "gptq"
    assert told == [0.1, 0.01]


def test_saved_models_have_a_line_over_each_cache(saved_model, tmp_path):
    from transformers import AutoModelForCausalLM

    import hf_mlspec

    model = AutoModelForCausalLM.from_pretrained(saved_model)
    hf_mlspec.quantize(model, "rtn", calibration=[[3, 4, 5] * 20], group_size=32)
    model.save_pretrained(tmp_path / "rtn")
    files = ["--text", str(tmp_path), "--humaneval", str(tmp_path), "--model", str(saved_model)]
    args = program("rotations").parse([*files, "--packed", str(tmp_path / "rtn"), "--kv-caches", "none", "int4"])
    assert program("rotations").methods_of(args) == ()
    made = [program("rotations").saved_model(args, folder) for folder in args.packed]
    models, names = program("rotations").varied(args, made, ("rtn",))
    assert names == ("rtn", "rtn, int4 cache")
    assert [one.config.quantization_config.kv_cache for one in models] == [None, "int4"]
    text = [list(range(3, 40))], [36]
    as_computed, few = (program("rotations").perplexity(one, text, "w4a16") for one in models)
    assert as_computed != few
    assert abs(as_computed / few - 1) < 0.2
    with pytest.raises(SystemExit):
        program("rotations").parse([*files, "--packed", str(tmp_path / "rtn"), "--clips", "auto"])
