"""`gramwatch study`: how our own choices were made."""

from pathlib import Path
from typing import Annotated

import typer

from gramwatch.cli.device import chosen_device

STUDIES = {"guard": "guard_study", "false_alarms": "false_alarm_study"}
"""Every study by name, and its module."""


def study(
    name: Annotated[
        str,
        typer.Argument(
            help="Which: guard (ways to join methods) or false_alarms (whether its p-values hold)."
        ),
    ],
    network: Annotated[str, typer.Option(help="The network's name, such as densenet.")],
    weights: Annotated[Path, typer.Option(help="Its checkpoint.")],
    data: Annotated[Path | None, typer.Option(help="Where the data lie; $GRAMWATCH_DATA by default.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where tables, pictures and finished cells go.")] = None,
    sets: Annotated[
        str, typer.Option(help="Only these out-of-distribution sets, such as tiny_imagenet,svhn.")
    ] = "",
    subset: Annotated[
        int | None, typer.Option(min=20, help="A quick look: so many images of each set, ten times to fit.")
    ] = None,
    methods: Annotated[str, typer.Option(help="The single methods to compare with, or 'all'.")] = "all",
    forms: Annotated[
        bool, typer.Option("--forms", help="Judge other forms of Gram, too, which takes longer.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="By default a GPU if there is one.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Images at once.")] = None,
) -> None:
    """Repeat a study of ours: every variant on the same network, data and protocol."""
    from gramwatch.experiments.paper import Options, computed

    if name not in STUDIES:
        raise typer.BadParameter(f"there is no study '{name}': choose from {', '.join(STUDIES)}")
    options = Options(
        output=output or Path("gramwatch-study") / name,
        network=network,
        weights={weights.stem: weights},
        data=data,
        device=chosen_device(device),
        subset=subset,
        methods=methods,
        sets=sets,
        forms=forms,
        batch=batch,
        say=typer.echo,
    )
    computed(STUDIES[name], options)
