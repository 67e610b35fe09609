"""The comparison with Outlier Exposure, and both tables that join it with Gram.

Give the checkpoints with their objectives: `--weights cross_entropy=FILE --weights outlier_exposure=FILE`; a
third one, say `outlier_exposure_tuned=FILE`, is taken as trained with Outlier Exposure too. On each network
stand MSP, Delta without the division by the confidence ("Gram"), `Delta / max_Va(Delta) - MSP` ("Gram less
MSP") and `Delta / MSP` ("Gram over MSP"). The comparison then sets Gram on the plain network beside MSP on
the network trained with Outlier Exposure.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace

from gramwatch.errors import InputError
from gramwatch.evaluation.evaluate import Evaluation
from gramwatch.methods.gram_rules import GramRule
from gramwatch.numerics.deviation import TotalDeviation
from gramwatch_lab.paper.beside import SEEN, Line, mean_line
from gramwatch_lab.paper.experiment import Options, entries_for, lines_of, methods_of, protocol_of, write
from gramwatch_lab.paper.sets import OodSet, ood_sets
from gramwatch_lab.paper.subject import Subject

PLAIN, EXPOSED = "cross_entropy", "outlier_exposure"
GRAM = "Gram, divided by the confidence"
RULES = {
    "Gram": GramRule(TotalDeviation(confidence="none")),
    "Gram less MSP": GramRule(TotalDeviation(confidence="subtract")),
    "Gram over MSP": GramRule(TotalDeviation(confidence="divide_total")),
    GRAM: GramRule(TotalDeviation(confidence="divide")),
}
JOINED = ("MSP", "Gram", "Gram less MSP", "Gram over MSP")


def run(options: Options) -> list[Line]:
    """Judge every set by both networks."""
    check_labels(options.weights)
    lines: list[Line] = []
    judged: dict[str, Evaluation] = {}
    for label, weights in options.weights.items():
        subject = options.subject(weights)
        options.say(f"\n{label}: {subject.title}, accuracy {subject.accuracy():.2%}")
        sets = ood_sets(subject.in_distribution)
        judged[label] = _judged(subject, sets)
        auxiliary = "" if label == PLAIN else options.auxiliary
        lines += _joined_lines(options, subject, label, sets, judged[label], auxiliary)
    return lines + _comparison(options, subject, sets, judged)


def check_labels(labels: Collection[str]) -> None:
    """A plain network and some with Outlier Exposure, and no others, are compared."""
    if PLAIN not in labels or not any(label.startswith(EXPOSED) for label in labels):
        raise InputError(
            f"two networks are compared: give --weights {PLAIN}=FILE and --weights {EXPOSED}=FILE"
        )
    for label in labels:
        if label != PLAIN and not label.startswith(EXPOSED):
            raise InputError(f"'{label}' is no objective of this comparison: {PLAIN} or {EXPOSED}...")


def _judged(subject: Subject, sets: Iterable[OodSet]) -> Evaluation:
    """MSP, and Gram with the confidence in every way, from one measurement."""
    measured = subject.measure(methods_of(subject, "msp,gram"), list(sets))
    every = {
        title: {"MSP": measurement["MSP"], **dict.fromkeys(RULES, measurement["Gram"])}
        for title, measurement in measured.items()
    }
    return subject.evaluate(every, RULES)


def _joined_lines(
    options: Options, subject: Subject, label: str, sets: list[OodSet], result: Evaluation, auxiliary: str
) -> list[Line]:
    """The table of one network, beside both published ones."""
    trained = PLAIN if label == PLAIN else EXPOSED
    lines = lines_of(
        subject,
        sets,
        JOINED,
        result.rows,
        lambda ood_set, method: entries_for(
            subject, ood_set, method, ("combining OE + ours", "preliminary"), trained
        ),
    )
    sources = {ood_set.title: ood_set.source for ood_set in sets}
    lines = [
        replace(line, network=f"{line.network}, {label}", note=_note(sources[line.ood], auxiliary))
        for line in lines
    ]
    title = f"{subject.title} ({label}), {subject.inside_title}: MSP and Gram joined"
    write(
        options,
        f"joined-{subject.label}-{label}",
        title,
        lines,
        protocol_of(subject, result, _seen_in_words(label, auxiliary)),
    )
    return lines


def _note(source: str, auxiliary: str) -> str:
    return SEEN if auxiliary and source == auxiliary else ""


def _seen_in_words(label: str, auxiliary: str) -> str:
    if label == PLAIN:
        return "No method saw an outlier."
    return (
        f"The network was trained with outliers ({auxiliary or 'of its authors'}); no other outlier was seen."
    )


def _comparison(
    options: Options, subject: Subject, sets: list[OodSet], judged: dict[str, Evaluation]
) -> list[Line]:
    """MSP and Gram on the plain network, MSP on those trained with Outlier Exposure: the paper's TNR."""
    columns = {"MSP": (PLAIN, "MSP")}
    exposed = [label for label in judged if label != PLAIN]
    for label in exposed:
        columns["OE" if len(exposed) == 1 else f"OE{label.removeprefix(EXPOSED).replace('_', ' ')}"] = (
            label,
            "MSP",
        )
    columns["Gram"] = (PLAIN, GRAM)
    rows = []
    for name, (label, method) in columns.items():
        rows += [replace(row, method=name) for row in judged[label].rows if row.method == method]
    sources = {ood_set.title: ood_set.source for ood_set in sets}
    lines = lines_of(
        subject,
        sets,
        columns,
        rows,
        lambda ood_set, method: entries_for(subject, ood_set, _as_published(method), ("appendix:OE",)),
    )
    lines = [
        replace(
            line, note=_note(sources[line.ood], options.auxiliary) if line.method.startswith("OE") else ""
        )
        for line in lines
    ]
    lines += [mean_line(lines, method) for method in columns]
    beside = any(line.published for line in lines)
    write(
        options,
        f"outlier_exposure-{subject.label}",
        f"{subject.title}, {subject.inside_title}: Outlier Exposure and Gram",
        lines,
        protocol_of(subject, judged[PLAIN], "Networks of OE were trained with outliers; Gram saw none.")
        + (" Published: OE on its authors' networks, Gram on ResNet-34 and DenseNet." if beside else ""),
        metrics=("tnr", "auroc"),
    )
    return lines


def _as_published(method: str) -> str:
    """A column of the comparison, as the published table calls it."""
    return "OE" if method.startswith("OE") else {"MSP": "MSP on OE's plain network"}.get(method, method)
