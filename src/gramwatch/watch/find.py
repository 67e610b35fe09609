"""Finding taps: a forward pass in which every call is followed.

The network runs twice on a tiny batch. Every tensor is followed to learn its batch axis and its channel axis.
A watched call is named after the module that makes it.
"""

import functools
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gramwatch.errors import NoTapError, TapError, warn_once
from gramwatch.inputs.adapters import LogitsAdapter, Network, unwrap
from gramwatch.inputs.batches import Inputs, mapped, on_device, repeated
from gramwatch.watch.probing import Event, Probe, sizes_of
from gramwatch.watch.running import Watch, call, first_look, judging, ordinary, outside_compilation
from gramwatch.watch.tap import Tap, Taps

MOST_SPREAD = 24
"""The most taps of `taps="spread"`."""


@outside_compilation
def find_taps(
    model: nn.Module | Network,
    inputs: Inputs,
    select: str | Iterable[str] = "all",
    *,
    logits: LogitsAdapter = None,
) -> Taps:
    """Find the tensors to watch in `model`, from one batch of its inputs.

    Args:
        model: any classifier. It is run twice, on copies of the batch's first example.
        inputs: a tensor, a tuple of arguments or a mapping of keyword arguments, as the model takes it.
        select: which tensors. `"all"`: the outputs of all convolutions, linear layers, recurrent layers and
            activations, without the logits. `"ends"`: of these, the last tensor of every size that has two
            channels or more; there the network's stages end. `"spread"`: of these, at most 24 with two
            channels or more, evenly spread from the first to the last. `"paper"`: the tensors of the paper,
            for the networks in `gramwatch.inputs.networks`. Or names and globs.
        logits: where the logits are in the model's output, as for `GramDetector`.

    """
    network = Network.of(model, logits=logits)
    if network is not model:  # a user's own inputs
        inputs = on_device(network.read(inputs), network.model)
    return Look(network, inputs).taps(select)


def find_head(model: nn.Module | Network, inputs: Inputs) -> int | None:
    """The position of the watched call that computes the logits by a linear layer. None if there is none."""
    return Look(Network.of(model), inputs).head


