"""What the detector costs, as ratios to the network's plain forward pass, all measured in one run.

    python -m lab.benchmarks.overhead                       # CPU; what `make bench` runs
    python -m lab.benchmarks.overhead --device cuda         # add --strict for float32 without TF32
    python -m lab.benchmarks.overhead --rounds 1 --batch 4 --fit-images 16 --networks WRN-40-2  # a trial

Prints a line as each thing is measured, then one table, and writes every number to a JSON file after each
network. Variants take turns: a ratio is the median, over rounds, of a variant's time over the plain forward
pass of the same round; beside it stand the quartiles. `python -m lab.benchmarks.document FILE` puts the
tables into docs/performance.md.
"""

import argparse
import itertools
import math
import statistics as stats
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gramwatch.numerics import kernels
from lab.benchmarks import memory, others, tables
from lab.benchmarks.breakdown import breakdown
from lab.benchmarks.measure import (
    Clock,
    given_up,
    machine,
    peak_on_cuda,
    read_bandwidth,
    save,
    summary,
    variant,
)
from lab.benchmarks.networks import NETWORKS, ORDERS, images
from lab.benchmarks.subject import EAGER, MEASURE, OURS, PLAIN, POOD, RELEASED, SLOW, VARIANTS, Fitted

DEFAULTS: dict[str, dict[str, int]] = {
    # How often: all variants; the slow ones; parts of the end-to-end fit, each a round; passes over them.
    "cpu": {"rounds": 7, "slow_rounds": 3, "parts": 4, "passes": 1},
    "cuda": {"rounds": 15, "slow_rounds": 5, "parts": 1, "passes": 3},
}
FIT_IMAGES: dict[str, dict[str, int]] = {
    # How many images, over all parts of a pass, the slow variants are fitted on; times are taken per image.
    "cpu": {RELEASED: 1_000, EAGER: 128, POOD: 128},
    "cuda": {RELEASED: 1_000, EAGER: 5_000, POOD: 1_000},
}
SLOW_PARTS = 3
"""Over how many of the parts the slow variants' images are spread: three, so that one slow moment of the
machine is not the median."""


def say(text: str) -> None:
    print(text, flush=True)


