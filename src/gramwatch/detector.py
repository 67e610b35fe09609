"""Detector: the one contract of all methods and guards; the lifecycle, written once.

A detector is fitted on training data, calibrated on held-out data, called on new inputs, saved and loaded. A
method adds four things: what it needs from a pass, how it learns from an observation, what it measures, and
the rule that turns its measurement into a score.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from gramwatch import artifact, probe
from gramwatch.batches import (
    Inputs,
    count_examples,
    device_of,
    mapped,
    on_device,
    on_device_ahead,
    repeated,
)
from gramwatch.counted import MOSTLY, Counted, Read, checksums
from gramwatch.distributed import Group, files_of_ranks, together
from gramwatch.errors import (
    ArtifactError,
    CalibrationError,
    GramwatchError,
    InputError,
    NotFittedError,
    in_short,
    warn,
    warn_once,
)
from gramwatch.explain import Contribution, Explained, Pass, Shares
from gramwatch.measurement import (
    AsMeasured,
    Calibration,
    Detection,
    Measurement,
    check_enough,
    warn_of_calibration,
    warn_of_rounding,
)
from gramwatch.observation import Needs, Observation, Statistics
from gramwatch.places import contrasts, strengths
from gramwatch.plan import Plan
from gramwatch.split import KeptInputs, halves
from gramwatch.taps import Look, Network, Tap, Taps, unwrap
from gramwatch.taps.running import InputsAdapter, LogitsAdapter, MaskAdapter, is_compiled
from gramwatch.writing import check_writable

CHECKPOINT_SECONDS = 60.0
"""How often a fit with a checkpoint writes it."""
RUN_AGAIN = 32
"""The number of calibration inputs that are run again in other batches."""
SIZES_AGAIN = (1, 7)
"""The sizes of these batches. Kernels differ most for a single input and for an odd number of them."""
UNCOUNTED = 32
"""After this many batches, their examples are counted."""
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
        inputs: how a batch becomes the network's input: a function of the batch, or a key. It is not needed
            for a tensor, a tuple whose first item is the input, or a mapping of keyword arguments.
        logits: where the logits are in the network's output, if the network returns more than logits: a
            name, a position, or a function of the output.
        mask: which places of an input are padding, which does not count: a function from the network's
            arguments to a mask `(N, length)` with 0 at padding, or the name of the argument that is the mask.
            None: `attention_mask`, if the network gets one. False: padding counts.

    Attributes:
        metadata: a free dictionary that is saved with the detector (preprocessing, class names, ...).

    """

    name: ClassVar[str]
    """The name that users and files use."""
    alone: bool = False
    """Whether the detector judges by passes of its own and cannot share one."""
    trained_on_outliers: bool = False
    """Whether the network was trained with outliers. Tables say so."""
    tuned_on_outliers: bool = False
    """Whether the detector was tuned on outliers. Tables say so."""
    per_class: bool = False
    """Whether the false-alarm rate holds for each group of classes."""
    uses_labels: bool = True
    """Whether its leaves see the labels of training data, if the loader has any."""
    record_pass: bool = False
    """Whether a GPU replays the forward pass as a CUDA graph: see `Guard.record_pass`."""

    def __init__(
        self,
        model: nn.Module | Network,
        *,
        level: float = 0.95,
        inputs: InputsAdapter = None,
        logits: LogitsAdapter = None,
        mask: MaskAdapter = None,
    ) -> None:
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, got {level}")
        self.network = Network.of(model, inputs, logits, mask)
        self.level = float(level)
        self.metadata: dict[str, Any] = {}
        self._begin()

    def _begin(self) -> None:
        """Start without training data, plan and calibration."""
        self._fits = Fits()
        self._examples = Counted()
        self._plan: Plan | None = None
        self._observers: tuple[Detector, ...] = ()  # the plan's detectors, in its order
        self._recipe: Any = None  # of the probe's input
        self.forget_calibration()

    # --- what a method writes ------------------------------------------------------------------------

    @property
    @abstractmethod
    def title(self) -> str:
        """The name in tables."""

    @property
    def needs(self) -> Needs:
        """What the detector needs from a pass, besides the logits."""
        return Needs()

    @property
    def known_taps(self) -> Mapping[Statistics, Taps]:
        """Taps that are known already, such as the taps of a saved detector."""
        return {}

    @property
    @abstractmethod
    def is_fitted(self) -> bool:
        """Whether the detector has learnt everything it needs."""

    @property
    def learns(self) -> bool:
        """Whether the detector needs training data."""
        return True

    def note(self, observation: Observation) -> None:  # noqa: B027
        """Note the form of a batch of training examples, just before `take`."""

    @abstractmethod
    def take(self, observation: Observation) -> Tensor | int:
        """Learn from one batch of training examples. Return how many examples are not finite and left out."""

    def finish(self, left_out: int = 0) -> None:  # noqa: B027
        """Complete the fit after the last batch. `left_out` examples were not finite."""

    def where_not_finite(self) -> str:
        """For a warning: the first tap that was not finite for a training example. Empty if unknown."""
        return ""

    @abstractmethod
    def measured(self, observation: Observation) -> Measurement:
        """The measurement of a batch."""

    def rule(self) -> Any:
        """The `Rule` that turns a measurement into a score, not fitted yet."""
        return AsMeasured()

    def taught_rule(self) -> Any:
        """The rule, not fitted, with what a rehearsal taught, to be fitted to data without inputs."""
        return self.rule()

    @abstractmethod
    def settings_as_json(self) -> dict[str, Any]:
        """The arguments of the constructor as plain values, without the network and its adapters."""

    @abstractmethod
    def contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What to save: plain values, and tensors. `save` adds the entries that every file has."""

    @classmethod
    @abstractmethod
    def described(
        cls: "type[_D]", header: Mapping[str, Any], model: nn.Module | Network
    ) -> "tuple[_D, artifact.Shapes]":
        """The detector without its tensors, and the fields that its tensors must match."""

    @abstractmethod
    def restore(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Set the tensors from a file."""

    @abstractmethod
    def take_over(self, before: Any) -> None:
        """Continue the fit of another detector of the same kind."""

    @abstractmethod
    def _merge(self, other: Any) -> None:
        """Add the fit of another detector of the same kind."""

    def add_unfinished(self, other: Any) -> None:
        """Add the fit of another detector before `finish`."""
        self._merge(other)

    def adopt(self, finished: Any) -> None:
        """Take over the finished fit of another detector."""
        self.take_over(finished)
        self._examples = finished._examples

    @property
    def why_not_merged(self) -> str:
        """Why two fits cannot become one; empty if they can."""
        return ""

    def check_inputs(self, inputs: Inputs) -> None:  # noqa: B027
        """Refuse inputs whose form differs from the form of the training data."""

    def explain_error(self, inputs: Inputs, error: BaseException) -> None:  # noqa: B027
        """Raise a clearer error than the network's error, if the detector knows the cause."""

    def check_calibration(self, measured: Measurement) -> None:  # noqa: B027
        """Refuse calibration data that cannot calibrate, such as training data."""

    def check_rule(self, rule: Any) -> None:  # noqa: B027
        """Warn of taps or members that a fitted rule leaves out."""

    def shown(self, measured: Measurement) -> dict[str, Tensor]:
        """What a detection shows besides the scores: `deviations` and `class_support` of Gram."""
        return {}

    @property
    def tap_names(self) -> tuple[str, ...] | None:
        """The names of the taps whose deviations a detection shows."""
        return None

    # --- how it is explained -------------------------------------------------------------------------

    sees: ClassVar[str] = ""
    """What the detector looks at, in a word or two. Empty: its title says it."""
    why_no_parts: ClassVar[str] = "its score is one number, not a sum over taps"
    """Why an explanation does not go below the score of this detector, if it has no terms."""

    def terms(self, observation: Observation) -> Tensor | None:
        """What each tap adds to the score, `(N, taps)`, if the rule does not show it; None without parts."""
        return None

    def words(self, observation: Observation, rule: Any) -> tuple[str, ...]:
        """What stands out in each example, in words, by detectors without terms that can say so."""
        return ()

    def term_taps(self, plan: Plan) -> tuple[Tap, ...]:
        """The taps of the terms."""
        return ()

    def channels_at(self, tap: Tap) -> Tensor:
        """The numbers of the channels that count at a tap: all."""
        return torch.arange(tap.channels)

    def shares_at(self, observation: Observation, rule: Any, example: int, tap: int) -> Shares:
        """The channels of a tap, for one example. Their amounts are in proportion to their parts."""
        raise NotImplementedError(f"{self.name} has terms, but does not say what is below a tap")

    def unusual_at(self, observation: Observation, tap: int, maps: Tensor) -> Tensor:
        """How unusual each pixel of a tap is, `(N, pixels)`, from maps `(N, channels that count, pixels)`.

        Pixels that are much stronger or weaker than the median pixel of their image are unusual.
        """
        return contrasts(strengths(maps))

    def contributions(
        self, measured: Measurement, observed: "Mapping[Any, Observation]"
    ) -> list[Contribution]:
        """The terms of the score, from the measurement and the observations of a batch."""
        rule = self.calibration(measured.logits.device).rule
        terms = rule.terms(measured)
        if terms is None and self in observed:
            terms = self.terms(observed[self])
        return [Contribution(self.name, self, rule, rule(measured)[:, 0], terms)]

    stands_beside_baseline: ClassVar[bool] = False
    """Whether `evaluate` adds the softmax baseline to the table of this detector."""

    def shown_beside(self) -> "dict[str, Detector]":
        """The detectors that `evaluate` adds to the table of this detector, by their names in the table."""
        return {}

    # --- what is known so far ------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The network that is judged."""
        return self.network.model

    @property
    def leaves(self) -> "tuple[Detector, ...]":
        """The detectors that receive observations: this detector, or the members of a guard."""
        return (self,)

    @property
    def counted(self) -> Counted:
        """The training examples of the fit: their number, and a sample of their checksums."""
        return self.leaves[0]._examples

    def to(self: _D, device: torch.device | str) -> _D:
        """Move the network to a device. The fitted tensors follow at the next use."""
        self.model.to(device)
        return self

    def reset(self: _D) -> _D:
        """Forget all training and calibration data. The settings stay."""
        self._begin()
        return self

    def forget_calibration(self) -> None:
        """Forget the calibration, which no longer holds after further training data."""
        self._calibration: Calibration | None = None
        self._moved: tuple[torch.device, Calibration] | None = None

    def check_fitted(self) -> None:
        """Raise an error if the detector is not fitted."""
        if not self.is_fitted:
            raise NotFittedError(f"{self._called} is not fitted: call detector.fit(train_loader) first")

    def calibration(self, device: torch.device | None = None) -> Calibration:
        """The calibration, or an error. With a device, a copy on that device, which is kept."""
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
        calibration = self.calibration()
        if self.per_class:
            raise ValueError("with per_class=True classes have thresholds of their own: see found.is_ood")
        return calibration.threshold(self.level)

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
        description = ", ".join(filter(None, state))
        return f"{type(self).__name__}({type(unwrap(self.model)).__name__}: {description})"

    # --- fit -----------------------------------------------------------------------------------------

    def fit(
        self: _D,
        loader: Iterable[Any],
        *,
        checkpoint: str | PathLike[str] | None = None,
        progress: bool = True,
        sharded: bool | None = None,
    ) -> _D:
        """Learn what training data looks like (Algorithm 1).

        A second fit adds to the first and needs a new calibration. An interruption keeps all finished
        batches.

        Args:
            loader: yields a tensor, a tuple or list whose first item is the input, or a mapping.
            checkpoint: a file to which progress is written every minute, on interruption and at the end. If
                it exists, its batches are skipped: the loader must yield the same batches in the same order.
                `save` deletes it. If several processes fit, each has a file of its own beside it.
            progress: show a progress bar (on a terminal only).
            sharded: of several processes: whether every process was given a part of its own (True), or all
                the same (False). None: they compare what they were given. An error asks if that does not
                tell.

        """
        with together(self.model, "fit") as group:
            self.check_adding(checkpoint is not None)
            files = [] if checkpoint is None else files_of_ranks(checkpoint, group.size)
            own = files[group.rank] if files else None
            begin_on_ranks(group, self.leaves, keep=self._fits.interrupted)
            done, begun = self._resume(own)
            self._fits.begin(own, files, begun)

            def write(done: int) -> None:
                if own is not None and all(leaf.has_examples for leaf in self.leaves):
                    self._write(own, batches=done)

            fit_all([self], loader, progress, self._fits, done, write, sharded)
            if group.rank == 0:
                self.check_useful()
        return self

    @property
    def has_examples(self) -> bool:
        """Whether an unfinished fit has anything to save."""
        return True

    def check_adding(self, checkpoint: bool) -> None:  # noqa: B027
        """Refuse a further fit, or a checkpoint, if the method cannot continue a fit."""

    @property
    def says_nothing(self) -> str:
        """Why every input gets the same score after this fit; empty if scores differ."""
        return ""

    def check_useful(self) -> None:
        """Refuse a fit after which every input gets the same score."""
        if self.says_nothing:
            raise InputError(self.says_nothing)

    def settle(self, look: Look) -> None:  # noqa: B027
        """At the first batch, find out which members this network supports."""

    def use(self, plan: Plan) -> None:  # noqa: B027
        """Take over what the detector keeps of a new plan: Gram keeps the taps."""

    def planned(self, inputs: Inputs) -> Plan:
        """The plan for this detector. It is built at the first batch and kept."""
        if self._plan is None:
            inputs = on_device(inputs, self.model)
            with explained(self.leaves, inputs):
                look = Look(self.network, inputs)
                self.settle(look)
                self._observers = self.leaves
                self._plan = plan_for(self._observers, look)
            self.note_form(inputs)
        return self._plan

    def note_form(self, inputs: Inputs) -> None:
        """Note the form of the first example, for the probe."""
        if self._recipe is None:
            self._recipe = probe.recipe_of(inputs)

    @torch.inference_mode()
    def merge(self: _D, other: _D) -> _D:
        """Add the fit of another detector of the same network, fitted on other data.

        Only methods whose merge is exact can be merged. The settings stay. The detector must be calibrated
        again.
        """
        self.check_merge(other)
        share = self.counted.share_in_both(other.counted)
        if share > MOSTLY:
            warn(
                f"the two were fitted on {self.counted.number:,} and {other.counted.number:,} examples. "
                f"About {share:.0%} are the same and count twice"
            )
        self._merge(other)
        for mine, theirs in zip(self.leaves, other.leaves, strict=True):
            mine._examples = mine._examples.joined(theirs._examples)
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
        if self.counted.number and self.counted == other.counted:
            raise ValueError(
                f"the two were fitted on the same {self.counted.number:,} examples. A fit cannot be merged "
                "with itself: its examples would count twice"
            )

    # --- calibrate and judge -------------------------------------------------------------------------

    @torch.inference_mode()
    def calibrate(
        self: _D,
        loader: Iterable[Any],
        *,
        split: bool = True,
        seed: int = 0,
        progress: bool = True,
        sharded: bool | None = None,
    ) -> _D:
        """Set the threshold from in-distribution data that was not used for training.

        A few inputs are run again, alone and in other batches, to measure by how much the network's rounding
        changes their scores. A score counts as higher than a calibration score only if it exceeds that by a
        tolerance, twice the largest change or more. So copies of an input are equal in any batch.

        Args:
            loader: as for `fit`. 1,000 examples are recommended (docs/howto/calibration.md).
            split: one half of the data, drawn by `seed`, fits the rule (E[delta_l] of Gram). The other half
                ranks. Then fresh in-distribution inputs are flagged at a rate of at most `1 - level`. With
                `False`, as in the paper, all data do both. Then the rate is approximate, and too high for
                small calibration sets (55 % instead of 5 % at 20 examples). Methods without a fitted rule
                always rank by all data.
            seed: the seed of the split. It is saved.
            progress: show a progress bar (on a terminal only).
            sharded: as for `fit`.

        """
        self.check_fitted()
        with together(self.model, "calibrate") as group:
            kept = KeptInputs(seed)
            measurement = self.measure_all(loader, "calibrating", progress, kept, sharded)
            self.calibrate_kept(group, measurement, kept, split=split, progress=progress)
        return self

    @torch.inference_mode()
    def calibrate_kept(
        self,
        group: Group,
        measurement: Measurement,
        kept: KeptInputs,
        numbers: Tensor | None = None,
        split: bool = True,
        progress: bool = False,
    ) -> None:
        """`calibrate` from the measurement of all examples of a loader, and the inputs kept of it.

        Args:
            group: the ranks of this run.
            measurement: of all examples.
            kept: the sample of inputs. Those of the half that ranks are dropped.
            numbers: the running numbers of the examples that calibrate. None: all.
            split: as for `calibrate`.
            progress: show a progress bar (on a terminal only).

        """
        numbers = torch.arange(len(measurement)) if numbers is None else numbers
        calibration = group.once(
            lambda: self._calibrated(measurement[numbers], split, kept.seed, numbers, kept.copies(numbers))
        )
        standard = numbers[measurement.finite[numbers]]
        if calibration.how["split"]:
            standard = standard[halves(standard, kept.seed)[0]]
        kept.restrict(standard)
        calibration = self.rehearsed(calibration, measurement[standard], kept, group, progress)
        rounding = self._rounding(group, calibration, measurement, kept)
        self.forget_calibration()
        self._calibration = calibration.tolerating(2 * rounding, self.level)

    @torch.inference_mode()
    def calibrate_on(self: _D, measurement: Measurement, *, split: bool = True, seed: int = 0) -> _D:
        """`calibrate` from the measurement of in-distribution data, as `measure_all` returns it.

        There are no inputs to run again. The tolerance of ranks is 64 units in the last place of float32, of
        the magnitude that nine of ten scores do not exceed.
        """
        calibration = self._calibrated(measurement, split, seed, torch.arange(len(measurement)))
        self.forget_calibration()
        self._calibration = calibration
        return self

    def _calibrated(
        self, measurement: Measurement, split: bool, seed: int, numbers: Tensor, copies: int = 0
    ) -> Calibration:
        """The calibration from the measurement of in-distribution examples with these running numbers."""
        warn_of_calibration(measurement.finite, copies)
        measurement, numbers = measurement[measurement.finite], numbers[measurement.finite]
        rule = self.rule()
        split = split and rule.standardises
        check_enough(len(measurement), self.level, split)
        self.check_calibration(measurement)
        how: dict[str, Any] = {"per_class": self.per_class, "split": split, "seed": seed}
        try:
            calibration = Calibration.of(measurement, rule, self.level, numbers=numbers, **how)
        except GramwatchError:
            raise
        except ValueError as error:
            raise CalibrationError(str(error)) from None
        self.check_rule(calibration.rule)
        return calibration

    def rehearsed(
        self, calibration: Calibration, standard: Measurement, kept: KeptInputs, group: Group, progress: bool
    ) -> Calibration:
        """The calibration after a rehearsal, by detectors that have one: see `rehearsal`.

        Args:
            calibration: before it.
            standard: the measurement of the examples that fitted its rule.
            kept: a sample of their inputs.
            group: the ranks of this run.
            progress: show a progress bar (on a terminal only).

        """
        return calibration

    def _rounding(
        self, group: Group, calibration: Calibration, measurement: Measurement, kept: KeptInputs
    ) -> Tensor:
        """The largest change of each kind of score when inputs are run again in other batches, `(kinds,)`.

        If the network cannot be run on other batches, a warning says so, and the change is taken for zero.
        """
        rule, scores = calibration.rule, calibration.scores
        largest, problem = torch.zeros(scores.shape[1], dtype=torch.float64), ""
        numbers = kept.numbers[:RUN_AGAIN].tolist()
        try:
            for size in SIZES_AGAIN:
                for chosen, inputs in kept.batches(size, numbers):
                    again = self.measure(on_device(inputs, self.model)).changed(Tensor.cpu)
                    change = (rule(again) - rule(measurement[chosen])).abs()
                    # An overflow that depends on the batch is no rounding.
                    change = torch.where(change.isfinite(), change, 0.0)
                    largest = largest.maximum(change.amax(0))
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            problem = in_short(error)
        ranks = group.gather((largest, problem))
        largest = torch.stack([of_rank for of_rank, _ in ranks]).amax(0)
        if group.rank == 0:
            warn_of_rounding(float(largest[0]), scores[:, 0], next(filter(None, (p for _, p in ranks)), ""))
        return largest

    def __call__(self, inputs: Any) -> Detection:
        """Judge a batch in one forward pass.

        An input gets an infinite score if it is not finite, or if its activations are not finite.
        """
        inputs = self._read(inputs)
        # Outside inference mode, the results and the tensors kept on a GPU are ordinary tensors.
        with torch.inference_mode(False), torch.no_grad():
            return self._detection(self._verdict(inputs))

    def _read(self, inputs: Any) -> Inputs:
        """The network's input, made from the argument of a call. The detector must be calibrated."""
        if self._calibration is None:
            self.calibration()  # raises the error that says what is missing
        if self.network.inputs is not None or not isinstance(inputs, Tensor):
            inputs = self.network.read(inputs)
        return inputs

    def _detection(self, verdict: tuple[Tensor, ...]) -> Detection:
        logits, predicted, score, p_values, is_ood, sound, *shown = (
            t.clone() if t.is_inference() else t for t in verdict
        )
        detection = Detection(
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
        # This is the first line that waits for a GPU.
        broken = len(predicted) - int(sound)
        if broken:
            warn(f"{broken} input(s) with NaN or infinity: their score is infinite")
        return detection

    def explain(self, inputs: Any, *, places: bool = True) -> Explained:
        """Judge a batch and say why: what members, taps, channels and places add to the scores.

        The contributions come from the pass that judges. The map needs a second pass, because the predicted
        class, which decides what is unusual, is known only at the end of the first.

        Args:
            inputs: as for a call.
            places: whether to compute the map, where in the input the contributions come from.

        """
        return self.explain_inputs(self._read(inputs), places=places)

    def explain_inputs(self, inputs: Inputs, *, places: bool = True) -> Explained:
        """`explain` for a batch that is the network's input already."""
        ranks = self.calibration().ranks
        inputs = on_device(inputs, self.model)
        with torch.inference_mode(False), torch.no_grad():
            observed: dict[Any, Observation] = {}
            if self.alone:
                measured = self._run(inputs)
            else:
                observed = self._observed(inputs)
                measured = self.measured_from({leaf: leaf.measured(seen) for leaf, seen in observed.items()})
            return Pass(
                network=self.network,
                inputs=inputs,
                found=self._detection(self._judged(measured)),
                ranking=ranks.among(measured.predicted).cpu(),
                contributions=self.contributions(measured, observed),
                observed=observed,
                plan=self._plan,
                class_names=_class_names(self.metadata),
                confidence=measured.probability,
            ).explained(places)

    def _observed(self, inputs: Inputs) -> "dict[Any, Observation]":
        """The observations of one pass by detector. A batch that needs several passes is refused."""
        plan, count = self.planned(inputs), count_examples(inputs)
        if count > plan.at_once:
            raise InputError(
                f"{count} inputs are too many to be explained at once: give at most {plan.at_once}, whose "
                "statistics fit into memory"
            )
        ((observations,),) = (list(plan.run(inputs)),)
        return dict(zip(self._observers, observations, strict=True))

    def _parts(self, p_values: Tensor) -> Mapping[str, Tensor] | None:
        """The p-values of the members, by name; None without members."""
        return None

    def _verdict(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """The tensors of a detection. This does not wait for a GPU."""
        weight = next(self.network.model.parameters(), None)
        if weight is not None and weight.is_cuda:
            return self._verdict_on_gpu(inputs)
        return self._judged(self._run(inputs))

    def _verdict_on_gpu(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """The same on a GPU, where a guard replays a CUDA graph."""
        return self._judged(self._run(inputs))

    def _judged(self, measurement: Measurement) -> tuple[Tensor, ...]:
        """The tensors of a detection, from the measurement."""
        moved, device = self._moved, measurement.logits.device
        calibration = moved[1] if moved is not None and moved[0] == device else self.calibration(device)
        score, p_values, is_ood = calibration.judged(measurement)
        logits, predicted, finite = measurement.logits, measurement.predicted, measurement.finite
        verdict = (logits, predicted, score, p_values.T, is_ood, finite.sum())
        shown = self.shown(measurement)
        return (*verdict, shown["deviations"], shown["class_support"]) if shown else verdict

    @torch.inference_mode()
    def measure(self, inputs: Inputs) -> Measurement:
        """The measurement of a batch, from which the calibration computes scores."""
        self.check_fitted()
        return self._run(inputs)

    @torch.inference_mode()
    def _run(self, inputs: Inputs) -> Measurement:
        """Run the network on a batch and measure it."""
        plan = self._plan or self.planned(inputs)
        pieces = [
            self.measured_from(
                {
                    leaf: leaf.measured(observation)
                    for leaf, observation in zip(self._observers, observations, strict=True)
                }
            )
            for observations in plan.run(inputs, record=self.record_pass)
        ]
        return pieces[0] if len(pieces) == 1 else Measurement.of_pieces(pieces)

    def measured_from(self, measured: "Mapping[Detector, Measurement]") -> Measurement:
        """The measurement of a batch, from the measurements of the leaves."""
        return measured[self]

    def measure_all(
        self,
        loader: Iterable[Any],
        doing: str = "measuring",
        progress: bool = True,
        kept: KeptInputs | None = None,
        sharded: bool | None = None,
    ) -> Measurement:
        """`measure` over a whole loader, on the CPU. `kept` receives a sample of the inputs."""

        def measure(inputs: Inputs) -> dict[str, Measurement]:
            return {"": self.measure(inputs)}

        return measured_all(self.network, loader, measure, doing, progress, kept, sharded)[""]

    # --- save and load -------------------------------------------------------------------------------

    def differing_settings(self, other: "Detector") -> Iterator[tuple[str, Any, Any]]:
        """The settings in which two detectors differ: name, value of this detector, value of the other."""
        theirs = other.settings_as_json()
        for name, mine in self.settings_as_json().items():
            if mine != theirs[name]:
                yield name, mine, theirs[name]

    def save(self, path: str | PathLike[str]) -> None:
        """Write the detector to one safetensors file. Keep it with the network's checkpoint.

        The file holds a fingerprint of the network, not the network itself.
        """
        self.check_fitted()
        self._write(path)
        self._fits.saved(path)

    def _write(self, path: str | PathLike[str], batches: int | None = None) -> None:
        check_writable(path)
        header, tensors = self.contents()
        header |= {"network": artifact.fingerprint(self.model), "metadata": self.metadata}
        header["counted"] = self.counted.as_json()
        if batches is not None:
            header["read"] = self._fits.read.as_json()
        if self.network.adapters:
            header["adapters"] = self.network.adapters
        if self._recipe is not None and (answered := self.probed(self._recipe)) is not None:
            header["probe"] = answered
        artifact.write(path, {**header, "batches": batches}, tensors)

    @classmethod
    def from_artifact(
        cls: "type[_D]",
        saved: artifact.Saved,
        model: nn.Module | Network,
        accept_other_weights: bool = False,
        check_probe: bool = True,
    ) -> "_D":
        """The detector in an opened file; `gramwatch.load` is the short way."""
        detector = saved.restored(cls, model, accept_other_weights)
        with artifact.reading(saved.path):
            counted = Counted.from_json(saved.header.get("counted"))
            for leaf in detector.leaves:
                leaf._examples = counted
            if saved.header.get("batches") is None:
                detector.check_fitted()
            found = saved.header.get("probe")  # files of earlier versions have none
            if found is None:
                return detector
            then, inputs = probe.Answer.from_json(found), probe.made(found["input"])
        detector._recipe = found["input"]
        if check_probe and saved.same_weights:
            detector._compare(then, inputs, saved.path)
        return detector

    def _answer(self, inputs: Inputs) -> probe.Answer:
        """The logits of a batch of one, and the score if the detector is calibrated.

        Everything is prepared anew, so that nothing is kept of an input that is made up. A compiled network
        would be compiled for it, and a method that is `alone` prepares by itself: they have no score.
        """
        with probe.plainly(self.network):
            logits, score = probe.logits_of(self.network, inputs), None
            compiled = any(map(is_compiled, self.model.modules()))
            if self._calibration is not None and not self.alone and not compiled:
                plan = plan_for(self.leaves, Look(self.network, inputs))
                (observations,) = plan.run(inputs)
                seen = zip(self.leaves, observations, strict=True)
                measured = self.measured_from({leaf: leaf.measured(shown) for leaf, shown in seen})
                score = float(self.calibration(logits.device).judged(measured)[0])
            return probe.Answer.of(logits, score)

    def probed(
        self, recipe: Any, prepare: Callable[[Any], Inputs] = lambda made: made
    ) -> dict[str, Any] | None:
        """The probe for a file. None if the network cannot be run on an input that is made up, or is random.

        `prepare` makes the network's input of what the recipe makes.
        """
        try:
            inputs = prepare(on_device(probe.made(recipe), self.model))
            answer = probe.repeatable(self._answer(inputs), self.network, inputs)
            return None if answer is None else answer.to_json(recipe)
        except Exception as error:  # whatever the network raises
            why = f"{type(error).__name__}: {error!s:.200}"
            warn_once(self.network.module, f"no probe is saved: the network fails on made-up inputs ({why})")
            return None

    def _compare(self, then: probe.Answer, inputs: Inputs, path: Path) -> None:
        """Warn if the network or the detector answers the probe otherwise than when the file was written."""
        device = device_of(self.model)
        if then.device != ("cpu" if device is None else device.type):
            return
        try:
            now = self._answer(on_device(inputs, self.model))
        except Exception as error:  # whatever the network raises
            differs = f"it fails: {type(error).__name__}: {error!s:.200}"
        else:
            differs = then.differences(now, now.rounding(self.network.dtype))
        if differs:
            warn(
                f"{path}: the network answers the probe otherwise than when the file was written: {differs}. "
                "Its tensors are the same, so its code differs (an activation, pooling, padding, an epsilon, "
                "a buffer that is not saved), or this library's. The false-alarm rate does not hold: build "
                "the network as it was, or fit and calibrate anew. check_probe=False does not look"
            )

    def _resume(self, checkpoint: str | PathLike[str] | None) -> tuple[int, Any]:
        """Continue from the checkpoint of an interrupted fit.

        Return the number of batches in it, and what they were; None if the file does not say.
        """
        if checkpoint is None:
            return 0, None
        check_writable(checkpoint)
        if not Path(checkpoint).exists():
            return 0, None
        saved = artifact.read(checkpoint)
        batches = saved.batches()
        before = type(self).from_artifact(saved, self.network)
        self._recipe = before._recipe
        remedy = "delete it to start anew"
        for name, mine, theirs in self.differing_settings(before):
            raise ArtifactError(f"{checkpoint} was begun with {name} = {theirs!r}, not {mine!r}: {remedy}")
        self._check_resumed(before, checkpoint, remedy)
        self.take_over(before)
        for leaf in self.leaves:
            leaf._examples = before.counted
        with artifact.reading(saved.path):
            begun = saved.header.get("read")
            if begun is not None:
                artifact.check_types(begun, examples=int, checksum=int)
        return batches, begun

    def _check_resumed(self, before: Any, checkpoint: str | PathLike[str], remedy: str) -> None:  # noqa: B027
        """Refuse a checkpoint that differs from this detector in more than its settings."""


# --- several detectors of one network ----------------------------------------------------------------


def plan_for(leaves: Sequence[Detector], look: Look, known: Mapping[Statistics, Taps] | None = None) -> Plan:
    """The plan for these detectors. `known` are taps that are known besides those of the detectors."""
    known = {**(known or {}), **{asked: taps for leaf in leaves for asked, taps in leaf.known_taps.items()}}
    plan = Plan(look, [leaf.needs for leaf in leaves], known)
    plan.explained = partial(explained, leaves)
    for leaf in leaves:
        leaf.use(plan)
    return plan


@contextmanager
def explained(leaves: Sequence[Detector], inputs: Inputs) -> Iterator[None]:
    """Refuse inputs whose form differs from the fit. Explain an error of the network by the inputs' form."""
    for leaf in leaves:
        leaf.check_inputs(inputs)
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, InputError) as error:
        # `Look` raises an InputError whose cause is the network's error.
        network_error = error.__cause__ if isinstance(error, InputError) else error
        if network_error is not None:
            for leaf in leaves:
                leaf.network.explain_dtype(inputs, network_error)
                leaf.explain_error(inputs, network_error)
        raise


def leaves_of(detectors: Iterable[Detector]) -> list[Detector]:
    """The leaves of all these detectors, without repetition: see `Detector.leaves`."""
    return list(dict.fromkeys(leaf for detector in detectors for leaf in detector.leaves))


def measured_all(
    network: Network,
    loader: Iterable[Any],
    measure: Callable[[Inputs], Mapping[str, Measurement]],
    doing: str,
    progress: bool,
    kept: KeptInputs | None = None,
    sharded: bool | None = None,
) -> dict[str, Measurement]:
    """The measurements of a whole loader, by detector, on the CPU. Ranks measure their parts.

    The result has the batches in turns: the first of every rank, the second of every rank, and so on. If the
    ranks deal out the batches of one loader, this is the order of the loader. The running numbers of the
    inputs that are `kept` are those of this order.
    """
    numbers: list[int] = []
    parts: list[Mapping[str, Measurement]] = []
    counted = Counted()
    with together(network.model, doing) as group:
        part = group.part(loader, network.inputs_of, sharded)
        numbered = network.numbered(part, doing, progress and group.rank == 0)
        read = ((number, inputs) for number, inputs, _ in numbered)
        watched = read if kept is None else _keeping(kept, read, group)
        for number, inputs in on_device_ahead(watched, network.model):
            numbers.append(number)
            if group.size > 1:
                counted = counted.joined(Counted.of(checksums(inputs)))
            parts.append(measure(inputs))
        group.compare(part, [counted])
        counts = [len(next(iter(measured.values()))) for measured in parts]
        mine = {
            name: Measurement.joined([part[name] for part in parts]) for name in (parts[0] if parts else ())
        }
        reading = None if kept is None else kept.reading()
        ranks = group.gather((numbers, counts, _sharing_logits(mine), reading))
        turns = _in_turns([(numbers, counts) for numbers, counts, _, _ in ranks])
        if kept is not None:
            readings = [reading for *_, reading in ranks if reading is not None]
            kept.settle(readings, _firsts(turns, group.size), group.rank)
        return _ordered([measured for _, _, measured, _ in ranks], turns, doing)


def _keeping(
    kept: KeptInputs, read: Iterable[tuple[int, Inputs]], group: Group
) -> Iterator[tuple[int, Inputs]]:
    """The batches, which `kept` takes in before they are moved to a GPU."""
    first = usual = 0
    for number, inputs in read:
        usual = usual or count_examples(inputs)
        if group.size > 1:  # the batches of the other ranks are not known: see `KeptInputs`
            first = (number * group.size + group.rank) * usual
        kept.add(inputs, first)
        first += count_examples(inputs)
        yield number, inputs


_Turn = tuple[int, int, int, int]
"""A batch: its number, its rank, its place among all examples rank by rank, and its number of examples."""


def _in_turns(ranks: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[_Turn]:
    """The batches of all ranks in turns, from the numbers of the batches and of the examples in each."""
    turns: list[_Turn] = []
    start = 0
    for rank, (numbers, counts) in enumerate(ranks):
        for number, count in zip(numbers, counts, strict=True):
            turns.append((number, rank, start, count))
            start += count
    return sorted(turns)


def _firsts(turns: Sequence[_Turn], ranks: int) -> list[list[int]]:
    """The running number of the first example of each batch, for every rank."""
    firsts: list[list[int]] = [[] for _ in range(ranks)]
    running = 0
    for _, rank, _, count in turns:
        firsts[rank].append(running)
        running += count
    return firsts


def _ordered(
    ranks: Sequence[dict[str, Measurement]], turns: Sequence[_Turn], doing: str
) -> dict[str, Measurement]:
    """One measurement of all ranks, in turns."""
    given = [measured for measured in ranks if measured]
    if not given:
        raise InputError(f"the loader yielded no example: {doing} needs some")
    if len(ranks) == 1:
        return given[0]
    order = torch.cat([torch.arange(start, start + count) for _, _, start, count in turns])
    names = given[0]
    return _sharing_logits(
        {n: Measurement.of_pieces([measured[n] for measured in given])[order] for n in names}
    )


def _sharing_logits(measured: dict[str, Measurement]) -> dict[str, Measurement]:
    """The same with one copy of equal logits: detectors that share a pass have the same."""
    first = next(iter(measured.values()), None)
    return {
        name: replace(each, logits=first.logits)
        if first is not None and each.logits.equal(first.logits)
        else each
        for name, each in measured.items()
    }


# --- the fit of several ranks ------------------------------------------------------------------------


def begin_on_ranks(group: Group, leaves: Iterable[Detector], keep: bool = False) -> None:
    """Before a fit by several ranks: let rank 0 alone keep earlier fits, so that they count once.

    With `keep`, every rank keeps its own: an interrupted fit has left a part on each.
    """
    if group.size == 1:
        return
    for leaf in leaves:
        if leaf.learns and leaf.why_not_merged:
            raise ValueError(f"several ranks cannot fit '{leaf.name}'. {leaf.why_not_merged}")
        if leaf.learns and group.rank and not keep:
            leaf.reset()


def packed(detector: Detector) -> tuple[Any, dict[str, Tensor]]:
    """The states of a fit, as a file holds them. None and no tensors before the first example."""
    if not all(leaf.has_examples for leaf in detector.leaves):
        return None, {}
    header, tensors = detector.contents()
    header |= {"counted": detector.counted.as_json()}
    return (json.loads(json.dumps(header)), tensors) if tensors else (None, {})


def unpacked(like: _D, header: Any, tensors: Mapping[str, Tensor]) -> _D:
    """A detector with these states, of the same kind and network as another one."""
    detector, _ = type(like).described(header, like.network)
    detector.restore(header, tensors)
    for leaf in detector.leaves:
        leaf._examples = Counted.from_json(header["counted"])
    return detector


def _reduced(leaf: Detector, group: Group) -> None:
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


def _finished_on_ranks(leaf: Detector, group: Group, left_out: int) -> None:
    """Finish a fit on rank 0, which has the states of all, and give it to all ranks."""
    _reduced(leaf, group)
    state: tuple[Any, dict[str, Tensor]] = (None, {})
    if group.rank == 0:
        leaf.finish(left_out)
        state = packed(leaf)
    header, tensors = group.broadcast(*state)
    if group.rank:
        leaf.adopt(unpacked(leaf, header, tensors))


@torch.inference_mode()
def fit_all(
    detectors: Sequence[Detector],
    loader: Iterable[Any],
    progress: bool,
    fits: "Fits",
    done: int = 0,
    write: Callable[[int], None] = lambda done: None,
    sharded: bool | None = None,
) -> None:
    """Fit detectors of one network in one pass over the training data. Every fit runs this loop."""
    network = detectors[0].network
    for detector in (*detectors, *leaves_of(detectors)):
        detector.forget_calibration()
    passed = _TrainingPass(detectors, fits)
    with together(network.model, "fit") as group:
        if any(leaf.learns for leaf in leaves_of(detectors)):
            part = group.part(loader, network.inputs_of, sharded)
            shown = network.batches(part, "fitting", progress and group.rank == 0)
            batches = on_device_ahead(shown, network.model)
            if group.size > 1:
                batches = passed.begin_together(batches, group)

            def write_all(done: int) -> None:
                passed.count()
                write(done)

            fits.run(batches, passed.take, passed.skip, done, write_all, may_be_empty=passed.begun)
            passed.compare(part, group)
        leaves = leaves_of(detectors)
        left_out, where = passed.left_out_by_all(leaves, group)
        if any(left_out) and group.rank == 0:
            warn(f"{max(left_out)} training example(s) with NaN or infinity were left out{where}")
        for leaf, count in zip(leaves, left_out, strict=True):
            if group.size > 1 and leaf in passed.learning:
                _finished_on_ranks(leaf, group, count)
            else:
                leaf.finish(count)


class _TrainingPass:
    """One pass over training data: its plan, and how many examples were left out."""

    def __init__(self, detectors: Sequence[Detector], fits: "Fits") -> None:
        self._detectors, self._fits = detectors, fits
        self._plan: Plan | None = None
        self._left_out: dict[Detector, Tensor | int] = {}
        joined = {leaf for detector in detectors if not detector.uses_labels for leaf in detector.leaves}
        self._labelled = set(leaves_of(detectors)) - joined
        self._sums: list[Tensor] = []
        """Checksums of examples that are not counted yet: to wait for a GPU after each batch takes time."""
        self.learning: list[Detector] = []

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
            detector.note_form(inputs)
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
        known = {asked: taps for _, each in reversed(ranks) for asked, taps in each.items()}
        with group.one_voice():
            self._begin(on_device(examples[0], self._detectors[0].model), known)
        return batches if first is None else chain([first], batches)

    def take(self, batch: tuple[Inputs, Tensor | None]) -> None:
        """Let all detectors learn from a batch."""
        plan = self._plan or self._begin(batch[0])
        if not self.learning:
            return
        sums = checksums(batch[0])
        record = any(detector.record_pass for detector in self._detectors)
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
        self._fits.skip(checksums(batch[0]))

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

    def left_out_by_all(self, leaves: Sequence[Detector], group: Group) -> tuple[list[int], str]:
        """How many examples of all ranks each detector left out, and where the first one was."""
        counts = [int(self._left_out.get(leaf, 0)) for leaf in leaves]
        where = next(filter(None, (leaf.where_not_finite() for leaf in leaves)), "") if any(counts) else ""
        ranks = group.gather((counts, where))
        total = [sum(each) for each in zip(*(counts for counts, _ in ranks), strict=True)]
        return total, next(filter(None, (where for _, where in ranks)), "")


class Fits:
    """The fits of one detector: whether the last was interrupted, and the checkpoint that `save` deletes."""

    def __init__(self) -> None:
        self._interrupted = 0
        self._checkpoint: Path | None = None
        self._all_checkpoints: list[Path] = []
        self._begun: Mapping[str, Any] | None = None
        self.read = Read()
        """The examples that this fit has read."""
        self.torn = False
        """True while a batch is in the states of one detector but not yet of all, or only in part."""

    @property
    def interrupted(self) -> bool:
        """Whether the last fit was interrupted."""
        return self._interrupted > 0

    def begin(
        self,
        checkpoint: str | PathLike[str] | None,
        of_all_ranks: Iterable[str | PathLike[str]] = (),
        begun: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin a fit. Warn if it follows an interrupted fit. `begun` is what the checkpoint has read."""
        if self._interrupted and (checkpoint is None or not Path(checkpoint).exists()):
            warn(
                f"an earlier fit was interrupted after {self._interrupted} batch(es), which are kept. If "
                "this loader yields them again, they count twice: detector.reset() forgets them"
            )
        self._interrupted = 0
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._all_checkpoints = [Path(each) for each in of_all_ranks]
        self._begun, self.read = begun, Read()

    def skip(self, sums: Tensor) -> None:
        """Note the checksums of a batch that the checkpoint holds already."""
        self.read.add(sums)

    def check_skipped(self, done: int) -> None:
        """After the batches that the checkpoint holds: make sure that the loader has yielded these."""
        if self._begun is None or self._begun == self.read.as_json():
            return
        then, now = self._begun["examples"], self.read.number
        if then != now:
            raise InputError(
                f"{self._checkpoint} holds {then:,} examples in {done} batches, and the first {done} batches "
                f"of the loader have {now:,}: give batches of the same size, or delete it to start anew"
            )
        warn(
            f"the first {done} batches of the loader are not those of {self._checkpoint}. If the order is "
            "random, some examples count twice and others not at all: fix it by a seed. Random augmentation "
            "does no harm"
        )

    def run(
        self,
        batches: Iterable[_B],
        take: Callable[[_B], None],
        skip: Callable[[_B], None],
        done: int,
        write: Callable[[int], None],
        may_be_empty: bool = False,
    ) -> None:
        """Call `skip` with the first `done` batches, and `take` with every further batch.

        `write(done)` is called every minute, on interruption, and at the end. No batch is an error, unless
        other ranks have some.
        """
        seen, done_before, saved_at = 0, done, time.monotonic()
        try:
            for number, batch in enumerate(batches):
                seen += 1
                if number < done_before:
                    skip(batch)
                    if seen == done_before:
                        self.check_skipped(done)
                    continue
                take(batch)
                done = number + 1
                if time.monotonic() - saved_at > CHECKPOINT_SECONDS:
                    write(done)
                    saved_at = time.monotonic()
        except BaseException:
            self._interrupted = done + self.torn
            # A torn state must not replace the last checkpoint, which is whole. Nor must nothing new.
            if not self.torn and not 0 < done == done_before:
                write(done)
            self.torn = False
            raise
        if seen == 0 and not may_be_empty:
            raise InputError("the loader yielded no example: there is nothing to fit")
        if seen < done:
            raise InputError(f"the checkpoint holds {done} batches, but the loader yielded only {seen}")
        if done_before == done and self._checkpoint is not None:
            warn(
                f"{self._checkpoint} holds all {done} batches already, so that nothing was fitted anew: "
                "delete it to fit again"
            )
        write(done)

    def saved(self, path: str | PathLike[str]) -> None:
        """Delete the checkpoint, of all ranks, after the detector was saved to `path`."""
        checkpoints, self._all_checkpoints, self._checkpoint = self._all_checkpoints, [], None
        for checkpoint in checkpoints:
            if checkpoint.resolve() != Path(path).resolve():
                checkpoint.unlink(missing_ok=True)


def _class_names(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the classes, if the metadata has them under "classes"."""
    names = metadata.get("classes")
    return tuple(map(str, names)) if isinstance(names, list | tuple) else ()


def listed(names: list[str], most: int = 8) -> str:
    """The first `most` names with commas between them, and the number of further names."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