class Look:
    """The facts about a network that a probe finds: its watched calls, its taps, and its head.

    The head is the linear layer that makes the logits.

    Args:
        network: any classifier. It runs once for its calls, once more for its taps, and once for its head.
        inputs: a batch. Only its first example is used.

    """

    def __init__(self, network: Network, inputs: Inputs) -> None:
        self.network, self.inputs = network, inputs
        self._model = unwrap(network.model)
        self.head_layer: tuple[Tensor, Tensor | None] | None = None
        """The weight `(classes, features)` and the bias of the head, after `head` has found it."""
        self.head_takes_features = False
        """Whether the features are the one argument of a module that makes the logits, likewise."""

    @functools.cached_property
    def _inputs(self) -> Inputs:
        """The first example. Values that are not finite become zero, because the probe compares values."""
        first = repeated(self.inputs, 1)
        return mapped(first, lambda t: t.nan_to_num(0.0, 0.0, 0.0) if t.is_floating_point() else t)

    @functools.cached_property
    @outside_compilation
    def _probe(self) -> Probe:
        """The watched calls of one pass over two examples, and its logits. The pass runs at the first use."""
        with judging(self._model), first_look(self.network, self._inputs):
            probe = Probe(self._model)
            probe.logits = self.network.logits_of(probe.run(repeated(self._inputs, 2)))
        self.network.warn_of_probabilities(probe.logits, probe.last_operation())
        return probe

    @property
    def operations(self) -> tuple[str, ...]:
        """Every watched call of a forward pass."""
        return tuple(event.operation for event in self._probe.events)

    def taps(self, select: str | Iterable[str] = "all") -> Taps:
        """The chosen taps."""
        return _chosen(self._model, self._all_taps, select, _HINT_PACKED * self._probe.packed)

    @functools.cached_property
    @outside_compilation
    def _all_taps(self) -> Taps:
        """All taps, including marked tensors. They are found at the first use."""
        probe, model = self._probe, self._model
        with judging(model):
            sizes = sizes_of(model, repeated(self._inputs, 3))
        if list(self.operations) != sizes.operations:
            raise TapError(
                "the network makes different calls for a batch of two and a batch of three: its path depends "
                "on its input, so its tensors cannot be watched by their place in it"
            )
        if not any(event.kind != "mark" for event in probe.events):
            none = f"{type(model).__name__} has no tap: no convolution, linear layer or activation was called"
            if any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
                raise TapError(
                    f"{none}; a scripted network cannot be watched, pass the nn.Module it was made from"
                )
            raise NoTapError(none + _HINT_PACKED * probe.packed)
        dropped = probe.logits_calls()
        names = _names(probe.events)
        taps = []
        for number, (event, shape3) in enumerate(zip(probe.events, sizes.shapes, strict=True)):
            batch = _batch_axis(event.shape, shape3)
            if number in dropped or batch is None or event.is_constant:
                continue  # the logits themselves, or values that do not depend on the input
            axis, fold = batch
            channel = _channel_axis(event, axis)
            shape = (*event.shape[:axis], fold, *event.shape[axis + 1 :])
            first = _examples_first(event.output, axis)
            taps.append(Tap(names[number], event.kind, event.operation, shape, axis, channel, number, first))
        return Taps(taps, sizes.operations)

    @property
    def makers(self) -> tuple[nn.Module, ...]:
        """The module of every watched call, in order. Empty if a call is no result of a module of its own."""
        if "_probe" not in vars(self):
            return ()
        makers = tuple([event.maker for event in self._probe.events])
        return () if any(maker is None for maker in makers) else makers  # type: ignore[return-value]

    @functools.cached_property
    @outside_compilation
    def head(self) -> int | None:
        """The position of the watched call that computes the logits by a linear layer. None if there is none.

        A convolution over its whole input counts as a linear layer, because it computes the same.
        """
        probe = self._probe
        layers = [n for n in probe.logits_calls() if probe.events[n].kind in ("linear", "convolution")]
        if len(layers) != 1:
            return None
        watch = Watch(Taps((), self.operations), lambda *_: None, head=layers[0])
        maker = probe.events[layers[0]].maker
        arguments: list[tuple[Any, ...]] = []
        hook: AbstractContextManager[object] = nullcontext()
        if maker is not None:
            hook = maker.register_forward_hook(lambda _, args, result: arguments.append(args))
        with hook, judging(self._model):
            logits = self.network.logits_of(watch.run(self._model, repeated(self._inputs, 2))).float()
        assert watch.at_head
        features, weight, bias = watch.at_head
        weight = weight.detach().flatten(1).float()
        if bias is not None and bias.ndim != 1:
            return None  # the network adds a matrix, which is no bias
        if features.shape[0] != 2 or weight.shape != (logits.shape[1], features.shape[1]):
            return None
        bias = None if bias is None else bias.detach().float()
        computed = features @ weight.T + (0.0 if bias is None else bias)
        if not torch.allclose(computed, logits, rtol=1e-2, atol=1e-3 * float(logits.abs().max())):
            return None
        self.head_layer = weight, bias
        if arguments and len(arguments[-1]) == 1:
            self.head_takes_features = torch.equal(arguments[-1][0].flatten(1).float(), features)
        return layers[0]

    def warn_of_padding(self, taps: Taps) -> None:
        """Warn if padding counts in spite of a mask: at some of these taps, or in the network itself."""
        mask = self.network.mask_of(self.inputs)
        if mask is None:
            return
        sizes = {tap.call: tap.pixels for tap in self._all_taps} if taps else {}  # for these inputs
        apart = [tap.name for tap in taps if sizes.get(tap.call, 1) not in (1, mask.shape[1])]
        if apart:
            names = ", ".join(apart[:8]) + (f" and {len(apart) - 8} more" if len(apart) > 8 else "")
            warn_once(
                self._model,
                f"padding counts at {len(apart)} tap(s) of {type(self._model).__name__}, which do not have "
                f"one pixel for each place of the mask: {names}",
            )
        padded = (mask.any(1) & ~mask.all(1)).nonzero().flatten().tolist()
        if padded and self._depends_on_padding(padded[0], mask):
            warn_once(
                self._model,
                f"{type(self._model).__name__} itself returns other logits if an input is padded, so that "
                "its verdict depends on its batch. Look at how the network pools places and numbers their "
                "positions; pad on the other side, or give position_ids",
            )

    @outside_compilation
    def _depends_on_padding(self, example: int, mask: Tensor) -> bool:
        """Whether the logits of an example change if its padding is cut off."""

        def alone(t: Tensor) -> Tensor:
            return t[example : example + 1] if t.ndim and t.shape[0] == len(mask) else t

        def cut(t: Tensor) -> Tensor:
            return alone(t)[:, mask[example]] if t.shape[:2] == mask.shape else alone(t)

        try:
            with judging(self._model):
                padded, without = (
                    self.network.logits_of(call(self._model, ordinary(mapped(self.inputs, change))))
                    for change in (alone, cut)
                )
        except (TypeError, RuntimeError, ValueError, IndexError):
            return False  # the network takes inputs of one length only
        rounding = torch.finfo(padded.dtype).eps ** 0.5 * padded.abs().amax().clamp_min(1.0)
        return bool((padded - without).abs().amax() > rounding)


