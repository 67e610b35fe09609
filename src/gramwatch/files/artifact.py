"""Saving and loading a fitted detector: one safetensors file with a JSON header. No pickle anywhere.

The header holds everything but the tensors. It determines the names, shapes and types of the tensors. These
are compared with the file before memory is taken. Then the tensors are read, and their numbers are checked.
Checksums of the header and of the tensors reveal damage. A file is opened only once. So header and tensors
belong together, even if another process replaces the file meanwhile.
"""

import hashlib
import json
import math
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from gramwatch.errors import ArtifactError
from gramwatch.files import __version__

FORMAT = 1
"""The version of the file's layout. Files of every version up to this one can be read."""
MOST_HEADER = 100_000_000
"""The longest header, in bytes. The safetensors library has the same limit."""
MOST_VALUES = 1_000_000
"""The most values in a header. A small value takes a hundred times its bytes of memory."""
MOST_AXES = 64
"""The largest number of axes of a tensor. PyTorch has the same limit."""
ADAPTERS: dict[str, Any] = {
    "inputs": str | None,
    "logits": str | int | None,
    "mask": str | Literal[False] | None,
}
"""The types of the adapters in a file. None stands for a function, which must be given again."""
_PIECE = 2**22
"""The number of values in one check."""


# --- what a file must hold ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A condition on the values of a tensor, in words and as a test."""

    text: str
    holds: Callable[[Tensor], bool]


def _everywhere(test: Callable[[Tensor], Tensor]) -> Callable[[Tensor], bool]:
    return lambda t: all(bool(test(piece).all()) for piece in t.flatten().split(_PIECE))


def _ascends(t: Tensor) -> bool:
    return FINITE.holds(t) and bool((t[1:] >= t[:-1]).all())


FINITE = Rule("finite", _everywhere(torch.isfinite))
NOT_NEGATIVE = Rule("finite and not negative", _everywhere(lambda t: t.isfinite() & (t >= 0)))
POSITIVE = Rule("finite and positive", _everywhere(lambda t: t.isfinite() & (t > 0)))
POSITIVE_OR_INFINITE = Rule("positive", _everywhere(lambda t: t > 0))
NO_NAN = Rule("numbers", _everywhere(lambda t: ~t.isnan()))
ASCENDING = Rule("finite and ascending", _ascends)


def within(lowest: int, highest: int) -> Rule:
    """Numbers in a range, both ends included."""
    return Rule(f"from {lowest} to {highest}", _everywhere(lambda t: (t >= lowest) & (t <= highest)))


@dataclass(frozen=True)
class Field:
    """The requirements on one tensor of a file."""

    shape: tuple[int | str, ...]
    """Sizes as numbers or names. A name stands for the same size in all fields of a file."""
    dtype: torch.dtype | None = None
    """None: any type."""
    rule: Rule | None = None
    """None: any numbers."""
    optional: bool = False
    """Whether a file is complete without this tensor."""
    reduce: Literal["sum", "min", "max", "mean", "sample"] | None = None
    """How the tensors of two sets of examples are joined. "mean" is weighted by the tensor `count_`. "sample"
    has a row for each example: those with the smallest numbers in the tensor `keys_` are kept.
    None: this tensor alone does not determine the joined tensor."""


Shapes = dict[str, Field]
"""The fields of a file's tensors, by name."""


def shapes_of(header: Mapping[str, Any]) -> Shapes:
    """The fields that the header lists under "shapes". They allow any type and any numbers."""
    shapes = header["shapes"]
    if not isinstance(shapes, dict) or not all(fits(shape, list[int]) for shape in shapes.values()):
        raise ValueError("its header does not list the shapes of its tensors")
    return {name: Field(tuple(shape)) for name, shape in shapes.items()}


NEVER_EMPTY = frozenset({"classes", "examples", "taps", "width"})
"""The names of sizes that must be at least one."""


def resolved(fields: Mapping[str, Field], given: Shapes) -> Shapes:
    """The declared fields of the tensors in a file, with the file's sizes instead of names."""
    sizes: dict[str, int] = {}
    fields_of_file: Shapes = {}
    for name, listed in given.items():
        if name not in fields:
            raise ValueError(f"the tensor '{name}' does not belong there")
        declared = fields[name].shape
        fitting = len(declared) == len(listed.shape)
        for size, actual in zip(declared, listed.shape, strict=False):
            if actual == 0 and size in NEVER_EMPTY:
                raise ValueError(f"the tensor '{name}' is of no {size}")
            fitting &= actual == (sizes.setdefault(size, int(actual)) if isinstance(size, str) else size)
        if not fitting:
            raise ValueError(f"the tensor '{name}' has shape {listed.shape}, which does not fit the others")
        fields_of_file[name] = replace(fields[name], shape=listed.shape)
    return fields_of_file


