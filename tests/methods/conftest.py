"""Features as a network would show them, for the methods that look at features."""

import pytest
import torch

from gramwatch.observe.observation import Head, Observation
from tests.methods.observed import CLASSES, WIDTH, Net, observed


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def head() -> Head:
    generator = torch.Generator().manual_seed(3)
    return Head(torch.randn(CLASSES, WIDTH, generator=generator), torch.randn(CLASSES, generator=generator))


@pytest.fixture
def training(head: Head) -> Observation:
    return observed(head, 90, 0)


@pytest.fixture
def new(head: Head) -> Observation:
    return observed(head, 25, 1, scale=2.0)
