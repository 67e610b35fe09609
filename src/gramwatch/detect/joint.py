"""Joining: the rule that makes one score of the measurements of several members.

    s = the score of a member; that of Gram is the mean over taps of sqrt(delta_l / E[delta_l])
    score = sum over members of weight * (max(s, quartile(s)) - median(s)) / (99th percentile(s) - median(s))

The lower quartile, the median and the percentile come from in-distribution data. The weights come from
a rehearsal (see `rehearsal`). The score is ranked among other in-distribution data (see `threshold`).
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from gramwatch.detect.measurement import FittedRule, Measurement
from gramwatch.errors import CalibrationError
from gramwatch.files import artifact
from gramwatch.files.artifact import Field


@dataclass
class Standard:
    """Makes the scores of the members comparable: `(score - median) / (99th percentile - median)`.

    A member is almost sure at its 99th percentile. There the standardised score is one for every member, so
    all members have the same weight. The divisor is at least one standard deviation: the percentile may equal
    the median if most scores are equal. A member with the same score for all examples is left out: its
    standardised score is zero.

    A score below the lower quartile counts as the lower quartile. Otherwise energy, which is very low for
    huge activations, would cancel the alarm of all other members.
    """

    kept: ClassVar[artifact.Shapes] = {
        "median_": Field(("members",), torch.float64, artifact.FINITE),
        "tail_": Field(("members",), torch.float64, artifact.POSITIVE_OR_INFINITE),
        "lowest_": Field(("members",), torch.float64, artifact.FINITE),
    }
    """The tensors that are saved."""
    floor = 0.25
    """A score below this quantile counts as this quantile."""
    tail = 0.99
    """The quantile at which the standardised score is one."""
    median_: Tensor | None = None
    """The median of the scores, `(members,)`, after `fit`."""
    tail_: Tensor | None = None
    """The distance from the median to the 99th percentile, `(members,)`; infinite: the member is left out."""
    lowest_: Tensor | None = None
    """The score at the quantile `floor`, `(members,)`, after `fit`."""

    def fit(self, scores: Tensor) -> "Standard":
        """Set median, tail and lowest score from scores `(N, members)`."""
        self.median_ = scores.quantile(0.5, 0)
        tail = torch.maximum(scores.quantile(self.tail, 0) - self.median_, scores.std(0, correction=0))
        rounding = 1e-9 * scores.abs().amax(0)
        self.tail_ = torch.where(tail > rounding, tail, torch.inf)
        self.lowest_ = scores.quantile(self.floor, 0)
        if self.tail_.isinf().all():
            raise CalibrationError(
                f"every member says the same of all {len(scores)} examples: there is nothing to standardise "
                "by. Use more, and different, in-distribution examples"
            )
        return self

    def __call__(self, scores: Tensor) -> Tensor:
        """The standardised scores, `(N, members)`."""
        assert self.median_ is not None
        assert self.tail_ is not None
        assert self.lowest_ is not None
        return (scores.maximum(self.lowest_) - self.median_) / self.tail_


@dataclass
class JointRule:
    """Turns the measurement of a guard into one score.

    Args:
        rules: the rules of the members whose scores must be fitted, by name. A member without a rule measures
            its score itself.
        standard: makes the scores of the members comparable.
        medians: the medians of the terms of in-distribution examples, `(taps,)`, by the names of the members
            whose measurement shows a term per tap. Scores do not depend on them; explanations do.
        weights: how much each member counts, `(members,)`; None: all the same.

    """

    rules: Mapping[str, FittedRule] = field(default_factory=dict)
    standard: Standard = field(default_factory=Standard)
    medians: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)
    weights: Tensor | None = field(default=None, kw_only=True)
    standardises = True

    def fit(self, measured: Measurement) -> "JointRule":
        """The rule fitted to in-distribution examples, all finite."""
        parts = measured.parts
        rule = replace(self, rules={name: member.fit(parts[name]) for name, member in self.rules.items()})
        standard = copy(self.standard).fit(rule.member_scores(measured, left_out=True))
        terms = {name: rule.terms_of(name, measured) for name in parts}
        medians = {name: of_taps.median(0).values for name, of_taps in terms.items() if of_taps is not None}
        return replace(rule, standard=standard, medians=medians)

    def taught_by(self, fitted: "JointRule") -> "JointRule":
        """The rule, not fitted, with the weights of a fitted one."""
        return replace(self, weights=fitted.weights)

    def terms_of(self, name: str, measured: Measurement) -> Tensor | None:
        """What each tap adds to a member's score before it is standardised, `(N, taps)`.

        None if the member measures its score itself.
        """
        return self.rules[name].terms(measured.parts[name]) if name in self.rules else None

    def terms(self, measured: Measurement) -> None:
        """None: the members have terms of their own. See `terms_of`."""

    def member_scores(self, measured: Measurement, left_out: bool = False) -> Tensor:
        """The scores of the members, not standardised, `(N, members)`, in float64.

        With `left_out`, the examples are those that fitted the rule, and are judged as if left out.
        """
        scores = []
        for name, part in measured.parts.items():
            if name not in self.rules:
                scores.append(part.values[:, 0].double())
            else:
                rule = self.rules[name]
                scores.append((rule.left_out(part) if left_out else rule(part))[:, 0])
        return torch.stack(scores, 1)

    def left_out(self, measured: Measurement) -> Tensor:
        """The scores of the very examples that fitted the rule, as if each had been left out."""
        return self(measured, left_out=True)

    def joined(self, scores: Tensor) -> Tensor:
        """The joint score `(N,)` from the scores of the members, `(N, members)`."""
        standard = self.standard(scores)
        return (standard if self.weights is None else standard * self.weights).sum(1)

    def __call__(self, measured: Measurement, left_out: bool = False) -> Tensor:
        """The joint score, then the scores of the members, `(N, 1 + members)`; infinite if not `finite`."""
        scores = self.member_scores(measured, left_out)
        all_scores = torch.cat([self.joined(scores).unsqueeze(1), scores], 1)
        return torch.where(measured.finite.unsqueeze(1), all_scores, torch.inf)

    # --- files and devices ---------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The fitted tensors, by their names in a file."""
        tensors = {name.removesuffix("_"): getattr(self.standard, name) for name in self.standard.kept}
        for name, rule in self.rules.items():
            tensors |= {_key(name, field): tensor for field, tensor in rule.tensors().items()}
        tensors |= {f"medians.{name}": medians for name, medians in self.medians.items()}
        return tensors if self.weights is None else tensors | {"weights": self.weights}

    def fields(self, members: int, values: Mapping[str, int], facts: Mapping[str, Any]) -> artifact.Shapes:
        """The fields of the fitted tensors, by their names in a file.

        Args:
            members: the number of members.
            values: how many values the members with a rule measure, by name.
            facts: the facts of the calibration, from the header of the file.

        """
        known = self.standard.kept.items()
        fields = {name.removesuffix("_"): replace(field, shape=(members,)) for name, field in known}
        for name, rule in self.rules.items():
            fields |= {_key(name, key): field for key, field in rule.fields(values[name]).items()}
        medians = facts.get("medians", {})  # files of earlier versions have none
        if not artifact.fits(medians, dict[str, int]):
            raise ValueError(f"it has the medians of {medians!r:.60}")
        for name, taps in medians.items():
            if name not in values or not 0 <= taps <= values[name]:
                raise ValueError(f"{taps} medians of {name!r:.60} are too many")
            fields[f"medians.{name}"] = Field((taps,), torch.float64, artifact.FINITE)
        if "rehearsal" in facts:
            fields["weights"] = Field((members,), torch.float64, artifact.NOT_NEGATIVE)
        return fields

    def restored(self, tensors: Mapping[str, Tensor]) -> "JointRule":
        """The rule with these fitted tensors."""
        standard = copy(self.standard)
        for name in standard.kept:
            setattr(standard, name, tensors[name.removesuffix("_")])
        rules = {
            name: rule.restored({field: tensors[_key(name, field)] for field in rule.kept})
            for name, rule in self.rules.items()
        }
        medians, weights = below(tensors, "medians."), tensors.get("weights")
        return replace(self, standard=standard, rules=rules, medians=medians, weights=weights)

    def to(self, device: torch.device) -> "JointRule":
        """The rule on another device."""
        return self.restored({name: tensor.to(device) for name, tensor in self.tensors().items()})


def below(tensors: Mapping[str, Tensor], start: str) -> dict[str, Tensor]:
    """The tensors of a file whose names begin so, by the rest of their names."""
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def _key(member: str, field: str) -> str:
    """The name in a file of a tensor of a member's rule. That of Gram is older than the other rules."""
    return f"expectation.{member}" if field == "expectation_" else f"rule.{member}.{field}"
