"""Observation: what one forward pass shows of a batch; and the plan of such a pass.

Detectors say what they need of a pass. A `Plan` is made once, from one look at the network, for any number of
detectors: which tensors are watched, what is computed of each, where the features are. Carrying it out gives
each detector its `Observation`, all of them from one forward pass.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gramwatch import kernels
from gramwatch.batches import Inputs, Signature, count_examples, finite_with, mapped, on_device, signature
from gramwatch.errors import InputError, TapError
from gramwatch.statistics import distinct_orders
from gramwatch.taps import Look, Network, Tap, Taps, observe, unwrap
from gramwatch.taps.running import warn_if_compiled

WIDEST_TRIANGLE = 1024
"""`statistic="auto"` takes the pairs of a vector up to this many channels, row sums above."""
MOST_STATISTICS = 2**30
"""If the statistics of a batch would take more bytes, the batch is run in pieces."""

Selection = str | tuple[str, ...]
"""Which taps: as for `find_taps`."""


@dataclass(frozen=True)
class Statistics:
    """Gram statistics that a detector asks for: at which taps, which statistic, of which orders."""

    taps: Selection
    statistic: str
    orders: tuple[int, ...]

    def at(self, tap: Tap) -> "StatisticsAtTap":
        """What is computed at one tap."""
        statistic, channels = self.statistic, tap.channels
        if statistic == "auto":
            pairs = tap.is_vector and channels <= WIDEST_TRIANGLE
            statistic = "triangle" if pairs else "row_sums"
        features = channels * (channels + 1) // 2 if statistic == "triangle" else channels
        if statistic == "triangle" and tap.is_vector:
            orders = distinct_orders(self.orders)
            return StatisticsAtTap(statistic, tuple(orders), tuple(orders.values()), features)
        return StatisticsAtTap(statistic, self.orders, (1,) * len(self.orders), features)


@dataclass(frozen=True)
class StatisticsAtTap:
    """What is computed at one tap: a statistic of some orders, each of which stands for so many."""

    statistic: str
    orders: tuple[int, ...]
    weights: tuple[int, ...]
    features: int
    """Statistics of each order."""

    @property
    def size(self) -> int:
        """How many statistics that are."""
        return len(self.orders) * self.features


@dataclass(frozen=True)
class Needs:
    """What a detector needs of a pass beside the logits."""

    features: bool = False
    """The penultimate features, and the linear layer that makes the logits of them."""
    features_at: str | None = None
    """The name of a tap whose channel means count as the features, instead of that layer's input."""
    means: Selection | None = None
    """The taps whose channel means are needed."""
    statistics: Statistics | None = None
    """The Gram statistics that are needed."""


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
    """What one forward pass shows one detector of a batch of N inputs."""

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
    statistics: Tensor | None = None
    """The Gram statistics of all taps side by side, `(N, statistics)`; `finite` says nothing of these."""
    form: Signature | None = None
    """Shapes and dtypes of the inputs."""

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def predicted(self) -> Tensor:
        """The predicted class, D_c."""
        return self.logits.argmax(1)

    @property
    def averages(self) -> list[Tensor]:
        """Features and channel means, as far as they are there."""
        return [*self.channel_means, *(() if self.features is None else (self.features,))]

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

        return replace(
            self,
            logits=change(self.logits),
            features=each(self.features),
            channel_means=tuple(change(t) for t in self.channel_means),
            labels=each(self.labels),
            finite=each(self.finite),
            statistics=each(self.statistics),
        )

    @cached_property
    def kept(self) -> "Observation":
        """The finite examples on the CPU, for those who keep examples; all of them share one copy."""
        trimmed = replace(self, finite=None, statistics=None)
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


class GramTable:
    """Where the Gram statistics of some taps lie side by side."""

    def __init__(self, asked: Statistics, taps: Taps) -> None:
        self.taps = taps
        self.at = [asked.at(tap) for tap in taps]
        self.starts = [0, *accumulate(each.size for each in self.at)]

    def empty(self, maps: Tensor) -> Tensor:
        """Room for the statistics of a batch."""
        return torch.empty(len(maps), self.starts[-1], dtype=torch.float32, device=maps.device)

    def place(self, table: Tensor, number: int) -> Tensor:
        """The part of a table that holds one tap's statistics, `(N, orders, features)`."""
        at = self.at[number]
        shape = (len(table), len(at.orders), at.features)
        return table.as_strided(shape, (self.starts[-1], at.features, 1), self.starts[number])


