"""The sums of images on the CPU, compiled by numba: the arithmetic is that of `image_numbers.sums_of`.

One image is read a few times while it is in cache. Its lines are summed in float32, in vectors, and the sums
of lines in float64. NaN and infinity make sums of their own image not finite, and no others.

Scratch lines are as long as whole vectors. What lies beyond the image is 0, so that sums may run over it.

All compiled functions are in this file. numba's cache on disk notices a change in a function's own file only.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from torch import Tensor

from gramwatch.numerics.image_scales import BLOCK, CLIPPED, pairs_of
from gramwatch.numerics.kernels.compiling import compiled
from gramwatch.numerics.kernels.threads import in_parts

WHOLE = 32
"""Scratch lines have a multiple of this length."""
_ZERO, _ONE, _QUARTER = np.float32(0), np.float32(1), np.float32(0.25)


@compiled
def _whole(length):
    return (length + WHOLE - 1) // WHOLE * WHOLE


@compiled
def _ramp(length, places):
    """From -1 to 1 over so many places, then 0."""
    ramp = np.zeros(places, np.float32)
    for k in range(length):
        ramp[k] = -1 + 2 * k / max(length - 1, 1)
    return ramp


@compiled
def _starts_and_stops(length, regions):
    """Where regions begin and end. If the length is no multiple of their number, they overlap."""
    edges = np.empty((2, regions), np.int64)
    for i in range(regions):
        edges[0, i] = i * length // regions
        edges[1, i] = ((i + 1) * length + regions - 1) // regions
    return edges


@compiled
def _sum(line):
    total = _ZERO
    for k in range(line.size):
        total += line[k]
    return total


@compiled
def _add(line, total):
    for k in range(total.size):
        total[k] += line[k]


@compiled
def _write_regions(totals, down, across, count, out):
    """Means by region, from sums of lines by row of regions."""
    regions = len(totals)
    for i in range(regions):
        for j in range(regions):
            total = 0.0
            for k in range(across[0, j], across[1, j]):
                total += totals[i, k]
            size = (down[1, i] - down[0, i]) * (across[1, j] - across[0, j])
            out[i * regions + j] = total / (size * count)


@compiled
def _widen(line, high, low):
    for k in range(line.size):
        v = line[k]
        high[k] = v if v > high[k] else high[k]
        low[k] = v if v < low[k] else low[k]


@compiled
def _write_extremes_and_means(x, regions_out, extremes, mean):
    """What the other sums need first."""
    channels, height, width = x.shape
    regions = int(np.sqrt(regions_out.shape[1]))
    down, across = _starts_and_stops(height, regions), _starts_and_stops(width, regions)
    totals = np.empty((regions, width), np.float32)
    high, low = np.empty(width, np.float32), np.empty(width, np.float32)
    for c in range(channels):
        totals[:] = 0
        high[:] = x[c, 0]
        low[:] = x[c, 0]
        total = 0.0
        for r in range(height):
            line = x[c, r]
            total += _sum(line)
            _widen(line, high, low)
            for i in range(regions):
                if down[0, i] <= r < down[1, i]:
                    _add(line, totals[i])
        mean[c] = total / (height * width)
        extremes[0, c], extremes[1, c] = high.max(), low.min()
        _write_regions(totals, down, across, 1, regions_out[c])


@compiled
def _moments(v, ramp):
    """The sums of a line, of its squares and third powers, and of its products with a ramp."""
    one = two = three = tilt = _ZERO
    for k in range(v.size):
        a = v[k]
        b = a * a
        one += a
        two += b
        three += a * b
        tilt += a * ramp[k]
    return one, two, three, tilt


@compiled
def _beyond(line, most, least):
    """How many values are at least `most`, and at most `least`."""
    above = below = _ZERO
    for k in range(line.size):
        above += _ONE if line[k] >= most else _ZERO
        below += _ONE if line[k] <= least else _ZERO
    return above, below


@compiled
def _write_values(x, first, second, share, extremes, mean, variance, third, tilt, clipped):
    """What depends on single pixels."""
    channels, height, width = x.shape
    places, pixels = _whole(width), height * width
    ramp, down = _ramp(width, places), _ramp(height, height)
    centred = np.zeros((channels, places), np.float32)
    apart = np.empty(places, np.float32)
    shift = np.zeros(variance.size)
    about = mean.astype(np.float32)
    most, least = np.empty(channels, np.float32), np.empty(channels, np.float32)
    for c in range(channels):
        high, low = np.float32(extremes[0, c]), np.float32(extremes[1, c])
        near = np.float32(share) * (high - low) + np.float32(1e-12)
        most[c], least[c] = high - near, low + near
    variance[:] = 0
    third[:] = 0
    tilt[:] = 0
    clipped[:] = 0
    for r in range(height):
        for c in range(channels):
            line, v, m = x[c, r], centred[c], about[c]
            for k in range(width):
                v[k] = line[k] - m
            one, two, three, across = _moments(v, ramp)
            shift[c] += one
            variance[c] += two
            third[c] += three
            tilt[0, c] += one * down[r]
            tilt[1, c] += across
            above, below = _beyond(line, most[c], least[c])
            clipped[0, c] += above
            clipped[1, c] += below
        for p in range(first.size):
            a, b = centred[first[p]], centred[second[p]]
            for k in range(places):
                apart[k] = a[k] - b[k]
            one, two, three, _ = _moments(apart, ramp)
            shift[channels + p] += one
            variance[channels + p] += two
            third[channels + p] += three
    tilt /= pixels
    clipped /= pixels
    for p in range(variance.size):  # about the mean, which is no float32 number
        s, two = shift[p] / pixels, variance[p] / pixels
        variance[p] = max(two - s * s, 0.0) if two == two else two
        third[p] = third[p] / pixels - 3 * s * two + 2 * s * s * s


@compiled
def _squares(d):
    """The sums of squares and of magnitudes."""
    square = length = _ZERO
    for k in range(d.size):
        square += d[k] * d[k]
        length += abs(d[k])
    return square, length


@compiled
def _weighted_squares(d, weights):
    total = _ZERO
    for k in range(d.size):
        total += d[k] * d[k] * weights[k]
    return total


@compiled
def _squares_apart(a, b):
    total = _ZERO
    for k in range(a.size):
        d = a[k] - b[k]
        total += d * d
    return total


@compiled
def _bend(a, b, c):
    """The sum of squares of second differences between three lines."""
    total = _ZERO
    for k in range(a.size):
        d = (c[k] - b[k]) - (b[k] - a[k])
        total += d * d
    return total


@compiled
def _add_magnitudes(d, total):
    for k in range(total.size):
        total[k] += abs(d[k])


@compiled
def _widen_magnitudes(d, largest):
    for k in range(largest.size):
        a = abs(d[k])
        largest[k] = a if a > largest[k] else largest[k]


@compiled
def _add_squares(a, b, total):
    for k in range(total.size):
        total[k] += a[k] * a[k] + b[k] * b[k]


@compiled
def _differ(plane, r, v, h):
    """The differences of a line to the next one, 0 if it is the last one, and those within it."""
    height, width = plane.shape
    line, below = plane[r], plane[min(r + 1, height - 1)]
    for k in range(width - 1):
        h[k] = line[k + 1] - line[k]
    for k in range(width):
        v[k] = below[k] - line[k]


@compiled
def _write_differences(x, first, second, square, curved, length):
    """What depends on differences, at any scale."""
    channels, height, width = x.shape
    lines = np.zeros((2, channels, _whole(width)), np.float32)
    square[:] = 0
    curved[:] = 0
    length[:] = 0
    for r in range(height):
        for c in range(channels):
            h = lines[1, c]
            _differ(x[c], r, lines[0, c], h)
            for axis in range(2):
                squares, magnitudes = _squares(lines[axis, c])
                square[axis, c] += squares
                length[axis, c] += magnitudes
            curved[1, c] += _squares_apart(h[1 : width - 1], h[: width - 2])
            if r < height - 2:
                curved[0, c] += _bend(x[c, r], x[c, r + 1], x[c, r + 2])
        for p in range(first.size):
            for axis in range(2):
                apart = _squares_apart(lines[axis, first[p]], lines[axis, second[p]])
                square[axis, channels + p] += apart
    for axis in range(2):
        down, across = (height - 1, width) if axis == 0 else (height, width - 1)
        square[axis] /= down * across
        length[axis] /= down * across
        curved[axis] /= (down - 1) * across if axis == 0 else down * (across - 1)


@compiled
def _write_places(x, block, slope, lines, step):
    """What depends on where differences lie, at full size."""
    channels, height, width = x.shape
    places = _whole(width)
    v, h = np.zeros(places, np.float32), np.zeros(places, np.float32)
    down, across = _ramp(height - 1, height), _ramp(width - 1, places)
    by_row, by_column = np.zeros(height - 1), np.zeros(width - 1)
    total, largest = np.zeros(places, np.float32), np.zeros((2, places), np.float32)
    slope[:] = 0
    for c in range(channels):
        total[:] = 0
        for r in range(height):
            _differ(x[c], r, v, h)
            slope[1, c] += _weighted_squares(h, across)
            _add_magnitudes(h, total)
            _widen_magnitudes(h, largest[1])
            _widen_magnitudes(v, largest[0])
            if r < height - 1:
                squares, magnitudes = _squares(v)
                slope[0, c] += squares * down[r]
                by_row[r] += magnitudes
        by_column += total[: width - 1]
    slope[0] /= (height - 1) * width
    slope[1] /= height * (width - 1)
    step[0], step[1] = largest[0].max(), largest[1].max()
    _write_lines(by_row / (channels * width), block, lines[0])
    _write_lines(by_column / (channels * height), block, lines[1])


@compiled
def _write_gradients(x, busy):
    """The mean square of the gradient by region. The last line and column have none."""
    channels, height, width = x.shape
    places, regions = _whole(width), int(np.sqrt(busy.size))
    v, h = np.zeros(places, np.float32), np.zeros(places, np.float32)
    down, across = _starts_and_stops(height - 1, regions), _starts_and_stops(width - 1, regions)
    totals = np.zeros((regions, places), np.float32)
    for r in range(height - 1):
        for c in range(channels):
            _differ(x[c], r, v, h)
            for i in range(regions):
                if down[0, i] <= r < down[1, i]:
                    _add_squares(v, h, totals[i])
    _write_regions(totals, down, across, channels, busy)


@compiled
def _write_lines(length, block, out):
    """The mean, the largest and the smallest line: averaged over every eighth place, then not."""
    blocks = length.size // block
    phases = length.copy()
    if blocks > 0:
        phases = np.zeros(block, length.dtype)
        for k in range(blocks * block):
            phases[k % block] += length[k] / blocks
    out[0, 0], out[0, 1], out[0, 2] = phases.mean(), phases.max(), phases.min()
    out[1, 0], out[1, 1], out[1, 2] = length.mean(), length.max(), length.min()


@compiled
def _halved(x):
    """Means of 2 x 2 pixels."""
    channels, height, width = x.shape[0], x.shape[1] // 2, x.shape[2] // 2
    y = np.empty((channels, height, width), np.float32)
    for c in range(channels):
        for r in range(height):
            a, b, line = x[c, 2 * r], x[c, 2 * r + 1], y[c, r]
            for k in range(width):
                line[k] = ((a[2 * k] + a[2 * k + 1]) + (b[2 * k] + b[2 * k + 1])) * _QUARTER
    return y


@compiled
def _in_range(images, first, second, block, share, out, start, stop):
    square, curved, length, slope, lines, step = out[:6]
    mean, variance, third, tilt, extremes, clipped, regions, busy = out[6:]
    for n in range(start, stop):
        x = images[n]
        _write_extremes_and_means(x, regions[n], extremes[n], mean[n])
        _write_values(
            x, first, second, share, extremes[n], mean[n], variance[n], third[n], tilt[n], clipped[n]
        )
        _write_places(x, block, slope[n], lines[n], step[n])
        for scale in range(square.shape[1]):
            if scale > 0:
                x = _halved(x)
            _write_differences(x, first, second, square[n, scale], curved[n, scale], length[n, scale])
            if scale < busy.shape[1]:
                _write_gradients(x, busy[n, scale])


def image_sums(images: Tensor, out: Sequence[Tensor]) -> None:
    """Write the sums of images `(N, channels, height, width)`: see `image_numbers.Sums`."""
    x = images.detach().float().contiguous().numpy()
    first, second = _pairs(x.shape[1])
    in_parts(_in_range, len(x), x, first, second, BLOCK, CLIPPED, tuple([t.numpy() for t in out]))


@lru_cache(64)
def _pairs(channels: int) -> tuple[np.ndarray, np.ndarray]:
    """The first and the second channels of the pairs."""
    pairs = np.array(pairs_of(channels), np.int64).reshape(-1, 2)
    return pairs[:, 0].copy(), pairs[:, 1].copy()
