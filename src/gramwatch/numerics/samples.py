"""Which part of a tensor counts: pixels on a grid, groups of channels."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def as_maps(x: Tensor, channel_axis: int) -> Tensor:
    """A tensor whose first axis is the examples as `(examples, channels, pixels)`."""
    x = x if channel_axis == 1 else x.movedim(channel_axis, 1)
    return x.flatten(2) if x.ndim > 2 else x.unsqueeze(2)


TOGETHER = 16
"""If not all channels count, groups of so many side by side do: memory is read in pieces."""


class Sample(NamedTuple):
    """Which part of a tensor counts."""

    pixels: int | None = None
    """About how many pixels, on a regular grid: every second, third, ... along every axis. None: all."""
    channels: int | None = None
    """At most how many channels, in groups of `TOGETHER` that are evenly spread. None: all."""

    def count(self, channels: int) -> int:
        """How many of so many channels count."""
        step = _channel_step(channels, self.channels)
        return channels if step == 1 else -(-(channels // TOGETHER) // step) * TOGETHER

    def numbers(self, channels: int) -> Tensor:
        """Which of so many channels count."""
        step = _channel_step(channels, self.channels)
        if step == 1:
            return torch.arange(channels)
        return (
            torch.arange(0, channels // TOGETHER, step)[:, None] * TOGETHER + torch.arange(TOGETHER)
        ).flatten()

    def of(self, shape: Sequence[int], channel_axis: int) -> "Chosen":
        """The part of a tensor of this shape, whose first axis is the examples."""
        grid = None if self.pixels is None else _grid(shape, channel_axis, self.pixels)
        return Chosen(grid, _channel_step(shape[channel_axis], self.channels))


WHOLE = Sample()


class Chosen(NamedTuple):
    """The part of a tensor of a known shape that counts. Different samples of small tensors are the same."""

    grid: tuple[tuple[int, int], ...] | None
    """The pixels: for every axis of the tensor the first position and the step. None: all."""
    step: int
    """Of the groups of channels, every such one counts. 1: all channels."""

    def __bool__(self) -> bool:
        """Whether only a part counts."""
        return self.grid is not None or self.step > 1


def _channel_step(channels: int, most: int | None) -> int:
    """Every which group of channels counts, so that at most so many channels do."""
    if most is None or channels <= most:
        return 1
    return -(-channels // (most // TOGETHER * TOGETHER))


def sampled(x: Tensor, channel_axis: int, sample: Sample) -> tuple[Tensor, int]:
    """The part of a tensor that counts, and the axis of its channels. The first axis is the examples.

    If that is not the whole tensor, it is a copy whose channels are dense, which most kernels prefer.
    """
    chosen = sample.of(x.shape, channel_axis)
    if not chosen:
        return x, channel_axis
    if chosen.grid is not None:
        x = x[tuple([slice(first, None, step) for first, step in chosen.grid])]
    x = x.movedim(channel_axis, -1)
    if chosen.step > 1:
        groups = x.shape[-1] // TOGETHER
        x = x[..., : groups * TOGETHER].unflatten(-1, (groups, TOGETHER))[..., :: chosen.step, :].flatten(-2)
    return (x if x.ndim == 2 else x.flatten(1, -2).transpose(1, 2)), 1


def _grid(shape: Sequence[int], channel_axis: int, pixels: int) -> tuple[tuple[int, int], ...] | None:
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
