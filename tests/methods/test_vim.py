"""ViM: how many dimensions it leaves out."""

import pytest
import torch

from gramwatch.errors import InputError
from gramwatch.methods import ViM
from gramwatch.methods.vim import default_dimensions
from gramwatch.observe.observation import Head, Observation
from tests.methods.observed import WIDTH, Net, fitted


@pytest.mark.parametrize(
    ("width", "dimensions"), [(4096, 1000), (2048, 1000), (2047, 512), (768, 512), (767, 383), (342, 171)]
)
def test_default_dimensions(width: int, dimensions: int) -> None:
    assert default_dimensions(width) == dimensions


def test_vim_takes_half_by_default(net: Net, training: Observation, new: Observation, head: Head) -> None:
    half = fitted(ViM, net, training, dimensions=WIDTH // 2).judged(new)
    assert torch.equal(fitted(ViM, net, training, dimensions=None).judged(new), half)


def test_vim_needs_something_outside(net: Net, training: Observation) -> None:
    with pytest.raises(InputError, match="12 dimensions leaves nothing outside it of 12 features"):
        fitted(ViM, net, training, dimensions=12)
    with pytest.raises(InputError, match=r"4 training example\(s\) lie wholly inside .* 5 dimensions"):
        fitted(ViM, net, training[:4], dimensions=5)
    with pytest.raises(ValueError, match="at least 1"):
        ViM(net, dimensions=0)
