"""What a guard costs beside a compiled network, in parts of the compiled network's own forward pass.

    python -m benchmarks.compiled                    # timm's ResNet-18 at 128 pixels, 16 images, on the CPU
    python -m benchmarks.compiled --device cuda --network resnet50 --size 224 --batch 128
    python -m benchmarks.compiled --device cuda --network resnet50 --size 224 --batch 128 --bfloat16

In each round the compiled network runs alone, then the network uncompiled, a guard of the compiled network,
and a guard of the uncompiled one. On a GPU there is also a guard of the compiled network that records the
pass. Every other round goes backwards. Printed are medians of the ratios within a round, with quartiles.
Compiling is not timed.
"""

import argparse
import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.measure import Clock, machine, ratios, save, summary
from benchmarks.networks import CLASSES, images, settle
from benchmarks.tables import ratio
from gramwatch import GramwatchWarning, Guard
from gramwatch.networks.foreign import import_torchvision

PLAIN = "compiled network"


def network(name: str, size: int, device: torch.device) -> nn.Module:
    """A network of timm with random weights, in evaluation mode."""
    import_torchvision()
    import timm

    torch.manual_seed(0)
    options = {"zero_init_last": False} if name.startswith("resnet") else {}
    model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options).to(device)
    settle(model, images(8, size).to(device))
    return model.eval()


def guarding(model: nn.Module, args: argparse.Namespace) -> Guard:
    """A fitted and calibrated guard."""
    dtype = torch.bfloat16 if args.bfloat16 else torch.float32
    fitting, calibrating = (images(4 * args.batch, args.size, seed).to(dtype) for seed in (1, 2))
    guard = Guard(model).fit(fitting.split(args.batch), progress=False)
    return guard.calibrate(calibrating.split(args.batch), progress=False)


def variants(args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """The functions that are timed."""
    device = torch.device(args.device)
    model = network(args.network, args.size, device)
    x = images(args.batch, args.size, 3).to(device)
    if args.bfloat16:
        model, x = model.bfloat16().to(memory_format=torch.channels_last), x.bfloat16()
        x = x.contiguous(memory_format=torch.channels_last)
    compiled = torch.compile(model, mode=args.mode)
    guard, before = guarding(compiled, args), guarding(model, args)

    def plain(net: nn.Module) -> None:
        with torch.inference_mode():
            net(x)

    functions = {
        PLAIN: lambda: plain(compiled),
        "uncompiled network": lambda: plain(model),
        "guard, compiled": lambda: guard(x),
        "guard, uncompiled": lambda: before(x),
    }
    if device.type == "cuda":
        recorded = copy.copy(guard)
        recorded.record_pass = True
        functions["guard, compiled, pass recorded"] = lambda: recorded(x)
        for function in list(functions.values()) * 5:
            function()
    return functions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--network", default="resnet18", help="a name of timm")
    parser.add_argument("--size", type=int, default=128, help="pixels along a side")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--bfloat16", action="store_true", help="weights and images, channels last")
    parser.add_argument("--mode", help="of torch.compile")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, help="default: compiled-cpu.json or compiled-cuda.json")
    args = parser.parse_args()
    warnings.simplefilter("ignore", GramwatchWarning)  # few images: many classes are predicted for none
    warnings.filterwarnings("error", "(?s).*uncompiled", GramwatchWarning)
    device = torch.device(args.device)
    times = Clock(device).in_turns(variants(args), args.rounds)
    found = {name: summary(ratios(seconds, times[PLAIN])) for name, seconds in times.items()}
    for name, value in found.items():
        print(f"{name}: {ratio(value)}")
    given = {name: value for name, value in vars(args).items() if name != "output"}
    output = args.output or Path(f"compiled-{device.type}.json")
    save(output, {"kind": "compiled", **machine(device), "arguments": given, "over_plain": found})
    print(f"written to {output}")


if __name__ == "__main__":
    main()
