"""Plain causes: from simple statistics of images to words such as "blurred" or "darker".

Two steps that do not know of each other. `statistics` measures images. `Ordinary` compares measured values
with those of ordinary images, and names what lies far outside. Values may come from elsewhere: a statistic
takes part if `TAILS` has words for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

FEWEST = 30
"""The fewest ordinary images with which others can be compared."""
RARE = 0.05
"""The share of ordinary images at each end of a statistic that may be odd themselves."""
MARGIN = 0.4
"""How far a value lies outside before it is named, in units of the range of ordinary values."""
SMALLEST = 0.02
"""The smallest range of ordinary values. Images that are all alike have none."""
DARK, BRIGHT = 0.02, 0.98
"""A pixel below or above is black or white."""


@dataclass(frozen=True)
class Cause:
    """A visible fault of an image, in words."""

    name: str
    """One or two words: a title."""
    about: str
    """The observation as the end of a sentence about images: "have less fine detail"."""


BLURRED = Cause("Blurred or smooth", "have less fine detail")
DETAILED = Cause("Much fine detail", "have more fine detail or grain")
DARKER = Cause("Darker", "are darker")

TAILS: Mapping[str, tuple[Cause | None, Cause | None]] = {
    "white": (None, Cause("Large white areas", "have larger white areas")),
    "black": (None, Cause("Large black areas", "have larger black areas")),
    "colour_noise": (None, Cause("Noisy", "have more coloured grain")),
    "noise": (BLURRED, DETAILED),
    "detail": (BLURRED, DETAILED),
    "highlights": (DARKER, None),
    "brightness": (DARKER, Cause("Brighter", "are brighter")),
    "saturation": (
        Cause("Grey", "have paler colours"),
        Cause("Colourful", "have stronger colours"),
    ),
    "warmth": (
        Cause("Bluish", "have more blue and less red"),
        Cause("Reddish", "have more red and less blue"),
    ),
    "contrast": (
        Cause("Low in contrast", "have less contrast"),
        Cause("High in contrast", "have more contrast"),
    ),
}
"""The causes of a statistic far below and far above that of ordinary images. None: no cause.

Causes stand before their effects: noise adds detail, and dark images have less contrast.
"""


def statistics(images: Tensor) -> dict[str, Tensor]:
    """The statistics of images `(N, 1 or 3, H, W)` with pixels in [0, 1], `(N,)` each, in float64."""
    pixels = images.double().clamp(0, 1)
    grey = pixels.mean(1)
    coarse = _halved(grey)
    return {
        "detail": _log(_steps(grey)) - _log(_steps(coarse)),
        "noise": _log(_grain(grey)),
        "colour_noise": _log(_grain(pixels[:, 0] - pixels[:, -1])),
        "saturation": _log(10 * (pixels.amax(1) - pixels.amin(1)).mean((1, 2))),
        "warmth": (pixels[:, 0] - pixels[:, -1]).mean((1, 2)),
        "brightness": grey.mean((1, 2)),
        "highlights": grey.flatten(1).quantile(0.95, 1),
        "contrast": _log(10 * grey.std((1, 2), correction=0)),
        "black": (pixels.amax(1) < DARK).double().mean((1, 2)),
        "white": (pixels.amin(1) > BRIGHT).double().mean((1, 2)),
    }


def _log(values: Tensor) -> Tensor:
    """The logarithm with a floor. Values below a step of 8-bit pixels become almost equal."""
    return (values + 1 / 255).log()


def _halved(grey: Tensor) -> Tensor:
    """Images of half the size. A side of one pixel stays."""
    height, width = (2 if side > 1 else 1 for side in grey.shape[1:])
    return torch.nn.functional.avg_pool2d(grey.unsqueeze(1), (height, width)).squeeze(1)


def _steps(grey: Tensor) -> Tensor:
    """The mean step from a pixel to its neighbours to the right and below."""
    steps = torch.cat([grey.diff(dim=dim).abs().flatten(1) for dim in (1, 2)], 1)
    return steps.sum(1) / max(1, steps.shape[1])


def _grain(grey: Tensor) -> Tensor:
    """The noise in the quieter half of the pixels, after constant and sloping areas are removed."""
    if min(grey.shape[1:]) < 3:
        return torch.zeros(len(grey), dtype=grey.dtype, device=grey.device)
    rest = grey.diff(n=2, dim=1).diff(n=2, dim=2).abs().flatten(1) / 6  # 6: its deviation under noise of one
    return rest.median(1).values / 0.6745


@dataclass(frozen=True)
class Ordinary:
    """The range of every statistic over ordinary images."""

    ranges: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, values: Mapping[str, Tensor]) -> "Ordinary | None":
        """The ranges of measured values. None if there are fewer than `FEWEST`."""
        if not values or min(map(len, values.values())) < FEWEST:
            return None
        ends = torch.tensor([RARE, 1 - RARE], dtype=torch.float64)
        columns = {name: column.double().quantile(ends).tolist() for name, column in values.items()}
        return cls({name: (low, high) for name, (low, high) in columns.items()})

    def causes(self, values: Mapping[str, Tensor]) -> list[list[Cause]]:
        """The visible faults of each of N images, causes before their effects."""
        causes: list[dict[Cause, None]] = [{} for _ in next(iter(values.values()))]
        for name, tails in TAILS.items():
            if name not in values or name not in self.ranges:
                continue
            low, high = self.ranges[name]
            least = MARGIN * max(high - low, SMALLEST)
            for tail, outside in zip(tails, (low - values[name], values[name] - high), strict=True):
                for i in (outside > least).nonzero().flatten().tolist():
                    if tail is not None:
                        causes[i][tail] = None
        return [list(of_image) for of_image in causes]
