"""From a `Measurement` to a `Detection`: a `Rule` computes the score, a `Calibration` ranks it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from gramwatch.detect.split import halves
from gramwatch.detect.threshold import Ranks, class_groups, examples_needed, rounding_of, threshold
from gramwatch.errors import CalibrationError, warn
from gramwatch.files import artifact
from gramwatch.files.artifact import Field

MOST_COPIES = 0.01
"""More exact copies among calibration examples than this share are worth a warning."""
MOST_ROUNDING = 0.1
"""A tolerance above this share of the spread of scores is worth a warning."""


_R = TypeVar("_R", bound="FittedRule")


class Verdict(NamedTuple):
    """The tensors of a detection, on the device of the network. A CUDA graph returns them."""

    score: Tensor
    """`(N,)`"""
    p_values: Tensor
    """The p-values of the score and of the members, `(N, 1 + members)`."""
    is_ood: Tensor
    """`(N,)`"""
    logits: Tensor
    """`(N, classes)`"""
    predicted: Tensor
    """`(N,)`"""
    finite: Tensor
    """The number of examples that are finite, a scalar."""
    deviations: Tensor | None = None
    """`(N, taps)`, of a detector that shows them."""
    class_support: Tensor | None = None
    """`(N,)`, likewise."""


@dataclass(frozen=True)
class Detection:
    """The result of a detector for a batch of N inputs."""

    logits: Tensor
    """The network's output, `(N, classes)`."""
    predicted: Tensor
    """The predicted class, `(N,)`."""
    score: Tensor
    """Gram's total deviation, or the score of another method or a guard, `(N,)`. Higher is more unusual."""
    p_value: Tensor
    """The share of the calibration examples that rank, and of the input itself, that score at least as high,
    `(N,)`. It is never below `1 / (n + 1)`, with which none of n examples scores as high."""
    is_ood: Tensor
    """Whether `p_value <= 1 - level`, `(N,)`."""
    deviations: Tensor | None = None
    """delta_l of Eq. 4, `(N, taps)`, in the order of `detector.taps`; None from other methods."""
    class_support: Tensor | None = None
    """The number of training examples with this predicted class, `(N,)`. If small, the bounds are narrow.
    If zero, bounds pooled over all classes are used, and an outlier may look normal."""
    parts: Mapping[str, Tensor] | None = None
    """The p-values of the members of a `Guard`, `(N,)` each. They show which member raised the alarm."""
    taps: tuple[str, ...] | None = None
    """The names of the taps, one for each column of `deviations`."""

    def __len__(self) -> int:
        return len(self.score)

    def __getitem__(self, index: Any) -> "Detection":
        """The detection of one example, `detection[0]`, or of several: a slice, numbers or a mask."""
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(f"there is no example {index}: the batch has {len(self)}")
            index = slice(index, index + 1 or None)

        def chosen(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: part[index] for name, part in value.items()}
            return value[index] if isinstance(value, Tensor) else value

        return Detection(**{name: chosen(value) for name, value in vars(self).items()})

    def __iter__(self) -> "Iterator[Detection]":
        """The examples one by one."""
        return (self[i] for i in range(len(self)))

    def to_dict(self) -> dict[str, Any]:
        """Plain lists with one entry per example, for JSON or a table. Fields that are None are left out.

        `parts` has one list per member, `deviations` one list per tap.
        """
        plain: dict[str, Any] = {
            name: value.tolist()
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name not in ("logits", "deviations")
        }
        if self.parts is not None:
            plain["parts"] = {name: part.tolist() for name, part in self.parts.items()}
        if self.deviations is not None and self.taps is not None:
            plain["deviations"] = dict(zip(self.taps, self.deviations.T.tolist(), strict=True))
        return plain

    def __repr__(self) -> str:
        rows = [
            f"  {i}: class {int(self.predicted[i])}, score {float(self.score[i]):.4g}, "
            f"p {float(self.p_value[i]):.2g}{self._shown_parts(i)}"
            f"{', out-of-distribution' if self.is_ood[i] else ''}"
            for i in range(min(len(self), 10))
        ]
        if len(self) > 10:
            rows.append(f"  ... {len(self) - 10} more")
        return "\n".join([f"Detection: {int(self.is_ood.sum())} of {len(self)} out-of-distribution", *rows])

    def _shown_parts(self, i: int) -> str:
        if self.parts is None:
            return ""
        return f" ({', '.join(f'{name} {float(p[i]):.2g}' for name, p in self.parts.items())})"


