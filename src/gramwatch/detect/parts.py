"""Parts: what a detector offers to be explained. `explain` asks for it, and nothing else does."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gramwatch.observe.observation import Observation
from gramwatch.observe.plan import Plan
from gramwatch.watch import Tap


class Shares(NamedTuple):
    """What the channels of one tap add to its term, for one example, as k entries."""

    amount: Tensor
    """`(k,)`; the sum is the term of the tap."""
    channel: Tensor
    """The number of the channel `(k,)`, or of two channels `(k, 2)`."""
    of: Sequence[str]
    """What was compared: `"order 3"`, `"distance"` or `"length"`, `(k,)`."""
    value: Tensor
    """`(k,)`"""
    low: Tensor
    """The lower end of the range of training data, or their mean, `(k,)`."""
    high: Tensor
    """The upper end of the range, or the same mean, `(k,)`."""
    examples: int
    """The number of training examples behind the range or mean."""


class Part(ABC):
    """The base of every detector: the terms of its score, and what lies below them."""

    name: ClassVar[str]
    """The name that users and files use."""
    sees: ClassVar[str] = ""
    """What the detector looks at, in a word or two. Empty: its title says it."""
    why_no_parts: ClassVar[str] = "its score is one number, not a sum over taps"
    """Why an explanation does not go below the score of this detector, if it has no terms."""

    @property
    @abstractmethod
    def title(self) -> str:
        """The name in tables."""

    def terms(self, observation: Observation) -> Tensor | None:
        """What each tap adds to the score, `(N, taps)`, if the rule does not show it; None without parts."""
        return None

    def words(self, observation: Observation, rule: Any) -> tuple[str, ...]:
        """What stands out in each example, in words, by detectors without terms that can say so."""
        return ()

    def term_taps(self, plan: Plan) -> tuple[Tap, ...]:
        """The taps of the terms."""
        return ()

    def channels_at(self, tap: Tap) -> Tensor:
        """The numbers of the channels that count at a tap: all."""
        return torch.arange(tap.channels)

    def shares_at(self, observation: Observation, rule: Any, example: int, tap: int) -> Shares:
        """The channels of a tap, for one example. Their amounts are in proportion to their parts."""
        raise NotImplementedError(f"{self.name} has terms, but does not say what is below a tap")

    def unusual_at(self, observation: Observation, tap: int, maps: Tensor) -> Tensor:
        """How unusual each pixel of a tap is, `(N, pixels)`, from maps `(N, channels that count, pixels)`.

        Pixels that are much stronger or weaker than the median pixel of their image are unusual.
        """
        from gramwatch.observe.places import contrasts, strengths

        return contrasts(strengths(maps))


@dataclass(frozen=True)
class Contribution:
    """One member with the terms of its score, before the medians are taken off."""

    name: str
    part: Part
    rule: Any
    total: Tensor
    """`(N,)`"""
    terms: Tensor | None
    """`(N, taps)`"""
    usual: Tensor | float = 0.0
    """The median of each term on calibration data, `(taps,)`."""
    divisor: float = 1.0
    """The tail of the member. Contributions are `(terms - usual) / divisor`."""
    words: tuple[str, ...] = ()
    """What stands out in each example, by members that say so in words."""
