"""Row sums against the full triangle of the Gram matrix: "differences of less than 0.5 %", the paper says.

Beside them, row sums as the paper's text has them: the root first, then the sum.
"""

from gramwatch_lab.paper.beside import SHORT, Line, markdown
from gramwatch_lab.paper.experiment import Options, entries_for, lines_of, protocol_of, write
from gramwatch_lab.paper.published import SHOWN
from gramwatch_lab.paper.sets import ood_sets
from gramwatch_lab.paper.subject import MethodSpec, rules_of

STATISTICS = {
    "row sums": "row_sums",
    "row sums of roots": "row_sums_of_roots",
    "full triangle": "triangle",
}


def run(options: Options) -> list[Line]:
    """Fit all three together, judge every set."""
    subject = options.subject()
    methods = [
        MethodSpec(name, "gram", {"taps": "paper", "statistic": statistic})
        for name, statistic in STATISTICS.items()
    ]
    sets = ood_sets(subject.in_distribution)
    measured = subject.measure(methods, sets)
    result = subject.evaluate(measured, rules_of(methods))
    lines = lines_of(
        subject,
        sets,
        STATISTICS,
        result.rows,
        lambda ood_set, method: (
            entries_for(subject, ood_set, "Gram", ("tab:exp_ood_results",)) if method == "row sums" else ()
        ),
    )
    title = f"{subject.title}, {subject.inside_title}: row sums and the full triangle"
    protocol = protocol_of(subject, result)
    write(
        options,
        f"triangle-{subject.label}",
        title,
        lines,
        protocol,
        more=_differences(lines),
        tallied=False,
    )
    return lines


def _differences(lines: list[Line]) -> str:
    """The full triangle less row sums, in points, on every set."""
    by_cell = {(line.ood, line.method): line for line in lines}
    rows = [["full triangle less row sums, points", *(SHORT[metric] for metric in SHOWN)]]
    largest = dict.fromkeys(SHOWN, 0.0)
    for ood in dict.fromkeys(line.ood for line in lines):
        differences = []
        for metric in SHOWN:
            whole, sums = (by_cell[ood, name].our(metric) for name in ("full triangle", "row sums"))
            if whole is not None and sums is not None:
                differences.append(f"{whole - sums:+.2f}")
                largest[metric] = max(largest[metric], abs(whole - sums))
        if differences:
            rows.append([ood, *differences])
    rows.append(["largest, either way (published: under 0.5)", *(f"{v:.2f}" for v in largest.values())])
    return markdown(rows)
