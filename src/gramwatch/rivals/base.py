"""What all rivals share: fit, calibrate, judge, save and load, each from one forward pass."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gramwatch import artifact
from gramwatch.batches import Inputs, batches_of
from gramwatch.detector import Detection, check_level, check_same_weights
from gramwatch.errors import CalibrationError, InputError, NotFittedError, warn
from gramwatch.observation import ChannelMeans, Observation, Observer
from gramwatch.threshold import examples_needed, is_above_threshold, p_value, threshold


@dataclass(frozen=True)
class Record:
    """What a reader wants to know of a method before choosing it."""

    title: str
    """How tables call it."""
    paper: str
    """Authors, title, where and when."""
    equation: str
    """The score in one line, as it is computed here: higher is more out-of-distribution."""
    fitted: bool
    """Whether it needs training data."""
    outliers: bool = False
    """Whether it can be tuned on outliers; where the network must be trained for it: trained with them."""
    gradients: bool = False
    """Whether it needs gradients, and so passes of its own."""
    retraining: bool = False
    """Whether the network must be trained for it."""
    cost: str = "none"
    """What judging one input costs beside the forward pass."""
    limits: str = ""
    """Where it fails."""


class Rival(ABC):
    """A detector that judges by what one forward pass shows.

    A method says what it `needs`, how it fits from a sample of training examples, and how it scores. Its
    fitted tensors are attributes that end in an underscore: these are what is saved.

    Args:
        model: any classifier that returns logits. It is not changed.
        level: the share of in-distribution inputs to keep; `1 - level` is the false-alarm rate.
        features: the name of a tap whose channel means are to count as the penultimate features.
        taps: whose channel means are looked at, by methods that do.
        most_examples: how many training examples are kept at most; more are sampled.
        seed: of that sample.

    """

    name: ClassVar[str]
    """How users ask for it."""
    record: ClassVar[Record]
    needs: ClassVar[frozenset[str]] = frozenset()
    """What it looks at beside the logits: see `gramwatch.observation.NEEDS`."""
    settings: ClassVar[tuple[str, ...]] = ()
    """The method's own settings: attributes, and arguments of the same name."""
    running: ClassVar[bool] = False
    """Whether what it learns is a running state: fitting again adds to it, and two can be merged exactly."""

    def __init__(
        self,
        model: nn.Module,
        *,
        level: float = 0.95,
        features: str | None = None,
        taps: str | Iterable[str] = "all",
        most_examples: int = 50_000,
        seed: int = 0,
    ) -> None:
        check_level(level)
        if most_examples < 1:
            raise ValueError(f"most_examples must be at least 1, got {most_examples}")
        self.model, self.level, self.most_examples, self.seed = model, float(level), most_examples, seed
        self.features = features
        self.taps = taps if isinstance(taps, str) else list(taps)
        self.metadata: dict[str, Any] = {}
        self._sample: _Sample | None = None
        self._fitted = not self.record.fitted
        self._scores: Tensor | None = None
        self.width_: Tensor | None = None  # of the features, after `fit`
        self.tuned_: Tensor | None = None  # true after `tune`, by methods that have it
        self._observer = Observer(model, self.needs, taps=taps, features=features)

    # --- what a method defines -----------------------------------------------------------------------

    def _fit(self, training: Observation) -> None:
        """Learn from a sample of the training examples, all finite."""
        raise NotImplementedError(f"{self.name} says that it is fitted, but not how")

    @abstractmethod
    def score(self, observation: Observation) -> Tensor:
        """The score of each example, `(N,)`: higher is more out-of-distribution."""

    @property
    def gradients(self) -> bool:
        """Whether judging needs gradients, and so passes of its own."""
        return self.record.gradients

    @property
    def alone(self) -> bool:
        """Whether judging takes passes of its own: `score_inputs`, not `judged`."""
        return self.gradients

    @property
    def trained_on_outliers(self) -> bool:
        """Whether its network was trained with outliers: a table has to say so."""
        return self.record.retraining and self.record.outliers

    @property
    def tuned_on_outliers(self) -> bool:
        """Whether it has itself seen outliers: a table has to say so."""
        return self.tuned_ is not None and bool(self.tuned_)

    @property
    def says_nothing(self) -> str:
        """Why every input gets the same score, after a fit to data of no use; empty otherwise."""
        return ""

    # --- fit -----------------------------------------------------------------------------------------

    def fit(self, loader: Iterable[Any], *, progress: bool = True) -> "Rival":
        """Take in what training data looks like; nothing, if the method needs none."""
        if self.record.fitted:
            for inputs, labels in batches_of(loader, self.name, progress):
                self.take(self._observer(inputs, labels))
        self.finish()
        if self.says_nothing:
            self._fitted = False
            raise InputError(self.says_nothing)
        return self

    def take(self, observation: Observation) -> None:
        """Take in one batch of training examples; those that are not finite are left out."""
        if self._sample is None:
            self._sample = _Sample(self.most_examples, self.seed)
        self._sample.add(observation.kept(self.needs))

    def means_of(self, inputs: Inputs) -> ChannelMeans:
        """What gathers the channel means at this method's taps in another's pass over these inputs."""
        return self._observer.means_of(inputs)

    def finish(self) -> None:
        """Learn from what was taken in."""
        self._scores = None
        if self.record.fitted:
            self._learn()
        self._fitted = True

    def _learn(self) -> None:
        if self._sample is None or not len(self._sample):
            raise InputError(f"{self.name} has seen no finite training example: there is nothing to fit")
        training = self._sample.observation()
        if training.features is not None:
            self.width_ = torch.tensor(training.features.shape[1])
        with torch.inference_mode():
            self._fit(training)
        self._sample = None

    def merge(self, other: "Rival") -> "Rival":
        """Join what another detector of the same network, fitted on other data, has seen.

        Only methods for which this is exact can be merged. The calibration must be done anew.
        """
        self.check_merge(other)
        if self.record.fitted:
            self._merge(other)
        self._scores = None
        return self

    def check_merge(self, other: "Rival") -> None:
        """Make sure that another detector can be merged into this one."""
        if type(other) is not type(self):
            raise ValueError(f"the two are different methods: {self.name} and {other.name}")
        for name, mine, theirs in self.differing_settings(other):
            raise ValueError(f"the two differ in {name}: {mine!r} and {theirs!r}")
        self.check_fitted()
        other.check_fitted()
        if self.record.fitted and not self.running:
            raise ValueError(
                f"{self.name} cannot be merged: what it learns from two parts of the data does not say what "
                "it would learn from both. Fit it on all the data"
            )
        check_same_weights(self.model, other.model)

    def _merge(self, other: "Rival") -> None:
        """Add what another has learnt."""
        raise NotImplementedError(f"{self.name} says that it can be merged, but not how")

    # --- calibrate and judge -------------------------------------------------------------------------

    def calibrate(self, loader: Iterable[Any], *, progress: bool = True) -> "Rival":
        """Set the threshold from in-distribution data that was not used for training."""
        scores = self.score_all(loader, progress=progress)
        finite = scores[scores.isfinite()]
        if len(finite) < len(scores):
            warn(f"{len(scores) - len(finite)} calibration example(s) with NaN or infinity were left out")
        if len(finite) < examples_needed(self.level):
            raise CalibrationError(
                f"{len(finite)} calibration examples cannot support level {self.level}: "
                f"at least {examples_needed(self.level)} are needed"
            )
        self._scores = finite.sort().values
        return self

    def score_all(self, loader: Iterable[Any], *, progress: bool = True) -> Tensor:
        """The scores of a whole loader, on the CPU."""
        parts = [self.score_inputs(inputs)[1].cpu() for inputs, _ in batches_of(loader, self.name, progress)]
        if not parts:
            raise InputError(f"the loader yielded no example: {self.name} needs some")
        return torch.cat(parts)

    def score_inputs(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The logits and the scores of a batch."""
        self.check_fitted()
        observation = self._observer(inputs)
        return observation.logits, self.judged(observation)

    @torch.inference_mode()
    def judged(self, observation: Observation) -> Tensor:
        """The scores in float64, infinite where the example or what was seen of it is not finite."""
        self.check_fitted()
        if self.alone:
            means = "gradients at the inputs" if self.gradients else "a tensor inside the network"
            raise InputError(
                f"{self.name} judges by {means}, which an observation does not show: "
                "call detector.score_inputs(inputs)"
            )
        if self.width_ is not None and observation.features is not None:
            now, then = observation.features.shape[1], int(self.width_)
            if now != then:
                raise InputError(f"{self.name} was fitted on {then} features, {now} were given")
        return self._infinite_where_broken(self.score(observation), observation.finite)

    @staticmethod
    def _infinite_where_broken(score: Tensor, finite: Tensor | None) -> Tensor:
        score = score.double()
        # Over True a score stays, over False it is infinite or NaN: one operation on a GPU, not several.
        return (score if finite is None else score / finite).nan_to_num(torch.inf, torch.inf, torch.inf)

    def __call__(self, inputs: Inputs) -> Detection:
        """Judge a batch."""
        self._calibrated()
        logits, score = self.score_inputs(inputs)
        calibration = self._scores = self._calibrated().to(score.device)
        score, logits = score.clone(), logits.clone()
        return Detection(
            logits=logits,
            predicted=logits.argmax(1),
            score=score,
            p_value=p_value(score, calibration),
            is_ood=is_above_threshold(score, calibration, self.level),
        )

    @property
    def calibration_scores_(self) -> Tensor:
        """The in-distribution scores that rank, ascending."""
        return self._calibrated().clone()

    @property
    def threshold_(self) -> float:
        """The score above which an input is out-of-distribution."""
        return threshold(self._calibrated(), self.level)

    def check_fitted(self) -> None:
        """It has been fitted, if it has to be, or a plain error."""
        if not self._fitted:
            raise NotFittedError(f"{self.name} is not fitted: call detector.fit(train_loader) first")

    def _calibrated(self) -> Tensor:
        self.check_fitted()
        if self._scores is None:
            raise NotFittedError(
                f"{self.name} is not calibrated: call detector.calibrate(validation_loader) after fitting"
            )
        return self._scores

    def __repr__(self) -> str:
        state = "not fitted" if not self._fitted else "not calibrated"
        if self._scores is not None:
            state = f"threshold {self.threshold_:.4g}"
        return f"{type(self).__name__}({type(self.model).__name__}: {state})"

    # --- save and load -------------------------------------------------------------------------------

    def differing_settings(self, other: "Rival") -> Iterator[tuple[str, Any, Any]]:
        """Each setting in which two detectors differ: its name, this one's value, the other's."""
        theirs = other._all_settings()
        for name, mine in self._all_settings().items():
            if mine != theirs[name]:
                yield name, mine, theirs[name]

    def _all_settings(self) -> dict[str, Any]:
        names = ("level", "features", "taps", "most_examples", "seed", *self.settings)
        return {name: getattr(self, name) for name in names}

    def state(self) -> dict[str, Tensor]:
        """The fitted tensors, by name."""
        return {
            name: value
            for name, value in vars(self).items()
            if name.endswith("_") and isinstance(value, Tensor)
        }

    def save(self, path: str | PathLike[str]) -> None:
        """Write the detector to one safetensors file. The network itself is not saved."""
        self.check_fitted()
        header, tensors = self.contents()
        more = {"network": artifact.fingerprint(self.model), "metadata": self.metadata}
        artifact.write(path, header | more, tensors)

    def contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What is to be saved, but for the network's fingerprint: plain values, and tensors."""
        tensors = {f"state.{name}": tensor for name, tensor in self.state().items()}
        if self._scores is not None:
            tensors["calibration.scores"] = self._scores
        header = {
            "detector": self.name,
            "settings": self._all_settings(),
            "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
        }
        return header, tensors

    @classmethod
    def from_artifact(
        cls, saved: artifact.Saved, model: nn.Module, accept_other_weights: bool = False
    ) -> "Rival":
        """The detector in an opened file."""
        return saved.restored(cls, model, accept_other_weights)

    @classmethod
    def described(
        cls, header: Mapping[str, Any], model: nn.Module
    ) -> "tuple[Rival, dict[str, tuple[int, ...]]]":
        """The detector without its tensors, and the names and shapes that these must have."""
        for name in header["shapes"]:
            if name != "calibration.scores" and not (name.startswith("state.") and name.endswith("_")):
                raise ValueError(f"the tensor '{name}' does not belong there")
        shapes = {name: tuple(shape) for name, shape in header["shapes"].items()}
        return cls(model, **header["settings"]), shapes

    def restore(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take over the tensors of a file."""
        self._scores = tensors.get("calibration.scores")
        self._set(
            {name.removeprefix("state."): t for name, t in tensors.items() if name.startswith("state.")}
        )
        self._fitted = True

    def take_over(self, before: "Rival") -> None:
        """Go on from what another detector has seen."""
        self._set(before.state())

    def _set(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in state.items():
            setattr(self, name, tensor)


class _Sample:
    """A uniform sample of the examples seen so far, of bounded size (reservoir sampling), on the CPU."""

    def __init__(self, most: int, seed: int) -> None:
        self._most, self._generator = most, torch.Generator().manual_seed(seed)
        self._parts: list[Observation] = []
        self._keys: list[Tensor] = []

    def __len__(self) -> int:
        return sum(len(keys) for keys in self._keys)

    def add(self, observation: Observation) -> None:
        """Every example draws a key; those with the smallest keys stay."""
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
        """The sample, in the order in which it was seen."""
        self._shrink()
        return self._parts[0]
