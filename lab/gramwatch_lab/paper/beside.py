"""Ours and the published figures side by side: as CSV, as Markdown, with a tally."""

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from statistics import mean

from gramwatch.evaluation.evaluate import Row
from gramwatch.numerics.metrics import METRICS
from gramwatch_lab.figures.table import APART
from gramwatch_lab.paper.published import SHOWN, Entry

ABSENT = "data not present"
SHORT = {"tnr": "TNR at TPR 95 %", "auroc": "AUROC", "dtacc": "detection accuracy"}
SETS = "out-of-distribution set"
"""The head of the first column, unless another one is given."""
SEEN = "auxiliary source seen"
"""The note of sets from the source of the outliers that a network was trained with."""
ROUNDING = 0.1
"""Two published figures with a smaller difference are one figure, rounded."""
PAR = 1.0
"""Points behind the best up to which the paper calls a method on par."""


@dataclass(frozen=True)
class Line:
    """One method on one set: our figures, and the published ones."""

    network: str
    in_distribution: str
    ood: str
    method: str
    ours: Row | None
    """None where the data are not present."""
    published: tuple[Entry, ...] = ()
    """The published figures. The first one is compared. Others are there if the paper contradicts itself."""
    like: str = ""
    """The published set, where ours is made in the same way but is not the same."""
    note: str = ""
    """A remark, such as that the method was trained on images of the same source."""
    summary: bool = False
    """Whether it sums up other lines, so that no tally counts it."""

    def our(self, metric: str) -> float | None:
        """Our figure, in percent."""
        return None if self.ours is None else 100 * self.ours.mean[metric]

    def their(self, metric: str) -> float | None:
        """The published figure, in percent."""
        return next((e.figures[metric] for e in self.published if metric in e.figures), None)

    def difference(self, metric: str) -> float | None:
        """Ours less the published one, in points."""
        ours, theirs = self.our(metric), self.their(metric)
        return None if ours is None or theirs is None else ours - theirs

    def contradicting(self, metric: str) -> list[Entry]:
        """Further published figures that differ from the first by more than rounding."""
        first = self.their(metric)
        return [
            e
            for e in self.published
            if first is not None and metric in e.figures and abs(e.figures[metric] - first) > ROUNDING
        ]

    def cell(self, metric: str) -> str:
        """For a table: ours, and in brackets the published figure and the difference."""
        ours, theirs, difference = self.our(metric), self.their(metric), self.difference(metric)
        shown = "" if ours is None else f"{ours:.2f}"
        if theirs is None:
            return shown
        also = "".join(f" or {_percent(entry.figures[metric])}" for entry in self.contradicting(metric))
        change = "" if difference is None else f", {difference:+.2f}"
        return f"{shown} ({_percent(theirs)}{also}{change})".strip()


def mean_line(lines: Sequence[Line], method: str) -> Line:
    """A method's mean over all sets that are present, and from no source that any network was trained on.

    No published mean stands beside it: those are over other sets.
    """
    seen = _seen(lines)
    own = [line for line in lines if line.method == method and not line.summary]
    rows = [line.ours for line in own if line.ours is not None and line.ood not in seen]
    means = {key: mean(row.mean[key] for row in rows) for key in METRICS if rows}
    whole = Row(method, "mean", len(rows), means, dict.fromkeys(METRICS, 0.0)) if rows else None
    title = f"mean, {SEEN} left out" if seen else "mean"
    return Line(own[0].network, own[0].in_distribution, title, method, whole, summary=True)


def _seen(lines: Iterable[Line]) -> set[str]:
    """The sets that do not count, because a network was trained on outliers of the same source."""
    return {line.ood for line in lines if line.note == SEEN}


def write_csv(path: str | PathLike[str], lines: Iterable[Line]) -> None:
    """One line per method and set, in percent: ours, its spread over the draws, published, difference."""
    fields = [f"{key}{suffix}" for key in SHOWN for suffix in ("", "_spread", "_published", "_difference")]
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = ["network", "in_distribution", "ood", "method", "images"]
        writer.writerow([*names, *fields, "published_set", "tables", "note"])
        for line in lines:
            figures: list[object] = []
            for key in SHOWN:
                spread = None if line.ours is None else 100 * line.ours.spread[key]
                figures += [line.our(key), spread, line.their(key), line.difference(key)]
            tables = "; ".join(f"{e.table}: {_plain(e)}" for e in line.published)
            images = ABSENT if line.ours is None else str(line.ours.examples)
            names = [line.network, line.in_distribution, line.ood, line.method, images]
            rounded = ["" if f is None else f"{f:.4f}" for f in figures]
            like = line.like or (line.published[0].ood if line.published else "")
            writer.writerow([*names, *rounded, like, tables, line.note])


def _plain(entry: Entry) -> str:
    return " / ".join(map(_percent, entry.figures.values()))


def _percent(value: float) -> str:
    """A published figure with as many decimals as it has, at least one."""
    return f"{value:.1f}" if round(value, 1) == value else f"{value:g}"


