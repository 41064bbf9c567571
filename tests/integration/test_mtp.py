"""Does the MTP layer of a checkpoint draft what it was trained to, change no token, and say what does not fit?"""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from models import EOS, VOCAB, alone, prompts, refused, tiny, together
from mtp_layers import TARGETS, layer_of, published, target_of, write_mtp
from safetensors.torch import load_file, save_file

import hf_mlspec
from hf_mlspec import generate_stream
from hf_mlspec.engines.choose import engine_of
from hf_mlspec.engines.modules.attention import ragged_attention_on
from hf_mlspec.engines.modules.mtp import MtpEngine
from hf_mlspec.engines.tap import Tap
from hf_mlspec.integration.costs.identity import model_of
from hf_mlspec.integration.levels import mtp_tensors
from hf_mlspec.integration.levels.mtp import _of_target, load_mtp
from hf_mlspec.integration.levels.words import parse_level
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

ROW = [5, 9, 13, 7, 21, 30, 11, 4]
DRAFT = [8, 17, 40]
OF_CHECKPOINTS = [name for name, (_, _, layout) in TARGETS.items() if layout != "speculators"]
COMPILED = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
ENGINES = ["modules", pytest.param("cpu", marks=COMPILED)]


def word(name: str, folder) -> str:
    return "mtp" if name in OF_CHECKPOINTS else str(folder)


def reference(target, layer, row: list[int], steps: int) -> list[torch.Tensor]:
    """Logits behind a row, and behind its last `steps` - 1 tokens as drafts: whole rows, no cache, float32."""
    known, found = len(row) - steps + 1, []
    with torch.no_grad():
        hidden = target(torch.tensor([row[:known]]), output_hidden_states=True).hidden_states[-1][:, :-1]
        for step in range(steps):
            out = layer(target, torch.tensor([row[1 : known + step]]), hidden)
            found.append(target.lm_head(out[0, -1]))
            hidden = torch.cat([hidden, out[:, -1:]], 1)
    return found


def drafting(target, head, name: str | None, rows) -> tuple:
    """An engine of the target that has read the rows, and one of the head behind it."""
    above = engine_of(target, name=name, required=False)
    above.tap = Tap(head.shape.taps, 32, target.dtype)
    made = MtpEngine(head, above.tap)
    above.start(len(rows), torch.device("cpu"))
    made.start(len(rows), torch.device("cpu"))
    with torch.inference_mode(), ragged_attention_on([target] if above.can.by_module else []):
        above.feed([list(row) for row in rows])
    return above, made


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", TARGETS)
def test_a_layer_computes_what_its_papers_write(name, engine, tmp_path):
    target = target_of(name)
    layer = layer_of(target)
    head = load_mtp(target, str(write_mtp(tmp_path, target, layer)), None)
    expected = reference(target, layer, ROW + DRAFT[:2], 3)
    _, made = drafting(target, head, engine, [ROW, ROW[:3]])
    with torch.inference_mode():
        found = [made.feed([ROW, ROW[:3]])[0, 0]]
        for token in DRAFT[:2]:
            found.append(made.step(torch.tensor([[token]] * 2), [1, 0], [0, 0], 1)[0, 0])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-3)


