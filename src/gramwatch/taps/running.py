"""Running a network: what it is called with, where its logits are, evaluation mode, wrappers taken off."""

import functools
import inspect
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from gramwatch.batches import (
    Inputs,
    as_inputs,
    batches_in,
    count_examples,
    described,
    kind_of,
    signature,
    split_batch,
)
from gramwatch.errors import GramwatchError, InputError, warn_once

_T = TypeVar("_T")
_P = ParamSpec("_P")

InputsAdapter = str | Callable[[Any], Any] | None
LogitsAdapter = str | int | Callable[[Any], Tensor] | None


@dataclass(frozen=True)
class Network:
    """A classifier, how batches become its inputs, and how its output becomes logits.

    Args:
        model: any classifier, wrapped or not.
        inputs: a function from a batch to what the network is called with (a tensor, a tuple of arguments or
            a mapping of keyword arguments), or the key of the input in batches that are mappings. It gets
            what a loader yields, and what a detector is called with.
        logits: a function from the network's output to the logits, or the key, attribute or position of the
            logits in that output.

    """

    model: nn.Module
    inputs: InputsAdapter = None
    logits: LogitsAdapter = None

    @staticmethod
    def of(
        model: "nn.Module | Network", inputs: InputsAdapter = None, logits: LogitsAdapter = None
    ) -> "Network":
        """The network of a model; one that is a `Network` already stays, unless adapters are given."""
        if isinstance(model, Network):
            given = {"inputs": inputs, "logits": logits}
            adapters = {name: value for name, value in given.items() if value is not None}
            return replace(model, **adapters) if adapters else model  # type: ignore[arg-type]
        if not isinstance(model, nn.Module):
            raise InputError(f"a detector watches a torch.nn.Module, not {kind_of(model)}")
        return Network(model, inputs, logits)

    @property
    def adapters(self) -> dict[str, Any]:
        """The adapters as a file holds them: names and positions as they are, functions as `None`."""
        given = {"inputs": self.inputs, "logits": self.logits}
        return {
            name: None if callable(value) else value for name, value in given.items() if value is not None
        }

    @functools.cached_property
    def module(self) -> nn.Module:
        """The network itself, its wrappers taken off."""
        return unwrap(self.model)

    def read(self, given: Any) -> Inputs:
        """What the network is called with, from what a detector is called with."""
        if callable(self.inputs):
            return as_inputs(self.inputs(given), self._accepts, self._dtype)
        if self.inputs is not None:
            if not isinstance(given, Mapping) or self.inputs not in given:
                raise InputError(f"inputs='{self.inputs}' names a key of a batch, which is {kind_of(given)}")
            given = given[self.inputs]
        return as_inputs(given, self._accepts, self._dtype)

    def batches(self, loader: Iterable[Any], doing: str, progress: bool) -> Iterator[tuple[Inputs, Any]]:
        """Inputs and labels of each batch that is not empty, with a progress bar on a terminal."""
        from tqdm.auto import tqdm

        hidden = None if progress else True
        for batch in tqdm(batches_in(loader), desc=doing, unit="batch", disable=hidden, leave=False):
            given, labels = split_batch(batch)
            inputs = self.read(batch if callable(self.inputs) else given)
            count = count_examples(inputs)
            if count:
                whole = isinstance(labels, Tensor) and labels.ndim == 1 and not labels.is_floating_point()
                yield inputs, labels if whole and len(labels) == count else None

    def _accepts(self, name: str) -> bool:
        """Whether the network's `forward` takes a keyword argument of this name."""
        parameters = inspect.signature(unwrap(self.model).forward).parameters
        if any(each.kind == each.VAR_KEYWORD for each in parameters.values()):
            return True
        return name in parameters and parameters[name].kind in (
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.KEYWORD_ONLY,
        )

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of the network's floating parameters."""
        held = itertools.chain(self.model.parameters(), self.model.buffers())
        return next((t.dtype for t in held if t.is_floating_point()), torch.get_default_dtype())

    def logits_of(self, output: Any) -> Tensor:
        """The logits in the network's output, `(N, classes)`."""
        found = output if self.logits is None and isinstance(output, Tensor) else self._chosen(output)
        if not isinstance(found, Tensor):
            raise InputError(
                f"the network returned {kind_of(output)}: no logits were found in it. Say where they are: "
                "logits='NAME', a position or a function"
            )
        if found.ndim != 2 or found.shape[1] < 2:
            single = found.ndim == 1 and " If this is one example without a batch axis, add it: images[None]."
            raise InputError(
                f"the logits have shape {tuple(found.shape)}: expected (examples, classes), two classes or "
                f"more.{single or ''} If the network returns more than logits, say where they are: logits=..."
            )
        return found

    def _chosen(self, output: Any) -> Any:
        """The logits by the adapter, or by what outputs usually look like."""
        if callable(self.logits):
            return self.logits(output)
        if self.logits is not None:
            return _part(output, self.logits)
        if isinstance(output, Tensor):
            return output
        if isinstance(output, Mapping) and "logits" in output:
            return output["logits"]
        if isinstance(getattr(output, "logits", None), Tensor):
            return output.logits
        if isinstance(output, Mapping | tuple | list):
            return self._likely(list(output.values() if isinstance(output, Mapping) else output))
        return None

    def _likely(self, parts: list[Any]) -> Tensor | None:
        """The one part that looks like logits: as wide as the last linear layer, where there are several."""
        likely = [each for each in parts if isinstance(each, Tensor) and each.ndim == 2 and each.shape[1] > 1]
        if len(likely) > 1:
            linear = [m for m in unwrap(self.model).modules() if isinstance(m, nn.Linear)]
            as_wide = [each for each in likely if linear and each.shape[1] == linear[-1].out_features]
            likely = as_wide if len(as_wide) == 1 else likely
        if len(likely) > 1:
            warn_once(
                unwrap(self.model),
                f"the network returns {len(likely)} tensors that may be logits, of "
                f"{', '.join(str(each.shape[1]) for each in likely)} columns: the first is taken. Say which, "
                "logits=..., by a name, a position or a function",
            )
        return likely[0] if likely else None

    def warn_of_probabilities(self, logits: Tensor, operation: str | None) -> None:
        """Say so if the output is made of probabilities: `operation` made it, or its rows sum to one."""
        rows = logits.double()
        softmax = bool((rows >= 0).all()) and torch.allclose(rows.sum(1), rows.new_ones(len(rows)), atol=1e-3)
        if softmax or operation == "sigmoid":
            warn_once(
                unwrap(self.model),
                f"the output of {type(unwrap(self.model)).__name__} looks like probabilities, not logits: "
                "energy and other scores that go by logits are blunt on it. Watch the network without its "
                f"{'softmax' if softmax else 'sigmoid'}, or undo it: logits=torch.log"
                f"{'' if softmax else 'it'}",
            )


