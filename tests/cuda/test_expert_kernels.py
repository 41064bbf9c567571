"""On a GPU: are tokens sent to the experts that plain torch sends them to, and do their products keep their bits?"""

from __future__ import annotations

import pytest
import torch
from expert_cases import FORMATS, ExpertCase, some_experts
from linear_cases import DEVICE, poison

from hf_mlspec import ops
from hf_mlspec.ops.expert_plans import most_items, plan_of, rows_of_item

pytestmark = pytest.mark.usefixtures("kernels_are_required")
# Experts, chosen, hidden: lanes that are not full, one expert, all chosen, the shape of a large model, the most.
ROUTERS = ((6, 2, 64), (5, 5, 72), (1, 1, 8), (128, 8, 2048), (160, 6, 512), (1024, 32, 64))
TOKENS = (1, 2, 3, 8, 9, 31, 32, 33, 64, 300)
SHAPES = ((6, 2, 176, 64), (5, 2, 200, 160), (16, 4, 130, 352), (3, 3, 8, 32), (1, 1, 64, 128))


def routed(count: int, hidden: int, tokens: int, shared: int = 0, dtype: torch.dtype = torch.bfloat16):
    draw = torch.Generator().manual_seed(count + hidden)
    router = torch.randn(count + shared, hidden, generator=draw) / hidden**0.5
    x = torch.randn(max(TOKENS), hidden, generator=draw)
    return x[:tokens].bfloat16().to(DEVICE), router.to(dtype).to(DEVICE)


