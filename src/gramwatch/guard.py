"""Guard: Gram, which sees texture, joined with scores that see meaning, from one forward pass.

The rule is in `joint`, the ranks are in `threshold`; here is the detector that is made of detectors.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from gramwatch import artifact
from gramwatch.artifact import Field
from gramwatch.batches import Inputs, count_examples, on_device
from gramwatch.detector import Detector
from gramwatch.deviation import TotalDeviation
from gramwatch.errors import ArtifactError, NoTapError, TapError, warn
from gramwatch.gram import GramDetector
from gramwatch.joint import JointRule
from gramwatch.measurement import Calibration, Measurement, how_many_rank
from gramwatch.methods import METHODS, TRAINED
from gramwatch.observation import Observation
from gramwatch.replay import Nest, Replay
from gramwatch.taps import Look, Network, unwrap
from gramwatch.taps.running import InputsAdapter, LogitsAdapter
from gramwatch.threshold import Ranks

MEMBERS = ("gram", "early_mahalanobis", "class_ratio", "energy")
"""Whose scores are joined, unless others are named."""
SHRINK = 50
"""Weight of the mean over all taps, counted in calibration examples: see `TotalDeviation`."""
STANDARD = {
    "median": artifact.FINITE,
    "tail": artifact.POSITIVE_OR_INFINITE,
    "lowest": artifact.FINITE,
}
"""What scores are standardised by, and saved."""
MOST_CLASSES = 2**24
"""A file with more classes is refused."""


def single(name: str) -> type[Detector]:
    """The detector, not a guard, that files call so; or a plain error."""
    known: dict[str, type[Detector]] = {GramDetector.name: GramDetector, **METHODS, **TRAINED}
    if name not in known:
        raise ArtifactError(
            f"it holds a {name!r:.60}, which this version does not know. If that is a method of your own, "
            "make it known first: gramwatch.methods.register(...)"
        )
    return known[name]


@dataclass(frozen=True)
class Seen:
    """What a verdict is made from: the measurements of some members, observations for the others."""

    measured: Mapping[str, Measurement]
    observed: Mapping[str, Observation]

    @property
    def constant(self) -> None:
        """What is there beside tensors: nothing that changes."""

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Seen":
        """The same with every tensor changed once; those that are shared stay shared."""
        made: dict[int, Tensor] = {}

        def once(t: Tensor) -> Tensor:
            if id(t) not in made:
                made[id(t)] = change(t)
            return made[id(t)]

        return Seen(
            {name: each.changed(once) for name, each in self.measured.items()},
            {name: each.changed(once) for name, each in self.observed.items()},
        )


class Guard(Detector):
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

    name = "Guard"
    title = "Guard"
    stands_beside_baseline = True
    _recorded: Replay[Any] | None

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
        made: dict[str, Detector] = {}
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
        self._join(made, level, per_class)

    @classmethod
    def of(cls, members: Mapping[str, Detector], *, level: float = 0.95, per_class: bool = False) -> "Guard":
        """A guard of detectors of one network that may be in use elsewhere too.

        What is fitted is shared: after one of them is fitted further, calibrate the guard anew.
        """
        guard = cls.__new__(cls)
        guard._join(dict(members), level, per_class)
        return guard

    def _join(self, members: dict[str, Detector], level: float, per_class: bool) -> None:
        if not members:
            raise ValueError("a guard needs at least one member")
        network = next(iter(members.values())).network
        for name, member in members.items():
            if member.network != network:
                raise ValueError(f"'{name}' judges another network than the first member")
            if member.alone:
                raise ValueError(f"'{name}' takes passes of its own, and a guard has one: leave it out")
            if sum(member is each for each in members.values()) > 1:
                raise ValueError(f"'{name}' is a member by two names: give it one")
            if getattr(member, "confidence", "") == "subtract":
                raise ValueError(f"'{name}' has confidence='subtract', which a guard cannot join")
        self._all_members, self.members = members, members
        self.per_class = bool(per_class)
        self._chosen = list(members)
        self._record_pass = False
        super().__init__(network, level=level)

    def _begin(self) -> None:
        self.members = self._all_members
        self._settled = False
        self._weights: list[Tensor] = []
        super()._begin()

    def reset(self) -> "Guard":
        """Forget all training and calibration data, of all members; settings stay."""
        for member in self._all_members.values():
            member.reset()
        return super().reset()

    # --- what is known so far ------------------------------------------------------------------------

    @property
    def leaves(self) -> tuple[Detector, ...]:
        """The members."""
        return tuple(self.members.values())

    @property
    def is_fitted(self) -> bool:
        """Whether all members are."""
        return all(member.is_fitted for member in self.members.values())

    @property
    def trained_on_outliers(self) -> bool:  # type: ignore[override]
        """Whether the network was trained with outliers for one of the members: a table has to say so."""
        return any(member.trained_on_outliers for member in self.members.values())

    @property
    def tuned_on_outliers(self) -> bool:  # type: ignore[override]
        """Whether one of the members has itself seen outliers: a table has to say so."""
        return any(member.tuned_on_outliers for member in self.members.values())

    @property
    def grams(self) -> dict[str, GramDetector]:
        """The members that watch the network's inside."""
        return {name: each for name, each in self.members.items() if isinstance(each, GramDetector)}

    @property
    def tap_names(self) -> tuple[str, ...] | None:
        """The taps of the Gram member whose deviations a detection shows."""
        return next((gram.tap_names for gram in self.grams.values()), None)

    def shown_beside(self) -> dict[str, Detector]:
        """Its members."""
        return {each.title: each for each in self.members.values()}

    @property
    def groups_(self) -> list[list[int]]:
        """The classes that are ranked together, group by group; all in one without `per_class`."""
        group_of = self.calibration().ranks.group_of
        return [(group_of == group).nonzero().flatten().tolist() for group in range(int(group_of.max()) + 1)]

    @property
    def record_pass(self) -> bool:
        """On a GPU, let the forward pass be part of the CUDA graph, from the fourth batch of a shape on.

        Off unless set. A host that launches many small operations is often slower than the GPU that carries
        them out, and this does without the host. It is for networks that do the same for all inputs of one
        shape: their Python code is not run again. In-place parameter updates are seen. Replacing a parameter
        object is not. Each shape, up to four, takes as much memory as the network's pass over it.
        """
        return self._record_pass

    @record_pass.setter
    def record_pass(self, record: bool) -> None:
        self._record_pass = bool(record)
        self._recorded = None

    def to(self, device: torch.device | str) -> "Guard":
        """Move the network to a device, and what was learnt of it with it."""
        for member in self.members.values():
            member.to(device)
        return self

    def forget_calibration(self) -> None:
        """What was calibrated no longer holds: there is more training data."""
        super().forget_calibration()
        self._recorded = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies: what was recorded on a GPU stays where it is."""
        return {**vars(self), "_recorded": None}

    def _described_fit(self) -> str:
        return " + ".join(self.members)

    def __repr__(self) -> str:
        state = "not calibrated"
        if self._calibration is not None:
            state = "calibrated per class" if self.per_class else f"threshold {self.threshold_:.4g}"
        return f"Guard({type(unwrap(self.model)).__name__}: {self._described_fit()}, {state})"

    # --- fit -----------------------------------------------------------------------------------------

    @property
    def learns(self) -> bool:
        """Whether one of the members needs training data."""
        return any(member.learns for member in self.members.values())

    def take(self, observation: Observation) -> int:
        """A guard itself takes in nothing: its members do."""
        return 0

    def check_adding(self, checkpoint: bool) -> None:
        """Members that keep examples cannot take up an earlier fit."""
        for member in self.members.values():
            member.check_adding(checkpoint)

    def check_useful(self) -> None:
        """Say which members are of no use."""
        for member in self.members.values():
            if member.says_nothing:
                warn(f"{member.says_nothing}. Until then it says the same of every input")

    def settle(self, look: Look) -> None:
        """At the first batch, leave out members that cannot be used on this network."""
        if self._settled:
            return
        unusable = {name: why for name, each in self.members.items() if (why := why_not(each, look))}
        if len(unusable) == len(self.members):
            reasons = "; ".join(dict.fromkeys(unusable.values()))
            raise TapError(f"no member can be used, {', '.join(unusable)}: {reasons}")
        for why in dict.fromkeys(unusable.values()):
            names = [name for name, reason in unusable.items() if reason == why]
            warn(f"{', '.join(names)} is left out of the guard: {why}")
        if unusable:
            self.members = {name: each for name, each in self.members.items() if name not in unusable}
            self._plan = None
        self._settled = True

    def check_merge(self, other: Detector) -> None:
        """Make sure that another guard can be merged into this one, member by member."""
        super().check_merge(other)
        assert isinstance(other, Guard)
        if list(self.members) != list(other.members):
            raise ValueError(f"the two have the members {list(self.members)} and {list(other.members)}")
        for name, member in self.members.items():
            if type(member) is not type(other.members[name]):
                raise ValueError(
                    f"the two have members of different kinds: {member!r} and {other.members[name]!r}"
                )
            member.check_merge(other.members[name])

    def _merge(self, other: "Guard") -> None:
        for name, member in self.members.items():
            member.merge(other.members[name])

    # --- calibrate and judge -------------------------------------------------------------------------

    def measured(self, observation: Observation) -> Measurement:
        """A guard has no observation of its own: see `measured_from`."""
        raise TypeError("a guard is measured by its members: call guard.measure(inputs)")

    def measured_from(self, measured: Mapping[Detector, Measurement]) -> Measurement:
        """What all members measure of a batch, side by side."""
        return Measurement.together({name: measured[each] for name, each in self.members.items()})

    def rule(self) -> JointRule:
        """How what the members measure becomes one score, not fitted."""
        return JointRule(
            {
                name: TotalDeviation(gram.normalise, gram.confidence, shrink=SHRINK)
                for name, gram in self.grams.items()
            }
        )

    def check_calibration(self, measured: Measurement) -> None:
        """Refuse training examples as calibration data."""
        for name, gram in self.grams.items():
            if not gram.saw_no_difference():
                gram.check_calibration(measured.parts[name])

    def check_rule(self, rule: JointRule) -> None:
        """Name the taps and the members that a score leaves out."""
        for name, gram in self.grams.items():
            gram.check_total(rule.totals[name])
        assert rule.standard.tail_ is not None
        for name, tail in zip(self.members, rule.standard.tail_.tolist(), strict=True):
            if tail == torch.inf:
                warn(f"{name} says the same of all calibration examples and is left out of the score")

    def shown(self, measured: Measurement) -> dict[str, Tensor]:
        """What the first Gram member shows."""
        for name, gram in self.grams.items():
            assert measured.columns is not None
            return gram.beside(measured.values[:, measured.columns[name]], measured.predicted)
        return {}

    def _parts(self, p_values: Tensor) -> Mapping[str, Tensor]:
        return dict(zip(self.members, p_values, strict=True))

    def _verdict_on_gpu(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """The same by a recording, unless the batch is too large for one pass."""
        inputs = on_device(inputs, self.network.model)
        if count_examples(inputs) > self.planned(inputs).at_once:
            return super()._verdict_on_gpu(inputs)
        if self._recorded is None and self._record_pass:
            self._weights = [*self.model.parameters(), *self.model.buffers()]
            self._recorded = Replay(self._judged_inputs, self._tables)
        if self._recorded is None:
            self._recorded = Replay(self._judged_seen)
        if self._record_pass:
            places = tuple(weight.data_ptr() for weight in self._weights)
            return self._recorded(Nest(inputs, places))
        return self._recorded(self._seen(inputs))

    @torch.inference_mode()
    def _seen(self, inputs: Inputs) -> Seen:
        """One forward pass; Gram's measurement, by kernels of its own, and what the others will look at."""
        (shown,) = self.planned(inputs).run(inputs)
        seen = dict(zip(self.members, shown, strict=True))
        grams = self.grams
        return Seen(
            {name: gram.measured(seen[name]) for name, gram in grams.items()},
            {name: each for name, each in seen.items() if name not in grams},
        )

    def _judged_inputs(self, inputs: Nest) -> tuple[Tensor, ...]:
        return self._judged_seen(self._seen(inputs.value))

    def _judged_seen(self, seen: Seen) -> tuple[Tensor, ...]:
        """All that a verdict consists of, from what was seen; a GPU is not waited for."""
        measured = {
            name: seen.measured[name] if name in seen.measured else each.measured(seen.observed[name])
            for name, each in self.members.items()
        }
        return self._judged(Measurement.together(measured))

    def _tables(self) -> list[Tensor]:
        return [table for gram in self.grams.values() for table in gram.tables()]

    # --- save and load -------------------------------------------------------------------------------

    def settings_as_json(self) -> dict[str, Any]:
        """The arguments that it was made with; those of its members are theirs."""
        return {"members": self._chosen, "level": self.level, "per_class": self.per_class}

    def contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What is to be saved: plain values, and tensors, all members included."""
        members: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for name, each in self.members.items():
            members[name], own = each.contents()
            tensors |= {f"members.{name}.{key}": tensor for key, tensor in own.items()}
        found = self._calibration
        if found is not None:
            assert found.predicted is not None
            tensors |= {"calibration.scores": found.scores, "calibration.predicted": found.predicted}
            if self.per_class:
                tensors["calibration.groups"] = found.ranks.group_of
            for name in STANDARD:
                tensors[f"calibration.{name}"] = getattr(found.rule.standard, f"{name}_")
            for name, total in found.rule.totals.items():
                assert total.expectation_ is not None
                tensors[f"calibration.expectation.{name}"] = total.expectation_
        header = {
            "detector": self.name,
            "settings": self.settings_as_json(),
            "members": members,
            "calibration": None if found is None else dict(found.how),
        }
        return header, tensors

    @classmethod
    def described(
        cls, header: Mapping[str, Any], model: nn.Module | Network
    ) -> tuple["Guard", artifact.Shapes]:
        """The guard without its tensors, and what these must be."""
        members: dict[str, Detector] = {}
        shapes: artifact.Shapes = {}
        for name, own in header["members"].items():
            members[name], expected = single(own["detector"]).described(own, model)
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
        how = {key: how[key] for key in ("split", "seed", "examples", "classes")}
        self._calibration = Calibration(rule, scores, predicted, ranks, how)

    def _check_resumed(self, before: "Guard", checkpoint: str | PathLike[str], anew: str) -> None:
        for name, earlier in before.members.items():
            member = self.members[name]
            if type(member) is not type(earlier):
                raise ArtifactError(f"{checkpoint} was begun with {earlier.name} as {name}: {anew}")
            for setting, mine, theirs in member.differing_settings(earlier):
                what = f"{setting} = {theirs!r}, not {mine!r}, for {name}"
                raise ArtifactError(f"{checkpoint} was begun with {what}: {anew}")

    def take_over(self, before: "Guard") -> None:
        """Go on from what another guard has seen; members that it left out stay out."""
        for name, earlier in before.members.items():
            self.members[name].take_over(earlier)
        self.members = {name: each for name, each in self.members.items() if name in before.members}
        self._plan = None


def why_not(member: Detector, look: Look) -> str:
    """Why a member cannot be used on a network; empty if it can."""
    needs = member.needs
    if needs.features and needs.features_at is None and look.head is None:
        name = type(unwrap(look.network.model)).__name__
        return f"the logits of {name} are not made by one linear layer, whose input it needs"
    statistics = None if needs.statistics is None or member.known_taps else needs.statistics.taps
    try:
        for where in filter(None, (needs.means, statistics)):
            look.taps(where)
    except NoTapError as error:
        return str(error)
    return ""
