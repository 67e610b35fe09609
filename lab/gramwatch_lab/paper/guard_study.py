"""The study behind Guard: which members, how Gram enters, how scores become comparable, how they are joined.

Each rule differs from Guard's in one thing. All follow from the same cells, those of the single methods, so
that a rule more costs seconds. Only in-distribution data sets anything; outliers judge.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from gramwatch.detect.joint import JointRule, Standard
from gramwatch.detect.measurement import AsMeasured, FittedRule, Measurement, Rule
from gramwatch.errors import InputError
from gramwatch.evaluation.evaluate import Measured, Row, draws_of, evaluate_measured, fitted_rule
from gramwatch.guard.guard import EFFORTS
from gramwatch.methods import METHODS
from gramwatch.methods.class_ratio import ClassRatio
from gramwatch.methods.early_mahalanobis import EarlyMahalanobis
from gramwatch.methods.gram_rules import SHRINK, MeanOfRoots
from gramwatch.methods.profile import Profile, ProfileRule
from gramwatch.methods.unit_mahalanobis import UnitMahalanobis
from gramwatch.numerics.deviation import TotalDeviation
from gramwatch.numerics.metrics import Difference, auroc_difference
from gramwatch_lab.figures.table import APART
from gramwatch_lab.paper import against
from gramwatch_lab.paper.beside import SHORT, Line, markdown
from gramwatch_lab.paper.experiment import Options, lines_of, methods_of, protocol_of, untuned, write
from gramwatch_lab.paper.scenes import SceneSubject, apart_of, facts_of, tables_of, write_facts
from gramwatch_lab.paper.subject import BLOCK_ENDS, VALIDATION, MethodSpec, rules_of

GRAM, GUARD = "Gram", "Guard"
EARLY, RATIO, UNIT, PROFILE = (
    kind.record.title for kind in (EarlyMahalanobis, ClassRatio, UnitMahalanobis, Profile)
)
OURS = (EARLY, RATIO, UNIT, PROFILE)
"""Methods that nobody else has published as they are here."""
STUDIED = ("gram", "profile", "class_ratio", "energy")
"""The members of the fourth rule, which this study chose. All count the same. The default guard has more."""
GUARDS_MEMBERS = tuple(GRAM if name == "gram" else METHODS[name].record.title for name in STUDIED)


# --- which Gram --------------------------------------------------------------------------------------

LEAN = MethodSpec(
    "lean Gram",
    "gram",
    {name: value if isinstance(value, str | int) else list(value) for name, value in EFFORTS["lean"].items()},
)
"""Gram as a guard has it."""
FORMS = (
    MethodSpec("Gram over the paper's taps", "gram", {"taps": "paper"}),
    MethodSpec("Gram of order 1", "gram", {"taps": "all", "orders": [1]}),
    MethodSpec("Gram of orders 1 and 2", "gram", {"taps": "all", "orders": [1, 2]}),
    MethodSpec("Gram of orders 1 to 4", "gram", {"taps": "all", "orders": [1, 2, 3, 4]}),
    MethodSpec("Gram of even orders", "gram", {"taps": "all", "orders": [2, 4, 6, 8, 10]}),
    MethodSpec("Gram normalised by tap and order", "gram_by_order", {"taps": "all"}),
    MethodSpec("Gram by mean and variance", "gram", {"taps": "all", "bounds": "mean_variance"}),
    MethodSpec("Gram fitted on mirrored and shifted images too", "gram", {"taps": "all"}, moved=True),
)
"""Gram in other forms than Guard's and the paper's: each a detector of its own, and a row."""
ENDS = "Gram over the ends of blocks"
"""One more, whose taps differ from network to network."""


def forms_of(network: str) -> list[MethodSpec]:
    """The forms that there are for a network."""
    ends = list(BLOCK_ENDS.get(network, ()))
    return [*FORMS, *([MethodSpec(ENDS, "gram", {"taps": ends})] if ends else [])]


def _all(deviations: Tensor) -> Tensor:
    return deviations


def _first_half(deviations: Tensor) -> Tensor:
    """Of the taps, in the order in which the network makes them."""
    return deviations[:, : deviations.shape[1] // 2]


def _last_half(deviations: Tensor) -> Tensor:
    return deviations[:, deviations.shape[1] // 2 :]


# --- how Gram enters ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plain(MeanOfRoots):
    """The mean over the taps of delta_l / E[delta_l]."""

    def __call__(self, measured: Measurement) -> Tensor:
        """The score, `(N, 1)`. No root is taken."""
        return self.mean_of(self.total.shares(measured.values, measured.probability))

    def mean_of(self, terms: Tensor) -> Tensor:
        """The mean of terms over the taps that count, `(N, 1)`."""
        return terms.sum(1, keepdim=True) / self.total.counted


@dataclass(frozen=True)
class Logarithms(Plain):
    """The mean over the taps of log(1 + delta_l / E[delta_l])."""

    def __call__(self, measured: Measurement) -> Tensor:
        """The score, `(N, 1)`. Logarithms take the place of roots."""
        return self.mean_of(self.total.shares(measured.values, measured.probability).log1p())


@dataclass(frozen=True)
class CubeRoots(Plain):
    """The mean over the taps of the cube root of delta_l / E[delta_l]."""

    def __call__(self, measured: Measurement) -> Tensor:
        """The score, `(N, 1)`. Cube roots take the place of square roots."""
        return self.mean_of(self.total.shares(measured.values, measured.probability) ** (1 / 3))


@dataclass(frozen=True)
class RootOfMean(Plain):
    """The root of the mean over the taps."""

    def __call__(self, measured: Measurement) -> Tensor:
        """The score, `(N, 1)`: one root, of the mean."""
        return super().__call__(measured).sqrt()


@dataclass(frozen=True)
class LogarithmOfMean(Plain):
    """The logarithm of one more than the mean over the taps."""

    def __call__(self, measured: Measurement) -> Tensor:
        """The score, `(N, 1)`: one logarithm, of the mean."""
        return super().__call__(measured).log1p()


# --- how scores are made comparable ------------------------------------------------------------------


@dataclass
class Adjusted(Standard):
    """Guard's way with other quantiles.

    Args:
        floor: no member finds an input more normal than this share of the examples.
        tail: which percentile is divided by.
        floored: whether there is a floor at all.

    """

    floor: float = Standard.floor
    tail: float = Standard.tail
    floored: bool = True

    def fit(self, scores: Tensor) -> "Adjusted":
        """Take median, tail and floor from scores `(N, members)`."""
        super().fit(scores)
        if not self.floored:
            self.lowest_ = scores.new_full((scores.shape[1],), -torch.inf)
        return self


class ZScore(Adjusted):
    """Less the mean, divided by the standard deviation."""

    def fit(self, scores: Tensor) -> "ZScore":
        """Take both from scores `(N, members)`."""
        super().fit(scores)
        assert self.tail_ is not None
        spread = scores.std(0, correction=0)
        self.median_, self.tail_ = scores.mean(0), torch.where(self.tail_.isinf(), self.tail_, spread)
        return self


class Decorrelated(Adjusted):
    """As much say for each member as it brings that others do not: the inverse covariance times one."""

    def fit(self, scores: Tensor) -> "Decorrelated":
        """Take the weights from scores `(N, members)`, too."""
        super().fit(scores)
        covariance = torch.cov(super().__call__(scores).T).reshape(scores.shape[1], -1)
        self._weights = torch.linalg.pinv(covariance).sum(1).clamp_min(0)
        return self

    def __call__(self, scores: Tensor) -> Tensor:
        """The weighted scores, `(N, members)`."""
        weighted: Tensor = super().__call__(scores) * self._weights
        return weighted


class LogarithmOfP(Standard):
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


class ExponentialTail(LogarithmOfP):
    """The same, where p falls exponentially beyond the 90th percentile, by the mean excess over it."""

    beyond = 0.9

    def fit(self, scores: Tensor) -> "ExponentialTail":
        """Take percentile and mean excess from scores `(N, members)`, too."""
        super().fit(scores)
        self._edge = scores.quantile(self.beyond, 0)
        excess = (scores - self._edge).clamp_min(0)
        self._excess = (excess.sum(0) / (excess > 0).sum(0).clamp_min(1)).clamp_min(1e-12)
        return self

    def __call__(self, scores: Tensor) -> Tensor:
        """The larger, the more unusual, `(N, members)`."""
        inside = -self._p(scores).clamp_min(1 - self.beyond).log()
        return inside + (scores - self._edge).clamp_min(0) / self._excess


# --- how they are joined -----------------------------------------------------------------------------


def _highest(z: Tensor) -> Tensor:
    return z.amax(1)


def _smooth_maximum(z: Tensor) -> Tensor:
    return z.logsumexp(1)


def _squares(z: Tensor) -> Tensor:
    """The sum of squares of what is above the median."""
    return z.clamp_min(0).square().sum(1)


def _sum(z: Tensor) -> Tensor:
    return z.sum(1)


@dataclass
class OtherJoin(JointRule):
    """Guard's rule with another function in place of the sum."""

    join: Callable[[Tensor], Tensor] = _sum

    def joined(self, scores: Tensor) -> Tensor:
        """The joint score of members' scores `(N, members)`."""
        return self.join(self.standard(scores))


