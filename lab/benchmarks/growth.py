"""How the cost grows: with channels, pixels, orders and classes.

    python -m lab.benchmarks.growth                         # CPU, about a minute
    python -m lab.benchmarks.growth --device cuda

Times the statistics alone (`row_sums`, `diagonal`, `off_diagonal`) against channels, pixels and orders, and
the look-up of bounds with the deviations, and their update, against classes. Prints the exponent of each
curve, its slope on logarithmic axes over the upper half of its points: 1 is linear growth, 0 none. A point is
the fastest of the rounds. Writes a JSON file after each panel, and a plot.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gramwatch.numerics import kernels
from gramwatch.numerics.deviation import Layout
from lab.benchmarks import plots, tables
from lab.benchmarks.measure import Clock, exponent, given_up, machine, save

ORDERS = tuple(range(1, 11))
CHANNELS = [16, 32, 64, 128, 256, 512, 1024, 2048]
SIDES = [7, 14, 28, 56, 112]
MOST_ORDERS = [1, 2, 5, 10, 15, 20]
CLASSES = [10, 20, 50, 100, 200, 500, 1000]
FEATURES, TAPS = 20_000, 50

Function = Callable[[], Any]


def statistic(
    name: str, device: torch.device, shape: tuple[int, int, int], orders: tuple[int, ...]
) -> Function:
    x = torch.randn(shape, device=device).relu_()
    out = torch.empty(shape[0], len(orders), shape[1], device=device)
    return lambda: kernels.compute(name, x, orders, out)


def bounds(name: str, device: torch.device, examples: int, classes: int) -> Function:
    statistics = torch.rand(examples, FEATURES, device=device)
    predicted = torch.randint(classes, (examples,), device=device)
    minimum = torch.full((classes, FEATURES), 0.25, device=device)
    maximum = torch.full((classes, FEATURES), 0.75, device=device)
    layout = Layout.of([FEATURES // TAPS] * TAPS).to(device)
    function, more = ("widen", ()) if name == "update" else ("deviations", (layout.starts, layout.weights))
    signature = (device.type, function, statistics.dtype, minimum.dtype)
    return lambda: kernels.attempt(signature, statistics, predicted, minimum, maximum, *more)


def panels(device: torch.device, scale: int) -> dict[str, tuple[str, list[int], dict[str, list[Function]]]]:
    """For each panel: what is fixed, where it is measured, and the functions of each curve."""
    few = 4 * scale

    def curves(
        shapes: list[tuple[int, int, int]], orders: list[tuple[int, ...]]
    ) -> dict[str, list[Function]]:
        return {
            name: [statistic(name, device, *shape) for shape in zip(shapes, orders, strict=True)]
            for name in kernels.FAST
        }

    return {
        "channels": (
            f"{few} images, 14 x 14 pixels, orders 1 to 10",
            CHANNELS,
            curves([(few, c, 196) for c in CHANNELS], [ORDERS] * len(CHANNELS)),
        ),
        "pixels": (
            f"{few} images, 64 channels, orders 1 to 10",
            [side**2 for side in SIDES],
            curves([(few, 64, side**2) for side in SIDES], [ORDERS] * len(SIDES)),
        ),
        "orders": (
            f"{few} images, 128 channels, 28 x 28 pixels, orders 1 to the given",
            MOST_ORDERS,
            curves([(few, 128, 784)] * len(MOST_ORDERS), [tuple(range(1, m + 1)) for m in MOST_ORDERS]),
        ),
        "classes": (
            f"{8 * scale} images, {FEATURES:,} statistics, {TAPS} taps",
            CLASSES,
            {
                name: [bounds(name, device, 8 * scale, c) for c in CLASSES]
                for name in ("look-up and deviations", "update")
            },
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lab.benchmarks.growth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--rounds", type=int, default=15, help="how often each point is measured")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of PyTorch on the CPU")
    parser.add_argument("--output", type=Path, help="the JSON file (default: growth-DEVICE.json)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    output = args.output or Path(f"growth-{device.type}.json")
    cuda = device.type == "cuda"
    repeats = 10 if cuda else 1  # so that launching is not what is timed
    clock = Clock(device)
    result: dict[str, Any] = {"kind": "growth", **machine(device), "strict": False, "fixed": {}, "curves": []}
    print(tables.where(result), flush=True)
    for panel, (fixed, x, curves) in panels(device, 32 if cuda else 4).items():
        result["fixed"][panel] = fixed
        functions = {
            f"{name} {n}": (lambda f=function: [f() for _ in range(repeats)])
            for name, points in curves.items()
            for n, function in enumerate(points)
        }
        times = clock.in_turns(functions, args.rounds)
        for name in curves:
            # The fastest of the rounds: other work on the machine only ever adds.
            fastest = [min(times[f"{name} {n}"]) / repeats for n in range(len(x))]
            curve = {
                "panel": panel,
                "name": name,
                "x": x,
                "seconds": fastest,
                "exponent": exponent(x, fastest),
            }
            result["curves"].append(curve)
            print(f"{panel}, {name}: exponent {curve['exponent']:.2f}", flush=True)
        save(output, result)
    result["kernels_given_up"] = given_up()
    save(output, result)
    picture = output.with_suffix(".png")
    plots.growth(result, picture)
    print(f"written to {output} and {picture}")


if __name__ == "__main__":
    main()
