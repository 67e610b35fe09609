"""What the number of images to fit and to calibrate costs: the share of outliers that a guard finds at 5 %.

    python -m benchmarks.sample_sizes --data sets --weights weights

A guard with default settings of a network with ten classes is fitted on more and more training images, and
calibrated anew on test images drawn at random. The false-alarm rate holds for any number; the share of
outliers found does not. Takes about ten minutes on one core. Writes docs/results/sample_sizes.csv, and the
table into docs/howto/calibration.md.
"""

import argparse
import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.document import DOCS, filled
from gramwatch import Guard, datasets, networks
from gramwatch.measurement import Calibration, Measurement, calibration_needs

FITTED = (100, 250, 500, 1_000, 2_500, 5_000, 10_000)
"""Training images, of ten classes."""
CALIBRATED = (40, 100, 200, 500, 1_000, 2_000)
DRAWS = 40
"""Calibrations on images drawn at random, for each number."""
POOL = 3_000
"""Test images: those that do not calibrate are judged."""
OUTLIERS = 600
SETS = {
    "resnet20": ("cifar10", "resnet20_cifar10.pth", ("isun", "dtd_10_classes", "cifar100_subset")),
    "mnist_convnet": ("mnist", "mnist_convnet_baseline.pth", ("fashion_mnist", "kmnist")),
}
"""In-distribution, weights and outliers of each network."""
LEVEL = 0.95
FIELDS = ("network", "set", "fitted", "calibrated", "found", "low", "high")


def measured(name: str, data: Path, weights: Path) -> Iterator[dict[str, Any]]:
    """The rows of a network: the share found in each set, for every pair of numbers."""
    inside, file, outside = SETS[name]
    loaded = networks.load(name, weights / file)
    grey = True if len(loaded.mean) == 1 else None

    def images(which: str, split: str, count: int) -> Sequence[Tensor]:
        whole = datasets.load(which, data, split=split, count=count, grey=grey).images
        return [loaded.prepare(part) for part in whole.split(100)]

    train = torch.cat(list(images(inside, "train", max(FITTED))))
    pool = images(inside, "test", POOL)
    sets = {which: images(which, "test", OUTLIERS) for which in outside}
    guard, done = Guard(loaded.network, level=LEVEL), 0
    for fitted in FITTED:
        guard.fit(train[done:fitted].split(100), progress=False)
        done = fitted
        ordinary = guard.measure_all(pool, "measuring", False)
        outliers = {which: guard.measure_all(each, "measuring", False) for which, each in sets.items()}
        for calibrated in CALIBRATED:
            yield from _rows(guard, ordinary, outliers, name, fitted, calibrated)


def _rows(
    guard: Guard,
    ordinary: Measurement,
    outliers: dict[str, Measurement],
    name: str,
    fitted: int,
    calibrated: int,
) -> Iterator[dict[str, Any]]:
    """The mean share over draws, and what nine of ten draws lie between."""
    assert calibrated >= calibration_needs(LEVEL, split=True)
    shares: dict[str, list[float]] = {which: [] for which in ("ordinary", *outliers)}
    for draw in range(DRAWS):
        order = torch.randperm(len(ordinary), generator=torch.Generator().manual_seed(draw))
        calibration = Calibration.of(ordinary[order[:calibrated]], guard.rule(), LEVEL)
        judged = {"ordinary": ordinary[order[calibrated:]], **outliers}
        for which, each in judged.items():
            shares[which].append(float(calibration.judged(each)[2].double().mean()))
    for which, values in shares.items():
        shares_of = 100 * torch.tensor(values)
        low, high = shares_of.quantile(torch.tensor([0.05, 0.95])).tolist()
        figures = {"found": float(shares_of.mean()), "low": low, "high": high}
        rounded = {key: round(value, 1) for key, value in figures.items()}
        yield {"network": name, "set": which, "fitted": fitted, "calibrated": calibrated, **rounded}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the expanded sets")
    parser.add_argument("--weights", type=Path, required=True, help="the folder of the checkpoints")
    parser.add_argument("--output", type=Path, default=DOCS / "results" / "sample_sizes.csv")
    args = parser.parse_args()
    with args.output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for name in SETS:
            for row in measured(name, args.data, args.weights):
                writer.writerow(row)
                print(row, flush=True)


if __name__ == "__main__":
    main()
