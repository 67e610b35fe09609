"""Networks of timm and torchvision, by the names `timm:NAME` and `torchvision:NAME`.

Both packages are in the extra `networks`. The weights are random: nothing is downloaded.
"""

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from gramwatch.errors import InputError, MissingExtraError

Channels = tuple[float, ...]
IMAGE_SIZE = {"vit_": "image_size"}
"""The option for the size of images, by the beginning of the name of a torchvision network."""
_operators: list[torch.library.Library] = []


@dataclass(frozen=True)
class NetworkRecord:
    """The facts about a network that do not depend on its weights."""

    title: str
    build: Callable[[int], nn.Module]
    """Builds the network, given the number of classes."""
    shape: tuple[int, int, int]
    """The shape of one input: channels, height, width."""
    mean: Channels
    std: Channels


def is_foreign(name: str) -> bool:
    """Whether the name is that of a network of timm or torchvision."""
    package, colon, _ = name.partition(":")
    return bool(colon) and package in _PACKAGES


def described(name: str, size: int | None = None) -> NetworkRecord:
    """Describe a network of timm or torchvision.

    Args:
        name: the name of the network, with the name of its package.
        size: height and width of the images. By default the size that the network's authors use.

    """
    package, _, short = name.partition(":")
    return _PACKAGES[package](short, size)


def _timm(name: str, size: int | None) -> NetworkRecord:
    timm = imported("timm")
    if "." in name or not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())
    usual = timm.models.get_pretrained_cfg(name)
    channels, side, _ = usual.input_size
    side = size or side
    sized = {"img_size": side} if usual.fixed_input_size else {}

    def build(classes: int) -> nn.Module:
        network: nn.Module = timm.create_model(name, pretrained=False, num_classes=classes, **sized)
        return network

    shape = (channels, side, side)
    return NetworkRecord(f"{name} (timm)", build, shape, tuple(usual.mean), tuple(usual.std))


def _torchvision(name: str, size: int | None) -> NetworkRecord:
    models = imported("torchvision").models
    names = models.list_models(module=models)
    if name not in names:
        raise _unknown("torchvision", name, names)
    usual = models.get_model_weights(name).DEFAULT.transforms()
    side = size or usual.crop_size[0]
    sized = {option: side for start, option in IMAGE_SIZE.items() if name.startswith(start)}

    def build(classes: int) -> nn.Module:
        network: nn.Module = models.get_model(name, weights=None, num_classes=classes, **sized)
        return network

    shape = (3, side, side)
    return NetworkRecord(f"{name} (torchvision)", build, shape, tuple(usual.mean), tuple(usual.std))


_PACKAGES: dict[str, Callable[[str, int | None], NetworkRecord]] = {
    "timm": _timm,
    "torchvision": _torchvision,
}


def _unknown(package: str, name: str, names: Iterable[str]) -> InputError:
    alike = [f"{package}:{close}" for close in get_close_matches(name, list(names))]
    hint = f"did you mean {' or '.join(alike)}?" if alike else f"see the names in {package}'s list_models()"
    return InputError(f"there is no network '{package}:{name}': {hint}")


def imported(package: str) -> Any:
    """Import the package. torchvision is imported first, because timm imports it."""
    try:
        import_torchvision()
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"networks of {package} need the package {error.name}: "
            "install it with pip install 'gramwatch[networks]'"
        ) from None


def import_torchvision() -> Any:
    """Import torchvision, even if its wheel lacks the compiled operators for this build of PyTorch.

    Two of these operators must be declared for the import of torchvision and timm. This function declares
    them after an import has failed. Declared earlier, they would break the import of a complete wheel.
    Classifiers do not use these operators.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    _operators.append(torch.library.Library("torchvision", "FRAGMENT"))
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            _operators[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    return importlib.import_module("torchvision")
