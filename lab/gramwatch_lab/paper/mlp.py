"""Fully connected networks on MNIST (App., "Results for Fully-connected Networks"), trained on the spot.

A vector has one pixel, so that row sums carry little: Gram looks at all pairs of a layer's ReLU outputs. Row
sums and MSP stand beside it. `RECIPE` is how the networks are trained; `gramwatch paper mlp_study` shows what
the figures depend on.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gramwatch.evaluation.evaluate import Evaluation
from gramwatch.inputs import demo, networks
from gramwatch_lab import datasets, training
from gramwatch_lab.paper.beside import Line
from gramwatch_lab.paper.cells import Cells
from gramwatch_lab.paper.experiment import Options, entries_for, lines_of, protocol_of, write
from gramwatch_lab.paper.sets import OodSet, ood_sets
from gramwatch_lab.paper.subject import MethodSpec, Subject, rules_of

NETWORKS = ("mlp_300", "mlp_300_150", "mlp_300_150_50")
MEAN, STD = 0.1307, 0.3081
"""Of MNIST's pixels, to normalise them: without it, `mlp_study` finds far less on Fashion-MNIST."""
RECIPE: Mapping[str, Any] = {
    "optimiser": "adam",
    "epochs": 20,
    "batch_size": 64,
    "learning_rate": 0.001,
    "weight_decay": 0.0,
    "cosine": False,
}
SETS = ("kmnist", "fashion_mnist", "cifar10", "dtd_10_classes", "gaussian", "bernoulli", "blobs")
PAIRS, SUMS = "Gram", "Gram, row sums"
# ReLU outputs are not negative: all orders of a pair are equal, and one stands for all ten.
METHODS = {
    "MSP": MethodSpec("MSP", "msp"),
    PAIRS: MethodSpec(PAIRS, "gram", {"taps": "paper", "statistic": "triangle", "orders": [1]}),
    SUMS: MethodSpec(SUMS, "gram", {"taps": "paper", "statistic": "row_sums"}),
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
        sets = [ood_set for ood_set in ood_sets("mnist") if ood_set.name in SETS]
        result = judged(subject, list(METHODS.values()), sets)
        network_lines = lines_of(
            subject,
            sets,
            METHODS,
            result.rows,
            lambda ood_set, method, subject=subject: entries_for(  # type: ignore[misc]
                subject, ood_set, method, ("fig:mnist_ood",)
            ),
        )
        told = (
            f"{protocol_of(subject, result)} Test accuracy {accuracy:.2%}. Trained with {in_words(RECIPE)}."
        )
        write(options, f"mlp-{name}", f"{subject.title}, MNIST", network_lines, told)
        lines += network_lines
    return lines


def in_words(recipe: Mapping[str, Any]) -> str:
    """How a network was trained."""
    rate = "falling along a cosine" if recipe["cosine"] else "constant"
    return (
        f"{recipe['optimiser']}, {recipe['epochs']} epochs, batches of {recipe['batch_size']}, learning rate "
        f"{recipe['learning_rate']:g} ({rate}), weight decay {recipe['weight_decay']:g}, pixels normalised "
        f"by mean {MEAN} and deviation {STD}"
    )


def trained(
    options: Options,
    name: str,
    network: nn.Module | None = None,
    label: str = "",
    mean: float = MEAN,
    std: float = STD,
    **changes: Any,
) -> networks.Loaded:
    """A network trained on MNIST; from its cell, if it was trained before.

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
    torch.manual_seed(0)
    loaded = networks.Loaded(
        name, (networks.build(name) if network is None else network).to(options.device), (mean,), (std,)
    )
    settings = {"network": name, "label": label, "subset": options.subset, "mean": mean, "std": std, **recipe}
    cells, called = Cells(options.output / "cells"), f"{name} {label} trained"
    weights = cells.read(called, settings)
    if weights is None:
        began = time.monotonic()
        count = None if options.subset is None else 10 * options.subset
        train_set = datasets.load("mnist", options.data, split="train", count=count)
        assert train_set.labels is not None
        _train(loaded, train_set.images.to(options.device), train_set.labels.to(options.device), **recipe)
        cells.keep(called, settings, loaded.network.state_dict())
        options.say(
            f"{time.monotonic() - began:7.1f} s  {networks.NETWORKS[name].title} {label} trained on "
            f"{len(train_set):,} images"
        )
    else:
        loaded.network.load_state_dict(weights)
    loaded.network.eval()
    return loaded


def _train(loaded: networks.Loaded, images: Tensor, labels: Tensor, optimiser: str, **recipe: Any) -> None:
    """By Adam, or by SGD with a cosine schedule."""
    if optimiser == "adam":
        demo.train(loaded.network, loaded.prepare(images), labels, progress=True, **recipe)
    else:
        recipe.pop("cosine")
        training.train(
            loaded.network,
            images,
            labels,
            training.CrossEntropy(),
            mean=loaded.mean,
            std=loaded.std,
            precision="float32",
            **recipe,
        )


def judged(subject: Subject, methods: Sequence[MethodSpec], sets: Sequence[OodSet]) -> Evaluation:
    """The figures of every method on every set that is present."""
    measured = subject.measure(methods, sets)
    return subject.evaluate(measured, rules_of(methods))
