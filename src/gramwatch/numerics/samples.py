"""Samples: which pixels and channels of a tensor count."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TOGETHER = 16
"""If not all channels count, groups of so many side by side do: memory is read in pieces."""


class Sample(NamedTuple):
    """Which part of a tensor counts, whatever its shape."""

    pixels: int | None = None
    """About how many pixels, on a regular grid: every second, third, ... along every axis. None: all."""
    channels: int | None = None
    """At most how many channels, in groups of `TOGETHER` that are evenly spread. None: all."""

    def count(self, channels: int) -> int:
        """How many of so many channels count."""
        step = self._step(channels)
        return channels if step == 1 else -(-(channels // TOGETHER) // step) * TOGETHER

    def numbers(self, channels: int) -> Tensor:
        """The numbers of the channels that count, of so many."""
        step = self._step(channels)
        if step == 1:
            return torch.arange(channels)
        return (
            torch.arange(0, channels // TOGETHER, step)[:, None] * TOGETHER + torch.arange(TOGETHER)
        ).flatten()

    def of(self, shape: Sequence[int], channel_axis: int) -> "Part":
        """The part of a tensor of this shape, whose first axis is the examples."""
        grid = None if self.pixels is None else grid_of(shape, channel_axis, self.pixels)
        return Part(grid, self._step(shape[channel_axis]), channel_axis)

    def _step(self, channels: int) -> int:
        """Stride between counted groups of channels, so that at most `channels` count. 1: all channels."""
        if self.channels is None or channels <= self.channels:
            return 1
        return -(-channels // (self.channels // TOGETHER * TOGETHER))


WHOLE = Sample()


class Part(NamedTuple):
    """The part of a tensor of a known shape that counts. Different samples of small tensors are the same."""

    grid: tuple[tuple[int, int], ...] | None
    """The pixels: for every axis of the tensor the first position and the step. None: all."""
    step: int
    """Stride between counted groups of channels. 1: all channels."""
    channel_axis: int

    def maps(self, x: Tensor) -> Tensor:
        """The part of a tensor as `(examples, channels, pixels)`.

        If that is not the whole tensor, it is a copy whose channels are dense, which most kernels prefer.
        """
        if self.grid is None and self.step == 1:
            x = x if self.channel_axis == 1 else x.movedim(self.channel_axis, 1)
            return x.flatten(2) if x.ndim > 2 else x.unsqueeze(2)
        if self.grid is not None:
            x = x[tuple([slice(first, None, step) for first, step in self.grid])]
        x = x.movedim(self.channel_axis, -1)
        if self.step > 1:
            groups = x.shape[-1] // TOGETHER
            x = x[..., : groups * TOGETHER].unflatten(-1, (groups, TOGETHER))[..., :: self.step, :]
            x = x.flatten(-2)
        return x.unsqueeze(2) if x.ndim == 2 else x.flatten(1, -2).transpose(1, 2)


def as_maps(x: Tensor, channel_axis: int) -> Tensor:
    """A tensor whose first axis is the examples as `(examples, channels, pixels)`."""
    return Part(None, 1, channel_axis).maps(x)


def grid_of(shape: Sequence[int], channel_axis: int, pixels: int) -> tuple[tuple[int, int], ...] | None:
    """The grid whose number of pixels is nearest to `pixels`, as a ratio. None if that is every pixel."""
    axes = [axis for axis in range(1, len(shape)) if axis != channel_axis]
    step, count, larger = 0, pixels + 1, 0
    while count > pixels:
        larger, step, count = count if step else 0, step + 1, 1
        for axis in axes:
            count *= -(-shape[axis] // step)
    if larger * count <= pixels * pixels and larger:  # the grid before is nearer
        step -= 1
    if step == 1:
        return None
    grid = [(0, 1)] * len(shape)
    for axis in axes:
        grid[axis] = ((shape[axis] - 1) % step // 2, step)
    return tuple(grid)
