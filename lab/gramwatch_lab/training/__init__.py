"""Training: one short loop, and one objective per file. An objective has its own score as a detector.

`OBJECTIVES` lists the objectives. `gramwatch.methods.TRAINED` lists their scores.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from gramwatch.errors import TrainingError
from gramwatch.inputs.networks import weights_of
from gramwatch_lab.training.base import Objective
from gramwatch_lab.training.checkpoint import read
from gramwatch_lab.training.cross_entropy import CrossEntropy
from gramwatch_lab.training.loop import PRECISIONS, Epoch, History, train
from gramwatch_lab.training.outlier_exposure import OutlierExposure
from gramwatch_lab.training.prior_network import PriorNetwork
from gramwatch_lab.training.recipes import RECIPES, Recipe, recipe
from gramwatch_lab.training.semantic import Semantic
from gramwatch_lab.training.variational_dirichlet import VariationalDirichlet

OBJECTIVES: dict[str, type[Objective]] = {
    objective.name: objective
    for objective in (CrossEntropy, OutlierExposure, PriorNetwork, VariationalDirichlet, Semantic)
}
"""All objectives by name."""


def objective_of(name: str, settings: Mapping[str, Any] | None = None) -> Objective:
    """An objective by its name. Settings that are not given have their defaults."""
    if name not in OBJECTIVES:
        raise TrainingError(f"there is no objective '{name}': choose from {', '.join(OBJECTIVES)}")
    settings = settings or {}
    known = OBJECTIVES[name]().settings()
    if not settings.keys() <= known.keys():
        raise TrainingError(
            f"{name} has the settings {', '.join(known) or 'none'}; got {', '.join(settings)}"
        )
    for key, value in settings.items():
        if not _like(known[key], value):
            raise TrainingError(f"{name}: {key} must be like {known[key]!r}, got {value!r}")
    return OBJECTIVES[name](**settings)


def _like(usual: Any, value: Any) -> bool:
    """Whether a setting has the type of its default: whole number, number, truth value, text or names."""
    if isinstance(usual, bool) or isinstance(value, bool):
        return isinstance(usual, bool) and isinstance(value, bool)
    if isinstance(usual, float):
        return isinstance(value, int | float) and math.isfinite(value)
    if isinstance(usual, tuple):
        return isinstance(value, str | list | tuple)
    return isinstance(value, type(usual))


def prepare(
    name: str, settings: Mapping[str, Any] | None, network: nn.Module, tensors: Mapping[str, Tensor]
) -> None:
    """Change a newly built network as an objective does, before the tensors of a file are loaded."""
    objective_of(name, settings).prepare(network, tensors)


PREPARE = {"gramwatch-lab": prepare}
"""What this package offers to `gramwatch.inputs.networks`."""


def restore(network: nn.Module, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Load a file of `train` into a newly built network. Its head is replaced if the objective does so."""
    prepare(header["objective"], header["settings"], network, tensors)
    network.load_state_dict(weights_of(tensors))
    network.eval()


__all__ = [
    "OBJECTIVES",
    "PRECISIONS",
    "RECIPES",
    "CrossEntropy",
    "Epoch",
    "History",
    "Objective",
    "OutlierExposure",
    "PriorNetwork",
    "Recipe",
    "Semantic",
    "VariationalDirichlet",
    "objective_of",
    "read",
    "recipe",
    "restore",
    "train",
    "weights_of",
]
