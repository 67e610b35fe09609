"""Where the extra time of scoring goes: into which of our kernels, and how long a GPU waits for Python."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import Clock
from benchmarks.subject import Subject

CALLS = 5
STATISTICS = ("_pixel_sums", "_channel_sums", "_two_pixel_peaks")


def breakdown(subject: Subject) -> dict[str, float] | None:
    """Seconds of one batch on a GPU; None elsewhere."""
    if subject.device.type != "cuda":
        return None
    plain, ours = (lambda: subject.plain(subject.x)), (lambda: subject.detector(subject.x))
    clock = Clock(subject.device)
    network = sum(kernel_seconds(plain).values())
    kernels = kernel_seconds(ours)
    wall = min(clock.once(ours) for _ in range(CALLS))
    statistics = sum(t for name, t in kernels.items() if name in STATISTICS)
    deviations = kernels.get("_deviations", 0.0)
    busy = sum(kernels.values())
    return {
        "plain": min(clock.once(plain) for _ in range(CALLS)),
        "network": network,
        "statistics": statistics,
        "deviations": deviations,
        "other kernels": max(0.0, busy - network - statistics - deviations),
        "idle": max(0.0, wall - busy),
        "ours": wall,
    }


def kernel_seconds(function: Callable[[], Any]) -> dict[str, float]:
    """The time on the GPU of each kernel in one call, by name."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        for _ in range(CALLS):
            function()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name] = found.get(event.name, 0.0) + event.device_time * 1e-6 / CALLS
    return found
