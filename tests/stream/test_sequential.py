"""Ranks among a stream, bets and Shiryaev-Roberts, against their definitions."""

import numpy as np
import pytest
from scipy.stats import binom, kstest

from gramwatch.stream.sequential import (
    BINS,
    MOST,
    POWERS,
    SHARES,
    TAILS,
    Evidence,
    FixedReference,
    OnlineRanks,
    PowerBets,
    grid_of,
)


def counts_of(bins: np.ndarray, groups: np.ndarray, count: int) -> np.ndarray:
    counts = np.zeros((count, BINS), np.int64)
    np.add.at(counts, (groups, bins), 1)
    return counts


@pytest.mark.parametrize("highest", [5, BINS])
def test_ranks_are_those_counted_one_by_one(highest):
    rng = np.random.default_rng(0)
    reference, groups = rng.integers(0, highest, (3, 40)), rng.integers(0, 2, (3, 40))
    pairs = zip(reference, groups, strict=True)
    ranks = OnlineRanks(np.stack([counts_of(row, group, 2) for row, group in pairs]))
    before = [list(zip(*row, strict=True)) for row in zip(reference, groups, strict=True)]
    for _ in range(60):
        bins, group, lots = rng.integers(0, highest, 3), rng.integers(0, 2, 3), 1 - rng.random(3)
        rank = ranks.rank(bins, group, lots)
        for stream in range(3):
            mine = [b for b, g in before[stream] if g == group[stream]]
            higher, equal = (sum(b > bins[stream] for b in mine), sum(b == bins[stream] for b in mine))
            assert rank[stream] == (higher + lots[stream] * (1 + equal)) / (1 + len(mine))
            before[stream].append((bins[stream], group[stream]))
    assert ranks.counts.sum() == 3 * 100


def test_p_values_of_a_stream_are_uniform_and_independent_however_coarse_the_grid():
    """Not so against a fixed set: there, neighbours are correlated by the set that they share."""
    rng = np.random.default_rng(1)
    streams, images = 4_000, 12
    grid = np.array([-0.5, 0.0, 1.0])
    bins = np.searchsorted(grid, rng.standard_normal((streams, 6 + images)))
    zero = np.zeros(streams, np.int64)
    ranks = OnlineRanks(np.stack([counts_of(row[:6], zero[:6], 1) for row in bins]))
    p = np.stack([ranks.rank(bins[:, 6 + i], zero, 1 - rng.random(streams)) for i in range(images)])
    assert kstest(p.ravel(), "uniform").pvalue > 0.01
    correlations = np.corrcoef(p)[np.triu_indices(images, 1)]
    assert np.abs(correlations).max() < 4.5 / streams**0.5

    scores = rng.standard_normal((streams, 6 + 2))
    fixed = (scores[:, :6, None] >= scores[:, None, 6:]).mean(1)
    assert np.corrcoef(fixed.T)[0, 1] > 0.1


def test_power_bets_are_fair_and_grow_with_small_p():
    u = (np.arange(200_000) + 0.5) / 200_000
    bets = PowerBets()
    for number, (w, eps) in enumerate((w, eps) for w in SHARES for eps in POWERS):
        p = u ** (1 / eps)  # then the mean of eps p^(eps-1) is the mean of 1 over u, weighted by dp/du
        weights = p / (eps * u)
        e = bets(p)[:, number]
        assert (e * weights).mean() == pytest.approx(1, abs=2e-4)
        assert e[1_000] == pytest.approx(1 - w + w * eps * p[1_000] ** (eps - 1))
    assert bets(u).shape == (len(u), PowerBets.count)
    assert (np.diff(bets(u), axis=0) < 0).all()


def test_evidence_is_shiryaev_roberts_and_knows_when_a_gain_began():
    rng = np.random.default_rng(2)
    bets = rng.uniform(0.5, 1.6, (50, 2, 3))
    evidence = Evidence(2, 3)
    for gain in bets:
        evidence.add(gain)
    expected = sum(np.prod(bets[start:], 0) for start in range(50))  # one bet for every possible start
    np.testing.assert_allclose(evidence.sums, expected)
    np.testing.assert_allclose(evidence.strength, expected.mean(1))
    for stream in range(2):
        for bet in range(3):
            products = [np.prod(bets[start:, stream, bet]) for start in range(50)]
            assert evidence.starts[stream, bet] == int(np.argmax(products))
            assert evidence.gains[stream, bet] == pytest.approx(max(products))


