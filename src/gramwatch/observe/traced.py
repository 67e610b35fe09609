"""A pass as one function that can be traced: by torch.compile, and for export."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gramwatch.inputs.batches import Inputs, count_examples
from gramwatch.numerics.samples import WHOLE
from gramwatch.observe.uses import GramTable, Mean, Uses
from gramwatch.watch import Network
from gramwatch.watch.observe import run_watched
from gramwatch.watch.padding import Real


def traceable(
    network: Network,
    uses: Uses,
    head_call: int | None,
    statistics: Callable[..., tuple[Tensor, Any]],
    channel_means: Callable[[Tensor, int, int | None, int | None], Tensor],
    table: Callable[[GramTable, Mapping[int, Tensor]], Tensor],
) -> Callable[[Inputs], tuple[Any, ...]]:
    """A pass under watch as a function of the inputs: the fields of a `Read`.

    Args:
        network: the network.
        uses: what is read of each tap.
        head_call: the watched call that makes the logits, if its input is needed.
        statistics: reads a tap for Gram. Its arguments are those of `compiled.statistics`.
        channel_means: reads a tap for other methods. Its arguments are those of `compiled.channel_means`.
        table: makes the table of a `GramTable` from what `statistics` returned, by the numbers of taps.

    """
    taps, layouts, averaged, places = uses.taps, uses.tables, uses.averaged, uses.places

    def read(inputs: Inputs) -> tuple[Any, ...]:
        examples, mask = count_examples(inputs), network.mask_of(inputs)
        real = None if mask is None else Real(mask)
        columns: list[dict[int, Tensor]] = [{} for _ in layouts]
        means: dict[Mean, Tensor] = {}
        features: list[Tensor] = []

        def write(i: int, column: int, maps: Tensor) -> None:
            at = layouts[i].at[column]
            arguments = (at.statistic, at.orders, at.features, False, None, None)
            columns[i][column], _ = statistics(maps, 1, *WHOLE, *arguments)

        def receive(number: int, tensor: Tensor) -> None:
            x, axis = taps.listed[number].examples_apart(tensor, examples)
            if real is not None and real.fits(x.shape, axis):
                uses.read_real(number, x, axis, real, write, means)
                return
            left = list(averaged[number])
            for i, column in places[number]:
                at, sample = layouts[i].at[column], layouts[i].sample
                part = sample.of(x.shape, axis)
                of_means = next((s for s in left if s.of(x.shape, axis) == part), left[0] if left else None)
                with_means = (False, None, None) if of_means is None else (True, *of_means)
                columns[i][column], mean = statistics(
                    x, axis, *sample, at.statistic, at.orders, at.features, *with_means
                )
                if of_means is not None:
                    part = of_means.of(x.shape, axis)
                    same = [other for other in left if other.of(x.shape, axis) == part]
                    means.update({(number, other): mean for other in same})
                    left = [other for other in left if other not in same]
            for sample in left:
                means[number, sample] = channel_means(x, axis, *sample)

        def at_head(x: Tensor, *_: Tensor | None) -> None:
            features.append(x.flatten(1).float())

        output = run_watched(network.module, inputs, taps, receive, None, (head_call, at_head))
        tables = [table(*filled) for filled in zip(layouts, columns, strict=True)]
        return network.logits_of(output), tables, means, features

    return read


def side_by_side(layout: GramTable, columns: Mapping[int, Tensor]) -> Tensor:
    """The statistics of all taps in the order of the table."""
    return torch.cat([columns[i].flatten(1) for i in range(len(columns))], 1)
