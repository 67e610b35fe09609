"""Padding: which places of a batch are real, and the part of a tensor that lies at these places."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gramwatch.numerics.samples import Sample


def most_along(pixels: int) -> int:
    """The most pixels that a sample of about so many takes along one axis. Of a shorter axis it takes all."""
    most = math.isqrt(2 * pixels * pixels)
    while most > pixels and most * -(-most // 2) > pixels * pixels:
        most -= 1
    return max(most, pixels)


class Real:
    """The places of a batch that are real, and not padding.

    A tensor with as many pixels as there are places has one pixel for each: the tokens of a text. Only the
    real ones count. A sample of them depends on their number alone, not on the length of the batch.

    Args:
        mask: True at real places, `(N, length)`.

    """

    def __init__(self, mask: Tensor) -> None:
        self.mask, self.length = mask, mask.shape[1]
        self.counts = mask.sum(1, keepdim=True)
        """The number of real places, `(N, 1)`."""
        self._samples: dict[int | None, tuple[Tensor, Tensor, Tensor]] = {}

    def fits(self, shape: Sequence[int], channel_axis: int) -> bool:
        """Whether a tensor of this shape has one pixel for each place. Its first axis is the examples."""
        sizes = [size for axis, size in enumerate(shape) if axis not in (0, channel_axis)]
        return math.prod(sizes) == self.length

    def whole(self, pixels: int | None) -> int | None:
        """The same number of pixels for a sample; None if it takes all real places of this batch."""
        return None if pixels is None or self.length <= most_along(pixels) else pixels

    def part(self, x: Tensor, channel_axis: int, sample: Sample) -> tuple[Tensor, Tensor]:
        """The real part of a tensor that counts, `(N, channels, pixels)`, and its pixels, `(N, 1)`.

        An example with fewer real pixels than others has zeros after them. They add nothing to Gram
        statistics.
        """
        places, real, count = self._sample(self.whole(sample.pixels))
        maps = Sample(None, sample.channels).of(x.shape, channel_axis).maps(x)
        rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
        return maps.transpose(1, 2)[rows, places].masked_fill(~real.unsqueeze(2), 0).transpose(1, 2), count

    def _sample(self, pixels: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Which places count, `(N, k)`, which of them are real, and how many these are."""
        if pixels not in self._samples:
            counts = self.counts
            most, about = (self.length,) * 2 if pixels is None else (most_along(pixels), pixels)
            first, step = _grid(counts, about)
            at = first + step * torch.arange(most, device=counts.device)
            places, real = self._order().gather(1, at.clamp_max(self.length - 1)), at < counts
            self._samples[pixels] = places, real, real.sum(1, keepdim=True)
        return self._samples[pixels]

    def _order(self) -> Tensor:
        """The places of each example, `(N, length)`: the real ones in their order, then any others."""
        places = torch.arange(self.length, device=self.mask.device).expand(self.mask.shape)
        # Padding is written to one more place, which is cut off.
        target = torch.where(self.mask, self.mask.cumsum(1) - 1, self.length)
        room = places.new_zeros(places.shape[0], self.length + 1)
        return room.scatter(1, target, places)[:, : self.length]


def real_means(part: Tensor, count: Tensor) -> Tensor:
    """The channel means of what `Real.part` returns, `(N, channels)`.

    They are summed in float64, so that zeros after the real pixels do not change their rounding: distances
    by ill-conditioned covariances magnify it.
    """
    return (part.sum(2, dtype=torch.float64) / count.clamp_min(1)).float()


def _grid(counts: Tensor, pixels: int) -> tuple[Tensor, Tensor]:
    """The first position and the step of `samples.grid_of`, for sequences of these numbers of places."""
    step = _quotient(counts, pixels).clamp_min(1)
    larger, count = _quotient(counts, (step - 1).clamp_min(1)), _quotient(counts, step)
    step = torch.where((step > 1) & (larger * count <= pixels * pixels), step - 1, step)
    return (counts - 1).clamp_min(0) % step // 2, step


def _quotient(a: Tensor, b: Tensor | int) -> Tensor:
    """`a / b`, rounded up."""
    return (a + b - 1) // b
