"""Batches: inputs of any nesting, loaders, devices, and what is finite."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from gramwatch.errors import InputError

Inputs = Any
"""The arguments of a network: a tensor, a tuple of arguments, or a mapping of keyword arguments."""

Signature = list[list[Any]]
"""For each tensor of an input: the shape of one example, and the dtype. A size that varies is None."""

_T = TypeVar("_T")


AT_ONCE = 256
"""The batch size, if a whole tensor or data set is given instead of a loader."""
LABELS = ("label", "labels", "target", "targets")
"""Keys of a batch that hold labels."""
IMAGES = ("pixel_values", "image", "images", "img", "input", "inputs", "x", "data")
"""Keys of a batch that usually hold the input. They are tried if `forward` has no argument of that name."""


def count_examples(inputs: Inputs) -> int:
    """The number of examples in a batch: the length of its first tensor."""
    if isinstance(inputs, Tensor) and inputs.ndim:
        return inputs.shape[0]  # not len, which torch.export takes for a constant
    first = next(tensors_in(inputs), None)
    if first is None or first.ndim == 0:
        raise InputError(
            f"a batch is a tensor, a tuple of arguments or a mapping of keyword arguments, each with a batch "
            f"axis; got {kind_of(inputs)}. {REMEDY}"
        )
    return first.shape[0]


REMEDY = "Turn batches into tensors as in training, or let inputs=FUNCTION do so: Guard(model, inputs=...)"


def kind_of(value: Any) -> str:
    """A value in words: its type; for a tensor or an array, its dtype and shape too."""
    if isinstance(value, Tensor | np.ndarray):
        kind = "tensor" if isinstance(value, Tensor) else "array"
        return f"a {str(value.dtype).removeprefix('torch.')} {kind} of shape {tuple(value.shape)}"
    if isinstance(value, Mapping) and value:
        return "a mapping of " + ", ".join(f"'{key}': {kind_of(item)}" for key, item in value.items())
    if isinstance(value, tuple | list) and value:
        return f"a {type(value).__name__} of {len(value)}, the first {kind_of(value[0])}"
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"a {name}" if value is not None else "None"


def as_inputs(value: Any, accepts: Callable[[str], bool], dtype: torch.dtype) -> Inputs:
    """The arguments of the network, made from a user's batch.

    Arrays become tensors. A floating-point array gets the dtype of the network. In a mapping, labels are left
    out, and the keys that the network's `forward` accepts become keyword arguments. If `forward` accepts no
    key, one tensor becomes the only argument: the only floating-point tensor, or the tensor under a usual
    key such as "image".
    """

    def tensor(array: Any) -> Any:
        if array.dtype.hasobject:
            return array
        converted = torch.from_numpy(array)
        return converted.to(dtype) if converted.is_floating_point() else converted

    if isinstance(value, Mapping):
        value = _arguments_of({key: item for key, item in value.items() if key not in LABELS}, accepts)
    return mapped(value, tensor, np.ndarray)


def _arguments_of(given: Mapping[str, Any], accepts: Callable[[str], bool]) -> Any:
    named = {key: value for key, value in given.items() if accepts(key)}
    if named:
        return named
    values = {key: value for key, value in given.items() if isinstance(value, Tensor | np.ndarray)}
    floating = [value for value in values.values() if "float" in str(value.dtype)]
    usual = [values[key] for key in IMAGES if key in values]
    if len(floating) == 1 or usual:
        return floating[0] if len(floating) == 1 else usual[0]
    raise InputError(
        f"the network's forward accepts none of the keys of {kind_of(given)}. Name the key of the input, "
        "inputs='KEY', or give a function, inputs=FUNCTION, that makes the network's arguments of a batch"
    )


def split_batch(batch: Any) -> tuple[Any, Any]:
    """The inputs and the labels of a loader's batch.

    They are the first two items of a tuple, or a mapping and the labels in it. Labels may be None.
    """
    if isinstance(batch, Mapping):
        return batch, next((batch[key] for key in LABELS if key in batch), None)
    if isinstance(batch, tuple | list):
        if not batch:
            raise InputError("the loader yielded an empty tuple: its first item must be the input")
        return batch[0], batch[1] if len(batch) > 1 else None
    return batch, None


def batches_in(loader: Iterable[Any]) -> Iterable[Any]:
    """The batches of a loader. A whole tensor, array or data set is split into batches."""
    if isinstance(loader, Tensor | np.ndarray) and loader.ndim:
        return [loader[i : i + AT_ONCE] for i in range(0, len(loader), AT_ONCE)]
    if isinstance(loader, Dataset):
        return DataLoader(loader, batch_size=AT_ONCE)
    if isinstance(loader, Mapping | str | bytes) or not isinstance(loader, Iterable):
        raise InputError(
            f"a loader yields batches, such as a DataLoader or a list of tensors; got {kind_of(loader)}"
        )
    return loader


def on_device(inputs: _T, model: nn.Module) -> _T:
    """The inputs on the device of the network's parameters."""
    device = device_of(model)
    if device is None or (isinstance(inputs, Tensor) and inputs.device == device):
        return inputs
    return mapped(inputs, lambda t: t.to(device, non_blocking=True))  # type: ignore[no-any-return]


