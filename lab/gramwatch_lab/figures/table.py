"""The files that an experiment leaves: the CSV with its figures, and the words of its page."""

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from gramwatch.explain.frame import Words

SHOWN = ("tnr", "auroc", "dtacc")
"""The metrics that a CSV has."""
APART = "shown apart"
"""The note of a set that counts in no mean, and that pictures leave out."""


@dataclass(frozen=True)
class Cell:
    """One method on one set: figures in percent, by metric."""

    ood: str
    method: str
    ours: Mapping[str, float]
    """Empty where the data are not present."""
    published: Mapping[str, float]
    note: str = ""
    """Such as that the method was trained on images of the same source."""


def read_cells(path: str | PathLike[str]) -> list[Cell]:
    """The lines of a CSV."""
    with Path(path).open(encoding="utf-8", newline="") as file:
        return [
            Cell(
                line["ood"],
                line["method"],
                _figures(line, ""),
                _figures(line, "_published"),
                line.get("note", ""),
            )
            for line in csv.DictReader(file)
        ]


def by_method(cells: Iterable[Cell], metric: str) -> dict[str, dict[str, float]]:
    """One metric, by method and set; sets without data are left out."""
    table: dict[str, dict[str, float]] = {}
    for cell in cells:
        if metric in cell.ours:
            table.setdefault(cell.method, {})[cell.ood] = cell.ours[metric]
    return table


def read_words(page: str | PathLike[str]) -> Words:
    """What the page of an experiment says of it: its title, who saw outliers or was tuned, the protocol."""
    lines = [line for line in Path(page).read_text(encoding="utf-8").splitlines() if line.strip()]
    # The title, the command, the protocol.
    title, told = lines[0].lstrip("# "), lines[2]
    return Words.of(title, re.sub(r"\s*\d{4}-\d\d-\d\d, .*", "", told))


def _figures(line: Mapping[str, str], suffix: str) -> dict[str, float]:
    return {metric: float(value) for metric in SHOWN if (value := line.get(metric + suffix))}
