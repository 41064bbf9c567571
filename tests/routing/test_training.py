"""Does training lower the distance to the teacher, meet the bits asked for, and go on where it was killed?"""

from __future__ import annotations

import pytest
import torch
from routed import pair, queries

from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.routing.blocks import average_bits, blocks_of
from hf_mlspec.routing.mixing import Mixture, Prefixes, likeliest
from hf_mlspec.routing.passes import Routed, at_widths
from hf_mlspec.routing.router import Router
from hf_mlspec.routing.training import RouterRecipe, price_for, train_router

FAST = {"steps": 12, "batch": 4, "query_tokens": 6, "hidden": 8}


def test_a_mixture_of_one_width_is_that_width():
    dense, model = pair()
    blocks, rows = blocks_of(model), queries(2, 6)
    for name, linear in ((n, m) for n, m in model.named_modules() if isinstance(m, PlanesLinear)):
        dense.get_submodule(name).weight.data = linear.dequantized(torch.float32, 6)
    router = Router(blocks, (2, 4, 6), temperature=1e-3)
    router.charge(-1.0)  # the widest
    mixture = Mixture(router, blocks, Prefixes(blocks, router.widths))
    with torch.no_grad():
        with mixture.over(model, [6, 6]):
            mixed = model(input_ids=rows).logits
        torch.testing.assert_close(mixed, dense(input_ids=rows).logits, rtol=1e-4, atol=1e-4)
    assert mixture.bits().tolist() == pytest.approx([6, 6])


def test_gradients_of_a_mixture_are_those_of_the_formula():
    _, model = pair()
    block = blocks_of(model)[0]
    linear = next(iter(block.linears.values()))
    prefixes = Prefixes([block], (2, 4, 8))
    x = torch.randn(2, 3, linear.in_features, requires_grad=True)
    p = torch.softmax(torch.randn(2, 3), -1).requires_grad_()
    router = Router([block], (2, 4, 8))
    mixture = Mixture(router, [block], prefixes)
    mixture.probabilities = {0: p}
    y = mixture.product(0, linear, x)
    weights = torch.stack([linear.dequantized(torch.float32, width) for width in (2, 4, 8)])
    wanted = torch.einsum("rk,koi,rti->rto", p, weights, x)
    torch.testing.assert_close(y, wanted)
    grad = torch.randn_like(y)
    for own, other in zip(torch.autograd.grad(y, (x, p), grad), torch.autograd.grad(wanted, (x, p), grad),
                          strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


def test_what_is_likeliest_is_read_with_the_gradient_of_the_mixture():
    scores = torch.tensor([[0.1, 2.0, 2.0], [3.0, 0.0, 1.0]], requires_grad=True)
    values = torch.randn(3)
    hard = likeliest(torch.softmax(scores, -1))
    assert hard.tolist() == [[0, 1, 0], [1, 0, 0]]
    wanted = torch.autograd.grad((torch.softmax(scores, -1) @ values).sum(), scores)[0]
    torch.testing.assert_close(torch.autograd.grad((hard @ values).sum(), scores)[0], wanted)


def test_hard_steps_see_the_loss_of_the_choices_themselves():
    dense, model = pair()
    samples, blocks = queries(4, 12), blocks_of(model)
    recipe = RouterRecipe(4.5, **FAST | {"steps": 4, "hard_share": 0.5})
    assert [recipe.is_hard(step) for step in range(4)] == [False, False, True, True]
    assert recipe.temperature(3) == recipe.temperatures[0] > recipe.temperature(1)
    found = train_router(model, dense, samples, recipe)
    assert len(found.steps) == 4
    router = found.router
    for own in router.of:
        torch.nn.init.normal_(own.outer.weight)
    mixture = Mixture(router, blocks, Prefixes(blocks, router.widths))
    mixture.hard = True
    with torch.no_grad():
        with mixture.over(model, [6] * 4):
            mixed = model(input_ids=samples).logits
        with Routed(router, blocks, [6] * 4).over(model) as routed:
            wanted = model(input_ids=samples).logits
    assert {p.max().item() for p in mixture.probabilities.values()} == {1.0}
    bits = [average_bits(list(row), blocks) for row in zip(*routed.widths, strict=True)]
    assert mixture.bits().tolist() == pytest.approx(bits)
    assert _kl(mixed, wanted) < 1e-4


def test_training_learns_and_meets_the_target():
    dense, model = pair()
    samples, seen = queries(16, 12), []
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = train_router(model, dense, samples, RouterRecipe(4.5, **FAST | {"steps": 40}), progress=seen.append)
    assert seen == found.steps
    assert len(seen) == 40
    # From the even mixture of five widths the temperature falls: at the same bits the choice is a better one.
    even = _distance(model, dense, samples, [[4] * 16 for _ in blocks_of(model)])
    blocks = blocks_of(model)
    with torch.no_grad(), Routed(found.router, blocks, [6] * 16).over(model) as routed:
        logits = model(input_ids=samples).logits
    bits = sum(average_bits(list(row), blocks) for row in zip(*routed.widths, strict=True)) / 16
    assert bits == pytest.approx(4.5, abs=0.3)
    assert found.bits == pytest.approx(bits, abs=1e-6)
    assert _kl(logits, dense(input_ids=samples).logits) < even
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.requires_grad for p in dense.parameters())