def on_device_ahead(batches: Iterable[_T], model: nn.Module) -> Iterator[_T]:
    """The batches on the device of the network. While a GPU works on a batch, it receives the next batch.

    A batch is an input, or any nest of tuples, lists and mappings of tensors.
    """
    device = device_of(model)
    if device is None or device.type != "cuda":
        for batch in batches:
            yield on_device(batch, model)
        return
    copying = torch.cuda.Stream(device)
    ahead: list[tuple[_T, torch.cuda.Event]] = []

    def arrived() -> _T:
        batch, copied = ahead.pop()
        working = torch.cuda.current_stream(device)
        working.wait_event(copied)
        for tensor in tensors_in(batch):
            tensor.record_stream(working)
        return batch

    try:
        for batch in batches:
            with torch.cuda.stream(copying):
                moved = on_device(batch, model)
                copied = copying.record_event()
            if ahead:
                yield arrived()
            ahead.append((moved, copied))
    except Exception:
        if ahead:  # the loader failed: the batch before that is still valid
            yield arrived()
        raise
    if ahead:
        yield arrived()


def device_of(model: nn.Module) -> torch.device | None:
    """The device of a network's parameters or buffers. None if the network has neither."""
    place = next(itertools.chain(model.parameters(), model.buffers()), None)
    return None if place is None else place.device


def repeated(inputs: Inputs, times: int) -> Inputs:
    """A batch that repeats the first example of a batch."""
    total = count_examples(inputs)
    if total == 0:
        raise InputError("the batch is empty")

    def repeat(t: Tensor) -> Tensor:
        return t[:1].repeat(times, *[1] * (t.ndim - 1)) if t.ndim and t.shape[0] == total else t

    return mapped(inputs, repeat)


