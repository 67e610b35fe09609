"""All commands, and how their errors are shown."""

import errno
import inspect
import re
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from gramwatch.cli.checks import printable
from gramwatch.cli.demo import demo
from gramwatch.cli.doctor import doctor
from gramwatch.cli.evaluate import evaluate
from gramwatch.cli.explain import explain
from gramwatch.cli.export import export
from gramwatch.cli.fit import fit
from gramwatch.cli.info import info
from gramwatch.cli.launch import first
from gramwatch.cli.live import live
from gramwatch.cli.merge import merge
from gramwatch.cli.options import with_groups
from gramwatch.cli.report import report
from gramwatch.cli.score import score
from gramwatch.cli.serve import serve
from gramwatch.cli.taps import taps
from gramwatch.errors import GramwatchError, warn
from gramwatch.files import __version__


class Commands(TyperGroup):
    """All commands. An error that a user can fix is one line. An unexpected exception keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            _fail(error.format_message(), 2)
        except KeyboardInterrupt:
            _fail("interrupted", 130)
        except (GramwatchError, OSError) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # the reader of the output has ended: typer exits without a message
            _fail(str(error) or type(error).__name__, 1)


def _fail(reason: str, code: int) -> NoReturn:
    if first():  # an error on another rank reaches rank 0 as a RankError
        typer.echo(printable(f"gramwatch: {reason}"), err=True)
    raise typer.Exit(code)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # commands and their groups inherit this
)


def _unwrapped(text: str | None) -> str:
    """A docstring without line breaks inside paragraphs, so that a terminal of any width wraps it well."""
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(re.sub(r"(?<!Examples:)\n", " ", paragraph) for paragraph in paragraphs)


COMMANDS = (
    *(fit, score, report, explain, live, serve, info, merge, export),
    *(taps, doctor, demo, evaluate),
)
OF_THE_LAB = ("paper", "study", "train", "data")


def _offered() -> dict[str, Any]:
    """The commands of installed packages, by name: functions, or groups of commands."""
    points = {point.name: point for point in entry_points(group="gramwatch.commands")}
    commands = {name: _loaded(points[name]) for name in sorted(points, key=(*OF_THE_LAB, *points).index)}
    return {name: loaded for name, loaded in commands.items() if loaded is not None}


def _loaded(point: EntryPoint) -> Any:
    """The command of an entry point; None if it cannot be imported, which does not stop other commands."""
    try:
        return point.load()
    except ImportError as error:
        warn(f"the command '{point.name}' of another package cannot be imported: {error}")
        return None


def _without_the_lab(ctx: typer.Context) -> None:
    """Say what to install."""
    _fail(f"'{ctx.info_name}' comes with gramwatch-lab: pip install gramwatch-lab", 2)


for command in COMMANDS:
    app.command(help=_unwrapped(command.__doc__))(with_groups(command))
offered = _offered()
for name, other in offered.items():
    if isinstance(other, typer.Typer):
        app.add_typer(other, name=name)
    else:
        app.command(name, help=_unwrapped(other.__doc__))(other)
for name in OF_THE_LAB:
    if name not in offered:
        app.command(
            name,
            hidden=True,
            add_help_option=False,
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )(_without_the_lab)


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
    """Know when a classifier is looking at something it was never trained on.

    For a network of your own: gramwatch fit, then gramwatch score. To see it at work: gramwatch demo
    """
