"""Small networks and images to train on."""

import torch
import torch.nn.functional as F
from torch import nn

from gramwatch_lab.training import train


def small_mlp():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    )


LOGITS = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
STRANGE = torch.randn(12, 4, generator=torch.Generator().manual_seed(4))
LABELS = torch.tensor([0, 3, 1, 2, 2, 0])


def loss_of(objective):
    """The loss when the network is the identity."""
    value, logits = objective.loss(nn.Identity(), LOGITS, LABELS, STRANGE)
    assert torch.equal(logits, LOGITS)
    return value.double()


def whole(shape, seed=0):
    return torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


class Small(nn.Module):
    """With batch normalisation and dropout, whose states and chance a resumed training must share."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(F.dropout(F.relu(self.bn(self.conv(x))).mean((2, 3)), 0.3, self.training))


def run(objective, path=None, net=None, **options):
    torch.manual_seed(5)
    net = Small() if net is None else net
    settings = {
        **{"mean": (0.5,) * 3, "std": (0.25,) * 3, "epochs": 4, "batch_size": 16, "augment": True, "seed": 2},
        **options,
    }
    if objective.needs_outliers:
        settings.setdefault("outliers", whole((30, 3, 8, 8), 7))
    labels = torch.arange(50) % 4
    test = whole((21, 3, 8, 8), 8), torch.arange(21) % 4
    history = train(
        net, whole((50, 3, 8, 8)), labels, objective, test=test, checkpoint=path, progress=False, **settings
    )
    return net, history
