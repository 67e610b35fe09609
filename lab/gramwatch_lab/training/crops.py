"""Random crops of photographs, enlarged to the size of the photograph and mirrored, on the device."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from gramwatch_lab.training.images import Images

SMALLEST = 0.25
"""The smallest area of a crop, as a share of the image."""
RATIO = 4 / 3
"""The largest ratio of the sides of a crop. The sides are shares of the image's width and height."""


class Crops(Images):
    """Images for training on random crops. Area, sides and place are drawn again for every batch."""

    def shuffled(self, batches: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Random batches of crops, and their images' indices. No image comes twice before all have come."""
        chosen = self._drawn(batches * size)
        placed = boxes(batches * size, self._device)
        for part, box in zip(chosen.split(size), placed.split(size), strict=True):
            yield self._normalised(cropped(self._pixels[part], box)), part


def boxes(count: int, device: torch.device) -> Tensor:
    """Random boxes `(count, 4)`: half the width, half the height, and the two coordinates of the centre.

    Coordinates run from -1 to 1 over the image. A box with a negative width is mirrored. Half of them are.
    """
    area, shape, mirror, across, down = torch.rand(5, count, device=device)
    area = SMALLEST + (1 - SMALLEST) * area
    ratio = (math.log(RATIO) * (2 * shape - 1)).exp()
    width, height = ((area * ratio).sqrt().clamp_max(1), (area / ratio).sqrt().clamp_max(1))
    left, top = ((2 * place - 1) * (1 - length) for place, length in ((across, width), (down, height)))
    return torch.stack([torch.where(mirror < 0.5, -width, width), height, left, top], 1)


def cropped(pixels: Tensor, placed: Tensor) -> Tensor:
    """The boxes of images `(N, H, W, C)`, enlarged to H x W by bilinear interpolation."""
    width, height, left, top = placed.unbind(1)
    zero = torch.zeros_like(width)
    across, down = torch.stack([width, zero, left], 1), torch.stack([zero, height, top], 1)
    images = pixels.permute(0, 3, 1, 2).float()
    grid = F.affine_grid(torch.stack([across, down], 1), list(images.shape), align_corners=False)
    enlarged = F.grid_sample(images, grid, "bilinear", "border", align_corners=False)
    return enlarged.permute(0, 2, 3, 1)
