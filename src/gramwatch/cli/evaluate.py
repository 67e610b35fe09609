"""`gramwatch evaluate`: every method side by side."""

from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    methods: Annotated[
        str, typer.Option(help="Names of methods, with commas between them, or 'all'.")
    ] = "all",
    networks: Annotated[str, typer.Option(help="The demo's networks: 'convnet', 'mlp', or both.")] = (
        "convnet,mlp"
    ),
    output: Annotated[Path, typer.Option(help="Where to put the tables and pictures.")] = Path(
        "gramwatch-evaluation"
    ),
) -> None:
    """Compare methods on the same networks, data and protocol."""
    from gramwatch.experiments.compare import run

    try:
        run(methods, [name.strip() for name in networks.split(",")], output, typer.echo)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
