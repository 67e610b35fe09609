"""What it costs to export a guard, and what the exported guard costs under ONNX Runtime.

    python -m lab.benchmarks.export                     # two networks of timm at 224 pixels, a lean guard
    python -m lab.benchmarks.export --activations       # the same, with taps after activations only
    python -m lab.benchmarks.export --effort full

The graphs of the network alone and with its guard run in turns in one process, every other round backwards.
Times are in parts of those of the network alone: medians of the ratios within a round, with quartiles, by the
clock and in CPU seconds. To export takes the CPU seconds of one thread. Weights are random.
"""

import argparse
import functools
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from torch import nn

from gramwatch import GramDetector, GramwatchWarning, Guard, find_taps
from gramwatch.guard.guard import EFFORTS
from gramwatch.inputs.foreign import import_torchvision
from gramwatch.methods import METHODS
from lab.benchmarks.measure import machine, ratios, save, summary
from lab.benchmarks.networks import CLASSES, images, settle
from lab.benchmarks.tables import ratio

PLAIN, GUARDED = "network", "network with guard"
NETWORKS = {"efficientnet_b0": "EfficientNet-B0", "resnet50": "ResNet-50"}
"""Names of timm, and what they are called."""


def network(name: str, size: int) -> nn.Module:
    """A network of timm with random weights, in evaluation mode."""
    import_torchvision()
    import timm

    torch.manual_seed(0)
    options = {"zero_init_last": False} if name.startswith("resnet") else {}
    model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    settle(model, images(8, size))
    return model.eval()


def activations(model: nn.Module, x: torch.Tensor) -> list[str]:
    """The names of as many activations as a lean guard has taps, from the first layers to the last."""
    names = [tap.name for tap in find_taps(model, x) if tap.kind == "activation"]
    count = min(len(names), len(find_taps(model, x, "spread")))
    return [names[(2 * i + 1) * len(names) // (2 * count)] for i in range(count)]


def guarding(name: str, args: argparse.Namespace) -> Guard:
    """A fitted and calibrated guard."""
    model = network(name, args.size)
    guard = Guard(model, effort=args.effort)
    if args.activations:
        taps = activations(model, images(2, args.size, 1))
        gram = GramDetector(model, **{**EFFORTS[args.effort], "taps": taps})
        others = {name: METHODS[name](model) for name in ("class_ratio", "energy")}
        guard = Guard.of({"gram": gram, "profile": METHODS["profile"](model, taps=taps), **others})
    guard.fit(images(args.fit, args.size, 1).split(8), progress=False)
    return guard.calibrate(images(args.fit, args.size, 2).split(8), progress=False)


def written(guard: Guard, folder: Path, x: torch.Tensor) -> tuple[dict[str, Path], dict[str, float]]:
    """The graphs of the network alone and with its guard, and the CPU seconds to write each."""
    paths = {PLAIN: folder / "plain.onnx", GUARDED: folder / "guard.onnx"}
    ways: dict[str, Callable[[], Any]] = {
        PLAIN: lambda: torch.onnx.export(
            guard.model, (x[:2],), paths[PLAIN], input_names=["images"], dynamo=True, verbose=False,
            dynamic_shapes=({0: torch.export.Dim("batch")},), external_data=False,
        ),
        GUARDED: lambda: guard.export(paths[GUARDED], x[:2]),
    }  # fmt: skip
    seconds = {}
    for name, way in ways.items():  # the first one also loads the exporter
        start = time.process_time()
        way()
        seconds[name] = time.process_time() - start
    return paths, seconds


def session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(path), options)


def page(result: dict[str, Any]) -> str:
    """The figures as docs/howto/export.md shows them."""
    given, networks = result["arguments"], result["networks"]
    threads = f"{given['threads']} thread{'s' if given['threads'] > 1 else ''}"
    rows = {
        f"taps of a {given['effort']} guard": [f"{row['taps']}" for row in networks.values()],
        "CPU seconds to write the file": [_both(row["export"], "{:.0f}") for row in networks.values()],
        "nodes": [_both(row["nodes"], "{:,.0f}") for row in networks.values()],
        "MB": [_both(row["bytes"], "{:.0f}", 1e6) for row in networks.values()],
    }
    for batch in map(str, given["batches"]):
        runs = [row["batches"][batch] for row in networks.values()]
        rows |= {
            f"batch {batch}, milliseconds": [_both(run["seconds"], "{:.0f}", 1e-3) for run in runs],
            f"batch {batch}, times the network": [f"**{ratio(run['over_plain']['clock'])}**" for run in runs],
            f"batch {batch}, in CPU seconds": [ratio(run["over_plain"]["cpu"]) for run in runs],
        }
    head = ["", *(NETWORKS.get(name, name) for name in networks)]
    lines = [head, ["---", *("---:" for _ in networks)], *([name, *row] for name, row in rows.items())]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"{table}\n\nImages of {given['size']} pixels, {threads} of ONNX Runtime {result['onnxruntime']}. "
        f"The exported network alone is in brackets. Times are medians, ratios medians and quartiles, of "
        f"{given['rounds']} rounds in turns."
    )


