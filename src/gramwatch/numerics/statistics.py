"""Gram statistics of one feature map (Eq. 1-2): the readable definition.

A feature map is a tensor. Its first axis is the batch, another axis holds the channels, and the positions
along all further axes are the "pixels". `a[i, k]` is the activation of channel `i` at pixel `k`. The Gram
matrix of order `p` before its root is `A[i, j] = sum_k a[i, k]^p a[j, k]^p`. The functions here return
float32 of shape `(N, orders, features)`:

| function | features | value for one example |
| --- | --- | --- |
| `row_sums` | C | `root(sum_j A[i, j])`: the published figures |
| `row_sums_of_roots` | C | `sum_j root(A[i, j])`: the paper's text |
| `diagonal` | C | `root(A[i, i])` |
| `off_diagonal` | C | `root(sum_{j != i} A[i, j])` |
| `triangle` | C (C + 1) / 2 | `root(A[i, j])`, `j >= i`, row by row (Algorithm 1) |

where `root(t) = sign(t) |t|^(1/p)`.

Powers of order 10 overflow and underflow float32 within the range of ordinary activations. Every statistic
here is homogeneous of degree 2. So the functions divide by a magnitude before the power, and multiply by it
after the root. A non-finite activation gives a non-finite statistic, never a plausible one.
"""

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

Statistic = Callable[[Tensor, Iterable[int], int], Tensor]

LARGEST_ORDER = 100
"""The largest order.

At this order, a root exceeds the largest of N products by a factor of at most `N^(1/100)`: 12 % for 65,536
products. Higher orders add nothing new. The cost grows with the largest order.
"""

# `triangle` and `row_sums_of_roots` work on pieces of at most this many float64 numbers (32 MB). On a GPU a
# piece is larger, because there starting a small operation takes longer than the operation.
PIECE = 2**22
TIMES_PIECE = {"cuda": 4}


def check_orders(orders: Iterable[int]) -> tuple[int, ...]:
    """The orders as a tuple. An error names the wrong order. No order may exceed `LARGEST_ORDER`."""
    try:
        given = iter(orders)
    except TypeError:
        raise ValueError(f"orders must be a collection such as range(1, 11), got {orders!r}") from None
    checked: list[int] = []
    for order in given:
        try:
            value = 0 if isinstance(order, bool) else operator.index(order)
        except TypeError:
            value = 0
        if value < 1:
            raise ValueError(f"orders must be positive integers, got {order!r}")
        if value > LARGEST_ORDER:
            raise ValueError(f"orders must be at most {LARGEST_ORDER}, got {order!r}")
        if value in checked:
            raise ValueError(f"order {value} is given twice")
        checked.append(value)
    if not checked:
        raise ValueError("orders is empty: give at least one positive integer, such as range(1, 11)")
    return tuple(checked)


def check_count(what: str, count: int | None, fewest: int = 1) -> int | None:
    """A number of pixels or channels, None for all. An error names a wrong number."""
    if count is None:
        return None
    if isinstance(count, bool) or not isinstance(count, int) or count < fewest:
        at_least = "a positive integer" if fewest == 1 else f"an integer, at least {fewest}"
        raise ValueError(f"{what} must be {at_least}, or None for all, got {count!r}")
    return count


def distinct_orders(orders: Iterable[int]) -> dict[int, int]:
    """The orders whose statistics differ on a feature map of one pixel, and how many orders each stands for.

    With one pixel `root((a_i a_j)^p)` is `|a_i a_j|` for every even `p` and `a_i a_j` for every odd `p`. So
    the first even order stands for all even orders, and the first odd order for all odd orders.
    """
    first_of: dict[bool, int] = {}
    count: dict[int, int] = {}
    for order in check_orders(orders):
        first = first_of.setdefault(order % 2 == 0, order)
        count[first] = count.get(first, 0) + 1
    return count


def row_sums(x: Tensor, orders: Iterable[int], channel_axis: int = 1) -> Tensor:
    """Row sums of the Gram matrix, then the signed root: `root(sum_j A[i, j])`, as published.

    `sum_j A[i, j] = sum_k a[i, k]^p s[k]` with the pixel sums `s[k] = sum_j a[j, k]^p`, so no C x C matrix
    is formed. For the pixel sums, activations are divided by the pixel's largest magnitude. The products of
    a channel are divided by the channel's largest product. So no sum of an even order can underflow.
    """
    orders = check_orders(orders)
    x, scale = _scaled_maps(x, channel_axis)
    pixel_peak = _peak(x, 1)
    products = x * pixel_peak
    product_peak = _peak(products, 2)
    rows = []
    for order, (share, product) in _powers(orders, x / pixel_peak, products / product_peak):
        sums = (product * share.sum(1, keepdim=True)).sum(2, keepdim=True)
        rows.append(_signed_root(sums, order) * product_peak)
    return _stacked(rows, orders, scale)


