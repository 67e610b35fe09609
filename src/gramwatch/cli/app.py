"""The commands put together."""

from typing import Annotated

import typer

from gramwatch.cli.data import data
from gramwatch.cli.demo import demo
from gramwatch.cli.evaluate import evaluate
from gramwatch.cli.paper import paper
from gramwatch.cli.study import study
from gramwatch.cli.train import train
from gramwatch.version import __version__

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(demo)
app.command()(evaluate)
app.command()(paper)
app.command()(study)
app.command()(train)
app.add_typer(data, name="data")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def gramwatch(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Know when a classifier is looking at something it was never trained on."""
