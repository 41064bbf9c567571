"""Does a head draft what it was trained to, change no token, and say what does not fit?"""

from __future__ import annotations

import json

import pytest
import torch
from heads import tensors_of, write_head
from models import EOS, alone, prompts, refused, tiny, together
from transformers import LlamaConfig

import hf_mlspec
from eval.train_head.head import Head
from hf_mlspec import Request, generate_stream
from hf_mlspec.engines.choose import engine_of
from hf_mlspec.engines.head import HeadEngine
from hf_mlspec.engines.modules.attention import ragged_attention_on
from hf_mlspec.engines.tap import Tap
from hf_mlspec.integration.levels.heads import load_head
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

ROW = [5, 9, 13, 7, 21, 30, 11, 4]
DRAFT = [8, 17, 40]
ENGINES = [
    "modules",
    pytest.param(
        "cpu", marks=pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
    ),
]
TARGETS = {dtype: tiny(seed=2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}


@pytest.fixture
def target():
    return TARGETS[torch.float32]


def reference(target, folder, row: list[int], steps: int) -> list[torch.Tensor]:
    """Logits behind a row and behind its last tokens as drafts, by the program that trains heads: `steps` of them."""
    tensors = tensors_of(target, width=32, draft_vocab=24, taps=3)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-6)  # fmt: skip
    targets = tensors["d2t"] + torch.arange(24)
    head = Head(config, [0, 1, 2], 32, targets, target.get_input_embeddings().weight.detach())
    own = {name.removeprefix("layers.0."): tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    head.load_state_dict(own)
    last = []
    hook = target.model.layers[-1].register_forward_hook(lambda module, inputs, output: last.append(output))
    with torch.no_grad():
        states = list(target(torch.tensor([row]), output_hidden_states=True).hidden_states[:2])
        hook.remove()
        states.append(last[0][0] if isinstance(last[0], tuple) else last[0])
        found = head(torch.tensor([row]), torch.cat(states, -1), steps)
    first = len(row) - steps - 2  # the pair of the last token of the row without its drafts
    whole = torch.full((steps, 64), float("-inf"))
    whole[:, targets] = torch.stack([logits[0, first] for logits in found])
    return list(whole)


def drafting(target, folder, name: str, rows=(ROW,)) -> tuple:
    """An engine of the target that has read the rows, and one of the head behind it."""
    head = load_head(target, str(folder), None)
    above = engine_of(target, name=name)
    above.tap = Tap(head.shape.taps, 32, target.dtype)
    made = HeadEngine(head, above.tap)
    above.start(len(rows), torch.device("cpu"))
    made.start(len(rows), torch.device("cpu"))
    with torch.inference_mode(), ragged_attention_on([target] if name == "modules" else []):
        above.feed([list(row) for row in rows])
    return above, made


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("layout", ["speculators", "specforge"])
def test_a_head_computes_what_the_training_computes(layout, name, target, tmp_path):
    write_head(tmp_path, target, layout=layout, draft_vocab=24)
    _, made = drafting(target, tmp_path, name)
    with torch.inference_mode():
        found = [made.feed([ROW])[0, 0]]
        for token in DRAFT[:-1]:
            found.append(made.step(torch.tensor([[token]]), [1], [0], 1)[0, 0])
    for ours, theirs in zip(found, reference(target, tmp_path, ROW + DRAFT, 3), strict=True):
        assert (ours.isneginf() == theirs.isneginf()).all()
        known = ~theirs.isneginf()
        torch.testing.assert_close(ours[known], theirs[known], rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("draft_vocab", [24, 64])
def test_a_whole_draft_is_what_steps_draft(draft_vocab, target, tmp_path):
    rows = [ROW, ROW[:3], ROW[:5]]
    _, made = drafting(target, write_head(tmp_path, target, draft_vocab=draft_vocab), "modules", rows)
    with torch.inference_mode():
        logits = [made.feed(rows)[:, 0]]
        for _ in range(3):
            logits.append(made.step(logits[-1].argmax(-1)[:, None], [1, 1, 1], [0] * 3, 1)[:, 0])
        expected = torch.stack([one.argmax(-1) for one in logits], 1).tolist()
        confidence = torch.stack([one.softmax(-1).amax(-1) for one in logits], 1)
        assert made.draft(rows, [4, 0, 2], 0.0) == [expected[0], [], expected[2][:2]]
        threshold = float(confidence[0].median())
        ends = int((confidence[0] < threshold).nonzero()[0]) + 1
        assert made.draft(rows, [4, 4, 4], threshold)[0] == expected[0][:ends]
        made.model.norm.weight.data[0] = float("nan")
        assert made.draft(rows, [4, 0, 0], 0.0) == [[-1], [], []]


@pytest.mark.parametrize("name", ENGINES)
def test_what_was_drafted_is_read_again_from_the_targets_own_states(name, target, tmp_path):
    """Rows of other lengths, one rejected in full, one in part: as a head that reads them for the first time."""
    write_head(tmp_path, target)
    rows = [ROW, ROW[:3], ROW[:5]]
    above, made = drafting(target, tmp_path, name, rows)
    with torch.inference_mode(), ragged_attention_on([target] if name == "modules" else []):
        made.feed(rows)
        for token in DRAFT:
            made.step(torch.tensor([[token]] * 3), [1, 1, 0], [0] * 3, 1)
        longer = [[*ROW, 50], [*ROW[:3], *DRAFT[:2], 51], [*ROW[:5], 52]]
        made.lengths = [min(have, len(row) - 1) for have, row in zip(made.lengths, longer, strict=True)]
        above.feed(longer)
        ours = made.feed(longer)
        _, fresh = drafting(target, tmp_path, name, longer)
        torch.testing.assert_close(ours, fresh.feed(longer), rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match="hidden states of row 0 are known of 9 tokens, not of 10"):
            made.feed([[*longer[0], 3, 3], *longer[1:]])
        with pytest.raises(ValueError, match="checks no drafts"):
            made.feed(longer, hf_mlspec.Draft.from_lists([[1], [1], [1]]).guess())


def test_a_row_whose_beginning_was_read_elsewhere_is_drafted_from_its_end(target, tmp_path):
    write_head(tmp_path, target)
    _, made = drafting(target, tmp_path, "modules")
    made.tap.first[0] = 4
    with torch.inference_mode():
        behind = made.feed([ROW])
    assert made.knows(0, len(ROW))
    assert not made.knows(0, 5)
    assert torch.isfinite(behind).all()


def test_a_row_that_waits_says_no_nonsense_and_keeps_what_it_has(target, tmp_path):
    """Of one row nothing is known but memory that nobody wrote; one was read from its middle on, and waits."""
    write_head(tmp_path, target)
    rows = [ROW, ROW[:6], ROW[:5]]
    _, made = drafting(target, tmp_path, "modules", rows)
    made.tap.forget(1)
    made.tap.states[1] = torch.nan
    made.tap.first[2] = 2
    with torch.inference_mode():
        made.feed(rows, alive=[False, False, True])
        held = made.cache.kv[:, :, 2, :, :2].clone()
        behind = made.feed(rows, alive=[True, False, False])
    assert torch.isfinite(behind).all()
    assert torch.equal(made.cache.kv[:, :, 2, :, :2], held)


CHAINS = {
    "head": lambda folder: [folder],
    "cast, head": lambda folder: ["mxfp4", folder],
    "head in 4 bits": lambda folder: [f"{folder}@mxfp4"],
    "cast of a cache of its own, head": lambda folder: ["mxfp4", folder],
}


@pytest.mark.parametrize("dtype", TARGETS, ids=str)
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("layout", ["speculators", "specforge"])
def test_every_token_is_the_targets(layout, chain, dtype, tmp_path):
    target = TARGETS[dtype]
    folder = str(write_head(tmp_path, target, layout=layout, draft_vocab=40))
    inputs = prompts([5, 14, 1, 9])
    config = {"num_draft_tokens": 3, "confidence_threshold": 0.0, "shared_cache": "own" not in chain}
    config |= {"prepare": dtype == torch.bfloat16}
    options = {"max_new_tokens": 30, "eos_token_id": EOS, "speculation_config": config}
    own = alone(target, inputs, max_new_tokens=30, eos_token_id=EOS, assistant_models=[],
                speculation_config={"prepare": dtype == torch.bfloat16})  # fmt: skip
    assert together(target, inputs, CHAINS[chain](folder), **options) == own
    last = hf_mlspec.last_stats(target).levels[-1]
    assert last.drafted > 40
    assert last.cache_bytes > 0


@pytest.mark.plans
def test_a_call_that_chooses_its_lengths_knows_what_a_head_costs(tmp_path, cache):
    target = TARGETS[torch.bfloat16]
    folder = str(write_head(tmp_path, target))
    inputs = prompts([5, 14])
    own = alone(target, inputs, max_new_tokens=40, eos_token_id=None, assistant_models=[])
    assert together(target, inputs, ["mxfp4", folder], max_new_tokens=40, eos_token_id=None) == own
    assert hf_mlspec.last_stats(target).plans


@pytest.mark.parametrize("dtype", TARGETS, ids=str)
def test_a_stream_of_rows_that_join_and_leave(dtype, tmp_path):
    """Also where prompts are read beside other rows, or not again, so that their hidden states are unknown."""
    target = TARGETS[dtype]
    folder = str(write_head(tmp_path, target))
    row = prompts([40])["input_ids"][0].tolist()
    asked = [{"input_ids": row[: 9 + 4 * n], "max_new_tokens": 6 + n, "eos_token_id": None, "id": n} for n in range(7)]
    config = {"prepare": dtype == torch.bfloat16, "num_draft_tokens": 3}
    lines = []
    for levels in ([], [folder], ["mxfp4", folder]):
        for reading in ({}, {"prefill_chunk": 8, "prefix_cache": "1MiB"}):
            how = {"assistant_models": levels, "speculation_config": config, "max_batch": 3, **reading}
            lines.append({one.id: one.sequence for one in generate_stream(target, asked, **how)})
    assert all(line == lines[0] for line in lines)


@pytest.mark.usefixtures("nothing_said_yet")
@pytest.mark.parametrize("dtype", TARGETS, ids=str)
def test_rows_join_a_stream_whose_head_has_failed(dtype, tmp_path, monkeypatch):
    """Then nobody keeps in step with the rows what the target would write for it."""
    target = TARGETS[dtype]
    folder = str(write_head(tmp_path, target))
    how = {"max_batch": 3, "do_sample": False, "eos_token_id": None}
    config = {"prepare": dtype == torch.bfloat16}

    def asked():
        yield Request([5, 6, 7], id=0, max_new_tokens=30)
        yield from [None] * 4  # rounds in which the first row is alone, and its head fails
        for n in range(1, 4):
            yield Request([5, 6, 7 + n], id=n, max_new_tokens=20)

    lines = []
    for levels, limits in (([], {}), ([folder], {"num_draft_tokens": 2})):
        told = {"assistant_models": levels, "speculation_config": config | limits}
        lines.append({one.id: (one.sequence, one.error) for one in generate_stream(target, asked(), **told, **how)})
        monkeypatch.setattr(HeadEngine, "_feed", lambda self, rows, alive: 1 / 0)
    assert lines[0] == lines[1]
    assert hf_mlspec.last_stats(target).levels_error


def test_draws_of_a_seed_do_not_depend_on_the_head(target, tmp_path):
    """So samples have the target's distribution, to which those of the target alone are held elsewhere."""
    folder = str(write_head(tmp_path, target, draft_vocab=40))
    inputs, found = prompts([6, 3, 9, 1] * 32), []
    for levels in ([], [folder], ["mxfp4", folder]):
        torch.manual_seed(5)
        options = {"do_sample": True, "max_new_tokens": 16, "eos_token_id": None, "top_k": 0}
        found.append(target.generate(**inputs, **options, assistant_models=levels).tolist())
    assert found[0] == found[1] == found[2]
    assert hf_mlspec.last_stats(target).levels[1].accepted > 20


WRONG = {
    "other hidden size": ({"target_hidden_size": 48}, {}, "states of 48 elements, and was made for 'a/target'"),
    "other vocabulary": ({"transformer_layer_config": {"vocab_size": 99}}, {}, "a target of 99 tokens"),
    "layer too high": ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, {}, r"layers \[0, 1, 3\].*has 2 layers"),
    "layers twice": ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, {}, "ascending numbers are read"),
    "another kind": ({"speculators_model_type": "dflash"}, {}, "a head of kind 'dflash'"),
    "another layer": ({"transformer_layer_config": {"model_type": "gpt2"}}, {}, "layers of 'gpt2'"),
    "no layer": ({"transformer_layer_config": None}, {}, "lacks or mistakes"),
    "no heads": ({"transformer_layer_config": {"num_attention_heads": 0}}, {}, "lacks or mistakes"),
    "a size in words": ({"transformer_layer_config": {"hidden_size": "wide"}}, {}, "lacks or mistakes.*'hidden_size'"),
    "a head too narrow": ({"transformer_layer_config": {"head_dim": -8}}, {}, "head_dim -8, which is at least 1"),
    "heads left over": ({"transformer_layer_config": {"num_key_value_heads": 3}}, {}, "leave heads over"),
    "no rotation": ({"transformer_layer_config": {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}}, {},
                    "the rotation of the head"),
    "a vocabulary in words": ({"draft_vocab_size": "all"}, {}, "lacks or mistakes draft_vocab_size, 'all'"),
    "parts apart": ({}, {"layers.0.self_attn.q_proj.weight": torch.zeros(32, 7)}, r"parts of layers.0.qkv.*\[32, 7\]"),
    "integers": ({}, {"fc.weight": torch.zeros(32, 96, dtype=torch.int8)}, "fc.weight.*torch.int8: convert it"),
    "no numbers": ({}, {"embed_tokens.weight": torch.full((64, 32), torch.nan)}, "embed_tokens.weight.*NaN or Inf"),
    "no map": ({}, {"d2t": None}, "has no map 'd2t'"),
    "map too short": ({}, {"d2t": torch.zeros(3, dtype=torch.long)}, r"'d2t'.*has shape \[3\]"),
    "map out of range": ({}, {"d2t": torch.full((40,), 60)}, "leads to tokens 60 to 99, the target has 0 to 63"),
    "map twice to one": ({}, {"d2t": -torch.arange(40)}, "leads to a token of the target more than once"),
    "maps apart": ({}, {"t2d": torch.arange(64) < 40}, "marks 40 tokens, and not the 40 of 'd2t'"),
    "t2d too short": ({}, {"t2d": torch.ones(9, dtype=torch.bool)}, r"'t2d'.*has shape \[9\]"),
    "tensor missing": ({}, {"norm.weight": None}, "lacks the tensor norm.weight"),
    "tensor too many": ({}, {"extra.weight": torch.ones(2)}, "holds extra.weight, which nothing"),
    "tensor of another size": ({}, {"fc.weight": torch.ones(32, 64)}, r"fc.weight is \[32, 64\] there and \[32, 96\]"),
    "NaN": ({}, {"norm.weight": torch.full((32,), float("nan"))}, "norm.weight.*holds NaN or Inf"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_head_that_does_not_fit_is_refused_before_anything_runs(case, target, tmp_path):
    said, tensors, words = WRONG[case]
    folder = write_head(tmp_path, target, draft_vocab=40, tensors=tensors)
    config = json.loads((folder / "config.json").read_text())
    for name, value in said.items():
        config[name] = config[name] | value if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(config))
    refused(ValueError, words, prompts([4]), target, assistant_models=[str(folder)])


def test_a_head_stands_last_and_below_the_target_itself(target, tmp_path):
    folder, other = str(write_head(tmp_path, target)), tiny(seed=7, dtype=torch.float32)
    inputs = prompts([4])
    refused(ValueError, "cannot check drafts", inputs, target, assistant_models=[folder, "mxfp4"])
    refused(ValueError, "above it is another model", inputs, target, assistant_models=[other, folder])
    refused(ValueError, "above it has 1 layers", inputs, target, assistant_models=["early_exit:1", folder])
    refused(ValueError, "engine 'cuda' cannot serve a head", inputs, target, assistant_models=[folder],
            speculation_config={"engine": "cuda"})  # fmt: skip
    (tmp_path / "model.safetensors").unlink()
    hf_mlspec.clear(target)
    refused(ValueError, "holds no .safetensors file", inputs, target, assistant_models=[folder])


def test_a_target_that_keeps_a_state_of_another_kind_is_refused_by_name(tmp_path):
    from hybrids import hybrid

    model = hybrid("RwkvForCausalLM")
    folder = str(write_head(tmp_path, model, taps=(0, 1)))
    refused(ValueError, "does not write them", prompts([4]), model, assistant_models=[folder])


@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "MambaForCausalLM"])
def test_linear_attention_that_runs_module_by_module_writes_hidden_states(name, tmp_path):
    from hybrids import hybrid

    model = hybrid(name)
    folder, inputs = str(write_head(tmp_path, model, taps=(0, 2, 3))), prompts([5, 9])
    config = {"engine": "modules", "num_draft_tokens": 3, "confidence_threshold": 0.0}
    options = {"max_new_tokens": 12, "eos_token_id": EOS, "speculation_config": config}
    own = alone(model, inputs, assistant_models=[], **options)
    for levels in ([folder], ["mxfp4", folder]):
        assert together(model, inputs, levels, **options) == own
        assert hf_mlspec.last_stats(model).levels[-1].drafted > 10


