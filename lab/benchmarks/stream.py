"""`gramwatch score` over many images: its memory, and whether decoding holds it up.

    python -m lab.benchmarks.stream                    # 100,000 images; about 5 minutes on two cores
    python -m lab.benchmarks.stream --draw             # the picture again, from docs/data/stream.json

Memory: 100,000 small images, links to 200 files, judged by the demo's network. Every half second, the memory
of the command and of its workers is read, and the number of rows that are written. Memory that processes
share counts once.

Workers: three cases, from images that are quickly read to large photographs before a small network, with 0 to
3 decoding workers. And the processor time of decoding and of judging an image, which other programs on the
machine change little: where decoding takes more, it holds the command up.

Writes docs/data/stream.json and draws docs/images/stream_memory.png.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gramwatch.cli.common import default_workers, opened_guard
from gramwatch.cli.options import NetworkOptions
from gramwatch.explain.frame import DPI, FAINT, INK, SMALL, SOFT, TEXT, TITLE, WIDTH, pyplot, write_picture
from gramwatch.inputs.decoding import as_arrays, pillow_image
from gramwatch.inputs.demo import digits, photograph_patches, small_convnet, train
from gramwatch.inputs.foreign import imported
from gramwatch.inputs.readers import Images
from gramwatch_lab.figures.looks import looks_of
from lab.benchmarks.measure import machine, save

IMAGES = 100_000
DATA, PICTURE = Path("docs/data/stream.json"), Path("docs/images/stream_memory.png")
DIGITS = (
    "gramwatch.inputs.demo:small_convnet",
    "--size",
    "8",
    "--resize",
    "bilinear",
    "--mean",
    "0",
    "--std",
    "1",
)
RESNET = "timm:resnet18"
CASES = {
    # What it is, the network, the side of the images, and how many are judged.
    "small": ("photographs of 128 x 128, ResNet-18 at 128", RESNET, 128, 500),
    "large": ("photographs of 2,048 x 2,048, ResNet-18 at 128", RESNET, 2048, 100),
    "digits": ("digits of 8 x 8, the demo's network", DIGITS[0], 8, 10_000),
}
WEIGHTS = {DIGITS[0]: "net.safetensors", RESNET: "resnet18.safetensors"}
WORKERS = (0, 1, 2, 3)


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "gramwatch", *map(str, words)]


def told(*words: object) -> dict[str, Any]:
    """Run a command, and read the summary that it prints."""
    done = subprocess.run(command(*words, "--json", "-q"), check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"gramwatch {' '.join(map(str, words))}: {done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def linked(files: list[Path], folder: Path, count: int) -> Path:
    """A folder of links to files, each as often as needed."""
    folder.mkdir()
    for number in range(count):
        os.link(files[number % len(files)], folder / f"{number:06d}{files[0].suffix}")
    return folder


def written(images: torch.Tensor, folder: Path) -> list[Path]:
    """Images as PNG files."""
    folder.mkdir(parents=True)
    for number, array in enumerate(as_arrays(images)):
        pillow_image().fromarray(array).save(folder / f"{number:04d}.png")
    return sorted(folder.iterdir())


def pixels(images: torch.Tensor) -> torch.Tensor:
    return images.mul(255).round().byte()


# --- memory ------------------------------------------------------------------------------------------


def family(process: int) -> Iterator[int]:
    """A process and all processes that it started."""
    yield process
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # it has just ended
            for child in thread.read_text().split():
                yield from family(int(child))


def memory(process: int) -> int:
    """Bytes of a process and its children. What they share counts once."""
    total = 0
    for member in family(process):
        with suppress(OSError):  # it has just ended
            lines = Path(f"/proc/{member}/smaps_rollup").read_text().splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def rows_in(file: Path, known: list[int]) -> int:
    """The number of rows in a file that grows. `known`: where the last look ended, the lines till there."""
    if file.exists():
        with file.open("rb") as opened:
            opened.seek(known[0])
            new = opened.read()
        known[:] = [known[0] + len(new), known[1] + new.count(b"\n")]
    return max(0, known[1] - 1)  # the first line says what is scored


def watched(*words: object, output: Path, every: float = 0.5) -> dict[str, Any]:
    """Run a command, and look at its memory and its rows until it ends."""
    known, seen, start = [0, 0], [], time.monotonic()
    with subprocess.Popen(command(*words, "-o", output, "-q", "--json"), stdout=subprocess.PIPE) as process:
        while process.poll() is None:
            rows, used = rows_in(output.with_name(f"{output.name}.part"), known), memory(process.pid)
            seen.append((time.monotonic() - start, rows, used))
            time.sleep(every)
        assert process.stdout is not None
        summary = json.load(process.stdout)
    if process.returncode:
        raise SystemExit(f"the command ended with code {process.returncode}")
    seen = [sample for sample in seen if sample[2]]  # the last look may find that it has ended
    return {
        "images": summary["images"],
        "seconds": summary["seconds"],
        "at": [round(at, 2) for at, _, _ in seen],
        "rows": [rows for _, rows, _ in seen],
        "mib": [round(used / 2**20, 1) for _, _, used in seen],
    }


def flatness(memory: dict[str, Any]) -> dict[str, float]:
    """The memory over the second tenth of the images, and over the last tenth: the largest, in MiB."""
    tenth = memory["images"] / 10

    def largest(low: float, high: float) -> float:
        return max(m for m, rows in zip(memory["mib"], memory["rows"], strict=True) if low <= rows <= high)

    return {"second_tenth": largest(tenth, 2 * tenth), "last_tenth": largest(9 * tenth, 10 * tenth)}


def guard_of_digits(folder: Path) -> Path:
    """The demo's network, guarded by the commands of docs/cli.md."""
    data = digits()
    torch.manual_seed(0)
    network = small_convnet()
    train(network, data.train, data.train_labels)
    save_file(network.state_dict(), folder / "net.safetensors")
    written(pixels(data.train), folder / "train")
    written(pixels(data.test), folder / "validation")
    guard = folder / "digits.safetensors"
    told("fit", *DIGITS, folder / "train", "--weights", folder / "net.safetensors",
         "--calibrate", folder / "validation", "-o", guard)  # fmt: skip
    return guard


