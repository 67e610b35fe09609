"""Gram statistics of one feature map (Eq. 1-2): the readable definition.

A feature map is a tensor with a batch axis first, a channel axis, and any number of further axes, whose
positions are the "pixels". With `a[i, k]` the activation of channel `i` at pixel `k`, the Gram matrix of
order `p` before its root is `A[i, j] = sum_k a[i, k]^p a[j, k]^p`. Each function here returns float32 of
shape `(N, orders, features)`:

| function | features | of each sample |
| --- | --- | --- |
| `row_sums` | C | `root(sum_j A[i, j])`: the published figures |
| `row_sums_of_roots` | C | `sum_j root(A[i, j])`: the paper's text |
| `diagonal` | C | `root(A[i, i])` |
| `off_diagonal` | C | `root(sum_{j != i} A[i, j])` |
| `triangle` | C (C + 1) / 2 | `root(A[i, j])`, `j >= i`, row by row (Algorithm 1) |

where `root(t) = sign(t) |t|^(1/p)`.

Powers of order 10 overflow and underflow float32 within the range of ordinary activations. Every
statistic here is homogeneous of degree 2, so magnitudes are divided out before taking powers and
multiplied back after the root. A non-finite activation gives a non-finite statistic, never a plausible one.
"""

import operator
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

Statistic = Callable[[Tensor, Iterable[int], int], Tensor]

LARGEST_ORDER = 100
"""The largest order. There a root is within `N^(1/100)` of the largest product, N the number of products.

That is 12 % for 65,536 of them: higher orders say nothing new. The cost grows with the largest order.
"""

# `triangle` and `row_sums_of_roots` work on pieces of at most this many float64 numbers (32 MB).
PIECE = 2**22


def check_orders(orders: Iterable[int]) -> tuple[int, ...]:
    """The orders as a tuple, or an error that says which one is wrong. None may exceed `LARGEST_ORDER`."""
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


def distinct_orders(orders: Iterable[int]) -> dict[int, int]:
    """The orders that differ on a feature map of one pixel, and how many of the given each stands for.

    With one pixel `root((a_i a_j)^p)` is `|a_i a_j|` for every even `p` and `a_i a_j` for every odd one.
    """
    standing: dict[bool, int] = {}
    count: dict[int, int] = {}
    for order in check_orders(orders):
        first = standing.setdefault(order % 2 == 0, order)
        count[first] = count.get(first, 0) + 1
    return count


def row_sums(x: Tensor, orders: Iterable[int], channel_axis: int = 1) -> Tensor:
    """Row sums of the Gram matrix, then the signed root: `root(sum_j A[i, j])`, as published.

    `sum_j A[i, j] = sum_k a[i, k]^p s[k]` with the pixel sums `s[k] = sum_j a[j, k]^p`, so no n x n
    matrix is formed. Pixel sums are taken of activations divided by the pixel's largest magnitude, and
    each channel's products by the channel's largest product: for even orders nothing can underflow.
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
    """The diagonal of the Gram matrix, `root(sum_k a[i, k]^2p)`: each channel by itself."""
    orders = check_orders(orders)
    x, scale = _scaled_maps(x, channel_axis)
    peak = _peak(x, 2)
    rows = [
        _signed_root((power * power).sum(2, keepdim=True), order) * peak * peak
        for order, (power,) in _powers(orders, x / peak)
    ]
    return _stacked(rows, orders, scale)


def off_diagonal(x: Tensor, orders: Iterable[int], channel_axis: int = 1) -> Tensor:
    """Row sums without the diagonal, then the signed root: each channel with all the others.

    The pixel sum over the other channels is the whole pixel sum less the channel's own part, except for
    the pixel's largest channel, whose own part may be nearly all of it: the others are summed for that
    one apart, so nothing cancels.
    """
    orders = check_orders(orders)
    x, scale = _scaled_maps(x, channel_axis)
    largest, holder = x.abs().max(1, keepdim=True)
    others = x.scatter(1, holder, 0.0)
    pixel_peak, others_peak = _positive(largest), _peak(others, 1)
    is_holder = torch.zeros_like(x, dtype=torch.bool).scatter(1, holder, True)
    # A channel that has no partner at a pixel (all others are zero there) has no product with it.
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
    """Row sums of the p-th order Gram matrix as the paper's text has it: the root first, then the sum."""
    orders = check_orders(orders)
    maps = _maps(x, channel_axis)
    found = maps.new_empty(maps.shape[0], len(orders), maps.shape[1], dtype=torch.float32)
    for samples, position, start, gram in _gram_pieces(maps, orders):
        found[samples, position, start : start + gram.shape[1]] = gram.sum(2).float()
    return found


