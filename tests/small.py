"""A small network of three classes, and its images."""

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 3


class SmallNet(nn.Module):
    """Convolutions, functional ReLUs in place and not, a hidden vector."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 5, 3, padding=1)
        self.conv2 = nn.Conv2d(5, 6, 3)
        self.hidden = nn.Linear(6, 4)
        self.head = nn.Linear(4, classes)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x), inplace=True)
        x = torch.tanh(self.hidden(x.mean((2, 3))))
        return self.head(x)


def images(count: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def made() -> SmallNet:
    torch.manual_seed(3)
    net = SmallNet()
    with torch.no_grad():
        net.head.weight *= 20  # so that all classes are predicted
        net.head.bias -= net(images(500, 9)).mean(0)
    return net.eval()
