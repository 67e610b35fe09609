"""`gramwatch demo`: the method at work in under a minute, with nothing to download."""

from pathlib import Path
from typing import Annotated

import typer


def demo(
    output: Annotated[Path, typer.Option(help="Where to put the picture, tables and detectors.")] = Path(
        "gramwatch-demo"
    ),
) -> None:
    """Train two small networks on handwritten digits and show what they make of other things."""
    from gramwatch.experiments.demo import run

    run(output, typer.echo)
