"""Gram statistics, deviations and bounds on NVIDIA GPUs, in Triton.

The arithmetic is that of `gramwatch.statistics`, with all orders of a tile of activations in registers. A
map is read twice as it lies in memory, channels first or last: for the pixel sums, then for the channels'.

A magnitude below 2^-126, the smallest normal float32, is treated as 0 where values would be divided by it,
as in `gramwatch.kernels.cpu`. So a statistic whose products all lie below 2^-126 is 0.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 10
"""How many orders are summed at a time, in registers."""
FEATURES = 1024
"""How many features of an example a program looks at together."""

_ROW_SUMS, _DIAGONAL, _OFF_DIAGONAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_GROUP = tl.constexpr(GROUP)
_SMALLEST = tl.constexpr(2.0**-126)
_KINDS = {"row_sums": 0, "diagonal": 1, "off_diagonal": 2}


@triton.jit
def _load(x, channel, pixel, channels, pixels, stride_c, stride_m):
    """A tile of one example, channels x pixels, in float32; zero outside."""
    inside = (channel[:, None] < channels) & (pixel[None, :] < pixels)
    place = x + channel[:, None] * stride_c + pixel[None, :] * stride_m
    return tl.load(place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _larger(a, b):
    """The larger of two; NaN, if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _inverse(peak):
    """One over a magnitude, 0 for one too small to divide by."""
    return tl.where(peak < _SMALLEST, 0.0, 1.0 / peak)


@triton.jit
def _power(base, EXPONENT: tl.constexpr):
    """The power at which a group of orders begins."""
    power = base
    for _ in tl.static_range(EXPONENT):
        power *= base
    return power


@triton.jit
def _root(t, order):
    """`sign(t) |t|^(1/order)`."""
    size = tl.exp2(tl.log2(tl.abs(t)) / order)
    root = tl.where(t < 0, -size, tl.where(t == 0, 0.0, size))
    return tl.where(order == 1, t, root)


