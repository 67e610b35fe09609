"""The default training settings of each network."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Recipe:
    """Settings of `train`. The defaults are for convolutional networks on 32 x 32 images."""

    epochs: int = 100
    batch_size: int = 256
    learning_rate: float = 0.2
    warmup: float = 3.0
    weight_decay: float = 5e-4
    augment: bool | str = True
    optimiser: str = "sgd"


# This network is wide and deep, and accurate after fewer epochs.
_LARGE = Recipe(epochs=80)
_MNIST = Recipe(epochs=20, batch_size=128, learning_rate=0.05, warmup=1.0, augment=False)

# For some thousand photographs of 128 x 128 pixels, and networks with random weights.
_PHOTOGRAPHS = Recipe(
    epochs=120,
    batch_size=128,
    learning_rate=0.001,
    warmup=5.0,
    weight_decay=0.05,
    augment="crops",
    optimiser="adamw",
)

RECIPES: dict[str, Recipe] = {
    "resnet34": _LARGE,
    "resnet18": Recipe(batch_size=128, learning_rate=0.1, warmup=0.0),  # as in OpenOOD's benchmark
    "densenet": Recipe(weight_decay=1e-4),
    "wrn40_2": Recipe(),
    "mlp_300": _MNIST,
    "mlp_300_150": _MNIST,
    "mlp_300_150_50": _MNIST,
    "mnist_convnet": _MNIST,
    "torchvision:resnet18": replace(
        _PHOTOGRAPHS, optimiser="sgd", learning_rate=0.1, weight_decay=5e-4, epochs=100
    ),
    "timm:efficientnet_b0": replace(_PHOTOGRAPHS, learning_rate=0.002),
    "timm:convnext_atto": replace(_PHOTOGRAPHS, epochs=150, warmup=10.0),
    "timm:vit_tiny_patch16_224": replace(_PHOTOGRAPHS, epochs=300, warmup=15.0),
}
"""The recipes by the name of the network. Networks of timm and torchvision that are not here use
`_PHOTOGRAPHS`. All others use `Recipe()`."""


def recipe(network: str, fine_tuning: bool = False) -> Recipe:
    """The recipe of a network. Fine-tuning has 10 epochs from 0.001, as Outlier Exposure does.

    With AdamW, fine-tuning starts at 0.0001, because AdamW takes larger steps.
    """
    usual = RECIPES.get(network, _PHOTOGRAPHS if ":" in network else Recipe())
    if not fine_tuning:
        return usual
    rate = 0.001 if usual.optimiser == "sgd" else 0.0001
    return replace(usual, epochs=10, learning_rate=rate, warmup=0.0)
