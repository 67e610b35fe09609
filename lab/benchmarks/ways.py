"""What a guard costs in the ways people run networks, in parts of the network's own forward pass.

    python -m lab.benchmarks.ways                     # on the CPU: 1 and 32 images, 1 and 2 threads
    python -m lab.benchmarks.ways --device cuda       # bfloat16 channels last: docs/performance.md
    python -m lab.benchmarks.ways --device cuda --networks ResNet-50 --ways compiled --fit
    python -m lab.benchmarks.document ways-cpu.json ways-cuda.json

In each round the network runs alone, then a guard, and on a GPU the network as a CUDA graph, and a guard that
records the pass; every other round goes backwards. A compiled network is compared with itself, compiled.
Printed are medians over the rounds, with quartiles. On a GPU there is also the time that the GPU itself was
busy, which a slow host leaves alone. `--fit` adds a whole fit, in times the plain pass over the same images,
and what each further batch of a longer fit takes.
`--kernels` prints which kernels the GPU's time goes into. Compiling is not timed.

The results are written to a file after each network. A further run adds to it.
"""

import argparse
import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gramwatch import GramwatchWarning, Guard
from gramwatch.inputs.foreign import import_torchvision
from lab.benchmarks.breakdown import kernel_seconds
from lab.benchmarks.guard import rows_of
from lab.benchmarks.measure import Clock, machine, ratios, save, summary
from lab.benchmarks.networks import CLASSES, images, settle
from lab.benchmarks.tables import WAYS, ways_table


class Case(NamedTuple):
    """A network, the pixels along a side of its images, and how many are judged at once."""

    make: str
    size: int = 224
    cpu: tuple[int, ...] = (1, 32)
    cuda: tuple[int, ...] = (128,)


CASES = {
    "ResNet-50": Case("resnet50", cuda=(128, 8, 1)),
    "EfficientNet-B0": Case("efficientnet_b0"),
    "DenseNet-121": Case("densenet121", cpu=()),
    "MobileNetV3-L": Case("mobilenetv3_large_100"),
    "Swin-T": Case("swin_tiny_patch4_window7_224", cpu=()),
    "ViT-B/16": Case("vit_base_patch16_224"),
    "ConvNeXt-T": Case("convnext_tiny"),
}
FIT_BATCHES = 20
"""How many batches a fit takes."""
FURTHER = 3
"""How many times as many batches a longer fit takes."""
SHOWN = 20
"""How many kernels `--kernels` prints."""


def build(case: Case, device: torch.device) -> nn.Module:
    """The network with random weights, in evaluation mode."""
    torch.manual_seed(0)
    import_torchvision()
    import timm

    options = {"zero_init_last": False} if case.make.startswith("resnet") else {}
    model: nn.Module = timm.create_model(case.make, pretrained=False, num_classes=CLASSES, **options)
    model = model.to(device)
    settle(model, images(8, case.size).to(device))
    return model.eval()


