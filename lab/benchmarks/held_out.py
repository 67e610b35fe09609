"""How many new images a guard flags that was calibrated on training images, and on images not seen before.

    python -m lab.benchmarks.held_out --data FOLDER --weights resnet20_cifar10.pth

By the commands of docs/cli.md, on folders of CIFAR-10 images. Writes docs/data/held_out.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from gramwatch.inputs.decoding import as_arrays, pillow_image
from gramwatch_lab import datasets
from lab.benchmarks.measure import machine, save

TRAIN, TEST, CALIBRATION = 3_000, 3_000, 600


def write(images: Tensor, folder: Path) -> None:
    """Write images as PNG files."""
    folder.mkdir(parents=True)
    for number, array in enumerate(as_arrays(images)):
        pillow_image().fromarray(array).save(folder / f"{number:05d}.png")


def told(folder: Path, *words: str) -> dict[str, int]:
    """Run a command in a folder, and read the summary that it prints."""
    command = [sys.executable, "-m", "gramwatch", *words, "--json", "-q", "--workers", "1"]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    report: dict[str, int] = json.loads(done.stdout)
    return report


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", required=True, help="the folder of the expanded sets")
    parser.add_argument("--weights", type=Path, required=True, help="the ResNet-20's checkpoint")
    parser.add_argument("--output", type=Path, default=Path("docs/data/held_out.json"))
    args = parser.parse_args()
    result = {"kind": "held_out", **machine(torch.device("cpu")), "train": TRAIN, "calibration": CALIBRATION}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        test = datasets.load("cifar10", args.data, split="test", count=TEST).images
        write(datasets.load("cifar10", args.data, split="train", count=TRAIN).images, folder / "train")
        write(test[:CALIBRATION], folder / "other")
        write(test[CALIBRATION:], folder / "new")
        fit = ("fit", "resnet20", "train", "--weights", str(args.weights.absolute()))
        for key, more in (("held out", ()), ("other", ("--calibrate", "other"))):
            told(folder, *fit, *more, "-o", "guard.safetensors")
            counts = told(folder, "score", "guard.safetensors", "new", "-o", "scores.csv", "--overwrite")
            result[key] = {"flagged": counts["flagged"], "images": counts["images"]}
    save(args.output, result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
