"""`gramwatch score`: a verdict for every image of a folder."""

import math
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gramwatch.cli.checks import between, interruptible, new_file
from gramwatch.cli.common import ImageSet, Opened, image_set, opened_guard
from gramwatch.cli.launch import first, share
from gramwatch.cli.options import (
    GuardFile,
    NetworkOptions,
    OtherLevel,
    PreprocessingOptions,
    Processes,
    Voice,
    WorkOptions,
)
from gramwatch.cli.report import check_page, write_report
from gramwatch.cli.rows import Filed, Piped, Ranked, Row, format_of
from gramwatch.errors import GramwatchWarning

if TYPE_CHECKING:
    from gramwatch.detect.detector import Detector
    from gramwatch.inputs.preprocessing import Preprocessing
    from gramwatch.inputs.readers import Batch, Tally
    from gramwatch.stream.select import Selection

FLAGGED = 3
"""The exit code with --fail-if-flagged if an image was flagged."""


def score(
    guard: GuardFile,
    images: Annotated[
        str,
        typer.Argument(
            metavar="IMAGES",
            help="A folder, a CSV with a column 'path', an image, a named set, or - for paths on standard "
            "input, one in each line.",
            show_default=False,
        ),
    ],
    *,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The table: .csv, .jsonl or .parquet; - is standard output."),
    ] = Path("-"),
    format: Annotated[  # noqa: A002
        str | None, typer.Option(help="csv, jsonl or parquet, if the name of the output does not say it.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output that exists.")] = False,
    network: NetworkOptions,
    given: PreprocessingOptions,
    work: WorkOptions,
    level: OtherLevel = None,
    fdr: Annotated[
        float | None,
        typer.Option(
            help="Add a column 'selected': images of which on average at most this share is selected by "
            "mistake.",
            callback=between("--fdr"),
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Also write a page about the result, as 'gramwatch report' does: .html"),
    ] = None,
    nproc: Processes = 1,
    fail_if_flagged: Annotated[
        bool, typer.Option("--fail-if-flagged", help="Exit with code 3 if an image was flagged.")
    ] = False,
    voice: Voice,
) -> None:
    """Score images: predicted class, score, p-value, verdict, and the p-value of each member.

    An image that cannot be read is a row with its error. A run that was stopped goes on where it was: give
    the same command again. Exit codes: 0 scored, 1 failed, 2 wrong usage, 3 something was flagged (only with
    --fail-if-flagged), 130 interrupted.

    Examples:
    gramwatch score guard.safetensors photos/new -o scores.csv

    find photos -name '*.jpg' | gramwatch score guard.safetensors - -o - --format jsonl

    gramwatch score guard.safetensors photos/new -o scores.parquet --fail-if-flagged -q

    gramwatch score guard.safetensors photos/new -o scores.csv --fdr 0.1 --report report.html

    """
    from gramwatch.detect.distributed import rank_and_size

    kind = format_of(output, format)
    reads = (guard, network.weights, None if images == "-" else Path(images))
    several = nproc > 1 or rank_and_size()[1] > 1
    if str(output) == "-":
        _check_piped(voice.as_json, fdr, report, several)
    else:
        new_file(output, overwrite, reads=reads)
    if report is not None:
        check_page(report, overwrite, "--report", reads)
    if several and images == "-":
        raise typer.BadParameter("standard input is read by one process: name a folder", param_hint="--nproc")
    share(nproc)
    shown = image_set(images, "test") if images != "-" else _from_stdin()
    opened = opened_guard(guard, network, work.place, given, level=level)
    voice.note(*opened.differences())
    columns = columns_of(opened, fdr)
    identity = {
        "guard": _identity(opened),
        "images": images,
        "preprocessing": opened.preprocessing.to_json(),
    }
    rows = (
        Piped(kind, columns)
        if str(output) == "-"
        else Filed(output, kind, columns, identity, Ranked(*rank_and_size(), work.batch_size))
    )
    job = Scoring(opened, rows, work, voice)
    try:
        with interruptible(lambda: _kept(rows)):
            job.run(shown)
            if not first():
                return
            job.finish(fdr)
    finally:
        rows.close()
    job.tell(output)
    if report is not None:
        write_report(voice, report, [output], guard, opened, level=level, workers=work.workers)
    if job.counts["images"] and job.counts["errors"] == job.counts["images"]:
        raise typer.Exit(1)
    if fail_if_flagged and job.counts["flagged"]:
        raise typer.Exit(FLAGGED)


