"""The command line: one file per command.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

import os
import sys
import warnings


def main() -> None:
    """Run the `gramwatch` command."""
    from gramwatch.errors import GramwatchWarning

    # Read when PyTorch is imported. Threads that wait do not spin then: they would take the cores from the
    # processes that decode images, and from other programs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from gramwatch.cli.app import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.exit("the command line needs typer and rich: install them with pip install 'gramwatch[cli,plot]'")
    in_full = warnings.formatwarning

    def plainly(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        """Show the library's own warnings as notes, without a line of code."""
        if issubclass(category, GramwatchWarning):
            return f"note: {message}\n"
        return in_full(message, category, filename, lineno, line)

    warnings.formatwarning = plainly
    app(prog_name="gramwatch")
