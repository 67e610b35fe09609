"""`gramwatch train`: train a network on images, for one of several objectives."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gramwatch.cli.checks import (
    about,
    chosen_device,
    existing_file,
    interruptible,
    known,
    writable_file,
)
from gramwatch_lab.commands.paper import Data, Device, known_network

if TYPE_CHECKING:
    from torch import Tensor

    from gramwatch.inputs.networks import Loaded
    from gramwatch_lab.training import Objective


def train(
    network: Annotated[
        str,
        typer.Argument(
            help="The network's name: resnet34, wrn40_2, densenet, resnet20, mlp_300, ..., timm:NAME or "
            "torchvision:NAME."
        ),
    ],
    output: Annotated[Path, typer.Option(help="The file for the weights. Its name ends in .safetensors.")],
    objective: Annotated[
        str,
        typer.Option(
            help="The objective: cross_entropy, outlier_exposure, prior_network, variational_dirichlet "
            "or semantic."
        ),
    ] = "cross_entropy",
    set_: Annotated[
        str, typer.Option("--set", help="The set to train on. 'gramwatch data list' shows the names.")
    ] = "cifar10",
    without: Annotated[
        list[str] | None,
        typer.Option(help="A class to leave out, by its name. May be repeated. For --set scenes."),
    ] = None,
    data: Annotated[Path | None, Data] = None,
    auxiliary: Annotated[
        str | None,
        typer.Option(
            help="The outliers to train with: NAME:SPLIT or NAME:SPLIT:REDUCE, several with commas between "
            "them. SPLIT is train, val or test; REDUCE is nearest, antialiased or crop."
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Fine-tune this checkpoint. By default random weights."
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="A setting of the objective, NAME=VALUE, such as weight=0.3. May be repeated."),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="The number of epochs. By default that of the network's recipe.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Images in a step. By default that of the recipe.")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="The highest learning rate. By default that of the recipe.")
    ] = None,
    subset: Annotated[
        int | None, typer.Option(min=1, help="For a quick look: use only this many images of each split.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of weights, order and augmentation.")
    ] = 0,
    device: Annotated[str | None, Device] = None,
    precision: Annotated[
        str, typer.Option(help="float32, bfloat16, or auto: bfloat16 on a GPU, float32 on other devices.")
    ] = "auto",
    compile: Annotated[  # noqa: A002
        bool, typer.Option("--compile", help="Use torch.compile: a slower start, faster steps.")
    ] = False,
    save_every: Annotated[
        int, typer.Option(min=1, help="Write the file after every N epochs, and after the last epoch.")
    ] = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the output file of an interrupted training.")
    ] = False,
) -> None:
    """Train a network on images. Its file is written after every epoch.

    An interruption loses only the current epoch: the same command with --resume goes on.

    Example: gramwatch train resnet34 --output resnet34.safetensors --set cifar10
    """
    from gramwatch.inputs import networks
    from gramwatch_lab import datasets, training

    known_network(network, "NETWORK")
    known(precision, training.PRECISIONS, "precision", "--precision")
    if learning_rate is not None and not 0 < learning_rate < math.inf:
        raise typer.BadParameter(f"{learning_rate} is not a positive number", param_hint="--learning-rate")
    chosen = _objective(objective, option or [])
    _check_sets(set_, objective, chosen.needs_outliers, auxiliary)
    classes = _classes(set_, without or [])
    chosen = _with_words(chosen, classes or datasets.source_of(set_, "train").classes)
    place = chosen_device(device)
    _check_output(output, resume)
    tuned = None if weights is None else networks.load(network, weights)
    images, test = (
        datasets.load(set_, data, split=split, count=subset, seed=seed, classes=classes)
        for split in ("train", "test")
    )
    if images.labels is None or test.labels is None:
        raise typer.BadParameter(f"'{set_}' has no labels to learn", param_hint="--set")
    side = tuned.size if tuned is not None and tuned.size else images.images.shape[-1]
    shape = networks.record_of(network, side).shape
    if images.images.shape[1:] != shape:
        raise typer.BadParameter(
            f"{network} takes images of {_size(shape)}, those of '{set_}' are "
            f"{_size(images.images.shape[1:])}: choose another set or network",
            param_hint="--set",
        )
    start = tuned or _start(network, len(images.classes) or int(images.labels.max()) + 1, side, seed)
    recipe: dict[str, Any] = dict(vars(training.recipe(network, fine_tuning=weights is not None)))
    given = {"epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate}
    recipe |= {key: value for key, value in given.items() if value is not None}
    typer.echo(f"{network} on {set_} ({len(images):,} images), {objective}, on {place}: {_told(recipe)}")
    with interruptible(lambda: _kept(output)):
        history = training.train(
            start.network,
            images.images,
            images.labels,
            chosen,
            mean=start.mean,
            std=start.std,
            outliers=None if auxiliary is None else _outliers(auxiliary, data, images.images, seed),
            test=(test.images, test.labels),
            seed=seed,
            device=place,
            precision=precision,
            compile=compile,
            checkpoint=output,
            save_every=save_every,
            resume=resume,
            name=network,
            class_names=images.classes,
            **recipe,
        )
    typer.echo(
        f"test accuracy {100 * (history.accuracy or 0):.2f} % after {len(history.epochs)} epochs, "
        f"{history.seconds:.0f} s: {output}"
    )


def _kept(output: Path) -> str:
    if output.exists():
        return f"{output} has the finished epochs: the same command with --resume goes on from it."
    return "The first epoch was not finished: nothing was kept."


def _objective(name: str, settings: list[str]) -> "Objective":
    """The objective with its settings. The files in its settings must exist."""
    from gramwatch_lab import training

    known(name, list(training.OBJECTIVES), "objective", "--objective")
    with about("--option"):
        chosen = training.objective_of(name, dict(_setting(text) for text in settings))
    for file in getattr(chosen, "vectors", ()):
        existing_file(Path(file), "--option")
    return chosen


def _with_words(chosen: "Objective", classes: Sequence[str]) -> "Objective":
    """Semantic labels from files of words: by default the words are the names of the classes."""
    from gramwatch_lab import training

    if not isinstance(chosen, training.Semantic) or not chosen.vectors:
        return chosen
    chosen = replace(chosen, words=chosen.words or tuple(classes))
    if chosen.words:
        with about("--option"):  # a wrong file is named before any image is read
            chosen.labels(len(classes) or len(chosen.words))
    return chosen


def _check_output(output: Path, resume: bool) -> None:
    """Make sure that the file can be written. An existing file is accepted only to resume from it."""
    from gramwatch_lab import training

    if output.suffix != ".safetensors":
        raise typer.BadParameter(f"the name {output} must end in .safetensors", param_hint="--output")
    writable_file(output)
    if output.exists() and not resume:
        raise typer.BadParameter(
            f"{output} is already there: --resume goes on from it", param_hint="--output"
        )
    if output.exists():
        with about("--output"):
            training.read(output)


def _check_sets(set_: str, objective: str, needs_outliers: bool, auxiliary: str | None) -> None:
    """Make sure that the sets exist and have the splits, and that outliers are given only if needed."""
    from gramwatch_lab import datasets
    from gramwatch_lab.datasets.images import REDUCE

    with about("--set"):
        for split in ("train", "test"):
            if not datasets.source_of(set_, split).place:
                raise typer.BadParameter(
                    f"'{set_}' is made up: it has no labels to learn", param_hint="--set"
                )
    if needs_outliers and auxiliary is None:
        raise typer.BadParameter(
            f"{objective} trains with outliers: say which, --auxiliary tiny_imagenet:val",
            param_hint="--auxiliary",
        )
    if auxiliary is not None and not needs_outliers:
        raise typer.BadParameter(
            f"{objective} has no use for outliers: leave it out", param_hint="--auxiliary"
        )
    for name, split, reduce in _named(auxiliary or ""):
        with about("--auxiliary"):
            datasets.source_of(name, split)
        if reduce is not None:
            known(reduce, list(REDUCE), "way to reduce", "--auxiliary")


def _classes(set_: str, without: list[str]) -> list[str] | None:
    """The names of the classes to train on. None: all classes."""
    from gramwatch_lab import datasets

    if not without:
        return None
    names = datasets.source_of(set_, "train").classes
    for name in without:
        known(name, names, f"class of '{set_}'", "--without")
    left = [name for name in names if name not in without]
    if len(left) < 2:
        raise typer.BadParameter("at least two classes must be left", param_hint="--without")
    return left


def _start(name: str, classes: int, size: int, seed: int) -> "Loaded":
    """A network with random weights."""
    import torch

    from gramwatch.inputs import networks

    torch.manual_seed(seed)
    record = networks.record_of(name, size)
    return networks.Loaded(name, record.build(classes), record.mean, record.std, size)


def _setting(text: str) -> tuple[str, Any]:
    """Name and value of NAME=VALUE. The value is a number, true, false, a JSON list or plain text."""
    import json

    name, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"'{text}' is not NAME=VALUE", param_hint="--option")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _named(auxiliary: str) -> list[tuple[str, str, str | None]]:
    """Name, split and way to reduce of each set in NAME:SPLIT:REDUCE,..."""
    sets = []
    for text in auxiliary.split(",") if auxiliary else ():
        name, _, rest = text.strip().partition(":")
        split, _, reduce = rest.partition(":")
        sets.append((name, split or "train", reduce or None))
    return sets


def _outliers(named: str, data: Path | None, like: "Tensor", seed: int) -> "Tensor":
    """The images of all named sets, in the size and the colours of the training images."""
    import torch

    from gramwatch_lab import datasets

    parts = []
    for name, split, reduce in _named(named):
        outliers = datasets.load(
            name,
            data,
            split=split,
            size=like.shape[-1],
            reduce=reduce,
            grey=like.shape[1] == 1,
            seed=seed,
        )
        typer.echo(f"outliers: {outliers.name}, {len(outliers):,} images ({outliers.description})")
        parts.append(outliers.images)
    return torch.cat(parts)


def _size(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _told(recipe: dict[str, Any]) -> str:
    by = "" if recipe["optimiser"] == "sgd" else f", {recipe['optimiser']}"
    return (
        f"{recipe['epochs']} epochs of batches of {recipe['batch_size']}, "
        f"learning rate {recipe['learning_rate']:g}{by}"
    )
