"""A network's file: weights and how they came about; while training lasts, also what is needed to go on.

One safetensors file, written whole or not at all. Its header, JSON under the key "gramwatch", says which
network, for which inputs, by which objective; the tensors are the network's own, by their names, and until
training is finished what the optimiser knows of each parameter, under one of `STATES` and its name.
"""

from collections.abc import Mapping
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gramwatch import artifact
from gramwatch.errors import TrainingError

MOMENTUM = "momentum/"
STATES = {
    "momentum_buffer": MOMENTUM,
    "exp_avg": "average/",
    "exp_avg_sq": "square/",
    "step": "step/",
}
"""What an optimiser knows of a parameter, and what its tensors' names begin with in a file."""
_T = TypeVar("_T")


def write(
    path: str | PathLike[str],
    header: Mapping[str, Any],
    network: nn.Module,
    optimiser: torch.optim.Optimizer | None = None,
) -> None:
    """Write the weights and, with an optimiser, what it knows of them."""
    tensors = dict(network.state_dict())
    if optimiser is not None:
        for name, parameter in network.named_parameters():
            known = optimiser.state.get(parameter, {})
            tensors |= {STATES[key] + name: known[key] for key in STATES if known.get(key) is not None}
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    artifact.write(path, {**header, "shapes": shapes}, tensors)


def read(path: str | PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and all tensors of a file that `write` wrote."""
    saved = artifact.opened(path)
    if "objective" not in saved.header:
        raise TrainingError(f"{path} holds a detector or something else, not a network")
    with artifact.reading(saved.path):
        shapes = artifact.shapes_of(saved.header)
    return saved.header, saved.tensors(shapes)


def weights_of(tensors: Mapping[str, _T]) -> dict[str, _T]:
    """The network's own tensors, or what is known of them."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(tuple(STATES.values()))}


def set_state(network: nn.Module, optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Give the optimiser what it knew."""
    for name, parameter in network.named_parameters():
        for key, start in STATES.items():
            if start + name in tensors:
                saved = tensors[start + name]
                like = parameter if saved.ndim else saved.to(parameter.device)
                optimiser.state[parameter][key] = torch.empty_like(like).copy_(saved).detach()
