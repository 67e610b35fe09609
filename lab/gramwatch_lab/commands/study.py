"""`gramwatch study`: the studies behind our own choices."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gramwatch.cli.checks import chosen_device, interruptible, known
from gramwatch_lab.commands.paper import (
    Batch,
    Data,
    Device,
    Inside,
    Network,
    Sets,
    Subset,
    check_shared,
    kept,
    known_network,
)

if TYPE_CHECKING:
    from gramwatch_lab.paper.experiment import Options

STUDIES = {"guard": "guard_study", "false_alarms": "false_alarm_study", "effort": "effort_study"}
"""Every study by name, and its module."""


def study(
    name: Annotated[
        str,
        typer.Argument(
            help="guard: ways to join methods. false_alarms: whether Guard's false-alarm rate holds. effort: "
            "how little of the network Gram needs to look at."
        ),
    ],
    network: Annotated[str, Network],
    weights: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="The network's checkpoint.")],
    in_distribution: Annotated[str | None, Inside] = None,
    data: Annotated[Path | None, Data] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="The folder for tables, pictures and finished parts. By default gramwatch-study/NAME."
        ),
    ] = None,
    sets: Annotated[str, Sets] = "",
    subset: Annotated[int | None, Subset] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="The single methods to compare with, with commas between them, or 'all'. For guard, which "
            "needs its own members among them."
        ),
    ] = "all",
    forms: Annotated[
        bool,
        typer.Option(
            "--forms",
            help="Also judge other settings of Gram: other taps, orders and bounds. For guard. Slower.",
        ),
    ] = False,
    device: Annotated[str | None, Device] = None,
    batch: Annotated[int | None, Batch] = None,
) -> None:
    """Repeat one of the studies by which Guard was designed, on one network.

    Finished parts are kept: after an interruption, the same command goes on.

    Example: gramwatch study guard --network resnet20 --weights resnet20.pth --subset 200
    """
    from gramwatch_lab.paper.experiment import Options, computed

    known(name, list(STUDIES), "study", "NAME")
    options = Options(
        output=output or Path("gramwatch-study") / name,
        network=network,
        weights={weights.stem: weights},
        in_distribution=in_distribution,
        data=data,
        device=chosen_device(device),
        subset=subset,
        methods=methods,
        sets=sets,
        forms=forms,
        batch=batch,
        say=typer.echo,
    )
    _check(name, options)
    check_shared(options)
    with interruptible(lambda: kept(options)):
        computed(STUDIES[name], options)


def _check(name: str, options: "Options") -> None:
    """Make sure that the network exists, and that the study of Guard has Guard's members."""
    from gramwatch_lab.paper.guard_study import STUDIED

    known_network(options.chosen_network(), "--network")
    chosen = [method.strip() for method in (options.methods or "all").split(",")]
    if name == "guard" and chosen != ["all"] and not set(STUDIED) <= set(chosen):
        raise typer.BadParameter(
            f"Guard's members must be among the methods: {', '.join(STUDIED)}", param_hint="--methods"
        )