_HINT_PACKED = (
    "; a recurrent layer over a packed sequence is not watched: in the network's code, mark the tensor that "
    'pad_packed_sequence returns, gramwatch.mark(x, "name")'
)


def _chosen(model: nn.Module, taps: Taps, select: str | Iterable[str], hint: str) -> Taps:
    if select in ("all", "ends", "spread"):
        plain = Taps((tap for tap in taps if tap.kind != "mark"), taps.operations)
        if not plain:
            raise NoTapError(
                f"{type(model).__name__} has no tap: its only convolution or linear layer makes the logits"
                + hint
            )
        if select == "all":
            return plain
        return _ends(model, plain) if select == "ends" else _spread(model, plain)
    if select == "paper":
        patterns = getattr(model, "paper_taps", None)
        if patterns is None:
            raise TapError(
                f"taps='paper' is defined for the networks in gramwatch_lab.networks, not for "
                f"{type(model).__name__}: choose 'all', or names and globs"
            )
        return taps.select(patterns)
    return taps.select(select)


def _ends(model: nn.Module, taps: Taps) -> Taps:
    """The last tap with two channels or more, of every size. One channel scaled to length one is constant."""
    last = {tap.pixels: tap for tap in taps if tap.channels > 1}
    without = {tap.pixels: tap.name for tap in taps if tap.pixels not in last}
    network = type(model).__name__
    if not last:
        raise NoTapError(f"{network} has no tap with two channels or more, which taps='ends' looks for")
    if without:
        warn_once(
            model,
            f"taps='ends' leaves out {len(without)} stage(s) of {network}, in which every tensor has one "
            f"channel only: {', '.join(without.values())}",
        )
    return Taps((tap for tap in taps if last.get(tap.pixels) is tap), taps.operations)


def _spread(model: nn.Module, taps: Taps) -> Taps:
    """At most `MOST_SPREAD` taps with two channels or more, evenly spread from the first to the last."""
    wide = [tap for tap in taps if tap.channels > 1]
    if not wide:
        raise NoTapError(
            f"{type(model).__name__} has no tap with two channels or more, which taps='spread' looks for"
        )
    steps = max(1, min(len(wide), MOST_SPREAD) - 1)
    chosen = {(2 * step * (len(wide) - 1) + steps) // (2 * steps) for step in range(steps + 1)}
    return Taps((tap for number, tap in enumerate(wide) if number in chosen), taps.operations)


def _channel_axis(event: Event, batch_axis: int) -> int:
    """The last axis of the channels. If they are unknown: the last of three axes, else the second axis."""
    likely = (0, 1, 2) if len(event.shape) == 3 else (0, 1)
    axes = [axis for axis in event.axes or likely if axis != batch_axis and axis < len(event.shape)]
    return axes[-1] if axes else batch_axis


def _examples_first(x: Tensor, axis: int) -> bool:
    """Whether all entries of one example come before the next, along a batch axis that holds more.

    `x` has two equal examples. So along that axis, either the two halves are equal, or neighbours are equal.
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


def _names(events: list[Event]) -> list[str]:
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
