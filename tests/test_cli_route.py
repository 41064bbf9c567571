"""Does mlspec route train write a router that mlspec route show and generate then read, and refuse in one line?"""

from __future__ import annotations

import json

import pytest
from refused_command import refusal
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec.cli import main

TEXTS = {"code": "def add(a, b):\n    return a + b\n\n" * 30, "prose": "It was a dark and stormy night. " * 30}
TRAIN = ("--steps", 4, "--batch", 4, "--samples", 12, "--tokens", 24, "--query-tokens", 12, "--group-size", 32)


@pytest.fixture(scope="module")
def place(saved_model, tmp_path_factory):
    """A folder with two texts, prompts, and a router that was trained for a few steps."""
    folder = tmp_path_factory.mktemp("route")
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text)
    (folder / "prompts.txt").write_text("def f(x):\nOnce upon a time\n")
    trained(saved_model, folder, "router.safetensors")
    return folder


def trained(model, folder, out, *more):
    words = ["route", "train", model, "--data", folder / "code.txt", "--data", folder / "prose.txt", "--target-bits",
             "4.5", "--out", folder / out, *TRAIN, *more]
    assert main([str(word) for word in words]) == 0


def test_training_writes_a_router_and_tells(capsys, place, saved_model):
    trained(saved_model, place, "again.safetensors", "--json")
    told = json.loads(capsys.readouterr().out)
    assert (told["queries"], told["tokens"], told["teacher"]) == (12, 24, "the dense model in float32")
    assert [step["step"] for step in told["steps"]] == [0, 1, 2, 3]
    assert told["widths"] == [2, 3, 4, 6, 8]
    assert 2 <= told["bits"] <= 8
    assert (place / "again.safetensors").read_bytes() == (place / "router.safetensors").read_bytes()
    assert not (place / "again.safetensors.training").exists()
    trained(saved_model, place, "again.safetensors")
    assert "  bits of a weight: " in capsys.readouterr().out


def test_pictures_are_drawn(capsys, place, saved_model):
    pytest.importorskip("matplotlib")
    trained(saved_model, place, "third.safetensors", "--plot", place / "learning.png")
    assert main([str(word) for word in ("route", "show", saved_model, "--router", place / "router.safetensors",
                                        "--prompts", place / "prompts.txt", "--group-size", 32, "--plot",
                                        place / "planes.png")]) == 0
    for name in ("learning", "planes"):
        assert (place / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_show_tells_planes_by_block_and_prompt(capsys, place, saved_model):
    words = ["route", "show", saved_model, "--router", place / "router.safetensors", "--prompts",
             place / "prompts.txt", "--group-size", 32]
    assert main([str(word) for word in (*words, "--json")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["prompt"] for one in told] == ["def f(x):", "Once upon a time"]
    assert list(told[0]["widths"]) == [f"model.layers.{layer}.{part}" for layer in (0, 1)
                                       for part in ("self_attn", "mlp")]
    assert main([str(word) for word in words]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = [str(one["widths"]["model.layers.0.self_attn"]) for one in told]
    assert lines[1].startswith(f"  0 self_attn: prompt 0 {first[0]}, prompt 1 {first[1]}, mean of 2 ")
    assert lines[-1].startswith(f"  bits of a weight: prompt 0 {told[0]['bits']:.2f}, ")


def test_a_saved_routed_model_is_shown_and_trained_again(capsys, place, saved_model):
    config = hf_mlspec.MLSpecConfig(format="planes", group_size=32, router=place / "router.safetensors")
    model = AutoModelForCausalLM.from_pretrained(saved_model, quantization_config=config)
    model.save_pretrained(place / "routed")
    for file in saved_model.glob("tokenizer*"):
        (place / "routed" / file.name).write_bytes(file.read_bytes())
    assert main(["route", "show", str(place / "routed"), "--prompts", str(place / "prompts.txt"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    trained(place / "routed", place, "planes.safetensors", "--json")
    assert json.loads(capsys.readouterr().out)["teacher"] == "all planes"


def test_a_chain_with_a_routed_draft_is_verified(capsys, place, saved_model):
    config = hf_mlspec.MLSpecConfig(format="planes", group_size=32)
    model = AutoModelForCausalLM.from_pretrained(saved_model, quantization_config=config)
    model.save_pretrained(place / "plain")
    for file in saved_model.glob("tokenizer*"):
        (place / "plain" / file.name).write_bytes(file.read_bytes())
    words = ["verify", place / "plain", "--level", "routed", "--router", place / "router.safetensors", "--prompts",
             place / "prompts.txt", "--max-new-tokens", 8, "--json"]
    assert main([str(word) for word in words]) == 0
    assert json.loads(capsys.readouterr().out)
    words[5] = place / "none"
    assert "which is no file; mlspec route train writes one" in refusal(capsys, *words)


@pytest.mark.parametrize(("words", "said"), [
    (["train", "MODEL", "--data", "one.txt", "--target-bits", "4.5", "--out", "new"],
     "has 1 tokens: a next token takes at least 2"),
    (["train", "MODEL", "--data", "short.txt", "--target-bits", "4.5", "--out", "new"],
     "the training text has 8 tokens, 256 samples of 128 need 32768"),
    (["train", "MODEL", "--data", "code.txt", "--target-bits", "9", "--out", "new", *map(str, TRAIN)],
     "target_bits is 9.0, the candidates are [2, 3, 4, 6, 8]"),
    (["train", "MODEL", "--data", "code.txt", "--target-bits", "4", "--out", "new", "--widths", "4", *map(str, TRAIN)],
     "two or more rising numbers of planes"),
    (["train", "MODEL", "--data", "no.txt", "--target-bits", "4.5", "--out", "new"], "does not exist"),
    (["train", "MODEL", "--data", "code.txt", "--target-bits", "4.5", "--out", "."], "is a folder"),
    (["train", "./nowhere", "--data", "code.txt", "--target-bits", "4.5", "--out", "new"], "does not exist"),
    (["train", "MODEL", "--data", "code.txt", "--target-bits", "4.5", "--out", "new", "--plot", "x.doc"],
     "a picture's name ends with"),
    (["show", "MODEL", "--prompts", "prompts.txt", "--group-size", "32"], "the model has no router of its own"),
    (["show", "MODEL", "--prompts", "prompts.txt", "--router", "router.safetensors", "--group-size", "96"], "group"),
    (["show", "MODEL", "--prompts", "prompts.txt", "--router", "code.txt", "--group-size", "32"], "is no router"),
    (["train", "MODEL"], "mlspec route train: "), (["dance"], "mlspec route: "), ([], "mlspec route: "),
])  # fmt: skip
def test_bad_calls_are_refused_and_write_nothing(capsys, monkeypatch, place, saved_model, words, said):
    monkeypatch.chdir(place)
    (place / "one.txt").write_text("a")
    (place / "short.txt").write_text("def f():")
    assert said in refusal(capsys, "route", *[str(saved_model) if word == "MODEL" else word for word in words])
    assert not list(place.glob("new*"))
