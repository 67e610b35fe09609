"""What Guard costs beside Gram alone, in parts of the network's own forward pass.

    python -m lab.benchmarks.guard                       # on the CPU, in about two minutes
    python -m lab.benchmarks.guard --device cuda
    python -m lab.benchmarks.guard --device cuda --batch 1
    python -m lab.benchmarks.document guard-cpu.json guard-cuda.json

In each round the network runs alone, then Gram, then Guard, then Guard with full effort, or the other way
round; printed are medians over the rounds, with quartiles. On a GPU there are also guards that record the
pass (`record_pass`), and how long the GPU itself was busy, which a slow host leaves alone.

The results are written to a file after each network. A further run adds to it: the rows of other networks
and batches are kept.
"""

import argparse
import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gramwatch import Guard
from lab.benchmarks.breakdown import kernel_seconds
from lab.benchmarks.measure import Clock, machine, ratios, save, summary
from lab.benchmarks.networks import NETWORKS, images
from lab.benchmarks.subject import Fitted
from lab.benchmarks.tables import guard_costs

CHOSEN = ("ResNet-34 (CIFAR)", "DenseNet-BC-100-12", "WRN-40-2")
BUSY = ("gram", "guard", "full")


def guarding(subject: Fitted, effort: str) -> Guard:
    """A guard that is fitted and calibrated. With full effort it watches what the subject's detector does."""
    guard = Guard(subject.model, effort=effort, taps=subject.spec.taps if effort == "full" else None)
    fitting, calibrating = (images(max(subject.batch, 64), subject.spec.size, seed=seed) for seed in (1, 2))
    return guard.fit([fitting], progress=False).calibrate([calibrating], progress=False)


def row(name: str, device: torch.device, rounds: int, batch: int) -> dict[str, Any]:
    """What is kept of one network: the extra over its plain pass."""
    subject, clock = Fitted(name, device, batch), Clock(device)
    guards = {"guard": guarding(subject, "lean"), "full": guarding(subject, "full")}
    if clock.cuda:
        for way, of in (("recorded", "guard"), ("full_recorded", "full")):
            guards[way] = copy.copy(guards[of])
            guards[way].record_pass = True
        for guard in [*guards.values()] * 5:
            guard(subject.x)
    functions: dict[str, Callable[[], Any]] = {
        "plain": lambda: subject.plain(subject.x),
        "gram": lambda: subject.detector(subject.x),
        **{way: partial(guard, subject.x) for way, guard in guards.items()},
    }
    times = clock.in_turns(functions, rounds)
    plain = times.pop("plain")
    extra = {way: [x - 1 for x in ratios(seconds, plain)] for way, seconds in times.items()}
    figures = {"network": name, "batch": subject.batch, **{way: summary(x) for way, x in extra.items()}}
    if clock.cuda:
        busy = {way: sum(kernel_seconds(functions[way]).values()) for way in ("plain", *BUSY)}
        figures |= {f"busy_{way}": busy[way] / busy["plain"] - 1 for way in BUSY}
    return figures


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows that a file has already."""
    return list(json.loads(path.read_text(encoding="utf-8"))["rows"]) if path.is_file() else []


def added(rows: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with a new one, in place of an older one of the same network and batch."""
    same = [(row["network"], row["batch"]) == (new["network"], new["batch"]) for row in rows]
    if not any(same):
        return [*rows, new]
    return [new if replaced else row for row, replaced in zip(rows, same, strict=True)]


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
