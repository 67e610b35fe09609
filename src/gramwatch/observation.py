"""Observation: what one forward pass shows of a batch, for any number of detectors at once.

Detectors ask for what they need, an `Observer` runs the network once and collects just that: the logits
always; the penultimate features and the linear layer that makes the logits of them; the mean of every
channel at every tap.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gramwatch.batches import Inputs, all_finite, count_examples, on_device
from gramwatch.detector import Collector
from gramwatch.errors import InputError, TapError
from gramwatch.taps import Network, Taps, find_calls, find_head, find_taps, observe, unwrap

NEEDS = ("features", "head", "channel_means")
"""What a detector may ask for beside the logits."""


@dataclass(frozen=True)
class Head:
    """The linear layer that makes the logits: `logits = features @ weight.T + bias`."""

    weight: Tensor
    """`(classes, features)`"""
    bias: Tensor
    """`(classes,)`"""

    def __call__(self, features: Tensor) -> Tensor:
        """The logits of some features."""
        return features @ self.weight.T.to(features) + self.bias.to(features)


@dataclass(frozen=True)
class Observation:
    """What one forward pass shows of a batch of N inputs."""

    logits: Tensor
    """`(N, classes)`"""
    features: Tensor | None = None
    """The penultimate features, `(N, D)`: the input of the layer that makes the logits."""
    head: Head | None = None
    """The linear layer that makes the logits of the features."""
    channel_means: tuple[Tensor, ...] = ()
    """For each tap the mean of each channel over the pixels, `(N, channels)`."""
    labels: Tensor | None = None
    """The labels that came with the inputs, `(N,)`, if any did."""
    finite: Tensor | None = None
    """Which examples, and all that was seen of them, are free of NaN and infinity, `(N,)`."""

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def predicted(self) -> Tensor:
        """The predicted class, D_c."""
        return self.logits.argmax(1)

    @property
    def classes(self) -> Tensor:
        """The label of each example; where there are none, the predicted class."""
        return self.predicted if self.labels is None else self.labels

    def __getitem__(self, index: Any) -> "Observation":
        """The observation of some examples."""
        return self.changed(lambda t: t[index])

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Observation":
        """The same with every tensor changed."""

        def each(t: Tensor | None) -> Tensor | None:
            return None if t is None else change(t)

        return Observation(
            change(self.logits),
            each(self.features),
            self.head,
            tuple(change(t) for t in self.channel_means),
            each(self.labels),
            each(self.finite),
        )

    def kept(self, needs: Iterable[str]) -> "Observation":
        """The finite examples on the CPU, with what is needed of them beside logits and labels."""
        means = self.channel_means if "channel_means" in needs else ()
        features = self.features if "features" in needs else None
        trimmed = replace(self, features=features, channel_means=means, finite=None)
        return (trimmed if self.finite is None else trimmed[self.finite]).changed(Tensor.cpu)

    @staticmethod
    def joined(parts: Sequence["Observation"]) -> "Observation":
        """The observation of several batches together."""

        def each(name: str) -> Tensor | None:
            tensors = [getattr(part, name) for part in parts]
            return None if any(t is None for t in tensors) else torch.cat(tensors)

        logits = torch.cat([part.logits for part in parts])
        means = tuple(torch.cat(t) for t in zip(*(part.channel_means for part in parts), strict=True))
        return Observation(logits, each("features"), parts[0].head, means, each("labels"), each("finite"))


class ChannelMeans:
    """Gathers the channel means of one batch at taps of its own, beside an observer who looks at others."""

    repeat = None

    def __init__(self, taps: Taps) -> None:
        self.taps = taps
        self.means: list[Tensor] = []
        """`(N, channels)` for each tap, when the network has run."""

    def receive(self, number: int, maps: Tensor) -> None:
        """Take the means of one tap."""
        self.means.append(maps.mean(2, dtype=torch.float32))

    def seen_in(self, observation: Observation) -> Observation:
        """What was observed, with these means."""
        finite = all_finite(self.means)
        if observation.finite is not None:
            finite = finite & observation.finite
        return replace(observation, channel_means=tuple(self.means), finite=finite)


class Observer:
    """Runs a network and collects from one forward pass what detectors ask for.

    Args:
        model: any classifier that returns logits.
        needs: some of `NEEDS`.
        taps: whose channel means to collect, as for `find_taps`.
        features: the name of a tap whose channel means are to count as the features, instead of the input of
            the layer that makes the logits.

    """

    def __init__(
        self,
        model: nn.Module | Network,
        needs: Iterable[str] = (),
        *,
        taps: str | Iterable[str] = "all",
        features: str | None = None,
    ) -> None:
        self.network = Network.of(model)
        self.model = self.network.model
        self.needs = frozenset(needs)
        unknown = self.needs - set(NEEDS)
        if unknown:
            raise ValueError(f"an observation has no {sorted(unknown)}, only {', '.join(NEEDS)}")
        self.head: Head | None = None
        """The linear layer that makes the logits, after the first batch; None where there is none."""
        self.taps: Taps | None = None
        self._selection, self._features_name = taps, features
        self._head_call: int | None = None
        self._features_call: int | None = None
        self._together: _Together | None = None

    def _prepare(self, inputs: Inputs) -> Taps:
        if self.taps is None:
            found = Taps((), ())  # nothing is watched, so nothing is looked for
            if "channel_means" in self.needs:
                found = find_taps(self.network, inputs, self._selection)
            taps = {tap.call: tap for tap in found}
            if self._features_name is not None:
                named = find_taps(self.network, inputs, [self._features_name])
                if len(named) != 1:
                    raise TapError(f"features='{self._features_name}' names {len(named)} taps: name one")
                self._features_call = named[0].call
                taps[named[0].call], found = named[0], named
            elif self.needs & {"features", "head"}:
                self._head_call = find_head(self.network, inputs)
                if self._head_call is None:
                    name = type(unwrap(self.model)).__name__
                    raise TapError(
                        f"the logits of {name} are not made by one linear layer, so its penultimate features "
                        "cannot be found: name a tap, features='...'"
                    )
                found = found if found.operations else find_calls(self.model, inputs)
            self.taps = Taps((taps[call] for call in sorted(taps)), found.operations)
        return self.taps

    @torch.inference_mode()
    def __call__(
        self, inputs: Inputs, labels: Tensor | None = None, beside: "Sequence[Collector | ChannelMeans]" = ()
    ) -> Observation:
        """One forward pass, which others may watch as well."""
        return self._pass(inputs, labels, beside, gradients=False)

    def means_of(self, inputs: Inputs) -> ChannelMeans:
        """What gathers the channel means that this observer would, in another's pass over these inputs."""
        return ChannelMeans(self._prepare(on_device(inputs, self.model)))

    def differentiable(self, inputs: Inputs) -> Observation:
        """One forward pass whose observation can be differentiated with respect to the inputs."""
        with torch.inference_mode(False), torch.enable_grad():
            return self._pass(inputs, None, (), gradients=True)

    def _pass(
        self,
        inputs: Inputs,
        labels: Tensor | None,
        beside: "Sequence[Collector | ChannelMeans]",
        gradients: bool,
    ) -> Observation:
        if count_examples(inputs) == 0:
            raise InputError("the batch is empty")
        inputs = on_device(inputs, self.model)
        taps = self._prepare(inputs)
        own = ChannelMeans(taps)
        features: list[Tensor] = []

        def at_head(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
            features.append(x.flatten(1).float())
            if self.head is None:
                weight = weight.detach().flatten(1).float()
                zero = weight.new_zeros(len(weight))
                self.head = Head(weight, zero if bias is None else bias.detach().float())

        watched, receive, repeat = self._watching(
            [(each.taps, each.receive, each.repeat) for each in (own, *beside)]
        )
        head = (self._head_call, at_head)
        logits = observe(
            self.network, watched, inputs, receive, repeat, head=head, gradients=gradients
        ).float()
        means = own.means
        features += [mean for tap, mean in zip(taps, means, strict=True) if tap.call == self._features_call]
        finite = all_finite([inputs, logits, features, means])
        return Observation(
            logits,
            features[0] if features else None,
            self.head,
            tuple(means) if "channel_means" in self.needs else (),
            None if labels is None else labels.to(logits.device),
            finite,
        )

    def _watching(self, watchers: "Sequence[Watcher]") -> "Watcher":
        """All who watch a pass, as one."""
        watchers = [each for each in watchers if len(each[0])] or watchers[:1]
        if len(watchers) == 1:
            return watchers[0]
        watched = [taps for taps, _, _ in watchers]
        if self._together is None or not self._together.is_of(watched):
            self._together = _Together(watched)
        return self._together.taps, *self._together.handing_over(watchers)


Receive = Callable[[int, Tensor], None]
Repeat = Callable[[int, int], bool | None]
Watcher = tuple[Taps, Receive, Repeat | None]


class _Together:
    """The taps of several watchers of one network together, and which of them are whose."""

    def __init__(self, watched: Sequence[Taps]) -> None:
        taps = {tap.call: tap for each in watched for tap in each}
        self.taps = Taps((taps[call] for call in sorted(taps)), watched[0].operations)
        self._watched = list(watched)
        place = {tap.call: number for number, tap in enumerate(self.taps)}
        self._own = [{place[tap.call]: n for n, tap in enumerate(each)} for each in watched]
        self._wanting = [
            [(watcher, own[number]) for watcher, own in enumerate(self._own) if number in own]
            for number in range(len(self.taps))
        ]

    def is_of(self, watched: Sequence[Taps]) -> bool:
        """Whether these are the same taps, by identity: asked for every batch."""
        return len(watched) == len(self._watched) and all(map(operator.is_, watched, self._watched))

    def handing_over(self, watchers: Sequence[Watcher]) -> tuple[Receive, Repeat]:
        """What hands each tensor to those it is for.

        They are told that a tensor is one they have seen before where this is so for all who want it.
        """
        wanting, receives = self._wanting, [receive for _, receive, _ in watchers]

        def receive_all(number: int, maps: Tensor) -> None:
            for watcher, own in wanting[number]:
                receives[watcher](own, maps)

        def repeat_all(number: int, earlier: int) -> bool:
            repeating = []
            for watcher, own in wanting[number]:
                repeat = watchers[watcher][2]
                if repeat is None or earlier not in self._own[watcher]:
                    return False
                repeating.append((repeat, own, self._own[watcher][earlier]))
            for repeat, own, before in repeating:
                repeat(own, before)
            return True

        return receive_all, repeat_all