@dataclass
class PerClass(JointRule):
    """Each score less the median of its predicted class, as if 30 more examples had shown the median of all.

    The classes of those that are judged are looked up, those of the examples are remembered.
    """

    medians_: Tensor | None = None
    """Of each class and member, `(classes, members)`, after `fit`."""
    worth = 30

    def fit(self, measured: Measurement) -> "PerClass":
        """Take the medians, too."""
        rule = replace(self, medians_=None)._fitted(measured)
        scores, classes = rule.member_scores(measured), measured.logits.shape[1]
        of_all = scores.quantile(0.5, 0)
        medians = of_all.repeat(classes, 1)
        for c in range(classes):
            own = scores[measured.predicted == c]
            if len(own):
                medians[c] = (len(own) * own.quantile(0.5, 0) + self.worth * of_all) / (len(own) + self.worth)
        return replace(rule, medians_=medians)._fitted(measured)

    def _fitted(self, measured: Measurement) -> "PerClass":
        rule = super().fit(measured)
        assert isinstance(rule, PerClass)
        return rule

    def member_scores(self, measured: Measurement, left_out: bool = False) -> Tensor:
        """The score of each member, not standardised, `(N, members)`."""
        scores = super().member_scores(measured, left_out)
        return scores if self.medians_ is None else scores - self.medians_[measured.predicted]


