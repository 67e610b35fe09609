"""How each network is trained if nothing else is said."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Recipe:
    """Settings of `train`: the defaults are for convolutional networks on 32 x 32 images."""

    epochs: int = 100
    batch_size: int = 256
    learning_rate: float = 0.2
    warmup: float = 3.0
    weight_decay: float = 5e-4
    augment: bool | str = True
    optimiser: str = "sgd"


# Wide and deep enough to be accurate after few epochs.
_LARGE = Recipe(epochs=80)
_MNIST = Recipe(epochs=20, batch_size=128, learning_rate=0.05, warmup=1.0, augment=False)

# Photographs of 128 x 128 pixels, a few thousand of them, and networks that begin at random.
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
"""By the network's name; others take `Recipe()`, or `_PHOTOGRAPHS` if they are of timm or torchvision."""


def recipe(network: str, fine_tuning: bool = False) -> Recipe:
    """The recipe for a network, or for fine-tuning it: 10 epochs from 0.001, as for Outlier Exposure.

    AdamW takes larger steps, so fine-tuning by it begins at 0.0001.
    """
    found = RECIPES.get(network, _PHOTOGRAPHS if ":" in network else Recipe())
    if not fine_tuning:
        return found
    rate = 0.001 if found.optimiser == "sgd" else 0.0001
    return replace(found, epochs=10, learning_rate=rate, warmup=0.0)
