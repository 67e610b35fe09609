"""Evaluation: a table of detectors and sets, by the paper's protocol.

Several detectors of one network share passes: `fit_together` fits them, `Together` measures sets. `judge`
takes a calibrated detector as it is, at its own level.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gramwatch.detect.calibrating import measured_all
from gramwatch.detect.detector import Detector
from gramwatch.detect.distributed import together
from gramwatch.detect.fitting import begin_on_ranks, check_adding, fit_all
from gramwatch.detect.measurement import AsMeasured, Measurement, Rule
from gramwatch.detect.passes import explained, leaves_of, measure, plan_for
from gramwatch.detect.progress import Fits
from gramwatch.detect.threshold import range_of_rates
from gramwatch.errors import CalibrationError, GramwatchError, InputError, warn
from gramwatch.files.sheets import as_cell
from gramwatch.files.writing import write_text
from gramwatch.inputs.batches import Inputs
from gramwatch.methods.msp import MSP
from gramwatch.numerics.metrics import METRICS, all_metrics, auroc
from gramwatch.observe.plan import Plan
from gramwatch.watch import Look

Measured = Mapping[str, Measurement]
"""The measurements of one set, by method."""


@dataclass(frozen=True)
class Row:
    """One detector on one out-of-distribution set: means and spreads over the draws."""

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
    """One sentence about the examples, the draws and the seed."""

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
        means = {(row.method, row.ood): row.mean[metric] for row in self.rows}
        return np.array([[means[method, name] for name in self.sets] for method in self.methods])

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
        """The rows in CSV, as fractions of one; written to `path` if given."""
        fields = [f"{key}{suffix}" for key in METRICS for suffix in ("", "_spread")]
        table: list[list[Any]] = [["method", "ood", "examples", *fields]]
        for row in self.rows:
            figures = [value for key in METRICS for value in (row.mean[key], row.spread[key])]
            table.append([as_cell(row.method), as_cell(row.ood), row.examples, *figures])
        return _as_csv(table, path)

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """The rows and the protocol in JSON, as fractions of one; written to `path` if given."""
        value = {"protocol": self.protocol, "rows": [vars(row) for row in self.rows]}
        return _written(json.dumps(value, indent=2) + "\n", path)


@dataclass(frozen=True)
class Share:
    """How many inputs of a set a detector flags."""

    name: str
    examples: int
    flagged: int
    low: float
    """The lower end of the 95 % confidence interval of the share (Clopper-Pearson)."""
    high: float
    """The upper end."""
    auroc: Mapping[str, float]
    """AUROC against the in-distribution set, by method; empty for that set itself."""

    @property
    def share(self) -> float:
        """The share of flagged inputs."""
        return self.flagged / self.examples


@dataclass(frozen=True)
class Judgement:
    """The result of `judge`. Prints as a table, in percent; exports to CSV and JSON as fractions of one."""

    rows: tuple[Share, ...]
    """The in-distribution set comes first."""
    level: float
    ranking: int
    """The number of calibration examples that rank."""

    @property
    def protocol(self) -> str:
        """What the figures are."""
        low, high = range_of_rates(self.ranking, self.level)
        return (
            f"As calibrated, at level {self.level:g}; {self.ranking:,} calibration examples rank. Of inputs "
            f"like those of the fit, at most {1 - self.level:.2%} are flagged on average, and from {low:.2%} "
            f"to {high:.2%} in nine of ten calibrations of this size. Shares with 95 % confidence intervals "
            "(Clopper-Pearson); AUROC against the first set, percent."
        )

    def __repr__(self) -> str:
        methods = list(self.rows[-1].auroc)
        table = [["set", "examples", "flagged", "95 % interval", f"AUROC: {methods[0]}", *methods[1:]]]
        for row in self.rows:
            interval = f"{100 * row.low:.1f} to {100 * row.high:.1f}"
            figures = [f"{100 * row.auroc[name]:.2f}" if row.auroc else "-" for name in methods]
            table.append([row.name, f"{row.examples:,}", f"{100 * row.share:.1f}", interval, *figures])
        return "\n".join([*_aligned(table, left=1), self.protocol])

    def to_csv(self, path: str | PathLike[str] | None = None) -> str:
        """The rows in CSV; written to `path` if given."""
        methods, first = list(self.rows[-1].auroc), ["set", "examples", "flagged", "low", "high"]
        table: list[list[Any]] = [[*first, *(f"auroc_{name}" for name in methods)]]
        for row in self.rows:
            figures = [row.auroc.get(name, "") for name in methods]
            table.append([row.name, row.examples, row.flagged, row.low, row.high, *figures])
        return _as_csv(table, path)

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """The rows in JSON; written to `path` if given."""
        value = {"level": self.level, "ranking": self.ranking, "rows": [vars(row) for row in self.rows]}
        return _written(json.dumps(value, indent=2) + "\n", path)


def judge(
    detector: Detector,
    in_distribution: Iterable[Any],
    out_of_distribution: Mapping[str, Iterable[Any]],
    *,
    progress: bool = True,
) -> Judgement:
    """Judge sets by a calibrated detector as it is: the share that it flags at its own level, and AUROC.

    `evaluate` follows the paper's protocol instead, which calibrates anew.

    Args:
        detector: a calibrated detector, such as a guard of a file.
        in_distribution: a loader of in-distribution test data, used neither to fit nor to calibrate.
        out_of_distribution: loaders by name.
        progress: show progress bars (on a terminal only).

    """
    detector.calibration()  # the error that says what is missing comes first
    by_name = beside(detector)
    with together(detector.model, "judge") as group:
        inside, sets = measured_sets(by_name, in_distribution, out_of_distribution, progress)
        return group.once(lambda: judge_measured(detector, inside, sets))


def judge_measured(
    detector: Detector, inside: Measured, sets: Mapping[str, Measured], name: str = "in-distribution"
) -> Judgement:
    """`judge` for measurements that exist already, by the names of `beside`.

    Args:
        detector: a calibrated detector.
        inside: the measurements of the in-distribution test data, by method.
        sets: the measurements of the out-of-distribution sets, by set.
        name: what the in-distribution test data are called in the table.

    """
    from scipy.stats import binomtest

    calibration, members = detector.calibration(), [member.title for member in detector.members.values()]
    columns = [detector.title, *members]

    def scores(measured: Measured) -> dict[str, Tensor]:
        own = calibration.rule(measured[detector.title])
        baseline = {key: measured[key].values[:, 0] for key in measured if key == MSP.record.title}
        return {key: own[:, i] for i, key in enumerate(columns)} | baseline

    def row(of_set: str, measured: Measured, is_inside: bool) -> Share:
        flagged = calibration.judged(measured[detector.title]).is_ood
        count, total = int(flagged.sum()), len(flagged)
        interval = binomtest(count, total).proportion_ci(0.95, method="exact")
        by_method = {} if is_inside else scores(measured)
        areas = {key: auroc(usual[key], values) for key, values in by_method.items()}
        return Share(of_set, total, count, float(interval.low), float(interval.high), areas)

    usual = scores(inside)
    rows = [row(name, inside, True), *(row(key, measured, False) for key, measured in sets.items())]
    return Judgement(tuple(rows), detector.level, len(calibration.scores))


def evaluate(
    detectors: Detector | Mapping[str, Detector],
    in_distribution: Iterable[Any],
    out_of_distribution: Mapping[str, Iterable[Any]],
    *,
    draws: int = 10,
    validation_share: float = 0.1,
    seed: int = 0,
    progress: bool = True,
    sharded: bool | None = None,
) -> Evaluation:
    """Judge fitted detectors of one network by the paper's protocol, in one pass over each set.

    A draw takes a random tenth of the in-distribution test data. This tenth sets E[delta_l] of Gram and
    standardises the members of a guard. The other nine tenths are compared with each out-of-distribution set,
    by every method alike. The detectors do not change. They need no calibration, and keep the one they have.

    Args:
        detectors: fitted detectors by name, or one fitted detector. With one `GramDetector` or `Guard`, the
            table also has "MSP", the baseline of Hendrycks & Gimpel, from the same forward pass. With one
            `Guard`, the table also has its members.
        in_distribution: a loader of in-distribution test data, not used for training.
        out_of_distribution: loaders by name.
        draws: how many times to draw the validation data.
        validation_share: the share of the in-distribution data in a draw.
        seed: the seed of the draws.
        progress: show progress bars (on a terminal only).
        sharded: of several processes, as for `Detector.fit`; it holds for all loaders.

    """
    if not out_of_distribution:
        raise InputError("there is no out-of-distribution set: give at least one, by name")
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    by_name = _by_name(detectors)
    with together(next(iter(by_name.values())).model, "evaluate") as group:
        inside, sets = measured_sets(by_name, in_distribution, out_of_distribution, progress, sharded)
        return group.once(
            lambda: evaluate_sets(
                by_name, inside, sets, draws=draws, validation_share=validation_share, seed=seed
            )
        )


def measured_sets(
    detectors: Mapping[str, Detector],
    in_distribution: Iterable[Any],
    out_of_distribution: Mapping[str, Iterable[Any]],
    progress: bool = True,
    sharded: bool | None = None,
) -> tuple[dict[str, Measurement], dict[str, dict[str, Measurement]]]:
    """The measurements of the in-distribution set and of the others, in one pass over each set."""
    shared = Together(detectors)
    inside = shared.measure(in_distribution, "in-distribution", progress, sharded)
    return inside, {
        name: shared.measure(loader, name, progress, sharded) for name, loader in out_of_distribution.items()
    }


def evaluate_sets(
    detectors: Mapping[str, Detector], inside: Measured, sets: Mapping[str, Measured], **draws: Any
) -> Evaluation:
    """`evaluate` for what these detectors measured. `draws`: the draws, as for `evaluate_measured`."""
    result = evaluate_measured(
        {name: inside[name] for name in detectors},
        sets,
        {name: _taught_rule(detector) for name, detector in detectors.items()},
        check=lambda name, rule: detectors[name].check_rule(rule),
        **draws,
    )
    return Evaluation(result.rows, f"{result.protocol} {_outliers_seen(detectors)}")


def _taught_rule(detector: Detector) -> Rule:
    """The unfitted rule, with the weights of the last rehearsal, if there was one."""
    rule: Rule = detector.rule()
    known = detector._calibration
    return rule if known is None else rule.taught_by(known.rule)


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
    """`evaluate` for measurements that exist already.

    Args:
        inside: the measurements of the in-distribution test data, by method.
        sets: the measurements of the out-of-distribution sets, by set.
        rules: the rules that turn measurements into scores, by method. They are fitted in each draw. The
            measurement of a method without a rule is its score.
        validation: the measurements of other in-distribution data, by method. If given, the rules are fitted
            to them, nothing is drawn, and all of `inside` is for test.
        draws: how many times to draw the validation data.
        validation_share: the share of the in-distribution data in a draw.
        seed: the seed of the draws.
        check: is called with the name and the fitted rule of every method, in the first draw.

    """
    figures: dict[tuple[str, str], list[dict[str, float]]] = {}
    total, size = _count(inside), 0
    if validation is None:
        drawn = draws_of(total, draws, validation_share, seed)
    else:
        drawn = iter([(torch.arange(_count(validation)), torch.arange(total))])
    for draw, (held_out, test) in enumerate(drawn):
        size = len(held_out)
        for method, measurement in inside.items():
            of_validation = measurement if validation is None else validation[method]
            rule = fitted_rule(rules.get(method, AsMeasured()), of_validation, held_out)
            if draw == 0:
                check(method, rule)

            def score(measurement: Measurement, rule: Rule = rule) -> torch.Tensor:
                return rule(measurement)[:, 0]

            scores = score(measurement)[test]
            for name, outside in sets.items():
                metrics = all_metrics(scores, score(outside[method]))
                figures.setdefault((name, method), []).append(metrics)
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


def fit_together(
    detectors: Mapping[str, Detector],
    loader: Iterable[Any],
    *,
    progress: bool = True,
    sharded: bool | None = None,
) -> None:
    """Fit several detectors of one network in one pass over the training data.

    A detector that is also a member of a guard is fitted once. `sharded` is as for `Detector.fit`.
    """
    for detector in detectors.values():
        check_adding(detector.leaves, checkpoint=False)
    leaves = leaves_of(detectors.values())
    with together(leaves[0].model, "fit_together") as group:
        begin_on_ranks(group, leaves)
        fit_all(list(detectors.values()), loader, progress, Fits(), sharded=sharded)
    for leaf in leaves_of(detectors.values()):
        if leaf.says_nothing and group.rank == 0:
            warn(f"{leaf.says_nothing}. Until then its score is the same for every input")


class Together:
    """Measures sets by several detectors in shared forward passes.

    Detectors that need passes of their own run them apart. The plan is built at the first batch and serves
    all sets.

    Args:
        detectors: fitted detectors of one network, by name.

    """

    def __init__(self, detectors: Mapping[str, Detector]) -> None:
        self._detectors = dict(detectors)
        self._sharing = {name: detector for name, detector in detectors.items() if not detector.alone}
        self._leaves = leaves_of(self._sharing.values())
        self._plan: Plan | None = None

    @torch.inference_mode()
    def measure(
        self, loader: Iterable[Any], doing: str, progress: bool = True, sharded: bool | None = None
    ) -> dict[str, Measurement]:
        """The measurements of one set, by detector, on the CPU."""
        network = next(iter(self._detectors.values())).network
        measurements = measured_all(network, loader, self._batch, doing, progress, sharded=sharded)
        return {name: measurements[name] for name in self._detectors}

    def _batch(self, inputs: Inputs) -> dict[str, Measurement]:
        """The measurements of one batch, by detector."""
        shared: dict[str, Measurement] = {}
        if self._leaves:
            if self._plan is None:
                with explained(self._leaves, inputs):
                    self._plan = plan_for(self._leaves, Look(self._leaves[0].network, inputs))
            sharing = measure(list(self._sharing.values()), self._leaves, self._plan.run(inputs))
            shared = dict(zip(self._sharing, sharing, strict=True))
        alone = {
            name: detector.measure(inputs) for name, detector in self._detectors.items() if detector.alone
        }
        return shared | alone


def draws_of(
    total: int, draws: int, validation_share: float = 0.1, seed: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The numbers of the validation examples and of the test examples, draw by draw."""
    size = round(validation_share * total)
    if not 1 <= size < total:
        raise InputError(f"{total} in-distribution examples cannot be split into validation and test")
    generator = torch.Generator().manual_seed(seed)
    for _ in range(draws):
        order = torch.randperm(total, generator=generator)
        yield order[:size], order[size:]