def items_of(plan: torch.Tensor, pairs: int) -> dict[int, list[int]]:
    """Of each expert the pairs that the items of a plan bring it, in ascending order."""
    found: dict[int, list[int]] = {}
    places = plan[:pairs].tolist()
    for expert, first, rows in plan[pairs:].view(-1, 3).tolist():
        if rows:
            found.setdefault(expert, []).extend(places[first : first + rows])
    return {expert: sorted(own) for expert, own in found.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("renormalize", [0, 1])
@pytest.mark.parametrize(("count", "chosen", "hidden"), ROUTERS)
def test_tokens_go_where_plain_torch_sends_them(count, chosen, hidden, renormalize, shared, dtype):
    x, router = routed(count, hidden, max(TOKENS), shared, dtype)
    exact = x.double() @ router.double().T
    best = exact[:, :count].sort(dim=1, descending=True).values
    apart = (best[:, :-1] - best[:, 1:])[:, :chosen] if count > 1 else torch.ones(len(x), 1, device=DEVICE)
    firm = (apart > 1e-5).all(dim=1)
    assert firm.sum() > len(x) // 2
    poison((len(x), count + 1), (len(x), chosen + 1))
    experts, weights, plan = ops.route_rows(x, router, None, count, chosen, renormalize)
    plain = ops.route_rows(x.cpu(), router.cpu(), None, count, chosen, renormalize)
    expected, shares, _ = (part.to(DEVICE) for part in plain)
    assert torch.equal(experts[firm], expected[firm])
    torch.testing.assert_close(weights[firm], shares[firm], rtol=1e-4, atol=1e-6)
    assert experts.sort(dim=1).values.diff(dim=1).gt(0).all()
    assert items_of(plan, experts.numel()) == items_of(plan_of(experts, count), experts.numel())
    assert torch.equal(plan[: experts.numel()].sort().values.cpu(), torch.arange(experts.numel(), dtype=torch.int32))
    for n in TOKENS:
        own, own_weights, own_plan = ops.route_rows(x[:n], router, None, count, chosen, renormalize)
        assert torch.equal(own, experts[:n])
        assert torch.equal(own_weights, weights[:n]), n
        assert items_of(own_plan, own.numel()) == items_of(plan_of(own, count), own.numel())
        rows = own_plan[own.numel() :].view(-1, 3)[:, 2]
        assert len(rows) == most_items(own.numel(), count)
        assert rows.max() <= rows_of_item(own.numel(), count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("shared", "sigmoids"), [(0, False), (1, False), (0, True)])
@pytest.mark.parametrize(("count", "chosen", "hidden"), [(6, 2, 64), (128, 8, 2048), (160, 6, 4104), (32, 4, 2880),
                                                         (256, 8, 8192)])  # fmt: skip
def test_a_row_that_is_normed_and_routed_at_once_has_the_same_bits(count, chosen, hidden, shared, sigmoids, dtype):
    x, router = routed(count, hidden, 7, shared, dtype)
    residual, weight = torch.randn(7, hidden, device=DEVICE).bfloat16(), torch.randn(hidden, device=DEVICE).to(dtype)
    bias = torch.randn(count + shared, device=DEVICE)
    how = count, chosen, 1, torch.randn(count, device=DEVICE), 2, 1 if chosen * 2 <= count else 2, 2.5
    how = how if sigmoids else (count, chosen, 1, None, 1, 1, 1.0)
    for row in range(7):
        own, beside = x[row : row + 1], residual[row : row + 1]
        poison((1, hidden), (1, hidden))
        normed, total, *found = ops.norm_route_row(own, beside, weight, 1e-6, router, bias, *how)
        expected = ops.rms_norm(own, weight, 1e-6, beside)
        assert torch.equal(normed, expected[0])
        assert torch.equal(total, expected[1])
        for part, plain in zip(found, ops.route_rows(normed, router, bias, *how), strict=True):
            assert torch.equal(part, plain)
    with pytest.raises(ValueError, match=r"norm_route_row: x has shape \[2, \d+\], expected \[1, hidden\]"):
        ops.norm_route_row(x[:2], residual[:2], weight, 1e-6, router, bias, *how)


# Experts, chosen, hidden, groups, of which so many are looked at; lanes that are not full, most groups, most experts.
SIGMOIDS = ((256, 8, 512, 8, 4), (128, 8, 256, 1, 1), (40, 3, 72, 5, 2), (6, 2, 64, 3, 1), (128, 6, 64, 64, 40),
            (1024, 32, 64, 16, 3))  # fmt: skip


@pytest.mark.parametrize("renormalize", [0, 1])
@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize(("count", "chosen", "hidden", "groups", "seen"), SIGMOIDS)
def test_sigmoids_choose_what_plain_torch_chooses(count, chosen, hidden, groups, seen, shared, renormalize):
    x, router = routed(count, hidden, max(TOKENS), shared)
    bias = (torch.randn(count, generator=torch.Generator().manual_seed(count)) * 0.2).to(DEVICE)
    how = count, chosen, renormalize, bias, groups, seen, 2.5
    sums = (x.double() @ router[:count].double().T).sigmoid() + bias.double()
    best = sums.view(len(x), groups, -1).topk(2, dim=2).values.sum(dim=2).sort(dim=1, descending=True)
    inside = torch.zeros_like(best.values, dtype=torch.bool).scatter(1, best.indices[:, :seen], True)
    order = sums.where(inside.repeat_interleave(count // groups, dim=1), -torch.inf).sort(dim=1, descending=True)
    apart = (order.values[:, :-1] - order.values[:, 1:])[:, :chosen].nan_to_num(1.0).amin(dim=1)
    if seen < groups:
        apart = apart.minimum(best.values[:, seen - 1] - best.values[:, seen])
    firm = apart > 1e-6
    assert firm.sum() > len(x) // 2
    poison((len(x), count + 1), (len(x), chosen + 1))
    experts, weights, plan = ops.route_rows(x, router, None, *how)
    plain = ops.route_rows(x.cpu(), router.cpu(), None, *how[:3], bias.cpu(), *how[4:])
    assert torch.equal(experts[firm].long(), order.indices[firm][:, :chosen])
    assert torch.equal(experts[firm].cpu(), plain[0][firm.cpu()])
    torch.testing.assert_close(weights[firm].cpu(), plain[1][firm.cpu()], rtol=1e-4, atol=1e-6)
    assert items_of(plan, experts.numel()) == items_of(plan_of(experts, count), experts.numel())
    for n in TOKENS:
        own, own_weights, _ = ops.route_rows(x[:n], router, None, *how)
        assert torch.equal(own, experts[:n])
        assert torch.equal(own_weights, weights[:n]), n


def test_of_equal_sigmoids_and_groups_the_lower_number_comes_first_and_nan_is_kept_to_its_token():
    x, router = routed(40, 64, 5)
    same, bias = router[:1].expand(40, 64).contiguous(), torch.zeros(40, device=DEVICE)
    experts, weights, _ = ops.route_rows(x, same, None, 40, 7, 1, bias, 5, 2, 1.0)
    assert torch.equal(experts.cpu(), torch.arange(7, dtype=torch.int32).expand(5, 7))
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 7))
    before = ops.route_rows(x, router, None, 40, 7, 0, bias, 5, 2, 1.0)
    x[2, 9] = torch.nan
    broken = ops.route_rows(x, router, None, 40, 7, 0, bias, 5, 2, 1.0)
    others = torch.arange(5, device=DEVICE) != 2
    assert torch.equal(broken[0][others], before[0][others])
    assert torch.equal(broken[1][others], before[1][others])
    assert broken[1][2].isnan().all()
    assert broken[0].min() >= 0
    assert broken[0].max() < 40
    assert sum(map(len, items_of(broken[2], 35).values())) == 35


def test_of_equal_experts_the_lower_number_comes_first():
    x, router = routed(40, 64, 5)
    same = router[:1].expand(40, 64).contiguous()
    experts, weights, _ = ops.route_rows(x, same, None, 40, 7, 1)
    assert torch.equal(experts.cpu(), torch.arange(7, dtype=torch.int32).expand(5, 7))
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 7))
    zeros = torch.zeros_like(router)
    zeros[3] = -0.0
    assert torch.equal(ops.route_rows(x, zeros, None, 40, 7, 0)[0], experts)


