"""Gram statistics on the CPU: the programs, compiled by numba. `numerics.kernels.cpu` calls them.

The arithmetic is that of `numerics.statistics`, with ten orders at a time in registers. An example is read a
few times while it is in cache. It is a matrix whose columns are processed side by side, in vectors. It is
channels x pixels, or pixels x channels if the channels are dense in memory or the pixels are few. The sums
`t` of each order are of values divided by a magnitude `q`. The statistic is `q root(t)`.

NaN and infinity survive. Magnitudes are compared as integers, where NaN is larger than all other values. The
compiler may not assume that values are finite.

A magnitude below 2^-126, the smallest normal float32, is treated as 0 as a divisor, because its inverse may
overflow. So a statistic whose products all lie below 2^-126 is 0. `off_diagonal` also leaves out the pixels
of a channel at which all other channels lie below 2^-126.

All compiled functions are in this file. numba's cache on disk notices a change in a function's own file only.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, misc, untyped-decorator"

from collections.abc import Callable

import numpy as np
from numba.cpython.unsafe.tuple import tuple_setitem

from gramwatch.numerics.kernels.compiling import compiled

GROUP = 10
"""The number of orders that are summed at a time."""
DOUBLED = (1, 2, 4, 8)
"""If these orders are enough, they are summed alone. Each power is the square of the one before."""

_MAGNITUDE = np.int32(0x7FFFFFFF)
_FRACTION = np.int32(0x007FFFFF)
_INFINITY = np.int32(0x7F800000)
_ONE_BITS = np.int32(0x3F800000)
_EXPONENT, _BIAS = np.int32(23), np.int32(127)
_ONE = np.float32(1)
_HALF = np.float32(0.5)
_ZERO = np.float32(0)
_SMALLEST = np.float32(2**-126)
_ZEROS = (_ZERO,) * GROUP

FEW = 32
"""With fewer pixels than this, vectors run along the channels."""
PAD = 16
"""Extra length of a row of sums. Rows that are a power of two apart would compete for cache lines."""
COLUMNS = 256
"""The number of columns whose ten sums fit into the nearest cache."""


@compiled
def _inverse(value):
    """One over a magnitude. It is 0 if the magnitude is too small to divide by."""
    return _ZERO if value < _SMALLEST else _ONE / value


@compiled
def _peak(values):
    """The largest magnitude of a vector."""
    bits = values.view(np.int32)
    largest = np.int32(0)
    for k in range(values.size):
        largest = max(largest, bits[k] & _MAGNITUDE)
    peak = np.empty(1, np.int32)
    peak[0] = largest
    return peak.view(np.float32)[0]


@compiled
def _column_peaks(x, peak):
    """The largest magnitude of each column."""
    bits, peak_bits = x.view(np.int32), peak.view(np.int32)
    rows, columns = x.shape
    peak_bits[:] = 0
    for i in range(0, rows - 3, 4):
        a, b, c, d = bits[i], bits[i + 1], bits[i + 2], bits[i + 3]
        for k in range(columns):
            ab = max(a[k] & _MAGNITUDE, b[k] & _MAGNITUDE)
            cd = max(c[k] & _MAGNITUDE, d[k] & _MAGNITUDE)
            peak_bits[k] = max(peak_bits[k], max(ab, cd))
    for i in range(rows - rows % 4, rows):
        a = bits[i]
        for k in range(columns):
            peak_bits[k] = max(peak_bits[k], a[k] & _MAGNITUDE)


@compiled
def _two_column_peaks(x, peak, second, holder):
    """The largest and the second largest magnitude of each column, and the row that holds the largest."""
    bits, peak_bits, second_bits = x.view(np.int32), peak.view(np.int32), second.view(np.int32)
    peak_bits[:] = -1
    second_bits[:] = 0
    for i in range(x.shape[0]):
        for k in range(x.shape[1]):
            size = bits[i, k] & _MAGNITUDE
            if size > peak_bits[k]:
                second_bits[k] = max(peak_bits[k], np.int32(0))
                peak_bits[k] = size
                holder[k] = i
            else:
                second_bits[k] = max(second_bits[k], size)


@compiled
def _lift(v, tens):
    """`v^(10 n)`, where `n + 1` is the length of the tuple `tens`."""
    power = _ONE
    if len(tens) > 1:
        square = v * v
        ten = (square * square) * (square * square) * square
        for _ in range(len(tens) - 1):
            power *= ten
    return power


@compiled
def _begin(v, tens):
    """`v^(10 n + 1)`, the first of ten consecutive powers."""
    return v * _lift(v, tens)


@compiled
def _column_sums(x, scale, tens, s):
    """`s[p, k] = sum_i (x[i, k] scale[k])^p` for ten powers. If `tens` is None, for the powers 1, 2, 4, 8.

    The compiler unrolls the loops over `p`. A rule for the next power in a function of its own would let it
    sum in another order.
    """
    s[: len(DOUBLED) if tens is None else GROUP] = 0
    rows, columns = x.shape
    # Four rows at a time: the sums are loaded and stored a quarter as often.
    for i in range(0, rows - 3, 4):
        xa, xb, xc, xd = x[i], x[i + 1], x[i + 2], x[i + 3]
        for k in range(columns):
            r = scale[k]
            va, vb, vc, vd = xa[k] * r, xb[k] * r, xc[k] * r, xd[k] * r
            if tens is None:
                a, b, c, d = va, vb, vc, vd
                for p in range(len(DOUBLED)):
                    s[p, k] += (a + b) + (c + d)
                    a, b, c, d = a * a, b * b, c * c, d * d
            else:
                a, b, c, d = _begin(va, tens), _begin(vb, tens), _begin(vc, tens), _begin(vd, tens)
                for p in range(GROUP):
                    s[p, k] += (a + b) + (c + d)
                    a, b, c, d = a * va, b * vb, c * vc, d * vd
    s0, s1, s2, s3, s4 = s[0], s[1], s[2], s[3], s[4]
    s5, s6, s7, s8, s9 = s[5], s[6], s[7], s[8], s[9]
    for i in range(rows - rows % 4, rows):
        xa = x[i]
        for k in range(columns):
            v = xa[k] * scale[k]
            if tens is None:
                for p in range(len(DOUBLED)):
                    s[p, k] += v
                    v *= v
            else:  # written out: a loop takes a tenth longer here
                a = _begin(v, tens)
                s0[k] += a
                a *= v
                s1[k] += a
                a *= v
                s2[k] += a
                a *= v
                s3[k] += a
                a *= v
                s4[k] += a
                a *= v
                s5[k] += a
                a *= v
                s6[k] += a
                a *= v
                s7[k] += a
                a *= v
                s8[k] += a
                a *= v
                s9[k] += a


@compiled
def _weighted_sums(c, r, tens, s, t, i):
    """`t[p, i] = sum_k (c[k] r)^p s[p, k]` for the same powers. If `s` is None, it counts as 1.

    The sums are a tuple, so that they stay in registers.
    """
    sums = _ZEROS
    for k in range(c.size):
        v = c[k] * r
        if tens is None:
            for p in range(len(DOUBLED)):
                sums = tuple_setitem(sums, p, sums[p] + (v if s is None else v * s[p, k]))
                v *= v
        else:
            a = _begin(v, tens)
            for p in range(GROUP):
                sums = tuple_setitem(sums, p, sums[p] + (a if s is None else a * s[p, k]))
                a *= v
    for p in range(len(DOUBLED) if tens is None else GROUP):
        t[p, i] = sums[p]


@compiled
def _doubled_weighted_column_sums(x, row_scale, scale, w, t, start, stop):
    """`_weighted_column_sums` for the powers 1, 2, 4, 8."""
    t[:4, start:stop] = 0
    t0, t1, t2, t3 = t[0, start:stop], t[1, start:stop], t[2, start:stop], t[3, start:stop]
    r = scale[start:stop]
    rows = x.shape[0]
    for i in range(0, rows - 1, 2):
        xa, xb, ra, rb = x[i, start:stop], x[i + 1, start:stop], row_scale[i], row_scale[i + 1]
        wa0, wa1, wa2, wa3 = w[0, i], w[1, i], w[2, i], w[3, i]
        wb0, wb1, wb2, wb3 = w[0, i + 1], w[1, i + 1], w[2, i + 1], w[3, i + 1]
        for k in range(stop - start):
            a, b = xa[k] * ra * r[k], xb[k] * rb * r[k]
            t0[k] += a * wa0 + b * wb0
            a, b = a * a, b * b
            t1[k] += a * wa1 + b * wb1
            a, b = a * a, b * b
            t2[k] += a * wa2 + b * wb2
            t3[k] += a * a * wa3 + b * b * wb3
    for i in range(rows - rows % 2, rows):
        xa, ra = x[i, start:stop], row_scale[i]
        w0, w1, w2, w3 = w[0, i], w[1, i], w[2, i], w[3, i]
        for k in range(stop - start):
            a = xa[k] * ra * r[k]
            t0[k] += a * w0
            a *= a
            t1[k] += a * w1
            a *= a
            t2[k] += a * w2
            t3[k] += a * a * w3


@compiled
def _weighted_column_sums(x, row_scale, scale, tens, w, t, start, stop):
    """`t[p, k] = sum_i (x[i, k] row_scale[i] scale[k])^p w[p, i]` for the same powers, from `start` on."""
    if tens is None:
        _doubled_weighted_column_sums(x, row_scale, scale, w, t, start, stop)
    else:
        _ten_weighted_column_sums(x, row_scale, scale, tens, w, t, start, stop)


@compiled
def _ten_weighted_column_sums(x, row_scale, scale, tens, w, t, start, stop):
    """`t[p, k] = sum_i (x[i, k] row_scale[i] scale[k])^p w[p, i]` for ten powers, `start <= k < stop`."""
    t[:, start:stop] = 0
    t0, t1, t2, t3 = t[0, start:stop], t[1, start:stop], t[2, start:stop], t[3, start:stop]
    t4, t5, t6, t7 = t[4, start:stop], t[5, start:stop], t[6, start:stop], t[7, start:stop]
    t8, t9 = t[8, start:stop], t[9, start:stop]
    r = scale[start:stop]
    rows = x.shape[0]
    # Two rows at a time: the sums are loaded and stored half as often.
    for i in range(0, rows - 1, 2):
        xa, xb, ra, rb = x[i, start:stop], x[i + 1, start:stop], row_scale[i], row_scale[i + 1]
        wa0, wa1, wa2, wa3, wa4 = w[0, i], w[1, i], w[2, i], w[3, i], w[4, i]
        wa5, wa6, wa7, wa8, wa9 = w[5, i], w[6, i], w[7, i], w[8, i], w[9, i]
        wb0, wb1, wb2, wb3, wb4 = w[0, i + 1], w[1, i + 1], w[2, i + 1], w[3, i + 1], w[4, i + 1]
        wb5, wb6, wb7, wb8, wb9 = w[5, i + 1], w[6, i + 1], w[7, i + 1], w[8, i + 1], w[9, i + 1]
        for k in range(stop - start):
            va, vb = xa[k] * ra * r[k], xb[k] * rb * r[k]
            a, b = _begin(va, tens), _begin(vb, tens)
            t0[k] += a * wa0 + b * wb0
            a, b = a * va, b * vb
            t1[k] += a * wa1 + b * wb1
            a, b = a * va, b * vb
            t2[k] += a * wa2 + b * wb2
            a, b = a * va, b * vb
            t3[k] += a * wa3 + b * wb3
            a, b = a * va, b * vb
            t4[k] += a * wa4 + b * wb4
            a, b = a * va, b * vb
            t5[k] += a * wa5 + b * wb5
            a, b = a * va, b * vb
            t6[k] += a * wa6 + b * wb6
            a, b = a * va, b * vb
            t7[k] += a * wa7 + b * wb7
            a, b = a * va, b * vb
            t8[k] += a * wa8 + b * wb8
            a, b = a * va, b * vb
            t9[k] += a * wa9 + b * wb9
    for i in range(rows - rows % 2, rows):
        xa, ra = x[i, start:stop], row_scale[i]
        w0, w1, w2, w3, w4 = w[0, i], w[1, i], w[2, i], w[3, i], w[4, i]
        w5, w6, w7, w8, w9 = w[5, i], w[6, i], w[7, i], w[8, i], w[9, i]
        for k in range(stop - start):
            v = xa[k] * ra * r[k]
            a = _begin(v, tens)
            t0[k] += a * w0
            a *= v
            t1[k] += a * w1
            a *= v
            t2[k] += a * w2
            a *= v
            t3[k] += a * w3
            a *= v
            t4[k] += a * w4
            a *= v
            t5[k] += a * w5
            a *= v
            t6[k] += a * w6
            a *= v
            t7[k] += a * w7
            a *= v
            t8[k] += a * w8
            a *= v
            t9[k] += a * w9


@compiled
def _row_sums(x, tens, t, q):
    """`row_sums` of one example, channels x pixels, before the root: `t` `(10, C)` and `q` `(C,)`."""
    channels, pixels = x.shape
    pixel_peak = np.empty(pixels, np.float32)
    scale = np.empty(pixels, np.float32)
    product = np.empty(pixels, np.float32)
    s = np.empty((GROUP, pixels + PAD), np.float32)
    _column_peaks(x, pixel_peak)
    for k in range(pixels):
        scale[k] = _inverse(pixel_peak[k])
    _column_sums(x, scale, tens, s)
    for i in range(channels):
        row = x[i]
        for k in range(pixels):
            product[k] = row[k] * pixel_peak[k]
        q[i] = _peak(product)
        _weighted_sums(product, _inverse(q[i]), tens, s, t, i)


@compiled
def _row_sums_of_pixels(x, tens, t, q):
    """`_row_sums` of an example that is stored as pixels x channels."""
    pixels, channels = x.shape
    pixel_peak = np.empty(pixels, np.float32)
    scale = np.empty(channels, np.float32)
    product = np.empty(channels, np.float32)
    column = np.empty(pixels, np.float32)
    s = np.empty((GROUP, pixels), np.float32)
    product_bits, q_bits = product.view(np.int32), q.view(np.int32)
    q_bits[:] = 0
    for k in range(pixels):
        row = x[k]
        pixel_peak[k] = _peak(row)
        for i in range(channels):
            product[i] = row[i] * pixel_peak[k]
        for i in range(channels):
            q_bits[i] = max(q_bits[i], product_bits[i] & _MAGNITUDE)
        _weighted_sums(row, _inverse(pixel_peak[k]), tens, None, s, k)
    # The compiler may multiply a peak by a scale first, which must not overflow.
    least = _SMALLEST * _peak(pixel_peak)
    for i in range(channels):
        scale[i] = _ZERO if q[i] < least else _inverse(q[i])
    for start in range(0, channels, COLUMNS):
        stop = min(start + COLUMNS, channels)
        _weighted_column_sums(x, pixel_peak, scale, tens, s, t, start, stop)
    for i in range(channels):
        if q[i] < least:  # rare: first all products, then their scale
            for k in range(pixels):
                column[k] = x[k, i] * pixel_peak[k]
            _weighted_sums(column, _inverse(q[i]), tens, s, t, i)


@compiled
def _diagonal(x, tens, t, q):
    """`diagonal` of one example before the root."""
    channels, pixels = x.shape
    square = np.empty(pixels, np.float32)
    for i in range(channels):
        row = x[i]
        peak = _peak(row)
        scale = _inverse(peak)
        for k in range(pixels):
            square[k] = (row[k] * scale) * (row[k] * scale)
        q[i] = peak * peak
        _weighted_sums(square, _ONE, tens, None, t, i)


@compiled
def _diagonal_of_pixels(x, tens, t, q):
    """`_diagonal` of an example that is stored as pixels x channels."""
    channels = x.shape[1]
    scale = np.empty(channels, np.float32)
    square = np.empty(x.shape, np.float32)
    _column_peaks(x, q)
    for i in range(channels):
        scale[i] = _inverse(q[i])
        q[i] *= q[i]
    for k in range(x.shape[0]):
        for i in range(channels):
            square[k, i] = (x[k, i] * scale[i]) * (x[k, i] * scale[i])
    scale[:] = 1
    _column_sums(square, scale, tens, t)


@compiled
def _off_diagonal(x, tens, t, q):
    """`off_diagonal` of one example before the root."""
    channels, pixels = x.shape
    peak = np.empty(pixels, np.float32)
    second = np.empty(pixels, np.float32)
    holder = np.zeros(pixels, np.int32)
    scale = np.empty(pixels, np.float32)
    second_scale = np.empty(pixels, np.float32)
    product = np.empty(pixels, np.float32)
    share = np.empty(pixels, np.float32)
    partners = np.empty((GROUP, pixels + PAD), np.float32)
    s = np.empty((GROUP, pixels + PAD), np.float32)
    s_others = np.empty((GROUP, pixels + PAD), np.float32)
    _two_column_peaks(x, peak, second, holder)
    others = x.copy()
    for k in range(pixels):
        scale[k], second_scale[k] = _inverse(peak[k]), _inverse(second[k])
        others[holder[k], k] = 0
    _column_sums(x, scale, tens, s)
    _column_sums(others, second_scale, tens, s_others)
    for i in range(channels):
        row = x[i]
        for k in range(pixels):
            product[k] = row[k] * (second[k] if holder[k] == i else peak[k])
            share[k] = _lift(row[k] * scale[k], tens)
        # At every pixel, the channel is multiplied by the sum over all other channels.
        for p in range(GROUP):
            for k in range(pixels):
                share[k] *= row[k] * scale[k]
                partners[p, k] = s_others[p, k] if holder[k] == i else s[p, k] - share[k]
        q[i] = _peak(product)
        _weighted_sums(product, _inverse(q[i]), tens, partners, t, i)


@compiled
def _scratch(x, out):
    """Memory for the sums of one example, its magnitudes, two rows of `_roots`, and its transpose."""
    channels = out.shape[3]
    return (
        np.empty((GROUP, channels + PAD), np.float32),
        np.empty(channels, np.float32),
        np.empty((2, channels), np.float32),
        np.empty((x.shape[2], x.shape[1]), np.float32),
    )


@compiled
def _transposed(x, out):
    for k in range(x.shape[1]):
        row = out[k]
        for i in range(x.shape[0]):
            row[i] = x[i, k]
    return out


def _polynomial(
    function: Callable[[np.ndarray], np.ndarray], degree: int, low: float, high: float
) -> tuple[np.float32, ...]:
    """The coefficients, lowest first, of a polynomial that approximates a function between two points."""
    series = np.polynomial.Chebyshev.interpolate(function, degree, [low, high])
    return tuple(np.float32(c) for c in series.convert(kind=np.polynomial.Polynomial, domain=[-1, 1]).coef)


# `log2(1 + r) / r` for mantissas `1 + r` near 1, and `2^y` for fractions `y` near 0.
_LOG = _polynomial(lambda r: np.log2(1 + r) / r, 9, 2**-0.5 - 1, 2**0.5 - 1)
_EXP = _polynomial(np.exp2, 6, -0.5, 0.5)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8, _L9 = _LOG
_E0, _E1, _E2, _E3, _E4, _E5, _E6 = _EXP


@compiled
def _roots(t, q, orders, rows, work, places, out):
    """Write `q sign(t) |t|^(1/p)` to `out[place]` for the orders `p`, whose sums are the `rows` of `t`."""
    number, log = work[0], work[1]
    number_bits = number.view(np.int32)
    for j in range(orders.size):
        sums = t[rows[j], : q.size]
        bits = sums.view(np.int32)
        if orders[j] == 1:
            out[places[j]] = sums * q
            continue
        for i in range(sums.size):
            number_bits[i] = (bits[i] & _FRACTION) | _ONE_BITS  # the mantissa, from 1 to 2
        share = _ONE / np.float32(orders[j])
        for i in range(sums.size):
            exponent = np.float32(((bits[i] & _MAGNITUDE) >> _EXPONENT) - _BIAS)
            upper = number[i] > np.float32(2**0.5)
            r = (number[i] * _HALF if upper else number[i]) - _ONE
            y = ((((_L9 * r + _L8) * r + _L7) * r + _L6) * r + _L5) * r + _L4
            y = (((y * r + _L3) * r + _L2) * r + _L1) * r + _L0
            log[i] = (y * r + (exponent + _ONE if upper else exponent)) * share
        for i in range(sums.size):
            number_bits[i] = (np.int32(np.floor(log[i] + _HALF)) + _BIAS) << _EXPONENT  # the power of two
        for i in range(sums.size):
            y = log[i] - np.floor(log[i] + _HALF)
            y = (((((_E6 * y + _E5) * y + _E4) * y + _E3) * y + _E2) * y + _E1) * y + _E0
            y *= number[i]
            plain = sums[i] == _ZERO or (bits[i] & _INFINITY) == _INFINITY
            log[i] = q[i] * (sums[i] if plain else y if sums[i] > _ZERO else -y)
        out[places[j]] = log


@compiled
def _row_sums_in_range(x, turn, tens, orders, rows, places, out, start, stop):
    t, q, work, turned = _scratch(x, out)
    for n in range(start, stop):
        _row_sums(_transposed(x[n], turned) if turn else x[n], tens, t, q)
        _roots(t, q, orders, rows, work, places, out[0, n])


@compiled
def _row_sums_of_pixels_in_range(x, turn, tens, orders, rows, places, out, start, stop):
    t, q, work, turned = _scratch(x, out)
    for n in range(start, stop):
        _row_sums_of_pixels(_transposed(x[n], turned) if turn else x[n], tens, t, q)
        _roots(t, q, orders, rows, work, places, out[0, n])


@compiled
def _diagonal_in_range(x, turn, tens, orders, rows, places, out, start, stop):
    t, q, work, turned = _scratch(x, out)
    for n in range(start, stop):
        _diagonal(_transposed(x[n], turned) if turn else x[n], tens, t, q)
        _roots(t, q, orders, rows, work, places, out[0, n])


@compiled
def _diagonal_of_pixels_in_range(x, turn, tens, orders, rows, places, out, start, stop):
    t, q, work, turned = _scratch(x, out)
    for n in range(start, stop):
        _diagonal_of_pixels(_transposed(x[n], turned) if turn else x[n], tens, t, q)
        _roots(t, q, orders, rows, work, places, out[0, n])


@compiled
def _off_diagonal_in_range(x, turn, tens, orders, rows, places, out, start, stop):
    t, q, work, turned = _scratch(x, out)
    for n in range(start, stop):
        _off_diagonal(_transposed(x[n], turned) if turn else x[n], tens, t, q)
        _roots(t, q, orders, rows, work, places, out[0, n])


# The function for a range of examples, by the statistic and by whether the rows are pixels.
IN_RANGE = {
    ("row_sums", False): _row_sums_in_range,
    ("row_sums", True): _row_sums_of_pixels_in_range,
    ("diagonal", False): _diagonal_in_range,
    ("diagonal", True): _diagonal_of_pixels_in_range,
    ("off_diagonal", False): _off_diagonal_in_range,
}
