"""Guard: Gram, which sees texture, joined with scores that see meaning, from one forward pass.

The rule is in `joint`, the ranks are in `threshold`; here is the object a user holds.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gramwatch import artifact
from gramwatch.artifact import Field
from gramwatch.batches import Inputs, on_device, on_device_ahead
from gramwatch.detector import (
    Detection,
    Fits,
    GramDetector,
    Measurement,
    check_deviating,
    check_enough,
    check_level,
    check_not_itself,
    how_many_rank,
)
from gramwatch.deviation import TotalDeviation
from gramwatch.errors import ArtifactError, InputError, NoTapError, NotFittedError, TapError, warn
from gramwatch.joint import Calibration, JointMeasurement, JointRule
from gramwatch.methods import METHODS, TRAINED
from gramwatch.methods.base import Method
from gramwatch.replay import Nest, Replay
from gramwatch.taps import Network, find_head, find_taps, unwrap
from gramwatch.taps.running import InputsAdapter, LogitsAdapter
from gramwatch.threshold import Ranks, threshold
from gramwatch.watch import Seen, Single, Watch

MEMBERS = ("gram", "early_mahalanobis", "class_ratio", "energy")
"""Whose scores are joined, unless others are named."""
SHRINK = 50
"""Of how many examples the mean over all taps is worth, beside the calibration examples: `TotalDeviation`."""
STANDARD = {
    "median": artifact.FINITE,
    "tail": artifact.POSITIVE_OR_INFINITE,
    "lowest": artifact.FINITE,
}
"""What scores are standardised by, and saved."""
MOST_CLASSES = 2**24
"""A file with more classes is refused."""
SINGLES: dict[str, type[Single]] = {GramDetector.__name__: GramDetector, **METHODS, **TRAINED}
"""Every detector that looks for itself, by what its file calls it."""


class Guard:
    """Tells whether a classifier is looking at something it was never trained on, by several scores at once.

    Gram sees texture, early Mahalanobis what the network makes of it on the way, class ratio and energy what
    comes out in the end. Each is standardised on in-distribution data, and their sum is ranked: see
    docs/guard.md.

    Example:
        >>> guard = gramwatch.Guard(model)
        >>> guard.fit(train_loader)
        >>> guard.calibrate(validation_loader)
        >>> found = guard(images)
        >>> found.is_ood, found.parts

    Args:
        model: any classifier that returns logits. It is not changed.
        taps: which tensors Gram watches, as for `GramDetector`.
        orders: the orders of the Gram matrices, P.
        statistic: of Gram, as for `GramDetector`.
        storage: of Gram's bounds, as for `GramDetector`.
        level: the share of in-distribution inputs to keep; `1 - level` is the false-alarm rate.
        per_class: let that rate hold for each group of predicted classes, not just on the whole. A class is
            a group of its own if at least 100 examples of the half that standardises are predicted to be of
            it; rarer classes share one. `groups_` says which.
        members: whose scores are joined: `"gram"`, and names of `gramwatch.methods.METHODS` that need no
            passes of their own. Those that look at the features are left out, with a warning, where the
            network's logits are not made by one linear layer; those that look at taps, where it has none.
        inputs: how a batch becomes the network's input, where it is not a tensor, a tuple whose first item is
            the input, or a mapping of keyword arguments: a function of the batch, or a key.
        logits: where the logits are in the network's output, where it returns more than these: a name, a
            position, or a function of the output.

    Attributes:
        members: the detectors that are joined, by name.
        metadata: a free dictionary that is saved with the guard (preprocessing, class names, ...).

    """

    _verdict: Replay[Any] | None

    def __init__(
        self,
        model: nn.Module | Network,
        *,
        taps: str | Iterable[str] = "all",
        orders: Iterable[int] = range(1, 11),
        statistic: str = "auto",
        storage: str = "float32",
        level: float = 0.95,
        per_class: bool = False,
        members: Iterable[str] = MEMBERS,
        inputs: InputsAdapter = None,
        logits: LogitsAdapter = None,
    ) -> None:
        made: dict[str, Single] = {}
        network = Network.of(model, inputs, logits)
        for name in members:
            if name == "gram":
                made[name] = GramDetector(
                    network, taps=taps, orders=orders, statistic=statistic, storage=storage, level=level
                )
            elif name in METHODS:
                made[name] = METHODS[name](network, level=level)
            else:
                raise ValueError(f"there is no member '{name}': choose from gram, {', '.join(METHODS)}")
        self._begin(made, level, per_class)

    @classmethod
    def of(cls, members: Mapping[str, Single], *, level: float = 0.95, per_class: bool = False) -> "Guard":
        """A guard of detectors of one network that may be in use elsewhere too.

        What is fitted is shared: after one of them is fitted further, calibrate the guard anew.
        """
        guard = cls.__new__(cls)
        guard._begin(dict(members), level, per_class)
        return guard

    def _begin(self, members: dict[str, Single], level: float, per_class: bool) -> None:
        check_level(level)
        if not members:
            raise ValueError("a guard needs at least one member")
        self.network = next(iter(members.values())).network
        for name, member in members.items():
            if member.network != self.network:
                raise ValueError(f"'{name}' judges another network than the first member")
            if isinstance(member, Method) and member.alone:
                raise ValueError(f"'{name}' takes passes of its own, and a guard has one: leave it out")
            if isinstance(member, GramDetector) and member.confidence == "subtract":
                raise ValueError(f"'{name}' has confidence='subtract', which a guard cannot join")
        features = {each.features for each in members.values() if isinstance(each, Method)}
        if len(features) > 1:
            raise ValueError(f"the members of a guard look at the same features, not at {features}")
        self._all_members, self.members = members, members
        self._fits = Fits()
        self.level, self.per_class = float(level), bool(per_class)
        self.metadata: dict[str, Any] = {}
        self._chosen = list(members)
        self._watch: Watch | None = None
        self._weights: list[Tensor] = []
        self._settled = self._record_pass = False
        self.forget_calibration()

    def reset(self) -> "Guard":
        """Forget all training and calibration data, of all members; settings stay."""
        for member in self._all_members.values():
            member.reset()
        self.members, self._fits = self._all_members, Fits()
        self._watch, self._settled = None, False
        self.forget_calibration()
        return self

    # --- what is known so far ------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The network that is guarded."""
        return self.network.model

    def to(self, device: torch.device | str) -> "Guard":
        """Move the network to a device, and what was learnt of it with it."""
        for member in self.members.values():
            member.to(device)
        return self

    @property
    def record_pass(self) -> bool:
        """On a GPU, let the forward pass be part of the CUDA graph, from the fourth batch of a shape on.

        Off unless set. A host that launches many small operations is often slower than the GPU that carries
        them out, and this does without the host. It is for networks that do the same for all inputs of one
        shape; what they do in Python is done no more. Parameters that change in place are followed, others in
        their place are not. Each shape, up to four, takes as much memory as the network's pass over it.
        """
        return self._record_pass

    @record_pass.setter
    def record_pass(self, record: bool) -> None:
        self._record_pass = bool(record)
        self._verdict = None

    @property
    def grams(self) -> dict[str, GramDetector]:
        """The members that watch the network's inside."""
        return {name: each for name, each in self.members.items() if isinstance(each, GramDetector)}

    @property
    def calibration_scores_(self) -> Tensor:
        """The in-distribution scores that rank, ascending."""
        return self._calibrated().scores[:, 0].sort().values

    @property
    def threshold_(self) -> float:
        """The score above which an input is out-of-distribution."""
        scores = self._calibrated().scores[:, 0]
        if self.per_class:
            raise ValueError("with per_class=True classes have thresholds of their own: see found.is_ood")
        return threshold(scores, self.level)

    @property
    def groups_(self) -> list[list[int]]:
        """The classes that are ranked together, group by group; all in one without `per_class`."""
        group_of = self._calibrated().ranks.group_of
        return [(group_of == group).nonzero().flatten().tolist() for group in range(int(group_of.max()) + 1)]

    @property
    def trained_on_outliers(self) -> bool:
        """Whether the network was trained with outliers for one of the members: a table has to say so."""
        return any(isinstance(each, Method) and each.trained_on_outliers for each in self.members.values())

    @property
    def tuned_on_outliers(self) -> bool:
        """Whether one of the members has itself seen outliers: a table has to say so."""
        return any(isinstance(each, Method) and each.tuned_on_outliers for each in self.members.values())

    def rule(self) -> JointRule:
        """How the scores become one, not fitted."""
        return JointRule(
            {
                name: TotalDeviation(gram.normalise, gram.confidence, shrink=SHRINK)
                for name, gram in self.grams.items()
            }
        )

    def forget_calibration(self) -> None:
        """What was calibrated no longer holds: there is more training data."""
        self._calibration: Calibration | None = None
        self._how: dict[str, Any] = {}
        self._moved: tuple[torch.device, Calibration] | None = None
        self._verdict = None

    def _calibrated(self) -> Calibration:
        if self._calibration is None:
            raise NotFittedError(
                "this guard is not calibrated: call guard.fit(train_loader), then "
                "guard.calibrate(validation_loader)"
            )
        return self._calibration

    def _calibrated_on(self, device: torch.device) -> Calibration:
        """The calibration on a device, kept there."""
        if self._moved is None or self._moved[0] != device:
            self._moved = (device, self._calibrated().to(device))
        return self._moved[1]

    def __getstate__(self) -> dict[str, Any]:
        """For copies: what was recorded on a GPU stays where it is."""
        return {**vars(self), "_verdict": None}

    def __repr__(self) -> str:
        state = "not calibrated"
        if self._calibration is not None:
            state = "calibrated per class" if self.per_class else f"threshold {self.threshold_:.4g}"
        return f"Guard({type(unwrap(self.model)).__name__}: {' + '.join(self.members)}, {state})"

    # --- fit -----------------------------------------------------------------------------------------

    def fit(
        self,
        loader: Iterable[Any],
        *,
        checkpoint: str | PathLike[str] | None = None,
        progress: bool = True,
    ) -> "Guard":
        """Take in what training data looks like, all members from the same forward passes.

        Fitting again adds to what was seen before and asks for a new calibration. An interruption keeps
        all finished batches.

        Args:
            loader: as for `GramDetector.fit`.
            checkpoint: as for `GramDetector.fit`.
            progress: show a progress bar (on a terminal only).

        """
        self._check_adding(checkpoint is not None)
        done = self._resume(checkpoint)
        self._fits.begin(checkpoint)
        self.forget_calibration()
        for gram in self.grams.values():
            gram.forget_calibration()

        def take(batch: tuple[Inputs, Tensor | None]) -> None:
            self.settle(batch[0])
            self._watching().take(*batch)

        def write(done: int) -> None:
            if checkpoint is not None and all(gram.has_examples() for gram in self.grams.values()):
                self._write(checkpoint, batches=done)

        batches = on_device_ahead(self.network.batches(loader, "fitting", progress), self.model)
        self._fits.run(batches, take, done, write)
        self._watching().finish()
        return self

    def settle(self, inputs: Inputs) -> None:
        """At the first batch, leave out members that cannot be used on this network."""
        if self._settled:
            return
        unusable = _unusable(self.network, self.members, on_device(inputs, self.model))
        if len(unusable) == len(self.members):
            reasons = "; ".join(dict.fromkeys(unusable.values()))
            raise TapError(f"no member can be used, {', '.join(unusable)}: {reasons}")
        for why in dict.fromkeys(unusable.values()):
            names = [name for name, reason in unusable.items() if reason == why]
            warn(f"{', '.join(names)} is left out of the guard: {why}")
        if unusable:
            self.members = {name: each for name, each in self.members.items() if name not in unusable}
            self._watch = None
        self._settled = True

    def _watching(self) -> Watch:
        if self._watch is None:
            self._watch = Watch(self.members.values())
        return self._watch

    def _check_adding(self, checkpoint: bool) -> None:
        """Members that keep examples cannot take up an earlier fit."""
        for name, each in self.members.items():
            if isinstance(each, Method) and each.record.fitted and not each.running:
                if checkpoint:
                    raise ValueError(f"'{name}' keeps examples, which a checkpoint does not: leave it out")
                if each.state():
                    raise ValueError(f"'{name}' is fitted already and cannot add to it: make a new guard")

    @torch.inference_mode()
    def merge(self, other: "Guard") -> "Guard":
        """Join what another guard of the same network, fitted on other data, has seen.

        Every member must be of a kind that merges exactly, as the default ones are; otherwise an error names
        it. Both keep their settings; the calibration must be done anew.
        """
        check_not_itself(self, other)
        for name, mine, theirs in self._differing_settings(other):
            raise ValueError(f"the two differ in {name}: {mine!r} and {theirs!r}")
        if list(self.members) != list(other.members):
            raise ValueError(f"the two have the members {list(self.members)} and {list(other.members)}")
        pairs: list[tuple[Any, Any]] = [(each, other.members[name]) for name, each in self.members.items()]
        for mine, theirs in pairs:
            if type(mine) is not type(theirs):
                raise ValueError(f"the two have members of different kinds: {mine!r} and {theirs!r}")
            mine.check_merge(theirs)
        for mine, theirs in pairs:
            mine.merge(theirs)
        self.forget_calibration()
        return self

    # --- calibrate and judge -------------------------------------------------------------------------

    @torch.inference_mode()
    def calibrate(
        self, loader: Iterable[Any], *, split: bool = True, seed: int = 0, progress: bool = True
    ) -> "Guard":
        """Set the threshold from in-distribution data that was not used for training.

        Args:
            loader: as for `fit`.
            split: half of the data, drawn by `seed`, standardises; the other half ranks. Then fresh
                in-distribution inputs are flagged at a rate of at most `1 - level`. With `False` the same
                data do both, and the rate is only approximate.
            seed: of the split; stored.
            progress: show a progress bar (on a terminal only).

        """
        measured = self.measure_all(loader, "calibrating", progress)
        finite = measured.finite
        if not finite.all():
            warn(f"{int((~finite).sum())} calibration example(s) with NaN or infinity were left out")
            measured = measured[finite]
        check_enough(len(measured.logits), self.level, split)
        for name, part in measured.parts.items():
            if isinstance(part, Measurement) and not self.grams[name].saw_no_difference():
                check_deviating(part.deviations)
        found = Calibration.of(
            measured, self.rule(), self.level, per_class=self.per_class, split=split, seed=seed
        )
        self._warn_of_silence(found.rule)
        examples, classes = measured.logits.shape
        self.forget_calibration()
        self._calibration = found
        self._how = {"split": split, "seed": seed, "examples": examples, "classes": classes}
        return self

    def _warn_of_silence(self, rule: JointRule) -> None:
        for name, gram in self.grams.items():
            gram.warn_of_silent_taps(rule.totals[name])
        assert rule.standard.tail_ is not None
        for name, tail in zip(self.members, rule.standard.tail_.tolist(), strict=True):
            if tail == torch.inf:
                warn(f"{name} says the same of all calibration examples and is left out of the score")

    def __call__(self, inputs: Any) -> Detection:
        """Judge a batch in one forward pass.

        An input that is not finite, or makes the network's activations so, gets an infinite score.
        """
        self._calibrated()
        verdict = self._replay()
        inputs = self.network.read(inputs)
        given = self._nest(inputs) if self._record_pass else self._look(inputs)
        # Out of inference mode, so that the results are ordinary tensors; what was seen is copied for that.
        with torch.inference_mode(False), torch.no_grad():
            made = (t.clone() if t.is_inference() else t for t in verdict(given))
            logits, predicted, score, p_values, is_ood, sound, *of_gram = made
            found = Detection(
                logits=logits,
                predicted=predicted,
                score=score,
                p_value=p_values[0],
                is_ood=is_ood,
                deviations=of_gram[0] if of_gram else None,
                class_support=of_gram[1] if of_gram else None,
                parts=dict(zip(self.members, p_values[1:], strict=True)),
                taps=self._tap_names(),
            )
            # The device is waited for here and nowhere before.
            broken = len(predicted) - int(sound)
        if broken:
            warn(f"{broken} input(s) with NaN or infinity: their score is infinite")
        return found

    def _tap_names(self) -> tuple[str, ...] | None:
        """The taps of the Gram member whose deviations a detection shows."""
        return next((tuple(gram.taps.names) for gram in self.grams.values()), None)

    def _replay(self) -> "Replay[Any]":
        if self._verdict is None and self._record_pass:
            self._weights = [*self.model.parameters(), *self.model.buffers()]
            self._verdict = Replay(self._looked_and_judged, self._tables)
        self._verdict = self._verdict or Replay(self._judged)
        return self._verdict

    def _nest(self, inputs: Inputs) -> Nest:
        """The inputs, and where the network's weights lie: elsewhere, they are others than those recorded."""
        return Nest(on_device(inputs, self.model), tuple(weight.data_ptr() for weight in self._weights))

    def _tables(self) -> list[Tensor]:
        return [table for gram in self.grams.values() for table in gram.tables()]

    def _looked_and_judged(self, inputs: Nest) -> tuple[Tensor, ...]:
        return self._judged(self._look(inputs.value))

    def _judged(self, seen: Seen) -> tuple[Tensor, ...]:
        """All that a verdict consists of, from what was seen; a GPU is not waited for."""
        measured = self._measured(seen)
        score, p_values, is_ood = self._calibrated_on(measured.logits.device).judged(measured)
        predicted = measured.predicted
        of_gram: tuple[Tensor, ...] = ()
        for gram, deviating in list(seen.deviations.items())[:1]:
            of_gram = (deviating.deviations, gram.class_support(predicted))
        return measured.logits, predicted, score, p_values.T, is_ood, measured.finite.sum(), *of_gram

    @torch.inference_mode()
    def measure(self, inputs: Inputs) -> JointMeasurement:
        """What all members say of a batch, without the calibration: what scores are made of."""
        return self._measured(self._look(inputs))

    @torch.inference_mode()
    def _look(self, inputs: Inputs) -> Seen:
        return self._watching().look(on_device(inputs, self.model))

    def _measured(self, seen: Seen) -> JointMeasurement:
        parts = {name: seen.said_by(each) for name, each in self.members.items()}
        return JointMeasurement(seen.observation.logits, parts)

    def measure_all(
        self, loader: Iterable[Any], doing: str = "measuring", progress: bool = True
    ) -> JointMeasurement:
        """`measure` over a whole loader, on the CPU."""
        batches = (inputs for inputs, _ in self.network.batches(loader, doing, progress))
        parts = [self.measure(inputs) for inputs in on_device_ahead(batches, self.model)]
        if not parts:
            raise InputError(f"the loader yielded no example: {doing} needs some")
        return JointMeasurement.joined(parts)

    # --- save and load -------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        return {"members": self._chosen, "level": self.level, "per_class": self.per_class}

    def _differing_settings(self, other: "Guard") -> Iterator[tuple[str, Any, Any]]:
        theirs = other._settings()
        for name, mine in self._settings().items():
            if mine != theirs[name]:
                yield name, mine, theirs[name]

    def save(self, path: str | PathLike[str]) -> None:
        """Write the guard with all its members to one safetensors file. The network itself is not saved."""
        for each in self.members.values():
            if isinstance(each, Method):
                each.check_fitted()
        self._write(path)
        self._fits.saved(path)

    def _write(self, path: str | PathLike[str], batches: int | None = None) -> None:
        artifact.check_writable(path)
        members: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for name, each in self.members.items():
            members[name], own = each.contents()
            tensors |= {f"members.{name}.{key}": tensor for key, tensor in own.items()}
        found = self._calibration
        if found is not None:
            tensors |= {"calibration.scores": found.scores, "calibration.predicted": found.predicted}
            if self.per_class:
                tensors["calibration.groups"] = found.ranks.group_of
            for name in STANDARD:
                tensors[f"calibration.{name}"] = getattr(found.rule.standard, f"{name}_")
            for name, total in found.rule.totals.items():
                assert total.expectation_ is not None
                tensors[f"calibration.expectation.{name}"] = total.expectation_
        header = {
            "detector": type(self).__name__,
            "settings": self._settings(),
            "network": artifact.fingerprint(self.model),
            "members": members,
            "calibration": None if found is None else self._how,
            "batches": batches,
            "metadata": self.metadata,
        }
        if self.network.adapters:
            header["adapters"] = self.network.adapters
        artifact.write(path, header, tensors)

    @classmethod
    def from_artifact(
        cls, saved: artifact.Saved, model: nn.Module | Network, accept_other_weights: bool = False
    ) -> "Guard":
        """The guard in an opened file; `gramwatch.load` is the short way."""
        return saved.restored(cls, model, accept_other_weights)

    @classmethod
    def described(
        cls, header: Mapping[str, Any], model: nn.Module | Network
    ) -> tuple["Guard", artifact.Shapes]:
        """The guard without its tensors, and what these must be."""
        members: dict[str, Single] = {}
        shapes: artifact.Shapes = {}
        for name, own in header["members"].items():
            members[name], expected = SINGLES[own["detector"]].described(own, model)
            shapes |= {f"members.{name}.{key}": field for key, field in expected.items()}
        settings, how = header["settings"], header["calibration"]
        artifact.check_types(settings, members=list[str], level=float, per_class=bool)
        if members.keys() - set(settings["members"]):
            raise ValueError(f"it was to have the members {settings['members']!r:.60}")
        guard = cls.of(members, level=settings["level"], per_class=settings["per_class"])
        guard._chosen = settings["members"]
        if how is not None:
            ranking, classes, kind = how_many_rank(how), how["classes"], torch.float64
            artifact.check_types(how, classes=int)
            if any(own.get("classes", classes) != classes for own in header["members"].values()):
                raise ValueError(f"its members were fitted on other than {classes:,} classes")
            if not 0 < classes <= MOST_CLASSES:
                raise ValueError(f"a network has no {classes:,} classes")
            predicted = artifact.within(0, classes - 1)
            shapes["calibration.scores"] = Field((ranking, 1 + len(members)), kind, artifact.FINITE)
            shapes["calibration.predicted"] = Field((ranking,), torch.int64, predicted)
            for name, rule in STANDARD.items():
                shapes[f"calibration.{name}"] = Field((len(members),), kind, rule)
            if guard.per_class:
                shapes["calibration.groups"] = Field((classes,), torch.int64, predicted)
            for name, gram in guard.grams.items():
                expectation = Field((len(gram.taps),), kind, artifact.NOT_NEGATIVE)
                shapes[f"calibration.expectation.{name}"] = expectation
        return guard, shapes

    def restore(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take over the tensors of a file."""
        for name, each in self.members.items():
            start = f"members.{name}."
            own = {key.removeprefix(start): t for key, t in tensors.items() if key.startswith(start)}
            each.restore(header["members"][name], own)
            if isinstance(each, Method) and header["batches"] is None:
                each.check_fitted()
        how = header["calibration"]
        if how is None:
            return
        rule = self.rule()
        for name, total in rule.totals.items():
            total.expectation_ = tensors[f"calibration.expectation.{name}"]
        for name in STANDARD:
            setattr(rule.standard, f"{name}_", tensors[f"calibration.{name}"])
        scores, predicted = tensors["calibration.scores"], tensors["calibration.predicted"]
        together = torch.zeros(int(how["classes"]), dtype=torch.int64)
        ranks = Ranks.of(scores, self.level, predicted, tensors.get("calibration.groups", together))
        self._calibration = Calibration(rule, scores, predicted, ranks)
        self._how = {key: how[key] for key in ("split", "seed", "examples", "classes")}

    def _resume(self, checkpoint: str | PathLike[str] | None) -> int:
        """Take over the state of an interrupted fit; the number of batches it holds."""
        if checkpoint is None or not Path(checkpoint).exists():
            return 0
        saved = artifact.read(checkpoint)
        batches = saved.batches()
        before = Guard.from_artifact(saved, self.network)
        anew = "delete it to start anew"
        for name, mine, theirs in self._differing_settings(before):
            raise ArtifactError(f"{checkpoint} was begun with {name} = {theirs!r}, not {mine!r}: {anew}")
        for name, earlier in before.members.items():
            own: Any = self.members[name]
            for setting, mine, theirs in own.differing_settings(earlier):
                what = f"{setting} = {theirs!r}, not {mine!r}, for {name}"
                raise ArtifactError(f"{checkpoint} was begun with {what}: {anew}")
            own.take_over(earlier)
        self.members = {name: each for name, each in self.members.items() if name in before.members}
        self._watch = None
        return batches


def _unusable(network: Network, members: Mapping[str, Single], inputs: Inputs) -> dict[str, str]:
    """The members that cannot be used on their network, and why not."""

    @cache
    def headless() -> str:
        name = type(unwrap(network.model)).__name__
        why = f"the logits of {name} are not made by one linear layer, whose input it needs"
        return why if find_head(network, inputs) is None else ""

    @cache
    def tapless(selection: str | tuple[str, ...]) -> str:
        try:
            find_taps(network, inputs, selection)
        except NoTapError as error:
            return str(error)
        return ""

    def why_not(member: Single) -> str:
        taps = member.selection if isinstance(member, GramDetector) else member.taps
        where = taps if isinstance(taps, str) else tuple(taps)
        if isinstance(member, GramDetector):
            return tapless(where)
        why = headless() if member.features is None and member.needs & {"features", "head"} else ""
        return why or (tapless(where) if "channel_means" in member.needs else "")

    reasons = {name: why_not(member) for name, member in members.items()}
    return {name: why for name, why in reasons.items() if why}