def fits(value: Any, hint: Any) -> bool:
    """Whether a value read from JSON has the type of a type hint. Numbers must be finite."""
    if hint is Any or hint is None or hint is NoneType:
        return hint is Any or value is None
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(fits(value, argument) for argument in arguments)
    if origin is Literal:
        return value in arguments
    if origin is dict:
        return isinstance(value, dict) and all(fits(item, arguments[1]) for item in value.values())
    if origin is not None:
        return isinstance(value, list) and all(fits(item, arguments[0]) for item in value)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is hint


def check_types(values: Mapping[str, Any], **hints: Any) -> None:
    """Make sure that a header has the named values, with the types of the hints."""
    for name, hint in hints.items():
        if not fits(values[name], hint):
            raise ValueError(f"{name} cannot be {values[name]!r:.60}")


def check_settings(kind: type, settings: Mapping[str, Any]) -> None:
    """Make sure that settings read from a header have the types that the constructor declares."""
    hints: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if "__init__" in vars(base):
            hints |= get_type_hints(vars(base)["__init__"])
    known = {name: hint for name, hint in hints.items() if name in settings}
    if not isinstance(settings, dict) or settings.keys() - known.keys():
        raise ValueError(f"its settings are {settings!r:.60}")
    check_types(settings, **known)


# --- one open file -----------------------------------------------------------------------------------

_DTYPES = {
    name: getattr(torch, dtype)
    for name, dtype in {
        "BOOL": "bool",
        "U8": "uint8",
        "I8": "int8",
        "F8_E5M2": "float8_e5m2",
        "F8_E4M3": "float8_e4m3fn",
        "U16": "uint16",
        "I16": "int16",
        "F16": "float16",
        "BF16": "bfloat16",
        "U32": "uint32",
        "I32": "int32",
        "F32": "float32",
        "C64": "complex64",
        "U64": "uint64",
        "I64": "int64",
        "F64": "float64",
    }.items()
}


@dataclass(frozen=True)
class Stored:
    """Shape, type and position of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int


class File:
    """A safetensors file, opened once. Its layout is read and checked at once, its tensors on request."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"there is no file {self.path}")
        self._file = self.path.open("rb")
        weakref.finalize(self, self._file.close)
        with reading(self.path):
            self.metadata, self.layout = self._described()

    def _described(self) -> tuple[dict[str, str], dict[str, Stored]]:
        size = os.fstat(self._file.fileno()).st_size
        start = self._file.read(8)
        if len(start) < 8:
            raise ArtifactError(f"{self.path} is truncated or not a safetensors file: it has {size} bytes")
        (length,) = struct.unpack("<Q", start)
        if length > min(size - 8, MOST_HEADER):
            raise ArtifactError(
                f"{self.path} is truncated or not a safetensors file: its header should have {length:,} "
                f"bytes, the file has {size:,}, and at most {MOST_HEADER:,} are read"
            )
        layout = parsed(self._file.read(length))
        metadata = layout.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("its metadata are not text")
        stored = {name: _stored(entry, 8 + length) for name, entry in layout.items()}
        end = max((tensor.stop for tensor in stored.values()), default=8 + length)
        if size < end:
            raise ArtifactError(f"{self.path} is truncated: {end:,} bytes were written, {size:,} are there")
        end = 8 + length
        for tensor in sorted(stored.values(), key=lambda tensor: (tensor.start, tensor.stop)):
            if tensor.start != end:
                raise ValueError("its tensors do not lie side by side")
            end = tensor.stop
        if size > end:
            raise ValueError(f"{end:,} bytes were written, {size:,} are there")
        return metadata, stored

    def header(self) -> dict[str, Any] | None:
        """The header that `write` wrote, checked. None if the file is not of this library."""
        text = self.metadata.get("gramwatch")
        if text is None:
            if any('"checksum"' in other and '"tensors"' in other for other in self.metadata.values()):
                raise ArtifactError(f"{self.path} is corrupt: its header has another name")
            return None
        with reading(self.path):
            header = parsed(text)
            version = header["format"]
            if type(version) is not int:
                raise ArtifactError(f"{self.path} is corrupt: its format is {version!r:.60}")
            if version > FORMAT:
                raise ArtifactError(
                    f"{self.path} has format {version}, written by gramwatch {header.get('library')!s:.60}; "
                    f"this is {__version__}, which reads up to format {FORMAT}: upgrade gramwatch"
                )
            if header.pop("checksum") != _header_checksum(header):
                raise ArtifactError(f"{self.path} is corrupt: its header does not match its checksum")
            return header

    def tensor(self, name: str) -> Tensor:
        """One tensor, in memory of its own."""
        stored = self.layout[name]
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        bits = tensor.flatten().view(torch.uint8)
        self._file.seek(stored.start)
        if self._file.readinto(bits.numpy().data) != stored.stop - stored.start:
            raise ArtifactError(f"{self.path} is truncated: '{name}' is not all there")
        if stored.dtype == torch.bool and not within(0, 1).holds(bits):
            raise ArtifactError(f"{self.path} is corrupt: '{name}' holds more than true and false")
        return tensor


