"""Replay: many small GPU operations, recorded once and then launched as one.

Launching dozens of small operations takes longer than the GPU needs to compute them. Recorded as a CUDA
graph, they are launched together. `Graphs` has those of a plan: of its pass alone, and of the verdicts.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gramwatch.inputs.batches import Inputs, mapped
from gramwatch.observe.observation import Observation
from gramwatch.observe.uses import Mean, Read
from gramwatch.watch import Network

CALLS = 3
"""The number of ordinary calls with tensors of the same shapes before the operations are recorded."""
MOST = 4
"""The largest number of recordings, one for each combination of shapes. Further shapes are not recorded."""

Self = TypeVar("Self", bound="Tensors")


class Tensors(Protocol):
    """An object that consists of tensors."""

    @property
    def constant(self) -> Hashable:
        """The values beside the tensors that decide which operations are done."""
        ...

    def changed(self: Self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same object with every tensor replaced by `change(tensor)`."""
        ...


Given = TypeVar("Given", bound=Tensors)


class Replay(Generic[Given]):
    """A function of tensors that is recorded on a GPU. On other devices it is called as usual.

    Args:
        function: takes an object that consists of tensors, and returns tensors. For the same shapes it must
            do the same operations. If it asks the GPU for a value, it cannot be recorded and is called as
            usual.
        reads: returns further tensors that the function reads by its own kernels, which PyTorch does not see.

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
        """The result of the function."""
        tensors = _tensors_of(given)
        if not tensors or not tensors[0].is_cuda or torch.cuda.is_current_stream_capturing():
            return self._function(given)
        device = tensors[0].device
        key = _key(given, tensors)
        # One thread at a time: a recording has one set of input tensors and one set of output tensors.
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
                    outputs = self._function(inside)
            except RuntimeError:  # the recording failed although no request for a value was seen
                torch.cuda.set_stream(stream)
                _forget_capture(device)
                return None
        kept.look_at(self._reads())
        return _Recording(graph, places, outputs, list(kept.memory.values()))


@dataclass(frozen=True)
class _Recording:
    """A CUDA graph with the tensors that it reads its inputs from and writes its outputs to."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: tuple[Tensor, ...]
    kept: list[UntypedStorage]
    """Memory that the graph reads and did not allocate. The graph has only the address: it is held here."""

    def __call__(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            pairs = [(a, b) for a, b in zip(self.inputs, tensors, strict=True) if b.dtype == dtype]
            torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])
        self.graph.replay()
        return tuple(t.clone() for t in self.outputs)


def asks_for_values(function: Callable[[], Any], device: str) -> bool:
    """Whether a function asks a kind of device for values: it copies them, or needs them to know a size.

    The function is called to find out. Trying a recording instead would be harmful: a failed recording leaves
    PyTorch in the middle of it.
    """
    asking = _Asking(device)
    with asking:
        function()
    return asking.asked


class _WithCompiled(TorchDispatchMode):
    """A mode under which compiled code runs as it is compiled. PyTorch would run it uncompiled otherwise."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled code runs under the mode."""
        return True


class _Asking(_WithCompiled):
    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.asked = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        devices = {t.device.type for t in tensors}
        if self._device in devices:
            packet = getattr(func, "overloadpacket", None)
            if packet in _INDEXING:  # a mask decides the size of the result, indices do not
                indices = [t for t in tree_leaves(args[1]) if isinstance(t, Tensor)]
                self.asked |= any(t.dtype in (torch.bool, torch.uint8) for t in indices)
            elif packet in _COPYING:
                self.asked |= len(devices) > 1
            else:
                self.asked |= not _ASKING.isdisjoint(getattr(func, "tags", ()))
        return result


_ASKING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_COPYING = (torch.ops.aten._to_copy, torch.ops.aten.copy_)
_INDEXING = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)


def _forget_capture(device: torch.device) -> None:
    """Reset PyTorch's random generator: after a failed capture it waits for the end (2.11, not 2.13)."""
    with contextlib.suppress(RuntimeError, AttributeError):
        generator = torch.cuda.default_generators[device.index]
        generator.graphsafe_set_state(generator.clone_state())


