"""The released algorithm, written anew from its description: what the detector's cost is compared with.

For each batch, tap and order: the activations to the power, an n x n product per image, its row sums, the
signed root; all statistics kept in lists on the CPU; minima and maxima per predicted class at the end.
Scoring computes the same lists, then each class's deviations on the CPU.
"""

import torch
from torch import Tensor, nn

from gramwatch.watch import Taps, observe

Ranges = list[dict[int, tuple[Tensor, Tensor]]]
"""Minima and maxima, `(orders, C)` each, by tap and predicted class."""


def statistics(maps: Tensor, orders: range) -> Tensor:
    """`(N, orders, C)` by way of the whole Gram matrix."""
    parts = []
    for order in orders:
        power = maps**order
        sums = torch.matmul(power, power.transpose(1, 2)).sum(2)
        parts.append(sums.sign() * sums.abs() ** (1 / order))
    return torch.stack(parts, 1)


def fit(model: nn.Module, taps: Taps, batches: list[Tensor], orders: range) -> Ranges:
    """Minima and maxima per tap and predicted class, from lists of everything."""
    kept, classes = _collect(model, taps, batches, orders)
    return [
        {int(c): (values[classes == c].amin(0), values[classes == c].amax(0)) for c in classes.unique()}
        for values in kept
    ]


def score(model: nn.Module, taps: Taps, batch: Tensor, orders: range, bounds: Ranges) -> Tensor:
    """Each tap's deviation, `(N, taps)`, class by class. Every predicted class must have bounds."""
    kept, classes = _collect(model, taps, [batch], orders)
    deviations = torch.zeros(len(classes), len(kept))
    for number, values in enumerate(kept):
        for c in classes.unique():
            of_class = values[classes == c]
            minimum, maximum = bounds[number][int(c)]
            below = (minimum - of_class).relu() / (minimum + 1e-6).abs()
            above = (of_class - maximum).relu() / (maximum + 1e-6).abs()
            deviations[classes == c, number] = (below + above).sum((1, 2))
    return deviations


def _collect(
    model: nn.Module, taps: Taps, batches: list[Tensor], orders: range
) -> tuple[list[Tensor], Tensor]:
    """All statistics of each tap, and the predicted classes, on the CPU."""
    place = next(model.parameters()).device
    kept: list[list[Tensor]] = [[] for _ in taps]
    predicted = []
    for batch in batches:

        def receive(number: int, maps: Tensor) -> None:
            kept[number].append(statistics(maps, orders).cpu())

        predicted.append(observe(model, taps, batch.to(place), receive).argmax(1).cpu())
    return [torch.cat(parts) for parts in kept], torch.cat(predicted)
