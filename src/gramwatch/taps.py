"""Taps: the watched tensors of any network, found and named without changing the network.

A tap is the output of a convolution, a linear layer or an activation function ("any set of values obtained
immediately after applying convolution or activation functions"). Most networks call some of these as
modules and some as plain functions, in place or not, once or several times. All of them end in a PyTorch
function, and a `TorchFunctionMode` sees every such call of one thread: so nothing is hooked while a
network is being judged, and a tap is simply the n-th watched call of a forward pass.

`find_taps` runs the network twice on a tiny batch, follows every tensor to learn which of its axes are the
batch and the channels, and names each call after the module it happened in. `observe` then runs it once,
handing over each tapped tensor at the moment it is made.
"""

import difflib
import fnmatch
import functools
import itertools
import math
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from gramwatch.errors import InputError, TapError

Inputs = Any
"""What a network is called with: a tensor, a tuple of arguments, or a mapping of keyword arguments."""

_T = TypeVar("_T")
_P = ParamSpec("_P")

_CONVOLUTIONS = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution"
_ACTIVATIONS = (
    "celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid mish prelu relu "
    "relu6 rrelu selu sigmoid silu softplus softshrink softsign tanh tanhshrink threshold"
)
_KINDS: dict[str, str] = {
    **dict.fromkeys(_CONVOLUTIONS.split(), "convolution"),
    **dict.fromkeys(["linear", "bilinear"], "linear"),
    "multi_head_attention_forward": "attention",
    **dict.fromkeys(_ACTIVATIONS.split(), "activation"),
    "mark": "mark",
}
# Functions that only move values about: a tag tensor sent through them shows where the channels went.
_MOVES = frozenset(
    (
        "__get__ __getitem__ permute transpose swapaxes swapdims movedim moveaxis t adjoint "
        "reshape reshape_as view view_as flatten ravel unflatten squeeze unsqueeze expand expand_as "
        "repeat tile unbind select narrow chunk split tensor_split roll flip unfold "
        "pixel_shuffle pixel_unshuffle"
    ).split()
)
# Functions that mix the values of different channels, so that the result is no longer "the same values".
_PRODUCTS = frozenset("matmul __matmul__ mm bmm".split())
_MIXES = _PRODUCTS | set("__rmatmul__ addmm addbmm baddbmm einsum tensordot inner mv addmv dot cdist".split())
# Functions that say where the channels of their result are, where nothing else does.
_LAYOUTS = {
    **dict.fromkeys("batch_norm instance_norm group_norm".split(), 1),
    **dict.fromkeys("layer_norm rms_norm embedding lstm gru rnn_tanh rnn_relu".split(), -1),
}


def mark(x: Tensor, name: str) -> Tensor:
    """Give a tensor inside a network a name under which it can be tapped; otherwise do nothing.

    For tensors that are neither a convolution's nor an activation's output, such as a residual sum.
    Marked tensors are watched only when chosen by name: `taps=["layer1.*.sum"]`.
    """
    if has_torch_function_unary(x):
        return handle_torch_function(mark, (x,), x, name)
    return x


