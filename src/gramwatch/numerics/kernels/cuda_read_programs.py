"""The programs of Triton that read a part of a tensor as it lies: its statistics and channel means."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"

import triton
import triton.language as tl

from gramwatch.numerics.kernels.programs import _inverse, _larger
from gramwatch.numerics.samples import TOGETHER

_TOGETHER = tl.constexpr(TOGETHER)


@triton.jit
def _four_sums(a0, a1, a2, a3, b0, b1, b2, b3):
    """Four sums at a time, which takes one exchange between threads."""
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _part(x, pixel, channel, pixels, channels, width, start, down, right, along, skip, PIXELS: tl.constexpr):
    """A tile of the part that counts, in float32. It is zero outside of the part.

    `PIXELS` is the axis of the pixels, and the other axis that of the channels. Threads side by side read
    along the second axis. Of groups of channels, one in every `skip` channels counts.
    """
    spot = start + (pixel // width) * down + (pixel % width) * right
    place = (channel // _TOGETHER * skip + channel % _TOGETHER) * along
    spots = x + tl.expand_dims(spot, 1 - PIXELS) + tl.expand_dims(place, PIXELS)
    inside = tl.expand_dims(pixel < pixels, 1 - PIXELS) & tl.expand_dims(channel < channels, PIXELS)
    return tl.load(spots, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _write_order(out, sums, q, channel, channels, ORDER: tl.constexpr, POSITION: tl.constexpr):
    """Write one order's statistics, if they are wanted."""
    if POSITION >= 0:
        root = sums
        if ORDER > 1:  # sums of even powers are never negative
            root = tl.where(sums > 0, tl.exp2(tl.log2(sums) / ORDER), sums)
        tl.store(out + POSITION * channels + channel, root * q, mask=channel < channels)


@triton.jit
def _sums_of_pixels(tile, peak):
    """For each pixel, the sums over the channels of the orders 1, 2, 4, 8, divided by its peak."""
    t0 = tile * _inverse(peak)[:, None]
    t1 = t0 * t0
    t2 = t1 * t1
    t3 = t2 * t2
    return tl.reduce((t0, t1, t2, t3), 1, _four_sums)


@triton.jit
def _write_channels(
    tile, peak, s0, s1, s2, s3, out, means, channel, channels, pixels,
    POSITIONS: tl.constexpr, MEANS: tl.constexpr,
):  # fmt: skip
    """Per channel, the roots of the sums over the pixels, and the mean. The tile holds all pixels.

    The positions of the orders 1, 2, 4, 8 are negative if an order is not wanted.
    """
    if MEANS:
        tl.store(means + channel, tl.sum(tile, 0) / pixels, mask=channel < channels)
    tile *= peak[:, None]
    q = tl.reduce(tl.abs(tile), 0, _larger)
    t0 = tile * _inverse(q)[None, :]
    t1 = t0 * t0
    t2 = t1 * t1
    t3 = t2 * t2
    t0 *= s0[:, None]
    t1 *= s1[:, None]
    t2 *= s2[:, None]
    t3 *= s3[:, None]
    t0, t1, t2, t3 = tl.reduce((t0, t1, t2, t3), 0, _four_sums)
    _write_order(out, t0, q, channel, channels, 1, POSITIONS[0])
    _write_order(out, t1, q, channel, channels, 2, POSITIONS[1])
    _write_order(out, t2, q, channel, channels, 4, POSITIONS[2])
    _write_order(out, t3, q, channel, channels, 8, POSITIONS[3])


