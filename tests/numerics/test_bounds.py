"""Bounds: running states against one pass in numpy, in any order, from any number of shards."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from torch import Tensor

from gramwatch.numerics.bounds import BOUNDS, Bounds, HalfMinMax, MeanVariance, MinMax
from gramwatch.numerics.deviation import Layout, tap_deviations

KINDS = [*BOUNDS.values(), HalfMinMax]
FEATURES = 6


def data(examples: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Statistics of very different sizes, and the predicted classes."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([1e-4, 1.0, 1e6]).repeat(2)
    statistics = torch.randn(examples, FEATURES, generator=generator) * scale + scale
    return statistics, torch.randint(classes, (examples,), generator=generator)


def seen(kind: type[Bounds], classes: int, *batches: tuple[Tensor, Tensor]) -> Bounds:
    bounds = kind(classes, (FEATURES,))
    for statistics, predicted in batches:
        bounds.update(statistics, predicted)
    return bounds


def every(classes: int) -> Tensor:
    return torch.arange(classes)


# --- against numpy -----------------------------------------------------------------------------------


def test_min_max_are_the_extremes_of_each_class() -> None:
    statistics, predicted = data(200, classes=4)
    minimum, maximum = seen(MinMax, 4, (statistics, predicted)).rows(every(4))
    for c in range(4):
        mine = statistics[predicted == c].numpy()
        assert np.array_equal(minimum[c].numpy(), mine.min(0))
        assert np.array_equal(maximum[c].numpy(), mine.max(0))


def test_mean_variance_are_the_population_s_of_each_class() -> None:
    statistics, predicted = data(200, classes=4)
    mean, variance = seen(MeanVariance, 4, (statistics, predicted)).rows(every(4))
    for c in range(4):
        mine = statistics[predicted == c].double().numpy()
        np.testing.assert_allclose(mean[c].numpy(), mine.mean(0), rtol=1e-6)
        np.testing.assert_allclose(variance[c].numpy(), mine.var(0), rtol=1e-6)


def test_mean_variance_keep_their_precision_far_from_zero() -> None:
    # With a mean 1e4 times the spread, E[x^2] - E[x]^2 in single precision would be noise.
    generator = torch.Generator().manual_seed(0)
    values = 1e4 + torch.randn(3000, FEATURES, generator=generator)
    bounds = seen(MeanVariance, 1, *[(v, torch.zeros(len(v), dtype=torch.int64)) for v in values.split(7)])
    state = bounds.state()
    expected = values.double().numpy()
    np.testing.assert_allclose(state["mean"][0], expected.mean(0), rtol=1e-13)
    np.testing.assert_allclose((state["squares"] / state["count"])[0], expected.var(0), rtol=1e-10)


def deviation(statistics: Tensor, predicted: Tensor, bounds: Bounds) -> Tensor:
    """Eq. 4 for a single tap that has all the features."""
    return tap_deviations(statistics, predicted, bounds, Layout.of([FEATURES]))[:, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_each_example_s_own_class(kind: type[Bounds]) -> None:
    bounds = seen(kind, 5, data(100, classes=5))
    predicted = torch.tensor([4, 0, 0, 2])
    for rows, table in zip(bounds.rows(predicted), bounds.rows(every(5)), strict=True):
        assert rows.shape == (4, FEATURES)
        assert rows.dtype == torch.float32
        assert rows.equal(table[predicted])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_can_be_asked_for_some_of_the_features_only(kind: type[Bounds]) -> None:
    bounds = seen(kind, 5, data(100, classes=4))
    predicted = torch.tensor([4, 0, 0, 2])
    for part, whole in zip(bounds.rows(predicted, slice(2, 5)), bounds.rows(predicted), strict=True):
        assert part.equal(whole[:, 2:5])


@pytest.mark.parametrize("kind", BOUNDS.values())
def test_features_may_have_several_axes(kind: type[Bounds]) -> None:
    statistics, predicted = data(100, classes=4)
    predicted[predicted == 1] = 0
    flat, folded = seen(kind, 4, (statistics, predicted)), kind(4, (2, 3))
    folded.update(statistics.reshape(-1, 2, 3), predicted)
    folded.merge(kind(4, (2, 3)))
    for row, expected in zip(folded.rows(every(4)), flat.rows(every(4)), strict=True):
        assert row.equal(expected.reshape(-1, 2, 3))


def test_min_max_tell_a_training_example_from_any_that_lies_outside() -> None:
    statistics, predicted = data(60, classes=3)
    bounds = seen(MinMax, 3, (statistics, predicted))
    assert deviation(statistics, predicted, bounds).eq(0).all()
    outside = statistics.clone()
    outside[:, 5] = 1e8
    assert deviation(outside, predicted, bounds).gt(0).all()


def test_mean_variance_give_training_examples_one_squared_deviation_per_statistic_on_average() -> None:
    statistics, predicted = data(500, classes=2)
    bounds = seen(MeanVariance, 2, (statistics, predicted))
    mean = deviation(statistics, predicted, bounds).double().mean()
    assert float(mean) == pytest.approx(FEATURES, rel=1e-4)


# --- any order, any shards ---------------------------------------------------------------------------

FINITE = st.floats(-1e6, 1e6, width=32)


@st.composite
def shards(draw: st.DrawFn) -> tuple[int, list[list[tuple[Tensor, Tensor]]]]:
    """Some examples, dealt out in batches to some shards; a few shards or batches may be empty."""
    classes = draw(st.integers(1, 4))
    dealt = []
    for _ in range(draw(st.integers(1, 4))):
        batches = []
        for _ in range(draw(st.integers(0, 3))):
            size = draw(st.integers(0, 5))
            values = draw(st_numpy.arrays(np.float32, (size, FEATURES), elements=FINITE))
            predicted = draw(st.lists(st.integers(0, classes - 1), min_size=size, max_size=size))
            batches.append((torch.from_numpy(values), torch.tensor(predicted, dtype=torch.int64)))
        dealt.append(batches)
    return classes, dealt


def assert_alike(found: Bounds, expected: Bounds) -> None:
    """Bit for bit for `MinMax`; up to rounding for `MeanVariance`."""
    for name, tensor in found.state().items():
        other = expected.state()[name]
        assert tensor.dtype == other.dtype
        if isinstance(found, MinMax) or name == "count":
            assert tensor.equal(other)
        else:
            # Relative to the largest values, 1e6, and their squares; a difference of two has lost digits.
            largest = 1e6 if name == "mean" else 1e12
            torch.testing.assert_close(tensor, other, rtol=1e-9, atol=1e-12 * largest)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(case=shards(), random=st.randoms())
def test_shards_merged_in_any_order_equal_one_pass_over_all(
    kind: type[Bounds], case: tuple[int, list[list[tuple[Tensor, Tensor]]]], random: object
) -> None:
    classes, dealt = case
    flat = [batch for batches in dealt for batch in batches]
    everything = kind(classes, (FEATURES,))
    if flat:
        everything.update(*(torch.cat(column) for column in zip(*flat, strict=True)))
    states = [seen(kind, classes, *batches) for batches in dealt]
    random.shuffle(states)  # type: ignore[attr-defined]
    first, *others = states
    for other in others:
        first.merge(other)
    assert_alike(first, everything)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(case=shards(), random=st.randoms())
def test_batches_in_any_order_equal_one_pass_over_all(
    kind: type[Bounds], case: tuple[int, list[list[tuple[Tensor, Tensor]]]], random: object
) -> None:
    classes, dealt = case
    flat = [batch for batches in dealt for batch in batches]
    in_order = seen(kind, classes, *flat)
    random.shuffle(flat)  # type: ignore[attr-defined]
    shuffled = seen(kind, classes, *flat)
    one_by_one = seen(kind, classes, *((s[None], p[None]) for batch in flat for s, p in zip(*batch)))  # noqa: B905
    assert_alike(shuffled, in_order)
    assert_alike(one_by_one, in_order)


@pytest.mark.parametrize("kind", KINDS)
def test_realistic_shards_agree_to_nine_digits(kind: type[Bounds]) -> None:
    statistics, predicted = data(400, classes=3)
    everything = seen(kind, 3, (statistics, predicted))
    order = torch.randperm(400, generator=torch.Generator().manual_seed(1))
    pieces = order.split([1, 99, 7, 0, 150, 143])
    parts = [seen(kind, 3, (statistics[piece], predicted[piece])) for piece in pieces]
    left_to_right = seen(kind, 3)
    for part in parts:
        left_to_right.merge(part)
    for name, tensor in left_to_right.state().items():
        if kind is MinMax:
            assert tensor.equal(everything.state()[name])
        else:
            torch.testing.assert_close(tensor, everything.state()[name], rtol=1e-9, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_merging_leaves_the_other_shard_as_it_was(kind: type[Bounds]) -> None:
    a, b = seen(kind, 3, data(50, 3, seed=1)), seen(kind, 3, data(50, 3, seed=2))
    before = {name: tensor.clone() for name, tensor in b.state().items()}
    a.merge(b)
    a.update(*data(50, 3, seed=3))
    assert all(b.state()[name].equal(tensor) for name, tensor in before.items())


@pytest.mark.parametrize("kind", KINDS)
def test_merging_with_a_shard_that_saw_nothing_changes_nothing(kind: type[Bounds]) -> None:
    bounds, expected = seen(kind, 3, data(50, 2)), seen(kind, 3, data(50, 2))
    bounds.merge(kind(3, (FEATURES,)))
    assert all(bounds.state()[name].equal(tensor) for name, tensor in expected.state().items())
    nothing = kind(3, (FEATURES,))
    nothing.merge(expected)
    assert all(nothing.state()[name].equal(tensor) for name, tensor in expected.state().items())


# --- classes that say nothing ------------------------------------------------------------------------


def test_pooled_extremes_stand_in_for_a_class_never_predicted() -> None:
    statistics, predicted = data(90, classes=3)
    predicted[predicted == 1] = 3
    minimum, maximum = seen(MinMax, 4, (statistics, predicted)).rows(every(4))
    assert np.array_equal(minimum[1].numpy(), statistics.numpy().min(0))
    assert np.array_equal(maximum[1].numpy(), statistics.numpy().max(0))
    for c in (0, 2, 3):
        mine = statistics[predicted == c].numpy()
        assert np.array_equal(minimum[c].numpy(), mine.min(0))
        assert np.array_equal(maximum[c].numpy(), mine.max(0))


def test_a_class_predicted_once_has_its_own_extremes() -> None:
    statistics, predicted = data(20, classes=2)
    predicted[:] = 0
    predicted[7] = 1
    minimum, maximum = seen(MinMax, 2, (statistics, predicted)).rows(torch.tensor([1]))
    assert minimum[0].equal(statistics[7])
    assert maximum[0].equal(statistics[7])


@pytest.mark.parametrize("own", [0, 1])
def test_pooled_moments_stand_in_for_a_class_with_fewer_than_two_examples(own: int) -> None:
    statistics, predicted = data(90, classes=3)
    predicted[predicted == 1] = 2
    predicted[:own] = 1
    mean, variance = seen(MeanVariance, 3, (statistics, predicted)).rows(every(3))
    everything = statistics.double().numpy()
    np.testing.assert_allclose(mean[1].numpy(), everything.mean(0), rtol=1e-6)
    np.testing.assert_allclose(variance[1].numpy(), everything.var(0), rtol=1e-6)
    for c in (0, 2):
        mine = statistics[predicted == c].double().numpy()
        np.testing.assert_allclose(mean[c].numpy(), mine.mean(0), rtol=1e-6)
        np.testing.assert_allclose(variance[c].numpy(), mine.var(0), rtol=1e-6)


def test_a_class_with_two_examples_has_its_own_moments() -> None:
    statistics, predicted = data(20, classes=2)
    predicted[:] = 0
    predicted[[3, 7]] = 1
    mean, variance = seen(MeanVariance, 2, (statistics, predicted)).rows(torch.tensor([1]))
    mine = statistics[[3, 7]].double().numpy()
    np.testing.assert_allclose(mean[0].numpy(), mine.mean(0), rtol=1e-6)
    np.testing.assert_allclose(variance[0].numpy(), np.maximum(mine.var(0), _floor(mine.mean(0))), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_predicted_later_is_no_longer_pooled(kind: type[Bounds]) -> None:
    bounds = seen(kind, 3, data(60, classes=2))
    pooled = [row.clone() for row in bounds.rows(torch.tensor([2]))]
    statistics, _ = data(30, classes=1, seed=5)
    bounds.update(statistics, torch.full((30,), 2))
    own = seen(kind, 3, (statistics, torch.full((30,), 2)))
    for row, was, expected in zip(
        bounds.rows(torch.tensor([2])), pooled, own.rows(torch.tensor([2])), strict=True
    ):
        assert not row.equal(was)
        torch.testing.assert_close(row, expected)


def test_pooled_bounds_are_looked_up_without_a_copy_of_the_table() -> None:
    bounds = seen(MinMax, 3, data(60, classes=2))
    minimum, maximum, rows = bounds.lookup(torch.tensor([0, 2, 1, 2]))
    assert rows.tolist() == [0, 3, 1, 3]
    assert minimum[3].equal(minimum[:2].amin(0))
    assert maximum[3].equal(maximum[:2].amax(0))
    for table, (name, tensor) in zip((minimum, maximum), bounds.state().items(), strict=True):
        assert table.dtype == torch.float32, name
        assert table.data_ptr() == tensor.data_ptr(), name
        assert tensor.shape == (3, FEATURES), name


def test_pooled_bounds_follow_updates_merges_and_loads() -> None:
    never = torch.tensor([2])
    batches = [data(30, classes=2, seed=seed) for seed in range(3)]
    bounds = seen(MinMax, 3, batches[0])
    taken = batches[0][0]
    takes = (bounds.update, lambda *batch: bounds.merge(seen(MinMax, 3, batch)))
    for batch, take in zip(batches[1:], takes, strict=True):
        bounds.rows(never)
        take(*batch)
        taken = torch.cat([taken, batch[0]])
        minimum, maximum = bounds.rows(never)
        assert minimum[0].equal(taken.amin(0))
        assert maximum[0].equal(taken.amax(0))
    bounds.load_state(seen(MinMax, 3, batches[2]).state())
    assert bounds.rows(never)[0][0].equal(batches[2][0].amin(0))


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_made_in_inference_mode_can_be_looked_up_outside_it(kind: type[Bounds]) -> None:
    with torch.inference_mode():
        bounds = seen(kind, 3, data(60, classes=2))
    expected = seen(kind, 3, data(60, classes=2)).rows(every(3))
    for row, other in zip(bounds.rows(every(3)), expected, strict=True):
        assert row.equal(other)


def test_a_class_that_an_interruption_left_without_some_features_is_judged_by_the_pooled_bounds() -> None:
    bounds = seen(MinMax, 2, data(30, classes=1))
    bounds.state()["minimum"][1, :3] = 0.0
    bounds.state()["maximum"][1, :3] = 0.0
    assert bounds.lookup(torch.tensor([1]))[2].tolist() == [2]


# --- the smallest variance ---------------------------------------------------------------------------


def _floor(mean: np.ndarray) -> np.ndarray:
    return (1e-3 * np.abs(mean) + 1e-6) ** 2


@pytest.mark.parametrize("value", [0.0, 1e-5, 1.0, -40.0, 1e6])
def test_a_statistic_that_never_varied_has_a_small_positive_variance(value: float) -> None:
    constant = torch.full((10, FEATURES), value)
    bounds = seen(MeanVariance, 1, (constant, torch.zeros(10, dtype=torch.int64)))
    mean, variance = bounds.rows(torch.tensor([0]))
    assert mean.eq(value).all()
    assert variance.gt(0).all()
    np.testing.assert_allclose(variance.numpy(), _floor(np.full((1, FEATURES), value)), rtol=1e-5)
    assert deviation(constant, torch.zeros(10, dtype=torch.int64), bounds).eq(0).all()


def test_the_floor_leaves_ordinary_variances_alone_and_lifts_only_small_ones() -> None:
    # Around a mean of 100 a standard deviation counts as at least 0.100001.
    signs = torch.tensor([1.0, -1.0]).repeat(50)[:, None]
    values = 100 + signs * torch.tensor([0.05, 0.2, 3.0]).repeat(2)
    bounds = seen(MeanVariance, 1, (values, torch.zeros(100, dtype=torch.int64)))
    _, variance = bounds.rows(torch.tensor([0]))
    expected = np.tile([0.100001, 0.2, 3.0], 2) ** 2
    np.testing.assert_allclose(variance[0].numpy(), expected, rtol=1e-4)


def test_the_floor_holds_for_pooled_moments_too() -> None:
    constant = torch.full((10, FEATURES), 5.0)
    bounds = seen(MeanVariance, 2, (constant, torch.zeros(10, dtype=torch.int64)))
    _, variance = bounds.rows(torch.tensor([1]))
    np.testing.assert_allclose(variance.numpy(), (5e-3 + 1e-6) ** 2, rtol=1e-5)


# --- states ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_or_a_merge_is_seen_by_the_next_rows(kind: type[Bounds]) -> None:
    bounds = seen(kind, 2, data(40, 2, seed=1))
    first = [row.clone() for row in bounds.rows(every(2))]
    bounds.update(*data(200, 2, seed=2))
    second = [row.clone() for row in bounds.rows(every(2))]
    bounds.merge(seen(kind, 2, data(2000, 2, seed=3)))
    third = bounds.rows(every(2))
    fresh = seen(kind, 2, data(40, 2, seed=1), data(200, 2, seed=2))
    for a, b, c, expected in zip(first, second, third, fresh.rows(every(2)), strict=True):
        assert not a.equal(b)
        assert not b.equal(c)
        assert b.equal(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_can_be_put_into_other_bounds(kind: type[Bounds]) -> None:
    bounds = seen(kind, 3, data(60, classes=2))
    other = seen(kind, 3, data(10, classes=3, seed=9))
    other.rows(every(3))  # what is kept of these must be forgotten
    other.load_state(bounds.state())
    assert tuple(other.state()) == kind.state_names
    for name, tensor in bounds.state().items():
        assert other.state()[name].equal(tensor)
        assert other.state()[name].dtype == tensor.dtype
    for row, expected in zip(other.rows(every(3)), bounds.rows(every(3)), strict=True):
        assert row.equal(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_two_bounds_never_share_a_state(kind: type[Bounds]) -> None:
    bounds = seen(kind, 3, data(60, classes=3))
    before = {name: tensor.clone() for name, tensor in bounds.state().items()}
    other = kind(3, (FEATURES,))
    other.load_state(bounds.state())
    other.update(*data(500, classes=3, seed=4))
    assert all(bounds.state()[name].equal(tensor) for name, tensor in before.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_continues_as_if_nothing_had_happened(kind: type[Bounds]) -> None:
    first, second = data(60, 3, seed=1), data(60, 3, seed=2)
    resumed = kind(3, (FEATURES,))
    resumed.load_state(seen(kind, 3, first).state())
    resumed.update(*second)
    whole = seen(kind, 3, first, second)
    assert all(resumed.state()[name].equal(tensor) for name, tensor in whole.state().items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_another_shape_is_refused_and_nothing_is_changed(kind: type[Bounds]) -> None:
    bounds = seen(kind, 3, data(60, classes=3))
    before = {name: tensor.clone() for name, tensor in bounds.state().items()}
    with pytest.raises(ValueError, match=r"has shape \(4, .*, not \(3, "):
        bounds.load_state(kind(4, (FEATURES,)).state())
    with pytest.raises(KeyError):
        bounds.load_state({})
    assert all(bounds.state()[name].equal(tensor) for name, tensor in before.items())


def test_bounds_of_another_kind_cannot_be_merged() -> None:
    a, b = MinMax(2, (FEATURES,)), MeanVariance(2, (FEATURES,))
    with pytest.raises(TypeError, match="mean_variance bounds cannot be merged into min_max bounds"):
        a.merge(b)
    with pytest.raises(TypeError, match="min_max bounds cannot be merged into mean_variance bounds"):
        b.merge(a)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3, (FEATURES,)), (2, (1,)), (2, (FEATURES, 1))], ids=str)
def test_bounds_of_another_shape_cannot_be_merged(
    kind: type[Bounds], shape: tuple[int, tuple[int, int]]
) -> None:
    bounds = seen(kind, 2, data(10, 2))
    before = {name: tensor.clone() for name, tensor in bounds.state().items()}
    with pytest.raises(ValueError, match="cannot be merged"):
        bounds.merge(kind(*shape))
    assert all(bounds.state()[name].equal(tensor) for name, tensor in before.items())


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_changes_nothing(kind: type[Bounds]) -> None:
    bounds, expected = seen(kind, 3, data(60, 3)), seen(kind, 3, data(60, 3))
    bounds.update(torch.empty(0, FEATURES), torch.empty(0, dtype=torch.int64))
    assert all(bounds.state()[name].equal(tensor) for name, tensor in expected.state().items())


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_made_in_inference_mode_can_be_updated_in_it_later(kind: type[Bounds]) -> None:
    first, second = data(30, 3, seed=1), data(30, 3, seed=2)
    with torch.inference_mode():
        bounds = seen(kind, 3, first)
    with torch.inference_mode():
        bounds.update(*second)
        rows = [row.clone() for row in bounds.rows(every(3))]
    with torch.inference_mode():
        bounds.merge(seen(kind, 3, data(30, 3, seed=3)))
    expected = seen(kind, 3, first, second)
    for row, other in zip(rows, expected.rows(every(3)), strict=True):
        assert row.equal(other)
    expected.merge(seen(kind, 3, data(30, 3, seed=3)))
    assert all(bounds.state()[name].equal(tensor) for name, tensor in expected.state().items())


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_made_outside_inference_mode_can_be_updated_inside_it_and_outside(kind: type[Bounds]) -> None:
    first, second, third = (data(30, 3, seed=i) for i in range(3))
    bounds = kind(3, (FEATURES,))
    with torch.inference_mode():
        saved = seen(kind, 3, first).state()
    bounds.load_state(saved)
    with torch.inference_mode():
        bounds.update(*second)
    resumed = kind(3, (FEATURES,))
    resumed.load_state(bounds.state())
    resumed.update(*third)
    expected = seen(kind, 3, first, second, third)
    assert all(resumed.state()[name].equal(tensor) for name, tensor in expected.state().items())


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_dtype_does_not_matter(kind: type[Bounds]) -> None:
    expected = seen(kind, 3, data(30, 3))
    torch.set_default_dtype(torch.float64)
    try:
        bounds = kind(3, (FEATURES,))
        bounds.update(*(tensor.clone() for tensor in _single(30)))
    finally:
        torch.set_default_dtype(torch.float32)
    for name, tensor in expected.state().items():
        assert bounds.state()[name].dtype == tensor.dtype
        assert bounds.state()[name].equal(tensor)


def _single(examples: int) -> tuple[Tensor, Tensor]:
    """`data` in float32, whatever the default."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        return data(examples, 3)
    finally:
        torch.set_default_dtype(default)


def test_every_kind_is_known_by_the_name_it_gives_itself() -> None:
    assert {kind.name: kind for kind in (MinMax, MeanVariance)} == BOUNDS
    assert list(BOUNDS) == ["min_max", "mean_variance"]


# --- examples that are left out ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_example_of_no_class_changes_nothing(kind: type[Bounds]) -> None:
    """Examples that are not finite come with a negative class. Class 0 must not get them."""
    statistics, predicted = data(60, classes=3)
    statistics += 50
    left_out = statistics.clone()
    left_out[::4] = torch.nan
    of_class = torch.where(torch.arange(60) % 4 == 0, -1, predicted)
    bounds = seen(kind, 3, (left_out, of_class))
    expected = seen(kind, 3, (statistics[of_class >= 0], of_class[of_class >= 0]))
    for name, tensor in expected.state().items():
        torch.testing.assert_close(bounds.state()[name], tensor, rtol=1e-12, atol=0)