def diagonal(x: Tensor, orders: Iterable[int], channel_axis: int = 1) -> Tensor:
    """The diagonal of the Gram matrix, `root(sum_k a[i, k]^2p)`: a channel with itself."""
    orders = check_orders(orders)
    x, scale = _scaled_maps(x, channel_axis)
    peak = _peak(x, 2)
    rows = [
        _signed_root((power * power).sum(2, keepdim=True), order) * peak * peak
        for order, (power,) in _powers(orders, x / peak)
    ]
    return _stacked(rows, orders, scale)


def off_diagonal(x: Tensor, orders: Iterable[int], channel_axis: int = 1) -> Tensor:
    """Row sums without the diagonal, then the signed root: a channel with all other channels.

    The pixel sum over the other channels is the whole pixel sum minus the channel's own part. The largest
    channel of a pixel is an exception: its own part may be nearly the whole sum, and the difference would
    lose digits. For that channel, the other channels are summed separately.
    """
    orders = check_orders(orders)
    x, scale = _scaled_maps(x, channel_axis)
    largest, holder = x.abs().max(1, keepdim=True)
    others = x.scatter(1, holder, 0.0)
    pixel_peak, others_peak = _positive(largest), _peak(others, 1)
    is_holder = torch.zeros_like(x, dtype=torch.bool).scatter(1, holder, True)
    # If all other channels are zero at a pixel, the channel's product there is zero.
    partner_peak = torch.where(is_holder, others.abs().amax(1, keepdim=True), pixel_peak)
    products = x * partner_peak
    product_peak = _peak(products, 2)
    rows = []
    powers = _powers(orders, x / pixel_peak, others / others_peak, products / product_peak)
    for order, (share, other_share, product) in powers:
        partners = torch.where(
            is_holder, other_share.sum(1, keepdim=True), share.sum(1, keepdim=True) - share
        )
        sums = (product * partners).sum(2, keepdim=True)
        rows.append(_signed_root(sums, order) * product_peak)
    return _stacked(rows, orders, scale)


def row_sums_of_roots(x: Tensor, orders: Iterable[int], channel_axis: int = 1) -> Tensor:
    """Row sums of the p-th order Gram matrix as in the paper's text: the root first, then the sum."""
    orders = check_orders(orders)
    maps = _maps(x, channel_axis)
    out = maps.new_empty(maps.shape[0], len(orders), maps.shape[1], dtype=torch.float32)
    write_pairs(maps, orders, sums=out)
    return out


