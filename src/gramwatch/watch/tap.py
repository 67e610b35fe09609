"""A tap, which is one watched tensor of a network, and the taps of a network in their order."""

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_type_hints, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from gramwatch.errors import TapError
from gramwatch.files.artifact import check_types
from gramwatch.numerics.samples import as_maps


def mark(x: Tensor, name: str) -> Tensor:
    """Give a tensor inside a network a name under which it can be tapped. The tensor is returned unchanged.

    Use it for tensors that are not the output of a convolution or an activation, such as a residual sum. A
    marked tensor is watched only if it is chosen by its name: `taps=["layer1.*.sum"]`.
    """
    if has_torch_function_unary(x):
        return handle_torch_function(mark, (x,), x, name)
    return x


@dataclass(frozen=True)
class Tap:
    """One watched tensor of a network.

    Attributes:
        name: the module that computes it, e.g. `layer1.0.conv1`. If that module makes other calls too, the
            name of the function follows (`layer1.0.relu`). If a name occurs again, `#2` follows.
        kind: `convolution`, `linear`, `recurrent`, `activation`, `attention` or `mark`.
        operation: the PyTorch function that computes it.
        shape: its shape for a batch of one. The size along `batch_axis` is 1. It is larger if the network
            folds windows, frames or the like into the batch.
        batch_axis: the axis that grows with the batch.
        channel_axis: the axis of the channels. All other axes are pixels. It is the batch axis if the network
            folds its channels into the batch.
        call: its position among the watched calls of one forward pass.
        examples_first: the order along a batch axis that holds more than examples. True: all entries of one
            example come before the next example.

    """

    name: str
    kind: str
    operation: str
    shape: tuple[int, ...]
    batch_axis: int
    channel_axis: int
    call: int
    examples_first: bool = True

    @property
    def channels(self) -> int:
        """The number of channels."""
        return self.shape[self.channel_axis]

    @property
    def pixels(self) -> int:
        """The number of pixels of a channel."""
        return torch.Size(self.shape).numel() // self.channels

    @property
    def is_plain(self) -> bool:
        """Whether the tensor is batch x channels x pixels, and nothing is folded into the batch."""
        return (self.batch_axis, self.channel_axis) == (0, 1) and self.shape[0] == 1

    @property
    def is_vector(self) -> bool:
        """Whether the tensor has one vector for every example, and no pixels."""
        return len(self.shape) == 2 and self.shape[self.batch_axis] == 1

    def maps(self, x: Tensor, examples: int) -> Tensor:
        """The tensor of a batch as `(examples, channels, pixels)`, copied only if its strides require it.

        If nothing is folded into the batch, the number of pixels may differ from that of `shape`.
        """
        return as_maps(*self.examples_apart(x, examples))

    def examples_apart(self, x: Tensor, examples: int) -> tuple[Tensor, int]:
        """The tensor of a batch with the examples alone on its first axis, and the axis of its channels."""
        fold = self.shape[self.batch_axis]
        expected = list(self.shape)
        expected[self.batch_axis] = fold * examples
        if list(x.shape) != expected and not self._differs_in_pixels_only(x.shape, expected):
            folded = ". Its batch axis holds more than examples: use inputs of one size" if fold > 1 else ""
            raise TapError(
                f"tap '{self.name}' has shape {tuple(x.shape)}, expected {tuple(expected)}: the network "
                f"treats this input differently from the one its taps were found with{folded}"
            )
        if fold == 1 and self.batch_axis == 0 and self.channel_axis > 0:  # as in nearly every network
            return x, self.channel_axis
        parts = (examples, fold) if self.examples_first else (fold, examples)
        x = x.unflatten(self.batch_axis, parts).movedim(self.batch_axis + (not self.examples_first), 0)
        return x, self.channel_axis + 1  # `unflatten` has added an axis before it

    def alike(self, other: "Tap") -> bool:
        """Whether another tap is equal except for the number of pixels, which depends on the input size."""
        same = self.shape == other.shape or self._differs_in_pixels_only(other.shape, self.shape)
        return same and replace(other, shape=self.shape) == self

    def _differs_in_pixels_only(self, shape: Sequence[int], expected: Sequence[int]) -> bool:
        """Whether a shape has the expected examples and channels. False if more is folded into the batch."""
        fixed = (self.batch_axis, self.channel_axis)
        if self.shape[self.batch_axis] != 1 or len(shape) != len(expected) or 0 in shape:
            return False
        return all(shape[axis] == expected[axis] for axis in fixed)


