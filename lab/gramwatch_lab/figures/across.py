"""What holds across networks: `python -m gramwatch_lab.figures.across FOLDER STUDY ...`.

Each STUDY is a folder that `gramwatch study guard` wrote for one network. The tables and the picture show
Guard beside the best single method, network by network and kind by kind. A rule is also chosen without one
family of networks, or without one kind of outlier, and judged on what was left out: this says how well the
choice carries over.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from gramwatch.explain.frame import BAND, FAINT, INK, SMALL, SOFT, TEXT, Words, plain
from gramwatch.methods import METHODS
from gramwatch_lab.figures.looks import LOOKS, OTHER, Look, framed_with_legend, key
from gramwatch_lab.figures.table import APART

GRAM, GUARD = "Gram", "Guard"
KINDS = {"near": "near", "far": "far", "fault": "faults"}
LOST = 10.0
"""Faults that cost the network at least this many points of accuracy must be found."""
BEHIND = (0.3, 1.0)
"""Points of AUROC behind the best single method of a set."""
PROTOCOL = (
    "AUROC in percent. The mean of a network is that over kinds of outliers, the mean of a kind that over "
    "its sets. Networks of one architecture and one training set are one family. All families weigh the "
    "same. Controls, and faults that cost at most one point of accuracy, do not count. No method saw an "
    "outlier."
)


@dataclass(frozen=True)
class Study:
    """One network: the AUROC of every method and rule on every set that counts, in percent."""

    name: str
    family: str
    figures: Mapping[str, Mapping[str, float]]
    """By method, then by set."""
    kinds: Mapping[str, str]
    """The kind of each set: `near`, `far` or `fault`."""
    lost: Mapping[str, float]
    """The points of accuracy that a fault costs, by set."""

    @property
    def singles(self) -> list[str]:
        """The methods that are no rules."""
        known = {GRAM, *(method.record.title for method in METHODS.values())}
        return [name for name in self.figures if name in known]

    @property
    def rules(self) -> list[str]:
        """Guard, and the other ways to join."""
        return [name for name in self.figures if name not in self.singles]

    def mean(self, method: str, without: str = "") -> float:
        """The mean over kinds of outliers of the mean over their sets, without one kind if given."""
        kinds = [kind for kind in KINDS if kind in self.kinds.values() and kind != without]
        return _mean([self.mean_of(method, kind) for kind in kinds])

    def mean_of(self, method: str, kind: str) -> float:
        """The mean over the sets of one kind."""
        return _mean([self.figures[method][ood] for ood, of_set in self.kinds.items() if of_set == kind])

    def best(self) -> str:
        """The single method with the highest mean."""
        return max(self.singles, key=self.mean)

    def best_of(self, kind: str) -> str:
        """The single method with the highest mean over the sets of one kind."""
        return max(self.singles, key=lambda name: self.mean_of(name, kind))

    def best_on(self, ood: str) -> str:
        """The single method with the highest AUROC on one set."""
        return max(self.singles, key=lambda name: self.figures[name][ood])


def read(folder: str | PathLike[str]) -> list[Study]:
    """The networks of a folder that `gramwatch study guard` wrote."""
    tables = sorted(Path(folder).glob("guard-*.csv"))
    if not tables:
        raise FileNotFoundError(
            f"{folder} has no guard-*.csv: run gramwatch study guard with --output {folder}"
        )
    return [_study(path, Path(folder).name) for path in tables]


def _study(path: Path, name: str) -> Study:
    figures: dict[str, dict[str, float]] = {}
    family = ""
    for line in _lines(path):
        family = f"{line['network']}, {line['in_distribution'].split(' without')[0]}"
        if line["auroc"] and line.get("note") != APART:
            figures.setdefault(line["method"], {})[line["ood"]] = float(line["auroc"])
    facts = path.with_name(path.name.replace("guard-", "sets-", 1))
    known = {line["ood"]: line for line in _lines(facts)} if facts.exists() else {}
    sets = next(iter(figures.values()))
    kinds = {ood: known[ood]["kind"] if ood in known else _kind(ood) for ood in sets}
    lost = {ood: float(known[ood]["lost"]) for ood in sets if ood in known and known[ood]["lost"]}
    return Study(name, family, figures, kinds, lost)


def _kind(ood: str) -> str:
    """The kind of a set that judges networks of small images. CIFAR's sets are near each other."""
    return "near" if ood.startswith("CIFAR") else "far"