def triangle(x: Tensor, orders: Iterable[int], channel_axis: int = 1) -> Tensor:
    """The flattened upper triangle of the p-th order Gram matrix, diagonal included (Algorithm 1)."""
    orders = check_orders(orders)
    maps = _maps(x, channel_axis)
    total, channels, pixels = maps.shape
    found = maps.new_empty(total, len(orders), channels * (channels + 1) // 2, dtype=torch.float32)
    if pixels == 1:
        return _vector_triangle(maps[:, :, 0], orders, found)
    for samples, position, start, gram in _gram_pieces(maps, orders):
        i, j = torch.triu_indices(gram.shape[1], channels, offset=start, device=gram.device)
        first = start * channels - start * (start - 1) // 2
        found[samples, position, first : first + i.numel()] = gram[:, i, j].float()
    return found


def _vector_triangle(vectors: Tensor, orders: tuple[int, ...], found: Tensor) -> Tensor:
    """`triangle` of vectors `(N, C)`, written to `found`: with one pixel a root undoes its power, up to sign.

    `root((a_i a_j)^p)` is `a_i a_j` for odd `p` and its magnitude for even ones.
    """
    at_once = max(1, PIECE // found.shape[2])
    for vector, out in zip(vectors.split(at_once), found.split(at_once), strict=True):
        pairs = torch.cat([vector[:, i : i + 1] * vector[:, i:] for i in range(vector.shape[1])], 1).float()
        for position, order in enumerate(orders):
            out[:, position] = pairs if order % 2 else pairs.abs()
    return found


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
    """The maps with each sample divided by a power of two near its largest magnitude, and that power.

    Division by a power of two is exact; it only keeps products of two activations within range.
    """
    maps = _maps(x, channel_axis)
    peak = _peak(maps, (1, 2))
    mantissa, _ = torch.frexp(peak)
    scale = peak / (2 * mantissa)  # at most the peak itself, so always finite
    return maps / scale, scale


def _positive(peak: Tensor) -> Tensor:
    """The magnitude to divide by: 1 where all is zero."""
    return torch.where(peak == 0, torch.ones_like(peak), peak)


def _peak(x: Tensor, axes: int | tuple[int, ...]) -> Tensor:
    """The largest magnitude along `axes`, 1 where all is zero."""
    return _positive(x.abs().amax(axes, keepdim=True))


def _powers(orders: tuple[int, ...], *bases: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Each order, ascending, with the bases to that power: by multiplication, as `pow` is slow."""
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
    """Rows of shape `(N, C, 1)` in ascending order, as `(N, orders, C)` in the order asked for."""
    ascending = sorted(orders)
    ordered = [rows[ascending.index(order)] for order in orders]
    return (torch.cat(ordered, 2) * scale * scale).transpose(1, 2).float()


def _gram_pieces(maps: Tensor, orders: tuple[int, ...]) -> Iterator[tuple[slice, int, int, Tensor]]:
    """The p-th order Gram matrices, a few samples and a few rows at a time, in float64.

    Yields the samples, the order's position, the first row and `(samples, rows, C)`. Channels are
    divided by their largest magnitude; float64 carries what pairs of channels leave of its range.
    """
    total, channels, pixels = maps.shape
    samples_at_once = max(1, PIECE // (channels * pixels))
    for first in range(0, total, samples_at_once):
        samples = slice(first, min(first + samples_at_once, total))
        piece = maps[samples].double()
        peak = _peak(piece, 2)
        rows_at_once = max(1, PIECE // (piece.shape[0] * channels))
        for order, (power,) in _powers(orders, piece / peak):
            for start in range(0, channels, rows_at_once):
                rows = slice(start, start + rows_at_once)
                gram = _signed_root(power[:, rows] @ power.mT, order)
                yield samples, orders.index(order), start, gram * peak[:, rows] * peak.mT
