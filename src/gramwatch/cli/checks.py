"""Checks before a command reads data or computes. A failure names the option, and the exit code is 2."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from textwrap import shorten
from typing import Any

import typer

from gramwatch.cli.launch import first
from gramwatch.errors import GramwatchError, MissingExtraError

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """A text for a terminal: a name in a file must not move the cursor or hide what stands before it."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


@contextmanager
def about(option: str) -> Iterator[None]:
    """Report errors of the library inside this block as errors of this option."""
    try:
        yield
    except MissingExtraError:  # the option is right, and the message names the package
        raise
    except (GramwatchError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


@contextmanager
def interruptible(kept: Callable[[], str]) -> Iterator[None]:
    """If this block is interrupted, name the files that were kept, and exit with code 130."""
    try:
        yield
    except KeyboardInterrupt:
        if first():
            typer.echo(f"\ngramwatch: interrupted. {kept()}", err=True)
        raise typer.Exit(130) from None


def known(name: str, every: Sequence[str], what: str, option: str) -> None:
    """Make sure that a name is one of `every`."""
    if name not in every:
        raise typer.BadParameter(
            f"there is no {what} '{name}': choose from {', '.join(every)}", param_hint=option
        )


def chosen_device(given: str | None) -> str:
    """The given device, if it can be used. By default a GPU if there is one, else the CPU."""
    import torch

    if given is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=given).cpu()
    except Exception as error:  # every backend has exceptions of its own
        reason = shorten(str(error) or type(error).__name__, 100, placeholder=" ...")
        raise typer.BadParameter(
            f"'{given}' cannot be used here ({reason}). Use cpu, or cuda if there is a GPU",
            param_hint="--device",
        ) from None
    return given


def existing_file(path: Path, option: str) -> None:
    """Make sure that a file exists."""
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {path}", param_hint=option)


def existing(option: str) -> Callable[[Any], Any]:
    """The callback of an option with a file, or with several: make sure that they exist."""

    def check(given: Any) -> Any:
        for path in given if isinstance(given, list | tuple) else [given]:
            if path is not None:
                existing_file(Path(path), option)
        return given

    return check


def between(option: str) -> Callable[[float | None], float | None]:
    """The callback of an option: make sure that its number lies between 0 and 1."""

    def check(number: float | None) -> float | None:
        if number is not None and not 0 < number < 1:
            raise typer.BadParameter(f"{number} does not lie between 0 and 1", param_hint=option)
        return number

    return check


def writable_folder(folder: Path, option: str = "--output") -> None:
    """Make sure that a folder exists or can be created, and that files can be written into it."""
    if folder.exists() and not folder.is_dir():
        raise typer.BadParameter(f"{folder} is a file, not a folder: name another place", param_hint=option)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder, prefix=".gramwatch-") as file:
            file.write(b"gramwatch")
    except OSError as error:
        raise typer.BadParameter(
            f"cannot write into {folder} ({error.strerror or error}): name another place", param_hint=option
        ) from None


def guard_file(path: Path, reads: Iterable[Path | None] = ()) -> None:
    """Make sure that the file of a guard can be written, under a name with its suffix.

    It must be none of the files that the command `reads`.
    """
    if path.suffix != ".safetensors":
        raise typer.BadParameter(f"the name {path} must end in .safetensors", param_hint="--output")
    writable_file(path, reads=reads)


def new_file(
    path: Path, overwrite: bool, option: str = "--output", reads: Iterable[Path | None] = ()
) -> None:
    """Make sure that a file can be written, and that it does not exist yet or may be replaced."""
    if path.exists() and not overwrite:
        raise typer.BadParameter(f"{path} exists: name another file, or give --overwrite", param_hint=option)
    writable_file(path, option, reads)


def writable_file(path: Path, option: str = "--output", reads: Iterable[Path | None] = ()) -> None:
    """Make sure that a file can be written, and that it is none of the files that the command `reads`."""
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder, not a file: name another place", param_hint=option)
    if path.exists() and not path.is_file():
        raise typer.BadParameter(
            f"{path} is a device or a pipe, and only files are replaced: name a file", param_hint=option
        )
    for other in reads:
        if other is not None and path.exists() and other.exists() and path.samefile(other):
            raise typer.BadParameter(
                f"{path} is a file that this command reads, and it would be lost: name another place",
                param_hint=option,
            )
    writable_folder(path.parent, option)
