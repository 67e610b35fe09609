"""The programs of Triton for image numbers. `sums_of` and `numbers_from` of `image_numbers` define them.

Four Triton programs run one after the other:

1. `halve` reads four lines: sums, extremes, and the image reduced to a half and a quarter.
2. `read_parts` reads one part of one channel at one scale. It sums all else, about the channel's mean.
3. `add_parts` adds the parts of each image.
4. `write_numbers` is `numbers_from`.

Sums of a part are in float32, one lane for each column. All that follows is in float64, but logarithms. Every
program writes to a place of its own, so results are the same at every call. NaN and infinity make sums of
their own image not finite, and no others.

Names that end in `_v` belong to vertical differences, those in `_h` to horizontal ones.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"

import triton
import triton.language as tl

from gramwatch.numerics.image_scales import BLOCK, BUSY, CLIPPED, FLOOR, REGIONS, SCALES, SHARE

ROWS, COLUMNS = 64, 64
"""The most rows of a part, and its columns: two for each thread of a warp."""
CELLS = 64
"""The cells of 4 x 4 pixels of `halve`: two for each thread of a warp."""
SLOTS = 32
"""The numbers of a part. `_SQUARE` and so on are their places."""

_ROWS, _COLUMNS, _CELLS, _SLOTS = (tl.constexpr(i) for i in (ROWS, COLUMNS, CELLS, SLOTS))
_SCALES, _BUSY = tl.constexpr(len(SCALES)), tl.constexpr(len(BUSY))
_REGIONS, _BLOCK = tl.constexpr(REGIONS), tl.constexpr(BLOCK)
_CLIPPED, _FLOOR, _SHARE = tl.constexpr(CLIPPED), tl.constexpr(FLOOR), tl.constexpr(SHARE)

# Of these, the second number is for the horizontal axis.
_SQUARE, _CURVED, _LENGTH, _APART, _SLOPE, _TILT, _STEP = (tl.constexpr(i) for i in range(0, 14, 2))
# The powers of the centred values, and of their difference from the next channel.
_ONE, _TWO, _THREE, _APART_TWO, _APART_THREE = (tl.constexpr(i) for i in range(14, 19))
_ABOVE, _BELOW, _ABOUT, _HIGH, _LOW = (tl.constexpr(i) for i in range(19, 24))
# These have a number for each column of regions.
_GRADIENT, _REGION = tl.constexpr(24), tl.constexpr(28)


# --- lines -------------------------------------------------------------------------------------------


@triton.jit
def _two_lines(x, row, cell, height, width, stride_h, high, low, STRIDE_W: tl.constexpr, EXACT: tl.constexpr):
    """Two lines of cells: their halves, the sum, magnitudes of differences by line, and wider extremes.

    `EXACT`: all cells are whole.
    """
    zero = tl.zeros_like(high)
    left, right, total, first, second = zero, zero, zero, zero, zero
    for k in tl.static_range(4):
        column = 4 * cell if EXACT else tl.minimum(4 * cell + k, width - 1)
        place = x + column * STRIDE_W + (k * STRIDE_W if EXACT else 0)
        a = _pixels(place, row, height, stride_h)
        b = _pixels(place, row + 1, height, stride_h)
        c = _pixels(place, row + 2, height, stride_h)
        high = tl.maximum(high, tl.maximum(a, b))
        low = tl.minimum(low, tl.minimum(a, b))
        if k < 2:
            left += a + b
        else:
            right += a + b
        length, next_length = tl.abs(b - a), tl.abs(c - b)
        if not EXACT:
            inside = 4 * cell + k < width
            a, b = tl.where(inside & (row < height), a, 0.0), tl.where(inside & (row + 1 < height), b, 0.0)
            length, next_length = tl.where(inside, length, 0.0), tl.where(inside, next_length, 0.0)
            total += a + b
        first += length
        second += next_length
    if EXACT:
        total = left + right
    return left * 0.25, right * 0.25, total, first, second, high, low


@triton.jit
def _pixels(place, row, height, stride_h):
    """Pixels of a line, or of the last line if there is no such line."""
    return tl.load(place + tl.minimum(row, height - 1) * stride_h).to(tl.float32)


@triton.jit
def halve(
    x, scratch, sums, stride_n, stride_c, stride_h, height, width,
    room, quarter_at, bands_at, lines_at, columns_at, parts_at,
    STRIDE_W: tl.constexpr, CHANNELS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Four lines of all channels: the reduced images, and what other sums need first."""
    band, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    x += n * stride_n
    scratch += n * room
    bands, cells, row = tl.cdiv(height, 4), tl.cdiv(width, 4), 4 * band
    zero = tl.zeros((_CELLS,), tl.float32)
    length0, length1, length2, length3 = zero, zero, zero, zero
    for c in range(CHANNELS):
        channel = x + c * stride_c
        half = scratch + (c * (height // 2) + 2 * band) * (width // 2)
        quarter = scratch + quarter_at + (c * (height // 4) + band) * (width // 4)
        total, high, low = zero, zero - float("inf"), zero + float("inf")
        for first in range(0, cells, _CELLS):
            cell = first + tl.arange(0, _CELLS)
            here, near = cell < cells, tl.minimum(cell, cells - 1)
            left, right, upper, one, two, high, low = _two_lines(
                channel, row, near, height, width, stride_h, high, low, STRIDE_W, EXACT
            )
            left_below, right_below, lower, three, four, high, low = _two_lines(
                channel, row + 2, near, height, width, stride_h, high, low, STRIDE_W, EXACT
            )
            total += tl.where(here, upper + lower, 0.0)
            length0 += tl.where(here, one, 0.0)
            length1 += tl.where(here, two, 0.0)
            length2 += tl.where(here, three, 0.0)
            length3 += tl.where(here, four, 0.0)
            is_left, is_right = 2 * cell < width // 2, 2 * cell + 1 < width // 2
            is_upper, is_lower = 2 * band < height // 2, 2 * band + 1 < height // 2
            tl.store(half + 2 * cell, left, mask=is_upper & is_left)
            tl.store(half + 2 * cell + 1, right, mask=is_upper & is_right)
            tl.store(half + width // 2 + 2 * cell, left_below, mask=is_lower & is_left)
            tl.store(half + width // 2 + 2 * cell + 1, right_below, mask=is_lower & is_right)
            mean = ((left + right) + (left_below + right_below)) * 0.25
            tl.store(quarter + cell, mean, mask=(band < height // 4) & (cell < width // 4))
        place = scratch + bands_at + c * 3 * bands + band
        tl.store(place, tl.sum(total))
        tl.store(place + bands, tl.max(high))
        tl.store(place + 2 * bands, tl.min(low))
    lines = scratch + lines_at + row
    tl.store(lines, tl.sum(length0))
    tl.store(lines + 1, tl.sum(length1), mask=row + 1 < height)
    tl.store(lines + 2, tl.sum(length2), mask=row + 2 < height)
    tl.store(lines + 3, tl.sum(length3), mask=row + 3 < height)


# --- parts -------------------------------------------------------------------------------------------


@triton.jit
def _of_bands(of, bands):
    """The sum, the largest and the smallest value of a channel."""
    total = tl.zeros((_COLUMNS,), tl.float32)
    high, low = total - float("inf"), total + float("inf")
    for first in range(0, bands, _COLUMNS):
        band = first + tl.arange(0, _COLUMNS)
        total += tl.load(of + band, mask=band < bands, other=0.0)
        high = tl.maximum(high, tl.load(of + bands + band, mask=band < bands, other=-float("inf")))
        low = tl.minimum(low, tl.load(of + 2 * bands + band, mask=band < bands, other=float("inf")))
    return tl.sum(total), tl.max(high), tl.min(low)


@triton.jit
def _start(region, length):
    """Where a region begins."""
    return region * length // _REGIONS


@triton.jit
def _stop(region, length):
    """Where a region ends. If the length is no multiple of their number, regions overlap."""
    return ((region + 1) * length + _REGIONS - 1) // _REGIONS


@triton.jit
def _splits(height):
    """The number of parts, one above the other, of a region: it may share a line with its neighbours."""
    return tl.cdiv(height // _REGIONS + 3, _ROWS)


@triton.jit
def _write(out, slot, values, inside):
    """The sum over columns."""
    tl.store(out + slot, tl.sum(tl.where(inside, values, 0.0)))


@triton.jit
def _write_regions(out, slot, values, column, width):
    """The sums over the columns of each region."""
    for j in tl.static_range(_REGIONS):
        _write(out, slot + j, values, (column >= _start(j, width)) & (column < _stop(j, width)))


@triton.jit
def _read_part(
    x, other, out, columns, part, height, width, stride_h, about, other_about, high, low,
    STRIDE_W: tl.constexpr, FULL: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """One part of one channel, and of its difference from the next channel. A lane sums one column.

    The rows of the image are divided among the rows of regions, from `first` to `last`. Sums by region may
    take one row more, as regions overlap, and gradients one less, the last: `gradient` and `in_region` are
    what such rows add.
    """
    blocks, splits = tl.cdiv(width, _COLUMNS), _splits(height)
    region, split = part // (blocks * splits), part // blocks % splits
    rows = tl.cdiv(height // _REGIONS + 3, splits)
    first, last = _start(region, height), _start(region + 1, height)
    first_gradient, last_gradient = _start(region, height - 1), _stop(region, height - 1)
    start = first_gradient + split * rows
    stop = tl.minimum(start + rows, _stop(region, height))
    column = part % blocks * _COLUMNS + tl.arange(0, _COLUMNS)
    inside, has_right, has_beyond = column < width, column < width - 1, column < width - 2
    at = tl.minimum(column, width - 1) * STRIDE_W
    x += at
    other += at
    near = _CLIPPED * (high - low) + 1e-12
    most, least = high - near, low + near
    per_row, per_difference = 2.0 / (height - 1), 2.0 / (height - 2)

    zero = tl.zeros((_COLUMNS,), tl.float32)
    square_v, square_h, curved_v, curved_h, length_v, length_h = zero, zero, zero, zero, zero, zero
    apart_v, apart_h, slope, tilt, step_v, step_h = zero, zero, zero, zero, zero, zero
    one, two, three, apart_two, apart_three = zero, zero, zero, zero, zero
    above, below, gradient, in_region = zero, zero, zero, zero
    line, lower = _pixels(x, start, height, stride_h), _pixels(x, start + 1, height, stride_h)
    v = lower - line
    if PAIRED:
        other_line = _pixels(other, start, height, stride_h)
    at_row, at_last = start * stride_h, (height - 1) * stride_h
    for row in tl.range(start, stop, loop_unroll_factor=2):
        place = x + at_row
        lowest = tl.load(x + tl.minimum(at_row + 2 * stride_h, at_last)).to(tl.float32)
        right = tl.load(place + STRIDE_W, mask=has_right).to(tl.float32)
        h = right - line
        squared_v, squared_h = v * v, h * h
        if PAIRED:
            other_lower = tl.load(other + tl.minimum(at_row + stride_h, at_last)).to(tl.float32)
        if (row >= first) & (row < last):
            beyond = tl.load(place + 2 * STRIDE_W, mask=has_beyond).to(tl.float32)
            bend_v = tl.where(row < height - 2, (lowest - lower) - v, 0.0)
            bend_h = (beyond - right) - h
            square_v += squared_v
            square_h += squared_h
            curved_v += bend_v * bend_v
            curved_h += bend_h * bend_h
            length_v += tl.abs(v)
            length_h += tl.abs(h)
            if PAIRED:
                other_right = tl.load(other + at_row + STRIDE_W, mask=has_right).to(tl.float32)
                d_v, d_h = v - (other_lower - other_line), h - (other_right - other_line)
                apart_v += d_v * d_v
                apart_h += d_h * d_h
            if FULL:
                value = line - about
                squared = value * value
                one += value
                two += squared
                three += squared * value
                tilt += value * (row * per_row - 1.0)
                slope += squared_v * (row * per_difference - 1.0)
                step_v = tl.maximum(step_v, tl.abs(v))
                step_h = tl.maximum(step_h, tl.abs(h))
                above += tl.where(line >= most, 1.0, 0.0)
                below += tl.where(line <= least, 1.0, 0.0)
                if PAIRED:
                    apart = value - (other_line - other_about)
                    squared = apart * apart
                    apart_two += squared
                    apart_three += squared * apart
            if row >= last_gradient:
                gradient -= squared_v + squared_h
        else:
            gradient += tl.where(row < last_gradient, squared_v + squared_h, 0.0)
            in_region += tl.where(row >= last, line - about, 0.0)
        v = lowest - lower
        line, lower = lower, lowest
        at_row += stride_h
        if PAIRED:
            other_line = other_lower

    square_h, length_h = tl.where(has_right, square_h, 0.0), tl.where(has_right, length_h, 0.0)
    _write(out, _SQUARE, square_v, inside)
    _write(out, _SQUARE + 1, square_h, inside)
    _write(out, _CURVED, curved_v, inside)
    _write(out, _CURVED + 1, curved_h, has_beyond)
    _write(out, _LENGTH, length_v, inside)
    _write(out, _LENGTH + 1, length_h, inside)
    _write_regions(out, _GRADIENT, gradient + square_v + square_h, column, width - 1)
    if PAIRED:
        _write(out, _APART, apart_v, inside)
        _write(out, _APART + 1, apart_h, has_right)
    if FULL:
        tl.store(columns + (region * splits + split) * width + column, length_h, mask=inside)
        _write(out, _SLOPE, slope, inside)
        _write(out, _SLOPE + 1, square_h * (column * (2.0 / (width - 2)) - 1.0), inside)
        _write(out, _TILT, tilt, inside)
        _write(out, _TILT + 1, one * (column * (2.0 / (width - 1)) - 1.0), inside)
        tl.store(out + _STEP, tl.max(step_v))  # pixels beyond the image are those of its edge
        tl.store(out + _STEP + 1, tl.max(tl.where(has_right, step_h, 0.0)))
        _write(out, _ONE, one, inside)
        _write(out, _TWO, two, inside)
        _write(out, _THREE, three, inside)
        _write(out, _ABOVE, above, inside)
        _write(out, _BELOW, below, inside)
        tl.store(out + _ABOUT, about)
        tl.store(out + _HIGH, high)
        tl.store(out + _LOW, low)
        _write_regions(out, _REGION, one + in_region, column, width)
        if PAIRED:
            _write(out, _APART_TWO, apart_two, inside)
            _write(out, _APART_THREE, apart_three, inside)


@triton.jit
def _parts(height, width):
    """The number of parts of a channel."""
    return _REGIONS * _splits(height) * tl.cdiv(width, _COLUMNS)


@triton.jit
def read_parts(
    x, scratch, sums, stride_n, stride_c, stride_h, height, width,
    room, quarter_at, bands_at, lines_at, columns_at, parts_at,
    STRIDE_W: tl.constexpr, CHANNELS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One part of one channel at one scale: a band of lines of a row of regions."""
    part, c, n = tl.program_id(0) // CHANNELS, tl.program_id(0) % CHANNELS, tl.program_id(1).to(tl.int64)
    x += n * stride_n
    scratch += n * room
    full, half = _parts(height, width), _parts(height // 2, width // 2)
    other = (c + 1) % CHANNELS
    out = scratch + parts_at + (part * CHANNELS + c) * _SLOTS
    columns = scratch + columns_at + c * _REGIONS * _splits(height) * width
    if part < full:
        bands, pixels = tl.cdiv(height, 4), height * width
        total, high, low = _of_bands(scratch + bands_at + c * 3 * bands, bands)
        other_total, _, _ = _of_bands(scratch + bands_at + other * 3 * bands, bands)
        _read_part(
            x + c * stride_c, x + other * stride_c, out, columns, part, height, width, stride_h,
            total / pixels, other_total / pixels, high, low, STRIDE_W, True, CHANNELS > 1,
        )  # fmt: skip
    else:
        is_half = part < full + half
        side = tl.where(is_half, 2, 4)
        height, width = height // side, width // side
        reduced = scratch + tl.where(is_half, 0, quarter_at)
        _read_part(
            reduced + c * height * width, reduced + other * height * width, out, columns,
            part - tl.where(is_half, full, full + half), height, width, width,
            0.0, 0.0, 0.0, 0.0, 1, False, CHANNELS > 1,
        )  # fmt: skip


# --- images ------------------------------------------------------------------------------------------


@triton.jit
def _add_lines(of, out, count, stride, length, over):
    """The mean, the largest and the smallest line: averaged over every eighth place, then not.

    A line is the sum of `count` numbers, `stride` apart.
    """
    piece = tl.arange(0, 4)[:, None, None]
    offset = tl.arange(0, 32)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    phases, total = tl.zeros((32, _BLOCK), tl.float64), tl.zeros((32, _BLOCK), tl.float64)
    most, least = total - float("inf"), total + float("inf")
    whole = length // _BLOCK * _BLOCK
    for first in range(0, length, 32 * _BLOCK):
        place = first + offset
        inside, line = place < length, tl.zeros((32, _BLOCK), tl.float64)
        for before in range(0, count, 4):
            at = of + (before + piece) * stride + place[None, :, :]
            mask = (before + piece < count) & inside[None, :, :]
            line += tl.sum(tl.load(at, mask=mask, other=0.0).to(tl.float64), 0)
        total += line
        phases += tl.where(place < whole, line, 0.0)
        most = tl.maximum(most, tl.where(inside, line, -float("inf")))
        least = tl.minimum(least, tl.where(inside, line, float("inf")))
    phase = tl.sum(phases, 0) / (whole // _BLOCK)
    tl.store(out, tl.sum(phase) / _BLOCK / over)
    tl.store(out + 1, tl.max(phase) / over)
    tl.store(out + 2, tl.min(phase) / over)
    tl.store(out + 3, tl.sum(total) / length / over)
    tl.store(out + 4, tl.max(most) / over)
    tl.store(out + 5, tl.min(least) / over)


@triton.jit
def _add(parts, out, by_region, CHANNELS: tl.constexpr):
    """Sums over the parts of each row of regions, then over all. Extremes are the largest numbers."""
    region, piece = tl.arange(0, _REGIONS)[:, None, None], tl.arange(0, 8)[None, :, None]
    slot = tl.arange(0, _SLOTS)[None, None, :]
    total = tl.zeros((_REGIONS, _SLOTS), tl.float64)
    most = total - float("inf")
    for before in range(0, by_region, 8):
        at = parts + ((region * by_region + before + piece) * CHANNELS) * _SLOTS + slot
        here = before + piece < by_region
        total += tl.sum(tl.load(at, mask=here, other=0.0).to(tl.float64), 1)
        most = tl.maximum(most, tl.max(tl.load(at, mask=here, other=-float("inf")).to(tl.float64), 1))
    slot = tl.arange(0, _SLOTS)
    tl.store(out + tl.arange(0, _REGIONS)[:, None] * _SLOTS + slot[None, :], total)
    is_largest = ((slot >= _STEP) & (slot < _STEP + 2)) | ((slot >= _ABOUT) & (slot <= _LOW))
    together = tl.where(is_largest, tl.max(most, 0), tl.sum(total, 0))
    tl.store(out + _REGIONS * _SLOTS + slot, together)


@triton.jit
def add_parts(
    x, scratch, sums, stride_n, stride_c, stride_h, height, width,
    room, quarter_at, bands_at, lines_at, columns_at, parts_at,
    STRIDE_W: tl.constexpr, CHANNELS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The sums of one channel at one scale, or the lines of one axis.

    `sums` `(N, scales, channels, regions + 1, slots)`: by row of regions, then over the image. The lines are
    behind them.
    """
    works: tl.constexpr = _SCALES * CHANNELS
    work, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    scratch += n * room
    sums += n * (works * (_REGIONS + 1) * _SLOTS + 12)
    if work < works:
        scale, c = work // CHANNELS, work % CHANNELS
        full, half = _parts(height, width), _parts(height // 2, width // 2)
        before = tl.where(scale == 0, 0, tl.where(scale == 1, full, full + half))
        parts = scratch + parts_at + (before * CHANNELS + c) * _SLOTS
        by_region = _parts(height >> scale, width >> scale) // _REGIONS
        _add(parts, sums + work * (_REGIONS + 1) * _SLOTS, by_region, CHANNELS)
    else:
        axis = work - works
        out = sums + works * (_REGIONS + 1) * _SLOTS + 6 * axis
        if axis == 0:
            _add_lines(scratch + lines_at, out, 1, 0, height - 1, CHANNELS * width)
        else:
            count = CHANNELS * _REGIONS * _splits(height)
            _add_lines(scratch + columns_at, out, count, width, width - 1, CHANNELS * height)


@triton.jit
def _log(x):
    """A float64 logarithm would take long on most GPUs. Its argument is as exact as float32."""
    return tl.log(x.to(tl.float32)).to(tl.float64)


@triton.jit
def _of(sums, slot, scale, channel, CHANNELS: tl.constexpr):
    """A sum over the image."""
    return tl.load(sums + ((scale * CHANNELS + channel) * (_REGIONS + 1) + _REGIONS) * _SLOTS + slot)


@triton.jit
def _by_region(sums, slot, scale, channel, height, width, CHANNELS: tl.constexpr):
    """The means by region: a vector of all regions, and as many channels as `channel` has."""
    region = tl.arange(0, _REGIONS * _REGIONS)
    i, j = region // _REGIONS, region % _REGIONS
    size = (_stop(i, height) - _start(i, height)) * (_stop(j, width) - _start(j, width))
    at = sums + ((scale * CHANNELS + channel) * (_REGIONS + 1) + i) * _SLOTS + slot + j
    return tl.load(at) / size


@triton.jit
def _places(axis, height, width, FEWER: tl.constexpr):
    """The number of places, if there are `FEWER` along the axis."""
    return tl.where(axis == 0, (height - FEWER) * width, height * (width - FEWER)).to(tl.float64)


@triton.jit
def _correlation(one, other, apart, floor):
    return (one + other - apart) / 2 / tl.sqrt(one * other + floor * floor)


@triton.jit
def _moments(sums, channel, pixels, floor, TWO: tl.constexpr, THREE: tl.constexpr, PAIR: tl.constexpr,
             CHANNELS: tl.constexpr):  # fmt: skip
    """The variance, and the variance and third power with the floor: about the mean, no float32 number."""
    s = _of(sums, _ONE, 0, channel, CHANNELS) / pixels
    if PAIR:
        s -= _of(sums, _ONE, 0, (channel + 1) % CHANNELS, CHANNELS) / pixels
    two = _of(sums, TWO, 0, channel, CHANNELS) / pixels
    three = _of(sums, THREE, 0, channel, CHANNELS) / pixels - 3 * s * two + 2 * s * s * s
    variance = tl.maximum(two - s * s, 0.0)
    variance = tl.where(two == two, variance, two)
    floored = variance + floor
    return variance, floored, three / (floored * tl.sqrt(floored))


@triton.jit
def write_numbers(
    x, out, sums, stride_n, stride_c, stride_h, height, width,
    room, quarter_at, bands_at, lines_at, columns_at, parts_at,
    STRIDE_W: tl.constexpr, CHANNELS: tl.constexpr, EXACT: tl.constexpr,
    PAIRS: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr, MOST_CHANNELS: tl.constexpr,
):  # fmt: skip
    """The numbers of one image, in the order of `image_numbers`. Indices run over channels last.

    `MOST` is at least the number of values that a vector holds, `MOST_CHANNELS` that of channels.
    """
    n = tl.program_id(1).to(tl.int64)
    lines_of: tl.constexpr = _SCALES * CHANNELS * (_REGIONS + 1) * _SLOTS
    sums += n * (lines_of + 12)
    out += n * WIDTH
    each = tl.arange(0, MOST_CHANNELS)
    real, each = each < CHANNELS, tl.minimum(each, CHANNELS - 1)
    high, low = _of(sums, _HIGH, 0, each, CHANNELS), _of(sums, _LOW, 0, each, CHANNELS)
    peak = tl.max(tl.maximum(tl.abs(high), tl.abs(low)))
    floor = _FLOOR * peak * peak + 1e-12
    pixels = (height * width).to(tl.float64)

    # Detail: (scales, axes, 3, channels), and (scales, 3) of regions.
    f = tl.arange(0, MOST)
    inside, f = f < 6 * _SCALES * CHANNELS, tl.minimum(f, 6 * _SCALES * CHANNELS - 1)
    c, what, axis, scale = f % CHANNELS, f // CHANNELS % 3, f // (3 * CHANNELS) % 2, f // (6 * CHANNELS)
    places = _places(axis, height >> scale, width >> scale, 1)
    fewer = _places(axis, height >> scale, width >> scale, 2)
    square = _log(_of(sums, _SQUARE + axis, scale, c, CHANNELS) / places + floor)
    curved = _log(_of(sums, _CURVED + axis, scale, c, CHANNELS) / fewer + floor)
    length = _log(_of(sums, _LENGTH + axis, scale, c, CHANNELS) / places + tl.sqrt(floor))
    spread = length - square / 2
    tl.store(out + f, tl.where(what == 0, square, tl.where(what == 1, curved, spread)), mask=inside)
    out += 6 * _SCALES * CHANNELS
    for scale in tl.static_range(_BUSY):
        mean = tl.zeros((_REGIONS * _REGIONS,), tl.float64)
        for c in range(CHANNELS):
            mean += _by_region(
                sums, _GRADIENT, scale, c, (height >> scale) - 1, (width >> scale) - 1, CHANNELS
            )
        energy = _log(mean / CHANNELS + floor)
        apart = energy - tl.sum(energy) / (_REGIONS * _REGIONS)
        tl.store(out, tl.min(energy))
        tl.store(out + 1, tl.max(energy))
        tl.store(out + 2, tl.sqrt(tl.sum(apart * apart) / (_REGIONS * _REGIONS)))
        out += 3

    # Grain: (scales, axes, pairs), and (axes, 2 kinds, largest and smallest) of lines.
    if PAIRS > 0:
        f = tl.arange(0, MOST)
        inside, f = f < 2 * _SCALES * PAIRS, tl.minimum(f, 2 * _SCALES * PAIRS - 1)
        c, axis, scale = f % PAIRS, f // PAIRS % 2, f // (2 * PAIRS)
        places = _places(axis, height >> scale, width >> scale, 1)
        one = _of(sums, _SQUARE + axis, scale, c, CHANNELS) / places
        other = _of(sums, _SQUARE + axis, scale, (c + 1) % CHANNELS, CHANNELS) / places
        apart = _of(sums, _APART + axis, scale, c, CHANNELS) / places
        correlation = _correlation(one, other, apart, floor)
        tl.store(out + f, _log(tl.maximum(1 - correlation, 0.0) + _SHARE), mask=inside)
        out += 2 * _SCALES * PAIRS
    f = tl.arange(0, 8)
    axis, kind, extreme = f // 4, f // 2 % 2, f % 2
    step = tl.zeros((8,), tl.float64)
    for c in range(CHANNELS):
        step = tl.maximum(step, _of(sums, _STEP + axis, 0, c, CHANNELS))
    small = 1e-3 * step + 1e-12
    line = sums + lines_of + (axis * 2 + kind) * 3
    tl.store(out + f, _log(tl.load(line + 1 + extreme) + small) - _log(tl.load(line) + small))
    out += 8

    # Colour: (4, pairs), and the means.
    variance, floored, skewness = _moments(sums, each, pixels, floor, _TWO, _THREE, False, CHANNELS)
    if PAIRS > 0:
        pair = real & (each < PAIRS)
        apart, apart_floored, apart_skewness = _moments(
            sums, each, pixels, floor, _APART_TWO, _APART_THREE, True, CHANNELS
        )
        other, _, _ = _moments(sums, (each + 1) % CHANNELS, pixels, floor, _TWO, _THREE, False, CHANNELS)
        correlation = _correlation(variance, other, apart, floor)
        rest = tl.maximum(1 - correlation * correlation, 0.0) + _SHARE / 10
        tl.store(out + each, correlation, mask=pair)
        tl.store(out + PAIRS + each, _log(rest), mask=pair)
        tl.store(out + 2 * PAIRS + each, _log(apart_floored), mask=pair)
        tl.store(out + 3 * PAIRS + each, apart_skewness, mask=pair)
        out += 4 * PAIRS
    about = _of(sums, _ABOUT, 0, each, CHANNELS)
    tl.store(out + each, about + _of(sums, _ONE, 0, each, CHANNELS) / pixels, mask=real)
    out += CHANNELS

    # Tone: (8, channels).
    above, below = _of(sums, _ABOVE, 0, each, CHANNELS), _of(sums, _BELOW, 0, each, CHANNELS)
    tl.store(out + each, _log(above / pixels + _SHARE), mask=real)
    tl.store(out + CHANNELS + each, _log(below / pixels + _SHARE), mask=real)
    tl.store(out + 2 * CHANNELS + each, high, mask=real)
    tl.store(out + 3 * CHANNELS + each, low, mask=real)
    tl.store(out + 4 * CHANNELS + each, _log(floored), mask=real)
    tl.store(out + 5 * CHANNELS + each, skewness, mask=real)
    for c in range(CHANNELS):
        mean = _by_region(sums, _REGION, 0, c, height, width, CHANNELS)
        mean += _of(sums, _ABOUT, 0, c, CHANNELS)
        tl.store(out + 6 * CHANNELS + c, tl.min(mean))
        tl.store(out + 7 * CHANNELS + c, tl.max(mean))
    out += 8 * CHANNELS

    # Layout: (axes, channels) of differences, then of values.
    for axis in tl.static_range(2):
        places = _places(axis, height, width, 1)
        slope = _of(sums, _SLOPE + axis, 0, each, CHANNELS) / places
        square = _of(sums, _SQUARE + axis, 0, each, CHANNELS) / places
        tilt = _of(sums, _TILT + axis, 0, each, CHANNELS) / pixels
        tl.store(out + axis * CHANNELS + each, slope / (square + floor), mask=real)
        tl.store(out + (2 + axis) * CHANNELS + each, tilt / tl.sqrt(floored), mask=real)
