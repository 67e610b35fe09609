"""Significance of depth (Fig. 1 and appendix): Gram that sees one stage or dense block at a time, all orders.

A transition belongs to the block before it. Layers before the first block belong to the first block.
"""

import re

from torch import Tensor

from gramwatch_lab.paper import published
from gramwatch_lab.paper.beside import Line
from gramwatch_lab.paper.curves import Parts, run_curves, tap_names
from gramwatch_lab.paper.experiment import Options
from gramwatch_lab.paper.subject import MethodSpec, Subject


def run(options: Options) -> list[Line]:
    """Judge every set by every stage."""
    title = "Gram on one stage at a time"
    return run_curves(options, "depth", MethodSpec("", "gram"), _stages, published.DEPTH, title)


def stage_of(tap: str) -> int:
    """The stage that a tensor belongs to, from its name."""
    match = re.match(r"(?:layer|block|trans)(\d)", tap)
    return int(match.group(1)) if match else 1


def _stages(subject: Subject) -> Parts:
    stages = [stage_of(tap) for tap in tap_names(subject)]

    def part(stage: int) -> list[int]:
        return [number for number, stage_name in enumerate(stages) if stage_name == stage]

    def choose(stage: int, deviations: Tensor) -> Tensor:
        return deviations[:, part(stage), 0]  # all orders are summed already

    return {
        f"stage {stage}": lambda deviations, stage=stage: choose(stage, deviations)  # type: ignore[misc]
        for stage in sorted(set(stages))
    }
