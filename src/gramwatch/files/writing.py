"""Writing files: beside their place, then renamed. A file is replaced whole or not at all.

Only regular files are replaced. A device or a pipe at the place is refused: a rename would put a file there.
"""

import glob
import hashlib
import os
import platform
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from stat import S_IMODE, S_ISREG

from gramwatch.errors import warn

_DAY = 86_400.0


def check_writable(path: str | PathLike[str]) -> None:
    """Make sure that `path` can be written: create an empty file in the same folder, and remove it."""
    with _writing(path) as target:
        beside = _beside(target)
        beside.touch(exist_ok=False)
        beside.unlink()


@contextmanager
def replacing(path: str | PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path for writing, then move the file to `path`. A failure leaves the old file whole.

    The place is in a new folder beside `path`, and has the name of the file that is replaced. Files there
    whose names begin with that name belong to it, and are moved before it. If `path` is a link, the file that
    it points to is replaced. What killed processes left beside it is removed.
    """
    with _writing(path) as target:
        _remove_leftovers(target)
        folder = _beside(target)
        try:
            folder.mkdir()
            beside = folder / target.name
            beside.touch()
            mode = (target if target.exists() else beside).stat().st_mode
            yield beside
            beside.chmod(S_IMODE(mode))  # some libraries let only the owner read
            others = sorted(set(folder.glob(f"{glob.escape(target.name)}?*")))
            for written in (*others, beside):
                _flush(written)
                _check_replaceable(target.with_name(written.name))
                written.replace(target.with_name(written.name))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        try:
            _flush(target.parent)
        except OSError as error:  # some file systems cannot
            warn(
                f"{path} is written whole. Its folder could not be flushed to the disk "
                f"({error.strerror or error}), so a loss of power now may bring the old file back"
            )


def write_text(path: str | PathLike[str], text: str, errors: str = "strict") -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with replacing(path) as beside:
        beside.write_bytes(text.encode(errors=errors))


@contextmanager
def _writing(path: str | PathLike[str]) -> Iterator[Path]:
    """The file to replace, with links followed. Any failure becomes an `OSError` that names `path`."""
    try:
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise IsADirectoryError("it is a folder")
        _check_replaceable(target)
        if not target.parent.is_dir():
            raise NotADirectoryError(f"there is no folder {target.parent}")
        yield target
    except OSError as error:
        raise OSError(f"cannot write {path}: {error}") from error


def _check_replaceable(target: Path) -> None:
    """Refuse a device, a pipe or a socket. A file that would replace it takes it from everyone."""
    with suppress(FileNotFoundError):
        if not S_ISREG(target.stat().st_mode):
            raise OSError("it is a device, a pipe or a socket, and only files are replaced. Name a file")


def _leftover(target: Path) -> str:
    """The prefix of temporary names beside a target."""
    return f".gramwatch-{_short_hash(target.name)}-"


def _beside(target: Path) -> Path:
    """A new temporary name beside a target. It holds the target, the machine and the process."""
    machine, process = _short_hash(platform.node()), os.getpid()
    return target.with_name(f"{_leftover(target)}{machine}-{process}-{uuid.uuid4().hex[:8]}")


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:12]


def _remove_leftovers(target: Path) -> None:
    """Remove temporary files beside this target whose process has ended, or that are over a day old.

    It is a folder, or an empty file of `check_writable`. Earlier versions left files.
    """
    for path in target.parent.glob(f"{_leftover(target)}*"):
        with suppress(OSError, ValueError):
            machine, process = path.name.split("-")[2:4]
            gone = machine == _short_hash(platform.node()) and not _is_running(int(process))
            if gone or time.time() - path.stat().st_mtime > _DAY:
                remove = shutil.rmtree if path.is_dir() else Path.unlink
                remove(path)


def _is_running(process: int) -> bool:
    if os.name != "posix":  # on Windows, signal 0 is Ctrl+C
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _flush(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
