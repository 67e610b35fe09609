"""Out-of-distribution sets that need no data, and tables as they were written."""

import csv
from pathlib import Path

from gramwatch_lab.paper.sets import ood_sets

NOISE = [each for each in ood_sets("mnist") if each.name in ("gaussian", "bernoulli")]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
