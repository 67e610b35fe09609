"""NCI: the weight of the norm."""

import pytest
import torch

from gramwatch.methods import NCI
from gramwatch.observe.observation import Observation
from tests.methods.observed import Net, fitted


def test_nci_alpha(net: Net, training: Observation, new: Observation) -> None:
    assert NCI(net).alpha == 0.0001
    with pytest.raises(ValueError, match="negative"):
        NCI(net, alpha=-1.0)
    assert new.features is not None
    plain = fitted(NCI, net, training, alpha=0.0).judged(new)
    more = fitted(NCI, net, training, alpha=0.5).judged(new)
    torch.testing.assert_close(plain - more, 0.5 * new.features.double().abs().sum(1))
