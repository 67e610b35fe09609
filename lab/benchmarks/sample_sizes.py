"""What the number of images to fit and to calibrate costs: the share of outliers that a guard finds at 5 %.

    python -m lab.benchmarks.sample_sizes --data sets --weights weights

A guard with default settings is fitted on more and more training images, and calibrated anew on test images
drawn at random. The rate of false alarms holds for any number. The share of outliers found does not.

Networks: ResNet-20 and a small convolutional network, with the weights that `--weights` holds, and an
EfficientNet-Lite0 of ImageNet (`efficientnet_lite0.safetensors`, timm's names) whose last layer is trained on
photographs of scenes, as transfer learning does. Takes about ten minutes on one core. Writes
docs/results/sample_sizes.csv, and its figures into docs/howto/calibration.md. Names of networks measure these
only; the rows of the others stay.
"""

import argparse
import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gramwatch import Guard
from gramwatch.detect.measurement import Calibration, Measurement
from gramwatch.inputs import networks
from gramwatch_lab import datasets
from lab.benchmarks import document
from lab.benchmarks.cells import DOCS

TABLE = DOCS / "results" / "sample_sizes.csv"
LEVEL = 0.95
BATCH = 100
DRAWS = 40
"""Calibrations on images drawn at random, for each number."""
FIELDS = ("network", "set", "fitted", "calibrated", "found", "low", "high")
"""`found`: the mean share over calibrations, in percent; nine of ten lie from `low` to `high`."""


@dataclass(frozen=True)
class Subject:
    """A network, its images, and the numbers that are compared."""

    model: nn.Module
    prepare: Callable[[Tensor], Tensor]
    inside: str
    outside: Mapping[str, str]
    """Sets and the split of each."""
    fitted: tuple[int, ...]
    calibrated: tuple[int, ...]
    pool: int
    """Test images. Those that do not calibrate are judged."""
    outliers: int
    size: int | None
    data: Path

    def images(self, name: str, split: str, count: int) -> Tensor:
        """Images as the network takes them."""
        grey = True if self.inside == "mnist" else None
        if name not in datasets.CATALOGUE:  # a folder of images
            name, split = str(self.data / name / split), "test"
        image_set = datasets.load(name, self.data, split=split, count=count, size=self.size, grey=grey)
        return self.prepare(image_set.images)


def resnet20(data: Path, weights: Path) -> Subject:
    """ResNet-20 on CIFAR-10."""
    loaded = networks.load("resnet20", weights / "resnet20_cifar10.pth")
    outside = {"isun": "test", "dtd_10_classes": "test", "cifar100_subset": "test"}
    return _small(loaded, "cifar10", outside, data)


def mnist_convnet(data: Path, weights: Path) -> Subject:
    """A small convolutional network on MNIST."""
    loaded = networks.load("mnist_convnet", weights / "mnist_convnet_baseline.pth")
    return _small(loaded, "mnist", {"fashion_mnist": "test", "kmnist": "test"}, data)


def _small(loaded: networks.Loaded, inside: str, outside: Mapping[str, str], data: Path) -> Subject:
    fitted, calibrated = (100, 250, 500, 1_000, 2_500, 5_000, 10_000), (40, 100, 200, 500, 1_000, 2_000)
    return Subject(
        loaded.network, loaded.prepare, inside, outside, fitted, calibrated, 3_000, 600, None, data
    )


def efficientnet_lite0(data: Path, weights: Path) -> Subject:
    """EfficientNet-Lite0 of ImageNet, with a last layer trained on scenes: transfer learning."""
    import timm
    from safetensors.torch import load_file

    model = timm.create_model("tf_efficientnet_lite0")
    model.load_state_dict(load_file(weights / "efficientnet_lite0.safetensors"))
    fitted, calibrated = (100, 250, 1_200), (40, 100, 200, 500)
    outside = {"imagenette": "val", "miniplaces_without_scenes": "val"}

    def prepare(images: Tensor) -> Tensor:
        return (images.float() - 127) / 128

    subject = Subject(model, prepare, "scenes", outside, fitted, calibrated, 600, 100, 128, data)
    whole = datasets.load("scenes", data, split="train", count=max(fitted), size=128)
    assert whole.labels is not None
    with torch.inference_mode():
        parts = prepare(whole.images).split(BATCH)
        features = torch.cat([model.forward_head(model.forward_features(x), pre_logits=True) for x in parts])
    model.classifier = _trained(features.clone(), whole.labels.long())
    model.eval()
    return subject


