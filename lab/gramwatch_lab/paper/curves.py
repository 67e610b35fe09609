"""The common part of depth and order: detectors that see a part of the network, as curves beside the whole.

Fig. 1 and 2 of the paper and their appendix: TNR against the stage or the order, for both metrics.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from gramwatch.detect.measurement import Measurement, Rule
from gramwatch.evaluation.evaluate import Measured
from gramwatch.methods.gram_rules import GramRule
from gramwatch.numerics.deviation import TotalDeviation
from gramwatch.watch import find_taps
from gramwatch_lab.paper import published
from gramwatch_lab.paper.ablation import BOUNDS
from gramwatch_lab.paper.beside import Line
from gramwatch_lab.paper.experiment import (
    Options,
    entries_for,
    lines_of,
    methods_of,
    protocol_of,
    untuned,
    write,
)
from gramwatch_lab.paper.sets import OodSet, ood_sets
from gramwatch_lab.paper.subject import MethodSpec, Subject, rules_of

Parts = Mapping[str, Callable[[Tensor], Tensor]]
"""The choice of deviations by part: from `(N, taps, orders)` to `(N, chosen)`. The keys are names in
tables."""
PRINTED = (
    "The paper prints its curves in numbers for TinyImgNet (R), Min/Max alone: ResNet-34 on CIFAR-10, "
    "DenseNet on CIFAR-100. Its other curves are pictures, from which no numbers were taken."
)
TABLES = ("tab:exp_ood_results", "released figures", "appendix:dpn+", "fig:ood_layerwise")


def run_curves(
    options: Options,
    name: str,
    spec: MethodSpec,
    parts_of: Callable[[Subject], Parts],
    curve: str,
    title: str,
) -> list[Line]:
    """Judge every set by every part, for both metrics, and draw one panel for each set.

    Args:
        options: what a user chose.
        name: of the experiment.
        spec: the Gram detector that is taken apart, whose title and bounds are set here.
        parts_of: the parts of a network.
        curve: the published curves.
        title: what the picture shows.

    """
    subject = options.subject()
    whole = methods_of(subject, options.methods or "msp,odin,mahalanobis,gram")
    grams = [
        replace(spec, title=metric, settings={"taps": "paper", "bounds": bounds, **spec.settings})
        for metric, bounds in BOUNDS.items()
    ]
    sets = ood_sets(subject.in_distribution)
    parts = parts_of(subject)
    taps = len(tap_names(subject))
    measured = {
        key: _by_part(measurement, parts, taps)
        for key, measurement in subject.measure([*grams, *whole], sets).items()
    }
    methods = list(measured[subject.inside_title])
    rules: dict[str, Rule] = {name: GramRule(TotalDeviation()) for name in methods if _metric(name) in BOUNDS}
    result = subject.evaluate(measured, rules | rules_of(whole))

    def entries(ood_set: OodSet, method: str) -> tuple[published.Entry, ...]:
        return _curve_entry(subject, ood_set, method, curve, list(parts)) or entries_for(
            subject, ood_set, method, TABLES
        )

    lines = lines_of(subject, sets, methods, result.rows, entries)
    title = f"{subject.title}, {subject.inside_title}: {title}"
    protocol = protocol_of(subject, result, untuned(whole))
    write(
        options,
        f"{name}-{subject.label}",
        title,
        lines,
        protocol,
        metrics=("tnr", "auroc"),
        more=PRINTED,
        tallied=False,
    )
    return lines


def tap_names(subject: Subject) -> list[str]:
    """The names of the tensors in the published figures."""
    images = subject.load(subject.in_distribution, count=2).images
    device = next(subject.network.parameters()).device
    return [
        tap.name for tap in find_taps(subject.network, subject.loaded.prepare(images.to(device)), "paper")
    ]


def _by_part(measured: Measured, parts: Parts, taps: int) -> Measured:
    parts_measured: dict[str, Measurement] = {}
    for name, measurement in measured.items():
        if name in BOUNDS:
            deviations = measurement.deviations.unflatten(1, (taps, -1))
            for part, choose in parts.items():
                parts_measured[f"{name}, {part}"] = replace(measurement, values=choose(deviations))
        else:
            parts_measured[name] = measurement
    return parts_measured


def _metric(name: str) -> str:
    """The metric of a part, by its name in tables; of a whole method, its name."""
    return name.partition(", ")[0]


def _curve_entry(
    subject: Subject, ood_set: OodSet, method: str, curve: str, parts: Sequence[str]
) -> tuple[published.Entry, ...]:
    """The published point of a curve; the curves in print are of Min/Max."""
    points = published.series(curve, subject.published_title, subject.loaded.name).get(
        ood_set.published or ""
    )
    names = [f"Min/Max, {part}" for part in parts]
    if points is None or method not in names:
        return ()
    inside, figures = subject.published_title, {"tnr": points[names.index(method)]}
    return (published.Entry("figure", inside, subject.loaded.name, str(ood_set.published), method, figures),)
