"""Are Hadamard transforms those of their explicit matrices, and is a stored matrix checked?"""

import math

import pytest
import torch

from hf_mlspec.checkpoints.layer import HeldTensor
from hf_mlspec.checkpoints.llama_shape import LlamaShape
from hf_mlspec.checkpoints.rotation import (
    OnlineHadamard,
    Rotation,
    apply_hadamard,
    order_of,
    require_hadamard,
    require_heads,
    stored_hadamard,
    sylvester,
)


def paley(prime: int) -> torch.Tensor:
    """Order prime + 1, prime % 4 == 3: skew, so not symmetric. Written out entry by entry."""
    squares = {x * x % prime for x in range(1, prime)}
    n = prime + 1
    rows = [[1] * n]
    for i in range(prime):
        row = [-1]
        for j in range(prime):
            row.append(1 if i == j else (1 if (i - j) % prime in squares else -1))
        rows.append(row)
    return torch.tensor(rows)


def by_hand(size: int) -> torch.Tensor:
    """Sylvester's matrix: the sign is the parity of common ones."""
    return torch.tensor([[(-1) ** bin(i & j).count("1") for j in range(size)] for i in range(size)])


def randn(*shape, seed=0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 64])
def test_sylvesters_matrix_entry_by_entry(size):
    assert sylvester(size).dtype == torch.int8
    assert sylvester(size).tolist() == by_hand(size).tolist()


@pytest.mark.parametrize("size", [0, 3, 12, -4])
def test_sylvester_has_powers_of_two(size):
    with pytest.raises(ValueError, match=f"not {size}"):
        sylvester(size)


@pytest.mark.parametrize("prime", [None, 11, 19])
@pytest.mark.parametrize("rest", [1, 2, 16])
def test_the_transform_is_the_explicit_matrix(prime, rest):
    order = 1 if prime is None else prime + 1
    had = torch.ones(1, 1) if prime is None else paley(prime)
    size = order * rest
    dense = torch.kron(had.double(), by_hand(rest).double())
    x = randn(3, 2, size)
    expected = x @ dense.T / math.sqrt(size)
    given = apply_hadamard(x, None if prime is None else had)
    assert (given - expected).abs().max() < 1e-12
    if prime is not None:
        assert (given - x @ dense / math.sqrt(size)).abs().max() > 0.1  # the transpose matters


def test_a_weight_that_was_turned_alike_cancels():
    had, size = paley(11), 12 * 8
    dense = torch.kron(had.double(), by_hand(8).double()) / math.sqrt(size)
    x, weight = randn(5, size), randn(7, size, seed=1)
    assert torch.allclose(apply_hadamard(x, had) @ (weight @ dense.T).T, x @ weight.T)


@pytest.mark.parametrize("prime", [None, 11])
def test_across_heads_each_place_of_a_head_by_itself(prime):
    heads, head_dim = (4 if prime is None else 24), 8
    dense = by_hand(4).double() if prime is None else torch.kron(paley(11).double(), by_hand(2).double())
    x = randn(3, heads * head_dim)
    expected = torch.zeros_like(x)
    for place in range(head_dim):
        columns = [head * head_dim + place for head in range(heads)]
        expected[:, columns] = x[:, columns] @ dense.T / math.sqrt(heads)
    online = OnlineHadamard(heads, head_dim, None if prime is None else paley(11).to(torch.int8))
    assert (online.apply(x) - expected).abs().max() < 1e-12
    assert online.order == (1 if prime is None else 12)


