"""The file of a trained network. Until training is finished, it also holds what is needed to resume.

It is one safetensors file, written whole or not at all. Its header, JSON under the key "gramwatch", holds the
network, the normalisation of its inputs, and the objective. The tensors are those of the network, by name.
Until training is finished, the file also has the state of the optimiser: one of `STATES` and the parameter's
name.
"""

from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from gramwatch.errors import TrainingError
from gramwatch.files import artifact
from gramwatch.inputs.networks import STATES


def write(
    path: str | PathLike[str],
    header: Mapping[str, Any],
    network: nn.Module,
    optimiser: torch.optim.Optimizer | None = None,
) -> None:
    """Write the weights. With an optimiser, write its state too."""
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


def set_state(network: nn.Module, optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Give the optimiser the state of a file."""
    for name, parameter in network.named_parameters():
        for key, start in STATES.items():
            if start + name in tensors:
                saved = tensors[start + name]
                like = parameter if saved.ndim else saved.to(parameter.device)
                optimiser.state[parameter][key] = torch.empty_like(like).copy_(saved).detach()
