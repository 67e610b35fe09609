"""Calibrations that rehearse: the false alarms of many of them, and how long one takes.

    python -m lab.benchmarks.calibrations --data sets --weights weights

A guard with default settings is fitted to the small convolutional network for MNIST, whose weights
`--weights` holds. It is calibrated again and again, each time on other test images and with another seed, and
judges test images that are left. The mean rate is compared with what is promised,
floor(0.05 (n + 1)) / (n + 1) for n images that rank. The time is that of `calibrate` over that of a plain
pass over the same images, on ResNet-50 at 224 x 224 pixels. Writes docs/data/calibrations.json and its
figures into docs/guard.md. Takes about an hour on one core.
"""

import argparse
import json
import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from tqdm.auto import tqdm

from gramwatch import Guard
from gramwatch.inputs import networks
from gramwatch_lab import datasets
from lab.benchmarks import document
from lab.benchmarks.cells import DOCS

RESULTS = DOCS / "data" / "calibrations.json"
SIZES = (100, 400, 2_000)
"""The numbers of calibration images."""
FITTED, JUDGED, BATCH, LEVEL = 3_000, 500, 200, 0.95
TIMED = 1_000
"""The number of calibration images of the timed calibration."""


_MADE: dict[str, Any] = {}
"""What a process makes once: the fitted guard, and the images that calibrate it or are judged."""


def prepare(data: Path, weights: Path) -> None:
    """Fit the guard of this process. Every process fits the same."""
    torch.set_num_threads(1)
    loaded = networks.load("mnist_convnet", weights / "mnist_convnet_baseline.pth")
    train = datasets.load("mnist", data, split="train", count=FITTED).images
    _MADE["pool"] = loaded.prepare(datasets.load("mnist", data, split="test").images)
    _MADE["guard"] = Guard(loaded.network, level=LEVEL)
    _MADE["guard"].fit(map(loaded.prepare, train.split(BATCH)), progress=False)


def rate_of(task: tuple[int, int]) -> tuple[int, float]:
    """How many images rank, and the rate of false alarms, in one calibration: its size and its seed."""
    size, seed = task
    guard, pool = _MADE["guard"], _MADE["pool"]
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))
    guard.calibrate(pool[order[:size]].split(BATCH), seed=seed, progress=False)
    alarms = guard(pool[order[size : size + JUDGED]]).is_ood
    return len(guard.calibration_scores_), float(alarms.double().mean())


def measure_rates(results: dict[str, Any], data: Path, weights: Path, times: int, workers: int) -> None:
    """Add the rate of false alarms of calibrations that are not in `results` yet, and write them."""
    rows = results.setdefault("alarms", [{"images": size, "ranking": 0, "rates": []} for size in SIZES])
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, prepare, (data, weights)) as pool:
        for row in rows:
            tasks = [(row["images"], seed) for seed in range(len(row["rates"]), times)]
            about = {"desc": f"{row['images']} images", "unit": "calibration", "total": len(tasks)}
            for row["ranking"], rate in tqdm(pool.map(rate_of, tasks), **about):
                row["rates"].append(rate)
                write(results)


def write(results: dict[str, Any]) -> None:
    """Write the results. A further run goes on from there."""
    RESULTS.write_text(json.dumps(results) + "\n", encoding="utf-8")


def seconds_of(count: int) -> dict[str, float]:
    """The processor's seconds of a plain pass, and of `calibrate` with and without rehearsal."""
    from torchvision.models import resnet50

    torch.manual_seed(0)
    model = resnet50().eval()
    images = torch.rand(count, 3, 224, 224)
    guard = Guard(model).fit(images[:64].split(32), progress=False)

    def seconds(work: Any) -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    def plain() -> None:
        with torch.inference_mode():
            for batch in images.split(32):
                model(batch)

    plain_seconds = seconds(plain)
    rehearsed = seconds(lambda: guard.calibrate(images.split(32), progress=False))
    guard.rehearse = False
    not_rehearsed = seconds(lambda: guard.calibrate(images.split(32), progress=False))
    return {"images": count, "plain": plain_seconds, "rehearsed": rehearsed, "not_rehearsed": not_rehearsed}


def promised(ranking: int) -> float:
    """The rate of false alarms that is promised with so many images that rank."""
    return math.floor((1 - LEVEL) * (ranking + 1) + 1e-9) / (ranking + 1)


def alarms_table(results: list[dict[str, Any]]) -> str:
    """The mean rate over calibrations, with its Monte-Carlo interval, beside the promise."""
    lines = [
        "| calibration images | that rank | calibrations | promised | measured | 95 % interval of the mean |",
        "| ---: |" + " ---: |" * 5,
    ]
    for row in results:
        rates, mean = row["rates"], fmean(row["rates"])
        error = 1.96 * stdev(rates) / len(rates) ** 0.5
        interval = f"{100 * (mean - error):.2f} to {100 * (mean + error):.2f} %"
        numbers = [f"{row['images']:,}", f"{row['ranking']:,}", f"{len(rates):,}"]
        cells = [*numbers, f"{100 * promised(row['ranking']):.2f} %", f"{100 * mean:.2f} %", interval]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def time_told(seconds: dict[str, float]) -> str:
    """How many plain passes `calibrate` takes."""
    with_it, without = (seconds[kind] / seconds["plain"] for kind in ("rehearsed", "not_rehearsed"))
    return (
        f"On the CPU, with ResNet-50 at 224 x 224, `calibrate` on {seconds['images']:,} images takes "
        f"{with_it:.1f} times as long as the plain network takes for these images; {without:.1f} times "
        "without rehearsal."
    )


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of the expanded sets")
    parser.add_argument("--weights", type=Path, help="the folder of the weights")
    parser.add_argument("--times", type=int, default=300, help="the number of calibrations of each size")
    parser.add_argument("--workers", type=int, default=1, help="the number of processes")
    parser.add_argument("--only", choices=("alarms", "time"), help="measure only these")
    args = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if args.only != "time":
        measure_rates(results, args.data, args.weights, args.times, args.workers)
    if args.only != "alarms":
        results["seconds"] = seconds_of(TIMED)
    write(results)
    document.write()


if __name__ == "__main__":
    main()
