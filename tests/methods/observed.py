"""Made-up features around one centre for each class."""

import numpy as np
import torch
from torch import Tensor, nn

from gramwatch.methods import KNN, NCI, Method, NNGuide, ViM
from gramwatch.observe.observation import Head, Observation

SMALL = {KNN: {"k": 7}, NNGuide: {"k": 4}, ViM: {"dimensions": 5}, NCI: {"alpha": 0.02}}
CLASSES, WIDTH = 5, 12


class Net(nn.Module):
    """Sixteen inputs, twelve features, five classes."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.body = nn.Linear(16, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


def observed(head: Head, n: int, seed: int, scale: float = 1.0, device: str = "cpu") -> Observation:
    """Features around one centre for each class, as a network would show them."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(77))
    labels = torch.arange(n) % CLASSES
    stretch = torch.linspace(0.3, 2, WIDTH)
    features = (centres[labels] + scale * stretch * torch.randn(n, WIDTH, generator=generator)).to(device)
    moved = Head(head.weight.to(device), head.bias.to(device))
    return Observation(moved(features), features, moved, labels=labels.to(device))


def fitted(method: type[Method], net: nn.Module, training: Observation, **settings: object) -> Method:
    detector = method(net, **{**SMALL.get(method, {}), **settings})
    detector.take(training)
    detector.finish()
    return detector


def double(tensor: Tensor | None) -> np.ndarray:
    assert tensor is not None
    return tensor.double().cpu().numpy()


def oracle_relative(training: Observation, new: Observation, shrinkage: float = 0.0) -> list[float]:
    x, y = double(training.features), double(training.labels).astype(int)
    means = {c: x[y == c].mean(0) for c in set(y.tolist())}
    s, s0, mean = np.zeros((x.shape[1],) * 2), np.zeros((x.shape[1],) * 2), x.mean(0)
    for row, c in zip(x, y, strict=True):
        s += np.outer(row - means[c], row - means[c]) / len(x)
        s0 += np.outer(row - mean, row - mean) / len(x)
    eye = np.eye(len(s)) / len(s)
    s, s0 = ((1 - shrinkage) * m + shrinkage * np.trace(m) * eye for m in (s, s0))
    p, p0 = np.linalg.inv(s), np.linalg.inv(s0)
    scores = []
    for h in double(new.features):
        nearest = min((h - m) @ p @ (h - m) for m in means.values())
        scores.append(float(nearest - (h - mean) @ p0 @ (h - mean)))
    return scores