@dataclass(frozen=True)
class Tap:
    """One watched tensor of a network.

    Attributes:
        name: the module it is made in, e.g. `layer1.0.conv1`; for a function called by a module that does
            more, the function's name follows (`layer1.0.relu`), and from the second time on, `#2`.
        kind: `convolution`, `linear`, `activation`, `attention` or `mark`.
        operation: the PyTorch function that makes it.
        shape: its shape for a batch of one. The size along `batch_axis` is 1, or larger where a network
            folds something else (windows, frames) into the batch.
        batch_axis: the axis that grows with the batch.
        channel_axis: the axis of the channels; all others are pixels. It may be the batch axis, where a
            network folds its channels into the batch.
        call: its position among the watched calls of one forward pass.
        examples_first: whether, where something is folded into the batch, all of one example comes before
            the next example.

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
        """How many channels the tensor has."""
        return self.shape[self.channel_axis]

    @property
    def pixels(self) -> int:
        """How many pixels each channel has."""
        return torch.Size(self.shape).numel() // self.channels

    @property
    def is_vector(self) -> bool:
        """Whether the tensor is a plain vector for each example, with no pixels."""
        return len(self.shape) == 2 and self.shape[self.batch_axis] == 1

    def maps(self, x: Tensor, examples: int) -> Tensor:
        """The tensor of a batch as `(examples, channels, pixels)`, without a copy where strides allow."""
        fold = self.shape[self.batch_axis]
        expected = list(self.shape)
        expected[self.batch_axis] = fold * examples
        if list(x.shape) != expected:
            raise TapError(
                f"tap '{self.name}' has shape {tuple(x.shape)}, expected {tuple(expected)}: "
                "the network treats this input differently from the one its taps were found with"
            )
        if fold == 1 and self.batch_axis == 0 and self.channel_axis > 0:  # as in nearly every network
            x = x if self.channel_axis == 1 else x.movedim(self.channel_axis, 1)
            return x.flatten(2) if x.ndim > 2 else x.unsqueeze(2)
        parts = (examples, fold) if self.examples_first else (fold, examples)
        x = x.unflatten(self.batch_axis, parts).movedim(self.batch_axis + (not self.examples_first), 0)
        # Now the examples come first, and every other axis is one further on than it was.
        return x.movedim(self.channel_axis + 1, 1).unsqueeze(-1).flatten(2)


class Taps(Sequence[Tap]):
    """The taps of one network, in the order in which they are made. Prints as a table."""

    def __init__(self, taps: Iterable[Tap], operations: Iterable[str]) -> None:
        self._taps = tuple(taps)
        self.operations = tuple(operations)
        """Every watched call of a forward pass, tapped or not: the path the network is expected to take."""

    @overload
    def __getitem__(self, index: int) -> Tap: ...
    @overload
    def __getitem__(self, index: slice) -> "Taps": ...
    def __getitem__(self, index: int | slice) -> "Tap | Taps":
        if isinstance(index, slice):
            return Taps(self._taps[index], self.operations)
        return self._taps[index]

    def __len__(self) -> int:
        return len(self._taps)

    def __iter__(self) -> Iterator[Tap]:
        return iter(self._taps)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Taps):
            return NotImplemented
        return self._taps == other._taps and self.operations == other.operations

    def __hash__(self) -> int:
        return hash((self._taps, self.operations))

    @property
    def names(self) -> list[str]:
        """The taps' names, in order."""
        return [tap.name for tap in self]

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


