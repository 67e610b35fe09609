"""Running a network: evaluation mode, compiled or not, and under watch.

Under watch, every tapped tensor is handed over as soon as it is computed.
"""

import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gramwatch.errors import GramwatchError, InputError, TapError, warn_once
from gramwatch.inputs.adapters import Network, unwrap
from gramwatch.inputs.batches import Inputs, count_examples, described, mapped, signature
from gramwatch.watch.operations import (
    OPERATIONS,
    RECURRENT,
    WATCHED_LATER,
    watched,
    writes,
)
from gramwatch.watch.tap import Taps

_T = TypeVar("_T")
_P = ParamSpec("_P")


@contextmanager
def first_look(network: Network, inputs: Inputs) -> Iterator[None]:
    """Turn the network's error on a wrong input into an `InputError` with the input's shape and a remedy."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except (TypeError, RuntimeError, ValueError, IndexError) as error:
        if isinstance(error, GramwatchError):
            raise
        network.explain_dtype(inputs, error)
        name = type(unwrap(network.model)).__name__
        raise InputError(
            f"{name} could not be run on inputs of {described(signature(inputs))} for each example "
            f"({type(error).__name__}: {error}). {_remedy(inputs)}"
        ) from error


def _remedy(inputs: Inputs) -> str:
    dtypes = {dtype for _, dtype in signature(inputs)}
    if "uint8" in dtypes:
        return "uint8 pixels must be scaled and normalised as in training: inputs=FUNCTION can do that"
    return (
        "A loader yields inputs, or a tuple whose first item is the input: ((a, b), labels) for two inputs. "
        "inputs=FUNCTION makes the network's arguments of a batch"
    )


def outside_compilation(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Keep torch.compile from compiling this function if its caller is compiled."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        eager: Callable[_P, _T] = torch.compiler.disable(function)
        return eager(*args, **kwargs)

    return run


def warn_uncompiled(network: nn.Module, why: str) -> None:
    """Warn once per network that detectors run it uncompiled, and why."""
    warn_once(network, f"{type(network).__name__} is compiled, but detectors run it uncompiled: {why}")


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled as a whole, by `torch.compile(module)` or `module.compile()`."""
    whole = isinstance(getattr(module, "_orig_mod", None), nn.Module)
    return whole or getattr(module, "_compiled_call_impl", None) is not None


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Call a network with a tensor, a tuple of arguments or a mapping of keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


_lock = threading.Lock()
_judged: "weakref.WeakKeyDictionary[nn.Module, tuple[int, list[tuple[nn.Module, bool]]]]" = (
    weakref.WeakKeyDictionary()
)
_uncompiled: list[ExitStack | None] = []


@contextmanager
def judging(model: nn.Module, compiled: bool = False) -> Iterator[None]:
    """Evaluation mode, without gradients. The last thread that leaves restores the old state.

    Unless `compiled`, code that torch.compile has compiled runs uncompiled.

    Inference mode is not used: if the network computes a tensor once and keeps it, training must be able to
    use that tensor.
    """
    with torch.inference_mode(False), torch.no_grad():
        with _lock:
            threads, flags = _judged.get(model, (0, []))
            if threads == 0 and _any_training(model):
                flags = [(module, module.training) for module in model.modules()]
                model.eval()
                for module, _ in flags:
                    module.training = False
            _judged[model] = (threads + 1, flags)
            if not compiled:
                _uncompiled.append(_compile_nothing() if "torch._dynamo" in sys.modules else None)
        try:
            yield
        finally:
            with _lock:
                if not compiled and (stack := _uncompiled.pop()) is not None:
                    stack.close()
                threads, flags = _judged.pop(model)
                if threads > 1:
                    _judged[model] = (threads - 1, flags)
                elif flags:
                    _restore(flags)


def _any_training(model: nn.Module) -> bool:
    """Whether a module is in training mode. `model.modules()` takes longer."""
    waiting = [model]
    for module in waiting:
        if module.training:
            return True
        waiting += [child for child in module._modules.values() if child is not None]
    return False


def _restore(flags: list[tuple[nn.Module, bool]]) -> None:
    """Restore the mode of every submodule. `train` is called because it may make a module drop a cache."""
    for module, training in flags:
        if training:
            module.train()
    for module, training in flags:
        module.training = training


