"""Where the extra time of scoring goes: into which of our kernels, and how long a GPU waits for Python."""

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from gramwatch.methods import gram
from gramwatch.numerics import kernels
from lab.benchmarks.measure import Clock
from lab.benchmarks.subject import Fitted

CALLS = 5
STATISTICS = ("_pixel_sums", "_channel_sums", "_two_pixel_peaks")


def breakdown(subject: Fitted) -> dict[str, float]:
    """Seconds of one batch: the whole calls of the plain network and of ours, and what ours consists of."""

    def plain() -> Any:
        return subject.plain(subject.x)

    def ours() -> Any:
        return subject.detector(subject.x)

    clock = Clock(subject.device)
    walls = {"plain": min(clock.once(plain) for _ in range(CALLS))}
    walls["ours"] = min(clock.once(ours) for _ in range(CALLS))
    return walls | (_on_cuda if subject.device.type == "cuda" else _on_cpu)(plain, ours, walls)


def _on_cuda(plain: Callable[[], Any], ours: Callable[[], Any], walls: dict[str, float]) -> dict[str, float]:
    network, seconds = sum(kernel_seconds(plain).values()), kernel_seconds(ours)
    busy = sum(seconds.values())
    statistics = sum(t for name, t in seconds.items() if name in STATISTICS)
    deviations = seconds.get("_deviations", 0.0)
    return {
        "network": network,
        "statistics": statistics,
        "deviations": deviations,
        "other": max(0.0, busy - network - statistics - deviations),
        "idle": max(0.0, walls["ours"] - busy),
    }


def kernel_seconds(function: Callable[[], Any]) -> dict[str, float]:
    """The time on the GPU of each kernel in one call, by name."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        for _ in range(CALLS):
            function()
        torch.cuda.synchronize()
    seconds: dict[str, float] = {}
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            seconds[event.name] = seconds.get(event.name, 0.0) + event.device_time * 1e-6 / CALLS
    return seconds


def _on_cpu(plain: Callable[[], Any], ours: Callable[[], Any], walls: dict[str, float]) -> dict[str, float]:
    """The time within the calls of our kernels, of the fastest call."""
    rounds = []
    for _ in range(CALLS):
        taken = {"statistics": 0.0, "deviations": 0.0}

        def timed(function: Callable[..., Any], part: str, taken: dict[str, float] = taken) -> Any:
            def run(*args: Any) -> Any:
                start = time.perf_counter()
                result = function(*args)
                taken[part] += time.perf_counter() - start
                return result

            return run

        with (
            mock.patch.object(kernels, "compute", timed(kernels.compute, "statistics")),
            mock.patch.object(gram, "tap_deviations", timed(gram.tap_deviations, "deviations")),
        ):
            ours()
        rounds.append(taken)
    best = min(rounds, key=lambda taken: sum(taken.values()))
    rest = walls["ours"] - walls["plain"] - sum(best.values())
    return {"network": walls["plain"], **best, "other": max(0.0, rest), "idle": 0.0}
