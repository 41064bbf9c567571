"""Are planes that lie apart from their tiles, in the order of a GPU, the weight that has them in its tiles?"""

from __future__ import annotations

import pytest
import torch

from hf_mlspec import ops
from hf_mlspec.formats import planes as bitplanes
from hf_mlspec.ops.planes import tiles_cuda

OUT, IN, TOP = 136, 192, 3


@pytest.fixture(scope="module")
def weight():
    return bitplanes.quantize(torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0)), 8, 32)


def parts(weight):
    """Tiles of the top planes, shapes of scales, and the other planes one by one."""
    tiles, scales = tiles_cuda.pack(weight.planes, weight.scale)
    halves = tiles.unflatten(2, (2, tiles.shape[2] // 2))
    front = halves.shape[3] - 8 * tiles_cuda.PLANE_BYTES
    low = halves[..., front + TOP * tiles_cuda.PLANE_BYTES :].unflatten(-1, (8 - TOP, tiles_cuda.PLANE_BYTES))
    top = halves[..., : front + TOP * tiles_cuda.PLANE_BYTES].flatten(2).contiguous()
    return top, scales, low.permute(3, 0, 1, 2, 4).flatten(1).contiguous()


def multiply(weight, x, num_planes, apart, **changed):
    top, scales, _ = parts(weight)
    how = {"group_size": 32, "zero_doubled": weight.zero_doubled, "total_planes": 8} | changed
    return ops.bitplane_linear(x, top, scales, OUT, num_planes=num_planes, apart=apart, **how)


def test_joined_tiles_are_those_of_the_whole_weight(weight):
    top, _, low = parts(weight)
    assert tiles_cuda.joined(top, low).equal(tiles_cuda.pack(weight.planes, weight.scale)[0])
    assert tiles_cuda.plane_bytes(top) == low.shape[1]


@pytest.mark.parametrize("resident", [0, 2, 5])
@pytest.mark.parametrize("num_planes", [4, 6, 8])
def test_every_width_is_read_from_where_its_planes_lie(weight, resident, num_planes):
    low = parts(weight)[2]
    x = torch.randn(3, IN, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = multiply(weight, x, num_planes, (low[:resident] if resident else None, low[resident:]))
    whole = ops.prepack_planes(weight.planes, weight.scale)
    how = {"group_size": 32, "zero_doubled": weight.zero_doubled, "num_planes": num_planes}
    assert found.equal(ops.bitplane_linear(x, *whole, OUT, **how))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"count": 2}, "num_planes is 8, the weight stores 5: choose 1 to 5"),
        ({"cut": 16}, r"fetched has shape \[5, .*\], expected"),
        ({"total_planes": 2}, "total_planes is 2, the tiles store 3"),
        ({"outputs_of_weight": 5}, "outputs_of_weight is 5"),
    ],
)
def test_planes_that_do_not_fit_are_named(weight, changed, said):
    low = parts(weight)[2][: changed.pop("count", None)]
    low = low[:, : low.shape[1] - changed.pop("cut", 0)].contiguous()
    with pytest.raises(ValueError, match=said):
        multiply(weight, torch.zeros(1, IN), 8, (None, low), **changed)


def test_tiles_of_the_cpu_have_no_planes_apart(weight):
    tiles, low = ops.prepack_planes(weight.planes[:TOP], weight.scale), parts(weight)[2]
    how = {"group_size": 32, "zero_doubled": weight.zero_doubled, "total_planes": 8, "num_planes": 8}
    with pytest.raises(ValueError, match="expected those of a GPU"):
        ops.bitplane_linear(torch.zeros(1, IN), *tiles, OUT, apart=(None, low), **how)
