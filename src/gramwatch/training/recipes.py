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
    augment: bool = True


# This network is wide and deep, and accurate after fewer epochs.
_LARGE = Recipe(epochs=80)
_MNIST = Recipe(epochs=20, batch_size=128, learning_rate=0.05, warmup=1.0, augment=False)

RECIPES: dict[str, Recipe] = {
    "resnet34": _LARGE,
    "densenet": Recipe(weight_decay=1e-4),
    "wrn40_2": Recipe(),
    "mlp_300": _MNIST,
    "mlp_300_150": _MNIST,
    "mlp_300_150_50": _MNIST,
    "mnist_convnet": _MNIST,
}
"""The recipes by the name of the network. Other networks use `Recipe()`."""


def recipe(network: str, fine_tuning: bool = False) -> Recipe:
    """The recipe of a network. Fine-tuning has 10 epochs from 0.001, as Outlier Exposure does."""
    usual = RECIPES.get(network, Recipe())
    return replace(usual, epochs=10, learning_rate=0.001, warmup=0.0) if fine_tuning else usual