def _compile_nothing() -> ExitStack:
    """Run compiled code uncompiled until the stack is closed, because compiled code hides its calls."""
    stack = ExitStack()
    if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
        stack.enter_context(torch.compiler.set_stance("force_eager"))
    return stack


# --- under watch ---------------------------------------------------------------------------------------


@outside_compilation
def observe(
    model: nn.Module | Network,
    taps: Taps,
    inputs: Inputs,
    receive: Callable[[int, Tensor], None],
    repeat: Callable[[int, int], bool | None] | None = None,
    gradients: bool = False,
) -> Tensor:
    """Run the network once and return its logits, `(N, classes)`.

    Args:
        model: any classifier.
        taps: the taps to watch, as `find_taps` returns them.
        inputs: a batch.
        receive: called as `receive(number, maps)` as soon as a tapped tensor is computed. `number` is the
            tap's number in `taps`, `maps` its tensor as `(N, channels, pixels)`. The tensor is not kept.
        repeat: called as `repeat(number, earlier)` if a marked tensor is the same tensor as that of an
            earlier tap, as at a residual shortcut. Then `receive` is not called, unless `repeat` returns
            False.
        gradients: whether the tensors handed over, and the logits, can be differentiated.

    """
    network = model if isinstance(model, Network) else Network.of(model)
    if network is not model and any(map(is_compiled, network.model.modules())):
        warn_uncompiled(network.module, "`observe` hands over tensors, which compiled code hides")
    inputs = ordinary(inputs)
    examples = count_examples(inputs)

    def hand_over(number: int, tensor: Tensor) -> None:
        receive(number, taps.maps(number, tensor, examples))

    with judging(network.module), torch.set_grad_enabled(gradients):
        output = Watch(taps, hand_over, repeat).run(network.module, inputs)
    return network.logits_of(output)


def ordinary(inputs: Inputs) -> Inputs:
    """The inputs without inference tensors, because the network may write into its inputs."""
    if isinstance(inputs, Tensor) and not inputs.is_inference():
        return inputs
    with torch.inference_mode(False):
        return mapped(inputs, lambda t: t.clone() if t.is_inference() else t)


Makers = Sequence[tuple[int, nn.Module]]
"""The modules that make the tapped tensors and the logits, each with the position of its call among the
watched calls.

A module that is called several times occurs with all its calls, tapped or not."""


class OtherCallsError(Exception):
    """The modules of a network were not called in the expected order."""


_keys = itertools.count(-1, -1)
"""Keys of our hooks. PyTorch's own are not negative."""


def run_by_modules(
    module: nn.Module,
    inputs: Inputs,
    taps: Taps,
    receive: Callable[[int, Tensor], None],
    makers: Makers,
    head: int | None = None,
) -> tuple[Any, list[Tensor]]:
    """The network's output, and the features if `head` is the position of the call that makes the logits.

    It is `Watch.run` for a network whose every watched call is the result of a module of its own. The makers
    get hooks for the time of this pass, before the hooks of others. All other calls take no more time than
    usual, and are not checked. It raises `OtherCallsError` if the makers are called in another order.
    """
    owner, key, numbers = threading.get_ident(), next(_keys), taps.numbers
    done = 0
    features: list[Tensor] = []

    def hook(maker: nn.Module, args: Any, result: Any) -> None:
        nonlocal done
        if threading.get_ident() != owner:
            return
        if done >= len(makers) or makers[done][1] is not maker:
            raise OtherCallsError
        position = makers[done][0]
        done += 1
        if position == head:
            if not args:  # the input is an argument by keyword, which a hook does not see
                raise OtherCallsError
            features.append(args[0].flatten(1).float())
        number = numbers.get(position)
        if number is not None:
            receive(number, made_by(result))

    hooked = [maker._forward_hooks for maker in dict.fromkeys(maker for _, maker in makers)]
    try:
        # `register_forward_hook` does the same, but takes long for many modules.
        for hooks in hooked:
            hooks[key] = hook
            if len(hooks) > 1:
                hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]
        output = call(module, inputs)
    finally:
        for hooks in hooked:
            hooks.pop(key, None)
    if done != len(makers):
        raise OtherCallsError
    return output, features


