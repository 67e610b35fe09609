"""What Guard costs beside Gram alone, in parts of the network's own forward pass.

    python -m benchmarks.guard                       # on the CPU, in about two minutes
    python -m benchmarks.guard --device cuda

In each round the network runs alone, then Gram, then Guard, or the other way round; printed are medians over
the rounds, with quartiles. On a GPU also by how long the GPU itself was busy, which a slow host leaves alone.
"""

import argparse

import torch

from benchmarks.measure import Clock, ratios, summary
from benchmarks.networks import NETWORKS, images
from benchmarks.subject import Subject
from benchmarks.tables import ratio
from gramwatch import Guard

CHOSEN = ("ResNet-34 (CIFAR)", "DenseNet-BC-100-12", "WRN-40-2")


def guarding(subject: Subject) -> Guard:
    """A guard that is fitted and calibrated, and watches what the subject's detector watches."""
    guard = Guard(subject.model, taps=subject.spec.taps, level=subject.detector.level)
    guard.fit([subject.x], progress=False)
    return guard.calibrate([images(max(subject.batch, 2), subject.spec.size, seed=2)], progress=False)


def row(name: str, device: torch.device, rounds: int) -> str:
    """One network's line of the table."""
    subject = Subject(name, device)
    guard = guarding(subject)
    functions = {
        "plain": lambda: subject.plain(subject.x),
        "gram": lambda: subject.detector(subject.x),
        "guard": lambda: guard(subject.x),
    }
    clock = Clock(device)
    times = clock.in_turns(functions, rounds)
    gram, guarded = (ratios(times[each], times["plain"]) for each in ("gram", "guard"))
    more = [b - a for a, b in zip(gram, guarded, strict=True)]
    found = [summary(column) for column in ([x - 1 for x in gram], [x - 1 for x in guarded], more)]
    line = f"| {name}, batch {subject.batch} | {' | '.join(ratio(each) for each in found)} |"
    if clock.cuda:
        plain, gram_alone, all_of_it = (clock.on_gpu(function) for function in functions.values())
        line += f" {(all_of_it - gram_alone) / plain:.3f} |"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--networks", nargs="*", choices=list(NETWORKS), default=list(CHOSEN))
    args = parser.parse_args()
    device = torch.device(args.device)
    head = ["extra over the plain pass", "Gram", "Guard", "Guard less Gram"]
    head += ["the same of the GPU's time"] * (device.type == "cuda")
    print(f"| {' | '.join(head)} |\n| --- |{' ---: |' * (len(head) - 1)}")
    for name in args.networks:
        print(row(name, device, args.rounds), flush=True)


if __name__ == "__main__":
    main()