@dataclass(frozen=True)
class Measurement:
    """What a detector measures of N inputs, before any calibration."""

    values: Tensor
    """`(N, k)`. Gram: one deviation per tap. Other methods: their score. Guard: the values of all members."""
    logits: Tensor
    """`(N, classes)`"""
    finite: Tensor
    """Whether an example and its observation are finite, `(N,)`."""
    columns: Mapping[str, slice] | None = None
    """The columns of `values` by member, if this is the measurement of a guard."""

    @property
    def deviations(self) -> Tensor:
        """The values under the name that Gram gives them: delta_l of Eq. 4."""
        return self.values

    @cached_property
    def predicted(self) -> Tensor:
        """The predicted class, D_c."""
        return self.logits.argmax(1)

    @cached_property
    def probability(self) -> Tensor:
        """The maximum softmax probability."""
        return self.logits.double().softmax(1).amax(1)

    @cached_property
    def parts(self) -> "dict[str, Measurement]":
        """The measurements of the members of a guard, by name."""
        columns = self.columns or {}
        return {
            name: Measurement(self.values[:, part], self.logits, self.finite)
            for name, part in columns.items()
        }

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> "Measurement":
        """The measurement of the chosen examples: a slice, numbers or a mask."""
        return self.changed(lambda t: t[index])

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Measurement":
        """A copy with `change` applied to every tensor."""
        return Measurement(change(self.values), change(self.logits), change(self.finite), self.columns)

    @staticmethod
    def joined(parts: "Sequence[Measurement]") -> "Measurement":
        """One measurement of several batches, on the CPU."""
        return Measurement.of_pieces([part.changed(Tensor.cpu) for part in parts])

    @staticmethod
    def of_pieces(parts: "Sequence[Measurement]") -> "Measurement":
        """One measurement of the pieces of a batch, on their device."""
        values, logits, finite = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("values", "logits", "finite")
        )
        return Measurement(values, logits, finite, parts[0].columns)

    @staticmethod
    def together(measured: "Mapping[str, Measurement]") -> "Measurement":
        """The measurements of several members, of the same inputs, side by side."""
        first = next(iter(measured.values()))
        columns, start = {}, 0
        for name, member in measured.items():
            columns[name] = slice(start, start := start + member.values.shape[1])
        values = torch.cat([member.values.double() for member in measured.values()], 1)
        finite = torch.stack([member.finite for member in measured.values()]).all(0)
        return Measurement(values, first.logits, finite, columns)


class Rule(Protocol):
    """Turns a measurement into a score."""

    standardises: bool
    """Whether the rule must be fitted to in-distribution examples."""

    def fit(self, measured: Measurement) -> "Rule":
        """The rule fitted to in-distribution examples, all finite."""

    def __call__(self, measured: Measurement) -> Tensor:
        """The score in the first column, the scores of members in further columns, `(N, 1 + members)`.

        Higher is more out-of-distribution. The scores of an example that is not finite are infinite.
        """

    def left_out(self, measured: Measurement) -> Tensor:
        """The scores of the very examples that fitted the rule, as if each had been left out."""

    def to(self, device: torch.device) -> "Rule":
        """The rule on another device."""

    def terms(self, measured: Measurement) -> Tensor | None:
        """The terms of the score, one per tap, `(N, taps)`; None if the measurement does not show them."""

    def taught_by(self, fitted: Any) -> "Rule":
        """The rule, not fitted, with what a rehearsal taught a fitted one."""


