"""Guard: Gram, which sees texture, joined with scores that see meaning, from one forward pass.

A guard is a detector made of detectors. Its rule is in `joint`, its ranks are in `threshold`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gramwatch.detect.detector import Detector
from gramwatch.detect.joint import JointRule, below
from gramwatch.detect.measurement import (
    Calibration,
    Measurement,
    Verdict,
    facts_of,
    how_many_rank,
    tolerance_in,
)
from gramwatch.detect.parts import Contribution
from gramwatch.detect.passes import measure
from gramwatch.errors import ArtifactError, NoTapError, TapError, warn
from gramwatch.files import artifact
from gramwatch.files.artifact import Field
from gramwatch.inputs import image_numbers
from gramwatch.inputs.adapters import InputsAdapter, LogitsAdapter, MaskAdapter
from gramwatch.inputs.batches import Inputs, on_device
from gramwatch.methods import METHODS, OF_THE_LAB, TRAINED
from gramwatch.methods.gram import GramDetector
from gramwatch.observe.observation import Observation
from gramwatch.watch import Look, Network, unwrap

if TYPE_CHECKING:
    from gramwatch.detect.distributed import Group
    from gramwatch.detect.split import KeptInputs

MEMBERS = ("gram", "profile", "class_ratio", "energy", "mahalanobis_pp", "knn", "image")
"""The default members. A member that tells little about a network gets a small weight."""
EFFORTS: dict[str, dict[str, Any]] = {
    "lean": {"taps": "spread", "orders": (1, 2, 4, 8), "pixels": 256, "channels": 128},
    "full": {"taps": "all", "orders": range(1, 11), "pixels": None, "channels": None},
}
"""What Gram looks at inside a guard. `"full"` is the paper's."""
MOST_CLASSES = 2**24
"""A file with more classes is refused."""


def single(name: str) -> type[Detector]:
    """The detector class with this name in files, guards excepted; an error if there is none."""
    if name == GramDetector.name:
        return GramDetector
    if name in OF_THE_LAB and name not in TRAINED:
        raise ArtifactError(f"it holds a '{name}', which comes with gramwatch-lab: pip install gramwatch-lab")
    if name not in METHODS and name not in TRAINED:
        raise ArtifactError(
            f"it holds a {name!r:.60}, which this version does not know. If that is a method of your own, "
            "make it known first: gramwatch.methods.register(...)"
        )
    return METHODS[name] if name in METHODS else TRAINED[name]


@dataclass(frozen=True)
class Given:
    """What a CUDA graph reads: the observations of the members. Some may be measured already."""

    parts: tuple[Observation | Measurement, ...]

    @property
    def constant(self) -> None:
        """None: only the tensors can change."""

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Given":
        """A copy with `change` applied once to every tensor. Shared tensors stay shared."""
        results: dict[int, Tensor] = {}

        def change_once(t: Tensor) -> Tensor:
            if id(t) not in results:
                results[id(t)] = change(t)
            return results[id(t)]

        return Given(tuple(part.changed(change_once) for part in self.parts))


