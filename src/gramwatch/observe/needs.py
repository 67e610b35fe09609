"""Needs: what a detector asks of a pass."""

from dataclasses import dataclass

from gramwatch.numerics.samples import WHOLE, Sample
from gramwatch.numerics.statistics import distinct_orders
from gramwatch.watch import Tap

WIDEST_TRIANGLE = 1024
"""With `statistic="auto"`, vectors up to this many channels are judged by pairs, wider ones by row sums."""

Selection = str | tuple[str, ...]
"""A choice of taps, as for `find_taps`."""
Averaged = tuple[Selection, tuple[int | None, int | None], Sample]
"""Taps whose channel means are needed: a choice, the bounds of a slice of it, and the part that counts."""


@dataclass(frozen=True)
class Statistics:
    """Gram statistics that a detector needs: the taps, the statistic, the orders, the part that counts."""

    taps: Selection
    statistic: str
    orders: tuple[int, ...]
    sample: Sample = WHOLE
    """Which part of every tensor counts."""

    def at(self, tap: Tap) -> "StatisticsAtTap":
        """The statistics to compute at one tap."""
        statistic, channels = self.statistic, self.sample.count(tap.channels)
        if statistic == "auto":
            pairs = tap.is_vector and channels <= WIDEST_TRIANGLE
            statistic = "triangle" if pairs else "row_sums"
        features = channels * (channels + 1) // 2 if statistic == "triangle" else channels
        if statistic == "triangle" and tap.is_vector:
            orders = distinct_orders(self.orders)
            return StatisticsAtTap(statistic, tuple(orders), tuple(orders.values()), features)
        return StatisticsAtTap(statistic, self.orders, (1,) * len(self.orders), features)


@dataclass(frozen=True)
class StatisticsAtTap:
    """The statistics to compute at one tap.

    At a vector, several orders give the same statistics. One of them is computed, and its weight is their
    number.
    """

    statistic: str
    orders: tuple[int, ...]
    weights: tuple[int, ...]
    """How many of the detector's orders a computed order stands for, `(orders,)`."""
    features: int
    """The number of statistics of one order."""

    @property
    def size(self) -> int:
        """The number of statistics of all orders."""
        return len(self.orders) * self.features


@dataclass(frozen=True)
class Needs:
    """What a detector needs from a pass, besides the logits."""

    features: bool = False
    """Whether the detector needs the penultimate features and the linear layer that makes the logits."""
    features_at: str | None = None
    """The name of a tap. Its channel means are the features, in place of the input of that linear layer."""
    means: Selection | None = None
    """The taps whose channel means are needed."""
    mean_taps: tuple[int | None, int | None] = (None, None)
    """Which of these taps, as the bounds of a slice. If none is left, all of them."""
    mean_sample: Sample = WHOLE
    """Which part of every tensor these means are of."""
    statistics: Statistics | None = None
    """The Gram statistics that are needed."""
    image: bool = False
    """Whether the numbers of the input itself are needed: see `image_numbers`."""

    @property
    def averaged(self) -> Averaged | None:
        """The taps whose channel means are needed, and the part that counts; None if no means are needed."""
        return None if self.means is None else (self.means, self.mean_taps, self.mean_sample)

    @property
    def features_averaged(self) -> Averaged | None:
        """The tap whose channel means are the features; None if no tap was named for them."""
        return ((self.features_at,), (None, None), WHOLE) if self.features and self.features_at else None
