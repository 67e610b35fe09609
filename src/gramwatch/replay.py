"""Replay: many small operations, recorded on a GPU once and then launched as one.

A GPU's host takes longer to launch dozens of small operations than the GPU to carry them out. Recorded as a
CUDA graph, they are launched together.
"""

import threading
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CALLS = 3
"""How often tensors of the same shapes are seen before what is done with them is recorded."""
MOST = 4
"""Recordings for different shapes; further shapes are not recorded."""

Self = TypeVar("Self", bound="Tensors")


class Tensors(Protocol):
    """An object that consists of tensors, beside what is always the same."""

    def changed(self: Self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same with every tensor changed."""
        ...


Given = TypeVar("Given", bound=Tensors)


class Replay(Generic[Given]):
    """A function of tensors that is recorded on a GPU; on other devices it is just called.

    Args:
        function: makes tensors of an object that consists of tensors. For the same shapes it must do the same
            operations, and never ask the GPU for a value. One that does cannot be recorded, and is called.

    """

    def __init__(self, function: Callable[[Given], tuple[Tensor, ...]]) -> None:
        self._function = function
        self._calls: Counter[Hashable] = Counter()
        self._recorded: dict[Hashable, _Recording | None] = {}
        self._lock = threading.Lock()

    def __call__(self, given: Given) -> tuple[Tensor, ...]:
        """What the function makes of it."""
        tensors = _tensors_of(given)
        device = tensors[0].device
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return self._function(given)
        key = (device, torch.cuda.current_stream(device).cuda_stream, *((t.shape, t.dtype) for t in tensors))
        # One at a time: a recording has one place for what it is given, and one for what it makes.
        with self._lock:
            recording = self._recorded.get(key)
            if recording is None and key not in self._recorded:
                self._calls[key] += 1
                if self._calls[key] > CALLS and len(self._recorded) < MOST:
                    recording = self._recorded[key] = self._record(given, device)
            if recording is not None:
                return recording(tensors)
        return self._function(given)

    def _record(self, given: Given, device: torch.device) -> "_Recording | None":
        places: list[Tensor] = []

        def place(t: Tensor) -> Tensor:
            places.append(t.clone(memory_format=torch.contiguous_format))
            return places[-1]

        with torch.cuda.device(device):
            kept, graph = _Kept(), torch.cuda.CUDAGraph()
            inside, stream = given.changed(place), torch.cuda.current_stream()
            try:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"), kept:
                    made = self._function(inside)
            except RuntimeError:
                torch.cuda.set_stream(stream)  # where recording fails, it is not left
                return None
        return _Recording(graph, places, made, kept.tensors)


@dataclass(frozen=True)
class _Recording:
    """The graph, where it looks for what it is given, and where it leaves what it makes."""

    graph: torch.cuda.CUDAGraph
    given: list[Tensor]
    made: tuple[Tensor, ...]
    kept: list[Tensor]
    """All that the operations looked at: the graph knows where it lies, and does not keep it there."""

    def __call__(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            pairs = [(a, b) for a, b in zip(self.given, tensors, strict=True) if b.dtype == dtype]
            torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])
        self.graph.replay()
        return tuple(t.clone() for t in self.made)


class _Kept(TorchDispatchMode):
    """Keeps every tensor that an operation looks at."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.tensors += [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        return func(*args, **kwargs)


def _tensors_of(given: Tensors) -> list[Tensor]:
    found: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        found.append(t)
        return t

    given.changed(note)
    return found
