"""Guard against the best single method: set by set, and on the whole, in figures and in words."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from gramwatch.evaluation.evaluate import Row
from gramwatch.numerics.metrics import Difference
from gramwatch_lab.paper.beside import markdown

CLOSE = 0.1
"""Points of AUROC behind the best that do not count as behind."""
SATURATED = 99.95
"""AUROC in percent from which a set is saturated: nobody is ahead."""
LEGEND = (
    "AUROC in percent, mean over the draws. In brackets the 95 % interval of the difference, by a paired "
    "bootstrap (2,000 resamples of the images) in the first draw. One pass: methods that need no gradients. "
    f"Saturated: both have {SATURATED} or more."
)
VERDICTS = ("ahead", f"within {CLOSE}", "behind", "saturated")


@dataclass(frozen=True)
class Against:
    """Guard and the best single method on one set. AUROC in percent, mean over the draws."""

    ood: str
    ours: float
    best: str
    theirs: float
    difference: Difference
    """The difference in one draw, with its interval by paired bootstrap. Fractions of one."""

    @property
    def ahead(self) -> float:
        """Points of AUROC that Guard is ahead."""
        return self.ours - self.theirs

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        if min(self.ours, self.theirs) >= SATURATED:
            return "saturated"
        return VERDICTS[0 if self.ahead > 0 else 1 if self.ahead >= -CLOSE else 2]

    @property
    def interval(self) -> str:
        """The difference, in points, at least and at most."""
        return f"{100 * self.difference.low:+.2f} to {100 * self.difference.high:+.2f}"


def against_the_best(
    rows: Sequence[Row],
    guard: str,
    singles: Collection[str],
    difference: Callable[[str, str], Difference],
) -> list[Against]:
    """Guard against the best of some single methods on every set.

    Args:
        rows: what was measured.
        guard: the title of the rule that is compared.
        singles: the titles of the methods it is compared with.
        difference: how far Guard is ahead of a method on a set, both given by title.

    """
    comparisons = []
    for ood in dict.fromkeys(row.ood for row in rows):
        aurocs = {row.method: 100 * row.mean["auroc"] for row in rows if row.ood == ood}
        best = max(singles, key=lambda name: aurocs[name])
        comparisons.append(Against(ood, aurocs[guard], best, aurocs[best], difference(ood, best)))
    return comparisons


def table(every: Sequence[Against], one_pass: Sequence[Against]) -> str:
    """Set by set: against all single methods, and against those that need one forward pass and no more."""

    def cells(comparison: Against) -> list[str]:
        return [
            f"{comparison.best} {comparison.theirs:.2f}",
            f"{comparison.ahead:+.2f} ({comparison.interval}), {comparison.verdict}",
        ]

    versus = "Guard is ahead by"
    rows = [["set", "Guard", "best single method", versus, "best of one pass", versus]]
    for comparison, quick in zip(every, one_pass, strict=True):
        again = ["the same", ""] if quick == comparison else cells(quick)
        rows.append([comparison.ood, f"{comparison.ours:.2f}", *cells(comparison), *again])
    return markdown(rows, left=6)


def in_words(
    rows: Sequence[Row],
    guard: str,
    singles: Collection[str],
    comparisons: Sequence[Against],
    near: Iterable[str],
) -> str:
    """The number of sets where Guard is ahead, its mean gain, and its place on near sets, in words."""
    counts = {
        verdict: [comparison.ood for comparison in comparisons if comparison.verdict == verdict]
        for verdict in VERDICTS
    }
    open_ = len(comparisons) - len(counts["saturated"])
    parts = [f"{len(counts[v])} {v}" + _named(counts[v] if v == "behind" else ()) for v in VERDICTS]
    words = [f"of {len(comparisons)} sets {', '.join(parts)}"]
    if open_:
        words[0] += f": ahead on {100 * len(counts['ahead']) / open_:.0f} % of those not saturated"
    name, theirs, ours = _means(rows, guard, singles, "auroc")
    words.append(f"mean AUROC {ours:.2f}, of the best single method ({name}) {theirs:.2f}")
    if theirs < 100:
        words[-1] += f": {100 * (ours - theirs) / (100 - theirs):.0f} % of its distance to 100 is closed"
    name, theirs, ours = _means(rows, guard, singles, "tnr")
    words.append(
        f"mean TNR {ours:.2f}, of the best single method ({name}) {theirs:.2f}: {ours - theirs:+.2f} points"
    )
    for comparison in comparisons:
        if comparison.ood in set(near):
            below = "below" if comparison.difference.high < 0 else "not below"
            words.append(
                f"near set {comparison.ood}: {below} {comparison.best} by paired bootstrap "
                f"({comparison.interval})"
            )
    return "; ".join(words) + "."


def _named(sets: Sequence[str]) -> str:
    return f" ({'; '.join(sets)})" if sets else ""


def _means(
    rows: Sequence[Row], guard: str, singles: Collection[str], metric: str
) -> tuple[str, float, float]:
    """The single method with the best mean over the sets, that mean, and Guard's, in percent."""

    def mean(title: str) -> float:
        values = [row.mean[metric] for row in rows if row.method == title]
        return 100 * sum(values) / len(values)

    best = max(singles, key=mean)
    return best, mean(best), mean(guard)
