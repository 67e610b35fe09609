"""Running a command in this process."""

from collections.abc import Callable
from typing import Any, NoReturn

from typer.testing import CliRunner

from gramwatch.cli.app import app


def invoke(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def told(result: Any) -> str:
    """The one line that a command failed with."""
    line, *others = [line for line in result.output.splitlines() if line]
    assert not others, result.output
    assert line.startswith("gramwatch: "), result.output
    return line


def raising(error: BaseException) -> Callable[..., NoReturn]:
    def run(*_: object, **__: object) -> NoReturn:
        raise error

    return run