class FittedRule(ABC):
    """A rule whose tensors come from in-distribution examples.

    It declares these tensors in `kept`: attributes, and arguments of the same name. How they are saved,
    checked and moved follows from that.
    """

    standardises = True
    kept: ClassVar[artifact.Shapes] = {}
    """The fitted tensors. A size called "values" is the number of values that the member measures."""
    in_file: ClassVar[Mapping[str, str]] = {}
    """The names that tensors have in the file of a detector by itself, if they are not those in `kept`."""

    @abstractmethod
    def fit(self: _R, measured: Measurement) -> _R:
        """The rule fitted to in-distribution examples, all finite."""

    @abstractmethod
    def __call__(self, measured: Measurement) -> Tensor:
        """The score, `(N, 1)`; infinite if an example is not finite."""

    def left_out(self, measured: Measurement) -> Tensor:
        """The scores of the very examples that fitted the rule. Most rules hardly depend on one example."""
        return self(measured)

    def terms(self, measured: Measurement) -> Tensor | None:
        """The terms of the score, one per tap, `(N, taps)`; None if it is no sum."""
        return None

    def taught_by(self: _R, fitted: Any) -> _R:
        """The rule itself: it learns nothing by rehearsal."""
        return self

    @classmethod
    def fields(cls, values: int) -> artifact.Shapes:
        """The fitted tensors of a rule for so many values."""
        return {
            name: replace(field, shape=tuple(values if size == "values" else size for size in field.shape))
            for name, field in cls.kept.items()
        }

    def tensors(self) -> dict[str, Tensor]:
        """The fitted tensors, by name."""
        return {name: getattr(self, name) for name in self.kept}

    def restored(self: _R, tensors: Mapping[str, Tensor]) -> _R:
        """The rule with these fitted tensors."""
        return type(self)(**tensors)

    def to(self: _R, device: torch.device) -> _R:
        """The rule on another device."""
        return self.restored({name: tensor.to(device) for name, tensor in self.tensors().items()})


class AsMeasured(FittedRule):
    """The rule of methods that measure their score itself. It has nothing to fit."""

    standardises = False

    def fit(self, measured: Measurement) -> "AsMeasured":
        """The rule itself."""
        return self

    def __call__(self, measured: Measurement) -> Tensor:
        """The values, which are the score."""
        return measured.values


