"""Gram statistics, deviations and bounds on NVIDIA GPUs: which Triton programs to launch, and how.

The programs are in `numerics.kernels.programs`. Their arithmetic is that of `numerics.statistics`.

A magnitude below 2^-126, the smallest normal float32, is treated as 0 as a divisor, as in
`numerics.kernels.cpu`. So a statistic whose products all lie below 2^-126 is 0.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from gramwatch.numerics.kernels import cuda_read_programs, programs
from gramwatch.numerics.samples import TOGETHER, Sample

FEATURES = 1024
"""The number of features of an example that a program handles together."""

MOST_READ = 1024
"""The most pixels whose statistics `reader` reads."""

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


def reader(
    x: Tensor,
    channel_axis: int,
    sample: Sample,
    orders: tuple[int, ...],
    stride_out: int,
    averaged: Sample | None,
) -> "Reading | None":
    """Reads parts of a tensor of this form: of this shape, dtype, alignment and device, with these strides.

    It writes `row_sums` of `sample` and the channel means of `averaged`. The tensor is read as it lies.
    `stride_out` is the distance from the statistics of one example to those of the next. Without orders, it
    writes the means alone. None if there is no such kernel: for many pixels, for more than two axes of
    pixels, for orders other than `programs.DOUBLED`, for float64.
    """
    form = (x.shape, x.stride(), channel_axis, sample, x.dtype, orders, stride_out, averaged)
    return _reading(*form, x.data_ptr() % 16 == 0, x.get_device())


class Reading:
    """The kernels that read a tensor of one form.

    Args:
        statistics: the kernel that writes statistics, and perhaps means, with its arguments.
        means: the kernel that writes means alone.
        device: the index of the device. Negative: a CPU tensor, in the interpreter.

    """

    def __init__(self, statistics: "_Launch | None", means: "_Launch | None", device: int) -> None:
        self._statistics, self._means, self._device = statistics, means, device

    def __call__(
        self, x: Tensor, out: Tensor | None, means: Tensor | None, scratch: Tensor | None
    ) -> Tensor | None:
        """Write statistics into `out` `(N, orders, C)`, means into `means` `(N, C)`. Either may be None.

        `scratch` is a tensor for sums that an earlier call returned, if there is one. It returns one, too.
        """
        if self._device < 0 or self._device == torch.cuda.current_device():
            return self._run(x, out, means, scratch)
        with torch.cuda.device(self._device):
            return self._run(x, out, means, scratch)

    def _run(
        self, x: Tensor, out: Tensor | None, means: Tensor | None, scratch: Tensor | None
    ) -> Tensor | None:
        if self._means is not None:
            assert means is not None
            self._means(x, means)
        if self._statistics is not None:
            assert out is not None
            room = self._statistics.room
            if room and (scratch is None or len(scratch) < room or scratch.get_device() != self._device):
                scratch = torch.empty(room, dtype=torch.float32, device=x.device)
            sums = scratch if room and scratch is not None else out
            self._statistics(x, sums, out, out if means is None else means)
        return scratch


@lru_cache(4096)
def _reading(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    channel_axis: int,
    sample: Sample,
    dtype: torch.dtype,
    orders: tuple[int, ...],
    stride_out: int,
    averaged: Sample | None,
    aligned: bool,
    device: int,
) -> Reading | None:
    axes = [axis for axis in range(1, len(shape)) if axis != channel_axis]
    if not 1 <= len(axes) <= 2 or not set(orders) <= set(programs.DOUBLED) or dtype == torch.float64:
        return None
    examples, along = shape[0], strides[channel_axis]
    averaged_part = _part(shape, strides, axes, channel_axis, averaged or sample)
    dense = along == 1 or shape[channel_axis] == 1
    same = averaged is not None and averaged.of(shape, channel_axis) == sample.of(shape, channel_axis)
    apart = averaged is not None and not (orders and same)
    means = None
    if apart and not (dense and orders):
        # Threads side by side read channels, or pixels if these lie closer together.
        by_pixel = along > min(strides[axis] for axis in axes)
        columns, rows, warps = means_alone(averaged_part[0], averaged_part[1], by_pixel)
        grid = (examples, triton.cdiv(averaged_part[0], columns))
        rest: tuple[Any, ...] = (strides[0], along, *averaged_part, columns, rows, int(by_pixel))
        means = _Launch(cuda_read_programs.read_means, grid, rest, warps, 0)
    if not orders:
        return Reading(None, means, device)
    part = _part(shape, strides, axes, channel_axis, sample)
    channels, pixels = part[:2]
    if pixels > MOST_READ:
        return None
    positions = tuple(orders.index(order) if order in orders else -1 for order in programs.DOUBLED)
    all_columns, all_rows = (triton.next_power_of_2(size) for size in (channels, pixels))
    whole = all_columns * all_rows <= MOST_HELD and dense
    warps = 16 if not whole else 8 if all_columns * all_rows > MOST_HELD // 4 else 4
    columns = min(256, all_columns)
    beside = apart and means is None
    mean_columns, mean_rows = means_beside(averaged_part[0], averaged_part[1], warps)
    rest = (
        *(strides[0], along, stride_out, *part, *averaged_part),
        *(positions, 2 if beside else int(same), whole),
        *(columns, min(TILE // columns, all_rows)),
        *(all_columns if whole else min(max(8, TILE // all_rows), all_columns), all_rows),
        *(mean_columns, mean_rows),
    )
    room = 0 if whole else examples * (1 + len(positions)) * pixels
    grid = (examples, 1 + (triton.cdiv(averaged_part[0], mean_columns) if beside else 0))
    return Reading(_Launch(cuda_read_programs.read_example, grid, rest, warps, room), means, device)


def _part(
    shape: tuple[int, ...], strides: tuple[int, ...], axes: list[int], channel_axis: int, sample: Sample
) -> tuple[int, ...]:
    """The part of a tensor that counts: its channels, its pixels, and where they lie."""
    chosen = sample.of(shape, channel_axis)
    grid = chosen.grid or ((0, 1),) * len(shape)
    ranges = [range(grid[axis][0], shape[axis], grid[axis][1]) for axis in axes]
    start = sum(each.start * strides[axis] for each, axis in zip(ranges, axes, strict=True))
    steps = [each.step * strides[axis] for each, axis in zip(ranges, axes, strict=True)]
    height, width = (1, *map(len, ranges))[-2:]
    down, right = (0, *steps)[-2:]
    channels = sample.count(shape[channel_axis])
    return channels, height * width, width, start, down, right, chosen.step * TOGETHER


MOST_HELD = 32768
"""The most numbers of an example that one program holds in registers. It then reads them once.

Only if channels are dense: otherwise a thread would hold an address for every number."""
TILE = 8192
"""The numbers that a program holds if it cannot hold all of them."""


def means_beside(channels: int, pixels: int, warps: int) -> tuple[int, int]:
    """The channels and the pixels of a tile of `read_example`, for the means of another part."""
    columns = min(256, triton.next_power_of_2(channels))
    return columns, min(2048 * warps // columns, triton.next_power_of_2(pixels))


def means_alone(channels: int, pixels: int, by_pixel: bool) -> tuple[int, int, int]:
    """The channels and the pixels of a tile of `read_means`, and its warps."""
    columns, rows = triton.next_power_of_2(channels), triton.next_power_of_2(pixels)
    if by_pixel:
        rows = min(rows, 1024)
        columns = min(max(1, 2048 // rows), columns)
    else:
        columns = min(32, columns)
        rows = min(TILE // columns, rows)
    return columns, rows, max(1, columns * rows // 1024)


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
    several such pieces across it. The sizes were the fastest on an H200:
    `python -m lab.benchmarks.tune_cuda`.
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