def _distance(model, dense, samples, widths) -> float:
    with torch.no_grad(), at_widths(model, blocks_of(model), widths):
        return _kl(model(input_ids=samples).logits, dense(input_ids=samples).logits)


def _kl(logits, wanted) -> float:
    wanted, own = wanted.log_softmax(-1), logits.log_softmax(-1)
    return float((wanted.exp() * (wanted - own)).sum(-1).mean().detach())


def test_seeds_fix_everything_and_a_killed_run_goes_on(tmp_path):
    dense, model = pair()
    samples, path = queries(10, 8), tmp_path / "training"
    recipe = RouterRecipe(4.0, **FAST)
    whole = train_router(model, dense, samples, recipe)

    class Killed(Exception):
        pass

    def kill(step):
        if step.step == 8:
            raise Killed

    with pytest.raises(Killed):
        train_router(model, dense, samples, recipe, checkpoint=path, every=3, progress=kill)
    assert path.exists()
    done = []
    resumed = train_router(model, dense, samples, recipe, checkpoint=path, every=3, progress=done.append)
    assert [step.step for step in done] == [6, 7, 8, 9, 10, 11]
    assert resumed.steps == whole.steps
    for name, tensor in whole.router.state_dict().items():
        assert torch.equal(resumed.router.state_dict()[name], tensor)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_training_is_refused(tmp_path):
    dense, model = pair()
    samples, path = queries(10, 8), tmp_path / "training"

    def stop(step):
        if step.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_router(model, dense, samples, RouterRecipe(4.0, **FAST), checkpoint=path, every=3, progress=stop)
    with pytest.raises(ValueError, match=r"trained with target_bits 4\.0, now 5\.0: delete"):
        train_router(model, dense, samples, RouterRecipe(5.0, **FAST), checkpoint=path)
    with pytest.raises(ValueError, match="trained with text"):
        train_router(model, dense, queries(10, 8, seed=9), RouterRecipe(4.0, **FAST), checkpoint=path)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is no checkpoint of a router's training"):
        train_router(model, dense, samples, RouterRecipe(4.0, **FAST), checkpoint=path)


@pytest.mark.parametrize(("recipe", "samples", "words"), [
    (RouterRecipe(9.0), (4, 8), r"target_bits is 9\.0, the candidates are \[2, 3, 4, 6, 8\]: choose 2 to 8"),
    (RouterRecipe(1.5), (4, 8), "choose 2 to 8"),
    (RouterRecipe(float("nan")), (4, 8), "target_bits is nan"),
    (RouterRecipe(4.5), (4, 1), "samples of 1 tokens"),
    (RouterRecipe(4.5), (0, 8), "samples of 0 tokens"),
    (RouterRecipe(4.5, steps=0), (4, 8), "steps is 0"),
    (RouterRecipe(4.5, hard_share=1.5), (4, 8), r"hard_share is 1\.5, .*give 0 to 1"),
    (RouterRecipe(4.5, temperatures=(0.1, 1.0)), (4, 8), "temperatures are"),
])  # fmt: skip
def test_bad_recipes_are_refused(recipe, samples, words):
    dense, model = pair()
    with pytest.raises(ValueError, match=words):
        train_router(model, dense, queries(*samples), recipe)


def test_a_teacher_of_nan_is_refused():
    dense, model = pair()
    with torch.no_grad():
        dense.model.norm.weight[0] = float("nan")
    with pytest.raises(FloatingPointError, match="loss is nan at step 0"):
        train_router(model, dense, queries(4, 8), RouterRecipe(4.5, **FAST))
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = float("nan")
    rows = queries(4, 8)
    rows[2, 3] = 5
    with pytest.raises(FloatingPointError, match=r"input of model\.layers\.0\.self_attn is NaN"):
        train_router(model, pair()[0], rows, RouterRecipe(4.5, **FAST))


def test_the_price_meets_an_average():
    _, model = pair()
    blocks = blocks_of(model)
    scores = [torch.randn(50, 3) for _ in blocks]
    price = price_for(scores, blocks, (2, 4, 8), 5.0)
    bits = torch.tensor([2.0, 4.0, 8.0])
    chosen = [bits[(own - price * bits).argmax(-1)].mean() for own in scores]
    total = sum(block.weights for block in blocks)
    assert sum(c * b.weights for c, b in zip(chosen, blocks, strict=True)) / total == pytest.approx(5.0, abs=0.1)
