"""Draw what a guard loses by looking at less of a network, beside how much less it computes.

    python -m lab.benchmarks.effort        # from docs/results/effort: docs/data/effort.json and a picture

The quality is that of `gramwatch study effort`. The cost is counted, not timed: for every tensor that Gram
watches, pixels times channels times orders, in parts of what the paper's Gram takes on the same network.
"""

import json
from pathlib import Path
from typing import Any

import torch

from gramwatch import find_taps
from gramwatch.explain.frame import FAINT, INK, SMALL, SOFT, TEXT, Words, framed
from gramwatch.inputs import networks
from gramwatch.numerics.samples import Sample
from gramwatch.watch import Taps
from gramwatch_lab.figures.looks import LOOKS
from gramwatch_lab.paper.effort_study import ORDERS
from lab.benchmarks.document import DOCS
from lab.benchmarks.measure import save
from lab.benchmarks.photographs import FULL, LEAN, Effort, means_by_effort

SIZE = 128
"""Pixels along a side of the images of scenes."""


def products(taps: Taps, effort: Effort) -> int:
    """Pixels times channels times orders, summed over the tensors that count."""
    pixels, channels, _, orders = effort
    sample = Sample(int(pixels) if pixels else None, int(channels) if channels else None)
    total = 0
    for tap in taps:
        grid = sample.of(tap.shape, tap.channel_axis).grid
        axes = [axis for axis in range(len(tap.shape)) if axis not in (tap.batch_axis, tap.channel_axis)]
        count = sample.count(tap.channels)
        for axis in axes:
            first, step = grid[axis] if grid else (0, 1)
            count *= len(range(first, tap.shape[axis], step))
        total += count
    return total * len(ORDERS[orders])


def counted(name: str, efforts: list[Effort]) -> dict[Effort, float]:
    """The cost of every effort on one network, in parts of the paper's."""
    network = networks.build(name, 6, SIZE).eval()
    image = torch.rand(1, 3, SIZE, SIZE)
    every, spread = (find_taps(network, image, select) for select in ("all", "spread"))
    chosen = {"all": every, "24 spread": spread, "12 spread": spread[::2]}
    whole = products(every, FULL)
    return {effort: products(chosen[effort[2]], effort) / whole for effort in efforts}


def points(results: Path) -> list[dict[str, Any]]:
    """One entry for each effort: cost and quality on every network."""
    by_effort: dict[Effort, dict[str, dict[str, float]]] = {}
    for path in sorted((results / "effort").glob("*.csv")):
        label = path.stem.removeprefix("effort-").removesuffix("-scenes")
        means = means_by_effort(path, "Guard")
        costs = counted(label.replace("-", ":", 1), list(means))
        for effort, auroc in means.items():
            values = {"cost": costs[effort], "difference": auroc - means[FULL]}
            by_effort.setdefault(effort, {})[label] = values
    names = ("pixels", "channels", "taps", "orders")
    return [
        {**dict(zip(names, effort, strict=True)), "networks": values} for effort, values in by_effort.items()
    ]


def mean_of(point: dict[str, Any], what: str) -> float:
    """The mean over the networks."""
    values = [network[what] for network in point["networks"].values()]
    return float(sum(values) / len(values))


def effort_of(point: dict[str, Any]) -> Effort:
    """What is looked at."""
    return point["pixels"], point["channels"], point["taps"], point["orders"]


def draw(points_drawn: list[dict[str, Any]], path: Path) -> None:
    """Cost on a logarithmic axis, the difference to full effort on the other, the chosen point marked."""
    words = Words(
        "What a guard loses by looking at less",
        "Dots: mean of four networks of photographs. Lines: down to the network that loses most.",
    )
    frame = framed(
        words, 3.6, caption="Cost: pixels x channels x orders, summed over the tensors that Gram watches."
    )
    axes = frame.axes[0, 0]
    for point in points_drawn:
        cost, mean = mean_of(point, "cost"), mean_of(point, "difference")
        worst = min(network["difference"] for network in point["networks"].values())
        effort = effort_of(point)
        colour = LOOKS["Guard"].colour if effort == LEAN else SOFT
        axes.plot([cost, cost], [worst, mean], color=colour, linewidth=1, zorder=2)
        axes.plot(cost, mean, "o", color=colour, ms=8 if effort == LEAN else 4.5, zorder=3)
        if effort in (LEAN, FULL):
            text = "lean: what Guard does" if effort == LEAN else "full effort"
            where = {"textcoords": "offset points", "ha": "center", "fontsize": SMALL, "color": INK}
            arrow = {"arrowstyle": "-", "color": INK, "shrinkB": 5}
            axes.annotate(text, (cost, mean), (0, 30 if effort == LEAN else 18), arrowprops=arrow, **where)
    axes.set_xscale("log")
    axes.set_xticks([0.01, 0.03, 0.1, 0.3, 1], ["0.01", "0.03", "0.1", "0.3", "1"])
    axes.minorticks_off()
    axes.axhline(0, color=FAINT, linewidth=1, zorder=1)
    axes.set_xlabel("Gram's cost, in parts of the paper's", fontsize=TEXT, color=INK)
    axes.set_ylabel("Guard's mean AUROC less full effort", fontsize=TEXT, color=INK)
    axes.margins(x=0.08, y=0.15)
    frame.write(path)


def main() -> None:
    """Count, keep and draw."""
    every_point = points(DOCS / "results")
    save(DOCS / "data" / "effort.json", {"kind": "effort", "points": every_point})
    draw(every_point, DOCS / "images" / "effort.png")
    lean = next(point for point in every_point if effort_of(point) == LEAN)
    print(json.dumps({"cost": mean_of(lean, "cost"), "difference": mean_of(lean, "difference")}))


if __name__ == "__main__":
    main()
