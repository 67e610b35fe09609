"""The optimisers of the training loop."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

OPTIMISERS = ("sgd", "adamw")


def optimiser_of(network: nn.Module, plan: Mapping[str, Any], fused: bool) -> torch.optim.Optimizer:
    """The optimiser of a plan, with the settings of the plan."""
    rate, decay = plan["learning_rate"], plan["weight_decay"]
    if plan["optimiser"] == "adamw":
        # Biases and the scales of normalisation have one axis. They do not decay.
        parameters = list(network.parameters())
        groups = [
            {"params": [tensor for tensor in parameters if tensor.ndim > 1], "weight_decay": decay},
            {"params": [tensor for tensor in parameters if tensor.ndim <= 1], "weight_decay": 0.0},
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
