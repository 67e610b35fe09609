"""Write the tables on photographs and on effort into docs/guard-study.md: `python -m benchmarks.photographs`.

They come from the CSVs in docs/results that `gramwatch study guard` and `gramwatch study effort` wrote.
"""

import csv
from collections.abc import Iterable
from pathlib import Path

from benchmarks.document import DOCS, filled
from gramwatch.report.across import GUARD, read

THIRD = "third rule: Gram + early Mahalanobis + class ratio + energy"
CLOSED = ("iSUN", "CIFAR-10", "SVHN", "Fashion-MNIST", "KMNIST")
LEAN, FULL = ("256", "24 spread", "1, 2, 4, 8"), ("", "all", "1 to 10")


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
    for folder in sorted((results / "scenes").iterdir()):
        (study,) = read(folder)
        closed = [ood for ood in study.kinds if ood.startswith(CLOSED)]
        best = study.best()
        cells = [f"{study.mean(GUARD):.2f}", f"{study.mean(THIRD):.2f}", f"{study.mean(best):.2f} ({best})"]
        if closed:
            of = {name: mean(study.figures[name][ood] for ood in closed) for name in study.figures}
            best = max(study.singles, key=lambda name: of[name])
            cells += [f"{of[GUARD]:.2f}", f"{of[THIRD]:.2f}", f"{of[best]:.2f} ({best})"]
        else:
            cells += ["", "", ""]
        lines.append(f"| {study.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def means_by_effort(path: Path, method: str) -> dict[tuple[str, str, str], float]:
    """The mean over kinds, by pixels, taps and orders."""
    found: dict[tuple[str, str, str], list[float]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["method"] == method:
                effort = (row["pixels"], row["taps"], row["orders"])
                found.setdefault(effort, []).append(float(row["auroc"]))
    return {effort: mean(values) for effort, values in found.items()}


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


def main() -> None:
    """Fill the page."""
    page = DOCS / "guard-study.md"
    generated = {"photographs": photographs(DOCS / "results"), "effort": effort(DOCS / "results")}
    page.write_text(filled(page.read_text(encoding="utf-8"), generated), encoding="utf-8")


if __name__ == "__main__":
    main()
