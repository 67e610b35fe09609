"""The released algorithm, written anew from its description: what the detector's cost is compared with.

For each batch, tap and order: the activations to the power, an n x n product per image, its row sums, the
signed root; all statistics kept in lists on the CPU; minima and maxima per predicted class at the end.
"""

import torch
from torch import Tensor, nn

from gramwatch.taps import Taps, observe


def statistics(maps: Tensor, orders: range) -> Tensor:
    """`(N, orders, C)` by way of the whole Gram matrix."""
    found = []
    for order in orders:
        power = maps**order
        sums = torch.matmul(power, power.transpose(1, 2)).sum(2)
        found.append(sums.sign() * sums.abs() ** (1 / order))
    return torch.stack(found, 1)


def fit(model: nn.Module, taps: Taps, batches: list[Tensor], orders: range) -> list[dict[int, tuple]]:
    """Minima and maxima per tap and predicted class, from lists of everything."""
    kept: list[list[Tensor]] = [[] for _ in taps]
    predicted = []
    for batch in batches:
        logits = observe(
            model, taps, batch, lambda number, maps: kept[number].append(statistics(maps, orders).cpu())
        )
        predicted.append(logits.argmax(1).cpu())
    classes = torch.cat(predicted)
    bounds = []
    for each in kept:
        values = torch.cat(each)
        bounds.append(
            {int(c): (values[classes == c].amin(0), values[classes == c].amax(0)) for c in classes.unique()}
        )
    return bounds
