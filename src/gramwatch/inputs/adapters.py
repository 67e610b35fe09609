"""A network with its adapters: arguments from a batch, logits from an output, the mask, wrappers."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gramwatch.errors import InputError, warn_once
from gramwatch.inputs.batches import (
    Inputs,
    as_inputs,
    batches_in,
    count_examples,
    device_of,
    kind_of,
    split_batch,
    tensors_in,
)

InputsAdapter = str | Callable[[Any], Any] | None
LogitsAdapter = str | int | Callable[[Any], Tensor] | None
MaskAdapter = str | Callable[[Any], Tensor] | Literal[False] | None
IN_A_COMMAND = "For a command, let a function of yours return a network that returns the logits alone"
MASK = "attention_mask"
"""The argument of a network that usually says which places are padding: they are 0."""


@dataclass(frozen=True)
class Network:
    """A classifier with its adapters: how batches become its inputs, and how its output becomes logits.

    Args:
        model: any classifier, wrapped or not.
        inputs: a function from a batch to the network's arguments (a tensor, a tuple of arguments or a
            mapping of keyword arguments), or the key of the input in batches that are mappings. The function
            gets the batches of a loader, and the argument of a detector's call.
        logits: a function from the network's output to the logits, or the key, attribute or position of the
            logits in that output.
        mask: a function from the network's arguments to the mask of a batch, `(N, length)`, 0 or False at
            padding, or the key of the mask among the arguments. None: `attention_mask`, if the network gets
            one. False: padding counts.

    """

    model: nn.Module
    inputs: InputsAdapter = None
    logits: LogitsAdapter = None
    mask: MaskAdapter = None

    @staticmethod
    def of(
        model: "nn.Module | Network",
        inputs: InputsAdapter = None,
        logits: LogitsAdapter = None,
        mask: MaskAdapter = None,
    ) -> "Network":
        """The `Network` of a model. If it is a `Network` already, the given adapters replace its own."""
        if isinstance(model, Network):
            given = {"inputs": inputs, "logits": logits, "mask": mask}
            adapters = {name: value for name, value in given.items() if value is not None}
            return replace(model, **adapters) if adapters else model  # type: ignore[arg-type]
        if not isinstance(model, nn.Module):
            raise InputError(f"a detector watches a torch.nn.Module, not {kind_of(model)}")
        return Network(model, inputs, logits, mask)

    @property
    def adapters(self) -> dict[str, Any]:
        """The adapters in the form of a file: keys and positions as they are, functions as `None`."""
        given = {"inputs": self.inputs, "logits": self.logits, "mask": self.mask}
        return {
            name: None if callable(value) else value for name, value in given.items() if value is not None
        }

    @functools.cached_property
    def module(self) -> nn.Module:
        """The network without its wrappers."""
        return unwrap(self.model)

    def read(self, given: Any) -> Inputs:
        """The network's arguments, made from the argument of a detector's call."""
        if callable(self.inputs):
            return as_inputs(self.inputs(given), self._accepts, self.dtype)
        if self.inputs is not None:
            if not isinstance(given, Mapping) or self.inputs not in given:
                raise InputError(f"inputs='{self.inputs}' names a key of a batch, which is {kind_of(given)}")
            given = given[self.inputs]
        return as_inputs(given, self._accepts, self.dtype)

    def batches(self, loader: Iterable[Any], doing: str, progress: bool) -> Iterator[tuple[Inputs, Any]]:
        """The inputs and the labels of every batch that is not empty, with a progress bar on a terminal."""
        for _, inputs, labels in self.numbered(loader, doing, progress):
            yield inputs, labels

    def numbered(
        self, loader: Iterable[Any], doing: str, progress: bool
    ) -> Iterator[tuple[int, Inputs, Any]]:
        """The same, with the number of each batch in the loader. Empty batches have numbers too."""
        from tqdm.auto import tqdm

        hidden = None if progress else True
        shown = tqdm(batches_in(loader), desc=doing, unit="batch", disable=hidden, leave=False)
        for number, batch in enumerate(shown):
            inputs, labels = self.read_batch(batch)
            count = count_examples(inputs)
            if count:
                whole = isinstance(labels, Tensor) and labels.ndim == 1 and not labels.is_floating_point()
                yield number, inputs, labels if whole and len(labels) == count else None

    def inputs_of(self, batch: Any) -> Inputs:
        """The network's arguments, made from a loader's batch."""
        return self.read_batch(batch)[0]

    def read_batch(self, batch: Any) -> tuple[Inputs, Any]:
        """The network's arguments and the labels, made from a loader's batch."""
        given, labels = split_batch(batch)
        return self.read(batch if callable(self.inputs) else given), labels

    def _accepts(self, name: str) -> bool:
        """Whether the network's `forward` takes a keyword argument of this name."""
        parameters = inspect.signature(unwrap(self.model).forward).parameters
        if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
            return True
        return name in parameters and parameters[name].kind in (
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.KEYWORD_ONLY,
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the network's floating-point parameters."""
        held = itertools.chain(self.model.parameters(), self.model.buffers())
        return next((t.dtype for t in held if t.is_floating_point()), torch.get_default_dtype())

    def explain_dtype(self, inputs: Inputs, error: BaseException) -> None:
        """If the inputs have another floating-point type than the network, raise an error that names both.

        Autocast converts inputs. So the type is no reason for an error there.
        """
        own, device = self.dtype, device_of(self.model)
        if torch.is_autocast_enabled("cpu" if device is None else device.type):
            return
        others = {t.dtype for t in tensors_in(inputs) if t.is_floating_point()} - {own}
        if others:
            given, kind = (str(t).removeprefix("torch.") for t in (min(others, key=str), own))
            raise InputError(
                f"inputs of {given} were given, the parameters of {type(unwrap(self.model)).__name__} are "
                f"{kind} ({type(error).__name__}: {error}). Convert the inputs, images.to(torch.{kind}), or "
                "let inputs=FUNCTION do so"
            ) from error

    def mask_of(self, inputs: Inputs) -> Tensor | None:
        """Which places of the network's arguments are not padding, `(N, length)`. None without a mask."""
        if self.mask is False:
            return None
        if self.mask is None:
            mask = inputs.get(MASK) if isinstance(inputs, Mapping) else None
            if mask is not None and not _is_mask(mask, inputs):
                warn_once(
                    self.module,
                    f"padding counts: {MASK} is no tensor of whole numbers of shape (examples, length), 0 at "
                    "padding. Say where the padding is: mask=FUNCTION",
                )
                return None
            return None if mask is None else mask != 0
        if callable(self.mask):
            mask, where = self.mask(inputs), "mask=FUNCTION returned"
        elif isinstance(inputs, Mapping) and self.mask in inputs:
            mask, where = inputs[self.mask], f"mask='{self.mask}' is"
        else:
            raise InputError(f"mask='{self.mask}' names an argument of the network, got {kind_of(inputs)}")
        if not _is_mask(mask, inputs):
            raise InputError(
                f"{where} {kind_of(mask)}: a mask is a tensor of bool or whole numbers of shape (examples, "
                "length), 0 at padding"
            )
        return mask != 0

    def logits_of(self, output: Any) -> Tensor:
        """The logits in the network's output, `(N, classes)`."""
        logits = output if self.logits is None and isinstance(output, Tensor) else self._chosen(output)
        if not isinstance(logits, Tensor):
            raise InputError(
                f"the network returned {kind_of(output)}: no logits were found in it. Say where they are: "
                f"logits='NAME', a position or a function. {IN_A_COMMAND}"
            )
        if logits.ndim != 2 or logits.shape[1] < 2:
            single = (
                logits.ndim == 1 and " If this is one example without a batch axis, add it: images[None]."
            )
            raise InputError(
                f"the logits have shape {tuple(logits.shape)}: expected those of a classifier, (examples, "
                f"classes), two classes or more.{single or ''} If the network returns more than logits, say "
                f"where they are: logits=NAME. {IN_A_COMMAND}"
            )
        return logits

    def _chosen(self, output: Any) -> Any:
        """The logits: by the adapter if there is one, else by the usual forms of outputs."""
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
        """The part that looks like logits. Of several, the part that is as wide as the last linear layer."""
        likely = [part for part in parts if isinstance(part, Tensor) and part.ndim == 2 and part.shape[1] > 1]
        if len(likely) > 1:
            linear = [m for m in unwrap(self.model).modules() if isinstance(m, nn.Linear)]
            as_wide = [part for part in likely if linear and part.shape[1] == linear[-1].out_features]
            likely = as_wide if len(as_wide) == 1 else likely
        if len(likely) > 1:
            warn_once(
                unwrap(self.model),
                f"the network returns {len(likely)} tensors that may be logits, of "
                f"{', '.join(str(part.shape[1]) for part in likely)} columns: the first is taken. Choose one "
                "by logits=, with a name, a position or a function",
            )
        return likely[0] if likely else None

    def warn_of_probabilities(self, logits: Tensor, operation: str | None) -> None:
        """Warn if the output looks like probabilities: its rows sum to one, or `operation` is a sigmoid."""
        rows = logits.double()
        softmax = bool((rows >= 0).all()) and torch.allclose(rows.sum(1), rows.new_ones(len(rows)), atol=1e-3)
        if softmax or operation == "sigmoid":
            warn_once(
                unwrap(self.model),
                f"the output of {type(unwrap(self.model)).__name__} looks like probabilities, not logits: "
                "energy and other scores of logits work badly on it. Watch the network without its "
                f"{'softmax' if softmax else 'sigmoid'}, or undo it: logits=torch.log"
                f"{'' if softmax else 'it'}",
            )


def _is_mask(value: Any, inputs: Inputs) -> bool:
    """Whether a value can be the mask of a batch."""
    shaped = isinstance(value, Tensor) and value.ndim == 2 and value.shape[0] == count_examples(inputs)
    return shaped and not value.is_floating_point()


def adapted(saved: Mapping[str, Any], network: Network) -> Network:
    """The network with the adapters of a file. Given adapters come first. Functions must be given."""
    missing = {name: value for name, value in saved.items() if getattr(network, name) is None}
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


def wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """The DataParallel, DistributedDataParallel and torch.compile wrappers of a network, then the network."""
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        yield model
        if isinstance(model, parallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return


def unwrap(model: nn.Module) -> nn.Module:
    """The network inside its wrappers."""
    *_, network = wrappers(model)
    return network
