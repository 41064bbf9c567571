"""How does a batch of windows go through a Mamba-2 layer in few products, so that training takes minutes?

transformers' own forward without mamba_ssm computes the squares of a chunk per head and element of the state; here
they are products (arXiv 2405.21060, section 6), and only what leaves a chunk goes from chunk to chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel


@contextmanager
def few_products(model: PreTrainedModel) -> Iterator[None]:
    """Mamba-2 layers of ``model`` run by `mixed` inside; they take no cache and no mask."""
    mixers = [one for one in model.modules() if type(one).__name__ == "Mamba2Mixer"]
    for mixer in mixers:
        mixer.forward = MethodType(mixed, mixer)
    try:
        yield
    finally:
        for mixer in mixers:
            del mixer.forward


def mixed(
    mixer: nn.Module, hidden_states: Tensor, cache_params: object = None, attention_mask: Tensor | None = None,
    **_: object,
) -> Tensor:  # fmt: skip
    """What the mixer's own forward gives of whole windows ``[rows, tokens, hidden]``, by other sums. ValueError for a
    cache, a mask, bounds on time steps, or tokens that do not fill chunks."""
    rows, tokens, _ = hidden_states.shape
    limits = tuple(mixer.time_step_limit)
    if cache_params is not None or attention_mask is not None or limits != (0.0, float("inf")):
        raise ValueError("windows are trained on without a cache, a mask and bounds on time steps")
    if tokens % mixer.chunk_size:
        raise ValueError(f"a window has {tokens} tokens, which chunks of {mixer.chunk_size} do not fill")
    heads, groups, size = mixer.num_heads, mixer.n_groups, mixer.ssm_state_size
    gates, channels, steps = mixer.in_proj(hidden_states).split([mixer.intermediate_size, mixer.conv_dim, heads], -1)
    channels = F.silu(mixer.conv1d(channels.transpose(1, 2))[..., :tokens].transpose(1, 2))
    values, keys, queries = channels.split([mixer.intermediate_size, groups * size, groups * size], dim=-1)
    steps = F.softplus(steps.float() + mixer.dt_bias)
    values = values.reshape(rows, tokens, heads, mixer.head_dim)
    keys, queries = (one.reshape(rows, tokens, groups, size) for one in (keys, queries))
    said = scanned(values * steps[..., None], steps * -torch.exp(mixer.A_log.float()), keys, queries, mixer.chunk_size)
    said = (said + mixer.D[:, None] * values).reshape(rows, tokens, -1)
    return mixer.out_proj(mixer.norm(said, gates).to(hidden_states.dtype))


def scanned(values: Tensor, decays: Tensor, keys: Tensor, queries: Tensor, chunk: int) -> Tensor:
    """values ``[rows, tokens, heads, value]`` as the state takes them, decays ``[rows, tokens, heads]`` as logarithms,
    keys and queries ``[rows, tokens, groups, key]`` -> what the state behind each token says of its query."""
    rows, tokens, heads, value = values.shape
    groups, size, chunks = keys.shape[2], keys.shape[3], tokens // chunk
    # [rows, chunks, groups, heads of a group, chunk, ...]
    v = values.view(rows, chunks, chunk, groups, heads // groups, value).permute(0, 1, 3, 4, 2, 5)
    k, q = (one.view(rows, chunks, chunk, groups, size).transpose(2, 3) for one in (keys, queries))
    d = decays.view(rows, chunks, chunk, groups, heads // groups).permute(0, 1, 3, 4, 2).cumsum(-1)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=d.device).triu(1)
    between = (d[..., :, None] - d[..., None, :]).masked_fill(later, -torch.inf).exp()
    near = ((q @ k.transpose(-1, -2))[:, :, :, None] * between) @ v
    left = k.transpose(-1, -2)[:, :, :, None] @ (v * (d[..., -1:] - d).exp()[..., None])  # [..., key, value]
    whole, state, before = d[..., -1].exp()[..., None, None], torch.zeros_like(left[:, 0]), []
    for at in range(chunks):
        before.append(state)
        state = state * whole[:, at] + left[:, at]
    far = (q[:, :, :, None] @ torch.stack(before, dim=1)) * d.exp()[..., None]
    return (near + far).permute(0, 1, 4, 2, 3, 5).reshape(rows, tokens, heads, value)
