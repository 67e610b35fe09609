"""Image numbers: how sharp, coloured, bright and laid out an image is, whatever it shows.

A network is trained to ignore what does not change the class. A fault of the camera or of the pipeline is
just that, so it is often plainer in the input than in the features. The numbers are those of the network's
input: `(N, channels, height, width)`, of any scale. They are in five groups, `GROUPS`. They use first
differences between neighbouring pixels, and differences of differences, at full size and reduced to a half
and a quarter.

Logarithms need a floor. It is relative to the largest value of the image, so that scaling the input adds a
constant to a logarithm.

`sums_of` reads the pixels, `numbers_from` makes numbers of the sums. The first one has a kernel for the CPU,
and both together have kernels for NVIDIA GPUs.
"""

from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gramwatch.errors import InputError
from gramwatch.inputs.batches import Inputs, tensors_in
from gramwatch.numerics import kernels
from gramwatch.numerics.image_scales import BLOCK, BUSY, CLIPPED, FLOOR, REGIONS, SCALES, SHARE, pairs_of

LEAST_SIDE = 8
"""Smaller images are not looked at."""
SMALL = 4 * SCALES[-1]
"""The pixels of images with a smaller side are repeated."""
MOST_CHANNELS = 16
"""A tensor with more channels is no image."""

WHY_NONE = (
    f"the input holds no image: one tensor (N, channels, height, width), of at most {MOST_CHANNELS} channels "
    f"and at least {LEAST_SIDE} x {LEAST_SIDE} pixels"
)

AXES, WAYS = (2, 3), ("vertical", "horizontal")

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


class Sums(NamedTuple):
    """Means and extremes of images over their pixels, `(N, ...)` each.

    Axes are 0, vertical, and 1, horizontal. Planes are the channels, then the differences of pairs of
    channels: these also tell what two channels have in common.
    """

    square: Tensor
    """Mean squares of differences, `(N, scales, 2 axes, planes)`."""
    curved: Tensor
    """Mean squares of second differences, `(N, scales, 2 axes, channels)`."""
    length: Tensor
    """Mean magnitudes of differences, `(N, scales, 2 axes, channels)`."""
    slope: Tensor
    """Mean squares of differences, weighted by a ramp along their axis, `(N, 2 axes, channels)`."""
    lines: Tensor
    """Mean magnitude of differences by line: its mean over lines, the largest and the smallest,
    `(N, 2 axes, 2, 3)`. First lines are averaged over every eighth place, then not."""
    step: Tensor
    """The largest magnitude of a difference, `(N, 2 axes)`."""
    mean: Tensor
    """`(N, channels)`."""
    variance: Tensor
    """`(N, planes)`."""
    third: Tensor
    """Mean third powers about the mean, `(N, planes)`."""
    tilt: Tensor
    """Means about the mean, weighted by a ramp, `(N, 2 axes, channels)`."""
    extremes: Tensor
    """The largest and the smallest value, `(N, 2, channels)`."""
    clipped: Tensor
    """The shares of pixels near these, `(N, 2, channels)`."""
    regions: Tensor
    """Means by region, `(N, channels, regions)`."""
    busy: Tensor
    """Mean squares of the length of the gradient by region, `(N, 2 scales, regions)`."""


def look(inputs: Inputs) -> Tensor:
    """The numbers of the image among the arguments of a network, `(N, numbers)`. Without one, an error.

    They are computed in float32. With a kernel, sums are kept in float64. Kernels have no gradients, and
    cannot be traced.
    """
    image = image_of(inputs)
    if image is None:
        raise InputError(WHY_NONE)
    x = large_enough(image)
    wants_gradients = x.requires_grad and torch.is_grad_enabled()
    if type(x) is not Tensor or wants_gradients or torch.compiler.is_compiling():
        return numbers_from(sums_of(x.float())).float()
    if x.is_cuda:
        signature = ("cuda", "image_numbers", x.dtype, x.shape[1])
        by_kernel = kernels.attempt(signature, x)
        result: Tensor | None = by_kernel[0] if by_kernel else None
        if result is not None:
            return result
    x = x.float()
    return numbers_from(fast_sums_of(x) or sums_of(x)).float()


