"""Image numbers: how sharp, coloured, bright and laid out an image is, whatever it shows.

A network is trained to ignore what does not change the class. A fault of the camera or of the pipeline is
just that, so it is often plainer in the input than in the features. The numbers are those of the network's
input: `(N, channels, height, width)`, of any scale. They are in five groups, `GROUPS`. They use first
differences between neighbouring pixels, and differences of differences, at full size and reduced to a half
and a quarter.

Logarithms need a floor. It is relative to the largest value of the image, so that scaling the input adds a
constant to a logarithm.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gramwatch.batches import Inputs, tensors_in

SCALES = (1, 2, 4)
"""The image is reduced by these factors, by the mean of square blocks."""
LEAST_SIDE = 8
"""Smaller images are not looked at."""
LEAST_REDUCED = 4
"""Images are not reduced to a smaller side."""
MOST_CHANNELS = 16
"""A tensor with more channels is no image."""
REGIONS = 4
"""The image has so many rows and columns of regions. The plainest and the busiest one count."""
BLOCK = 8
"""The side of the blocks of JPEG. Their edges show in large differences at every eighth place."""
FLOOR = 2.5e-6
"""The floor of mean squares, relative to the square of the largest value: a quarter of a step of 8 bits."""
SHARE = 1e-3
"""The floor of shares of pixels."""
CLIPPED = 0.004
"""A pixel is clipped if it lies this near the largest or smallest value, relative to their distance."""

WHY_NONE = (
    f"the input holds no image: one tensor (N, channels, height, width), of at most {MOST_CHANNELS} channels "
    f"and at least {LEAST_SIDE} x {LEAST_SIDE} pixels"
)

GROUPS = {
    "detail": "sharpness and noise",
    "grain": "fine differences of colour, and lines",
    "colour": "colours",
    "tone": "brightness and contrast",
    "layout": "where light and detail lie",
}
"""The groups of numbers, and what each one sees."""


class Number(NamedTuple):
    """The meaning of one number."""

    group: str
    what: str
    """Such as "log mean square of vertical differences"."""
    scale: int
    """The factor by which the image was reduced."""
    channels: str
    """The channel or the pair of channels; empty: all together."""

    @property
    def in_words(self) -> str:
        """What it is, with the channel and the scale."""
        word = "channels" if "and" in self.channels else "channel"
        channels = f" of {word} {self.channels}" if self.channels else ""
        reduced = f", reduced to 1/{self.scale}" if self.scale > 1 else ""
        return f"{self.what}{channels}{reduced}"


def image_of(inputs: Inputs) -> Tensor | None:
    """The image among the arguments of a network: its only tensor `(N, channels, height, width)` of numbers.

    None if there is no such tensor, if there are several, or if it has too many channels or too few pixels.
    """
    images = [t for t in tensors_in(inputs) if t.ndim == 4 and t.is_floating_point()]
    if len(images) != 1:
        return None
    _, channels, height, width = images[0].shape
    fits = channels <= MOST_CHANNELS and min(height, width) >= LEAST_SIDE
    return images[0] if fits else None


def pairs_of(channels: int) -> list[tuple[int, int]]:
    """The pairs of channels that are compared: neighbours, the last one and the first one among them."""
    if channels < 3:
        return [(0, 1)] if channels == 2 else []
    return [(i, (i + 1) % channels) for i in range(channels)]


class _Numbers:
    """Collects numbers, `(N, k)` each, and what they mean, by group."""

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor]] = {group: [] for group in GROUPS}
        self.meanings: dict[str, list[Number]] = {group: [] for group in GROUPS}

    def add(self, group: str, what: str, scale: int, channels: Iterable[str], values: Tensor) -> None:
        self.values[group].append(values)
        self.meanings[group] += [Number(group, what, scale, channel) for channel in channels]

    @property
    def in_order(self) -> Iterator[Number]:
        return (number for group in GROUPS for number in self.meanings[group])


def look(images: Tensor) -> Tensor:
    """The numbers of images `(N, channels, height, width)`: `(N, numbers)`.

    They are computed in float32.
    """
    numbers = _measured(images.float())
    return torch.cat([values for group in GROUPS for values in numbers.values[group]], 1)


@lru_cache(maxsize=64)
def numbers(channels: int, side: int) -> tuple[Number, ...]:
    """What the numbers of images mean, by their channels and their shorter side."""
    side = min(side, LEAST_REDUCED * SCALES[-1])  # more pixels give no further numbers
    return tuple(_measured(torch.zeros(1, channels, side, side)).in_order)


@lru_cache(maxsize=64)
def meaning(width: int) -> tuple[Number, ...]:
    """What so many numbers mean."""
    for side in (LEAST_REDUCED * scale for scale in SCALES if LEAST_REDUCED * scale >= LEAST_SIDE):
        for channels in range(1, MOST_CHANNELS + 1):
            if len(numbers(channels, side)) == width:
                return numbers(channels, side)
    raise ValueError(f"no image has {width} numbers")


@lru_cache(maxsize=256)
def columns(width: int, group: str) -> slice:
    """The columns of one group among so many numbers."""
    groups = [number.group for number in meaning(width)]
    first = groups.index(group)
    return slice(first, first + groups.count(group))


def _measured(x: Tensor) -> _Numbers:
    numbers = _Numbers()
    each = [str(channel) for channel in range(x.shape[1])]
    pairs = pairs_of(x.shape[1])
    both = [f"{i} and {j}" for i, j in pairs]
    first, second = [i for i, _ in pairs], [j for _, j in pairs]
    floor = FLOOR * x.abs().amax((1, 2, 3)).square().unsqueeze(1) + 1e-12
    scales = [scale for scale in SCALES if min(x.shape[2:]) >= LEAST_REDUCED * scale]
    for scale in scales:
        y = x if scale == 1 else F.avg_pool2d(x, scale)
        for axis, way in ((2, "vertical"), (3, "horizontal")):
            d = _difference(y, axis)
            square, length = _mean_square(d), d.abs().mean((2, 3))
            of = f"{way} differences"
            numbers.add("detail", f"log mean square of {of}", scale, each, (square + floor).log())
            curved = (_mean_square(_difference(d, axis)) + floor).log()
            numbers.add("detail", f"log mean square of second {of}", scale, each, curved)
            spread = (length + floor.sqrt()).log() - (square + floor).log() / 2
            numbers.add("detail", f"log mean over root mean square of {of}", scale, each, spread)
            if pairs:
                product = (d[:, first] * d[:, second]).mean((2, 3))
                apart = 1 - product / (square[:, first] * square[:, second] + floor.square()).sqrt()
                numbers.add(
                    "grain",
                    f"log of 1 - correlation of {of}",
                    scale,
                    both,
                    (apart.clamp_min(0) + SHARE).log(),
                )
            if scale == 1:
                _add_lines(numbers, d, axis, way)
                energy = d.square()
                slope = (energy * _ramp(d, axis)).mean((2, 3)) / (square + floor)
                numbers.add("layout", f"{way} slope of {of}", scale, each, slope)
    _add_colours(numbers, x, floor, each, both, (first, second))
    _add_tones(numbers, x, floor, each)
    for scale in (1, 2):
        _add_regions(numbers, x if scale == 1 else F.avg_pool2d(x, scale), floor, scale)
    return numbers


def _add_lines(numbers: _Numbers, d: Tensor, axis: int, way: str) -> None:
    """Single lines, and lines at every eighth place: how far differences there are from the mean."""
    profile = d.abs().mean((1, 5 - axis))
    blocks = profile.shape[1] // BLOCK
    small = 1e-3 * d.abs().amax((1, 2, 3)).unsqueeze(1) + 1e-12
    kinds = {"at one line": profile}
    if blocks:
        by_phase = profile[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK)).mean(1)
        kinds["at every eighth place"] = by_phase
    for what, lines in kinds.items():
        extremes = torch.stack([lines.amax(1), lines.amin(1)], 1)
        values = (extremes + small).log() - (lines.mean(1, keepdim=True) + small).log()
        for column, most in enumerate(("largest", "smallest")):
            text = f"log of the {most} {way} difference {what}, over the mean"
            numbers.add("grain", text, 1, [""], values[:, column : column + 1])


def _add_colours(
    numbers: _Numbers,
    x: Tensor,
    floor: Tensor,
    each: list[str],
    both: list[str],
    pairs: tuple[list[int], list[int]],
) -> None:
    """Means, and how two channels differ from one another."""
    mean = x.mean((2, 3), keepdim=True)
    numbers.add("colour", "mean", 1, each, mean.flatten(1))
    if not both:
        return
    centred = x - mean
    one, other = centred[:, pairs[0]], centred[:, pairs[1]]
    variance = _mean_square(centred)
    correlation = (one * other).mean((2, 3))
    correlation = correlation / (variance[:, pairs[0]] * variance[:, pairs[1]] + floor.square()).sqrt()
    numbers.add("colour", "correlation", 1, both, correlation)
    rest = (1 - correlation.square()).clamp_min(0) + SHARE / 10
    numbers.add("colour", "log of 1 - squared correlation", 1, both, rest.log())
    difference = one - other
    square = _mean_square(difference) + floor
    numbers.add("colour", "log variance of the difference", 1, both, square.log())
    skewness = (difference * difference.square()).mean((2, 3)) / square.pow(1.5)
    numbers.add("colour", "skewness of the difference", 1, both, skewness)


def _add_tones(numbers: _Numbers, x: Tensor, floor: Tensor, each: list[str]) -> None:
    """The distribution of the values of each channel, and where they lie."""
    high, low = x.amax((2, 3), keepdim=True), x.amin((2, 3), keepdim=True)
    near = CLIPPED * (high - low) + 1e-12
    for what, clipped in (("largest", x >= high - near), ("smallest", x <= low + near)):
        share = clipped.float().mean((2, 3)) + SHARE
        numbers.add("tone", f"log share of pixels at the {what} value", 1, each, share.log())
    numbers.add("tone", "largest value", 1, each, high.flatten(1))
    numbers.add("tone", "smallest value", 1, each, low.flatten(1))
    centred = x - x.mean((2, 3), keepdim=True)
    variance = _mean_square(centred) + floor
    numbers.add("tone", "log variance", 1, each, variance.log())
    skewness = (centred * centred.square()).mean((2, 3)) / variance.pow(1.5)
    numbers.add("tone", "skewness", 1, each, skewness)
    regions = F.adaptive_avg_pool2d(x, REGIONS).flatten(2)
    numbers.add("tone", "mean of the darkest region", 1, each, regions.amin(2))
    numbers.add("tone", "mean of the brightest region", 1, each, regions.amax(2))
    for axis, way in ((2, "vertical"), (3, "horizontal")):
        slope = (centred * _ramp(x, axis)).mean((2, 3)) / variance.sqrt()
        numbers.add("layout", f"{way} slope of the values", 1, each, slope)


def _add_regions(numbers: _Numbers, y: Tensor, floor: Tensor, scale: int) -> None:
    """The plainest and the busiest region of the image, and how much regions differ."""
    square = _difference(y, 2)[:, :, :, :-1].square() + _difference(y, 3)[:, :, :-1].square()
    regions = F.adaptive_avg_pool2d(square.mean(1, keepdim=True), REGIONS).flatten(1)
    energy = (regions + floor).log()
    for what, value in (
        ("plainest", energy.amin(1)),
        ("busiest", energy.amax(1)),
        ("spread over", energy.std(1, correction=0)),
    ):
        text = f"log mean square of differences: {what} region{'s' if what == 'spread over' else ''}"
        numbers.add("detail", text, scale, [""], value.unsqueeze(1))


def _difference(x: Tensor, axis: int) -> Tensor:
    """The differences between neighbours along an axis."""
    return x[:, :, 1:] - x[:, :, :-1] if axis == 2 else x[:, :, :, 1:] - x[:, :, :, :-1]


def _mean_square(x: Tensor) -> Tensor:
    return x.square().mean((2, 3))


def _ramp(x: Tensor, axis: int) -> Tensor:
    """From -1 to 1 along an axis."""
    ramp = torch.linspace(-1, 1, x.shape[axis], device=x.device)
    return ramp.unsqueeze(1) if axis == 2 else ramp
