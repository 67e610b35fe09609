"""`gramwatch report`: a page about scored images, one HTML file that opens offline."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gramwatch.cli.checks import chosen_device, existing, new_file
from gramwatch.cli.common import Opened, default_workers, opened_guard, read_guard
from gramwatch.cli.info import facts, named_facts
from gramwatch.cli.options import Device, NetworkOptions, OtherLevel, Voice, Workers
from gramwatch.errors import DataError

if TYPE_CHECKING:
    from gramwatch.files.artifact import Saved
    from gramwatch.inputs.readers import Opener
    from gramwatch.report.page import About, Reasons
    from gramwatch.report.scores import Scores

IMAGES = 24
"""The number of the most suspicious images on a page."""


def report(
    tables: Annotated[
        list[Path],
        typer.Argument(
            metavar="TABLES",
            help="Tables that 'gramwatch score' wrote. Several are compared.",
            callback=existing("TABLES"),
        ),
    ],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page. Its name ends in .html.")],
    guard: Annotated[
        Path | None,
        typer.Option(
            help="The guard that scored: the page says what it was fitted on, and why images are flagged.",
            callback=existing("--guard"),
        ),
    ] = None,
    level: OtherLevel = None,
    network: NetworkOptions,
    explain: Annotated[
        bool,
        typer.Option("--explain/--no-explain", help="Run the network again to say why images are flagged."),
    ] = True,
    images: Annotated[
        int, typer.Option(min=0, help="The number of the most suspicious images that are shown.")
    ] = IMAGES,
    minimal: Annotated[
        bool,
        typer.Option("--minimal", help="No pictures and no explanations: for very many images."),
    ] = False,
    workers: Workers = None,
    device: Device = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a page that exists.")] = False,
    voice: Voice,
) -> None:
    """Write a page about scored images: counts, distributions, the most suspicious, groups, a table.

    The page is one file. It opens in a browser without a connection.

    Examples:
    gramwatch report scores.csv --guard guard.safetensors -o report.html

    gramwatch report monday.csv tuesday.csv --guard guard.safetensors -o report.html

    gramwatch report scores.parquet --minimal -o report.html

    gramwatch report scores.csv --guard guard.safetensors -o report.html --json | jq '.groups[0].images'

    """
    check_page(output, overwrite, reads=(*tables, guard, network.weights))
    opened = None
    if guard is not None and explain and not minimal:
        opened = opened_guard(guard, network, chosen_device(device), level=level)
    summary = write_report(
        voice, output, tables, guard, opened, images=images, minimal=minimal, level=level, workers=workers
    )
    voice.summary(summary)


def check_page(
    output: Path, overwrite: bool, option: str = "--output", reads: Iterable[Path | None] = ()
) -> None:
    """Make sure that the page can be written, and that the packages for it are installed."""
    from gramwatch.report.charts import altair

    if output.suffix.lower() not in (".html", ".htm"):
        raise typer.BadParameter(f"the name {output} must end in .html", param_hint=option)
    new_file(output, overwrite, option, reads)
    altair()


def write_report(
    voice: Voice,
    output: Path,
    tables: Sequence[Path],
    guard: Path | None,
    opened: Opened | None = None,
    *,
    images: int = IMAGES,
    minimal: bool = False,
    level: float | None = None,
    workers: int | None = None,
) -> dict[str, Any]:
    """Write the page of some tables. An opened guard says why. Return a summary."""
    from gramwatch.explain.thumbnails import Finder
    from gramwatch.files.writing import write_text
    from gramwatch.report import scores as scored
    from gramwatch.report.page import About, page

    scores, opener = scored.read(tables), None if minimal else Finder()
    about = About(level=level) if guard is None else about_guard(read_guard(guard, level))
    reasons = None
    if opened is not None and opener is not None:
        reasons = _reasons(opened, scores, opener, images, workers)
    text = page(scores, about, reasons, opener=opener, images=images)
    write_text(output, text, errors="replace")
    size = output.stat().st_size
    voice.say(f"written: {output}, {size / 1e6:.1f} MB")
    summary: dict[str, Any] = {"output": str(output), "bytes": size}
    if reasons is not None:
        summary["groups"] = [
            {"title": group.title, "about": group.about, "images": [scores.paths[i] for i in group.images]}
            for group in reasons.groups
        ]
    return summary


def _reasons(
    opened: Opened, scores: "Scores", opener: "Opener", images: int, workers: int | None
) -> "Reasons":
    from gramwatch.report.explained import Explainer

    detector = opened.detector
    members = list(detector.members)
    if members != list(scores.parts):
        raise DataError(
            f"the table has the members {', '.join(scores.parts) or 'none'}, the guard "
            f"{', '.join(members) or 'none'}: give the guard that wrote the table, or --no-explain"
        )
    count = default_workers() if workers is None else workers
    return Explainer(detector, opened.preprocessing, scores, opener, count).reasons(images)


def about_guard(saved: "Saved") -> "About":
    """The contents of a guard's file, without its network."""
    import numpy as np

    from gramwatch.detect.measurement import tolerance_in
    from gramwatch.detect.threshold import range_of_rates, threshold
    from gramwatch.report.page import About

    names_and_texts, level, scores = named_facts(saved), facts(saved)["level"], _calibration_scores(saved)
    if scores is None or not isinstance(level, float) or not 0 < level < 1:
        return About(names_and_texts)
    whole = not (saved.header.get("settings") or {}).get("per_class")
    how = saved.header.get("calibration") or {}
    kinds = len(how.get("tolerance") or [0.0])
    return About(
        names_and_texts,
        level,
        threshold(scores + tolerance_in(how, kinds)[0], level) if whole else None,
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
