"""`gramwatch explain`: why one image was flagged, in three sentences and a picture."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gramwatch.cli.checks import chosen_device, existing_file, printable, writable_file
from gramwatch.cli.common import (
    Device,
    Given,
    GuardFile,
    Json,
    Mean,
    OtherNetwork,
    Resize,
    Size,
    Std,
    Voice,
    Weights,
    opened_guard,
)
from gramwatch.cli.score import differences

MOST = 10
"""The channels in the summary."""


def explain(
    guard: Annotated[Path, GuardFile],
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="An image.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The picture to draw, a PNG.", show_default=False)
    ] = None,
    model: Annotated[str | None, OtherNetwork] = None,
    weights: Annotated[Path | None, Weights] = None,
    size: Annotated[int | None, Size] = None,
    resize: Annotated[str | None, Resize] = None,
    mean: Annotated[str | None, Mean] = None,
    std: Annotated[str | None, Std] = None,
    device: Annotated[str | None, Device] = None,
    as_json: Annotated[bool, Json] = False,
) -> None:
    """Say why an image was flagged: what members, taps and channels add to its score, and where it lies.

    Example: gramwatch explain guard.safetensors photo.jpg -o why.png
    """
    from gramwatch.errors import DataError
    from gramwatch.inputs.readers import Images

    given = Given.of(size, resize, mean, std)
    existing_file(guard, "GUARD")
    if image.is_dir():
        raise typer.BadParameter(
            f"{image} is a folder: name one image. For all images of a folder, with reasons: gramwatch score "
            f"{guard} {image} -o scores.csv --report report.html",
            param_hint="IMAGE",
        )
    existing_file(image, "IMAGE")
    if output is not None:
        writable_file(output, reads=(guard, weights, image))
    opened = opened_guard(guard, model, weights, chosen_device(device))
    preprocessing = given.applied(opened.recorded or opened.model.preprocessing, opened.model.name)
    for text in differences(opened, preprocessing):
        Voice(False).note(text)
    (batch,) = Images([str(image)], preprocessing, batch_size=1, workers=0)
    if batch.inputs is None:
        raise DataError(f"{image}: {batch.images[0].error}")
    explanation = opened.detector.explain(batch.inputs)
    if output is not None:
        explanation.plot(0, output)
    if as_json:
        Voice(True, True).summary(_summary(explanation))
        return
    typer.echo(printable(str(explanation[0])))
    if output is not None:
        typer.echo(f"written: {output}", err=True)
    for note in explanation.notes:
        typer.echo(f"note: {note}", err=True)


def _summary(explanation: Any) -> dict[str, Any]:
    """The contributions as plain values. Those to an image that is not finite are left out."""
    detection, finite = explanation.detection, bool(explanation.finite[0])
    taps = {
        member: dict(zip(names, explanation.taps[member][0].tolist(), strict=True))
        for member, names in explanation.tap_names.items()
    }
    return {
        "sentences": explanation.sentences(),
        "predicted": int(detection.predicted[0]),
        "score": float(detection.score[0]) if finite else None,
        "p_value": float(detection.p_value[0]),
        "is_ood": bool(detection.is_ood[0]),
        "members": dict(zip(explanation.member_names, explanation.members[0].tolist(), strict=True))
        if finite
        else {},
        "taps": taps if finite else {},
        "channels": [vars(channel) for channel in explanation.channels(0, most=MOST)],
        "notes": list(explanation.notes),
    }