def _check_piped(as_json: bool, fdr: float | None, report: Path | None, several: bool) -> None:
    """Refuse options that need a table in a file: a pipe cannot be read again."""
    for option, wanted, why in (
        ("--json", as_json, "the table takes standard output"),
        ("--fdr", fdr is not None, "images are selected when all of them are scored"),
        ("--report", report is not None, "the page is made from the table"),
        ("--nproc", several, "several processes write a file"),
    ):
        if wanted:
            raise typer.BadParameter(f"{why}: give -o FILE", param_hint=option)


def _from_stdin() -> ImageSet:
    from gramwatch.inputs.files import listed

    sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    return ImageSet(listed(sys.stdin), about="paths on standard input")


def _kept(rows: Piped | Filed) -> str:
    if isinstance(rows, Piped):
        return "The rows so far are written."
    return f"The rows so far are in {rows.part}: the same command goes on from there."


def _identity(opened: Opened) -> str:
    """A checksum of all that determines the verdicts of a guard."""
    import hashlib

    scores = opened.detector.calibration_scores_.double().contiguous().numpy().tobytes()
    return hashlib.sha256(scores + repr(opened.detector.settings_as_json()).encode()).hexdigest()[:16]


def columns_of(opened: Opened, fdr: float | None = None) -> list[str]:
    """The columns of the table."""
    parts = [f"p_{name}" for name in opened.detector.members]
    selected = [] if fdr is None else ["selected"]
    return ["path", "predicted", "class", "score", "p_value", "is_ood", *selected, *parts, "note", "error"]


@dataclass
class Scoring:
    """One run over images."""

    opened: Opened
    rows: Piped | Filed
    work: WorkOptions
    voice: Voice
    counts: dict[str, int] = field(default_factory=lambda: {"images": 0, "flagged": 0, "errors": 0})
    seconds: float = 0.0
    selection: "Selection | None" = None

    def run(self, images: ImageSet) -> None:
        """Score the images that have no row yet."""
        from gramwatch.detect.distributed import together
        from gramwatch.inputs.readers import Tally

        self.tally: Tally = Tally()
        start = time.monotonic()
        with together(self.opened.detector.model, "scoring") as group:
            if group.size > 1:  # the batches are those of one process
                listed = ImageSet(list(_new(images.keys, set())), images.opener)
                images = listed.part(group.rank, group.size, self.work.batch_size)
            if isinstance(self.rows, Filed):
                self.counts |= {"images": len(self.rows.done), **self.rows.earlier}
            if done := sum(group.gather(len(self.rows.done))):
                self.voice.say(f"going on: {done:,} images were scored before")
            left = ImageSet(_new(images.keys, set(self.rows.done)), images.opener)
            with self.voice.progress(images.count, len(self.rows.done), "scoring") as bar:
                for batch in left.read(self.opened.preprocessing, self.work):
                    group.check()
                    rows = self.judged(batch)
                    self.rows.add(rows)
                    self.tally.add(batch)
                    self._count(rows)
                    bar.update(len(rows))
            counted = group.gather((self.counts, self.tally))
        self.counts = {name: sum(counts[name] for counts, _ in counted) for name in self.counts}
        self.tally = Tally.of_all([tally for _, tally in counted])
        self.seconds = time.monotonic() - start

    def finish(self, fdr: float | None) -> None:
        """Write the output. Images are selected here, when the p-values of all are known."""
        if fdr is None or isinstance(self.rows, Piped):
            self.rows.finish()
            return
        selection = self.selection = _selected(self.rows.p_values(), fdr)

        def is_selected(row: Row) -> Row:
            p_value = row["p_value"]  # None if the image could not be read
            return {"selected": None if p_value is None else p_value <= selection.threshold}

        self.rows.finish(is_selected)

    def _count(self, rows: list[Row]) -> None:
        self.counts["images"] += len(rows)
        self.counts["flagged"] += sum(bool(row["is_ood"]) for row in rows)
        self.counts["errors"] += sum(bool(row["error"]) for row in rows)

    def judged(self, batch: "Batch") -> list[Row]:
        """The rows of a batch."""
        verdicts: Iterator[Row] = iter(())
        if batch.inputs is not None:
            verdicts = self._verdicts(self.opened.detector(batch.inputs).to_dict())
        rows = []
        for image in batch.images:
            row: Row = {"path": image.key, **(next(verdicts) if not image.error else _EMPTY)}
            rows.append({**row, "note": image.note, "error": image.error})
        return rows

    def _verdicts(self, detection: dict[str, Any]) -> Iterator[Row]:
        names, parts = self.opened.classes, detection.get("parts") or {}
        for i, predicted in enumerate(detection["predicted"]):
            yield {
                "predicted": predicted,
                "class": names[predicted] if predicted < len(names) else "",
                "score": _finite(detection["score"][i]),
                "p_value": detection["p_value"][i],
                "is_ood": detection["is_ood"][i],
                **{f"p_{name}": values[i] for name, values in parts.items()},
            }

    def tell(self, output: Path) -> None:
        """The summary of the verdicts, and possible faults of the images."""
        opened, counts, level = self.opened, self.counts, self.opened.detector.level
        readable = counts["images"] - counts["errors"]
        expected = (1 - level) * readable
        self.voice.note(*resized_otherwise(opened.detector.metadata, self.tally, opened.preprocessing))
        self.voice.say(
            f"{counts['flagged']:,} of {readable:,} images flagged; about {expected:,.0f} would be, if all "
            f"were like those of the fit. {counts['errors']:,} could not be read"
        )
        selected: dict[str, Any] = {}
        if (selection := self.selection) is not None:
            self.voice.say(_in_words(selection))
            self.voice.note(*_too_few(selection, opened.detector))
            selected = {"fdr": selection.fdr, "selected": len(selection)}
            selected["largest_p_value_selected"] = selection.threshold
        if self.seconds and self.tally.read:
            rate = self.tally.read / self.seconds
            self.voice.say(f"{self.tally.read:,} images in {self.seconds:.1f} s, {rate:,.0f} each second")
        self.voice.summary(
            {
                "output": str(output),
                **counts,
                "expected_by_chance": round(expected, 3),
                "level": level,
                **selected,
                "seconds": round(self.seconds, 3),
            }
        )


