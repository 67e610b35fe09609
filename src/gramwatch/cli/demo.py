"""`gramwatch demo`: the method at work in under a minute, with nothing to download."""

from pathlib import Path
from typing import Annotated

import typer

from gramwatch.cli.checks import interruptible, writable_folder


def demo(
    output: Annotated[
        Path, typer.Option(help="The folder for the picture, the tables and the fitted detectors.")
    ] = Path("gramwatch-demo"),
) -> None:
    """Train two small networks on handwritten digits, guard them, and show which other images they flag.

    Example: gramwatch demo --output demo
    """
    from gramwatch.cli.quickstart import run

    writable_folder(output)
    with interruptible(lambda: f"Finished tables and detectors are in {output}."):
        run(output, typer.echo)