def adapted(saved: Mapping[str, Any], network: Network) -> Network:
    """The network with the adapters of a file, unless others were given; functions must be given."""
    missing = {name: value for name, value in saved.items() if getattr(network, name, None) is None}
    for name, value in missing.items():
        if value is None:
            raise InputError(
                f"the detector was fitted with {name}= a function, which a file does not hold: give it "
                f"again, load(path, model, {name}=...)"
            )
    return Network.of(network, **missing)


def _part(output: Any, name: str | int) -> Any:
    """A named or numbered part of a network's output."""
    try:
        if isinstance(name, str) and not isinstance(output, Mapping):
            return getattr(output, name)
        return output[name]
    except (KeyError, IndexError, TypeError, AttributeError):
        raise InputError(f"logits={name!r} is not in the network's output, {kind_of(output)}") from None


@contextmanager
def first_look(network: Network, inputs: Inputs) -> Iterator[None]:
    """What a network says of inputs it cannot take becomes an `InputError` that names them and a remedy."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except (TypeError, RuntimeError, ValueError, IndexError) as error:
        if isinstance(error, GramwatchError):
            raise
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


_lock = threading.Lock()
_judged: "weakref.WeakKeyDictionary[nn.Module, tuple[int, list[tuple[nn.Module, bool]]]]" = (
    weakref.WeakKeyDictionary()
)
_uncompiled: list[ExitStack | None] = []


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
            _uncompiled.append(_compile_nothing() if "torch._dynamo" in sys.modules else None)
        try:
            yield
        finally:
            with _lock:
                if (stack := _uncompiled.pop()) is not None:
                    stack.close()
                threads, flags = _judged.pop(model)
                if threads > 1:
                    _judged[model] = (threads - 1, flags)
                elif flags:
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