@pytest.mark.parametrize("shared", [0, 1])
def test_a_token_of_nan_has_weights_of_nan_and_leaves_others_alone(shared):
    x, router = routed(40, 64, 9, shared)
    experts, weights, _ = ops.route_rows(x, router, None, 40, 7, 0)
    x[4, 9] = torch.nan
    broken, shares, plan = ops.route_rows(x, router, None, 40, 7, 0)
    others = torch.arange(9, device=DEVICE) != 4
    assert torch.equal(broken[others], experts[others])
    assert torch.equal(shares[others], weights[others])
    assert shares[4].isnan().all()
    assert torch.equal(broken[4].cpu(), torch.arange(7, dtype=torch.int32))
    assert sum(map(len, items_of(plan, 63).values())) == 63
    router[5] = torch.nan  # one expert alone: it comes behind all others
    some = ops.route_rows(x, router, None, 40, 40, 0)[0]
    assert (some[others, -1] == 5).all()


@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_plan_rows_has_the_pairs_of_experts_that_there_are(tokens):
    experts = some_experts(tokens, 16, 4)
    plan = ops.plan_rows(experts, 16)
    assert items_of(plan, 4 * tokens) == items_of(plan_of(experts, 16), 4 * tokens)
    assert sum(map(len, items_of(plan, 4 * tokens).values())) == 4 * tokens
    few = ops.plan_rows(experts, 11)  # the others are not here
    assert items_of(few, 4 * tokens) == items_of(plan_of(experts, 11), 4 * tokens)
    assert sum(map(len, items_of(few, 4 * tokens).values())) == int((experts < 11).sum())


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize(("count", "chosen", "out", "size"), SHAPES)
def test_products_of_experts_are_exact_but_for_float32_sums(form, count, chosen, out, size):
    if form.group_size and size % form.group_size:
        pytest.skip("groups do not divide the inputs")
    case = ExpertCase(form, count, out, size, 300)
    for tokens in (1, 3, 40, 300):
        experts = some_experts(tokens, count, chosen)
        poison((tokens * chosen, out))
        y = case.multiply(case.x[:tokens], experts)
        exact, magnitude = case.exact(case.x[:tokens], experts)
        bound = 2.0**-24 * (size / 8 + 16) * magnitude + 2.0**-8 * exact.abs()
        assert ((y.double() - exact).abs() <= bound).all(), tokens
    rows = case.x[: 40 * chosen].contiguous() if 40 * chosen <= 300 else case.x[:120]
    experts = some_experts(len(rows) // chosen, count, chosen)
    own = case.multiply(rows, experts)  # a row for every pair
    exact, magnitude = case.exact(rows, experts)
    assert ((own.double() - exact).abs() <= 2.0**-24 * (size / 8 + 16) * magnitude + 2.0**-8 * exact.abs()).all()


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_pair_has_the_same_bits_among_any_others(form):
    """Alone, in a batch of 32, in a check of nine, and where all tokens go to one expert."""
    case = ExpertCase(form, 16, 200, 384, 300)
    experts = some_experts(300, 16, 4)
    whole = case.multiply(case.x, experts).view(300, 4, -1)
    for first, n in ((0, 1), (17, 1), (5, 9), (32, 32), (100, 2), (0, 130), (290, 10)):
        rows = slice(first, first + n)
        part = case.multiply(case.x[rows], experts[rows].contiguous())
        assert torch.equal(part.view(n, 4, -1), whole[rows]), (first, n)
    crowd = torch.full((300, 1), 7, dtype=torch.int32, device=DEVICE)
    together = case.multiply(case.x, crowd)
    for row in (0, 9, 299):
        assert torch.equal(case.multiply(case.x[row : row + 1], crowd[:1]), together[row : row + 1])
    order = torch.randperm(300, device=DEVICE)
    mixed = case.multiply(case.x[order], experts[order].contiguous()).view(300, 4, -1)
    assert torch.equal(mixed, whole[order])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_bias_is_added_before_a_sum_is_rounded(form, dtype):
    case, experts = ExpertCase(form, 16, 200, 384, 40), some_experts(40, 16, 4)
    bias = torch.randn(16, 200, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    y = case.multiply(case.x, experts, bias=bias)
    products, magnitude = case.exact(case.x, experts)
    exact = products + bias.double()[experts.flatten().long()]
    bound = 2.0**-24 * (384 / 8 + 16) * (magnitude + exact.abs()) + 2.0**-8 * exact.abs()
    assert ((y.double() - exact).abs() <= bound).all()
    alone = case.multiply(case.x[17:18], experts[17:18].contiguous(), bias=bias)
    assert torch.equal(alone, y[17 * 4 : 18 * 4])
    with pytest.raises(ValueError, match=r"bias has shape \[15, 200\], expected \[16, 200\]"):
        case.multiply(case.x, experts, bias=bias[:15])


@pytest.mark.parametrize("shared", [0, 1])
def test_a_router_adds_its_bias(shared):
    x, router = routed(40, 64, 64, shared)
    bias = torch.randn(40 + shared, generator=torch.Generator().manual_seed(3)).to(DEVICE) * 2
    exact = x.double() @ router.double().T + bias.double()
    best = exact[:, :40].sort(dim=1, descending=True).values
    firm = ((best[:, :-1] - best[:, 1:])[:, :7] > 1e-5).all(dim=1)
    assert firm.sum() > 32
    experts, weights, _ = ops.route_rows(x, router, bias, 40, 7, 1)
    expected, shares, _ = (part.to(DEVICE) for part in ops.route_rows(x.cpu(), router.cpu(), bias.cpu(), 40, 7, 1))
    assert torch.equal(experts[firm], expected[firm])
    torch.testing.assert_close(weights[firm], shares[firm], rtol=1e-4, atol=1e-6)
    assert not torch.equal(ops.route_rows(x, router, None, 40, 7, 1)[0], experts)
    for n in (1, 9, 33):
        part = ops.route_rows(x[:n], router, bias, 40, 7, 1)
        assert torch.equal(part[0], experts[:n])
        assert torch.equal(part[1], weights[:n])


@pytest.mark.parametrize("width", [8, 100, 2880, 7])
def test_gates_in_clamped_pairs(width):
    gate_up = (torch.randn(33, 2 * width, generator=torch.Generator().manual_seed(width)) * 5).bfloat16().to(DEVICE)
    gate_up[3, 5] = torch.nan
    poison((33, width))
    y = ops.gated_pairs(gate_up, 1.702, 7.0)
    gate, up = gate_up[:, ::2].double().clamp(max=7), gate_up[:, 1::2].double().clamp(-7, 7)
    exact = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    torch.testing.assert_close(y.double(), exact, rtol=2.0**-8, atol=1e-6, equal_nan=True)
    assert y.isnan().sum() == 1
    for row in (0, 17):
        assert torch.equal(ops.gated_pairs(gate_up[row : row + 1], 1.702, 7.0), y[row : row + 1])


@pytest.mark.parametrize("out", [200, 130, 6])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_pairs_that_are_gated_where_they_are_multiplied_have_the_same_bits(form, out):
    case, bias = ExpertCase(form, 16, out, 384, 300), torch.randn(16, out, device=DEVICE).bfloat16()
    for tokens in (1, 9, 300):
        experts = some_experts(tokens, 16, 4)
        expected = ops.gated_pairs(case.multiply(case.x[:tokens], experts, bias=bias), 1.702, 1.0)
        poison((4 * tokens, out // 2))
        assert torch.equal(case.multiply(case.x[:tokens], experts, bias=bias, clamp=(1.702, 1.0)), expected), tokens
    with pytest.raises(ValueError, match="limit -1, expected finite numbers"):
        case.multiply(case.x[:3], some_experts(3, 16, 4), clamp=(1.702, -1.0))


@pytest.mark.parametrize("form", FORMATS[:3], ids=lambda form: form.name)
def test_experts_without_tokens_are_not_read(form):
    case = ExpertCase(form, 16, 136, 256, 40)
    experts = some_experts(40, 8, 2)  # the first eight
    expected = case.multiply(case.x, experts)
    if case.tiles is None:
        case.dense[8:] = torch.nan
    else:
        case.tiles[0][8:] = 255
        case.tiles[1][8:] = 255
    assert torch.equal(case.multiply(case.x, experts), expected)
    assert expected.isfinite().all()


@pytest.mark.parametrize(("shared", "weighed"), [(False, False), (True, True), (True, False)])
def test_a_token_is_summed_in_its_own_order(shared, weighed):
    rows = torch.randn(300 * 6, 200, device=DEVICE).bfloat16()
    weights = torch.rand(300, 6 + weighed, device=DEVICE)
    beside = torch.randn(300, 200, device=DEVICE).bfloat16() if shared else None
    y = ops.weighted_rows(rows, weights, beside)
    weights, given = torch.cat([weights, weights.new_ones(300, shared and not weighed)], dim=1), weights
    parts = [*rows.view(300, 6, 200).double().unbind(1), *([beside.double()] if shared else [])]
    exact = sum(part * weights[:, i, None].double() for i, part in enumerate(parts))
    magnitude = sum(part.abs() * weights[:, i, None].double() for i, part in enumerate(parts))
    assert ((y.double() - exact).abs() <= 2.0**-21 * magnitude + 2.0**-8 * exact.abs()).all()
    for n in (1, 9, 33):
        part = ops.weighted_rows(rows[: n * 6], given[:n].contiguous(), None if beside is None else beside[:n])
        assert torch.equal(part, y[:n])


@pytest.mark.parametrize("width", [64, 2048, 2880, 8000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("shared", "weighed"), [(False, False), (True, True), (True, False)])
def test_summed_and_normed_at_once_it_has_the_same_bits(shared, weighed, dtype, width):
    rows = torch.randn(40 * 6, width, device=DEVICE).bfloat16()
    weights = torch.rand(40, 6 + weighed, device=DEVICE)
    beside = torch.randn(40, width, device=DEVICE).bfloat16() if shared else None
    residual, weight = torch.randn(40, width, device=DEVICE).bfloat16(), torch.randn(width, device=DEVICE).to(dtype)
    poison((40, width), (40, width))
    normed, total = ops.weighted_norm_rows(rows, weights, beside, residual, weight, 1e-6)
    expected = ops.rms_norm(ops.weighted_rows(rows, weights, beside), weight, 1e-6, residual)
    assert torch.equal(normed, expected[0])
    assert torch.equal(total, expected[1])
    one = None if beside is None else beside[3:4]
    alone = ops.weighted_norm_rows(rows[18:24], weights[3:4], one, residual[3:4], weight, 1e-6)
    assert torch.equal(alone[0], normed[3:4])
    with pytest.raises(ValueError, match=r"weighted_norm_rows: residual has shape \[39, \d+\], expected \[40, \d+\]"):
        ops.weighted_norm_rows(rows, weights, beside, residual[1:], weight, 1e-6)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_gate_before_up_is_gated_with_the_same_bits(form):
    case = ExpertCase(form, 6, 320, 384, 300)  # 160 of gate: halves of tiles, odd in number
    bias = torch.randn(6, 320, device=DEVICE)
    for tokens, activation in ((1, 0), (9, 1), (40, 2), (300, 0), (300, 3), (1, 4)):
        experts = some_experts(tokens, 6, 2)
        expected = ops.gated(case.multiply(case.x[:tokens], experts, bias=bias), activation)
        poison((tokens * 2, 160))
        assert torch.equal(case.multiply(case.x[:tokens], experts, None, bias, (0.0, 0.0, activation)), expected)
    for out, clamp, message in (
        (320, (0.0, 0.0, 5), "activation is 5"), (320, (1.7, 7.0, 0), "activation is 0 and limit 7"),
        (200, (0.0, 0.0, 0), "200 outputs, the CUDA kernels take gate before up in multiples of 64"),
    ):  # fmt: skip
        other = ExpertCase(form, 6, out, 384, 1)
        with pytest.raises(ValueError, match=f"expert_rows: {message}"):
            other.multiply(other.x, some_experts(1, 6, 2), clamp=clamp)


@pytest.mark.parametrize("tokens", [1, 3, 32, 200])
@pytest.mark.parametrize("fused", [False, True], ids=["gated apart", "gated"])
def test_a_layer_only_enqueues_and_can_be_captured(fused, tokens):
    """Several in a row, each sent by what the one before it made: no product reads a plan that is not written yet."""
    up, down = ExpertCase(FORMATS[0], 16, 2 * 96, 256, 200), ExpertCase(FORMATS[1], 16, 256, 96, 200)
    x, router = up.x[:tokens].clone(), torch.randn(16, 256, device=DEVICE).bfloat16()

    def layer() -> torch.Tensor:
        rows = x
        for chosen in (4, 1, 4, 8):
            if fused and tokens == 1:
                how = torch.ones(256, device=DEVICE), 1e-6, router, None, 16, chosen, 1, None, 1, 1, 1.0
                rows, _, experts, weights, plan = ops.norm_route_row(rows, x, *how)
            else:
                experts, weights, plan = ops.route_rows(rows, router, None, 16, chosen, 1)
            if fused:
                inner = up.multiply(rows, experts, plan, None, (0.0, 0.0, 0))
            else:
                inner = ops.gated(up.multiply(rows, experts, plan), 0)
            rows = ops.weighted_rows(down.multiply(inner, experts, plan), weights, None)
            rows = ops.rms_norm(rows, torch.ones(256, device=DEVICE), 1e-6, x)[0]
        return rows

    layer()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            captured = layer()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for seed in range(6):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x) if seed < 5 else x[:1].expand_as(x))
        captured.fill_(torch.nan)
        graph.replay()
        replayed = captured.clone()
        assert torch.equal(replayed, layer()), seed


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(3, 64)}, TypeError, "x is .*, the CUDA kernels take bfloat16"),
        ({"x": torch.zeros(3, 72).bfloat16()}, ValueError, r"x has shape \[3, 72\] and router|router has shape"),
        ({"chosen": 7}, ValueError, "chosen is 7, expected 1 to 6"),
        ({"num_experts": 4}, ValueError, "router has 6 rows for num_experts = 4"),
        ({"choice_bias": torch.zeros(5)}, ValueError, r"choice_bias has shape \[5\], expected \[6\]"),
        ({"choice_bias": torch.zeros(6), "groups": 65}, ValueError, "chosen_groups is 1 of 65 groups"),
    ],
)
def test_operands_of_a_router_that_do_not_fit_are_named(change, error, message):
    zeros = torch.zeros(9, 64).bfloat16()
    given = {"x": zeros[:3], "router": zeros[:6], "bias": None, "num_experts": 6, "chosen": 2, "renormalize": 0}
    given |= {"choice_bias": None, "groups": 1} | change
    operands = [value.to(DEVICE) if isinstance(value, torch.Tensor) else value for value in given.values()]
    with pytest.raises(error, match=f"route_rows: {message}"):
        ops.route_rows(*operands, 1, 1.0)


def test_operands_of_experts_that_do_not_fit_are_named():
    case, experts = ExpertCase(FORMATS[1], 4, 64, 64, 3), some_experts(3, 4, 2)
    for x, plan, message in (
        (case.x[:2], None, r"x has shape \[2, 64\], expected \[3 or 6, 64\]"),
        (case.x[:, :32].contiguous(), None, r"x has shape \[3, 32\], expected"),
        (case.x, plan_of(experts, 4)[:-1], r"plan has shape \[\d+\], expected"),
    ):
        with pytest.raises(ValueError, match=f"mxfp4_expert_rows: {message}"):
            case.multiply(x, experts, plan)