class Guard(Detector):
    """Tells whether a classifier is looking at something it was never trained on, by several scores at once.

    Gram sees texture. Profile sees how features go through the network. Class ratio sees how near the classes
    are, and energy sees the logits. Mahalanobis++ and KNN compare the last features with those of training
    examples, and image sees the input itself. Labels are not used. The scores are standardised on
    in-distribution data. Each is weighted by how much it tells about outliers that the guard makes itself.
    The weighted sum is ranked: see docs/guard.md.

    Example:
        >>> guard = gramwatch.Guard(model)
        >>> guard.fit(train_loader)
        >>> guard.calibrate(validation_loader)
        >>> detection = guard(images)
        >>> detection.is_ood, detection.parts

    Args:
        model: any classifier that returns logits. It is not changed.
        effort: how much of the network Gram looks at. `"lean"`: about 256 pixels and at most 128 channels of
            each of 24 tensors, and orders 1, 2, 4, 8. `"full"`: everything, as in the paper, at many times
            the cost.
        taps: which tensors Gram watches, as for `GramDetector`; None: those of `effort`.
        orders: the orders of the Gram matrices, P; None: those of `effort`.
        pixels: about how many pixels of each tensor Gram looks at, `"all"` for all; None: those of `effort`.
        channels: at most how many channels of each tensor Gram looks at, likewise.
        statistic: the statistic of Gram, as for `GramDetector`.
        storage: the storage of Gram's bounds, as for `GramDetector`.
        level: the share of in-distribution inputs to keep; `1 - level` is the false-alarm rate.
        per_class: let the false-alarm rate hold for each group of predicted classes, not only on the whole. A
            class is a group by itself if it is predicted for at least 100 examples of the half that
            standardises. All rarer classes share one group. `groups_` lists the groups.
        members: the methods whose scores are joined: `"gram"`, and names of `gramwatch.methods.METHODS` that
            need no passes of their own; None: `MEMBERS`. A warning names the members that the network does
            not support: members that need features, if the logits are not made by one linear layer; members
            that need taps, if the network has none. They are left out. So are members that look at images,
            without a warning, if the input is no image.
        rehearse: let `calibrate` learn how much each member counts on this network, from outliers that it
            makes of calibration inputs: see docs/guard.md. With False, all members count the same.
        inputs: how a batch becomes the network's input: a function of the batch, or a key. It is not needed
            for a tensor, a tuple whose first item is the input, or a mapping of keyword arguments.
        logits: where the logits are in the network's output, if the network returns more than logits: a
            name, a position, or a function of the output.
        mask: which places of an input are padding, which does not count: a function from the network's
            arguments to a mask `(N, length)` with 0 at padding, or the name of the argument that is the mask.
            None: `attention_mask`, if the network gets one. False: padding counts.

    Attributes:
        members: the joined detectors, by name.
        metadata: a free dictionary that is saved with the guard (preprocessing, class names, ...).
        record_pass: whether the forward pass is part of the CUDA graph, on a GPU, from the third batch of a
            shape on. None, the default: if that is safe; `print(guard)` says why it is not. False: never.
            True: for fitting, too, and even if the network has forward hooks. A replay does not call them.

    """

    name = "Guard"
    title = "Guard"
    stands_beside_baseline = True
    uses_labels = False

    def __init__(
        self,
        model: nn.Module | Network,
        *,
        effort: str = "lean",
        taps: str | Iterable[str] | None = None,
        orders: Iterable[int] | None = None,
        pixels: int | str | None = None,
        channels: int | str | None = None,
        statistic: str = "auto",
        storage: str = "float32",
        level: float = 0.95,
        per_class: bool = False,
        members: Iterable[str] | None = None,
        rehearse: bool = True,
        inputs: InputsAdapter = None,
        logits: LogitsAdapter = None,
        mask: MaskAdapter = None,
    ) -> None:
        if effort not in EFFORTS:
            raise ValueError(f"effort must be one of {', '.join(EFFORTS)}; got {effort!r}")
        chosen = {"taps": taps, "orders": orders, "pixels": pixels, "channels": channels}
        gram = EFFORTS[effort] | {name: value for name, value in chosen.items() if value is not None}
        for name in ("pixels", "channels"):
            gram[name] = None if gram[name] == "all" else gram[name]
        detectors: dict[str, Detector] = {}
        network = Network.of(model, inputs, logits, mask)
        for name in MEMBERS if members is None else members:
            if name == "gram":
                detectors[name] = GramDetector(
                    network, statistic=statistic, storage=storage, level=level, **gram
                )
            elif name in METHODS:
                detectors[name] = METHODS[name](network, level=level)
            else:
                raise ValueError(f"there is no member '{name}': choose from gram, {', '.join(METHODS)}")
        self._join(detectors, level, per_class, rehearse)

    @classmethod
    def of(
        cls,
        members: Mapping[str, Detector],
        *,
        level: float = 0.95,
        per_class: bool = False,
        rehearse: bool = True,
    ) -> "Guard":
        """A guard of existing detectors of one network, which may be in use elsewhere too.

        The guard shares their fit. After a further fit of a member, calibrate the guard again.
        """
        guard = cls.__new__(cls)
        guard._join(dict(members), level, per_class, rehearse)
        return guard

    def _join(self, members: dict[str, Detector], level: float, per_class: bool, rehearse: bool) -> None:
        if not members:
            raise ValueError("a guard needs at least one member")
        network = next(iter(members.values())).network
        for name, member in members.items():
            if member.network != network:
                raise ValueError(f"'{name}' judges another network than the first member")
            if member.alone:
                raise ValueError(f"'{name}' takes passes of its own, and a guard has one: leave it out")
            if member.why_no_member:
                raise ValueError(f"'{name}' {member.why_no_member}")
            if sum(member is other for other in members.values()) > 1:
                raise ValueError(f"'{name}' is a member by two names: give it one")
        self._all_members, self.members = members, members
        self.per_class, self.rehearse = bool(per_class), bool(rehearse)
        self._chosen = list(members)
        self.record_pass: bool | None = None
        super().__init__(network, level=level)

    def _begin(self) -> None:
        self.members = self._all_members
        self._settled = False
        super()._begin()

    def reset(self) -> "Guard":
        """Forget the training and calibration data of all members. The settings stay."""
        for member in self._all_members.values():
            member.reset()
        return super().reset()

    # --- what is known so far ------------------------------------------------------------------------

    @property
    def is_fitted(self) -> bool:
        """Whether all members are fitted."""
        return all(member.is_fitted for member in self.members.values())

    @property
    def trained_on_outliers(self) -> bool:  # type: ignore[override]
        """Whether the network was trained with outliers for one of the members. Tables say so."""
        return any(member.trained_on_outliers for member in self.members.values())

    @property
    def tuned_on_outliers(self) -> bool:  # type: ignore[override]
        """Whether one of the members was tuned on outliers. Tables say so."""
        return any(member.tuned_on_outliers for member in self.members.values())

    @property
    def groups_(self) -> list[list[int]]:
        """The groups of classes that are ranked together. Without `per_class`, all classes are one group."""
        group_of = self.calibration().ranks.group_of
        return [(group_of == group).nonzero().flatten().tolist() for group in range(int(group_of.max()) + 1)]

    def to(self, device: torch.device | str) -> "Guard":
        """Move the network and the fitted tensors to a device."""
        for member in self.members.values():
            member.to(device)
        return self

    def _described_fit(self) -> str:
        weights = None if self._calibration is None else self._calibration.rule.weights
        if weights is None:
            return " + ".join(self.members)
        return " + ".join(f"{w:.2f} {name}" for name, w in zip(self.members, weights.tolist(), strict=True))

    def __repr__(self) -> str:
        state = "not calibrated"
        if self._calibration is not None:
            state = "calibrated per class" if self.per_class else f"threshold {self.threshold_:.4g}"
        graphs = vars(self._plan).get("graphs") if self._plan is not None else None
        recorded = f", {graphs.described}" if graphs is not None and graphs.described else ""
        return f"Guard({type(unwrap(self.model)).__name__}: {self._described_fit()}, {state}{recorded})"

    # --- fit -----------------------------------------------------------------------------------------

    @property
    def learns(self) -> bool:
        """Whether one of the members needs training data."""
        return any(member.learns for member in self.members.values())

    def check_useful(self) -> None:
        """Warn of members that give every input the same score."""
        for member in self.members.values():
            if member.says_nothing:
                warn(f"{member.says_nothing}. Until then it says the same of every input")

    def settle(self, look: Look) -> None:
        """At the first batch, leave out members that this network does not support."""
        if self._settled:
            return
        unusable = {name: why for name, member in self.members.items() if (why := why_not(member, look))}
        if len(unusable) == len(self.members):
            reasons = "; ".join(dict.fromkeys(unusable.values()))
            raise TapError(f"no member can be used, {', '.join(unusable)}: {reasons}")
        for why in dict.fromkeys(unusable.values()):
            if why == image_numbers.WHY_NONE:
                continue  # texts and tables are no images: nothing is missing
            names = [name for name, reason in unusable.items() if reason == why]
            verb = "is" if len(names) == 1 else "are"
            warn(f"{', '.join(names)} {verb} left out of the guard: {why}")
        if unusable:
            self.members = {name: member for name, member in self.members.items() if name not in unusable}
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
            member._merge(other.members[name])
            member.forget_calibration()

    # --- calibrate and judge -------------------------------------------------------------------------

    def rule(self) -> JointRule:
        """The rule that joins the members, not fitted yet."""
        rules = {name: member.member_rule() for name, member in self.members.items()}
        return JointRule({name: rule for name, rule in rules.items() if rule.standardises})

    def rehearsed(
        self,
        calibration: Calibration,
        standard: Measurement,
        kept: "KeptInputs",
        group: "Group",
        progress: bool,
    ) -> Calibration:
        """The calibration with the weights that a rehearsal found."""
        if not self.rehearse or len(self.members) == 1:
            return calibration
        from gramwatch.guard.rehearsal import rehearse

        rule: JointRule = calibration.rule

        def scores(inputs: Inputs) -> Tensor:
            measured = self.measure(on_device(inputs, self.model)).changed(Tensor.cpu)
            return rule.standard(rule.member_scores(measured)[measured.finite])

        usual = rule.standard(rule.member_scores(standard, left_out=True))
        rehearsal = rehearse(scores, usual, kept, group, self.network.mask_of, progress)
        if rehearsal is None:
            return calibration
        rule = replace(rule, weights=rehearsal.weights)
        of_members = calibration.scores[:, 1:]
        ranking = torch.cat([rule.joined(of_members).unsqueeze(1), of_members], 1)
        return calibration.with_rule(rule, ranking, self.level, rehearsal=rehearsal.facts)

    @property
    def weights_(self) -> dict[str, float]:
        """How much each member counts, one on average: what the rehearsal found out about this network."""
        weights = self.calibration().rule.weights
        return dict(
            zip(self.members, [1.0] * len(self.members) if weights is None else weights.tolist(), strict=True)
        )

    def check_calibration(self, measured: Measurement) -> None:
        """Refuse training examples as calibration data."""
        for name, member in self.members.items():
            if member.sees_differences:
                member.check_calibration(measured.parts[name])

    def check_rule(self, rule: JointRule) -> None:
        """Warn of taps and members that the score leaves out."""
        for name, of_member in rule.rules.items():
            self.members[name].check_rule(of_member)
        assert rule.standard.tail_ is not None
        for name, tail in zip(self.members, rule.standard.tail_.tolist(), strict=True):
            if tail == torch.inf:
                warn(f"{name} says the same of all calibration examples and is left out of the score")

    def contributions(self, measured: Measurement, observed: Mapping[Any, Observation]) -> list[Contribution]:
        """The terms of all members.

        Without stored medians of its taps, the median of a member is shared evenly by its taps.
        """
        rule: JointRule = self.calibration(measured.logits.device).rule
        standard, medians = rule.standard(rule.member_scores(measured)), rule.standard.median_
        assert medians is not None
        assert rule.standard.tail_ is not None
        contributions = []
        for column, (name, member) in enumerate(self.members.items()):
            terms = rule.terms_of(name, measured)
            if terms is None and member in observed:
                terms = member.terms(observed[member])
            own = rule.rules.get(name)
            words: tuple[str, ...] = ()
            if terms is None and member in observed:
                words = member.words(observed[member], own)
            usual: Tensor | float = rule.medians.get(name, 0.0)
            if terms is not None and name not in rule.medians:
                usual = float(medians[column]) / terms.shape[1]
            weight = 1.0 if rule.weights is None else float(rule.weights[column])
            tail = float(rule.standard.tail_[column]) / weight if weight else torch.inf
            total = weight * standard[:, column]
            contributions.append(Contribution(name, member, own, total, terms, usual, tail, words))
        return contributions

    def _replayed(self, inputs: Inputs) -> Verdict:
        """The verdict on a batch on a GPU, by a CUDA graph if the batch fits into one pass."""
        tensors = self.planned(inputs).judged(inputs, self)
        return self.judge(self._run(inputs)) if tensors is None else Verdict(*tensors)

    def given(self, observations: Sequence[Observation]) -> Given:
        """What a CUDA graph reads. Members with kernels of their own have measured."""
        return Given(
            tuple(
                leaf.measured(observation) if leaf.measured_by_kernels else observation
                for leaf, observation in zip(self._observers, observations, strict=True)
            )
        )

    def judge_given(self, given: Given) -> tuple[Tensor, ...]:
        """The tensors of the verdict. This does not wait for a GPU."""
        (measured,) = measure([self], self._observers, [given.parts])
        return tuple(t for t in self.judge(measured) if t is not None)

    def tables(self) -> list[Tensor]:
        """The fitted tensors that kernels of the members read."""
        return [table for member in self.members.values() for table in member.tables()]

    # --- save and load -------------------------------------------------------------------------------

    def settings_as_json(self) -> dict[str, Any]:
        """The arguments of the guard. The members have their own settings."""
        return {
            "members": self._chosen,
            "level": self.level,
            "per_class": self.per_class,
            "rehearse": self.rehearse,
        }

    def contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What to save: plain values, and tensors, of the guard and of all members."""
        members: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for name, member in self.members.items():
            members[name], member_tensors = member.contents()
            tensors |= {f"members.{name}.{key}": tensor for key, tensor in member_tensors.items()}
        calibration = self._calibration
        if calibration is not None:
            scores, predicted = calibration.scores, calibration.predicted
            assert predicted is not None
            tensors |= {"calibration.scores": scores, "calibration.predicted": predicted}
            if self.per_class:
                tensors["calibration.groups"] = calibration.ranks.group_of
            tensors |= {f"calibration.{name}": t for name, t in calibration.rule.tensors().items()}
        header = {
            "detector": self.name,
            "settings": self.settings_as_json(),
            "members": members,
            "calibration": None
            if calibration is None
            else {**calibration.how, "medians": {n: len(m) for n, m in calibration.rule.medians.items()}},
        }
        return header, tensors

    @classmethod
    def described(
        cls, header: Mapping[str, Any], model: nn.Module | Network
    ) -> tuple["Guard", artifact.Shapes]:
        """The guard without its tensors, and the fields that its tensors must match."""
        members: dict[str, Detector] = {}
        shapes: artifact.Shapes = {}
        headers = header["members"]
        for name, member_header in headers.items():
            detector = single(member_header["detector"])
            members[name], member_shapes = detector.described(member_header, model)
            shapes |= {f"members.{name}.{key}": field for key, field in member_shapes.items()}
        settings, how = header["settings"], header["calibration"]
        artifact.check_types(settings, members=list[str], level=float, per_class=bool)
        if members.keys() - set(settings["members"]):
            raise ValueError(f"it was to have the members {settings['members']!r:.60}")
        rehearse = settings.get("rehearse", False)  # guards of earlier versions did not
        if not isinstance(rehearse, bool):
            raise ValueError(f"rehearse is {rehearse!r:.60}")
        guard = cls.of(members, level=settings["level"], per_class=settings["per_class"], rehearse=rehearse)
        guard._chosen = settings["members"]
        if how is not None:
            ranking, classes, kind = how_many_rank(how), how["classes"], torch.float64
            artifact.check_types(how, classes=int)
            if any(member.get("classes", classes) != classes for member in headers.values()):
                raise ValueError(f"its members were fitted on other than {classes:,} classes")
            if not 0 < classes <= MOST_CLASSES:
                raise ValueError(f"a network has no {classes:,} classes")
            predicted = artifact.within(0, classes - 1)
            shapes["calibration.scores"] = Field((ranking, 1 + len(members)), kind, artifact.FINITE)
            shapes["calibration.predicted"] = Field((ranking,), torch.int64, predicted)
            if guard.per_class:
                shapes["calibration.groups"] = Field((classes,), torch.int64, predicted)
            tolerance_in(how, 1 + len(members))
            if "rehearsal" in how:
                from gramwatch.guard.rehearsal import check_facts

                check_facts(how["rehearsal"])
            rule = guard.rule()
            values = {name: members[name].values_in(headers[name]) for name in rule.rules}
            fields = rule.fields(len(members), values, how)
            shapes |= {f"calibration.{name}": field for name, field in fields.items()}
        return guard, shapes

    def restore(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Set the tensors from a file."""
        for name, member in self.members.items():
            member.restore(header["members"][name], below(tensors, f"members.{name}."))
        how = header["calibration"]
        if how is None:
            return
        fitted = below(tensors, "calibration.")
        if "weights" in fitted:
            from gramwatch.guard.rehearsal import check_weights

            check_weights(fitted["weights"])
        rule = self.rule().restored(fitted)
        scores, predicted = fitted["scores"], fitted["predicted"]
        together = torch.zeros(int(how["classes"]), dtype=torch.int64)
        groups = fitted.get("groups", together)
        how = facts_of(how, "classes", "rehearsal")
        self._calibration = Calibration.restored(rule, scores, self.level, how, predicted, groups)

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Write a folder in Hugging Face's layout: `guard.safetensors`, `config.json` and a model card.

        What you write into the card outside of the marked part is kept. A folder that holds the files of
        something else, such as a network, is refused. The card takes the names of network, data and classes
        from `metadata`: its entries `model`, `images`, `classes` and `preprocessing`.
        """
        from gramwatch.guard import pretrained

        pretrained.save(self, folder)

    @classmethod
    def from_pretrained(cls, folder: str | PathLike[str], model: nn.Module, **options: Any) -> "Guard":
        """The guard of a folder that `save_pretrained` wrote. Nothing in the folder is executed.

        `options` are those of `gramwatch.load`: `accept_other_weights`, `check_probe`, `inputs`, `logits`,
        `mask`.
        """
        from gramwatch.guard import pretrained

        return pretrained.load(cls, folder, model, **options)

    def export(self, path: str | PathLike[str], images: Any, *, preprocessing: bool = False) -> None:
        """Write the network and the guard as one graph. It needs neither this library nor the network's code.

        The graph takes a batch of any size. It returns `logits`, `predicted`, `score`, `p_value`, `is_ood`,
        and `parts.NAME` for each member: see docs/howto/export.md.

        Args:
            path: a file that ends in `.onnx`, or in `.pt2` for `torch.export.load`.
            images: a batch as for a call. The graph takes images of its size.
            preprocessing: let the graph take uint8 pixels, `(N, height, width, channels)`, of images that are
                resized and cropped. It scales and normalises them as `metadata["preprocessing"]` says.

        """
        from gramwatch.deploy import export

        export.export(self, path, images, preprocessing)

    def take_over(self, before: "Guard") -> None:
        """Continue the fit of another guard. Members that it left out stay out."""
        for name, earlier in before.members.items():
            self.members[name].take_over(earlier)
        self.members = {name: member for name, member in self.members.items() if name in before.members}
        self._plan = None

    def adopt(self, finished: "Guard") -> None:
        """Take over the finished fit of another guard."""
        super().adopt(finished)
        for name, member in self.members.items():
            member.adopt(finished.members[name])


def why_not(member: Detector, look: Look) -> str:
    """Why a network does not support a member; empty if it does."""
    needs = member.needs
    if needs.image and image_numbers.image_of(look.inputs) is None:
        return image_numbers.WHY_NONE
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
