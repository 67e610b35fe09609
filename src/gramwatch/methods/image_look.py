"""Image look: how far the numbers of the input itself lie from those of training images."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gramwatch import image_numbers
from gramwatch.artifact import FINITE, NOT_NEGATIVE, Field
from gramwatch.errors import InputError
from gramwatch.methods.base import Method, Record
from gramwatch.methods.features import TINY
from gramwatch.observation import Needs, Observation

RIDGE = 0.05
"""Added to the variances of the standardised numbers, so that no direction counts without bound."""


class ImageLook(Method):
    """The distance of one group of an image's numbers from those of the training images.

    The numbers are in `image_numbers`. The distance is Mahalanobis', with one mean and one covariance for all
    classes. The fit keeps running sums and no examples. The network's features are not looked at.

    Args:
        model: any classifier of images, `(N, channels, height, width)`.
        options: the arguments of every `Method`.

    """

    group: ClassVar[str]
    """The group of numbers that it looks at, one of `image_numbers.GROUPS`."""
    running = True
    kept: ClassVar = {
        "count_": Field((), torch.int64, NOT_NEGATIVE, reduce="sum"),
        "sum_": Field(("numbers",), torch.float64, FINITE, reduce="sum"),
        "products_": Field(("numbers", "numbers"), torch.float64, FINITE, reduce="sum"),
    }

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.count_: Tensor | None = None
        self.sum_: Tensor | None = None
        self.products_: Tensor | None = None

    def _begin(self) -> None:
        self._usual: tuple[Tensor, Tensor, Tensor] | None = None
        super()._begin()

    @property
    def needs(self) -> Needs:
        """The numbers of the input."""
        return replace(super().needs, image=True)

    def _numbers(self, observation: Observation) -> Tensor:
        """The numbers of the group, `(N, numbers)`."""
        if observation.image is None:
            raise InputError(f"{self.name} looks at images, and this observation has none")
        return observation.image[:, image_numbers.columns(observation.image.shape[1], self.group)].double()

    # --- fit -----------------------------------------------------------------------------------------

    def take(self, observation: Observation) -> Tensor | int:
        """Add one batch of training images to the sums. Images that are not finite are left out."""
        numbers, finite, left_out = self._numbers(observation), observation.finite, 0
        count = torch.tensor(len(numbers), device=numbers.device)
        if finite is not None:
            numbers = torch.where(finite.unsqueeze(1), numbers, 0.0)
            count, left_out = finite.sum(), (~finite).sum()
        self.add_states({"count_": count, "sum_": numbers.sum(0), "products_": numbers.T @ numbers})
        return left_out

    def add_states(self, states: Any) -> None:
        """Add the states of further training images."""
        super().add_states(states)
        self._usual = None

    def _set(self, state: Any) -> None:
        super()._set(state)
        self._usual = None

    @property
    def usual(self) -> tuple[Tensor, Tensor, Tensor]:
        """The mean of the numbers, their scale, and the whitening of the standardised numbers."""
        if self._usual is None:
            assert self.count_ is not None
            assert self.sum_ is not None
            assert self.products_ is not None
            mean = self.sum_ / self.count_
            covariance = self.products_ / self.count_ - mean.outer(mean)
            scale = covariance.diagonal().clamp_min(0).sqrt()
            varies = scale > 1e-6 * mean.abs().clamp_min(1e-3)
            scale = torch.where(varies, scale, torch.inf)  # a constant number counts nothing
            standardised = covariance / scale.outer(scale)
            identity = torch.eye(len(mean), dtype=mean.dtype, device=mean.device)
            lower = torch.linalg.cholesky(standardised + RIDGE * identity)
            inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
            self._usual = mean, scale, inverse.T
        return self._usual

    # --- judge ---------------------------------------------------------------------------------------

    def score(self, observation: Observation) -> Tensor:
        """The logarithm of the squared distance, divided by the number of numbers."""
        numbers = self._numbers(observation)
        mean, scale, whitening = (tensor.to(numbers.device) for tensor in self.usual)
        white = ((numbers - mean) / scale) @ whitening
        return white.square().mean(1).clamp_min(TINY).log()


def _record(group: str, limits: str) -> Record:
    return Record(
        title=f"image {group}",
        paper="part of Guard",
        equation="log (v - E[v])^T C^-1 (v - E[v]) / k, v = the k numbers of an image's "
        f"{group}; E and C of training images, C of standardised numbers plus {RIDGE}",
        fitted=True,
        cost="a few passes over the input",
        limits=limits,
    )


class ImageDetail(ImageLook):
    """How sharp and how noisy an image is, at three scales, and in its plainest and busiest region.

    See `ImageLook`.
    """

    name, group = "image_detail", "detail"
    sees = "the sharpness of the image"
    record = _record(group, "Knows no contents: a sharp photograph of something foreign looks normal to it.")


class ImageGrain(ImageLook):
    """Whether fine differences go together in all channels, and whether single lines or blocks stand out.

    See `ImageLook`.
    """

    name, group = "image_grain", "grain"
    sees = "the grain of the image"
    record = _record(group, "Knows no contents. Of grey images it sees only lines and blocks.")


class ImageColour(ImageLook):
    """The mean colour of an image, and how its channels go together.

    See `ImageLook`.
    """

    name, group = "image_colour", "colour"
    sees = "the colours of the image"
    record = _record(group, "Colours of natural images vary much: only clear faults stand out.")


class ImageTone(ImageLook):
    """How dark, bright, flat and clipped an image is.

    See `ImageLook`.
    """

    name, group = "image_tone", "tone"
    sees = "brightness and contrast of the image"
    record = _record(group, "Natural images vary much in brightness: mild faults look normal to it.")


class ImageLayout(ImageLook):
    """Whether light and detail lie where they usually lie: above or below, left or right.

    See `ImageLook`.
    """

    name, group = "image_layout", "layout"
    sees = "where light and detail lie in the image"
    record = _record(group, "Tells only where images have a usual layout, such as a sky above.")
