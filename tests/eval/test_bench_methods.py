"""Does the benchmark of methods time every model in turns, alone and with drafts, and hold it against the first?"""

from __future__ import annotations

import json

import pytest
from programs import program
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_mlspec

pytestmark = [pytest.mark.usefixtures("from_the_root"), pytest.mark.filterwarnings("ignore:no compiled kernel")]


@pytest.fixture
def folders(saved_model, tmp_path):
    """The model by two methods, and prompts."""
    made = []
    for method in ("rtn", "gptq"):
        model = AutoModelForCausalLM.from_pretrained(saved_model)
        hf_mlspec.quantize(model, method, calibration=[[3, 1, 4, 1, 5, 9, 2, 6] * 8], group_size=32)
        model.save_pretrained(tmp_path / method)
        AutoTokenizer.from_pretrained(saved_model).save_pretrained(tmp_path / method)
        made.append(str(tmp_path / method))
    prompts = tmp_path / "words.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in ("def f(", "apples", "How many?")))
    return [*made, "--prompts", str(prompts), "--threads", "1", "--repeats", "1", "--tokens", "6"]


def test_a_line_for_every_method_and_batch_size(folders, tmp_path, capsys):
    out = tmp_path / "lines.jsonl"
    status = program("bench_methods").main([*folders, "--batch", "1,2", "--json", str(out)])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["batch"], line["method"]) for line in lines] == [(n, m) for n in (1, 2) for m in ("rtn", "gptq")]
    for first, second in zip(lines[::2], lines[1::2], strict=True):
        ratio = second["chain_tokens_per_second"] / first["chain_tokens_per_second"]
        assert (first["of_first_chain"], second["of_first_chain"]) == (1, pytest.approx(ratio))
    for line in lines:
        assert line["of_alone"] * line["alone_tokens_per_second"] == pytest.approx(line["chain_tokens_per_second"])
        assert 0 <= line["of_drafted"] <= line["of_tested"] <= 1
        assert line["compared"] == 2 * 6 * line["batch"] * (3 if line["batch"] == 1 else 1)  # two turns of all batches
    assert status == any(line["differing"] for line in lines)
    assert "x first" in capsys.readouterr().out


@pytest.mark.parametrize(("change", "words"), [
    (["--repeats", "0"], "--repeats and --threads are at least 1"),
    (["--device", "nowhere"], "is none that torch knows")])
def test_wrong_options_are_refused(folders, capsys, change, words):
    with pytest.raises(SystemExit):
        program("bench_methods").main([*folders, *change])
    assert words in capsys.readouterr().err


def test_too_few_prompts_are_refused(folders, capsys):
    assert program("bench_methods").main([*folders, "--batch", "4"]) == 2
    assert "a batch of 4 needs as many prompts, and 3 were read" in capsys.readouterr().err
