"""Do given rotations keep outputs, is a file of them read safely, and does learning find better ones?"""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from test_rotate import FAMILIES, logits_of, model_of
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from turns import check_gradient_of_a_turn

import hf_mlspec
from hf_mlspec import demo_pair
from hf_mlspec.calibration import learning, needed
from hf_mlspec.calibration.learning import learned_rotation
from hf_mlspec.calibration.matrices import read_rotations, write_rotations
from hf_mlspec.calibration.rotation import rotate, stream_matrix

pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")


def orthogonal(width: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(width, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(drawn)[0]


def matrices_of(model: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return orthogonal(config.hidden_size), [orthogonal(dim, 1 + index) for index in range(config.num_hidden_layers)]


@pytest.mark.parametrize("family", [name for name in FAMILIES if "gemma" not in name])
def test_given_rotations_keep_outputs(family):
    model = model_of(family)
    before, (residual, heads) = logits_of(model), matrices_of(model)
    rotate(model, residual=residual.float(), heads=heads)
    assert (logits_of(model) - before).norm() <= 1e-5 * before.norm()


def test_rows_of_the_residual_stream_become_x_r():
    model, (residual, heads) = model_of("mistral"), matrices_of(model_of("mistral"))
    table, values = (tensor.detach().double() for tensor in (model.model.embed_tokens.weight,
                                                             model.model.layers[1].self_attn.v_proj.weight))
    gain = model.model.layers[1].input_layernorm.weight.detach().double()
    rotate(model, residual=residual, heads=heads, online=False)
    assert torch.allclose(model.model.embed_tokens.weight.double(), table @ residual, atol=1e-5)
    turned = ((values * gain) @ residual).view(4, 16, -1)
    wanted = torch.einsum("hdx,de->hex", turned, heads[1]).flatten(0, 1)
    assert torch.allclose(model.model.layers[1].self_attn.v_proj.weight.double(), wanted, atol=1e-5)


def test_the_matrix_that_a_seed_stands_for_does_what_the_seed_does():
    one, other = model_of("qwen3"), model_of("qwen3")
    given = stream_matrix(other, seed=3)
    rotate(one, seed=3)
    rotate(other, seed=3, residual=given)
    for (name, left), right in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(left, right, atol=1e-5), name


@pytest.mark.parametrize(("change", "error", "words"), [
    (lambda residual, heads: {"residual": residual[:-1]}, ValueError, r"residual is \[63, 64\], this model's is \[64"),
    (lambda residual, heads: {"residual": 2 * residual}, ValueError, "residual is not orthogonal: .* off by 3"),
    (lambda residual, heads: {"residual": residual * torch.nan}, ValueError, "residual is not orthogonal"),
    (lambda residual, heads: {"residual": residual.int()}, TypeError, "residual is a torch.int32"),
    (lambda residual, heads: {"heads": heads[:1]}, ValueError, "heads holds 1 matrices, the model has 2 layers"),
    (lambda residual, heads: {"heads": [heads[0], residual]}, ValueError, r"heads\[1\] is \[64, 64\]"),
    (lambda residual, heads: {"heads": [None, None]}, TypeError, r"heads\[0\] is a NoneType"),
    (lambda residual, heads: {"residual": residual.tolist()}, TypeError, "residual is a list, expected a tensor"),
    (lambda residual, heads: {"residual": None}, TypeError, "residual is a NoneType, expected a tensor"),
    (lambda residual, heads: {"heads": None}, TypeError, "heads is a NoneType, expected True, False or a matrix for"),
], ids=["shape", "length", "NaN", "dtype", "layers", "head size", "other", "list", "none", "no heads"])  # fmt: skip
def test_what_is_no_rotation_is_named_and_changes_nothing(change, error, words):
    model = model_of("qwen3")
    before, given = logits_of(model), change(*matrices_of(model))
    with pytest.raises(error, match=words):
        rotate(model, **given)
    assert torch.equal(logits_of(model), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_file_of_rotations_comes_back(tmp_path, dtype):
    model = model_of("llama")
    residual, heads = matrices_of(model)
    file = tmp_path / "R.bin"
    write_rotations(file, residual.to(dtype), [matrix.to(dtype) for matrix in heads])
    assert [path.name for path in tmp_path.iterdir()] == ["R.bin"]
    before = logits_of(model)
    found, of_heads = read_rotations(file)
    assert torch.equal(found, residual.to(dtype))
    assert all(torch.equal(one, matrix.to(dtype)) for one, matrix in zip(of_heads, heads, strict=True))
    rotate(model, residual=found, heads=of_heads)  # as exact as before: the nearest rotation is taken
    assert (logits_of(model) - before).norm() <= 1e-5 * before.norm()
    write_rotations(file, residual)
    assert read_rotations(file)[1] is None


class Hostile:
    def __reduce__(self):
        return (exec, ("raise SystemExit('it ran')",))


@pytest.mark.parametrize(("held", "words"), [
    ({"R1": torch.eye(4), "R3": torch.eye(4)}, r"holds R3, expected R1 and model\.layers\.N"),
    ({"model.layers.0.self_attn.R2": torch.eye(4)}, "holds no R1"),
    ([torch.eye(4)], "holds no R1"),
    ({"R1": [[1.0]]}, "R1 is a list, expected a tensor"),
    ({"R1": torch.eye(4), "model.layers.1.self_attn.R2": torch.eye(4)}, r"holds no model\.layers\.0\.self_attn\.R2"),
    ({"R1": Hostile()}, r"is refused: it names (builtins|__builtin__)\.exec"),
], ids=["name", "values only", "list", "list in it", "layer", "hostile"])  # fmt: skip
def test_a_file_of_something_else_is_refused(tmp_path, held, words):
    torch.save(held, tmp_path / "R.bin")
    with pytest.raises(ValueError, match=words):
        read_rotations(tmp_path / "R.bin")


def test_no_file_and_no_file_of_torch_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"R\.bin"):
        read_rotations(tmp_path / "R.bin")
    (tmp_path / "R.bin").write_bytes(pickle.dumps({"R1": 1}))
    with pytest.raises(ValueError, match="is refused"):
        read_rotations(tmp_path / "R.bin")


def test_steps_stay_rotations_and_reach_the_nearest_one():
    """Of |R - Q|^2 the gradient is 2 (R - Q): from a rotation of the same determinant it leads to Q."""
    wanted, learned = orthogonal(12, 5).float(), nn.Parameter(torch.eye(12))
    if torch.linalg.det(wanted) < 0:
        wanted[:, 0] *= -1
    momentum = torch.zeros(12, 12)
    for step in range(300):
        momentum = learning._step(learned, 0.9 * momentum + 2 * (learned.data - wanted), 0.05 * (1 - step / 300))
        assert (learned.data.T @ learned.data - torch.eye(12)).abs().max() < 1e-4
    assert (learned.data - wanted).abs().max() < 1e-2


def test_a_turn_has_the_gradient_of_rotated_weights_but_for_what_turns_nothing():
    """Of inputs that a matrix rotated, which are rounded, and of weights that it rotated, as plain torch has it."""
    check_gradient_of_a_turn(orthogonal(64, 6).float())


def loss_of(model: nn.Module, residual: torch.Tensor, samples: list[torch.Tensor]) -> float:
    """Of the next token behind quantized activations, with a given rotation."""
    turned = copy.deepcopy(model)
    rotate(turned, residual=residual)
    same = torch.eye(len(residual))
    with torch.no_grad(), learning._quantized(turned, same, torch.zeros_like(same), 32, 4):
        losses = [F.cross_entropy(turned(ids).logits[0, :-1], ids[0, 1:]) for ids in samples]
    return float(sum(losses) / len(losses))


@pytest.fixture(scope="module")
def unlucky() -> tuple[nn.Module, list[torch.Tensor]]:
    """The demo's draft and a text; all its embeddings share a direction that the rotation of seed 0 puts into one
    channel."""
    model = AutoModelForCausalLM.from_pretrained(demo_pair()[1], dtype=torch.float32)
    learning.separate_head(model)
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table += table.norm(dim=1).mean() * stream_matrix(model, 0)[:, 3].float()
    text = inspect.getsource(learning)
    ids = AutoTokenizer.from_pretrained(demo_pair()[1])(text, return_tensors="pt")["input_ids"][:, : 6 * 64]
    return model, list(ids.view(6, 1, 64).unbind())


def test_a_learned_rotation_loses_less_than_the_one_it_starts_from(unlucky):
    model, samples = unlucky
    weights, seen = {name: tensor.clone() for name, tensor in model.state_dict().items()}, []
    found = learned_rotation(model, samples, group_size=32, steps=32, batch=2, rate=0.02, progress=seen.append)
    assert seen == list(range(32))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert (found.T @ found - torch.eye(len(found))).abs().max() < 1e-5
    assert loss_of(model, found, samples) < loss_of(model, stream_matrix(model, 0), samples) - 0.1


def test_the_same_seed_learns_the_same_rotation(unlucky):
    model, samples = unlucky
    first, second, other = (learned_rotation(model, samples, steps=1, batch=1, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_a_loss_that_is_not_finite_names_its_sample():
    model = model_of("mistral")
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    with pytest.raises(ValueError, match=r"the loss of sample 0 is nan"):
        learned_rotation(model, [torch.tensor([[3, 7, 5]])], steps=1)


def test_a_model_gets_a_file_from_a_text_that_quantize_takes(tmp_path, unlucky):
    model, samples = unlucky
    file, rows = tmp_path / "R.bin", [row[0].tolist() for row in samples]
    found = hf_mlspec.learn_rotation(model, file, calibration=rows, group_size=32, steps=2, seed=1)
    assert torch.equal(found, learned_rotation(model, samples, group_size=32, steps=2, seed=1))
    residual, heads = read_rotations(file)
    assert torch.equal(residual, found.float())
    assert heads is None
    packed = copy.deepcopy(model)
    made = hf_mlspec.quantize(packed, "quarot", calibration=rows, group_size=32, rotations=file)
    assert len(made.record["rotations_sha256"]) == 64


@pytest.mark.parametrize(("given", "error", "words"), [
    ({"steps": 0}, ValueError, "steps is 0, it must be a whole number of at least 1"),
    ({"rate": 2}, ValueError, "rate is 2, it must be a number between 0 and 1"),
    ({"seed": "x"}, ValueError, "seed is 'x', it must be a whole number"),
    ({"group_size": 48}, ValueError, "groups hold 32, 64, 128 elements, not 48"),
    ({"calibration": [[5]]}, ValueError, "sample 0 has one token: nothing follows it"),
    ({"calibration": [[5, 10**6]]}, ValueError, "holds token 1000000"),
    ({"calibration": "no.txt"}, ValueError, r"no\.txt"),
    ({"file": "none/R.bin"}, OSError, "none/R.bin' cannot be written: name a file in a folder that exists"),
    ({"model": nn.Linear(2, 2)}, TypeError, "learn_rotation takes a transformers PreTrainedModel, not Linear"),
    ({"model": model_of("gemma2")}, ValueError, "norms behind its blocks"),
], ids=str)  # fmt: skip
def test_what_cannot_be_learned_is_refused(tmp_path, monkeypatch, unlucky, given, error, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        hf_mlspec.learn_rotation(**{"model": unlucky[0], "file": "R.bin", "calibration": [[5, 6, 7]], **given})
    assert not list(tmp_path.iterdir())


def test_gradients_are_needed(tmp_path, unlucky):
    with torch.inference_mode(), pytest.raises(ValueError, match=r"call it outside of torch\.inference_mode"):
        hf_mlspec.learn_rotation(unlucky[0], tmp_path / "R.bin", calibration=[[5, 6, 7]])


def test_too_little_memory_is_said_before_the_first_step(tmp_path, monkeypatch, unlucky):
    monkeypatch.setattr(needed, "available", lambda device: 1000)
    with pytest.raises(MemoryError, match="give samples of fewer tokens, or free some"):
        hf_mlspec.learn_rotation(unlucky[0], tmp_path / "R.bin", calibration=[[5, 6, 7]])
