"""Evaluation: the paper's protocol, from a fitted detector and named sets of inputs to a table."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gramwatch.detector import Detector, Together
from gramwatch.errors import CalibrationError, GramwatchError, InputError
from gramwatch.measurement import AsMeasured, Measurement, Rule
from gramwatch.methods.msp import MSP
from gramwatch.metrics import METRICS, all_metrics

Measured = Mapping[str, Measurement]
"""What each method measured of a set."""


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
        return "\n".join([*_aligned(self._table(), left=2), self.protocol])

    def _table(self) -> list[list[str]]:
        short = {"tnr": "TNR@95", "auroc": "AUROC", "dtacc": "DTACC", "auin": "AUIN", "auout": "AUOUT"}
        table = [["out-of-distribution set", "method", *(short[key] for key in METRICS)]]
        for row in self.rows:
            figures = [f"{100 * row.mean[key]:.2f} ± {100 * row.spread[key]:.2f}" for key in METRICS]
            table.append([f"{row.ood} ({row.examples})", row.method, *figures])
        return table

    @property
    def methods(self) -> list[str]:
        """The methods, in the order given."""
        return list(dict.fromkeys(row.method for row in self.rows))

    @property
    def sets(self) -> list[str]:
        """The out-of-distribution sets, in the order given."""
        return list(dict.fromkeys(row.ood for row in self.rows))

    def figures(self, metric: str = "auroc") -> np.ndarray:
        """One metric, methods x sets."""
        if metric not in METRICS:
            raise ValueError(f"there is no metric '{metric}', only {', '.join(METRICS)}")
        found = {(row.method, row.ood): row.mean[metric] for row in self.rows}
        return np.array([[found[method, name] for name in self.sets] for method in self.methods])

    def overview(self, metric: str = "auroc") -> str:
        """One metric as a table of methods x sets with the mean and the worst set, best mean first."""
        figures = 100 * self.figures(metric)
        table = [["method", *self.sets, "mean", "worst"]]
        for i in sorted(range(len(self.methods)), key=lambda i: -figures[i].mean()):
            cells = [f"{value:.2f}" for value in (*figures[i], figures[i].mean())]
            worst = int(figures[i].argmin())
            table.append([self.methods[i], *cells, f"{figures[i][worst]:.2f} ({self.sets[worst]})"])
        return "\n".join(_aligned(table, left=1))

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
    detectors: Detector | Mapping[str, Detector],
    in_distribution: Iterable[Any],
    out_of_distribution: Mapping[str, Iterable[Any]],
    *,
    draws: int = 10,
    validation_share: float = 0.1,
    seed: int = 0,
    progress: bool = True,
) -> Evaluation:
    """Judge fitted detectors of one network by the paper's protocol, in one pass over each set.

    In each draw a random tenth of the in-distribution test data sets E[delta_l] of Gram, and standardises the
    members of a guard; the other nine tenths are compared with each out-of-distribution set, by every method
    alike. The detectors themselves, their calibration included, are unchanged: they need not be calibrated.

    Args:
        detectors: fitted on training data: several, by name, or a single one. Beside a single `GramDetector`
            or `Guard` stands "MSP", the baseline of Hendrycks & Gimpel, from the same forward pass; beside a
            `Guard` its members, too.
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
    by_name = _by_name(detectors)
    together = Together(by_name)
    inside = together.measure(in_distribution, "in-distribution", progress)
    sets = {name: together.measure(loader, name, progress) for name, loader in out_of_distribution.items()}
    result = evaluate_measured(
        inside,
        sets,
        {name: detector.rule() for name, detector in by_name.items()},
        draws=draws,
        validation_share=validation_share,
        seed=seed,
        check=lambda name, rule: by_name[name].check_rule(rule),
    )
    return Evaluation(result.rows, f"{result.protocol} {_outliers_seen(by_name)}")


