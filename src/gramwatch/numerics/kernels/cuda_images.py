"""The numbers of images on NVIDIA GPUs: which programs to launch. They are in `cuda_image_programs`."""

# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from gramwatch.numerics.image_scales import REGIONS, SCALES, pairs_of
from gramwatch.numerics.kernels.cuda import _Launch
from gramwatch.numerics.kernels.cuda_image_programs import (
    COLUMNS,
    ROWS,
    SLOTS,
    add_parts,
    halve,
    read_parts,
    write_numbers,
)

MOST_IMAGES = 65535
"""The most images of a launch."""


def image_numbers(images: Tensor) -> Tensor | None:
    """The numbers of images `(N, channels, height, width)` whose sides are at least `SMALL`, in float32.

    None for more images than a launch takes, and if the places of an image do not fit into 32 bits.
    """
    if images.stride(3) not in (1, images.shape[1]):  # channels first or last: there are programs for these
        images = images.contiguous()
    index, aligned = images.get_device(), images.data_ptr() % 16 == 0
    plan = _plan(images.shape, images.stride(), images.dtype, index, aligned)
    if plan is None:
        return None
    if index < 0 or index == torch.cuda.current_device():  # negative: a CPU tensor, in the interpreter
        return plan(images)
    with torch.cuda.device(index):
        return plan(images)


class _Plan:
    """The kernels for images of one form, with their arguments."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        examples, channels, height, width = shape
        pairs = len(pairs_of(channels))
        self.width = 31 * channels + 10 * pairs + 14
        sizes = [(height // scale, width // scale) for scale in SCALES]
        splits = [triton.cdiv(h // REGIONS + 3, ROWS) for h, _ in sizes]
        parts = sum(REGIONS * s * triton.cdiv(w, COLUMNS) for s, (_, w) in zip(splits, sizes, strict=True))
        bands, works = triton.cdiv(height, 4), len(SCALES) * channels
        rooms = (
            *(channels * h * w for h, w in sizes[1:]),
            3 * channels * bands,
            height,
            channels * REGIONS * splits[0] * width,
            parts * channels * SLOTS,
        )
        *places, room = (sum(rooms[: i + 1]) for i in range(len(rooms)))
        self.room, self.sums = room, works * (REGIONS + 1) * SLOTS + 2 * 6
        exact = height % 4 == 0 and width % 4 == 0
        rest: tuple[Any, ...] = (*strides[:3], height, width, room, *places, strides[3], channels, exact)
        most, most_channels = (triton.next_power_of_2(size) for size in (6 * works, channels))
        last = (*rest, pairs, self.width, most, most_channels)
        self.first = [
            _Launch(halve, (bands, examples), rest, 1, 0),
            _Launch(read_parts, (parts * channels, examples), rest, 1, 0),
            _Launch(add_parts, (works + 2, examples), rest, 4, 0),
        ]
        self.last = _Launch(write_numbers, (1, examples), last, 1, 0)

    def __call__(self, images: Tensor) -> Tensor:
        count, device = len(images), images.device
        out = torch.empty(count, self.width, dtype=torch.float32, device=device)
        if count:
            scratch = torch.empty(count, self.room, dtype=torch.float32, device=device)
            sums = torch.empty(count, self.sums, dtype=torch.float64, device=device)
            for launch in self.first:
                launch(images, scratch, sums)
            self.last(images, out, sums)
        return out


@lru_cache(1024)
def _plan(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: int, aligned: bool
) -> _Plan | None:
    plan = _Plan(shape, strides)
    last = sum((size - 1) * stride for size, stride in zip(shape[1:], strides[1:], strict=True))
    return plan if shape[0] <= MOST_IMAGES and max(last, plan.room) < 2**31 else None
