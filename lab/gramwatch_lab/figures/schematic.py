"""The method in one picture: `python -m gramwatch_lab.figures.schematic docs/images/schematic.png`.

What is drawn is computed as `GramDetector` does by default: feature maps of a made-up image, their Gram
matrices of two orders, row sums and their roots against the ranges of two hundred other made-up images, the
deviations, and these divided by the confidence of a made-up classifier. Only the scale of the score is not.
"""

import sys
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gramwatch.explain.frame import (
    DPI,
    FAINT,
    INK,
    INSIDE,
    OUTSIDE,
    SMALL,
    SOFT,
    TEXT,
    WIDTH,
    pyplot,
    write_picture,
)
from gramwatch.numerics.deviation import outside_range
from gramwatch.numerics.statistics import row_sums
from gramwatch_lab.figures.looks import LOOKS

CHANNELS, ORDERS, LAYERS, CLASSES = 8, (1, 5), 3, 4
HEIGHT = 4.75
ROWS = (3.02, 1.98, 0.94)
"""Where the layers stand, in inches from below."""
SIZE = 0.62
"""Of a matrix, in inches."""
HEADS = {
    0.5: "image $D$",
    1.55: "feature maps\n$F_l$: $n_l \\times p_l$",
    2.92: "Gram matrices\nof powers\n$F_l^p\\,F_l^{p\\top}$",
    4.72: "row sums, then the $p$-th root,\nbetween the minima and maxima\nof training images of class $D_c$",
    6.3: "deviation, divided\nby the confidence\n$\\delta_l\\,/\\,\\pi$",
    7.42: "score $\\Delta$: sum of\n$\\delta_l\\,/\\,\\pi$ over its\nexpectation $E$",
}


@dataclass(frozen=True)
class Example:
    """What is drawn."""

    image: Tensor
    maps: list[Tensor]
    """Of each layer, `(channels, height, width)`."""
    ranges: list[tuple[Tensor, Tensor]]
    """Minima and maxima of each layer's statistics over other images."""
    confidence: float
    """The maximum softmax probability."""

    def statistics(self, layer: int) -> Tensor:
        """Row sums and their roots, `(orders, channels)`."""
        return row_sums(self.maps[layer][None], ORDERS)[0]

    def deviation(self, layer: int) -> float:
        """How far outside the statistics of a layer are."""
        return float(outside_range(self.statistics(layer), *self.ranges[layer]).sum())


def draw_schematic(path: str | PathLike[str]) -> None:
    """Draw the way from an image to its score."""
    example = make_example()
    figure = pyplot().figure(figsize=(WIDTH, HEIGHT), dpi=DPI)
    canvas = figure.add_axes((0, 0, 1, 1))
    canvas.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))
    canvas.set_axis_off()
    for x, text in HEADS.items():
        canvas.text(x, 4.35, text, ha="center", va="center", fontsize=TEXT, color=INK, linespacing=1.3)
    _picture(figure, (0.13, ROWS[1] - 0.07, 0.76, 0.76), example.image.permute(1, 2, 0).numpy())
    largest = max(example.deviation(layer) for layer in range(LAYERS)) / example.confidence
    for layer, name in enumerate(("1", "l", "L")):
        _layer(figure, canvas, example, layer, name, largest)
    _score(canvas)
    _classifier(canvas, example.confidence)
    canvas.text(
        0.13,
        0.09,
        "Ranges come from training images alone (Algorithm 1), $E$ from validation images. "
        "No outlier is needed. Shown: $p = 1$ and $5$ of the orders $1$ to $10$.",
        fontsize=SMALL,
        color=SOFT,
    )
    write_picture(figure, path)