def _trained(features: Tensor, labels: Tensor) -> nn.Linear:
    """A last layer, by logistic regression."""
    torch.manual_seed(0)
    layer = nn.Linear(features.shape[1], int(labels.max()) + 1)
    optimiser = torch.optim.LBFGS(layer.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(layer(features), labels) + 1e-3 * layer.weight.square().sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    return layer


SUBJECTS: dict[str, Callable[[Path, Path], Subject]] = {
    subject.__name__: subject for subject in (resnet20, mnist_convnet, efficientnet_lite0)
}


def measured(name: str, subject: Subject) -> Iterator[dict[str, Any]]:
    """The rows of a network: the share found in each set, for every pair of numbers."""
    train = subject.images(subject.inside, "train", max(subject.fitted))
    pool = subject.images(subject.inside, "test", subject.pool).split(BATCH)
    outside = {
        name: subject.images(name, split, subject.outliers).split(BATCH)
        for name, split in subject.outside.items()
    }
    guard, done = Guard(subject.model, level=LEVEL), 0
    for fitted in subject.fitted:
        guard.fit(train[done:fitted].split(BATCH), progress=False)
        done = fitted
        ordinary = guard.measure_all(pool, "measuring", False)
        outliers = {
            which: guard.measure_all(measurement, "measuring", False)
            for which, measurement in outside.items()
        }
        for calibrated in subject.calibrated:
            numbers = {"network": name, "fitted": fitted, "calibrated": calibrated}
            for which, figures in _shares(guard, ordinary, outliers, calibrated).items():
                yield {**numbers, "set": which, **figures}


def _shares(
    guard: Guard, ordinary: Measurement, outliers: Mapping[str, Measurement], calibrated: int
) -> dict[str, dict[str, float]]:
    """The share flagged of each set: its mean over calibrations, and what nine of ten lie between."""
    shares: dict[str, list[float]] = {which: [] for which in ("ordinary", *outliers)}
    for draw in range(DRAWS):
        order = torch.randperm(len(ordinary), generator=torch.Generator().manual_seed(draw))
        calibration = Calibration.of(ordinary[order[:calibrated]], guard.rule(), LEVEL)
        judged = {"ordinary": ordinary[order[calibrated:]], **outliers}
        for which, measurement in judged.items():
            shares[which].append(100 * float(calibration.judged(measurement)[2].double().mean()))
    figures = {}
    for which, values in shares.items():
        mean, quantiles = sum(values) / DRAWS, torch.tensor(values).quantile(torch.tensor([0.05, 0.95]))
        figures[which] = {
            key: round(value, 1)
            for key, value in zip(("found", "low", "high"), (mean, *quantiles.tolist()), strict=True)
        }
    return figures


# --- what few images cost ----------------------------------------------------------------------------

CLASSES = {"resnet20": 10, "mnist_convnet": 10, "efficientnet_lite0": 6}
"""The number of classes of each network."""


def losses(rows: list[dict[str, str]], few: dict[int, Any], varied: str, kept: str) -> dict[int, int]:
    """How many of 100 outliers fewer are found with few images, for the set that suffers most.

    The keys of `few` are numbers of calibration images, or of training images of a class. A measured number
    counts for the largest key that is not above it. Compared is the largest number that was tried.
    """
    most: dict[int, int] = {}
    for network, which in {(row["network"], row["set"]) for row in rows} - {(n, "ordinary") for n in CLASSES}:
        mine = [row for row in rows if (row["network"], row["set"]) == (network, which)]
        full = max(int(row[kept]) for row in mine)
        shares = {int(row[varied]): float(row["found"]) for row in mine if int(row[kept]) == full}
        for number, share in shares.items():
            images = number if varied == "calibrated" else number / CLASSES[network]
            if key := max((key for key in few if key <= images), default=None):
                most[key] = max(most.get(key, 0), round(shares[max(shares)] - share))
    return dict(sorted(most.items()))


# --- the page ----------------------------------------------------------------------------------------

NAMES = {
    ("resnet20", "isun"): "ResNet-20, CIFAR-10: iSUN",
    ("resnet20", "cifar100_subset"): "ResNet-20, CIFAR-10: CIFAR-100",
    ("mnist_convnet", "kmnist"): "convnet, MNIST: KMNIST",
    ("efficientnet_lite0", "imagenette"): "EfficientNet-Lite0, scenes: objects",
    ("efficientnet_lite0", "miniplaces_without_scenes"): "EfficientNet-Lite0, scenes: other places",
}
"""The sets on the page. The file has more."""


def page(rows: list[dict[str, str]]) -> dict[str, str]:
    """The generated parts of the page: one number varies, the other is the largest that was tried."""
    return {
        "fitted": _table(rows, "fitted", "calibrated"),
        "calibrated": _table(rows, "calibrated", "fitted"),
    }


def _table(rows: list[dict[str, str]], varied: str, kept: str) -> str:
    heads = sorted({int(row[varied]) for row in rows})
    lines = [["outliers found at level 0.95", *(f"{n:,}" for n in heads)], ["---", *["---:"] * len(heads)]]
    for (network, which), title in NAMES.items():
        mine = [row for row in rows if (row["network"], row["set"]) == (network, which)]
        most = max((int(row[kept]) for row in mine), default=0)
        cells = {
            int(
                row[varied]
            ): f"{float(row['found']):.0f} % ({float(row['low']):.0f} to {float(row['high']):.0f})"
            for row in mine
            if int(row[kept]) == most
        }
        lines.append([title, *(cells.get(n, "") for n in heads)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def read(path: Path = TABLE) -> list[dict[str, str]]:
    """The rows of the file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"{', '.join(SUBJECTS)}; all if none")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the expanded sets")
    parser.add_argument("--weights", type=Path, required=True, help="the folder of the weights")
    args = parser.parse_args()
    for name in args.networks or SUBJECTS:
        kept = [row for row in read() if row["network"] != name] if TABLE.exists() else []
        new = list(measured(name, SUBJECTS[name](args.data, args.weights)))
        with TABLE.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows([*kept, *new])
    document.write()


if __name__ == "__main__":
    main()
