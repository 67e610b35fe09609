"""The five figures, against definitions written out as loops, scikit-learn and closed forms."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from gramwatch.numerics.metrics import (
    METRICS,
    all_metrics,
    aupr_in,
    aupr_out,
    auroc,
    auroc_difference,
    detection_accuracy,
    tnr_at_tpr,
)

FUNCTIONS = {
    "tnr": tnr_at_tpr,
    "auroc": auroc,
    "dtacc": detection_accuracy,
    "auin": aupr_in,
    "auout": aupr_out,
}

# Few distinct values, so that ties are common; infinities among them.
TIED = st.lists(
    st.sampled_from([-math.inf, -2.0, -1.0, 0.0, 0.5, 1.0, 3.0, math.inf]), min_size=1, max_size=25
)
SPREAD = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=25)
SCORES = st.one_of(TIED, SPREAD)


# --- the definitions, as loops over all thresholds ---------------------------------------------------


def points(inside: list[float], outside: list[float]) -> list[tuple[Fraction, Fraction]]:
    """TPR and TNR of every threshold that keeps scores up to it, exactly.

    A threshold above all in-distribution scores keeps no more than the highest of them, and is none.
    """
    return [
        (
            Fraction(sum(s <= t for s in inside), len(inside)),
            Fraction(sum(s > t for s in outside), len(outside)),
        )
        for t in sorted({*inside, *outside})
        if t <= max(inside)
    ]


def tnr_by_definition(
    inside: list[float], outside: list[float], tpr: Fraction = Fraction(95, 100)
) -> Fraction:
    """The paper's rule: at the point whose TPR is nearest; of several, the one that catches least."""
    nearest = min(abs(kept - tpr) for kept, _ in points(inside, outside))
    return min(caught for kept, caught in points(inside, outside) if abs(kept - tpr) == nearest)


def tnr_by_sweep(inside: list[int], outside: list[int]) -> Fraction:
    """The published evaluation: raise a threshold on the confidence, here minus the score, step by step.

    The first of the steps whose TPR is nearest to 95 % counts. For scores without ties.
    """
    kept, let_through = len(inside), len(outside)
    steps = [(kept, let_through)]
    for _, is_out in sorted([(-s, False) for s in inside] + [(-s, True) for s in outside]):
        kept, let_through = kept - (not is_out), let_through - is_out
        steps.append((kept, let_through))
    best = min(steps, key=lambda step: abs(Fraction(step[0], len(inside)) - Fraction(95, 100)))
    return 1 - Fraction(best[1], len(outside))


def auroc_by_definition(inside: list[float], outside: list[float]) -> Fraction:
    """The share of pairs in the right order; a tie is half right."""
    pairs = list(itertools.product(inside, outside))
    return sum((Fraction(2 * (o > i) + (o == i), 2) for i, o in pairs), Fraction(0)) / len(pairs)


def accuracy_by_definition(inside: list[float], outside: list[float]) -> Fraction:
    """The best mean of TPR and TNR, over the thresholds and the one below all scores."""
    return max([Fraction(1, 2), *((kept + caught) / 2 for kept, caught in points(inside, outside))])


def precision_by_definition(positive: list[float], negative: list[float]) -> Fraction:
    """Average precision where high scores are positive: steps of recall times the precision there."""
    total, before = Fraction(0), Fraction(0)
    for t in sorted({*positive, *negative}, reverse=True):
        hits, misses = sum(s >= t for s in positive), sum(s >= t for s in negative)
        recall = Fraction(hits, len(positive))
        total += (recall - before) * Fraction(hits, hits + misses)
        before = recall
    return total


@given(SCORES, SCORES)
def test_tnr_is_that_of_the_point_nearest_to_95_percent(inside: list[float], outside: list[float]) -> None:
    assert tnr_at_tpr(inside, outside) == pytest.approx(float(tnr_by_definition(inside, outside)), abs=1e-12)


@given(st.permutations(range(60)), st.integers(11, 59))
def test_tnr_equals_the_published_sweep_over_confidences(scores: list[int], size: int) -> None:
    inside, outside = scores[:size], scores[size:]
    expected = float(tnr_by_sweep(inside, outside))
    assert tnr_at_tpr(inside, outside) == pytest.approx(expected, abs=1e-12)


