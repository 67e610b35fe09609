"""Training: one short loop, and one objective per file, each with its own score as a detector.

`OBJECTIVES` are what a network can be trained for; `rivals.TRAINED` holds the scores that go with them.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from gramwatch.errors import TrainingError
from gramwatch.training.base import Objective
from gramwatch.training.checkpoint import read, weights_of
from gramwatch.training.cross_entropy import CrossEntropy
from gramwatch.training.loop import Epoch, History, train
from gramwatch.training.outlier_exposure import OutlierExposure
from gramwatch.training.prior_network import PriorNetwork
from gramwatch.training.recipes import RECIPES, Recipe, recipe
from gramwatch.training.semantic import Semantic
from gramwatch.training.variational_dirichlet import VariationalDirichlet

OBJECTIVES: dict[str, type[Objective]] = {
    objective.name: objective
    for objective in (CrossEntropy, OutlierExposure, PriorNetwork, VariationalDirichlet, Semantic)
}
"""By the name users ask for them."""


def objective_of(name: str, settings: Mapping[str, Any] | None = None) -> Objective:
    """An objective by its name, with some of its settings."""
    if name not in OBJECTIVES:
        raise TrainingError(f"there is no objective '{name}': choose from {', '.join(OBJECTIVES)}")
    try:
        return OBJECTIVES[name](**(settings or {}))
    except TypeError:
        known = ", ".join(OBJECTIVES[name]().settings()) or "none"
        raise TrainingError(f"{name} has the settings {known}; got {', '.join(settings or {})}") from None


def restore(network: nn.Module, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Make a newly built network the one that a file of `train` holds, its head included."""
    objective_of(header["objective"], header["settings"]).prepare(network, tensors)
    network.load_state_dict(weights_of(tensors))
    network.eval()


__all__ = [
    "OBJECTIVES",
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