def _lines(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# --- a choice, and what was left out ---------------------------------------------------------------------


def over_families(studies: Sequence[Study], method: str, *, kind: str = "", without: str = "") -> float:
    """The mean over families of the mean over their networks: of one kind, or without one kind, if given."""
    families: dict[str, list[float]] = {}
    for study in studies:
        figure = study.mean_of(method, kind) if kind else study.mean(method, without)
        families.setdefault(study.family, []).append(figure)
    return _mean([_mean(values) for values in families.values()])


def shared_rules(studies: Sequence[Study]) -> list[str]:
    """The rules that every network has."""
    return [rule for rule in studies[0].rules if all(rule in study.figures for study in studies)]


@dataclass(frozen=True)
class LeftOut:
    """A rule chosen without one family or one kind, on what was left out."""

    what: str
    chosen: str
    auroc: float
    """The AUROC of the chosen rule there."""
    guard: float
    single: float
    """The AUROC there of the single method that is best without it."""
    best_single: str


def left_out(studies: Sequence[Study]) -> list[LeftOut]:
    """Leave out one family, then one kind, at a time."""
    cases = []
    for family in dict.fromkeys(study.family for study in studies):
        rest = [study for study in studies if study.family != family]
        if rest:
            own = [study for study in studies if study.family == family]
            cases.append(_judged(family, rest, own))
    for kind, title in KINDS.items():
        own = [study for study in studies if kind in study.kinds.values()]
        if own and any(other != kind for study in studies for other in study.kinds.values()):
            cases.append(_judged(title, studies, own, kind))
    return cases


def _judged(what: str, rest: Sequence[Study], own: Sequence[Study], kind: str = "") -> LeftOut:
    """The rule and the single method that are best on the rest, without `kind`, judged on their own."""
    every = [*rest, *own]
    singles = [name for name in every[0].singles if all(name in study.figures for study in every)]
    rule, single = (
        max(names, key=lambda name: over_families(rest, name, without=kind))
        for names in (shared_rules(every), singles)
    )
    auroc, guard, best = (over_families(own, name, kind=kind) for name in (rule, GUARD, single))
    return LeftOut(what, rule, auroc, guard, best, single)


@dataclass(frozen=True)
class Pair:
    """Guard and the best single method of one set, for one network."""

    network: str
    ood: str
    kind: str
    guard: float
    best: float
    best_single: str

    @property
    def behind(self) -> float:
        """Points of AUROC that Guard is behind; negative where it is ahead."""
        return self.best - self.guard


def pairs_of(studies: Sequence[Study]) -> list[Pair]:
    """All networks x sets, where Guard is furthest behind first."""
    pairs = []
    for study in studies:
        for ood, kind in study.kinds.items():
            best, figures = study.best_on(ood), study.figures
            pairs.append(Pair(study.name, ood, kind, figures[GUARD][ood], figures[best][ood], best))
    return sorted(pairs, key=lambda pair: -pair.behind)


# --- tables ------------------------------------------------------------------------------------------


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *body))


def tables_of(studies: Sequence[Study], most: int = 10) -> str:
    """All tables, in Markdown."""
    kinds = [kind for kind in KINDS if any(kind in study.kinds.values() for study in studies)]
    heads = (f"{KINDS[kind]}: Guard, best" for kind in kinds)
    by_network = [["network", *heads, "mean: Guard", "best single method"]]
    for study in studies:
        best = study.best()
        cells = [_beside(study, kind) for kind in kinds]
        means = [f"{study.mean(GUARD):.2f}", f"{study.mean(best):.2f} ({best})"]
        by_network.append([study.name, *cells, *means])
    of_rules = {rule: over_families(studies, rule) for rule in shared_rules(studies)}
    ranked = sorted(of_rules, key=lambda rule: -of_rules[rule])
    rules = [
        ["rule", "mean over families"],
        *([f"**{rule}**" if rule == GUARD else rule, f"{of_rules[rule]:.2f}"] for rule in ranked),
    ]
    without = [["left out", "chosen without it", "its AUROC there", "Guard", "best single without it"]]
    for case in left_out(studies):
        single = f"{case.single:.2f} ({case.best_single})"
        without.append([case.what, case.chosen, f"{case.auroc:.2f}", f"{case.guard:.2f}", single])
    pairs = pairs_of(studies)
    shares = [
        f"Guard is at most {points} points behind the best single method of the set on "
        f"{sum(pair.behind <= points for pair in pairs)} of {len(pairs)} pairs of a network and a set."
        for points in BEHIND
    ]
    worst = [["network", "set", "Guard", "best single method", "behind"]]
    for pair in pairs[:most]:
        best = f"{pair.best:.1f} ({pair.best_single})"
        worst.append([pair.network, pair.ood, f"{pair.guard:.1f}", best, f"{pair.behind:.1f}"])
    parts = [
        PROTOCOL,
        "## By network and kind",
        _table(by_network),
        "## Rules",
        _table(rules),
        "## Chosen without one family, or one kind",
        _table(without),
        "## Where Guard is behind",
        " ".join(shares),
        _table(worst),
    ]
    costly = _costly(studies)
    if costly:
        parts += [f"## Faults that cost {LOST:g} points of accuracy or more", _table(costly)]
    return "\n\n".join(parts) + "\n"