@dataclass(frozen=True)
class Calibration:
    """A fitted rule, and the in-distribution scores among which new scores are ranked."""

    rule: Any
    scores: Tensor
    """The scores of the examples that rank, `(n, 1 + members)`."""
    predicted: Tensor | None
    """The predicted classes of these examples, `(n,)`."""
    ranks: Ranks
    how: Mapping[str, Any]
    """The facts of the calibration: `split`, `seed`, `examples`, `classes`, `tolerance`."""

    @staticmethod
    def of(
        measured: Measurement,
        rule: Any,
        level: float,
        *,
        per_class: bool = False,
        split: bool = True,
        seed: int = 0,
        numbers: Tensor | None = None,
    ) -> "Calibration":
        """The calibration from in-distribution examples, all finite: one half fits the rule, the other ranks.

        With `per_class`, the half that fits the rule also decides which classes are ranked together. Without
        `split`, all examples do both. `numbers` are the running numbers of the examples, by which the halves
        are drawn; None: 0, 1, 2 and so on. The tolerance is that of float32: see `threshold.rounding_of`.
        """
        examples = torch.arange(len(measured))
        fitting, ranking = halves(examples if numbers is None else numbers, seed)
        if not split:
            fitting = ranking = examples
        standard, ranked = measured[fitting], measured[ranking]
        rule, classes = rule.fit(standard), measured.logits.shape[1]
        groups = torch.zeros(classes, dtype=torch.int64)
        if per_class:
            groups = class_groups(standard.predicted, classes, level)
        scores = rule(ranked) if split else rule.left_out(ranked)
        tolerance = rounding_of(scores).tolist()
        how = {
            "split": split,
            "seed": seed,
            "examples": len(measured),
            "classes": classes,
            "tolerance": tolerance,
        }
        return Calibration.restored(rule, scores, level, how, ranked.predicted, groups)

    @staticmethod
    def restored(
        rule: Any,
        scores: Tensor,
        level: float,
        how: Mapping[str, Any],
        predicted: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> "Calibration":
        """The calibration from the scores of a file, `(n, kinds)`. Without groups, all classes rank together.

        Args:
            rule: the fitted rule.
            scores: of the examples that rank.
            level: the share of in-distribution inputs to keep.
            how: the facts of the calibration.
            predicted: the predicted classes of the examples that rank, if they are known.
            groups: the group of each class.

        """
        groups = torch.zeros(1, dtype=torch.int64) if groups is None else groups
        classes = torch.zeros(len(scores), dtype=torch.int64) if predicted is None else predicted
        limits = scores + tolerance_in(how, scores.shape[1])
        return Calibration(rule, scores, predicted, Ranks.of(limits, level, classes, groups), how)

    def with_rule(self, rule: Any, scores: Tensor, level: float, **facts: Any) -> "Calibration":
        """The calibration with another rule, which gives the examples that rank these scores."""
        facts["tolerance"] = rounding_of(scores).tolist()
        before = {name: fact for name, fact in self.how.items() if name not in facts}
        how = before | facts  # in the order of `facts_of`: a loaded detector is saved as the same file
        groups = self.ranks.group_of
        return Calibration.restored(rule, scores, level, how, self.predicted, groups)

    def tolerating(self, tolerance: Tensor, level: float) -> "Calibration":
        """The calibration with at least this tolerance for each kind of score, `(1 + members,)`."""
        how = {**self.how, "tolerance": tolerance.maximum(self.tolerance).tolist()}
        groups = self.ranks.group_of
        return Calibration.restored(self.rule, self.scores, level, how, self.predicted, groups)

    @property
    def tolerance(self) -> Tensor:
        """By how much a score must exceed a ranking score to count as higher, `(1 + members,)`.

        It is at least twice the rounding of the network, whose scores differ a little with the batch that an
        input is part of. So all copies of an input are equal.
        """
        return tolerance_in(self.how, self.scores.shape[1])

    @property
    def limits(self) -> Tensor:
        """The scores that rank, raised by the tolerance, `(n, 1 + members)`. Higher ones exceed them."""
        return self.scores + self.tolerance

    # --- the file of a detector by itself ------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the file: the scores that rank, ascending, and those of the rule."""
        names, tensors = self.rule.in_file, self.rule.tensors()
        of_rule = {f"calibration.{names.get(name, name)}": tensor for name, tensor in tensors.items()}
        return {"calibration.scores": self.scores[:, 0].sort().values, **of_rule}

    @staticmethod
    def fields(rule: type[FittedRule], values: int, ranking: int | str) -> artifact.Shapes:
        """The fields of these tensors, of a rule for so many values and so many scores that rank."""
        fields, names = rule.fields(values), rule.in_file
        of_rule = {f"calibration.{names.get(name, name)}": field for name, field in fields.items()}
        return {"calibration.scores": Field((ranking,), torch.float64, artifact.ASCENDING), **of_rule}

    @staticmethod
    def loaded(
        rule: FittedRule, tensors: Mapping[str, Tensor], level: float, how: Mapping[str, Any]
    ) -> "Calibration":
        """The calibration from these tensors, of a rule that is not fitted."""
        scores, names = tensors["calibration.scores"], rule.in_file
        if how_many_rank(how) != len(scores):
            raise ValueError(f"{len(scores)} examples rank, not {how_many_rank(how)}")
        fitted = {name: tensors[f"calibration.{names.get(name, name)}"] for name in rule.kept}
        return Calibration.restored(rule.restored(fitted), scores.unsqueeze(1), level, facts_of(how))

    # --- judge ---------------------------------------------------------------------------------------

    def threshold(self, level: float) -> float:
        """The score above which an input is out-of-distribution (Eq. 6), if all classes rank together."""
        return threshold(self.limits[:, 0], level)

    def judged(self, measured: Measurement) -> Verdict:
        """The verdict: the score, its p-value and those of the members, and whether it is flagged."""
        scores, predicted = self.rule(measured), measured.logits.argmax(1)
        p_values, is_ood = self.ranks.judged(scores, predicted)
        return Verdict(scores[:, 0], p_values, is_ood, measured.logits, predicted, measured.finite.sum())

    def to(self, device: torch.device) -> "Calibration":
        """The calibration with its rule and ranks on another device. The scores stay where they are."""
        return replace(self, rule=self.rule.to(device), ranks=self.ranks.to(device))


class Calibrated(Protocol):
    """A calibrated detector, or an exported guard."""

    level: float

    def calibration(self) -> Calibration:
        """The fitted rule and the scores that rank."""


def calibration_needs(level: float, split: bool) -> int:
    """The fewest examples from which a level can be calibrated."""
    return examples_needed(level) * (2 if split else 1)


def check_enough(examples: int, level: float, split: bool) -> None:
    """Raise an error if there are too few calibration examples for the level."""
    needed = calibration_needs(level, split)
    if examples < needed:
        raise CalibrationError(
            f"{examples} calibration examples cannot support level {level}: "
            f"at least {needed} are needed" + (" (half of them rank)" if split else "")
        )


def warn_of_calibration(finite: Tensor, copies: int) -> None:
    """Warn of calibration examples that are not finite, and of exact copies, with what they cost."""
    examples, broken = len(finite), int((~finite).sum())
    if broken:
        warn(
            f"{broken} calibration example(s) with NaN or infinity were left out. The rate of false alarms "
            "holds for finite inputs. Others are always flagged and come on top, "
            f"{broken / examples:.1%} if they are as many later"
        )
    if copies > MOST_COPIES * examples:
        warn(
            f"{copies:,} of {examples:,} calibration examples are exact copies of others: "
            f"{examples - copies:,} are different. Leave copies out, unless inputs in use repeat in the same "
            "way. They raise the rate of false alarms: 1,000 images that were 20 images, 50 times each, gave "
            "23 % instead of 5 %"
        )


def warn_of_rounding(largest: float, scores: Tensor, problem: str) -> None:
    """Warn if the rounding of scores could not be measured, or if it is too large to be rounding."""
    if problem:
        warn(
            "calibration inputs could not be run again in batches of other sizes, so the tolerance of ranks "
            f"is that of float32 ({problem})"
        )
    spread = float(scores.quantile(0.95) - scores.median())
    if 2 * largest > MOST_ROUNDING * spread > 0:
        warn(
            f"the scores of the same inputs differ by up to {largest:.2g} between batches, where the 95th "
            f"percentile of scores is {spread:.2g} above their median. Fewer inputs than asked for will be "
            "flagged. A network in evaluation mode should not depend on the other inputs of a batch"
        )


def how_many_rank(calibration: Mapping[str, Any]) -> int:
    """The number of calibration examples that rank, from the header of a file."""
    artifact.check_types(calibration, split=bool, seed=int, examples=int)
    examples: int = calibration["examples"]
    return examples - examples // 2 if calibration["split"] else examples


def facts_of(how: Mapping[str, Any], *further: str) -> dict[str, Any]:
    """The facts of a calibration that the file of a detector keeps, and further ones."""
    return {name: how[name] for name in ("split", "seed", "examples", *further, "tolerance") if name in how}


def tolerance_in(how: Mapping[str, Any], kinds: int) -> Tensor:
    """The tolerance of each kind of score, `(kinds,)`, from the facts of a calibration.

    Files of earlier versions have none. Their tolerance is zero.
    """
    tolerance = how.get("tolerance", [0.0] * kinds)
    if not artifact.fits(tolerance, list[float]) or len(tolerance) != kinds or min(tolerance) < 0:
        raise ValueError(f"its tolerance is {tolerance!r:.60}")
    return torch.tensor(tolerance, dtype=torch.float64)
