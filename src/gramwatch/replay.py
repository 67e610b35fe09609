"""Replay: many small operations, recorded on a GPU once and then launched as one.

A GPU's host takes longer to launch dozens of small operations than the GPU to carry them out. Recorded as a
CUDA graph, they are launched together.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gramwatch.batches import mapped

CALLS = 3
"""How often tensors of the same shapes are seen before what is done with them is recorded."""
MOST = 4
"""Recordings for different shapes; further shapes are not recorded."""

Self = TypeVar("Self", bound="Tensors")


class Tensors(Protocol):
    """An object that consists of tensors."""

    @property
    def constant(self) -> Hashable:
        """What else must be the same for the same operations to be done."""
        ...

    def changed(self: Self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same with every tensor changed."""
        ...


Given = TypeVar("Given", bound=Tensors)


class Replay(Generic[Given]):
    """A function of tensors that is recorded on a GPU; on other devices it is just called.

    Args:
        function: makes tensors of an object that consists of tensors. For the same shapes it must do the same
            operations, and never ask the GPU for a value. One that does cannot be recorded, and is called.
        reads: gives what the function reads beside that by kernels of its own, which PyTorch does not see.

    """

    def __init__(
        self,
        function: Callable[[Given], tuple[Tensor, ...]],
        reads: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self._function, self._reads = function, reads
        self._calls: Counter[Hashable] = Counter()
        self._recorded: dict[Hashable, _Recording | None] = {}
        self._lock = threading.Lock()

    def __call__(self, given: Given) -> tuple[Tensor, ...]:
        """What the function makes of it."""
        tensors = _tensors_of(given)
        if not tensors or not tensors[0].is_cuda or torch.cuda.is_current_stream_capturing():
            return self._function(given)
        device = tensors[0].device
        key = _key(given, tensors)
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
            places.append(t.clone())
            return places[-1]

        with torch.cuda.device(device):
            kept, graph = _Kept(), torch.cuda.CUDAGraph()
            inside, stream = given.changed(place), torch.cuda.current_stream()
            if asks_for_values(lambda: self._function(inside), "cuda"):
                return None
            try:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"), kept:
                    made = self._function(inside)
            except RuntimeError:  # it cannot be recorded for a reason that could not be seen
                torch.cuda.set_stream(stream)
                _forget_capture(device)
                return None
        kept.look_at(self._reads())
        return _Recording(graph, places, made, list(kept.memory.values()))


@dataclass(frozen=True)
class _Recording:
    """The graph, where it looks for what it is given, and where it leaves what it makes."""

    graph: torch.cuda.CUDAGraph
    given: list[Tensor]
    made: tuple[Tensor, ...]
    kept: list[UntypedStorage]
    """What was looked at and not made: the graph knows where it lies, and does not keep it there."""

    def __call__(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            pairs = [(a, b) for a, b in zip(self.given, tensors, strict=True) if b.dtype == dtype]
            torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])
        self.graph.replay()
        return tuple(t.clone() for t in self.made)


def asks_for_values(function: Callable[[], Any], device: str) -> bool:
    """Whether a function asks a kind of device for values, by copying them or for the size of a result.

    Found by calling it. A recording that fails on this is no harmless way to find out: PyTorch is then left
    in the middle of it.
    """
    asking = _Asking(device)
    with asking:
        function()
    return asking.found


class _Asking(TorchDispatchMode):
    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        devices = {t.device.type for t in tensors}
        if self._device in devices:
            packet = getattr(func, "overloadpacket", None)
            if packet in _INDEXING:  # by masks, not by numbers
                indices = [t for t in tree_leaves(args[1]) if isinstance(t, Tensor)]
                self.found |= any(t.dtype in (torch.bool, torch.uint8) for t in indices)
            elif packet in _COPYING:
                self.found |= len(devices) > 1
            else:
                self.found |= not _ASKING.isdisjoint(getattr(func, "tags", ()))
        return result


_ASKING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_COPYING = (torch.ops.aten._to_copy, torch.ops.aten.copy_)
_INDEXING = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)


def _forget_capture(device: torch.device) -> None:
    """After a capture that failed, PyTorch's random numbers still wait for its end (2.11; not so in 2.13)."""
    with contextlib.suppress(RuntimeError, AttributeError):
        generator = torch.cuda.default_generators[device.index]
        generator.graphsafe_set_state(generator.clone_state())


class _Kept(TorchDispatchMode):
    """Keeps the memory on a GPU that operations look at and that none of them has made.

    The memory, not the tensors: a parameter that is moved to another device is the same tensor as before.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory: dict[int, UntypedStorage] = {}
        """By where it begins."""
        self._made: set[int] = set()

    def look_at(self, nest: Any) -> None:
        """Keep the memory of all tensors in a nest that lie on a GPU."""
        for memory in _memory_of(nest):
            if memory.data_ptr() not in self._made:
                self.memory.setdefault(memory.data_ptr(), memory)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.look_at((args, kwargs))
        result = func(*args, **(kwargs or {}))
        places = {memory.data_ptr() for memory in _memory_of(result)}
        self._made |= places - self.memory.keys()
        return result


def _memory_of(nest: Any) -> Iterator[UntypedStorage]:
    return (t.untyped_storage() for t in tree_leaves(nest) if isinstance(t, Tensor) and t.is_cuda)


def _key(given: Tensors, tensors: list[Tensor]) -> Hashable:
    """What must be the same for the same operations to be done."""
    device = tensors[0].device
    autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
    stream = torch.cuda.current_stream(device).cuda_stream
    forms = ((t.shape, t.dtype, t.stride()) for t in tensors)
    return (device, stream, autocast, given.constant, *forms)


@dataclass(frozen=True)
class Nest:
    """Tensors in tuples, lists and mappings, and what stands between them.

    Args:
        value: the nest.
        beside: what must be the same, too, for the same operations to be done.

    """

    value: Any
    beside: Hashable = None

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Nest":
        """The same with every tensor changed."""
        return Nest(mapped(self.value, change), self.beside)

    @property
    def constant(self) -> Hashable:
        """All of it but the tensors."""
        return str(mapped(self.value, lambda t: None)), self.beside


def _tensors_of(given: Tensors) -> list[Tensor]:
    found: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        found.append(t)
        return t

    given.changed(note)
    return found