@triton.jit
def _read_whole(
    x, out, means, channels, pixels, width, start, down, right, along, skip,
    POSITIONS: tl.constexpr, MEANS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The statistics of a part that one tile holds. It is read once."""
    pixel, channel = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tile = _part(x, pixel, channel, pixels, channels, width, start, down, right, along, skip, 0)
    peak = tl.reduce(tl.abs(tile), 1, _larger)
    s0, s1, s2, s3 = _sums_of_pixels(tile, peak)
    _write_channels(
        tile, peak, s0, s1, s2, s3, out, means, channel, channels, pixels, POSITIONS, MEANS
    )  # fmt: skip


@triton.jit
def _read_pixels(
    x, scratch, channels, pixels, width, start, down, right, along, skip,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """For each pixel, its largest magnitude, and its sums over the channels divided by that."""
    column = tl.arange(0, COLUMNS)
    for before in range(0, pixels, ROWS):
        pixel = before + tl.arange(0, ROWS)
        tile = _part(x, pixel, column, pixels, channels, width, start, down, right, along, skip, 0)
        largest = tl.abs(tile)
        for first in range(COLUMNS, channels, COLUMNS):
            channel = first + column
            other = _part(x, pixel, channel, pixels, channels, width, start, down, right, along, skip, 0)
            largest = _larger(largest, tl.abs(other))
        peak = tl.reduce(largest, 1, _larger)
        scale = _inverse(peak)[:, None]
        t0 = tile * scale
        t1 = t0 * t0
        t2 = t1 * t1
        t3 = t2 * t2
        for first in range(COLUMNS, channels, COLUMNS):
            channel = first + column
            base = _part(x, pixel, channel, pixels, channels, width, start, down, right, along, skip, 0)
            base *= scale
            t0 += base
            base *= base
            t1 += base
            base *= base
            t2 += base
            base *= base
            t3 += base
        t0, t1, t2, t3 = tl.reduce((t0, t1, t2, t3), 1, _four_sums)
        row, here = scratch + pixel, pixel < pixels
        tl.store(row, peak, mask=here)
        tl.store(row + pixels, t0, mask=here)
        tl.store(row + 2 * pixels, t1, mask=here)
        tl.store(row + 3 * pixels, t2, mask=here)
        tl.store(row + 4 * pixels, t3, mask=here)


@triton.jit
def _read_channels(
    x, scratch, out, means, channels, pixels, width, start, down, right, along, skip,
    POSITIONS: tl.constexpr, MEANS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The statistics of a part whose sums over the channels are known. A tile holds all pixels."""
    pixel = tl.arange(0, ROWS)
    row, here = scratch + pixel, pixel < pixels
    peak = tl.load(row, mask=here, other=0.0)
    s0 = tl.load(row + pixels, mask=here, other=0.0)
    s1 = tl.load(row + 2 * pixels, mask=here, other=0.0)
    s2 = tl.load(row + 3 * pixels, mask=here, other=0.0)
    s3 = tl.load(row + 4 * pixels, mask=here, other=0.0)
    for first in range(0, channels, COLUMNS):
        channel = first + tl.arange(0, COLUMNS)
        tile = _part(x, pixel, channel, pixels, channels, width, start, down, right, along, skip, 0)
        _write_channels(tile, peak, s0, s1, s2, s3, out, means, channel, channels, pixels, POSITIONS, MEANS)


@triton.jit
def _read_means(
    x, means, channel, channels, pixels, width, start, down, right, along, skip,
    ROWS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """The means of some channels over the pixels."""
    row = tl.arange(0, ROWS)
    total = _part(x, row, channel, pixels, channels, width, start, down, right, along, skip, PIXELS)
    for first in range(ROWS, pixels, ROWS):
        pixel = first + row
        total += _part(x, pixel, channel, pixels, channels, width, start, down, right, along, skip, PIXELS)
    tl.store(means + channel, tl.sum(total, PIXELS) / pixels, mask=channel < channels)


@triton.jit
def read_means(
    x, means, stride_n, along, channels, pixels, width, start, down, right, skip,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """The mean of each channel over the pixels."""
    n = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x += n * stride_n
    means += n * channels
    _read_means(x, means, channel, channels, pixels, width, start, down, right, along, skip, ROWS, PIXELS)


@triton.jit
def _read_statistics(
    x, scratch, out, means, channels, pixels, width, start, down, right, along, skip,
    POSITIONS: tl.constexpr, MEANS: tl.constexpr, WHOLE: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, ALL_COLUMNS: tl.constexpr, ALL_ROWS: tl.constexpr,
):  # fmt: skip
    """The statistics of one example, and the means of the same part."""
    if WHOLE:
        _read_whole(
            x, out, means, channels, pixels, width, start, down, right, along, skip,
            POSITIONS, MEANS, ALL_COLUMNS, ALL_ROWS,
        )  # fmt: skip
    else:
        _read_pixels(x, scratch, channels, pixels, width, start, down, right, along, skip, COLUMNS, ROWS)
        tl.debug_barrier()  # all threads see the sums that others have written
        _read_channels(
            x, scratch, out, means, channels, pixels, width, start, down, right, along, skip,
            POSITIONS, MEANS, ALL_COLUMNS, ALL_ROWS,
        )  # fmt: skip


@triton.jit
def read_example(
    x, scratch, out, means, stride_n, along, stride_out,
    channels, pixels, width, start, down, right, skip,
    mean_channels, mean_pixels, mean_width, mean_start, mean_down, mean_right, mean_skip,
    POSITIONS: tl.constexpr, MEANS: tl.constexpr, WHOLE: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, ALL_COLUMNS: tl.constexpr, ALL_ROWS: tl.constexpr,
    MEAN_COLUMNS: tl.constexpr, MEAN_ROWS: tl.constexpr,
):  # fmt: skip
    """Row sums of one example, and its channel means: of the same part of the tensor, or of another part.

    `MEANS` is 0 without means, 1 for the same part, 2 for another. The means of another part are the work of
    further programs of the same launch. With `WHOLE`, one tile holds the part. Otherwise, `scratch` has five
    numbers for each pixel.
    """
    n = tl.program_id(0).to(tl.int64)
    x += n * stride_n
    scratch += n * 5 * pixels
    out += n * stride_out
    means += n * mean_channels
    work = tl.program_id(1) if MEANS == 2 else 0
    if work > 0:
        channel = (work - 1) * MEAN_COLUMNS + tl.arange(0, MEAN_COLUMNS)
        _read_means(
            x, means, channel, mean_channels, mean_pixels, mean_width, mean_start, mean_down, mean_right,
            along, mean_skip, MEAN_ROWS, 0,
        )  # fmt: skip
    else:
        _read_statistics(
            x, scratch, out, means, channels, pixels, width, start, down, right, along, skip,
            POSITIONS, MEANS == 1, WHOLE, COLUMNS, ROWS, ALL_COLUMNS, ALL_ROWS,
        )  # fmt: skip
