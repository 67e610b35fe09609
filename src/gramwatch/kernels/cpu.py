"""Gram statistics on the CPU, compiled by numba: a few passes over each example while it is in cache.

The arithmetic is that of `gramwatch.statistics`, with ten orders at a time in registers. What the compiled
functions return is not yet rooted: for each channel the sum `t` of each order, and the magnitude `q` that was
divided out, so that the statistic is `q root(t)`. PyTorch takes the roots, which it does in vectors.

An example is a matrix of channels x pixels. NaN and infinity survive: magnitudes are compared as integers,
where NaN is larger than everything else, and no assumption about them is given to the compiler.
"""

# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch
from numba import njit
from torch import Tensor

GROUP = 10
"""How many orders are taken at a time. Beyond the first group, `power` arrays hold the powers reached."""

# Sums may be reordered and multiplications fused.
_compiled = njit(fastmath={"reassoc", "contract", "nsz", "arcp"}, error_model="numpy", nogil=True, cache=True)

_MAGNITUDE = np.int32(0x7FFFFFFF)
_ONE = np.float32(1)
_ZERO = np.float32(0)


@_compiled
def _inverse(value):
    """One over the value, 1 for zero."""
    return _ONE / value if value != _ZERO else _ONE


@_compiled
def _peak(values):
    """The largest magnitude of a vector."""
    bits = values.view(np.int32)
    largest = np.int32(0)
    for k in range(values.size):
        largest = max(largest, bits[k] & _MAGNITUDE)
    found = np.empty(1, np.int32)
    found[0] = largest
    return found.view(np.float32)[0]


@_compiled
def _column_peaks(x, peak):
    """The largest magnitude of each column."""
    bits, peak_bits = x.view(np.int32), peak.view(np.int32)
    peak_bits[:] = 0
    for i in range(x.shape[0]):
        for k in range(x.shape[1]):
            peak_bits[k] = max(peak_bits[k], bits[i, k] & _MAGNITUDE)


@_compiled
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


@_compiled
def _column_sums(x, scale, power, s):
    """`s[p, k] = sum_i (x[i, k] scale[k])^p` for the next ten powers."""
    s[:] = 0
    s0, s1, s2, s3, s4 = s[0], s[1], s[2], s[3], s[4]
    s5, s6, s7, s8, s9 = s[5], s[6], s[7], s[8], s[9]
    rows, columns = x.shape
    # Four rows at a time, so that the sums are fetched and stored a quarter as often.
    for i in range(0, rows - 3, 4):
        xa, xb, xc, xd = x[i], x[i + 1], x[i + 2], x[i + 3]
        for k in range(columns):
            r = scale[k]
            va, vb, vc, vd = xa[k] * r, xb[k] * r, xc[k] * r, xd[k] * r
            a, b, c, d = va, vb, vc, vd
            if power is not None:
                a, b, c, d = a * power[i, k], b * power[i + 1, k], c * power[i + 2, k], d * power[i + 3, k]
            s0[k] += (a + b) + (c + d)
            a, b, c, d = a * va, b * vb, c * vc, d * vd
            s1[k] += (a + b) + (c + d)
            a, b, c, d = a * va, b * vb, c * vc, d * vd
            s2[k] += (a + b) + (c + d)
            a, b, c, d = a * va, b * vb, c * vc, d * vd
            s3[k] += (a + b) + (c + d)
            a, b, c, d = a * va, b * vb, c * vc, d * vd
            s4[k] += (a + b) + (c + d)
            a, b, c, d = a * va, b * vb, c * vc, d * vd
            s5[k] += (a + b) + (c + d)
            a, b, c, d = a * va, b * vb, c * vc, d * vd
            s6[k] += (a + b) + (c + d)
            a, b, c, d = a * va, b * vb, c * vc, d * vd
            s7[k] += (a + b) + (c + d)
            a, b, c, d = a * va, b * vb, c * vc, d * vd
            s8[k] += (a + b) + (c + d)
            a, b, c, d = a * va, b * vb, c * vc, d * vd
            s9[k] += (a + b) + (c + d)
            if power is not None:
                power[i, k], power[i + 1, k], power[i + 2, k], power[i + 3, k] = a, b, c, d
    for i in range(rows - rows % 4, rows):
        xa = x[i]
        for k in range(columns):
            v = xa[k] * scale[k]
            a = v
            if power is not None:
                a *= power[i, k]
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
            if power is not None:
                power[i, k] = a


