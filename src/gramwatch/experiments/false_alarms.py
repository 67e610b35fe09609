"""How often fresh in-distribution examples are flagged: `python -m gramwatch.experiments.false_alarms`.

The examples are made up, so that there are as many as it takes to measure the rates: what the members of a
guard might say of ten classes, some rare, the rarer the higher their scores. What is measured is the rule of
`gramwatch.joint` and the ranks of `gramwatch.threshold`, the same code that a `Guard` runs.
The same on real images is `false_alarm_study`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gramwatch.detector import Measurement
from gramwatch.deviation import TotalDeviation
from gramwatch.joint import Calibration, JointMeasurement, JointRule

ALPHAS = (0.01, 0.05, 0.1)
SHARES = (0.28, 0.19, 0.14, 0.10, 0.08, 0.07, 0.07, 0.03, 0.02, 0.02)
"""How often each class is predicted."""
RARE = 3
"""So many classes, the last ones, have fewer than 100 examples that rank, of 2,000."""
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


def simulated(examples: int, generator: torch.Generator) -> JointMeasurement:
    """What the three members say of made-up in-distribution examples."""
    shares = torch.tensor(SHARES, dtype=torch.float64)
    classes = torch.multinomial(shares, examples, replacement=True, generator=generator)
    harder = classes.double() / len(SHARES)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    common = noise(examples)
    sure = (4 - 2 * harder - common).clamp_min(0.1)
    logits = torch.nn.functional.one_hot(classes, len(SHARES)) * sure.unsqueeze(1)
    deviations = (harder.unsqueeze(1) + 0.5 * common.unsqueeze(1) + noise(examples, TAPS)).exp() - 1
    deviations = deviations.clamp_min(0)
    return JointMeasurement(
        logits,
        {
            "gram": Measurement(logits, deviations, torch.ones(examples, dtype=torch.bool)),
            "fdbd": harder + common + noise(examples),
            "energy": -logits.logsumexp(1),
        },
    )


def rates(
    *, per_class: bool, calibration: int = 4000, fresh: int = 4000, repeats: int = 200, seed: int = 0
) -> Rates:
    """Calibrate many times, each time on other examples, and judge as many fresh ones."""
    generator = torch.Generator().manual_seed(seed)
    flagged = torch.zeros(len(SHARES), len(ALPHAS), dtype=torch.float64)
    counts = torch.zeros(len(SHARES), dtype=torch.float64)
    alphas = torch.tensor(ALPHAS, dtype=torch.float64)
    for repeat in range(repeats):
        rule = JointRule({"gram": TotalDeviation()})
        found = Calibration.of(
            simulated(calibration, generator), rule, level=0.95, per_class=per_class, seed=repeat
        )
        new = simulated(fresh, generator)
        low = found.judged(new)[1][:, :1] <= alphas
        flagged.index_add_(0, new.predicted, low.double())
        counts += new.predicted.bincount(minlength=len(SHARES))
    rare = flagged[-RARE:].sum(0) / counts[-RARE:].sum()
    return Rates(flagged.sum(0) / counts.sum(), flagged / counts.unsqueeze(1), rare)


def table() -> str:
    """The measured rates, in Markdown."""
    rows = [
        "| ranked | alpha | all examples | highest of seven common classes | three rare classes together |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for per_class, name in ((False, "together"), (True, "`per_class=True`")):
        found = rates(per_class=per_class)
        worst = found.by_class[:-RARE].amax(0)
        for i, alpha in enumerate(ALPHAS):
            cells = [f"{100 * float(each[i]):.2f} %" for each in (found.overall, worst, found.rare)]
            rows.append(f"| {name} | {100 * alpha:.0f} % | " + " | ".join(cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
