"""Running a network once under watch: every tapped tensor is handed over as soon as it is computed."""

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gramwatch.errors import TapError
from gramwatch.inputs.adapters import Network
from gramwatch.inputs.batches import Inputs, count_examples, mapped
from gramwatch.watch.operations import (
    OPERATIONS,
    RECURRENT,
    WATCHED_LATER,
    layer_arguments,
    made_by,
    watched,
    writes,
)
from gramwatch.watch.running import call, is_compiled, judging, outside_compilation, warn_uncompiled
from gramwatch.watch.tap import Taps


@outside_compilation
def observe(
    model: nn.Module | Network,
    taps: Taps,
    inputs: Inputs,
    receive: Callable[[int, Tensor], None],
    repeat: Callable[[int, int], bool | None] | None = None,
    head: "Head | None" = None,
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
        head: a call, as `find_head` returns it, and a function. The function is called with the input, the
            weight and the bias of the layer at that call.
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
        output = run_watched(network.module, inputs, taps, hand_over, repeat, head or (None, None))
    return network.logits_of(output)


Head = tuple[int | None, Callable[[Tensor, Tensor, Tensor | None], None] | None]
"""A watched call, and a function that takes the input, the weight and the bias of the layer at that call."""


def ordinary(inputs: Inputs) -> Inputs:
    """The inputs without inference tensors, because the network may write into its inputs."""
    if isinstance(inputs, Tensor) and not inputs.is_inference():
        return inputs
    with torch.inference_mode(False):
        return mapped(inputs, lambda t: t.clone() if t.is_inference() else t)


def run_watched(
    module: nn.Module,
    inputs: Inputs,
    taps: Taps,
    receive: Callable[[int, Tensor], None],
    repeat: Callable[[int, int], bool | None] | None,
    head: Head,
) -> Any:
    """The network's output. Every tapped tensor is handed over as the network makes it."""
    if not taps.listed and head[0] is None:  # nothing is watched, so any path will do
        return call(module, inputs)
    watch = Watch(taps, receive, repeat, head)
    with watch:
        output = call(module, inputs)
    watch.finish()
    return output


Makers = Sequence[tuple[int, nn.Module]]
"""The modules that make the tapped tensors, each with the position of its call among the watched calls.

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
) -> Any:
    """`run_watched` for a network whose every watched call is the result of a module of its own.

    The makers get hooks for the time of this pass, before the hooks of others. All other calls take no more
    time than usual, and are not checked. It raises `OtherCallsError` if the makers are called in another
    order.
    """
    owner, key, numbers = threading.get_ident(), next(_keys), taps.numbers
    done = 0

    def hook(maker: nn.Module, args: Any, result: Any) -> None:
        nonlocal done
        if threading.get_ident() != owner:
            return
        if done >= len(makers) or makers[done][1] is not maker:
            raise OtherCallsError
        number = numbers.get(makers[done][0])
        done += 1
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
    return output


class Watch(TorchFunctionMode):
    """Hands over every tapped tensor, and makes sure that the network makes the expected calls.

    A compiled network is traced by torch.compile with this mode inside. So it compares functions by identity,
    and works on names and weak references only if `repeat` is given.
    """

    def __init__(
        self,
        taps: Taps,
        receive: Callable[[int, Tensor], None],
        repeat: Callable[[int, int], bool | None] | None,
        head: Head,
    ) -> None:
        super().__init__()
        self._head_call, self._take_head = head
        self._taps, self._receive = taps, receive
        self._repeat = repeat if taps.marked else None
        self._handed_over: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._calls = 0

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
            if call == self._head_call and self._take_head is not None:
                self._take_head(*layer_arguments(operation, args, kwargs or {}))
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

    def finish(self) -> None:
        """Make sure that the network made all expected calls."""
        if self._calls != len(self._taps.operations):
            raise TapError(
                f"the network made {self._calls} watched calls, {len(self._taps.operations)} were expected: "
                "it is another network, or takes another path, than when its taps were found"
            )


def _overwrites(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Whether a call writes its result into an existing tensor."""
    return bool(kwargs and "out" in kwargs) or bool(args and result is args[0])
