"""Uses: what is read of each watched tensor, and where it belongs.

A `Pass` runs a network as it is: tensors are read as soon as the network makes them.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gramwatch.numerics import kernels
from gramwatch.numerics.kernels import Reading, Scratch, form_of, reading
from gramwatch.numerics.samples import Part, Sample
from gramwatch.observe.needs import Statistics
from gramwatch.watch import Taps
from gramwatch.watch.padding import Real, real_means

MOST_READERS = 4096
"""The most taps and forms of tensors whose readers a plan keeps."""
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


class Reader(NamedTuple):
    """Reads the tensors of one tap that have one form. It is prepared at the first of them."""

    as_it_is: bool
    """Whether the examples are the first axis of the tensor."""
    steps: list[tuple[Reading, list[tuple[int, Place]], list[Mean]]]
    """What is read at once: the prepared reading, the places of its statistics in tables, and the keys of its
    channel means."""


Readers = dict[tuple[Any, ...], Reader]
"""The readers of a plan, by the number of the tap, the number of examples and the form of the tensor."""


@dataclass
class Pass:
    """One pass: it receives the tensors that the network makes, and keeps what is read of them."""

    uses: Uses
    readers: Readers
    """The readers of earlier passes."""
    examples: int
    """The number of examples in the batch."""
    real: Real | None
    """The places that are not padding, if the batch has a mask."""
    tables: list[Tensor] = field(default_factory=list)
    means: dict[Mean, Tensor] = field(default_factory=dict)
    _scratch: Scratch = field(default_factory=Scratch)

    def receive(self, number: int, tensor: Tensor) -> None:
        """Read the tensor of a tap."""
        if not self.tables:
            sizes = [(self.examples, table.starts[-1]) for table in self.uses.tables]
            self.tables = [torch.empty(size, dtype=torch.float32, device=tensor.device) for size in sizes]
        if self.real is not None:
            x, axis = self.uses.taps.examples_apart(number, tensor, self.examples)
            if self.real.fits(x.shape, axis):
                return self.uses.read_real(number, x, axis, self.real, self._write, self.means)
        form = (number, self.examples, *form_of(tensor))
        reader = self.readers.get(form) or self._prepared(form, number, tensor)
        if not reader.as_it_is:
            tensor, _ = self.uses.taps.examples_apart(number, tensor, self.examples)
        for prepared, places, keys in reader.steps:
            outs = [self.tables[i].as_strided(*place) for i, place in places]
            mean = prepared(tensor, outs, self._scratch)
            for key in keys:
                assert mean is not None
                self.means[key] = mean
        return None

    def _prepared(self, form: tuple[Any, ...], number: int, tensor: Tensor) -> Reader:
        """The reader of the tensors of a tap that have this form. It is kept."""
        uses = self.uses
        x, axis = uses.taps.examples_apart(number, tensor, self.examples)
        reader = Reader(x is tensor, [])
        for step in uses.steps(number, x.shape, axis):
            places = [(i, uses.tables[i].place(self.examples, column)) for i, column in step.tables]
            at_tap = [uses.tables[i].at[column] for i, column in step.tables]
            wanted = [
                (at.statistic, at.orders, self.tables[i].as_strided(*place))
                for at, (i, place) in zip(at_tap, places, strict=True)
            ]
            averaged = step.averaged[0] if step.averaged else None
            prepared = reading(x, axis, step.sample, wanted, averaged)
            reader.steps.append((prepared, places, [(number, sample) for sample in step.averaged]))
        if len(self.readers) >= MOST_READERS:
            self.readers.clear()
        self.readers[form] = reader
        return reader

    def _write(self, table: int, column: int, maps: Tensor) -> None:
        """Compute the statistics of a tap from maps."""
        layout = self.uses.tables[table]
        at, place = layout.at[column], layout.place(self.examples, column)
        kernels.compute(at.statistic, maps, at.orders, self.tables[table].as_strided(*place))

    def repeat(self, number: int, earlier: int) -> bool:
        """Copy the statistics of an earlier tap of the same tensor. False if the copy is not enough."""
        uses, call = self.uses, self.uses.taps[earlier].call
        if uses.averaged[number] or any(call not in uses.columns[i] for i, _ in uses.places[number]):
            return False
        for i, column in uses.places[number]:
            first, second = (
                self.tables[i].as_strided(*uses.tables[i].place(self.examples, at))
                for at in (uses.columns[i][call], column)
            )
            second.copy_(first)
        return True
