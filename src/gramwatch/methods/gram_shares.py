"""What channels add to the deviation of a tap: the explanation of Gram below a tap."""

import torch
from torch import Tensor

from gramwatch.detect.parts import Shares
from gramwatch.numerics.bounds import Bounds, MinMax
from gramwatch.numerics.deviation import outside_range, squared_distance
from gramwatch.observe.needs import StatisticsAtTap


def shares(
    statistics: Tensor,
    bounds: Bounds,
    compared: tuple[Tensor, ...],
    weights: Tensor,
    asked: StatisticsAtTap,
    channels: int,
    examples: int,
) -> Shares:
    """The deviations of one example at a tap, by order and by channel, or by pair of channels.

    Args:
        statistics: of the example at the tap, `(1, orders x features)`.
        bounds: the bounds of all taps.
        compared: what `bounds` compares the statistics with, in the same shape.
        weights: how many orders each statistic stands for.
        asked: the statistics that are computed at the tap.
        channels: the number of channels that count.
        examples: the number of training examples behind the bounds.

    """
    low, high = compared
    if isinstance(bounds, MinMax):
        outside = outside_range(statistics, low, high)
    else:
        outside, high = squared_distance(statistics, low, high), low
    numbers = torch.arange(channels)
    if asked.statistic == "triangle":
        numbers = torch.triu_indices(channels, channels).T
    return Shares(
        amount=(outside * weights).flatten().double().cpu(),
        channel=numbers.repeat(len(asked.orders), *(1 for _ in numbers.shape[1:])),
        of=[f"order {order}" for order in asked.orders for _ in range(asked.features)],
        value=statistics.flatten().cpu(),
        low=low.flatten().cpu(),
        high=high.flatten().cpu(),
        examples=examples,
    )
