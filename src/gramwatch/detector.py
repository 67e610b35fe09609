"""Detector: the one contract of all methods and guards; the lifecycle, written once.

A detector is fitted on training data, calibrated on held-out data, called on new inputs, saved and loaded. A
method adds what it needs of a pass, what it takes in, what it measures, and the rule that makes a score of
what it measured.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from gramwatch import artifact
from gramwatch.batches import Inputs, on_device, on_device_ahead
from gramwatch.errors import ArtifactError, CalibrationError, GramwatchError, InputError, NotFittedError, warn
from gramwatch.measurement import AsMeasured, Calibration, Detection, Measurement, check_enough
from gramwatch.observation import Needs, Observation, Plan, Statistics
from gramwatch.taps import Look, Network, Taps, unwrap
from gramwatch.taps.running import InputsAdapter, LogitsAdapter
from gramwatch.threshold import threshold

CHECKPOINT_SECONDS = 60.0
"""How often a fit with a checkpoint writes it."""
_B = TypeVar("_B")
_D = TypeVar("_D", bound="Detector")


class Detector(ABC):
    """Tells whether a classifier is looking at something it was never trained on.

    Example:
        >>> detector.fit(train_loader)
        >>> detector.calibrate(validation_loader)
        >>> found = detector(images)
        >>> found.is_ood

    Args:
        model: any classifier that returns logits. It is not changed.
        level: the share of in-distribution inputs to keep; `1 - level` is the false-alarm rate.
        inputs: how a batch becomes the network's input, where it is not a tensor, a tuple whose first item is
            the input, or a mapping of keyword arguments: a function of the batch, or a key.
        logits: where the logits are in the network's output, where it returns more than these: a name, a
            position, or a function of the output.

    Attributes:
        metadata: a free dictionary that is saved with the detector (preprocessing, class names, ...).

    """

    name: ClassVar[str]
    """How users, and files, call it."""
    alone: bool = False
    """Whether judging takes passes of its own."""
    trained_on_outliers: bool = False
    """Whether its network was trained with outliers: a table has to say so."""
    tuned_on_outliers: bool = False
    """Whether it has itself seen outliers: a table has to say so."""
    per_class: bool = False
    """Whether the false-alarm rate holds for each group of classes."""

    def __init__(
        self,
        model: nn.Module | Network,
        *,
        level: float = 0.95,
        inputs: InputsAdapter = None,
        logits: LogitsAdapter = None,
    ) -> None:
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, got {level}")
        self.network = Network.of(model, inputs, logits)
        self.level = float(level)
        self.metadata: dict[str, Any] = {}
        self._begin()

    def _begin(self) -> None:
        """Nothing was seen yet."""
        self._fits = Fits()
        self._plan: Plan | None = None
        self._seeing: tuple[Detector, ...] = ()  # the detectors that the plan is for
        self.forget_calibration()

    # --- what a method writes ------------------------------------------------------------------------

    @property
    @abstractmethod
    def title(self) -> str:
        """How tables call it."""

    @property
    def needs(self) -> Needs:
        """What it needs of a pass beside the logits."""
        return Needs()

    @property
    def known_taps(self) -> Mapping[Statistics, Taps]:
        """Taps that are known already, as those of a saved detector."""
        return {}

    @property
    @abstractmethod
    def is_fitted(self) -> bool:
        """Whether it has learnt all that it needs."""

    @property
    def learns(self) -> bool:
        """Whether it needs training data."""
        return True

    def note(self, observation: Observation) -> None:  # noqa: B027
        """Take note of the form of a batch of training examples, which is taken in next."""

    @abstractmethod
    def take(self, observation: Observation) -> Tensor | int:
        """Take in one batch of training examples; how many were left out because they are not finite."""

    def finish(self, left_out: int = 0) -> None:  # noqa: B027
        """Learn from what was taken in, of which so many examples were left out."""

    def where_not_finite(self) -> str:
        """Where training examples were found not to be finite, in words."""
        return ""

    @abstractmethod
    def measured(self, observation: Observation) -> Measurement:
        """What it measures of a batch."""

    def rule(self) -> Any:
        """How what was measured becomes a score, not fitted: a `Rule`."""
        return AsMeasured()

    @abstractmethod
    def settings_as_json(self) -> dict[str, Any]:
        """The arguments that it was made with, as plain values, but for the network's."""

    @abstractmethod
    def contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What is to be saved, but for what every file has: plain values, and tensors."""

    @classmethod
    @abstractmethod
    def described(
        cls: "type[_D]", header: Mapping[str, Any], model: nn.Module | Network
    ) -> "tuple[_D, artifact.Shapes]":
        """The detector without its tensors, and what these must be."""

    @abstractmethod
    def restore(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take over the tensors of a file."""

    @abstractmethod
    def take_over(self, before: Any) -> None:
        """Go on from what another detector of the same kind has seen."""

    @abstractmethod
    def _merge(self, other: Any) -> None:
        """Add what another detector of the same kind has seen."""

    def check_inputs(self, inputs: Inputs) -> None:  # noqa: B027
        """Refuse inputs of another form than it was fitted on."""

    def explain(self, inputs: Inputs, error: BaseException) -> None:  # noqa: B027
        """Raise a better error than the network's own, if there is one."""

    def check_calibration(self, measured: Measurement) -> None:  # noqa: B027
        """Refuse calibration data that are of no use."""

    def check_rule(self, rule: Any) -> None:  # noqa: B027
        """Say what a fitted rule leaves out."""

    def shown(self, measured: Measurement) -> dict[str, Tensor]:
        """What a detection shows beside the scores: `deviations` and `class_support` of Gram."""
        return {}

    @property
    def tap_names(self) -> tuple[str, ...] | None:
        """The names of the taps whose deviations a detection shows."""
        return None

    stands_beside_baseline: ClassVar[bool] = False
    """Whether `evaluate` of this detector alone shows the softmax baseline, too."""

    def shown_beside(self) -> "dict[str, Detector]":
        """Which detectors `evaluate` of this one alone shows, too, by the names in its table."""
        return {}

    # --- what is known so far ------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The network that is judged."""
        return self.network.model

    @property
    def leaves(self) -> "tuple[Detector, ...]":
        """The detectors that look for themselves: this one, or the members of a guard."""
        return (self,)

    def to(self: _D, device: torch.device | str) -> _D:
        """Move the network to a device; what was learnt of it follows when it is used."""
        self.model.to(device)
        return self

    def reset(self: _D) -> _D:
        """Forget all training and calibration data; settings stay."""
        self._begin()
        return self

    def forget_calibration(self) -> None:
        """What was calibrated no longer holds: there is more training data."""
        self._calibration: Calibration | None = None
        self._moved: tuple[torch.device, Calibration] | None = None

    def check_fitted(self) -> None:
        """It has been fitted, if it has to be, or a plain error."""
        if not self.is_fitted:
            raise NotFittedError(f"{self._called} is not fitted: call detector.fit(train_loader) first")

    def calibration(self, device: torch.device | None = None) -> Calibration:
        """The calibration, on a device if one is named, kept there; or a plain error."""
        if self._calibration is None:
            self.check_fitted()
            raise NotFittedError(
                f"{self._called} is not calibrated: call detector.calibrate(validation_loader) after fitting"
            )
        if device is None:
            return self._calibration
        if self._moved is None or self._moved[0] != device:
            self._moved = (device, self._calibration.to(device))
        return self._moved[1]

    @property
    def calibration_scores_(self) -> Tensor:
        """The in-distribution scores that rank, ascending."""
        return self.calibration().scores[:, 0].sort().values

    @property
    def threshold_(self) -> float:
        """The score above which an input is out-of-distribution (Eq. 6)."""
        scores = self.calibration().scores[:, 0]
        if self.per_class:
            raise ValueError("with per_class=True classes have thresholds of their own: see found.is_ood")
        return threshold(scores, self.level)

    @property
    def _called(self) -> str:
        return f"this {type(self).__name__}"

    def _described_fit(self) -> str:
        """What `repr` says of the fit."""
        return "" if self.is_fitted else "not fitted"

    def __repr__(self) -> str:
        state = [self._described_fit()]
        if self.is_fitted:
            state.append("not calibrated")
            if self._calibration is not None:
                state[-1] = "calibrated per class" if self.per_class else f"threshold {self.threshold_:.4g}"
        said = ", ".join(each for each in state if each)
        return f"{type(self).__name__}({type(unwrap(self.model)).__name__}: {said})"

    # --- fit -----------------------------------------------------------------------------------------

    def fit(
        self: _D,
        loader: Iterable[Any],
        *,
        checkpoint: str | PathLike[str] | None = None,
        progress: bool = True,
    ) -> _D:
        """Take in what training data looks like (Algorithm 1).

        Fitting again adds to what was seen before and asks for a new calibration. An interruption keeps
        all finished batches.

        Args:
            loader: yields a tensor, a tuple or list whose first item is the input, or a mapping.
            checkpoint: a file to which progress is written every minute, on interruption and at the end. If
                it exists, its batches are skipped: the loader must yield the same batches in the same order.
                `save` deletes it.
            progress: show a progress bar (on a terminal only).

        """
        self.check_adding(checkpoint is not None)
        done = self._resume(checkpoint)
        self._fits.begin(checkpoint)

        def write(done: int) -> None:
            if checkpoint is not None and all(leaf.has_examples for leaf in self.leaves):
                self._write(checkpoint, batches=done)

        fit_all([self], loader, progress, self._fits, done, write)
        self.check_useful()
        return self

    @property
    def has_examples(self) -> bool:
        """Whether there is something to be written down of a fit under way."""
        return True

    def check_adding(self, checkpoint: bool) -> None:  # noqa: B027
        """Refuse to add to a fit that cannot be added to."""

    @property
    def says_nothing(self) -> str:
        """Why every input gets the same score, after a fit to data of no use; empty otherwise."""
        return ""

    def check_useful(self) -> None:
        """Refuse a fit to data of no use."""
        if self.says_nothing:
            raise InputError(self.says_nothing)

    def settle(self, look: Look) -> None:  # noqa: B027
        """At the first batch, find out what can be used on this network."""

    def use(self, plan: Plan) -> None:  # noqa: B027
        """Take note of a plan that was made for it."""

    def planned(self, inputs: Inputs) -> Plan:
        """The plan of a pass for this detector, made at the first batch and kept."""
        if self._plan is None:
            inputs = on_device(inputs, self.model)
            with explained(self.leaves, inputs):
                look = Look(self.network, inputs)
                self.settle(look)
                self._seeing = self.leaves
                self._plan = plan_for(self._seeing, look)
        return self._plan

    @torch.inference_mode()
    def merge(self: _D, other: _D) -> _D:
        """Join what another detector of the same network, fitted on other data, has seen.

        Only methods for which this is exact can be merged. Both keep their settings; the calibration must be
        done anew.
        """
        self.check_merge(other)
        self._merge(other)
        self.forget_calibration()
        return self

    def check_merge(self, other: "Detector") -> None:
        """Make sure that another detector can be merged into this one."""
        if self is other:
            raise ValueError("a detector cannot be merged with itself: its examples would count twice")
        if type(other) is not type(self):
            raise ValueError(f"the two are different methods: {self.name} and {other.name}")
        for name, mine, theirs in self.differing_settings(other):
            raise ValueError(f"the two differ in {name}: {mine!r} and {theirs!r}")
        self.check_fitted()
        other.check_fitted()
        mine, theirs = self.model, other.model
        if mine is not theirs and artifact.fingerprint(mine) != artifact.fingerprint(theirs):
            raise ValueError("the two were fitted on networks with different weights")

    # --- calibrate and judge -------------------------------------------------------------------------

    @torch.inference_mode()
    def calibrate(
        self: _D, loader: Iterable[Any], *, split: bool = True, seed: int = 0, progress: bool = True
    ) -> _D:
        """Set the threshold from in-distribution data that was not used for training.

        Args:
            loader: as for `fit`.
            split: half of the data, drawn by `seed`, sets what scores are divided by, E[delta_l] of Gram; the
                other half ranks. Then fresh in-distribution inputs are flagged at a rate of at most
                `1 - level`. With `False`, the paper's way, the same data do both: the rate is only
                approximate, and too high for small calibration sets (55 % instead of 5 % at 20 examples).
                Methods that divide by nothing rank by all data in any case.
            seed: of the split; stored.
            progress: show a progress bar (on a terminal only).

        """
        self.check_fitted()
        measured = self.measure_all(loader, "calibrating", progress)
        finite = measured.finite
        if not finite.all():
            warn(f"{int((~finite).sum())} calibration example(s) with NaN or infinity were left out")
            measured = measured[finite]
        rule = self.rule()
        split = split and rule.standardises
        check_enough(len(measured), self.level, split)
        self.check_calibration(measured)
        try:
            found = Calibration.of(
                measured, rule, self.level, per_class=self.per_class, split=split, seed=seed
            )
        except GramwatchError:
            raise
        except ValueError as error:
            raise CalibrationError(str(error)) from None
        self.check_rule(found.rule)
        self.forget_calibration()
        self._calibration = found
        return self

    def __call__(self, inputs: Any) -> Detection:
        """Judge a batch in one forward pass.

        An input that is not finite, or makes the network's activations so, gets an infinite score.
        """
        if self._calibration is None:
            self.calibration()  # which says what is missing
        if self.network.inputs is not None or not isinstance(inputs, Tensor):
            inputs = self.network.read(inputs)
        # Out of inference mode, so that the results, and what is kept on a GPU, are ordinary tensors.
        with torch.inference_mode(False), torch.no_grad():
            logits, predicted, score, p_values, is_ood, sound, *shown = (
                t.clone() if t.is_inference() else t for t in self._verdict(inputs)
            )
            found = Detection(
                logits=logits,
                predicted=predicted,
                score=score,
                p_value=p_values[0],
                is_ood=is_ood,
                deviations=shown[0] if shown else None,
                class_support=shown[1] if shown else None,
                parts=self._parts(p_values[1:]),
                taps=self.tap_names,
            )
            # The device is waited for here and nowhere before.
            broken = len(predicted) - int(sound)
        if broken:
            warn(f"{broken} input(s) with NaN or infinity: their score is infinite")
        return found

    def _parts(self, p_values: Tensor) -> Mapping[str, Tensor] | None:
        """The p-values of members, by name."""
        return None

    def _verdict(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """All that a detection consists of; a GPU is not waited for."""
        weight = next(self.network.model.parameters(), None)
        if weight is not None and weight.is_cuda:
            return self._verdict_on_gpu(inputs)
        return self._judged(self._measured(inputs))

    def _verdict_on_gpu(self, inputs: Inputs) -> tuple[Tensor, ...]:
        return self._judged(self._measured(inputs))

    def _judged(self, measured: Measurement) -> tuple[Tensor, ...]:
        moved, device = self._moved, measured.logits.device
        found = moved[1] if moved is not None and moved[0] == device else self.calibration(device)
        score, p_values, is_ood = found.judged(measured)
        more = self.shown(measured)
        first = (measured.logits, measured.predicted, score, p_values.T, is_ood, measured.finite.sum())
        return (*first, more["deviations"], more["class_support"]) if more else first

    @torch.inference_mode()
    def measure(self, inputs: Inputs) -> Measurement:
        """What it measures of a batch, without the calibration: what scores are made of."""
        self.check_fitted()
        return self._measured(inputs)

    @torch.inference_mode()
    def _measured(self, inputs: Inputs) -> Measurement:
        plan = self._plan or self.planned(inputs)
        parts = [
            self.measured_from(
                {leaf: leaf.measured(seen) for leaf, seen in zip(self._seeing, shown, strict=True)}
            )
            for shown in plan.run(inputs)
        ]
        return parts[0] if len(parts) == 1 else Measurement.of_pieces(parts)

    def measured_from(self, measured: "Mapping[Detector, Measurement]") -> Measurement:
        """What it measures of a batch, from what the detectors that look for themselves did."""
        return measured[self]

    def measure_all(
        self, loader: Iterable[Any], doing: str = "measuring", progress: bool = True
    ) -> Measurement:
        """`measure` over a whole loader, on the CPU."""
        batches = (inputs for inputs, _ in self.network.batches(loader, doing, progress))
        parts = [self.measure(inputs) for inputs in on_device_ahead(batches, self.model)]
        if not parts:
            raise InputError(f"the loader yielded no example: {doing} needs some")
        return Measurement.joined(parts)

    # --- save and load -------------------------------------------------------------------------------

    def differing_settings(self, other: "Detector") -> Iterator[tuple[str, Any, Any]]:
        """Each setting in which two detectors differ: its name, this one's value, the other's."""
        theirs = other.settings_as_json()
        for name, mine in self.settings_as_json().items():
            if mine != theirs[name]:
                yield name, mine, theirs[name]

    def save(self, path: str | PathLike[str]) -> None:
        """Write the detector to one safetensors file, to be kept beside the network's checkpoint.

        The network itself is not saved, only a fingerprint of it.
        """
        self.check_fitted()
        self._write(path)
        self._fits.saved(path)

    def _write(self, path: str | PathLike[str], batches: int | None = None) -> None:
        artifact.check_writable(path)
        header, tensors = self.contents()
        header |= {"network": artifact.fingerprint(self.model), "metadata": self.metadata}
        if self.network.adapters:
            header["adapters"] = self.network.adapters
        artifact.write(path, {**header, "batches": batches}, tensors)

    @classmethod
    def from_artifact(
        cls: "type[_D]", saved: artifact.Saved, model: nn.Module | Network, accept_other_weights: bool = False
    ) -> "_D":
        """The detector in an opened file; `gramwatch.load` is the short way."""
        detector = saved.restored(cls, model, accept_other_weights)
        if saved.header.get("batches") is None:
            with artifact.reading(saved.path):
                detector.check_fitted()
        return detector

    def _resume(self, checkpoint: str | PathLike[str] | None) -> int:
        """Take over the state of an interrupted fit; the number of batches it holds."""
        if checkpoint is None:
            return 0
        artifact.check_writable(checkpoint)
        if not Path(checkpoint).exists():
            return 0
        saved = artifact.read(checkpoint)
        batches = saved.batches()
        before = type(self).from_artifact(saved, self.network)
        anew = "delete it to start anew"
        for name, mine, theirs in self.differing_settings(before):
            raise ArtifactError(f"{checkpoint} was begun with {name} = {theirs!r}, not {mine!r}: {anew}")
        self._check_resumed(before, checkpoint, anew)
        self.take_over(before)
        return batches

    def _check_resumed(self, before: Any, checkpoint: str | PathLike[str], anew: str) -> None:  # noqa: B027
        """Compare more than the settings with an interrupted fit."""


# --- several detectors of one network ----------------------------------------------------------------


def plan_for(leaves: Sequence[Detector], look: Look) -> Plan:
    """The plan of a pass that shows each of some detectors what it needs."""
    known = {asked: taps for leaf in leaves for asked, taps in leaf.known_taps.items()}
    plan = Plan(look, [leaf.needs for leaf in leaves], known)
    plan.explained = partial(explained, leaves)
    for leaf in leaves:
        leaf.use(plan)
    return plan


@contextmanager
def explained(leaves: Sequence[Detector], inputs: Inputs) -> Iterator[None]:
    """Refuse inputs of another form than those of the fit; name the size that the network fails on."""
    for leaf in leaves:
        leaf.check_inputs(inputs)
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, InputError) as error:
        # At a first look, the network's own error is the cause of another.
        own = error.__cause__ if isinstance(error, InputError) else error
        if own is not None:
            for leaf in leaves:
                leaf.explain(inputs, own)
        raise