def _beside(study: Study, kind: str) -> str:
    """Guard and the best single method of a kind; empty if the network has no such set."""
    if kind not in study.kinds.values():
        return ""
    best = study.best_of(kind)
    return f"{study.mean_of(GUARD, kind):.1f}, {study.mean_of(best, kind):.1f} ({best})"


def _costly(studies: Sequence[Study]) -> list[list[str]]:
    """By family, the mean AUROC of Guard on faults that cost much accuracy."""
    families: dict[str, list[float]] = {}
    for study in studies:
        for ood, lost in study.lost.items():
            if study.kinds[ood] == "fault" and lost >= LOST:
                families.setdefault(study.family, []).append(study.figures[GUARD][ood])
    if not families:
        return []
    rows = [[family, str(len(values)), f"{_mean(values):.2f}"] for family, values in families.items()]
    return [["family", "pairs of a network and a fault", "mean AUROC of Guard"], *rows]


def write_pairs(path: str | PathLike[str], pairs: Sequence[Pair]) -> None:
    """All pairs as CSV."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["network", "ood", "kind", "guard", "best", "best_single", "behind"])
        for pair in pairs:
            figures = [f"{value:.4f}" for value in (pair.guard, pair.best, pair.behind)]
            writer.writerow([pair.network, pair.ood, pair.kind, *figures[:2], pair.best_single, figures[2]])


# --- the picture -------------------------------------------------------------------------------------

WORDS = Words("Guard and the best single method, by network and kind of outlier", "No method saw an outlier.")
CAPTION = (
    "Mean AUROC in percent over the sets of a kind. The best single method is that of each network and kind, "
    "and is chosen by the outliers themselves."
)


def draw_across(path: str | PathLike[str], studies: Sequence[Study]) -> None:
    """Draw a panel for each kind, a row for each network."""
    kinds = [kind for kind in KINDS if any(kind in study.kinds.values() for study in studies)]
    looks = {"best single method": Look(OTHER, "D"), GUARD: LOOKS[GUARD]}
    legend = [key(look, name, markersize=6) for name, look in looks.items()]
    height = 0.3 * len(studies) + 0.7
    frame = framed_with_legend(WORDS, height, 1, len(kinds), legend=legend, caption=CAPTION, sharey=True)
    for axes, kind in zip(frame.axes[0], kinds, strict=True):
        plain(axes)
        for y, study in enumerate(studies):
            if y % 2 == 0:
                axes.axhspan(y - 0.5, y + 0.5, color=BAND, zorder=0)
            if kind not in study.kinds.values():
                continue
            best = study.best_of(kind)
            ends = study.mean_of(best, kind), study.mean_of(GUARD, kind)
            axes.plot(ends, (y, y), color=FAINT, lw=2, zorder=1)
            for value, (name, look) in zip(ends, looks.items(), strict=True):
                axes.plot(value, y, look.mark, color=look.colour, ms=7 if name == GUARD else 5, zorder=3)
        axes.set_title(KINDS[kind], fontsize=TEXT, color=INK, loc="left")
        axes.set_ylim(len(studies) - 0.5, -0.5)
        axes.tick_params(labelsize=SMALL, colors=SOFT)
    frame.axes[0][0].set_yticks(range(len(studies)), [study.name for study in studies])
    frame.write(path)


def main(arguments: Sequence[str]) -> None:
    """Write across.md, across.csv and across.png."""
    if len(arguments) < 2:
        raise SystemExit(f"usage: python -m gramwatch_lab.figures.across FOLDER STUDY ...\n\n{__doc__}")
    folder, *names = arguments
    try:
        studies = [study for name in names for study in read(name)]
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from None
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "across.md").write_text(f"# Across networks\n\n{tables_of(studies)}", encoding="utf-8")
    write_pairs(Path(folder) / "across.csv", pairs_of(studies))
    draw_across(Path(folder) / "across.png", studies)


if __name__ == "__main__":
    main(sys.argv[1:])
