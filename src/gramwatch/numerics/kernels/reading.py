"""Reading a tensor: statistics and channel means of a part, made ready for tensors of one form."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from gramwatch.numerics import kernels
from gramwatch.numerics.samples import WHOLE, Sample
from gramwatch.numerics.statistics import write_pairs

Wanted = Sequence[tuple[str, tuple[int, ...], Tensor]]
"""Names of statistics, their orders, and tensors like those that they are written to."""
MOST = 4096
"""The most forms whose readings are kept."""

_kept: "dict[Hashable, Reading]" = {}


class Scratch:
    """Memory for sums, which the readings of one pass share."""

    tensor: Tensor | None = None


def reading(
    x: Tensor, channel_axis: int, sample: Sample, wanted: Wanted, averaged: Sample | None = None
) -> "Reading":
    """The reading of tensors of the form of `x`. It is prepared at the first one, and kept.

    Args:
        x: a tensor whose first axis is the examples. All axes but that and `channel_axis` are pixels.
        channel_axis: the axis of the channels.
        sample: the part whose statistics are wanted.
        wanted: the statistics.
        averaged: the part whose channel means are wanted. None: no means.

    """
    outs = tuple([(statistic, orders, out.stride(0)) for statistic, orders, out in wanted])
    form = (form_of(x), channel_axis, sample, outs, averaged)
    kept = _kept.get(form)
    if kept is None:
        if len(_kept) >= MOST:
            _kept.clear()
        kept = _kept[form] = Reading(x, channel_axis, sample, wanted, averaged)
    return kept


def form_of(x: Tensor) -> tuple[Any, ...]:
    """What decides how a tensor is read: tensors with the same form are read alike."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() % 16, x.get_device(), x.requires_grad


class Reading:
    """Reads a part of a tensor. Which part, in which layout, and by which kernel, is decided once.

    The arguments are those of `reading`.
    """

    def __init__(
        self, x: Tensor, channel_axis: int, sample: Sample, wanted: Wanted, averaged: Sample | None
    ) -> None:
        self._part = sample.of(x.shape, channel_axis)
        self._pairs, self._statistics = _shared(wanted)
        self._averaged = None if averaged is None else averaged.of(x.shape, channel_axis)
        self._means_of, self._counted = self._averaged, None
        """The part that is averaged, and which of its channels count."""
        apart = averaged is not None and not (wanted and self._averaged == self._part)
        if apart and averaged is not None and averaged.of(x.shape, channel_axis).grid is None:
            # The means of all channels cost less than a copy of those that count.
            self._means_of = WHOLE.of(x.shape, channel_axis)
            if averaged.count(x.shape[channel_axis]) < x.shape[channel_axis]:
                with torch.inference_mode(False):
                    self._counted = averaged.numbers(x.shape[channel_axis]).to(x.device)
        self._prepare_kernel(x, channel_axis, sample, wanted, averaged)

    def _prepare_kernel(
        self, x: Tensor, channel_axis: int, sample: Sample, wanted: Wanted, averaged: Sample | None
    ) -> None:
        """Take the kernel that reads statistics and means together, if there is one for this form."""
        self._kernel: Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor | None] | None
        self._kernel, self._width = None, None
        plain = not wanted or (len(wanted) == 1 and wanted[0][0] == "row_sums")
        if not (x.is_cuda and plain and len(x) and not x.requires_grad):
            return
        orders, stride = (wanted[0][1], wanted[0][2].stride(0)) if wanted else ((), 0)
        self._signature = ("cuda", "read", x.dtype, orders)
        module = kernels.kernels_of(self._signature)
        if module is not None:
            self._kernel = module.prepared(x, channel_axis, sample, orders, stride, averaged)
            self._width = None if averaged is None else averaged.count(x.shape[channel_axis])

    def __call__(self, x: Tensor, outs: Sequence[Tensor], scratch: Scratch) -> Tensor | None:
        """Write the statistics. Return the channel means, `(N, channels that count)`, if they are wanted."""
        if self._kernel is not None:
            means = None
            if self._width is not None:
                means = torch.empty((x.shape[0], self._width), dtype=torch.float32, device=x.device)
            try:
                scratch.tensor = self._kernel(x, outs[0] if outs else None, means, scratch.tensor)
            except Exception as error:
                kernels.give_up(self._signature, error)
                self._kernel = None
            else:
                return means
        maps = None
        if outs:
            maps = self._part.maps(x)
            for pairs, sums, orders in self._pairs:
                write_pairs(maps, orders, pairs=outs[pairs], sums=outs[sums])
            for number, statistic, orders in self._statistics:
                kernels.compute(statistic, maps, orders, outs[number])
        if self._means_of is None:
            return None
        if maps is None or self._means_of != self._part:
            maps = self._means_of.maps(x)
        means = maps.mean(2, dtype=torch.float32)
        return means if self._counted is None else means[:, self._counted]


def _shared(
    wanted: Wanted,
) -> tuple[list[tuple[int, int, tuple[int, ...]]], list[tuple[int, str, tuple[int, ...]]]]:
    """The numbers of statistics that share a Gram matrix, a triangle and sums of roots; the others."""
    sums = {orders: i for i, (statistic, orders, _) in enumerate(wanted) if statistic == "row_sums_of_roots"}
    pairs = [
        (i, sums.pop(orders), orders)
        for i, (statistic, orders, _) in enumerate(wanted)
        if statistic == "triangle" and orders in sums
    ]
    shared = {number for i, j, _ in pairs for number in (i, j)}
    rest = [(i, name, orders) for i, (name, orders, _) in enumerate(wanted) if i not in shared]
    return pairs, rest
