"""Method: a detector that judges by one score. This file has its needs, its states and its files."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from gramwatch.detect.detector import Detector
from gramwatch.detect.measurement import AsMeasured, Calibration, Measurement, facts_of
from gramwatch.detect.passes import explained
from gramwatch.errors import InputError
from gramwatch.files import artifact
from gramwatch.files.artifact import Field
from gramwatch.inputs.adapters import InputsAdapter, LogitsAdapter, MaskAdapter
from gramwatch.inputs.batches import Inputs, on_device
from gramwatch.observe.needs import Needs
from gramwatch.observe.observation import Observation
from gramwatch.watch import Network

_M = TypeVar("_M", bound="Method")
NEEDS = ("features", "head", "channel_means")
"""The parts of an observation that a method may use, apart from the logits."""
REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}
"""The functions that join two states, by the name in `Field.reduce`."""


@dataclass(frozen=True)
class Record:
    """The facts by which a reader chooses a method."""

    title: str
    """The name in tables."""
    paper: str
    """Authors, title, where and when."""
    equation: str
    """The score in one line, as it is computed here: higher is more out-of-distribution."""
    fitted: bool
    """Whether it needs training data."""
    outliers: bool = False
    """Whether it can be tuned on outliers. If `retraining`: whether the network is trained with outliers."""
    gradients: bool = False
    """Whether it needs gradients. Then it runs forward passes of its own."""
    retraining: bool = False
    """Whether the network must be trained for it."""
    cost: str = "none"
    """The cost of judging one input, without the forward pass."""
    limits: str = ""
    """Where it fails."""


class Method(Detector):
    """A detector that judges by one score, computed from one forward pass.

    A method declares what it looks at, how it learns from a sample of training examples, and how it scores.
    Its fitted tensors are attributes whose names end in an underscore. The file holds these tensors.

    Args:
        model: any classifier that returns logits. It is not changed.
        level: the share of in-distribution inputs to keep; `1 - level` is the false-alarm rate.
        inputs: how a batch becomes the network's input, as for `Guard`.
        logits: where the logits are in the network's output, as for `Guard`.
        mask: which places of an input are padding, as for `Guard`.
        features: the name of a tap. Its channel means are used as the penultimate features.
        taps: the taps whose channel means are used, by methods that look at channel means.
        most_examples: the most training examples to keep. Of more, a random sample is kept.
        seed: the seed of that sample.

    """

    record: ClassVar[Record]
    looks_at: ClassVar[frozenset[str]] = frozenset()
    """The parts of `NEEDS` that it uses."""
    settings: ClassVar[tuple[str, ...]] = ()
    """The method's own settings: attributes, and arguments of the same name."""
    kept: ClassVar[artifact.Shapes] = {}
    """The learnt tensors of the file. A size called "width" is the number of features."""
    running: ClassVar[bool] = False
    """Whether it learns by running states: fitting again adds to them, and two detectors merge exactly.
    `take` hands the states of one batch to `add_states`. A state called `count_` counts the examples."""
    rule_kind: ClassVar[type[Any]] = AsMeasured
    """The kind of its `Rule`. Most methods measure their score itself."""

    def __init__(
        self,
        model: nn.Module | Network,
        *,
        level: float = 0.95,
        inputs: InputsAdapter = None,
        logits: LogitsAdapter = None,
        mask: MaskAdapter = None,
        features: str | None = None,
        taps: str | Iterable[str] = "all",
        most_examples: int = 50_000,
        seed: int = 0,
    ) -> None:
        unknown = self.looks_at - set(NEEDS)
        if unknown:
            raise ValueError(f"a method cannot look at {sorted(unknown)}, only at {', '.join(NEEDS)}")
        if most_examples < 1:
            raise ValueError(f"most_examples must be at least 1, got {most_examples}")
        self.called = self.name
        self.most_examples, self.seed, self.features = most_examples, seed, features
        self.selection = taps if isinstance(taps, str) else list(taps)
        self.width_: Tensor | None = None  # of the features, after `fit`
        self._known_width: tuple[Tensor | None, int] = (None, 0)
        self.tuned_: Tensor | None = None  # true after `tune`, by methods that have it
        for name in self.kept:
            setattr(self, name, None)
        super().__init__(model, level=level, inputs=inputs, logits=logits, mask=mask)

    def _begin(self) -> None:
        self._sample: _Sample | None = None
        self._fitted = not self.learns
        self._copies: dict[str, tuple[Tensor, Tensor]] = {}
        super()._begin()

    # --- what a method defines -----------------------------------------------------------------------

    def _fit(self, training: Observation) -> None:
        """Learn from a sample of the training examples, all finite."""
        raise NotImplementedError(f"{self.name} says that it is fitted, but not how")

    @abstractmethod
    def score(self, observation: Observation) -> Tensor:
        """The score of each example, `(N,)`: higher is more out-of-distribution."""

    @property
    def gradients(self) -> bool:
        """Whether judging needs gradients. Then it runs forward passes of its own."""
        return self.record.gradients

    @property
    def alone(self) -> bool:  # type: ignore[override]
        """Whether judging runs forward passes of its own: `score_inputs`, not `judged`."""
        return self.gradients

    # --- what follows from that ----------------------------------------------------------------------

    @property
    def title(self) -> str:
        """The name in tables."""
        return self.record.title

    def rule(self) -> Any:
        """The rule that turns a measurement into a score, not fitted yet."""
        return self.rule_kind()

    @property
    def learns(self) -> bool:
        """Whether it needs training data."""
        return self.record.fitted

    @property
    def is_fitted(self) -> bool:
        """Whether it is fitted, or needs no fit."""
        return self._fitted

    @property
    def trained_on_outliers(self) -> bool:  # type: ignore[override]
        """Whether its network was trained with outliers. Tables must say so."""
        return self.record.retraining and self.record.outliers

    @property
    def tuned_on_outliers(self) -> bool:  # type: ignore[override]
        """Whether it was tuned on outliers. Tables must say so."""
        return self.tuned_ is not None and bool(self.tuned_)

    @property
    def needs(self) -> Needs:
        """What it needs from a forward pass."""
        where = self.selection if isinstance(self.selection, str) else tuple(self.selection)
        features = bool(self.looks_at & {"features", "head"})
        return Needs(
            features, self.features if features else None, where if "channel_means" in self.looks_at else None
        )

    # --- fit -----------------------------------------------------------------------------------------

    def check_useful(self) -> None:
        """Refuse a fit after which every input would get the same score."""
        if self.says_nothing:
            self._fitted = False
        super().check_useful()

    def note(self, observation: Observation) -> None:
        """Note the number of features."""
        if observation.features is not None:
            self.width_ = torch.tensor(observation.features.shape[1])

    def take(self, observation: Observation) -> Tensor | int:
        """Take in one batch of training examples. Examples that are not finite are left out."""
        if self._sample is None:
            self._sample = _Sample(self.most_examples, self.seed)
        self._sample.add(observation.kept)
        return 0 if observation.finite is None else (~observation.finite).sum()

    def finish(self, left_out: int = 0) -> None:
        """Learn from the sample of the batches that were taken in. Running states are complete already."""
        if self.learns and not self._has_states:
            if self._sample is None or not len(self._sample):
                raise InputError(f"{self.name} has seen no finite training example: there is nothing to fit")
            with torch.inference_mode():
                self._fit(self._sample.observation())
            self._sample = None
        self._fitted = True

    @property
    def _has_states(self) -> bool:
        """Whether it has learnt running states, of one example at least."""
        count: Tensor | None = getattr(self, "count_", None)
        learnt = any(getattr(self, name) is not None for name in self.kept)
        return self.running and learnt and (count is None or bool(count.any()))

    def reset(self) -> "Method":
        """Forget all training and calibration data. Settings stay."""
        for name in self.state():
            setattr(self, name, None)
        return super().reset()

    def check_merge(self, other: Detector) -> None:
        """Make sure that another detector can be merged into this one."""
        super().check_merge(other)
        if self.why_not_merged:
            raise ValueError(f"{self.name} cannot be merged: {self.why_not_merged}")

    @property
    def why_not_merged(self) -> str:  # type: ignore[override]
        """Why two fits cannot become one; empty if they can."""
        if not self.learns or self.running:
            return ""
        return (
            "what it learns from two parts of the data does not say what it would learn from both. Fit it on "
            "all the data"
        )

    def _merge(self, other: Any) -> None:
        if self.learns:
            self.add_states(other.state())

    def add_states(self, states: Mapping[str, Tensor]) -> None:
        """Add the states of further training examples. The fields in `kept` say how.

        The result is on the device of the added states. This never waits for a GPU.
        """
        how = {name: field.reduce for name, field in self.kept.items() if field.reduce is not None}
        if not how:
            raise NotImplementedError(f"{self.name} says that it can be merged, but not how")
        if not how.keys() & states.keys():
            return  # of no examples
        before = {name: getattr(self, name) for name in how}
        begun = any(state is not None for state in before.values())
        for name in how:
            if name not in states or (begun and before[name] is None):
                missing = {"count_": "its number of examples", "keys_": "the keys of its sample"}
                raise InputError(
                    f"{self.name} was saved without {missing.get(name, name)}, so nothing can be added: fit "
                    "a new one"
                )
        joined = {name: states[name] for name in how}
        for name, rule in how.items() if begun else ():
            old, new = before[name].to(states[name].device), states[name]
            if rule == "mean":
                count = before["count_"].to(new.device) + states["count_"]
                joined[name] = old + (new - old) * (states["count_"] / count.clamp_min(1).double())
            elif rule == "sample":
                joined[name] = torch.cat([old, new])
            else:
                joined[name] = REDUCTIONS[rule](old, new)
        if "sample" in how.values():
            order = joined["keys_"].argsort(stable=True)
            keys = joined["keys_"][order]
            first = torch.ones_like(keys, dtype=torch.bool)  # of the copies of an example
            first[1:] = keys[1:] != keys[:-1]
            rows = order[first][: self.most_examples]
            joined |= {name: joined[name][rows] for name, rule in how.items() if rule == "sample"}
        self._set(joined)

    # --- judge ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def measured(self, observation: Observation) -> Measurement:
        """The score of each example, in float64, and whether it is finite."""
        if not self._fitted:
            self.check_fitted()
        if self.width_ is not None and observation.features is not None:
            if self._known_width[0] is not self.width_:  # read once: reading waits for a GPU
                self._known_width = (self.width_, int(self.width_))
            now, then = observation.features.shape[1], self._known_width[1]
            if now != then:
                raise InputError(f"{self.name} was fitted on {then} features, {now} were given")
        score = self._infinite_where_broken(self.score(observation), observation.finite)
        return Measurement(score.unsqueeze(1), observation.logits, score < torch.inf)

    def _run(self, inputs: Inputs) -> Measurement:
        if not self.alone:
            return super()._run(inputs)
        with explained([self], inputs):
            logits, score = self.score_inputs(inputs)
        return Measurement(score.unsqueeze(1), logits, score < torch.inf)

    def score_inputs(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The logits and the scores of a batch."""
        self.check_fitted()
        measured = super()._run(inputs)
        return measured.logits, self.scored(measured)

    def score_all(self, loader: Iterable[Any], *, progress: bool = True) -> Tensor:
        """The scores of a whole loader, on the CPU."""
        return self.scored(self.measure_all(loader, self.name, progress))

    def scored(self, measured: Measurement) -> Tensor:
        """The scores of a measurement, `(N,)`. If the method has a rule, the detector must be calibrated."""
        rule = self.rule()
        if rule.standardises:
            rule = self.calibration(measured.values.device).rule
        scores: Tensor = rule(measured)[:, 0]
        return scores

    def observe(self, inputs: Inputs) -> Observation:
        """The observation of one forward pass."""
        inputs = on_device(inputs, self.model)
        return self.planned(inputs)(inputs)[0]

    def differentiable(self, inputs: Inputs) -> Observation:
        """The observation of one forward pass. It can be differentiated with respect to the inputs."""
        inputs = on_device(inputs, self.model)
        return self.planned(inputs.detach()).differentiable(inputs)[0]

    @torch.inference_mode()
    def judged(self, observation: Observation) -> Tensor:
        """The scores in float64. They are infinite if the example or its observation is not finite."""
        self.check_fitted()
        if self.alone:
            raise InputError(
                f"{self.name} judges by gradients at the inputs, which an observation does not show: "
                "call detector.score_inputs(inputs)"
            )
        return self.scored(self.measured(observation))

    def on(self, device: torch.device, name: str) -> Tensor:
        """A fitted tensor on a device. The copy is kept there."""
        tensor: Tensor = getattr(self, name)
        if tensor.device == device:
            return tensor
        original, copy = self._copies.get(name, (None, tensor))
        if original is not tensor or copy.device != device:
            copy = tensor.to(device)
            self._copies[name] = (tensor, copy)
        return copy

    @staticmethod
    def _infinite_where_broken(score: Tensor, finite: Tensor | None) -> Tensor:
        score = score.double()
        # Divided by True, a score stays. Divided by False, it is infinite or NaN. This is one GPU operation.
        return (score if finite is None else score / finite).nan_to_num(torch.inf, torch.inf, torch.inf)

    # --- save and load -------------------------------------------------------------------------------

    def settings_as_json(self) -> dict[str, Any]:
        """The arguments of its constructor."""
        shared = {
            "level": self.level,
            "features": self.features,
            "taps": self.selection,
            "most_examples": self.most_examples,
            "seed": self.seed,
        }
        return shared | {name: getattr(self, name) for name in self.settings}

    def state(self) -> dict[str, Tensor]:
        """The fitted tensors, by name."""
        return {
            name: value
            for name, value in vars(self).items()
            if name.endswith("_") and isinstance(value, Tensor)
        }

    def contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The contents of its file: plain values, and tensors."""
        tensors = {f"state.{name}": tensor for name, tensor in self.state().items()}
        if self._calibration is not None:
            tensors |= self._calibration.tensors()
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        header = {"detector": self.name, "settings": self.settings_as_json(), "shapes": shapes}
        if self._calibration is not None:
            header["calibration"] = facts_of(self._calibration.how)
        return header, tensors

    @classmethod
    def described(
        cls: "type[_M]", header: Mapping[str, Any], model: nn.Module | Network
    ) -> "tuple[_M, artifact.Shapes]":
        """The detector without its tensors, and the fields that its tensors must match."""
        fields = {f"state.{name}": field for name, field in cls.fields().items()}
        fields |= Calibration.fields(cls.rule_kind, cls.values_in(header), "ranking")
        artifact.check_settings(cls, header["settings"])
        return cls(model, **header["settings"]), artifact.resolved(fields, artifact.shapes_of(header))

    def restore(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Set the tensors of a file."""
        scores = tensors.get("calibration.scores")
        if scores is not None:
            how = header.get("calibration", {"split": False, "seed": 0, "examples": len(scores)})
            self._calibration = Calibration.loaded(self.rule(), tensors, self.level, how)
        state = {name.removeprefix("state."): t for name, t in tensors.items() if name.startswith("state.")}
        fields = self.fields()
        for name, tensor in state.items():
            for size, field in zip(tensor.shape, fields[name].shape, strict=True):
                if field == "width" and size != int(state["width_"]):
                    raise ValueError(f"{name} is of {size} features, not of {int(state['width_'])}")
        self._set(state)
        self._check_state()
        self._fitted = all(name in state or field.optional for name, field in fields.items())

    @classmethod
    def fields(cls) -> artifact.Shapes:
        """The fields of the tensors that `state` has after `fit`: those in `kept`, and shared ones."""
        shared = {"tuned_": Field((), torch.bool, optional=True)}
        if cls.record.fitted and "features" in cls.looks_at:
            shared["width_"] = Field((), torch.int64, artifact.POSITIVE)
        return {**shared, **cls.kept}

    def _check_state(self) -> None:
        """Refuse tensors of a file that do not fit each other or the settings."""
        return  # for most methods the check of the shapes is enough

    def take_over(self, before: "Method") -> None:
        """Continue from the state of another detector."""
        self._set(before.state())

    def adopt(self, finished: "Method") -> None:
        """Take over the finished fit of another detector."""
        super().adopt(finished)
        self._fitted = finished.is_fitted

    def _set(self, state: Mapping[str, Tensor]) -> None:
        vars(self).update(state)


class _Sample:
    """A uniform sample of the examples seen so far, of bounded size (reservoir sampling), on the CPU."""

    def __init__(self, most: int, seed: int) -> None:
        self._most, self._generator = most, torch.Generator().manual_seed(seed)
        self._parts: list[Observation] = []
        self._keys: list[Tensor] = []

    def __len__(self) -> int:
        return sum(len(keys) for keys in self._keys)

    def add(self, observation: Observation) -> None:
        """Add a batch. Every example draws a random key, and the examples with the smallest keys stay."""
        self._parts.append(observation)
        self._keys.append(torch.rand(len(observation), generator=self._generator, dtype=torch.float64))
        if len(self) > 2 * self._most:
            self._shrink()

    def _shrink(self) -> None:
        keys, all_parts = torch.cat(self._keys), Observation.joined(self._parts)
        if len(keys) > self._most:
            kept = keys.topk(self._most, largest=False).indices.sort().values
            keys, all_parts = keys[kept], all_parts[kept]
        self._keys, self._parts = [keys], [all_parts]

    def observation(self) -> Observation:
        """The sample, in the order of the loader."""
        self._shrink()
        return self._parts[0]
