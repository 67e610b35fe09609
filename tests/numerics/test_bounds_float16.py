"""Bounds in float16: never narrower than in float32, hardly wider, in any order."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gramwatch.numerics import bounds
from gramwatch.numerics.bounds import HalfMinMax, MinMax, make_bounds
from gramwatch.numerics.deviation import Layout, tap_deviations
from tests.numerics.test_bounds import data

GROUPS = (2, 1, 4)


FEATURES = sum(GROUPS)


CLASSES = 3


def both(*batches: tuple[Tensor, Tensor]) -> tuple[HalfMinMax, MinMax]:
    """The same examples in float16 and in float32."""
    half, single = HalfMinMax(CLASSES, (FEATURES,), groups=GROUPS), MinMax(CLASSES, (FEATURES,))
    for batch in batches:
        half.update(*batch)
        single.update(*batch)
    return half, single


def assert_hardly_wider(half: HalfMinMax, single: MinMax, classes: Tensor) -> None:
    """Never narrower; wider by 2^-10 of the value, or by 2^-38 of the group's largest where it is tiny."""
    (low, high), (minimum, maximum) = ([t.double() for t in b.rows(classes)] for b in (half, single))
    assert low.le(minimum).all()
    assert high.ge(maximum).all()
    peak = torch.maximum(minimum.abs(), maximum.abs()).split(GROUPS, 1)
    peak = torch.cat([p.amax(1, keepdim=True).expand_as(p) for p in peak], 1)
    for wide, bound in ((low, minimum), (high, maximum)):
        precise = bound.abs() >= 2**-28 * peak
        allowed = torch.where(precise, 2**-10 * bound.abs(), 2**-38 * peak)
        assert (wide - bound).abs().le(allowed).all()


# --- what is stored ----------------------------------------------------------------------------------


MAGNITUDES = st.one_of(
    st.floats(-1e7, 1e7, width=32),
    st.floats(-1, 1, width=32),
    st.floats(-(2.0**-100), 2.0**-100, width=32),
    st.sampled_from(
        [0.0, -0.0, 1e7, -1e7, 2.0**-149, -(2.0**-149), 65504.0, 65536.0, 32767.999, 1e38, -1e38]
    ),
)


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[Tensor, Tensor]]:
    found = []
    for size in draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)):
        values = draw(st_numpy.arrays(np.float32, (size, FEATURES), elements=MAGNITUDES))
        predicted = draw(st.lists(st.integers(-1, CLASSES - 1), min_size=size, max_size=size))
        found.append((torch.from_numpy(values), torch.tensor(predicted)))
    return found


@settings(max_examples=150, deadline=None)
@given(batches())
def test_no_example_falls_outside_and_bounds_are_hardly_wider(dealt: list[tuple[Tensor, Tensor]]) -> None:
    half, single = both(*dealt)
    predicted = torch.cat([p for _, p in dealt])
    present = predicted[predicted >= 0].unique()
    if len(present):
        assert_hardly_wider(half, single, present)
    for statistics, classes in dealt:
        kept = classes >= 0
        low, high = half.rows(classes[kept])
        assert low.le(statistics[kept]).all()
        assert high.ge(statistics[kept]).all()


@settings(max_examples=80, deadline=None)
@given(batches(), st.randoms())
def test_batches_and_shards_in_any_order_are_the_same_bits(
    dealt: list[tuple[Tensor, Tensor]], random: object
) -> None:
    everything, _ = both(tuple(torch.cat(column) for column in zip(*dealt, strict=True)))
    random.shuffle(dealt)  # type: ignore[attr-defined]
    one_by_one, _ = both(*dealt)
    merged, _ = both()
    for batch in dealt:
        merged.merge(both(batch)[0])
    for name, tensor in everything.state().items():
        assert one_by_one.state()[name].equal(tensor)
        assert merged.state()[name].equal(tensor)


@settings(max_examples=80, deadline=None)
@given(batches(), st.integers(0, FEATURES), st.integers(0, FEATURES))
def test_look_ups_by_part_equal_those_of_the_whole(
    dealt: list[tuple[Tensor, Tensor]], a: int, b: int
) -> None:
    a, b = sorted((a, b))
    assume(a < b)
    half, _ = both(*dealt)
    every = torch.arange(CLASSES)
    for part, row in zip(half.rows(every, slice(a, b)), half.rows(every), strict=True):
        assert part.equal(row[:, a:b])


def test_later_batches_that_are_far_larger_or_smaller_are_taken_in() -> None:
    statistics, predicted = data(90, classes=CLASSES)
    statistics = statistics[:, [0, 1, 2, 3, 4, 5, 0]]
    half, single = both(*((statistics * scale, predicted) for scale in (1e-3, 1e6, 1.0, 1e12, 1e-9)))
    assert_hardly_wider(half, single, torch.arange(CLASSES))
    assert half.state()["minimum"].isfinite().all()


