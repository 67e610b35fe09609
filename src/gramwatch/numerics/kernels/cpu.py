"""Gram statistics, deviations and bounds on the CPU: which compiled programs run, and on which threads."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gramwatch.numerics.kernels.compiling import compiled
from gramwatch.numerics.kernels.cpu_programs import DOUBLED, FEW, GROUP, IN_RANGE
from gramwatch.numerics.kernels.threads import in_parts

_ZERO = np.float32(0)


class _Plan(NamedTuple):
    """How a statistic of maps of one shape is computed."""

    function: Callable[..., None]
    transposed: bool
    """Whether maps are `(N, pixels, C)` in memory."""
    turn: bool
    """Whether the function takes the other layout, so that it turns each example."""
    groups: list[tuple[Any, np.ndarray, np.ndarray, np.ndarray]]
    """The orders that are summed at a time: `tens`, the orders, the rows of their sums, their places."""


@lru_cache(4096)
def _plan(statistic: str, channels: int, pixels: int, dense_channels: bool, orders: tuple[int, ...]) -> _Plan:
    """The program for maps of a shape. Vectors run along memory, unless that axis is too short."""
    of_pixels = dense_channels if min(channels, pixels) >= FEW else channels > pixels
    of_pixels = of_pixels and statistic != "off_diagonal"
    places = np.arange(len(orders))
    groups: list[tuple[Any, np.ndarray, np.ndarray, np.ndarray]] = []
    if statistic != "off_diagonal" and set(orders) <= set(DOUBLED):
        rows = np.array([DOUBLED.index(order) for order in orders], np.int64)
        groups.append((None, np.array(orders), rows, places))
    else:
        for ten in range(-(-max(orders) // GROUP)):
            here = places[(np.array(orders) - 1) // GROUP == ten]
            if here.size:
                chosen = np.array(orders)[here]
                groups.append(((0,) * (ten + 1), chosen, (chosen - 1) % GROUP, here))
    return _Plan(IN_RANGE[statistic, of_pixels], dense_channels, of_pixels != dense_channels, groups)


def compute(statistic: str, maps: Tensor, orders: tuple[int, ...], out: Tensor) -> None:
    """Write a statistic of maps `(N, C, M)` into `out` `(N, orders, C)`."""
    examples, channels, pixels = maps.shape
    plan = _plan(statistic, channels, pixels, maps.stride(1) == 1 and channels > 1, orders)
    x = (maps.transpose(1, 2) if plan.transposed else maps).detach().float().contiguous().numpy()
    # With an axis of stride 0 in front, dense and other outputs are of one type: one function is compiled.
    written = out.expand(2, *out.shape).numpy()
    for tens, group, rows, places in plan.groups:
        in_parts(plan.function, examples, x, plan.turn, tens, group, rows, places, written)


@compiled
def _deviations(statistics, predicted, minimum, maximum, starts, weights, out, start, stop):
    for n in range(start, stop):
        low, high, values = minimum[predicted[n]], maximum[predicted[n]], statistics[n]
        for tap in range(out.shape[1]):
            a, b = starts[tap], starts[tap + 1]
            out[n, tap] = _outside(values[a:b], low[a:b], high[a:b], weights[a:b])


@compiled
def _outside(values, low, high, weights):
    """Eq. 3-4 summed over the features of a tap. A value that is not finite makes the sum not finite."""
    total = _ZERO
    tiny = np.float32(1e-6)
    for f in range(values.size):
        below, above = low[f] - values[f], values[f] - high[f]
        # Divide first and choose after: without a branch, the compiler uses vectors.
        share_below, share_above = below / abs(low[f] + tiny), above / abs(high[f] + tiny)
        share_below = _ZERO if below <= _ZERO else share_below
        share_above = _ZERO if above <= _ZERO else share_above
        total += weights[f] * (share_below + share_above)
    return total


def deviations(
    statistics: Tensor, predicted: Tensor, minimum: Tensor, maximum: Tensor, starts: Tensor, weights: Tensor
) -> Tensor:
    """Deviations from a range, summed over the features of each tap, `(N, taps)`."""
    out = torch.empty(len(statistics), len(starts) - 1, dtype=torch.float32)
    arrays = (t.numpy() for t in (statistics, predicted, minimum, maximum, starts, weights, out))
    if len(statistics):
        in_parts(_deviations, len(statistics), *arrays)
    return out


@compiled
def _widen(statistics, predicted, minimum, maximum, start, stop):
    for n in range(statistics.shape[0]):
        if predicted[n] >= 0:
            low, high = minimum[predicted[n], start:stop], maximum[predicted[n], start:stop]
            values = statistics[n, start:stop]
            for f in range(values.size):
                low[f] = min(low[f], values[f])
                high[f] = max(high[f], values[f])


def widen(statistics: Tensor, predicted: Tensor, minimum: Tensor, maximum: Tensor) -> None:
    """Widen the range of each example's class in place. Examples of a negative class are left out."""
    arrays = (t.numpy() for t in (statistics, predicted, minimum, maximum))
    in_parts(_widen, statistics.shape[1], *arrays)
