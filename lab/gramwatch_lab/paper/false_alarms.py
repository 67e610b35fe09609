"""How often fresh in-distribution examples are flagged.

    python -m gramwatch_lab.paper.false_alarms docs/data/false_alarms.json

The examples are made up, so that there are as many as it takes to measure the rates: what the members of a
guard might say of ten classes, some rare, the rarer the higher their scores. What is measured is the rule of
`gramwatch.detect.joint` and the ranks of `gramwatch.detect.threshold`, the same code that a `Guard` runs.
The same on real images is `false_alarm_study`.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gramwatch.detect.joint import JointRule
from gramwatch.detect.measurement import Calibration, Measurement
from gramwatch.methods.gram_rules import MeanOfRoots
from gramwatch.numerics.deviation import TotalDeviation

ALPHAS = (0.01, 0.05, 0.1)
SHARES = (0.28, 0.19, 0.14, 0.10, 0.08, 0.07, 0.07, 0.03, 0.02, 0.02)
"""The shares of the predicted classes."""
RARE = 3
"""So many classes, the last ones, have fewer than 100 examples that rank, of 2,000."""
SCARCE = (0.5, 0.42, 0.05, 0.03)
"""Of 1,000 examples that rank, both rare classes together have about 80: too few for a group of their own."""
BORDER = (0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1)
"""Of 1,000 examples that rank, five classes have about 100: by chance they are groups or not."""
TAPS = 6


@dataclass(frozen=True)
class Rates:
    """The share of fresh examples with a p-value of at most alpha, for each of `ALPHAS`."""

    overall: Tensor
    """`(alphas,)`"""
    by_class: Tensor
    """`(classes, alphas)`"""
    rare: Tensor
    """Of the rare classes together, `(alphas,)`."""
    alone: Tensor
    """Of examples whose class is a group of its own, `(alphas,)`."""
    shared: Tensor
    """Of examples whose class shares a group with others, `(alphas,)`; NaN where there are none."""


def simulated(examples: int, generator: torch.Generator, shares: tuple[float, ...] = SHARES) -> Measurement:
    """What three members measure of made-up in-distribution examples; later classes score higher."""
    weights = torch.tensor(shares, dtype=torch.float64)
    classes = torch.multinomial(weights, examples, replacement=True, generator=generator)
    harder = classes.double() / len(shares)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    common = noise(examples)
    sure = (4 - 2 * harder - common).clamp_min(0.1)
    logits = torch.nn.functional.one_hot(classes, len(shares)) * sure.unsqueeze(1)
    deviations = (harder.unsqueeze(1) + 0.5 * common.unsqueeze(1) + noise(examples, TAPS)).exp() - 1
    deviations = deviations.clamp_min(0)
    values = {
        "gram": deviations,
        "fdbd": (harder + common + noise(examples)).unsqueeze(1),
        "energy": -logits.logsumexp(1, keepdim=True),
    }
    finite = torch.ones(examples, dtype=torch.bool)
    return Measurement.together({name: Measurement(value, logits, finite) for name, value in values.items()})


def rates(
    *,
    per_class: bool,
    shares: tuple[float, ...] = SHARES,
    calibration: int = 4000,
    fresh: int = 4000,
    repeats: int = 200,
    seed: int = 0,
) -> Rates:
    """Calibrate many times, each time on other examples, and judge as many fresh ones."""
    generator = torch.Generator().manual_seed(seed)
    # By whether the class is a group of its own, by class.
    flagged = torch.zeros(2, len(shares), len(ALPHAS), dtype=torch.float64)
    counts = torch.zeros(2, len(shares), 1, dtype=torch.float64)
    alphas = torch.tensor(ALPHAS, dtype=torch.float64)
    for repeat in range(repeats):
        rule = JointRule({"gram": MeanOfRoots(TotalDeviation())})
        known = simulated(calibration, generator, shares)
        calibrated = Calibration.of(known, rule, level=0.95, per_class=per_class, seed=repeat)
        new = simulated(fresh, generator, shares)
        low = calibrated.judged(new)[1][:, :1] <= alphas
        group_of = calibrated.ranks.group_of
        alone = (group_of.bincount()[group_of] == 1).long()[new.predicted]
        flagged.index_put_((alone, new.predicted), low.double(), accumulate=True)
        counts.index_put_((alone, new.predicted), torch.ones(fresh, 1).double(), accumulate=True)
    by_class, shared, alone = (flagged.sum(0) / counts.sum(0), *(flagged.sum(1) / counts.sum(1)))
    rare = flagged.sum(0)[-RARE:].sum(0) / counts.sum(0)[-RARE:].sum()
    return Rates(flagged.sum((0, 1)) / counts.sum(), by_class, rare, alone, shared)


Row = dict[str, Any]


def measured() -> dict[str, list[Row]]:
    """The rates of both tables: simulated in about ten seconds."""
    simulated_rates: dict[str, list[Row]] = {"classes": [], "groups": []}
    for per_class, name in ((False, "together"), (True, "`per_class=True`")):
        measurement = rates(per_class=per_class)
        for i, alpha in enumerate(ALPHAS):
            shares = [measurement.overall[i], measurement.by_class[:-RARE].amax(0)[i], measurement.rare[i]]
            simulated_rates["classes"].append(
                {"name": name, "alpha": alpha, "rates": [float(share) for share in shares]}
            )
    for classes, name in ((SCARCE, "8 % in rare classes"), (BORDER, "five classes near the limit")):
        measurement = rates(per_class=True, shares=classes, calibration=2000, fresh=2000, repeats=300)
        for i, alpha in enumerate(ALPHAS):
            shares = [measurement.overall[i], measurement.alone[i], measurement.shared[i]]
            simulated_rates["groups"].append(
                {"name": name, "alpha": alpha, "rates": [float(share) for share in shares]}
            )
    return simulated_rates


HEADS = {
    "classes": "ranked | alpha | all examples "
    "| highest of seven common classes | three rare classes together",
    "groups": "classes | alpha | all examples | classes that are groups | classes that share a group",
}


def table(simulated_rates: dict[str, list[Row]], kind: str) -> str:
    """One of the tables, in Markdown."""
    lines = [f"| {HEADS[kind]} |", "| --- | ---: | ---: | ---: | ---: |"]
    for row in simulated_rates[kind]:
        cells = " | ".join(f"{100 * share:.2f} %" for share in row["rates"])
        lines.append(f"| {row['name']} | {100 * row['alpha']:.0f} % | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    simulated_rates = measured()
    for path in sys.argv[1:]:
        Path(path).write_text(json.dumps(simulated_rates, indent=1) + "\n", encoding="utf-8")
    print(*(table(simulated_rates, kind) for kind in HEADS), sep="\n\n")