def parsed(text: str | bytes) -> dict[str, Any]:
    """The object in a text of JSON from a file. Bytes are UTF-8 without a mark at the beginning.

    Refused are numbers that are none, names that come twice, and more values than `MOST_VALUES`: small values
    take a hundred times their bytes of memory.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number")

    def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        named = dict(pairs)
        if len(named) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"it has the name {next(n for n in names if names.count(n) > 1)!r:.60} twice")
        return named

    if count_values(text) > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES:,} values")
    text = text.decode() if isinstance(text, bytes) else text
    value = json.loads(text, parse_constant=refuse, object_pairs_hook=without_repetition)
    if not isinstance(value, dict):
        raise ValueError("its header is not an object")
    return value


def count_values(text: str | bytes) -> int:
    """The number of values in a text of JSON, or more: commas and brackets within strings count, too."""
    marks: tuple[Any, ...] = (b",", b"[", b"{") if isinstance(text, bytes) else (",", "[", "{")
    return sum(text.count(mark) for mark in marks)


def _stored(entry: Any, data: int) -> Stored:
    """One entry of the layout. Its offsets are relative to `data`, where the data begin."""
    shape, (start, stop) = entry["shape"], entry["data_offsets"]
    if len(shape) > MOST_AXES:
        raise ValueError(f"a tensor has {len(shape):,} axes")
    if not fits([*shape, start, stop], list[int]) or min([*shape, start], default=0) < 0:
        raise ValueError(f"a tensor has shape {shape!r:.60} and lies from {start!r:.30} to {stop!r:.30}")
    dtype = _DTYPES[entry["dtype"]]
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {shape!r:.60} has {stop - start:,} bytes")
    return Stored(tuple(shape), dtype, data + start, data + stop)


class Storable(Protocol):
    """An object that can be read from a file: first its header, then its tensors."""

    metadata: dict[str, Any]

    @classmethod
    def described(cls: "type[_S]", header: Mapping[str, Any], model: Any) -> "tuple[_S, Shapes]":
        """The object without its tensors, and the fields that its tensors must match."""

    def restore(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Set the tensors."""


_S = TypeVar("_S", bound=Storable)


