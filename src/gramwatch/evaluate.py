"""Evaluation: the paper's protocol, from a fitted detector and named sets of inputs to a table."""

import csv
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gramwatch.detector import GramDetector, Measurement
from gramwatch.deviation import TotalDeviation
from gramwatch.errors import CalibrationError, InputError
from gramwatch.metrics import METRICS, all_metrics


@dataclass(frozen=True)
class Row:
    """One detector on one out-of-distribution set: the mean of each figure over the draws, and its spread."""

    method: str
    ood: str
    examples: int
    mean: dict[str, float]
    spread: dict[str, float]
    """Standard deviation over the draws."""


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`. Prints as a table, in percent; exports to CSV, JSON and Markdown."""

    rows: tuple[Row, ...]
    protocol: str
    """In words: what was drawn from what, how often."""

    def __repr__(self) -> str:
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([*lines, self.protocol])

    def _table(self) -> list[list[str]]:
        short = {"tnr": "TNR@95", "auroc": "AUROC", "dtacc": "DTACC", "auin": "AUIN", "auout": "AUOUT"}
        table = [["out-of-distribution set", "method", *(short[key] for key in METRICS)]]
        for row in self.rows:
            figures = [f"{100 * row.mean[key]:.2f} ± {100 * row.spread[key]:.2f}" for key in METRICS]
            table.append([f"{row.ood} ({row.examples})", row.method, *figures])
        return table

    def to_markdown(self, path: str | PathLike[str] | None = None) -> str:
        """The table in Markdown, in percent; written to `path` if given."""
        head, *body = self._table()
        rule = ["---", "---", *["---:"] * len(METRICS)]
        lines = [
            "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, rule, *body)
        ]
        return _written("\n".join([*lines, "", self.protocol, ""]), path)

    def to_csv(self, path: str | PathLike[str] | None = None) -> str:
        """One line per row, fractions of one; written to `path` if given."""
        out = io.StringIO()
        fields = [f"{key}{suffix}" for key in METRICS for suffix in ("", "_spread")]
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["method", "ood", "examples", *fields])
        for row in self.rows:
            figures = [value for key in METRICS for value in (row.mean[key], row.spread[key])]
            writer.writerow([row.method, row.ood, row.examples, *figures])
        return _written(out.getvalue(), path)

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """All rows and the protocol, fractions of one; written to `path` if given."""
        value = {"protocol": self.protocol, "rows": [vars(row) for row in self.rows]}
        return _written(json.dumps(value, indent=2) + "\n", path)


def evaluate(
    detector: GramDetector,
    in_distribution: Iterable[Any],
    out_of_distribution: Mapping[str, Iterable[Any]],
    *,
    draws: int = 10,
    validation_share: float = 0.1,
    seed: int = 0,
    progress: bool = True,
) -> Evaluation:
    """Judge a fitted detector by the paper's protocol, with the maximum softmax probability beside it.

    In each draw a random tenth of the in-distribution test data sets E[delta_l]; the other nine tenths are
    compared with each out-of-distribution set. The detector itself, its calibration included, is unchanged:
    it need not be calibrated. "MSP" is the baseline of Hendrycks & Gimpel, from the same forward pass.

    Args:
        detector: fitted on training data.
        in_distribution: a loader of in-distribution test data, not used for training.
        out_of_distribution: loaders by name.
        draws: how many times to draw the validation data.
        validation_share: the share drawn.
        seed: of the draws.
        progress: show progress bars (on a terminal only).

    """
    if not out_of_distribution:
        raise InputError("there is no out-of-distribution set: give at least one, by name")
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    inside = detector.measure_all(in_distribution, "in-distribution", progress)
    sets = {
        name: detector.measure_all(loader, name, progress) for name, loader in out_of_distribution.items()
    }
    total = len(inside.finite)
    size = round(validation_share * total)
    if not 1 <= size < total:
        raise InputError(f"{total} in-distribution examples cannot be split into validation and test")
    figures: dict[tuple[str, str], list[dict[str, float]]] = {}
    generator = torch.Generator().manual_seed(seed)
    for _ in range(draws):
        order = torch.randperm(total, generator=generator)
        validation, test = order[:size], order[size:]
        deviation = _gram_total(detector, inside, validation)
        gram, msp = _gram(deviation, inside)[test], _msp(inside)[test]
        for name, outside in sets.items():
            figures.setdefault((name, "Gram"), []).append(all_metrics(gram, _gram(deviation, outside)))
            figures.setdefault((name, "MSP"), []).append(all_metrics(msp, _msp(outside)))
    rows = tuple(_row(method, name, len(sets[name].finite), each) for (name, method), each in figures.items())
    return Evaluation(
        rows,
        f"In-distribution: {total} examples; {draws} draws of {size} for validation and {total - size} for "
        f"test, seed {seed}; mean ± standard deviation over the draws, percent. No method saw an outlier.",
    )


def _gram_total(detector: GramDetector, inside: Measurement, validation: torch.Tensor) -> TotalDeviation:
    """The detector's total deviation, normalised by some of the in-distribution examples."""
    chosen = validation[inside.finite[validation]]
    if not len(chosen):
        raise InputError(f"all {len(validation)} in-distribution examples of a draw hold NaN or infinity")
    total = TotalDeviation(detector.normalise, detector.confidence)
    try:
        return total.fit(inside.deviations[chosen], inside.probability[chosen])
    except ValueError as error:
        raise CalibrationError(str(error)) from None


def _gram(total: TotalDeviation, measured: Measurement) -> torch.Tensor:
    score = total(measured.deviations, measured.probability)
    return torch.where(measured.finite, score, torch.inf)


def _msp(measured: Measurement) -> torch.Tensor:
    """Minus the maximum softmax probability; infinite where the network's output is not finite."""
    return torch.where(measured.finite, -measured.probability, torch.inf)


def _row(method: str, name: str, examples: int, figures: list[dict[str, float]]) -> Row:
    values = {key: np.array([each[key] for each in figures]) for key in METRICS}
    return Row(
        method,
        name,
        examples,
        {key: float(v.mean()) for key, v in values.items()},
        {key: float(v.std()) for key, v in values.items()},
    )


def _written(text: str, path: str | PathLike[str] | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
