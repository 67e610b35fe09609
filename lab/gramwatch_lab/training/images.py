"""Images for training: all are on the device, and are cropped, mirrored and normalised there by batches."""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gramwatch.errors import TrainingError

PADDING = 4
"""The black border around an image, in pixels, from which a random crop of the image's size is taken."""


class Images:
    """A set of images on a device.

    Args:
        images: uint8, `(N, C, H, W)`.
        mean: the mean of each channel, for pixels in [0, 1].
        std: the standard deviation of each channel, likewise.
        device: the device that holds them.
        augment: whether images in batches are shifted by up to `PADDING` pixels and mirrored, at random.
        what: their name in error messages.

    """

    def __init__(
        self,
        images: Tensor,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        augment: bool = False,
        what: str = "images",
    ) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4 or not len(images):
            raise TrainingError(
                f"{what} must be uint8 of shape (N, channels, height, width), not {images.dtype} of shape "
                f"{tuple(images.shape)}"
            )
        if not len(mean) == len(std) == images.shape[1]:
            raise TrainingError(
                f"{what} have {images.shape[1]} channels, mean and std {len(mean)} and {len(std)} numbers"
            )
        self.shape = tuple(images.shape[1:])
        self._augment, self._device = augment, device
        pixels = images.to(device).permute(0, 2, 3, 1)
        if augment:
            pixels = F.pad(pixels, (0, 0, PADDING, PADDING, PADDING, PADDING))
        self._pixels = (
            pixels.contiguous()
        )  # channels last: a crop is read in rows, and convolutions are faster
        self._scale = 1 / (255 * torch.tensor(std, dtype=torch.float32, device=device))
        self._shift = -torch.tensor(mean, dtype=torch.float32, device=device) * 255 * self._scale

    def __len__(self) -> int:
        return len(self._pixels)

    def shuffled(self, batches: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Random batches, and the indices of their images. All images are used before one is used again.

        All random numbers are drawn at once, from PyTorch's generator of the device.
        """
        total = batches * size
        chosen = self._drawn(total)
        if not self._augment:
            for part in chosen.split(size):
                yield self._normalised(self._pixels[part]), part
            return
        corners = torch.randint(0, 2 * PADDING + 1, (total, 2), device=self._device)
        mirrored = torch.randint(0, 2, (total,), device=self._device).bool()
        for part, corner, mirror in zip(
            chosen.split(size), corners.split(size), mirrored.split(size), strict=True
        ):
            yield self._normalised(self._cut(part, corner, mirror)), part

    def _drawn(self, total: int) -> Tensor:
        """The indices of `total` random images. No image comes twice before all have come."""
        rounds = math.ceil(total / len(self))
        orders = [torch.randperm(len(self), device=self._device) for _ in range(rounds)]
        return torch.cat(orders)[:total]

    def in_order(self, size: int) -> Iterator[Tensor]:
        """All images in batches, in their order and without augmentation."""
        pixels = self._pixels
        if self._augment:
            pixels = pixels[:, PADDING:-PADDING, PADDING:-PADDING]
        for part in pixels.split(size):
            yield self._normalised(part)

    def _cut(self, chosen: Tensor, corners: Tensor, mirrored: Tensor) -> Tensor:
        """A crop of every chosen image at its corner, mirrored or not, by one indexing operation."""
        _, height, width = self.shape
        rows = corners[:, :1] + torch.arange(height, device=self._device)
        columns = corners[:, 1:] + torch.arange(width, device=self._device)
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
        return self._pixels[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]

    def _normalised(self, pixels: Tensor) -> Tensor:
        return (pixels * self._scale + self._shift).permute(0, 3, 1, 2)