@given(SCORES, SCORES, st.integers(1, 20))
def test_tnr_at_any_other_rate_follows_the_same_rule(
    inside: list[float], outside: list[float], twentieths: int
) -> None:
    expected = tnr_by_definition(inside, outside, Fraction(twentieths, 20))
    assert tnr_at_tpr(inside, outside, tpr=twentieths / 20) == pytest.approx(float(expected), abs=1e-12)


@given(SCORES, SCORES)
def test_auroc_is_the_share_of_pairs_in_the_right_order(inside: list[float], outside: list[float]) -> None:
    assert auroc(inside, outside) == pytest.approx(float(auroc_by_definition(inside, outside)), abs=1e-12)


@given(SCORES, SCORES)
def test_detection_accuracy_is_the_best_over_all_thresholds(
    inside: list[float], outside: list[float]
) -> None:
    expected = accuracy_by_definition(inside, outside)
    assert detection_accuracy(inside, outside) == pytest.approx(float(expected), abs=1e-12)


@given(SCORES, SCORES)
def test_both_areas_under_precision_and_recall_follow_their_definition(
    inside: list[float], outside: list[float]
) -> None:
    expected_out = precision_by_definition(outside, inside)
    expected_in = precision_by_definition([-s for s in inside], [-s for s in outside])
    assert aupr_out(inside, outside) == pytest.approx(float(expected_out), abs=1e-12)
    assert aupr_in(inside, outside) == pytest.approx(float(expected_in), abs=1e-12)


# --- scikit-learn ------------------------------------------------------------------------------------


@given(SPREAD, SPREAD)
def test_areas_equal_those_of_scikit_learn(inside: list[float], outside: list[float]) -> None:
    is_out = np.repeat([0, 1], [len(inside), len(outside)])
    scores = np.array(inside + outside)
    assert auroc(inside, outside) == pytest.approx(roc_auc_score(is_out, scores))
    assert aupr_out(inside, outside) == pytest.approx(average_precision_score(is_out, scores))
    assert aupr_in(inside, outside) == pytest.approx(average_precision_score(1 - is_out, -scores))


def test_large_samples_equal_the_definitions_too() -> None:
    generator = np.random.default_rng(0)
    inside = np.round(generator.normal(0, 1, 400), 2).tolist()
    outside = np.round(generator.normal(1, 2, 300), 2).tolist()
    figures = all_metrics(inside, outside)
    assert figures["tnr"] == pytest.approx(float(tnr_by_definition(inside, outside)))
    assert figures["auroc"] == pytest.approx(float(auroc_by_definition(inside, outside)))
    assert figures["dtacc"] == pytest.approx(float(accuracy_by_definition(inside, outside)))
    assert figures["auout"] == pytest.approx(float(precision_by_definition(outside, inside)))


# --- closed forms ------------------------------------------------------------------------------------


@pytest.mark.parametrize("highest", [2.0, math.inf])
def test_perfect_separation_gives_one_everywhere(highest: float) -> None:
    for count in (*range(1, 22), 1000):
        figures = all_metrics(np.linspace(0, 1, count), [*np.linspace(1.5, 2, 30), highest])
        assert figures == pytest.approx(dict.fromkeys(METRICS, 1.0), abs=1e-12)
        assert max(figures.values()) == 1


def test_reversed_scores_give_the_worst_everywhere() -> None:
    figures = all_metrics(np.linspace(1.5, 2, 30), np.linspace(0, 1, 30))
    assert figures["tnr"] == 0
    assert figures["auroc"] == 0
    assert figures["dtacc"] == 0.5
    # All negatives come first: the k-th of n positives has precision k / (n + k).
    worst = sum(k / (30 + k) for k in range(1, 31)) / 30
    assert figures["auin"] == pytest.approx(worst)
    assert figures["auout"] == pytest.approx(worst)


@pytest.mark.parametrize("value", [0.0, -3.5, math.inf, -math.inf])
def test_identical_scores_tell_nothing(value: float) -> None:
    figures = all_metrics([value] * 30, [value] * 10)
    assert figures["tnr"] == 0  # nothing scores above the only threshold
    assert figures["auroc"] == 0.5
    assert figures["dtacc"] == 0.5
    assert figures["auin"] == pytest.approx(30 / 40)
    assert figures["auout"] == pytest.approx(10 / 40)


def test_one_score_on_each_side_is_enough() -> None:
    assert all_metrics([0.0], [1.0]) == dict.fromkeys(METRICS, 1.0)
    assert all_metrics([1.0], [0.0])["auroc"] == 0


