"""`gramwatch train`: a network from images, for one of several objectives."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gramwatch.cli.device import chosen_device

if TYPE_CHECKING:
    from torch import Tensor

    from gramwatch.networks import Loaded


def train(
    network: Annotated[str, typer.Argument(help="Its name: resnet34, wrn40_2, densenet, mlp_300, ...")],
    output: Annotated[Path, typer.Option(help="The file to write: .safetensors.")],
    objective: Annotated[
        str,
        typer.Option(
            help="cross_entropy, outlier_exposure, prior_network, variational_dirichlet or semantic."
        ),
    ] = "cross_entropy",
    set_: Annotated[
        str, typer.Option("--set", help="The images to learn, with a training split.")
    ] = "cifar10",
    data: Annotated[Path | None, typer.Option(help="The folder in which the sets lie.")] = None,
    auxiliary: Annotated[
        str | None,
        typer.Option(help="Outliers, NAME:SPLIT or NAME:SPLIT:REDUCE, several with commas between them."),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Fine-tune from these instead of from scratch.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="A setting of the objective, NAME=VALUE; may be repeated.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="By default as the network's recipe says.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Likewise.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Likewise: the highest.")] = None,
    subset: Annotated[int | None, typer.Option(help="Only that many images, for a quick look.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, order and augmentation.")] = 0,
    device: Annotated[str | None, typer.Option(help="By default a GPU if there is one.")] = None,
    precision: Annotated[str, typer.Option(help="float32, bfloat16, or auto: bfloat16 on a GPU.")] = "auto",
    compile: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = False,  # noqa: A002
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the output file.")] = False,
) -> None:
    """Train a network. Its file is written after every epoch; an interruption loses the epoch under way."""
    from gramwatch import datasets, training

    if output.suffix != ".safetensors":
        raise typer.BadParameter("the output's name must end in .safetensors", param_hint="--output")
    chosen = training.objective_of(objective, dict(_setting(text) for text in option or []))
    _check_outliers(chosen.needs_outliers, objective, auxiliary)
    # A file that is in the way is better known before minutes of loading.
    if output.exists() and not resume:
        raise typer.BadParameter(
            f"{output} is already there: --resume goes on from it", param_hint="--output"
        )
    place = chosen_device(device)
    images = datasets.load(set_, data, split="train", count=subset, seed=seed)
    test = datasets.load(set_, data, split="test", count=subset, seed=seed)
    if images.labels is None or test.labels is None:
        raise typer.BadParameter(f"'{set_}' has no labels to learn", param_hint="--set")
    start = _start(network, weights, int(images.labels.max()) + 1, seed)
    recipe: dict[str, Any] = dict(vars(training.recipe(network, fine_tuning=weights is not None)))
    given = {"epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate}
    recipe |= {key: value for key, value in given.items() if value is not None}
    typer.echo(f"{network} on {set_} ({len(images):,} images), {objective}, on {place}: {_told(recipe)}")
    try:
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
            resume=resume,
            name=network,
            **recipe,
        )
    except KeyboardInterrupt:
        typer.echo(f"\ninterrupted: the same command with --resume goes on from {output}", err=True)
        raise typer.Exit(130) from None
    typer.echo(
        f"test accuracy {100 * (history.accuracy or 0):.2f} % after {len(history.epochs)} epochs, "
        f"{history.seconds:.0f} s: {output}"
    )


def _start(name: str, weights: Path | None, classes: int, seed: int) -> "Loaded":
    """The network to begin with: that of a file, or one with random weights."""
    import torch

    from gramwatch import networks

    if weights is not None:
        return networks.load(name, weights)
    torch.manual_seed(seed)
    network = networks.build(name, classes)
    return networks.Loaded(name, network, networks.NETWORKS[name].mean, networks.NETWORKS[name].std)


def _setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value a number, true, false, a JSON list or plain text."""
    import json

    name, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"'{text}' is not NAME=VALUE", param_hint="--option")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _check_outliers(needed: bool, objective: str, auxiliary: str | None) -> None:
    if needed and auxiliary is None:
        raise typer.BadParameter(
            f"{objective} trains with outliers: say which, --auxiliary tiny_imagenet:val",
            param_hint="--auxiliary",
        )
    if auxiliary is not None and not needed:
        raise typer.BadParameter(f"{objective} has no use for outliers", param_hint="--auxiliary")


def _outliers(named: str, data: Path | None, like: "Tensor", seed: int) -> "Tensor":
    """The images of all sets named, in the size and the colours of those to be learnt."""
    import torch

    from gramwatch import datasets

    parts = []
    for each in named.split(","):
        name, _, rest = each.strip().partition(":")
        split, _, reduce = rest.partition(":")
        found = datasets.load(
            name,
            data,
            split=split or "train",
            size=like.shape[-1],
            reduce=reduce or None,
            grey=like.shape[1] == 1,
            seed=seed,
        )
        typer.echo(f"outliers: {found.name}, {len(found):,} images ({found.description})")
        parts.append(found.images)
    return torch.cat(parts)


def _told(recipe: dict[str, Any]) -> str:
    return (
        f"{recipe['epochs']} epochs of batches of {recipe['batch_size']}, "
        f"learning rate {recipe['learning_rate']:g}"
    )
