"""A small network with two taps, and its images."""

from typing import Any

import torch
from torch import Tensor, nn

from gramwatch.methods import Mahalanobis

CLASSES = 3


class Net(nn.Module):
    """Images of 6 x 6 and two taps, one followed by an activation in place and one by a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3)
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.norm(self.first(x)))
        return self.fc(torch.sigmoid(self.second(x)).mean((2, 3)))


TAPS = ["first", "second"]


def images(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def labelled(count: int, batch: int = 16, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    labels = torch.arange(count) % CLASSES
    pictures = images(count, seed) + labels[:, None, None, None]
    return list(zip(pictures.split(batch), labels.split(batch), strict=True))


def mahalanobis(net: nn.Module, **choices: Any) -> Mahalanobis:
    detector = Mahalanobis(net, **{"taps": TAPS, **choices})
    detector.fit(labelled(90), progress=False)
    return detector


def made() -> Net:
    net = Net().eval()
    with torch.no_grad():
        net.fc.weight.mul_(20)
        net.fc.bias.sub_(net(torch.cat([x for x, _ in labelled(90)])).mean(0))  # so that all classes occur
    return net
