"""`gramwatch evaluate`: how well methods tell sets of images apart, for a guard or on the demo's networks."""

import json
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gramwatch.cli.checks import about, chosen_device, existing_file, interruptible, known, writable_folder
from gramwatch.cli.common import (
    BatchSize,
    Device,
    Given,
    GuardFile,
    Json,
    Mean,
    OtherNetwork,
    Quiet,
    Resize,
    Size,
    Std,
    Voice,
    Weights,
    Workers,
    opened_guard,
    pictures,
    shown_errors,
)
from gramwatch.cli.score import differences

if TYPE_CHECKING:
    from gramwatch.detector import Detector
    from gramwatch.evaluate import Evaluation
    from gramwatch.readers import Images

FOLDER = Path("gramwatch-evaluation")
"""Where the tables of the demo's networks go, unless another folder is named."""


def evaluate(
    guard: Annotated[Path | None, GuardFile] = None,
    test: Annotated[
        str | None,
        typer.Argument(
            metavar="TEST",
            help="Images like those of the fit, not used for it: a folder, a CSV or a named set.",
            show_default=False,
        ),
    ] = None,
    outliers: Annotated[
        list[str] | None,
        typer.Argument(metavar="OUTLIERS", help="Other images: one set or several.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help=f"The folder for tables and pictures. For the demo's networks: {FOLDER}",
            show_default=False,
        ),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="On the demo's networks: methods with commas between them, or 'all'.")
    ] = "all",
    networks: Annotated[
        str, typer.Option(help="The demo's networks to use: convnet, mlp, or both with a comma between them.")
    ] = "convnet,mlp",
    own: Annotated[
        Path | None, typer.Option(help="A Python file of your own that registers methods. It is executed.")
    ] = None,
    model: Annotated[str | None, OtherNetwork] = None,
    weights: Annotated[Path | None, Weights] = None,
    size: Annotated[int | None, Size] = None,
    resize: Annotated[str | None, Resize] = None,
    mean: Annotated[str | None, Mean] = None,
    std: Annotated[str | None, Std] = None,
    batch_size: Annotated[int, BatchSize] = 64,
    workers: Annotated[int | None, Workers] = None,
    device: Annotated[str | None, Device] = None,
    quiet: Annotated[bool, Quiet] = False,
    as_json: Annotated[bool, Json] = False,
) -> None:
    """Show how well a guard tells other images from those of its fit: TNR at TPR 95 %, AUROC and others.

    Its members and the softmax baseline stand beside it. Without a guard, methods are compared on the two
    small networks of 'gramwatch demo'. For the paper's networks: gramwatch paper.

    Examples:
    gramwatch evaluate guard.safetensors photos/test photos/other photos/blurred

    gramwatch evaluate --methods guard,gram,msp --networks mlp

    """
    if guard is None:
        _on_the_demo(methods, networks, output or FOLDER, own)
        return
    existing_file(guard, "GUARD")
    if test is None or not outliers:
        raise typer.BadParameter(
            "give images like those of the fit, then one set of other images or several", param_hint="TEST"
        )
    if output is not None:
        writable_folder(output)
    voice = Voice(quiet, as_json)
    given = Given.of(size, resize, mean, std)
    names = list(dict.fromkeys((test, *outliers)))
    sets = [pictures(name, "test") for name in names]
    opened = opened_guard(guard, model, weights, chosen_device(device), calibrated=False)
    preprocessing = given.applied(opened.recorded or opened.model.preprocessing, opened.model.name)
    for text in differences(opened, preprocessing):
        voice.note(text)
    with interruptible(lambda: "Nothing was written."):
        found = _evaluated(
            opened.detector,
            {
                name: images.read(preprocessing, batch_size, workers)
                for name, images in zip(names, sets, strict=True)
            },
            voice,
        )
    if output is not None:
        found.to_csv(output / "evaluation.csv")
        found.to_markdown(output / "evaluation.md")
        voice.say(f"written: {output / 'evaluation.csv'} and evaluation.md")
    if not quiet and not as_json:
        typer.echo(str(found))
    voice.summary(json.loads(found.to_json()))


def _evaluated(detector: "Detector", sets: "dict[str, Images]", voice: Voice) -> "Evaluation":
    """Compare the first set with each of the others. Images that cannot be read are named."""
    from gramwatch.evaluate import evaluate
    from gramwatch.readers import Tally

    tallies = {name: Tally() for name in sets}
    inputs = {name: images.inputs(tallies[name]) for name, images in sets.items()}
    first, *others = inputs
    try:
        return evaluate(
            detector, inputs[first], {name: inputs[name] for name in others}, progress=not voice.quiet
        )
    finally:
        for tally in tallies.values():
            for text in shown_errors(tally.errors, tally.failed):
                voice.note(text)


def _on_the_demo(methods: str, networks: str, output: Path, own: Path | None) -> None:
    from gramwatch.paper.compare import NETWORKS, method_names, run

    if own is not None:
        existing_file(own, "--own")
        runpy.run_path(str(own))
    with about("--methods"):
        method_names(methods)
    chosen = [name.strip() for name in networks.split(",")]
    for name in chosen:
        known(name, list(NETWORKS), "network", "--networks")
    writable_folder(output)
    with interruptible(lambda: f"Finished tables and pictures are in {output}."):
        run(methods, chosen, output, typer.echo)
