"""Images with a planted region: a patch of another source, or an artefact. The truth for maps."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST, LARGEST = 0.04, 0.25
"""The area of a planted region, as a share of the image."""
ENOUGH = 0.25
"""The share of a box that must lie inside the image."""
FEATHER = 0.12
"""The width of a patch's soft edge, as a share of its side."""


@dataclass(frozen=True)
class Planted:
    """Images with one planted region each."""

    images: Tensor
    """`(N, 3, H, W)`, from 0 to 1."""
    mask: Tensor
    """Where the region lies, `(N, H, W)`."""
    kinds: tuple[str, ...]


def boxes(count: int, side: int, seed: int) -> list[tuple[int, int, int, int]]:
    """Random boxes in an image: top, left, height, width.

    Boxes may reach beyond the image, and are cut off there. Otherwise pixels in the middle would lie in a box
    much more often than pixels at the border, and a map that is always highest in the middle would seem to
    find the boxes.
    """
    random = torch.Generator().manual_seed(seed)
    corners: list[tuple[int, int, int, int]] = []
    while len(corners) < count:
        area, ratio, y, x = torch.rand(4, generator=random).tolist()
        share, shape = SMALLEST + (LARGEST - SMALLEST) * area, math.exp((ratio - 0.5) * math.log(2.0))
        sizes = [side * (share * s) ** 0.5 for s in (shape, 1 / shape)]
        starts = [at * (side + size) - size for at, size in zip((y, x), sizes, strict=True)]
        (top, height), (left, width) = (
            (round(max(0, start)), round(min(side, start + size)) - round(max(0, start)))
            for start, size in zip(starts, sizes, strict=True)
        )
        visible = height * width / side**2
        if min(height, width) > 1 and visible >= max(SMALLEST, ENOUGH * share):
            corners.append((top, left, height, width))
    return corners


def patched(images: Tensor, sources: Tensor, seed: int = 0) -> Planted:
    """Paste a patch of another image into each. Edges are feathered, colours match the region replaced.

    Args:
        images: `(N, 3, H, W)`, from 0 to 1.
        sources: at least as large as the patches, from 0 to 1, one for each image. Patches are cut out of
            their middle, not resized.
        seed: of the boxes.

    """
    out, mask = images.clone(), torch.zeros(len(images), *images.shape[2:], dtype=torch.bool)
    for i, (top, left, height, width) in enumerate(boxes(len(images), images.shape[2], seed)):
        place = (slice(None), slice(top, top + height), slice(left, left + width))
        up, start = (sources.shape[2] - height) // 2, (sources.shape[3] - width) // 2
        patch = sources[i, :, up : up + height, start : start + width]
        behind = images[i][place]
        spread = (behind.std((1, 2)) / patch.std((1, 2)).clamp_min(1e-3)).clamp(0.2, 5.0)
        patch = (patch - patch.mean((1, 2))[:, None, None]) * spread[:, None, None]
        patch = (patch + behind.mean((1, 2))[:, None, None]).clamp(0, 1)
        soft = _feathered(height, width)
        out[i][place] = soft * patch + (1 - soft) * behind
        mask[i][place[1:]] = True
    return Planted(out, mask, ("patch",) * len(images))


def _feathered(height: int, width: int) -> Tensor:
    """One in the middle, falling to zero at the edges."""
    edges = []
    for size in (height, width):
        rise = ((torch.arange(size) + 0.5) / max(1.0, FEATHER * size)).clamp_max(1)
        edges.append(torch.minimum(rise, rise.flip(0)))
    return edges[0][:, None] * edges[1]


def _dead(region: Tensor, random: torch.Generator) -> Tensor:
    """A block of the sensor that gives one value."""
    return torch.full_like(region, float(torch.rand(1, generator=random) < 0.5))


def _blurred(region: Tensor, random: torch.Generator) -> Tensor:
    """Reduced to a quarter and enlarged again."""
    height, width = region.shape[1:]
    small = F.interpolate(region[None], (max(1, height // 4), max(1, width // 4)), mode="area")
    return F.interpolate(small, (height, width), mode="bilinear", align_corners=False)[0]


def _noisy(region: Tensor, random: torch.Generator) -> Tensor:
    """Independent noise on every value."""
    return region + 0.2 * torch.randn(region.shape, generator=random)


def _logo(region: Tensor, random: torch.Generator) -> Tensor:
    """A ring with two bars in one strong colour."""
    height, width = region.shape[1:]
    y, x = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    away = (x.square() + y.square()).sqrt()
    drawn = ((away > 0.65) & (away < 0.95)) | ((y.abs() < 0.15) & (away < 0.65))
    colour = torch.rand(3, generator=random).round()[:, None, None]
    return torch.where(drawn, colour.expand_as(region), region)


ARTEFACTS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "dead block": _dead,
    "blurred region": _blurred,
    "noisy region": _noisy,
    "logo": _logo,
}


def damaged(images: Tensor, seed: int = 0) -> Planted:
    """Give each image one of the artefacts, in turns."""
    random = torch.Generator().manual_seed(seed + 1)
    out, mask = images.clone(), torch.zeros(len(images), *images.shape[2:], dtype=torch.bool)
    kinds = [list(ARTEFACTS)[i % len(ARTEFACTS)] for i in range(len(images))]
    for i, (top, left, height, width) in enumerate(boxes(len(images), images.shape[2], seed)):
        place = (slice(None), slice(top, top + height), slice(left, left + width))
        out[i][place] = ARTEFACTS[kinds[i]](images[i][place], random).clamp(0, 1)
        mask[i][place[1:]] = True
    return Planted(out, mask, tuple(kinds))
