"""The method in one picture: `python -m gramwatch.report.schematic docs/images/schematic.png`.

What is drawn is computed: feature maps of a made-up image, their Gram matrices of two orders, row sums
against the ranges of two hundred other made-up images, and the deviations that follow. Only the scale of the
score stands for what it would be.
"""

import sys
from os import PathLike
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gramwatch.deviation import outside_range
from gramwatch.report import pyplot, write_picture
from gramwatch.statistics import row_sums

INK, INSIDE, OUTSIDE, SOFT = "#2b2f36", "#2f6db3", "#d1603d", "#8a929c"
CHANNELS, ORDERS, LAYERS = 8, (1, 5), 3


def draw_schematic(path: str | PathLike[str]) -> None:
    """Draw the way from an image to its score."""
    plt = pyplot()
    image, maps, ranges = _example()
    figure = plt.figure(figsize=(13, 6.6), dpi=130)
    canvas = figure.add_axes((0, 0, 1, 1))
    canvas.set(xlim=(0, 13), ylim=(0, 6.6))
    canvas.set_axis_off()
    heads = {
        0.95: "input $D$",
        2.75: "feature maps\n$F_l$, $n_l \\times p_l$",
        5.35: "Gram matrices\n$G_l^p = (F_l^p F_l^{p\\top})^{1/p}$",
        8.35: "their row sums, between the minima and\nmaxima of training images of class $D_c$",
        10.75: "deviation\n$\\delta_l$",
        12.1: "score\n$\\Delta = \\sum_l \\delta_l\\,/\\,E[\\delta_l]$",
    }
    for x, text in heads.items():
        canvas.text(x, 6.28, text, ha="center", va="center", fontsize=10.5, color=INK)
    _picture(figure, (0.35, 3.05, 1.2, 1.2), image.permute(1, 2, 0).numpy())
    deviations = []
    for layer in range(LAYERS):
        y = 4.62 - 1.72 * layer
        _arrow(canvas, (1.62, 3.65), (2.12, y + 0.5))
        _stack(figure, canvas, 2.2, y, maps[layer])
        _arrow(canvas, (3.62, y + 0.5), (4.22, y + 0.5))
        statistics = row_sums(maps[layer][None], ORDERS)[0]
        for number, order in enumerate(ORDERS):
            _gram(figure, canvas, 4.3 + 1.12 * number, y, maps[layer], order)
        canvas.text(6.62, y + 0.5, "$\\cdots$", ha="center", va="center", fontsize=13, color=SOFT)
        _arrow(canvas, (6.82, y + 0.5), (7.18, y + 0.5))
        delta = outside_range(statistics, ranges[layer][0], ranges[layer][1])
        _ranges(figure, (7.3, y, 2.5, 1.0), statistics, *ranges[layer])
        deviations.append(float(delta.sum()))
        _arrow(canvas, (9.9, y + 0.5), (10.3, y + 0.5))
        names = ("1", "l", "L")
        canvas.text(2.05, y + 1.06, f"layer ${names[layer]}$", fontsize=9, color=SOFT)
    for layer, deviation in enumerate(deviations):
        y = 4.62 - 1.72 * layer
        length = 0.85 * deviation / max(deviations)
        canvas.add_patch(plt.Rectangle((10.35, y + 0.36), max(length, 0.02), 0.28, color=OUTSIDE, lw=0))
        _arrow(canvas, (11.3, y + 0.5), (11.72, 3.4 + 0.12 * (1 - layer)))
    _score(canvas, plt)
    canvas.text(
        0.95, 1.6, "predicted class\n$D_c = f(D)$", ha="center", va="center", fontsize=10.5, color=INK
    )
    _arrow(canvas, (0.95, 2.95), (0.95, 1.95))
    canvas.plot([0.95, 0.95, 8.55, 8.55], [1.25, 0.82, 0.82, 0.9], color=INSIDE, lw=1.3)
    _arrow(canvas, (8.55, 0.84), (8.55, 1.16), INSIDE)
    canvas.text(
        4.75, 0.54, "chooses whose ranges count", ha="center", fontsize=10, color=INSIDE, style="italic"
    )
    canvas.text(
        0.35,
        0.14,
        "Ranges come from training images alone (Algorithm 1), $E[\\delta_l]$ from validation images; no "
        "outlier is needed. Shown are $p = 1$ and $5$ of the orders $1 \\ldots 10$.",
        fontsize=9,
        color=SOFT,
    )
    write_picture(figure, path)


