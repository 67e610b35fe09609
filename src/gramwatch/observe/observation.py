"""Observation: what one forward pass shows of a batch. Plan: what a pass watches and computes.

A detector declares its `Needs`. A `Plan` serves the needs of any number of detectors. It is built once, from
one `Look` at the network. It says which tensors are watched, what is computed from them, and where the
features are. One forward pass by the plan gives every detector its `Observation`.
"""

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gramwatch.errors import InputError, TapError
from gramwatch.inputs import image_numbers
from gramwatch.inputs.batches import (
    Inputs,
    Signature,
    count_examples,
    finite_with,
    mapped,
    on_device,
    signature,
    without_length,
)
from gramwatch.numerics import kernels
from gramwatch.numerics.samples import WHOLE, Chosen, Sample
from gramwatch.numerics.statistics import distinct_orders
from gramwatch.observe.replay import Nest, Replay
from gramwatch.watch import Look, Network, Tap, Taps, judging, unwrap
from gramwatch.watch.compiled import channel_means, compiled_as, statistics
from gramwatch.watch.observe import Makers, OtherCallsError, observe_apart, ordinary, run_watched
from gramwatch.watch.padding import Real, real_means
from gramwatch.watch.running import is_compiled, warn_uncompiled, wrappers

WIDEST_TRIANGLE = 1024
"""With `statistic="auto"`, vectors up to this many channels are judged by pairs, wider ones by row sums."""
MOST_MISSED = 20
"""After so many passes in a row in which PyTorch compiled nothing, a compiled network runs uncompiled."""
MOST_READS = 4096
"""For so many taps and shapes of tensors a plan remembers what is read."""
MOST_STATISTICS = 2**30
"""If the statistics of a batch would take more bytes, the batch is run in pieces."""

Selection = str | tuple[str, ...]
"""A choice of taps, as for `find_taps`."""
_Mean = tuple[int, Sample]
_Form = tuple[int, torch.Size, tuple[int, ...], torch.dtype, int, int]
_Prepared = tuple[kernels.Prepared, tuple[int, int] | None, list[Sample]]
_Place = Callable[[Tensor, int, int], Tensor]
_Averaged = tuple[Selection, tuple[int | None, int | None], Sample]


@dataclass(frozen=True)
class Statistics:
    """Gram statistics that a detector needs: the taps, the statistic, the orders, the part that counts."""

    taps: Selection
    statistic: str
    orders: tuple[int, ...]
    sample: Sample = WHOLE
    """Which part of every tensor counts."""

    def at(self, tap: Tap) -> "StatisticsAtTap":
        """The statistics to compute at one tap."""
        statistic, channels = self.statistic, self.sample.count(tap.channels)
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
    """The statistics to compute at one tap.

    At a vector, several orders give the same statistics. One of them is computed, and its weight is their
    number.
    """

    statistic: str
    orders: tuple[int, ...]
    weights: tuple[int, ...]
    """How many of the detector's orders a computed order stands for, `(orders,)`."""
    features: int
    """The number of statistics of one order."""

    @property
    def size(self) -> int:
        """The number of statistics of all orders."""
        return len(self.orders) * self.features


@dataclass(frozen=True)
class Needs:
    """What a detector needs from a pass, besides the logits."""

    features: bool = False
    """Whether the detector needs the penultimate features and the linear layer that makes the logits."""
    features_at: str | None = None
    """The name of a tap. Its channel means are the features, in place of the input of that linear layer."""
    means: Selection | None = None
    """The taps whose channel means are needed."""
    mean_taps: tuple[int | None, int | None] = (None, None)
    """Which of these taps, as the bounds of a slice. If none is left, all of them."""
    mean_sample: Sample = WHOLE
    """Which part of every tensor these means are of."""
    statistics: Statistics | None = None
    """The Gram statistics that are needed."""
    image: bool = False
    """Whether the numbers of the input itself are needed: see `image_numbers`."""

    @property
    def averaged(self) -> "_Averaged | None":
        """The taps whose channel means are needed, and the part that counts; None if no means are needed."""
        return None if self.means is None else (self.means, self.mean_taps, self.mean_sample)


