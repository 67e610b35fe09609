"""Fast kernels for statistics, deviations and bounds: chosen by device, never by the caller.

A function here has the arguments and the results of its readable counterpart. The CPU kernels are compiled by
numba, those for NVIDIA GPUs by Triton. PyTorch's form is used on other devices, and if a kernel cannot be
built; then one warning says so.

There are no kernels for float64 maps, and one warning says so. The kernels compute in float32, which would
lose the digits that a float64 network is used for.
"""

import contextlib
import importlib
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from gramwatch.errors import warn
from gramwatch.numerics.samples import Sample, as_maps, sampled
from gramwatch.numerics.statistics import STATISTICS, write_pairs

FAST = ("row_sums", "diagonal", "off_diagonal")
"""The statistics that have kernels."""
_OF_PAIRS = {"triangle": "pairs", "row_sums_of_roots": "sums"}
"""The statistics that are written in place, and the argument of `write_pairs` that takes them."""

_MODULES = {"cpu": "gramwatch.numerics.kernels.cpu", "cuda": "gramwatch.numerics.kernels.cuda"}
_given_up: set[tuple[Hashable, ...]] = set()
"""Signatures without a kernel: a device, or a device, a function and the values its kernel depends on."""


def compute(statistic: str, maps: Tensor, orders: tuple[int, ...], out: Tensor) -> None:
    """Write a statistic of maps `(N, C, pixels)` into `out` `(N, orders, features)`."""
    signature = (maps.device.type, "compute", statistic, maps.dtype, orders)
    kernels = _kernels(signature) if statistic in FAST and len(maps) else None
    if kernels is not None and maps.dtype == torch.float64:
        _say_float64()
    elif kernels is not None:
        try:
            return kernels.compute(statistic, maps, orders, out)  # type: ignore[no-any-return]
        except Exception as error:
            _give_up(signature, error)
    if statistic in _OF_PAIRS:
        write_pairs(maps, orders, **{_OF_PAIRS[statistic]: out})
    else:
        out.copy_(STATISTICS[statistic](maps, orders, 1))
    return None


Wanted = Sequence[tuple[str, tuple[int, ...], Tensor]]
"""Names of statistics, their orders, and where to write them."""


def compute_each(maps: Tensor, wanted: Wanted) -> None:
    """Write several statistics of the same maps."""
    for statistic, orders, out in _without_shared(maps, wanted) if len(wanted) > 1 else wanted:
        compute(statistic, maps, orders, out)


def read(
    x: Tensor, channel_axis: int, sample: Sample, wanted: Wanted, averaged: Sample | None = None
) -> Tensor | None:
    """Write several statistics of the part of a tensor that counts. Return the channel means of a part.

    The first axis of `x` is the examples. All axes but that and `channel_axis` are pixels. The channel means
    are those of `averaged`, `(N, channels that count)`; None if it is None.
    """
    prepared = Prepared.of(x, channel_axis, sample, wanted, averaged)
    if prepared is not None:
        with contextlib.suppress(KernelError):
            return prepared(x, wanted[0][2] if wanted else None, None)[0]
    if (
        wanted
        and averaged is not None
        and averaged.of(x.shape, channel_axis) != sample.of(x.shape, channel_axis)
    ):
        read(x, channel_axis, sample, wanted)
        return read(x, channel_axis, averaged, (), averaged)
    sample = sample if wanted or averaged is None else averaged
    chosen = sample.of(x.shape, channel_axis)
    if not wanted and chosen.grid is None:  # a copy would cost more than the mean of all channels
        means = as_maps(x, channel_axis).mean(2, dtype=torch.float32)
        return means[:, sample.numbers(means.shape[1]).to(means.device)] if chosen.step > 1 else means
    maps = as_maps(*sampled(x, channel_axis, sample))
    compute_each(maps, wanted)
    return None if averaged is None else maps.mean(2, dtype=torch.float32)


