"""What Guard costs beside Gram alone, in parts of the network's own forward pass.

    python -m benchmarks.guard                       # on the CPU, in about two minutes
    python -m benchmarks.guard --device cuda
    python -m benchmarks.guard --device cuda --batch 1
    python -m benchmarks.document guard-cpu.json guard-cuda.json

In each round the network runs alone, then Gram, then Guard, or the other way round; printed are medians over
the rounds, with quartiles. On a GPU there is also a guard that records the pass (`record_pass`), and how
long the GPU itself was busy, which a slow host leaves alone.

The results are written to a file after each network. A further run adds to it: the rows of other networks
and batches are kept.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.breakdown import kernel_seconds
from benchmarks.measure import Clock, machine, ratios, save, summary
from benchmarks.networks import NETWORKS, images
from benchmarks.subject import Fitted
from benchmarks.tables import guard_costs
from gramwatch import Guard

CHOSEN = ("ResNet-34 (CIFAR)", "DenseNet-BC-100-12", "WRN-40-2")


def guarding(subject: Fitted) -> Guard:
    """A guard that is fitted and calibrated, and watches what the subject's detector watches."""
    guard = Guard(subject.model, taps=subject.spec.taps)
    fitting, calibrating = (images(max(subject.batch, 64), subject.spec.size, seed=seed) for seed in (1, 2))
    return guard.fit([fitting], progress=False).calibrate([calibrating], progress=False)


def row(name: str, device: torch.device, rounds: int, batch: int) -> dict[str, Any]:
    """What is kept of one network: the extra over its plain pass."""
    subject, clock = Fitted(name, device, batch), Clock(device)
    guard = guarding(subject)
    functions = {
        "plain": lambda: subject.plain(subject.x),
        "gram": lambda: subject.detector(subject.x),
        "guard": lambda: guard(subject.x),
    }
    if clock.cuda:
        recorded = copy.copy(guard)
        recorded.record_pass = True
        functions["recorded"] = lambda: recorded(subject.x)
        for each in (guard, recorded) * 5:
            each(subject.x)
    times = clock.in_turns(functions, rounds)
    plain = times.pop("plain")
    extra = {each: [x - 1 for x in ratios(seconds, plain)] for each, seconds in times.items()}
    extra["more"] = [b - a for a, b in zip(extra["gram"], extra["guard"], strict=True)]
    found = {"network": name, "batch": subject.batch, **{each: summary(x) for each, x in extra.items()}}
    if clock.cuda:
        busy = [sum(kernel_seconds(functions[each]).values()) for each in ("plain", "gram", "guard")]
        found |= {"busy_gram": busy[1] / busy[0] - 1, "busy_guard": busy[2] / busy[0] - 1}
    return found


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows that a file has already."""
    return list(json.loads(path.read_text(encoding="utf-8"))["rows"]) if path.is_file() else []


def added(rows: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with a new one, in place of an older one of the same network and batch."""
    same = [(each["network"], each["batch"]) == (new["network"], new["batch"]) for each in rows]
    if not any(same):
        return [*rows, new]
    return [new if replaced else each for each, replaced in zip(rows, same, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=0, help="images at once, if not as many as usual")
    parser.add_argument("--networks", nargs="*", choices=list(NETWORKS), default=list(CHOSEN))
    parser.add_argument("--output", type=Path, help="default: guard-cpu.json or guard-cuda.json")
    args = parser.parse_args()
    device = torch.device(args.device)
    output = args.output or Path(f"guard-{device.type}.json")
    rows = rows_of(output)
    for name in args.networks:
        rows = added(rows, row(name, device, args.rounds, args.batch))
        save(output, {"kind": "guard", **machine(device), "strict": False, "rows": rows})
    print(guard_costs({"device": device.type, "rows": rows}))
    print(f"\nwritten to {output}")


if __name__ == "__main__":
    main()