class Taps(Sequence[Tap]):
    """The taps of one network, in the order of their calls. Prints as a table."""

    def __init__(self, taps: Iterable[Tap], operations: Iterable[str]) -> None:
        self.listed = tuple(taps)
        """The taps in their order."""
        self.operations = tuple(operations)
        """Every watched call of a forward pass, tapped or not. The network must repeat these calls."""
        self.names = [tap.name for tap in self.listed]
        """The taps' names, in order."""
        # The rest is used in every pass, and computed only once.
        self.numbers = {tap.call: number for number, tap in enumerate(self.listed)}
        """The number of each tap, by its watched call."""
        self.marked = any(tap.kind == "mark" for tap in self.listed)
        """Whether a tap is a marked tensor. It may be the same tensor as that of an earlier tap."""
        self.plain = tuple(tap.channels if tap.is_plain else -1 for tap in self.listed)
        """The channels of taps that are batch x channels x pixels, -1 for others."""

    @overload
    def __getitem__(self, index: int) -> Tap: ...
    @overload
    def __getitem__(self, index: slice) -> "Taps": ...
    def __getitem__(self, index: int | slice) -> "Tap | Taps":
        if isinstance(index, slice):
            return Taps(self.listed[index], self.operations)
        return self.listed[index]

    def __len__(self) -> int:
        return len(self.listed)

    def __iter__(self) -> Iterator[Tap]:
        return iter(self.listed)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Taps):
            return NotImplemented
        return self.listed == other.listed and self.operations == other.operations

    def __hash__(self) -> int:
        return hash((self.listed, self.operations))

    def alike(self, other: "Taps") -> bool:
        """Whether other taps are equal except for the number of pixels, which depends on the input size."""
        return (
            self.operations == other.operations
            and len(self) == len(other)
            and all(mine.alike(theirs) for mine, theirs in zip(self, other, strict=True))
        )

    def maps(self, number: int, x: Tensor, examples: int) -> Tensor:
        """The tensor of the tap of this number, as `Tap.maps` returns it."""
        return as_maps(*self.examples_apart(number, x, examples))

    def examples_apart(self, number: int, x: Tensor, examples: int) -> tuple[Tensor, int]:
        """The tensor of the tap of this number, as `Tap.examples_apart` returns it."""
        shape = x.shape
        if len(shape) > 2 and shape[1] == self.plain[number] and shape[0] == examples:
            return x, 1  # as in nearly every convolutional network
        return self.listed[number].examples_apart(x, examples)

    def select(self, patterns: str | Iterable[str]) -> "Taps":
        """Only the taps whose name matches one of the names or globs (`"layer1.*"`)."""
        wanted = [patterns] if isinstance(patterns, str) else list(patterns)
        if not wanted:
            raise TapError("no tap was chosen: give names or globs such as 'layer1.*', or 'all'")
        kept: set[str] = set()
        for pattern in wanted:
            matching = [name for name in self.names if fnmatch.fnmatchcase(name, pattern)]
            if not matching:
                close = difflib.get_close_matches(pattern, self.names, n=3, cutoff=0.3) or self.names[:3]
                raise TapError(
                    f"no tap matches '{pattern}'. There are {len(self)}, such as {', '.join(close)}; "
                    "print(gramwatch.find_taps(model, images)) lists them"
                )
            kept.update(matching)
        return Taps((tap for tap in self if tap.name in kept), self.operations)

    def __repr__(self) -> str:
        rows = [("tap", "operation", "shape", "channel axis")]
        for tap in self:
            sizes: list[object] = list(tap.shape)
            fold = tap.shape[tap.batch_axis]
            sizes[tap.batch_axis] = "N" if fold == 1 else f"{fold} N"
            rows.append((tap.name, tap.operation, " x ".join(map(str, sizes)), str(tap.channel_axis)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([*lines, f"{len(self)} taps"])


def taps_to_json(taps: Taps) -> dict[str, Any]:
    """The taps as plain values, for the header of a file."""
    return {"calls": list(taps.operations), "watched": [asdict(tap) for tap in taps]}


def taps_from_json(value: Mapping[str, Any]) -> Taps:
    """The taps from plain values, checked."""
    check_types(value, calls=list[str], watched=list[dict[str, Any]])
    if not value["watched"]:
        raise ValueError("no tap is watched")
    for entry in value["watched"]:
        check_types(entry, **get_type_hints(Tap) | {"shape": list[int]})
    taps = [Tap(**{**entry, "shape": tuple(entry["shape"])}) for entry in value["watched"]]
    for tap in taps:
        axes = range(len(tap.shape))
        if tap.channel_axis not in axes or tap.batch_axis not in axes or min(tap.shape) < 1:
            raise ValueError(
                f"tap '{tap.name}' has shape {tap.shape}, batch axis {tap.batch_axis} "
                f"and channel axis {tap.channel_axis}"
            )
        if tap.call not in range(len(value["calls"])):
            raise ValueError(f"tap '{tap.name}' is call {tap.call} of {len(value['calls'])}")
    return Taps(taps, value["calls"])
