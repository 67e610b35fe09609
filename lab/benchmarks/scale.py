"""What docs/scale.md says of several processes: exactness, speed-up, failures, memory, traffic, hours.

    python -m lab.benchmarks.scale                  # all parts, about ten minutes on two cores
    python -m lab.benchmarks.scale speed            # one part: exactness, speed, killed, memory, large

torchrun starts the processes, as for a user. Writes docs/data/scale.json, and its figures into docs/scale.md.
Hours are computed from the measured rates in docs/data/overhead-*.json.
"""

import argparse
import json
import math
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gramwatch import Guard
from gramwatch.cli import launch
from gramwatch.detect import exchange
from gramwatch.inputs.demo import digits, small_convnet, train
from gramwatch.methods.features import BankMethod
from gramwatch.methods.gaussians import ClassDistances
from gramwatch.methods.image import Image
from gramwatch.methods.profile import Profile
from lab.benchmarks import document, scale_ranks
from lab.benchmarks.cells import DOCS
from lab.benchmarks.measure import EVERY_TENSOR_ITS_OWN, machine, save
from lab.benchmarks.networks import build, images

RANKS = (1, 2, 3, 4, 8)
SETS = {"ImageNet-1k": (1_281_167, 1_000), "ImageNet-21k": (14_197_122, 21_841)}
"""Images and classes."""
LARGE = {"ResNet-50 at 224": "resnet50", "ViT-B/16 at 224": "vit_base_patch16_224"}


def torchrun(ranks: int, *words: object, environment: dict[str, str] | None = None) -> None:
    """Run `lab.benchmarks.scale_ranks` in so many processes of one thread each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "lab.benchmarks.scale_ranks", *map(str, words)]
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env={**os.environ, **threads, **(environment or {})})


def read(folder: Path) -> list[dict[str, float]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


# --- exactness ---------------------------------------------------------------------------------------


def kind_of(name: str) -> str:
    """What a tensor of a file is: `bounds`, `counts`, `sums`, or computed from these."""
    last = name.split()[-1].rpartition(".")[2]
    if last in ("minimum", "maximum", "exponent"):
        return "bounds"
    if last in ("class_counts", "counts_", "count_", "count"):
        return "counts"
    return "sums" if last in ("sums_", "products_", "mean", "mean_", "squares") else "computed"


def differing(values: dict[str, Tensor], expected: dict[str, Tensor], kind: str) -> tuple[int, int]:
    """How many numbers differ, and how many there are."""
    names = [name for name in expected if kind_of(name) == kind]
    return (
        sum(int((values[name] != expected[name]).sum()) for name in names),
        sum(expected[name].numel() for name in names),
    )


def largest(values: dict[str, Tensor], expected: dict[str, Tensor], names: list[str]) -> float:
    """The largest difference, relative to the largest number of its tensor."""
    return max(
        float((values[name] - expected[name]).abs().max() / expected[name].abs().max()) for name in names
    )


def compared(values: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Any]:
    sums = [name for name in expected if kind_of(name) == "sums"]
    bounds, numbers = differing(values, expected, "bounds")
    return {
        "bounds": numbers,
        "bounds_differing": bounds,
        "counts_differing": differing(values, expected, "counts")[0],
        "sums": sum(expected[name].numel() for name in sums),
        "sums_difference": largest(values, expected, sums),
        "score_difference": largest(values, expected, ["score"]),
        "p_values": len(expected["p_value"]),
        "p_values_differing": int((values["p_value"] != expected["p_value"]).sum()),
    }


def exactness() -> list[dict[str, Any]]:
    """Every number of ranks and every kind of loader, compared with one process on the same batches."""
    rows = []
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data, model = digits(), small_convnet()
    train(model, data.train, data.train_labels)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(model.state_dict(), folder / "weights.pt")
        for ranks in RANKS:
            torchrun(ranks, "exactness", folder, folder / "weights.pt")
            for loader in scale_ranks.LOADERS:
                parts = scale_ranks.parts_of(data.train, loader, ranks)
                in_order = data.train.split(scale_ranks.BATCH)
                batches = in_order if loader == "dealt out" else [batch for part in parts for batch in part]
                expected = scale_ranks.results(model, batches)
                results = [torch.load(folder / f"{loader}-{rank}of{ranks}.pt") for rank in range(ranks)]
                same = all(torch.equal(results[0][key], result[key]) for result in results for key in result)
                examples = [sum(map(len, part)) for part in parts]
                row = {"ranks": ranks, "loader": loader, "examples": examples, "all_ranks_equal": same}
                rows.append(row | compared(results[0], expected))
                print(json.dumps(rows[-1]), flush=True)
    return rows


# --- speed-up, failures, memory ----------------------------------------------------------------------


QUIET = 0.1
"""Cores that other programs may use before a run of the speed-up begins."""


def busy_seconds() -> float:
    """CPU seconds that all programs of this machine have used since it started."""
    user, nice, system, _, _, *interrupts = (
        int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:8]
    )
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def wait_until_quiet(patience: float) -> None:
    """Wait until other programs use few cores, at most so many seconds."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        before = busy_seconds()
        time.sleep(2)
        if busy_seconds() - before <= 2 * QUIET:
            return


