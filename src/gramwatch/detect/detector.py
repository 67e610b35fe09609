"""Detector: the one contract of all methods and guards; the lifecycle, written once.

A detector is fitted on training data, calibrated on held-out data, called on new inputs, saved and loaded.
`Contract` says what a method adds. What only a fit, a calibration or a file needs is imported there.
"""

from collections.abc import Iterable, Mapping
from os import PathLike
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from gramwatch.detect.contract import Contract
from gramwatch.detect.measurement import Detection, Measurement, Verdict
from gramwatch.detect.parts import Contribution
from gramwatch.detect.passes import explained, measure, note_form, plan_for
from gramwatch.detect.progress import MOSTLY
from gramwatch.detect.split import KeptInputs
from gramwatch.errors import InputError, warn
from gramwatch.files import artifact
from gramwatch.inputs.adapters import InputsAdapter, LogitsAdapter, MaskAdapter
from gramwatch.inputs.batches import Inputs, count_examples, on_device
from gramwatch.observe.observation import Observation
from gramwatch.observe.plan import Plan
from gramwatch.watch import Look, Network, unwrap

if TYPE_CHECKING:
    from gramwatch.explain.explained import Explained

_D = TypeVar("_D", bound="Detector")


class Detector(Contract):
    """Tells whether a classifier is looking at something it was never trained on.

    Example:
        >>> detector.fit(train_loader)
        >>> detector.calibrate(validation_loader)
        >>> detection = detector(images)
        >>> detection.is_ood

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

    members: "Mapping[str, Detector]" = MappingProxyType({})

    def __init__(
        self,
        model: nn.Module | Network,
        *,
        level: float = 0.95,
        inputs: InputsAdapter = None,
        logits: LogitsAdapter = None,
        mask: MaskAdapter = None,
    ) -> None:
        super().__init__(Network.of(model, inputs, logits, mask), level)

    # --- what is known so far ------------------------------------------------------------------------

    def to(self: _D, device: torch.device | str) -> _D:
        """Move the network to a device. The fitted tensors follow at the next use."""
        self.model.to(device)
        return self

    @property
    def calibration_scores_(self) -> Tensor:
        """The in-distribution scores that rank, ascending."""
        return self.calibration().scores[:, 0].sort().values

    @property
    def threshold_(self) -> float:
        """The score above which an input is out-of-distribution (Eq. 6)."""
        calibration = self.calibration()
        if self.per_class:
            raise ValueError("with per_class=True classes have thresholds of their own: see detection.is_ood")
        return calibration.threshold(self.level)

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
        from gramwatch.detect import storing
        from gramwatch.detect.distributed import files_of_ranks, together
        from gramwatch.detect.fitting import begin_on_ranks, check_adding, fit_all

        with together(self.model, "fit") as group:
            check_adding(self.leaves, checkpoint is not None)
            files = [] if checkpoint is None else files_of_ranks(checkpoint, group.size)
            own = files[group.rank] if files else None
            begin_on_ranks(group, self.leaves, keep=self._fits.interrupted)
            done, begun = storing.resume(self, own)
            self._fits.begin(own, files, done, begun)

            def write() -> None:
                if own is not None and all(leaf.has_examples for leaf in self.leaves):
                    storing.write(self, own, batches=self._fits.done)

            fit_all([self], loader, progress, self._fits, write, sharded)
            if group.rank == 0:
                self.check_useful()
        return self

    def planned(self, inputs: Inputs) -> Plan:
        """The plan for this detector. It is built at the first batch and kept."""
        if self._plan is None:
            inputs = on_device(inputs, self.model)
            with explained(self.leaves, inputs):
                look = Look(self.network, inputs)
                self.settle(look)
                self._observers = self.leaves
                self._plan = plan_for(self._observers, look)
            note_form(self, inputs)
        return self._plan

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
        from gramwatch.detect import storing

        if self is other:
            raise ValueError("a detector cannot be merged with itself: its examples would count twice")
        if type(other) is not type(self):
            raise ValueError(f"the two are different methods: {self.name} and {other.name}")
        for name, mine, theirs in storing.differences(self, other):
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
        from gramwatch.detect import calibrating
        from gramwatch.detect.distributed import together

        self.check_fitted()
        with together(self.model, "calibrate") as group:
            kept = KeptInputs(seed)
            measurement = self.measure_all(loader, "calibrating", progress, kept, sharded)
            calibrating.calibrate(self, group, measurement, kept, split=split, progress=progress)
        return self

    @torch.inference_mode()
    def calibrate_on(self: _D, measurement: Measurement, *, split: bool = True, seed: int = 0) -> _D:
        """`calibrate` from the measurement of in-distribution data, as `measure_all` returns it.

        There are no inputs to run again. The tolerance of ranks is 64 units in the last place of float32, of
        the magnitude that nine of ten scores do not exceed.
        """
        from gramwatch.detect.calibrating import calibrated

        calibration = calibrated(self, measurement, split, seed)
        self.forget_calibration()
        self._calibration = calibration
        return self

    def __call__(self, inputs: Any) -> Detection:
        """Judge a batch in one forward pass.

        An input gets an infinite score if it is not finite, or if its activations are not finite.
        """
        if self._calibration is None:
            self.calibration()  # raises the error that says what is missing
        if self.network.inputs is not None or not isinstance(inputs, Tensor):
            inputs = self.network.read(inputs)
        # Outside inference mode, the results and the tensors kept on a GPU are ordinary tensors.
        with torch.inference_mode(False), torch.no_grad():
            weight = next(self.network.model.parameters(), None)
            on_gpu = weight is not None and weight.is_cuda
            return self._detection(self._replayed(inputs) if on_gpu else self.judge(self._run(inputs)))

    def _replayed(self, inputs: Inputs) -> Verdict:
        """The verdict on a batch on a GPU, where a guard replays a CUDA graph."""
        return self.judge(self._run(inputs))

    def judge(self, measurement: Measurement) -> Verdict:
        """The verdict from a measurement, with what a detection shows besides the scores."""
        ready, device = self._ready, measurement.logits.device
        if ready is None or ready.device != device:
            ready = self.ready(device)
        verdict = ready.calibration.judged(measurement)
        for name, leaf in (self.members or {"": self}).items():
            if leaf.shows_deviations:
                values = measurement.parts[name].values if name else measurement.values
                return verdict._replace(**leaf.shown(values, verdict.predicted))
        return verdict

    def _detection(self, verdict: Verdict) -> Detection:
        """The result for the user. Counting the inputs that are not finite waits for a GPU."""
        ordinary: list[Any] = [t.clone() if t is not None and t.is_inference() else t for t in verdict]
        verdict = Verdict(*ordinary)
        p_value, *of_members = verdict.p_values.unbind(1)
        detection = Detection(
            logits=verdict.logits,
            predicted=verdict.predicted,
            score=verdict.score,
            p_value=p_value,
            is_ood=verdict.is_ood,
            deviations=verdict.deviations,
            class_support=verdict.class_support,
            parts=dict(zip(self.members, of_members, strict=True)) if self.members else None,
            taps=self.tap_names if self._ready is None else self._ready.tap_names,
        )
        broken = len(verdict.predicted) - int(verdict.finite)
        if broken:
            warn(f"{broken} input(s) with NaN or infinity: their score is infinite")
        return detection

    @torch.inference_mode()
    def measure(self, inputs: Inputs) -> Measurement:
        """The measurement of a batch, from which the calibration computes scores."""
        self.check_fitted()
        return self._run(inputs)

    @torch.inference_mode()
    def _run(self, inputs: Inputs) -> Measurement:
        """Run the network on a batch and measure it."""
        plan = self._plan or self.planned(inputs)
        return measure([self], self._observers, plan.run(inputs, record=self.record_pass))[0]

    def measure_all(
        self,
        loader: Iterable[Any],
        doing: str = "measuring",
        progress: bool = True,
        kept: KeptInputs | None = None,
        sharded: bool | None = None,
    ) -> Measurement:
        """`measure` over a whole loader, on the CPU. `kept` receives a sample of the inputs."""
        from gramwatch.detect.calibrating import measured_all

        def measure(inputs: Inputs) -> dict[str, Measurement]:
            return {"": self.measure(inputs)}

        return measured_all(self.network, loader, measure, doing, progress, kept, sharded)[""]

    # --- explain -------------------------------------------------------------------------------------

    def explain(self, inputs: Any, *, places: bool = True) -> "Explained":
        """Judge a batch and say why: what members, taps, channels and places add to the scores.

        The contributions come from the pass that judges. The map needs a second pass, because the predicted
        class, which decides what is unusual, is known only at the end of the first.

        Args:
            inputs: as for a call.
            places: whether to compute the map, where in the input the contributions come from.

        """
        self.calibration()  # raises the error that says what is missing
        return self.explain_inputs(self.network.read(inputs), places=places)

    def explain_inputs(self, inputs: Inputs, *, places: bool = True) -> "Explained":
        """`explain` for a batch that is the network's input already."""
        from gramwatch.explain.explained import Pass

        ranks = self.calibration().ranks
        inputs = on_device(inputs, self.model)
        with torch.inference_mode(False), torch.no_grad():
            observed: dict[Any, Observation] = {}
            if self.alone:
                measured = self._run(inputs)
            else:
                observed = self._observed(inputs)
                (measured,) = measure([self], list(observed), [list(observed.values())])
            return Pass(
                network=self.network,
                inputs=inputs,
                detection=self._detection(self.judge(measured)),
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

    def contributions(self, measured: Measurement, observed: Mapping[Any, Observation]) -> list[Contribution]:
        """The terms of the score, from the measurement and the observations of a batch."""
        rule = self.calibration(measured.logits.device).rule
        terms = rule.terms(measured)
        if terms is None and self in observed:
            terms = self.terms(observed[self])
        return [Contribution(self.name, self, rule, rule(measured)[:, 0], terms)]

    # --- save and load -------------------------------------------------------------------------------

    def save(self, path: str | PathLike[str]) -> None:
        """Write the detector to one safetensors file. Keep it with the network's checkpoint.

        The file holds a fingerprint of the network, not the network itself.
        """
        from gramwatch.detect import storing

        self.check_fitted()
        storing.write(self, path)
        self._fits.saved(path)

    @classmethod
    def from_artifact(
        cls: type[_D],
        saved: artifact.Saved,
        model: nn.Module | Network,
        accept_other_weights: bool = False,
        check_probe: bool = True,
    ) -> _D:
        """The detector in an opened file; `gramwatch.load` is the short way."""
        from gramwatch.detect import storing

        return storing.restored(cls, saved, model, accept_other_weights, check_probe)


def _class_names(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the classes, if the metadata has them under "classes"."""
    names = metadata.get("classes")
    return tuple(map(str, names)) if isinstance(names, list | tuple) else ()
