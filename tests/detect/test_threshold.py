"""p-values and thresholds: by counting, in exact arithmetic, and by simulating many calibrations."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gramwatch.detect.threshold import (
    Ranks,
    class_groups,
    examples_needed,
    p_value,
    rank_of_threshold,
    threshold,
)
from gramwatch.errors import CalibrationError

LEVELS = ["0.8", "0.9", "0.95", "0.99"]
MORE_LEVELS = [
    *LEVELS,
    "0.5",
    "0.05",
    "0.7",
    "0.93",
    "0.975",
    "0.995",
    "0.999",
    "0.9999",
    "0.99999",
    "0.9999999",
]
SCORES = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0, 7.0]), min_size=1, max_size=40)


def p_by_counting(score: float, calibration: list[float]) -> Fraction:
    return Fraction(1 + sum(c >= score for c in calibration), len(calibration) + 1)


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- p-values ----------------------------------------------------------------------------------------


@given(SCORES, SCORES)
def test_p_counts_the_calibration_scores_at_least_as_high(
    scores: list[float], calibration: list[float]
) -> None:
    found = p_value(tensor(scores), tensor(calibration))
    assert found.dtype == torch.float64
    assert found.tolist() == [float(p_by_counting(score, calibration)) for score in scores]


@given(
    st.lists(st.floats(allow_nan=False, width=64), min_size=1, max_size=30),
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=64), min_size=1, max_size=30),
)
def test_p_counts_right_for_any_numbers(scores: list[float], calibration: list[float]) -> None:
    found = p_value(tensor(scores), tensor(calibration))
    assert found.tolist() == [float(p_by_counting(score, calibration)) for score in scores]


def test_a_score_equal_to_a_calibration_score_counts_it_in() -> None:
    calibration = tensor([1.0, 2.0, 2.0, 3.0])
    scores = tensor([0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, math.inf])
    assert (p_value(scores, calibration) * 5).tolist() == [5, 5, 4, 4, 2, 2, 1, 1]


def test_the_smallest_p_is_never_zero_and_the_largest_is_one() -> None:
    calibration = torch.arange(99.0, dtype=torch.float64)
    assert p_value(tensor([math.inf, 1e300]), calibration).tolist() == [0.01, 0.01]
    assert p_value(tensor([-math.inf, -1e300]), calibration).tolist() == [1.0, 1.0]


def test_the_order_of_the_calibration_scores_does_not_matter() -> None:
    calibration = torch.randn(50, dtype=torch.float64)
    scores = torch.randn(20, dtype=torch.float64)
    ascending = calibration.sort().values
    assert p_value(scores, calibration).equal(p_value(scores, ascending))
    assert threshold(calibration, 0.9) == threshold(ascending, 0.9)


def test_neither_function_changes_the_scores_given() -> None:
    calibration, scores = tensor([3.0, 1.0, 2.0] * 10), tensor([5.0, 0.0])
    p_value(scores, calibration)
    threshold(calibration, 0.9)
    assert calibration.tolist() == [3.0, 1.0, 2.0] * 10
    assert scores.tolist() == [5.0, 0.0]


def test_a_score_of_single_precision_is_compared_as_the_number_it_is() -> None:
    single = torch.tensor([0.1], dtype=torch.float32)
    assert float(single) > 0.1
    assert p_value(single, tensor([0.1])).tolist() == [0.5]
    assert p_value(tensor([0.1]), single.double()).tolist() == [1.0]


# --- thresholds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", MORE_LEVELS)
def test_the_rank_is_that_of_exact_arithmetic(level: str) -> None:
    exact = Fraction(level)
    for n in [*range(1, 1200), 4999, 9999, 10_000, 99_999, 100_000, 1_000_003]:
        assert rank_of_threshold(n, float(level)) == math.ceil((n + 1) * exact), n


@pytest.mark.parametrize("level", LEVELS)
def test_the_threshold_is_the_calibration_score_of_that_rank(level: str) -> None:
    for n in [*range(99, 140), 500, 999, 1000]:
        scores = torch.randn(n, dtype=torch.float64)
        rank = math.ceil((n + 1) * Fraction(level))
        found = threshold(scores, float(level))
        assert type(found) is float
        assert found == sorted(scores.tolist())[rank - 1]


def test_a_level_computed_with_rounding_means_the_round_number() -> None:
    noisy = 1 - 0.07  # 0.9299999999999999
    also_noisy = 0.1 + 0.7  # 0.7999999999999999
    above = 0.1 * 3 + 0.6  # 0.9000000000000001 or so
    assert noisy != 0.93
    assert also_noisy != 0.8
    for n in range(9, 500):
        assert rank_of_threshold(n, noisy) == math.ceil((n + 1) * Fraction("0.93"))
        assert rank_of_threshold(n, also_noisy) == math.ceil((n + 1) * Fraction("0.8"))
        assert rank_of_threshold(n, above) == math.ceil((n + 1) * Fraction("0.9"))
        assert rank_of_threshold(n, math.nextafter(0.95, 1)) == math.ceil((n + 1) * Fraction("0.95"))


@pytest.mark.parametrize("level", LEVELS)
def test_a_score_exceeds_the_threshold_exactly_when_p_is_at_most_one_minus_the_level(level: str) -> None:
    exact = Fraction(level)
    first = examples_needed(float(level))
    for n in [*range(first, first + 60), 200, 399, 400, 401]:
        calibration = torch.randn(n, dtype=torch.float64).mul(2).round(decimals=1)  # with many ties
        scores = torch.cat([calibration, calibration + 0.05, calibration - 0.05, tensor([-99.0, math.inf])])
        above = (scores > threshold(calibration, float(level))).tolist()
        listed = calibration.tolist()
        expected = [p_by_counting(score, listed) <= 1 - exact for score in scores.tolist()]
        assert above == expected, n
        assert any(above)
        assert not all(above)


@given(SCORES, SCORES, st.sampled_from(["0.5", *LEVELS]))
def test_threshold_and_p_agree_for_any_scores(
    scores: list[float], calibration: list[float], level: str
) -> None:
    calibration = calibration * (1 + examples_needed(float(level)) // len(calibration))
    cut = threshold(tensor(calibration), float(level))
    for score in scores:
        assert (score > cut) == (p_by_counting(score, calibration) <= 1 - Fraction(level))


def test_identical_calibration_scores_flag_only_what_is_higher() -> None:
    calibration = tensor([2.0] * 40)
    assert threshold(calibration, 0.95) == 2.0
    assert p_value(tensor([2.0, 2.0000001]), calibration).tolist() == [1.0, 1 / 41]


# --- too few examples --------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "needed"), [(0.8, 4), (0.9, 9), (0.95, 19), (0.99, 99), (0.999, 999)])
def test_the_number_of_examples_needed_is_known(level: float, needed: int) -> None:
    assert examples_needed(level) == needed


@pytest.mark.parametrize("level", MORE_LEVELS)
def test_the_number_of_examples_needed_is_that_of_exact_arithmetic(level: str) -> None:
    exact = Fraction(level)
    needed = examples_needed(float(level))
    assert needed == math.ceil(exact / (1 - exact))
    assert rank_of_threshold(needed, float(level)) <= needed
    assert rank_of_threshold(needed - 1, float(level)) > needed - 1


@pytest.mark.parametrize("level", [level for level in MORE_LEVELS if float(level) < 0.9999999])
def test_exactly_as_many_examples_as_needed_work_and_one_fewer_is_an_error_that_says_so(level: str) -> None:
    needed = examples_needed(float(level))
    scores = torch.arange(needed, dtype=torch.float64)
    rank = math.ceil((needed + 1) * Fraction(level))
    assert threshold(scores, float(level)) == rank - 1
    with pytest.raises(
        CalibrationError,
        match=rf"^{needed - 1} calibration scores cannot support level {float(level)}: "
        rf"at least {needed} are needed$",
    ):
        threshold(scores[:-1], float(level))


def test_no_calibration_scores_at_all_are_an_error_that_says_how_many_are_needed() -> None:
    with pytest.raises(CalibrationError, match=r"0 calibration scores.*at least 19 are needed"):
        threshold(torch.empty(0, dtype=torch.float64), 0.95)


@pytest.mark.parametrize("level", [1 - 1e-10, math.nextafter(1, 0)])
def test_a_level_that_nearly_is_one_needs_more_examples_than_there_are(level: float) -> None:
    with pytest.raises(CalibrationError, match=r"at least [0-9]{10,} are needed"):
        threshold(torch.arange(1000, dtype=torch.float64), level)


def test_a_level_that_nearly_is_zero_takes_the_lowest_score() -> None:
    assert threshold(tensor([3.0, 1.0, 2.0]), 1e-12) == 1.0


# --- validity ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("examples", [19, 20, 99, 250])
@pytest.mark.parametrize("ties", [False, True], ids=["continuous", "tied"])
def test_fresh_scores_are_flagged_at_most_at_the_stated_rate(examples: int, ties: bool) -> None:
    calibrations, fresh = 2000, 50
    generator = torch.Generator().manual_seed(examples)
    scores = torch.randn(calibrations, examples + fresh, generator=generator, dtype=torch.float64).exp()
    if ties:
        scores = scores.mul(4).round()
    p = torch.stack([p_value(row[examples:], row[:examples]) for row in scores])
    for alpha in (0.01, 0.05, 0.1):
        # The fresh scores of one calibration share it; calibrations are independent.
        rates = (p <= alpha + 1e-12).double().mean(1)
        error = float(rates.std()) / math.sqrt(calibrations)
        rate = float(rates.mean())
        assert rate <= alpha + 4 * error, alpha
        if not ties:
            # And it is no more cautious than ranks allow: the largest multiple of 1 / (n + 1) up to alpha.
            attained = math.floor(alpha * (examples + 1) + 1e-9) / (examples + 1)
            assert abs(rate - attained) <= 4 * error + 1e-12, alpha


@pytest.mark.parametrize("level", LEVELS)
def test_fresh_scores_exceed_the_threshold_at_most_at_the_stated_rate(level: str) -> None:
    examples, calibrations, fresh = 120, 2000, 50
    generator = torch.Generator().manual_seed(7)
    scores = torch.rand(calibrations, examples + fresh, generator=generator, dtype=torch.float64)
    flagged = torch.stack([row[examples:] > threshold(row[:examples], float(level)) for row in scores])
    rates = flagged.double().mean(1)
    error = float(rates.std()) / math.sqrt(calibrations)
    assert float(rates.mean()) <= 1 - float(level) + 4 * error
    assert float(rates.mean()) >= 1 - float(level) - 1 / (examples + 1) - 4 * error


def test_p_of_a_fresh_score_is_uniform_over_its_possible_values() -> None:
    examples, repetitions = 9, 20_000
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(repetitions, examples + 1, generator=generator, dtype=torch.float64)
    p = torch.cat([p_value(row[:1], row[1:]) for row in scores])
    counts = (p * 10).round().long().bincount(minlength=11)[1:].double()
    assert counts.sum() == repetitions
    chi_square = float((counts - repetitions / 10).square().sum() / (repetitions / 10))
    assert chi_square < 33.7  # 9 degrees of freedom: exceeded once in 10,000 times


@pytest.mark.parametrize("groups", [[0, 0, 0, 0, 0], [0, 1, 2, 2, 2], [1, 0, 1, 2, 2]])
def test_ranks_are_those_of_counting(groups):
    generator = torch.Generator().manual_seed(0)
    # With ties, and a class without any example.
    scores = torch.randint(0, 40, (700, 3), generator=generator).double()
    predicted = torch.multinomial(torch.tensor([0.5, 0.3, 0.1, 0.1, 0.0]), 700, True, generator=generator)
    new = torch.randint(-2, 43, (200, 3), generator=generator).double()
    new[0] = torch.inf
    classes = torch.randint(0, 5, (200,), generator=generator)
    group_of = torch.tensor(groups)
    p, is_ood = Ranks.of(scores, 0.95, predicted, group_of).judged(new, classes)
    for i in range(200):
        among = group_of[predicted] == group_of[classes[i]]
        n = int(among.sum())
        for kind in range(3):
            higher = int((scores[among, kind] >= new[i, kind]).sum())
            assert p[i, kind].item() == pytest.approx((1 + higher) / (n + 1), abs=1e-15)
        lower = n - int((scores[among, 0] >= new[i, 0]).sum())
        assert bool(is_ood[i]) == (lower >= rank_of_threshold(n, 0.95))
    if max(groups) == 0:
        assert torch.equal(p[:, 1], p_value(new[:, 1].contiguous(), scores[:, 1]))


@pytest.mark.parametrize(
    ("counts", "level", "groups"),
    [
        ([250, 130, 60, 50, 0], 0.95, [[0], [1], [2, 3, 4]]),  # the rare ones are enough together
        ([250, 130, 60, 30, 0], 0.95, [[0], [1, 2, 3, 4]]),  # they are not: the smallest large class joins
        ([130, 250, 99], 0.95, [[0, 2], [1]]),
        ([100, 100], 0.95, [[0], [1]]),
        ([99, 99], 0.95, [[0, 1]]),  # no class is large
        ([30, 30], 0.95, [[0, 1]]),  # nor are all together
        ([300, 150, 150], 0.99, [[0], [1, 2]]),  # the level needs 99, twice that is 198
        ([500, 0], 0.95, [[0, 1]]),
    ],
)
def test_which_classes_are_ranked_together(counts, level, groups):
    predicted = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    group_of = class_groups(predicted, len(counts), level)
    found = [(group_of == g).nonzero().flatten().tolist() for g in range(int(group_of.max()) + 1)]
    assert sorted(found) == groups


def test_a_group_without_ranking_examples_flags_nothing():
    scores, predicted = torch.arange(100).double().unsqueeze(1), torch.zeros(100).long()
    ranks = Ranks.of(scores, 0.95, predicted, torch.tensor([0, 1]))
    p, is_ood = ranks.judged(torch.tensor([[1e9], [1e9]]).double(), torch.tensor([0, 1]))
    assert p.flatten().tolist() == pytest.approx([1 / 101, 1.0])
    assert is_ood.tolist() == [True, False]