def evaluate_measured(
    inside: Measured,
    sets: Mapping[str, Measured],
    rules: Mapping[str, Rule],
    *,
    validation: Measured | None = None,
    draws: int = 10,
    validation_share: float = 0.1,
    seed: int = 0,
    check: Callable[[str, Any], None] = lambda name, rule: None,
) -> Evaluation:
    """`evaluate` of what was measured already.

    Args:
        inside: what each method measured of the in-distribution test data.
        sets: the same of each out-of-distribution set.
        rules: how what a method measured becomes its score, fitted anew in each draw. A method without a
            rule measured its score.
        validation: what each method measured of other in-distribution data, by which all rules are fitted.
            Nothing is drawn then: all of `inside` is for test.
        draws: as in `evaluate`, like the rest.
        validation_share: the share drawn.
        seed: of the draws.
        check: gets each method's name and its rule as fitted in the first draw.

    """
    figures: dict[tuple[str, str], list[dict[str, float]]] = {}
    total, size = _count(inside), 0
    if validation is None:
        drawn = _drawn(total, draws, validation_share, seed)
    else:
        drawn = iter([(torch.arange(_count(validation)), torch.arange(total))])
    for draw, (held_out, test) in enumerate(drawn):
        size = len(held_out)
        for method, measured in inside.items():
            of_validation = measured if validation is None else validation[method]
            rule = _fitted(rules.get(method, AsMeasured()), of_validation, held_out)
            if draw == 0:
                check(method, rule)

            def score(measured: Measurement, rule: Rule = rule) -> torch.Tensor:
                return rule(measured)[:, 0]

            scores = score(measured)[test]
            for name, outside in sets.items():
                found = all_metrics(scores, score(outside[method]))
                figures.setdefault((name, method), []).append(found)
    rows = tuple(
        _row(method, name, _count(sets[name]), figures[name, method]) for name in sets for method in inside
    )
    if validation is not None:
        return Evaluation(
            rows, f"In-distribution: {size} examples for validation and {total} for test, percent."
        )
    return Evaluation(
        rows,
        f"In-distribution: {total} examples; {draws} draws of {size} for validation and {total - size} for "
        f"test, seed {seed}; mean ± standard deviation over the draws, percent.",
    )


def scores_of_first_draw(
    method: str,
    inside: Measured,
    sets: Mapping[str, Measured],
    rules: Mapping[str, Rule],
    *,
    validation_share: float = 0.1,
    seed: int = 0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What `evaluate_measured` compares in its first draw: a method's scores of test data and sets."""
    validation, test = next(_drawn(_count(inside), 1, validation_share, seed))
    rule = _fitted(rules.get(method, AsMeasured()), inside[method], validation)
    scores = {name: rule(each[method])[:, 0] for name, each in sets.items()}
    return rule(inside[method])[test, 0], scores


def _drawn(
    total: int, draws: int, validation_share: float, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Which examples are for validation and which for test, draw by draw."""
    size = round(validation_share * total)
    if not 1 <= size < total:
        raise InputError(f"{total} in-distribution examples cannot be split into validation and test")
    generator = torch.Generator().manual_seed(seed)
    for _ in range(draws):
        order = torch.randperm(total, generator=generator)
        yield order[:size], order[size:]


def _by_name(detectors: Detector | Mapping[str, Detector]) -> dict[str, Detector]:
    if isinstance(detectors, Detector):
        shown = {detectors.title: detectors, **detectors.shown_beside()}
        return shown | {"MSP": MSP(detectors.network)} if detectors.stands_beside_baseline else shown
    if not detectors:
        raise InputError("there is no detector: give at least one, by name")
    first = next(iter(detectors.values()))
    for name, detector in detectors.items():
        if detector.model is not first.model:
            raise InputError(f"'{name}' judges another network than the first: evaluate them apart")
    return dict(detectors)


def _outliers_seen(detectors: Mapping[str, Detector]) -> str:
    trained = [name for name, detector in detectors.items() if detector.trained_on_outliers]
    if trained:
        return f"The network was trained with outliers ({', '.join(trained)}): every method had them."
    tuned = [name for name, detector in detectors.items() if detector.tuned_on_outliers]
    if not tuned:
        return "No method saw an outlier."
    return f"Tuned on outliers: {', '.join(tuned)}. No other method saw one."


def _count(measured: Measured) -> int:
    return len(next(iter(measured.values())))


def _fitted(rule: Rule, inside: Measurement, validation: torch.Tensor) -> Rule:
    """The rule fitted to some of the in-distribution examples."""
    if not rule.standardises:
        return rule
    chosen = inside[validation[inside.finite[validation]]]
    if not len(chosen):
        raise InputError(f"all {len(validation)} in-distribution examples of a draw hold NaN or infinity")
    try:
        return rule.fit(chosen)
    except GramwatchError:
        raise
    except ValueError as error:
        raise CalibrationError(str(error)) from None


def _row(method: str, name: str, examples: int, figures: list[dict[str, float]]) -> Row:
    values = {key: np.array([each[key] for each in figures]) for key in METRICS}
    return Row(
        method,
        name,
        examples,
        {key: float(v.mean()) for key, v in values.items()},
        {key: float(v.std()) for key, v in values.items()},
    )


def _aligned(table: list[list[str]], left: int) -> list[str]:
    """The lines of a table with a rule under its head; the first columns to the left, the rest right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def _written(text: str, path: str | PathLike[str] | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
