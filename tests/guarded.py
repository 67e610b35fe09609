"""A small network of four classes to guard, and distances to its classes written out in float64."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gramwatch.guard import rehearsal
from gramwatch.methods.profile import RIDGE

CLASSES = 4
OUTLIERS = 160
"""The most outliers of a rehearsal in most tests: ten of each family."""
BUDGET = rehearsal.BUDGET
"""The most outliers of a rehearsal of users."""


@contextmanager
def rehearsing(outliers: int = BUDGET) -> Iterator[None]:
    """Guards that are calibrated here rehearse with at most so many outliers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rehearsal, "BUDGET", outliers)
        yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 5, 3, padding=1), nn.Conv2d(5, 6, 3)
        self.head = nn.Linear(6, CLASSES)

    def features(self, x):
        return F.relu(self.conv2(F.relu(self.conv1(x)))).mean((2, 3))

    def forward(self, x):
        return self.head(self.features(x))


def images(count: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(count, 1, 7, 7, generator=torch.Generator().manual_seed(seed))


def made(kind: type[Net] = Net) -> Net:
    torch.manual_seed(5)
    net = kind()
    with torch.no_grad():
        net.head.weight *= 30  # so that all classes are predicted
        net.head.bias -= F.linear(net.features(images(500, 9)), net.head.weight, net.head.bias).mean(0)
    return net.eval()


def stage_ends(net: Net, x: torch.Tensor) -> list[np.ndarray]:
    """The channel means after each of the two sizes there are, at length one, in float64."""
    with torch.no_grad():
        first = F.relu(net.conv1(x))
        means = [first.mean((2, 3)), F.relu(net.conv2(first)).mean((2, 3))]
    return [np.stack([f / np.linalg.norm(f) for f in ends.double().numpy()]) for ends in means]


def fitted_classes(net: Net, train: torch.Tensor) -> list[tuple[dict[int, np.ndarray], np.ndarray]]:
    """The mean of each predicted class, and the covariance about these, at each stage's end."""
    with torch.no_grad():
        predicted = net(train).argmax(1).numpy()
    classes = []
    for u in stage_ends(net, train):
        centres = {int(c): u[predicted == c].mean(0) for c in np.unique(predicted)}
        residuals = np.stack([row - centres[int(c)] for row, c in zip(u, predicted, strict=True)])
        classes.append((centres, residuals.T @ residuals / len(u)))
    return classes


def distances(net: Net, classes: list, x: torch.Tensor) -> list[list[np.ndarray]]:
    """Of each example, at each stage's end: the distances to all classes, and last that to their middle."""
    result = []
    for example in zip(*stage_ends(net, x), strict=True):
        result.append([])
        for u, (centres, covariance) in zip(example, classes, strict=True):
            inverse = np.linalg.inv(covariance)
            means = [*centres.values(), sum(centres.values()) / len(centres)]
            result[-1].append(np.array([np.sqrt((u - m) @ inverse @ (u - m)) for m in means]))
    return result


def early_mahalanobis(net: Net, classes: list, x: torch.Tensor) -> np.ndarray:
    """The first of the two stages."""
    width = len(classes[0][1])
    return np.array([of_stage[0][:-1].min() / np.sqrt(width) for of_stage in distances(net, classes, x)])


def class_ratio(net: Net, classes: list, x: torch.Tensor) -> np.ndarray:
    return np.array([of_stage[-1][:-1].min() / of_stage[-1][-1] for of_stage in distances(net, classes, x)])


def mahalanobis_pp(net: Net, classes: list, x: torch.Tensor) -> np.ndarray:
    """The last stage's end is the input of the linear layer."""
    return np.array([row[-1][:-1].min() ** 2 for row in distances(net, classes, x)])


def knn(net: Net, train: torch.Tensor, x: torch.Tensor, k: int = 10) -> np.ndarray:
    bank, queries = stage_ends(net, train)[-1], stage_ends(net, x)[-1]
    return np.array([np.sort(np.linalg.norm(bank - u, axis=1))[k - 1] for u in queries])


def channel_means(net: Net, x: torch.Tensor) -> list[np.ndarray]:
    """The channel means at all four tensors of the network, in float64."""
    with torch.no_grad():
        first = net.conv1(x)
        second = net.conv2(F.relu(first))
    return [maps.mean((2, 3)).double().numpy() for maps in (first, F.relu(first), second, F.relu(second))]


def profiles(net: Net, train: torch.Tensor, x: torch.Tensor) -> np.ndarray:
    """The logarithms of distance and length at each tensor, example by example."""
    numbers: list[list[float]] = [[] for _ in x]
    for of_train, of_x in zip(channel_means(net, train), channel_means(net, x), strict=True):
        units = np.stack([f / np.linalg.norm(f) for f in of_train])
        mean = units.mean(0)
        covariance = sum(np.outer(u - mean, u - mean) for u in units) / len(units)
        values, vectors = np.linalg.eigh(covariance)
        keep = values > 1e-12 * values.max()
        inverse = (vectors[:, keep] / values[keep]) @ vectors[:, keep].T
        for row, f in zip(numbers, of_x, strict=True):
            away = f / np.linalg.norm(f) - mean
            row += [np.log(away @ inverse @ away / keep.sum()), np.log(f @ f)]
    return np.array(numbers)


def profile_distance(fitting: np.ndarray, profile: np.ndarray) -> float:
    """Of one profile from those of calibration examples."""
    mean, spread = fitting.mean(0), fitting.std(0)
    standardised = [(row - mean) / spread for row in fitting]
    covariance = sum(np.outer(z, z) for z in standardised) / len(fitting) + RIDGE * np.eye(len(mean))
    z = (profile - mean) / spread
    return float(np.sqrt(z @ np.linalg.inv(covariance) @ z / len(z)))


def largest_share(alpha: float, ranking: int, fresh: int, repeats: int) -> float:
    """Alpha plus three standard deviations of the mean share over so many calibrations.

    The rate of one calibration with `ranking` scores follows a beta distribution, and the share of `fresh`
    examples a beta-binomial one.
    """
    k, n = int(alpha * (ranking + 1)), ranking + 1
    rate = k / n
    variance = rate * (1 - rate) / (n + 1) * (1 - 1 / fresh) + rate * (1 - rate) / fresh
    return alpha + 3 * (variance / repeats) ** 0.5
