"""Do the commands nest a target whose levels ask for it, write nested and bit-plane folders, and refuse the rest?"""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec import MLSpecConfig
from hf_mlspec.cli import main
from tests.test_cli_refusals import refusal

IDS = torch.arange(3, 17).view(2, 7)
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("def area(radius):\nOnce upon a time\n", encoding="utf-8")
    return path


def told(capsys, *argv: object) -> dict:
    """The JSON that a command which succeeds prints."""
    assert main([*map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("options", "settings"), [
    (["--format", "nested-bf16"], {"format": "nested-bf16"}),
    (["--format", "nested-bf16", "--codebook", "fitted"], {"format": "nested-bf16", "codebook": "fitted"}),
    (["--format", "bitplanes", "--group-size", 32], {"format": "bitplanes", "group_size": 32}),
    (["--format", "bitplanes", "--group-size", 32, "--num-planes", "int3"],
     {"format": "bitplanes", "group_size": 32, "num_planes": "int3"}),
])  # fmt: skip
def test_quantize_writes_what_from_pretrained_makes(capsys, saved_model, tmp_path, options, settings):
    found = told(capsys, "quantize", saved_model, tmp_path / "out", "--dtype", "bfloat16", *options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    wanted = AutoModelForCausalLM.from_pretrained(
        saved_model, dtype=torch.bfloat16, quantization_config=MLSpecConfig(**settings)
    )
    packed_bytes = sum(parameter.nbytes for parameter in wanted.parameters())  # as on disk: tiles may be padded
    assert torch.equal(model(IDS).logits, wanted(IDS).logits)
    plain = AutoModelForCausalLM.from_pretrained(saved_model, dtype=torch.bfloat16)
    assert found["all_weights"] == sum(parameter.numel() for parameter in plain.parameters())
    assert found["wide_bytes"] == sum(parameter.nbytes for parameter in plain.parameters())
    assert found["packed_bytes"] == packed_bytes
    nested = settings["format"] == "nested-bf16"
    assert found["packed_modules"] == 14 + nested  # nesting rounds nothing: the head may be nested, too
    assert (found["packed_bytes"] > found["wide_bytes"]) == nested


def test_quantize_says_what_it_weighs(capsys, saved_model, tmp_path):
    out = str(tmp_path / "out")
    assert main(["quantize", str(saved_model), out, "--format", "nested-bf16", "--dtype", "bfloat16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  bits per packed weight: 16.25" in lines
    assert "  kept wide: none of the linear layers" in lines
    assert any(line.startswith("  size after: ") and line.endswith("times larger)") for line in lines)


@pytest.mark.parametrize("levels", [["nested"], ["nested", "prompt_lookup"], ["int3"]])
def test_verify_finds_these_levels_lossless(capsys, saved_model, prompts, levels):
    words = [word for level in levels for word in ("--level", level)]
    found = told(capsys, "verify", saved_model, "--dtype", "bfloat16", "--prompts", prompts, "--max-new-tokens", 8,
                 *words)  # fmt: skip
    assert (found["identical"], found["failing"], found["tokens_compared"]) == (2, 0, 16)
    assert found["asked"]["levels"] == levels


def test_generate_takes_a_folder_that_is_nested_or_in_planes(capsys, saved_model, tmp_path):
    for format, level in (("nested-bf16", "nested"), ("bitplanes", "planes4")):
        group = [] if format == "nested-bf16" else ["--group-size", 32]
        told(capsys, "quantize", saved_model, tmp_path / format, "--dtype", "bfloat16", "--format", format, *group)
        found = told(capsys, "generate", "--model", tmp_path / format, "--level", level, "--dtype", "bfloat16",
                     "--prompt", "def f(", "--max-new-tokens", 8)  # fmt: skip
        assert [entry["name"] for entry in found["speculation"]["levels"]] == [level]
        assert len(found["ids"]) == 8


def test_demo_nests_the_demo_target(capsys):
    target, draft = hf_mlspec.demo_pair()
    found = told(capsys, "demo", "--model", target, "--level", "nested", "--level", draft, "--dtype", "bfloat16",
                 "--max-new-tokens", 4)  # fmt: skip
    assert found["levels"] == ["nested", draft]


@pytest.mark.parametrize(("argv", "message"), [
    (["verify", "MODEL", "--level", "nested", "--prompts", "FILE"],
     "--level nested drafts inside BF16 weights, not float32 ones; add --dtype bfloat16"),
    (["generate", "--model", "MODEL", "--level", "planes4", "--prompt", "x"], "with the target's own bit-planes"),
    (["generate", "--model", "MODEL", "--level", "planes9", "--prompt", "x"], "9 weight bits, must be 1 to 8"),
    (["quantize", "MODEL", "OUT", "--format", "nested-bf16"], "load it with dtype=torch.bfloat16 (--dtype bfloat16)"),
    (["quantize", "MODEL", "OUT", "--format", "nested-bf16", "--codebook", "nf4"], "unknown codebook 'nf4'"),
    (["quantize", "MODEL", "OUT", "--format", "nested-bf16", "--num-planes", "4"], "has no num_planes"),
    (["quantize", "MODEL", "OUT", "--format", "bitplanes", "--num-planes", "9"], "choose 1 to 8 or one of int3"),
    (["quantize", "MODEL", "OUT", "--format", "bitplanes"], "bitplanes with group_size=128 does not divide"),
])  # fmt: skip
def test_a_bad_call_is_refused_in_one_line(capsys, saved_model, prompts, tmp_path, argv, message):
    places = {"MODEL": str(saved_model), "FILE": str(prompts), "OUT": str(tmp_path / "out")}
    assert message in refusal(capsys, *[places.get(word, word) for word in argv])
    assert not (tmp_path / "out").exists()


def test_info_lists_the_ops_of_nested_weights_and_planes(capsys):
    ops = {entry["op"] for entry in told(capsys, "info")["kernels"]}
    assert {"nested_linear", "nested_rows", "bitplane_linear"} <= ops
