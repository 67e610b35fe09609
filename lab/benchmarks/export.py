"""What an exported guard costs under ONNX Runtime, in parts of the exported network alone.

    python -m lab.benchmarks.export                     # timm's ResNet-50 at 224 pixels, a lean guard
    python -m lab.benchmarks.export --activations       # the same, with taps after activations only
    python -m lab.benchmarks.export --effort full

Both graphs run in turns in one process, every other round backwards. Printed are medians of the ratios within
a round, with quartiles, by the clock and in CPU seconds. Weights are random.
"""

import argparse
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


def guarding(args: argparse.Namespace) -> Guard:
    """A fitted and calibrated guard."""
    model = network(args.network, args.size)
    guard = Guard(model, effort=args.effort)
    if args.activations:
        taps = activations(model, images(2, args.size, 1))
        gram = GramDetector(model, **{**EFFORTS[args.effort], "taps": taps})
        others = {name: METHODS[name](model) for name in ("class_ratio", "energy")}
        guard = Guard.of({"gram": gram, "profile": METHODS["profile"](model, taps=taps), **others})
    guard.fit(images(args.fit, args.size, 1).split(8), progress=False)
    return guard.calibrate(images(args.fit, args.size, 2).split(8), progress=False)


def write(guard: Guard, folder: Path, x: torch.Tensor) -> dict[str, Path]:
    """The graphs of the network alone and with its guard."""
    paths = {PLAIN: folder / "plain.onnx", GUARDED: folder / "guard.onnx"}
    guard.export(paths[GUARDED], x)
    torch.onnx.export(
        guard.model, (x[:2],), paths[PLAIN], input_names=["images"], dynamo=True, verbose=False,
        dynamic_shapes=({0: torch.export.Dim("batch")},), external_data=False,
    )  # fmt: skip
    return paths


def session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(path), options)


def page(result: dict[str, Any]) -> str:
    """The figures as docs/howto/export.md shows them."""
    given, over = result["arguments"], result["over_plain"]
    threads = f"{given['threads']} thread{'s' if given['threads'] > 1 else ''}"
    return (
        f"ResNet-50 at {given['size']} pixels, batch {given['batch']}, {threads}, a {given['effort']} guard "
        f"with {result['taps']} taps: **{ratio(over['clock'])}** times\nthe exported network alone by the "
        f"clock, {ratio(over['cpu'])} in CPU seconds. These are medians and quartiles of "
        f"{over['clock']['rounds']} rounds in turns."
    )


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


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--network", default="resnet50", help="a name of timm")
    parser.add_argument("--size", type=int, default=224, help="pixels along a side")
    parser.add_argument("--effort", choices=EFFORTS, default="lean", help="of the guard")
    parser.add_argument("--activations", action="store_true", help="taps after activations only")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="of ONNX Runtime")
    parser.add_argument("--fit", type=int, default=48, help="images to fit, and as many to calibrate")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--output", type=Path, default=Path("export-cpu.json"))
    args = parser.parse_args()
    warnings.simplefilter("ignore", GramwatchWarning)  # few images: many classes are predicted for none
    guard, x = guarding(args), images(args.batch, args.size, 3)
    with tempfile.TemporaryDirectory() as folder:
        paths = write(guard, Path(folder), x)
        nodes = {name: len(onnx.load(path).graph.node) for name, path in paths.items()}
        bytes_ = {name: path.stat().st_size for name, path in paths.items()}
        run = {name: session(path, args.threads) for name, path in paths.items()}
    inputs = {"images": x.numpy()}
    times = timed({name: lambda s=s: s.run(None, inputs) for name, s in run.items()}, args.rounds)
    overhead = {kind: summary(ratios(times[GUARDED][kind], times[PLAIN][kind])) for kind in ("clock", "cpu")}
    for kind, value in overhead.items():
        print(f"{kind}: {ratio(value)}")
    given = {name: value for name, value in vars(args).items() if name != "output"}
    result = {"kind": "export", **machine(torch.device("cpu")), "onnxruntime": onnxruntime.__version__}
    result |= {"arguments": given, "taps": len(guard.members["gram"].taps), "over_plain": overhead}
    save(args.output, {**result, "seconds": times, "nodes": nodes, "bytes": bytes_})
    print(f"written to {args.output}: {len(guard.members['gram'].taps)} taps, {nodes}, {bytes_}")


if __name__ == "__main__":
    main()