@dataclass(frozen=True)
class Head:
    """The linear layer that makes the logits: `logits = features @ weight.T + bias`."""

    weight: Tensor
    """`(classes, features)`"""
    bias: Tensor
    """`(classes,)`"""

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None) -> "Head":
        """The layer with this weight, and with a bias of zero if it has none."""
        return Head(weight, weight.new_zeros(len(weight)) if bias is None else bias)

    def __call__(self, features: Tensor) -> Tensor:
        """The logits of features `(N, D)`."""
        return features @ self.weight.T.to(features) + self.bias.to(features)


@dataclass(frozen=True)
class Observation:
    """What one forward pass shows one detector of a batch of N inputs."""

    logits: Tensor
    """`(N, classes)`"""
    features: Tensor | None = None
    """The penultimate features, `(N, D)`: the input of the layer that makes the logits."""
    head: Head | None = None
    """The linear layer that turns the features into logits."""
    channel_means: tuple[Tensor, ...] = ()
    """The mean of each channel over the pixels, `(N, channels)`: one tensor per tap."""
    labels: Tensor | None = None
    """The labels of the inputs, `(N,)`; None if the loader yields none."""
    finite: Tensor | None = None
    """Whether the inputs, logits, features and channel means of an example are all finite, `(N,)`."""
    statistics: Tensor | None = None
    """The Gram statistics of all taps side by side, `(N, statistics)`. `finite` does not cover them."""
    form: Signature | None = None
    """Shapes and dtypes of the inputs."""
    image: Tensor | None = None
    """The numbers of the input, if it is an image, `(N, numbers)`: see `image_numbers`."""
    checksums: Tensor | None = None
    """The checksums of the inputs, `(N,)`, while fitting: see `counted`."""

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def predicted(self) -> Tensor:
        """The predicted class, D_c."""
        return self.logits.argmax(1)

    @property
    def averages(self) -> list[Tensor]:
        """The channel means, then the features, if this observation has them."""
        return [*self.channel_means, *(() if self.features is None else (self.features,))]

    @property
    def classes(self) -> Tensor:
        """The labels; without labels, the predicted classes."""
        return self.predicted if self.labels is None else self.labels

    def __getitem__(self, index: Any) -> "Observation":
        """The observation of the chosen examples: a slice, numbers or a mask."""
        return self.changed(lambda t: t[index])

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Observation":
        """A copy with `change` applied to every tensor but those of the head."""

        def applied(t: Tensor | None) -> Tensor | None:
            return None if t is None else change(t)

        return replace(
            self,
            logits=change(self.logits),
            features=applied(self.features),
            channel_means=tuple(change(t) for t in self.channel_means),
            labels=applied(self.labels),
            finite=applied(self.finite),
            statistics=applied(self.statistics),
            image=applied(self.image),
            checksums=applied(self.checksums),
        )

    @cached_property
    def kept(self) -> "Observation":
        """The finite examples, on the CPU. All detectors with this observation share the copy."""
        trimmed = replace(self, finite=None, statistics=None)
        return (trimmed if self.finite is None else trimmed[self.finite]).changed(Tensor.cpu)

    @staticmethod
    def joined(parts: Sequence["Observation"]) -> "Observation":
        """One observation of several batches, without statistics and form."""

        def column(name: str) -> Tensor | None:
            tensors = [getattr(part, name) for part in parts]
            return None if any(t is None for t in tensors) else torch.cat(tensors)

        logits = torch.cat([part.logits for part in parts])
        means = tuple(torch.cat(t) for t in zip(*(part.channel_means for part in parts), strict=True))
        return Observation(
            logits,
            column("features"),
            parts[0].head,
            means,
            column("labels"),
            column("finite"),
            image=column("image"),
        )


