"""Following the tensors of a network through one pass: which calls are watched, and where channels end up."""

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gramwatch.inputs.batches import Inputs, tensors_in
from gramwatch.watch.operations import (
    KINDS,
    LAYOUTS,
    MIXES,
    MOVES,
    PRODUCTS,
    RECURRENT,
    operation_of,
    watched,
)
from gramwatch.watch.running import call, made_by

_T = TypeVar("_T")


@dataclass
class Event:
    """One watched call of the probing pass."""

    operation: str
    kind: str
    module: str
    is_leaf: bool
    module_call: int
    label: str
    output: Tensor
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    sources: frozenset[int]
    """The watched calls whose output the activation was applied to, with no other layer in between."""
    is_constant: bool
    maker: nn.Module | None = None
    """The module without parts that made this call, no other watched call, and returned the result."""


@dataclass(frozen=True)
class _Trace:
    """The facts about a tensor: the axes of its channels, and the watched calls that its values come from.

    The channels have several axes if a network splits them into heads or groups.
    """

    axes: tuple[int, ...] = ()
    sources: frozenset[int] = frozenset()


_Known = list[tuple[Tensor, tuple[int, ...], _Trace]]
"""The traced arguments of a call, with their shapes before the call, which may change them in place."""


class Probe(TorchFunctionMode):
    """Records the watched calls of one pass, and follows the channel axis through all calls between them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.events: list[Event] = []
        self._traces: dict[int, _Trace] = {}
        self._alive = list(_held(model))  # tensors that are kept, so that no id is used twice
        self._constants = {_storage(t) for t in self._alive}
        self._hidden: set[int] = set()  # the watched calls whose values are the input of a later layer
        self._last_output = 0  # the id of the last watched call's result
        self._modules: list[tuple[str, bool, int]] = [("", False, 0)]
        self.logits: Tensor
        """The logits of the pass, set by the caller of `run`."""
        self.packed = False
        """Whether a recurrent layer was given a packed sequence."""

    def run(self, inputs: Inputs) -> Any:
        """The output of the network for these inputs."""
        with self._module_names(), self:
            return call(self.model, inputs)

    @contextmanager
    def _module_names(self) -> Iterator[None]:
        """Keep track of the module that runs, by hooks. The hooks are removed at the end."""
        owner, calls, handles = threading.get_ident(), itertools.count(1), []

        def enter(name: str, is_leaf: bool) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                if threading.get_ident() == owner:
                    self._modules.append((name, is_leaf, next(calls)))

            return hook

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            if threading.get_ident() != owner:
                return
            _, is_leaf, number = self._modules.pop()
            events = [event for event in self.events[-2:] if event.module_call == number]
            if is_leaf and len(events) == 1 and result is not None:
                returned = id(made_by(result))
                events[0].maker = module if returned == self._last_output else None

        try:
            for path, module in self.model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # a scripted module takes no hooks and shows no calls
                name = ".".join(part for part in path.split(".") if part != "_orig_mod")
                is_leaf = bool(path) and not any(True for _ in module.children())
                handles.append(module.register_forward_pre_hook(enter(name, is_leaf)))
                handles.append(module.register_forward_hook(leave, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = operation_of(func)
        given = list(tensors_in((args, kwargs)))
        known = [(t, tuple(t.shape), self._traces[id(t)]) for t in given if id(t) in self._traces]
        is_constant = all(_storage(t) in self._constants for t in given)
        result = func(*args, **kwargs)
        if watched(func, args):
            output = made_by(result)
            for state in tensors_in(result) if operation in RECURRENT else ():
                self._traces[id(state)] = _Trace((state.ndim - 1,))
            self._traces[id(output)] = self._record(operation, args, output, known, given[0], is_constant)
        elif known or operation in LAYOUTS:
            for output in tensors_in(result):
                self._traces[id(output)] = self._followed(func, operation, args, kwargs, output, known)
        self.packed |= operation in RECURRENT and not watched(func, args)
        for output in [*tensors_in(result), *(given[:1] if operation == "__setitem__" else [])]:
            self._alive.append(output)
            (self._constants.add if is_constant else self._constants.discard)(_storage(output))
        return result

    def _record(
        self,
        operation: str,
        args: tuple[Any, ...],
        output: Tensor,
        known: _Known,
        given: Tensor,
        is_constant: bool,
    ) -> _Trace:
        """Record a watched call, and return the facts about its output."""
        kind = KINDS[operation]
        before = next((trace for t, _, trace in known if t is given), _Trace())
        axes, sources = before.axes, before.sources
        if kind not in ("activation", "mark"):
            self._hidden.update(*(trace.sources for _, _, trace in known))
            axes = (1 if kind == "convolution" else output.ndim - 1,)
            sources = frozenset()
        self._last_output = id(output)
        module, is_leaf, module_call = self._modules[-1]
        self.events.append(
            Event(
                operation,
                kind,
                module,
                is_leaf,
                module_call,
                label=args[1] if kind == "mark" else operation,
                output=output.detach(),  # a view: it keeps its shape if `output` changes
                shape=tuple(output.shape),
                axes=axes,
                sources=sources,
                is_constant=is_constant,
            )
        )
        return _Trace(axes, sources if kind == "mark" else frozenset({len(self.events) - 1}))

    def _followed(
        self, func: Any, operation: str, args: Any, kwargs: Any, output: Tensor, known: _Known
    ) -> _Trace:
        """The facts about the output of an unwatched function, from the facts about its arguments."""
        axes: tuple[int, ...] = ()
        sources = frozenset(
            itertools.chain(
                *(trace.sources for _, shape, trace in known if math.prod(shape) == output.numel())
            )
        )
        if operation in MIXES:
            self._hidden.update(*(trace.sources for _, _, trace in known))
            sources = frozenset()
        if known:
            _, shape, trace = next((k for k in known if k[1] == output.shape), known[0])
            axes = trace.axes
            if operation in PRODUCTS and [len(shape) for _, shape, _ in known] == [output.ndim] * 2:
                rows, columns = known[0][2].axes, known[1][2].axes
                axes = tuple(sorted({*rows} - {output.ndim - 1} | {*columns} - {output.ndim - 2}))
            elif axes and (operation in MOVES or len(shape) != output.ndim):
                axes = _moved_axes(func, args, kwargs, output, known)
        if not axes and operation in LAYOUTS:
            axes = (LAYOUTS[operation] % output.ndim,)
        return _Trace(axes, sources)

    def last_operation(self) -> str | None:
        """The watched function whose output the logits are. None if there is none."""
        place = self.logits.data_ptr()
        return next((e.operation for e in reversed(self.events) if e.output.data_ptr() == place), None)

    def logits_calls(self) -> set[int]:
        """The watched calls that computed the logits: the layers, and activations applied to their output."""
        dropped: set[int] = set()
        left = set(self._traces.get(id(self.logits), _Trace()).sources)
        while left := left - self._hidden - dropped:
            number = left.pop()
            dropped.add(number)
            left |= self.events[number].sources
        return dropped


class Sizes(TorchFunctionMode):
    """Records only the names and the output shapes of watched calls, for a batch of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.shapes: list[tuple[int, ...]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operation = watched(func, args)
        if operation is not None:
            self.operations.append(operation)
            self.shapes.append(tuple(made_by(result).shape))
        return result


def sizes_of(model: nn.Module, inputs: Inputs) -> Sizes:
    """The names and the output shapes of the watched calls in a pass over a batch."""
    sizes = Sizes()
    with sizes:
        call(model, inputs)
    return sizes


def _held(model: nn.Module) -> Iterator[Tensor]:
    """The tensors that a network holds before it runs: parameters, buffers, and tensors in its attributes."""
    for value in itertools.chain(*(vars(module).values() for module in model.modules())):
        values = value.values() if isinstance(value, dict) else value
        several = isinstance(value, dict | tuple | list)
        yield from (t for t in (values if several else [value]) if isinstance(t, Tensor))


def _storage(t: Tensor) -> int:
    """The identity of a tensor's memory. A tensor shares it with its views."""
    try:
        return int(t.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, ValueError):  # for example a sparse tensor
        return id(t)


def _moved_axes(func: Any, args: Any, kwargs: Any, output: Tensor, known: _Known) -> tuple[int, ...]:
    """The axes of the channels after a function. Tensors of channel numbers go through the same function."""
    if any(output is t for t in tensors_in((args, kwargs))) and not any(output is t for t, _, _ in known):
        return ()  # the function writes into an argument that is not traced
    tags = {id(t): _tag(shape, trace.axes, t) for t, shape, trace in known if t.is_floating_point()}
    try:
        moved = func(*_replaced(args, tags), **_replaced(kwargs, tags))
        tag = next(t for t in tensors_in(moved) if t.shape == output.shape)
    except Exception:
        return ()  # the function does not take these tensors: the axes stay unknown
    # The number of different values along an axis. Along an axis of channels all values are different. If the
    # function repeats channels, the axis with the most different values is taken.
    steps = {d: tag.sort(dim=d).values.diff(dim=d) != 0 for d, size in enumerate(tag.shape) if size > 1}
    counts = {d: 1 + int(step.sum(dim=d).amax()) for d, step in steps.items() if step.any()}
    distinct = tuple(d for d, count in counts.items() if count == tag.shape[d])
    return distinct or tuple(sorted(counts, key=lambda d: -counts[d])[:1])


def _tag(shape: tuple[int, ...], axes: tuple[int, ...], like: Tensor) -> Tensor:
    """A tensor whose values number the channels."""
    sizes = [size if axis in axes else 1 for axis, size in enumerate(shape)]
    numbers = torch.arange(math.prod(sizes), dtype=torch.float32, device=like.device)
    return numbers.view(sizes).expand(shape).contiguous()


def _replaced(value: _T, tags: Mapping[int, Tensor]) -> _T:
    if id(value) in tags:
        return tags[id(value)]  # type: ignore[return-value]
    if isinstance(value, tuple | list):
        return type(value)(_replaced(v, tags) for v in value)
    if isinstance(value, dict):
        return {k: _replaced(v, tags) for k, v in value.items()}  # type: ignore[return-value]
    return value
