"""Fitting: the loop over training data, for one or several detectors, by one or several processes."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from gramwatch.detect.contract import Contract
from gramwatch.detect.distributed import Group, together
from gramwatch.detect.passes import explained, leaves_of, note_form, plan_for
from gramwatch.detect.progress import Counted, Fits, checksums
from gramwatch.errors import InputError, warn
from gramwatch.inputs.batches import Inputs, mapped, on_device, on_device_ahead, repeated
from gramwatch.observe.needs import Statistics
from gramwatch.observe.observation import Observation
from gramwatch.observe.plan import Plan
from gramwatch.watch import Look, Taps

UNCOUNTED = 32
"""After this many batches, their examples are counted."""
_C = TypeVar("_C", bound=Contract)


def check_adding(leaves: Iterable[Contract], checkpoint: bool) -> None:
    """Refuse a further fit, or a checkpoint, of detectors that keep examples."""
    for leaf in leaves:
        if leaf.why_not_merged and checkpoint:
            raise ValueError(f"'{leaf.name}' keeps examples, which a checkpoint does not: leave it out")
        if leaf.why_not_merged and leaf.is_fitted:
            raise ValueError(
                f"'{leaf.name}' is fitted already and cannot add to it: detector.reset() forgets that fit"
            )


@torch.inference_mode()
def fit_all(
    detectors: Sequence[Contract],
    loader: Iterable[Any],
    progress: bool,
    fits: Fits,
    write: Callable[[], None] = lambda: None,
    sharded: bool | None = None,
) -> None:
    """Fit detectors of one network in one pass over the training data. Every fit runs this loop."""
    network = detectors[0].network
    for detector in (*detectors, *leaves_of(detectors)):
        detector.forget_calibration()
    training = TrainingPass(detectors, fits)
    with together(network.model, "fit") as group:
        if any(leaf.learns for leaf in leaves_of(detectors)):
            part = group.part(loader, network.inputs_of, sharded)
            shown = network.batches(part, "fitting", progress and group.rank == 0)
            batches = on_device_ahead(shown, network.model)
            if group.size > 1:
                batches = training.begin_together(batches, group)

            def write_all() -> None:
                training.count()
                write()

            fits.run(batches, training.take, training.skip, write_all, may_be_empty=training.begun)
            training.compare(part, group)
        leaves = leaves_of(detectors)
        left_out, where = training.left_out_by_all(leaves, group)
        if any(left_out) and group.rank == 0:
            warn(f"{max(left_out)} training example(s) with NaN or infinity were left out{where}")
        for leaf, count in zip(leaves, left_out, strict=True):
            if group.size > 1 and leaf in training.learning:
                finish_on_ranks(leaf, group, count)
            else:
                leaf.finish(count)


class TrainingPass:
    """One pass over training data: its plan, and how many examples were left out."""

    def __init__(self, detectors: Sequence[Contract], fits: Fits) -> None:
        self._detectors, self._fits = detectors, fits
        self._plan: Plan | None = None
        self._left_out: dict[Contract, Tensor | int] = {}
        joined = {leaf for detector in detectors if not detector.uses_labels for leaf in detector.leaves}
        self._labelled = set(leaves_of(detectors)) - joined
        self._sums: list[Tensor] = []
        """Checksums of examples that are not counted yet: to wait for a GPU after each batch takes time."""
        self.learning: list[Contract] = []

    @property
    def begun(self) -> bool:
        """Whether there is a plan."""
        return self._plan is not None

    def _begin(self, inputs: Inputs, known: Mapping[Statistics, Taps] | None = None) -> Plan:
        """Look at the network, at the first batch."""
        with explained(leaves_of(self._detectors), inputs):
            look = Look(self._detectors[0].network, inputs)
            for detector in self._detectors:
                detector.settle(look)
            self.learning = [leaf for leaf in leaves_of(self._detectors) if leaf.learns]
            self._plan = plan_for(self.learning, look, known)
        for detector in (*self._detectors, *leaves_of(self._detectors)):
            note_form(detector, inputs)
        return self._plan

    def begin_together(
        self, batches: Iterator[tuple[Inputs, Tensor | None]], group: Group
    ) -> Iterator[tuple[Inputs, Tensor | None]]:
        """Look at the network with one example on all ranks, so that all watch the same taps.

        It is the first example of the first rank that has any. Taps of an earlier fit come first.
        """
        first = next(batches, None)
        example = None if first is None else mapped(repeated(first[0], 1), Tensor.cpu)
        known = {
            asked: taps for leaf in leaves_of(self._detectors) for asked, taps in leaf.known_taps.items()
        }
        ranks = group.gather((example, known))
        examples = [example for example, _ in ranks if example is not None]
        if not examples:
            raise InputError("the loader yielded no example: there is nothing to fit")
        known = {asked: taps for _, taps_of_rank in reversed(ranks) for asked, taps in taps_of_rank.items()}
        with group.one_voice():
            self._begin(on_device(examples[0], self._detectors[0].model), known)
        return batches if first is None else chain([first], batches)

    def take(self, batch: tuple[Inputs, Tensor | None]) -> None:
        """Let all detectors learn from a batch."""
        plan = self._plan or self._begin(batch[0])
        if not self.learning:
            return
        sums = checksums(batch[0])
        record = any(detector.record_pass is True for detector in self._detectors)
        inputs, labels = batch
        first = 0
        for observations in plan.run(inputs, labels if self._labelled else None, record):
            self._fits.torn = True
            last = first + len(observations[0])
            shown: dict[tuple[int, bool], Observation] = {}  # leaves of one observation share it
            for leaf, observation in zip(self.learning, observations, strict=True):
                key = id(observation), leaf in self._labelled
                if key not in shown:
                    labels_shown = observation.labels if leaf in self._labelled else None
                    shown[key] = replace(observation, labels=labels_shown, checksums=sums[first:last])
                observation = shown[key]
                leaf.note(observation)
                self._left_out[leaf] = self._left_out.get(leaf, 0) + leaf.take(observation)
            first = last
        self._fits.torn = False
        self._sums.append(sums)
        if len(self._sums) == UNCOUNTED:
            self.count()

    def skip(self, batch: tuple[Inputs, Tensor | None]) -> None:
        """Pass a batch that the checkpoint holds already."""
        self._fits.read.add(checksums(batch[0]))

    def count(self) -> None:
        """Count the examples of the last batches."""
        if self._sums:
            sums, self._sums = torch.cat(self._sums).cpu(), []
            self._fits.read.add(sums)
            counted = Counted.of(sums)
            for leaf in leaves_of(self._detectors):
                leaf._examples = leaf._examples.joined(counted)

    def compare(self, part: Iterable[Any], group: Group) -> None:
        """After the last batch: compare what the ranks counted, and join it."""
        leaves = leaves_of(self._detectors)
        joined = group.compare(part, [leaf._examples for leaf in leaves])
        for leaf, examples in zip(leaves, joined, strict=True):
            leaf._examples = examples

    def left_out_by_all(self, leaves: Sequence[Contract], group: Group) -> tuple[list[int], str]:
        """How many examples of all ranks each detector left out, and where the first one was."""
        counts = [int(self._left_out.get(leaf, 0)) for leaf in leaves]
        where = next(filter(None, (leaf.not_finite_at for leaf in leaves)), "") if any(counts) else ""
        ranks = group.gather((counts, where))
        total = [sum(of_leaf) for of_leaf in zip(*(counts for counts, _ in ranks), strict=True)]
        return total, next(filter(None, (where for _, where in ranks)), "")


# --- several processes: their fits become one -------------------------------------------------------


def begin_on_ranks(group: Group, leaves: Iterable[Contract], keep: bool = False) -> None:
    """Before a fit by several ranks: rank 0 alone keeps an earlier fit, so that it counts once.

    With `keep`, every rank keeps its own part: that of an interrupted fit.
    """
    if group.size == 1:
        return
    for leaf in leaves:
        if leaf.learns and leaf.why_not_merged:
            raise ValueError(f"several ranks cannot fit '{leaf.name}'. {leaf.why_not_merged}")
        if leaf.learns and group.rank and not keep:
            leaf.reset()


def packed(detector: Contract) -> tuple[Any, dict[str, Tensor]]:
    """The states of a fit, as a file holds them. None and no tensors before the first example."""
    if not all(leaf.has_examples for leaf in detector.leaves):
        return None, {}
    header, tensors = detector.contents()
    header |= {"counted": detector.counted.as_json()}
    return (json.loads(json.dumps(header)), tensors) if tensors else (None, {})


def unpacked(like: _C, header: Any, tensors: Mapping[str, Tensor]) -> _C:
    """A detector with these states, of the same kind and network as another one."""
    detector, _ = type(like).described(header, like.network)
    detector.restore(header, tensors)
    for leaf in detector.leaves:
        leaf._examples = Counted.from_json(header["counted"])
    return detector


def _reduced(leaf: Contract, group: Group) -> None:
    """Join the states of all ranks on rank 0, in pairs: 1 to 0, 3 to 2, ..., then 2 to 0, and so on."""
    step = 1
    while step < group.size:
        if group.rank % (2 * step):
            group.send(group.rank - step, *packed(leaf))
            return
        if group.rank + step < group.size:
            header, tensors = group.receive(group.rank + step)
            if header is not None:
                other = unpacked(leaf, header, tensors)
                del tensors  # a state may be large
                add = leaf.take_over if packed(leaf)[0] is None else leaf.add_unfinished
                add(other)
        step *= 2


def finish_on_ranks(leaf: Contract, group: Group, left_out: int) -> None:
    """Finish a fit on rank 0, which has the states of all, and give it to all ranks."""
    _reduced(leaf, group)
    state: tuple[Any, dict[str, Tensor]] = (None, {})
    if group.rank == 0:
        leaf.finish(left_out)
        state = packed(leaf)
    header, tensors = group.broadcast(*state)
    if group.rank:
        leaf.adopt(unpacked(leaf, header, tensors))
