"""Random crops of photographs, enlarged to the size of the whole and mirrored, on the device."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from gramwatch.training.images import Images

SMALLEST = 0.25
"""The smallest share of the image's area that a crop has."""
RATIO = 4 / 3
"""The largest ratio of a crop's sides, to those of the image."""


class Crops(Images):
    """Images of which training sees random parts: their area, sides and place are drawn anew each time."""

    def shuffled(self, batches: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Random batches of crops, and which images they are of. None comes twice before all have come."""
        chosen = self._drawn(batches * size)
        placed = boxes(batches * size, self._device)
        for part, box in zip(chosen.split(size), placed.split(size), strict=True):
            yield self._normalised(cropped(self._pixels[part], box)), part


def boxes(count: int, device: torch.device) -> Tensor:
    """Random boxes `(count, 4)`: half the width, half the height, the middle across and down.

    The image reaches from -1 to 1. Half of the widths are negative: these boxes are mirrored.
    """
    area, shape, mirror, across, down = torch.rand(5, count, device=device)
    area = SMALLEST + (1 - SMALLEST) * area
    ratio = (math.log(RATIO) * (2 * shape - 1)).exp()
    width, height = ((area * ratio).sqrt().clamp_max(1), (area / ratio).sqrt().clamp_max(1))
    left, top = ((2 * place - 1) * (1 - length) for place, length in ((across, width), (down, height)))
    return torch.stack([torch.where(mirror < 0.5, -width, width), height, left, top], 1)


def cropped(pixels: Tensor, placed: Tensor) -> Tensor:
    """The boxes of images `(N, H, W, C)`, enlarged to H x W between neighbouring pixels (bilinear)."""
    width, height, left, top = placed.unbind(1)
    zero = torch.zeros_like(width)
    across, down = torch.stack([width, zero, left], 1), torch.stack([zero, height, top], 1)
    images = pixels.permute(0, 3, 1, 2).float()
    grid = F.affine_grid(torch.stack([across, down], 1), list(images.shape), align_corners=False)
    found = F.grid_sample(images, grid, "bilinear", "border", align_corners=False)
    return found.permute(0, 2, 3, 1)
