"""Does eval.zipper.calibrated compute what the packed layers compute, on models that stay what they are?"""

from __future__ import annotations

import json

import pytest
import torch
from models import prompts, tiny

import hf_mlspec
from eval.zipper.calibrated import main
from eval.zipper.outliers import give_outliers
from eval.zipper.two_parts import SPLITS, parts_of, take_apart
from eval.zipper.zero_shot import Question, accuracy, paired
from hf_mlspec.formats import ZipperWeight
from hf_mlspec.formats.zipper import Split

ROWS = [torch.randint(3, 64, (40,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(4)]


@pytest.mark.parametrize("word", SPLITS)
def test_parts_of_every_split_add_up(word):
    weight = ZipperWeight.from_dense(torch.randn(16, 256, generator=torch.Generator().manual_seed(0)))
    codes, scale = weight.codes(), weight.weight_scale.float()
    low, high = parts_of(codes, scale, word, Split())
    off = ((low + high) / scale - codes).abs()
    if word in ("signed", "clamped", "unsigned"):
        assert off.max() < 1e-4
    elif word == "halved":
        assert 0.5 < off.max() <= 1.001
    else:  # seven steps for sixteen
        assert 0.5 < off.max() <= 16 / 7 / 2 + 1e-3
        assert torch.equal((high != 0), (codes < -16) | (codes >= 16))
        assert not low[high != 0].any()
    zeros = float((high == 0).double().mean())
    assert (zeros < 0.6) if word == "unsigned" else (zeros > 0.8)


@pytest.mark.parametrize(("mode", "word"), [("exact", "signed"), ("paper", "halved"), ("clamp", "clamped")])
def test_dense_parts_are_the_packed_layers(mode, word):
    model, ids = tiny(dtype=torch.float32), prompts([12])["input_ids"]
    hf_mlspec.quantize(model, "quarot+smoothquant", "zipper", calibration=ROWS, mode=mode, search_bits=4)
    switch, wanted = hf_mlspec.precision_switch(model), {}
    for bits in (16, 8, 4):
        with switch.at("zipper" if bits == 16 else f"zippera{bits}"), torch.no_grad():
            wanted[bits] = model(ids).logits
    layers = take_apart(model, word)
    assert len(layers) == 14
    for bits, logits in wanted.items():
        for layer in layers:
            layer.bits = bits
        with torch.no_grad():
            # an activation may lie on the other side of a rounding
            assert (model(ids).logits - logits).norm() < (0.02 if bits == 16 else 0.1) * logits.norm(), bits
    assert (wanted[4] - wanted[16]).norm() > 0


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_outliers_change_activations_and_no_logit(kind):
    model, ids = tiny(kind, dtype=torch.float32), prompts([12])["input_ids"]
    before = model(ids).logits
    channels = give_outliers(model, 16)
    norm = model.model.layers[1].input_layernorm.weight
    assert norm[channels].min() > 8 * norm.median()
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-5, atol=1e-5)


def test_answers_are_compared_question_by_question():
    assert paired("1101", "1101") == (0.0, 0.0)
    assert paired("1101", "1000") == (0.5, 0.25)
    assert paired("01", "10") == (0.0, 0.5**0.5)
    with pytest.raises(ValueError, match="longer"):
        paired("1", "11")


@pytest.mark.parametrize("packed", [False, True])
def test_the_program_adds_a_line_a_row(tmp_path, capsys, packed):
    path = hf_mlspec.demo_pair()[0]
    (tmp_path / "text.txt").write_text("def add(a, b):\n    return a + b\n" * 200, encoding="utf-8")
    tasks = [{"prompt": "def f(x):\n", "canonical_solution": "    return x\n"}] * 2
    (tmp_path / "he.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
    text = tmp_path / "text.txt"
    files = ["--text", text, "--calibration", text, "--humaneval", tmp_path / "he.jsonl"]
    options = ["--windows", 1, "--solutions", 2, "--samples", 1, "--tokens", 32, "--outliers", 4]
    rows = ["bfloat16", "zipper"]
    questions = [{"goal": "add", "sol1": "a + b", "sol2": "return"}, {"goal": "x", "sol1": "b", "sol2": "a"}]
    (tmp_path / "piqa").mkdir()
    text = "".join(json.dumps(one) + "\n" for one in questions)
    (tmp_path / "piqa" / "valid.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "piqa" / "valid-labels.lst").write_text("0\n1\n", encoding="utf-8")
    (tmp_path / "winogrande").mkdir()
    both = {"context_options": ["a went so a", "a went so b"], "continuation": "came.", "gold": 1}
    (tmp_path / "winogrande" / "winogrande_dev.jsonl").write_text(json.dumps(both) + "\n", encoding="utf-8")
    options += ["--choices", tmp_path, *(["--packed"] if packed else [])]
    given = ["--model", path, *files, *options, "--json", tmp_path / "out.jsonl", "--rows", *rows]
    assert main(list(map(str, given))) == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == rows
    for name, count in (("piqa", 2), ("winogrande", 1)):
        assert all(line[f"{name}, 16"] * count in range(count + 1) for line in lines)
    assert "piqa, 4" in lines[1]
    assert len(lines[1]["answers, piqa, 8"]) == 2
    for line in lines[1:]:
        assert 1 < line["solutions, 16"] < 1e4
        assert packed or 0.5 < line["zeros"] < 1
        assert set(line["by layer"]) >= {"q_proj", "down_proj"}
    told = capsys.readouterr().out
    assert "| zipper |" in told
    assert "winogrande, 4" in told
    assert "| bfloat16 | +0.0 (0.0) |  |  | +0.0 (0.0) |" in told


def test_padding_and_order_change_no_answer():
    model = tiny(dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 64, (5 + i % 7,), generator=draw).tolist() for i in range(80)]
    counts = [1 + i % 4 for i in range(80)]
    questions = [Question(rows[i : i + 2], counts[i : i + 2], i // 2 % 2) for i in range(0, 80, 2)]
    right = 0
    for one in questions:
        chances = []
        for row, count in zip(one.rows, one.scored, strict=True):
            with torch.no_grad():
                scores = model(torch.tensor([row])).logits[0].log_softmax(-1)
            chances.append(sum(scores[at - 1, row[at]].item() for at in range(len(row) - count, len(row))))
        right += chances.index(max(chances)) == one.gold
    assert 0 < right < 40
    assert accuracy(model, questions) == right / 40