@_compiled
def _weighted_sums(c, r, power, s, t, i):
    """`t[p, i] = sum_k (c[k] r)^p s[p, k]` for the next ten powers; `s` counts as 1 where it is None."""
    t0 = t1 = t2 = t3 = t4 = t5 = t6 = t7 = t8 = t9 = _ZERO
    if s is not None:
        s0, s1, s2, s3, s4 = s[0], s[1], s[2], s[3], s[4]
        s5, s6, s7, s8, s9 = s[5], s[6], s[7], s[8], s[9]
        for k in range(c.size):
            v = c[k] * r
            a = v
            if power is not None:
                a *= power[k]
            t0 += a * s0[k]
            a *= v
            t1 += a * s1[k]
            a *= v
            t2 += a * s2[k]
            a *= v
            t3 += a * s3[k]
            a *= v
            t4 += a * s4[k]
            a *= v
            t5 += a * s5[k]
            a *= v
            t6 += a * s6[k]
            a *= v
            t7 += a * s7[k]
            a *= v
            t8 += a * s8[k]
            a *= v
            t9 += a * s9[k]
            if power is not None:
                power[k] = a
    else:
        for k in range(c.size):
            v = c[k] * r
            a = v
            if power is not None:
                a *= power[k]
            t0 += a
            a *= v
            t1 += a
            a *= v
            t2 += a
            a *= v
            t3 += a
            a *= v
            t4 += a
            a *= v
            t5 += a
            a *= v
            t6 += a
            a *= v
            t7 += a
            a *= v
            t8 += a
            a *= v
            t9 += a
            if power is not None:
                power[k] = a
    t[0, i], t[1, i], t[2, i], t[3, i], t[4, i] = t0, t1, t2, t3, t4
    t[5, i], t[6, i], t[7, i], t[8, i], t[9, i] = t5, t6, t7, t8, t9


@_compiled
def _row_sums(x, t, q, powers):
    """`row_sums` of one example before the root: `t` `(orders, C)` and `q` `(C,)`."""
    channels, pixels = x.shape
    pixel_peak = np.empty(pixels, np.float32)
    scale = np.empty(pixels, np.float32)
    product = np.empty(pixels, np.float32)
    s = np.empty((GROUP, pixels), np.float32)
    _column_peaks(x, pixel_peak)
    for k in range(pixels):
        scale[k] = _inverse(pixel_peak[k])
    for first in range(0, t.shape[0], GROUP):
        _column_sums(x, scale, None if powers is None else powers[0], s)
        for i in range(channels):
            row = x[i]
            for k in range(pixels):
                product[k] = row[k] * pixel_peak[k]
            if first == 0:
                q[i] = _peak(product)
            power = None if powers is None else powers[1, i]
            _weighted_sums(product, _inverse(q[i]), power, s, t[first : first + GROUP], i)


@_compiled
def _diagonal(x, t, q, powers):
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
        for first in range(0, t.shape[0], GROUP):
            power = None if powers is None else powers[0, i]
            _weighted_sums(square, _ONE, power, None, t[first : first + GROUP], i)


@_compiled
def _off_diagonal(x, t, q, powers):
    """`off_diagonal` of one example before the root."""
    channels, pixels = x.shape
    peak = np.empty(pixels, np.float32)
    second = np.empty(pixels, np.float32)
    holder = np.zeros(pixels, np.int32)
    scale = np.empty(pixels, np.float32)
    second_scale = np.empty(pixels, np.float32)
    product = np.empty(pixels, np.float32)
    share = np.empty(pixels, np.float32)
    partners = np.empty((GROUP, pixels), np.float32)
    s = np.empty((GROUP, pixels), np.float32)
    s_others = np.empty((GROUP, pixels), np.float32)
    _two_column_peaks(x, peak, second, holder)
    others = x.copy()
    for k in range(pixels):
        scale[k], second_scale[k] = _inverse(peak[k]), _inverse(second[k])
        others[holder[k], k] = 0
    for first in range(0, t.shape[0], GROUP):
        _column_sums(x, scale, None if powers is None else powers[0], s)
        _column_sums(others, second_scale, None if powers is None else powers[1], s_others)
        for i in range(channels):
            row = x[i]
            for k in range(pixels):
                product[k] = row[k] * (second[k] if holder[k] == i else peak[k])
                share[k] = _ONE
            if powers is not None:
                share[:] = powers[3, i]
            # What the channel is multiplied with at each pixel: the sum over all others.
            for p in range(GROUP):
                for k in range(pixels):
                    share[k] *= row[k] * scale[k]
                    partners[p, k] = s_others[p, k] if holder[k] == i else s[p, k] - share[k]
            if powers is not None:
                powers[3, i] = share
            if first == 0:
                q[i] = _peak(product)
            power = None if powers is None else powers[2, i]
            _weighted_sums(product, _inverse(q[i]), power, partners, t[first : first + GROUP], i)


@_compiled
def _powers_reached(count, x):
    return np.ones((count, x.shape[0], x.shape[1]), np.float32)


