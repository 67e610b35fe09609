"""Fully connected networks on MNIST (App., "Results for Fully-connected Networks"), trained on the spot.

A vector has one pixel, so that row sums carry little: Gram looks at all pairs of a layer's ReLU outputs. Row
sums and MSP stand beside it. `RECIPE` is how the networks are trained; `gramwatch paper mlp_study` shows what
the figures depend on.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from gramwatch import datasets, networks
from gramwatch.deviation import TotalDeviation
from gramwatch.evaluate import Evaluation, evaluate_measured
from gramwatch.experiments.beside import Line
from gramwatch.experiments.cells import Cells
from gramwatch.experiments.paper import Options, entries_for, lines_of, protocol_of, write
from gramwatch.experiments.subject import Method, OodSet, Subject, ood_sets
from gramwatch.training import CrossEntropy, train

NETWORKS = ("mlp_300", "mlp_300_150", "mlp_300_150_50")
RECIPE: Mapping[str, Any] = {
    "epochs": 20,
    "batch_size": 64,
    "learning_rate": 0.1,
    "warmup": 1.0,
    "weight_decay": 0.0,
}
SETS = ("kmnist", "fashion_mnist", "cifar10", "dtd_10_classes", "gaussian", "bernoulli", "blobs")
PAIRS, SUMS = "Gram", "Gram, row sums"
# ReLU outputs are not negative: all orders of a pair are equal, and one stands for all ten.
METHODS = {
    "MSP": Method("MSP", "msp"),
    PAIRS: Method(PAIRS, "gram", {"taps": "paper", "statistic": "triangle", "orders": [1]}),
    SUMS: Method(SUMS, "gram", {"taps": "paper", "statistic": "row_sums"}),
}


def run(options: Options) -> list[Line]:
    """Train the networks, judge every set."""
    lines: list[Line] = []
    names = NETWORKS if options.network is None else (options.network,)
    for name in names:
        loaded = trained(options, name)
        subject = options.study(loaded, "mnist")
        accuracy = subject.accuracy()
        options.say(f"{subject.title}: accuracy {accuracy:.2%}")
        sets = [each for each in ood_sets("mnist") if each.name in SETS]
        result = judged(subject, list(METHODS.values()), sets)
        found = lines_of(
            subject,
            sets,
            METHODS,
            result.rows,
            lambda each, method, subject=subject: entries_for(  # type: ignore[misc]
                subject, each, method, ("fig:mnist_ood",)
            ),
        )
        recipe = ", ".join(f"{key.replace('_', ' ')} {value:g}" for key, value in RECIPE.items())
        told = f"{protocol_of(subject, result)} Test accuracy {accuracy:.2%}; trained by SGD with {recipe}."
        write(options, f"mlp-{name}", f"{subject.title}, MNIST", found, told)
        lines += found
    return lines


def trained(
    options: Options,
    name: str,
    network: nn.Module | None = None,
    label: str = "",
    mean: float = 0.0,
    std: float = 1.0,
    **changes: Any,
) -> networks.Loaded:
    """A network trained on MNIST; from its file, if it was trained before.

    Args:
        options: where the data and the cells are.
        name: of the network.
        network: something like it, to be trained in its place.
        label: what is different about it.
        mean: of the pixels, by which they are normalised.
        std: likewise.
        changes: of the recipe.

    """
    recipe = {**RECIPE, **changes}
    count = None if options.subset is None else 10 * options.subset
    settings = {"network": name, "label": label, "subset": options.subset, "mean": mean, "std": std, **recipe}
    path = Cells(options.output / "cells").path(f"{name} {label} trained", settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    images = datasets.load("mnist", options.data, split="train", count=count)
    assert images.labels is not None
    began = time.monotonic()
    network = networks.build(name) if network is None else network
    history = train(
        network,
        images.images,
        images.labels,
        CrossEntropy(),
        mean=[mean],
        std=[std],
        device=options.device,
        precision="float32",
        checkpoint=path,
        **recipe,
    )
    options.say(
        f"{time.monotonic() - began:7.1f} s  {networks.NETWORKS[name].title} {label} trained for "
        f"{len(history.epochs)} epochs on {len(images):,} images"
    )
    return networks.Loaded(name, network, (mean,), (std,))


def judged(subject: Subject, methods: Sequence[Method], sets: Sequence[OodSet]) -> Evaluation:
    """The figures of every method on every set that is present."""
    measured = subject.measure(methods, sets)
    inside = measured.pop(subject.inside_title)
    totals = {method.title: TotalDeviation() for method in methods}
    return evaluate_measured(inside, measured, totals)