def mapped(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """The same nest of tuples, lists and mappings, with every tensor replaced by `change(tensor)`.

    Other values than tensors may be replaced: those of a `kind`.
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, Mapping):
        return {k: mapped(v, change, kind) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return tuple(mapped(v, change, kind) for v in value)
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a nest of tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from tensors_in(v)
    elif isinstance(value, tuple | list):
        for v in value:
            yield from tensors_in(v)


_SMALL = 4096
"""Tensors with at most this many numbers per example are joined and checked in one call.

Copying so few numbers costs less than a call.
"""


def all_finite(*inputs: Inputs) -> Tensor:
    """Whether all inputs of an example are finite, `(N,)`."""
    total = count_examples(inputs[0])
    every = [t for nest in inputs for t in ((nest,) if isinstance(nest, Tensor) else tensors_in(nest))]
    tensors = [t for t in every if t.ndim and t.shape[0] == total]
    floating = [t for t in tensors if t.is_floating_point() and t.numel()]
    if not floating:
        return torch.ones(total, dtype=torch.bool, device=tensors[0].device)
    # The largest magnitude is below infinity if and only if all values are finite: NaN is not below infinity.
    # Every batch is checked, and on a GPU a call costs more than its work: so small tensors are joined.
    small: list[Tensor] = []
    large: list[Tensor] = []
    for t in floating:
        is_small = t.numel() <= _SMALL * total and t.dtype == torch.float32
        (small if is_small else large).append(t)
    joined = [torch.cat([t.reshape(total, -1) for t in small], 1)] if len(small) > 1 else small
    largest = [
        # Over all axes: a tensor whose channels are last would be copied to make one axis of them.
        torch.linalg.vector_norm(t, torch.inf, tuple(range(1, t.ndim))) if t.ndim > 1 else t.abs()
        for t in (*large, *joined)
    ]
    finite: list[Tensor] = [magnitude < torch.inf for magnitude in largest]
    return functools.reduce(torch.logical_and, finite)


def signature(inputs: Inputs) -> Signature:
    """The signature of an input, by which later inputs of another form are recognised."""
    tensors = (inputs,) if isinstance(inputs, Tensor) else tensors_in(inputs)
    return [[list(t.shape[1:]), str(t.dtype).removeprefix("torch.")] for t in tensors]


def same_form(given: list[list[Any]], fitted: list[list[Any]]) -> bool:
    """Whether a detector fitted on inputs of one signature can judge inputs of another.

    Sizes may differ. The number of axes and the kind of numbers must be equal. All floating-point types are
    one kind, so a network in half precision takes the same inputs.
    """
    if len(given) != len(fitted):
        return False
    pairs = zip(given, fitted, strict=True)
    return all(
        len(shape) == len(then)
        and _kind(dtype) == _kind(dtype_then)
        and (_kind(dtype) == "whole" or _same_channels(shape, then))
        for (shape, dtype), (then, dtype_then) in pairs
    )


def _kind(dtype: str) -> str:
    """The kind of numbers in a tensor: measurements, or whole numbers such as tokens and masks."""
    return "float" if "float" in dtype else "whole" if dtype in ("int32", "int64", "bool") else dtype


def _same_channels(shape: list[int], fitted: list[int | None]) -> bool:
    """Whether two examples have the same number of channels.

    In a vector, all numbers are channels. If there are two axes, one of them may be time and may differ. If
    there are more axes, the channels are the first or the last axis, whichever is shorter.
    """
    if len(shape) > 2:
        ends = [axis for axis in (0, -1) if fitted[axis] is not None]
        channels = min(ends, key=lambda axis: fitted[axis] or 0)
        return shape[channels] == fitted[channels]
    differing = sum(size != then for size, then in zip(shape, fitted, strict=True))
    return differing == 0 or differing < len(shape)


def same_size(given: list[list[Any]], fitted: list[list[Any]]) -> bool:
    """Whether the fit has seen inputs of this size. A size that varied in the fit may have any value."""
    pairs = zip(given, fitted, strict=True)
    return all(n == m or m is None for (a, _), (b, _) in pairs for n, m in zip(a, b, strict=True))


def widened(fitted: list[list[Any]], given: list[list[Any]]) -> list[list[Any]]:
    """The signature that covers both signatures. A size that differs becomes None."""
    pairs = zip(fitted, given, strict=True)
    return [
        [[n if n == m else None for n, m in zip(a, b, strict=True)], dtype] for (a, dtype), (b, _) in pairs
    ]


def without_length(form: Signature, length: int) -> Signature:
    """The signature of padded inputs. Their length is that of the longest in the batch, and may be any."""
    return [[[None, *shape[1:]] if shape[:1] == [length] else shape, dtype] for shape, dtype in form]


def described(inputs: list[list[Any]]) -> str:
    """A signature in words."""

    def sizes(shape: list[int | None]) -> str:
        return str(tuple("any" if n is None else n for n in shape)).replace("'", "")

    return " and ".join(f"{dtype} {sizes(shape)}" for shape, dtype in inputs)
