"""Out-of-distribution sets that need no data, and tables as they were written."""

import csv
from pathlib import Path

from gramwatch_lab.paper.sets import ood_sets

NOISE = [ood_set for ood_set in ood_sets("mnist") if ood_set.name in ("gaussian", "bernoulli")]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
