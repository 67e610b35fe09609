"""The study behind `Guard(effort="lean")`: how few pixels, tensors and orders of Gram a guard can do with.

Detectors measure Gram's deviations by tap and by order, over few pixels and over few channels. Every choice
of tensors and orders follows from their cells. Only Gram changes: the other members of the guard stay.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gramwatch.detect.joint import JointRule
from gramwatch.detect.measurement import Measurement, Rule
from gramwatch.errors import InputError
from gramwatch.evaluation.evaluate import Measured
from gramwatch.methods.gram import GramDetector
from gramwatch.methods.gram_rules import GramRule, MeanOfRoots
from gramwatch.methods.profile import ProfileRule
from gramwatch.numerics.deviation import TotalDeviation
from gramwatch.watch import Taps, find_taps
from gramwatch_lab.paper.beside import markdown
from gramwatch_lab.paper.experiment import Options, command, methods_of, surroundings
from gramwatch_lab.paper.guard_study import GRAM, GUARD, GUARDS_MEMBERS, PROFILE
from gramwatch_lab.paper.scenes import SceneSubject, apart_of, facts_of
from gramwatch_lab.paper.subject import MethodSpec

PIXELS = (64, 256)
ORDERS = {
    "1 to 10": tuple(range(1, 11)),
    "1, 2, 4, 8": (1, 2, 4, 8),
    "1, 2": (1, 2),
    "2": (2,),
}
CHANNELS = (256, 128, 64)
ALL, SPREAD, HALF = "all", "24 spread", "12 spread"
FULL = "all pixels"


@dataclass(frozen=True)
class Effort:
    """The part of the network that Gram reads."""

    pixels: int | None
    taps: str
    orders: str
    channels: int | None = None

    @property
    def title(self) -> str:
        """In words."""
        pixels = FULL if self.pixels is None else f"{self.pixels} pixels"
        channels = "" if self.channels is None else f", {self.channels} channels"
        return f"{pixels}{channels}, {self.taps} taps, orders {self.orders}"


EVERYTHING = Effort(None, ALL, "1 to 10")
EFFORTS = (
    EVERYTHING,
    *(Effort(pixels, taps, orders) for pixels in PIXELS for taps in (ALL, SPREAD, HALF) for orders in ORDERS),
    *(
        Effort(max(PIXELS), taps, orders, channels)
        for channels in CHANNELS
        for taps in (ALL, SPREAD)
        for orders in ("1 to 10", "1, 2, 4, 8")
    ),
)


@dataclass(frozen=True)
class Line:
    """The mean AUROC of one effort, in percent."""

    network: str
    effort: Effort
    method: str
    """Guard, or Gram alone."""
    kind: str
    sets: int
    auroc: float


def specs() -> list[MethodSpec]:
    """Gram by tap and order, over few pixels and channels."""
    return [*(_spec(pixels) for pixels in PIXELS), *(_spec(max(PIXELS), channels) for channels in CHANNELS)]


def _spec(pixels: int, channels: int | None = None) -> MethodSpec:
    settings = {"taps": "all", "pixels": pixels}
    if channels is None:
        return MethodSpec(f"by order {pixels}", "gram_by_order", settings)
    title = f"by order {pixels}, {channels} channels"
    return MethodSpec(title, "gram_by_order", {**settings, "channels": channels})


def run(options: Options) -> list[Line]:
    """Judge a guard, and Gram alone, with every effort."""
    subject = options.subject()
    methods = [m for m in methods_of(subject, "all", {"taps": "all"}) if m.title in GUARDS_MEMBERS]
    sets = [
        ood_set for ood_set in options.chosen_sets(subject.in_distribution) if subject.is_outlying(ood_set)
    ]
    measured = subject.measure([*methods, *specs()], sets)
    present = [ood_set for ood_set in sets if ood_set.title in measured]
    if not present:
        raise InputError(f"none of the sets is there: {options.sets or 'no data are present'}")
    first_batch = next(iter(subject.test_batches(present[0])))
    images = first_batch if isinstance(first_batch, Tensor) else first_batch[0]
    taps = find_taps(subject.network, images[:2], "all")
    spread = find_taps(subject.network, images[:2], "spread").names
    chosen = {ALL: set(taps.names), SPREAD: set(spread), HALF: set(spread[::2])}
    rules: dict[str, Rule] = {}
    for effort in EFFORTS:
        rules[f"{GUARD}: {effort.title}"] = JointRule({GRAM: MeanOfRoots(), PROFILE: ProfileRule()})
        rules[f"{GRAM}: {effort.title}"] = GramRule(TotalDeviation())
    result = subject.evaluate(
        {
            name: _WithEfforts(measurement, subject.network, taps, chosen)
            for name, measurement in measured.items()
        },
        rules,
    )
    facts = facts_of(subject, measured) if isinstance(subject, SceneSubject) else []
    apart = apart_of(facts) if facts else set()
    kinds = {fact.title: fact.kind for fact in facts} or {
        ood_set.title: "near" if ood_set.near else "far" for ood_set in sets
    }
    aurocs: dict[tuple[str, str], list[float]] = {}
    for row in result.rows:
        if row.ood not in apart:
            aurocs.setdefault((row.method, kinds[row.ood]), []).append(100 * row.mean["auroc"])
    lines = [
        Line(subject.label, effort, method, kind, len(values), sum(values) / len(values))
        for effort in EFFORTS
        for method in (GUARD, GRAM)
        for (title, kind), values in aurocs.items()
        if title == f"{method}: {effort.title}"
    ]
    _write(options, subject.label, subject.title, lines)
    return lines


class _WithEfforts(Mapping[str, Measurement]):
    """The measurements of a set by a guard and by Gram alone, with every effort. Computed on request."""

    def __init__(
        self, measured: Measured, network: torch.nn.Module, taps: Taps, chosen: Mapping[str, set[str]]
    ) -> None:
        self._measured, self._taps, self._chosen = measured, taps, chosen
        self._by_title = {effort.title: effort for effort in EFFORTS}
        self._names = [f"{method}: {title}" for title in self._by_title for method in (GUARD, GRAM)]
        self._at = {}
        for channels in (None, *CHANNELS):
            statistics = GramDetector(network, channels=channels).needs.statistics
            assert statistics is not None
            self._at[channels] = [statistics.at(tap) for tap in taps]

    def __getitem__(self, name: str) -> Measurement:
        method, _, title = name.partition(": ")
        gram = self._gram(self._by_title[title])
        if method == GRAM:
            return gram
        members = {member: self._measured[member] for member in GUARDS_MEMBERS}
        return Measurement.together({**members, GRAM: gram})

    def _gram(self, effort: Effort) -> Measurement:
        """The deviations of the chosen taps, summed over the chosen orders."""
        if effort.pixels is None:
            return self._measured[GRAM]
        by_order = self._measured[_spec(effort.pixels, effort.channels).title]
        columns, start = [], 0
        for tap, at in zip(self._taps, self._at[effort.channels], strict=True):
            own = by_order.values[:, start : start + len(at.orders)]
            start += len(at.orders)
            if tap.name in self._chosen[effort.taps]:
                # A vector has one order for all odd and one for all even ones: both count.
                vector = len(at.orders) < len(ORDERS["1 to 10"])
                use = [vector or order in ORDERS[effort.orders] for order in at.orders]
                columns.append(own[:, use].sum(1))
        return replace(by_order, values=torch.stack(columns, 1))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def means(lines: Sequence[Line], method: str) -> dict[Effort, float]:
    """The mean over kinds of one network, by effort."""
    aurocs: dict[Effort, list[float]] = {}
    for line in lines:
        if line.method == method:
            aurocs.setdefault(line.effort, []).append(line.auroc)
    return {effort: sum(values) / len(values) for effort, values in aurocs.items()}


def _write(options: Options, label: str, title: str, lines: Sequence[Line]) -> None:
    path = options.output / f"effort-{label}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ["network", "pixels", "channels", "taps", "orders", "method", "kind", "sets", "auroc"]
        )
        for line in lines:
            effort = line.effort
            what = [effort.pixels or "", effort.channels or "", effort.taps, effort.orders]
            writer.writerow([line.network, *what, line.method, line.kind, line.sets, f"{line.auroc:.4f}"])
    guard, gram = means(lines, GUARD), means(lines, GRAM)
    rows = [["effort", "Guard, mean AUROC", "against full effort", "Gram alone", "against full effort"]]
    for effort in sorted(guard, key=lambda effort: -guard[effort]):
        cells = [
            cell
            for by_effort in (guard, gram)
            for cell in (f"{by_effort[effort]:.2f}", f"{by_effort[effort] - by_effort[EVERYTHING]:+.2f}")
        ]
        rows.append([effort.title, *cells])
    table = markdown(rows)
    head = (
        f"## {title}: fewer pixels, channels, taps and orders\n\n    {command()}\n\n{surroundings(options)}"
    )
    path.with_suffix(".md").write_text(f"{head}\n\n{table}\n", encoding="utf-8")
    options.say(f"\n{table}")
