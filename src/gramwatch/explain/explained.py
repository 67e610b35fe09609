"""Explained: why inputs were flagged. Contributions of members, taps and channels, and places in the input.

    score = sum over members of a member's contribution
    contribution of a member = sum over taps of (term - median of the term) / tail of the member + rest

A detector declares the terms of its score per tap. They add up exactly. Below a tap, channels share its term
in proportion to their part of the deviation: a convention, because a root is not additive. See
docs/explain.md.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gramwatch.detect.measurement import Detection
from gramwatch.detect.parts import Contribution, Part, Shares
from gramwatch.errors import InputError
from gramwatch.explain import reasons
from gramwatch.inputs.batches import Inputs
from gramwatch.observe.observation import Observation
from gramwatch.observe.places import Places, observe_tensors, shares
from gramwatch.watch import Network, Tap, Taps

REST = "rest"
"""The name of the last column of a member's taps. It holds what no tap adds, such as the floor of the
score."""
MOST_CHANNELS = 20
"""The most channels that `Explained.channels` returns, unless more are asked for."""


@dataclass(frozen=True)
class Channel:
    """The contribution of one channel, or of a pair of channels, to the score at one tap."""

    member: str
    tap: str
    channel: int | tuple[int, int]
    of: str
    """What was compared: `"order 3"` of the Gram statistics, or `"distance"` or `"length"` of features."""
    contribution: float
    value: float
    low: float
    """The lower end of the range of the predicted class, or the mean that the value was compared with."""
    high: float
    """The upper end of that range, or the same mean."""
    examples: int
    """The number of training examples behind the range or mean."""

    @property
    def direction(self) -> str:
        """`"too high"`, `"too low"` or `"within"`."""
        return "too high" if self.value > self.high else "too low" if self.value < self.low else "within"


@dataclass(frozen=True)
class Member:
    """The contributions of one member of a guard, or of a detector by itself."""

    name: str
    title: str
    sees: str
    """The part of the input or network that the member looks at, in a word or two."""
    total: Tensor
    """`(N,)`; NaN for inputs that are not finite."""
    taps: tuple[Tap, ...] = ()
    terms: Tensor | None = None
    """The contribution of each tap and the rest, `(N, taps + 1)`. None if the score has no parts."""
    why_no_parts: str = ""
    words: tuple[str, ...] = ()
    """The most unusual property of each example in words, if the member names one."""

    def chosen(self, index: Any) -> "Member":
        """The contributions to the chosen examples."""
        terms = None if self.terms is None else self.terms[index]
        total, words = self.total[index], self.words
        if words:
            words = tuple(words[i] for i in torch.arange(len(words))[index].tolist())
        return replace(self, total=total, terms=terms, words=words)


class Token(NamedTuple):
    """The contribution of one token of a text to the score."""

    text: str
    contribution: float
    place: int
    """Its place in the input."""


class Tokens(tuple[Token, ...]):
    """The tokens of a text, in order, with their contributions. `print` shows lines with bars."""

    __slots__ = ()

    def __repr__(self) -> str:
        return reasons.token_lines(self)

    def _repr_html_(self) -> str:
        """The same for a notebook: the text, its tokens shaded by what they add."""
        return reasons.token_html(self)


Lookup = Callable[[int, str, str | None], Iterator[tuple[str, Shares, float]]]
"""The channels of an example and a member, at one tap or at all: the name of the tap, its shares, and the
divisor of its terms."""


@dataclass(frozen=True)
class Explained:
    """Why N inputs got their scores, as `detector.explain(images)` returns it.

    `print(explained[0])` says it in three sentences. `explained.plot(0)` draws it.
    """

    detection: Detection
    """Scores, p-values and verdicts, as the detector returns them."""
    parts: tuple[Member, ...]
    """The members with their contributions."""
    ranking: Tensor
    """The number of calibration examples among which an input is ranked, `(N,)`."""
    map: Tensor | None = None
    """Where in the input the contributions come from, `(N, H, W)`, or `(N, length)` for a sequence.

    It is not negative. Its sum over an input is the sum of the positive contributions that have a place. None
    if no part of the score has a place; `notes` says why.
    """
    notes: tuple[str, ...] = ()
    """Reasons why members have no parts or no place."""
    confidence: Tensor | None = None
    """The maximum softmax probability, `(N,)`. Gram divides by it: one factor for all its taps."""
    class_names: tuple[str, ...] = ()
    images: Tensor | None = field(default=None, repr=False)
    """The input that the map belongs to."""
    mask: Tensor | None = field(default=None, repr=False)
    """Which places of the input are not padding, `(N, length)`. None without a mask."""
    _lookup: Lookup | None = field(default=None, repr=False)
    _rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64), repr=False)

    # --- contributions -------------------------------------------------------------------------------

    @property
    def member_names(self) -> tuple[str, ...]:
        """The names of the columns of `members`."""
        return tuple(member.name for member in self.parts)

    @property
    def members(self) -> Tensor:
        """The contributions of the members, `(N, members)`. They add up to the score.

        The contributions to an input that is not finite are NaN.
        """
        return torch.stack([member.total for member in self.parts], 1)

    @property
    def taps(self) -> dict[str, Tensor]:
        """The contributions of taps by member, `(N, taps + 1)`. The last column is `rest`.

        A row adds up to the contribution of the member. Members without parts are left out: see `notes`.
        """
        return {member.name: member.terms for member in self.parts if member.terms is not None}

    @property
    def tap_names(self) -> dict[str, tuple[str, ...]]:
        """The names of the columns of `taps`, by member."""
        return {
            member.name: (*(tap.name for tap in member.taps), REST)
            for member in self.parts
            if member.terms is not None
        }

    def by_module(self, depth: int = 1) -> dict[str, Tensor]:
        """The contributions of all taps, summed by the first `depth` names of their module, `(N,)` each."""
        return self._summed(lambda tap: ".".join(tap.name.partition("#")[0].split(".")[:depth]))

    def by_kind(self) -> dict[str, Tensor]:
        """The contributions of all taps, summed by kind: `convolution`, `activation`, ... `(N,)` each."""
        return self._summed(lambda tap: tap.kind)

    def _summed(self, key: Callable[[Tap], str]) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        for member in self.parts:
            if member.terms is not None:
                for column, tap in enumerate(member.taps):
                    sums[key(tap)] = sums.get(key(tap), 0) + member.terms[:, column]
        return sums

    def channels(
        self, i: int, *, member: str | None = None, tap: str | None = None, most: int | None = MOST_CHANNELS
    ) -> list[Channel]:
        """The channels that add most to the score of example `i`, largest first.

        The channels of a tap add up to its term before the median is taken off: `taps` has the difference.
        Within a tap of Gram, a channel has the share of its part of the deviation. This is a convention.

        Args:
            i: the number of the example.
            member: only this member.
            tap: only this tap.
            most: how many; None for all.

        """
        self._check(i)
        names = [part.name for part in self.parts if part.terms is not None]
        if member is not None and member not in names:
            why = {part.name: part.why_no_parts for part in self.parts}
            raise InputError(f"there is nothing below '{member}': {why.get(member) or 'it is no member'}")
        known = {name for columns in self.tap_names.values() for name in columns[:-1]}
        if tap is not None and tap not in known:
            raise InputError(f"no tap is called '{tap}': explained.tap_names lists them")
        if self._lookup is None or not bool(self.finite[i]):
            return []
        channels: list[Channel] = []
        for name in names if member is None else [member]:
            for where, below, divisor in self._lookup(int(self._rows[i]), name, tap):
                channels += _largest(name, where, below, divisor, most)
        return sorted(channels, key=lambda channel: -channel.contribution)[:most]

    @property
    def finite(self) -> Tensor:
        """Whether an input has contributions, `(N,)`: its score is finite."""
        return self.detection.score.isfinite()

    def percentages(self, i: int) -> dict[str, float]:
        """The shares of the members in the score of a flagged input, in percent, over positive terms only.

        Inputs that are not flagged have none.
        """
        self._check(i)
        if not bool(self.detection.is_ood[i]) or not bool(self.finite[i]):
            return {}
        positive = {part.name: max(0.0, float(part.total[i])) for part in self.parts}
        total = sum(positive.values())
        return {name: 100 * value / total for name, value in positive.items() if value} if total else {}

    def tokens(
        self, i: int, tokenizer: "Any | Callable[[list[int]], Sequence[str]] | None" = None
    ) -> "Tokens":
        """The tokens of a text with what each adds to the score, in the order of the text, without padding.

        `print(explained.tokens(0, tokenizer))` shows them as lines, a notebook as a shaded text. They are the
        numbers of `map`: the positive contributions that have a place.

        Args:
            i: the number of the example.
            tokenizer: a tokenizer of transformers, or a function from the numbers of tokens to their texts.
                None: the numbers are the texts.

        """
        self._check(i)
        numbers = None if self.images is None else self.images[i]
        if self.map is None or numbers is None or numbers.ndim != 1 or numbers.is_floating_point():
            why = "; ".join(note for note in self.notes if note.startswith("no map")) or "explain its places"
            raise InputError(f"there are no contributions by token, only those of a text have them: {why}")
        real = torch.ones_like(numbers, dtype=torch.bool) if self.mask is None else self.mask[i]
        ids, amounts = numbers[real].tolist(), self.map[i][real].tolist()
        words = getattr(tokenizer, "convert_ids_to_tokens", tokenizer) or (lambda ids: list(map(str, ids)))
        texts = [str(text) for text in words(ids)]
        if len(texts) != len(ids):
            raise InputError(f"the tokenizer makes {len(texts)} texts of {len(ids)} tokens")
        places = real.nonzero().flatten().tolist()
        return Tokens(Token(*token) for token in zip(texts, amounts, places, strict=True))

    # --- one by one ----------------------------------------------------------------------------------

    def _check(self, i: int) -> None:
        if not -len(self) <= i < len(self):
            raise IndexError(f"there is no example {i}: the batch has {len(self)}")

    def __len__(self) -> int:
        return len(self.detection)

    def __getitem__(self, index: Any) -> "Explained":
        """The explanation of one example, `explained[0]`, or of several: a slice, numbers or a mask."""
        if isinstance(index, int):
            self._check(index)
            index = slice(index, index + 1 or None)

        def chosen(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[index]

        return replace(
            self,
            detection=self.detection[index],
            parts=tuple(member.chosen(index) for member in self.parts),
            ranking=self.ranking[index],
            map=chosen(self.map),
            confidence=chosen(self.confidence),
            images=chosen(self.images),
            mask=chosen(self.mask),
            _rows=self._rows[index],
        )

    def __iter__(self) -> "Iterator[Explained]":
        """The examples one by one."""
        return (self[i] for i in range(len(self)))

    # --- shown ---------------------------------------------------------------------------------------

    def sentences(self, i: int = 0) -> list[str]:
        """Three sentences: the verdict, what the score comes from, and what is ordinary."""
        self._check(i)
        return reasons.sentences(self[i])

    def __repr__(self) -> str:
        if len(self) == 1:
            return " ".join(self.sentences())
        shown = min(len(self), reasons.MOST_EXAMPLES)
        lines = [f"  {i}: {' '.join(self.sentences(i)[:2])}" for i in range(shown)]
        rest = [f"  ... {len(self) - shown} more"] if len(self) > shown else []
        flagged = int(self.detection.is_ood.sum())
        return "\n".join([f"Explained: {flagged} of {len(self)} out-of-distribution", *lines, *rest])

    def _repr_html_(self) -> str:
        """The same for a notebook: sentences and a table of the members, for the first ten examples."""
        return reasons.html(self)

    def plot(self, i: int = 0, path: str | PathLike[str] | None = None, *, image: Any = None) -> Any:
        """Draw one example: the image, the map over it, members and taps, the channels furthest outside.

        Args:
            i: the number of the example.
            path: the PNG to write. Without it, the matplotlib figure is returned.
            image: the image to show, `(H, W)`, `(H, W, 3)` or `(3, H, W)`. By default the network's input,
                stretched to the range of colours.

        """
        self._check(i)
        return reasons.draw(self[i], path, image)


def _largest(member: str, tap: str, tap_shares: Shares, divisor: float, most: int | None) -> list[Channel]:
    """The channels of a tap with the largest contributions."""
    amounts = tap_shares.amount / divisor
    count = len(amounts) if most is None else min(most, len(amounts))
    channels = []
    for k in amounts.topk(count).indices.tolist():
        number, amount = tap_shares.channel[k].tolist(), float(amounts[k])
        if amount:
            low, high, value = (float(end[k]) for end in (tap_shares.low, tap_shares.high, tap_shares.value))
            which = number if isinstance(number, int) else (number[0], number[1])
            channels.append(
                Channel(member, tap, which, tap_shares.of[k], amount, value, low, high, tap_shares.examples)
            )
    return channels


# --- how a detector is explained ---------------------------------------------------------------------


def member_of(part: Contribution, finite: Tensor, taps: tuple[Tap, ...]) -> Member:
    """The contributions of a member and of its taps. Those to inputs that are not finite are NaN."""
    title, sees, total = part.part.title, part.part.sees, torch.where(finite, part.total, torch.nan)
    if part.terms is None:
        return Member(part.name, title, sees, total, why_no_parts=part.part.why_no_parts, words=part.words)
    terms = torch.where(finite[:, None], (part.terms - part.usual) / part.divisor, torch.nan)
    terms = torch.cat([terms, (total - terms.sum(1)).unsqueeze(1)], 1)
    return Member(part.name, title, sees, total, taps, terms)


@dataclass(frozen=True)
class Pass:
    """One pass over a batch with its observations and measurements."""

    network: Network
    inputs: Inputs
    detection: Detection
    ranking: Tensor
    contributions: Sequence[Contribution]
    observed: Mapping[Any, Observation]
    """The observations by detector; empty if it takes passes of its own."""
    plan: Any
    class_names: tuple[str, ...] = ()
    confidence: Tensor | None = None

    def explained(self, places: bool) -> Explained:
        """The explanation. With `places`, a second pass finds the map."""
        finite = self.detection.score.isfinite()
        taps = [
            part.part.term_taps(self.plan) if part.terms is not None else () for part in self.contributions
        ]
        members = [
            member_of(part, finite, of_part) for part, of_part in zip(self.contributions, taps, strict=True)
        ]
        notes = [f"{member.title}: {member.why_no_parts}" for member in members if member.why_no_parts]
        tensor, heat, mask = None, None, self.network.mask_of(self.inputs)
        if places:
            tensor, heat, without = self._map(members, mask)
            notes += without
        return Explained(
            detection=self.detection,
            parts=tuple(members),
            ranking=self.ranking,
            map=heat,
            notes=tuple(notes),
            confidence=self.confidence,
            class_names=self.class_names,
            images=tensor,
            mask=mask,
            _lookup=self._channels,
            _rows=torch.arange(len(self.detection)),
        )

    def _channels(self, example: int, name: str, at: str | None) -> Iterator[tuple[str, Shares, float]]:
        """The channels of one tap of a member, or of all its taps, for one example."""
        for contribution in self.contributions:
            if contribution.name == name and contribution.terms is not None:
                observation = self.observed[contribution.part]
                for number, tap in enumerate(contribution.part.term_taps(self.plan)):
                    if at is not None and tap.name != at:
                        continue
                    term = contribution.terms[example, number]
                    tap_shares = contribution.part.shares_at(observation, contribution.rule, example, number)
                    total = tap_shares.amount.sum()
                    # All shares are zero if a tap does not deviate.
                    amount = tap_shares.amount * torch.where(total == 0, 0, term / total)
                    channel = contribution.part.channels_at(tap)[tap_shares.channel]
                    yield tap.name, tap_shares._replace(amount=amount, channel=channel), contribution.divisor

    def _map(
        self, members: Sequence[Member], mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, list[str]]:
        """The input that has places, the map, and why there is none."""
        places = Places(self.inputs, mask)
        heat = None
        if places.sizes:
            self._share(places, members, only_positive=True)
            heat = places.map()
            if heat is None:  # no tap with a positive contribution has places: other taps may have them
                self._share(places, members, only_positive=False)
                heat = places.map()
        if heat is None:
            why = "no tap has places" if places.sizes else "the input has no places"
            if all(member.terms is None for member in members):
                why = "no member has taps"
            return places.tensor, None, [f"no map: {why}"]
        return places.tensor, heat.nan_to_num(0.0), []

    def _share(self, places: Places, members: Sequence[Member], only_positive: bool) -> None:
        """Run the network again, and share the positive contributions of taps among their pixels.

        Every member with a term at a tap gives the shares of its pixels. Their mean counts.
        """
        watched: dict[int, Tap] = {}
        amounts: dict[int, Tensor] = {}
        views: dict[int, list[Callable[[Tensor, Tensor | slice], Tensor]]] = {}
        for contribution, member in zip(self.contributions, members, strict=True):
            if member.terms is None:
                continue
            positive = member.terms[:, :-1].nan_to_num(0.0).clamp_min(0)
            for number, tap in enumerate(member.taps):
                watched[tap.call] = tap
                amounts[tap.call] = positive[:, number] + amounts.get(tap.call, 0)
                views.setdefault(tap.call, []).append(partial(self._view, contribution.part, tap, number))
        calls = [call for call in sorted(watched) if not only_positive or bool(amounts[call].any())]
        taps = Taps([watched[call] for call in calls], self.plan.taps.operations)

        def receive(number: int, tensor: Tensor) -> None:
            maps, grid = places.place(tensor, taps[number])
            if grid is not None:
                call, inside = calls[number], maps[:, :, grid[0] :].float()
                places.share(amounts[call], places.pixels(inside, partial(_mean_shares, views[call])), grid)

        if calls:
            with places.noting(self.network.module):
                observe_tensors(self.network, taps, self.inputs, receive)

    def _view(self, part: Part, tap: Tap, number: int, maps: Tensor, rows: Tensor | slice) -> Tensor:
        """How unusual the pixels of a tap are to a detector, `(N, pixels)`, for some examples."""
        counted = part.channels_at(tap)
        counted_maps = maps if len(counted) == maps.shape[1] else maps[:, counted.to(maps.device)]
        return part.unusual_at(self.observed[part][rows], number, counted_maps)


def _mean_shares(
    views: Sequence[Callable[[Tensor, Tensor | slice], Tensor]], maps: Tensor, rows: Tensor | slice
) -> Tensor:
    """The shares of pixels, `(N, pixels)`: the mean over detectors."""
    return torch.stack([shares(view(maps, rows)) for view in views]).mean(0)
