"""ASH, SCALE, ReAct and DICE at all published settings: mean AUROC on four networks.

    python -m lab.benchmarks.defaults --data sets --weights FOLDER

FOLDER holds the four checkpoints of `NETWORKS`. Fits on 1,500 images and tells 400 test images from 400 of
each of five sets. One pass serves all settings. Takes about four minutes on one core. Writes
docs/data/defaults.json, whose figures stand in docs/methods/defaults.md.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gramwatch import fit_together
from gramwatch.evaluation.evaluate import Together
from gramwatch.inputs import networks
from gramwatch.methods import ASH, DICE, SCALE, Energy, Method, ReAct
from gramwatch.numerics.metrics import auroc
from gramwatch_lab import datasets
from lab.benchmarks.measure import machine, save

NETWORKS = {
    "ResNet-20, CIFAR-10, 64 features": ("resnet20", "resnet20_cifar10.pth", "cifar10"),
    "ResNet-32, CIFAR-10, 64 features": ("resnet32", "resnet32_cifar10.pth", "cifar10"),
    "DenseNet, CIFAR-10, 342 features": ("densenet", "densenet_bc_100_12_cifar10.pth", "cifar10"),
    "DenseNet, CIFAR-100, 342 features": ("densenet", "densenet_bc_100_12_cifar100.pth", "cifar100_subset"),
}
SHAPED = (65, 75, 80, 85, 90, 95)
CLIPPED = (85, 90, 95, 99)
SPARSE = (0.3, 0.5, 0.7, 0.9)
TRAIN, TEST, BATCH = 1500, 400, 50


def detectors(network: nn.Module) -> dict[str, Method]:
    """Energy, and the methods at each setting."""
    shaped = {f"{m.record.title} {p}": m(network, percentile=p) for m in (ASH, SCALE) for p in SHAPED}
    clipped = {f"ReAct {p}": ReAct(network, percentile=p) for p in CLIPPED}
    return {
        "energy": Energy(network),
        **shaped,
        **clipped,
        **{f"DICE {p}": DICE(network, sparsity=p) for p in SPARSE},
    }


def images_of(data: str, inside: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Images to fit, images to test, and the sets they are told from."""
    other = "cifar10" if inside == "cifar100_subset" else "cifar100_subset"
    if inside == "cifar10":
        train = datasets.load("cifar10", data, split="train", count=TRAIN).images
        test = datasets.load("cifar10", data, split="test", count=TEST).images
    else:
        whole = datasets.load(inside, data, count=TEST + TRAIN).images
        train, test = whole[TEST:], whole[:TEST]
    outside = {
        how: datasets.load("tiny_imagenet", data, size=32, reduce=how, count=TEST).images
        for how in ("nearest", "antialiased")
    }
    names = ("dtd_10_classes", "svhn_subset", other)
    return train, test, outside | {name: datasets.load(name, data, count=TEST).images for name in names}


def measured(data: str, network: str, weights: Path, inside: str) -> dict[str, float]:
    """The mean AUROC over the sets, in percent, by setting."""
    loaded = networks.load(network, weights)
    train, test, outside = images_of(data, inside)
    fitted = detectors(loaded.network)
    fit_together(fitted, loaded.prepare(train).split(BATCH), progress=False)
    evaluation = Together(fitted)

    def scores(images: Tensor) -> dict[str, Tensor]:
        values = evaluation.measure(loaded.prepare(images).split(BATCH), "measured", progress=False)
        return {name: torch.as_tensor(value.values[:, 0]) for name, value in values.items()}

    within, beyond = scores(test), [scores(images) for images in outside.values()]
    return {
        name: sum(100 * auroc(within[name], other[name]) for other in beyond) / len(beyond) for name in fitted
    }


def page(result: dict[str, Any]) -> str:
    """The part of docs/methods/defaults.md that stands between the markers."""
    titles = list(result["networks"])
    lines = [f"| | {' | '.join(titles)} |", f"| --- |{' ---: |' * len(titles)}"]
    for name in result["networks"][titles[0]]:
        cells = " | ".join(f"{result['networks'][title][name]:.1f}" for title in titles)
        lines.append(f"| {name} | {cells} |")
    note = (
        f"Mean AUROC in percent: {result['test']} test images against {result['test']} of each of five sets"
    )
    return "\n".join([*lines, "", f"{note}, {result['train']:,} training images."])


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", required=True, help="the folder of the expanded sets")
    parser.add_argument("--weights", required=True, type=Path, help="the folder of the checkpoints")
    parser.add_argument("--output", type=Path, default=Path("docs/data/defaults.json"))
    args = parser.parse_args()
    auroc_of = {
        title: measured(args.data, network, args.weights / file, inside)
        for title, (network, file, inside) in NETWORKS.items()
    }
    result = {"kind": "defaults", **machine(torch.device("cpu")), "train": TRAIN, "test": TEST}
    save(args.output, result | {"networks": auroc_of})
    print(page(result | {"networks": auroc_of}))


if __name__ == "__main__":
    main()
