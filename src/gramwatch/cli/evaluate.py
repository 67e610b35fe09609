"""`gramwatch evaluate`: every method side by side on the demo's networks."""

import runpy
from pathlib import Path
from typing import Annotated

import typer

from gramwatch.cli.checks import about, existing_file, interruptible, known, writable_folder


def evaluate(
    methods: Annotated[
        str, typer.Option(help="Names of methods, with commas between them, or 'all'.")
    ] = "all",
    networks: Annotated[
        str, typer.Option(help="The demo's networks to use: convnet, mlp, or both with a comma between them.")
    ] = "convnet,mlp",
    output: Annotated[Path, typer.Option(help="The folder for tables and pictures.")] = Path(
        "gramwatch-evaluation"
    ),
    own: Annotated[
        Path | None, typer.Option(help="A Python file of your own that registers methods. It is executed.")
    ] = None,
) -> None:
    """Compare methods on the two small networks of 'gramwatch demo', and on no others.

    For a network of your own, call gramwatch.evaluate in Python. For the paper's networks: gramwatch paper.

    Example: gramwatch evaluate --methods guard,gram,msp --networks mlp
    """
    from gramwatch.paper.compare import NETWORKS, method_names, run

    if own is not None:
        existing_file(own, "--own")
        runpy.run_path(str(own))
    with about("--methods"):
        method_names(methods)
    chosen = [name.strip() for name in networks.split(",")]
    for name in chosen:
        known(name, list(NETWORKS), "network", "--networks")
    writable_folder(output)
    with interruptible(lambda: f"Finished tables and pictures are in {output}."):
        run(methods, chosen, output, typer.echo)
