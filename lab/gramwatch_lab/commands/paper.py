"""`gramwatch paper`: the paper's tables and figures, one command each."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gramwatch.cli.checks import (
    about,
    chosen_device,
    existing_file,
    interruptible,
    known,
    writable_folder,
)

if TYPE_CHECKING:
    from gramwatch_lab.paper.experiment import Options

Network = typer.Option(
    help="The network's name: resnet34, densenet, wrn40_2, resnet20, mnist_convnet, ..., timm:NAME or "
    "torchvision:NAME."
)
Data = typer.Option(
    exists=True,
    file_okay=False,
    help="The folder of sets. By default $GRAMWATCH_DATA, or else ~/.cache/gramwatch/data.",
)
Inside = typer.Option(help="The set the network was trained on. By default cifar10; mnist for grey images.")
Subset = typer.Option(
    min=20, help="For a quick look: judge this many images of each set, and fit on ten times as many."
)
Sets = typer.Option(
    help="Only these out-of-distribution sets, such as tiny_imagenet,svhn. By default all. For table2 and "
    "for the study of Guard."
)
Device = typer.Option(help="The device: cpu, cuda, cuda:1, ... By default a GPU if there is one.")
Batch = typer.Option(
    min=1, help="The number of images in a batch. By default 500 on a GPU, 125 on other devices."
)


def known_network(name: str, option: str) -> None:
    """Make sure that a network exists: one of this library, of timm or of torchvision."""
    from gramwatch.inputs.networks import record_of

    with about(option):
        record_of(name)


def paper(
    name: Annotated[str, typer.Argument(help="The experiment's name. 'list' shows all, and what they need.")],
    network: Annotated[str | None, Network] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            help="The network's checkpoint, FILE. If networks are compared: OBJECTIVE=FILE, repeated."
        ),
    ] = None,
    in_distribution: Annotated[str | None, Inside] = None,
    data: Annotated[Path | None, Data] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="The folder for tables, pictures and finished parts. By default gramwatch-paper/NAME."
        ),
    ] = None,
    subset: Annotated[int | None, Subset] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Names of methods, with commas between them, or 'all'. By default those of the paper."
        ),
    ] = None,
    tune: Annotated[
        str,
        typer.Option(
            help="What ODIN and Mahalanobis are tuned on: none, outliers (images of each set) or fgsm "
            "(adversarial images). For table2."
        ),
    ] = "none",
    auxiliary: Annotated[
        str,
        typer.Option(
            help="The source of the outliers that networks were trained with, such as tiny_imagenet. Sets "
            "from this source are marked and left out of means. For outlier_exposure and trained."
        ),
    ] = "",
    sets: Annotated[str, Sets] = "",
    device: Annotated[str | None, Device] = None,
    batch: Annotated[int | None, Batch] = None,
) -> None:
    """Compute a table or figure of the paper. The published figures are shown beside the computed ones.

    Finished parts are kept: after an interruption, the same command goes on.

    Example: gramwatch paper table2 --network densenet --weights densenet.pth --subset 200
    """
    from gramwatch_lab.paper.experiment import EXPERIMENTS, Options, overview, run

    if name == "list":
        overview(data, typer.echo)
        return
    known(name, [*EXPERIMENTS, "list"], "experiment", "NAME")
    options = Options(
        output=output or Path("gramwatch-paper") / name,
        network=network,
        weights=_labelled(weights or []),
        in_distribution=in_distribution,
        data=data,
        device=chosen_device(device),
        subset=subset,
        methods=methods,
        tune=tune,
        auxiliary=auxiliary,
        sets=sets,
        batch=batch,
        say=typer.echo,
    )
    _check(name, options)
    check_shared(options)
    with interruptible(lambda: kept(options)):
        run(name, options)


def check_shared(options: "Options") -> None:
    """Check the options that experiments and studies share. The output folder is checked last."""
    from gramwatch.evaluation.compare import GRAM, method_names
    from gramwatch.methods import METHODS
    from gramwatch_lab.datasets import source_of
    from gramwatch_lab.paper.sets import ood_sets

    for path in options.weights.values():
        existing_file(path, "--weights")
    with about("--in-distribution"):
        for split in ("train", "test"):
            source_of(options.in_distribution or "cifar10", split)
    for given in options.sets.split(",") if options.sets else ():
        names = list(dict.fromkeys(ood_set.name for ood_set in ood_sets(options.inside())))
        known(given.strip(), names, "out-of-distribution set", "--sets")
    with about("--methods"):
        method_names(options.methods or "all", (GRAM, *METHODS))
    writable_folder(options.output)


def kept(options: "Options") -> str:
    """A sentence on the finished parts of an interrupted experiment."""
    cells = options.output / "cells"
    if cells.is_dir() and any(cells.iterdir()):
        return f"Finished parts are in {cells}: the same command goes on from them."
    return "No part was finished: nothing was kept."


def _check(name: str, options: "Options") -> None:
    """Check the network and the weights that this experiment needs."""
    from gramwatch_lab.paper import mlp, outlier_exposure, table2, trained

    known(options.tune, list(table2.HOW), "way to tune", "--tune")
    if name in ("mlp", "mlp_study"):
        if options.weights:
            raise typer.BadParameter(
                f"{name} trains its networks itself: leave it out", param_hint="--weights"
            )
        if options.network is not None:
            known(options.network, mlp.NETWORKS, "network of this experiment", "--network")
        return
    with about("--network"):
        known_network(options.chosen_network(), "--network")
    with about("--weights"):
        if name == "outlier_exposure":
            outlier_exposure.check_labels(options.weights)
        elif name == "trained":
            trained.check_labels(options.weights)
        else:
            options.only_weights()


def _labelled(given: list[str]) -> dict[str, Path]:
    """The files by label: `OBJECTIVE=FILE`, or a file alone, whose label is its name."""
    files: dict[str, Path] = {}
    for text in given:
        label, equals, file = text.partition("=")
        label, path = (label, Path(file)) if equals else (Path(text).stem, Path(text))
        if label in files:
            raise typer.BadParameter(
                f"{files[label]} and {path} have the same label '{label}': give LABEL=FILE",
                param_hint="--weights",
            )
        files[label] = path
    return files
