"""What Guard costs beside Gram alone, in parts of the network's own forward pass.

    python -m benchmarks.guard                       # on the CPU, in about two minutes
    python -m benchmarks.guard --device cuda
    python -m benchmarks.guard --device cuda --batch 1

In each round the network runs alone, then Gram, then Guard, or the other way round; printed are medians over
the rounds, with quartiles. On a GPU there is also a guard that records the pass (`record_pass`), and how
long the GPU itself was busy, which a slow host leaves alone.
"""

import argparse
import copy

import torch

from benchmarks.breakdown import kernel_seconds
from benchmarks.measure import Clock, ratios, summary
from benchmarks.networks import NETWORKS, images
from benchmarks.subject import Fitted
from benchmarks.tables import ratio
from gramwatch import Guard

CHOSEN = ("ResNet-34 (CIFAR)", "DenseNet-BC-100-12", "WRN-40-2")
HEAD = ("Gram", "Guard", "Guard less Gram")
ON_A_GPU = ("Guard, pass recorded", "of the GPU's time: Gram", "Guard")


def guarding(subject: Fitted) -> Guard:
    """A guard that is fitted and calibrated, and watches what the subject's detector watches."""
    guard = Guard(subject.model, taps=subject.spec.taps)
    fitting, calibrating = (images(max(subject.batch, 64), subject.spec.size, seed=seed) for seed in (1, 2))
    return guard.fit([fitting], progress=False).calibrate([calibrating], progress=False)


def row(name: str, device: torch.device, rounds: int, batch: int) -> str:
    """One network's line of the table."""
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
    more = [b - a for a, b in zip(extra["gram"], extra["guard"], strict=True)]
    columns = [extra["gram"], extra["guard"], more, *([extra["recorded"]] if clock.cuda else [])]
    cells = [ratio(summary(column)) for column in columns]
    if clock.cuda:
        busy = [sum(kernel_seconds(functions[each]).values()) for each in ("plain", "gram", "guard")]
        cells += [f"{seconds / busy[0] - 1:.3f}" for seconds in busy[1:]]
    return f"| {name}, batch {subject.batch} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=0, help="images at once, if not as many as usual")
    parser.add_argument("--networks", nargs="*", choices=list(NETWORKS), default=list(CHOSEN))
    args = parser.parse_args()
    device = torch.device(args.device)
    head = (*HEAD, *ON_A_GPU) if device.type == "cuda" else HEAD
    print(f"| extra over the plain pass | {' | '.join(head)} |\n| --- |{' ---: |' * len(head)}")
    for name in args.networks:
        print(row(name, device, args.rounds, args.batch), flush=True)


if __name__ == "__main__":
    main()
