"""Running a network: its wrappers taken off, in evaluation mode, its logits found in what it returns."""

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from gramwatch.batches import Inputs
from gramwatch.errors import InputError, warn_once

_T = TypeVar("_T")
_P = ParamSpec("_P")


def outside_compilation(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Keep torch.compile from compiling this function, where its caller is compiled."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        eager: Callable[_P, _T] = torch.compiler.disable(function)
        return eager(*args, **kwargs)

    return run


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


_looked_at: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def warn_if_compiled(model: nn.Module) -> None:
    """Say once for each network that what is compiled of it is run uncompiled."""
    if model in _looked_at:
        return
    _looked_at.add(model)
    if any(map(_is_compiled, model.modules())):
        network = unwrap(model)
        warn_once(
            network,
            f"{type(network).__name__} is compiled, in whole or in part. Compiled code hides its tensors, so "
            "detectors run the network uncompiled",
        )


def _is_compiled(module: nn.Module) -> bool:
    whole = isinstance(getattr(module, "_orig_mod", None), nn.Module)
    return whole or getattr(module, "_compiled_call_impl", None) is not None


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


_lock = threading.Lock()
_judged: "weakref.WeakKeyDictionary[nn.Module, tuple[int, list[tuple[nn.Module, bool]]]]" = (
    weakref.WeakKeyDictionary()
)
_uncompiled: list[ExitStack] = []


@contextmanager
def judging(model: nn.Module) -> Iterator[None]:
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