def test_evidence_never_overflows():
    evidence = Evidence(1, 2)
    for _ in range(200):
        evidence.add(np.array([[1e17, 0.5]]))
    assert evidence.sums[0, 0] == MOST
    assert np.isfinite(evidence.strength).all()


def test_the_bound_is_clopper_and_pearsons_and_bets_are_fair_up_to_it():
    sizes = np.array([2_500, 60])
    fixed = FixedReference(sizes, 0.95)
    wrong = 0.05 / (2 * len(TAILS))
    for group, n in enumerate(sizes):
        for tail, first in zip(TAILS, range(0, FixedReference.count, len(SHARES)), strict=True):
            rank = max(1, int(tail * (n + 1)))
            u = fixed.bounds[group, first]
            assert binom.cdf(rank - 1, n, u) == pytest.approx(wrong)
            p = np.array([rank / (n + 1), (rank + 1) / (n + 1)])
            hit, miss = fixed(p, np.full(2, group))[:, first : first + len(SHARES)]
            np.testing.assert_allclose(u * hit + (1 - u) * miss, 1)
            assert (0.5 * u * hit + (1 - 0.5 * u) * miss < 1).all()
            q = u + np.array(SHARES) * (1 - u)
            np.testing.assert_allclose(hit, q / u)


def test_bounds_hold_for_as_many_reference_sets_as_promised():
    rng = np.random.default_rng(3)
    n, sets = 300, 2_000
    fixed = FixedReference(np.array([n]), 0.9)
    ascending = np.sort(rng.random((sets, n)), 1)
    hold = np.ones(sets, bool)
    for limit, u in set(zip(fixed.limits[0], fixed.bounds[0], strict=True)):
        rate = 1 - ascending[:, n - int(limit * (n + 1))]  # of scores above the m-th highest
        hold &= rate <= u
    assert 0.9 - 3 * (0.09 / sets) ** 0.5 < hold.mean() < 0.99


def test_a_group_without_reference_scores_says_nothing():
    fixed = FixedReference(np.array([0, 100]), 0.95)
    assert (fixed(np.array([1.0, 0.001]), np.array([0, 0])) == 1).all()


def test_the_grid_ascends_and_is_fine_where_outliers_lie():
    rng = np.random.default_rng(4)
    for scores in (rng.standard_normal(100), -1 + 1e-7 * rng.random(100), np.full(50, 3.0), np.arange(2.0)):
        grid = grid_of(scores)
        assert len(grid) == BINS - 1
        assert (np.diff(grid) > 0).all()
        assert np.searchsorted(grid, np.inf) == BINS - 1
    grid = grid_of(rng.standard_normal(100))
    assert len(set(np.searchsorted(grid, np.linspace(2, 4, 10)))) == 10


def test_streams_without_a_change_keep_the_promise():
    """A = 100: the mean time is at least 100, and at most half of the streams have an alarm by image 50."""
    rng = np.random.default_rng(5)
    streams, n, level = 1_000, 100, 100
    zero = np.zeros(streams, np.int64)
    grid = grid_of(rng.standard_normal(100))
    reference = np.searchsorted(grid, rng.standard_normal((streams, n)))
    ranks = OnlineRanks(np.stack([counts_of(row, zero[:n], 1) for row in reference]))
    evidence, bets, times = Evidence(streams, PowerBets.count), PowerBets(), np.full(streams, 2_000)
    for image in range(1, 2_001):
        bins = np.searchsorted(grid, rng.standard_normal(streams))
        evidence.add(bets(ranks.rank(bins, zero, 1 - rng.random(streams))))
        times[evidence.strength >= level] = np.minimum(times[evidence.strength >= level], image)
    assert times.mean() >= level
    assert (times <= 50).mean() <= 0.5


def test_no_edge_of_a_grid_separates_scores_that_differ_by_rounding():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=100)
    scores[:30] = rng.choice(scores[30:40], 30)  # repeated inputs
    plain = grid_of(scores)
    assert (grid_of(scores, 0.0) == plain).all()
    for tolerance in (1e-7, 1e-4, 0.01, 0.1):
        edges = grid_of(scores, tolerance)
        assert len(edges) == BINS - 1
        assert (np.diff(edges) >= 0).all()
        assert np.abs(edges[:, None] - scores).min() > tolerance
        moved = edges != plain
        assert (np.abs(plain[moved, None] - scores).min(1) <= tolerance * (1 + 1e-9)).all()
        for shift in (-tolerance, tolerance):
            assert (np.searchsorted(edges, scores + shift) == np.searchsorted(edges, scores)).all()
    assert (np.diff(grid_of(np.zeros(100), 1.0)) >= 0).all()
