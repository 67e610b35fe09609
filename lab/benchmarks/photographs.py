"""Write the tables of Guard's fourth rule into docs/guard-study.md.

    python -m lab.benchmarks.photographs                   # from what docs/results holds
    python -m lab.benchmarks.photographs studies/vit_0     # first adopt what a study wrote for one network

Studies are adopted without the columns that no table needs. The folder's name is the network's. Studies of
networks that were trained on scenes go to docs/results/scenes, those of ResNet-18 for CIFAR-10 to
docs/results/openood, those of others to docs/results/cifar. What `gramwatch study effort` wrote goes to
docs/results/effort.
"""

import csv
import shutil
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import stdev

from gramwatch_lab.figures.across import GUARD, Study, read
from lab.benchmarks import document
from lab.benchmarks.cells import DOCS, Cells

THIRD = "third rule: Gram + early Mahalanobis + class ratio + energy"
CLOSED = ("iSUN", "CIFAR-10", "SVHN", "Fashion-MNIST", "KMNIST")
LEAN, FULL = ("256", "128", "24 spread", "1, 2, 4, 8"), ("", "", "all", "1 to 10")
OPENOOD = {
    "near": ("CIFAR-100 subset", "Tiny ImageNet, anti-aliased"),
    "far": ("MNIST", "SVHN, first 1,083 training images", "DTD, 10 classes", "MiniPlaces, anti-aliased"),
}
"""Our sets that are like those of OpenOOD's benchmark for CIFAR-10."""
PUBLISHED = {"KNN": (90.6, 93.0)}
"""Near and far means of OpenOOD's leaderboard, by our names of the methods."""
COLUMNS = ("network", "in_distribution", "ood", "method", "images", "tnr", "auroc", "note")
"""The columns that are kept."""


def adopt(folder: Path, results: Path) -> None:
    """Copy what a study wrote for one network, without the columns that no table needs."""
    (study,) = read(folder)
    (table,) = folder.glob("guard-*.csv")
    kinds = {"scenes": "scenes", "ResNet-18, CIFAR-10": "openood"}
    target = results / next((kinds[k] for k in kinds if k in study.family), "cifar") / folder.name
    target.mkdir(parents=True, exist_ok=True)
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    with (target / table.name).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for path in folder.glob("sets-*.csv"):
        shutil.copy(path, target)
    for path in folder.glob("effort-*.csv"):
        shutil.copy(path, results / "effort")


def studies_of(results: Path, kind: str) -> list[Study]:
    """The adopted studies: `scenes`, `cifar` or `openood`."""
    return [
        replace(study, figures=Cells(study.figures, f"docs/results/{kind}/{folder.name}"))
        for folder in sorted((results / kind).iterdir())
        for study in read(folder)
    ]


def mean(values: Iterable[float]) -> float:
    """The mean."""
    listed = list(values)
    return sum(listed) / len(listed)