def test_a_head_shares_what_is_the_targets(target, tmp_path):
    rows = target.get_input_embeddings().weight.detach().clone()
    folder = write_head(tmp_path, target, tensors={"lm_head.weight": None, "embed_tokens.weight": rows})
    head = load_head(target, str(folder), None)
    assert head.embedding is target.get_input_embeddings()
    assert torch.equal(head.lm_head.weight, target.get_output_embeddings().weight)
    narrow = load_head(target, str(write_head(tmp_path / "narrow", target, width=16)), None)
    assert narrow.embedding.weight.shape == (64, 16)


def test_a_folder_of_the_speculators_package_gives_the_logits_of_its_own_module(tmp_path):
    """In float32, and in bfloat16 within twice the error of its module; needs the package `speculators`."""
    core = pytest.importorskip("speculators.models.eagle3.core", reason="the package speculators is not installed")
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    torch.manual_seed(3)
    target = tiny(seed=2, dtype=torch.float32)
    layer = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4,
                        num_key_value_heads=2, head_dim=8, num_hidden_layers=1, rms_norm_eps=1e-6)  # fmt: skip
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(transformer_layer_config=layer, draft_vocab_size=64, fc_norm=True,
                                    norm_before_residual=True, eagle_aux_hidden_state_layer_ids=[0, 1, 2])  # fmt: skip
    theirs = core.Eagle3DraftModel(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape) + (parameter.ndim == 1))
    theirs.save_pretrained(tmp_path)
    states, tokens, found = torch.randn(1, 12, 96), torch.randint(3, 64, (1, 12)), []
    theirs.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output[0].float()))

    def logits(model) -> torch.Tensor:
        dtype = next(model.parameters()).dtype
        with torch.no_grad():
            model(states.to(dtype), tokens, torch.zeros(1, 12, dtype=torch.long), ttt_steps=1)
        return found.pop()

    exact, rounded = logits(theirs.float()), logits(theirs.bfloat16())
    for dtype, error in ((torch.float32, 1e-4), (torch.bfloat16, 2 * float((rounded - exact).abs().max()))):
        head = load_head(target.to(dtype), str(tmp_path), None)
        kv = torch.zeros(1, 2, 1, 2, 16, 8, dtype=dtype)
        rope = tuple(table[1:] for table in head.rope(17))
        hidden = head(tokens, head.join(states.view(1, 12, 3, 32).to(dtype)), kv, [0], rope)
        assert float((head.logits(hidden[0]) - exact).abs().max()) <= error
