"""The Triton programs: Gram statistics, deviations and bounds, as they run on the GPU.

All orders of a tile of activations are in registers. A map is read twice as it lies in memory, channels first
or last: once for the sums over the channels, once for the sums over the pixels.
`numerics.kernels.cuda` launches the programs.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"

import triton
import triton.language as tl

GROUP = 10
"""The number of orders that are summed at a time, in registers."""

DOUBLED = (1, 2, 4, 8)
"""The orders of `read`. Each power is the square of the one before."""

_ROW_SUMS, _DIAGONAL, _OFF_DIAGONAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_GROUP = tl.constexpr(GROUP)
_SMALLEST = tl.constexpr(2.0**-126)


@triton.jit
def _load(x, channel, pixel, channels, pixels, stride_c, stride_m):
    """A tile of one example, channels x pixels, in float32. It is zero outside the example."""
    inside = (channel[:, None] < channels) & (pixel[None, :] < pixels)
    place = x + channel[:, None] * stride_c + pixel[None, :] * stride_m
    return tl.load(place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _larger(a, b):
    """The larger of two values. It is NaN if one of them is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _inverse(peak):
    """One over a magnitude. It is 0 if the magnitude is too small to divide by."""
    return tl.where(peak < _SMALLEST, 0.0, 1.0 / peak)


@triton.jit
def _power(base, EXPONENT: tl.constexpr):
    """`base^(EXPONENT + 1)`, the first power of a group of orders."""
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
    """Sum the `FOLD` entries along an axis that one thread holds: neighbours if DENSE, else evenly spaced."""
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
    """The addresses of an example's peaks, its pixel sums, and its pixel sums without the largest channel."""
    peaks: tl.constexpr = 3 if KIND == _OFF_DIAGONAL else 1
    rows: tl.constexpr = peaks + (2 if KIND == _OFF_DIAGONAL else 1) * _GROUP
    scratch += n.to(tl.int64) * rows * pixels
    return scratch, scratch + peaks * pixels, scratch + (peaks + _GROUP) * pixels


@triton.jit
def two_pixel_peaks(
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
    """The largest and the second largest magnitude of each pixel, and the channel of the largest."""
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
def pixel_sums(
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
    """For each pixel, the sums over the channels, divided by its peak, of `ORDERS` orders after `FIRST`.

    With `OTHERS`, the sums leave out the largest channel, and the divisor is the second largest magnitude.
    The first group of `row_sums` also computes the peaks. With `ONCE`, one tile holds all channels.
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
    """The factor of a channel's power at each pixel."""
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
    """For each activation: its product with a peak, its share of the pixel's peak, whether it is the peak.

    The product is with the pixel's largest magnitude, or for `off_diagonal` with the largest of the other
    channels. For `diagonal` it is the square.
    """
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
def channel_sums(
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
    """Per channel, the roots of the sums over the pixels: the statistic of `ORDERS` orders after `FIRST`.

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
    # All orders of a channel are side by side, so that the threads share the work of the roots.
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


@triton.jit
def deviations(
    statistics, predicted, minimum, maximum, starts, weights, out, features, taps, BLOCK: tl.constexpr
):
    """Eq. 3-4 for one example and tap. A value that is not finite makes the sum not finite."""
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


@triton.jit
def widen(statistics, order, segments, minimum, maximum, features, BLOCK: tl.constexpr):
    """Widen one class and one block of features by the examples of that class, one after the other."""
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
