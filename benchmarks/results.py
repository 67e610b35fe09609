"""Every method on the third-party DenseNet for CIFAR-10 and all sets that lie in a folder of packed data.

    python -m benchmarks.results --shared ../shared --device cuda
    python -m benchmarks.results --shared ../shared --train 500 --images 100 --methods msp,energy   # quick

Writes the tables, a picture and every figure to docs/results. A set that is absent is named and left out.
With `--tune`, ODIN and Mahalanobis stand there a second time, tuned on the Tiny ImageNet validation images
(1,000, and 1,000 training images that no other part uses); the table names the methods that saw outliers.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gramwatch import GramwatchWarning, evaluate
from gramwatch.datasets import synthetic
from gramwatch.experiments.compare import fitted, method_names
from gramwatch.networks import densenet_bc_100_12
from gramwatch.report.comparison import draw_comparison
from gramwatch.rivals import ODIN, RIVALS

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import real_data

TUNING = 1000


def outlier_sets(data: Path, count: int) -> dict[str, Callable[[], np.ndarray]]:
    """What makes each set, by name: uint8 images N x 32 x 32 x 3."""

    def some(images: np.ndarray) -> np.ndarray:
        order = np.random.default_rng(0).permutation(len(images))
        return images[order[:count]]

    def made(images: Tensor) -> np.ndarray:
        return (images.permute(0, 2, 3, 1).numpy() * 255).round().astype(np.uint8)

    shape = (3, 32, 32)
    tiny, places = data / "tiny_imagenet_test" / "images.tar.xz", data / "miniplaces_val" / "images.tar"
    grey = "t10k-images-idx3-ubyte.gz"
    return {
        "Tiny ImageNet, anti-aliased": lambda: real_data.reduced(tiny, count, 32, "antialiased"),
        "Tiny ImageNet, nearest": lambda: real_data.reduced(tiny, count, 32, "nearest"),
        "MiniPlaces, anti-aliased": lambda: real_data.reduced(places, count, 32, "antialiased"),
        "MiniPlaces, nearest": lambda: real_data.reduced(places, count, 32, "nearest"),
        "CIFAR-100 subset": lambda: some(real_data.mosaic(data / "cifar100_subset" / "images.webp", 6000)),
        "DTD, 10 classes": lambda: some(real_data.mosaic(data / "dtd_10_classes" / "images_32.webp", 1200)),
        "MNIST": lambda: real_data.padded_grey(data / "MNIST" / "raw" / grey, count),
        "Fashion-MNIST": lambda: real_data.padded_grey(data / "FashionMNIST" / "raw" / grey, count),
        "KMNIST": lambda: real_data.padded_grey(data / "KMNIST" / "raw" / grey, count),
        "blobs": lambda: made(synthetic.blobs(count, shape)),
        "Gaussian noise": lambda: made(synthetic.gaussian(count, shape)),
        "Rademacher noise": lambda: made(synthetic.rademacher(count, shape)),
        "Bernoulli noise": lambda: made(synthetic.bernoulli(count, shape)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="the folder with data/ and weights/")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--train", type=int, default=50_000, help="training images")
    parser.add_argument("--images", type=int, default=2_000, help="of each set")
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument("--methods", default="all")
    parser.add_argument("--tune", action="store_true", help="also ODIN and Mahalanobis tuned on outliers")
    parser.add_argument("--output", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    warnings.simplefilter("always", GramwatchWarning)
    data = args.shared / "data"
    network = densenet_bc_100_12()
    weights = args.shared / "weights" / "densenet_bc_100_12_cifar10.pth"
    network.load_state_dict(real_data.checkpoint(weights))
    network.eval().to(args.device)
    torch.backends.cudnn.allow_tf32 = False
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {text}", flush=True)

    kept_back = TUNING if args.tune else 0
    parts = [
        real_data.cifar10(data, f"train_{i}", 10_000) for i in range(-(-(args.train + kept_back) // 10_000))
    ]
    images, labels = (torch.cat(each) for each in zip(*parts, strict=True))
    held = images[args.train : args.train + kept_back]
    images, labels = images[: args.train], labels[: args.train]
    training = list(zip(images.split(args.batch), labels.split(args.batch), strict=True))
    say(f"{len(images)} training images")
    detectors = fitted(network, training, method_names(args.methods), say, taps="paper")
    if "ODIN" in detectors:  # its step is meant in terms of images from 0 to 1
        detectors["ODIN"] = ODIN(network, scale=real_data.CIFAR_STD)
    say(f"{len(detectors)} methods fitted")
    if args.tune:
        outliers = real_data.reduced(data / "tiny_imagenet_val" / "images.tar.xz", TUNING, 32, "antialiased")
        for name in ("odin", "mahalanobis"):
            scale = {"scale": real_data.CIFAR_STD}
            tuned = RIVALS[name](network, **scale).fit(training)
            tuned.tune(held.split(args.batch), real_data.normalised(outliers).split(args.batch))  # type: ignore[attr-defined]
            detectors[f"{tuned.record.title}, tuned"] = tuned
            say(f"{name} tuned on Tiny ImageNet validation images: {tuned._all_settings()}")
    sets = {}
    for name, make in outlier_sets(data, args.images).items():
        try:
            sets[name] = real_data.normalised(make()).split(args.batch)
        except FileNotFoundError:  # noqa: PERF203
            say(f"{name}: data not present")
    test = real_data.cifar10(data, "test_0", 10_000)[0]
    test = test[torch.randperm(10_000, generator=torch.Generator().manual_seed(0))[: args.images]]
    say(f"{len(sets)} sets")
    result = evaluate(detectors, test.split(args.batch), sets)
    say("evaluated")
    args.output.mkdir(parents=True, exist_ok=True)
    title = "DenseNet-BC-100-12 (CIFAR-10)"
    draw_comparison(args.output / "densenet.png", result, f"{title}: every method")
    result.to_csv(args.output / "densenet.csv")
    given = {name: getattr(args, name) for name in ("device", "train", "images", "methods")}
    options = [f"--{name} {value}" for name, value in given.items() if value != parser.get_default(name)]
    options += ["--tune"] if args.tune else []
    command = " ".join(["python -m benchmarks.results --shared ../shared", *options])
    page = [
        f"# {title}: every method",
        "",
        f"{len(images):,} training images, {args.device}. {result.protocol}",
        "",
    ]
    page += [f"    {command}", "", "![AUROC by method and set](densenet.png)", ""]
    for metric, words in (("auroc", "AUROC"), ("tnr", "TNR at 95 % TPR")):
        page += [f"## {words}, percent", "", markdown(result.overview(metric)), ""]
    (args.output / "densenet.md").write_text("\n".join(page), encoding="utf-8")
    print(result.overview())


def markdown(overview: str) -> str:
    """A table of aligned columns as one of Markdown."""
    head, rule, *rows = overview.splitlines()
    starts = [0, *(i + 2 for i in range(len(rule) - 1) if rule[i : i + 2] == "  ")]
    edges = list(zip(starts, [*starts[1:], None], strict=True))
    cells = [[line[a:b].strip() for a, b in edges] for line in (head, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "| --- |" + " ---: |" * (len(edges) - 1), *lines[1:]])


if __name__ == "__main__":
    main()
