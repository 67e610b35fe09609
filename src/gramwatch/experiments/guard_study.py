"""The study behind Guard: which members, how Gram enters, how scores become comparable, how they are joined.

Each rule differs from Guard's in one thing. All follow from the same cells, those of the single methods, so
that a rule more costs seconds. Only in-distribution data sets anything; outliers judge.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from gramwatch.detector import Measurement
from gramwatch.deviation import TotalDeviation
from gramwatch.errors import InputError
from gramwatch.evaluate import Row, evaluate_measured, scores_of_first_draw
from gramwatch.experiments import against
from gramwatch.experiments.beside import SHORT, Line, markdown
from gramwatch.experiments.paper import Options, lines_of, methods_of, protocol_of, write
from gramwatch.experiments.subject import BLOCK_ENDS, Method, OodSet, ood_sets
from gramwatch.guard import SHRINK
from gramwatch.joint import JointMeasurement, JointRule, ZScore, gram_score, sum_of_members
from gramwatch.metrics import Difference, auroc_difference
from gramwatch.report.comparison import draw_comparison
from gramwatch.report.why import draw_why
from gramwatch.rivals import Rival
from gramwatch.together import Measured
from gramwatch.watch import Single

GRAM, GUARD = "Gram", "Guard"
GUARDS_MEMBERS = (GRAM, "fDBD", "energy")


# --- which Gram --------------------------------------------------------------------------------------

FORMS = (
    Method("Gram over the paper's taps", "gram", {"taps": "paper"}),
    Method("Gram of order 1", "gram", {"taps": "all", "orders": [1]}),
    Method("Gram of orders 1 and 2", "gram", {"taps": "all", "orders": [1, 2]}),
    Method("Gram of orders 1 to 4", "gram", {"taps": "all", "orders": [1, 2, 3, 4]}),
    Method("Gram of even orders", "gram", {"taps": "all", "orders": [2, 4, 6, 8, 10]}),
    Method("Gram normalised by tap and order", "gram_by_order", {"taps": "all"}),
    Method("Gram by mean and variance", "gram", {"taps": "all", "bounds": "mean_variance"}),
    Method("Gram fitted on mirrored and shifted images too", "gram", {"taps": "all"}, moved=True),
)
"""Gram in other forms than Guard's: each a detector of its own, and a row."""
ENDS = "Gram over the ends of blocks"
"""One more, whose taps differ from network to network."""


def forms_of(network: str) -> list[Method]:
    """The forms that there are for a network."""
    ends = list(BLOCK_ENDS.get(network, ()))
    return [*FORMS, *([Method(ENDS, "gram", {"taps": ends})] if ends else [])]


def _all(deviations: Tensor) -> Tensor:
    return deviations