def measure_network(name: str, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Scoring, fitting and memory of one network."""
    clock = Clock(device)
    start = time.perf_counter()
    subject = Fitted(name, device, args.batch)
    first = time.perf_counter() - start
    slow = args.slow and subject.spec.slow
    say(
        f"{name}: batch {subject.batch}, {len(subject.taps)} taps; built, fitted, calibrated in {first:.1f} s"
    )
    row: dict[str, Any] = {
        "network": name,
        "batch": subject.batch,
        "taps": len(subject.taps),
        "activations_per_image": subject.activations,
        "statistics_bytes": subject.statistics_bytes,
        "first_use_seconds": first,
    }
    row["score"] = measure_score(subject, clock, args, slow)
    read = 4 * subject.activations * subject.batch / args.bandwidth
    plain = row["score"][PLAIN]["seconds"]
    row["read_once_seconds"] = read
    row["read_once_over_plain"] = read / stats.median(plain)
    for way in (OURS, MEASURE, EAGER, POOD, RELEASED):
        if way in row["score"]:
            extra = [mine - alone for mine, alone in zip(row["score"][way]["seconds"], plain, strict=False)]
            row["score"][way]["share_of_read_limit"] = read / max(stats.median(extra), 1e-12)
    row["breakdown"] = breakdown(subject)
    parts = (f"{name} {1000 * seconds:.2f}" for name, seconds in row["breakdown"].items())
    say(f"  milliseconds of a batch: {', '.join(parts)}")
    row["fit"] = measure_fit(subject, clock, args, slow)
    if args.memory and device.type == "cuda":
        row["memory"] = memory_on_cuda(subject, args, slow)
    elif args.memory:
        batch = subject.batch
        del subject  # its bounds, so that they need not fit in memory twice
        row["memory"] = memory_on_cpu(name, batch, args, slow)
    return row


def measure_score(subject: Fitted, clock: Clock, args: argparse.Namespace, slow: bool) -> dict[str, Any]:
    functions = subject.scoring(slow)
    if not args.slow:
        functions.pop(EAGER)
    fewer = {way: min(args.slow_rounds, args.rounds) for way in SLOW if way in functions}
    times = clock.in_turns(functions, args.rounds, fewer)
    figures = {way: variant(values, times[PLAIN], subject.batch) for way, values in times.items()}
    for way, value in figures.items():
        say(f"  score, {way}: {tables.ratio(value['ratio'])} x, {value['images_per_second']:,.1f} images/s")
    return figures


def measure_fit(subject: Fitted, clock: Clock, args: argparse.Namespace, slow: bool) -> dict[str, Any]:
    """Fitting end to end over batches that lie on the CPU, part by part in turns with the plain forward pass.

    What is compiled or allocated on first use has been before.
    """
    kind = subject.device.type
    data = images(args.fit_images or subject.spec.fit_images[kind], subject.spec.size, seed=3)
    batches = list((data.pin_memory() if kind == "cuda" else data).split(subject.batch))
    limits = FIT_IMAGES[kind] | ({RELEASED: args.released_images} if args.released_images else {})
    parts = in_parts(batches, args.parts)
    rounds: list[dict[str, tuple[float, int]]] = []
    for _ in range(args.passes):
        functions = subject.fitting(slow)
        if not args.slow:
            functions.pop(EAGER)
        for number, part in enumerate(parts):
            taken = {}
            for way, function in functions.items():
                given = part
                if way in limits:
                    if number >= SLOW_PARTS:
                        continue
                    given = first_images(part, share(limits[way], number, min(len(parts), SLOW_PARTS)))
                count = sum(map(len, given))
                if way == POOD and count < subject.classes:
                    continue  # it asks for an example of each class
                taken[way] = (clock.once(lambda f=function, g=given: f(g)), count)
            rounds.append(taken)
            say(f"  fit, round {len(rounds)} of {args.passes * len(parts)}: {taken[PLAIN][1]:,} images")
    figures = fit_summary(rounds, args.passes)
    for way, value in figures.items():
        say(
            f"  fit, {way}: {tables.ratio(value['ratio'])} x, {value['images_per_second']:,.1f} images/s "
            f"({value['images']:,} images)"
        )
    return figures


def fit_summary(rounds: list[dict[str, tuple[float, int]]], passes: int = 1) -> dict[str, Any]:
    """From seconds and images of each variant in each round: ratios of times per image."""
    figures: dict[str, Any] = {}
    for name in dict.fromkeys(name for r in rounds for name in r):
        among = [{k: seconds / count for k, (seconds, count) in r.items()} for r in rounds if name in r]
        taken = [r[name] for r in rounds if name in r]
        seconds, count = (sum(values) for values in zip(*taken, strict=True))
        figures[name] = {
            "images": count // passes,
            "seconds": [s for s, _ in taken],
            "images_per_second": count / seconds,
            "ratio": summary([r[name] / r[PLAIN] for r in among]),
            "over_ours": summary([r[name] / r[OURS] for r in among]),
        }
    return figures


def share(total: int, number: int, parts: int) -> int:
    """How many of a total the part of this number gets."""
    return total * (number + 1) // parts - total * number // parts


def in_parts(batches: list[Tensor], parts: int) -> list[list[Tensor]]:
    """The batches in as many lists of about equal length, fewer where there are fewer batches."""
    size = math.ceil(len(batches) / parts)
    return [batches[start : start + size] for start in range(0, len(batches), size)]


def first_images(batches: list[Tensor], count: int) -> list[Tensor]:
    """The first so many images, but at least one whole batch."""
    kept, left = [batches[0]], count - len(batches[0])
    for batch in batches[1:]:
        if left <= 0:
            break
        kept.append(batch[:left])
        left -= len(batch)
    return kept


def memory_on_cuda(subject: Fitted, args: argparse.Namespace, slow: bool) -> dict[str, int]:
    """Bytes at the worst moment of scoring one batch, over what was there before, by variant."""
    peaks: dict[str, int] = {}
    for way, function in subject.scoring(slow).items():
        if way != MEASURE and (args.slow or way != EAGER):
            function()
            peaks[way] = peak_on_cuda(function)
            say(f"  peak memory, {way}: {peaks[way] / 1e6:,.1f} MB")
    return peaks


def memory_on_cpu(name: str, batch: int, args: argparse.Namespace, slow: bool) -> dict[str, int]:
    """The same, by a process of its own."""
    peaks: dict[str, int] = {}
    for way, peak in memory.in_own_process(name, batch, args.threads, slow):
        peaks[way] = peak
        say(f"  peak memory, {way}: {peak / 1e6:,.1f} MB")
    return peaks


def measure_kernels(device: torch.device, bandwidth: float, rounds: int) -> list[dict[str, Any]]:
    """The statistics alone on maps of 64 MB, against reading the map once."""
    clock, rows = Clock(device), []
    cuda = device.type == "cuda"
    maps = [(64, 1024), (128, 256), (256, 64), (256, 3136), (768, 197)]
    for (channels, pixels), dtype, layout in itertools.product(
        maps,
        (torch.float32, torch.bfloat16) if cuda else (torch.float32,),
        ("channels first", "channels last"),
    ):
        examples = math.ceil(64e6 / (channels * pixels * dtype.itemsize))
        # On a GPU several maps in turn, so that no map is in its cache from before, and that launching is not
        # what is timed. On the CPU one is enough: it is larger than the caches of one machine's share.
        many = [torch.randn(examples, channels, pixels, device=device).relu_().to(dtype)]
        if layout == "channels last":
            many[0] = many[0].transpose(1, 2).contiguous().transpose(1, 2)
        many += [many[0].clone() for _ in range(3 if cuda else 0)]  # which keeps the strides
        out = torch.empty(examples, len(ORDERS), channels, device=device)

        def run(statistic: str, many: list[Tensor] = many, out: Tensor = out) -> None:
            for x in many * (5 if cuda else 1):
                kernels.compute(statistic, x, tuple(ORDERS), out)

        repeats = len(many) * (5 if cuda else 1)
        functions = {statistic: (lambda s=statistic: run(s)) for statistic in kernels.FAST}
        for statistic, times in clock.in_turns(functions, rounds).items():
            seconds = stats.median(times) / repeats
            limit = many[0].numel() * dtype.itemsize / bandwidth
            rows.append(
                {
                    "shape": [examples, channels, pixels],
                    "dtype": str(dtype).removeprefix("torch."),
                    "layout": layout,
                    "statistic": statistic,
                    "seconds": seconds,
                    "share_of_one_read": limit / seconds,
                }
            )
            say(
                f"  {examples} x {channels} x {pixels} {rows[-1]['dtype']}, {layout}, {statistic}: "
                f"{rows[-1]['share_of_one_read']:.0%} of the limit"
            )
    return rows


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lab.benchmarks.overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="variants:\n" + "\n".join(f"  {name:18}{what}" for name, what in VARIANTS.items()),
    )
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument(
        "--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS), metavar="NAME",
        help="only these: " + ", ".join(f"'{name}'" for name in NETWORKS),
    )  # fmt: skip
    for option, what in {
        "rounds": "rounds of scoring",
        "slow-rounds": "rounds in which the slow variants (eager, pytorch-ood, released) take part",
        "parts": "parts of the end-to-end fit; each is a round",
        "passes": "passes over these parts",
    }.items():
        key = option.replace("-", "_")
        usual = ", ".join(f"{values[key]} on {kind}" for kind, values in DEFAULTS.items())
        parser.add_argument(f"--{option}", type=int, default=0, help=f"{what} ({usual})")
    parser.add_argument("--batch", type=int, default=0, help="instead of each network's own")
    parser.add_argument(
        "--fit-images",
        type=int,
        default=0,
        help="images of the end-to-end fit, instead of each network's own",
    )
    parser.add_argument(
        "--released-images", type=int, default=0, help="images the released algorithm is fitted on (1,000)"
    )
    parser.add_argument("--fast-only", dest="slow", action="store_false", help="leave the slow variants out")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave peak memory out")
    parser.add_argument("--no-kernels", dest="kernels", action="store_false", help="networks only")
    parser.add_argument(
        "--strict", action="store_true", help="float32 convolutions in full precision, no TF32 (CUDA)"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of PyTorch on the CPU")
    parser.add_argument("--output", type=Path, help="the JSON file (default: overhead-DEVICE.json)")
    args = parser.parse_args(given)
    kind = torch.device(args.device).type
    for key, value in DEFAULTS.get(kind, DEFAULTS["cuda"]).items():
        setattr(args, key, getattr(args, key) or value)
    args.output = args.output or Path(f"overhead-{kind}{'-strict' if args.strict else ''}.json")
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    if args.strict:
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
    args.bandwidth = read_bandwidth(device)
    result: dict[str, Any] = {
        "kind": "overhead",
        **machine(device),
        "strict": args.strict,
        "pytorch_ood": others.version(),
        "read_bytes_per_second": args.bandwidth,
        "networks": [],
        "kernels": [],
        "kernels_given_up": [],
    }
    say(tables.where(result) + f"; reads {args.bandwidth / 1e9:,.1f} GB/s")
    for name in args.networks:
        try:
            row = measure_network(name, device, args)
        except ImportError as error:
            row = {"network": name, "left_out": str(error)}
            say(f"{name}: left out ({error})")
        result["networks"].append(row)
        result["kernels_given_up"] = given_up()
        save(args.output, result)
    if args.kernels:
        say("kernels on maps of 64 MB:")
        result["kernels"] = measure_kernels(device, args.bandwidth, args.rounds)
        result["kernels_given_up"] = given_up()
    save(args.output, result)
    say("\n" + tables.overhead(result) + "\n\n" + tables.kernels(result))
    if result["kernels_given_up"]:
        say("\nNOTE: the kernels could not be used here: 'ours' is PyTorch's form too")
    say(f"\nwritten to {args.output}")


if __name__ == "__main__":
    main()