def speed(
    rounds: int, patience: float = 0, name: str = "WRN-40-2", count: int = 1_024, batch: int = 64
) -> dict[str, Any]:
    """One process and two, of one thread each, in turns."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    cpu: dict[int, list[float]] = {1: [], 2: []}
    others = []
    for turn in range(rounds):
        for ranks in (1, 2) if turn % 2 == 0 else (2, 1):
            wait_until_quiet(patience)
            busy, own, start = busy_seconds(), _of_children(), time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                torchrun(ranks, "speed", folder, name, count, batch)
                seconds[ranks].append(max(record["seconds"] for record in read(Path(folder))))
                cpu[ranks].append(max(record["cpu"] for record in read(Path(folder))))
            foreign = busy_seconds() - busy - (_of_children() - own)
            others.append(max(0.0, foreign / (time.monotonic() - start)))
            took = f"{seconds[ranks][-1]:.2f} s, {cpu[ranks][-1]:.2f} s of the busiest process"
            print(f"{ranks} process(es): {took}, other programs used {others[-1]:.2f} cores", flush=True)
    pairs = [one / two for one, two in zip(seconds[1], seconds[2], strict=True)]
    return {
        "network": name,
        "images": count,
        "batch": batch,
        "seconds": {str(ranks): values for ranks, values in seconds.items()},
        "cpu_seconds": {str(ranks): values for ranks, values in cpu.items()},
        "cpu_speed_up": statistics.median(cpu[1]) / statistics.median(cpu[2]),
        "speed_up": statistics.median(pairs),
        "least": min(pairs),
        "most": max(pairs),
        "best": min(seconds[1]) / min(seconds[2]),
        "others": others,
    }


def _of_children() -> float:
    """CPU seconds of the processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def killed(ranks: int = 3, unlucky: int = 1) -> dict[str, Any]:
    """Seconds from `kill -9` of a rank to the end of the others, by themselves and under torchrun."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "lab.benchmarks.scale_ranks", "endless", name]
        processes = [
            subprocess.Popen(
                command,
                env=launch._environment(rank, ranks, store.port),
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        _until_ready(Path(name), ranks)
        processes[unlucky].send_signal(signal.SIGKILL)
        start = time.monotonic()
        said = [process.communicate(timeout=60)[1] for process in processes]
        took = time.monotonic() - start
    last = [text.strip().splitlines()[-1] for rank, text in enumerate(said) if rank != unlucky]
    result = {"ranks": ranks, "unlucky": unlucky, "seconds": took, "said": last}
    return result | {"silent": exchange.SILENT, "torchrun_seconds": _killed_under_torchrun(ranks, unlucky)}


def _killed_under_torchrun(ranks: int, unlucky: int) -> float:
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(ranks), "-m", "lab.benchmarks.scale_ranks", "endless", name]
        whole = subprocess.Popen(
            command, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        _until_ready(Path(name), ranks)
        os.kill(int((Path(name) / f"ready-{unlucky}").read_text()), signal.SIGKILL)
        start = time.monotonic()
        whole.wait(timeout=60)
        return time.monotonic() - start


def _until_ready(folder: Path, ranks: int) -> None:
    end = time.monotonic() + 120
    while len(list(folder.glob("ready-*"))) < ranks:
        if time.monotonic() > end:
            raise SystemExit("the ranks did not begin within two minutes")
        time.sleep(0.1)


def memory(ranks: int = 2, classes: int = 2_000, channels: int = 1_536) -> dict[str, Any]:
    """The peak memory of a fit, and the time of an exchange over the loopback."""
    figures = {}
    for count in (1, ranks):
        with tempfile.TemporaryDirectory() as folder:
            torchrun(count, "memory", folder, classes, channels, environment=EVERY_TENSOR_ITS_OWN)
            figures[count] = read(Path(folder))
    state = figures[1][0]["state"]
    return {
        "state": state,
        "alone": figures[1][0]["peak"] / state,
        "ranks": ranks,
        "peaks": [figure["peak"] / state for figure in figures[ranks]],
        "exchange_seconds": max(figure["seconds"] for figure in figures[ranks]) - figures[1][0]["seconds"],
    }


# --- large sets --------------------------------------------------------------------------------------


WATCHED: dict[str, dict[str, Any]] = {
    "lean": {},
    "ends": {"taps": "ends"},
    "full effort": {"effort": "full"},
}
"""What Gram watches inside a guard, in words, and the options of the guard."""


def state_bytes(guard: Guard, classes: int, examples: int, half: bool = False) -> int:
    """The size of a fitted guard's state with another number of classes and of training examples."""
    total = 0
    for member in guard.leaves:
        if isinstance(member, BankMethod):
            assert member.bank_ is not None
            total += min(examples, member.most_examples) * (4 * member.bank_.shape[1] + 8)
        if isinstance(member, Image):
            assert member.sum_ is not None
            total += 8 * (len(member.sum_) + len(member.sum_) ** 2)
        if isinstance(member, ClassDistances):
            assert member.widths_ is not None
            widths, means = member.widths_.tolist(), 1 if isinstance(member, Profile) else classes
            total += 8 * (means + sum(2 * means * w + 2 * w * w + w for w in widths))
        elif member.needs.statistics is not None:
            numbers = sum(member.needs.statistics.at(tap).size for tap in member.taps)
            total += classes * (8 + numbers * (4 if half else 8))
    return total