@dataclass(frozen=True)
class JoinVariant:
    """A rule, by what it has instead of Guard's choice."""

    title: str
    members: Sequence[str] = GUARDS_MEMBERS
    gram: MeanOfRoots = field(default_factory=MeanOfRoots)
    standard: Standard = field(default_factory=Standard)
    join: Callable[[Tensor], Tensor] | None = None
    """How comparable scores become one; None: their sum."""
    form: str = LEAN.title
    """The method that measures Gram's deviations: `LEAN`, Gram itself, or one of `forms_of`."""
    part: Callable[[Tensor], Tensor] = _all
    """Which of the deviations count."""
    kind: type[JointRule] = JointRule

    def measured(self, methods: Measured) -> Measurement:
        """What the members measured, side by side, from what every method measured."""
        parts = {name: methods[self.form if name == GRAM else name] for name in self.members}
        if GRAM in parts:
            parts[GRAM] = replace(parts[GRAM], values=self.part(parts[GRAM].deviations))
        return Measurement.together(parts)

    def rule(self) -> JointRule:
        """The rule, not fitted."""
        known: dict[str, FittedRule] = {GRAM: self.gram, PROFILE: ProfileRule()}
        rules = {name: rule for name, rule in known.items() if name in self.members}
        if self.join is not None:
            return OtherJoin(rules, self.standard, self.join)
        return self.kind(rules, self.standard)