class _Kept(_WithCompiled):
    """Keeps the GPU memory that operations read and that no recorded operation allocated.

    It keeps the memory, not the tensors: a parameter that moves to another device is still the same tensor,
    but leaves its memory.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory: dict[int, UntypedStorage] = {}
        """The kept memory by its address."""
        self._allocated: set[int] = set()

    def look_at(self, nest: Any) -> None:
        """Keep the memory of all GPU tensors in a nest."""
        for memory in _memory_of(nest):
            if memory.data_ptr() not in self._allocated:
                self.memory.setdefault(memory.data_ptr(), memory)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.look_at((args, kwargs))
        result = func(*args, **(kwargs or {}))
        places = {memory.data_ptr() for memory in _memory_of(result)}
        self._allocated |= places - self.memory.keys()
        return result


def _memory_of(nest: Any) -> Iterator[UntypedStorage]:
    return (t.untyped_storage() for t in tree_leaves(nest) if isinstance(t, Tensor) and t.is_cuda)


def _key(given: Tensors, tensors: list[Tensor]) -> Hashable:
    """Everything that decides which operations are done. Calls with the same key share a recording."""
    device = tensors[0].device
    autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
    stream = torch.cuda.current_stream(device).cuda_stream
    forms = ((t.shape, t.dtype, t.stride()) for t in tensors)
    return (device, stream, autocast, given.constant, *forms)


@dataclass(frozen=True)
class Nest:
    """A nest of tuples, lists and mappings that holds tensors and other values.

    Args:
        value: the nest.
        beside: a further value that decides which operations are done.

    """

    value: Any
    beside: Hashable = None

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Nest":
        """The same nest with every tensor replaced by `change(tensor)`."""
        return Nest(mapped(self.value, change), self.beside)

    @property
    def constant(self) -> Hashable:
        """All values but the tensors."""
        return str(mapped(self.value, lambda t: None)), self.beside


def _tensors_of(given: Tensors) -> list[Tensor]:
    tensors: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        tensors.append(t)
        return t

    given.changed(note)
    return tensors


# --- the graphs of a plan --------------------------------------------------------------------------------


class Judge(Protocol):
    """A calibrated detector whose verdicts are replayed."""

    record_pass: bool
    """Whether the forward pass is part of the graph."""

    def calibration(self) -> object:
        """The calibration. Graphs hold for one."""

    def given(self, observations: Sequence[Observation]) -> Tensors:
        """What a graph of the verdict alone reads, from the observations of a pass."""

    def judge_given(self, given: Any) -> tuple[Tensor, ...]:
        """The tensors of the verdict. This does not wait for a GPU."""

    def tables(self) -> Iterable[Tensor]:
        """The fitted tensors that kernels read, which PyTorch does not see."""


class Graphs:
    """The CUDA graphs of a plan.

    Args:
        network: the network of the plan.
        read: runs and reads one pass.
        observe: runs one pass, and returns the observations of all detectors.

    """

    def __init__(
        self,
        network: Network,
        read: Callable[[Inputs], Read],
        observe: Callable[[Inputs], list[Observation]],
    ) -> None:
        self._network, self._read, self._observe = network, read, observe
        self.forget()

    def forget(self) -> None:
        """Forget all recordings."""
        self._passes: Replay[Nest] | None = None
        self.verdicts: Replay[Any] | None = None
        """The recordings of verdicts."""
        self._held: list[Tensor] = []
        """The tensors of the network when the recordings began."""
        self._calibration: object = None
        self._with_pass = False
        self._means: list[Mean] = []
        self._tables = 0

    def read(self, inputs: Inputs) -> Read:
        """What is read in one pass, replayed. Weights that have moved make a new recording."""
        if self._passes is None:
            self._hold()
            self._passes = Replay(self._flat, lambda: self._held)
        logits, *rest = self._passes(Nest(inputs, self._places()))
        tables, means = self._tables, self._tables + len(self._means)
        by_tap = dict(zip(self._means, rest[tables:means], strict=True))
        return Read(logits, rest[:tables], by_tap, rest[means:])

    def _flat(self, given: Nest) -> tuple[Tensor, ...]:
        """What is read in one pass, side by side."""
        logits, tables, means, features = self._read(given.value)
        self._means, self._tables = list(means), len(tables)
        return (logits, *tables, *means.values(), *features)

    def judged(self, inputs: Inputs, judge: Judge) -> tuple[Tensor, ...]:
        """The tensors of a verdict, replayed. The pass is a part of the graph if the judge says so."""
        calibration = judge.calibration()
        if self._calibration is not calibration or self._with_pass != judge.record_pass:
            self._calibration, self._with_pass = calibration, judge.record_pass
            self.verdicts = None
        if judge.record_pass:
            if self.verdicts is None:
                self._hold()
                self.verdicts = Replay(
                    lambda nest: judge.judge_given(self.given(nest.value, judge)),
                    lambda: [*judge.tables(), *self._held],
                )
            return self.verdicts(Nest(inputs, self._places()))
        if self.verdicts is None:
            self.verdicts = Replay(judge.judge_given)
        return self.verdicts(self.given(inputs, judge))

    @torch.inference_mode()
    def given(self, inputs: Inputs, judge: Judge) -> Tensors:
        """What the graph of a verdict alone reads, from one pass."""
        return judge.given(self._observe(inputs))

    def _hold(self) -> None:
        """Note the tensors of the network. To list them for each batch takes long."""
        self._held = [*self._network.model.parameters(), *self._network.model.buffers()]

    def _places(self) -> tuple[int, ...]:
        """Where the tensors of the network lie in memory."""
        return tuple([tensor.data_ptr() for tensor in self._held])