@_compiled
def _row_sums_of_some(x, t, q, start, stop):
    for n in range(start, stop):
        example = np.ascontiguousarray(x[n])
        if t.shape[1] > GROUP:
            _row_sums(example, t[n], q[n], _powers_reached(2, example))
        else:
            _row_sums(example, t[n], q[n], None)


@_compiled
def _diagonal_of_some(x, t, q, start, stop):
    for n in range(start, stop):
        example = np.ascontiguousarray(x[n])
        if t.shape[1] > GROUP:
            _diagonal(example, t[n], q[n], _powers_reached(1, example))
        else:
            _diagonal(example, t[n], q[n], None)


@_compiled
def _off_diagonal_of_some(x, t, q, start, stop):
    for n in range(start, stop):
        example = np.ascontiguousarray(x[n])
        if t.shape[1] > GROUP:
            _off_diagonal(example, t[n], q[n], _powers_reached(4, example))
        else:
            _off_diagonal(example, t[n], q[n], None)


_OF_SOME = {
    "row_sums": _row_sums_of_some,
    "diagonal": _diagonal_of_some,
    "off_diagonal": _off_diagonal_of_some,
}
# Threads that sleep when there is nothing to do: those that numba starts itself were seen busy between calls.
_threads = ThreadPoolExecutor(os.cpu_count(), "gramwatch")


def _in_parts(function: Callable[..., None], count: int, *arguments: object) -> None:
    """Call `function(*arguments, start, stop)` over `range(count)`, on as many threads as PyTorch uses."""
    parts = min(torch.get_num_threads(), count)
    edges = [count * i // parts for i in range(parts + 1)]
    others = [_threads.submit(function, *arguments, *edge) for edge in pairwise(edges[1:])]
    function(*arguments, 0, edges[1])
    for other in others:
        other.result()


def compute(statistic: str, maps: Tensor, orders: tuple[int, ...], out: Tensor) -> None:
    """A statistic of maps `(N, C, M)` into `out` `(N, orders, C)`."""
    examples, channels, _ = maps.shape
    groups = -(-max(orders) // GROUP)
    t = torch.empty(examples, groups * GROUP, channels, dtype=torch.float32)
    q = torch.empty(examples, channels, dtype=torch.float32)
    _in_parts(_OF_SOME[statistic], examples, maps.detach().float().numpy(), t.numpy(), q.numpy())
    wanted = t[:, [order - 1 for order in orders]]
    roots = wanted.abs().pow_(1 / torch.tensor(orders, dtype=torch.float32)[:, None])
    torch.mul(roots.copysign_(wanted), q[:, None], out=out)


@_compiled
def _deviations(statistics, predicted, minimum, maximum, starts, weights, out, start, stop):
    for n in range(start, stop):
        low, high, values = minimum[predicted[n]], maximum[predicted[n]], statistics[n]
        for tap in range(out.shape[1]):
            out[n, tap] = _outside(values, low, high, weights, starts[tap], starts[tap + 1])


@_compiled
def _outside(values, low, high, weights, start, stop):
    """Eq. 3-4 over some features. What is not finite stays so."""
    total = _ZERO
    tiny = np.float32(1e-6)
    for f in range(start, stop):
        below, above = low[f] - values[f], values[f] - high[f]
        below = _ZERO if below <= _ZERO else below / abs(low[f] + tiny)
        above = _ZERO if above <= _ZERO else above / abs(high[f] + tiny)
        total += weights[f] * (below + above)
    return total


def deviations(
    statistics: Tensor, predicted: Tensor, minimum: Tensor, maximum: Tensor, starts: Tensor, weights: Tensor
) -> Tensor:
    """Deviations from a range summed over each tap's features, `(N, taps)`."""
    out = torch.empty(len(statistics), len(starts) - 1, dtype=torch.float32)
    arrays = (t.numpy() for t in (statistics, predicted, minimum, maximum, starts, weights, out))
    if len(statistics):
        _in_parts(_deviations, len(statistics), *arrays)
    return out


@_compiled
def _widen(statistics, predicted, minimum, maximum, start, stop):
    for n in range(statistics.shape[0]):
        if predicted[n] >= 0:
            low, high, values = minimum[predicted[n]], maximum[predicted[n]], statistics[n]
            for f in range(start, stop):
                low[f] = min(low[f], values[f])
                high[f] = max(high[f], values[f])


def widen(statistics: Tensor, predicted: Tensor, minimum: Tensor, maximum: Tensor) -> None:
    """Widen the range of each example's class in place; a negative class is left out."""
    arrays = (t.numpy() for t in (statistics, predicted, minimum, maximum))
    _in_parts(_widen, statistics.shape[1], *arrays)
