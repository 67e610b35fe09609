"""The real places of a batch: what counts of a tensor, compared with the same tensor without padding."""

import numpy as np
import pytest
import torch

from gramwatch.numerics import kernels
from gramwatch.numerics.samples import WHOLE, Sample, grid_of
from gramwatch.watch.padding import Real, most_along, real_means
from tests import oracle

LENGTH, CHANNELS = 30, 6
MANY = 64


def mask_of(*counts: int, how: str = "right") -> torch.Tensor:
    """A mask with so many real places in each row: at the beginning, at the end, or anywhere."""
    mask = torch.arange(LENGTH) < torch.tensor(counts).unsqueeze(1)
    if how == "right":
        return mask
    if how == "left":
        return mask.flip(1)
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    return mask[:, order]


@pytest.mark.parametrize("pixels", [None, 1, 4, 7, 30])
@pytest.mark.parametrize("how", ["right", "left", "anywhere"])
@pytest.mark.parametrize(("layout", "channels"), [("N L C", None), ("N C L", 32), ("N L 1 C", 32)])
def test_the_part_that_counts_is_that_of_the_tensor_without_padding(layout, channels, how, pixels):
    mask = mask_of(1, 5, 8, 17, 23, LENGTH, how=how)
    tokens = torch.randn(len(mask), LENGTH, MANY)
    tokens[~mask] = torch.nan  # whatever a network makes of padding
    x, axis = {
        "N L C": (tokens, 2),
        "N C L": (tokens.transpose(1, 2), 1),
        "N L 1 C": (tokens.unsqueeze(2), 3),
    }[layout]
    real = Real(mask)
    assert real.fits(x.shape, axis)
    sample = Sample(pixels, channels)
    part, count = real.part(x, axis, sample)
    means = real_means(part, count)
    for row, keep in enumerate(mask):
        alone = tokens[row : row + 1, keep]
        expected = sample.of(alone.shape, 2).maps(alone)
        assert count[row] == expected.shape[2]
        assert torch.equal(part[row : row + 1, :, : count[row]], expected)
        assert not part[row, :, count[row] :].any()
        torch.testing.assert_close(means[row], expected[0].mean(1))


@pytest.mark.parametrize(
    "statistic", ["row_sums", "row_sums_of_roots", "diagonal", "off_diagonal", "triangle"]
)
def test_statistics_are_those_of_the_paper_on_the_tokens_without_padding(statistic):
    mask, orders = mask_of(3, 9, LENGTH, 14, how="anywhere"), (1, 2, 4, 8)
    tokens = torch.randn(len(mask), LENGTH, CHANNELS)
    part, _ = Real(mask).part(tokens, 2, WHOLE)
    features = CHANNELS * (CHANNELS + 1) // 2 if statistic == "triangle" else CHANNELS
    out = torch.empty(len(mask), len(orders), features)
    kernels.compute(statistic, part, orders, out)
    for row, keep in enumerate(mask):
        for number, order in enumerate(orders):
            alone = tokens[row, keep].T.numpy()
            np.testing.assert_allclose(
                out[row, number], oracle.stat(alone, order, statistic), rtol=1e-3, atol=1e-4
            )


def test_a_sample_takes_at_most_so_many_along_one_axis():
    for pixels in range(1, 30):
        most = most_along(pixels)
        for length in range(1, 200):
            grid = grid_of((1, 4, length), 1, pixels)
            first, step = (0, 1) if grid is None else grid[2]
            assert (grid is None) == (length <= most)
            assert len(range(first, length, step)) <= most


def test_only_tensors_with_one_pixel_for_each_place_fit():
    real = Real(mask_of(3, 4))
    assert real.fits((2, LENGTH, 7), 2)
    assert real.fits((2, 5, 6, 7), 3)
    assert not real.fits((2, 7), 1)
    assert not real.fits((2, LENGTH + 1, 7), 2)
    assert not real.fits((2, 2, LENGTH, 7), 3)


def test_an_example_that_is_nothing_but_padding_has_zeros():
    part, count = Real(mask_of(0, 2)).part(torch.randn(2, LENGTH, CHANNELS), 2, Sample(4))
    assert not part[0].any()
    assert count.tolist() == [[0], [2]]
    assert not real_means(part, count)[0].any()