class Watch(TorchFunctionMode):
    """Hands over every tapped tensor, and makes sure that the network makes the expected calls.

    A compiled network is traced by torch.compile with this mode inside. So it compares functions by identity,
    and works on names and weak references only if `repeat` is given.

    Args:
        taps: the taps to watch.
        receive: called as `receive(number, tensor)` as soon as a tapped tensor is computed.
        repeat: as for `observe`.
        head: the position of the call that makes the logits, by a linear layer or a convolution.

    """

    at_head: tuple[Tensor, Tensor, Tensor | None] | tuple[()] = ()
    """The features `(N, D)`, the weight and the bias of the call `head`, after it."""

    def __init__(
        self,
        taps: Taps,
        receive: Callable[[int, Tensor], None],
        repeat: Callable[[int, int], bool | None] | None = None,
        head: int | None = None,
    ) -> None:
        super().__init__()
        self._taps, self._receive, self._head = taps, receive, head
        self._repeat = repeat if taps.marked else None
        self._handed_over: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._calls = 0

    def run(self, module: nn.Module, inputs: Inputs) -> Any:
        """The network's output. If no tap and no head is watched, the network may take any path."""
        if not self._taps.listed and self._head is None:
            return call(module, inputs)
        with self:
            output = call(module, inputs)
        if self._calls != len(self._taps.operations):
            raise TapError(
                f"the network made {self._calls} watched calls, {len(self._taps.operations)} were expected: "
                "it is another network, or takes another path, than when its taps were found"
            )
        return output

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        operation = OPERATIONS.get(func)
        if self._handed_over and operation != "mark" and (writes(func) or _overwrites(result, args, kwargs)):
            self._handed_over.clear()
        if operation is not None and (operation not in RECURRENT or watched(func, args)):
            call, expected = self._calls, self._taps.operations
            if call >= len(expected) or expected[call] != operation:
                self._refuse(operation)
            if call == self._head:
                self.at_head = _layer_arguments(operation, args, kwargs or {})
            self._calls = call + 1
            number = self._taps.numbers.get(call)
            if number is not None:
                tensor = made_by(result)
                if self._repeat is None or not self._repeats(number, tensor, operation):
                    self._receive(number, tensor)
        return result

    def _repeats(self, number: int, tensor: Tensor, operation: str) -> bool:
        """Whether a marked tensor is that of an earlier tap, with the same axes, and `repeat` accepts it."""
        before, earlier = self._handed_over.get(id(tensor), (None, -1))
        if operation == "mark" and before is not None and before() is tensor:
            tap, first = self._taps.listed[number], self._taps.listed[earlier]
            alike = (first.batch_axis, first.channel_axis) == (tap.batch_axis, tap.channel_axis)
            if alike and self._repeat is not None and self._repeat(number, earlier) is not False:
                return True
        self._handed_over[id(tensor)] = (weakref.ref(tensor), number)
        return False

    def _refuse(self, operation: str) -> None:
        expected = self._taps.operations
        instead = expected[self._calls] if self._calls < len(expected) else "the end of the network"
        later = f". Version 0.1.0 did not watch '{operation}': after an update, fit anew"
        raise TapError(
            f"the network calls '{operation}' where '{instead}' was expected (watched call "
            f"{self._calls}): it is another network, or takes another path, than when its taps were found"
            + (later if operation in WATCHED_LATER else "")
        )


def made_by(result: Any) -> Tensor:
    """The watched tensor in a result. Attention also returns its weights, a recurrent layer its state."""
    tensor: Tensor = result[0] if isinstance(result, tuple) else result
    return tensor


def _overwrites(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Whether a call writes its result into an existing tensor."""
    return bool(kwargs and "out" in kwargs) or bool(args and result is args[0])


def _layer_arguments(
    operation: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Input, `(N, D)` in float32, weight and bias in the call of a linear layer or a convolution."""
    if operation == "addmm":
        given = dict(zip(("input", "mat1", "mat2"), args, strict=False)) | dict(kwargs)
        weight, bias = given["mat2"].T * given.get("alpha", 1), given["input"] * given.get("beta", 1)
        return given["mat1"].flatten(1).float(), weight, bias
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
    return given["input"].flatten(1).float(), given["weight"], given.get("bias")
