"""`gramwatch merge`: one guard from guards that were fitted on parts of the data."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gramwatch.cli.checks import about, existing, guard_file, interruptible
from gramwatch.cli.common import image_set, opened_guard
from gramwatch.cli.fit import Job, agreement, check_enough_images
from gramwatch.cli.options import NetworkOptions, Voice, Weights, WorkOptions
from gramwatch.errors import ArtifactError

if TYPE_CHECKING:
    from gramwatch.inputs.models import Model


def merge(
    guards: Annotated[
        list[Path],
        typer.Argument(
            metavar="GUARDS",
            help="Files of guards of one network.",
            show_default=False,
            callback=existing("GUARDS"),
        ),
    ],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file for the merged guard.")],
    calibrate: Annotated[
        str | None,
        typer.Option(help="Images to calibrate on. Without them the merged guard is not calibrated."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The network, if the files do not name it.")] = None,
    weights: Weights = None,
    seed: Annotated[int, typer.Option(help="The seed of the calibration.")] = 0,
    work: WorkOptions,
    voice: Voice,
) -> None:
    """Merge guards that were fitted on different images. The result equals one fit on all of them.

    A merged guard must be calibrated anew, on images that none of the guards was fitted on.

    Example: gramwatch merge a.safetensors b.safetensors --calibrate photos/validation -o both.safetensors
    """
    if len(guards) < 2:
        raise typer.BadParameter("a merge needs two guards or more", param_hint="GUARDS")
    guard_file(output, reads=(*guards, weights))
    network, place = NetworkOptions(model, weights), work.place
    built: dict[tuple[Any, ...], Model] = {}
    first, *others = (opened_guard(guard, network, place, built=built, calibrated=False) for guard in guards)
    images = None if calibrate is None else image_set(calibrate, "test")
    if images is not None:
        check_enough_images(images.count or 0, first.detector.level)
    for path, other in zip(guards[1:], others, strict=True):
        if other.recorded != first.recorded:
            raise ArtifactError(
                f"{guards[0]} and {path} were fitted on images that were prepared in different ways: "
                f"{first.recorded}; {other.recorded}"
            )
        with about("GUARDS"):
            first.detector.merge(other.detector)
    with interruptible(lambda: "Nothing was written."):
        if images is not None:
            if first.recorded is None:
                raise ArtifactError(f"{guards[0]} does not say how images are prepared: calibrate in Python")
            read = Job(first.detector, first.recorded, work, voice).calibrate(images, seed)
            labels, known = images.without(read.unreadable).labels, first.classes
            agreed = agreement(first.detector, labels, None, known, seed)
            if agreed is not None:
                agreed.tell(voice, names_known=bool(known))
                if agreed.holds and not known:
                    first.detector.metadata["classes"] = agreed.folders
        _count_all([shard.detector.metadata for shard in (first, *others)])
        first.detector.save(output)
    if images is None:
        voice.note("the merged guard is not calibrated: it cannot score yet. Merge with --calibrate FOLDER")
    voice.say(f"written: {output}")
    voice.summary({"output": str(output), "merged": len(guards), "calibrated": images is not None})


def _count_all(metadata: list[dict[str, object]]) -> None:
    """Add up the images of all guards, and the changes by resizing, in the metadata of the first guard."""
    from gramwatch.files.artifact import fits

    records = [entry.get("images") for entry in metadata]
    counted = [
        record
        for record in records
        if isinstance(record, dict)
        and fits(record.get("resizing"), dict[str, int])
        and fits(record.get("count"), int)
    ]
    if len(counted) == len(records):
        changes: dict[str, int] = {}
        for record in counted:
            for name, count in record["resizing"].items():
                changes[name] = changes.get(name, 0) + count
        data = ", ".join(str(record.get("data")) for record in counted)
        count = sum(record["count"] for record in counted)
        metadata[0]["images"] = {"data": data, "count": count, "resizing": changes}
