"""Try tiles for the two passes of the CUDA kernels: which is fastest for which map.

    python -m lab.benchmarks.tune_cuda --seconds 100

Prints for each map the fastest choices of (warps, entries along memory, entries of a thread), with their
microseconds and registers. Choices are tried in turn until the time is up.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from gramwatch.numerics.kernels import cuda

ORDERS = tuple(range(1, 11))
MAPS = {
    "channels first": [(96, 64, 1024), (192, 128, 256), (256, 256, 64), (256, 512, 16), (8, 256, 3136)],
    "channels last": [(40, 768, 197), (10, 3072, 197), (96, 64, 1024)],
}
CHOICES = list(itertools.product([1, 4], [32, 64, 128, 256], [16, 32, 64, 8]))


def microseconds(function: Callable[[], Any], repeats: int = 10) -> float:
    """The time of a launch, without what Python takes to launch it."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            function()
    times = []
    for _ in range(4):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / repeats)
    return min(times)


def one_pass(x: torch.Tensor, reduced: int) -> Callable[[], Any]:
    """A launch of the kernel that sums over the channels (0) or the pixels (1)."""
    examples, channels, pixels = x.shape
    scratch = torch.rand(examples, 11, pixels, device="cuda")
    out = torch.empty(examples, 10, channels, device="cuda")
    cuda._plan.cache_clear()
    plan = cuda._plan(
        "row_sums", x.shape, x.stride(), x.dtype, ORDERS, out.stride(0), x.device.index, (True, True)
    )
    step = plan[reduced]
    return lambda: step.kernel[step.grid](x, scratch, out, *step.rest, num_warps=step.warps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=100.0, help="for each layout")
    args = parser.parse_args()
    standing = dict(cuda._TILES)
    for layout, shapes in MAPS.items():
        began = time.monotonic()
        timings: dict[tuple[int, tuple[int, ...]], list[tuple[float, Any, int]]] = {}
        for choice in (None, *CHOICES):
            if time.monotonic() - began > args.seconds:
                print(f"time is up at {choice}")
                break
            cuda._TILES.update(
                standing if choice is None else dict.fromkeys(standing, lambda *_, c=choice: c)
            )
            for shape, reduced in itertools.product(shapes, (0, 1)):
                x = torch.randn(shape, device="cuda").relu_()
                if layout == "channels last":
                    x = x.transpose(1, 2).contiguous().transpose(1, 2)
                launch = one_pass(x, reduced)
                registers = launch().n_regs
                timings.setdefault((reduced, shape), []).append((microseconds(launch), choice, registers))
        for (reduced, shape), rows in timings.items():
            limit = torch.Size(shape).numel() * 4 / 4.33e6
            best = [
                f"{t:.1f} {choice or 'as it is'} r{r}" for t, choice, r in sorted(rows, key=lambda r: r[0])
            ]
            over = "pixels" if reduced else "channels"
            print(
                f"{layout}, {shape}, summing over {over}, one read {limit:.1f}: {'; '.join(best[:5])}",
                flush=True,
            )


if __name__ == "__main__":
    main()