def _outside_compilation(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Keep torch.compile from compiling this function, where its caller is compiled."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        eager: Callable[_P, _T] = torch.compiler.disable(function)
        return eager(*args, **kwargs)

    return run


@_outside_compilation
def find_taps(model: nn.Module, inputs: Inputs, select: str | Iterable[str] = "all") -> Taps:
    """Find the tensors to watch in `model`, from one batch of its inputs.

    Args:
        model: any classifier. It is run twice, on copies of the batch's first example.
        inputs: a tensor, a tuple of arguments or a mapping of keyword arguments, as the model takes it.
        select: `"all"` convolutions, linear layers and activations but the logits; `"ends"`, of these the
            last of each size, where a network's stages end; `"paper"`, the tensors of the paper, for the
            networks in `gramwatch.networks`; or names and globs.

    """
    model = unwrap(model)
    with _judging(model):
        probe = _Probe(model)
        logits = probe.run(_repeated(inputs, 2))
        sizes = _Sizes()
        with sizes:
            call(model, _repeated(inputs, 3))
    if [e.operation for e in probe.events] != sizes.operations:
        raise TapError(
            "the network makes different calls for a batch of two and a batch of three: its path depends "
            "on its input, so its tensors cannot be watched by their place in it"
        )
    if not any(event.kind != "mark" for event in probe.events):
        hint = (
            "; a scripted network cannot be watched, pass the nn.Module it was made from"
            if any(isinstance(m, torch.jit.ScriptModule) for m in model.modules())
            else ""
        )
        raise TapError(
            f"{type(model).__name__} has no tap: no convolution, linear layer or activation was called{hint}"
        )
    dropped = probe.logits_calls(logits)
    names = _names(probe.events)
    taps = []
    for number, (event, shape3) in enumerate(zip(probe.events, sizes.shapes, strict=True)):
        batch = _batch_axis(event.shape, shape3)
        if number in dropped or batch is None or event.is_constant:
            continue  # the logits themselves, or values that do not depend on the input
        axis, fold = batch
        channel = _channel_axis(event, axis)
        shape = (*event.shape[:axis], fold, *event.shape[axis + 1 :])
        first = _examples_first(event.made, axis)
        taps.append(Tap(names[number], event.kind, event.operation, shape, axis, channel, number, first))
    found = Taps(taps, sizes.operations)
    return _chosen(model, found, select)


@_outside_compilation
def find_head(model: nn.Module, inputs: Inputs) -> int | None:
    """The watched call, by its position, of the linear layer that makes the logits; None if there is no such.

    A convolution over the whole of its input counts: it is the same thing.
    """
    model = unwrap(model)
    # An input that is not finite shows nothing; where the logits come from does not depend on it.
    inputs = mapped(inputs, lambda t: t.nan_to_num(0.0, 0.0, 0.0) if t.is_floating_point() else t)
    with _judging(model):
        probe = _Probe(model)
        logits = probe.run(_repeated(inputs, 2))
        layers = [n for n in probe.logits_calls(logits) if probe.events[n].kind in ("linear", "convolution")]
        if len(layers) != 1:
            return None
        seen: list[tuple[Tensor, Tensor, Tensor | None]] = []
        inputs = _repeated(inputs, 2)
        nothing = Taps((), [event.operation for event in probe.events])
        with _Watch(nothing, 2, _ignore, None, (layers[0], lambda *given: seen.append(given))):
            logits = logits_of(call(model, inputs)).float()
    x, weight, bias = seen[0]
    features, weight = x.flatten(1).float(), weight.flatten(1).float()
    if features.shape[0] != 2 or weight.shape != (logits.shape[1], features.shape[1]):
        return None
    made = features @ weight.T + (0.0 if bias is None else bias.float())
    near = torch.allclose(made, logits, rtol=1e-2, atol=1e-3 * float(logits.abs().max()))
    return layers[0] if near else None


def _ignore(number: int, maps: Tensor) -> None:
    """Take no notice of a tensor."""


def _chosen(model: nn.Module, found: Taps, select: str | Iterable[str]) -> Taps:
    if select in ("all", "ends"):
        plain = Taps((tap for tap in found if tap.kind != "mark"), found.operations)
        if not plain:
            raise TapError(
                f"{type(model).__name__} has no tap: its only convolution or linear layer makes the logits"
            )
        if select == "all":
            return plain
        last = {tap.pixels: tap for tap in plain}  # of each size, the last one stays
        return Taps((tap for tap in plain if last[tap.pixels] is tap), found.operations)
    if select == "paper":
        patterns = getattr(model, "paper_taps", None)
        if patterns is None:
            raise TapError(
                f"taps='paper' is defined for the networks in gramwatch.networks, not for "
                f"{type(model).__name__}: choose 'all', or names and globs"
            )
        return found.select(patterns)
    return found.select(select)


@_outside_compilation
def observe(
    model: nn.Module,
    taps: Taps,
    inputs: Inputs,
    receive: Callable[[int, Tensor], None],
    repeat: Callable[[int, int], bool | None] | None = None,
    head: "tuple[int | None, Callable[[Tensor, Tensor, Tensor | None], None]] | None" = None,
    gradients: bool = False,
) -> Tensor:
    """Run the network once and return its logits, `(N, classes)`.

    `receive(number, maps)` is called with each tap's number in `taps` and its tensor as
    `(N, channels, pixels)` at the moment the tensor is made; the tensor is not kept. Where a marked tensor
    is the very one of an earlier tap, as at a residual shortcut, `repeat(number, earlier)` is called
    instead, if given; if that returns False, the tensor is handed over all the same. With
    `head = (call, take)`, `take(input, weight, bias)` gets what the layer at that call, as given by
    `find_head`, was called with. With `gradients`, what is handed over and returned can be differentiated.
    """
    model = unwrap(model)
    with _judging(model), torch.set_grad_enabled(gradients):
        inputs = mapped(inputs, lambda t: t.clone() if t.is_inference() else t)  # may be written into
        with _Watch(taps, count_examples(inputs), receive, repeat, head or (None, None)) as watch:
            output = call(model, inputs)
    watch.finish()
    return logits_of(output)


class _Watch(TorchFunctionMode):
    """Hands over each tapped tensor, and makes sure that the network takes the expected path."""

    def __init__(
        self,
        taps: Taps,
        examples: int,
        receive: Callable[[int, Tensor], None],
        repeat: Callable[[int, int], bool | None] | None,
        head: "tuple[int | None, Callable[[Tensor, Tensor, Tensor | None], None] | None]",
    ) -> None:
        super().__init__()
        self._head_call, self._take_head = head
        self._numbers = {tap.call: number for number, tap in enumerate(taps)}
        self._taps, self._examples, self._receive, self._repeat = taps, examples, receive, repeat
        self._handed_over: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        operation, writes = _known(func)
        if operation != "mark" and (writes or (kwargs and "out" in kwargs) or (args and result is args[0])):
            self._handed_over.clear()
        if operation in _KINDS:
            self._check(operation)
            number = self._numbers.get(self._calls)
            if self._calls == self._head_call and self._take_head is not None:
                self._take_head(*_arguments(args, kwargs or {}))
            self._calls += 1
            if number is not None:
                self._hand_over(number, _made(result), operation)
        return result

    def _hand_over(self, number: int, tensor: Tensor, operation: str) -> None:
        tap = self._taps[number]
        known, earlier = self._handed_over.get(id(tensor), (None, -1))
        if operation == "mark" and self._repeat is not None and known is not None and known() is tensor:
            before = self._taps[earlier]
            alike = (before.batch_axis, before.channel_axis) == (tap.batch_axis, tap.channel_axis)
            if alike and self._repeat(number, earlier) is not False:
                return
        self._handed_over[id(tensor)] = (weakref.ref(tensor), number)
        self._receive(number, tap.maps(tensor, self._examples))

    def _check(self, operation: str) -> None:
        expected = self._taps.operations
        if self._calls >= len(expected) or expected[self._calls] != operation:
            instead = expected[self._calls] if self._calls < len(expected) else "the end of the network"
            raise TapError(
                f"the network calls '{operation}' where '{instead}' was expected (watched call "
                f"{self._calls}): it is another network, or takes another path, than when its taps were found"
            )

    def finish(self) -> None:
        if self._calls != len(self._taps.operations):
            raise TapError(
                f"the network made {self._calls} watched calls, {len(self._taps.operations)} were expected: "
                "it is another network, or takes another path, than when its taps were found"
            )


def _operation(func: Any) -> str:
    """A function's name without underscores and overload: `relu_`, `_threshold`, `relu.default`."""
    name: str = getattr(func, "__name__", "")
    return name.partition(".")[0].strip("_") if not name.startswith("__") else name


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Input, weight and bias of a call of a linear layer or a convolution."""
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
    return given["input"], given["weight"], given.get("bias")


@functools.lru_cache(4096)
def _known(func: Any) -> tuple[str, bool]:
    """A function's operation, and whether by its name it writes into a tensor that was there before."""
    name: str = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return _operation(func), in_place or name.startswith("__i") or name in ("__set__", "__setitem__")


def _made(result: Any) -> Tensor:
    """The tensor a watched function made; attention returns its weights beside it."""
    tensor: Tensor = result[0] if isinstance(result, tuple) else result
    return tensor


# --- finding: a forward pass in which every call is followed -----------------------------------------


@dataclass
class _Event:
    """One watched call seen while finding taps."""

    operation: str
    kind: str
    module: str
    is_leaf: bool
    module_call: int
    label: str
    made: Tensor
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    sources: frozenset[int]
    """The watched calls whose values an activation was applied to, if they came straight from some."""
    is_constant: bool


@dataclass(frozen=True)
class _Trace:
    """What is known of a tensor: the axes its channels lie along, and the watched calls that made its values.

    The channels lie along several axes where a network splits them, into heads or groups.
    """

    axes: tuple[int, ...] = ()
    sources: frozenset[int] = frozenset()


_Known = list[tuple[Tensor, tuple[int, ...], _Trace]]
"""The traced tensors given to a call, with their shapes before it: the call may change them."""


class _Probe(TorchFunctionMode):
    """Records the watched calls of one pass, following the channel axis through all calls between them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.events: list[_Event] = []
        self._traces: dict[int, _Trace] = {}
        self._alive = list(_held(model))  # so that no id is used twice
        self._constants = {_storage(t) for t in self._alive}
        self._hidden: set[int] = set()  # the watched calls whose values went into a later layer
        self._modules: list[tuple[str, bool, int]] = [("", False, 0)]

    def run(self, inputs: Inputs) -> Tensor:
        with self._module_names(), self:
            output = call(self.model, inputs)
        return logits_of(output)

    @contextmanager
    def _module_names(self) -> Iterator[None]:
        """Keep track of the module being run, by hooks that are gone afterwards."""
        owner, calls, handles = threading.get_ident(), itertools.count(1), []

        def enter(name: str, is_leaf: bool) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                if threading.get_ident() == owner:
                    self._modules.append((name, is_leaf, next(calls)))

            return hook

        def leave(*_: Any) -> None:
            if threading.get_ident() == owner:
                self._modules.pop()

        try:
            for path, module in self.model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # takes no hooks, and shows no calls
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
        operation = _operation(func)
        given = list(_tensors((args, kwargs)))
        known = [(t, tuple(t.shape), self._traces[id(t)]) for t in given if id(t) in self._traces]
        is_constant = all(_storage(t) in self._constants for t in given)
        result = func(*args, **kwargs)
        if operation in _KINDS:
            made = _made(result)
            self._traces[id(made)] = self._record(operation, args, made, known, given[0], is_constant)
        elif known or operation in _LAYOUTS:
            for made in _tensors(result):
                self._traces[id(made)] = self._followed(func, operation, args, kwargs, made, known)
        for made in [*_tensors(result), *(given[:1] if operation == "__setitem__" else [])]:
            self._alive.append(made)
            (self._constants.add if is_constant else self._constants.discard)(_storage(made))
        return result

    def _record(
        self,
        operation: str,
        args: tuple[Any, ...],
        made: Tensor,
        known: _Known,
        given: Tensor,
        is_constant: bool,
    ) -> _Trace:
        """Note a watched call; what is known of the tensor it made."""
        kind = _KINDS[operation]
        before = next((trace for t, _, trace in known if t is given), _Trace())
        axes, sources = before.axes, before.sources
        if kind not in ("activation", "mark"):
            self._hidden.update(*(trace.sources for _, _, trace in known))
            axes = (1 if kind == "convolution" else made.ndim - 1,)
            sources = frozenset()
        module, is_leaf, module_call = self._modules[-1]
        self.events.append(
            _Event(
                operation,
                kind,
                module,
                is_leaf,
                module_call,
                label=args[1] if kind == "mark" else operation,
                made=made.detach(),  # which keeps its shape, whatever is done to `made`
                shape=tuple(made.shape),
                axes=axes,
                sources=sources,
                is_constant=is_constant,
            )
        )
        return _Trace(axes, sources if kind == "mark" else frozenset({len(self.events) - 1}))

    def _followed(
        self, func: Any, operation: str, args: Any, kwargs: Any, made: Tensor, known: _Known
    ) -> _Trace:
        """What is known of a tensor that an unwatched function made from tensors known before."""
        axes: tuple[int, ...] = ()
        sources = frozenset(
            itertools.chain(*(trace.sources for _, shape, trace in known if math.prod(shape) == made.numel()))
        )
        if operation in _MIXES:
            self._hidden.update(*(trace.sources for _, _, trace in known))
            sources = frozenset()
        if known:
            _, shape, trace = next((k for k in known if k[1] == made.shape), known[0])
            axes = trace.axes
            if operation in _PRODUCTS and [len(shape) for _, shape, _ in known] == [made.ndim] * 2:
                rows, columns = known[0][2].axes, known[1][2].axes
                axes = tuple(sorted({*rows} - {made.ndim - 1} | {*columns} - {made.ndim - 2}))
            elif axes and (operation in _MOVES or len(shape) != made.ndim):
                axes = _moved_axes(func, args, kwargs, made, known)
        if not axes and operation in _LAYOUTS:
            axes = (_LAYOUTS[operation] % made.ndim,)
        return _Trace(axes, sources)

    def logits_calls(self, logits: Tensor) -> set[int]:
        """The watched calls that made the logits: the layers, and a sigmoid or so applied to them."""
        dropped: set[int] = set()
        left = set(self._traces.get(id(logits), _Trace()).sources)
        while left := left - self._hidden - dropped:
            number = left.pop()
            dropped.add(number)
            left |= self.events[number].sources
        return dropped


class _Sizes(TorchFunctionMode):
    """Records only the shapes of watched calls, for a batch of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.shapes: list[tuple[int, ...]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operation = _operation(func)
        if operation in _KINDS:
            self.operations.append(operation)
            self.shapes.append(tuple(_made(result).shape))
        return result


def _held(model: nn.Module) -> Iterator[Tensor]:
    """The tensors that a network holds before it is run: parameters, buffers, and what else it keeps."""
    for value in itertools.chain(*(vars(module).values() for module in model.modules())):
        values = value.values() if isinstance(value, dict) else value
        several = isinstance(value, dict | tuple | list)
        yield from (t for t in (values if several else [value]) if isinstance(t, Tensor))


def _storage(t: Tensor) -> int:
    """What a tensor shares with its views."""
    try:
        return int(t.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, say
        return id(t)


def _moved_axes(func: Any, args: Any, kwargs: Any, made: Tensor, known: _Known) -> tuple[int, ...]:
    """Where the channels went: send tensors that vary along them alone through the same function."""
    if any(made is t for t in _tensors((args, kwargs))) and not any(made is t for t, _, _ in known):
        return ()  # the function writes into a tensor of the network
    tags = {id(t): _tag(shape, trace.axes, t) for t, shape, trace in known if t.is_floating_point()}
    try:
        moved = func(*_replaced(args, tags), **_replaced(kwargs, tags))
        tag = next(t for t in _tensors(moved) if t.shape == made.shape)
    except Exception:
        return ()  # a guess that failed: the axes are unknown
    # How many numbers an axis holds: all different along an axis of channels; some where they were repeated.
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


def _channel_axis(event: _Event, batch_axis: int) -> int:
    """The innermost axis of the channels; where they are unknown, tokens by channels or channels first."""
    likely = (0, 1, 2) if len(event.shape) == 3 else (0, 1)
    axes = [axis for axis in event.axes or likely if axis != batch_axis and axis < len(event.shape)]
    return axes[-1] if axes else batch_axis


def _examples_first(x: Tensor, axis: int) -> bool:
    """Whether, along a batch axis that holds more, all of one example comes before the next.

    `x` is of two equal examples: so along that axis either its halves are equal, or its neighbours.
    """
    rows = x.movedim(axis, 0)
    if len(rows) == 2 or not rows.numel():
        return True
    first, second = rows.chunk(2)
    halves, neighbours = first - second, rows[::2] - rows[1::2]
    return not bool(10 * neighbours.abs().amax() < halves.abs().amax())


def _batch_axis(shape2: tuple[int, ...], shape3: tuple[int, ...]) -> tuple[int, int] | None:
    """The axis that grows with the batch, and its size for a batch of one."""
    for axis, (size2, size3) in enumerate(zip(shape2, shape3, strict=False)):
        if size2 != size3 and 3 * size2 == 2 * size3:
            return axis, size2 // 2
    return None


def _names(events: list[_Event]) -> list[str]:
    """A readable and unique name for each watched call."""
    in_module_call = Counter((e.module, e.module_call) for e in events)
    seen: Counter[str] = Counter()
    names = []
    for event in events:
        alone = event.is_leaf and in_module_call[event.module, event.module_call] == 1
        if alone and event.kind != "mark":
            name = event.module
        elif event.kind == "attention":
            name = event.module or "attention"
        else:
            name = f"{event.module}.{event.label}" if event.module else event.label
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


# --- calling a network -------------------------------------------------------------------------------


def unwrap(model: nn.Module) -> nn.Module:
    """The network inside DataParallel, DistributedDataParallel and torch.compile wrappers."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        if isinstance(model, wrappers):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Call a network with a tensor, a tuple of arguments or a mapping of keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def logits_of(output: Any) -> Tensor:
    """The logits in a network's output: the tensor, its `.logits`, or the first of a tuple."""
    found = output
    if isinstance(found, Mapping) and "logits" in found:
        found = found["logits"]
    elif hasattr(found, "logits"):
        found = found.logits
    elif isinstance(found, tuple | list) and found:
        found = found[0]
    if not isinstance(found, Tensor):
        raise InputError(f"the network returned {type(output).__name__}: expected a tensor or .logits")
    if found.ndim != 2 or found.shape[1] < 2:
        raise InputError(
            f"the logits have shape {tuple(found.shape)}: expected (examples, classes), two classes or more"
        )
    return found


def count_examples(inputs: Inputs) -> int:
    """How many examples a batch holds: the length of its first tensor."""
    first = next(_tensors(inputs), None)
    if first is None or first.ndim == 0:
        raise InputError(f"no tensor with a batch axis in the input, a {type(inputs).__name__}")
    return first.shape[0]


def on_device(inputs: _T, model: nn.Module) -> _T:
    """The inputs on the device of the network's parameters."""
    device = _device(model)
    if device is None:
        return inputs
    return mapped(inputs, lambda t: t.to(device, non_blocking=True))  # type: ignore[no-any-return]


def on_device_ahead(batches: Iterable[_T], model: nn.Module) -> Iterator[_T]:
    """Each batch on the device of the network; a GPU gets the next one while it works on this one.

    A batch is an input, or any nest of tuples, lists and mappings of tensors.
    """
    device = _device(model)
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
        for tensor in _tensors(batch):
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
        if ahead:  # the loader failed: what it gave before still counts
            yield arrived()
        raise
    if ahead:
        yield arrived()


def _device(model: nn.Module) -> torch.device | None:
    place = next(itertools.chain(model.parameters(), model.buffers()), None)
    return None if place is None else place.device


def _repeated(inputs: Inputs, times: int) -> Inputs:
    """The batch's first example, several times over."""
    total = count_examples(inputs)
    if total == 0:
        raise InputError("the batch is empty")

    def repeat(t: Tensor) -> Tensor:
        return t[:1].repeat(times, *[1] * (t.ndim - 1)) if t.ndim and t.shape[0] == total else t

    return mapped(inputs, repeat)


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same nest of tuples, lists and mappings with each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {k: mapped(v, change) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return tuple(mapped(v, change) for v in value)
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in a nest of tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from _tensors(v)
    elif isinstance(value, tuple | list):
        for v in value:
            yield from _tensors(v)


_SMALL = 4096
"""So many numbers of an example are looked at together with others: copying them costs less than a call."""


def all_finite(inputs: Inputs) -> Tensor:
    """Whether each example's inputs are all finite, `(N,)`."""
    total = count_examples(inputs)
    tensors = [t for t in _tensors(inputs) if t.ndim and t.shape[0] == total]
    floating = [t for t in tensors if t.is_floating_point() and t.numel()]
    if not floating:
        return torch.ones(total, dtype=torch.bool, device=tensors[0].device)
    # NaN is no less than infinity. One look at each value, and small tensors together: this is done for
    # every batch, and on a GPU each call costs more than its work.
    rows = [t.reshape(total, -1) for t in floating]
    small = [t for t in rows if t.shape[1] <= _SMALL and t.dtype == torch.float32]
    large = [t for t in rows if t.shape[1] > _SMALL or t.dtype != torch.float32]
    together = [torch.cat(small, 1)] if len(small) > 1 else small
    largest = [torch.linalg.vector_norm(t, torch.inf, 1) for t in (*large, *together)]
    finite: list[Tensor] = [each < torch.inf for each in largest]
    return functools.reduce(torch.logical_and, finite)


def signature(inputs: Inputs) -> list[list[Any]]:
    """Shape of one example and dtype of each tensor of an input, to notice other inputs later."""
    return [[list(t.shape[1:]), str(t.dtype).removeprefix("torch.")] for t in _tensors(inputs)]


_lock = threading.Lock()
_judged: "weakref.WeakKeyDictionary[nn.Module, tuple[int, list[tuple[nn.Module, bool]]]]" = (
    weakref.WeakKeyDictionary()
)
_uncompiled: list[ExitStack] = []


@contextmanager
def _judging(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, nothing compiled; all is restored when the last thread is done.

    Not inference mode: a tensor that the network computes once and keeps must still be of use in training.
    """
    with torch.inference_mode(False), torch.no_grad():
        with _lock:
            threads, flags = _judged.get(model, (0, []))
            if threads == 0 and any(module.training for module in model.modules()):
                flags = [(module, module.training) for module in model.modules()]
                model.eval()
                for module, _ in flags:
                    module.training = False
            _judged[model] = (threads + 1, flags)
            _uncompiled.append(_compile_nothing())
        try:
            yield
        finally:
            with _lock:
                _uncompiled.pop().close()
                threads, flags = _judged.pop(model)
                if threads > 1:
                    _judged[model] = (threads - 1, flags)
                else:
                    _restore(flags)


def _restore(flags: list[tuple[nn.Module, bool]]) -> None:
    """Each submodule's own mode. `train` is called because some modules then forget what they keep."""
    for module, training in flags:
        if training:
            module.train()
    for module, training in flags:
        module.training = training


def _compile_nothing() -> ExitStack:
    """Until closed, run compiled modules and functions as they were written: compiled, they hide calls."""
    stack = ExitStack()
    if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
        stack.enter_context(torch.compiler.set_stance("force_eager"))
    return stack
