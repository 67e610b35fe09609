"""`gramwatch paper`: the paper's tables and figures, one command each."""

from pathlib import Path
from typing import Annotated

import typer

from gramwatch.cli.device import chosen_device


def paper(
    name: Annotated[str, typer.Argument(help="Which experiment; 'list' says which there are.")],
    network: Annotated[str | None, typer.Option(help="The network's name, such as densenet.")] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(help="Its checkpoint: FILE, or OBJECTIVE=FILE where several are compared."),
    ] = None,
    in_distribution: Annotated[
        str | None, typer.Option(help="What the network was trained on; cifar10, or mnist for grey images.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Where the data lie; $GRAMWATCH_DATA by default.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where tables, pictures and finished cells go.")] = None,
    subset: Annotated[
        int | None, typer.Option(min=20, help="A quick look: so many images of each set, ten times to fit.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Names of methods, with commas between them, or 'all'.")
    ] = None,
    tune: Annotated[
        str, typer.Option(help="What ODIN and Mahalanobis are tuned on: none, outliers or fgsm.")
    ] = "none",
    auxiliary: Annotated[
        str, typer.Option(help="The set of which networks saw images, as outliers, in training.")
    ] = "",
    device: Annotated[str | None, typer.Option(help="By default a GPU if there is one.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Images at once.")] = None,
) -> None:
    """Compute a table or figure of the paper; published figures stand beside ours."""
    from gramwatch.experiments.paper import Options, overview, run

    if name == "list":
        overview(data, typer.echo)
        return
    options = Options(
        output=output or Path("gramwatch-paper") / name,
        network=network,
        weights=dict(_labelled(each) for each in weights or []),
        in_distribution=in_distribution,
        data=data,
        device=chosen_device(device),
        subset=subset,
        methods=methods,
        tune=tune,
        auxiliary=auxiliary,
        batch=batch,
        say=typer.echo,
    )
    run(name, options)


def _labelled(given: str) -> tuple[str, Path]:
    """`OBJECTIVE=FILE`, or a file alone, which is labelled by its name."""
    label, found, file = given.partition("=")
    return (label, Path(file)) if found else (Path(given).stem, Path(given))
