"""Fast kernels: chosen by device, never by the caller. Reading a tensor: made ready for tensors of one form.

A kernel has the arguments and the results of its readable counterpart. The CPU kernels are compiled by
numba, those for NVIDIA GPUs by Triton. PyTorch's form is used on other devices, and if a kernel cannot be
built; then one warning says so.

There are no kernels for float64 maps, and one warning says so. The kernels compute in float32, which would
lose the digits that a float64 network is used for.
"""

import importlib
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gramwatch.errors import warn
from gramwatch.numerics.samples import WHOLE, Sample
from gramwatch.numerics.statistics import STATISTICS, write_pairs

FAST = ("row_sums", "diagonal", "off_diagonal")
"""The statistics that have kernels."""
_OF_PAIRS = {"triangle": "pairs", "row_sums_of_roots": "sums"}
"""The statistics that are written in place, and the argument of `write_pairs` that takes them."""

_MODULES = {"cpu": f"{__name__}.cpu", "cuda": f"{__name__}.cuda"}
_ELSEWHERE = {"image_sums": f"{__name__}.images", "image_numbers": f"{__name__}.cuda_images"}
"""The kernels that are not in the module of their device."""
_given_up: set[tuple[Hashable, ...]] = set()
"""Signatures without a kernel: a device, or a device, a function and the values its kernel depends on."""


def compute(statistic: str, maps: Tensor, orders: tuple[int, ...], out: Tensor) -> None:
    """Write a statistic of maps `(N, C, pixels)` into `out` `(N, orders, features)`."""
    if statistic in FAST and len(maps):
        device = maps.device.type
        if maps.dtype == torch.float64:
            if device in _MODULES and (device,) not in _given_up:
                _say_float64()
        elif attempt((device, "compute", statistic, maps.dtype, orders), statistic, maps, orders, out):
            return
    if statistic in _OF_PAIRS:
        write_pairs(maps, orders, **{_OF_PAIRS[statistic]: out})
    else:
        out.copy_(STATISTICS[statistic](maps, orders, 1))


def attempt(signature: tuple[Any, ...], *arguments: Any) -> tuple[Any] | None:
    """What a kernel returns, in a tuple. None if there is no kernel, or if it fails: then it is given up.

    Args:
        signature: the device, the name of the function, and the values that the kernel depends on.
        arguments: of the function.

    """
    device, name = signature[:2]
    if device not in _MODULES or (device,) in _given_up or signature in _given_up:
        return None
    try:
        kernels = importlib.import_module(_MODULES[device])
    except Exception as error:
        give_up((device,), error)
        return None
    try:
        if name in _ELSEWHERE:
            kernels = importlib.import_module(_ELSEWHERE[name])
        return (getattr(kernels, name)(*arguments),)
    except Exception as error:
        give_up(signature, error)
        return None


@cache
def _say_float64() -> None:
    """Warn once that float64 maps have no kernels."""
    warn(
        "the network's feature maps are float64, for which there are no fast kernels. PyTorch's form is "
        "used, many times slower: use model.float() if float32 is exact enough"
    )


def give_up(signature: tuple[Hashable, ...], error: Exception) -> None:
    """Use no kernels for a signature from now on, and warn once."""
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        raise error
    if signature[0] == "cuda" and torch.cuda.is_current_stream_capturing():  # the recording may be what fails
        raise error
    _given_up.add(signature)
    device, *rest = map(str, signature)
    which = f"kernel {', '.join(rest)} for {device}" if rest else f"kernels for {device}"
    warn(
        f"the fast {which} cannot be used, PyTorch's slower form is used instead "
        f"({type(error).__name__}: {error})"
    )


# --- reading a tensor ------------------------------------------------------------------------------

Wanted = Sequence[tuple[str, tuple[int, ...], Tensor]]
"""Names of statistics, their orders, and tensors like those that they are written to."""
MOST_READINGS = 4096
"""The most forms whose readings are kept."""

_readings: "dict[Hashable, Reading]" = {}


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
    kept = _readings.get(form)
    if kept is None:
        if len(_readings) >= MOST_READINGS:
            _readings.clear()
        kept = _readings[form] = Reading(x, channel_axis, sample, wanted, averaged)
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
        shape = x.shape
        self._part = sample.of(shape, channel_axis)
        self._pairs, self._statistics = _shared(wanted)
        self._means_of = None if averaged is None else averaged.of(shape, channel_axis)
        """The part that is averaged."""
        self._counted: Tensor | None = None
        """Which channels of that part count. None: all."""
        self._width = None if averaged is None else averaged.count(shape[channel_axis])
        """The number of channels that count."""
        apart = not (wanted and self._means_of == self._part)
        if self._means_of is not None and apart and self._means_of.grid is None:
            # The means of all channels cost less than a copy of those that count.
            self._means_of = WHOLE.of(shape, channel_axis)
            if averaged is not None and averaged.count(shape[channel_axis]) < shape[channel_axis]:
                with torch.inference_mode(False):
                    self._counted = averaged.numbers(shape[channel_axis]).to(x.device)
        self._kernel: Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor | None] | None
        """The kernel that reads statistics and means together. None if there is none for this form."""
        self._kernel = None
        only_row_sums = [name for name, _, _ in wanted] in ([], ["row_sums"])
        if x.is_cuda and only_row_sums and len(x) and not x.requires_grad:
            orders, stride = (wanted[0][1], wanted[0][2].stride(0)) if wanted else ((), 0)
            self._signature = ("cuda", "reader", x.dtype, orders)
            reader = attempt(self._signature, x, channel_axis, sample, orders, stride, averaged)
            self._kernel = reader[0] if reader else None

    def __call__(self, x: Tensor, outs: Sequence[Tensor], scratch: Scratch) -> Tensor | None:
        """Write the statistics. Return the channel means, `(N, channels that count)`, if they are wanted."""
        if self._kernel is not None:
            means = None
            if self._width is not None:
                means = torch.empty((x.shape[0], self._width), dtype=torch.float32, device=x.device)
            try:
                scratch.tensor = self._kernel(x, outs[0] if outs else None, means, scratch.tensor)
            except Exception as error:
                give_up(self._signature, error)
                self._kernel = None
            else:
                return means
        maps = None
        if outs:
            maps = self._part.maps(x)
            for pairs, sums, orders in self._pairs:
                write_pairs(maps, orders, pairs=outs[pairs], sums=outs[sums])
            for number, statistic, orders in self._statistics:
                compute(statistic, maps, orders, outs[number])
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
