"""What do files of QuaRot and QSpec look like? Their bytes, encoded one nibble at a time."""


import torch

from hf_mlspec.checkpoints.layer import HeldTensor

CONFIG = {
    "model_type": "llama_quarot", "num_hidden_layers": 1, "hidden_size": 192, "intermediate_size": 96,
    "num_attention_heads": 12, "num_key_value_heads": 3,
}  # fmt: skip
LAYER = "model.layers.0"
SHAPES = {
    "self_attn.q_proj": (192, 192), "self_attn.k_proj": (48, 192), "self_attn.v_proj": (48, 192),
    "self_attn.o_proj": (192, 192), "mlp.gate_proj": (96, 192), "mlp.up_proj": (96, 192), "mlp.down_proj": (192, 96),
}  # fmt: skip
INDEXED = {"self_attn.o_proj": "self_attn.o_proj.1", "mlp.down_proj": "mlp.down_proj.2"}


def held(tensors):
    return {name: HeldTensor(f"{name} in f", tensor) for name, tensor in tensors.items()}


def hadamard12() -> torch.Tensor:
    """Paley's of order 12, entry by entry; not symmetric."""
    squares = {x * x % 11 for x in range(1, 11)}
    rows = [[1] * 12]
    for i in range(11):
        rows.append([-1] + [1 if i == j or (i - j) % 11 in squares else -1 for j in range(11)])
    return torch.tensor(rows)


def integers(shape, seed=0) -> torch.Tensor:
    out = torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(seed))
    out.view(-1)[:16] = torch.arange(-8, 8)
    return out


def scales(rows, seed=0) -> torch.Tensor:
    return (torch.rand(rows, 1, generator=torch.Generator().manual_seed(seed)) * 0.1 + 0.01).half()


def nibbles(ints: torch.Tensor) -> torch.Tensor:
    """Two's complement, low nibble first."""
    rows = [[(row[2 * i] % 16) + 16 * (row[2 * i + 1] % 16) for i in range(len(row) // 2)] for row in ints.tolist()]
    return torch.tensor(rows, dtype=torch.uint8)


def folder():
    """(tensors, what the linears hold: name -> (integers, scales))."""
    tensors, meant = {}, {}
    for seed, (linear, shape) in enumerate(SHAPES.items()):
        ints, scale = integers(shape, seed), scales(shape[0], seed)
        place = f"{LAYER}.{INDEXED.get(linear, linear)}"
        tensors[f"{place}.weight"], tensors[f"{place}.weight_scales"] = nibbles(ints), scale
        meant[f"{LAYER}.{linear}"] = (ints, scale)
    tensors[f"{LAYER}.mlp.down_proj.0.had_rem_dim"] = hadamard12().half()
    tensors[f"{LAYER}.self_attn.o_proj_hadamard.had_rem_dim"] = hadamard12().half()
    tensors["model.embed_tokens.weight"] = torch.ones(5, 192).half()
    tensors["lm_head.weight"] = torch.ones(5, 192).half()
    tensors["model.norm.weight"] = torch.full((192,), 3.0).half()
    return tensors, meant


def read(plan):
    return plan.read({name: tensor.load() for name, tensor in plan.tensors.items()})
