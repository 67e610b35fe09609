"""Table 2 and the expanded table: Baseline, ODIN, Mahalanobis and Gram, one network on every set.

`tune="none"`: no method sees an outlier. `tune="outliers"`: ODIN and Mahalanobis are tuned on images of each
out-of-distribution set, as in the published table. `tune="fgsm"`: on adversarial examples of in-distribution
images. Images that were tuned on are not judged, by any method.
"""

from collections.abc import Sequence
from dataclasses import replace

from gramwatch.errors import InputError
from gramwatch.evaluation.evaluate import Evaluation, Row
from gramwatch_lab.paper.beside import Line
from gramwatch_lab.paper.experiment import (
    TUNABLE,
    Options,
    entries_for,
    lines_of,
    methods_of,
    protocol_of,
    write,
)
from gramwatch_lab.paper.sets import OodSet
from gramwatch_lab.paper.subject import FGSM, MethodSpec, Subject, rules_of

TABLES = ("tab:exp_ood_results", "released figures", "appendix:dpn+", "appendix:OE")
HOW = {
    "none": "No method saw an outlier; {} untuned (published: tuned on images of each set).",
    "outliers": "{} tuned on images of each out-of-distribution set; no other method saw an outlier.",
    "fgsm": "{} tuned on FGSM examples of in-distribution images, by their true classes; no method saw "
    "an outlier (published: tuned on images of each set).",
}


def run(options: Options) -> list[Line]:
    """Measure every set, and set the figures beside the published ones."""
    if options.tune not in HOW:
        raise InputError(f"tune is one of {', '.join(HOW)}, not '{options.tune}'")
    subject = options.subject()
    methods = methods_of(subject, options.methods or "msp,odin,mahalanobis,gram")
    sets = options.chosen_sets(subject.in_distribution)
    result = judged(subject, methods, sets, options.tune)
    tuned = " and ".join(m.title for m in methods if m.kind in TUNABLE)
    told = HOW[options.tune if tuned else "none"].format(tuned)
    if not tuned:
        told = "No method saw an outlier."
    lines = lines_of(
        subject,
        sets,
        [m.title for m in methods],
        result.rows,
        lambda ood_set, method: entries_for(subject, ood_set, method, TABLES),
    )
    suffix = "" if options.tune == "none" else f"-{options.tune}"
    title = f"{subject.title}, {subject.inside_title} against everything else"
    protocol = protocol_of(subject, result, told)
    write(
        options,
        f"table2-{subject.label}{suffix}",
        title,
        lines,
        protocol,
    )
    return lines


def judged(
    subject: Subject, methods: Sequence[MethodSpec], sets: Sequence[OodSet], tune: str = "none"
) -> Evaluation:
    """The figures of every method on every set that is present."""
    rows: list[Row] = []
    protocol = ""
    for group in [[ood_set] for ood_set in sets] if tune == "outliers" else [sets]:
        names = {"fgsm": FGSM, "outliers": group[0].title}
        chosen = [
            replace(m, tuned_on=names[tune]) if tune != "none" and m.kind in TUNABLE else m for m in methods
        ]
        if tune == "outliers" and not subject.present(group[0]):
            continue
        result = subject.evaluate(subject.measure(chosen, group), rules_of(methods))
        if result.rows:
            rows += result.rows
            protocol = result.protocol
    return Evaluation(tuple(rows), protocol)