class GramTable:
    """The layout of a table that holds the Gram statistics of several taps side by side."""

    def __init__(self, statistics: Statistics, taps: Taps) -> None:
        self.taps, self.sample = taps, statistics.sample
        self.at = [statistics.at(tap) for tap in taps]
        self.starts = [0, *accumulate(at_tap.size for at_tap in self.at)]

    def empty(self, maps: Tensor) -> Tensor:
        """A table for the statistics of a batch, not filled yet."""
        return torch.empty(len(maps), self.starts[-1], dtype=torch.float32, device=maps.device)

    def place(self, table: Tensor, number: int) -> Tensor:
        """The part of a table that holds one tap's statistics, `(N, orders, features)`."""
        at = self.at[number]
        shape = (len(table), len(at.orders), at.features)
        return table.as_strided(shape, (self.starts[-1], at.features, 1), self.starts[number])


class Read(NamedTuple):
    """What was read in one pass."""

    logits: Tensor
    tables: list[Tensor]
    """Gram statistics, one table for each `GramTable`."""
    means: "dict[_Mean, Tensor]"
    """Channel means by the number of the tap and by the part of it that they are of."""
    features: list[Tensor]
    """The input of the layer that makes the logits, if a detector needs it."""


class _ToRead(NamedTuple):
    """What is read of a tap at once: statistics of one part, and channel means of this or of another part."""

    sample: Sample
    tables: list[tuple[int, int]]
    """The tables that get statistics, and the number of the tap in each."""
    averaged: list[Sample]
    """The samples whose channel means are needed. All of them are the same part."""

    @property
    def of_means(self) -> Sample | None:
        """The part whose channel means are needed; None if no means are needed."""
        return self.averaged[0] if self.averaged else None


