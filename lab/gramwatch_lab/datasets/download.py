"""Downloading sets from their publishers. A download can be resumed. It is checked, then moved into place."""

import glob
import hashlib
import http.client
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gramwatch.errors import DataError, MissingExtraError, warn
from gramwatch.files import __version__
from gramwatch.inputs.sets import Source
from gramwatch_lab.datasets.folder import image_files
from gramwatch_lab.datasets.images import check_image

CHUNK = 1 << 20
ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip")
MOST_MEMBERS = 1_000_000
MOST_UNPACKED = 32 * 2**30
MOST_UNPACKED_OF_LITTLE = 100 * 2**20
MOST_RATIO = 20
"""The largest ratio of the unpacked size to the size of the archive, unless 100 MiB is more.

Compressed images hardly shrink in an archive."""


@dataclass(frozen=True)
class Download:
    """One file as its publisher offers it."""

    url: str
    md5: str | None
    """None: unknown."""
    cited: str = ""
    """The publication that has the checksums."""
    folder: str = ""
    """The folder of the file, below the root. An archive is unpacked there."""
    sha256: str | None = None
    """None: unknown. If it is known, the file is compared with it and not with the MD5."""
    size: int | None = None
    """The size in bytes. None: unknown."""

    @property
    def has_checksum(self) -> bool:
        """Whether a checksum is known."""
        return self.md5 is not None or self.sha256 is not None

    @property
    def file(self) -> str:
        """The file's name."""
        return self.url.rpartition("/")[2]


def is_archive(download: Download) -> bool:
    """Whether the file must be unpacked. A single `.gz` file, as of MNIST, is read without unpacking."""
    return download.file.endswith(ARCHIVES)


def is_present(source: Source, root: Path) -> bool:
    """Whether the file or folder of the set exists."""
    return bool(source.place) and any(root.glob(source.place))


def checksum_of(path: Path, kind: str) -> str:
    """The MD5 or SHA-256 of a file. MD5 detects damage, not forgery."""
    digest = hashlib.new(kind, usedforsecurity=kind != "md5")
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def check(path: Path, download: Download) -> None:
    """Compare a file with its published size and checksum, if these are known."""
    size = path.stat().st_size
    if download.size is not None and size != download.size:
        raise DataError(
            f"{path} is damaged, packed anew or another file: it has {size:,} bytes, the published one has "
            f"{download.size:,} ({download.cited}). Remove it and get it again"
        )
    for kind, name, published in (
        ("sha256", "SHA-256", download.sha256),
        ("md5", "MD5", None if download.sha256 else download.md5),
    ):
        if published is not None and (actual := checksum_of(path, kind)) != published:
            raise DataError(
                f"{path} is damaged, packed anew or another file: its {name} is {actual}, the published one "
                f"is {published} ({download.cited}). Remove it and get it again"
            )


def get(source: Source, root: Path, say: Callable[[str], None] = print, again: bool = False) -> None:
    """Download a set, check it, and put it where `load` looks for it. Existing files stay."""
    if not source.downloads:
        raise DataError(f"{source.title} cannot be downloaded: {source.about}")
    for download in source.downloads:
        path = root / download.folder / download.file
        _remove_left(path)
        if is_archive(download) and is_present(source, root) and not again:
            say(f"{source.title} is there already: {root / source.place}")
            continue
        if path.exists():
            check(path, download)
            say(f"{path} is there already")
        else:
            fetch(download, path)
            say(f"{path}: {'checksum right' if download.has_checksum else 'no checksum is known'}")
        if not download.has_checksum:
            warn(
                f"no checksum of {download.file} is known: it is used as {download.url} sent it, and only "
                "its images are checked"
            )
        if is_archive(download):
            unpack(path, path.parent, look=not download.has_checksum)
            say(f"unpacked into {path.parent}")


