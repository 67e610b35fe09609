"""Contract: what a method or a guard says of itself. `Detector` makes the lifecycle of it.

A method adds four things: what it needs from a pass, how it learns from an observation, what it measures, and
the rule that turns its measurement into a score.
"""

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gramwatch.detect.measurement import AsMeasured, Calibration, Measurement
from gramwatch.detect.parts import Part
from gramwatch.detect.progress import Counted, Fits
from gramwatch.detect.split import KeptInputs
from gramwatch.errors import InputError, NotFittedError
from gramwatch.files import artifact
from gramwatch.inputs.batches import Inputs, Signature
from gramwatch.observe.needs import Needs, Statistics
from gramwatch.observe.observation import Observation
from gramwatch.observe.plan import Plan
from gramwatch.watch import Look, Network, Taps

if TYPE_CHECKING:
    from gramwatch.detect.distributed import Group

_C = TypeVar("_C", bound="Contract")


class Ready(NamedTuple):
    """What every batch needs of a calibrated detector."""

    device: torch.device
    calibration: Calibration
    """The calibration on the device."""
    tap_names: tuple[str, ...] | None
    """The names of the taps whose deviations a detection shows."""


class Contract(Part):
    """What a method or a guard says of itself.

    Args:
        network: the network that is judged.
        level: the share of in-distribution inputs to keep; `1 - level` is the false-alarm rate.

    """

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
    record_pass: bool | None = False
    """Whether a GPU replays the forward pass as a CUDA graph: see `Guard.record_pass`."""
    has_examples: bool = True
    """Whether an unfinished fit has anything to save."""
    says_nothing: str = ""
    """Why every input gets the same score after this fit; empty if scores differ."""
    why_not_merged: str = ""
    """Why two fits cannot become one; empty if they can."""
    why_no_member: str = ""
    """Why a guard cannot have it as a member; empty if it can."""
    sees_differences: bool = True
    """Whether its training examples differ. If they do not, calibration data cannot be told from them."""
    not_finite_at: str = ""
    """For a warning: the first tap that was not finite for a training example. Empty if unknown."""
    called: str = ""
    """The detector in the sentences of errors. Empty: its type."""
    measured_by_kernels: ClassVar[bool] = False
    """Whether `measured` runs kernels of its own. A guard on a GPU calls it before its CUDA graph."""
    shows_deviations: ClassVar[bool] = False
    """Whether a detection shows its values: see `shown`."""
    stands_beside_baseline: ClassVar[bool] = False
    """Whether `evaluate` adds the softmax baseline to the table of this detector."""
    members: "Mapping[str, Contract]" = MappingProxyType({})
    """The members of a guard, by name. Others have none."""

    def __init__(self, network: Network, level: float) -> None:
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, got {level}")
        self.network = network
        self.level = float(level)
        self.metadata: dict[str, Any] = {}
        self._begin()

    def _begin(self) -> None:
        """Start without training data, plan and calibration."""
        self._fits = Fits()
        self._examples = Counted()
        self._plan: Plan | None = None
        self._observers: tuple[Contract, ...] = ()  # the plan's detectors, in its order
        self._recipe: Any = None  # of the probe's input
        self._form: Signature | None = None  # of the inputs of the fit, if they must have it
        self.forget_calibration()

    # --- what it needs, and what it knows ------------------------------------------------------------

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

    @property
    def tap_names(self) -> tuple[str, ...] | None:
        """The names of the taps whose deviations a detection shows."""
        return next((m.tap_names for m in self.members.values() if m.shows_deviations), None)

    @property
    def model(self) -> nn.Module:
        """The network that is judged."""
        return self.network.model

    @property
    def leaves(self) -> "tuple[Contract, ...]":
        """The detectors that receive observations: this detector, or the members of a guard."""
        return tuple(self.members.values()) or (self,)

    @property
    def counted(self) -> Counted:
        """The training examples of the fit: their number, and a sample of their checksums."""
        return self.leaves[0]._examples

    def reset(self: _C) -> _C:
        """Forget all training and calibration data. The settings stay."""
        self._begin()
        return self

    def forget_calibration(self) -> None:
        """Forget the calibration, which no longer holds after further training data."""
        self._calibration: Calibration | None = None
        self._ready: Ready | None = None

    def check_fitted(self) -> None:
        """Raise an error if the detector is not fitted."""
        if not self.is_fitted:
            called = self.called or f"this {type(self).__name__}"
            raise NotFittedError(f"{called} is not fitted: call detector.fit(train_loader) first")

    def calibration(self, device: torch.device | None = None) -> Calibration:
        """The calibration, or an error. With a device, a copy on that device, which is kept."""
        if self._calibration is None:
            self.check_fitted()
            called = self.called or f"this {type(self).__name__}"
            raise NotFittedError(
                f"{called} is not calibrated: call detector.calibrate(validation_loader) after fitting"
            )
        return self._calibration if device is None else self.ready(device).calibration

    def ready(self, device: torch.device) -> Ready:
        """What every batch needs of a calibrated detector, on a device. It is prepared once."""
        if self._ready is None or self._ready.device != device:
            calibration = self.calibration().to(device)
            self._ready = Ready(device, calibration, self.tap_names)
        return self._ready

    # --- learn ---------------------------------------------------------------------------------------

    def settle(self, look: Look) -> None:
        """At the first batch, find out which members this network supports."""

    def use(self, plan: Plan) -> None:
        """Take over what the detector keeps of a new plan: Gram keeps the taps."""

    def note(self, observation: Observation) -> None:
        """Note the form of a batch of training examples, just before `take`."""

    def take(self, observation: Observation) -> Tensor | int:
        """Learn from one batch of training examples. Return how many examples are not finite and left out."""
        raise TypeError(f"{self.name} learns by its members")

    def finish(self, left_out: int = 0) -> None:
        """Complete the fit after the last batch. `left_out` examples were not finite."""

    def check_useful(self) -> None:
        """Refuse a fit after which every input gets the same score."""
        if self.says_nothing:
            raise InputError(self.says_nothing)

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

    # --- calibrate and judge -------------------------------------------------------------------------

    def measured(self, observation: Observation) -> Measurement:
        """The measurement of a batch."""
        raise TypeError(f"{self.name} is measured by its members: call {self.name.lower()}.measure(inputs)")

    @abstractmethod
    def measure(self, inputs: Inputs) -> Measurement:
        """The measurement of a batch, from which the calibration computes scores."""

    def rule(self) -> Any:
        """The `Rule` that turns a measurement into a score, not fitted yet."""
        return AsMeasured()

    def member_rule(self) -> Any:
        """The rule as a member of a guard, not fitted yet."""
        return self.rule()

    def check_calibration(self, measured: Measurement) -> None:
        """Refuse calibration data that cannot calibrate, such as training data."""

    def check_rule(self, rule: Any) -> None:
        """Warn of taps or members that a fitted rule leaves out."""

    def rehearsed(
        self,
        calibration: Calibration,
        standard: Measurement,
        kept: KeptInputs,
        group: "Group",
        progress: bool,
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

    def shown(self, values: Tensor, predicted: Tensor) -> dict[str, Tensor]:
        """What a detection shows besides the scores, by a detector with `shows_deviations`."""
        raise NotImplementedError(f"{self.name} shows no deviations")

    def tables(self) -> list[Tensor]:
        """The fitted tensors that kernels of its own read."""
        return []

    # --- save and load -------------------------------------------------------------------------------

    @abstractmethod
    def settings_as_json(self) -> dict[str, Any]:
        """The arguments of the constructor as plain values, without the network and its adapters."""

    @abstractmethod
    def contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What to save: plain values, and tensors. `save` adds the entries that every file has."""

    @classmethod
    @abstractmethod
    def described(
        cls: "type[_C]", header: Mapping[str, Any], model: nn.Module | Network
    ) -> "tuple[_C, artifact.Shapes]":
        """The detector without its tensors, and the fields that its tensors must match."""

    @abstractmethod
    def restore(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Set the tensors from a file."""

    @classmethod
    def values_in(cls, header: Mapping[str, Any]) -> int:
        """The number of values that it measures, from its part of a file."""
        return 1