def leaves_of(detectors: Iterable[Detector]) -> list[Detector]:
    """The detectors that look for themselves, each once: those given, and members of guards."""
    return list(dict.fromkeys(leaf for each in detectors for leaf in each.leaves))


@torch.inference_mode()
def fit_all(
    detectors: Sequence[Detector],
    loader: Iterable[Any],
    progress: bool,
    fits: "Fits",
    done: int = 0,
    write: Callable[[int], None] = lambda done: None,
) -> None:
    """Fit detectors of one network from one pass over the training data: the one loop that does."""
    network = detectors[0].network
    for each in (*detectors, *leaves_of(detectors)):
        each.forget_calibration()
    plan: Plan | None = None
    learning: list[Detector] = []
    left_out: dict[Detector, Tensor | int] = {}

    def take(batch: tuple[Inputs, Tensor | None]) -> None:
        nonlocal plan
        if plan is None:
            with explained(leaves_of(detectors), batch[0]):
                look = Look(network, batch[0])
                for each in detectors:
                    each.settle(look)
                learning.extend(leaf for leaf in leaves_of(detectors) if leaf.learns)
                plan = plan_for(learning, look)
        if not learning:
            return
        for seen in plan.run(*batch):
            fits.torn = True
            for leaf, observation in zip(learning, seen, strict=True):
                leaf.note(observation)
                left_out[leaf] = left_out.get(leaf, 0) + leaf.take(observation)
        fits.torn = False

    if any(leaf.learns for leaf in leaves_of(detectors)):
        batches = on_device_ahead(network.batches(loader, "fitting", progress), network.model)
        fits.run(batches, take, done, write)
    counts = {leaf: int(left_out.get(leaf, 0)) for leaf in leaves_of(detectors)}
    if any(counts.values()):
        where = next(filter(None, (leaf.where_not_finite() for leaf in counts)), "")
        warn(f"{max(counts.values())} training example(s) with NaN or infinity were left out{where}")
    for leaf, count in counts.items():
        leaf.finish(count)


