"""Running a network once under watch: each tapped tensor is handed over at the moment it is made."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gramwatch.batches import Inputs, count_examples, mapped
from gramwatch.errors import TapError
from gramwatch.taps.operations import KINDS, WATCHED_LATER, is_watched, known, layer_arguments, made_by
from gramwatch.taps.running import Network, call, judging, outside_compilation, unwrap, warn_if_compiled
from gramwatch.taps.tap import Taps


@outside_compilation
def observe(
    model: nn.Module | Network,
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
    network = Network.of(model)
    warn_if_compiled(network.model)
    module = unwrap(network.model)
    with judging(module), torch.set_grad_enabled(gradients):
        inputs = mapped(inputs, lambda t: t.clone() if t.is_inference() else t)  # may be written into
        if not len(taps) and (head is None or head[0] is None):  # nothing is watched, so any path will do
            return network.logits_of(call(module, inputs))
        with Watch(taps, count_examples(inputs), receive, repeat, head or (None, None)) as watch:
            output = call(module, inputs)
    watch.finish()
    return network.logits_of(output)


class Watch(TorchFunctionMode):
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
        operation, writes = known(func)
        if operation != "mark" and (writes or (kwargs and "out" in kwargs) or (args and result is args[0])):
            self._handed_over.clear()
        if operation in KINDS and is_watched(operation, args):
            self._check(operation)
            number = self._numbers.get(self._calls)
            if self._calls == self._head_call and self._take_head is not None:
                self._take_head(*layer_arguments(operation, args, kwargs or {}))
            self._calls += 1
            if number is not None:
                self._hand_over(number, made_by(result), operation)
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
            later = f". Version 0.1.0 did not watch '{operation}': after an update, fit anew"
            raise TapError(
                f"the network calls '{operation}' where '{instead}' was expected (watched call "
                f"{self._calls}): it is another network, or takes another path, than when its taps were found"
                + (later if operation in WATCHED_LATER else "")
            )

    def finish(self) -> None:
        """The network made all expected calls, or a plain error."""
        if self._calls != len(self._taps.operations):
            raise TapError(
                f"the network made {self._calls} watched calls, {len(self._taps.operations)} were expected: "
                "it is another network, or takes another path, than when its taps were found"
            )
