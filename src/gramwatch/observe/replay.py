"""Replay: many small GPU operations, recorded once and then launched as one.

Launching dozens of small operations takes longer than the GPU needs to compute them. Recorded as a CUDA
graph, they are launched together. `Graphs` has those of a plan: of its pass alone, and of the verdicts.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gramwatch.errors import in_short
from gramwatch.inputs.batches import Inputs, count_examples, mapped, tensors_in
from gramwatch.observe.compiled import records_itself
from gramwatch.observe.observation import Observation
from gramwatch.observe.uses import Mean, Read
from gramwatch.watch import Network
from gramwatch.watch.running import is_compiled

CALLS = 2
"""The number of ordinary calls with tensors of the same shapes before the operations are recorded."""
MOST = 4
"""The largest number of recordings, one for each combination of shapes."""
UNUSED = 100
"""After so many calls a recording that was not used makes place for another one."""
CLOSE, MOST_OFF = 0.02, 0.25
"""A replay is not used if more than the share `MOST_OFF` of its values are off by more than `CLOSE`."""

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
            do the same operations. If it asks the GPU for a value or draws random numbers, if two calls do
            different operations, or if a replay gives other results, it is called as usual.
        reads: returns further tensors that the function reads by its own kernels, which PyTorch does not see.

    Attributes:
        why_not: why the last attempt gave no recording; empty if it did.

    """

    def __init__(
        self,
        function: Callable[[Given], tuple[Tensor, ...]],
        reads: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self._function, self._reads = function, reads
        self._calls: Counter[Hashable] = Counter()
        self._recorded: dict[Hashable, _Recording | None] = {}
        self._used: dict[Hashable, int] = {}
        """The number of the last call that used a recording."""
        self._count = 0
        self._lock = threading.Lock()
        self.why_not = ""

    @property
    def memory(self) -> int:
        """The bytes that the recordings hold on the GPU."""
        return sum(recording.memory for recording in self._recorded.values() if recording is not None)

    @property
    def recordings(self) -> int:
        """The number of recordings."""
        return sum(recording is not None for recording in self._recorded.values())

    def __call__(self, given: Given) -> tuple[Tensor, ...]:
        """The result of the function."""
        tensors = _tensors_of(given)
        if not tensors or not tensors[0].is_cuda or torch.cuda.is_current_stream_capturing():
            return self._function(given)
        device = tensors[0].device
        key = _key(given, tensors)
        # One thread at a time: a recording has one set of input tensors and one set of output tensors.
        with self._lock:
            self._count += 1
            recording = self._recorded.get(key)
            if recording is None and key not in self._recorded:
                self._calls[key] += 1
                if self._calls[key] > CALLS and self._has_place():
                    recording = self._recorded[key] = self._record(given, device)
            if recording is not None:
                self._used[key] = self._count
                return recording(tensors)
        return self._function(given)

    def _has_place(self) -> bool:
        """Whether one more recording may be made. The one that was not used for longest makes place."""
        if self.recordings < MOST:
            return True
        oldest = min(self._used, key=lambda key: self._used[key])
        if self._count - self._used[oldest] <= UNUSED:
            return False
        del self._recorded[oldest], self._used[oldest], self._calls[oldest]
        return True

    def _record(self, given: Given, device: torch.device) -> "_Recording | None":
        places: list[Tensor] = []

        def place(t: Tensor) -> Tensor:
            places.append(t.clone())
            return places[-1]

        with torch.cuda.device(device):
            inside, stream = given.changed(place), torch.cuda.current_stream()
            trial, kept, graph = Asking("cuda"), _Kept(), torch.cuda.CUDAGraph()
            with trial:  # a failed recording leaves PyTorch in the middle of it
                expected = self._function(inside)
            self.why_not = trial.why_not
            if self.why_not:
                return None
            torch.cuda.empty_cache()  # a recording takes memory of its own
            before = torch.cuda.memory_reserved()
            try:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"), kept:
                    outputs = self._function(inside)
            except RuntimeError as error:  # the recording failed although nothing was seen that forbids it
                torch.cuda.set_stream(stream)
                _forget_capture(device)
                out_of_memory = isinstance(error, torch.cuda.OutOfMemoryError)
                self.why_not = "the GPU has too little memory" if out_of_memory else in_short(error)
                if out_of_memory:
                    del graph
                    torch.cuda.empty_cache()
                return None
            if kept.operations != trial.operations:
                self.why_not = "it does other operations from call to call"
                return None
            kept.look_at(self._reads())
            memory = max(0, torch.cuda.memory_reserved() - before)
            recording = _Recording(graph, places, outputs, list(kept.memory.values()), memory)
            if not _alike(recording(places), expected):
                self.why_not = "a replay gives other results"
                return None
        return recording


def _alike(replayed: Sequence[Tensor], computed: Sequence[Tensor]) -> bool:
    """Whether a replay gives the computed results. Rounding may differ, and with it a rank.

    This waits for the GPU.
    """
    for one, other in zip(replayed, computed, strict=True):
        first, second = one.double().nan_to_num(), other.double().nan_to_num()
        off = (first - second).abs() > CLOSE * (1 + second.abs())
        if off.numel() and float(off.double().mean()) > MOST_OFF:
            return False
    return True


@dataclass(frozen=True)
class _Recording:
    """A CUDA graph with the tensors that it reads its inputs from and writes its outputs to."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: tuple[Tensor, ...]
    kept: list[UntypedStorage]
    """Memory that the graph reads and did not allocate. The graph has only the address: it is held here."""
    memory: int
    """The bytes that it took on the GPU."""

    def __call__(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            pairs = [(a, b) for a, b in zip(self.inputs, tensors, strict=True) if b.dtype == dtype]
            torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])
        self.graph.replay()
        return tuple(t.clone() for t in self.outputs)


class _WithCompiled(TorchDispatchMode):
    """A mode under which compiled code runs as it is compiled. PyTorch would run it uncompiled otherwise."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled code runs under the mode."""
        return True


class Asking(_WithCompiled):
    """Sees what forbids a recording: questions to a device, and random numbers.

    A function asks if it copies values from the device, or needs them to know a size.
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.asked = False
        self.draws = False
        """Whether random numbers were drawn on the device."""
        self.operations: list[str] = []
        """The names of the operations on the device, in order."""

    @property
    def why_not(self) -> str:
        """Why the function cannot be recorded; empty if it can."""
        if self.asked:
            return "it asks the GPU for values"
        return "it draws random numbers" if self.draws else ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        devices = {t.device.type for t in tensors}
        if self._device in devices:
            self.operations.append(str(func))
            packet = getattr(func, "overloadpacket", None)
            if packet in _INDEXING:  # a mask decides the size of the result, indices do not
                indices = [t for t in tree_leaves(args[1]) if isinstance(t, Tensor)]
                self.asked |= any(t.dtype in (torch.bool, torch.uint8) for t in indices)
            elif packet in _COPYING:
                self.asked |= len(devices) > 1
            else:
                tags = getattr(func, "tags", ())
                self.asked |= not _ASKING.isdisjoint(tags)
                self.draws |= torch.Tag.nondeterministic_seeded in tags and _drops(func, args, kwargs or {})
        return result


def _drops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation that may draw random numbers does so: attention without dropout does not."""
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    default = func._schema.arguments[place].default_value
    return bool(args[place] if place < len(args) else kwargs.get("dropout_p", default))


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
        self.operations: list[str] = []
        """The names of the operations on a GPU, in order."""
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
        if places or any(True for _ in _memory_of((args, kwargs))):
            self.operations.append(str(func))
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

    record_pass: bool | None
    """Whether the forward pass is part of the graph. None: if that is safe."""

    def calibration(self) -> object:
        """The calibration. Graphs hold for one."""

    def given(self, observations: Sequence[Observation]) -> Tensors:
        """What a graph of the verdict alone reads, from the observations of a pass."""

    def judge_given(self, given: Any) -> tuple[Tensor, ...]:
        """The tensors of the verdict. This does not wait for a GPU."""

    def tables(self) -> Iterable[Tensor]:
        """The fitted tensors that kernels read, which PyTorch does not see."""


class Held:
    """The modules of a network, and where its tensors lie. To list modules for each batch takes long.

    Args:
        model: the network.

    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._tensors = [held for m in self._modules for held in (m._parameters, m._buffers)]
        self._hooks = [hooks for m in self._modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._children = [m._modules for m in self._modules]
        self._known = self._submodules()
        self._compiled = any(map(is_compiled, self._modules)) and records_itself(model)

    def _submodules(self) -> list[int]:
        return [id(module) for children in self._children for module in children.values()]

    @property
    def holds(self) -> bool:
        """Whether the network still has these modules."""
        return self._known == self._submodules()

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters and the buffers."""
        return [t for held in self._tensors for t in held.values() if t is not None]

    def places(self) -> tuple[int, ...]:
        """Where they lie in memory. A parameter that was replaced lies elsewhere."""
        return tuple([t.data_ptr() for t in self.tensors])

    def why_not(self) -> str:
        """Why a pass must not be replayed now; empty if it may be."""
        if self._compiled:
            return "torch.compile records it already"
        if any(module.training for module in self._modules):
            return "it is in training mode"
        try:
            # Our own hooks have negative keys. A recording has them already.
            hooked = any(any(key >= 0 for key in hooks) for hooks in self._hooks if hooks)
        except RuntimeError:  # they changed meanwhile
            return "another thread runs it"
        return "it has forward hooks, which a replay would not call" if hooked or _global_hooks() else ""


def _global_hooks() -> bool:
    """Whether hooks are called for all modules."""
    of_all = torch.nn.modules.module
    return bool(of_all._global_forward_hooks or of_all._global_forward_pre_hooks)


class Graphs:
    """The CUDA graphs of a plan.

    Args:
        network: the network of the plan.
        read: runs and reads one pass.
        observe: runs one pass, and returns the observations of all detectors.

    Attributes:
        why_not: why the pass is not recorded, though nobody has forbidden it; empty if it is or may be.

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
        self.why_not = ""
        self._refused = ""
        """Why the pass cannot be recorded at all."""
        self._held: Held | None = None
        self._passes: Replay[Nest] | None = None
        self.whole: Replay[Nest] | None = None
        """The recordings of passes with their verdicts."""
        self.verdicts: Replay[Any] | None = None
        """The recordings of verdicts alone."""
        self._sizes: dict[Hashable, set[int]] = {}
        """The numbers of examples of the recordings, by the form of the inputs."""
        self._calibration: object = None
        self._means: list[Mean] = []
        self._tables = 0

    @property
    def described(self) -> str:
        """What is recorded, or why the pass is not; empty if there is nothing to say yet."""
        if self.why_not:
            return f"its pass is not recorded: {self.why_not}"
        replays = [
            replay for replay in (self._passes, self.whole) if replay is not None and replay.recordings
        ]
        count, memory = sum(r.recordings for r in replays), sum(r.memory for r in replays)
        return f"{count} recorded pass{'es' * (count > 1)}, {memory / 2**20:,.0f} MiB" if count else ""

    def may_replay(self, record: bool | None) -> bool:
        """Whether a pass may be replayed now.

        Args:
            record: False: no. None: if it is safe. True: even if hooks will not be called.

        """
        if record is False:
            return False
        if self._held is None or not self._held.holds:
            self.forget()
            self._held = Held(self._network.model)
        self.why_not = self._refused or ("" if record else self._held.why_not())
        return record is True or not self.why_not

    def _note(self, replay: Replay[Nest]) -> None:
        """Note that the pass cannot be recorded, or that it can."""
        if replay.why_not and not replay.recordings:
            self.why_not = self._refused = replay.why_not

    def read(self, inputs: Inputs, record: bool | None = True) -> Read:
        """What is read in one pass, replayed if that may be. Weights that have moved make a new recording."""
        if not self.may_replay(record):
            return self._read(inputs)
        assert self._held is not None
        if self._passes is None:
            self._passes = Replay(self._flat, lambda: self._held.tensors if self._held else ())
        logits, *rest = self._passes(Nest(inputs, self._held.places()))
        self._note(self._passes)
        tables, means = self._tables, self._tables + len(self._means)
        by_tap = dict(zip(self._means, rest[tables:means], strict=True))
        return Read(logits, rest[:tables], by_tap, rest[means:])

    def _flat(self, given: Nest) -> tuple[Tensor, ...]:
        """What is read in one pass, side by side."""
        logits, tables, means, features = self._read(given.value)
        self._means, self._tables = list(means), len(tables)
        return (logits, *tables, *means.values(), *features)

    def judged(self, inputs: Inputs, judge: Judge) -> tuple[Tensor, ...]:
        """The tensors of a verdict, replayed. The pass is a part of the graph if that may be.

        After a new calibration, the memory of recordings is given back, that of calibrating among it.
        """
        calibration, replayed = judge.calibration(), self.may_replay(judge.record_pass)
        if self._calibration is not calibration:
            self._passes = self.whole = self.verdicts = None
            self._sizes.clear()
            self._calibration = calibration
        if replayed:
            return self._judged_whole(inputs, judge)
        if self.verdicts is None:
            self.verdicts = Replay(judge.judge_given)
        return self.verdicts(self.given(inputs, judge))

    def _judged_whole(self, inputs: Inputs, judge: Judge) -> tuple[Tensor, ...]:
        """The tensors of a verdict, from one graph of pass and verdict.

        A batch of a size that is not recorded is padded to a recorded size of at most twice as many examples.
        """
        assert self._held is not None
        if self.whole is None:
            self.whole = Replay(
                lambda nest: judge.judge_given(self.given(nest.value, judge)),
                lambda: [*judge.tables(), *(self._held.tensors if self._held else ())],
            )
        whole, places, examples = self.whole, self._held.places(), count_examples(inputs)
        given = list(tensors_in(inputs))
        can_be_padded = all(t.shape[:1] == (examples,) for t in given)
        form = tuple([(t.shape[1:], t.dtype, t.stride()[1:]) for t in given]), places
        sizes = self._sizes.get(form, set()) if can_be_padded else set()
        larger = min((size for size in sizes if examples < size <= 2 * examples), default=None)
        if larger is not None and examples not in sizes:
            return _without_padding(whole(Nest(padded(inputs, examples, larger), places)), examples)
        before = whole.recordings
        tensors = whole(Nest(inputs, places))
        if whole.recordings > before and can_be_padded:
            self._sizes.setdefault(form, set()).add(examples)
        self._note(whole)
        return tensors

    @torch.inference_mode()
    def given(self, inputs: Inputs, judge: Judge) -> Tensors:
        """What the graph of a verdict alone reads, from one pass."""
        return judge.given(self._observe(inputs))


def padded(inputs: Inputs, examples: int, size: int) -> Inputs:
    """The inputs with copies of the first example at the end, in the same memory format."""

    def longer(t: Tensor) -> Tensor:
        last = t.ndim == 4 and not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last)
        form = torch.channels_last if last else torch.contiguous_format
        whole = torch.empty((size, *t.shape[1:]), dtype=t.dtype, device=t.device, memory_format=form)
        whole[:examples] = t
        whole[examples:] = t[:1]
        return whole

    padded: Inputs = mapped(inputs, longer)
    return padded


def _without_padding(tensors: tuple[Tensor, ...], examples: int) -> tuple[Tensor, ...]:
    """The tensors of a verdict on the first examples. One of them is the number of finite examples."""
    score, *_ = tensors
    copies = len(score) - examples
    return tuple(t[:examples] if t.ndim else t - copies * score[0].isfinite().to(t.dtype) for t in tensors)