def test_uniform_scores_shifted_by_a_quarter_have_the_known_figures() -> None:
    n = 1000
    inside = np.arange(n) / n
    outside = inside + 0.25 + 0.5 / n
    figures = all_metrics(inside, outside)
    assert figures["tnr"] == pytest.approx(0.30, abs=1e-9)  # above 0.949: 250 above 1, and 50 between
    assert figures["auroc"] == pytest.approx(1 - 0.75**2 / 2, abs=1e-3)
    assert figures["dtacc"] == pytest.approx(0.5 + 0.25 / 2, abs=1e-3)


# --- the paper's rule and ties -----------------------------------------------------------------------


def test_with_20_examples_exactly_19_are_kept() -> None:
    assert tnr_at_tpr(list(range(20)), [17.5, 19.0, 19.5]) == pytest.approx(2 / 3)


def test_with_12_examples_11_are_kept_since_11_of_12_is_nearer_than_1() -> None:
    assert tnr_at_tpr(list(range(12)), [9.5, 11.0, 11.5]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("count", range(1, 10))
def test_with_fewer_than_10_examples_all_are_kept_and_what_lies_above_is_caught(count: int) -> None:
    inside = list(range(count))
    assert tnr_at_tpr(inside, [count - 1.5, count - 1, count - 0.5, count]) == pytest.approx(1 / 2)
    assert tnr_at_tpr(inside, [count]) == 1


def test_of_two_equally_near_rates_the_one_that_catches_less_is_taken() -> None:
    # Nine and ten of ten are equally far from 95 %.
    assert tnr_at_tpr(list(range(10)), [9.0, 9.5]) == pytest.approx(1 / 2)
    assert tnr_at_tpr(list(range(30)), [28.0, 28.5, 29.5]) == pytest.approx(1 / 3)


def test_an_outlier_that_scores_exactly_the_threshold_is_missed() -> None:
    inside = list(range(20))
    assert tnr_at_tpr(inside, [18.0, 18.0, 18.0, 19.0]) == pytest.approx(1 / 4)
    assert tnr_at_tpr(inside, [18.0]) == 0
    assert tnr_at_tpr(inside, [np.nextafter(18.0, 19.0), 30.0]) == pytest.approx(1 / 2)


def test_of_thresholds_that_keep_the_same_share_the_one_that_catches_least_counts() -> None:
    # Between the 19th and the 20th score anything may be the threshold; one at 18.7 misses both.
    assert tnr_at_tpr(list(range(20)), [18.3, 18.7]) == 0


def test_ties_among_inside_scores_move_the_nearest_rate() -> None:
    inside = [0.0] * 89 + [1.0] * 11  # 0.89 or 1.00 can be kept, nothing between
    assert tnr_at_tpr(inside, [0.5, 1.0, 1.5, 2.0]) == pytest.approx(1 / 2)


# --- infinite scores ---------------------------------------------------------------------------------


def test_an_infinite_score_is_one_above_all_others() -> None:
    inside, outside = [0.0, 1.0, 2.0, 5.0], [1.0, 3.0, math.inf, math.inf]
    finite = [1.0, 3.0, 1e9, 1e9]
    assert all_metrics(inside, outside) == all_metrics(inside, finite)
    inside_too = [0.0, 1.0, 2.0, math.inf]
    assert all_metrics(inside_too, outside) == all_metrics([0.0, 1.0, 2.0, 1e9], finite)


def test_infinite_outliers_are_always_caught_by_a_finite_threshold() -> None:
    figures = all_metrics(np.arange(20.0), [math.inf] * 5)
    assert figures == pytest.approx(dict.fromkeys(METRICS, 1.0), abs=1e-12)


# --- what is accepted --------------------------------------------------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_nan_is_an_error_that_says_on_which_side(function: object) -> None:
    assert callable(function)
    with pytest.raises(ValueError, match="2 in-distribution scores are NaN"):
        function([0.0, math.nan, math.nan], [1.0])
    with pytest.raises(ValueError, match="1 out-of-distribution scores are NaN"):
        function([0.0], [1.0, math.nan])


@pytest.mark.parametrize("function", [*FUNCTIONS.values(), all_metrics], ids=[*FUNCTIONS, "all"])
def test_no_scores_are_an_error_that_says_on_which_side(function: object) -> None:
    assert callable(function)
    with pytest.raises(ValueError, match="no in-distribution scores"):
        function([], [1.0])
    with pytest.raises(ValueError, match="no out-of-distribution scores"):
        function([0.0], torch.empty(0))


def test_all_metrics_holds_each_figure_under_its_name() -> None:
    inside, outside = [0.0, 1.0, 2.0, 2.5], [1.5, 2.0, 3.0]
    figures = all_metrics(inside, outside)
    assert list(figures) == list(METRICS) == list(FUNCTIONS)
    apart = {name: function(inside, outside) for name, function in FUNCTIONS.items()}
    assert figures == pytest.approx(apart, rel=1e-15, abs=1e-15)
    assert len(set(figures.values())) == 5  # no two are the same figure by mistake
    assert all(type(value) is float for value in figures.values())


@settings(max_examples=200, deadline=None)
@given(SCORES, SCORES)
def test_all_metrics_from_one_sort_equal_each_by_itself(inside: list[float], outside: list[float]) -> None:
    apart = {name: function(inside, outside) for name, function in FUNCTIONS.items()}
    assert all_metrics(inside, outside) == pytest.approx(apart, rel=1e-13, abs=1e-13)


def test_lists_arrays_and_tensors_of_any_type_and_shape_give_the_same() -> None:
    inside, outside = [0, 1, 2, 2], [1, 2, 3, 4]
    expected = all_metrics(inside, outside)
    assert all_metrics(np.array(inside, dtype=np.int16), np.array(outside, dtype=np.float32)) == expected
    assert all_metrics(torch.tensor(inside), torch.tensor(outside, dtype=torch.float64)) == expected
    assert all_metrics(np.array(inside).reshape(2, 2), np.array(outside).reshape(4, 1)) == expected


def test_the_scores_given_are_not_changed() -> None:
    inside, outside = np.array([3.0, 1.0, 2.0]), np.array([5.0, 0.0])
    all_metrics(inside, outside)
    assert inside.tolist() == [3.0, 1.0, 2.0]
    assert outside.tolist() == [5.0, 0.0]


# --- properties --------------------------------------------------------------------------------------


@given(SCORES, SCORES)
def test_every_figure_lies_between_zero_and_one(inside: list[float], outside: list[float]) -> None:
    for value in all_metrics(inside, outside).values():
        assert 0 <= value <= 1


@settings(max_examples=40)
@given(SCORES, SCORES, st.randoms())
def test_the_order_of_the_examples_does_not_matter(
    inside: list[float], outside: list[float], random: object
) -> None:
    expected = all_metrics(inside, outside)
    assert all_metrics(inside[::-1], outside[::-1]) == pytest.approx(expected)
    shuffled = inside.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert all_metrics(shuffled, outside) == pytest.approx(expected)


INTEGERS = st.lists(st.integers(-1000, 1000), min_size=1, max_size=25)


@settings(max_examples=40)
@given(INTEGERS, INTEGERS)
def test_monotone_transformations_change_nothing(inside: list[int], outside: list[int]) -> None:
    expected = all_metrics(inside, outside)
    for transformation in (
        lambda s: 2.0 * s - 7,
        lambda s: float(s) ** 3,
        lambda s: math.atan(s / 100),
        lambda s: math.exp(s / 2),  # over 200 orders of magnitude
        lambda s: math.inf if s == 1000 else s,
    ):
        assert all_metrics(list(map(transformation, inside)), list(map(transformation, outside))) == expected


@given(SCORES, SCORES)
def test_swapping_the_sides_mirrors_auroc(inside: list[float], outside: list[float]) -> None:
    assert auroc(inside, outside) + auroc(outside, inside) == pytest.approx(1)


@given(SCORES, SCORES)
def test_swapping_the_sides_and_the_sign_swaps_the_two_precision_areas(
    inside: list[float], outside: list[float]
) -> None:
    negated_in, negated_out = [-s for s in inside], [-s for s in outside]
    assert aupr_in(inside, outside) == pytest.approx(aupr_out(negated_out, negated_in))
    assert auroc(inside, outside) == pytest.approx(auroc(negated_out, negated_in))


@settings(max_examples=40)
@given(SCORES, SCORES, st.integers(2, 4))
def test_repeating_every_example_changes_nothing(
    inside: list[float], outside: list[float], times: int
) -> None:
    assert all_metrics(inside * times, outside * times) == pytest.approx(all_metrics(inside, outside))


@settings(max_examples=40)
@given(SPREAD, SPREAD, st.floats(0, 1e6))
def test_raising_an_outlier_never_makes_rates_worse(
    inside: list[float], outside: list[float], raised: float
) -> None:
    # Not so for average precision, in which a tie can count for more than the order it replaces.
    higher = [outside[0] + raised, *outside[1:]]
    for function in (tnr_at_tpr, auroc, detection_accuracy):
        assert function(inside, higher) >= function(inside, outside) - 1e-12


# --- the difference of two AUROCs --------------------------------------------------------------------


def two_detectors(
    inside: int, outside: int, random: np.random.Generator, ours: float = 1.2, theirs: float = 1.0
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Scores of two detectors that share half of their noise; outliers score so much higher."""

    def scored(count: int, *shifts: float) -> list[np.ndarray]:
        common = random.normal(size=count)
        return [shift + common + random.normal(size=count) for shift in shifts]

    (in_ours, in_theirs), (out_ours, out_theirs) = scored(inside, 0, 0), scored(outside, ours, theirs)
    return (in_ours, out_ours), (in_theirs, out_theirs)


def test_the_difference_is_that_of_the_two_areas_with_ties_and_infinities() -> None:
    random = np.random.default_rng(0)
    ours, theirs = ([random.integers(0, 6, n).astype(float) for n in (40, 30)] for _ in range(2))
    ours[1][:3] = math.inf
    difference = auroc_difference((ours[0], ours[1]), (theirs[0], theirs[1]), resamples=50)
    assert difference.value == pytest.approx(auroc(*ours) - auroc(*theirs))
    assert difference.low < difference.value < difference.high


def test_a_detector_is_not_ahead_of_itself() -> None:
    ours, _ = two_detectors(200, 100, np.random.default_rng(1))
    difference = auroc_difference(ours, (2 * ours[0] + 1, 2 * ours[1] + 1))
    assert (difference.value, difference.low, difference.high) == (0, 0, 0)


def test_the_bootstrap_is_that_of_scipy() -> None:
    from scipy.stats import bootstrap

    ours, theirs = two_detectors(80, 60, np.random.default_rng(2))
    # AUROC is the share of pairs of which the outlier scores higher.
    higher = [(out[None, :] > inside[:, None]).astype(float) for inside, out in (ours, theirs)]
    assert higher[0].mean() == pytest.approx(auroc(*ours))

    def difference(i: np.ndarray, j: np.ndarray) -> float:
        return float((higher[0] - higher[1])[np.ix_(i, j)].mean())

    expected = bootstrap(
        (np.arange(80), np.arange(60)), difference, n_resamples=1500, vectorized=False, method="percentile"
    ).confidence_interval
    difference = auroc_difference(ours, theirs)
    width = expected.high - expected.low
    assert difference.low == pytest.approx(expected.low, abs=0.12 * width)
    assert difference.high == pytest.approx(expected.high, abs=0.12 * width)


def test_the_interval_is_as_wide_as_delong_has_it() -> None:
    ours, theirs = two_detectors(900, 700, np.random.default_rng(3))
    # By how much each input adds to the difference of the two areas; their variance is DeLong's.
    wins = [(out[None, :] > inside[:, None]).mean(axis) for axis in (0, 1) for inside, out in (ours, theirs)]
    of_out, of_in = wins[0] - wins[1], wins[2] - wins[3]
    deviation = math.sqrt(of_in.var(ddof=1) / 900 + of_out.var(ddof=1) / 700)
    difference = auroc_difference(ours, theirs)
    assert difference.high - difference.low == pytest.approx(2 * 1.96 * deviation, rel=0.08)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(4)
    normal = torch.special.ndtr(torch.tensor([1.2, 1.0], dtype=torch.float64) / 2)
    truth = float(normal[0] - normal[1])
    intervals = [auroc_difference(*two_detectors(150, 100, random), resamples=300) for _ in range(300)]
    held = sum(interval.low <= truth <= interval.high for interval in intervals) / 300
    assert 0.90 <= held <= 0.985  # 95 %, and three standard deviations


def test_detectors_of_different_inputs_have_no_difference() -> None:
    ours, theirs = two_detectors(20, 10, np.random.default_rng(5))
    with pytest.raises(ValueError, match="different inputs: 20 and 10, 20 and 9"):
        auroc_difference(ours, (theirs[0], theirs[1][:9]))