def measured_memory(folder: Path, guard: Path, count: int) -> dict[str, Any]:
    shown = torch.cat([digits().validation[:100], photograph_patches(100)])
    images = linked(written(pixels(shown), folder / "shown"), folder / "many", count)
    memory = watched("score", guard, images, "--model", DIGITS[0], output=folder / "scores.csv")
    return {**memory, **flatness(memory), "workers": default_workers()}


# --- workers -----------------------------------------------------------------------------------------


def photographs(side: int, folder: Path) -> list[Path]:
    """200 pieces of scikit-learn's two photographs as JPEG files of one size."""
    from sklearn.datasets import load_sample_images

    folder.mkdir()
    wholes = [pillow_image().fromarray(array) for array in load_sample_images().images]
    for number in range(200):
        left = top = number
        piece = wholes[number % 2].crop((left, top, left + 220, top + 220)).resize((side, side))
        piece.save(folder / f"{number:03d}.jpg", quality=90)
    return sorted(folder.iterdir())


def guard_of_photographs(folder: Path) -> Path:
    """A guard for a ResNet-18 of random weights: time does not depend on them."""
    torch.manual_seed(0)
    network = imported("timm").create_model("resnet18")
    save_file(network.state_dict(), folder / "resnet18.safetensors")
    images = folder / "fitted"
    photographs(128, images)
    guard = folder / "resnet18_guard.safetensors"
    told("fit", RESNET, images, "--weights", folder / WEIGHTS[RESNET], "--size", 128, "-o", guard)
    return guard


