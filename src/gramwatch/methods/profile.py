"""Profile: how far features lie from the mean and how long they are, from the first layers to the last."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from gramwatch.detect.measurement import FittedRule, Measurement
from gramwatch.detect.parts import Shares
from gramwatch.files import artifact
from gramwatch.files.artifact import FINITE, Field
from gramwatch.methods.base import Record
from gramwatch.methods.features import TINY
from gramwatch.methods.gaussians import ClassDistances, Gaussian
from gramwatch.numerics.samples import Sample
from gramwatch.numerics.statistics import check_count
from gramwatch.observe.needs import Needs
from gramwatch.observe.observation import Observation
from gramwatch.watch.tap import Tap

MOST_CHANNELS = 256
"""At most so many channels of a tensor count: see `Sample`."""
RIDGE = 0.1
"""Added to the variances of the standardised numbers: 200 calibration examples can carry 48 numbers."""


@dataclass(frozen=True)
class ProfileRule(FittedRule):
    """The distance of a profile from the profiles of in-distribution examples.

    A profile is unusual if one of its numbers is too large or too small. It is also unusual if two numbers
    that go together in-distribution do not: features that lie far off early, and near the mean later.
    """

    mean_: Tensor | None = None
    """The mean profile, `(numbers,)`."""
    whitening_: Tensor | None = None
    """`(numbers, numbers)`. The score is the length of `(profile - mean) @ whitening`."""
    kept: ClassVar[artifact.Shapes] = {
        "mean_": Field(("values",), torch.float64, FINITE),
        "whitening_": Field(("values", "values"), torch.float64, FINITE),
    }

    def fit(self, measured: Measurement) -> "ProfileRule":
        """The rule fitted to in-distribution examples, all finite."""
        values = measured.values.double()
        mean, scale = values.mean(0), values.std(0, correction=0)
        varies = scale > 1e-9 * values.abs().amax(0)
        factor = torch.where(varies, 1 / scale, 0)  # a constant number counts nothing
        standardised = (values - mean) * factor
        numbers = values.shape[1]
        identity = torch.eye(numbers, dtype=values.dtype, device=values.device)
        covariance = standardised.T @ standardised / len(values) + RIDGE * identity
        lower = torch.linalg.cholesky(covariance)
        inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
        return ProfileRule(mean, factor.unsqueeze(1) * inverse.T / numbers**0.5)

    def __call__(self, measured: Measurement) -> Tensor:
        """The distance, `(N, 1)`."""
        assert self.mean_ is not None
        assert self.whitening_ is not None
        white = (measured.values.double() - self.mean_) @ self.whitening_
        distance = white.square().sum(1).sqrt()
        return torch.where(measured.finite, distance, torch.inf).unsqueeze(1)

    def left_out(self, measured: Measurement) -> Tensor:
        """The distances of the very examples that fitted the rule, as if each had been left out, `(n, 1)`.

        An example pulls the covariance towards itself. With few examples, its distance is therefore too small
        to be compared with the distance of a new one. Without its own share of the covariance, the squared
        distance d is d / (1 - d / n).
        """
        assert self.mean_ is not None
        assert self.whitening_ is not None
        squares = ((measured.values.double() - self.mean_) @ self.whitening_).square().sum(1)
        share = squares * measured.values.shape[1] / len(measured)
        return (squares / (1 - share)).sqrt().unsqueeze(1)

    def terms(self, measured: Measurement) -> Tensor:
        """What distance and length at each tap add to the score, `(N, taps)`: the sums of their `shares`."""
        by_tap: Tensor = self.shares(measured).unflatten(1, (-1, 2)).sum(2)
        return by_tap

    def shares(self, measured: Measurement) -> Tensor:
        """What each number adds to the score, `(N, numbers)`: `d_i (C^-1 d)_i / |d|`, which may be negative.

        `d` is the profile minus its mean, and `|d|` the score, the root of the sum of `d_i (C^-1 d)_i`.
        """
        assert self.mean_ is not None
        assert self.whitening_ is not None
        difference = measured.values.double() - self.mean_
        white = difference @ self.whitening_
        length: Tensor = white.norm(dim=1, keepdim=True).clamp_min(TINY)
        return difference * (white @ self.whitening_.T) / length


class _Together(NamedTuple):
    """The distributions at all taps, made as wide as the widest with zeros, in one tensor each."""

    gaussians: Sequence[Gaussian]
    """The distributions that it was made of."""
    place: Tensor
    """The place of every channel among the padded channels of all taps, `(1, channels)`."""
    shift: Tensor
    """Minus the mean of all training examples, whitened, `(taps, 1, rank)`."""
    whitening: Tensor
    """`(taps, width, rank)`"""

    @staticmethod
    def of(gaussians: Sequence[Gaussian]) -> "_Together":
        shapes = [gaussian.whitening.shape for gaussian in gaussians]
        width, rank = (max(sizes) for sizes in zip(*shapes, strict=True))
        like = gaussians[0].whitening
        shift, whitening = (like.new_zeros(len(shapes), *size) for size in ((1, rank), (width, rank)))
        for tap, (gaussian, (wide, high)) in enumerate(zip(gaussians, shapes, strict=True)):
            shift[tap, 0, :high] = gaussian.shift - gaussian.points[0]
            whitening[tap, :wide, :high] = gaussian.whitening
        places = [torch.arange(wide) + tap * width for tap, (wide, _) in enumerate(shapes)]
        return _Together(gaussians, torch.cat(places).unsqueeze(0).to(like.device), shift, whitening)

    def padded(self, taps: Sequence[Tensor]) -> Tensor:
        """The channel means of all taps, `(taps, N, width)`, with zeros after the last channel."""
        means = torch.cat(list(taps), 1).double()
        room = means.new_zeros(len(means), self.whitening.shape[0] * self.whitening.shape[1])
        room.scatter_(1, self.place.expand_as(means), means)
        return room.view(len(means), len(self.whitening), -1).transpose(0, 1)


class Profile(ClassDistances):
    """How the features of an input go through the network, compared with held-out examples.

    At 24 tensors, from the first to the last, it takes two numbers of the channel means: the Mahalanobis
    distance of their direction from the mean of all training examples, and their length. These numbers are
    the profile of an input. The score is the distance of the profile from the profiles of the calibration
    examples. So an input is unusual if it lies too far from the training examples, but also if it lies too
    near, or far in some layers and near in others.

    The score needs a calibration. Classes and labels are ignored.

    Args:
        model: any classifier that returns logits.
        taps: the watched taps, as for `GramDetector`.
        pixels: about how many pixels of each tensor the channel means are taken over, on a regular grid;
            None: all.
        options: the arguments of every `Method`.

    """

    name = "profile"
    record = Record(
        title="profile",
        paper="part of Guard; after Lee et al.: A Simple Unified Framework for Detecting Out-of-Distribution "
        "Samples. NeurIPS 2018; and Müller & Hein: Mahalanobis++. ICML 2025",
        equation="sqrt((v - E[v])^T C^-1 (v - E[v]) / 2L), v = (log D_l^2 / rank(S_l), log ||f_l||^2) over "
        "the taps l = 1 ... L, D_l^2 = (u_l - mu_l)^T S_l^-1 (u_l - mu_l), u_l = f_l / ||f_l||; "
        "E and C of calibration data, C of standardised numbers plus 0.1",
        fitted=True,
        cost="the channel means of 24 tensors, a product with a matrix of at most 256 x 256 at each",
        limits="Knows no classes: an input that is only of a new class looks normal to it. Needs some "
        "hundred calibration examples to be at its best.",
    )
    settings = ("pixels",)
    unit = True
    classes_by = "none"  # the distance is that from the mean of all training examples
    rule_kind = ProfileRule

    def __init__(
        self,
        model: nn.Module,
        *,
        taps: str | Iterable[str] = "spread",
        pixels: int | None = 1024,
        **options: Any,
    ) -> None:
        self.pixels = check_count("pixels", pixels)
        super().__init__(model, taps=taps, **options)

    @property
    def needs(self) -> Needs:
        """The channel means at the taps."""
        return replace(super().needs, mean_sample=self._counted)

    def _begin(self) -> None:
        self._together: _Together | None = None
        super()._begin()

    @property
    def _counted(self) -> Sample:
        return Sample(self.pixels, MOST_CHANNELS)

    def channels_at(self, tap: Tap) -> Tensor:
        """The numbers of the channels that count at a tap."""
        return self._counted.numbers(tap.channels)

    # --- judge ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def measured(self, observation: Observation) -> Measurement:
        """The profile of each example: distance and length at each tap, as logarithms, `(N, 2 x taps)`."""
        if not self._fitted:
            self.check_fitted()
        taps = observation.channel_means
        if taps and taps[0].is_cuda:
            numbers = self._measured_together(observation)
        else:
            columns = []
            for at_tap in self._at_taps(observation):
                assert at_tap.length is not None
                distance = at_tap.nearest / at_tap.gaussian.expected
                columns += [distance, at_tap.length.squeeze(1).square()]
            numbers = torch.stack(columns, 1)
        profile = numbers.clamp_min(TINY).log()
        finite = profile.isfinite().all(1)
        if observation.finite is not None:
            finite = finite & observation.finite
        return Measurement(profile, observation.logits, finite)

    def _measured_together(self, observation: Observation) -> Tensor:
        """Distance and length of all taps at once, `(N, 2 x taps)`: on a GPU, every launch costs time."""
        taps = observation.channel_means
        fitted = self._fitted_on(observation.logits.device, taps)
        cached = self._together
        if cached is None or cached.gaussians is not fitted.gaussians:
            self._together = cached = _Together.of(fitted.gaussians)
        by_tap = cached.padded(taps)
        length = torch.linalg.vector_norm(by_tap, dim=2, keepdim=True)
        # A product of float64 numbers takes a GPU less time than a quotient.
        unit = by_tap * length.clamp_min(TINY).reciprocal()
        white = torch.baddbmm(cached.shift, unit, cached.whitening)
        distance = torch.linalg.vector_norm(white, dim=2).square() / fitted.expected.unsqueeze(1)
        return torch.stack([distance, length.squeeze(2).square()], 1).flatten(0, 1).T

    # --- explain -------------------------------------------------------------------------------------

    sees = "the course of the features"

    def shares_at(self, observation: Observation, rule: ProfileRule, example: int, tap: int) -> Shares:
        """What channels add to the score at a tap, by its distance and by its length.

        The share of a number is divided in proportion to `d_i (S^-1 d)_i` and to the square of the channel's
        mean. The mean length of a channel is that of its direction, at the mean length of calibration data.
        """
        one = observation[example : example + 1]
        of_distance, of_length = rule.shares(self.measured(one))[0, 2 * tap : 2 * tap + 2].cpu()
        distance = super().shares_at(observation, rule, example, tap)
        features = one.channel_means[tap].double().flatten().cpu()
        squares, products = features.square(), distance.amount
        assert rule.mean_ is not None
        usual = distance.low * (rule.mean_[2 * tap + 1].cpu() / 2).exp()
        return Shares(
            amount=torch.cat([of_distance * _shares(products), of_length * _shares(squares)]),
            channel=distance.channel.repeat(2),
            of=["distance"] * len(features) + ["length"] * len(features),
            value=torch.cat([distance.value, features]),
            low=torch.cat([distance.low, usual]),
            high=torch.cat([distance.high, usual]),
            examples=distance.examples,
        )

    def score(self, observation: Observation) -> Tensor:
        """The distance of each profile, `(N,)`. The detector must be calibrated."""
        return self.scored(self.measured(observation))

    @classmethod
    def values_in(cls, header: Mapping[str, Any]) -> int:
        """The number of values that it measures, from its part of a file: two for each tap."""
        (taps,) = header["shapes"].get("state.widths_", [0])
        return 2 * int(taps)


def _shares(parts: Tensor) -> Tensor:
    """Parts over their sum; zero if the sum is zero."""
    total = parts.sum()
    return parts / total if float(total) else torch.zeros_like(parts)