def triangle(x: Tensor, orders: Iterable[int], channel_axis: int = 1) -> Tensor:
    """The flattened upper triangle of the p-th order Gram matrix, diagonal included (Algorithm 1)."""
    orders = check_orders(orders)
    maps = _maps(x, channel_axis)
    total, channels, _ = maps.shape
    out = maps.new_empty(total, len(orders), channels * (channels + 1) // 2, dtype=torch.float32)
    write_pairs(maps, orders, pairs=out)
    return out


def write_pairs(
    maps: Tensor, orders: tuple[int, ...], pairs: Tensor | None = None, sums: Tensor | None = None
) -> None:
    """Write `triangle` of maps `(N, C, pixels)` into `pairs`, `row_sums_of_roots` into `sums`, or both.

    One Gram matrix serves both. It is computed in float64, a few examples and a few rows at a time, from
    powers of channels divided by their largest magnitude. The range of float64 holds their products.
    """
    maps = _maps(maps, 1)
    if pairs is not None and maps.shape[2] == 1:
        _write_vector_pairs(maps[:, :, 0], orders, pairs)
        pairs = None
    if pairs is None and sums is None:
        return
    total, channels, pixels = maps.shape
    piece = PIECE * TIMES_PIECE.get(maps.device.type, 1)
    for samples in _slices(total, piece // (channels * pixels)):
        part = maps[samples].double()
        peak = _peak(part, 2)
        blocks = [
            (rows, None if pairs is None else _UpperHalf.of(rows, peak))
            for rows in _slices(channels, piece // (len(part) * channels))
        ]
        for order, (power,) in _powers(orders, part / peak):
            position = orders.index(order)
            for rows, half in blocks:
                gram = power[:, rows] @ power.mT
                if sums is not None:
                    gram = _root_of_products(gram, order)
                    sums[samples, position, rows] = (gram @ peak * peak[:, rows]).squeeze(2)
                if half is not None and pairs is not None:
                    chosen = gram.flatten(1)[:, half.chosen]
                    root = chosen if sums is not None else _root_of_products(chosen, order)
                    pairs[samples, position, half.place] = root * half.scale


class _UpperHalf(NamedTuple):
    """The upper half of some rows of a Gram matrix."""

    place: slice
    """Where it lies in the whole triangle."""
    chosen: Tensor
    """Where it lies in the flattened rows."""
    scale: Tensor
    """The product of both channels' peaks, `(N, pairs)`."""

    @staticmethod
    def of(rows: slice, peak: Tensor) -> "_UpperHalf":
        start, channels = rows.start, peak.shape[1]
        i, j = torch.triu_indices(rows.stop - start, channels, offset=start, device=peak.device)
        first = start * channels - start * (start - 1) // 2
        scale = peak[:, i + start, 0] * peak[:, j, 0]
        return _UpperHalf(slice(first, first + len(i)), i * channels + j, scale)


def _slices(total: int, at_once: int) -> list[slice]:
    """The numbers from 0 to `total` in slices of `at_once`, at least one each."""
    step = max(1, at_once)
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def _root_of_products(t: Tensor, order: int) -> Tensor:
    """The signed root of sums of products of powers. Of an even order they are never negative."""
    return _signed_root(t, order) if order % 2 else t.pow(1.0 / order)


def _write_vector_pairs(vectors: Tensor, orders: tuple[int, ...], out: Tensor) -> None:
    """`triangle` of vectors `(N, C)`, written to `out`. With one pixel, a root undoes its power, up to sign.

    `root((a_i a_j)^p)` is `a_i a_j` for odd `p`, and its magnitude for even `p`.
    """
    at_once = max(1, PIECE // out.shape[2])
    for vector, rows in zip(vectors.split(at_once), out.split(at_once), strict=True):
        pairs = torch.cat([vector[:, i : i + 1] * vector[:, i:] for i in range(vector.shape[1])], 1).float()
        for position, order in enumerate(orders):
            rows[:, position] = pairs if order % 2 else pairs.abs()


STATISTICS: dict[str, Statistic] = {
    f.__name__: f for f in (row_sums, row_sums_of_roots, diagonal, off_diagonal, triangle)
}


def _maps(x: Tensor, channel_axis: int) -> Tensor:
    """The feature maps as `(N, channels, pixels)`, in float32 or wider."""
    if not x.is_floating_point():
        raise TypeError(f"feature maps must be floating-point, got {x.dtype}")
    axis = channel_axis + x.ndim if channel_axis < 0 else channel_axis
    if x.ndim < 2 or not 1 <= axis < x.ndim:
        raise ValueError(
            f"a feature map has a batch axis 0 and a channel axis after it; "
            f"got shape {tuple(x.shape)} with channel_axis {channel_axis}"
        )
    if 0 in x.shape[1:]:
        raise ValueError(f"a feature map needs channels and pixels, got shape {tuple(x.shape)}")
    if x.dtype not in (torch.float32, torch.float64):
        x = x.float()
    return x.movedim(axis, 1).unsqueeze(-1).flatten(2)


def _scaled_maps(x: Tensor, channel_axis: int) -> tuple[Tensor, Tensor]:
    """The maps, every example divided by a power of two near its largest magnitude, and that power.

    Division by a power of two is exact. It keeps the products of two activations within range.
    """
    maps = _maps(x, channel_axis)
    peak = _peak(maps, (1, 2))
    mantissa, _ = torch.frexp(peak)
    scale = peak / (2 * mantissa)  # at most the peak itself, so always finite
    return maps / scale, scale


def _positive(peak: Tensor) -> Tensor:
    """The magnitude to divide by: 1 instead of 0."""
    return torch.where(peak == 0, torch.ones_like(peak), peak)


def _peak(x: Tensor, axes: int | tuple[int, ...]) -> Tensor:
    """The largest magnitude along `axes`. It is 1 if all values are zero."""
    return _positive(x.abs().amax(axes, keepdim=True))


def _powers(orders: tuple[int, ...], *bases: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """The orders, ascending, with the bases to that power. Powers are products, because `pow` is slow."""
    powers, reached = bases, 1
    for order in sorted(orders):
        while reached < order:
            powers = tuple(power * base for power, base in zip(powers, bases, strict=True))
            reached += 1
        yield order, powers


def _signed_root(t: Tensor, order: int) -> Tensor:
    """`sign(t) |t|^(1/order)`."""
    return t if order == 1 else t.sign() * t.abs().pow(1.0 / order)


def _stacked(rows: list[Tensor], orders: tuple[int, ...], scale: Tensor) -> Tensor:
    """Rows `(N, C, 1)` of ascending orders become `(N, orders, C)`, in the sequence of `orders`."""
    ascending = sorted(orders)
    ordered = [rows[ascending.index(order)] for order in orders]
    return (torch.cat(ordered, 2) * scale * scale).transpose(1, 2).float()