VARIANTS = (
    JoinVariant(GUARD),
    JoinVariant(
        "first rule: Gram + fDBD + energy", (GRAM, "fDBD", "energy"), standard=Adjusted(tail=0.95), form=GRAM
    ),
    JoinVariant(
        "second rule: Gram + unit Mahalanobis + fDBD + energy",
        (GRAM, UNIT, "fDBD", "energy"),
        standard=Adjusted(tail=0.95),
        form=GRAM,
    ),
    JoinVariant(
        "third rule: Gram + early Mahalanobis + class ratio + energy",
        (GRAM, EARLY, RATIO, "energy"),
        form=GRAM,
    ),
    JoinVariant("full effort", form=GRAM),
    JoinVariant("full effort over the first half of taps", form=GRAM, part=_first_half),
    JoinVariant("full effort over the last half of taps", form=GRAM, part=_last_half),
    JoinVariant("early Mahalanobis instead of profile", (GRAM, EARLY, RATIO, "energy")),
    JoinVariant("unit Mahalanobis instead of profile", (GRAM, UNIT, RATIO, "energy")),
    JoinVariant("Mahalanobis instead of profile", (GRAM, "Mahalanobis", RATIO, "energy")),
    JoinVariant("fDBD instead of class ratio", (GRAM, PROFILE, "fDBD", "energy")),
    JoinVariant("KNN instead of class ratio", (GRAM, PROFILE, "KNN", "energy")),
    JoinVariant("NCI instead of class ratio", (GRAM, PROFILE, "NCI", "energy")),
    JoinVariant(
        "relative Mahalanobis instead of class ratio", (GRAM, PROFILE, "relative Mahalanobis", "energy")
    ),
    JoinVariant("GEN instead of energy", (GRAM, PROFILE, RATIO, "GEN")),
    JoinVariant("fDBD instead of energy", (GRAM, PROFILE, RATIO, "fDBD")),
    JoinVariant("KNN instead of energy", (GRAM, PROFILE, RATIO, "KNN")),
    *(
        JoinVariant(f"Guard + {name}", (*GUARDS_MEMBERS, name))
        for name in (EARLY, UNIT, "Mahalanobis", "relative Mahalanobis", "KNN", "ViM", "fDBD", "GEN")
    ),
    *(
        JoinVariant(f"Guard without {name}", tuple(kind for kind in GUARDS_MEMBERS if kind != name))
        for name in GUARDS_MEMBERS
    ),
    JoinVariant("Gram + energy", (GRAM, "energy")),
    JoinVariant("Gram + profile", (GRAM, PROFILE)),
    JoinVariant("profile + energy", (PROFILE, "energy")),
    JoinVariant("class ratio + energy", (RATIO, "energy")),
    *(JoinVariant(title, form=title) for title in (*(kind.title for kind in FORMS), ENDS)),
    JoinVariant("Gram's expectations not shrunk", gram=MeanOfRoots(TotalDeviation())),
    JoinVariant("Gram not normalised", gram=MeanOfRoots(TotalDeviation(normalise=False))),
    JoinVariant(
        "Gram without confidence", gram=MeanOfRoots(TotalDeviation(confidence="none", shrink=SHRINK))
    ),
    JoinVariant("Gram not compressed", gram=Plain()),
    JoinVariant("cube roots instead of square roots", gram=CubeRoots()),
    JoinVariant("logarithms instead of square roots", gram=Logarithms()),
    JoinVariant("square root of the mean", gram=RootOfMean()),
    JoinVariant("no floor", standard=Adjusted(floored=False)),
    JoinVariant("floor at the lowest", standard=Adjusted(floor=0.0)),
    JoinVariant("floor at the median", standard=Adjusted(floor=0.5)),
    JoinVariant("90th percentile", standard=Adjusted(tail=0.9)),
    JoinVariant("95th percentile", standard=Adjusted(tail=0.95)),
    JoinVariant("mean and standard deviation", standard=ZScore()),
    JoinVariant(
        "z-scores, logarithm of the mean",
        standard=ZScore(floored=False),
        gram=LogarithmOfMean(),
    ),
    JoinVariant("decorrelated", standard=Decorrelated()),
    JoinVariant("less the medians of classes", kind=PerClass),
    JoinVariant("Fisher", standard=LogarithmOfP()),
    JoinVariant("Fisher with an exponential tail", standard=ExponentialTail()),
    JoinVariant("Stouffer", standard=NormalDeviate()),
    JoinVariant("harmonic mean of p-values", standard=LogarithmOfP(), join=_smooth_maximum),
    JoinVariant("maximum", join=_highest),
    JoinVariant("smooth maximum", join=_smooth_maximum),
    JoinVariant("squares above the median", join=_squares),
)


def run(options: Options) -> list[Line]:
    """Judge every rule and every single method on every set."""
    subject = options.subject()
    methods = methods_of(subject, options.methods or "all", {"taps": "all"})
    singles = [method.title for method in methods]
    forms = [LEAN, *(forms_of(subject.loaded.name) if options.forms else ())]
    known = {*singles, *(form.title for form in forms)}
    usable = [variant for variant in VARIANTS if {*variant.members, variant.form} <= known]
    if GUARD not in [variant.title for variant in usable]:
        raise InputError(f"the study needs {', '.join(GUARDS_MEMBERS)} among the methods")
    sets = [
        ood_set for ood_set in options.chosen_sets(subject.in_distribution) if subject.is_outlying(ood_set)
    ]
    measured = subject.measure([*methods, *forms], sets)
    joined = {name: WithRules(measurement, usable, singles) for name, measurement in measured.items()}
    inside, validation = joined.pop(subject.inside_title), joined.pop(VALIDATION, None)
    if not joined:
        raise InputError(f"none of the sets is there: {options.sets or 'no data are present'}")
    rules: dict[str, Rule] = {**rules_of(methods), **{variant.title: variant.rule() for variant in usable}}
    result = evaluate_measured(inside, joined, rules, validation=validation)
    facts = facts_of(subject, measured) if isinstance(subject, SceneSubject) else []
    apart = apart_of(facts)
    counted = [row for row in result.rows if row.ood not in apart]
    titles = [*(variant.title for variant in usable), *singles]
    lines = [
        replace(line, note=APART) if line.ood in apart else line
        for line in lines_of(subject, sets, titles, result.rows, lambda *_: ())
    ]
    title = f"{subject.title}, {subject.inside_title}: ways to join"
    protocol = protocol_of(subject, result, untuned(methods))
    tables = [_table(counted, titles, metric) for metric in ("auroc", "tnr")]
    difference = _differences(inside, joined, rules, validation)
    published = [title for title in singles if title not in OURS]
    one_pass = [m.title for m in methods if not m.make(subject.network).alone]
    near = [ood_set.title for ood_set in sets if ood_set.near]
    verdict = _verdict(counted, singles, one_pass, published, difference, near)
    name = f"guard-{subject.label}"
    if facts:
        write_facts(options.output / f"sets-{subject.label}.csv", facts)
        tables = tables_of(facts, counted, titles, tables)
    if apart:
        shown = [row for row in result.rows if row.ood in apart]
        tables += ["### Shown apart", _table(shown, titles, "auroc")]
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
    )
    return lines


