"""A stream of scores watched over time: p-values among the stream itself, bets, Shiryaev-Roberts.

Every class here handles `S` independent streams at once, one image of each per step. A `Monitor` is one
stream; `lab.benchmarks.monitor` simulates a thousand with the same code.

A bet is a number `e_t >= 0` with a mean of at most one, given the past, while nothing has changed. From it

    R_t = (1 + R_(t-1)) e_t,    R_0 = 0                    (Shiryaev-Roberts)

Then `R_t - t` is a supermartingale, and so is it for the mean of R over several bets. Let T be the first time
that the mean reaches A. By optional stopping at the smaller of T and t, `A P(T <= t) <= E[min(T, t)] <= t`.
So a false alarm comes within t images with a probability of at most `t / A`, and the mean time to it is at
least A. Nothing is assumed about the scores, only about the bets: `OnlineRanks` and `FixedReference` say when
theirs are fair.
"""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SHARES = (0.02, 0.1, 0.5)
"""Shares of outliers that are bet on, w."""
POWERS = (0.1, 0.2, 0.4)
"""How small their p-values are: `eps p^(eps-1)`, the smaller eps, the smaller p."""
TAILS = (0.05, 0.01, 0.002)
"""Tail rates that a fixed reference watches."""
BINS = 1024
"""Bins of the grid, a power of two."""
MOST = 1e250
"""Evidence beyond this is cut off: a float could not hold it. A smaller bet is still fair."""
_LEVELS = np.arange(BINS.bit_length())


# --- from evidence to an alarm -----------------------------------------------------------------------


class Evidence:
    """Shiryaev-Roberts for `S` streams and `J` bets, and since when each bet gains."""

    def __init__(self, streams: int, bets: int, time: int = 0) -> None:
        self.sums: Floats = np.zeros((streams, bets))
        """R, `(S, J)`."""
        self.gains: Floats = np.zeros((streams, bets))
        """CUSUM: `max(1, gain) e`. At one or below, the bet starts anew."""
        self.starts: Ints = np.full((streams, bets), time)
        """The number of images before the present gain began."""
        self.time = time
        """The number of images so far."""

    def add(self, bets: Floats) -> NDArray[np.bool_]:
        """Take in the bets of one image, `(S, J)`. Return which of them start anew with this image."""
        fresh = self.gains <= 1
        self.starts[fresh] = self.time
        self.gains = np.minimum(np.where(fresh, 1.0, self.gains) * bets, MOST)
        self.sums = np.minimum((1 + self.sums) * bets, MOST)
        self.time += 1
        return fresh

    @property
    def strength(self) -> Floats:
        """The mean of R over the bets, `(S,)`."""
        mean: Floats = self.sums.mean(1)
        return mean


# --- online ranks ------------------------------------------------------------------------------------


def grid_of(scores: Floats, tolerance: float = 0.0) -> Floats:
    """The edges of a grid for scores like these: `BINS - 1` of them, ascending.

    Bins are even around the median and geometric above it, so that scores far beyond all of these still fall
    into bins of their own. Scores below the usual ones need no detail.

    The grid must not depend on the scores that are ranked. A grid costs power if it is coarse, never
    validity: equal bins are ranked by lot.

    No edge lies within `tolerance` of one of these scores. So copies of an input, whose scores differ by the
    rounding of the network, fall into one bin if one of them is among these.
    """
    middle = float(np.median(scores))
    spread = float(np.quantile(scores, 0.9)) - middle
    smallest = 1e-9 * max(1.0, abs(middle))
    steps = np.sinh(np.linspace(-2, 25, BINS - 1))
    edges: Floats = middle + max(spread, smallest) * steps
    return _apart(edges, np.sort(scores), tolerance) if tolerance else edges


def _apart(edges: Floats, scores: Floats, tolerance: float) -> Floats:
    """The edges, ascending. An edge within a tolerance of a score is moved above it and its neighbours."""
    last = np.append(np.diff(scores) > 2 * tolerance, True)  # the end of a run of neighbours
    highest = scores[last] + tolerance
    lowest = scores[np.insert(last[:-1], 0, True)] - tolerance
    run = np.searchsorted(highest, edges)  # the first run that ends at or above the edge
    inside = run < len(highest)
    inside[inside] = edges[inside] >= lowest[run[inside]]
    moved: Floats = edges.copy()
    moved[inside] = np.nextafter(highest[run[inside]], np.inf)
    return moved