def test_across_heads_and_within_them_is_the_whole():
    x = randn(2, 24 * 16)
    within = apply_hadamard(x.unflatten(-1, (24, 16))).flatten(-2)
    both = OnlineHadamard(24, 16, paley(11).to(torch.int8)).apply(within)
    assert torch.allclose(both, apply_hadamard(x, paley(11)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_stay(dtype):
    x = randn(2, 64).to(dtype)
    assert apply_hadamard(x).dtype == dtype
    assert torch.equal(apply_hadamard(x), apply_hadamard(x.float()).to(dtype))


def test_a_width_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"48 elements, expected 1 times a power of two"):
        apply_hadamard(torch.ones(48))
    with pytest.raises(ValueError, match=r"36 elements, expected 12 times a power of two"):
        apply_hadamard(torch.ones(36), paley(11))


@pytest.mark.parametrize(("size", "order"), [
    (11008, 172), (13824, 108), (14336, 28), (28672, 28), (8192, 1), (8960, 140), (27648, 108), (3072, 12), (9216, 36),
    (4864, None), (18944, None), (29568, None), (9728, None), (5632, None), (14, None), (9, None), (40, 40), (20, 20),
])  # fmt: skip
def test_the_orders_that_quarot_takes(size, order):
    assert order_of(size) == order


def test_a_stored_matrix_is_taken():
    online = stored_hadamard(HeldTensor("had_K in f", paley(11).half()), 96, "x", inner=4)
    assert (online.size, online.inner, online.order) == (96, 4, 12)
    assert (online.matrix.dtype, online.matrix.tolist()) == (torch.int8, paley(11).tolist())
    assert stored_hadamard(None, 64, "x").matrix is None


BROKEN = {
    "no square": (torch.ones(12, 8), r"has shape \[12, 8\], a Hadamard matrix is square"),
    "another number": (paley(11).double().index_put((torch.tensor(3), torch.tensor(4)), torch.tensor(0.5).double()),
                       "holds 1 numbers other than 1 and -1"),
    "nan": (torch.full((12, 12), float("nan")), "holds 144 numbers other than 1 and -1"),
    "not orthogonal": (torch.ones(12, 12), "12 of its 12 rows are not orthogonal"),
}  # fmt: skip


@pytest.mark.parametrize(("matrix", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_matrix_is_refused_by_name(matrix, message):
    with pytest.raises(ValueError, match=r"^it .*" + message):
        require_hadamard(matrix, "it")


def test_a_matrix_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"had_K in f has shape \[12, 12\]: 80 inputs are not its order times"):
        stored_hadamard(HeldTensor("had_K in f", paley(11)), 80, "x")


def test_a_missing_matrix_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^had_rem_dim is missing: 11008 is no power of two.*\[172, 172\]"):
        stored_hadamard(None, 11008, "had_rem_dim")
    with pytest.raises(ValueError, match=r"^x is missing: 5632 .* of an order that leaves a power of two"):
        stored_hadamard(None, 5632, "x")


@pytest.mark.parametrize("heads", [24, 28, 32, 40, 64])
def test_heads_that_cancel(heads):
    require_heads(heads, 128, "model")


@pytest.mark.parametrize(("heads", "head_dim"), [(20, 128), (14, 64), (32, 80)])
def test_heads_that_do_not_cancel_are_refused(heads, head_dim):
    with pytest.raises(ValueError, match=f"^model: {heads} heads of {head_dim} cannot be rotated"):
        require_heads(heads, head_dim, "model")


def test_a_rotation_says_whether_inputs_are_transformed():
    assert Rotation(True, o_proj=32).online
    assert not Rotation(True).online


def test_shapes_of_a_config():
    config = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
              "num_key_value_heads": 2}  # fmt: skip
    shape = LlamaShape.of_config(config)
    assert (shape.head_dim, shape.tied) == (16, False)
    assert shape.linears["self_attn.k_proj"] == (32, 64)
    assert shape.linears["mlp.down_proj"] == (64, 96)
    assert next(shape.named_linears()) == ("model.layers.0", "self_attn.q_proj", 64, 64)
    assert shape.norms() == (
        "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm")  # fmt: skip
    assert LlamaShape.of_config({**config, "head_dim": 32}).linears["self_attn.o_proj"] == (64, 128)


@pytest.mark.parametrize("value", [None, 0, -1, 4.0, "4", True])
def test_a_size_that_is_none_is_refused(value):
    config = {"num_hidden_layers": value, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    with pytest.raises(ValueError, match=r"config.json: num_hidden_layers is"):
        LlamaShape.of_config(config)
    with pytest.raises(ValueError, match=r"hidden_size 64 is no multiple of 5 heads"):
        LlamaShape.of_config({**config, "num_attention_heads": 5})
