"""A pass that is run as it is: tensors are read as soon as the network makes them."""

from typing import Any

import torch
from torch import Tensor

from gramwatch.numerics import kernels
from gramwatch.numerics.kernels import Reading, Scratch, form_of, reading
from gramwatch.numerics.samples import Sample
from gramwatch.observe.uses import Mean, Place, Uses
from gramwatch.watch.padding import Real

MOST_READERS = 4096
"""The most taps and forms of tensors whose readers a plan keeps."""


class Reader:
    """Reads the tensors of one tap that have one form. It is prepared at the first of them.

    Args:
        uses: what is read of each tap.
        number: the number of the tap.
        tensor: the first tensor.
        tables: tables like those that are written to.
        examples: the number of examples in the batch.

    """

    def __init__(self, uses: Uses, number: int, tensor: Tensor, tables: list[Tensor], examples: int) -> None:
        self._tap, self._examples = uses.taps.listed[number], examples
        x, axis = uses.taps.examples_apart(number, tensor, examples)
        self._as_it_is = x is tensor
        self._steps: list[tuple[Reading, list[tuple[int, Place]], list[Mean]]] = []
        for step in uses.steps(number, x.shape, axis):
            places = [(i, uses.tables[i].place(examples, column)) for i, column in step.tables]
            at_tap = [uses.tables[i].at[column] for i, column in step.tables]
            wanted = [
                (at.statistic, at.orders, tables[i].as_strided(*place))
                for at, (i, place) in zip(at_tap, places, strict=True)
            ]
            averaged: Sample | None = step.averaged[0] if step.averaged else None
            prepared = reading(x, axis, step.sample, wanted, averaged)
            self._steps.append((prepared, places, [(number, sample) for sample in step.averaged]))

    def __call__(
        self, tensor: Tensor, tables: list[Tensor], means: dict[Mean, Tensor], scratch: Scratch
    ) -> None:
        """Write the statistics into the tables, and add the channel means."""
        x = tensor if self._as_it_is else self._tap.examples_apart(tensor, self._examples)[0]
        for prepared, places, keys in self._steps:
            mean = prepared(x, [tables[i].as_strided(*place) for i, place in places], scratch)
            for key in keys:
                assert mean is not None
                means[key] = mean


Readers = dict[tuple[Any, ...], Reader]
"""The readers of a plan, by the number of the tap, the number of examples and the form of the tensor."""


class Pass:
    """One pass: it receives the tensors that the network makes, and keeps what is read of them.

    Args:
        uses: what is read of each tap.
        readers: the readers of earlier passes.
        examples: the number of examples in the batch.
        real: the places that are not padding, if the batch has a mask.

    """

    def __init__(self, uses: Uses, readers: Readers, examples: int, real: Real | None) -> None:
        self._uses, self._readers, self._examples, self._real = uses, readers, examples, real
        self._scratch = Scratch()
        self.tables: list[Tensor] = []
        self.means: dict[Mean, Tensor] = {}
        self.features: list[Tensor] = []

    def receive(self, number: int, tensor: Tensor) -> None:
        """Read the tensor of a tap."""
        if not self.tables:
            sizes = [(self._examples, table.starts[-1]) for table in self._uses.tables]
            self.tables = [torch.empty(size, dtype=torch.float32, device=tensor.device) for size in sizes]
        if self._real is not None:
            x, axis = self._uses.taps.examples_apart(number, tensor, self._examples)
            if self._real.fits(x.shape, axis):
                return self._uses.read_real(number, x, axis, self._real, self._write, self.means)
        form = (number, self._examples, *form_of(tensor))
        reader = self._readers.get(form)
        if reader is None:
            if len(self._readers) >= MOST_READERS:
                self._readers.clear()
            reader = Reader(self._uses, number, tensor, self.tables, self._examples)
            self._readers[form] = reader
        return reader(tensor, self.tables, self.means, self._scratch)

    def _write(self, table: int, column: int, maps: Tensor) -> None:
        """Compute the statistics of a tap from maps."""
        layout = self._uses.tables[table]
        at, place = layout.at[column], layout.place(self._examples, column)
        kernels.compute(at.statistic, maps, at.orders, self.tables[table].as_strided(*place))

    def repeat(self, number: int, earlier: int) -> bool:
        """Copy the statistics of an earlier tap of the same tensor. False if the copy is not enough."""
        uses, call = self._uses, self._uses.taps[earlier].call
        if uses.averaged[number] or any(call not in uses.columns[i] for i, _ in uses.places[number]):
            return False
        for i, column in uses.places[number]:
            first, second = (
                self.tables[i].as_strided(*uses.tables[i].place(self._examples, at))
                for at in (uses.columns[i][call], column)
            )
            second.copy_(first)
        return True

    def at_head(self, x: Tensor, *_: Tensor | None) -> None:
        """Keep the input of the layer that makes the logits."""
        self.features.append(x.flatten(1).float())
