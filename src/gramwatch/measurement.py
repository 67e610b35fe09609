"""From a `Measurement` to a `Detection`: a `Rule` computes the score, a `Calibration` ranks it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from gramwatch import artifact
from gramwatch.errors import CalibrationError
from gramwatch.threshold import Ranks, class_groups, examples_needed


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
        """The detection of one example, `found[0]`, or of several: a slice, numbers or a mask."""
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
            name: replace(self, values=self.values[:, part], columns=None) for name, part in columns.items()
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


class AsMeasured:
    """The rule of methods that measure their score itself."""

    standardises = False

    def fit(self, measured: Measurement) -> "AsMeasured":
        """The rule itself: it has nothing to fit."""
        return self

    def __call__(self, measured: Measurement) -> Tensor:
        """The values, which are the score."""
        return measured.values

    def left_out(self, measured: Measurement) -> Tensor:
        """The values: no example is part of a fit."""
        return measured.values

    def to(self, device: torch.device) -> "AsMeasured":
        """The rule itself: it has no tensors."""
        return self

    def terms(self, measured: Measurement) -> None:
        """None: a score shows no terms."""


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
    """The facts of the calibration: `split`, `seed`, `examples`, `classes`."""

    @staticmethod
    def of(
        measured: Measurement,
        rule: Any,
        level: float,
        *,
        per_class: bool = False,
        split: bool = True,
        seed: int = 0,
    ) -> "Calibration":
        """The calibration from in-distribution examples, all finite: one half fits the rule, the other ranks.

        With `per_class`, the half that fits the rule also decides which classes are ranked together. Without
        `split`, all examples do both.
        """
        examples = torch.arange(len(measured))
        fitting, ranking = halves(len(examples), seed) if split else (examples, examples)
        standard, ranked = measured[fitting], measured[ranking]
        rule, classes = rule.fit(standard), measured.logits.shape[1]
        groups = torch.zeros(classes, dtype=torch.int64)
        if per_class:
            groups = class_groups(standard.predicted, classes, level)
        scores = rule(ranked) if split else rule.left_out(ranked)
        predicted = ranked.predicted
        how = {"split": split, "seed": seed, "examples": len(measured), "classes": classes}
        return Calibration(rule, scores, predicted, Ranks.of(scores, level, predicted, groups), how)

    @staticmethod
    def restored(rule: Any, scores: Tensor, level: float, how: Mapping[str, Any]) -> "Calibration":
        """The calibration from the scores of a file, `(n,)`. All classes are ranked together."""
        together = torch.zeros(1, dtype=torch.int64)
        column = scores.unsqueeze(1)
        ranks = Ranks.of(column, level, torch.zeros(len(scores), dtype=torch.int64), together)
        return Calibration(rule, column, None, ranks, how)

    def judged(self, measured: Measurement) -> tuple[Tensor, Tensor, Tensor]:
        """The score `(N,)`, the p-values of it and of the members `(N, 1 + members)`, the verdict `(N,)`."""
        predicted, scores = measured.predicted, self.rule(measured)
        return scores[:, 0], *self.ranks.judged(scores, predicted)

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


def how_many_rank(calibration: Mapping[str, Any]) -> int:
    """The number of calibration examples that rank, from the header of a file."""
    artifact.check_types(calibration, split=bool, seed=int, examples=int)
    examples: int = calibration["examples"]
    return examples - examples // 2 if calibration["split"] else examples


def halves(examples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two random halves: the examples that fit the rule, and the examples that rank. An odd one ranks."""
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed))
    return order[: examples // 2], order[examples // 2 :]
