"""The networks by name, and their checkpoints: PyTorch files (weights only) and safetensors files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gramwatch.errors import ArtifactError, InputError, listed
from gramwatch.files import artifact
from gramwatch.inputs.foreign import Channels, NetworkRecord, described, is_foreign
from gramwatch.inputs.offered import Offered

NETWORKS: Mapping[str, NetworkRecord] = Offered("gramwatch.architectures")
"""The networks of installed packages by name: with `gramwatch-lab`, those of the paper."""
PREPARE: Mapping[str, Callable[[str, Mapping[str, Any] | None, nn.Module, Mapping[str, Tensor]], None]] = (
    Offered("gramwatch.objectives")
)
"""Functions of installed packages that change a network as its training objective did."""
STATES = {
    "momentum_buffer": "momentum/",
    "exp_avg": "average/",
    "exp_avg_sq": "square/",
    "step": "step/",
}
"""The states that an optimiser keeps for a parameter, and the prefixes of their names in a file."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Loaded:
    """A network in evaluation mode, and the normalisation of its inputs."""

    name: str
    network: nn.Module
    mean: Channels
    std: Channels
    size: int | None = None
    """Height and width of the images, if the file holds them."""
    class_names: tuple[str, ...] = ()
    """The names of the classes in the order of the logits, if the file holds them."""

    @property
    def record(self) -> NetworkRecord:
        """The record of the network, for the size of its images."""
        return record_of(self.name, self.size)

    def prepare(self, images: Tensor) -> Tensor:
        """The network's inputs, float32, from images N x C x H x W that are uint8 or floats in [0, 1]."""
        if images.ndim != 4 or images.shape[1] != len(self.mean):
            raise InputError(
                f"{self.name} takes images of {len(self.mean)} channels, N x {len(self.mean)} x H x W, "
                f"not {tuple(images.shape)}"
            )
        pixels = images.float() / 255 if images.dtype == torch.uint8 else images.float()
        mean, std = (torch.tensor(c, device=images.device)[:, None, None] for c in (self.mean, self.std))
        return (pixels - mean) / std


def record_of(name: str, size: int | None = None) -> NetworkRecord:
    """The record of a network.

    Args:
        name: one of `NETWORKS`, `timm:NAME` or `torchvision:NAME`.
        size: height and width of the images, for networks of timm and torchvision.

    """
    if is_foreign(name):
        return described(name, size)
    if name not in NETWORKS:
        names = ", ".join([*NETWORKS, "timm:NAME", "torchvision:NAME"])
        raise InputError(f"there is no network '{name}': choose from {names}")
    return NETWORKS[name]


def build(name: str, classes: int = 10, size: int | None = None) -> nn.Module:
    """A network with random weights. `size` is that of the images, for networks of timm and torchvision."""
    return record_of(name, size).build(classes)


def load(
    name: str,
    weights: str | PathLike[str] | None = None,
    *,
    device: str | torch.device = "cpu",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    size: int | None = None,
) -> Loaded:
    """A network with the weights of a checkpoint, in evaluation mode, and its input normalisation.

    Args:
        name: one of `NETWORKS`, or `timm:NAME` or `torchvision:NAME`.
        weights: a PyTorch checkpoint (`.pth`, `.pt`, `.th`: parameters, at the top or under `state_dict`,
            with or without `module.` before their names) or a safetensors file. Without it: random weights.
        device: the device of the network.
        mean: the mean of each input channel. By default that in the file, or else the usual one.
        std: the standard deviation of each input channel, likewise.
        size: height and width of the images, for networks of timm and torchvision. By default that in the
            file, or else the usual one.

    """
    record = record_of(name, size)
    checkpoint = None if weights is None else _opened(Path(weights))
    header: dict[str, Any] = {}
    if checkpoint is None:
        network = record.build(10)
    else:
        header = _checked_header(checkpoint, name, record)
        record = record_of(name, size or _size(header))
        network = _restored(checkpoint, name, record)

    def channels(given: Sequence[float] | None, key: str, usual: Channels) -> Channels:
        return tuple(float(value) for value in (given or header.get(key) or usual))

    return Loaded(
        name,
        network.to(device).eval(),
        channels(mean, "mean", record.mean),
        channels(std, "std", record.std),
        size or _size(header),
        tuple(header.get("class_names", ())),
    )