def _example() -> tuple[Tensor, list[Tensor], list[tuple[Tensor, Tensor]]]:
    """An image, its feature maps, and the ranges of row sums over other images."""
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
        found, x = [], images - 0.5
        for kernel in kernels:
            x = F.avg_pool2d(F.conv2d(x, kernel, padding=1).relu(), 2)
            found.append(x)
        return found

    train = features(smooth(200, 5))
    image = _rings()
    ranges = []
    for maps in train:
        statistics = row_sums(maps, ORDERS)
        ranges.append((statistics.amin(0), statistics.amax(0)))
    return image[0], [maps[0] for maps in features(image)], ranges


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
        spine.set(color=INK, linewidth=0.9)
    return axes


def _arrow(canvas: Any, start: tuple[float, float], end: tuple[float, float], colour: str = INK) -> None:
    canvas.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.2})


def _stack(figure: Any, canvas: Any, x: float, y: float, maps: Tensor) -> None:
    """Some channels of a layer, one behind the other."""
    shown = 4
    for number in range(shown):
        back = shown - 1 - number
        _picture(figure, (x + 0.14 * back, y + 0.1 * back, 0.82, 0.82), maps[back].numpy(), cmap="magma")


def _gram(figure: Any, canvas: Any, x: float, y: float, maps: Tensor, order: int) -> None:
    """The Gram matrix of one order, and its row sums beside it."""
    powers = maps.flatten(1).double().pow(order)
    matrix = (powers @ powers.T).pow(1 / order)
    _picture(figure, (x, y + 0.06, 0.88, 0.88), matrix.numpy(), cmap="Blues")
    canvas.text(x + 0.44, y + 1.03, f"$p = {order}$", ha="center", fontsize=9, color=INK)


def _ranges(
    figure: Any, box: tuple[float, float, float, float], statistics: Tensor, low: Tensor, high: Tensor
) -> None:
    """Every row sum of every order in its range, scaled so that all ranges look alike."""
    width, height = figure.get_size_inches()
    x, y, w, h = box
    axes = figure.add_axes((x / width, y / height, w / width, h / height))
    value = ((statistics - low) / (high - low)).flatten().numpy()
    places = np.arange(len(value)) + 0.9 * (np.arange(len(value)) >= CHANNELS)
    axes.vlines(places, 0, 1, color=INSIDE, lw=5, alpha=0.3, capstyle="round")
    outside = (value < 0) | (value > 1)
    shown = value.clip(-0.65, 1.75)
    axes.plot(places[~outside], shown[~outside], "o", color=INSIDE, ms=4.5)
    axes.plot(places[outside], shown[outside], "o", color=OUTSIDE, ms=4.5)
    for place, at in zip(places[outside], shown[outside], strict=True):
        axes.vlines(place, *sorted((at, min(max(at, 0), 1))), color=OUTSIDE, lw=1.2)
    for number, order in enumerate(ORDERS):
        middle = places[number * CHANNELS : (number + 1) * CHANNELS].mean()
        axes.text(middle, -0.62, f"$p = {order}$", ha="center", fontsize=7.5, color=SOFT)
    axes.set(xlim=(-1, places[-1] + 1), ylim=(-0.8, 1.9), xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(color="#cfd4da")


def _score(canvas: Any, plt: Any) -> None:
    """The sum on a scale with the threshold."""
    x, low, high, threshold, value = 12.1, 2.2, 4.8, 3.0, 4.1
    canvas.plot([x, x], [low, high], color=SOFT, lw=5, alpha=0.35, solid_capstyle="round")
    canvas.plot([x - 0.17, x + 0.17], [threshold] * 2, color=INK, lw=1.6)
    canvas.text(x + 0.24, threshold, "$\\tau$", va="center", fontsize=12, color=INK)
    canvas.plot(x, value, "o", color=OUTSIDE, ms=9)
    canvas.text(x + 0.24, value, "$\\Delta > \\tau$:\nunknown", va="center", fontsize=9.5, color=OUTSIDE)
    canvas.text(x + 0.24, 2.42, "known", va="center", fontsize=9.5, color=INSIDE)


if __name__ == "__main__":
    draw_schematic(sys.argv[1] if len(sys.argv) > 1 else "schematic.png")
