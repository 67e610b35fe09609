"""`gramwatch explain`: why one image was flagged, in three sentences and a picture."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gramwatch.cli.checks import chosen_device, existing_file, printable, writable_file
from gramwatch.cli.common import opened_guard
from gramwatch.cli.options import Device, GuardFile, Json, NetworkOptions, PreprocessingOptions, Voice

MOST = 10
"""The channels in the summary."""


def explain(
    guard: GuardFile,
    *,
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="An image.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The picture to draw, a PNG.", show_default=False)
    ] = None,
    network: NetworkOptions,
    given: PreprocessingOptions,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Say why an image was flagged: what members, taps and channels add to its score, and where it lies.

    Example: gramwatch explain guard.safetensors photo.jpg -o why.png
    """
    from gramwatch.errors import DataError
    from gramwatch.inputs.readers import Images

    if image.is_dir():
        raise typer.BadParameter(
            f"{image} is a folder: name one image. For all images of a folder, with reasons: gramwatch score "
            f"{guard} {image} -o scores.csv --report report.html",
            param_hint="IMAGE",
        )
    existing_file(image, "IMAGE")
    if output is not None:
        writable_file(output, reads=(guard, network.weights, image))
    voice = Voice(as_json=as_json)
    opened = opened_guard(guard, network, chosen_device(device), given)
    voice.note(*opened.differences())
    (batch,) = Images([str(image)], opened.preprocessing, batch_size=1, workers=0)
    if batch.inputs is None:
        raise DataError(f"{image}: {batch.images[0].error}")
    explanation = opened.detector.explain(batch.inputs)
    if output is not None:
        explanation.plot(0, output)
    if as_json:
        voice.summary(_summary(explanation))
        return
    typer.echo(printable(str(explanation[0])))
    if output is not None:
        voice.say(f"written: {output}")
    voice.note(*explanation.notes)


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
