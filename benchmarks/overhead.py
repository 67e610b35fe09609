"""What the detector costs, as ratios to the network's plain forward pass, all measured in one run.

    python -m benchmarks.overhead                       # CPU
    python -m benchmarks.overhead --device cuda

Prints one table and writes it, with every number, to `--output`. Variants take turns, several rounds of each;
a ratio is that of the medians.
"""

import argparse
import json
import platform
import statistics as stats
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gramwatch
from benchmarks import released
from gramwatch import kernels
from gramwatch.detector import GramDetector
from gramwatch.networks import densenet_bc_100_12, resnet34, wide_resnet_40_2

ORDERS = range(1, 11)


def timm_network(name: str) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False)


NETWORKS: dict[str, dict[str, Any]] = {
    "ResNet-34 (CIFAR)": {"make": resnet34, "taps": "paper", "size": 32, "cpu": 64, "cuda": 256},
    "DenseNet-BC-100-12": {"make": densenet_bc_100_12, "taps": "paper", "size": 32, "cpu": 64, "cuda": 256},
    "WRN-40-2": {"make": wide_resnet_40_2, "taps": "paper", "size": 32, "cpu": 64, "cuda": 256},
    "ResNet-50 at 224": {"make": "resnet50", "taps": "all", "size": 224, "cpu": 8, "cuda": 128},
    "ViT-B/16 at 224": {"make": "vit_base_patch16_224", "taps": "all", "size": 224, "cpu": 8, "cuda": 128},
}


class Clock:
    """Times functions in turns, waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def once(self, function: Callable[[], Any]) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def in_turns(self, functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
        for function in functions.values():
            self.once(function)
        times: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(rounds):
            for name, function in functions.items():
                times[name].append(self.once(function))
        return times


def without_kernels(function: Callable[[], Any]) -> Callable[[], Any]:
    """The same with PyTorch's form of everything."""

    def run() -> None:
        before = set(kernels._given_up)
        kernels._given_up.update(kernels._MODULES)
        try:
            function()
        finally:
            kernels._given_up.clear()
            kernels._given_up.update(before)

    return run


