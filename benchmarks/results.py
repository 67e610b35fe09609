"""Every method on the third-party DenseNet for CIFAR-10 and all sets that lie in a folder of data.

    python -m benchmarks.results --data DATA --weights densenet_bc_100_12_cifar10.pth --device cuda
    python -m benchmarks.results --data DATA --weights ... --train 500 --images 100 --methods msp,energy

Writes the tables, a picture and every figure to docs/results. A set that is absent is named and left out.
With `--tune`, ODIN and Mahalanobis stand there a second time, tuned on the Tiny ImageNet validation images
(1,000, and 1,000 training images that no other part uses); the table names the methods that saw outliers.
"""

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from gramwatch import GramwatchWarning, MissingDataError, datasets, evaluate, networks
from gramwatch.experiments.compare import fitted, method_names
from gramwatch.report.comparison import draw_comparison
from gramwatch.rivals import ODIN, RIVALS

TUNING = 1000


REDUCED = {"size": 32, "grey": False}
SETS: list[tuple[str, dict[str, Any]]] = [
    *(
        (name, {"reduce": reduce})
        for name in ("tiny_imagenet", "miniplaces")
        for reduce in ("antialiased", "nearest", "crop")
    ),
    *(
        (name, {})
        for name in ("imagenet_resize", "imagenet_crop", "lsun_resize", "lsun_crop", "isun", "svhn")
    ),
    *((name, {}) for name in ("cifar100", "cifar100_subset", "dtd", "dtd_10_classes")),
    *((name, {}) for name in ("mnist", "fashion_mnist", "kmnist")),
    *((name, {}) for name in ("blobs", "gaussian", "rademacher", "bernoulli")),
]
"""Names of sets and how they are reduced; a grey image is put on black and repeated to three channels."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of sets, see docs/datasets.md")
    parser.add_argument("--weights", type=Path, required=True, help="the network's checkpoint")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--train", type=int, default=50_000, help="training images")
    parser.add_argument("--images", type=int, default=2_000, help="of each set")
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument("--methods", default="all")
    parser.add_argument("--tune", action="store_true", help="also ODIN and Mahalanobis tuned on outliers")
    parser.add_argument("--output", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    warnings.simplefilter("always", GramwatchWarning)
    loaded = networks.load("densenet", args.weights, device=args.device)
    network = loaded.network
    torch.backends.cudnn.allow_tf32 = False
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {text}", flush=True)

    kept_back = TUNING if args.tune else 0
    if args.train + kept_back > 50_000:
        parser.error(f"--tune keeps {TUNING} training images back: use --train {50_000 - TUNING} or fewer")
    cifar10 = datasets.load("cifar10", args.data, split="train")
    assert cifar10.labels is not None
    images, labels = loaded.prepare(cifar10.images[: args.train + kept_back]), cifar10.labels
    held = images[args.train :]
    images, labels = images[: args.train], labels[: args.train]
    training = list(zip(images.split(args.batch), labels.split(args.batch), strict=True))
    say(f"{len(images)} training images")
    detectors = fitted(network, training, method_names(args.methods), say, taps="paper")
    if "ODIN" in detectors:  # its step is meant in terms of images from 0 to 1
        detectors["ODIN"] = ODIN(network, scale=loaded.std)
    say(f"{len(detectors)} methods fitted")
    if args.tune:
        outliers = loaded.prepare(
            datasets.load(
                "tiny_imagenet", args.data, split="val", reduce="antialiased", count=TUNING, **REDUCED
            ).images
        )
        for name in ("odin", "mahalanobis"):
            scale = {"scale": loaded.std}
            tuned = RIVALS[name](network, **scale).fit(training)
            tuned.tune(held.split(args.batch), outliers.split(args.batch))  # type: ignore[attr-defined]
            detectors[f"{tuned.record.title}, tuned"] = tuned
            say(f"{name} tuned on Tiny ImageNet validation images: {tuned._all_settings()}")
    sets = {}
    for name, how in SETS:
        try:
            found = datasets.load(name, args.data, count=args.images, **REDUCED, **how)
        except MissingDataError:  # noqa: PERF203
            say(f"{datasets.CATALOGUE[name].title}: data not present")
        else:
            sets[found.name] = loaded.prepare(found.images).split(args.batch)
    test = loaded.prepare(datasets.load("cifar10", args.data, count=args.images).images)
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
    command = " ".join([f"python -m benchmarks.results --data DATA --weights {args.weights.name}", *options])
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
