"""Image: how far the input itself looks from the training images, whatever it shows."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gramwatch.detect.measurement import FittedRule, Measurement
from gramwatch.errors import InputError
from gramwatch.files import artifact
from gramwatch.files.artifact import FINITE, NOT_NEGATIVE, POSITIVE_OR_INFINITE, Field
from gramwatch.inputs import image_numbers
from gramwatch.inputs.image_numbers import GROUPS
from gramwatch.methods.base import Method, Record
from gramwatch.methods.features import TINY
from gramwatch.observe.needs import Needs
from gramwatch.observe.observation import Observation

RIDGE = 0.05
"""Added to the variances of the standardised numbers, so that no direction counts without bound."""
MOST = 1e12
"""An image with a larger number counts as not finite: its square would drown the sums."""
TAIL = 0.99
"""The quantile at which the distance of every group is one."""


@dataclass(frozen=True)
class LargestGroup(FittedRule):
    """The largest of the distances of the groups, each standardised on in-distribution examples.

    A blurred image is unusual in its detail and in nothing else. A sum would bury that under the others.
    """

    median_: Tensor | None = None
    """The median of the distances, `(groups,)`."""
    tail_: Tensor | None = None
    """From there to the 99th percentile, `(groups,)`; infinite for a group that says nothing."""
    kept: ClassVar[artifact.Shapes] = {
        "median_": Field(("values",), torch.float64, FINITE),
        "tail_": Field(("values",), torch.float64, POSITIVE_OR_INFINITE),
    }

    def fit(self, measured: Measurement) -> "LargestGroup":
        """The rule fitted to in-distribution examples, all finite."""
        values = measured.values.double()
        median = values.quantile(0.5, 0)
        tail = torch.maximum(values.quantile(TAIL, 0) - median, values.std(0, correction=0))
        return LargestGroup(median, torch.where(tail > 1e-9 * (1 + median.abs()), tail, torch.inf))

    def groups(self, measured: Measurement) -> Tensor:
        """The standardised distance of each group, `(N, groups)`."""
        assert self.median_ is not None
        assert self.tail_ is not None
        distances: Tensor = (measured.values.double() - self.median_) / self.tail_
        return distances

    def __call__(self, measured: Measurement) -> Tensor:
        """The largest distance, `(N, 1)`."""
        assert self.median_ is not None
        assert self.tail_ is not None
        largest = ((measured.values.double() - self.median_) / self.tail_).amax(1)
        return torch.where(measured.finite, largest, torch.inf).unsqueeze(1)


class Image(Method):
    """How far the input itself looks from the training images, whatever it shows.

    137 numbers of an image, of three channels, say how sharp, coloured, bright and laid out it is: see
    `image_numbers`. They are in five groups. For each group, the measurement is the Mahalanobis distance from
    the training images, as a logarithm. The score is the largest of the five, after each was standardised on
    calibration images. The network's features are not looked at, nor classes and labels.

    The fit keeps running sums and no examples. The score needs a calibration.

    Args:
        model: any classifier of images, `(N, channels, height, width)`.
        options: the arguments of every `Method`.

    """

    name = "image"
    record = Record(
        title="image",
        paper="part of Guard, 2026; the idea of Mittal, Soundararajan & Bovik: Making a Completely Blind "
        "Image Quality Analyzer. IEEE Signal Processing Letters 2013",
        equation="max_g (s_g - median(s_g)) / (99th percentile(s_g) - median(s_g)), "
        "s_g = log (v_g - E[v_g])^T C_g^-1 (v_g - E[v_g]), v_g = the numbers of group g of the image; "
        f"E and C of training images, C of standardised numbers plus {RIDGE}; median and percentile of "
        "calibration images",
        fitted=True,
        cost="a few passes over the input",
        limits="Knows no contents: a good photograph of something foreign looks normal to it. Images only.",
    )
    running = True
    rule_kind = LargestGroup
    kept: ClassVar = {
        "count_": Field((), torch.int64, NOT_NEGATIVE, reduce="sum"),
        "sum_": Field(("numbers",), torch.float64, FINITE, reduce="sum"),
        "products_": Field(("numbers", "numbers"), torch.float64, FINITE, reduce="sum"),
    }

    sees = "the image itself"
    why_no_parts = "it is the largest of five distances, and the largest has no parts"

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.count_: Tensor | None = None
        self.sum_: Tensor | None = None
        self.products_: Tensor | None = None

    def _begin(self) -> None:
        self._usual: _Usual | None = None
        super()._begin()

    @property
    def needs(self) -> Needs:
        """The numbers of the input."""
        return replace(super().needs, image=True)

    # --- fit -----------------------------------------------------------------------------------------

    def take(self, observation: Observation) -> Tensor | int:
        """Add one batch of training images to the sums. Images that are not finite are left out."""
        if observation.image is None:
            raise InputError(f"{self.name} looks at images. {image_numbers.WHY_NONE}")
        numbers = observation.image.double()
        finite = (numbers.abs() < MOST).all(1)
        if observation.finite is not None:
            finite = finite & observation.finite
        numbers = torch.where(finite.unsqueeze(1), numbers, 0.0)
        states = {"count_": finite.sum(), "sum_": numbers.sum(0), "products_": numbers.T @ numbers}
        self.add_states(states)
        return (~finite).sum()

    def add_states(self, states: Mapping[str, Tensor]) -> None:
        """Add the states of further training images."""
        super().add_states(states)
        self._usual = None

    def _set(self, state: Mapping[str, Tensor]) -> None:
        super()._set(state)
        self._usual = None

    def usual(self, device: torch.device) -> "_Usual":
        """What training images look like."""
        if self._usual is None or self._usual.mean.device != device:
            sums = (self.count_, self.sum_, self.products_)
            self._usual = _Usual.of(*(tensor.cpu() for tensor in sums if tensor is not None)).to(device)
        return self._usual

    # --- judge ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def measured(self, observation: Observation) -> Measurement:
        """The distance of each group, as a logarithm."""
        if not self._fitted:
            self.check_fitted()
        if observation.image is None:
            raise InputError(f"{self.name} looks at images. {image_numbers.WHY_NONE}")
        numbers = observation.image.double()
        usual = self._usual
        if usual is None or usual.mean.device != numbers.device:
            usual = self.usual(numbers.device)
        if numbers.shape[1] != len(usual.mean):
            now, then = numbers.shape[1], len(usual.mean)
            raise InputError(
                f"{self.name} was fitted on images with {then} numbers, and these have {now}: they have "
                "another number of channels"
            )
        distances = ((numbers - usual.mean) @ usual.whitening).square() @ usual.share
        finite = (numbers.abs() < MOST).all(1)
        if observation.finite is not None:
            finite = finite & observation.finite
        return Measurement(distances.clamp_min(TINY).log(), observation.logits, finite)

    def score(self, observation: Observation) -> Tensor:
        """The largest standardised distance, `(N,)`. The detector must be calibrated."""
        return self.scored(self.measured(observation))

    # --- explain -------------------------------------------------------------------------------------

    def words(self, observation: Observation, rule: LargestGroup) -> tuple[str, ...]:
        """The group with the largest distance, and the number that adds most to it."""
        measured = self.measured(observation)
        assert observation.image is not None
        numbers = observation.image.double()
        usual = self.usual(numbers.device)
        difference = numbers - usual.mean
        shares = difference * ((difference @ usual.whitening) @ usual.whitening.T)
        meaning, groups = image_numbers.meaning(numbers.shape[1]), list(GROUPS)
        sentences = []
        for example, group in enumerate(rule.groups(measured).nan_to_num(0.0).argmax(1).tolist()):
            part = image_numbers.columns(numbers.shape[1], groups[group])
            column = part.start + int(shares[example, part].argmax())
            how = "high" if float(difference[example, column]) > 0 else "low"
            text = f"by its {GROUPS[groups[group]]}: {meaning[column].in_words} is too {how}"
            sentences.append(text)
        return tuple(sentences)

    @classmethod
    def values_in(cls, header: Mapping[str, Any]) -> int:
        """The number of values that it measures: one for each group."""
        return len(GROUPS)

    def _check_state(self) -> None:
        if self.sum_ is None or self.count_ is None:
            return
        image_numbers.meaning(len(self.sum_))
        if not self.count_:
            raise ValueError("it has seen no image")
        try:
            self.usual(torch.device("cpu"))
        except RuntimeError:
            raise ValueError("products_ are not those of any images") from None


@dataclass(frozen=True)
class _Usual:
    """What training images look like, from the sums."""

    mean: Tensor
    """`(numbers,)`"""
    whitening: Tensor
    """`(numbers, numbers)`: in blocks, one for each group. The scale of the numbers is a part of it."""
    share: Tensor
    """`(numbers, groups)`: one over the size of the group to which a number belongs."""

    @staticmethod
    def of(count: Tensor, total: Tensor, products: Tensor) -> "_Usual":
        mean = total / count
        covariance = products / count - mean.outer(mean)
        scale = covariance.diagonal().clamp_min(0).sqrt()
        varies = scale > 1e-6 * mean.abs().clamp_min(1e-3)
        factor = torch.where(varies, 1 / scale, 0.0)  # a constant number counts nothing
        standardised = covariance * factor.outer(factor)
        whitening, share = torch.zeros_like(covariance), mean.new_zeros(len(mean), len(GROUPS))
        for place, group in enumerate(GROUPS):
            part = image_numbers.columns(len(mean), group)
            block = standardised[part, part]
            identity = torch.eye(len(block), dtype=block.dtype)
            lower = torch.linalg.cholesky(block + RIDGE * identity)
            inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
            whitening[part, part] = factor[part].unsqueeze(1) * inverse.T
            share[part, place] = 1 / len(block)
        return _Usual(mean, whitening, share)

    def to(self, device: torch.device) -> "_Usual":
        return _Usual(self.mean.to(device), self.whitening.to(device), self.share.to(device))
