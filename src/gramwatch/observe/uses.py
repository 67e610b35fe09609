"""Uses: what is read of each watched tensor, and where it belongs."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from gramwatch.numerics.samples import Part, Sample
from gramwatch.observe.needs import Statistics
from gramwatch.watch import Taps
from gramwatch.watch.padding import Real, real_means

Mean = tuple[int, Sample]
"""The channel means of a tap: its number, and the part that they are of."""


class GramTable:
    """The layout of a table that holds the Gram statistics of several taps side by side."""

    def __init__(self, statistics: Statistics, taps: Taps) -> None:
        self.taps, self.sample = taps, statistics.sample
        self.at = [statistics.at(tap) for tap in taps]
        self.starts = [0, *accumulate(at_tap.size for at_tap in self.at)]

    def place(self, examples: int, number: int) -> "Place":
        """The place of one tap's statistics in a table of so many examples."""
        at = self.at[number]
        shape, strides = (examples, len(at.orders), at.features), (self.starts[-1], at.features, 1)
        return shape, strides, self.starts[number]


Place = tuple[tuple[int, int, int], tuple[int, int, int], int]
"""The arguments of `as_strided` for one tap's statistics, `(N, orders, features)`, in a table."""


class Read(NamedTuple):
    """The results of reading one pass."""

    logits: Tensor
    tables: list[Tensor]
    """Gram statistics, one table for each `GramTable`."""
    means: dict[Mean, Tensor]
    """Channel means by the number of the tap and by the part of it that they are of."""
    features: list[Tensor]
    """The input of the layer that makes the logits, if a detector needs it."""


class Step(NamedTuple):
    """What is read of a tap at once: statistics of one part, and channel means of this or of another part."""

    sample: Sample
    tables: list[tuple[int, int]]
    """The tables that get statistics, and the number of the tap in each."""
    averaged: list[Sample]
    """The samples whose channel means are needed. All of them are the same part."""


class Uses:
    """What is read of each tap of a plan, and where it belongs.

    Args:
        taps: the watched tensors.
        tables: the tables of Gram statistics.
        averaged: the samples whose channel means are needed, by the call of the tap.

    """

    def __init__(
        self, taps: Taps, tables: Sequence[GramTable], averaged: Mapping[int, Sequence[Sample]]
    ) -> None:
        self.taps, self.tables = taps, list(tables)
        self.columns = [{tap.call: column for column, tap in enumerate(table.taps)} for table in tables]
        """For each table, the number of a tap in it by the call of the tap."""
        self.averaged = [list(dict.fromkeys(averaged.get(tap.call, ()))) for tap in taps]
        """The samples whose channel means are needed, by the number of the tap."""
        self.places = [
            [(i, columns[tap.call]) for i, columns in enumerate(self.columns) if tap.call in columns]
            for tap in taps
        ]
        """The tables that hold statistics of a tap, and its number in each, by the number of the tap."""
        self.size = sum(table.starts[-1] for table in tables)
        """The number of statistics of one example."""

    def steps(self, number: int, shape: Sequence[int], axis: int) -> list[Step]:
        """What is read of a tap whose tensor has this shape. Different samples may be the same part."""
        steps: dict[Part, Step] = {}
        for i, column in self.places[number]:
            sample = self.tables[i].sample
            steps.setdefault(sample.of(shape, axis), Step(sample, [], [])).tables.append((i, column))
        for sample in self.averaged[number]:
            steps.setdefault(sample.of(shape, axis), Step(sample, [], [])).averaged.append(sample)
        return _paired(list(steps.values()))

    def read_real(
        self,
        number: int,
        x: Tensor,
        axis: int,
        real: Real,
        write: Callable[[int, int, Tensor], None],
        means: dict[Mean, Tensor],
    ) -> None:
        """Read a tap without its padding. `write` computes a statistic of the tap, of a table, from maps."""
        parts: dict[Hashable, tuple[Tensor, Tensor]] = {}

        def part(sample: Sample) -> tuple[Tensor, Tensor]:
            """The part that counts, and its pixels. Different samples of short texts are the same part."""
            key = real.whole(sample.pixels), sample.of(x.shape, axis).step
            if key not in parts:
                parts[key] = real.part(x, axis, sample)
            return parts[key]

        for i, column in self.places[number]:
            write(i, column, part(self.tables[i].sample)[0])
        for sample in self.averaged[number]:
            means[number, sample] = real_means(*part(sample))


def _paired(steps: list[Step]) -> list[Step]:
    """The steps, with statistics of one part and means of another in one: a GPU launches them together."""
    statistics = next((step for step in steps if step.tables and not step.averaged), None)
    means = next((step for step in steps if not step.tables), None)
    if statistics is None or means is None:
        return steps
    rest = [step for step in steps if step is not statistics and step is not means]
    return [statistics._replace(averaged=means.averaged), *rest]
