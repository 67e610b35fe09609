"""ReAct on the DenseNet: AUROC by the percentile at which features are clipped.

    python -m lab.benchmarks.react --data sets --weights densenet_bc_100_12_cifar10.pth

Fits on CIFAR-10 training images and tells CIFAR-10 test images from Tiny ImageNet, reduced in two ways. One
pass over the images serves all percentiles. Takes about a minute. Writes docs/data/react.json, whose figures
stand in docs/methods/react.md.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from gramwatch import fit_together
from gramwatch.evaluation.evaluate import Together
from gramwatch.inputs import networks
from gramwatch.methods import Energy, Method, ReAct
from gramwatch.numerics.metrics import auroc
from gramwatch_lab import datasets
from lab.benchmarks.measure import densenet_arguments, machine, save

PERCENTILES = (99, 95, 90, 85)
SETS = {"nearest": "Tiny ImageNet, nearest", "antialiased": "Tiny ImageNet, anti-aliased"}
BATCH = 50


def detectors(network: nn.Module) -> dict[str, Method]:
    """Energy, and ReAct at each percentile."""
    clipped = {
        f"percentile {percentile}": ReAct(network, percentile=percentile) for percentile in PERCENTILES
    }
    return {"energy, nothing clipped": Energy(network), **clipped}


def rows(methods: dict[str, Method], scores: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each detector: where it clips, and its AUROC in percent on each set."""
    inside = scores["inside"]
    return [
        {
            "variant": name,
            "clip": float(detector.clip_)
            if isinstance(detector, ReAct) and detector.clip_ is not None
            else None,
            **{title: 100 * auroc(inside[name], scores[title][name]) for title in SETS.values()},
        }
        for name, detector in methods.items()
    ]


def page(result: dict[str, Any]) -> str:
    """The part of docs/methods/react.md that stands between the markers."""
    lines = [f"| | c | {' | '.join(SETS.values())} |", "| --- | ---: | ---: | ---: |"]
    best = {title: max(row[title] for row in result["rows"]) for title in SETS.values()}
    for row in result["rows"]:
        clip = "" if row["clip"] is None else f"{row['clip']:.2f}"
        bold = ["**" if row[title] == best[title] else "" for title in SETS.values()]
        cells = [f"{b}{row[title]:.1f}{b}" for b, title in zip(bold, SETS.values(), strict=True)]
        lines.append(f"| {row['variant']} | {clip} | {' | '.join(cells)} |")
    train, test = f"{result['train']:,}", f"{result['test']:,}"
    note = f"{train} training images; AUROC in percent of {test} CIFAR-10 test images against {test}"
    return "\n".join([*lines, "", f"{note} of each set."])


def main() -> None:
    """Measure and write."""
    args = densenet_arguments(__doc__, 1500, 400, Path("docs/data/react.json"))
    loaded = networks.load("densenet", args.weights)
    methods = detectors(loaded.network)
    train = datasets.load("cifar10", args.data, split="train", count=args.train).images
    fit_together(methods, loaded.prepare(train).split(BATCH), progress=False)
    images = {"inside": datasets.load("cifar10", args.data, split="test", count=args.test).images}
    for how, title in SETS.items():
        images[title] = datasets.load("tiny_imagenet", args.data, size=32, reduce=how, count=args.test).images
    evaluation, scores = Together(methods), {}
    for title, image in images.items():
        measured = evaluation.measure(loaded.prepare(image).split(BATCH), "measured", progress=False)
        scores[title] = {name: values.values[:, 0] for name, values in measured.items()}
    result = {"kind": "react", **machine(torch.device("cpu")), "train": args.train, "test": args.test}
    result["rows"] = rows(methods, scores)
    save(args.output, result)
    print(page(result))


if __name__ == "__main__":
    main()