def peak_memory(function: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - base


def read_bandwidth(device: torch.device, clock: Clock) -> float:
    """Bytes a second that reading a large tensor reaches here."""
    x = torch.ones(2**30 if clock.cuda else 2**27, device=device)
    times = clock.in_turns({"sum": lambda: x.sum()}, 10)["sum"]
    return x.numel() * 4 / min(times)


def measure_network(name: str, spec: dict[str, Any], device: torch.device, args: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    make = spec["make"]
    model = (timm_network(make) if isinstance(make, str) else make()).eval().to(device)
    batch = args.batch or spec[device.type]
    x = torch.randn(batch, 3, spec["size"], spec["size"], device=device)
    clock = Clock(device)
    detector = GramDetector(model, taps=spec["taps"], orders=ORDERS)
    first = clock.once(lambda: detector.fit([x], progress=False))

    def plain() -> Tensor:
        with torch.inference_mode():
            return model(x)

    def score() -> Any:
        return detector.measure(x)

    def fit() -> Any:
        with torch.inference_mode():
            return detector._fit_batch(x)

    def released_score() -> None:
        def receive(number: int, maps: Tensor) -> None:
            released.statistics(maps, ORDERS).cpu()

        gramwatch.taps.observe(model, detector.taps, x, receive)

    functions: dict[str, Callable[[], Any]] = {"plain": plain, "score": score, "fit": fit}
    if args.slow:
        functions["score, PyTorch form"] = without_kernels(score)
        functions["released algorithm"] = released_score
    times = clock.in_turns(functions, args.rounds)
    medians = {key: stats.median(values) for key, values in times.items()}
    activations = sum(tap.channels * (torch.Size(tap.shape).numel() // tap.channels) for tap in detector.taps)
    row: dict[str, Any] = {
        "network": name,
        "batch": batch,
        "taps": len(detector.taps),
        "activations_per_image": activations,
        "first_fit_seconds": first,
        "seconds": medians,
        "images_per_second": {key: batch / value for key, value in medians.items()},
        "extra_over_plain": {key: value / medians["plain"] - 1 for key, value in medians.items()},
        "spread": {key: [min(v), max(v)] for key, v in times.items()},
        "read_once_over_plain": activations * 4 * batch / args.bandwidth / medians["plain"],
    }
    if device.type == "cuda":
        features = sum(m.size for m in detector._measures)
        own = features * 4 * batch
        row["peak_bytes"] = {"plain": peak_memory(plain), "score": peak_memory(score), "statistics": own}
        row["extra_memory"] = (row["peak_bytes"]["score"] - own) / row["peak_bytes"]["plain"] - 1
    return row


def measure_kernels(device: torch.device, bandwidth: float, rounds: int) -> list[dict[str, Any]]:
    """The statistics alone on maps of 64 MB and more, against reading the map once."""
    clock, rows = Clock(device), []
    repeats = 20 if clock.cuda else 1  # so that launching is not what is timed
    shapes = [(256, 64, 1024), (512, 128, 256), (1024, 256, 64), (64, 256, 3136), (256, 768, 197)]
    if device.type == "cpu":
        shapes = [(64, 64, 1024), (64, 128, 256), (64, 256, 64), (8, 256, 3136), (8, 768, 197)]
    for shape in shapes:
        for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
            for layout in ("channels first", "channels last"):
                x = torch.randn(shape, device=device).relu_().to(dtype)
                if layout == "channels last":
                    x = x.transpose(1, 2).contiguous().transpose(1, 2)
                for statistic in kernels.FAST:
                    out = torch.empty(shape[0], 10, shape[1], device=device)

                    def run(s: str = statistic, x: Tensor = x, out: Tensor = out) -> None:
                        for _ in range(repeats):
                            kernels.compute(s, x, tuple(ORDERS), out)

                    times = [t / repeats for t in clock.in_turns({"kernel": run}, rounds)["kernel"]]
                    limit = x.numel() * x.element_size() / bandwidth
                    rows.append(
                        {
                            "shape": list(shape),
                            "dtype": str(dtype).removeprefix("torch."),
                            "layout": layout,
                            "statistic": statistic,
                            "seconds": stats.median(times),
                            "share_of_one_read": limit / stats.median(times),
                        }
                    )
    return rows


def table(result: dict[str, Any]) -> str:
    lines = [
        "| network | batch | taps | plain, images/s | score, extra | fit, extra | PyTorch form, extra "
        "| released algorithm, extra | reading once, extra | memory, extra |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["networks"]:
        extra = row["extra_over_plain"]

        def cell(key: str, extra: dict[str, float] = extra) -> str:
            return f"{extra[key]:.3f}" if key in extra else "not run"

        memory = f"{row['extra_memory']:+.1%}" if "extra_memory" in row else "not measured"
        cells = [row["network"], row["batch"], row["taps"], f"{row['images_per_second']['plain']:,.0f}"]
        cells += [cell(key) for key in ("score", "fit", "score, PyTorch form", "released algorithm")]
        cells += [f"{row['read_once_over_plain']:.3f}", memory]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def kernel_table(result: dict[str, Any]) -> str:
    lines = ["| map (N, C, pixels) | dtype | layout | statistic | ms | share of one read |"]
    lines.append("| --- | --- | --- | --- | ---: | ---: |")
    lines += [
        f"| {' x '.join(map(str, row['shape']))} | {row['dtype']} | {row['layout']} | {row['statistic']} | "
        f"{1000 * row['seconds']:.3f} | {row['share_of_one_read']:.0%} |"
        for row in result["kernels"]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=0, help="instead of each network's own")
    parser.add_argument("--fast-only", dest="slow", action="store_false", help="leave the slow variants out")
    parser.add_argument(
        "--strict", action="store_true", help="float32 convolutions in full precision, no TF32 (CUDA)"
    )
    parser.add_argument("--no-kernels", dest="kernels", action="store_false", help="networks only")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=Path("overhead.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", ".*fewer than 20", gramwatch.GramwatchWarning)
    device = torch.device(args.device)
    if args.strict:
        torch.backends.cudnn.allow_tf32 = False
    args.bandwidth = read_bandwidth(device, Clock(device))
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "CPU",
        "threads": args.threads,
        "tf32": device.type == "cuda" and not args.strict,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "read_bytes_per_second": args.bandwidth,
        "networks": [],
    }
    print(f"{result['device']}, torch {result['torch']}, reads {args.bandwidth / 1e9:,.0f} GB/s", flush=True)
    for name in args.networks:
        try:
            result["networks"].append(measure_network(name, NETWORKS[name], device, args))
        except ImportError as error:
            print(f"{name}: left out ({error})")
            continue
        print(table({**result, "networks": result["networks"][-1:]}).splitlines()[-1], flush=True)
    result["kernels"] = measure_kernels(device, args.bandwidth, args.rounds) if args.kernels else []
    print("\n" + table(result) + "\n\n" + kernel_table(result))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
