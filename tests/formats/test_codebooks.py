"""Is a codebook's nearest level found for every field, and a fitted codebook never worse than those it starts from?"""

import pytest
import torch

from hf_mlspec.formats import nested
from hf_mlspec.formats.nested import codebooks


def relative_error(weight: torch.Tensor, codebook: torch.Tensor) -> float:
    parts = nested.split(weight, codebook)
    draft = nested.dequantize_draft(parts.packed, parts.scale, codebook, torch.float64)
    return float(((draft - weight.double()).square().sum() / weight.double().square().sum()).sqrt())


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", codebooks.CODEBOOKS)
def test_known_codebooks_are_valid(name):
    codebook = codebooks.codebook_of(name)
    codebooks.require_codebook(codebook)
    assert codebook.tolist() == list(codebooks.CODEBOOKS[name])


def test_fields_are_worth_their_units():
    values = codebooks.field_values()
    assert torch.equal(values, values.sort().values)
    assert values[[0, 1, 127, 128, 31 << 7, 4095]].tolist() == [0, 2.0**-32, 127 * 2.0**-32, 2.0**-25, 32, 63.75]


def test_ties_go_to_the_lower_level():
    index, values = codebooks.indices_of_fields(codebooks.codebook_of("mxfp4")), codebooks.field_values().tolist()
    ties = {2.0: 0, 6.0: 1, 10.0: 2, 14.0: 3, 20.0: 4, 28.0: 5, 40.0: 6}
    assert [int(index[values.index(tie)]) for tie in ties] == list(ties.values())
    assert [int(index[values.index(tie) + 1]) for tie in ties] == [lower + 1 for lower in ties.values()]


@pytest.mark.parametrize("sigma", [0.02, 0.027, 0.035, 1.0])
def test_lloyd_max_beats_mxfp4_on_gaussian_weights(sigma):
    weight = (seeded(256, 512) * sigma).bfloat16()
    lloyd_max, mxfp4 = (relative_error(weight, codebooks.codebook_of(name)) for name in ("lloyd_max", "mxfp4"))
    assert lloyd_max < 0.103
    assert lloyd_max < 0.92 * mxfp4


@pytest.mark.parametrize("shape", ["gauss", "laplace", "uniform", "two levels", "constant", "scales apart"])
def test_a_fitted_codebook_is_never_worse(shape):
    noise = seeded(64, 256, seed=3)
    weight = {
        "gauss": noise * 0.03,
        "laplace": noise * noise.abs(),
        "uniform": torch.rand(64, 256, generator=torch.Generator().manual_seed(1)) - 0.5,
        "two levels": noise.sign() * 0.25 + (noise > 1) * 0.5,
        "constant": torch.full((64, 256), 0.7),
        "scales apart": noise * torch.logspace(-6, 6, 64)[:, None],
    }[shape].bfloat16()
    fitted = codebooks.fit(nested.count_fields(weight))
    codebooks.require_codebook(fitted)
    assert torch.equal(fitted, codebooks.fit(nested.count_fields(weight)))
    best = min(relative_error(weight, codebooks.codebook_of(name)) for name in codebooks.CODEBOOKS)
    assert relative_error(weight, fitted) <= best * (1 + 1e-9)


def test_no_other_codebook_has_less_error():
    """Few rows whose errors are large and many of another shape whose are small: nothing near is better, nothing drawn
    at random, and the few decide."""
    large = torch.rand(16, 256, generator=torch.Generator().manual_seed(1)) - 0.5
    small = seeded(240, 256, seed=2) ** 3 * 0.002
    weight = torch.cat([large, small]).bfloat16()
    fitted = codebooks.fit(nested.count_fields(weight))
    least = relative_error(weight, fitted)
    generator = torch.Generator().manual_seed(0)
    others = [(torch.randperm(64, generator=generator)[:8]).sort().values for _ in range(60)]
    others += [fitted.long() + step * torch.eye(8, dtype=torch.long)[i] for i in range(8) for step in (-1, 1)]
    others = [other for other in others if len(other.unique()) == 8 and 0 <= int(other.min()) <= int(other.max()) < 64]
    assert len(others) > 60
    assert all(relative_error(weight, other.to(torch.uint8)) >= least for other in others)
    alone = codebooks.fit(nested.count_fields(weight[:16]))
    assert (fitted.int() - alone.int()).abs().max() <= 1
    assert (fitted.int() - codebooks.fit(nested.count_fields(weight[16:])).int()).abs().max() > 2


def test_a_fitted_codebook_learns_the_levels_there_are():
    """Weights of eight magnitudes: the codebook becomes those, and the draft the weight."""
    units = torch.tensor([1.0, 4, 9, 13, 21, 33, 47, 60])
    weight = (units[torch.randint(8, (32, 256), generator=torch.Generator().manual_seed(0))] / 64).bfloat16()
    weight[:, ::32] = 60 / 64
    fitted = codebooks.fit(nested.count_fields(weight))
    assert fitted.tolist() == units.int().tolist()
    assert relative_error(weight, fitted) == 0


def test_counts_are_of_every_weight():
    weight = torch.tensor([[0.75, -0.3125, *[0.0] * 30]]).bfloat16()
    counts = nested.count_fields(weight)
    assert counts.shape == (256, 4096)
    assert counts.nonzero().tolist() == [[126, 0], [126, 3872], [126, 4032]]
    assert counts.sum() == 32
    assert codebooks.fit(nested.count_fields(torch.zeros(0, 32, dtype=torch.bfloat16))).shape == (8,)


@pytest.mark.parametrize(
    ("levels", "error", "message"),
    [
        (torch.arange(8), TypeError, r"x is torch\.int64"),
        (torch.arange(7, dtype=torch.uint8), ValueError, r"x has shape \[7\], expected \[8\]"),
        (torch.tensor([0, 1, 2, 3, 4, 5, 6, 64], dtype=torch.uint8), ValueError, "64.*0..63"),
        (torch.tensor([0, 1, 2, 2, 4, 5, 6, 7], dtype=torch.uint8), ValueError, "must ascend"),
        (torch.tensor([1, 0, 2, 3, 4, 5, 6, 7], dtype=torch.uint8), ValueError, "must ascend"),
    ],
)
def test_what_is_no_codebook_is_named(levels, error, message):
    with pytest.raises(error, match=message):
        codebooks.require_codebook(levels, "x")


def test_unknown_names_are_named():
    with pytest.raises(ValueError, match="unknown codebook 'nf4': choose one of lloyd_max, mxfp4, fitted"):
        codebooks.require_codebook_name("nf4")
