"""The PyTorch form of the statistics and deviations is traceable by `torch.export`."""

import pytest
import torch
from torch import nn

from gramwatch.bounds import MinMax
from gramwatch.deviation import outside_range
from gramwatch.statistics import STATISTICS


class Guarded(nn.Module):
    """A convolution with its statistic and its deviation: all of the method that runs per input."""

    def __init__(self, statistic: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.statistic = STATISTICS[statistic]
        bounds = MinMax(2, tuple(self.statistic(self.conv(torch.randn(1, 3, 8, 8)), (1, 2, 5), 1).shape[1:]))
        for cls in (0, 1):
            train = self.statistic(self.conv(torch.randn(20, 3, 8, 8)), (1, 2, 5), 1).detach()
            bounds.update(train, torch.full((20,), cls))
        self.register_buffer("minimum", bounds.state()["minimum"])
        self.register_buffer("maximum", bounds.state()["maximum"])

    def forward(self, x):
        maps = self.conv(x)
        predicted = maps.mean((2, 3))[:, :2].argmax(1)
        statistics = self.statistic(maps, (1, 2, 5), 1)
        return outside_range(statistics, self.minimum[predicted], self.maximum[predicted]).sum((1, 2))


@pytest.mark.parametrize("statistic", ["row_sums", "diagonal", "off_diagonal"])
def test_exports_with_any_batch_size(statistic):
    module = Guarded(statistic).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(module, (torch.randn(4, 3, 8, 8),), dynamic_shapes=({0: batch},))
    x = 3 * torch.randn(7, 3, 8, 8)
    torch.testing.assert_close(program.module()(x), module(x))
    assert (module(x) > 0).any()


@pytest.mark.parametrize("statistic", ["triangle", "row_sums_of_roots"])
def test_exports_with_a_fixed_batch_size(statistic):
    module = Guarded(statistic).eval()
    x = 3 * torch.randn(4, 3, 8, 8)
    program = torch.export.export(module, (x,))
    torch.testing.assert_close(program.module()(x), module(x))
    assert (module(x) > 0).any()