class OnlineRanks:
    """The rank of each score among the reference and the stream so far, with ties broken by lot.

        p_t = (#{higher} + U_t (1 + #{equal})) / (1 + #{all before})

    If the reference and the stream are exchangeable, the p-values are independent and uniform, for every grid
    that does not depend on them. This is exact; p-values against a fixed set are not independent.
    With groups, a score is ranked in its group. Then only the scores within each group must be exchangeable:
    the mix of groups may change.

    Counts are kept as a binary tree over the bins: memory is constant, a step takes `log2(BINS)` additions.

    Args:
        counts: how often the reference falls into each bin, `(S, groups, BINS)`.

    """

    def __init__(self, counts: Ints) -> None:
        self._groups = counts.shape[1]
        levels = [counts]
        while levels[-1].shape[2] > 1:
            levels.append(levels[-1][:, :, 0::2] + levels[-1][:, :, 1::2])
        root = np.zeros_like(levels[-1])  # node 1 is the root, node 0 is not used
        self._tree: Ints = np.concatenate([root, *reversed(levels)], 2).astype(np.int64)
        self._flat = self._tree.reshape(-1)
        self._first = np.arange(len(counts)) * self._groups

    @property
    def counts(self) -> Ints:
        """How often reference and stream fell into each bin, `(S, groups, BINS)`."""
        return self._tree[:, :, BINS:]

    def rank(self, bins: Ints, groups: Ints, random: Floats) -> Floats:
        """The p-values of one score of each stream, `(S,)`; then the scores belong to the reference.

        `random` are the lots U, above zero and at most one.
        """
        tree, start = self._flat, ((self._first + groups) * (2 * BINS))[:, None]
        nodes = (bins[:, None] + BINS) >> _LEVELS  # from the leaf to the root
        places = start + nodes
        higher = (tree[start + (nodes | 1)] * (1 - (nodes & 1))).sum(1)
        equal, before = tree[places[:, 0]], tree[places[:, -1]]
        tree[places] += 1
        rank: Floats = (higher + random * (1 + equal)) / (1 + before)
        return rank


class PowerBets:
    """Bets on small p-values: `e = 1 - w + w eps p^(eps-1)`, one for each w and eps.

    The mean of `eps p^(eps-1)` over a uniform p is one, so these bets are fair if p-values are uniform given
    the past.
    """

    count = len(SHARES) * len(POWERS)
    """J, the number of bets."""

    def __init__(self) -> None:
        self._shares = np.array(SHARES)[:, None]
        self._powers = np.array(POWERS)

    def __call__(self, p_values: Floats) -> Floats:
        """The bets of p-values `(S,)`, `(S, J)`."""
        powers = self._powers * np.exp((self._powers - 1) * np.log(p_values)[:, None])
        bets: Floats = 1 + self._shares * (powers[:, None, :] - 1)
        return bets.reshape(len(p_values), -1)


# --- a fixed reference -------------------------------------------------------------------------------


class FixedReference:
    """Bets on a tail that has grown: `e = (q/u)^x ((1-q)/(1-u))^(1-x)` with `q > u`.

    x says whether a score is above the m-th highest of n reference scores, that is `p <= m / (n + 1)`. The
    rate r of x is unknown. Over all reference sets it has a beta distribution with parameters m and
    `n - m + 1` (smaller with ties). So u, the Clopper-Pearson upper bound for `m - 1` of n, is at least r
    with the stated confidence. Then the mean of e is at most one, for all images alike: independent images
    make these bets fair given the past, whatever their number.

    q is what the rate would be if a share w of outliers all lay in the tail: `u + w (1 - u)`. Groups have
    bounds of their own. All bounds hold together with the stated confidence.

    Args:
        sizes: the number of reference scores in each group, `(groups,)`.
        confidence: the probability that all bounds hold.

    """

    count = len(TAILS) * len(SHARES)
    """J, the number of bets."""

    def __init__(self, sizes: Ints, confidence: float) -> None:
        wrong = (1 - confidence) / (len(TAILS) * len(sizes))
        rows = [[self._bound(int(n), tail, wrong) for tail in TAILS] for n in sizes]
        table = np.repeat(np.array(rows), len(SHARES), 1)  # (groups, J, 2)
        self.limits: Floats = table[..., 0]
        """The p-values at which the tails begin, `(groups, J)`."""
        self.bounds: Floats = table[..., 1]
        """u, `(groups, J)`."""
        with np.errstate(divide="ignore", invalid="ignore"):
            u = self.bounds
            q = u + np.tile(SHARES, len(TAILS)) * (1 - u)
            known = u < 1
            self._inside: Floats = np.where(known, (1 - q) / (1 - u), 1.0)
            self._tail: Floats = np.where(known, q / u, 1.0)

    @staticmethod
    def _bound(size: int, tail: float, wrong: float) -> tuple[float, float]:
        """The p-value at which a tail begins, and the upper bound for its rate."""
        from scipy.stats import beta

        rank = max(1, math.floor(tail * (size + 1)))
        bound = float(beta.ppf(1 - wrong, rank, size - rank + 1)) if size >= rank else 1.0
        return (rank + 0.5) / (size + 1), bound  # half a rank more: p-values are rounded

    def __call__(self, p_values: Floats, groups: Ints) -> Floats:
        """The bets of p-values against the reference, `(S,)` each, `(S, J)`."""
        hit = p_values[:, None] <= self.limits[groups]
        bets: Floats = np.where(hit, self._tail[groups], self._inside[groups])
        return bets
