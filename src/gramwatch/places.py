"""Places: where the pixels and tokens of a network's tensors lie in its input."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramwatch.batches import Inputs, count_examples, tensors_in
from gramwatch.taps import Network, Tap, Taps, judging
from gramwatch.taps.observe import ordinary, run_watched
from gramwatch.taps.tap import as_maps

FEW_CHANNELS = 4
"""An image has its channels last if its last axis has at most so many entries, and its first axis more."""
MOST_PREFIX = 8
"""The most tokens before the grid of a transformer, such as class tokens and registers."""
STRIDING = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)
"""Modules that make maps of images smaller."""
INTERPOLATIONS = {1: "linear", 2: "bilinear", 3: "trilinear"}
TOKENS = "input_ids"
"""The argument of a network that usually holds the tokens of a text."""


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
    tensor = max(tensors, key=lambda each: each.ndim)
    return tensor, _sizes(tensor)


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    shape = tuple(tensor.shape[1:])
    if len(shape) == 1:
        return () if tensor.is_floating_point() else shape  # numbers of words are a sequence
    if len(shape) == 2 or (len(shape) > 2 and shape[-1] <= FEW_CHANNELS < shape[0]):
        return shape[:-1] if len(shape) > 2 else shape
    return shape[1:]


def grid_of(positions: Sequence[int], sizes: Sequence[int]) -> tuple[int, tuple[int, ...]] | None:
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


class Alike(NamedTuple):
    """Examples of a batch that have as many real places as each other."""

    rows: Tensor | slice
    """The numbers of the examples."""
    real: Tensor | None
    """Their real places, `(examples, places)`. None: there is no padding."""


class Places:
    """Collects what pixels of taps add, and brings it to the size of the input.

    Args:
        inputs: a batch.
        mask: True at places that are not padding, `(N, length)`. None: there is no padding.

    """

    def __init__(self, inputs: Inputs, mask: Tensor | None = None) -> None:
        self.tensor, self.sizes = sizes_of(inputs)
        self.examples = count_examples(inputs)
        self.alike = [Alike(slice(None), None)] if mask is None else list(_alike(mask))
        """All examples, in groups that are shared by pixels together."""
        self._length = None if mask is None else mask.shape[1]
        self._sums: dict[tuple[int, ...], Tensor] = {}
        self._first: dict[tuple[int, ...], tuple[float, ...]] = {}

    def place(self, tensor: Tensor, tap: Tap) -> tuple[Tensor, list[int], tuple[int, tuple[int, ...]] | None]:
        """The maps of a tap, `(N, channels, pixels)`, the sizes of their axes, and their grid."""
        apart, axis = tap.examples_apart(tensor, self.examples)
        positions = [size for number, size in enumerate(apart.shape) if number not in (0, axis)]
        folded = tap.shape[tap.batch_axis] > 1  # windows or frames: their order is not known
        grid = None if folded else grid_of(positions, self.sizes_for(positions))
        return as_maps(apart, axis), positions, grid

    def sizes_for(self, positions: Sequence[int]) -> tuple[int, ...]:
        """The sizes of the input. Of two axes without channels, the sequence is the one that taps follow."""
        if self.tensor is None or self.tensor.ndim != 3 or len(positions) != 1:
            return self.sizes
        self.sizes = (min(self.sizes, key=lambda size: abs(math.log(size / positions[0]))),)
        return self.sizes

    def spread(
        self,
        maps: Tensor,
        positions: Sequence[int],
        shared: Sequence[Callable[[Tensor, Sequence[int]], Tensor]],
    ) -> Tensor:
        """What the pixels of a tap add, `(N, pixels)`. Padding adds nothing.

        Args:
            maps: `(N, channels, pixels)`
            positions: the sizes of the axes of the pixels.
            shared: for each group of `alike` a function from maps and positions to amounts.

        """
        if self._length is None:
            return shared[0](maps.float(), positions)
        placed = maps.new_zeros(len(maps), maps.shape[2], dtype=torch.float32)
        for (rows, real), share in zip(self.alike, shared, strict=True):
            some = maps[rows].float()
            if real is None or maps.shape[2] != self._length:
                placed[rows] = share(some, positions).to(placed)
            else:
                some = some.gather(2, real.unsqueeze(1).expand(-1, some.shape[1], -1))
                amounts = share(some, [real.shape[1]]).to(placed)
                placed[rows] = torch.zeros_like(placed[rows]).scatter(1, real, amounts)
        return placed

    def add(self, amounts: Tensor, grid: tuple[int, tuple[int, ...]]) -> None:
        """Add the amounts of the pixels of a tap, `(N, pixels)`."""
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
        how = (module.kernel_size, getattr(module, "dilation", 1), module.padding)
        pairs = zip(*((each, each) if isinstance(each, int) else each for each in how), strict=True)
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
        """All amounts at the size of the input. The sums stay. None if there are none."""
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
        before, after = placed.flatten(1).sum(1), large.flatten(1).sum(1)
        share = torch.where(after > 0, before / after, 0)
        return large * share.view(-1, *(1 for _ in self.sizes))


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
        run_watched(network.module, ordinary(inputs), taps, receive, None, (None, None))