def _by_name(detectors: Detector | Mapping[str, Detector]) -> dict[str, Detector]:
    if isinstance(detectors, Detector):
        return beside(detectors)
    if not detectors:
        raise InputError("there is no detector: give at least one, by name")
    first = next(iter(detectors.values()))
    for name, detector in detectors.items():
        if detector.model is not first.model:
            raise InputError(f"'{name}' judges another network than the first: evaluate them apart")
    return dict(detectors)


def beside(detector: Detector) -> dict[str, Detector]:
    """A detector with its companions in tables: its members and the softmax baseline."""
    shown = {detector.title: detector} | {member.title: member for member in detector.members.values()}
    return shown | {MSP.record.title: MSP(detector.network)} if detector.stands_beside_baseline else shown


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


def fitted_rule(rule: Rule, inside: Measurement, validation: torch.Tensor) -> Rule:
    """The rule fitted to the finite validation examples."""
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
    values = {key: np.array([draw[key] for draw in figures]) for key in METRICS}
    return Row(
        method,
        name,
        examples,
        {key: float(v.mean()) for key, v in values.items()},
        {key: float(v.std()) for key, v in values.items()},
    )


def _aligned(table: list[list[str]], left: int) -> list[str]:
    """The lines of a table with a rule under its head. The first `left` columns are aligned to the left."""
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


def _as_csv(table: Iterable[Iterable[Any]], path: str | PathLike[str] | None) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(table)
    return _written(out.getvalue(), path)


def _written(text: str, path: str | PathLike[str] | None) -> str:
    if path is not None:
        write_text(path, text)
    return text
