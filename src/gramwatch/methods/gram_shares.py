"""What channels add to the deviation of a tap: the explanation of Gram below a tap."""

from typing import NamedTuple

import torch
from torch import Tensor

from gramwatch.detect.parts import Shares
from gramwatch.numerics.bounds import Bounds, MinMax
from gramwatch.numerics.deviation import outside_range, squared_distance
from gramwatch.observe.needs import StatisticsAtTap


class AtTap(NamedTuple):
    """The statistics of one tap, `(N, orders, features)` each."""

    value: Tensor
    low: Tensor
    high: Tensor
    outside: Tensor
    """The deviation of each statistic; the sum is delta_l."""


def at_tap(
    statistics: Tensor, bounds: Bounds, compared: tuple[Tensor, ...], weights: Tensor, asked: StatisticsAtTap
) -> AtTap:
    """The statistics of some examples at one tap, and what they were compared with.

    Args:
        statistics: of the tap, `(N, orders x features)`.
        bounds: the bounds of all taps.
        compared: what `bounds` compares the statistics with, a row for each example.
        weights: how many orders each statistic stands for.
        asked: the statistics that are computed at the tap.

    """
    low, high = compared
    if isinstance(bounds, MinMax):
        outside = outside_range(statistics, low, high)
    else:
        outside, high = squared_distance(statistics, low, high), low
    shape = (-1, len(asked.orders), asked.features)
    return AtTap(*(t.reshape(shape) for t in (statistics, low, high, outside * weights)))


def shares(at: AtTap, asked: StatisticsAtTap, channels: int, examples: int) -> Shares:
    """The deviations of one example at a tap, by order and by channel, or by pair of channels.

    Args:
        at: the statistics of the example.
        asked: the statistics that are computed at the tap.
        channels: the number of channels that count.
        examples: the number of training examples behind the bounds.

    """
    numbers = torch.arange(channels)
    if asked.statistic == "triangle":
        numbers = torch.triu_indices(channels, channels).T
    value, low, high, outside = (t.flatten().cpu() for t in at)
    return Shares(
        amount=outside.double(),
        channel=numbers.repeat(len(asked.orders), *(1 for _ in numbers.shape[1:])),
        of=[f"order {order}" for order in asked.orders for _ in range(asked.features)],
        value=value,
        low=low,
        high=high,
        examples=examples,
    )
