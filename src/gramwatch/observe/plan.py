"""Plan: what a pass watches and computes, for any number of detectors.

It is built once, from the detectors' `Needs` and one `Look` at the network. It says which tensors are
watched, what is computed from them, and where the features are. One forward pass by the plan gives every
detector its `Observation`.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gramwatch.errors import InputError, TapError
from gramwatch.inputs import image_numbers
from gramwatch.inputs.adapters import wrappers
from gramwatch.inputs.batches import (
    Inputs,
    Signature,
    all_finite,
    count_examples,
    mapped,
    on_device,
    signature,
    tensors_in,
    without_length,
)
from gramwatch.numerics.samples import Sample
from gramwatch.observe.needs import Averaged, Needs, Statistics
from gramwatch.observe.observation import Head, Observation
from gramwatch.observe.uses import GramTable, Mean, Pass, Read, Readers, Uses
from gramwatch.watch import Look, Network, Taps, judging, unwrap
from gramwatch.watch.padding import Real
from gramwatch.watch.running import (
    Makers,
    OtherCallsError,
    Watch,
    is_compiled,
    ordinary,
    outside_compilation,
    run_by_modules,
    warn_uncompiled,
)

if TYPE_CHECKING:
    from gramwatch.observe.replay import Graphs, Judge

MOST_MISSED = 20
"""After so many passes in a row in which PyTorch compiled nothing, a compiled network runs uncompiled."""
MOST_STATISTICS = 2**30
"""If the statistics of a batch would take more bytes, the batch is run in pieces."""


class _View(NamedTuple):
    """What one detector sees of a pass."""

    at_head: bool
    """Whether it sees the input of the layer that makes the logits, and that layer."""
    features: Mean | None
    """The channel means that are its features, if it named a tap for them."""
    means: list[Mean]
    table: int | None
    """The number of the table with its statistics."""
    image: bool


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
        of_features = _distinct(need.features_averaged for need in needs)
        averaged = [*_distinct(need.averaged for need in needs), *of_features]
        self._averaged = {key: _averaged_taps(look, key) for key in averaged}
        for key in of_features:
            if len(self._averaged[key]) != 1:
                (name,), count = key[0], len(self._averaged[key])
                raise TapError(f"features='{name}' names {count} taps: name one")
        self.tables = {
            statistics: GramTable(statistics, known.get(statistics) or look.taps(statistics.taps))
            for statistics in _distinct(need.statistics for need in needs)
        }
        self._head_call = look.head if self._needs_head else None
        self._check_head()
        self.head = Head.of(*look.head_layer) if self._head_call is not None and look.head_layer else None
        """The linear layer that makes the logits. None if no detector needs it."""
        watched = [
            *self._averaged.values(),
            *(table.taps for table in self.tables.values()),
        ]
        calls = {tap.call: tap for taps in watched for tap in taps}
        operations = (
            watched[0].operations if watched else look.operations if self._head_call is not None else ()
        )
        self.taps = Taps((calls[call] for call in sorted(calls)), operations)
        look.warn_of_padding(self.taps)
        self._makers = self._makers_of(look)
        samples: dict[int, list[Sample]] = {}
        for (_, _, sample), taps in self._averaged.items():
            for tap in taps:
                samples.setdefault(tap.call, []).append(sample)
        self._uses = Uses(self.taps, list(self.tables.values()), samples)
        self._readers: Readers = {}
        self._bytes = 4 * self._uses.size  # of the statistics of one example
        self._views = {need: self._view_of(need) for need in self.needs}

    @staticmethod
    def of(network: Network, needs: Sequence[Needs], inputs: Inputs) -> "Plan":
        """The plan for a network that has not been probed yet."""
        return Plan(Look(network, on_device(inputs, network.model)), needs)

    def taps_of(self, needs: Needs) -> Taps | None:
        """The taps whose channel means a detector needs; None if it needs none."""
        return None if needs.averaged is None else self._averaged[needs.averaged]

    @property
    def _needs_head(self) -> bool:
        """Whether a detector needs the input of the linear layer that makes the logits."""
        return any(need.features and not need.features_at for need in self.needs)

    def _makers_of(self, look: Look) -> Makers:
        """The modules to watch in place of all calls. Empty if they do not show all that is needed."""
        makers = look.makers if self.taps or self._head_call is not None else ()
        if not makers or look.operations != self.taps.operations:
            return ()
        if self._head_call is not None and not look.head_takes_features:
            return ()
        if any(map(is_compiled, self.network.model.modules())):
            return ()
        # If the head is watched, so are all others: a guard refuses a network that takes another path.
        watched = {makers[tap.call] for tap in self.taps} if self._head_call is None else set(makers)
        return tuple((call, maker) for call, maker in enumerate(makers) if maker in watched)

    def _check_head(self) -> None:
        if self._needs_head and self._head_call is None:
            raise TapError(
                f"the logits of {type(unwrap(self.network.model)).__name__} are not made by one linear "
                "layer, so its penultimate features cannot be found: name a tap, features='...'"
            )

    def _view_of(self, needs: Needs) -> _View:
        """What a detector with these needs sees of a pass."""
        features = self._keys(needs.features_averaged)
        return _View(
            at_head=needs.features and not features,
            features=features[0] if features else None,
            means=self._keys(needs.averaged),
            table=None if needs.statistics is None else list(self.tables).index(needs.statistics),
            image=needs.image,
        )

    def _keys(self, key: Averaged | None) -> list[Mean]:
        """The keys of the channel means of chosen taps."""
        return [] if key is None else [(self.taps.numbers[tap.call], key[2]) for tap in self._averaged[key]]

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
        self, inputs: Inputs, labels: Tensor | None = None, record: bool | None = False
    ) -> Iterable[list[Observation]]:
        """Run a batch: one list per forward pass, with the observations of all detectors.

        The inputs are moved to the network's device. A batch takes one pass. If its statistics would exceed
        `MOST_STATISTICS`, it is run in pieces, one pass per piece. With `record`, a GPU replays the pass as a
        CUDA graph, from the third batch of a shape on; None: if that is safe.
        """
        inputs = on_device(inputs, self.network.model)
        form, examples = signature(inputs), count_examples(inputs)
        one_pass = examples * self._bytes <= max(MOST_STATISTICS, self._bytes)
        if form == self.form and examples and one_pass:
            replayed = record is not False and next(tensors_in(inputs)).is_cuda
            read = self.graphs.read(inputs, record) if replayed else self._read(inputs)
            return [self.observed(read, inputs, labels, form)]
        return self._checked(inputs, labels, form)

    def judged(self, inputs: Inputs, judge: "Judge") -> tuple[Tensor, ...] | None:
        """The tensors of a verdict on a batch, replayed on a GPU. None if the batch takes several passes."""
        inputs = on_device(inputs, self.network.model)
        return None if count_examples(inputs) > self.at_once else self.graphs.judged(inputs, judge)

    @cached_property
    def graphs(self) -> "Graphs":
        """The CUDA graphs of the pass, and of verdicts."""
        from gramwatch.observe.replay import Graphs

        return Graphs(self.network, self._read, lambda inputs: next(iter(self.run(inputs))))

    def _checked(self, inputs: Inputs, labels: Tensor | None, form: Signature) -> Iterator[list[Observation]]:
        """`run` for inputs of a new form, which a detector may refuse, and for large batches."""
        with nullcontext() if form == self.form else self.explained(inputs):
            for piece, labels_of_piece in self.pieces(inputs, labels):
                yield self(piece, labels_of_piece)
        self.form = form

    @torch.inference_mode()
    def __call__(self, inputs: Inputs, labels: Tensor | None = None) -> list[Observation]:
        """One forward pass: the observations of all detectors. The inputs are on the network's device."""
        return self._pass(inputs, labels)

    def differentiable(self, inputs: Inputs) -> list[Observation]:
        """One forward pass whose observations can be differentiated with respect to the inputs."""
        if self._in_graph is not None:
            warn_uncompiled(self.network.module, "a method needs gradients")
        with torch.inference_mode(False), torch.enable_grad():
            return self._pass(inputs, None, gradients=True)

    def _pass(self, inputs: Inputs, labels: Tensor | None, gradients: bool = False) -> list[Observation]:
        if count_examples(inputs) == 0:
            raise InputError("the batch is empty")
        return self.observed(self._read(inputs, gradients), inputs, labels, signature(inputs))

    def observed(
        self, read: Read, inputs: Inputs, labels: Tensor | None, form: Signature | None
    ) -> list[Observation]:
        """The observations of all detectors, from what was read in one pass.

        An example that is nothing but padding counts as not finite.
        """
        logits, mask = read.logits.float(), self.network.mask_of(inputs)
        labels = None if labels is None else labels.to(logits.device)
        finite = all_finite(inputs, logits)
        if mask is not None:
            finite = finite & mask.any(1)
            form = None if form is None else without_length(form, mask.shape[1])
        image = image_numbers.look(inputs) if any(view.image for view in self._views.values()) else None
        observations = {}
        for needs, view in self._views.items():
            features = read.features[0] if view.at_head else None
            features = features if view.features is None else read.means[view.features]
            means = tuple([read.means[key] for key in view.means])
            averages = means if features is None else (*means, features)
            observations[needs] = Observation(
                logits,
                features,
                self.head if view.at_head else None,
                means,
                labels,
                finite & all_finite(*averages) if averages else finite,
                None if view.table is None else read.tables[view.table],
                form,
                image if view.image else None,
            )
        return [observations[needs] for needs in self.needs]

    def _read(self, inputs: Inputs, gradients: bool = False) -> Read:
        """One forward pass. A compiled network stays compiled, unless gradients are needed."""
        inputs = ordinary(inputs)
        if self._in_graph is None or gradients:
            return self._read_eagerly(inputs, gradients)
        try:
            with judging(self.network.module, compiled=True):
                read = Read(*self._in_graph(inputs))
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
        from gramwatch.observe import compiled

        plain = self.traceable(compiled.statistics, compiled.channel_means, compiled.side_by_side)
        return compiled.compiled_as(self.network.model, plain)

    def traceable(
        self,
        statistics: Callable[..., tuple[Tensor, Any]],
        channel_means: Callable[[Tensor, int, int | None, int | None], Tensor],
        table: Callable[[GramTable, Mapping[int, Tensor]], Tensor],
    ) -> Callable[[Inputs], tuple[Any, ...]]:
        """A pass under watch as a function that can be traced: see `compiled.traceable`."""
        from gramwatch.observe.compiled import traceable

        return traceable(self.network, self._uses, self._head_call, statistics, channel_means, table)

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy. It compiles its own network, and has no recordings and prepared kernels."""
        own = {name: value for name, value in vars(self).items() if name not in ("_in_graph", "graphs")}
        return {**own, "_readers": {}}

    @outside_compilation
    def _read_eagerly(self, inputs: Inputs, gradients: bool = False) -> Read:
        """One forward pass, uncompiled. If the caller is compiled, torch.compile must not compile this."""
        network, makers = self.network, self._makers
        examples, mask = count_examples(inputs), network.mask_of(inputs)
        real = None if mask is None else Real(mask)
        reading = Pass(self._uses, self._readers, examples, real)
        with judging(network.module), torch.set_grad_enabled(gradients):
            if makers:
                try:
                    output, features = run_by_modules(
                        network.module, inputs, self.taps, reading.receive, makers, self._head_call
                    )
                except OtherCallsError:  # perhaps a module was replaced: watch all calls from now on
                    self._makers = ()
                    return self._read_eagerly(inputs, gradients)
            else:
                watch = Watch(self.taps, reading.receive, reading.repeat, self._head_call)
                output = watch.run(network.module, inputs)
                features = list(watch.at_head[:1])
        return Read(network.logits_of(output), reading.tables, reading.means, features)


def _distinct(values: Iterable[Any]) -> list[Any]:
    """The values in their order, without None and without repetition."""
    return list(dict.fromkeys(value for value in values if value is not None))


def _averaged_taps(look: Look, wanted: Averaged) -> Taps:
    """The taps whose channel means are wanted."""
    selection, (first, end), _ = wanted
    taps = look.taps(selection)
    return taps[first:end] or taps