def _first_half(deviations: Tensor) -> Tensor:
    """Of the taps, in the order in which the network makes them."""
    return deviations[:, : deviations.shape[1] // 2]


def _last_half(deviations: Tensor) -> Tensor:
    return deviations[:, deviations.shape[1] // 2 :]


# --- how Gram enters ---------------------------------------------------------------------------------


def _mean_deviation(total: TotalDeviation, measured: Measurement) -> Tensor:
    """The mean over the taps of delta_l / E[delta_l]."""
    return gram_score(total, measured).expm1()


def _root(total: TotalDeviation, measured: Measurement) -> Tensor:
    return _mean_deviation(total, measured).sqrt()


def _tap_by_tap(total: TotalDeviation, measured: Measurement) -> Tensor:
    """The mean over the taps of log(1 + delta_l / E[delta_l])."""
    return total.terms(measured.deviations, measured.probability).log1p().mean(1)


# --- how scores are made comparable ------------------------------------------------------------------


class FromQuartile(ZScore):
    """No member finds an input more normal than a quarter of the examples."""

    def fit(self, scores: Tensor) -> "FromQuartile":
        """Take mean, deviation and lower quartile from scores `(N, members)`."""
        super().fit(scores)
        self.lowest_ = scores.quantile(0.25, 0)
        return self


class MedianAndTail(ZScore):
    """Less the median, divided by the distance of the 95th percentile from it."""

    def fit(self, scores: Tensor) -> "MedianAndTail":
        """Take both from scores `(N, members)`."""
        super().fit(scores)
        self.mean_ = scores.median(0).values
        self.deviation_ = scores.quantile(0.95, 0) - self.mean_
        return self


class LogarithmOfP(ZScore):
    """Minus the logarithm of the p-value among the examples: their sum is Fisher's."""

    def fit(self, scores: Tensor) -> "LogarithmOfP":
        """Keep the scores `(N, members)`, each member's ascending."""
        self._ascending = scores.sort(0).values.T.contiguous()
        return self

    def __call__(self, scores: Tensor) -> Tensor:
        """The larger, the more unusual, `(N, members)`; between two ranks by the score."""
        return -self._p(scores).log() + 1e-6 * scores.clamp(-1e6, 1e6)

    def _p(self, scores: Tensor) -> Tensor:
        below = torch.searchsorted(self._ascending, scores.T.contiguous(), side="left").T
        count = self._ascending.shape[1]
        return (1 + count - below).double() / (count + 1)


class NormalDeviate(LogarithmOfP):
    """The normal deviate that is as unusual: their sum is Stouffer's."""

    def __call__(self, scores: Tensor) -> Tensor:
        """The larger, the more unusual, `(N, members)`."""
        deviate: Tensor = torch.special.ndtri(1 - self._p(scores).clamp(1e-6, 1 - 1e-6))
        return deviate + 1e-6 * scores.clamp(-1e6, 1e6)


# --- how they are joined -----------------------------------------------------------------------------


def _highest(z: Tensor) -> Tensor:
    return z.amax(1)


def _smooth_maximum(z: Tensor) -> Tensor:
    return z.logsumexp(1)


def _squares(z: Tensor) -> Tensor:
    """The sum of squares of what is above the mean."""
    return z.clamp_min(0).square().sum(1)


@dataclass(frozen=True)
class Variant:
    """A rule, by what it has instead of Guard's choice."""

    title: str
    members: Sequence[str] = GUARDS_MEMBERS
    total: TotalDeviation = field(default_factory=lambda: TotalDeviation(shrink=SHRINK))
    standard: ZScore = field(default_factory=ZScore)
    join: Callable[[Tensor], Tensor] = sum_of_members
    gram: Callable[[TotalDeviation, Measurement], Tensor] = gram_score
    form: str = GRAM
    """The method that measures Gram's deviations: Gram, or one of `forms_of`."""
    part: Callable[[Tensor], Tensor] = _all
    """Which of the deviations count."""

    def parts(self, measured: Measured) -> Mapping[str, Measurement | Tensor]:
        """What the members say, from what every method says."""
        found: dict[str, Measurement | Tensor] = {}
        for name in self.members:
            said = measured[self.form if name == GRAM else name]
            assert not isinstance(said, JointMeasurement)
            if isinstance(said, Measurement):
                said = replace(said, deviations=self.part(said.deviations))
            found[name] = said
        return found

    def rule(self) -> JointRule:
        """The rule, not fitted."""
        totals = {GRAM: self.total} if GRAM in self.members else {}
        return JointRule(totals, self.standard, self.join, self.gram)


VARIANTS = (
    Variant(GUARD),
    Variant("Gram + energy", (GRAM, "energy")),
    Variant("Gram + fDBD", (GRAM, "fDBD")),
    Variant("Gram + GEN", (GRAM, "GEN")),
    Variant("Gram + KNN", (GRAM, "KNN")),
    Variant("Gram + fDBD + GEN", (GRAM, "fDBD", "GEN")),
    Variant("Gram + fDBD + KNN", (GRAM, "fDBD", "KNN")),
    Variant("Guard + GEN", (*GUARDS_MEMBERS, "GEN")),
    Variant("Guard + KNN", (*GUARDS_MEMBERS, "KNN")),
    Variant("Guard + ViM", (*GUARDS_MEMBERS, "ViM")),
    Variant("Guard + relative Mahalanobis", (*GUARDS_MEMBERS, "relative Mahalanobis")),
    Variant("Guard without Gram", ("fDBD", "energy")),
    *(Variant(title, form=title) for title in (*(each.title for each in FORMS), ENDS)),
    Variant("Gram over the first half of taps", part=_first_half),
    Variant("Gram over the last half of taps", part=_last_half),
    Variant("Gram's expectations not shrunk", total=TotalDeviation()),
    Variant("Gram not normalised", total=TotalDeviation(normalise=False)),
    Variant("Gram without confidence", total=TotalDeviation(confidence="none", shrink=SHRINK)),
    Variant("Gram not compressed", gram=_mean_deviation),
    Variant("Gram compressed tap by tap", gram=_tap_by_tap),
    Variant("Gram under a square root", gram=_root),
    Variant("no floor", standard=ZScore(floor=False)),
    Variant("floor at the lower quartile", standard=FromQuartile()),
    Variant("square root, floor at the quartile", standard=FromQuartile(), gram=_root),
    Variant("median and 95th percentile", standard=MedianAndTail()),
    Variant("Fisher", standard=LogarithmOfP()),
    Variant("Stouffer", standard=NormalDeviate()),
    Variant("maximum", join=_highest),
    Variant("smooth maximum", join=_smooth_maximum),
    Variant("squares above the mean", join=_squares),
)


def run(options: Options) -> list[Line]:
    """Judge every rule and every single method on every set."""
    subject = options.subject()
    methods = methods_of(subject, options.methods or "all", {"taps": "all"})
    singles = [method.title for method in methods]
    forms = forms_of(subject.loaded.name) if options.forms else []
    known = {*singles, *(form.title for form in forms)}
    usable = [each for each in VARIANTS if {*each.members, each.form} <= known]
    if GUARD not in [each.title for each in usable]:
        raise InputError(f"the study needs {', '.join(GUARDS_MEMBERS)} among the methods")
    sets = [each for each in ood_sets(subject.in_distribution) if _chosen(each, options.sets)]
    measured = subject.measure([*methods, *forms], sets)
    together = {name: _with_rules(each, usable, singles) for name, each in measured.items()}
    inside = together.pop(subject.inside_title)
    if not together:
        raise InputError(f"none of the sets is there: {options.sets or 'no data are present'}")
    rules = {each.title: each.rule() for each in usable}
    totals: dict[str, TotalDeviation | JointRule] = {GRAM: TotalDeviation(), **rules}
    result = evaluate_measured(inside, together, totals)
    titles = [*rules, *singles]
    lines = lines_of(subject, sets, titles, result.rows, lambda *_: ())
    title = f"{subject.title}, {subject.inside_title}: ways to join"
    protocol = protocol_of(subject, result)
    tables = [_table(result.rows, titles, metric) for metric in ("auroc", "tnr")]
    difference = _differences(inside, together, totals)
    one_pass = [m.title for m in methods if not _needs_gradients(m.make(subject.network))]
    verdict = _verdict(result.rows, singles, one_pass, difference, [each.title for each in sets if each.near])
    name = f"guard-{subject.loaded.name}"
    draw_why(
        options.output / f"{name}-why.png", {f"{subject.title}, {subject.inside_title}": _aurocs(result.rows)}
    )
    why = f"![AUROC of Gram, of the best other method and of Guard on every set]({name}-why.png)"
    write(
        options,
        name,
        title,
        lines,
        protocol,
        metrics=(),
        more="\n\n".join([verdict, why, *tables]),
        tallied=False,
        picture=lambda path: draw_comparison(path, result, title),
    )
    return lines


def _chosen(each: OodSet, names: str) -> bool:
    """Whether a set is among those named, with commas between them; all, where none is."""
    return not names or each.name in [name.strip() for name in names.split(",")]


def _with_rules(measured: Measured, variants: Sequence[Variant], singles: Sequence[str]) -> Measured:
    """What the rules' members say, beside what every single method says."""
    gram = measured[GRAM]
    assert isinstance(gram, Measurement)
    joint = {each.title: JointMeasurement(gram.logits, each.parts(measured)) for each in variants}
    return {**joint, **{name: measured[name] for name in singles}}


def _table(rows: Sequence[Row], titles: Sequence[str], metric: str) -> str:
    """Every rule and method on every set, the best mean first, in percent."""
    sets = list(dict.fromkeys(row.ood for row in rows))
    found = {(row.method, row.ood): 100 * row.mean[metric] for row in rows}
    means = {title: sum(found[title, ood] for ood in sets) / len(sets) for title in titles}
    table = [[SHORT[metric] + ", percent", *sets, "mean"]]
    for title in sorted(titles, key=lambda title: -means[title]):
        figures = [*(found[title, ood] for ood in sets), means[title]]
        table.append([title, *(f"{figure:.2f}" for figure in figures)])
    return markdown(table)


def _aurocs(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """In percent, by set and method."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row.ood, {})[row.method] = 100 * row.mean["auroc"]
    return found


def _needs_gradients(detector: Single) -> bool:
    return isinstance(detector, Rival) and detector.gradients


def _differences(
    inside: Measured, sets: Mapping[str, Measured], totals: Mapping[str, TotalDeviation | JointRule]
) -> Callable[[str, str], Difference]:
    """How far Guard is ahead of a method on a set, both given by title, in the first draw."""

    @cache
    def scores(method: str) -> tuple[Tensor, dict[str, Tensor]]:
        return scores_of_first_draw(method, inside, sets, totals)

    @cache
    def difference(ood: str, method: str) -> Difference:
        ours, theirs = scores(GUARD), scores(method)
        return auroc_difference((ours[0], ours[1][ood]), (theirs[0], theirs[1][ood]))

    return difference


def _verdict(
    rows: Sequence[Row],
    singles: Sequence[str],
    one_pass: Sequence[str],
    difference: Callable[[str, str], Difference],
    near: Sequence[str],
) -> str:
    """Guard against the best single method of each set, in figures and in words."""
    every, quick = (against.against_the_best(rows, GUARD, some, difference) for some in (singles, one_pass))
    return "\n\n".join(
        [
            "### Guard against the best single method of each set",
            against.table(every, quick),
            against.LEGEND,
            f"- Against all single methods: {against.in_words(rows, GUARD, singles, every, near)}\n"
            f"- Against those of one pass: {against.in_words(rows, GUARD, one_pass, quick, near)}",
        ]
    )
