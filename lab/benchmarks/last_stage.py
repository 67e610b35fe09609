"""The last stage of ResNet-34 alone: what its TNR depends on, beside the other stages.

    python -m lab.benchmarks.last_stage --data sets --weights resnet34.safetensors

Gram sees one stage at a time, as in Figure 1a of the paper. It tells CIFAR-10 test images from Tiny ImageNet,
reduced by nearest neighbour. Each variant changes one thing. Takes a quarter of an hour on a CPU. Writes
docs/data/last_stage.json, whose figures stand in docs/results/README.md.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gramwatch import fit_together
from gramwatch.detect.measurement import Measurement
from gramwatch.evaluation.evaluate import Measured, Together, evaluate_measured
from gramwatch.inputs import networks
from gramwatch.methods.gram import GramDetector
from gramwatch.methods.gram_rules import GramRule
from gramwatch.numerics.deviation import Confidence, TotalDeviation
from gramwatch_lab import datasets
from gramwatch_lab.paper.depth import stage_of
from gramwatch_lab.paper.subject import GramByOrder
from lab.benchmarks.measure import machine, save

STAGES = (1, 2, 3, 4)
SOME = [
    f"layer{stage}.{block}.{kind}"
    for stage, last in zip(STAGES, (2, 3, 5, 2), strict=True)
    for block, kind in ((0, "conv1"), (1, "relu"), (last, "sum"))
]
"""Three tensors of each stage, for statistics that take long."""
FEW = (1, 2, 10)
PAIRS = {"row_sums": "row sums", "row_sums_of_roots": "sums of roots", "triangle": "full triangle"}
OUTSIDE = "Tiny ImageNet, nearest"
BATCH = 25


@dataclass(frozen=True)
class Variant:
    """One way to compute the curve."""

    title: str
    detector: str = "by order"
    kinds: tuple[str, ...] = ()
    """The kinds of tensors, by the end of their names. By default all."""
    first_order: int = 1
    step: int = 1
    """The orders from the first in these steps. By default all."""
    equal_parts: bool = False
    """Whether the list of tensors is cut into four parts of the same length, instead of stages."""
    normalise: bool = True
    confidence: Confidence = "divide"

    def columns(self, taps: Sequence[str], stage: int) -> list[int]:
        """The numbers of the tensors of one part."""
        if self.equal_parts:
            size = len(taps) // len(STAGES)
            return list(range(size * (stage - 1), size * stage))
        return [
            number
            for number, tap in enumerate(taps)
            if stage_of(tap) == stage and (not self.kinds or tap.split(".")[-1] in self.kinds)
        ]


VARIANTS = (
    Variant("as in the tables"),
    Variant("not divided by the confidence", confidence="none"),
    Variant("not divided by the expectation", normalise=False),
    Variant("even orders alone", first_order=2, step=2),
    Variant("odd orders alone", step=2),
    Variant("before ReLUs alone", kinds=("conv1", "conv2", "shortcut", "sum")),
    Variant("after ReLUs alone", kinds=("relu", "relu#2")),
    Variant("four parts of 24 tensors", equal_parts=True),
    Variant("bounds of test images", "held out"),
    *(Variant(f"three tensors of each stage, {title}", name) for name, title in PAIRS.items()),
)


def rows(taps: Mapping[str, Sequence[str]], inside: Measured, outside: Measured) -> list[dict[str, Any]]:
    """The TNR in percent of every variant, stage by stage."""
    return [
        {"variant": variant.title, "tnr": [_tnr(variant, taps, inside, outside, stage) for stage in STAGES]}
        for variant in VARIANTS
    ]


def _tnr(
    variant: Variant, taps: Mapping[str, Sequence[str]], inside: Measured, outside: Measured, stage: int
) -> float:
    names = taps[variant.detector]
    columns = variant.columns(names, stage)

    def part(measured: Measured) -> dict[str, Measurement]:
        measurement = measured[variant.detector]
        by_order = measurement.values.unflatten(1, (len(names), -1))[:, columns]
        chosen = by_order[:, :, variant.first_order - 1 :: variant.step]
        return {"Gram": replace(measurement, values=chosen.sum(2))}

    rules = {"Gram": GramRule(TotalDeviation(variant.normalise, variant.confidence))}
    (row,) = evaluate_measured(part(inside), {OUTSIDE: part(outside)}, rules).rows
    return 100 * row.mean["tnr"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", required=True, help="the folder of the expanded sets")
    parser.add_argument("--weights", required=True, help="the checkpoint of ResNet-34")
    parser.add_argument("--train", type=int, default=2000)
    parser.add_argument("--test", type=int, default=600)
    parser.add_argument("--output", type=Path, default=Path("docs/data/last_stage.json"))
    return parser.parse_args()


def main() -> None:
    """Measure and write."""
    args = arguments()
    loaded = networks.load("resnet34", args.weights)
    detectors: dict[str, GramDetector] = {"by order": GramByOrder(loaded.network, taps="paper")}
    for name in PAIRS:
        detectors[name] = GramDetector(loaded.network, taps=SOME, statistic=name, orders=FEW)
    held_out = GramByOrder(loaded.network, taps="paper")

    def batches(images: torch.Tensor) -> Sequence[torch.Tensor]:
        return loaded.prepare(images).split(BATCH)

    # The first images are judged, the others are for the bounds of test images.
    test = datasets.load("cifar10", args.data, count=args.test + args.train).images
    train = datasets.load("cifar10", args.data, split="train", count=args.train).images
    strange = datasets.load("tiny_imagenet", args.data, size=32, reduce="nearest", count=args.test).images
    fit_together(detectors, batches(train))
    held_out.fit(batches(test[args.test :]))
    detectors["held out"] = held_out
    evaluation = Together(detectors)
    inside, outside = (
        evaluation.measure(batches(images), title)
        for title, images in (("CIFAR-10", test[: args.test]), (OUTSIDE, strange))
    )
    taps = {name: [tap.name for tap in detector.taps] for name, detector in detectors.items()}
    result = {"kind": "last_stage", **machine(torch.device("cpu")), "train": args.train, "test": args.test}
    result["rows"] = rows(taps, inside, outside)
    save(args.output, result)
    for row in result["rows"]:
        print(f"{row['variant']:45}", *(f"{tnr:6.1f}" for tnr in row["tnr"]))


if __name__ == "__main__":
    main()
