"""What commands check before they look for data or compute. A failure names the option: code 2."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from textwrap import shorten

import typer

from gramwatch.errors import GramwatchError


@contextmanager
def about(option: str) -> Iterator[None]:
    """Errors of the library inside this block are due to this option."""
    try:
        yield
    except (GramwatchError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


@contextmanager
def interruptible(kept: Callable[[], str]) -> Iterator[None]:
    """An interruption of this block says what was kept, and ends with code 130."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"\ngramwatch: interrupted. {kept()}", err=True)
        raise typer.Exit(130) from None


def known(name: str, every: Sequence[str], what: str, option: str) -> None:
    """The name is one of those that there are."""
    if name not in every:
        raise typer.BadParameter(
            f"there is no {what} '{name}': choose from {', '.join(every)}", param_hint=option
        )


def known_network(name: str, option: str) -> None:
    """The name is that of a network, of ours or of timm or torchvision."""
    from gramwatch.networks import record_of

    with about(option):
        record_of(name)


def chosen_device(given: str | None) -> str:
    """The device that was named, if it can be used; by default a GPU if there is one."""
    import torch

    if given is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=given).cpu()
    except Exception as error:  # every backend has exceptions of its own
        reason = shorten(str(error) or type(error).__name__, 100, placeholder=" ...")
        raise typer.BadParameter(
            f"'{given}' cannot be used here ({reason}). Use cpu, or cuda where there is a GPU",
            param_hint="--device",
        ) from None
    return given


def existing_file(path: Path, option: str) -> None:
    """There is such a file."""
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {path}", param_hint=option)


def writable_folder(folder: Path, option: str = "--output") -> None:
    """The folder is there, or can be made, and files can be written into it."""
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


def writable_file(path: Path, option: str = "--output") -> None:
    """A file can be written there."""
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder, not a file: name another place", param_hint=option)
    writable_folder(path.parent, option)
