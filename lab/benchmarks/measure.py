"""What all benchmarks share: turns, ratios, memory, the machine, and results that survive interruption."""

import argparse
import contextlib
import ctypes
import json
import math
import os
import platform
import statistics as stats
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import gramwatch
from gramwatch.numerics import kernels


class Clock:
    """Times functions in turns, waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def once(self, function: Callable[[], Any]) -> float:
        """Seconds of one call."""
        if self.cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def in_turns(
        self,
        functions: Mapping[str, Callable[[], Any]],
        rounds: int,
        fewer: Mapping[str, int] | None = None,
        warm_up: bool = True,
    ) -> dict[str, list[float]]:
        """Seconds of each function in each round; those in `fewer` only join so many of the first rounds.

        Every other round goes backwards, so that none always follows the same: a device may be hot from it.
        """
        fewer = fewer or {}
        if warm_up:
            for name, function in functions.items():
                if name not in fewer:
                    self.once(function)
        times: dict[str, list[float]] = {name: [] for name in functions}
        for turn in range(rounds):
            for name in list(functions)[:: -1 if turn % 2 else 1]:
                if turn < fewer.get(name, rounds):
                    times[name].append(self.once(functions[name]))
        return times


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) == 1:
        return {"median": values[0], "low": values[0], "high": values[0], "rounds": 1}
    low, median, high = stats.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high, "rounds": len(values)}


def ratios(times: Sequence[float], plain: Sequence[float]) -> list[float]:
    """Each round's time over the plain forward pass of the same round.

    A machine that is slow for a while is slow for both, so that this is steadier than a ratio of medians.
    """
    return [mine / theirs for mine, theirs in zip(times, plain, strict=False)]


def variant(times: Sequence[float], plain: Sequence[float], count: int) -> dict[str, Any]:
    """What is kept of one variant's rounds over `count` images each."""
    return {
        "seconds": list(times),
        "images_per_second": count / stats.median(times),
        "ratio": summary(ratios(times, plain)),
    }


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of log y over log x, by least squares over the upper half of the points."""
    start = len(x) // 2 if len(x) > 3 else 0
    a, b = [math.log(v) for v in x[start:]], [math.log(v) for v in y[start:]]
    return stats.linear_regression(a, b).slope


def given_up() -> list[str]:
    """Which kernels could not be used so far."""
    return sorted(" ".join(map(str, signature)) for signature in kernels._given_up)


def without_kernels(function: Callable[[], Any]) -> Callable[[], Any]:
    """The same with PyTorch's form of everything."""

    def run() -> Any:
        before = set(kernels._given_up)
        kernels._given_up.update((device,) for device in kernels._MODULES)
        try:
            return function()
        finally:
            kernels._given_up.clear()
            kernels._given_up.update(before)

    return run


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second that reading a large tensor reaches here."""
    clock = Clock(device)
    x = torch.ones(2**30 if clock.cuda else 2**27, device=device)
    return x.numel() * 4 / min(clock.in_turns({"sum": x.sum}, 10)["sum"])


# --- memory ------------------------------------------------------------------------------------------


def peak_on_cuda(function: Callable[[], Any]) -> int:
    """Bytes of tensors at the worst moment of a call, over what was there before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - base


EVERY_TENSOR_ITS_OWN = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "OMP_WAIT_POLICY": "passive",  # nothing is timed there, so threads need not spin
}
"""An environment in which freed tensors go back to the system, so that resident memory is live memory."""


def peak_on_cpu(function: Callable[[], Any]) -> int:
    """Bytes of resident memory at the worst moment of a call, over what was there before (Linux only).

    Only meaningful in a process that was started with `EVERY_TENSOR_ITS_OWN`.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak so far is forgotten
    base = _status("VmRSS")
    function()
    return _status("VmHWM") - base


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


# --- what ran where ----------------------------------------------------------------------------------


def densenet_arguments(about: str | None, train: int, test: int, output: Path) -> argparse.Namespace:
    """The arguments of a benchmark of the DenseNet on CIFAR-10, with these defaults."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", required=True, help="the folder of the expanded sets")
    parser.add_argument("--weights", required=True, help="the DenseNet's checkpoint")
    parser.add_argument("--train", type=int, default=train)
    parser.add_argument("--test", type=int, default=test)
    parser.add_argument("--output", type=Path, default=output)
    return parser.parse_args()


def machine(device: torch.device) -> dict[str, Any]:
    """What a result must say of where it came from."""
    cuda = device.type == "cuda"
    return {
        "device": device.type,
        "device_name": torch.cuda.get_device_name() if cuda else _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "tf32": cuda and torch.backends.cudnn.allow_tf32,
        "gramwatch": gramwatch.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "CPU"


def save(path: Path, result: dict[str, Any]) -> None:
    """Write a result so that an interruption leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(_rounded(result), indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def _rounded(value: Any) -> Any:
    """Six digits are more than any timing has."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return value
