"""Bounds that cancel: how small row sums get beside what was summed, and what rounding then does to a score.

    python -m lab.benchmarks.cancellation --data sets --weights densenet_bc_100_12_cifar10.pth

Fits the DenseNet's ranges on CIFAR-10 training images and judges test images, with statistics in float64 and
with those of the kernel. On the test images the rounding of the kernel is compared with that of the readable
definition in float32 and with that of the network: the same network run in float64. Takes some minutes.
Writes docs/data/cancellation.json, whose figures stand in docs/method.md.
"""

import copy
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gramwatch import GramDetector
from gramwatch.inputs import networks
from gramwatch.numerics import kernels
from gramwatch.numerics.deviation import outside_range
from gramwatch.numerics.statistics import STATISTICS
from gramwatch_lab import datasets
from lab.benchmarks.measure import densenet_arguments, machine, save

SMALL = (1e-2, 1e-3, 1e-4)
ORDERS = tuple(range(1, 11))
BATCH = 20


def exact(maps: Tensor) -> Tensor:
    """Row sums of all orders in float64, rooted: `(N, orders * C)`, in float32."""
    maps = maps.double()
    power, rows = torch.ones_like(maps), []
    for p in ORDERS:
        power *= maps
        t = (power @ power.sum(1).unsqueeze(2)).squeeze(2)
        rows.append(t.sign() * t.abs() ** (1 / p))
    return torch.cat(rows, 1).float()


class Recorder:
    """Stands in for `kernels.compute`: keeps several forms of the statistics, and the sums of magnitudes."""

    def __init__(self, readable: bool) -> None:
        self.readable, self.kept = readable, defaultdict[str, list[Tensor]](list)
        self.plain = kernels.compute

    def __call__(self, statistic: str, maps: Tensor, orders: tuple[int, ...], out: Tensor) -> None:
        """Of a network in float32."""
        self.plain(statistic, maps, orders, out)
        self.kept["kernel"].append(out.flatten(1).clone())
        self.kept["float64"].append(exact(maps))
        self.kept["magnitude"].append(exact(maps.abs()))
        if self.readable:
            self.kept["readable"].append(STATISTICS[statistic](maps, orders, 1).flatten(1))

    def in_double(self, statistic: str, maps: Tensor, orders: tuple[int, ...], out: Tensor) -> None:
        """Of a network in float64."""
        self.kept["network"].append(exact(maps))
        out.copy_(self.kept["network"][-1].view(out.shape))

    def features(self, taps: int) -> dict[str, Tensor]:
        """What was kept of all batches, all taps side by side, `(N, features)`."""
        forms = {}
        for name, parts in self.kept.items():
            batches = [torch.cat(parts[start : start + taps], 1) for start in range(0, len(parts), taps)]
            forms[name] = torch.cat(batches)
        return forms


def rounding(forms: dict[str, Tensor], order: Tensor) -> list[dict[str, Any]]:
    """By order: what float32 does to a statistic before its root, in parts of the summed magnitudes.

    In the kernel and in the readable form, both of the same activations, and in the network, whose
    activations are compared with those in float64.
    """
    rows = []
    for p in ORDERS:
        chosen = order == p
        magnitude = forms["magnitude"][:, chosen].double()
        row: dict[str, Any] = {"order": p}
        for name in ("kernel", "readable", "network"):
            share, expected = (forms[form][:, chosen].double() / magnitude for form in (name, "float64"))
            error = share.sign() * share.abs() ** p - expected.sign() * expected.abs() ** p
            error = error[magnitude > 0].abs()
            row[name] = {"rms": error.square().mean().sqrt().item(), "largest": error.max().item()}
        rows.append(row)
    return rows


def cancelled(forms: dict[str, Tensor], predicted: Tensor, order: Tensor) -> list[dict[str, Any]]:
    """By odd order: the share of the bounds that are small beside the summed magnitudes of their example."""
    rows = []
    for p in order[order % 2 == 1].unique().tolist():
        chosen = order == p
        counts, bounds = dict.fromkeys(SMALL, 0), 0
        for cls in predicted.unique():
            values = forms["float64"][predicted == cls][:, chosen]
            magnitudes = forms["magnitude"][predicted == cls][:, chosen]
            for index in (values.argmin(0, keepdim=True), values.argmax(0, keepdim=True)):
                bound, magnitude = values.gather(0, index).double(), magnitudes.gather(0, index).double()
                share = (bound.abs() / magnitude)[magnitude > 0] ** p
                bounds += share.numel()
                for small in SMALL:
                    counts[small] += int((share < small).sum())
        shares = {f"{small:g}": count / bounds for small, count in counts.items()}
        rows.append({"order": p, "bounds": bounds, **shares})
    return rows