def decoding(images_read: int = 200) -> float:
    """JPEG photographs of 640 x 427 that one core decodes, resizes and normalises in a second."""
    from sklearn import datasets

    from gramwatch.inputs.preprocessing import Preprocessing
    from gramwatch.inputs.readers import Images

    torch.set_num_threads(1)
    path = Path(datasets.__file__).parent / "images" / "china.jpg"
    prepare = Preprocessing((224, 224), 256, "bilinear", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    rates = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in Images([str(path)] * images_read, prepare, batch_size=50):
            pass
        rates.append(images_read / (time.perf_counter() - start))
    return max(rates)


def large() -> dict[str, Any]:
    """The sizes of states, and the rates from which hours follow."""
    rows = []
    for name in LARGE:
        model = build(name, torch.device("cpu"))
        for taps, options in WATCHED.items():
            guard = Guard(model, **options).fit([images(8, 224, seed=1)], progress=False)
            sizes = {
                data: {
                    "float32": state_bytes(guard, classes, examples),
                    "float16": state_bytes(guard, classes, examples, half=True),
                }
                for data, (examples, classes) in SETS.items()
            }
            rows.append({"network": name, "taps": taps, "states": sizes})
            print(json.dumps(rows[-1]), flush=True)
    rates = {place: _fit_rates(place) for place in ("cuda-strict", "cpu")}
    return {"rows": rows, "images_per_second": rates, "decoded_per_second": decoding()}


def _fit_rates(place: str) -> dict[str, float]:
    run = json.loads((DOCS / "data" / f"overhead-{place}.json").read_text(encoding="utf-8"))
    rates = {row["network"]: row["fit"]["ours"]["images_per_second"] for row in run["networks"]}
    return {name: rates[name] for name in LARGE}


def hours(images_in_set: int, rate: float, processes: int, share: float) -> float:
    """Hours of a fit. `share` is the speed of each of several processes over that of one alone."""
    return images_in_set / (rate * processes * (share if processes > 1 else 1)) / 3600


def exchanged(state: int, ranks: int) -> dict[str, int]:
    """Bytes of an exchange: in all, and through the busiest rank, rank 0, in each direction."""
    return {"all": 2 * (ranks - 1) * state, "busiest": math.ceil(math.log2(ranks)) * state}


# --- the page ----------------------------------------------------------------------------------------


def exactness_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| ranks | loader | examples of each rank | minima and maxima that differ | counts that differ "
        "| sums, largest difference | scores, largest difference | p-values that differ |",
        "| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = [
            f"{row['ranks']}",
            row["loader"],
            ", ".join(map(str, row["examples"])),
            f"{row['bounds_differing']} of {row['bounds']:,}",
            f"{row['counts_differing']}",
            f"{row['sums_difference']:.0e}",
            f"{row['score_difference']:.0e}",
            f"{row['p_values_differing']} of {row['p_values']}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def size(count: float) -> str:
    """Bytes in words."""
    for unit, power in (("TB", 12), ("GB", 9), ("MB", 6)):
        if count >= 10**power:
            value = count / 10**power
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{count / 1e3:.0f} kB"


def speed_text(figures: dict[str, Any]) -> str:
    one, two = (min(figures["seconds"][key]) for key in ("1", "2"))
    others = figures["others"]
    return (
        f"| {figures['network']}, {figures['images']:,} images | "
        f"seconds, best of {len(figures['seconds']['1'])} | images/s |\n| --- | ---: | ---: |\n"
        f"| one process | {one:.1f} | {figures['images'] / one:.0f} |\n"
        f"| two processes | {two:.1f} | {figures['images'] / two:.0f} |\n\n"
        f"The speed-up is {figures['best']:.2f} by the best times. In neighbouring runs it is "
        f"{figures['least']:.2f} to {figures['most']:.2f}, in the median {figures['speed_up']:.2f}. "
        f"Other programs used {min(others):.2f} to {max(others):.2f} of the two cores meanwhile."
    )


def killed_text(figures: dict[str, Any]) -> str:
    return (
        f"`kill -9` of rank {figures['unlucky']} of {figures['ranks']}: the other processes ended after "
        f"{figures['seconds']:.0f} seconds with the message below. Under torchrun all ended after "
        f"{figures['torchrun_seconds']:.0f} seconds, because torchrun ends them.\n\n    {figures['said'][0]}"
    )


def memory_text(figures: dict[str, Any]) -> str:
    peaks = " and ".join(f"{peak:.1f}" for peak in figures["peaks"])
    return (
        f"With a state of {size(figures['state'])}, the peak of a fit over what was there before was "
        f"{figures['alone']:.1f} times the state in one process, and {peaks} times in the two ranks "
        f"of a run. Joining the states and giving the result to both took "
        f"{figures['exchange_seconds']:.1f} seconds over the loopback."
    )


def sizes_table(figures: dict[str, Any]) -> str:
    lines = [
        "| network | Gram's taps | " + " | ".join(f"{name}, float32 | float16" for name in SETS) + " |",
        "| --- | --- | " + " | ".join("---: | ---:" for _ in SETS) + " |",
    ]
    for row in figures["rows"]:
        cells = [size(row["states"][name][kind]) for name in SETS for kind in ("float32", "float16")]
        lines.append(f"| {row['network']} | {row['taps']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rates_table(figures: dict[str, Any]) -> str:
    rates = figures["images_per_second"]
    lines = ["| network | H200, images/s | two CPU threads, images/s |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {rates['cuda-strict'][name]:,.0f} | {rates['cpu'][name]:.1f} |" for name in LARGE]
    decoded = f"{figures['decoded_per_second']:.0f} photographs of 640 x 427 in a second"
    return "\n".join([*lines, "", f"One core decodes and resizes {decoded}."])


def hours_table(figures: dict[str, Any], share: float, peak: float) -> str:
    lines = [
        "| set | network | one GPU | eight GPUs | cores that decode for eight | one CPU of two cores "
        "| memory of a rank | traffic of eight ranks | of it to rank 0 |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, (count, _) in SETS.items():
        for network in LARGE:
            gpu, cpu = (figures["images_per_second"][place][network] for place in ("cuda-strict", "cpu"))
            (row,) = [row for row in figures["rows"] if (row["network"], row["taps"]) == (network, "lean")]
            state = row["states"][name]["float32"]
            sent = exchanged(state, 8)
            cells = [
                name,
                network,
                *(f"{hours(count, gpu, processes, share):.2f} h" for processes in (1, 8)),
                f"{math.ceil(8 * gpu * share / figures['decoded_per_second'])}",
                f"{hours(count, cpu, 1, share):,.0f} h",
                size(peak * state),
                size(sent["all"]),
                size(sent["busiest"]),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def pages(result: dict[str, Any]) -> dict[str, str]:
    """The generated parts of docs/scale.md, by name."""
    share = result["speed"]["best"] / 2
    return {
        "exactness": exactness_table(result["exactness"]),
        "speed": speed_text(result["speed"]),
        "killed": killed_text(result["killed"]),
        "memory": memory_text(result["memory"]),
        "sizes": sizes_table(result["large"]),
        "rates": rates_table(result["large"]),
        "hours": hours_table(result["large"], share, max(result["memory"]["peaks"])),
    }


def main() -> None:
    parts = {"exactness": exactness, "killed": killed, "memory": memory, "large": large}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", help="the parts to measure (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="of the speed-up")
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait for a quiet machine")
    parser.add_argument("--output", type=Path, default=DOCS / "data" / "scale.json")
    args = parser.parse_args()
    result: dict[str, Any] = {"kind": "scale"}
    if args.output.is_file():
        result = json.loads(args.output.read_text(encoding="utf-8"))
    result |= machine(torch.device("cpu"))
    for part in args.parts or [*parts, "speed"]:
        result[part] = speed(args.rounds, args.patience) if part == "speed" else parts[part]()
        save(args.output, result)
    result = json.loads(args.output.read_text(encoding="utf-8"))
    document.write()


if __name__ == "__main__":
    main()