@triton.jit
def _fold(tile, AXIS: tl.constexpr, DENSE: tl.constexpr, FOLD: tl.constexpr):
    """Sum the `FOLD` entries along an axis that one thread holds: neighbours, or every so many."""
    outer: tl.constexpr = tile.shape[0]
    inner: tl.constexpr = tile.shape[1]
    if AXIS == 0:
        if DENSE:
            folded = tl.sum(tl.reshape(tile, (outer // FOLD, FOLD, inner)), 1)
        else:
            folded = tl.sum(tl.reshape(tile, (FOLD, outer // FOLD, inner)), 0)
    else:
        if DENSE:
            folded = tl.sum(tl.reshape(tile, (outer, inner // FOLD, FOLD)), 2)
        else:
            folded = tl.sum(tl.reshape(tile, (outer, FOLD, inner // FOLD)), 1)
    return folded


@triton.jit
def _two_largest(peak, second, holder, other_peak, other_second, other_holder):
    """The two largest magnitudes of two sets of channels, and the channel that holds the largest."""
    ahead = peak >= other_peak
    return (
        tl.where(ahead, peak, other_peak),
        tl.where(ahead, tl.maximum(second, other_peak), tl.maximum(other_second, peak)),
        tl.where(ahead, holder, other_holder),
    )


@triton.jit
def _rooms(scratch, n, pixels, KIND: tl.constexpr):
    """Where an example's peaks, its pixel sums, and those over all channels but the largest are kept."""
    peaks: tl.constexpr = 3 if KIND == _OFF_DIAGONAL else 1
    rows: tl.constexpr = peaks + (2 if KIND == _OFF_DIAGONAL else 1) * _GROUP
    scratch += n.to(tl.int64) * rows * pixels
    return scratch, scratch + peaks * pixels, scratch + (peaks + _GROUP) * pixels


@triton.jit
def _two_pixel_peaks(
    x,
    scratch,
    out,
    channels,
    pixels,
    stride_n,
    stride_c,
    stride_m,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each pixel's largest and second largest magnitude, and the channel whose the largest is."""
    n = tl.program_id(0)
    x += n.to(tl.int64) * stride_n
    peaks, _, _ = _rooms(scratch, n, pixels, KIND)
    pixel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)
    inside = pixel < pixels
    peak = tl.full((ROWS, BLOCK), -1.0, tl.float32)
    second = tl.zeros((ROWS, BLOCK), tl.float32)
    holder = tl.zeros((ROWS, BLOCK), tl.int32)
    for first in range(0, channels, ROWS):
        size = tl.abs(_load(x, first + row, pixel, channels, pixels, stride_c, stride_m))
        channel = tl.zeros((ROWS, BLOCK), tl.int32) + (first + row)[:, None]
        peak, second, holder = _two_largest(peak, second, holder, size, size * 0.0, channel)
    peak, second, holder = tl.reduce((peak, second, holder), 0, _two_largest)
    tl.store(peaks + 0 * pixels + pixel, peak, mask=inside)
    tl.store(peaks + 1 * pixels + pixel, tl.maximum(second, 0.0), mask=inside)
    tl.store(peaks + 2 * pixels + pixel, holder.to(tl.float32), mask=inside)


@triton.jit
def _pixel_sums(
    x,
    scratch,
    out,
    channels,
    pixels,
    stride_n,
    stride_c,
    stride_m,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    ORDERS: tl.constexpr,
    OTHERS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DENSE: tl.constexpr,
    FOLD: tl.constexpr,
    ONCE: tl.constexpr,
):
    """Each pixel's sums over the channels, divided by its peak, of `ORDERS` orders after `FIRST`.

    With `OTHERS`, over the channels but the largest, divided by the second largest magnitude. The first
    group of `row_sums` finds the peaks itself. With `ONCE`, one tile holds all channels.
    """
    n = tl.program_id(0)
    x += n.to(tl.int64) * stride_n
    pixel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)
    inside = pixel < pixels
    peaks, sums, others = _rooms(scratch, n, pixels, KIND)
    if OTHERS:
        holder = tl.load(peaks + 2 * pixels + pixel, mask=inside, other=-1.0).to(tl.int32)
        sums = others
    stop = ROWS if ONCE else channels
    if ONCE:
        tile = _load(x, row, pixel, channels, pixels, stride_c, stride_m)
    if KIND == _ROW_SUMS and FIRST == 0:
        if ONCE:
            largest = tl.abs(tile)
        else:
            largest = tl.zeros((ROWS, BLOCK), tl.float32)
            for first in range(0, channels, ROWS):
                size = tl.abs(_load(x, first + row, pixel, channels, pixels, stride_c, stride_m))
                largest = _larger(largest, size)
        peak = tl.reduce(largest, 0, _larger)
        tl.store(peaks + pixel, peak, mask=inside)
    else:
        peak = tl.load(peaks + OTHERS * pixels + pixel, mask=inside, other=1.0)
    scale = _inverse(peak)
    zero = tl.zeros((ROWS // FOLD, BLOCK), tl.float32)
    t0 = zero
    t1 = zero
    t2 = zero
    t3 = zero
    t4 = zero
    t5 = zero
    t6 = zero
    t7 = zero
    t8 = zero
    t9 = zero
    for first in range(0, stop, ROWS):
        if not ONCE:
            tile = _load(x, first + row, pixel, channels, pixels, stride_c, stride_m)
        base = tile * scale[None, :]
        if OTHERS:
            base = tl.where((first + row)[:, None] == holder[None, :], 0.0, base)
        power = _power(base, FIRST)
        if ORDERS > 0:
            t0 += _fold(power, 0, DENSE, FOLD)
            power *= base
        if ORDERS > 1:
            t1 += _fold(power, 0, DENSE, FOLD)
            power *= base
        if ORDERS > 2:
            t2 += _fold(power, 0, DENSE, FOLD)
            power *= base
        if ORDERS > 3:
            t3 += _fold(power, 0, DENSE, FOLD)
            power *= base
        if ORDERS > 4:
            t4 += _fold(power, 0, DENSE, FOLD)
            power *= base
        if ORDERS > 5:
            t5 += _fold(power, 0, DENSE, FOLD)
            power *= base
        if ORDERS > 6:
            t6 += _fold(power, 0, DENSE, FOLD)
            power *= base
        if ORDERS > 7:
            t7 += _fold(power, 0, DENSE, FOLD)
            power *= base
        if ORDERS > 8:
            t8 += _fold(power, 0, DENSE, FOLD)
            power *= base
        if ORDERS > 9:
            t9 += _fold(power, 0, DENSE, FOLD)
            power *= base
    if ORDERS > 0:
        tl.store(sums + 0 * pixels + pixel, tl.sum(t0, 0), mask=pixel < pixels)
    if ORDERS > 1:
        tl.store(sums + 1 * pixels + pixel, tl.sum(t1, 0), mask=pixel < pixels)
    if ORDERS > 2:
        tl.store(sums + 2 * pixels + pixel, tl.sum(t2, 0), mask=pixel < pixels)
    if ORDERS > 3:
        tl.store(sums + 3 * pixels + pixel, tl.sum(t3, 0), mask=pixel < pixels)
    if ORDERS > 4:
        tl.store(sums + 4 * pixels + pixel, tl.sum(t4, 0), mask=pixel < pixels)
    if ORDERS > 5:
        tl.store(sums + 5 * pixels + pixel, tl.sum(t5, 0), mask=pixel < pixels)
    if ORDERS > 6:
        tl.store(sums + 6 * pixels + pixel, tl.sum(t6, 0), mask=pixel < pixels)
    if ORDERS > 7:
        tl.store(sums + 7 * pixels + pixel, tl.sum(t7, 0), mask=pixel < pixels)
    if ORDERS > 8:
        tl.store(sums + 8 * pixels + pixel, tl.sum(t8, 0), mask=pixel < pixels)
    if ORDERS > 9:
        tl.store(sums + 9 * pixels + pixel, tl.sum(t9, 0), mask=pixel < pixels)


@triton.jit
def _weight(sums, others, k: tl.constexpr, pixel, pixels, is_holder, own, KIND: tl.constexpr):
    """What a channel's power is multiplied with at each pixel."""
    if KIND == _DIAGONAL:
        weight = tl.full((1, 1), 1.0, tl.float32)
    else:
        weight = tl.load(sums + pixel, mask=pixel < pixels, other=0.0)[None, :]
        if KIND == _OFF_DIAGONAL:
            rest = tl.load(others + k * pixels + pixel, mask=pixel < pixels, other=0.0)[None, :]
            weight = tl.where(is_holder, rest, weight - own)
    return weight


@triton.jit
def _products(x, peaks, channel, pixel, channels, pixels, stride_c, stride_m, KIND: tl.constexpr):
    """The activations times the largest magnitude they meet, their share of it, and if it is their own."""
    tile = _load(x, channel, pixel, channels, pixels, stride_c, stride_m)
    inside = pixel < pixels
    share = tile
    is_holder = tile == tile
    if KIND == _DIAGONAL:
        product = tile * tile
    else:
        peak = tl.load(peaks + pixel, mask=inside, other=1.0)[None, :]
        if KIND == _OFF_DIAGONAL:
            second = tl.load(peaks + pixels + pixel, mask=inside, other=0.0)[None, :]
            holder = tl.load(peaks + 2 * pixels + pixel, mask=inside, other=-1.0).to(tl.int32)[None, :]
            is_holder = channel[:, None] == holder
            product = tile * tl.where(is_holder, second, peak)
            share = tile * _inverse(peak)
        else:
            product = tile * peak
    return product, share, is_holder


@triton.jit
def _with_column(table, t, k: tl.constexpr):
    """The table with the row sums of `t` in its column `k`."""
    column = tl.arange(0, table.shape[1])[None, :]
    return tl.where(column == k, tl.sum(t, 1)[:, None], table)


@triton.jit
def _channel_sums(
    x,
    scratch,
    out,
    channels,
    pixels,
    stride_n,
    stride_c,
    stride_m,
    stride_out,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    ORDERS: tl.constexpr,
    WANTED: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    DENSE: tl.constexpr,
    FOLD: tl.constexpr,
    ONCE: tl.constexpr,
):
    """Each channel's sums over the pixels, rooted: the statistic itself, of `ORDERS` orders after `FIRST`.

    With `ONCE`, one tile holds all pixels.
    """
    n = tl.program_id(0)
    x += n.to(tl.int64) * stride_n
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, COLUMNS)
    peaks, sums, others = _rooms(scratch, n, pixels, KIND)
    stop = COLUMNS if ONCE else pixels
    if ONCE:
        product, share, is_holder = _products(
            x, peaks, channel, column, channels, pixels, stride_c, stride_m, KIND
        )
        largest = tl.abs(product)
    else:
        largest = tl.zeros((BLOCK, COLUMNS), tl.float32)
        for first in range(0, pixels, COLUMNS):
            product, share, is_holder = _products(
                x, peaks, channel, first + column, channels, pixels, stride_c, stride_m, KIND
            )
            largest = _larger(largest, tl.abs(product))
    q = tl.reduce(largest, 1, _larger)
    scale = _inverse(q)
    zero = tl.zeros((BLOCK, COLUMNS // FOLD), tl.float32)
    t0 = zero
    t1 = zero
    t2 = zero
    t3 = zero
    t4 = zero
    t5 = zero
    t6 = zero
    t7 = zero
    t8 = zero
    t9 = zero
    for first in range(0, stop, COLUMNS):
        pixel = first + column
        if not ONCE:
            product, share, is_holder = _products(
                x, peaks, channel, pixel, channels, pixels, stride_c, stride_m, KIND
            )
        base = product * scale[:, None]
        power = _power(base, FIRST)
        own = share
        if KIND == _OFF_DIAGONAL:
            own = _power(share, FIRST)
        if ORDERS > 0:
            t0 += _fold(
                power * _weight(sums + 0 * pixels, others, 0, pixel, pixels, is_holder, own, KIND),
                1,
                DENSE,
                FOLD,
            )
            power *= base
            own *= share
        if ORDERS > 1:
            t1 += _fold(
                power * _weight(sums + 1 * pixels, others, 1, pixel, pixels, is_holder, own, KIND),
                1,
                DENSE,
                FOLD,
            )
            power *= base
            own *= share
        if ORDERS > 2:
            t2 += _fold(
                power * _weight(sums + 2 * pixels, others, 2, pixel, pixels, is_holder, own, KIND),
                1,
                DENSE,
                FOLD,
            )
            power *= base
            own *= share
        if ORDERS > 3:
            t3 += _fold(
                power * _weight(sums + 3 * pixels, others, 3, pixel, pixels, is_holder, own, KIND),
                1,
                DENSE,
                FOLD,
            )
            power *= base
            own *= share
        if ORDERS > 4:
            t4 += _fold(
                power * _weight(sums + 4 * pixels, others, 4, pixel, pixels, is_holder, own, KIND),
                1,
                DENSE,
                FOLD,
            )
            power *= base
            own *= share
        if ORDERS > 5:
            t5 += _fold(
                power * _weight(sums + 5 * pixels, others, 5, pixel, pixels, is_holder, own, KIND),
                1,
                DENSE,
                FOLD,
            )
            power *= base
            own *= share
        if ORDERS > 6:
            t6 += _fold(
                power * _weight(sums + 6 * pixels, others, 6, pixel, pixels, is_holder, own, KIND),
                1,
                DENSE,
                FOLD,
            )
            power *= base
            own *= share
        if ORDERS > 7:
            t7 += _fold(
                power * _weight(sums + 7 * pixels, others, 7, pixel, pixels, is_holder, own, KIND),
                1,
                DENSE,
                FOLD,
            )
            power *= base
            own *= share
        if ORDERS > 8:
            t8 += _fold(
                power * _weight(sums + 8 * pixels, others, 8, pixel, pixels, is_holder, own, KIND),
                1,
                DENSE,
                FOLD,
            )
            power *= base
            own *= share
        if ORDERS > 9:
            t9 += _fold(
                power * _weight(sums + 9 * pixels, others, 9, pixel, pixels, is_holder, own, KIND),
                1,
                DENSE,
                FOLD,
            )
            power *= base
            own *= share
    # All orders of a channel side by side, so that the threads share the roots.
    table = tl.zeros((BLOCK, 16), tl.float32)
    if ORDERS > 0:
        table = _with_column(table, t0, 0)
    if ORDERS > 1:
        table = _with_column(table, t1, 1)
    if ORDERS > 2:
        table = _with_column(table, t2, 2)
    if ORDERS > 3:
        table = _with_column(table, t3, 3)
    if ORDERS > 4:
        table = _with_column(table, t4, 4)
    if ORDERS > 5:
        table = _with_column(table, t5, 5)
    if ORDERS > 6:
        table = _with_column(table, t6, 6)
    if ORDERS > 7:
        table = _with_column(table, t7, 7)
    if ORDERS > 8:
        table = _with_column(table, t8, 8)
    if ORDERS > 9:
        table = _with_column(table, t9, 9)
    order = (FIRST + 1 + tl.arange(0, 16))[None, :]
    position = tl.full((1, 16), -1, tl.int32)
    for k in tl.static_range(len(WANTED)):
        if WANTED[k] <= FIRST + ORDERS:
            position = tl.where(order == WANTED[k], k, position)
    place = out + n.to(tl.int64) * stride_out + position * channels + channel[:, None]
    wanted = (position >= 0) & (channel[:, None] < channels)
    tl.store(place, _root(table, order) * q[:, None], mask=wanted)


def compute(statistic: str, maps: Tensor, orders: tuple[int, ...], out: Tensor) -> None:
    """A statistic of maps `(N, C, M)` into `out` `(N, orders, C)`, whose last two axes are dense."""
    aligned = maps.data_ptr() % 16 == 0, out.data_ptr() % 16 == 0
    index = maps.get_device()
    plan = _plan(statistic, maps.shape, maps.stride(), maps.dtype, orders, out.stride(0), index, aligned)
    if index < 0 or index == torch.cuda.current_device():  # negative: a CPU tensor, in the interpreter
        return _run(plan, maps, out)
    with torch.cuda.device(index):
        return _run(plan, maps, out)


def _run(plan: "list[_Launch]", maps: Tensor, out: Tensor) -> None:
    room = plan[0].room
    scratch = torch.empty(room, dtype=torch.float32, device=maps.device) if room else out
    for launch in plan:
        launch(maps, scratch, out)


class _Launch:
    """One kernel with all that stays the same from batch to batch.

    Triton looks at every argument of every call to find the compiled kernel, and at each tensor to find
    out where it lies; here the one is done once, and the other not at all.
    """

    def __init__(self, kernel: Any, grid: tuple[int, int], rest: tuple[Any, ...], warps: int, room: int):
        self.kernel, self.grid, self.rest, self.warps, self.room = kernel, (*grid, 1), rest, warps, room
        self._compiled: Any = None
        self._may_keep = True

    def __call__(self, *tensors: Tensor) -> None:
        found = self._compiled
        if found is not None:
            try:
                stream = torch._C._cuda_getCurrentRawStream(tensors[0].get_device())
                places = [tensor.data_ptr() for tensor in tensors]
                # No hooks: three times None.
                known = (*self.grid, stream, found.function, found.packed_metadata, None, None, None)
                return found.run(*known, *places, *self.rest)  # type: ignore[no-any-return]
            except (TypeError, AttributeError):  # other versions of Triton take other arguments here
                self._compiled, self._may_keep = None, False
        found = self.kernel[self.grid](*tensors, *self.rest, num_warps=self.warps)
        if self._may_keep and hasattr(found, "packed_metadata"):  # not so in the interpreter
            self._compiled = found
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
    """The kernels to be launched, one after the other, for maps of a shape."""
    examples, channels, pixels = shape
    kind = _KINDS[statistic]
    sizes = (channels, pixels, *strides)
    dense_channels = strides[1] == 1 and channels > 1
    summing_channels, channel_warps = _tile(channels, pixels, dense_channels, dtype.itemsize, reduced=0)
    summing_pixels, pixel_warps = _tile(channels, pixels, dense_channels, dtype.itemsize, reduced=1)
    over_pixels = (examples, triton.cdiv(pixels, summing_channels[1]))
    over_channels = (examples, triton.cdiv(channels, summing_pixels[0]))
    rows = {"row_sums": 1 + GROUP, "diagonal": 0, "off_diagonal": 3 + 2 * GROUP}[statistic]
    room = examples * rows * pixels
    plan = []
    rest: tuple[Any, ...]
    if statistic == "off_diagonal":
        rest = (*sizes, kind, *summing_channels[:2])
        plan.append(_Launch(_two_pixel_peaks, over_pixels, rest, channel_warps, room))
    for first in range(0, max(orders), GROUP):
        group = (kind, first, min(GROUP, max(orders) - first))
        for others in range({"row_sums": 1, "diagonal": 0, "off_diagonal": 2}[statistic]):
            rest = (*sizes, *group, others, *summing_channels, summing_channels[0] >= channels)
            plan.append(_Launch(_pixel_sums, over_pixels, rest, channel_warps, room))
        rest = (*sizes, stride_out, *group, orders, *summing_pixels, summing_pixels[1] >= pixels)
        plan.append(_Launch(_channel_sums, over_channels, rest, pixel_warps, room))
    return plan


def _tile(
    channels: int, pixels: int, dense_channels: bool, itemsize: int, reduced: int
) -> tuple[tuple[int, int, bool, int], int]:
    """How a program that sums over the channels (0) or the pixels (1) walks over an example.

    Gives the tile's channels and pixels, whether the axis summed over is dense in memory, how many of its
    entries a thread holds and folds, and the number of warps. A thread holds 16 bytes along memory, and
    several such pieces across it. The sizes did best on an H200 (`python -m benchmarks.tune_cuda`).
    """
    dense = 0 if dense_channels else 1
    extent = triton.next_power_of_2(channels), triton.next_power_of_2(pixels)
    warps, width, held = _TILES[reduced == dense, reduced](channels, pixels)
    threads = 32 * warps
    vector = min(16 // itemsize, extent[dense])
    width = min(width, extent[dense])
    across = min(extent[1 - dense], held * threads // width)
    # What lies across memory is dealt out to the threads first, then each gets its next piece.
    along = min(width, vector * threads)
    fold = min(vector, width) if reduced == dense else max(1, across * along // (vector * threads))
    return ((width, across) if dense == 0 else (across, width)) + (reduced == dense, fold), warps


# By whether the axis summed over is dense, and which it is: warps, entries along memory, entries of a thread.
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


@triton.jit
def _deviations(
    statistics, predicted, minimum, maximum, starts, weights, out, features, taps, BLOCK: tl.constexpr
):
    """Eq. 3-4 for one example and tap. What is not finite stays so."""
    n, tap = tl.program_id(0).to(tl.int64), tl.program_id(1)
    bounds = tl.load(predicted + n) * features
    start, stop = tl.load(starts + tap), tl.load(starts + tap + 1)
    total = tl.zeros((BLOCK,), tl.float32)
    while start < stop:
        f = start + tl.arange(0, BLOCK)
        inside = f < stop
        value = tl.load(statistics + n * features + f, mask=inside, other=0.0)
        low = tl.load(minimum + bounds + f, mask=inside, other=0.0)
        high = tl.load(maximum + bounds + f, mask=inside, other=0.0)
        weight = tl.load(weights + f, mask=inside, other=0.0)
        below, above = low - value, value - high
        below = tl.where(below <= 0, 0.0, below / tl.abs(low + 1e-6))
        above = tl.where(above <= 0, 0.0, above / tl.abs(high + 1e-6))
        total += weight * (below + above)
        start += BLOCK
    tl.store(out + n * taps + tap, tl.sum(total, 0))


def deviations(
    statistics: Tensor, predicted: Tensor, minimum: Tensor, maximum: Tensor, starts: Tensor, weights: Tensor
) -> Tensor:
    """Deviations from a range summed over each tap's features, `(N, taps)`."""
    examples, features = statistics.shape
    taps = len(starts) - 1
    out = torch.empty(examples, taps, dtype=torch.float32, device=statistics.device)
    with torch.cuda.device_of(statistics):
        _deviations[(examples, taps)](
            statistics, predicted, minimum, maximum, starts, weights, out, features, taps, FEATURES
        )
    return out


@triton.jit
def _widen(statistics, order, segments, minimum, maximum, features, BLOCK: tl.constexpr):
    """One class and some features: take in the examples of that class, one after the other."""
    f = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cls = tl.program_id(1).to(tl.int64)
    inside = f < features
    start, stop = tl.load(segments + cls), tl.load(segments + cls + 1)
    if stop > start:
        low = tl.load(minimum + cls * features + f, mask=inside, other=0.0)
        high = tl.load(maximum + cls * features + f, mask=inside, other=0.0)
        while start < stop:
            n = tl.load(order + start)
            value = tl.load(statistics + n * features + f, mask=inside, other=0.0)
            low, high = tl.minimum(low, value), tl.maximum(high, value)
            start += 1
        tl.store(minimum + cls * features + f, low, mask=inside)
        tl.store(maximum + cls * features + f, high, mask=inside)


def widen(statistics: Tensor, predicted: Tensor, minimum: Tensor, maximum: Tensor) -> None:
    """Widen the range of each example's class in place; a negative class is left out."""
    classes, features = minimum.shape
    ascending, order = predicted.sort()
    segments = torch.searchsorted(ascending, torch.arange(classes + 1, device=predicted.device))
    with torch.cuda.device_of(statistics):
        _widen[(triton.cdiv(features, FEATURES), classes)](
            statistics, order, segments, minimum, maximum, features, FEATURES
        )
