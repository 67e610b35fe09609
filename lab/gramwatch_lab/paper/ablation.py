"""The detailed ablation (App. C): which statistic, which metric, normalised or not.

Six detectors are fitted in one pass; with and without normalising, their deviations give twelve settings.
"""

from statistics import mean, stdev

from gramwatch.evaluation.evaluate import Measured, Row
from gramwatch.methods.gram_rules import GramRule
from gramwatch.numerics.deviation import TotalDeviation
from gramwatch_lab.paper import published
from gramwatch_lab.paper.beside import SHORT, Line, markdown
from gramwatch_lab.paper.experiment import Options, entries_for, lines_of, protocol_of, write
from gramwatch_lab.paper.sets import ood_sets
from gramwatch_lab.paper.subject import MethodSpec

STATISTICS = {"diagonal": "diagonal", "off-diagonal": "off_diagonal", "complete": "row_sums"}
BOUNDS = {"Min/Max": "min_max", "Mean/Var": "mean_variance"}
TABLES = ("tab:detailed_ablation",)
SUMMARIES = {"MEAN": mean, "STD-DEV": stdev}


def run(options: Options) -> list[Line]:
    """Fit six detectors, judge every set in twelve settings."""
    subject = options.subject()
    methods = [
        MethodSpec(f"{name}, {metric}", "gram", {"taps": "paper", "statistic": statistic, "bounds": bounds})
        for name, statistic in STATISTICS.items()
        for metric, bounds in BOUNDS.items()
    ]
    sets = ood_sets(subject.in_distribution)
    measured = {title: _twelve(measurement) for title, measurement in subject.measure(methods, sets).items()}
    rules = {
        name: GramRule(TotalDeviation(normalise="(U)" not in name)) for name in published.ABLATION_METHODS
    }
    result = subject.evaluate(measured, rules)
    lines = lines_of(
        subject,
        sets,
        published.ABLATION_METHODS,
        result.rows,
        lambda ood_set, method: entries_for(subject, ood_set, method, TABLES),
    )
    near = {ood_set.title for ood_set in sets if ood_set.near}
    more = _summary([row for row in result.rows if row.ood not in near])
    name, title = (
        f"ablation-{subject.label}",
        f"{subject.title}, {subject.inside_title}: twelve settings",
    )

    write(
        options,
        name,
        title,
        lines,
        f"{protocol_of(subject, result)} (U): not normalised.",
        more=more,
        tallied=False,
    )
    return lines


def _twelve(measured: Measured) -> Measured:
    """The measurements of six detectors, for both ways of summing deviations."""
    return {name: measured[name.removesuffix(" (U)")] for name in published.ABLATION_METHODS}


def _summary(rows: list[Row]) -> str:
    """Mean and standard deviation over the sets, near ones left out.

    The published ones are over other sets and six networks: they do not stand beside ours.
    """
    parts = []
    for metric in published.SHOWN:
        table = [["setting", *SUMMARIES]]
        for method in published.ABLATION_METHODS:
            values = [100 * row.mean[metric] for row in rows if row.method == method]
            ours = [f"{summary(values):.1f}" if len(values) > 1 else "" for summary in SUMMARIES.values()]
            table.append([method, *ours])
        count = len({row.ood for row in rows})
        parts += [f"### {SHORT[metric]} over {count} sets, the near ones left out", "", markdown(table), ""]
    return "\n".join(parts)
