"""Fast kernels for statistics, deviations and bounds: chosen by device, never by the caller.

A function here has the arguments and the results of its readable counterpart. The CPU kernels are compiled by
numba, those for NVIDIA GPUs by Triton. PyTorch's form is used on other devices, and if a kernel cannot be
built; then one warning says so.

There are no kernels for float64 maps, and one warning says so. The kernels compute in float32, which would
lose the digits that a float64 network is used for.
"""

import importlib
from collections.abc import Hashable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gramwatch.errors import warn
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
    if statistic in FAST and len(maps):
        signature = (maps.device.type, "compute", statistic, maps.dtype, orders)
        if maps.dtype == torch.float64:
            if kernels_of(signature) is not None:
                _say_float64()
        elif _attempt(signature, statistic, maps, orders, out):
            return
    if statistic in _OF_PAIRS:
        write_pairs(maps, orders, **{_OF_PAIRS[statistic]: out})
    else:
        out.copy_(STATISTICS[statistic](maps, orders, 1))


def deviations(
    statistics: Tensor, predicted: Tensor, minimum: Tensor, maximum: Tensor, starts: Tensor, weights: Tensor
) -> Tensor | None:
    """Deviations from a range, summed over the features of each tap, `(N, taps)`. None without a kernel."""
    signature = (statistics.device.type, "deviations", statistics.dtype, minimum.dtype)
    result = _attempt(signature, statistics, predicted, minimum, maximum, starts, weights)
    return result[0] if result else None


def widen(statistics: Tensor, predicted: Tensor, minimum: Tensor, maximum: Tensor) -> bool:
    """Widen the range of each example's class in place. False if there is no kernel."""
    signature = (statistics.device.type, "widen", statistics.dtype, minimum.dtype)
    return bool(_attempt(signature, statistics, predicted, minimum, maximum))


def image_sums(images: Tensor, out: Sequence[Tensor]) -> bool:
    """Write the sums of images, those of `image_numbers.Sums`, in float64. False if there is no kernel."""
    signature = ("cpu", "image_sums", images.dtype)
    return bool(_attempt(signature, images, out, module=f"{__name__}.images"))


def image_numbers(images: Tensor) -> Tensor | None:
    """The numbers of images on a GPU, those of `image_numbers.look`. None if there is no kernel."""
    signature = ("cuda", "image_numbers", images.dtype, images.shape[1])
    result = _attempt(signature, images, module=f"{__name__}.cuda_images")
    return result[0] if result else None


def _attempt(signature: tuple[Any, ...], *arguments: Any, module: str | None = None) -> tuple[Any] | None:
    """What a kernel returns, in a tuple. None if there is no kernel, or if it fails: then it is given up.

    Args:
        signature: the device, the name of the function, and the values that the kernel depends on.
        arguments: of the function.
        module: with the function, if it is not in the module of the device.

    """
    kernels = kernels_of(signature)
    if kernels is None:
        return None
    try:
        kernels = kernels if module is None else importlib.import_module(module)
        return (getattr(kernels, signature[1])(*arguments),)
    except Exception as error:
        give_up(signature, error)
        return None


def kernels_of(signature: tuple[Hashable, ...]) -> ModuleType | None:
    """The module with the kernels of a signature, whose first entry is a device. None if it has no kernel."""
    device = signature[0]
    if device not in _MODULES or (device,) in _given_up or signature in _given_up:
        return None
    try:
        return importlib.import_module(_MODULES[device])
    except Exception as error:
        give_up((device,), error)
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
