"""`gramwatch live`: a page where a person gives an image and sees verdict, map and sentences."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gramwatch.cli.checks import about, chosen_device, existing_file, interruptible
from gramwatch.cli.common import (
    Device,
    Given,
    GuardFile,
    Mean,
    OtherNetwork,
    Quiet,
    Resize,
    Size,
    Std,
    Voice,
    Weights,
    opened_guard,
)
from gramwatch.cli.info import named_facts
from gramwatch.cli.score import differences

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gramwatch.deploy.live import Examiner, Shown
    from gramwatch.inputs.files import Files

MOST_NAMES = 8
"""The classes that the page names under its title."""
ABOUT = "The guard flags images that are unlike those of its fit."
"""The facts under the name of the network."""


def live(
    guard: Annotated[Path | None, GuardFile] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Without a guard: train a small network on digits, and guard it.")
    ] = False,
    model: Annotated[str | None, OtherNetwork] = None,
    weights: Annotated[Path | None, Weights] = None,
    size: Annotated[int | None, Size] = None,
    resize: Annotated[str | None, Resize] = None,
    mean: Annotated[str | None, Mean] = None,
    std: Annotated[str | None, Std] = None,
    device: Annotated[str | None, Device] = None,
    images: Annotated[
        Path | None,
        typer.Option(help="A folder, a CSV or an image: some of its images are on the page, to try."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port. 0: any that is free.")] = 8008,
    quiet: Annotated[bool, Quiet] = False,
) -> None:
    """Open a page for trying a guard: drop, draw or photograph an image, see the verdict and why.

    The page can be opened from this machine only. It needs no connection, and no image is kept. Ctrl-C ends
    it.

    Examples:
    gramwatch live --demo

    gramwatch live guard.safetensors --model timm:resnet18 --weights net.safetensors

    gramwatch live guard.safetensors --images photos/test

    """
    from gramwatch.deploy.live import create_page, opened_port, run_page
    from gramwatch.inputs.files import files_of

    voice = Voice(quiet)
    given = Given.of(size, resize, mean, std)
    if demo == (guard is not None):
        raise typer.BadParameter("give the file of a guard, or --demo", param_hint="GUARD")
    if demo and images is not None:
        raise typer.BadParameter("the demo has images of its own", param_hint="--images")
    if guard is not None:
        existing_file(guard, "GUARD")
    with about("--images"):
        files = None if images is None else files_of(images)
    with about("--port"):
        opened = opened_port(port)
    with opened, interruptible(lambda: "Nothing was kept."):
        if guard is None:
            from gramwatch.deploy.live.demo import demo_page

            examiner, shown = demo_page(voice.say, progress=not quiet)
        else:
            examiner, shown = _page_of(guard, model, weights, given, chosen_device(device), files, voice)
        examiner.warm_up()
        app = create_page(examiner, shown)
        run_page(app, opened, lambda url: voice.say(f"open {url} in a browser. Ctrl-C ends it"))


def _page_of(
    guard: Path,
    model: str | None,
    weights: Path | None,
    given: Given,
    device: str,
    files: "Files | None",
    voice: Voice,
) -> "tuple[Examiner, Shown]":
    from gramwatch.deploy.live import Examiner, Shown
    from gramwatch.deploy.live.shown import examples_of, made_up
    from gramwatch.files import artifact

    opened = opened_guard(guard, model, weights, device)
    preprocessing = given.applied(opened.recorded or opened.model.preprocessing, opened.model.name)
    told = list(differences(opened, preprocessing))
    for text in told:
        voice.note(text)
    classes = opened.classes or opened.model.classes
    about_it = " ".join([_known(classes), ABOUT, *(f"Note: {text}." for text in told)]).strip()
    examples = [*([] if files is None else examples_of(files)), *made_up(preprocessing)]
    facts = named_facts(artifact.read(guard))
    return Examiner(opened.detector, preprocessing, classes), Shown(guard.stem, about_it, facts, examples)


def _known(classes: "Sequence[str]") -> str:
    """The classes of the network in a sentence."""
    if not classes:
        return ""
    rest = f" and {len(classes) - MOST_NAMES:,} more" if len(classes) > MOST_NAMES else ""
    return f"The network knows {', '.join(classes[:MOST_NAMES])}{rest}."
