"""The same statistics, deviations and bounds, fast: chosen by device, never by the caller.

Each function here takes what its readable counterpart takes and gives what that gives. On the CPU numba does
the work, on NVIDIA GPUs Triton; elsewhere, and where a kernel cannot be built (one warning says so), PyTorch.
"""

import importlib
import warnings
from types import ModuleType

import torch
from torch import Tensor

from gramwatch.errors import GramwatchWarning
from gramwatch.statistics import STATISTICS

FAST = ("row_sums", "diagonal", "off_diagonal")
"""The statistics that have kernels."""

_MODULES = {"cpu": "gramwatch.kernels.cpu", "cuda": "gramwatch.kernels.cuda"}
_given_up: set[str] = set()


def compute(statistic: str, maps: Tensor, orders: tuple[int, ...], out: Tensor) -> None:
    """Write a statistic of maps `(N, C, pixels)` into `out` `(N, orders, features)`."""
    kernels = _kernels(maps) if statistic in FAST and maps.dtype != torch.float64 else None
    if kernels is not None and len(maps):
        try:
            return kernels.compute(statistic, maps, orders, out)  # type: ignore[no-any-return]
        except Exception as error:
            _give_up(maps.device.type, error)
    out.copy_(STATISTICS[statistic](maps, orders, 1))
    return None


def deviations(
    statistics: Tensor, predicted: Tensor, minimum: Tensor, maximum: Tensor, starts: Tensor, weights: Tensor
) -> Tensor | None:
    """Deviations from a range summed over each tap's features, `(N, taps)`; None where there is no kernel."""
    kernels = _kernels(statistics)
    if kernels is not None:
        try:
            return kernels.deviations(statistics, predicted, minimum, maximum, starts, weights)  # type: ignore[no-any-return]
        except Exception as error:
            _give_up(statistics.device.type, error)
    return None


def widen(statistics: Tensor, predicted: Tensor, minimum: Tensor, maximum: Tensor) -> bool:
    """Widen the range of each example's class in place; False where there is no kernel."""
    kernels = _kernels(statistics)
    if kernels is not None:
        try:
            kernels.widen(statistics, predicted, minimum, maximum)
        except Exception as error:
            _give_up(statistics.device.type, error)
        else:
            return True
    return False


def _kernels(like: Tensor) -> ModuleType | None:
    """The module of kernels for a tensor's device, if it can be imported."""
    device = like.device.type
    if device not in _MODULES or device in _given_up:
        return None
    try:
        return importlib.import_module(_MODULES[device])
    except Exception as error:
        _give_up(device, error)
        return None


def _give_up(device: str, error: Exception) -> None:
    """Do without kernels on a device from now on, and say so once."""
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        raise error
    if device == "cuda" and torch.cuda.is_current_stream_capturing():  # what fails may be the recording
        raise error
    _given_up.add(device)
    warnings.warn(
        f"the fast kernels for {device} cannot be used, PyTorch's slower form is used instead "
        f"({type(error).__name__}: {error})",
        GramwatchWarning,
        stacklevel=2,
    )