def each_deviation(train: Tensor, train_class: Tensor, test: Tensor, test_class: Tensor) -> Tensor:
    """Eq. 3 of every statistic of every test image, in float64."""
    deviations = torch.zeros(test.shape, dtype=torch.float64)
    for cls in test_class.unique():
        own, judged = train[train_class == cls].double(), test_class == cls
        deviations[judged] = outside_range(test[judged].double(), own.amin(0), own.amax(0))
    return deviations


def scores(deviations: Tensor, tap: Tensor) -> Tensor:
    """What every statistic adds to Eq. 5, with E[delta_l] over the same images."""
    sums = deviations.new_zeros(len(deviations), int(tap.max()) + 1).index_add_(1, tap, deviations)
    return deviations / (sums.mean(0) + 1e-7)[tap]


def judged(
    train: dict[str, Tensor],
    train_class: Tensor,
    test: dict[str, Tensor],
    test_class: Tensor,
    tap: Tensor,
    order: Tensor,
) -> dict[str, Any]:
    """How far one statistic decides a score, and how far the score depends on the arithmetic."""
    totals: dict[str, Tensor] = {}
    figures: dict[str, Any] = {}
    for name in ("float64", "kernel"):
        part = scores(each_deviation(train[name], train_class, test[name], test_class), tap)
        totals[name] = part.sum(1)
        if name == "float64":
            largest, which = part.max(1)
            alone = largest > totals[name] / 2
            figures["one_statistic_is_over_half"] = alone.double().mean().item()
            figures["of_these_order_1"] = int((order[which[alone]] == 1).sum())
            figures["largest_share"] = (largest / totals[name].clamp_min(1e-30)).max().item()
    difference = ((totals["kernel"] - totals["float64"]) / totals["float64"].clamp_min(1e-30)).abs()
    figures["kernel"] = {"median": difference.median().item(), "largest": difference.max().item()}
    return figures


def page(result: dict[str, Any]) -> str:
    """The figures as docs/method.md shows them."""
    bounds, errors, scores = result["cancelled"], result["rounding"][::2], result["scores"]
    rows = [("", [f"order {row['order']}" for row in bounds]), ("---", ["---"] * len(bounds))]
    rows += [(f"bounds below {s:g}", [f"{row[f'{s:g}']:.2%}" for row in bounds]) for s in SMALL]
    for name, where in (("kernel", "kernel"), ("readable", "readable form"), ("network", "network")):
        rows.append((f"rounding, {where}", [f"{row[name]['rms']:.1e}" for row in errors]))
        rows.append(("the largest", [f"{row[name]['largest']:.1e}" for row in errors]))
    lines = [f"| {label} | {' | '.join(cells)} |" for label, cells in rows]
    return "\n".join(lines) + (
        f"\n\n{result['train']:,} training and {result['test']:,} test images. One statistic makes more than "
        f"half of the score of {scores['one_statistic_is_over_half']:.1%} of the test images.\n"
        f"The largest share of one statistic is {scores['largest_share']:.0%}. "
        f"The kernel's scores differ from those in float64 by {scores['kernel']['median']:.0e} in the\n"
        f"median, by {scores['kernel']['largest']:.0e} at most."
    )


def main() -> None:
    """Measure and write."""
    args = densenet_arguments(__doc__, 1000, 300, Path("docs/data/cancellation.json"))
    loaded = networks.load("densenet", args.weights)
    detector = GramDetector(loaded.network, taps="paper", orders=ORDERS)
    batches = {}
    for split, count in (("train", args.train), ("test", args.test)):
        images = datasets.load("cifar10", args.data, split=split, count=count).images
        batches[split] = loaded.prepare(images).split(BATCH)
    recorders = {split: Recorder(readable=split == "test") for split in batches}
    with mock.patch.object(kernels, "compute", recorders["train"]):
        detector.fit(batches["train"], progress=False)
    with mock.patch.object(kernels, "compute", recorders["test"]):
        test_class = detector.measure_all(batches["test"], progress=False).predicted
    double = GramDetector(copy.deepcopy(loaded.network).double(), taps="paper", orders=ORDERS)
    with mock.patch.object(kernels, "compute", recorders["test"].in_double):
        double.fit([part.double() for part in batches["test"]], progress=False)
    with torch.no_grad():
        train_class = torch.cat([loaded.network(part).argmax(1) for part in batches["train"]])
    train, test = (recorder.features(len(detector.taps)) for recorder in recorders.values())
    at = [detector.needs.statistics.at(tap) for tap in detector.taps]
    sizes = [(len(bounds.orders), bounds.features) for bounds in at]
    order = torch.cat([torch.tensor(ORDERS).repeat_interleave(features) for _, features in sizes])
    tap = torch.cat([torch.full((n * features,), t) for t, (n, features) in enumerate(sizes)])
    result: dict[str, Any] = {
        "kind": "cancellation",
        **machine(torch.device("cpu")),
        "train": args.train,
        "test": args.test,
        "cancelled": cancelled(train, train_class, order),
        "rounding": rounding(test, order),
        "scores": judged(train, train_class, test, test_class, tap, order),
    }
    save(args.output, result)
    print(page(result))
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