def photographs(results: Path) -> str:
    """Guard, the third rule and the best single method on every network."""
    lines = [
        "| network | Guard | third rule | best single method | sets that stayed closed: Guard | third rule "
        "| best single method |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for study in studies_of(results, "scenes"):
        best, (ours, theirs, closed) = study.best(), on_closed_sets(study)
        cells = [f"{study.mean(GUARD):.2f}", f"{study.mean(THIRD):.2f}", f"{study.mean(best):.2f} ({best})"]
        third = mean(study.figures[THIRD][ood] for ood in study.kinds if ood.startswith(CLOSED))
        cells += [f"{ours:.2f}", f"{third:.2f}", f"{theirs:.2f} ({closed})"]
        lines.append(f"| {study.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def on_closed_sets(study: Study) -> tuple[float, float, str]:
    """The means of Guard and of the best single method over the sets that stayed closed, and its name."""
    sets = [ood for ood in study.kinds if ood.startswith(CLOSED)]
    of = {name: mean(study.figures[name][ood] for ood in sets) for name in (GUARD, *study.singles)}
    best = max(study.singles, key=lambda name: of[name])
    return of[GUARD], of[best], best


def small_images(results: Path) -> str:
    """The fourth rule beside the third on CIFAR networks: means over far and near sets."""
    lines = [
        "| network | Guard, far | third rule | near | third rule | best single method's mean "
        "| behind the best of a set by at most |",
        "| --- |" + " ---: |" * 6,
    ]
    for study in studies_of(results, "cifar"):
        cells = [f"{study.mean_of(rule, kind):.2f}" for kind in ("far", "near") for rule in (GUARD, THIRD)]
        best = study.best()
        cells += [f"{study.mean(best):.2f} ({best})", f"{max(behind(study).values()):.2f}"]
        lines.append(f"| {study.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def on_openood(results: Path, method: str) -> dict[str, tuple[float, float]]:
    """Near and far: the mean over the networks of the mean over the sets, and the standard deviation."""
    figures = {}
    for kind, sets in OPENOOD.items():
        of = [mean(study.figures[method][ood] for ood in sets) for study in studies_of(results, "openood")]
        figures[kind] = (mean(of), stdev(of))
    return figures


def openood(results: Path, most: int = 10) -> str:
    """Guard and the best single methods on sets like OpenOOD's, by the sum of near and far."""
    studies = studies_of(results, "openood")
    of = {name: on_openood(results, name) for name in (GUARD, *studies[0].singles)}
    names = sorted(studies[0].singles, key=lambda name: -sum(value for value, _ in of[name].values()))
    lines = ["| method | near | far | published: near | far |", "| --- |" + " ---: |" * 4]
    of |= {name: on_openood(results, name) for name in (THIRD, "Guard + KNN")}
    for name in (GUARD, "Guard + KNN", THIRD, *names[:most]):
        cells = [f"{value:.2f} ± {spread:.2f}" for value, spread in of[name].values()]
        cells += [f"{value}" for value in PUBLISHED.get(name, ("", ""))]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def behind(study: Study) -> dict[str, float]:
    """How far Guard is behind the best single method of each set."""
    return {ood: study.figures[study.best_on(ood)][ood] - study.figures[GUARD][ood] for ood in study.kinds}


Effort = tuple[str, str, str, str]


def means_by_effort(path: Path, method: str) -> dict[Effort, float]:
    """The mean over kinds, by pixels, channels, taps and orders."""
    aurocs: dict[Effort, list[float]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["method"] == method:
                effort = (row["pixels"], row["channels"], row["taps"], row["orders"])
                aurocs.setdefault(effort, []).append(float(row["auroc"]))
    means = {effort: mean(values) for effort, values in aurocs.items()}
    return Cells(means, f"docs/results/effort/{path.name}, {method}")


def effort(results: Path) -> str:
    """What lean costs in quality."""
    lines = [
        "| network | Guard, full effort | lean | difference | Gram alone, full effort | lean | difference |",
        "| --- |" + " ---: |" * 6,
    ]
    for path in sorted((results / "effort").glob("*.csv")):
        cells = []
        for method in (GUARD, "Gram"):
            of = means_by_effort(path, method)
            cells += [f"{of[FULL]:.2f}", f"{of[LEAN]:.2f}", f"{of[LEAN] - of[FULL]:+.2f}"]
        lines.append(f"| {path.stem.removeprefix('effort-')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def blocks() -> dict[str, str]:
    """The blocks of docs/guard-study.md."""
    results = DOCS / "results"
    return {
        "photographs": photographs(results),
        "small": small_images(results),
        "openood": openood(results),
        "effort": effort(results),
    }


def main() -> None:
    """Adopt the studies that are given, and write the pages."""
    for folder in sys.argv[1:]:
        adopt(Path(folder), DOCS / "results")
    document.write()


if __name__ == "__main__":
    main()
