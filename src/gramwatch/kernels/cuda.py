"""Gram statistics, deviations and bounds on NVIDIA GPUs: which Triton programs to launch, and how.

The programs are in `gramwatch.kernels.programs`. Their arithmetic is that of `gramwatch.statistics`.

A magnitude below 2^-126, the smallest normal float32, is treated as 0 as a divisor, as in
`gramwatch.kernels.cpu`. So a statistic whose products all lie below 2^-126 is 0.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from gramwatch.kernels import programs

FEATURES = 1024
"""The number of features of an example that a program handles together."""

MOST_READ = 1024
"""The most pixels that `read` takes."""

_KINDS = {"row_sums": 0, "diagonal": 1, "off_diagonal": 2}


def compute(statistic: str, maps: Tensor, orders: tuple[int, ...], out: Tensor) -> None:
    """Write a statistic of maps `(N, C, M)` into `out` `(N, orders, C)`, whose last two axes are dense."""
    aligned = maps.data_ptr() % 16 == 0, out.data_ptr() % 16 == 0
    index = maps.get_device()
    plan = _plan(statistic, maps.shape, maps.stride(), maps.dtype, orders, out.stride(0), index, aligned)
    if index < 0 or index == torch.cuda.current_device():  # negative: a CPU tensor, in the interpreter
        return _run(plan, maps, out)
    with torch.cuda.device(index):
        return _run(plan, maps, out)


def read(x: Tensor, channel_axis: int, orders: tuple[int, ...], out: Tensor, means: Tensor) -> bool:
    """Write `row_sums` of a tensor into `out` `(N, orders, C)`, and its channel means into `means` `(N, C)`.

    `means` may be empty, `(N, 0)`. The tensor is read as it lies, a strided view too. False, and nothing is
    done, if there is no such kernel: for many pixels, for more than two axes of pixels, for orders other than
    `programs.DOUBLED`, for float64.
    """
    axes = [axis for axis in range(1, x.ndim) if axis != channel_axis]
    if not 1 <= len(axes) <= 2 or not set(orders) <= set(programs.DOUBLED) or x.dtype == torch.float64:
        return False
    height, width = (1, *(x.shape[axis] for axis in axes))[-2:]
    if height * width > MOST_READ:
        return False
    if x.stride(channel_axis) != 1:
        x = x.movedim(channel_axis, -1).contiguous()
        channel_axis, axes = x.ndim - 1, list(range(1, x.ndim - 1))
    shape = (len(x), x.shape[channel_axis], height, width)
    strides = (x.stride(0), *(0, *(x.stride(axis) for axis in axes))[-2:])
    aligned = tuple([place.data_ptr() % 16 == 0 for place in (x, out, means)])
    index = x.get_device()
    plan = _reading(shape, strides, x.dtype, orders, out.stride(0), means.shape[1] > 0, index, aligned)
    if index < 0 or index == torch.cuda.current_device():  # negative: a CPU tensor, in the interpreter
        _run_reading(plan, x, out, means)
    else:
        with torch.cuda.device(index):
            _run_reading(plan, x, out, means)
    return True


def _run_reading(plan: "tuple[_Launch, _Launch]", x: Tensor, out: Tensor, means: Tensor) -> None:
    scratch = torch.empty(plan[0].room, dtype=torch.float32, device=x.device)
    plan[0](x, scratch)
    plan[1](x, scratch, out, means)


@lru_cache(4096)
def _reading(
    shape: tuple[int, int, int, int],
    strides: tuple[int, int, int],
    dtype: torch.dtype,
    orders: tuple[int, ...],
    stride_out: int,
    with_means: bool,
    device: int,
    aligned: tuple[bool, ...],
) -> "tuple[_Launch, _Launch]":
    """The two kernels that `read` launches: sums over the channels, then sums over the pixels."""
    examples, channels, height, width = shape
    pixels = height * width
    sizes = (channels, pixels, width, *strides)
    largest = programs.DOUBLED.index(max(orders))
    positions = tuple(orders.index(o) if o in orders else -1 for o in programs.DOUBLED[: largest + 1])
    room = examples * (1 + len(positions)) * pixels
    columns, across, warps = sums_over_channels(channels, pixels)
    rest: tuple[Any, ...] = (*sizes, len(positions), columns, across, columns >= channels)
    over_channels = _Launch(programs.read_pixels, (examples, triton.cdiv(pixels, across)), rest, warps, room)
    columns, warps = sums_over_pixels(channels, pixels)
    rest = (*sizes, stride_out, positions, with_means, columns, triton.next_power_of_2(pixels))
    grid = (examples, triton.cdiv(channels, columns))
    return over_channels, _Launch(programs.read_channels, grid, rest, warps, room)


def sums_over_channels(channels: int, pixels: int) -> tuple[int, int, int]:
    """The channels and the pixels of a program of `read_pixels`, and its warps."""
    columns = min(128, triton.next_power_of_2(channels))
    return columns, min(2048 // columns, triton.next_power_of_2(pixels)), 4


def sums_over_pixels(channels: int, pixels: int) -> tuple[int, int]:
    """The channels of a program of `read_channels`, which takes all pixels, and its warps."""
    columns = max(8, 4096 // triton.next_power_of_2(pixels))
    return min(columns, triton.next_power_of_2(channels)), 4


def _run(plan: "list[_Launch]", maps: Tensor, out: Tensor) -> None:
    room = plan[0].room
    scratch = torch.empty(room, dtype=torch.float32, device=maps.device) if room else out
    for launch in plan:
        launch(maps, scratch, out)


class _Launch:
    """One kernel with the arguments that are the same for every batch.

    In an ordinary call, Triton inspects all arguments to find the compiled kernel. Here this happens once,
    and later launches call the compiled kernel directly.
    """

    def __init__(self, kernel: Any, grid: tuple[int, int], rest: tuple[Any, ...], warps: int, room: int):
        self.kernel, self.grid, self.rest, self.warps, self.room = kernel, (*grid, 1), rest, warps, room
        self._compiled: Any = None
        self._may_keep = True

    def __call__(self, *tensors: Tensor) -> None:
        compiled = self._compiled
        if compiled is not None:
            try:
                stream = torch._C._cuda_getCurrentRawStream(tensors[0].get_device())
                places = [tensor.data_ptr() for tensor in tensors]
                # The three None are hooks, which are not used.
                fixed = (*self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None)
                return compiled.run(*fixed, *places, *self.rest)  # type: ignore[no-any-return]
            except (TypeError, AttributeError):  # other versions of Triton take other arguments here
                self._compiled, self._may_keep = None, False
        compiled = self.kernel[self.grid](*tensors, *self.rest, num_warps=self.warps)
        if self._may_keep and hasattr(compiled, "packed_metadata"):  # the interpreter has none
            self._compiled = compiled
        return None


@lru_cache(4096)
def _plan(
    statistic: str,
    shape: tuple[int, int, int],
    strides: tuple[int, int, int],
    dtype: torch.dtype,
    orders: tuple[int, ...],
    stride_out: int,
    device: int,
    aligned: tuple[bool, bool],
) -> list[_Launch]:
    """The kernels to launch, one after the other, for maps of a shape."""
    examples, channels, pixels = shape
    kind = _KINDS[statistic]
    sizes = (channels, pixels, *strides)
    dense_channels = strides[1] == 1 and channels > 1
    summing_channels, channel_warps = _tile(channels, pixels, dense_channels, dtype.itemsize, reduced=0)
    summing_pixels, pixel_warps = _tile(channels, pixels, dense_channels, dtype.itemsize, reduced=1)
    over_pixels = (examples, triton.cdiv(pixels, summing_channels[1]))
    over_channels = (examples, triton.cdiv(channels, summing_pixels[0]))
    rows = {"row_sums": 1 + programs.GROUP, "diagonal": 0, "off_diagonal": 3 + 2 * programs.GROUP}[statistic]
    room = examples * rows * pixels
    plan = []
    rest: tuple[Any, ...]
    if statistic == "off_diagonal":
        rest = (*sizes, kind, *summing_channels[:2])
        plan.append(_Launch(programs.two_pixel_peaks, over_pixels, rest, channel_warps, room))
    for first in range(0, max(orders), programs.GROUP):
        group = (kind, first, min(programs.GROUP, max(orders) - first))
        for others in range({"row_sums": 1, "diagonal": 0, "off_diagonal": 2}[statistic]):
            rest = (*sizes, *group, others, *summing_channels, summing_channels[0] >= channels)
            plan.append(_Launch(programs.pixel_sums, over_pixels, rest, channel_warps, room))
        rest = (*sizes, stride_out, *group, orders, *summing_pixels, summing_pixels[1] >= pixels)
        plan.append(_Launch(programs.channel_sums, over_channels, rest, pixel_warps, room))
    return plan


def _tile(
    channels: int, pixels: int, dense_channels: bool, itemsize: int, reduced: int
) -> tuple[tuple[int, int, bool, int], int]:
    """The tile of a program that sums over the channels (`reduced=0`) or the pixels (`reduced=1`).

    Returns the tile's channels and pixels, whether the summed axis is dense in memory, how many of its
    entries a thread holds and folds, and the number of warps. A thread holds 16 bytes along memory, and
    several such pieces across it. The sizes were the fastest on an H200 (`python -m benchmarks.tune_cuda`).
    """
    dense = 0 if dense_channels else 1
    extent = triton.next_power_of_2(channels), triton.next_power_of_2(pixels)
    warps, width, held = _TILES[reduced == dense, reduced](channels, pixels)
    threads = 32 * warps
    vector = min(16 // itemsize, extent[dense])
    width = min(width, extent[dense])
    across = min(extent[1 - dense], held * threads // width)
    # The pieces across memory are given to the threads in turn, until all pieces are given.
    along = min(width, vector * threads)
    fold = min(vector, width) if reduced == dense else max(1, across * along // (vector * threads))
    return ((width, across) if dense == 0 else (across, width)) + (reduced == dense, fold), warps


# Warps, entries along memory, entries of a thread. Key: whether the summed axis is dense, and which it is.
_TILES: dict[tuple[bool, int], Callable[[int, int], tuple[int, int, int]]] = {
    (False, 0): lambda channels, pixels: (1, 32, 64) if pixels >= 32 else (4, 32, 32),
    (True, 1): lambda channels, pixels: (
        (1, 128 if pixels <= 1024 else 256, 16) if pixels > 256 else (4, 32, 16)
    ),
    (True, 0): lambda channels, pixels: (
        (1, 128 if channels < 256 else 256, 8) if channels >= 128 else (4, 32, 8)
    ),
    (False, 1): lambda channels, pixels: (1 if pixels <= 256 else 4, 32, 16),
}


def deviations(
    statistics: Tensor, predicted: Tensor, minimum: Tensor, maximum: Tensor, starts: Tensor, weights: Tensor
) -> Tensor:
    """Deviations from a range, summed over the features of each tap, `(N, taps)`."""
    examples, features = statistics.shape
    taps = len(starts) - 1
    out = torch.empty(examples, taps, dtype=torch.float32, device=statistics.device)
    with torch.cuda.device_of(statistics):
        programs.deviations[(examples, taps)](
            statistics, predicted, minimum, maximum, starts, weights, out, features, taps, FEATURES
        )
    return out


def widen(statistics: Tensor, predicted: Tensor, minimum: Tensor, maximum: Tensor) -> None:
    """Widen the range of each example's class in place. Examples of a negative class are left out."""
    classes, features = minimum.shape
    ascending, order = predicted.sort()
    segments = torch.searchsorted(ascending, torch.arange(classes + 1, device=predicted.device))
    with torch.cuda.device_of(statistics):
        programs.widen[(triton.cdiv(features, FEATURES), classes)](
            statistics, order, segments, minimum, maximum, features, FEATURES
        )