class Fits:
    """The fits of one detector: whether one was interrupted, and the checkpoint that `save` makes useless."""

    def __init__(self) -> None:
        self._interrupted = 0
        self._checkpoint: Path | None = None
        self.torn = False
        """Whether a batch is taken in by some detectors, or in part, and not yet by all."""

    def begin(self, checkpoint: str | PathLike[str] | None) -> None:
        """Say what a fit after an interrupted one does."""
        if self._interrupted and (checkpoint is None or not Path(checkpoint).exists()):
            warn(
                f"an earlier fit was interrupted after {self._interrupted} batch(es), which are kept. If "
                "this loader yields them again, they count twice: detector.reset() forgets them"
            )
        self._interrupted = 0
        self._checkpoint = None if checkpoint is None else Path(checkpoint)

    def run(
        self, batches: Iterable[_B], take: Callable[[_B], None], done: int, write: Callable[[int], None]
    ) -> None:
        """Take in every batch after the first `done`.

        `write(done)` is called every minute, on interruption, and at the end.
        """
        seen, before, saved_at = 0, done, time.monotonic()
        try:
            for number, batch in enumerate(batches):
                seen += 1
                if number < done:
                    continue
                take(batch)
                done = number + 1
                if time.monotonic() - saved_at > CHECKPOINT_SECONDS:
                    write(done)
                    saved_at = time.monotonic()
        except BaseException:
            self._interrupted = done + self.torn
            if not self.torn:  # else what was last written is whole, and what is there now is not
                write(done)
            self.torn = False
            raise
        if seen == 0:
            raise InputError("the loader yielded no example: there is nothing to fit")
        if seen < done:
            raise InputError(f"the checkpoint holds {done} batches, but the loader yielded only {seen}")
        if before == done and self._checkpoint is not None:
            warn(
                f"{self._checkpoint} holds all {done} batches already, so that nothing was fitted anew: "
                "delete it to fit again"
            )
        write(done)

    def saved(self, path: str | PathLike[str]) -> None:
        """The detector was saved to `path`: its checkpoint is of no more use."""
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None and checkpoint.resolve() != Path(path).resolve():
            checkpoint.unlink(missing_ok=True)


def listed(names: list[str], most: int = 8) -> str:
    """Some names with commas between them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