class Plan:
    """What to watch in a network, and what to compute of it, for some detectors.

    Args:
        look: what a look at the network found out.
        needs: of each detector.
        known: taps that were found before, as those of a saved detector.

    """

    def __init__(
        self, look: Look, needs: Sequence[Needs], known: Mapping[Statistics, Taps] | None = None
    ) -> None:
        self.network, self.needs = look.network, list(needs)
        warn_if_compiled(self.network.model)
        self.form: Signature | None = None
        """Shapes and dtypes of inputs that all detectors were found to accept."""
        self.explained: Callable[[Inputs], AbstractContextManager[None]] = lambda inputs: nullcontext()
        """What refuses inputs that a detector does not accept, and explains why the network fails on them."""
        self.head: Head | None = None
        """The linear layer that makes the logits, after the first pass; None where nobody asked for it."""
        known = known or {}
        self._means = {asked: look.taps(asked) for asked in _asked(each.means for each in needs)}
        self._named = {(name,): _one(look, name) for name in _asked(each.features_at for each in needs)}
        asked = _asked(each.statistics for each in needs)
        self.tables = {each: GramTable(each, known.get(each) or look.taps(each.taps)) for each in asked}
        self._head_call = look.head if any(each.features and not each.features_at for each in needs) else None
        self._check_head()
        watched = [
            *self._means.values(),
            *self._named.values(),
            *(each.taps for each in self.tables.values()),
        ]
        taps = {tap.call: tap for each in watched for tap in each}
        operations = (
            watched[0].operations if watched else look.operations if self._head_call is not None else ()
        )
        self.taps = Taps((taps[call] for call in sorted(taps)), operations)
        self._share_out()

    @staticmethod
    def of(network: Network, needs: Sequence[Needs], inputs: Inputs) -> "Plan":
        """The plan of a pass over a network that nothing is known of yet."""
        return Plan(Look(network, on_device(inputs, network.model)), needs)

    def _check_head(self) -> None:
        wanted = any(each.features and not each.features_at for each in self.needs)
        if wanted and self._head_call is None:
            raise TapError(
                f"the logits of {type(unwrap(self.network.model)).__name__} are not made by one linear "
                "layer, so its penultimate features cannot be found: name a tap, features='...'"
            )

    def _share_out(self) -> None:
        """For each watched tensor: whether its means are wanted, and which tables want its statistics."""
        place = {tap.call: number for number, tap in enumerate(self.taps)}
        averaged = {tap.call for each in (*self._means.values(), *self._named.values()) for tap in each}
        tables = list(self.tables.values())
        self._own = [{place[tap.call]: own for own, tap in enumerate(table.taps)} for table in tables]
        self._wanted = [
            (tap.call in averaged, [(i, own[number]) for i, own in enumerate(self._own) if number in own])
            for number, tap in enumerate(self.taps)
        ]
        self._numbers = {
            asked: [place[tap.call] for tap in taps] for asked, taps in (self._means | self._named).items()
        }
        self._bytes = 4 * sum(table.starts[-1] for table in tables)

    @property
    def at_once(self) -> int:
        """How many examples are run together, so that their statistics fit into memory."""
        return max(1, MOST_STATISTICS // self._bytes) if self._bytes else sys.maxsize

    def pieces(self, inputs: Inputs, labels: Tensor | None) -> Iterator[tuple[Inputs, Tensor | None]]:
        """The batch, or parts of it whose statistics fit into memory."""
        total, at_once = count_examples(inputs), self.at_once
        if total <= at_once:
            yield inputs, labels
            return
        for start in range(0, total, at_once):
            part = slice(start, start + at_once)
            some = mapped(inputs, lambda t: t[part] if t.ndim and t.shape[0] == total else t)  # noqa: B023
            yield some, None if labels is None else labels[part]

    def run(self, inputs: Inputs, labels: Tensor | None = None) -> Iterable[list[Observation]]:
        """What each detector sees of a batch in one forward pass, or in several if the batch is large."""
        inputs = on_device(inputs, self.network.model)
        form, examples = signature(inputs), count_examples(inputs)
        if form == self.form and 0 < examples <= self.at_once:
            return [self._pass(inputs, labels, form)]
        return self._checked(inputs, labels, form)

    def _checked(self, inputs: Inputs, labels: Tensor | None, form: Signature) -> Iterator[list[Observation]]:
        """The same for inputs of a new form, which a detector may refuse, and for large batches."""
        with nullcontext() if form == self.form else self.explained(inputs):
            for piece, labels_of_piece in self.pieces(inputs, labels):
                yield self(piece, labels_of_piece)
        self.form = form

    @torch.inference_mode()
    def __call__(self, inputs: Inputs, labels: Tensor | None = None) -> list[Observation]:
        """One forward pass: what it shows to each detector. The inputs are on the network's device."""
        return self._pass(inputs, labels, _form(inputs))

    def differentiable(self, inputs: Inputs) -> list[Observation]:
        """One forward pass whose observations can be differentiated with respect to the inputs."""
        with torch.inference_mode(False), torch.enable_grad():
            return self._pass(inputs, None, _form(inputs), gradients=True)

    def _pass(
        self, inputs: Inputs, labels: Tensor | None, form: Signature, gradients: bool = False
    ) -> list[Observation]:
        means: dict[int, Tensor] = {}
        layouts, filled = list(self.tables.values()), [torch.empty(0)] * len(self.tables)
        features: list[Tensor] = []

        def receive(number: int, maps: Tensor) -> None:
            averaged, tables = self._wanted[number]
            for i, own in tables:
                if not filled[i].numel():
                    filled[i] = layouts[i].empty(maps)
                at = layouts[i].at[own]
                kernels.compute(at.statistic, maps, at.orders, layouts[i].place(filled[i], own))
            if averaged:
                means[number] = maps.mean(2, dtype=torch.float32)

        def repeat(number: int, earlier: int) -> bool:
            """Copy the statistics of an earlier tap with the very same tensor, if nothing else is wanted."""
            averaged, tables = self._wanted[number]
            if averaged or any(earlier not in self._own[i] for i, _ in tables):
                return False
            for i, own in tables:
                before = layouts[i].place(filled[i], self._own[i][earlier])
                layouts[i].place(filled[i], own).copy_(before)
            return True

        def at_head(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
            features.append(x.flatten(1).float())
            if self.head is None:
                weight = weight.detach().flatten(1).float()
                zero = weight.new_zeros(len(weight))
                self.head = Head(weight, zero if bias is None else bias.detach().float())

        logits = observe(
            self.network, self.taps, inputs, receive, repeat, (self._head_call, at_head), gradients
        ).float()
        base = Observation(
            logits,
            features[0] if features else None,
            self.head,
            labels=None if labels is None else labels.to(logits.device),
            form=form,
        )
        tables = dict(zip(self.tables, filled, strict=True))
        shown = {needs: self._shown(base, needs, means, tables) for needs in dict.fromkeys(self.needs)}
        finite = finite_with([inputs, logits], [each.averages for each in shown.values()])
        shown = {needs: replace(shown[needs], finite=own) for needs, own in zip(shown, finite, strict=True)}
        return [shown[needs] for needs in self.needs]

    def _shown(
        self,
        base: Observation,
        needs: Needs,
        means: Mapping[int, Tensor],
        tables: Mapping[Statistics, Tensor],
    ) -> Observation:
        """What one detector sees of a pass; what of it is finite is found out later."""
        features, head = (base.features, base.head) if needs.features else (None, None)
        if needs.features and needs.features_at is not None:
            features, head = means[self._numbers[(needs.features_at,)][0]], None
        numbers = () if needs.means is None else self._numbers[needs.means]
        return replace(
            base,
            features=features,
            head=head,
            channel_means=tuple([means[number] for number in numbers]),
            statistics=None if needs.statistics is None else tables[needs.statistics],
        )


def _form(inputs: Inputs) -> Signature:
    """Shapes and dtypes of a batch that is not empty."""
    if count_examples(inputs) == 0:
        raise InputError("the batch is empty")
    return signature(inputs)


def _asked(wishes: Iterable[Any]) -> list[Any]:
    """What is asked for, each once."""
    return list(dict.fromkeys(wish for wish in wishes if wish is not None))


def _one(look: Look, name: str) -> Taps:
    """The one tap of a name."""
    named = look.taps([name])
    if len(named) != 1:
        raise TapError(f"features='{name}' names {len(named)} taps: name one")
    return named
