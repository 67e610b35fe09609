"""The optimisers that training knows."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

OPTIMISERS = ("sgd", "adamw")


def optimiser_of(network: nn.Module, plan: Mapping[str, Any], fused: bool) -> torch.optim.Optimizer:
    """The optimiser that a plan names, with the plan's settings."""
    rate, decay = plan["learning_rate"], plan["weight_decay"]
    if plan["optimiser"] == "adamw":
        # Biases and the scales of normalisation are not weights of inputs: they do not decay.
        parameters = list(network.parameters())
        groups = [
            {"params": [each for each in parameters if each.ndim > 1], "weight_decay": decay},
            {"params": [each for each in parameters if each.ndim <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, rate, fused=fused)
    return torch.optim.SGD(
        network.parameters(),
        rate,
        plan["momentum"],
        weight_decay=decay,
        nesterov=plan["momentum"] > 0,
        fused=fused,
    )
