"""A small network whose methods are compared, and sets to compare them on."""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.hidden, self.head = nn.Conv2d(1, 6, 3), nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(F.relu(self.hidden(F.relu(self.conv(x)).mean((2, 3)))))


def training():
    x = torch.randn(200, 1, 6, 6)
    return [(part, torch.zeros(len(part), dtype=torch.long)) for part in x.split(50)]


def made():
    net = Net().eval()
    with torch.no_grad():
        net.head.weight *= 20
        net.head.bias -= net(torch.randn(500, 1, 6, 6)).mean(0)
    return net


def outliers():
    return {"noise": [3 * torch.randn(40, 1, 6, 6)], "flat": [torch.rand(30, 1, 1, 1).expand(30, 1, 6, 6)]}
