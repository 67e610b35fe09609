"""What evaluating every method that needs no gradients costs, beside one plain pass over the same data.

    python -m lab.benchmarks.together                        # DenseNet-BC-100-12 on the CPU, 256 images
    python -m lab.benchmarks.together --device cuda --images 5120

All detectors share one forward pass; `neighbours` examples lie in the banks of those that keep some. In each
round the network runs alone, then all methods; printed is the median of the ratios, with the quartiles.
"""

import argparse
import warnings
from typing import Any

import torch

from gramwatch import GramDetector, GramwatchWarning
from gramwatch.evaluation.evaluate import Together, fit_together
from gramwatch.methods import METHODS, Method
from gramwatch_lab.networks import densenet_bc_100_12
from lab.benchmarks.measure import Clock, summary
from lab.benchmarks.tables import ratio


def banks_of(detectors: dict[str, Method], examples: int) -> None:
    """Fill the banks up to a size, with copies that differ a little."""
    for detector in detectors.values():
        bank = getattr(detector, "bank_", None)
        if bank is not None:
            copies = bank.repeat(-(-examples // len(bank)), 1)[:examples]
            detector.bank_ = copies + 1e-3 * torch.randn_like(copies)  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--neighbours", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--without", nargs="*", default=[], help="methods to leave out, by name ('gram' is one)"
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore", GramwatchWarning)
    device = torch.device(args.device)
    torch.manual_seed(0)
    network = densenet_bc_100_12().eval().to(device)
    images = torch.randn(args.images, 3, 32, 32)
    loader = list(images.split(args.batch))
    methods = {
        name: method(network)
        for name, method in METHODS.items()
        if not method(network).gradients and name not in args.without
    }
    fit_together(methods, [torch.randn(args.batch, 3, 32, 32) for _ in range(8)], progress=False)
    banks_of(methods, args.neighbours)
    detectors: dict[str, Any] = dict(methods)
    if "gram" not in args.without:
        detectors["gram"] = GramDetector(network, taps="paper").fit(loader, progress=False)

    @torch.inference_mode()
    def plain() -> None:
        for batch in loader:
            network(batch.to(device))

    evaluation = Together(detectors)
    functions = {"plain": plain, "together": lambda: evaluation.measure(loader, "judging", False)}
    times = Clock(device).in_turns(functions, args.rounds)
    figures = summary([a / b for a, b in zip(times["together"], times["plain"], strict=True)])
    print(
        f"{len(detectors)} methods together: {ratio(figures)} x one plain pass over {args.images} images, "
        f"{args.neighbours:,} neighbours: {', '.join(detectors)}"
    )


if __name__ == "__main__":
    main()
