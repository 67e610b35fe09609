"""A small network, and a guard of it that is fitted and calibrated on what a test feeds it with."""

import warnings

import torch
import torch.nn.functional as F
from torch import nn

from gramwatch import GramwatchWarning, Guard

CLASSES = 3


class Plain(nn.Module):
    """A small classifier; what it takes and returns is up to its subclasses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(1, 6, 3)
        self.hidden = nn.Linear(6, 5)
        self.head = nn.Linear(5, CLASSES)
        with torch.no_grad():
            self.head.weight *= 20
            self.head.bias -= self.head(self.features(images(500, 9))).mean(0)  # all classes are predicted
        self.eval()

    def features(self, x):
        return torch.tanh(self.hidden(F.relu(self.conv(x)).mean((2, 3))))

    def forward(self, x):
        return self.head(self.features(x))


def images(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 1, 6, 6, generator=torch.Generator().manual_seed(seed))


def quietly(function, *args, **kwargs):
    """Few training examples of some classes are not what these tests are about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*were predicted for fewer than", GramwatchWarning)
        return function(*args, **kwargs)


def guarded(net: nn.Module, fit, calibrate, **options) -> Guard:
    guard = Guard(net, orders=(1, 2), **options)
    quietly(guard.fit, fit, progress=False)
    return guard.calibrate(calibrate, progress=False)
