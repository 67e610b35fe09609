"""The Gram statistics against the float64 transcription of the paper."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramwatch.numerics import statistics
from gramwatch.numerics.statistics import STATISTICS, check_count, check_orders, distinct_orders
from tests import oracle

EVERY = list(STATISTICS)
ORDERS = (1, 2, 3, 4, 5, 10, 19, 20)


def reference(x: torch.Tensor, orders, name: str) -> np.ndarray:
    maps = x.double().flatten(2).numpy()
    return np.array([[oracle.stat(m, p, name) for p in orders] for m in maps])


def reference_magnitude(x: torch.Tensor, orders, name: str) -> np.ndarray:
    maps = x.double().flatten(2).numpy()
    return np.array([[oracle.magnitude(m, p, name) for p in orders] for m in maps])


def mixed_map(n: int, c: int, h: int, w: int, zeros: float, seed: int) -> torch.Tensor:
    """Activations of both signs whose magnitudes run from 1e-4 to 1e4 within one map, some zero."""
    g = torch.Generator().manual_seed(seed)
    magnitude = 10 ** (torch.rand(n, c, h, w, generator=g) * 8 - 4)
    sign = torch.where(torch.rand(n, c, h, w, generator=g) < 0.5, -1.0, 1.0)
    return magnitude * sign * (torch.rand(n, c, h, w, generator=g) >= zeros)


def assert_as_exact_as_promised(got: torch.Tensor, x: torch.Tensor, orders, name: str) -> None:
    """Even orders within 1e-4 relative; odd ones within 1e-5 of what cancels, before the root."""
    expected = reference(x, orders, name)
    got_values = got.double().numpy()
    assert got.dtype == torch.float32
    assert got_values.shape == expected.shape
    assert np.isfinite(got_values).all()
    for k, p in enumerate(orders):
        if p % 2 == 0:
            np.testing.assert_allclose(got_values[:, k], expected[:, k], rtol=1e-4, atol=0)
        elif name == "row_sums_of_roots":
            # Each root is exact to 1e-5 of what cancels in it; the sum of n roots cancels once more.
            np.testing.assert_allclose(
                got_values[:, k], expected[:, k], rtol=1e-4, atol=1e-5 * np.abs(expected[:, k]).max()
            )
        else:
            before_root = np.sign(got_values[:, k]) * np.abs(got_values[:, k]) ** p
            expected_before = np.sign(expected[:, k]) * np.abs(expected[:, k]) ** p
            error = np.abs(before_root - expected_before)
            magnitude = reference_magnitude(x, [p], name)[:, 0]
            assert (error <= 1e-5 * magnitude).all(), (p, (error / magnitude).max())


def assert_exact_down_to_denormals(got: torch.Tensor, x: torch.Tensor, orders, name: str) -> None:
    """The same for activations of any size. A product below 2^-126, or 2^-126 of the peak, may count as 0."""
    assert got.isfinite().all()
    for values, feature_map in zip(got.double().numpy(), x.double().flatten(2).numpy(), strict=True):
        lost = 2.0**-126 * max(1.0, np.abs(feature_map).max())
        for value, p in zip(values, orders, strict=True):
            q, t, magnitude = oracle.scaled(feature_map, p, name)
            expected = q * oracle.signed_root(t, p)
            error = np.abs(value - expected)
            close = error <= lost * feature_map.size ** (1 / p)
            if p % 2 == 0:
                close |= error <= 1e-4 * expected
            else:
                with np.errstate(over="ignore"):
                    share = value / np.where(q == 0, 1, q)
                    close |= np.abs(np.sign(share) * np.abs(share) ** p - t) <= 1e-5 * magnitude
            assert close.all(), (p, value[~close], expected[~close])


def tiny_map(shape, seed: int, where: str, power: int) -> torch.Tensor:
    """A mixed map of which all, the first channel or the first pixel is multiplied by `2^-power`."""
    x = mixed_map(*shape, seed=seed)
    part = {"example": x, "channel": x[:, :1], "pixel": x[:, :, :1, :1]}[where]
    part.copy_((part.double() * 2.0**-power).float())
    return x


tiny = st.tuples(st.sampled_from(["example", "channel", "pixel"]), st.integers(0, 165))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("zeros", [0.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_agrees_with_the_paper_over_eight_decades(name, zeros, dtype):
    x = mixed_map(3, 9, 5, 4, zeros, seed=1).to(dtype)
    assert_as_exact_as_promised(STATISTICS[name](x, ORDERS, 1), x, ORDERS, name)


@pytest.mark.parametrize("name", EVERY)
def test_autocast_changes_nothing(name):
    x = mixed_map(2, 6, 4, 4, 0.2, seed=2)
    plain = STATISTICS[name](x, ORDERS, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = STATISTICS[name](x, ORDERS, 1)
    assert torch.equal(plain, under_autocast)


shapes = st.tuples(
    st.integers(1, 3),
    st.integers(1, 8),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.5, 0.9]),
)


@given(shapes, st.integers(0, 2**31), st.sampled_from(EVERY))
@settings(max_examples=150, deadline=None)
def test_agrees_with_the_paper_on_any_shape(shape, seed, name):
    x = mixed_map(*shape, seed=seed)
    assert_as_exact_as_promised(STATISTICS[name](x, (1, 2, 7, 10), 1), x, (1, 2, 7, 10), name)


@given(shapes, st.integers(0, 2**31), st.sampled_from(["row_sums", "diagonal", "off_diagonal"]), tiny)
@settings(max_examples=150, deadline=None)
def test_agrees_with_the_paper_down_to_denormals(shape, seed, name, tiny):
    x = tiny_map(shape, seed, *tiny)
    assert_exact_down_to_denormals(STATISTICS[name](x, (1, 2, 7, 10), 1), x, (1, 2, 7, 10), name)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-37, 1e-20, 3e38])
def test_an_example_whose_peak_is_at_the_edge_of_float32(name, size):
    """Its square is far outside float32, so the statistic is 0 or infinite, but what lies between is kept."""
    x = torch.full((2, 3, 2, 2), 1e-20)
    x[1] *= 0
    x[1, 0, 0, 0] = size
    got = STATISTICS[name](x, (1, 2), 1)
    assert not got.isnan().any()
    others = [index for index in range(got.shape[2]) if name == "off_diagonal" or index]
    assert (got[1][:, others] == 0).all()
    if name != "off_diagonal":
        expected = torch.tensor(size, dtype=torch.float64).float().double().square().float()
        torch.testing.assert_close(got[1, :, 0], expected.expand(2), rtol=1e-4, atol=2e-45)


@given(shapes, st.integers(0, 2**31), st.sampled_from(EVERY), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_permuting_pixels_changes_nothing(shape, seed, name, random):
    x = mixed_map(*shape, seed=seed).flatten(2).abs()
    order = list(range(x.shape[2]))
    random.shuffle(order)
    a, b = STATISTICS[name](x, (1, 2, 5), 1), STATISTICS[name](x[:, :, order], (1, 2, 5), 1)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=0)


@given(shapes, st.integers(0, 2**31), st.sampled_from(EVERY), st.integers(-40, 40))
@settings(max_examples=60, deadline=None)
def test_scaling_activations_by_c_scales_by_c_squared(shape, seed, name, exponent):
    x = mixed_map(*shape, seed=seed).clamp(-100, 100)
    a, b = STATISTICS[name](x, (1, 2, 5, 10), 1), STATISTICS[name](x * 2.0**exponent, (1, 2, 5, 10), 1)
    # A power of two is exact; down to 2^-126 so is the result.
    expected = a.double() * 4.0**exponent
    normal = (expected.abs() > 1e-36) | (expected == 0)
    torch.testing.assert_close(b.double()[normal], expected[normal], rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("axis", [1, 2, 3, -1])
def test_the_channel_axis_may_be_anywhere(name, axis):
    x = torch.randn(2, 5, 4, 3)
    moved = x.movedim(1, axis)
    torch.testing.assert_close(STATISTICS[name](moved, (1, 2), axis), STATISTICS[name](x, (1, 2), 1))


@pytest.mark.parametrize("name", EVERY)
def test_vectors_and_one_pixel_maps_are_the_same(name):
    x = torch.randn(4, 7)
    torch.testing.assert_close(
        STATISTICS[name](x, (1, 2, 3), 1), STATISTICS[name](x[:, :, None], (1, 2, 3), 1)
    )


@pytest.mark.parametrize("name", EVERY)
def test_any_orders_in_any_sequence(name):
    x = torch.randn(2, 4, 3, 3)
    shuffled = STATISTICS[name](x, (10, 1, 4), 1)
    for k, p in enumerate((10, 1, 4)):
        torch.testing.assert_close(shuffled[:, k], STATISTICS[name](x, [p], 1)[:, 0])


@pytest.mark.parametrize("name", EVERY)
def test_an_order_far_beyond_float32_stays_finite(name):
    x = torch.rand(1, 3, 2, 2) * 1000 + 1
    got = STATISTICS[name](x, (100,), 1)
    assert got.isfinite().all()
    # At a very high order the root tends to the largest product.
    if name == "diagonal":
        largest = x.flatten(2).amax(2).square()
        torch.testing.assert_close(got[:, 0], largest, rtol=0.02, atol=0)


@pytest.mark.parametrize("name", EVERY)
def test_zero_maps_give_zero(name):
    assert (STATISTICS[name](torch.zeros(2, 3, 4, 4), (1, 2, 10), 1) == 0).all()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_activation_shows(name, bad):
    x = torch.rand(3, 4, 5, 5) + 0.1
    x[1, 2, 3, 3] = bad
    got = STATISTICS[name](x, (1, 2), 1)
    assert got[[0, 2]].isfinite().all()
    assert not got[1].isfinite().all()


def test_off_diagonal_of_one_channel_is_zero():
    assert (statistics.off_diagonal(torch.rand(2, 1, 3, 3), (1, 2)) == 0).all()


def test_off_diagonal_does_not_cancel_where_one_channel_outshines_all():
    x = torch.full((1, 3, 2, 2), 1e-3)
    x[:, 0] = 1e3
    assert_as_exact_as_promised(statistics.off_diagonal(x, (2, 4, 10)), x, (2, 4, 10), "off_diagonal")


@pytest.mark.parametrize("name", ["triangle", "row_sums_of_roots"])
def test_pieces_of_any_size_give_the_same(name, monkeypatch):
    x = torch.randn(5, 7, 3, 3)
    whole = STATISTICS[name](x, (1, 2, 3), 1)
    for piece in (1, 70, 200):
        monkeypatch.setattr(statistics, "PIECE", piece)
        torch.testing.assert_close(STATISTICS[name](x, (1, 2, 3), 1), whole, rtol=1e-6, atol=0)


def test_pairs_and_their_sums_from_one_gram_matrix_are_those_of_two(monkeypatch):
    x, orders = mixed_map(4, 7, 3, 3, zeros=0.1, seed=5).flatten(2), (4, 1, 3, 10)
    for piece in (statistics.PIECE, 200, 1):
        monkeypatch.setattr(statistics, "PIECE", piece)
        pairs, sums = torch.empty(4, 4, 28), torch.empty(4, 4, 7)
        statistics.write_pairs(x, orders, pairs=pairs, sums=sums)
        assert pairs.equal(statistics.triangle(x, orders))
        assert sums.equal(statistics.row_sums_of_roots(x, orders))


@pytest.mark.parametrize("name", ["row_sums", "diagonal", "off_diagonal"])
def test_no_square_matrix_is_formed(name):
    """4,096 channels of one pixel: an n x n matrix alone would hold 16.8 M numbers."""
    largest = 0

    class Largest(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    with Largest():
        STATISTICS[name](torch.rand(2, 4096, 3), (1, 2, 3), 1)
    assert largest == 2 * 4096 * 3


def test_an_empty_batch_gives_an_empty_result():
    for statistic in STATISTICS.values():
        assert statistic(torch.zeros(0, 3, 4, 4), (1, 2), 1).shape[:2] == (0, 2)


@pytest.mark.parametrize(
    "orders", [(0,), (-1, 2), (1.5,), ("2",), (True,), (None,), (), 3, (2, 2)], ids=lambda o: repr(o)
)
def test_orders_that_are_not_positive_integers_are_refused(orders):
    with pytest.raises(ValueError, match="order"):
        check_orders(orders)


@pytest.mark.parametrize(
    "orders",
    [(1, 101), [10**7], range(1, 10**12), itertools.count(1)],
    ids=["101", "10^7", "range", "endless"],
)
def test_orders_beyond_the_limit_are_refused_at_once(orders):
    with pytest.raises(ValueError, match=r"at most 100, got"):
        check_orders(orders)
    assert check_orders(range(1, 101)) == tuple(range(1, 101))


def test_numpy_integers_are_orders():
    assert check_orders(np.arange(1, 4)) == (1, 2, 3)


@pytest.mark.parametrize(
    ("x", "axis", "error"),
    [
        (torch.zeros(3), 1, ValueError),
        (torch.zeros(3, 4), 0, ValueError),
        (torch.zeros(3, 4), 2, ValueError),
        (torch.zeros(3, 4, 0), 1, ValueError),
        (torch.zeros(3, 4, dtype=torch.int32), 1, TypeError),
    ],
)
def test_a_tensor_that_is_no_feature_map_is_refused(x, axis, error):
    with pytest.raises(error, match="feature map"):
        statistics.row_sums(x, (1,), axis)


def test_distinct_orders_of_a_vector_stand_for_all():
    assert distinct_orders(range(1, 11)) == {1: 5, 2: 5}
    assert distinct_orders((4, 6, 3)) == {4: 2, 3: 1}
    x = torch.randn(3, 6)
    every, two = statistics.triangle(x, range(1, 11)), statistics.triangle(x, (1, 2))
    for k in range(10):
        torch.testing.assert_close(every[:, k], two[:, k % 2], rtol=1e-6, atol=0)


def test_float64_is_not_narrowed_before_channels_are_added():
    """Two channels that cancel in float32."""
    x = torch.tensor([[[1 + 2.0**-40], [-1.0]]], dtype=torch.float64)
    found = STATISTICS["row_sums"](x, (1,))[0, 0]
    assert found.tolist() == pytest.approx([2.0**-40, -(2.0**-40)], rel=1e-3, abs=0)


def test_the_fewest_pixels_and_channels_are_allowed():
    assert check_count("pixels", 1) == 1
    assert check_count("channels", 16, 16) == 16
    with pytest.raises(ValueError, match="at least 16"):
        check_count("channels", 15, 16)