def test_a_layer_of_qwen3_by_hand(tmp_path):
    """The same numbers from its published tensors alone, without any module of transformers."""
    target = target_of("Qwen3ForCausalLM")
    layer = layer_of(target)
    head = load_mtp(target, str(write_mtp(tmp_path, target, layer)), None)
    _, made = drafting(target, head, "modules", [ROW])
    with torch.inference_mode():
        ours = made.feed([ROW])[0, 0]
        hidden = target(torch.tensor([ROW]), output_hidden_states=True).hidden_states[-1][0, :-1]
    w = {name.removeprefix("mtp_layers.0."): tensor for name, tensor in published(layer, "speculators", 2).items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * w[f"{name}.weight"]

    def turned(x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(1, len(ROW)).float()[:, None, None] * 10000.0 ** -(torch.arange(4) / 4)
        one, two = x.chunk(2, -1)
        return torch.cat([one * places.cos() - two * places.sin(), two * places.cos() + one * places.sin()], -1)

    embedded = target.model.embed_tokens.weight.detach()[ROW[1:]]
    x = torch.cat([norm(embedded, "token_layernorm"), norm(hidden, "hidden_layernorm")], -1) @ w["input_proj.weight"].T
    y = norm(x, "input_layernorm")
    q, k, v = ((y @ w[f"self_attn.{one}_proj.weight"].T).unflatten(-1, (-1, 8)) for one in "qkv")
    q, k = turned(norm(q, "self_attn.q_norm")), turned(norm(k, "self_attn.k_norm"))
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / 8**0.5 + torch.full((7, 7), float("-inf")).triu(1)
    x = x + torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1) @ w["self_attn.o_proj.weight"].T
    y = norm(x, "post_attention_layernorm")
    gate, up = (y @ w[f"mlp.{one}_proj.weight"].T for one in ("gate", "up"))
    x = norm(x + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T, "final_layernorm")
    torch.testing.assert_close(ours, x[-1] @ target.lm_head.weight.detach().T, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["Glm4MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_the_layer_of_transformers_gives_the_same(name, tmp_path):
    """Its own reader of the checkpoint (`use_mtp`), of the same release."""
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers.MtpModel, "get_mtp_weights_regex"):
        pytest.skip("the reader of an older release")
    target = target_of(name)
    target._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\."]  # as of the sizes that were published
    folder = write_mtp(tmp_path, target, layer_of(target))
    whole = {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}
    (folder / "of_mtp.safetensors").unlink()
    save_file(whole, folder / "model.safetensors", {"format": "pt"})  # the one file that transformers reads
    target.config.dtype = torch.float32
    theirs = layers.MtpModel.from_pretrained(target)
    head = load_mtp(target, str(folder), None)
    own = dict(head.named_parameters()) | dict(head.named_buffers())
    read = {f"layers.0.{n.replace('block.', 'mtp_block.', 1) if n.startswith('block.') else n}": t
            for n, t in own.items()}  # fmt: skip
    held = {n: t for n, t in theirs.state_dict().items() if n.startswith("layers.")}
    assert held.keys() == read.keys()
    assert all(torch.equal(held[n], read[n]) for n in held)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["Glm4MoeForCausalLM", "Qwen3_5ForCausalLM"])
def test_what_was_drafted_is_read_again_from_the_targets_own_states(name, engine, tmp_path):
    """Rows of other lengths, one rejected in full, one in part: as a layer that reads them for the first time."""
    target = target_of(name)
    head = load_mtp(target, str(write_mtp(tmp_path, target, layer_of(target))), None)
    rows = [ROW, ROW[:3], ROW[:5]]
    above, made = drafting(target, head, engine, rows)
    with torch.inference_mode(), ragged_attention_on([target] if above.can.by_module else []):
        made.feed(rows)
        for token in DRAFT:
            made.step(torch.tensor([[token]] * 3), [1, 1, 0], [0] * 3, 1)
        longer = [[*ROW, 50], [*ROW[:3], *DRAFT[:2], 51], [*ROW[:5], 52]]
        made.lengths = [min(have, len(row) - 1) for have, row in zip(made.lengths, longer, strict=True)]
        above.feed(longer)
        ours = made.feed(longer)
    _, fresh = drafting(target, head, engine, longer)
    with torch.inference_mode():
        torch.testing.assert_close(ours, fresh.feed(longer), rtol=1e-4, atol=1e-4)
    assert made.cache_bytes > 0
    assert made.bytes_per_token > 0


CHAINS = {"mtp": "{0}", "cast, mtp": "mxfp4 {0}", "mtp in 4 bits": "{0}@mxfp4"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TARGETS)
def test_every_token_is_the_targets(name, dtype, tmp_path):
    target = target_of(name, dtype)
    folder = write_mtp(tmp_path, target, layer_of(target))
    inputs = prompts([5, 14, 1, 9])
    own = alone(target, inputs, max_new_tokens=20, eos_token_id=EOS, assistant_models=[])
    config = {"num_draft_tokens": 3, "confidence_threshold": 0.0}
    options = {"max_new_tokens": 20, "eos_token_id": EOS, "speculation_config": config}
    for chain in CHAINS.values():
        levels = chain.format(word(name, folder)).split()
        assert together(target, inputs, levels, **options) == own
        last = hf_mlspec.last_stats(target).levels[-1]
        assert last.accepted > 2
        assert last.cache_bytes > 0


@pytest.mark.parametrize("name", ["Qwen3_5ForCausalLM", "Qwen3NextForCausalLM"])
def test_a_target_that_keeps_a_state_runs_its_modules_too(name, tmp_path):
    target = target_of(name)
    write_mtp(tmp_path, target, layer_of(target))
    inputs, config = prompts([5, 9]), {"num_draft_tokens": 2, "confidence_threshold": 0.0, "engine": "modules"}
    own = alone(target, inputs, max_new_tokens=12, eos_token_id=EOS, assistant_models=[], speculation_config=config)
    for levels in (["mtp"], ["mxfp4", "mtp"]):
        options = {"max_new_tokens": 12, "eos_token_id": EOS, "speculation_config": config}
        assert together(target, inputs, levels, **options) == own
        assert hf_mlspec.last_stats(target).levels[-1].accepted > 0


@pytest.mark.parametrize("name", ["Glm4MoeForCausalLM", "DeepseekV3ForCausalLM", "Qwen3_5ForCausalLM"])
def test_a_stream_of_rows_that_join_and_leave(name, tmp_path):
    """Also where prompts are read beside other rows, or not again, so that their hidden states are unknown."""
    target = target_of(name)
    write_mtp(tmp_path, target, layer_of(target))
    row = prompts([40])["input_ids"][0].tolist()
    asked = [{"input_ids": row[: 9 + 4 * n], "max_new_tokens": 5 + n, "eos_token_id": None, "id": n} for n in range(5)]
    lines = []
    for levels in ([], ["mtp"], ["mxfp4", "mtp"]):
        for reading in ({}, {"prefill_chunk": 8, "prefix_cache": "1MiB"}):
            how = {"assistant_models": levels, "speculation_config": {"num_draft_tokens": 3}, "max_batch": 3}
            lines.append({one.id: one.sequence for one in generate_stream(target, asked, **how, **reading)})
    assert all(line == lines[0] for line in lines)


@pytest.mark.parametrize("name", ["Glm4MoeForCausalLM", "Qwen3_5ForCausalLM", "Qwen3ForCausalLM"])
def test_draws_of_a_seed_do_not_depend_on_the_layer(name, tmp_path):
    target = target_of(name)
    level = word(name, write_mtp(tmp_path, target, layer_of(target)))
    inputs, found = prompts([6, 3, 9, 1] * 8), []
    for levels in ([], [level], ["mxfp4", level]):
        torch.manual_seed(5)
        options = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": None, "top_k": 0}
        found.append(target.generate(**inputs, **options, assistant_models=levels).tolist())
    assert found[0] == found[1] == found[2]
    assert hf_mlspec.last_stats(target).levels[1].accepted > 5


@pytest.mark.plans
def test_a_call_that_chooses_its_lengths_knows_what_a_layer_costs(tmp_path, cache):
    target = target_of("Glm4MoeForCausalLM", torch.bfloat16)
    write_mtp(tmp_path, target, layer_of(target))
    inputs = prompts([5, 14])
    own = alone(target, inputs, max_new_tokens=30, eos_token_id=None, assistant_models=[])
    options = {"max_new_tokens": 30, "eos_token_id": None}
    assert [row[:30] for row in together(target, inputs, ["mtp"], **options)] == [
        row[: row.index(EOS) + 1] if EOS in row else row for row in own
    ]
    assert hf_mlspec.last_stats(target).plans


def test_tables_are_the_targets_or_its_own(tmp_path):
    target = target_of("Glm4MoeForCausalLM")
    rows, place = target.lm_head.weight.detach(), "model.layers.2."
    same = {f"{place}shared_head.head.weight": rows.clone(), f"{place}embed_tokens.weight": rows + 1}
    head = load_mtp(target, str(write_mtp(tmp_path, target, layer_of(target), tensors=same)), None)
    assert head.outputs is target.lm_head
    assert torch.equal(head.embedding.weight, rows + 1)


GLM, QWEN = "Glm4MoeForCausalLM", "Qwen3ForCausalLM"
WRONG = {
    "size": (GLM, {"model.layers.2.eh_proj.weight": torch.zeros(32, 96)}, {},
             r"for another target: eh_proj.weight is \[32, 96\] there and \[32, 64\]"),
    "vocabulary": (GLM, {"model.layers.2.embed_tokens.weight": torch.zeros(99, 32)}, {}, "target: embed_tokens"),
    "missing": (GLM, {"model.layers.2.hnorm.weight": None}, {}, "lacks the tensor hnorm.weight"),
    "too many": (GLM, {"model.layers.2.extra.weight": torch.zeros(2)}, {}, "holds block.extra.weight, which no layer"),
    "expert missing": (GLM, {"model.layers.2.mlp.experts.1.up_proj.weight": None}, {}, "lacks up_proj of expert 1"),
    "several": (GLM, {"model.layers.3.enorm.weight": torch.zeros(32)}, {}, "holds several MTP layers"),
    "none": (GLM, {"model.layers.2.enorm.weight": None}, {}, "holds no MTP layer"),
    "eight bits": (GLM, {"model.layers.2.eh_proj.weight": torch.zeros(32, 64, dtype=torch.int8)}, {}, "is torch.int8"),
    "NaN": (GLM, {"model.layers.2.hnorm.weight": torch.full((32,), torch.nan)}, {}, "hnorm.weight.*NaN or Inf"),
    "another class": (QWEN, {}, {"transformer_layer_config": {"model_type": "qwen3_next"}},
                      "has model_type 'qwen3_next', and was made for 'a/target'"),
    "another hidden size": (QWEN, {}, {"transformer_layer_config": {"hidden_size": 48}}, "has hidden_size 48"),
    "another vocabulary": (QWEN, {}, {"transformer_layer_config": {"vocab_size": 99}}, "has vocab_size 99"),
    "another vocabulary, in a damaged config": (
        QWEN, {}, {"transformer_layer_config": {"vocab_size": 99}, "speculators_config": "x"}, "has vocab_size 99;"),
    "several in a folder": (QWEN, {}, {"num_nextn_predict_layers": 2}, "holds 2 MTP layers"),
    "a kind not read": (QWEN, {}, {"speculators_model_type": "peagle"}, "a head of kind 'peagle'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_layer_that_does_not_fit_is_refused_before_anything_runs(case, tmp_path):
    name, tensors, said, words = WRONG[case]
    target = target_of(name)
    folder = write_mtp(tmp_path, target, layer_of(target), tensors=tensors, **said)
    refused(ValueError, words, prompts([4]), target, assistant_models=[word(name, folder)])


def test_what_a_layer_costs_is_kept_by_the_output_head_too(tmp_path):
    """It is the target's, and no module of the layer."""
    target = target_of(QWEN)
    folder = str(write_mtp(tmp_path, target, layer_of(target)))
    head, names = load_mtp(target, folder, None), []
    for width in (VOCAB, 2 * VOCAB):
        target.lm_head = torch.nn.Linear(32, width, bias=False)
        head.share(_of_target(target))
        names.append(model_of(MtpEngine(head, Tap((2,), 32, torch.float32))))
    assert names[0] != names[1]


def test_the_config_of_a_layer_on_the_hub_is_read(tmp_path, monkeypatch):
    target = target_of(QWEN)
    folder = write_mtp(tmp_path, target, layer_of(target), transformer_layer_config={"vocab_size": 99})
    monkeypatch.setattr(mtp_tensors, "snapshot_download", lambda *given, **options: str(folder))
    with pytest.raises(ValueError, match="the MTP layer in 'some/layer' has vocab_size 99"):
        load_mtp(target, "some/layer", None)


def test_a_layer_stands_last_and_below_the_target_itself(tmp_path):
    target, inputs = target_of(GLM), prompts([4])
    refused(ValueError, "was loaded from none", inputs, target, assistant_models=["mtp"])
    folder = str(write_mtp(tmp_path, target, layer_of(target)))
    refused(ValueError, "cannot check drafts", inputs, target, assistant_models=["mtp", "mxfp4"])
    refused(ValueError, "goes through rows alone: leave tree out", inputs, target, assistant_models=["mtp"],
            speculation_config={"tree": [2]})  # fmt: skip
    other = tiny(seed=7, dtype=torch.float32)
    refused(ValueError, "above it is another model", inputs, target, assistant_models=[other, "mtp"])
    refused(ValueError, "above it has 1 layers", inputs, target, assistant_models=["early_exit:1", "mtp"])
    refused(ValueError, "lacks the tensor block.mlp", inputs, other, assistant_models=[f"mtp:{folder}"])
    refused(ValueError, "use_mtp and assistant_models were both", inputs, target, assistant_models=["mtp"],
            use_mtp=True)  # fmt: skip
    (tmp_path / "of_mtp.safetensors").write_bytes(b"not whole")
    hf_mlspec.clear(target)
    refused(ValueError, "damaged or not whole", inputs, target, assistant_models=["mtp"])


def test_the_layer_of_another_folder(tmp_path):
    """As for a target that was saved again, without it."""
    target = target_of(GLM)
    folder = write_mtp(tmp_path / "whole", target, layer_of(target))
    target.config._name_or_path = ""
    inputs = prompts([5, 9])
    own = alone(target, inputs, max_new_tokens=12, eos_token_id=EOS, assistant_models=[])
    assert together(target, inputs, [f"mtp:{folder}"], max_new_tokens=12, eos_token_id=EOS) == own
    assert hf_mlspec.last_stats(target).levels[-1].name == "whole"


def test_words(tmp_path):
    assert parse_level("mtp").path is None
    assert (parse_level("mtp@mxfp4").kind, parse_level("mtp@mxfp4").cast) == ("mtp", "mxfp4")
    assert parse_level(f"mtp:{tmp_path}@mxfp4").path == str(tmp_path)
    with pytest.raises(ValueError, match="mtp takes an existing folder"):
        parse_level("mtp:nowhere")


def test_a_folder_of_the_speculators_package_gives_the_logits_of_its_own_module(tmp_path):
    """Needs the package `speculators`."""
    core = pytest.importorskip("speculators.models.mtp", reason="the package speculators is not installed")
    target = target_of(QWEN)
    layer = layer_of(target)
    folder = write_mtp(tmp_path, target, layer)
    theirs = core.MTPDraftModel(core.MTPSpeculatorConfig(transformer_layer_config=target.config)).eval().float()
    theirs.load_state_dict(published(layer, "speculators", 2), strict=False)
    head = load_mtp(target, str(folder), None)
    assert {n for n in theirs.state_dict() if n.startswith("mtp_layers")} == set(published(layer, "speculators", 2))
    assert sum(p.numel() for p in head.parameters()) == sum(p.numel() for p in theirs.mtp_layers.parameters())


def test_eagle_folders_are_still_told_apart(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": "mtp"}))
    save_file({"x": torch.zeros(1)}, str(tmp_path / "model.safetensors"))
    refused(ValueError, "holds no MTP layer", prompts([4]), target_of(QWEN), assistant_models=[str(tmp_path)])