_EMPTY: Row = {"predicted": None, "class": "", "score": None, "p_value": None, "is_ood": None}


def _finite(value: float) -> float | None:
    """The score. None if it is infinite, because the network's values were: JSON has no infinity."""
    return value if abs(value) < float("inf") else None


def _new(keys: Iterable[str], done: set[str]) -> Iterator[str]:
    """The keys without repetitions."""
    for key in keys:
        if key not in done:
            done.add(key)
            yield key


_WORDS = {"kept": "already had the right size", "reduced": "were reduced", "enlarged": "were enlarged"}


def resized_otherwise(
    metadata: dict[str, Any], tally: "Tally", preprocessing: "Preprocessing"
) -> Iterator[str]:
    """Warn if resizing changed most of these images in another way than most images of the fit."""
    from gramwatch.files.artifact import fits

    recorded = metadata.get("images")
    changes = recorded.get("resizing") if isinstance(recorded, dict) else None
    if not fits(changes, dict[str, int]) or not changes or not tally.changes:
        return
    then, now = max(changes, key=lambda name: changes[name]), tally.usual()
    if then == now or then not in _WORDS:
        return
    text = f"most of these images {_WORDS[now]}, most images of the fit {_WORDS[then]}"
    if "kept" in (then, now):
        text += (
            f". Here {preprocessing.resize} resizes images. The filter that resized the others before is "
            "unknown: if it is another one, such as nearest, images look out of distribution"
        )
    yield text


# --- a selection: --fdr ------------------------------------------------------------------------------


def _selected(p_values: Iterable[float], fdr: float) -> "Selection":
    """The selection among all images. `_too_few` says what the warning of `select` says."""
    import torch

    from gramwatch.stream.select import select

    values = torch.tensor(list(p_values), dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GramwatchWarning)
        return select(values, fdr)


def _in_words(selection: "Selection") -> str:
    """The number of selected images in words."""
    count = f"{len(selection):,} of {len(selection.is_selected):,} images selected"
    if not len(selection):
        return f"{count} at a false-discovery rate of {selection.fdr:g}"
    return f"{count}. On average at most {selection.fdr:.0%} of the selected are like those of the fit"


def _too_few(selection: "Selection", detector: "Detector") -> Iterator[str]:
    """Say if a single image cannot be selected, because too few calibration images rank."""
    ranking, count = int(detector.calibration().ranks.sizes.min()), len(selection.is_selected)
    least, needed = (  # rounding must not add one
        math.ceil(count / (selection.fdr * images) * (1 - 1e-12)) for images in (ranking + 1, 1)
    )
    if least > 1:
        chance = f"either none or at least {least:,} of {count:,} images are selected"
        yield (
            f"{ranking:,} calibration images rank. With so few, "
            f"{chance if least <= count else f'nothing can be selected among {count:,} images'}. To select a "
            f"single outlier, {needed - 1:,} must rank (half of the calibration images do)"
        )