def test_bounds_have_half_the_bytes() -> None:
    half = make_bounds("min_max", "float16", 1000, [512] * 20, "meta").state()
    single = make_bounds("min_max", "float32", 1000, [512] * 20, "meta").state()
    size = [sum(t.numel() * t.element_size() for t in state.values()) for state in (half, single)]
    assert size[0] / size[1] == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_an_interruption_never_parts_a_bound_from_its_exponent(lost: int) -> None:
    class Interrupt(TorchFunctionMode):
        writes = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.writes += func is Tensor.__setitem__
            if func is Tensor.__setitem__ and self.writes == lost:
                raise KeyboardInterrupt
            return func(*args, **(kwargs or {}))

    statistics, predicted = torch.rand(9, FEATURES), torch.arange(9) % CLASSES
    half, single = both((statistics, predicted), (1e6 * statistics, predicted))
    interrupted, _ = both((statistics, predicted))
    with Interrupt() as writing, pytest.raises(KeyboardInterrupt):
        interrupted.update(1e6 * statistics, predicted)
    assert writing.writes == lost + 3
    for name, tensor in half.state().items():
        assert interrupted.state()[name].equal(tensor)
    assert_hardly_wider(interrupted, single, torch.arange(CLASSES))


def test_bounds_of_another_storage_or_of_other_groups_cannot_be_merged() -> None:
    half, single = both()
    with pytest.raises(TypeError, match="min_max bounds cannot be merged into float16 min_max bounds"):
        half.merge(single)
    with pytest.raises(TypeError, match="float16 min_max bounds cannot be merged into min_max bounds"):
        single.merge(half)
    with pytest.raises(ValueError, match="other groups"):
        half.merge(HalfMinMax(CLASSES, (FEATURES,), groups=GROUPS[::-1]))


# --- what is looked up -------------------------------------------------------------------------------


def test_a_class_never_predicted_is_judged_by_the_pooled_bounds() -> None:
    statistics, predicted = data(90, classes=2)
    statistics = statistics[:, [0, 1, 2, 3, 4, 5, 0]]
    half, single = both((statistics, predicted))
    assert_hardly_wider(half, single, torch.tensor([0, 1, 2]))
    minimum, maximum, rows = half.lookup(torch.tensor([2, 0, 2]))
    assert minimum.dtype == maximum.dtype == torch.float32
    assert minimum[rows][0].equal(minimum[rows][2])
    assert minimum[rows][0].le(statistics.amin(0)).all()
    assert maximum[rows][0].ge(statistics.amax(0)).all()
    half.update(statistics[:5] + 1, torch.full((5,), 2))
    assert half.rows(torch.tensor([2]))[0][0].gt(minimum[rows][0]).any()


def test_nothing_depends_on_how_many_examples_are_worked_on_together(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = torch.rand(50, FEATURES), torch.arange(50) % (CLASSES - 1)
    expected, _ = both(batch)
    expected.rows(torch.arange(CLASSES))
    monkeypatch.setattr(bounds, "COPIED", 2 * FEATURES)
    half, _ = both(batch)
    half.merge(both((batch[0] / 2, batch[1]))[0])
    expected.update(batch[0] / 2, batch[1])
    for found, other in zip(*(b.rows(torch.arange(CLASSES)) for b in (half, expected)), strict=True):
        assert found.equal(other)
    statistics, predicted = 3 * torch.randn(100, FEATURES), torch.arange(100) % CLASSES
    layout = Layout.of([3, 4])
    whole = tap_deviations(statistics, predicted, half, layout)
    each = [
        tap_deviations(s[None], p[None], half, layout) for s, p in zip(statistics, predicted, strict=True)
    ]
    assert half.at_once == 2
    assert whole.gt(0).any()
    assert whole.equal(torch.cat(each))


# --- what stays behind -------------------------------------------------------------------------------


def test_a_state_that_is_loaded_leaves_nothing_of_the_pooled_bounds_before() -> None:
    statistics, predicted = torch.randn(60, FEATURES), torch.arange(60) % 2
    wide, narrow = both((1000 * statistics, predicted))[0], both((statistics, predicted))[0]
    unseen = torch.tensor([2])
    wide.rows(unseen)  # it fills the pooled row
    wide.load_state(narrow.state())
    for mine, expected in zip(wide.rows(unseen), narrow.rows(unseen), strict=True):
        assert torch.equal(mine, expected)


def test_a_bound_of_zero_has_one_form_in_any_order() -> None:
    """A tiny negative bound is rounded up to zero. As bits it must be the zero of any other order."""
    rows = [torch.tensor([[value] * (FEATURES - 1) + [1.0]]) for value in (-(2.0**-149), 0.0)]
    states = []
    for order in ((0, 1), (1, 0), (0,)):
        half = HalfMinMax(CLASSES, (FEATURES,))
        for number in order:
            half.update(rows[number], torch.zeros(1, dtype=torch.int64))
        states.append(half.state()["maximum"][0].view(torch.int16))
    assert all(torch.equal(state, states[0]) for state in states)
    assert states[0][:-1].eq(0).all()