def markdown_tables(
    lines: Sequence[Line],
    metrics: Sequence[str] = SHOWN,
    tallied: bool = True,
    rows: str = SETS,
    whole: bool = True,
) -> str:
    """One table for each metric: sets x methods, each cell `ours (published, difference)`, and the tally.

    `whole` says that all images of each set were judged. If not, no set is the same files as published.
    """
    parts = [text for text in (same_files(lines, metrics),) if text and whole and rows == SETS]
    parts += [""] if parts else []
    for metric in metrics:
        parts += [
            f"### {SHORT[metric]}, percent: ours (published, difference)",
            "",
            _table(lines, metric, rows),
            "",
        ]
        counted = tally_in_words(lines, metric) if tallied else ""
        parts += [counted, ""] if counted else []
    notes = dict.fromkeys(
        f"{line.ood}: beside it stand the published figures of {line.like}, which is like it but not the same"
        for line in lines
        if line.like
    )
    notes |= dict.fromkeys(
        f"{line.method}, {line.ood}: {line.note}" for line in lines if line.note not in ("", APART)
    )
    notes |= dict.fromkeys(
        f"{line.ood}, {line.method}: the paper has {SHORT[metric]} "
        + " and ".join(
            f"{_percent(entry.figures[metric])} ({entry.table})"
            for entry in (line.published[0], *line.contradicting(metric))
        )
        for line in lines
        for metric in metrics
        if line.contradicting(metric)
    )
    return "\n".join([*parts, *(f"- {note}." for note in notes), ""])


def same_files(lines: Sequence[Line], metrics: Sequence[str] = SHOWN) -> str:
    """One line on the distance to the published figures, on sets of the same files. Empty without any."""
    told: dict[str, list[str]] = {}
    for line in lines:
        differences = [d for d in map(line.difference, metrics) if d is not None]
        inside = {entry.in_distribution for entry in line.published}
        if differences and not line.like and not line.summary and inside == {line.in_distribution}:
            points = " / ".join(f"{d:+.1f}" for d in differences)
            told.setdefault(line.ood, []).append(f"{line.method} {points}")
    sets = "; ".join(f"{ood}: {', '.join(methods)}" for ood, methods in told.items())
    names = " / ".join(SHORT[metric] for metric in metrics)
    return f"On the same files as published, ours less published, points of {names}: {sets}." if told else ""


def _table(lines: Sequence[Line], metric: str, head: str) -> str:
    methods = list(dict.fromkeys(line.method for line in lines))
    by_cell = {(line.ood, line.method): line for line in lines}
    rows = [[head, *methods]]
    for ood in dict.fromkeys(line.ood for line in lines):
        row = [by_cell.get((ood, method)) for method in methods]
        first = next(line for line in row if line is not None)
        images = f" ({first.ours.examples:,})" if first.ours else f": {ABSENT}"
        rows.append([f"{ood}{images}", *("" if line is None else line.cell(metric) for line in row)])
    return markdown([*rows, *(_mean_and_worst(lines, methods, metric) if head == SETS else [])])


def _mean_and_worst(lines: Sequence[Line], methods: Sequence[str], metric: str) -> list[list[str]]:
    """Each method's mean over the sets that are present, and its worst; none where lines sum up already.

    Sets from the source of outliers that a network was trained with do not count.
    """
    seen = _seen(lines)
    present: dict[str, list[float]] = {method: [] for method in methods}
    for line in lines:
        value = line.our(metric)
        if value is not None and line.ood not in seen:
            present[line.method].append(value)
    if any(line.summary for line in lines) or any(len(values) < 2 for values in present.values()):
        return []
    left_out = f", {SEEN} left out" if seen else ""
    summaries: dict[str, Callable[[list[float]], float]] = {"mean": mean, "worst": min}
    return [
        [f"**{name}{left_out}**", *(f"{summary(values):.2f}" for values in present.values())]
        for name, summary in summaries.items()
    ]


def markdown(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table in Markdown; the first row is its head, the first columns stand to the left."""
    head, *body = rows
    rule = ["---" if i < left else "---:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *body))


# --- tally -----------------------------------------------------------------------------------------------


def tally(lines: Sequence[Line], method: str, metric: str = "tnr", published: bool = False) -> list[int]:
    """The number of wins, ties and losses of a method against the best of the others on the same set.

    As the paper counts: ahead of all is a win, up to one point behind the best a tie, more a loss.
    """
    counts = [0, 0, 0]
    by_set: dict[tuple[str, str, str], dict[str, float]] = {}
    for line in lines:
        value = line.their(metric) if published else line.our(metric)
        if value is not None and not line.summary and not (published and line.like):
            key = (line.network, line.in_distribution, line.ood)
            by_set.setdefault(key, {})[line.method] = value
    for values in by_set.values():
        if method in values and len(values) > 1:
            best = max(value for name, value in values.items() if name != method)
            behind = best - values[method]
            counts[0 if behind < 0 else 1 if behind <= PAR else 2] += 1
    return counts


def tally_in_words(lines: Sequence[Line], metric: str) -> str:
    """The tally of every method, ours and as published, as a table; nothing for a single method."""
    methods = list(dict.fromkeys(line.method for line in lines))
    if len(methods) < 2:
        return ""
    rows = [["wins / ties / losses against the best of the others", "ours", "as published, on its sets"]]
    for method in methods:
        counts = [tally(lines, method, metric, published) for published in (False, True)]
        rows.append([method, *(" / ".join(map(str, c)) if sum(c) else "" for c in counts)])
    return markdown(rows)