class Prepared:
    """Reading a statistic, channel means or both, made ready for tensors of one form.

    A pass reads many taps, and a GPU is often faster than the host. This takes the host little time.
    """

    def __init__(
        self,
        reading: Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor | None],
        signature: tuple[Hashable, ...],
        means: int | None,
    ) -> None:
        self._reading, self._signature, self._means = reading, signature, means

    @staticmethod
    def of(
        x: Tensor, channel_axis: int, sample: Sample, wanted: Wanted, averaged: Sample | None
    ) -> "Prepared | None":
        """The arguments are those of `read`, and the part whose means are wanted. None without a kernel."""
        plain = not wanted or (len(wanted) == 1 and wanted[0][0] == "row_sums")
        if not (x.is_cuda and plain and len(x) and not x.requires_grad):
            return None
        _, orders, out = wanted[0] if wanted else ("", (), None)
        signature = ("cuda", "read", x.dtype, orders)
        kernels = _kernels(signature)
        if kernels is None:
            return None
        stride_out = 0 if out is None else out.stride(0)
        reading = kernels.prepared(x, channel_axis, sample, orders, stride_out, averaged)
        means = None if averaged is None else averaged.count(x.shape[channel_axis])
        return None if reading is None else Prepared(reading, signature, means)

    def __call__(
        self, x: Tensor, out: Tensor | None, scratch: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Write the statistic. Return the channel means, if wanted, and a tensor to give to the next call.

        It raises `KernelError` if the kernel turns out not to work. Then no kernel is prepared any more.
        """
        means = None
        if self._means is not None:
            means = torch.empty((x.shape[0], self._means), dtype=torch.float32, device=x.device)
        try:
            return means, self._reading(x, out, means, scratch)
        except Exception as error:
            _give_up(self._signature, error)
            raise KernelError from error


class KernelError(Exception):
    """A kernel cannot be used. A warning has said so."""


def _without_shared(maps: Tensor, wanted: Wanted) -> Wanted:
    """Write `triangle` and `row_sums_of_roots` of the same orders from one Gram matrix. Return the rest."""
    sums = {orders: out for statistic, orders, out in wanted if statistic == "row_sums_of_roots"}
    written: list[Tensor] = []
    for statistic, orders, out in wanted:
        if statistic == "triangle" and orders in sums:
            write_pairs(maps, orders, pairs=out, sums=sums[orders])
            written += [out, sums[orders]]
    return [each for each in wanted if not any(each[2] is out for out in written)]


def deviations(
    statistics: Tensor, predicted: Tensor, minimum: Tensor, maximum: Tensor, starts: Tensor, weights: Tensor
) -> Tensor | None:
    """Deviations from a range, summed over the features of each tap, `(N, taps)`. None without a kernel."""
    signature = (statistics.device.type, "deviations", statistics.dtype, minimum.dtype)
    kernels = _kernels(signature)
    if kernels is not None:
        try:
            return kernels.deviations(statistics, predicted, minimum, maximum, starts, weights)  # type: ignore[no-any-return]
        except Exception as error:
            _give_up(signature, error)
    return None


def widen(statistics: Tensor, predicted: Tensor, minimum: Tensor, maximum: Tensor) -> bool:
    """Widen the range of each example's class in place. False if there is no kernel."""
    signature = (statistics.device.type, "widen", statistics.dtype, minimum.dtype)
    kernels = _kernels(signature)
    if kernels is not None:
        try:
            kernels.widen(statistics, predicted, minimum, maximum)
        except Exception as error:
            _give_up(signature, error)
        else:
            return True
    return False


def image_sums(
    images: Tensor, pairs: Sequence[tuple[int, int]], block: int, clipped: float, out: Sequence[Tensor]
) -> bool:
    """Write the sums of images, those of `image_numbers.Sums`, in float64. False if there is no kernel."""
    signature = ("cpu", "image_sums", images.dtype)
    if _kernels(signature) is None:
        return False
    try:
        importlib.import_module("gramwatch.numerics.kernels.images").image_sums(
            images, pairs, block, clipped, out
        )
    except Exception as error:
        _give_up(signature, error)
        return False
    return True


def image_numbers(images: Tensor) -> Tensor | None:
    """The numbers of images on a GPU, those of `image_numbers.look`. None if there is no kernel."""
    signature = ("cuda", "image_numbers", images.dtype, images.shape[1])
    if _kernels(signature) is None:
        return None
    try:
        return importlib.import_module("gramwatch.numerics.kernels.cuda_images").image_numbers(images)  # type: ignore[no-any-return]
    except Exception as error:
        _give_up(signature, error)
        return None


def _kernels(signature: tuple[Hashable, ...]) -> ModuleType | None:
    """The module with the kernels of a signature, whose first entry is a device. None if it has no kernel."""
    device = signature[0]
    if device not in _MODULES or (device,) in _given_up or signature in _given_up:
        return None
    try:
        return importlib.import_module(_MODULES[device])
    except Exception as error:
        _give_up((device,), error)
        return None


@cache
def _say_float64() -> None:
    """Warn once that float64 maps have no kernels."""
    warn(
        "the network's feature maps are float64, for which there are no fast kernels. PyTorch's form is "
        "used, many times slower: use model.float() if float32 is exact enough"
    )


def _give_up(signature: tuple[Hashable, ...], error: Exception) -> None:
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