@dataclass
class Saved:
    """An opened file of this library. Its header has been read and checked, its tensors have not."""

    file: File
    header: dict[str, Any]
    same_weights: bool = True
    """False after a load that accepted other weights than those of the fit."""

    @property
    def path(self) -> Path:
        """The path that was opened."""
        return self.file.path

    @property
    def adapters(self) -> dict[str, Any]:
        """The adapters of the network that the file names, checked. Names of Python's own are refused."""
        adapters = self.header.get("adapters", {})
        with reading(self.path):
            if not isinstance(adapters, dict) or adapters.keys() - ADAPTERS.keys():
                raise ValueError(f"its adapters are {adapters!r:.60}")
            check_types(adapters, **{name: ADAPTERS[name] for name in adapters})
            if any(isinstance(value, str) and value.startswith("__") for value in adapters.values()):
                raise ValueError(f"its adapters are {adapters!r:.60}")
        return adapters

    def tensors(self, expected: Shapes) -> dict[str, Tensor]:
        """The tensors. An error says which one does not match its expected field."""
        self._compare(expected)
        tensors = {name: self.file.tensor(name) for name in expected}
        if _checksum(tensors.items()) != self.header.get("tensors"):
            raise ArtifactError(f"{self.path} is corrupt: its tensors do not match their checksum")
        for name, tensor in tensors.items():
            rule = expected[name].rule
            if rule is not None and not rule.holds(tensor):
                raise ArtifactError(f"{self.path}: the tensor '{name}' must be {rule.text}")
        return tensors

    def _compare(self, expected: Shapes) -> None:
        """Compare names, shapes and types with the file's layout. This takes no memory."""
        layout = self.file.layout
        for name in sorted(expected.keys() | layout.keys()):
            if name not in layout:
                raise ArtifactError(f"{self.path}: the tensor '{name}' is missing")
            if name not in expected:
                raise ArtifactError(f"{self.path}: the tensor '{name}' does not belong there")
            stored, field = layout[name], expected[name]
            if stored.shape != field.shape:
                raise ArtifactError(
                    f"{self.path}: the tensor '{name}' has shape {stored.shape}, "
                    f"its header says {field.shape}"
                )
            if field.dtype not in (None, stored.dtype):
                raise ArtifactError(
                    f"{self.path} is corrupt: the tensor '{name}' is {stored.dtype}, not {field.dtype}"
                )

    def check_network(self, model: nn.Module, accept_other_weights: bool) -> None:
        """Make sure that `model` is the network the detector was fitted on."""
        now = fingerprint(model)
        with reading(self.path):
            then = self.header["network"]
            check_types(then, structure=str, weights=str, parameters=int)
            if then["structure"] != now["structure"]:
                raise ArtifactError(
                    f"{self.path} was fitted on another network: the names or shapes of parameters differ "
                    f"({then['parameters']:,} parameters then, {now['parameters']:,} now)"
                )
            self.same_weights = then["weights"] == now["weights"]
            if not self.same_weights and not accept_other_weights:
                raise ArtifactError(
                    f"{self.path} was fitted on a network of the same form with other weights. Load the "
                    "weights it was fitted with, fit anew, or pass accept_other_weights=True"
                )

    def batches(self) -> int:
        """The number of batches in the checkpoint of a fit."""
        batches = self.header.get("batches")
        if type(batches) is not int or batches < 0:
            raise ArtifactError(f"{self.path} is a finished detector, not the checkpoint of a fit")
        return batches

    def restored(self, kind: type[_S], model: Any, network: nn.Module, accept_other_weights: bool) -> _S:
        """The detector in the file, for a model: a network, perhaps with adapters."""
        name, held = getattr(kind, "name", kind.__name__), self.header["detector"]
        if held != name:
            raise ArtifactError(f"{self.path} holds a {held!r:.60}, not a '{name}'")
        self.check_network(network, accept_other_weights)
        with reading(self.path):
            check_types(self.header, metadata=dict)
            detector, shapes = kind.described(self.header, model)
            detector.metadata = self.header["metadata"]
        tensors = self.tensors(shapes)
        with reading(self.path):
            detector.restore(self.header, tensors)
        return detector


def read(path: str | PathLike[str]) -> Saved:
    """Open the file of a detector and check its header. The tensors are read later."""
    saved = opened(path)
    with reading(saved.path):
        check_types(saved.header, detector=str)
        saved.header["network"]
    return saved


def opened(path: str | PathLike[str]) -> Saved:
    """Open any file that `write` wrote and check its header."""
    file = File(path)
    header = file.header()
    if header is None:
        raise ArtifactError(f"{path} is a safetensors file, but not one that gramwatch wrote")
    return Saved(file, header)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error caused by a file's contents into an `ArtifactError` that names the file."""
    try:
        yield
    except ArtifactError as error:
        if str(path) in str(error):
            raise
        raise ArtifactError(f"{path}: {error}") from None
    except (OSError, MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        raise ArtifactError(f"{path} is corrupt: {type(error).__name__}: {error!s:.500}") from error


# --- writing -----------------------------------------------------------------------------------------


def write(path: str | PathLike[str], header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a file, whole or not at all: see `writing.replacing`."""
    from gramwatch.files.writing import check_writable, replacing

    check_writable(path)
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    whole = {"format": FORMAT, "library": __version__, "tensors": _checksum(kept.items()), **header}
    if not isinstance(whole.get("metadata", {}), dict):
        raise ArtifactError(f"the detector's metadata must be a dictionary, not {whole['metadata']!r}")
    try:
        # The checksum is of the values as they will be read: JSON turns tuples into lists and keys into text.
        whole = json.loads(json.dumps(whole, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ArtifactError(f"the detector's metadata must be plain JSON values: {error}") from None
    text = json.dumps({**whole, "checksum": _header_checksum(whole)})
    if len(text) > MOST_HEADER // 2:  # the other half is for escaped quotes
        raise ArtifactError(f"the detector's metadata are too long: its header has {len(text):,} bytes")
    if count_values(text) > MOST_VALUES:
        raise ArtifactError(f"the detector's metadata are too long: over {MOST_VALUES:,} values")
    with replacing(path) as beside:
        try:
            save_file(kept, beside, metadata={"gramwatch": text})
        except SafetensorError as error:
            raise OSError(str(error)) from error


# --- taps and networks -------------------------------------------------------------------------------


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """The identity of a network: checksums of the names and shapes, and of the values, of its tensors.

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