class WithRules(Mapping[str, Measurement]):
    """What the members of every rule measured of a set, beside what every single method measured.

    A rule's members are put side by side when they are asked for: dozens of copies of Gram's deviations
    would not fit into memory.
    """

    def __init__(self, methods: Measured, variants: Sequence[JoinVariant], singles: Sequence[str]) -> None:
        self._methods, self._variants = methods, {variant.title: variant for variant in variants}
        self._names = [*self._variants, *singles]

    def __getitem__(self, name: str) -> Measurement:
        if name in self._variants:
            return self._variants[name].measured(self._methods)
        return self._methods[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _table(rows: Sequence[Row], titles: Sequence[str], metric: str) -> str:
    """Every rule and method on every set, the best mean first, in percent."""
    sets = list(dict.fromkeys(row.ood for row in rows))
    aurocs = {(row.method, row.ood): 100 * row.mean[metric] for row in rows}
    means = {title: sum(aurocs[title, ood] for ood in sets) / len(sets) for title in titles}
    table = [[SHORT[metric] + ", percent", *sets, "mean"]]
    for title in sorted(titles, key=lambda title: -means[title]):
        figures = [*(aurocs[title, ood] for ood in sets), means[title]]
        table.append([title, *(f"{figure:.2f}" for figure in figures)])
    return markdown(table)


def _differences(
    inside: Measured, sets: Mapping[str, Measured], rules: Mapping[str, Rule], validation: Measured | None
) -> Callable[[str, str], Difference]:
    """How far Guard is ahead of a method on a set, both given by title, in the first draw."""

    @cache
    def scores(method: str) -> tuple[Tensor, dict[str, Tensor]]:
        return scores_of_first_draw(method, inside, sets, rules, validation)

    @cache
    def difference(ood: str, method: str) -> Difference:
        ours, theirs = scores(GUARD), scores(method)
        return auroc_difference((ours[0], ours[1][ood]), (theirs[0], theirs[1][ood]))

    return difference


def scores_of_first_draw(
    method: str,
    inside: Measured,
    sets: Mapping[str, Measured],
    rules: Mapping[str, Rule],
    validation: Measured | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """What `evaluate_measured` compares in its first draw: a method's scores of test data and sets."""
    total = len(inside[method])
    if validation is None:
        held_out, test = next(draws_of(total, draws=1))
    else:
        held_out, test = torch.arange(len(validation[method])), torch.arange(total)
    to_fit = inside if validation is None else validation
    rule = fitted_rule(rules.get(method, AsMeasured()), to_fit[method], held_out)
    scores = {name: rule(measured[method])[:, 0] for name, measured in sets.items()}
    return rule(inside[method])[test, 0], scores


def _verdict(
    rows: Sequence[Row],
    singles: Sequence[str],
    one_pass: Sequence[str],
    published: Sequence[str],
    difference: Callable[[str, str], Difference],
    near: Sequence[str],
) -> str:
    """Guard against the best single method of each set, in figures and in words."""
    every, quick, known = (
        against.against_the_best(rows, GUARD, titles, difference) for titles in (singles, one_pass, published)
    )
    return "\n\n".join(
        [
            "### Guard against the best single method of each set",
            against.table(every, quick),
            against.LEGEND,
            f"- Against all single methods: {against.in_words(rows, GUARD, singles, every, near)}\n"
            f"- Against those of one pass: {against.in_words(rows, GUARD, one_pass, quick, near)}\n"
            f"- Against all but {', '.join(OURS)}, which are ours: "
            f"{against.in_words(rows, GUARD, published, known, near)}",
        ]
    )