def fetch(download: Download, path: Path) -> None:
    """Download one file. The part that an earlier attempt received is kept (`.part`) and continued."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    if not download.has_checksum:
        part.unlink(missing_ok=True)  # without a checksum, a mixture of two files would go unnoticed
    try:
        _transfer(download, part)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"{download.url} could not be downloaded ({error}). Run the command again to continue, or get "
            f"{download.file} by other means, put it in {path.parent} and run the command again"
        ) from None
    try:
        check(part, download)
    except DataError:
        part.unlink()  # a wrong file cannot be continued
        raise
    part.replace(path)


class _SameOrSafer(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but never from https to another protocol."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """The request to the new address."""
        if req.type == "https" and not newurl.lower().startswith("https:"):
            raise OSError(f"it redirects to {newurl}, which is not encrypted")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _transfer(download: Download, part: Path) -> None:
    from tqdm.auto import tqdm

    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(download.url, headers={"User-Agent": f"gramwatch/{__version__}"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = urllib.request.build_opener(_SameOrSafer).open(request, timeout=60)
    except urllib.error.HTTPError as error:
        if have and error.code == 416:  # no bytes are left: the file is whole, or its checksum is wrong
            return
        raise
    with response:
        if response.status != 206:  # the server starts from the beginning
            have = 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else download.size
        if total is None and not download.has_checksum:
            raise OSError("the server does not say how long it is, and no checksum is known")
        if download.size is not None and total != download.size:
            raise OSError(f"the server sends {total:,} bytes, the published file has {download.size:,}")
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
                if total is not None and file.tell() > total:
                    break  # the check of the size below fails
    if total is not None and (size := part.stat().st_size) != total:
        if size > total:
            part.unlink()
        raise OSError(f"the connection ended after {size:,} of {total:,} bytes")


class _Counted:
    """Counts the unpacked members and bytes, and refuses more than a set of images needs."""

    def __init__(self, archive: Path) -> None:
        self._most = max(MOST_UNPACKED_OF_LITTLE, MOST_RATIO * archive.stat().st_size)
        self._most = min(self._most, MOST_UNPACKED)
        self._members = self._size = 0

    def add(self, size: int) -> None:
        """Count one member of `size` bytes."""
        self._members, self._size = self._members + 1, self._size + size
        if self._members > MOST_MEMBERS:
            raise ValueError(f"it has more than {MOST_MEMBERS:,} members")
        if self._size > self._most:
            raise ValueError(f"it unpacks to more than {self._most:,} bytes")


def _remove_left(archive: Path) -> None:
    """Remove what a killed process left when it unpacked this archive."""
    for left in archive.parent.glob(f"{glob.escape(_prefix(archive))}*"):
        shutil.rmtree(left, ignore_errors=True)


def _prefix(archive: Path) -> str:
    """How the names of the temporary folders of an archive begin."""
    return f".unpacking-{archive.name}-"


def unpack(archive: Path, folder: Path, *, look: bool = False) -> None:
    """Unpack into a temporary folder, then move everything. An interruption leaves no half of a folder.

    Members that would land outside the folder, links out of it, and devices are refused. An archive that
    unpacks to far more than images need is refused.

    Args:
        archive: the file.
        folder: the folder for its contents.
        look: make sure that every file with the name of an image is an image.

    """
    if not hasattr(tarfile, "data_filter"):
        raise DataError(
            f"{archive} is there, but this Python is too old to unpack it safely: update to its latest patch "
            "release, or unpack the file by hand"
        )
    with tempfile.TemporaryDirectory(prefix=_prefix(archive), dir=folder) as beside:
        try:
            _extract(archive, beside, to_the_end=look)
            if look:
                for image in image_files(Path(beside)):
                    check_image(image)
        except MissingExtraError:
            raise
        except Exception as error:  # a damaged archive can raise nearly anything
            raise DataError(f"{archive} cannot be unpacked: {error!s:.300}") from None
        for entry in Path(beside).iterdir():
            _move(entry, folder / entry.name)


def _move(entry: Path, place: Path) -> None:
    """Move a file or a folder, in one step if nothing is there. A folder that exists takes the new files."""
    if entry.is_dir() and place.exists():
        shutil.copytree(entry, place, dirs_exist_ok=True, copy_function=shutil.move)
    else:
        entry.replace(place)


def _extract(archive: Path, beside: str, to_the_end: bool) -> None:
    counted = _Counted(archive)

    def counting(member: tarfile.TarInfo, place: str) -> tarfile.TarInfo | None:
        counted.add(member.size)
        return tarfile.data_filter(member, place)

    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as packed:
            for member in packed.infolist():
                counted.add(member.file_size)
            packed.extractall(beside)
    else:
        with tarfile.open(archive) as tar:
            tar.extractall(beside, filter=counting)
            if to_the_end:
                _check_end(tar)


def _check_end(tar: tarfile.TarFile) -> None:
    """Make sure that zeros follow the last member. `tarfile` stops silently at damage."""
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    length = 0
    while chunk := tar.fileobj.read(CHUNK):
        length += len(chunk)
        if any(chunk):
            raise ValueError(f"it is damaged after {len(tar.getmembers()):,} members")
    if length < tarfile.BLOCKSIZE:
        raise ValueError(f"it ends after {len(tar.getmembers()):,} members without saying so")