def large_enough(images: Tensor) -> Tensor:
    """Small images with every pixel repeated, so that they can be reduced. Other images as they are."""
    factor = -(-SMALL // min(images.shape[2:]))
    return images if factor == 1 else images.repeat_interleave(factor, 2).repeat_interleave(factor, 3)


@lru_cache(maxsize=64)
def numbers(channels: int) -> tuple[Number, ...]:
    """What the numbers of images mean, by their channels, in the order of `numbers_from`."""
    own = [str(channel) for channel in range(channels)]
    pairs = [f"{i} and {j}" for i, j in pairs_of(channels)]
    differences = (
        "log mean square of {} differences",
        "log mean square of second {} differences",
        "log mean over root mean square of {} differences",
    )
    regions = ("plainest region", "busiest region", "spread over regions")
    places, mosts = ("at every eighth place", "at one line"), ("largest", "smallest")
    of_pairs = (
        "correlation",
        "log of 1 - squared correlation",
        "log variance of the difference",
        "skewness of the difference",
    )
    tones = (
        "log share of pixels at the largest value",
        "log share of pixels at the smallest value",
        "largest value",
        "smallest value",
        "log variance",
        "skewness",
        "mean of the darkest region",
        "mean of the brightest region",
    )
    slopes = ("{0} slope of {0} differences", "{0} slope of the values")
    return (
        *(
            Number("detail", what.format(way), s, c)
            for s, way, what, c in product(SCALES, WAYS, differences, own)
        ),
        *(
            Number("detail", f"log mean square of differences: {what}", s, "")
            for s, what in product(BUSY, regions)
        ),
        *(
            Number("grain", f"log of 1 - correlation of {way} differences", s, pair)
            for s, way, pair in product(SCALES, WAYS, pairs)
        ),
        *(
            Number("grain", f"log of the {most} {way} difference {place}, over the mean", 1, "")
            for way, place, most in product(WAYS, places, mosts)
        ),
        *(Number("colour", what, 1, pair) for what, pair in product(of_pairs, pairs)),
        *(Number("colour", "mean", 1, c) for c in own),
        *(Number("tone", what, 1, c) for what, c in product(tones, own)),
        *(Number("layout", what.format(way), 1, c) for what, way, c in product(slopes, WAYS, own)),
    )


@lru_cache(maxsize=64)
def meaning(width: int) -> tuple[Number, ...]:
    """What so many numbers mean."""
    for channels in range(1, MOST_CHANNELS + 1):
        if len(numbers(channels)) == width:
            return numbers(channels)
    raise ValueError(f"no image has {width} numbers")


@lru_cache(maxsize=256)
def columns(width: int, group: str) -> slice:
    """The columns of one group among so many numbers."""
    groups = [number.group for number in meaning(width)]
    first = groups.index(group)
    return slice(first, first + groups.count(group))


def sums_of(x: Tensor) -> Sums:
    """The sums of images with sides of at least `SMALL`, in their own precision. This is the definition."""
    channels, pairs = x.shape[1], pairs_of(x.shape[1])
    planes = torch.cat([x, *(x[:, i : i + 1] - x[:, j : j + 1] for i, j in pairs)], 1)
    high, low = x.amax((2, 3), keepdim=True), x.amin((2, 3), keepdim=True)
    near = CLIPPED * (high - low) + 1e-12
    mean = planes.mean((2, 3), keepdim=True)
    centred = planes - mean
    by_line = [centred[:, :channels].mean(5 - axis) for axis in AXES]
    clipped = [at.to(x.dtype).mean((2, 3)) for at in (x >= high - near, x <= low + near)]
    by_scale, busy, slopes, lines, steps = [], [], [], [], []
    y = planes
    for scale in SCALES:
        y = y if scale == 1 else F.avg_pool2d(y, 2)
        squares = []
        for axis in AXES:
            d = _difference(y, axis)
            own, squared = d[:, :channels], d.square()
            magnitude = own.abs()
            square, length = squared.mean(5 - axis), magnitude.mean(5 - axis)
            by_scale.append((square.mean(2), _mean_square(_difference(own, axis)), length.mean(2)))
            if scale == 1:
                slopes.append((square[:, :channels] * _ramp(square)).mean(2))
                lines.append(_lines(length.mean(1)))
                steps.append(magnitude.amax((1, 2, 3)))
            squares.append(squared[:, :channels])
        if scale in BUSY:
            gradient = squares[0][:, :, :, :-1].mean(1, True) + squares[1][:, :, :-1].mean(1, True)
            busy.append(_by_region(gradient).flatten(1))
    square, curved, length = (
        torch.stack(parts, 1).unflatten(1, (-1, len(AXES))) for parts in zip(*by_scale, strict=True)
    )
    return Sums(
        square=square,
        curved=curved,
        length=length,
        slope=torch.stack(slopes, 1),
        lines=torch.stack(lines, 1),
        step=torch.stack(steps, 1),
        mean=mean[:, :channels].flatten(1),
        variance=_mean_square(centred),
        third=centred.pow(3).mean((2, 3)),
        tilt=torch.stack([(line * _ramp(line)).mean(2) for line in by_line], 1),
        extremes=torch.stack([high.flatten(1), low.flatten(1)], 1),
        clipped=torch.stack(clipped, 1),
        regions=_by_region(x).flatten(2),
        busy=torch.stack(busy, 1),
    )


def _by_region(x: Tensor) -> Tensor:
    """Means by region, as `adaptive_avg_pool2d` makes them. In ONNX that is an addition for every pixel."""
    for axis in AXES:
        size = x.shape[axis]
        edges = [(i * size // REGIONS, -(-(i + 1) * size // REGIONS)) for i in range(REGIONS)]
        x = torch.stack([x.narrow(axis, start, stop - start).mean(axis) for start, stop in edges], axis)
    return x


def _lines(length: Tensor) -> Tensor:
    """The `lines` of one axis, from the mean magnitude of differences by line, `(N, lines)`."""
    blocks = length.shape[1] // BLOCK
    by_phase = length[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK)).mean(1) if blocks else length
    kinds = (by_phase, length)
    return torch.stack([torch.stack([k.mean(1), k.amax(1), k.amin(1)], 1) for k in kinds], 1)


def fast_sums_of(x: Tensor) -> Sums | None:
    """The same in float64, by a kernel for the CPU. None without a kernel."""
    if x.device.type != "cpu":
        return None
    sums = Sums(*(x.new_empty((len(x), *shape), dtype=torch.float64) for shape in _shapes(x.shape[1])))
    return sums if kernels.attempt(("cpu", "image_sums", x.dtype), x, sums) else None


@lru_cache(maxsize=64)
def _shapes(channels: int) -> list[torch.Size]:
    """The shapes of the sums of one image."""
    return [part.shape[1:] for part in sums_of(torch.zeros(1, channels, SMALL, SMALL))]


def numbers_from(sums: Sums) -> Tensor:
    """The numbers, `(N, numbers)`, from sums of any precision. The groups follow each other."""
    channels = sums.mean.shape[1]
    floor = FLOOR * sums.extremes.abs().amax((1, 2)).square().unsqueeze(1) + 1e-12
    least = floor[:, None, None]

    # Detail: how large differences are, and how much regions differ.
    square = (sums.square[..., :channels] + least).log()
    curved = (sums.curved + least).log()
    spread = (sums.length + least.sqrt()).log() - square / 2
    energy = (sums.busy + floor.unsqueeze(1)).log()
    over_regions = (energy - energy.mean(2, keepdim=True)).square().mean(2).sqrt()
    parts = [
        torch.stack([square, curved, spread], -2),
        torch.stack([energy.amin(2), energy.amax(2), over_regions], 2),
    ]

    # Grain: how much the differences of channels differ, and those of lines.
    if channels > 1:
        correlation = _correlation(sums.square, channels, least)
        parts.append(((1 - correlation).clamp_min(0) + SHARE).log())
    lines = (sums.lines + (1e-3 * sums.step[..., None, None] + 1e-12)).log()
    parts.append(lines[..., 1:] - lines[..., :1])

    # Colour: the values of pairs of channels.
    variance = sums.variance + floor
    skewness = sums.third / variance.pow(1.5)
    if channels > 1:
        correlation = _correlation(sums.variance, channels, floor)
        rest = (1 - correlation.square()).clamp_min(0) + SHARE / 10
        apart = (variance[:, channels:].log(), skewness[:, channels:])
        parts.append(torch.stack([correlation, rest.log(), *apart], -2))
    parts.append(sums.mean)

    # Tone: the values of channels.
    variance = variance[:, :channels]
    tones = (
        *(sums.clipped + SHARE).log().unbind(1),
        *sums.extremes.unbind(1),
        variance.log(),
        skewness[:, :channels],
        sums.regions.amin(2),
        sums.regions.amax(2),
    )
    parts.append(torch.stack(tones, -2))

    # Layout: where detail and light lie.
    parts.append(sums.slope / (sums.square[:, 0, :, :channels] + floor.unsqueeze(1)))
    parts.append(sums.tilt / variance.sqrt().unsqueeze(1))
    return torch.cat([part.flatten(1) for part in parts], 1)


def _correlation(square: Tensor, channels: int, floor: Tensor) -> Tensor:
    """The correlation of pairs of channels, from the mean squares of planes."""
    own, apart = square[..., :channels], square[..., channels:]
    pairs = apart.shape[-1]  # each channel with the next; of more than two, the last with the first
    one, other = own[..., :pairs], torch.cat([own[..., 1:], own[..., :1]], -1)[..., :pairs]
    return (one + other - apart) / 2 / (one * other + floor.square()).sqrt()


def _difference(x: Tensor, axis: int) -> Tensor:
    """The differences between neighbours along an axis."""
    return x[:, :, 1:] - x[:, :, :-1] if axis == 2 else x[:, :, :, 1:] - x[:, :, :, :-1]


def _mean_square(x: Tensor) -> Tensor:
    return x.square().mean((2, 3))


def _ramp(lines: Tensor) -> Tensor:
    """From -1 to 1 along the last axis."""
    return torch.linspace(-1, 1, lines.shape[-1], dtype=lines.dtype, device=lines.device)