class Subject:
    """A network run in one way, with a batch and a guard."""

    def __init__(self, case: Case, way: str, device: torch.device, batch: int) -> None:
        self.case, self.way, self.device, self.batch = case, way, device, batch
        self.model = build(case, device)
        self.dtype = torch.float32 if way == "float32" else torch.bfloat16
        if way != "float32":
            self.model = self.model.bfloat16().to(memory_format=torch.channels_last)
        if way == "compiled":
            self.model = torch.compile(self.model)  # type: ignore[assignment]
        self.x = self.batch_of(3)
        needed = max(1, 64 // batch)
        self.guard = Guard(self.model, rehearse=False)  # weights do not change what a call costs
        self.guard.fit([self.batch_of(10 + i) for i in range(needed)], progress=False)
        self.guard.calibrate([self.batch_of(20 + i) for i in range(needed)], progress=False)

    def batch_of(self, seed: int) -> Tensor:
        x = images(self.batch, self.case.size, seed).to(self.device, self.dtype)
        return x if self.way == "float32" else x.contiguous(memory_format=torch.channels_last)

    def plain(self) -> None:
        with torch.inference_mode():
            self.model(self.x)

    def plain_graph(self) -> Callable[[], None]:
        """The plain pass as a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.plain()
        return graph.replay

    def functions(self) -> dict[str, Callable[[], Any]]:
        """What is timed, after some calls that are not."""
        functions: dict[str, Callable[[], Any]] = {"plain": self.plain, "guard": partial(self.guard, self.x)}
        if self.device.type == "cuda":
            recorded = copy.copy(self.guard)
            recorded.record_pass = True
            functions["recorded"] = partial(recorded, self.x)
        for function in list(functions.values()) * (6 if self.device.type == "cuda" else 1):
            function()
        if self.device.type == "cuda":
            functions["graph"] = self.plain_graph()
        return functions

    def fit_ratios(self, clock: Clock, rounds: int) -> dict[str, Any]:
        """A fit of different images that lie on the device, in times the plain pass over them.

        `fit` is a whole fit of `FIT_BATCHES` batches, with the look at the network and the inversion of the
        covariances. `fit_further` is what further batches of a longer fit take.
        """
        data = [turned for i in range(FIT_BATCHES // 4) for turned in four_ways(self.batch_of(30 + i))]
        longer = FURTHER * data

        def fit(batches: list[Tensor], record: bool) -> None:
            guard = Guard(self.model)
            guard.record_pass = record
            guard.fit(batches, progress=False)

        def plain() -> None:
            with torch.inference_mode():
                for x in data:
                    self.model(x)

        functions: dict[str, Callable[[], Any]] = {"plain": plain}
        recording = [False, True] if clock.cuda else [False]
        for record in recording:
            functions |= {
                f"fit {record}": partial(fit, data, record),
                f"longer {record}": partial(fit, longer, record),
            }
        times = clock.in_turns(functions, rounds)
        figures: dict[str, Any] = {"fit": summary(ratios(times["fit False"], times["plain"]))}
        for record in recording:
            pairs = zip(times[f"longer {record}"], times[f"fit {record}"], strict=True)
            further = [(long - short) / (FURTHER - 1) for long, short in pairs]
            name = "fit_further_recorded" if record else "fit_further"
            figures[name] = summary(ratios(further, times["plain"]))
        return figures


def four_ways(images: Tensor) -> list[Tensor]:
    """The images, and the same on their sides and upside down: four batches of different images."""
    turned = [images.rot90(quarters, (2, 3)) for quarters in range(4)]
    channels_last = images.is_contiguous(memory_format=torch.channels_last)
    form = torch.channels_last if channels_last else torch.contiguous_format
    return [batch.contiguous(memory_format=form) for batch in turned]


def row(name: str, way: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """What is kept of one network in one way."""
    device = torch.device(args.device)
    clock, subject = Clock(device), Subject(CASES[name], way, device, batch)
    functions = subject.functions()
    times = clock.in_turns(functions, args.rounds)
    figures: dict[str, Any] = {
        "network": name,
        "way": way,
        "batch": batch,
        **({} if clock.cuda else {"threads": torch.get_num_threads()}),
        "members": len(subject.guard.members),
        "plain_seconds": summary(times["plain"]),
        "guard": extra(times["guard"], times["plain"]),
    }
    if clock.cuda:
        figures["graph_seconds"] = summary(times["graph"])
        figures["recorded"] = extra(times["recorded"], times["plain"])
        figures["recorded_over_graph"] = extra(times["recorded"], times["graph"])
        kernels = {key: kernel_seconds(function) for key, function in functions.items()}
        busy = {key: sum(seconds.values()) for key, seconds in kernels.items()}
        figures["busy_plain_seconds"] = busy["plain"]
        figures["busy_guard"] = busy["guard"] / busy["plain"] - 1
        if args.kernels:
            show_kernels(name, way, kernels["plain"], kernels["guard"])
    if args.fit:
        figures |= subject.fit_ratios(clock, 5)
    return figures


def extra(times: Sequence[float], plain: Sequence[float]) -> dict[str, float]:
    """The extra over the plain pass of the same round: median and quartiles."""
    return summary([ratio - 1 for ratio in ratios(times, plain)])


def show_kernels(name: str, way: str, plain: dict[str, float], guard: dict[str, float]) -> None:
    """Print where the GPU's extra time goes."""
    extra = {kernel: seconds - plain.get(kernel, 0.0) for kernel, seconds in guard.items()}
    print(
        f"{name}, {way}: plain {1e3 * sum(plain.values()):.3f} ms, guard {1e3 * sum(guard.values()):.3f} ms"
    )
    for kernel in sorted(extra, key=lambda kernel: -extra[kernel])[:SHOWN]:
        print(f"  {1e6 * extra[kernel]:8.1f} us  {kernel[:110]}")


def added(rows: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with a new one, in place of an older one of the same network, way, batch and threads."""
    key = ("network", "way", "batch", "threads", "members")
    kept = [row for row in rows if any(row.get(k) != new.get(k) for k in key)]
    return [*kept, new]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--networks", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), help="default: bfloat16, on the CPU float32")
    parser.add_argument("--batch", nargs="*", type=int, help="images at once, if not as many as usual")
    parser.add_argument("--threads", nargs="*", type=int, help="default: 1 and 2 on the CPU")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--fit", action="store_true", help="measure a fit, too")
    parser.add_argument("--kernels", action="store_true", help="print where the GPU's time goes")
    parser.add_argument("--output", type=Path, help="default: ways-cpu.json or ways-cuda.json")
    args = parser.parse_args()
    warnings.simplefilter("ignore", GramwatchWarning)  # few images: many classes are predicted for none
    for serious in ("(?s).*uncompiled", "(?s).*cannot be used"):
        warnings.filterwarnings("error", serious, GramwatchWarning)
    device = torch.device(args.device)
    on_cuda = device.type == "cuda"
    output = args.output or Path(f"ways-{device.type}.json")
    rows = rows_of(output)
    for name in args.networks:
        batches = args.batch or (CASES[name].cuda if on_cuda else CASES[name].cpu)
        ways = args.ways or (["bfloat16"] if on_cuda else ["float32"])
        threads = args.threads or ([torch.get_num_threads()] if on_cuda else [1, 2])
        for way, batch, count in product(ways, batches, threads):
            torch.set_num_threads(count)
            rows = added(rows, row(name, way, batch, args))
            save(output, {"kind": "ways", **machine(device), "strict": False, "rows": rows})
            print(
                f"{name}, {way}, batch {batch}, threads {count}: {rows[-1]['guard']['median']:+.3f}",
                flush=True,
            )
    print(ways_table([{"device": device.type, "device_name": "", "rows": rows}]))
    print(f"\nwritten to {output}")


if __name__ == "__main__":
    main()
