"""The command line: one file per command."""

import sys


def main() -> None:
    """Run the `gramwatch` command."""
    from gramwatch.errors import GramwatchError

    try:
        from gramwatch.cli.app import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.exit("the command line needs typer and rich: install them with pip install 'gramwatch[cli,plot]'")
    try:
        app()
    except GramwatchError as error:
        sys.exit(f"gramwatch: {error}")
