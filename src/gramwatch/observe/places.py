"""Places: where the pixels and tokens of a network's tensors lie in its input, and which are unusual."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramwatch.inputs.batches import Inputs, count_examples, tensors_in
from gramwatch.numerics.samples import as_maps
from gramwatch.watch import Network, Tap, Taps, judging
from gramwatch.watch.running import Watch, ordinary

FEW_CHANNELS = 4
"""An image has its channels last if its last axis has at most so many entries, and its first axis more."""
MOST_PREFIX = 8
"""The most tokens before the grid of a transformer, such as class tokens and registers."""
STRIDING = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)
"""Modules that make maps of images smaller."""
INTERPOLATIONS = {1: "linear", 2: "bilinear", 3: "trilinear"}
TOKENS = "input_ids"
"""The argument of a network that usually holds the tokens of a text."""
Grid = tuple[int, tuple[int, ...]]
"""How many tokens come before the grid, and its shape."""
FAINTEST = 0.01
"""The strength of a pixel below this share of the mean strength counts as this share."""
FAINTEST_CHANNEL = 0.001
"""The mean square of a channel below this share of the largest counts as this share."""
SMOOTHED = 8
"""A map is averaged over about this part of its sides: single pixels say little."""


def sizes_of(inputs: Inputs) -> tuple[Tensor | None, tuple[int, ...]]:
    """The tensor of an input that has places, and their sizes: height and width, or the length of a sequence.

    Of several tensors, the tokens of a text are taken, or the first with the most axes. A plain vector has no
    places.
    """
    if isinstance(inputs, Mapping) and isinstance(inputs.get(TOKENS), Tensor):
        inputs = inputs[TOKENS]
    tensors = [tensor for tensor in tensors_in(inputs) if tensor.ndim > 1]
    if not tensors:
        return None, ()
    tensor = max(tensors, key=lambda t: t.ndim)
    return tensor, _sizes(tensor)


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    shape = tuple(tensor.shape[1:])
    if len(shape) == 1:
        return () if tensor.is_floating_point() else shape  # numbers of words are a sequence
    if len(shape) == 2 or (len(shape) > 2 and shape[-1] <= FEW_CHANNELS < shape[0]):
        return shape[:-1] if len(shape) > 2 else shape
    return shape[1:]


def grid_of(positions: Sequence[int], sizes: Sequence[int]) -> Grid | None:
    """How many tokens to leave out, and the grid of the others; None if the positions have no place.

    Positions along as many axes as the input are its grid. Tokens along one axis are a grid of the shape of
    the input, after up to `MOST_PREFIX` tokens without a place.
    """
    if not sizes or math.prod(positions) < 2:
        return None
    if len(positions) == len(sizes):
        return 0, tuple(positions)
    if len(positions) != 1:
        return None
    for skipped in range(MOST_PREFIX + 1):
        ratio = (math.prod(sizes) / max(1, positions[0] - skipped)) ** (1 / len(sizes))
        grid = tuple(round(size / ratio) for size in sizes)
        if math.prod(grid) == positions[0] - skipped and min(grid) > 1:
            return skipped, grid
    return None


def strengths(maps: Tensor) -> Tensor:
    """How strong each pixel of a tap is, `(N, pixels)`, from maps `(N, channels, pixels)`.

    This is the part of the pixel in the Gram row sums of order 2, `v_i(x) = a_i(x)^2 sum_j a_j(x)^2`, in the
    mean over channels. A channel is measured by its mean square in the image: strong channels do not outweigh
    weak ones.
    """
    scale = maps.abs().amax((1, 2), keepdim=True).clamp_min(torch.finfo(maps.dtype).tiny)
    squares = (maps / scale).square_()
    usual = squares.mean(2)
    weights = 1 / usual.maximum(FAINTEST_CHANNEL * usual.amax(1, keepdim=True)).clamp_min(1e-30)
    weights = torch.stack([torch.ones_like(weights), weights], 1)
    return torch.bmm(weights, squares).prod(1)


def contrasts(strength: Tensor) -> Tensor:
    """How much stronger or weaker than the median pixel each pixel is, `(N, pixels)`.

    This is the square of the logarithm of the ratio of their strengths.
    """
    strength = strength.maximum(FAINTEST * strength.mean(1, keepdim=True)).clamp_min(1e-37)
    ratio = strength.log()
    return (ratio - ratio.median(1, keepdim=True).values).square()


def shares(parts: Tensor) -> Tensor:
    """Parts of pixels, `(N, pixels)`, over their sum. Without parts, all pixels have the same share."""
    total = parts.sum(1, keepdim=True)
    return torch.where(total > 0, parts / total, 1 / parts.shape[1])


class Alike(NamedTuple):
    """Examples of a batch that have as many real places as each other."""

    rows: Tensor | slice
    """The numbers of the examples."""
    real: Tensor | None
    """Their real places, `(examples, places)`. None: there is no padding."""


class Places:
    """Shares the contributions of taps among their pixels, and brings them to the size of the input.

    Args:
        inputs: a batch.
        mask: True at places that are not padding, `(N, length)`. None: there is no padding.

    """

    def __init__(self, inputs: Inputs, mask: Tensor | None = None) -> None:
        self.tensor, self.sizes = sizes_of(inputs)
        self.examples = count_examples(inputs)
        self._alike = [Alike(slice(None), None)] if mask is None else list(_alike(mask))
        self._length = None if mask is None else mask.shape[1]
        self._sums: dict[tuple[int, ...], Tensor] = {}
        self._shared: Tensor | float = 0.0  # the contributions so far, `(N,)`
        self._first: dict[tuple[int, ...], tuple[float, ...]] = {}

    def place(self, tensor: Tensor, tap: Tap) -> tuple[Tensor, Grid | None]:
        """The maps of a tap, `(N, channels, pixels)`, and their grid; None if they have no place."""
        apart, axis = tap.examples_apart(tensor, self.examples)
        positions = [size for number, size in enumerate(apart.shape) if number not in (0, axis)]
        folded = tap.shape[tap.batch_axis] > 1  # windows or frames: their order is not known
        grid = None if folded else grid_of(positions, self.sizes_for(positions))
        return as_maps(apart, axis), grid

    def sizes_for(self, positions: Sequence[int]) -> tuple[int, ...]:
        """The sizes of the input. Of two axes without channels, the sequence is the one that taps follow."""
        if self.tensor is None or self.tensor.ndim != 3 or len(positions) != 1:
            return self.sizes
        self.sizes = (min(self.sizes, key=lambda size: abs(math.log(size / positions[0]))),)
        return self.sizes

    def pixels(self, maps: Tensor, unusual: Callable[[Tensor, Tensor | slice], Tensor]) -> Tensor:
        """What `unusual` says of the pixels of a tap, `(N, pixels)`. It says nothing of padding.

        Args:
            maps: `(N, channels, pixels)`
            unusual: from maps without padding, and the numbers of their examples, to `(examples, pixels)`.

        """
        if self._length is None:
            return unusual(maps, slice(None))
        pixels = maps.new_zeros(len(maps), maps.shape[2])
        for rows, real in self._alike:
            alike = maps[rows]
            if real is None or maps.shape[2] != self._length:  # its places are not those of the mask
                pixels[rows] = unusual(alike, rows).to(pixels)
            else:
                alike = alike.gather(2, real.unsqueeze(1).expand(-1, alike.shape[1], -1))
                pixels[rows] = pixels[rows].scatter(1, real, unusual(alike, rows).to(pixels))
        return pixels

    def share(self, amounts: Tensor, pixels: Tensor, grid: Grid) -> None:
        """Share the contributions of a tap, `(N,)`, among its pixels, by shares `(N, pixels of the grid)`.

        A tap with many pixels says more exactly where something is. So a tap is weighed by its number of
        pixels.
        """
        amounts, shape = amounts.to(pixels), grid[1]
        self.add(math.prod(shape) * amounts.unsqueeze(1) * pixels, (0, shape))
        self._shared = self._shared + amounts

    def add(self, amounts: Tensor, grid: Grid) -> None:
        """Add amounts of the pixels of a tap, `(N, pixels)`."""
        skipped, shape = grid
        placed = amounts[:, skipped:].unflatten(1, shape)
        self._sums[shape] = self._sums[shape] + placed if shape in self._sums else placed

    @contextmanager
    def noting(self, module: nn.Module) -> Iterator[None]:
        """While a network runs, note where the maps of images lie that its modules make.

        A pixel of a map lies in the middle of the pixels that it stands for, if kernels are as large as their
        stride. If a larger kernel pads on both sides, as in a ResNet, it lies before the middle.
        """
        hooks = [m.register_forward_hook(self._note) for m in module.modules() if isinstance(m, STRIDING)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, module: Any, inputs: Any, output: Any) -> None:
        """Note where the first pixel of an output lies in the input of the network."""
        if len(self.sizes) != 2 or not isinstance(output, Tensor) or isinstance(module.padding, str):
            return
        before, after = tuple(inputs[0].shape[-2:]), tuple(output.shape[-2:])
        if before == after or after in self._first:
            return
        settings = (module.kernel_size, getattr(module, "dilation", 1), module.padding)
        pairs = zip(*((value, value) if isinstance(value, int) else value for value in settings), strict=True)
        start = self._first.get(before, self._even(before))
        self._first[after] = tuple(
            at + ((kernel - 1) * dilation / 2 - padding) * whole / size
            for (kernel, dilation, padding), at, size, whole in zip(
                pairs, start, before, self.sizes, strict=True
            )
        )

    def _even(self, shape: tuple[int, ...]) -> tuple[float, ...]:
        """Where the first pixel of a grid lies if every pixel is in the middle of those it stands for."""
        return tuple((whole / size - 1) / 2 for size, whole in zip(shape, self.sizes, strict=True))

    def map(self) -> Tensor | None:
        """The shared contributions at the size of the input. None if nothing was shared.

        They are smoothed, but for the tokens of a text: neighbours there need not be alike.
        """
        whole = self.whole()
        if whole is None:
            return None
        is_text = len(self.sizes) == 1 and self.tensor is not None and not self.tensor.is_floating_point()
        return _scaled(whole if is_text else smoothed(whole), self._shared)

    def whole(self) -> Tensor | None:
        """The amounts of all pixels at the size of the input. None if there are none."""
        total: Tensor | None = None
        for placed in self._sums.values():
            large = self._enlarged(placed)
            total = large if total is None else total + large
        return total

    def _enlarged(self, placed: Tensor) -> Tensor:
        if tuple(placed.shape[1:]) == self.sizes:
            return placed
        how = INTERPOLATIONS[len(self.sizes)]
        large = F.interpolate(placed.unsqueeze(1), self.sizes, mode=how, align_corners=False).squeeze(1)
        shape = tuple(placed.shape[1:])
        even = self._even(shape)
        for axis, (at, usual) in enumerate(zip(self._first.get(shape, even), even, strict=True), 1):
            positions = torch.arange(large.shape[axis], device=large.device) - round(at - usual)
            large = large.index_select(axis, positions.clamp(0, large.shape[axis] - 1))
        return _scaled(large, placed.flatten(1).sum(1))


def _scaled(maps: Tensor, sums: Tensor | float) -> Tensor:
    """Maps `(N, ...)` with the given sums `(N,)`. Maps of zeros stay."""
    now = maps.flatten(1).sum(1)
    return maps * torch.where(now > 0, sums / now, 0).view(-1, *(1 for _ in maps.shape[1:]))


def smoothed(maps: Tensor) -> Tensor:
    """Means of maps `(N, ...)` over about an eighth of each side. Beyond the border there is nothing."""
    for axis in range(1, maps.ndim):
        reach = maps.shape[axis] // (2 * SMOOTHED)
        if reach:
            lines = maps.movedim(axis, -1)
            means = F.avg_pool1d(lines.flatten(0, -2).unsqueeze(1), 2 * reach + 1, 1, reach)
            maps = means.view_as(lines).movedim(-1, axis)
    return maps


def _alike(mask: Tensor) -> Iterator[Alike]:
    """The examples of a batch by their number of real places. Those without any are left out."""
    counts = mask.sum(1)
    for count in counts.unique().tolist():
        if count:
            rows = (counts == count).nonzero().flatten()
            yield Alike(rows, mask[rows].nonzero()[:, 1].view(len(rows), count))


def observe_tensors(
    network: Network, taps: Taps, inputs: Inputs, receive: Callable[[int, Tensor], None]
) -> None:
    """Run the network once, uncompiled. `receive` gets the number and the tensor of each tap."""
    with judging(network.module), torch.no_grad():
        Watch(taps, receive).run(network.module, ordinary(inputs))