def measured_workers(
    folder: Path, guards: dict[str, Path], rounds: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Images each second for each number of workers: the best of the rounds, since other work only adds."""
    for name, (about, network, side, count) in CASES.items():
        if name == "digits":
            files = written(pixels(digits().validation), folder / "files_digits")
        else:
            files = photographs(side, folder / f"files_{name}")
        images = linked(files, folder / name, count)
        rates: dict[int, list[float]] = {workers: [] for workers in WORKERS}
        for turn in range(rounds):
            for workers in WORKERS[:: -1 if turn % 2 else 1]:
                summary = told("score", guards[network], images, "--model", network, "--workers", workers,
                               "--weights", guards[network].with_name(WEIGHTS[network]),
                               "-o", folder / "workers.csv", "--overwrite")  # fmt: skip
                rates[workers].append(summary["images"] / summary["seconds"])
                print(f"{about}, {workers} workers: {rates[workers][-1]:,.1f} images each second", flush=True)
        yield (
            name,
            {
                "about": about,
                "images": count,
                "images_per_second": {str(workers): max(rate) for workers, rate in rates.items()},
                "rounds": {str(workers): rate for workers, rate in rates.items()},
                "load_average": os.getloadavg()[1],
            },
        )


def measured_costs(folder: Path, guards: dict[str, Path]) -> dict[str, Any]:
    """Milliseconds of processor time for each image, on one thread: to decode it, and to judge it."""
    torch.set_num_threads(1)
    costs: dict[str, Any] = {}
    for name, (_, network, side, _) in CASES.items():
        if name == "digits":
            files = written(pixels(digits().validation[:256]), folder / "cost_digits")
        else:
            files = photographs(side, folder / f"cost_{name}")[: 64 if name == "large" else 128]
        options = NetworkOptions(network, guards[network].with_name(WEIGHTS[network]))
        opened = opened_guard(guards[network], options, "cpu")
        assert opened.recorded is not None
        read = Images([str(file) for file in files], opened.recorded, batch_size=64)
        batches = [batch.inputs for batch in read]
        opened.detector(batches[0])  # kernels are compiled, the network is looked at
        decode, judge = [], []
        for _ in range(3):
            start = time.process_time()
            list(read)
            decode.append(time.process_time() - start)
            start = time.process_time()
            for inputs in batches:
                opened.detector(inputs)
            judge.append(time.process_time() - start)
        costs[name] = {
            "decode_ms": 1000 * min(decode) / len(files),
            "judge_ms": 1000 * min(judge) / len(files),
        }
        print(name, costs[name], flush=True)
    return costs


# --- the picture -------------------------------------------------------------------------------------


def draw(result: dict[str, Any], path: Path) -> None:
    """Memory over the number of images that are scored."""
    memory = result["memory"]
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(WIDTH, 3.2), layout="constrained")
    (look,) = looks_of(("row_sums",)).values()
    axis.plot(memory["rows"], memory["mib"], color=look.colour, linewidth=1.4)
    tenth = memory["images"] / 10
    for left, right, key in ((tenth, 2 * tenth, "second_tenth"), (9 * tenth, 10 * tenth, "last_tenth")):
        axis.axvspan(left, right, color=FAINT, zorder=0)
        axis.annotate(
            f"at most {memory[key]:,.0f} MiB",
            ((left + right) / 2, memory[key]), (0, 8), textcoords="offset points",
            ha="center", va="bottom", fontsize=SMALL, color=INK,
        )  # fmt: skip
    axis.set_xlim(0, memory["images"])
    axis.set_ylim(0, 1.25 * max(memory["mib"]))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_xlabel("images scored", fontsize=TEXT, color=INK)
    axis.set_ylabel("memory, MiB", fontsize=TEXT, color=INK)
    axis.tick_params(labelsize=SMALL)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(SOFT)
    workers = f"{memory['workers']} decoding worker{'s' if memory['workers'] > 1 else ''}"
    axis.set_title(
        f"gramwatch score, {memory['images']:,} images: the command and its {workers}",
        fontsize=TITLE, weight="bold", loc="left", color=INK,
    )  # fmt: skip
    figure.set_dpi(DPI)
    write_picture(figure, path)


def main(given: list[str] | None = None) -> None:
    """Measure, write and draw."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.benchmarks.stream",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--rounds", type=int, default=3, help="how often each number of workers is measured")
    parser.add_argument("--output", type=Path, default=DATA)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--draw", action="store_true", help="only draw the picture, from the output")
    parser.add_argument("--keep-workers", action="store_true", help="keep the rates of the last run")
    args = parser.parse_args(given)
    if not args.draw:
        result = {"kind": "stream", **machine(torch.device("cpu"))}
        before = json.loads(args.output.read_text(encoding="utf-8"))["workers"] if args.keep_workers else None
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            guards = {DIGITS[0]: guard_of_digits(folder)}
            result["memory"] = measured_memory(folder, guards[DIGITS[0]], args.images)
            print(json.dumps({k: result["memory"][k] for k in ("seconds", "second_tenth", "last_tenth")}))
            guards[RESNET] = guard_of_photographs(folder)
            result["costs"] = measured_costs(folder, guards)
            result["workers"] = before if args.keep_workers else {}
            save(args.output, result)
            for case, rates in () if args.keep_workers else measured_workers(folder, guards, args.rounds):
                result["workers"][case] = rates
                save(args.output, result)
    draw(json.loads(args.output.read_text(encoding="utf-8")), args.picture)


if __name__ == "__main__":
    main()
