"""`gramwatch demo`: two small networks trained on handwritten digits, and their verdicts on other images."""

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from gramwatch.detect.measurement import Detection
from gramwatch.detect.threshold import rank_of_threshold
from gramwatch.evaluation.evaluate import Evaluation, evaluate
from gramwatch.explain.frame import pyplot
from gramwatch.guard.guard import Guard
from gramwatch.inputs.demo import Digits, digits, outlier_sets, small_convnet, small_mlp, train
from gramwatch.methods.gram import GramDetector
from gramwatch.methods.msp import MSP


@dataclass(frozen=True)
class Judged:
    """One network of the demo: its accuracy, its detectors, and the detections of Guard on every set."""

    name: str
    accuracy: float
    detector: GramDetector
    guard: Guard
    inside: Detection
    outside: dict[str, Detection]
    evaluation: Evaluation


def judge(name: str, make: Callable[[], nn.Module], data: Digits, outliers: dict[str, Tensor]) -> Judged:
    """Train a network, fit and calibrate Guard and the Gram detector in it, and judge every set."""
    torch.manual_seed(0)
    network = make()
    train(network, data.train, data.train_labels)
    guard = Guard(network)
    guard.fit(data.train.split(256))
    detector = guard.members["gram"]
    assert isinstance(detector, GramDetector)
    detector.calibrate(data.validation.split(256))
    guard.calibrate(data.validation.split(256))
    inside = guard(data.test)
    return Judged(
        name,
        float((inside.predicted == data.test_labels).double().mean()),
        detector,
        guard,
        inside,
        {set_name: guard(images) for set_name, images in outliers.items()},
        evaluate(
            {"Guard": guard, "Gram": detector, "MSP": MSP(network)},
            data.test.split(256),
            {n: x.split(256) for n, x in outliers.items()},
            progress=False,
        ),
    )


def chance_range(detector: Guard | GramDetector, examples: int) -> tuple[float, float]:
    """The range of the share of flagged in-distribution examples in 95 of 100 calibrations and test sets.

    The rate of one calibration with `n` ranking scores follows a beta distribution with mean `k / (n + 1)`.
    """
    from scipy.stats import betabinom

    ranking = len(detector.calibration_scores_)
    kept = rank_of_threshold(ranking, detector.level)
    low, high = betabinom.interval(0.95, examples, ranking + 1 - kept, kept)
    return low / examples, high / examples


def run(folder: str | PathLike[str] = "gramwatch-demo", say: Callable[[str], None] = print) -> list[Judged]:
    """Train, judge, print the tables, and leave the picture, the tables and the detectors in `folder`."""
    from gramwatch.report.overview import draw_overview

    pyplot()  # known to be there before anything is trained
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    data = digits()
    outliers = outlier_sets(data)
    judged = []
    for name, make in (("convnet", small_convnet), ("mlp", small_mlp)):
        result = judge(name, make, data, outliers)
        judged.append(result)
        false_alarms = float(result.inside.is_ood.double().mean())
        low, high = chance_range(result.guard, len(data.test))
        say(
            f"\n{name}: trained on {len(data.train)} digits 0 to 7, "
            f"{result.accuracy:.1%} of {len(data.test)} test digits right;\n"
            f"{len(result.detector.taps)} tensors watched; {false_alarms:.1%} of the test digits flagged "
            f"(asked for: {1 - result.guard.level:.0%};\nwith {len(result.guard.calibration_scores_)} "
            f"digits to rank by, {low:.1%} to {high:.1%} is within chance)\n"
        )
        alone = float(result.detector(data.test).is_ood.double().mean())
        say(f"The same for Gram alone, one of the members of Guard: {alone:.1%} flagged\n")
        say(str(result.evaluation))
        result.evaluation.to_csv(folder / f"{name}.csv")
        result.detector.save(folder / f"{name}.safetensors")
        result.guard.save(folder / f"{name}-guard.safetensors")
    picture = folder / "demo.png"
    first = judged[0]
    draw_overview(
        picture,
        first.guard,
        {"test digits 0 to 7": (data.test, first.inside)}
        | {name: (outliers[name], detection) for name, detection in first.outside.items()},
        title="A network that knows the digits 0 to 7 looks at other things; no outlier was seen before",
    )
    say(f"\nLook at {picture}; the tables and the detectors are beside it.")
    return judged
