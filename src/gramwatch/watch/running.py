"""Running a network: evaluation mode, compiled or not, and the error of its first run."""

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from gramwatch.errors import GramwatchError, InputError, warn_once
from gramwatch.inputs.adapters import Network, unwrap
from gramwatch.inputs.batches import (
    Inputs,
    described,
    signature,
)

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