def _both(values: dict[str, float], form: str, unit: float = 1) -> str:
    """The figure of the network with its guard, and that of the network alone in brackets."""
    return f"{form.format(values[GUARDED] / unit)} ({form.format(values[PLAIN] / unit)})"


def timed(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by the clock and of the processor, of each function in each round."""
    times: dict[str, dict[str, list[float]]] = {name: {"clock": [], "cpu": []} for name in functions}
    for turn in range(-1, rounds):  # the first round warms up
        for name in list(functions)[:: -1 if turn % 2 else 1]:
            clock, cpu = time.perf_counter(), time.process_time()
            functions[name]()
            if turn >= 0:
                times[name]["clock"].append(time.perf_counter() - clock)
                times[name]["cpu"].append(time.process_time() - cpu)
    return times


def measured(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one network."""
    guard = guarding(name, args)
    with tempfile.TemporaryDirectory() as folder:
        paths, seconds = written(guard, Path(folder), images(2, args.size, 3))
        row: dict[str, Any] = {
            "taps": len(guard.members["gram"].taps),
            "export": seconds,
            "nodes": {name: len(onnx.load(path).graph.node) for name, path in paths.items()},
            "bytes": {name: path.stat().st_size for name, path in paths.items()},
            "batches": {},
        }
        run = {name: session(path, args.threads) for name, path in paths.items()}
    for batch in args.batches:
        inputs = {"images": images(batch, args.size, 4).numpy()}
        calls = {name: functools.partial(s.run, None, inputs) for name, s in run.items()}
        times = timed(calls, args.rounds)
        over = {kind: summary(ratios(times[GUARDED][kind], times[PLAIN][kind])) for kind in ("clock", "cpu")}
        medians = {name: summary(of["clock"])["median"] for name, of in times.items()}
        row["batches"][str(batch)] = {"seconds": medians, "over_plain": over, "rounds": times}
        print(
            f"{name}, batch {batch}: {ratio(over['clock'])} by the clock, {ratio(over['cpu'])} in CPU seconds"
        )
    return row


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), help="names of timm")
    parser.add_argument("--size", type=int, default=224, help="pixels along a side")
    parser.add_argument("--effort", choices=EFFORTS, default="lean", help="of the guard")
    parser.add_argument("--activations", action="store_true", help="taps after activations only")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=1, help="of ONNX Runtime")
    parser.add_argument("--fit", type=int, default=48, help="images to fit, and as many to calibrate")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--output", type=Path, default=Path("export-cpu.json"))
    args = parser.parse_args()
    warnings.simplefilter("ignore", GramwatchWarning)  # few images: many classes are predicted for none
    given = {name: value for name, value in vars(args).items() if name != "output"}
    result = {"kind": "export", **machine(torch.device("cpu")), "onnxruntime": onnxruntime.__version__}
    result |= {"arguments": given, "networks": {}}
    for name in args.networks:
        result["networks"][name] = measured(name, args)
        save(args.output, result)
    print(page(result))
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
