"""`gramwatch report`: a page about scored images, one HTML file that opens offline."""

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gramwatch.cli.checks import existing_file, writable_file
from gramwatch.cli.common import Json, Quiet, Voice
from gramwatch.cli.info import facts, shown

if TYPE_CHECKING:
    from gramwatch.artifact import Saved
    from gramwatch.report.page import About

IMAGES = 24
"""The number of the most suspicious images on a page."""
NAMES = {
    "network": "network",
    "weights": "weights",
    "fitted_on": "fitted on",
    "calibrated_on": "calibrated on",
    "level": "level",
    "members": "members",
    "preprocessing": "images",
    "classes": "classes",
    "file": "file",
    "written_by": "written by",
    "fingerprint": "fingerprint of the weights",
}
"""The facts of a guard on the page, and what they are called there."""


def report(
    tables: Annotated[
        list[Path], typer.Argument(help="Tables that 'gramwatch score' wrote. Several are compared.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page. Its name ends in .html.")],
    guard: Annotated[
        Path | None, typer.Option(help="The guard that scored: the page says what it was fitted on.")
    ] = None,
    images: Annotated[
        int, typer.Option(min=0, help="The number of the most suspicious images that are shown.")
    ] = IMAGES,
    minimal: Annotated[
        bool, typer.Option("--minimal", help="No pictures: for very many images, or a small file.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a page that exists.")] = False,
    quiet: Annotated[bool, Quiet] = False,
    as_json: Annotated[bool, Json] = False,
) -> None:
    """Write a page about scored images: counts, distributions, the most suspicious, groups, a table.

    The page is one file. It opens in a browser without a connection.

    Examples:
    gramwatch report scores.csv --guard guard.safetensors -o report.html

    gramwatch report monday.csv tuesday.csv --guard guard.safetensors -o report.html

    gramwatch report scores.parquet --minimal -o report.html

    """
    for table in tables:
        existing_file(table, "TABLES")
    if guard is not None:
        existing_file(guard, "--guard")
    check_page(output, overwrite)
    voice = Voice(quiet, as_json)
    size = write_report(voice, output, tables, guard, images=images, minimal=minimal)
    voice.summary({"output": str(output), "bytes": size})


def check_page(output: Path, overwrite: bool, option: str = "--output") -> None:
    """Make sure that the page can be written, and that the packages for it are installed."""
    from gramwatch.report.charts import altair

    if output.suffix.lower() not in (".html", ".htm"):
        raise typer.BadParameter(f"the name {output} must end in .html", param_hint=option)
    if output.exists() and not overwrite:
        raise typer.BadParameter(
            f"{output} exists: name another file, or give --overwrite", param_hint=option
        )
    writable_file(output, option)
    altair()


def write_report(
    voice: Voice, output: Path, tables: Sequence[Path], guard: Path | None, *, images: int, minimal: bool
) -> int:
    """Write the page of some tables. Return its size in bytes."""
    from gramwatch import artifact
    from gramwatch.report import scores as scored
    from gramwatch.report.page import page
    from gramwatch.report.thumbnails import opener

    scores = scored.read(tables)
    about = None if guard is None else about_guard(artifact.read(guard))
    text = page(scores, about, opener=None if minimal else opener(), images=images)
    size = _write(output, text)
    voice.say(f"written: {output}, {size / 1e6:.1f} MB")
    return size


def _write(output: Path, text: str) -> int:
    """Write the page, whole or not at all."""
    data = text.encode(errors="replace")
    with NamedTemporaryFile(dir=output.parent, prefix=".gramwatch-", delete=False) as file:
        beside = Path(file.name)
    try:
        beside.write_bytes(data)
        beside.chmod(0o666 & ~_umask())
        beside.replace(output)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(f"cannot write {output}: {error.strerror or error}") from error
    return len(data)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def about_guard(saved: "Saved") -> "About":
    """What the file of a guard says, without its network."""
    import numpy as np

    from gramwatch.report.page import About
    from gramwatch.threshold import range_of_rates, threshold

    found = facts(saved)
    told = [(NAMES[name], shown(found[name])) for name in NAMES if found.get(name) is not None]
    level, scores = found["level"], _calibration_scores(saved)
    if scores is None or not isinstance(level, float) or not 0 < level < 1:
        return About(told)
    whole = not (saved.header.get("settings") or {}).get("per_class")
    return About(
        told,
        level,
        threshold(scores, level) if whole else None,
        np.asarray(scores),
        range_of_rates(len(scores), level),
    )


def _calibration_scores(saved: "Saved") -> Any:
    """The scores of the calibration images that rank. None if the file has none."""
    if "calibration.scores" not in saved.file.layout:
        return None
    scores = saved.file.tensor("calibration.scores").double()
    first = scores[:, 0] if scores.ndim == 2 else scores
    return first[first.isfinite()] if first.ndim == 1 and len(first) else None