def weights_of(tensors: Mapping[str, _T]) -> dict[str, _T]:
    """The entries of the network's own tensors, without the state of the optimiser."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(tuple(STATES.values()))}


def restore(network: nn.Module, weights: str | PathLike[str], name: str) -> None:
    """Give a network of any kind the weights of a checkpoint. An error names the tensors that differ."""
    checkpoint = _opened(Path(weights))
    with artifact.reading(checkpoint.path):
        state = checkpoint.read()
    _check(network.state_dict(), state, name, checkpoint.path)
    network.load_state_dict(state, strict=False)


@dataclass(frozen=True)
class _Checkpoint:
    """An opened file of parameters."""

    path: Path
    header: dict[str, Any]
    """Its header. Empty if it is not a file of this library."""
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    read: Callable[[], dict[str, Tensor]]
    """Reads the parameters."""


def _opened(path: Path) -> _Checkpoint:
    if not path.is_file():
        raise ArtifactError(f"there is no checkpoint {path}")
    if path.suffix == ".safetensors":
        return _opened_safetensors(path)
    state = _loaded(path)
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    return _Checkpoint(path, {}, shapes, lambda: state)


def _opened_safetensors(path: Path) -> _Checkpoint:
    """A safetensors file. Files of this library are compared with their checksums, others have none."""
    try:
        file = artifact.File(path)
    except ArtifactError as error:
        raise ArtifactError(f"not a readable safetensors file: {error}") from None
    header = file.header()
    names = {name: name.removeprefix("module.") for name in file.layout}
    shapes = {names[name]: (stored.dtype, stored.shape) for name, stored in file.layout.items()}
    if header is None:
        return _Checkpoint(
            path, {}, shapes, lambda: {short: file.tensor(name) for name, short in names.items()}
        )
    if "objective" not in header:
        kind = "guard" if header.get("detector") == "Guard" else "detector"
        raise ArtifactError(f"{path} is a {kind}, not a checkpoint of a network")
    fields = {name: artifact.Field(stored.shape) for name, stored in file.layout.items()}
    shapes = weights_of(shapes)
    return _Checkpoint(path, header, shapes, lambda: weights_of(artifact.Saved(file, header).tensors(fields)))


def _loaded(path: Path) -> dict[str, Tensor]:
    """The parameters of a file that PyTorch wrote."""
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # a damaged file can raise nearly anything
        raise ArtifactError(
            f"{path} cannot be read as parameters alone: it is damaged, or holds a whole pickled module, "
            "which would run code. docs/checkpoints.md shows how to convert such a file once. "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ) from None
    if isinstance(state, Mapping):
        state = next((state[key] for key in ("state_dict", "model") if key in state), state)
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        raise ArtifactError(
            f"{path} does not hold parameters by name, at its top or under 'state_dict' or 'model'"
        )
    return {name.removeprefix("module."): value for name, value in state.items()}


def _checked_header(checkpoint: _Checkpoint, name: str, record: NetworkRecord) -> dict[str, Any]:
    """The header of the file, with its types checked."""
    header, channels = checkpoint.header, len(record.mean)
    with artifact.reading(checkpoint.path):
        for key, hint in _HEADER.items():
            if key in header:
                artifact.check_types(header, **{key: hint})
        if header.get("network", name) != name:
            raise ArtifactError(f"{checkpoint.path} holds a '{header['network']:.60}', not a '{name}'")
        if any(len(header.get(key) or record.mean) != channels for key in ("mean", "std")):
            raise ValueError(f"its mean or std is not of {channels} channel(s)")
        if min(header.get("std") or record.std) <= 0:
            raise ValueError("its std must be positive")
        if "class_names" in header and len(header["class_names"]) != header.get("classes"):
            raise ValueError(f"it names {len(header['class_names'])} classes and has {header.get('classes')}")
        shape = header.get("shape")
        if shape is not None and (len(shape) != 3 or shape[0] != channels or min(shape) < 1):
            raise ValueError(f"its shape {shape} is not that of an image of {channels} channel(s)")
    return header


def _size(header: Mapping[str, Any]) -> int | None:
    """Height and width of the images, if the header holds their shape and they are square."""
    shape = header.get("shape")
    return None if shape is None or shape[1] != shape[2] else int(shape[1])


_HEADER: dict[str, Any] = {
    "network": str,
    "classes": int,
    "objective": str,
    "settings": dict[str, Any],
    "mean": list[float] | None,
    "std": list[float] | None,
    "shape": list[int],
    "class_names": list[str],
}
"""The entries about the network in the header of a file of this library."""


def _restored(checkpoint: _Checkpoint, name: str, record: NetworkRecord) -> nn.Module:
    """The network with the weights of a file. Names and shapes are compared before memory is taken."""
    with torch.device("meta"):
        state = {key: torch.empty(shape, dtype=kind) for key, (kind, shape) in checkpoint.shapes.items()}
        network = _built(checkpoint, record, state)
    _check(network.state_dict(), state, name, checkpoint.path)
    with artifact.reading(checkpoint.path):
        state = checkpoint.read()
    network = _built(checkpoint, record, state)
    network.load_state_dict(state, strict=False)
    return network


def _built(checkpoint: _Checkpoint, record: NetworkRecord, state: Mapping[str, Tensor]) -> nn.Module:
    """The network without its weights. It has as many classes as the last linear layer of the file."""
    with artifact.reading(checkpoint.path):
        network, header = _new_network(record, 10), checkpoint.header
        linear = [key for key, module in network.named_modules() if isinstance(module, nn.Linear)]
        head = linear[-1] if linear else ""
        rows = state.get(f"{head}.weight", state.get(f"{head}.labels_0"))
        if rows is not None and rows.ndim:
            if header.get("classes", len(rows)) != len(rows):
                raise ValueError(f"it is of {header['classes']:,} classes, its weights are of {len(rows):,}")
            network = _new_network(record, len(rows))
        elif not linear and "classes" in header:
            network = _new_network(record, header["classes"])
        if "objective" in header:
            for prepare in PREPARE.values():
                prepare(header["objective"], header.get("settings"), network, state)
    return network


def _new_network(record: NetworkRecord, classes: int) -> nn.Module:
    """The network on the current device. On the CPU if its constructor computes with values (RegNet)."""
    try:
        return record.build(classes)
    except (NotImplementedError, RuntimeError):
        if torch.get_default_device().type != "meta":
            raise
        with torch.device("cpu"):
            return record.build(classes)


def _check(
    expected: Mapping[str, Tensor], state: Mapping[str, Tensor], name: str, path: str | PathLike[str] | None
) -> None:
    """Compare names, shapes and types. An error names the tensors that differ."""
    # Checkpoints older than PyTorch 0.4.1 lack these counters, which matter to training only.
    missing = [k for k in expected if k not in state and not k.endswith("num_batches_tracked")]
    unknown = [key for key in state if key not in expected]
    shapes = [
        f"{key} {tuple(state[key].shape)} instead of {tuple(expected[key].shape)}"
        for key in expected
        if key in state and state[key].shape != expected[key].shape
    ]
    kinds = [
        f"{key} {state[key].dtype} instead of {expected[key].dtype}"
        for key in expected
        if key in state and _kind(state[key]) != _kind(expected[key])
    ]
    wrong = {"missing": missing, "unknown": unknown, "of another shape": shapes, "of another type": kinds}
    problems = [f"{what}: {listed(keys, 3)}" for what, keys in wrong.items() if keys]
    if problems:
        raise ArtifactError(f"{path} does not fit the network '{name}'. {'; '.join(problems)}")


def _kind(tensor: Tensor) -> tuple[bool, bool]:
    """Whether numbers are real, complex or whole. Their precision may differ."""
    return tensor.is_floating_point(), tensor.is_complex()