def _layer(figure: Any, canvas: Any, example: Example, layer: int, name: str, largest: float) -> None:
    """One row: maps, matrices, statistics in their ranges, deviation."""
    y, middle = ROWS[layer], ROWS[layer] + SIZE / 2
    _arrow(canvas, (0.93, ROWS[1] + SIZE / 2), (1.2, middle))
    _stack(figure, 1.24, y, example.maps[layer])
    canvas.text(1.24, y + 0.72, f"layer ${name}$", fontsize=SMALL, color=SOFT)
    _arrow(canvas, (2.02, middle), (2.2, middle))
    for number, order in enumerate(ORDERS):
        _gram(figure, canvas, 2.24 + 0.72 * number, y, example.maps[layer], order)
    _arrow(canvas, (3.62, middle), (3.8, middle))
    _ranges(figure, (3.86, y - 0.06, 1.72, 0.78), example.statistics(layer), *example.ranges[layer])
    _arrow(canvas, (5.64, middle), (5.84, middle))
    _deviation(canvas, 5.9, middle, example.deviation(layer), example.confidence, largest)
    _arrow(canvas, (6.82, middle), (7.12, 2.3 + 0.1 * (1 - layer)))


def _deviation(canvas: Any, x: float, y: float, deviation: float, confidence: float, largest: float) -> None:
    """A bar of the deviation, and one of what it is divided by the confidence."""
    for value, below, how in ((deviation, 0.02, {"alpha": 0.45}), (deviation / confidence, -0.16, {})):
        length = max(0.82 * value / largest, 0.02)
        canvas.add_patch(pyplot().Rectangle((x, y + below), length, 0.14, color=OUTSIDE, lw=0, **how))
    canvas.text(x, y + 0.21, "$\\delta_l$", fontsize=SMALL, color=SOFT)
    canvas.text(x, y - 0.21, "$\\delta_l / \\pi$", va="top", fontsize=SMALL, color=SOFT)


def _classifier(canvas: Any, confidence: float) -> None:
    """The predicted class and the confidence, and what each does."""
    told = f"class $D_c$,\nconfidence\n$\\pi = {confidence:.2f}$"
    canvas.text(0.5, 1.16, told, ha="center", va="top", fontsize=TEXT, color=INK)
    _arrow(canvas, (0.5, ROWS[1] - 0.1), (0.5, 1.22))
    colour = LOOKS["Gram"].colour
    for end, text in ((4.72, "the class chooses the ranges"), (6.3, "the confidence divides")):
        start = 1.0 if end < 5 else 4.86
        canvas.plot([start, end, end], [0.55, 0.55, 0.6], color=colour, lw=1.2)
        _arrow(canvas, (end, 0.56), (end, 0.84), colour)
        where = (2.7, 0.62) if end < 5 else (5.52, 0.38)
        canvas.text(*where, text, ha="center", fontsize=SMALL, color=colour, style="italic")
    canvas.plot([4.72, 4.86], [0.55, 0.55], color=colour, lw=1.2)


def make_example() -> Example:
    """An image, its feature maps, the ranges of other images, and the confidence of a classifier."""
    generator = torch.Generator().manual_seed(3)

    def smooth(count: int, size: int) -> Tensor:
        return F.interpolate(
            torch.rand(count, 3, size, size, generator=generator), 32, mode="bicubic", align_corners=False
        ).clamp(0, 1)

    kernels = [
        torch.randn(CHANNELS, 3 if layer == 0 else CHANNELS, 3, 3, generator=generator) / 3
        for layer in range(LAYERS)
    ]

    def features(images: Tensor) -> list[Tensor]:
        stage_maps, x = [], images - 0.5
        for kernel in kernels:
            x = F.avg_pool2d(F.conv2d(x, kernel, padding=1).relu(), 2)
            stage_maps.append(x)
        return stage_maps

    train = features(smooth(200, 5))
    image = _rings()
    ranges = []
    for maps in train:
        statistics = row_sums(maps, ORDERS)
        ranges.append((statistics.amin(0), statistics.amax(0)))
    shown = features(image)
    head = torch.randn(CLASSES, CHANNELS, generator=generator)
    confidence = float((shown[-1].mean((2, 3)) @ head.T).softmax(1).max())
    return Example(image[0], [maps[0] for maps in shown], ranges, confidence)


def _rings() -> Tensor:
    """Something unlike the rest: coloured rings."""
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    radius = ((x - 13) ** 2 + (y - 18) ** 2).sqrt()
    phases = torch.tensor([0.0, 0.6, 2.2])[:, None, None]
    return (0.5 + 0.5 * (0.9 * radius + phases).sin())[None]


