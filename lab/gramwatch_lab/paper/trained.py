"""Methods that need training of their own: DPN, VD, Semantic and Outlier Exposure beside Gram and MSP (App.).

Give one checkpoint for each objective: `--weights cross_entropy=FILE --weights prior_network=FILE ...`. Gram
and MSP judge the plain network, every other method its own. With `--auxiliary`, sets from the source of the
outliers that networks were trained with are marked, and left out of the means.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from gramwatch.errors import InputError
from gramwatch.evaluation.evaluate import Row
from gramwatch.methods import TRAINED
from gramwatch_lab import training
from gramwatch_lab.paper import published
from gramwatch_lab.paper.beside import SEEN, Line, mean_line
from gramwatch_lab.paper.experiment import Options, lines_of, methods_of, protocol_of, write
from gramwatch_lab.paper.sets import OodSet, ood_sets
from gramwatch_lab.paper.subject import MethodSpec, rules_of

PLAIN = "cross_entropy"
TITLES = {
    "outlier_exposure": "OE",
    "prior_network": "DPN",
    "variational_dirichlet": "VD",
    "semantic": "Semantic",
}
"""The trained methods, as the paper calls them."""
REVERSE, RANDOM = " (reverse KL)", " (random label codes)"
OTHER_FORMS = {
    REVERSE: "DPN is the reverse-KL form; the published figures are of the forward one.",
    RANDOM: "Semantic has random label codes, not the paper's word vectors.",
}
"""What is not as in the paper, by what follows the method's name."""


def run(options: Options) -> list[Line]:
    """Judge every set by every network."""
    check_labels(options.weights)
    rows: list[Row] = []
    columns: dict[str, bool] = {}  # whether the network was trained with outliers
    accuracies = []
    for label, weights in options.weights.items():
        subject = options.subject(weights)
        sets = ood_sets(subject.in_distribution)
        if label == PLAIN:
            methods = methods_of(subject, options.methods or "msp,gram")
        else:
            methods = [MethodSpec(f"{TITLES[label]}{form_of(label, weights)}", label)]
        accuracies.append(f"{label} {subject.accuracy():.2%}")
        options.say(f"\n{subject.title}: accuracy {accuracies[-1]}")
        measured = subject.measure(methods, sets)
        result = subject.evaluate(measured, rules_of(methods))
        rows += result.rows
        columns |= {m.title: label != PLAIN and TRAINED[label].record.outliers for m in methods}

    def entries(ood_set: OodSet, method: str) -> tuple[published.Entry, ...]:
        entries = published.find(
            subject.published_title, "resnet34", ood_set.published or "", _plain(method), ("appendix:dpn+",)
        )
        return tuple(entries)

    sources = {ood_set.title: ood_set.source for ood_set in sets}
    lines = lines_of(subject, sets, columns, rows, entries)
    lines = [
        replace(line, note=SEEN)
        if columns[line.method] and options.auxiliary and sources[line.ood] == options.auxiliary
        else line
        for line in lines
    ]
    lines += [mean_line(lines, method) for method in columns]
    outliers = " and ".join(method for method, seen in columns.items() if seen)
    told = (
        f"Trained with outliers: {outliers}. No other saw one." if outliers else "No method saw an outlier."
    )
    write(
        options,
        f"trained-{subject.label}",
        f"{subject.title}, {subject.inside_title}: methods that need training of their own",
        lines,
        f"{protocol_of(subject, result, told)} Accuracies: {', '.join(accuracies)}. Published: ResNet-34."
        + "".join(f" {OTHER_FORMS[form]}" for form in OTHER_FORMS if any(form in name for name in columns)),
    )
    return lines


def form_of(label: str, weights: Path) -> str:
    """What follows a method's name if its network was trained in another form than the paper's."""
    if weights.suffix != ".safetensors":
        return ""
    settings = training.read(weights)[0].get("settings", {})
    if label == "prior_network" and settings.get("reverse"):
        return REVERSE
    return RANDOM if label == "semantic" and not settings.get("vectors") else ""


def _plain(method: str) -> str:
    """A column, as the published table calls it."""
    return method.removesuffix(REVERSE).removesuffix(RANDOM)


def check_labels(labels: Collection[str]) -> None:
    """There is a network, and every label is an objective."""
    if not labels:
        raise InputError(f"give --weights OBJECTIVE=FILE for some of {', '.join((PLAIN, *TRAINED))}")
    for label in labels:
        if label != PLAIN and label not in TRAINED:
            raise InputError(f"there is no objective '{label}': choose from {', '.join((PLAIN, *TRAINED))}")
