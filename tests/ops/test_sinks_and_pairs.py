"""Do sinks, windows and clamped gates give the same on every instruction set: what their formulas say?"""

from __future__ import annotations

import json

import pytest
from instruction_sets import ISAS, PACKAGE, output_on

from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")

CODE = (
    PACKAGE
    + """
import json
from hf_mlspec.ops.compiled_decoder import F32, Experts, Sizes, Weight, compiled_decoder, set_experts, set_linear

HIDDEN, HEADS, KV, DIM, COUNT, CHOSEN, INNER, VOCAB, TOKENS, WINDOW = 48, 6, 2, 16, 5, 2, 21, 40, 150, 70
SLOPE, LIMIT = 1.702, 0.6
seeded = torch.Generator().manual_seed(0)

def random(*shape, scale=1.0):
    return torch.randn(shape, generator=seeded) * scale

def linear(out, inputs):
    return Weight(F32, random(out, inputs, scale=inputs**-0.5), inputs, out, bias=random(out, scale=0.3))

table, sinks = random(VOCAB, HIDDEN), random(HEADS, scale=2.0)
sinks[0], sinks[1] = 90.0, -90.0  # all of the softmax, and nothing of it
q, k, v, o = linear(96, HIDDEN), linear(32, HIDDEN), linear(32, HIDDEN), linear(HIDDEN, 96)
up = Weight(F32, random(COUNT, 2 * INNER, HIDDEN, scale=0.3), HIDDEN, 2 * INNER, bias=random(COUNT, 2 * INNER))
down = Weight(F32, random(COUNT, HIDDEN, INNER, scale=0.3), INNER, HIDDEN, bias=random(COUNT, HIDDEN))
router, router_bias, head = random(COUNT, HIDDEN, scale=0.2), random(COUNT), linear(VOCAB, HIDDEN)
made = compiled_decoder(Sizes(HIDDEN, HEADS, KV, DIM, INNER, VOCAB, VOCAB, DIM, "silu", 1e-5, attention_scale=0.25),
                        torch.float32, table, torch.ones(HIDDEN))
made.set_rope(0, torch.ones(256, DIM // 2), torch.zeros(256, DIM // 2))
made.add_layer([torch.ones(HIDDEN), torch.ones(HIDDEN), *[None] * 10], WINDOW, 0, sinks)
for name, weight in (("q", q), ("k", k), ("v", v), ("o", o)):
    set_linear(made, name, weight)
set_experts(made, Experts(router, router_bias, CHOSEN, True, up, down, (SLOPE, LIMIT), None, {}))
set_linear(made, "head", head)
ids = torch.randint(VOCAB, (TOKENS,), generator=seeded).tolist()

def score(tokens, start, cache):
    return made.score(cache, tokens, [len(tokens)], [start], [len(tokens)], False, True, 0, 0, 0, [], [])[2]

kv = torch.zeros(1, 2, 1, KV, 256, DIM)
logits = score(ids, 0, kv)
kv = torch.zeros_like(kv)
steps = torch.cat([score([token], at, kv) for at, token in enumerate(ids)])

def apply(weight, x):
    return x @ weight.weight.double().T + weight.bias.double()

def normed(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

x = table.double()[ids]
rows = normed(x)
queries, keys, values = (apply(w, rows).view(TOKENS, -1, DIM).transpose(0, 1) for w in (q, k, v))
keys, values = (states.repeat_interleave(HEADS // KV, 0) for states in (keys, values))
behind = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
scores = (queries @ keys.transpose(1, 2) * 0.25).masked_fill((behind < 0) | (behind >= WINDOW), -torch.inf)
scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, TOKENS, 1)], -1).softmax(-1)[..., :-1]
x = x + apply(o, (scores @ values).transpose(0, 1).reshape(TOKENS, -1))
rows = normed(x)
best = (rows @ router.double().T + router_bias).topk(CHOSEN)
for token in range(TOKENS):
    for expert, weight in zip(best.indices[token], best.values[token].softmax(-1)):
        both = up.weight[expert].double() @ rows[token] + up.bias[expert]
        gate, linear_part = both[::2].clamp(max=LIMIT), both[1::2].clamp(-LIMIT, LIMIT)
        inner = (linear_part + 1) * gate * torch.sigmoid(SLOPE * gate)
        x[token] += weight * (down.weight[expert].double() @ inner + down.bias[expert])
exact = apply(head, normed(x))
print(json.dumps([float((logits - exact).abs().max()), float(exact.abs().max()), bool(torch.equal(logits, steps))]))
"""
)


@pytest.mark.parametrize("isa", ISAS)
def test_a_layer_is_what_its_formulas_say_on_every_instruction_set(isa, tmp_path):
    error, largest, same = json.loads(output_on(isa, CODE, tmp_path))
    assert error < 1e-4
    assert largest > 1
    assert same
