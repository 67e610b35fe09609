"""`gramwatch data`: list, download and check sets of images."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated

import typer

from gramwatch.cli.checks import interruptible, writable_folder

if TYPE_CHECKING:
    from gramwatch_lab.datasets import Download, Source

Root = Annotated[
    Path | None,
    typer.Option(
        "--data", help="The folder of sets. By default $GRAMWATCH_DATA, or else ~/.cache/gramwatch/data."
    ),
]
Names = Annotated[list[str], typer.Argument(help="Names of sets, as 'gramwatch data list' shows them.")]

data = typer.Typer(no_args_is_help=True, help="List, download and check sets of images.")


def _root(root: Path | None) -> Path:
    from gramwatch_lab.datasets import default_root

    return root or default_root()


def _known(names: list[str]) -> list[str]:
    from gramwatch_lab.datasets import CATALOGUE

    for name in names:
        if name not in CATALOGUE:
            raise typer.BadParameter(
                f"there is no set '{name}': choose from {', '.join(CATALOGUE)}", param_hint="NAMES"
            )
    return names


@data.command("list")
def list_sets(
    root: Root = None,
    sources: Annotated[
        bool,
        typer.Option("--sources", help="Also show where files are downloaded from, and their checksums."),
    ] = False,
) -> None:
    """Show every set: its name, whether it is on this machine, and what it is.

    Example: gramwatch data list --sources
    """
    from gramwatch_lab.datasets import CATALOGUE
    from gramwatch_lab.datasets.download import is_present

    folder = _root(root)
    longest = max(map(len, CATALOGUE))
    width = get_terminal_size().columns if sys.stdout.isatty() and not sources else None
    typer.echo(f"sets in {folder}\n")
    for name, source in CATALOGUE.items():
        if not source.place:
            state = "made up"
        elif is_present(source, folder):
            state = "there"
        else:
            state = "absent" if source.downloads else "absent, no download"
        line = f"{name:<{longest}}  {state:<19}  {source.title}: {source.about}"
        typer.echo(line if width is None or len(line) <= width else f"{line[: width - 4]} ...")
        for download in source.downloads if sources else ():
            typer.echo(f"  {download.url}, {_checksum(download)}")


@data.command()
def get(
    names: Names,
    root: Root = None,
    again: Annotated[
        bool, typer.Option("--again", help="Unpack archives again even if the set is there.")
    ] = False,
) -> None:
    """Download sets from their publishers, compare their checksums and unpack them.

    Example: gramwatch data get cifar10 svhn --data images
    """
    from gramwatch_lab.datasets import CATALOGUE, download

    sources = [CATALOGUE[name] for name in _known(names)]
    for source in sources:
        if source.place and not source.downloads:
            raise typer.BadParameter(
                f"{source.title} cannot be downloaded: {source.about}", param_hint="NAMES"
            )
    folder = _root(root)
    writable_folder(folder, "--data")
    with interruptible(lambda: f"Downloads are kept in {folder}: the same command goes on from them."):
        for source in sources:
            if source.place:
                download.get(source, folder, typer.echo, again)
            else:
                typer.echo(f"{source.title} is made up: there is nothing to download")


@data.command()
def check(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of sets. By default all that are on this machine.")
    ] = None,
    root: Root = None,
) -> None:
    """Compare downloaded files with their published checksums, and read every image.

    Ends with code 1 if a file is wrong. A file that is absent is not wrong.

    Example: gramwatch data check cifar10
    """
    from gramwatch_lab.datasets import CATALOGUE, download

    folder = _root(root)
    chosen = _known(
        names or [name for name, source in CATALOGUE.items() if download.is_present(source, folder)]
    )
    if not chosen:
        typer.echo(f"there are no sets in {folder}")
    wrong = False
    for name in chosen:
        source = CATALOGUE[name]
        for item in source.downloads:
            wrong |= _tell(f"{name}: {item.file}", partial(_compared, folder / item.folder / item.file, item))
        for split in source.splits if source.place else ():
            wrong |= _tell(f"{name}: {split}", partial(_counted, source, folder, split))
    if wrong:
        raise typer.Exit(1)


def _tell(what: str, find: Callable[[], str]) -> bool:
    """Print the result of a check. Returns whether a file is wrong. An absent file is not wrong."""
    from gramwatch.errors import DataError, MissingDataError

    try:
        typer.echo(f"{what}: {find()}")
    except MissingDataError as error:
        typer.echo(f"{what}: absent ({error})")
    except DataError as error:
        typer.echo(f"{what}: WRONG: {error}")
        return True
    return False


def _compared(path: Path, item: "Download") -> str:
    from gramwatch_lab.datasets import download

    if not path.exists():
        return "not there, so not compared with its checksum"
    download.check(path, item)
    return "checksum right" if item.has_checksum else "no checksum is known"


def _checksum(item: "Download") -> str:
    if not item.has_checksum:
        return "checksum unknown"
    known = f"SHA-256 {item.sha256}" if item.sha256 else f"MD5 {item.md5}"
    return f"{known} ({item.cited})"


def _counted(source: "Source", folder: Path, split: str) -> str:
    return f"{len(source.read(folder, split)):,} images"
