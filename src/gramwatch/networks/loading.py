"""The networks by name, and reading their checkpoints: PyTorch's (weights only) and safetensors."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gramwatch.errors import ArtifactError, InputError
from gramwatch.networks.cifar_resnet import CifarResNet
from gramwatch.networks.convnet import MnistConvNet
from gramwatch.networks.densenet import densenet_bc_100_12
from gramwatch.networks.mlp import MLP
from gramwatch.networks.resnet import resnet34
from gramwatch.networks.wide_resnet import wide_resnet_40_2
from gramwatch.training import objective_of, weights_of

Channels = tuple[float, ...]


@dataclass(frozen=True)
class NetworkRecord:
    """What is known of a network before its weights."""

    title: str
    build: Callable[[int], nn.Module]
    """From the number of classes."""
    shape: tuple[int, int, int]
    """Of one input: channels, height, width."""
    mean: Channels
    std: Channels


def _cifar(title: str, make: Callable[[int], nn.Module], mean: Channels, std: Channels) -> NetworkRecord:
    return NetworkRecord(title, make, (3, 32, 32), mean, std)


def _mnist(title: str, make: Callable[[int], nn.Module]) -> NetworkRecord:
    return NetworkRecord(title, make, (1, 28, 28), (0.0,), (1.0,))


def _mlp(*hidden: int) -> NetworkRecord:
    return _mnist("MLP " + "-".join(map(str, hidden)), partial(MLP, hidden))


CIFAR = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
OUTLIER_EXPOSURE = (125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255)
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

NETWORKS: Mapping[str, NetworkRecord] = {
    "resnet34": _cifar("ResNet-34", resnet34, *CIFAR),
    "densenet": _cifar("DenseNet-BC-100-12", densenet_bc_100_12, *CIFAR),
    "wrn40_2": _cifar("WRN-40-2", wide_resnet_40_2, *OUTLIER_EXPOSURE),
    **{
        f"resnet{depth}": _cifar(f"ResNet-{depth}", partial(CifarResNet, depth), *IMAGENET)
        for depth in (20, 32, 44, 56, 110)
    },
    "mlp_300": _mlp(300),
    "mlp_300_150": _mlp(300, 150),
    "mlp_300_150_50": _mlp(300, 150, 50),
    "mnist_convnet": _mnist("MNIST ConvNet", MnistConvNet),
}


@dataclass(frozen=True)
class Loaded:
    """A network ready to judge images, and what its input must look like."""

    name: str
    network: nn.Module
    mean: Channels
    std: Channels

    def prepare(self, images: Tensor) -> Tensor:
        """uint8 images, or floats in [0, 1], of shape N x C x H x W, as the network takes them: float32."""
        if images.ndim != 4 or images.shape[1] != len(self.mean):
            raise InputError(
                f"{self.name} takes images of {len(self.mean)} channels, N x {len(self.mean)} x H x W, "
                f"not {tuple(images.shape)}"
            )
        pixels = images.float() / 255 if images.dtype == torch.uint8 else images.float()
        mean, std = (torch.tensor(c, device=images.device)[:, None, None] for c in (self.mean, self.std))
        return (pixels - mean) / std


def _record(name: str) -> NetworkRecord:
    if name not in NETWORKS:
        raise InputError(f"there is no network '{name}': choose from {', '.join(NETWORKS)}")
    return NETWORKS[name]


def build(name: str, classes: int = 10) -> nn.Module:
    """A network with fresh random weights."""
    return _record(name).build(classes)


def load(
    name: str,
    weights: str | PathLike[str] | None = None,
    *,
    device: str | torch.device = "cpu",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Loaded:
    """A network with the weights of a checkpoint, in evaluation mode, and its input normalisation.

    Args:
        name: one of `NETWORKS`.
        weights: a PyTorch checkpoint (`.pth`, `.pt`, `.th`: parameters, at the top or under `state_dict`,
            with or without `module.` before their names) or a safetensors file. Without it: random weights.
        device: where the network goes.
        mean: of the input's channels; by default as the file says, or else as is usual for the network.
        std: likewise.

    """
    record = _record(name)
    state, said = (None, {}) if weights is None else _read(Path(weights))
    if said.get("network", name) != name:
        raise ArtifactError(f"{weights} holds a '{said['network']}', not a '{name}'")
    network = record.build(10)
    if state is not None:
        # The last linear layer tells the number of classes, unless the file says it itself.
        head = [key for key, module in network.named_modules() if isinstance(module, nn.Linear)][-1]
        if "classes" in said or f"{head}.weight" in state:
            network = record.build(said.get("classes") or len(state[f"{head}.weight"]))
        if "objective" in said:
            state = weights_of(state)
            objective_of(said["objective"], said.get("settings")).prepare(network, state)
        _check(network.state_dict(), state, name, weights)
        network.load_state_dict(state, strict=False)

    def channels(given: Sequence[float] | None, key: str, usual: Channels) -> Channels:
        return tuple(float(value) for value in (given or said.get(key) or usual))

    return Loaded(
        name,
        network.to(device).eval(),
        channels(mean, "mean", record.mean),
        channels(std, "std", record.std),
    )


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The parameters of a checkpoint and what its header says."""
    if not path.is_file():
        raise ArtifactError(f"there is no checkpoint {path}")
    said: dict[str, Any] = {}
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                state = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
                said = json.loads((file.metadata() or {}).get("gramwatch", "{}"))
        except (SafetensorError, OSError, ValueError) as error:
            raise ArtifactError(f"{path} is not a readable safetensors file: {error}") from None
    else:
        try:
            state = torch.load(path, weights_only=True, map_location="cpu")
        except Exception as error:  # a damaged file can raise nearly anything
            raise ArtifactError(
                f"{path} cannot be read as parameters alone: it is damaged, or holds a whole pickled module, "
                "which would run code. docs/checkpoints.md shows how to convert such a file once. "
                f"({str(error).splitlines()[0] if str(error) else type(error).__name__})"
            ) from None
        if isinstance(state, Mapping):
            state = state.get("state_dict", state)
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ArtifactError(f"{path} does not hold parameters by name, at its top or under 'state_dict'")
    return {key.removeprefix("module."): value for key, value in state.items()}, said


def _check(
    expected: Mapping[str, Tensor], state: Mapping[str, Tensor], name: str, path: str | PathLike[str] | None
) -> None:
    """Compare names and shapes, and name what is missing, too many or of another shape."""
    # Checkpoints older than PyTorch 0.4.1 lack these counters, which matter to training only.
    missing = [k for k in expected if k not in state and not k.endswith("num_batches_tracked")]
    unknown = [key for key in state if key not in expected]
    shapes = [
        f"{key} {tuple(state[key].shape)} instead of {tuple(expected[key].shape)}"
        for key in expected
        if key in state and state[key].shape != expected[key].shape
    ]
    wrong = {"missing": missing, "unknown": unknown, "of another shape": shapes}
    told = [
        f"{what}: {', '.join(keys[:3])}{f' and {len(keys) - 3} more' if len(keys) > 3 else ''}"
        for what, keys in wrong.items()
        if keys
    ]
    if told:
        raise ArtifactError(f"{path} does not fit the network '{name}'. {'; '.join(told)}")