def _picture(figure: Any, box: tuple[float, float, float, float], pixels: np.ndarray, **how: Any) -> Any:
    """An image at a place in inches."""
    width, height = figure.get_size_inches()
    x, y, w, h = box
    axes = figure.add_axes((x / width, y / height, w / width, h / height))
    axes.imshow(pixels, interpolation="nearest", **how)
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(color=INK, linewidth=0.6)
    return axes


def _arrow(canvas: Any, start: tuple[float, float], end: tuple[float, float], colour: str = INK) -> None:
    canvas.annotate(
        "", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1, "mutation_scale": 8}
    )


def _stack(figure: Any, x: float, y: float, maps: Tensor) -> None:
    """Some channels of a layer, one behind the other."""
    for back in (3, 2, 1, 0):
        place = (x + 0.08 * back, y + 0.06 * back, 0.48, 0.48)
        _picture(figure, place, maps[back].numpy(), cmap="magma")


def _gram(figure: Any, canvas: Any, x: float, y: float, maps: Tensor, order: int) -> None:
    """The Gram matrix of one order."""
    powers = maps.flatten(1).double().pow(order)
    _picture(figure, (x, y, SIZE, SIZE), (powers @ powers.T).numpy(), cmap="Blues")
    canvas.text(x + SIZE / 2, y + SIZE + 0.06, f"$p = {order}$", ha="center", fontsize=SMALL, color=INK)


def _ranges(
    figure: Any, box: tuple[float, float, float, float], statistics: Tensor, low: Tensor, high: Tensor
) -> None:
    """Every row sum of every order in its range, scaled so that all ranges look alike."""
    width, height = figure.get_size_inches()
    x, y, w, h = box
    axes = figure.add_axes((x / width, y / height, w / width, h / height))
    value = ((statistics - low) / (high - low)).flatten().numpy()
    places = np.arange(len(value)) + 0.9 * (np.arange(len(value)) >= CHANNELS)
    axes.vlines(places, 0, 1, color=INSIDE, lw=3.2, alpha=0.35, capstyle="round")
    outside = (value < 0) | (value > 1)
    shown = value.clip(-0.65, 1.75)
    axes.plot(places[~outside], shown[~outside], "o", color=INSIDE, ms=2.8)
    axes.plot(places[outside], shown[outside], "o", color=OUTSIDE, ms=2.8)
    for place, at in zip(places[outside], shown[outside], strict=True):
        axes.vlines(place, *sorted((at, min(max(at, 0), 1))), color=OUTSIDE, lw=1)
    for number, order in enumerate(ORDERS):
        middle = places[number * CHANNELS : (number + 1) * CHANNELS].mean()
        axes.text(middle, -0.75, f"$p = {order}$", ha="center", fontsize=SMALL, color=SOFT)
    axes.set(xlim=(-1, places[-1] + 1), ylim=(-0.95, 1.9), xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(color=FAINT)


def _score(canvas: Any) -> None:
    """The sum on a scale with the threshold."""
    x, low, high, threshold, value = 7.25, 1.45, 3.15, 1.95, 2.7
    canvas.plot([x, x], [low, high], color=INSIDE, lw=4, alpha=0.35, solid_capstyle="round")
    canvas.plot([x - 0.1, x + 0.1], [threshold] * 2, color=INK, lw=1.4)
    canvas.text(x + 0.15, threshold, "$\\tau$", va="center", fontsize=TEXT + 2, color=INK)
    canvas.plot(x, value, "o", color=OUTSIDE, ms=6)
    canvas.text(x + 0.15, value, "$\\Delta > \\tau$:\nflagged", va="center", fontsize=TEXT, color=OUTSIDE)
    canvas.text(x + 0.15, low + 0.1, "normal", va="center", fontsize=TEXT, color=INSIDE)


if __name__ == "__main__":
    draw_schematic(sys.argv[1] if len(sys.argv) > 1 else "schematic.png")