class Plan:
    """What to watch in a network and what to compute, for several detectors.

    Args:
        look: the result of probing the network.
        needs: the needs of the detectors, one entry per detector.
        known: taps that are known already, such as the taps of a saved detector.

    """

    def __init__(
        self, look: Look, needs: Sequence[Needs], known: Mapping[Statistics, Taps] | None = None
    ) -> None:
        self.network, self.needs = look.network, list(needs)
        self.form: Signature | None = None
        """Shapes and dtypes of the inputs that all detectors accepted last."""
        self.explained: Callable[[Inputs], AbstractContextManager[None]] = lambda inputs: nullcontext()
        """A context for inputs of a new form. It refuses inputs that a detector does not accept, and explains
        an error of the network."""
        known = known or {}
        self._mean_taps = {key: _averaged_taps(look, key) for key in _distinct(n.averaged for n in needs)}
        names = _distinct(need.features_at for need in needs)
        self._feature_taps = {_at_tap(name): _single_tap(look, name) for name in names}
        self.tables = {
            statistics: GramTable(statistics, known.get(statistics) or look.taps(statistics.taps))
            for statistics in _distinct(need.statistics for need in needs)
        }
        self._head_call = look.head if self._needs_head else None
        self._check_head()
        self.head = Head.of(*look.head_layer) if self._head_call is not None and look.head_layer else None
        """The linear layer that makes the logits. None if no detector needs it."""
        watched = [
            *self._mean_taps.values(),
            *self._feature_taps.values(),
            *(table.taps for table in self.tables.values()),
        ]
        calls = {tap.call: tap for taps in watched for tap in taps}
        operations = (
            watched[0].operations if watched else look.operations if self._head_call is not None else ()
        )
        self.taps = Taps((calls[call] for call in sorted(calls)), operations)
        look.warn_of_padding(self.taps)
        self._makers = self._makers_of(look)
        self._assign_taps()

    @staticmethod
    def of(network: Network, needs: Sequence[Needs], inputs: Inputs) -> "Plan":
        """The plan for a network that has not been probed yet."""
        return Plan(Look(network, on_device(inputs, network.model)), needs)

    def taps_of(self, needs: Needs) -> Taps | None:
        """The taps whose channel means a detector needs; None if it needs none."""
        return None if needs.averaged is None else self._mean_taps[needs.averaged]

    @property
    def _needs_head(self) -> bool:
        """Whether a detector needs the input of the linear layer that makes the logits."""
        return any(need.features and not need.features_at for need in self.needs)

    def _makers_of(self, look: Look) -> Makers:
        """The modules to watch in place of all calls. Empty if they do not show all that is needed."""
        makers = look.makers if self._head_call is None and self.taps else ()
        if not makers or look.operations != self.taps.operations:
            return ()
        if any(map(is_compiled, self.network.model.modules())):
            return ()
        watched = {makers[tap.call] for tap in self.taps}
        return tuple((call, maker) for call, maker in enumerate(makers) if maker in watched)

    def _check_head(self) -> None:
        if self._needs_head and self._head_call is None:
            raise TapError(
                f"the logits of {type(unwrap(self.network.model)).__name__} are not made by one linear "
                "layer, so its penultimate features cannot be found: name a tap, features='...'"
            )

    def _assign_taps(self) -> None:
        """Note for every watched tensor whether its channel means are needed, and which tables hold it.

        `_columns` has one mapping per table, from the number of a tap in the plan to its number in the table.
        """
        number_of = {tap.call: number for number, tap in enumerate(self.taps)}
        selected = self._mean_taps | self._feature_taps
        averaged: dict[int, list[Sample]] = {}
        for (_, _, sample), taps in selected.items():
            for tap in taps:
                averaged.setdefault(tap.call, []).append(sample)
        tables = list(self.tables.values())
        self._columns = [
            {number_of[tap.call]: column for column, tap in enumerate(table.taps)} for table in tables
        ]
        self._uses = [
            (
                list(dict.fromkeys(averaged.get(tap.call, ()))),
                [(i, columns[number]) for i, columns in enumerate(self._columns) if number in columns],
            )
            for number, tap in enumerate(self.taps)
        ]
        self._numbers = {
            key: [(number_of[tap.call], key[2]) for tap in taps] for key, taps in selected.items()
        }
        self._bytes = 4 * sum(table.starts[-1] for table in tables)
        self._known_reads: dict[tuple[int, tuple[int, ...]], list[_ToRead]] = {}
        self._prepared: dict[_Form, list[_Prepared]] = {}
        self._read_means: list[_Mean] = []

    @property
    def at_once(self) -> int:
        """The most examples of one pass, so that their statistics fit into memory."""
        return max(1, MOST_STATISTICS // self._bytes) if self._bytes else sys.maxsize

    def pieces(self, inputs: Inputs, labels: Tensor | None) -> Iterator[tuple[Inputs, Tensor | None]]:
        """The batch in pieces whose statistics fit into memory. A small batch is one piece."""
        total, at_once = count_examples(inputs), self.at_once
        if total <= at_once:
            yield inputs, labels
            return
        for start in range(0, total, at_once):
            part = slice(start, start + at_once)
            piece = mapped(inputs, lambda t: t[part] if t.ndim and t.shape[0] == total else t)  # noqa: B023
            yield piece, None if labels is None else labels[part]

    def run(
        self, inputs: Inputs, labels: Tensor | None = None, record: bool = False
    ) -> Iterable[list[Observation]]:
        """Run a batch: one list per forward pass, with the observations of all detectors.

        The inputs are moved to the network's device. A batch takes one pass. If its statistics would exceed
        `MOST_STATISTICS`, it is run in pieces, one pass per piece. With `record`, a GPU replays the pass as a
        CUDA graph, from the fourth batch of a shape on.
        """
        inputs = on_device(inputs, self.network.model)
        form, examples = signature(inputs), count_examples(inputs)
        if form == self.form and 0 < examples <= self.at_once:
            read = self._read_recorded(inputs) if record else self._read(inputs, False)
            return [self.observed(read, inputs, labels, form)]
        return self._checked(inputs, labels, form)

    def _checked(self, inputs: Inputs, labels: Tensor | None, form: Signature) -> Iterator[list[Observation]]:
        """`run` for inputs of a new form, which a detector may refuse, and for large batches."""
        with nullcontext() if form == self.form else self.explained(inputs):
            for piece, labels_of_piece in self.pieces(inputs, labels):
                yield self(piece, labels_of_piece)
        self.form = form

    @torch.inference_mode()
    def __call__(self, inputs: Inputs, labels: Tensor | None = None) -> list[Observation]:
        """One forward pass: the observations of all detectors. The inputs are on the network's device."""
        return self._pass(inputs, labels, _form(inputs))

    def differentiable(self, inputs: Inputs) -> list[Observation]:
        """One forward pass whose observations can be differentiated with respect to the inputs."""
        if self._in_graph is not None:
            warn_uncompiled(self.network.module, "a method needs gradients")
        with torch.inference_mode(False), torch.enable_grad():
            return self._pass(inputs, None, _form(inputs), gradients=True)

    def _pass(
        self, inputs: Inputs, labels: Tensor | None, form: Signature, gradients: bool = False
    ) -> list[Observation]:
        return self.observed(self._read(inputs, gradients), inputs, labels, form)

    def observed(
        self, read: "Read", inputs: Inputs, labels: Tensor | None, form: Signature | None
    ) -> list[Observation]:
        """The observations of all detectors, from what was read in one pass.

        An example that is nothing but padding counts as not finite.
        """
        logits, mask = read.logits.float(), self.network.mask_of(inputs)
        if mask is not None and form is not None:
            form = without_length(form, mask.shape[1])
        base = Observation(
            logits,
            read.features[0] if read.features else None,
            self.head,
            labels=None if labels is None else labels.to(logits.device),
            form=form,
            image=self._numbers_of(inputs),
        )
        tables = dict(zip(self.tables, read.tables, strict=True))
        distinct = list(dict.fromkeys(self.needs))
        observations = [self._observation(base, needs, read.means, tables) for needs in distinct]
        finite = finite_with([inputs, logits], [observation.averages for observation in observations])
        finite = finite if mask is None else [examples & mask.any(1) for examples in finite]
        by_needs = {
            needs: replace(observation, finite=finite_examples)
            for needs, observation, finite_examples in zip(distinct, observations, finite, strict=True)
        }
        return [by_needs[needs] for needs in self.needs]

    def _numbers_of(self, inputs: Inputs) -> Tensor | None:
        """The numbers of the input itself, if a detector needs them."""
        if not any(need.image for need in self.needs):
            return None
        image = image_numbers.image_of(inputs)
        if image is None:
            raise InputError(image_numbers.WHY_NONE)
        return image_numbers.look(image)

    def _read(self, inputs: Inputs, gradients: bool) -> "Read":
        """One forward pass. A compiled network stays compiled, unless gradients are needed."""
        if self._in_graph is None or gradients:
            return self._read_eagerly(inputs, gradients)
        try:
            with judging(self.network.module, compiled=True):
                read = Read(*self._in_graph(ordinary(inputs)))
            self._missed = 0
            return read
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise  # the recording may be what fails
            read = self._read_eagerly(inputs)  # if the network itself fails, its error is raised here
            # Another thread that runs a network uncompiled keeps PyTorch from compiling, for all threads.
            self._missed = self._missed + 1 if "found no compiled frames" in str(error) else MOST_MISSED
            if self._missed >= MOST_MISSED:
                self._do_without_graph(error)
            return read

    _missed = 0

    def _read_recorded(self, inputs: Inputs) -> "Read":
        """`_read`, replayed on a GPU as a CUDA graph. Weights that have moved make a new recording."""
        replay, weights = self._replay
        logits, *rest = replay(Nest(inputs, tuple([weight.data_ptr() for weight in weights])))
        tables, means = len(self.tables), len(self._read_means)
        return Read(
            logits,
            rest[:tables],
            dict(zip(self._read_means, rest[tables : tables + means], strict=True)),
            rest[tables + means :],
        )

    @cached_property
    def _replay(self) -> tuple[Replay[Nest], list[Tensor]]:
        """The recordings of the pass, and the tensors of the network."""
        weights = [*self.network.model.parameters(), *self.network.model.buffers()]

        def read(given: Nest) -> tuple[Tensor, ...]:
            logits, tables, means, features = self._read(given.value, False)
            self._read_means = list(means)
            return (logits, *tables, *means.values(), *features)

        return Replay(read, lambda: weights), weights

    def _do_without_graph(self, error: Exception) -> None:
        """Run the network uncompiled from now on, and warn."""
        first, *lines = str(error).strip().splitlines() or [""]
        context = [line.strip() for line in lines if "debug context:" in line]
        reason = ", ".join([f"{type(error).__name__}: {first}", *context])
        why = f"torch.compile cannot watch it in one graph ({reason})"
        warn_uncompiled(self.network.module, why)
        from torch._dynamo.exc import FailOnRecompileLimitHit

        if not isinstance(error, FailOnRecompileLimitHit):  # sizes that were compiled before stay compiled
            self._in_graph = None

    @cached_property
    def _in_graph(self) -> Callable[[Inputs], Any] | None:
        """A pass under watch as one compiled function. None if the network is not compiled as a whole."""
        if not any(map(is_compiled, wrappers(self.network.model))):
            if any(map(is_compiled, self.network.model.modules())):
                why = "a part of it is compiled, which hides its tensors. Compile the whole network instead"
                warn_uncompiled(self.network.module, why)
            return None
        return compiled_as(self.network.model, self.in_graph(statistics, channel_means, _side_by_side))

    def in_graph(
        self,
        statistics: Callable[..., tuple[Tensor, Any]],
        channel_means: Callable[[Tensor, int, int | None, int | None], Tensor],
        table: "Callable[[GramTable, Mapping[int, Tensor]], Tensor]",
    ) -> Callable[[Inputs], tuple[Any, ...]]:
        """A pass under watch as a function of the inputs: the fields of a `Read`. It can be traced.

        Args:
            statistics: reads a tap for Gram. Its arguments are those of `compiled.statistics`.
            channel_means: reads a tap for other methods. Its arguments are those of `compiled.channel_means`.
            table: makes the table of a `GramTable` from what `statistics` returned, by the numbers of taps.

        """
        network, taps, uses, head_call = self.network, self.taps, self._uses, self._head_call
        layouts = list(self.tables.values())

        def read(inputs: Inputs) -> tuple[Any, ...]:
            examples, real = count_examples(inputs), Real.of(network.mask_of(inputs))
            columns: list[dict[int, Tensor]] = [{} for _ in layouts]
            means: dict[_Mean, Tensor] = {}
            features: list[Tensor] = []

            def write(i: int, column: int, maps: Tensor) -> None:
                at = layouts[i].at[column]
                arguments = (at.statistic, at.orders, at.features, False, None, None)
                columns[i][column], _ = statistics(maps, 1, *WHOLE, *arguments)

            def receive(number: int, tensor: Tensor) -> None:
                averaged, tables = uses[number]
                x, axis = taps.listed[number].examples_apart(tensor, examples)
                if real is not None and real.fits(x.shape, axis):
                    self._read_real(number, x, axis, real, write, means)
                    return
                left = list(averaged)
                for i, column in tables:
                    at, sample = layouts[i].at[column], layouts[i].sample
                    part = sample.of(x.shape, axis)
                    of_means = next(
                        (s for s in left if s.of(x.shape, axis) == part), left[0] if left else None
                    )
                    with_means = (False, None, None) if of_means is None else (True, *of_means)
                    columns[i][column], mean = statistics(
                        x, axis, *sample, at.statistic, at.orders, at.features, *with_means
                    )
                    if of_means is not None:
                        part = of_means.of(x.shape, axis)
                        same = [each for each in left if each.of(x.shape, axis) == part]
                        means.update({(number, each): mean for each in same})
                        left = [each for each in left if each not in same]
                for sample in left:
                    means[number, sample] = channel_means(x, axis, *sample)

            def at_head(x: Tensor, *_: Tensor | None) -> None:
                features.append(x.flatten(1).float())

            output = run_watched(network.module, inputs, taps, receive, None, (head_call, at_head))
            tables = [table(*filled) for filled in zip(layouts, columns, strict=True)]
            return network.logits_of(output), tables, means, features

        return read

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy. It compiles its own network, and has no recordings and prepared kernels."""
        own = {name: value for name, value in vars(self).items() if name not in ("_in_graph", "_replay")}
        return {**own, "_prepared": {}}

    def _reads(self, number: int, shape: tuple[int, ...], axis: int) -> list[_ToRead]:
        """What is read of a tap whose tensor has this shape. Different samples may be the same part."""
        key = number, shape[1:]
        if key not in self._known_reads:
            averaged, tables = self._uses[number]
            layouts, reads = list(self.tables.values()), dict[Chosen, _ToRead]()
            for i, column in tables:
                sample = layouts[i].sample
                reads.setdefault(sample.of(shape, axis), _ToRead(sample, [], [])).tables.append((i, column))
            for sample in averaged:
                reads.setdefault(sample.of(shape, axis), _ToRead(sample, [], [])).averaged.append(sample)
            if len(self._known_reads) > MOST_READS:
                self._known_reads.clear()
            self._known_reads[key] = _paired(list(reads.values()))
        return self._known_reads[key]

    def _read_real(
        self,
        number: int,
        x: Tensor,
        axis: int,
        real: Real,
        write: Callable[[int, int, Tensor], None],
        means: dict[_Mean, Tensor],
    ) -> None:
        """Read a tap without its padding. `write` computes a statistic of the tap, of a table, from maps."""
        averaged, tables = self._uses[number]
        layouts = list(self.tables.values())
        parts: dict[Hashable, tuple[Tensor, Tensor]] = {}

        def part(sample: Sample) -> tuple[Tensor, Tensor]:
            """The part that counts, and its pixels. Different samples of short texts are the same part."""
            key = real.whole(sample.pixels), sample.of(x.shape, axis).step
            if key not in parts:
                parts[key] = real.part(x, axis, sample)
            return parts[key]

        for i, column in tables:
            write(i, column, part(layouts[i].sample)[0])
        for sample in averaged:
            means[number, sample] = real_means(*part(sample))

    def _wanted(self, read: _ToRead, x: Tensor, place: "_Place") -> kernels.Wanted:
        """The statistics to compute of one part of a tap, and where they belong."""
        layouts = list(self.tables.values())
        at_taps = [layouts[i].at[column] for i, column in read.tables]
        places = [place(x, i, column) for i, column in read.tables]
        return [(at.statistic, at.orders, out) for at, out in zip(at_taps, places, strict=True)]

    def _prepare(self, form: "_Form", x: Tensor, axis: int, place: "_Place") -> "list[_Prepared]":
        """What is launched for a tap's tensor of this form. Empty if a part of it has no kernel."""
        steps: list[_Prepared] = []
        for read in self._reads(form[0], x.shape, axis):
            wanted = self._wanted(read, x, place)
            prepared = kernels.Prepared.of(x, axis, read.sample, wanted, read.of_means)
            if prepared is None:
                steps = []
                break
            steps.append((prepared, read.tables[0] if read.tables else None, read.averaged))
        if len(self._prepared) > MOST_READS:
            self._prepared.clear()
        self._prepared[form] = steps
        return steps

    def _read_eagerly(self, inputs: Inputs, gradients: bool = False) -> "Read":
        means: dict[_Mean, Tensor] = {}
        layouts, filled = list(self.tables.values()), [torch.empty(0)] * len(self.tables)
        features: list[Tensor] = []
        scratch: Tensor | None = None
        real = Real.of(self.network.mask_of(inputs))

        def place(x: Tensor, i: int, column: int) -> Tensor:
            """Where the statistics of a tap belong."""
            if not filled[i].numel():
                filled[i] = layouts[i].empty(x)
            return layouts[i].place(filled[i], column)

        def write(i: int, column: int, maps: Tensor) -> None:
            """Compute the statistics of a tap from maps."""
            at = layouts[i].at[column]
            kernels.compute(at.statistic, maps, at.orders, place(maps, i, column))

        def launch(number: int, x: Tensor, axis: int) -> bool:
            """Read a tensor by prepared kernels. False if there are none."""
            nonlocal scratch
            form = (number, x.shape, x.stride(), x.dtype, x.data_ptr() % 16, x.get_device())
            steps = self._prepared.get(form)
            if steps is None:
                steps = self._prepare(form, x, axis, place)
            for prepared, table, averaged in steps:
                mean, scratch = prepared(x, None if table is None else place(x, *table), scratch)
                for sample in averaged:
                    assert mean is not None
                    means[number, sample] = mean
            return bool(steps)

        def receive(number: int, x: Tensor, axis: int) -> None:
            if real is not None and real.fits(x.shape, axis):
                self._read_real(number, x, axis, real, write, means)
                return
            if x.is_cuda and not gradients:
                try:
                    if launch(number, x, axis):
                        return
                except kernels.KernelError:
                    self._prepared.clear()
            for read in self._reads(number, x.shape, axis):
                wanted = self._wanted(read, x, place)
                mean = kernels.read(x, axis, read.sample, wanted, read.of_means)
                for sample in read.averaged:
                    assert mean is not None
                    means[number, sample] = mean

        def repeat(number: int, earlier: int) -> bool:
            """Copy the statistics of an earlier tap of the same tensor; False if the copy is not enough."""
            averaged, tables = self._uses[number]
            if averaged or any(earlier not in self._columns[i] for i, _ in tables):
                return False
            for i, column in tables:
                statistics = layouts[i].place(filled[i], self._columns[i][earlier])
                layouts[i].place(filled[i], column).copy_(statistics)
            return True

        def at_head(x: Tensor, *_: Tensor | None) -> None:
            features.append(x.flatten(1).float())

        watch = (self.network, self.taps, inputs, receive, repeat, (self._head_call, at_head), gradients)
        if self._makers:
            try:
                return Read(observe_apart(*watch, makers=self._makers), filled, means, features)
            except OtherCallsError:  # perhaps a module was replaced: watch all calls from now on
                self._makers = ()
        return Read(observe_apart(*watch), filled, means, features)

    def _observation(
        self,
        base: Observation,
        needs: Needs,
        means: Mapping[_Mean, Tensor],
        tables: Mapping[Statistics, Tensor],
    ) -> Observation:
        """The observation of one detector. Its `finite` is set later."""
        features, head = (base.features, base.head) if needs.features else (None, None)
        if needs.features and needs.features_at is not None:
            features, head = means[self._numbers[_at_tap(needs.features_at)][0]], None
        numbers = () if needs.averaged is None else self._numbers[needs.averaged]
        return replace(
            base,
            features=features,
            head=head,
            channel_means=tuple([means[number] for number in numbers]),
            statistics=None if needs.statistics is None else tables[needs.statistics],
            image=base.image if needs.image else None,
        )


def _paired(reads: list[_ToRead]) -> list[_ToRead]:
    """The reads, with statistics of one part and means of another in one: a GPU launches them together."""
    statistics = next((read for read in reads if read.tables and not read.averaged), None)
    means = next((read for read in reads if not read.tables), None)
    if statistics is None or means is None:
        return reads
    rest = [read for read in reads if read is not statistics and read is not means]
    return [_ToRead(statistics.sample, statistics.tables, means.averaged), *rest]


def _side_by_side(layout: GramTable, found: Mapping[int, Tensor]) -> Tensor:
    """The statistics of all taps in the order of the table."""
    return torch.cat([found[i].flatten(1) for i in range(len(found))], 1)


def _form(inputs: Inputs) -> Signature:
    """Shapes and dtypes of a batch that is not empty."""
    if count_examples(inputs) == 0:
        raise InputError("the batch is empty")
    return signature(inputs)


def _distinct(values: Iterable[Any]) -> list[Any]:
    """The values in their order, without None and without repetition."""
    return list(dict.fromkeys(value for value in values if value is not None))


def _at_tap(name: str) -> _Averaged:
    """The channel means of one tap."""
    return (name,), (None, None), WHOLE


def _averaged_taps(look: Look, wanted: _Averaged) -> Taps:
    """The taps whose channel means are wanted."""
    selection, (first, end), _ = wanted
    taps = look.taps(selection)
    return taps[first:end] or taps


def _single_tap(look: Look, name: str) -> Taps:
    """The tap of this name; an error if the name fits several taps."""
    named = look.taps([name])
    if len(named) != 1:
        raise TapError(f"features='{name}' names {len(named)} taps: name one")
    return named
