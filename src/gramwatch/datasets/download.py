"""Downloading sets from their publishers: resumed where it stopped, checked, put in place at once."""

import hashlib
import http.client
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path

from gramwatch.datasets.source import Download, Source
from gramwatch.errors import DataError
from gramwatch.version import __version__

CHUNK = 1 << 20
ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip")


def is_archive(download: Download) -> bool:
    """Whether the file is to be unpacked. A lone `.gz`, as of MNIST, is read as it is."""
    return download.file.endswith(ARCHIVES)


def found(source: Source, root: Path) -> bool:
    """Whether something lies where the set belongs."""
    return bool(source.place) and any(root.glob(source.place))


def md5_of(path: Path) -> str:
    """The MD5 of a file: a check for damage, not against forgery."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def check(path: Path, download: Download) -> None:
    """Compare a file with its published checksum, where one is known."""
    if download.md5 is not None and (actual := md5_of(path)) != download.md5:
        raise DataError(
            f"{path} is damaged, packed anew or another file: its MD5 is {actual}, the published one is "
            f"{download.md5} ({download.cited}). Remove it and get it again"
        )


def get(source: Source, root: Path, say: Callable[[str], None] = print, again: bool = False) -> None:
    """Download a set, check it and put it where `load` looks for it. What is there already stays."""
    if not source.downloads:
        raise DataError(f"{source.title} cannot be downloaded: {source.about}")
    for download in source.downloads:
        path = root / download.folder / download.file
        if is_archive(download) and found(source, root) and not again:
            say(f"{source.title} is there already: {root / source.place}")
            continue
        if path.exists():
            check(path, download)
            say(f"{path} is there already")
        else:
            fetch(download, path)
            say(f"{path}: {'checksum right' if download.md5 else 'no checksum is known'}")
        if is_archive(download):
            unpack(path, path.parent)
            say(f"unpacked into {path.parent}")


def fetch(download: Download, path: Path) -> None:
    """Download one file. What an earlier attempt got is kept beside it (`.part`) and continued."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        _transfer(download.url, part)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"{download.url} could not be downloaded ({error}). Run the command again to continue, or get "
            f"{download.file} by other means, put it in {path.parent} and run the command again"
        ) from None
    try:
        check(part, download)
    except DataError:
        part.unlink()  # there is nothing to continue from
        raise
    part.replace(path)


def _transfer(url: str, part: Path) -> None:
    from tqdm.auto import tqdm

    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": f"gramwatch/{__version__}"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if have and error.code == 416:  # nothing after what we have: it is whole, or the checksum will tell
            return
        raise
    with response:
        if response.status != 206:  # the server starts from the beginning
            have = 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        with (
            part.open("ab" if have else "wb") as file,
            tqdm(
                desc=part.stem,
                initial=have,
                total=total,
                unit="B",
                unit_scale=True,
                leave=False,
                disable=None,
            ) as bar,
        ):
            while chunk := response.read(CHUNK):
                file.write(chunk)
                bar.update(len(chunk))
    if total is not None and (size := part.stat().st_size) != total:
        raise OSError(f"the connection ended after {size:,} of {total:,} bytes")


def unpack(archive: Path, folder: Path) -> None:
    """Unpack beside the place, then move everything there: an interruption leaves no half of a set.

    Members that would land outside the folder, links out of it and devices are refused.
    """
    if not hasattr(tarfile, "data_filter"):
        raise DataError(
            f"{archive} is there, but this Python is too old to unpack it safely: update to its latest patch "
            "release, or unpack the file by hand"
        )
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=folder) as beside:
        try:
            if archive.suffix == ".zip":
                with zipfile.ZipFile(archive) as packed:
                    packed.extractall(beside)
            else:
                with tarfile.open(archive) as tar:
                    tar.extractall(beside, filter="data")
        except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
            raise DataError(f"{archive} cannot be unpacked: {error}") from None
        for entry in Path(beside).iterdir():
            if entry.is_dir():
                shutil.copytree(entry, folder / entry.name, dirs_exist_ok=True, copy_function=shutil.move)
            else:
                entry.replace(folder / entry.name)
