"""Saving and loading a fitted detector: one safetensors file with a JSON header. No pickle anywhere.

The header holds everything but the tensors; what a file must contain follows from it, and is compared with
what the file does contain before any memory is taken. Checksums of the header and of the tensors find damage.
"""

import hashlib
import json
import struct
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from operator import itemgetter
from os import PathLike
from pathlib import Path
from stat import S_IMODE
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from gramwatch.errors import ArtifactError
from gramwatch.taps import Network, Tap, Taps
from gramwatch.version import __version__

FORMAT = 1
"""The version of the file's layout. Files of every version up to this one can be read."""


Shapes = dict[str, tuple[int, ...]]


class Storable(Protocol):
    """What can be read back: first as its header describes it, then with its tensors."""

    metadata: dict[str, Any]

    @classmethod
    def described(
        cls: "type[_S]", header: Mapping[str, Any], model: nn.Module | Network
    ) -> "tuple[_S, Shapes]":
        """The object without its tensors, and the names and shapes that these must have."""

    def restore(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take over the tensors."""


_S = TypeVar("_S", bound=Storable)


@dataclass
class Saved:
    """An opened file: its header, read and checked; its tensors, not yet read."""

    path: Path
    header: dict[str, Any]

    def tensors(self, expected: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """The tensors, whose names and shapes must be as expected."""
        with reading(self.path), safe_open(self.path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            for name in sorted(expected.keys() | shapes.keys()):
                if name not in shapes:
                    raise ArtifactError(f"{self.path}: the tensor '{name}' is missing")
                if name not in expected:
                    raise ArtifactError(f"{self.path}: the tensor '{name}' does not belong there")
                if shapes[name] != expected[name]:
                    raise ArtifactError(
                        f"{self.path}: the tensor '{name}' has shape {shapes[name]}, "
                        f"its header says {expected[name]}"
                    )
            # Copies: what safetensors returns is the file itself, mapped, and would change or crash with it.
            tensors = {name: file.get_tensor(name).clone() for name in shapes}
            if _checksum(tensors.items()) != self.header["tensors"]:
                raise ArtifactError(f"{self.path} is corrupt: its tensors do not match their checksum")
        return tensors

    def check_network(self, model: nn.Module, accept_other_weights: bool) -> None:
        """Make sure that `model` is the network the detector was fitted on."""
        now = fingerprint(model)
        with reading(self.path):
            then = self.header["network"]
            if then["structure"] != now["structure"]:
                raise ArtifactError(
                    f"{self.path} was fitted on another network: the names or shapes of parameters differ "
                    f"({then['parameters']:,} parameters then, {now['parameters']:,} now)"
                )
            if then["weights"] != now["weights"] and not accept_other_weights:
                raise ArtifactError(
                    f"{self.path} was fitted on a network of the same form with other weights. Load the "
                    "weights it was fitted with, fit anew, or pass accept_other_weights=True"
                )

    def batches(self) -> int:
        """How many batches the checkpoint of a fit holds."""
        batches = self.header.get("batches")
        if not isinstance(batches, int):
            raise ArtifactError(f"{self.path} is a finished detector, not the checkpoint of a fit")
        return batches

    def restored(self, kind: type[_S], model: nn.Module | Network, accept_other_weights: bool) -> _S:
        """The detector that the file holds."""
        self.check_network(Network.of(model).model, accept_other_weights)
        with reading(self.path):
            detector, shapes = kind.described(self.header, model)
            detector.metadata = dict(self.header["metadata"])
        tensors = self.tensors(shapes)
        with reading(self.path):
            detector.restore(self.header, tensors)
        return detector


def write(path: str | PathLike[str], header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a file beside `path`, then put it in place: a failure leaves the old file whole."""
    path = Path(path)
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    whole = {"format": FORMAT, "library": __version__, "tensors": _checksum(kept.items()), **header}
    if not isinstance(whole.get("metadata", {}), dict):
        raise ArtifactError(f"the detector's metadata must be a dictionary, not {whole['metadata']!r}")
    try:
        # As it will be read: JSON turns tuples into lists and keys into text.
        whole = json.loads(json.dumps(whole, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ArtifactError(f"the detector's metadata must be plain JSON values: {error}") from None
    text = json.dumps({**whole, "checksum": _header_checksum(whole)})
    beside = path.parent / f".gramwatch-{uuid.uuid4().hex}"
    try:
        beside.touch()
        mode = (path if path.exists() else beside).stat().st_mode
        save_file(kept, beside, metadata={"gramwatch": text})
        beside.chmod(S_IMODE(mode))  # some versions of safetensors let only the owner read
        beside.replace(path)
    except (OSError, SafetensorError) as error:
        raise OSError(f"cannot write {path}: {error}") from error
    finally:
        with suppress(OSError):
            beside.unlink()


def read(path: str | PathLike[str]) -> Saved:
    """Open the file of a detector and check its header; its tensors are read later."""
    saved = opened(path)
    with reading(saved.path):
        saved.header["detector"], saved.header["network"]
    return saved


def opened(path: str | PathLike[str]) -> Saved:
    """Open any file that `write` wrote and check its header."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    with reading(path):
        _check_length(path)
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("gramwatch")
    if text is None:
        raise ArtifactError(f"{path} is a safetensors file, but not one that gramwatch wrote")
    with reading(path):
        header = dict(json.loads(text))
        version = header["format"]
        if not isinstance(version, int):
            raise ArtifactError(f"{path} is corrupt: its format is {version!r}")
        if version > FORMAT:
            raise ArtifactError(
                f"{path} has format {version}, written by gramwatch {header.get('library')}; "
                f"this is {__version__}, which reads up to format {FORMAT}: upgrade gramwatch"
            )
        if header.pop("checksum") != _header_checksum(header):
            raise ArtifactError(f"{path} is corrupt: its header does not match its checksum")
        return Saved(path, header)


def _check_length(path: Path) -> None:
    """Say plainly that a file is cut short, which safetensors reports in its own terms."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise ArtifactError(f"{path} is truncated or not a safetensors file: it has {size} bytes")
        (length,) = struct.unpack("<Q", start)
        if length > size - 8:
            raise ArtifactError(
                f"{path} is truncated or not a safetensors file: its header should have {length:,} bytes, "
                f"the file has {size:,}"
            )
        layout = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in layout.items() if name != "__metadata__"]
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        raise ArtifactError(f"{path} is truncated: {expected:,} bytes were written, {size:,} are there")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever a file's contents make go wrong is an `ArtifactError` that names the file."""
    try:
        yield
    except (ArtifactError, OSError, MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        raise ArtifactError(f"{path} is corrupt: {type(error).__name__}: {error}") from error


def taps_to_json(taps: Taps) -> dict[str, Any]:
    """The taps as plain values."""
    return {"calls": list(taps.operations), "watched": [asdict(tap) for tap in taps]}


def taps_from_json(value: Mapping[str, Any]) -> Taps:
    """The taps from plain values, checked."""
    taps = [Tap(**{**entry, "shape": tuple(int(n) for n in entry["shape"])}) for entry in value["watched"]]
    for tap in taps:
        axes = range(len(tap.shape))
        if tap.channel_axis not in axes or tap.batch_axis not in axes or min(tap.shape) < 1:
            raise ValueError(
                f"tap '{tap.name}' has shape {tap.shape}, batch axis {tap.batch_axis} "
                f"and channel axis {tap.channel_axis}"
            )
        if not isinstance(tap.examples_first, bool):
            raise ValueError(f"tap '{tap.name}' has examples_first {tap.examples_first!r}")
    return Taps(taps, value["calls"])


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """What identifies a network: the names and shapes of its parameters and buffers, and their values.

    The prefixes that wrappers add to names (`module.`, `_orig_mod.`) are ignored.
    """
    tensors = [(_plain_name(name), t) for name, t in model.state_dict().items() if isinstance(t, Tensor)]
    structure = hashlib.sha256()
    for name, tensor in sorted(tensors, key=itemgetter(0)):
        structure.update(f"{name} {tuple(tensor.shape)}\n".encode())
    return {
        "structure": structure.hexdigest(),
        "weights": _checksum(tensors),
        "parameters": sum(t.numel() for t in model.parameters()),
    }


def _plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


def _header_checksum(header: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header).encode()).hexdigest()


def _checksum(tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=itemgetter(0)):
        tensor = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
