"""`gramwatch live`: a page where a person gives an image and sees verdict, map and sentences."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gramwatch.cli.checks import about, chosen_device, interruptible
from gramwatch.cli.common import Opened, opened_guard
from gramwatch.cli.info import named_facts
from gramwatch.cli.options import Device, GuardOrNone, NetworkOptions, PreprocessingOptions, Quiet, Voice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gramwatch.deploy.live import Examiner, Shown
    from gramwatch.inputs.files import Files

MOST_NAMES = 8
"""The classes that the page names under its title."""
ABOUT = "The guard flags images that are unlike those of its fit."
"""The facts under the name of the network."""


def live(
    guard: GuardOrNone = None,
    *,
    demo: Annotated[
        bool, typer.Option("--demo", help="Without a guard: train a small network on digits, and guard it.")
    ] = False,
    network: NetworkOptions,
    given: PreprocessingOptions,
    device: Device = None,
    images: Annotated[
        Path | None,
        typer.Option(help="A folder, a CSV or an image: some of its images are on the page, to try."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port. 0: any that is free.")] = 8008,
    quiet: Quiet = False,
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
    if demo == (guard is not None):
        raise typer.BadParameter("give the file of a guard, or --demo", param_hint="GUARD")
    if demo and images is not None:
        raise typer.BadParameter("the demo has images of its own", param_hint="--images")
    with about("--images"):
        files = None if images is None else files_of(images)
    with about("--port"):
        address = opened_port(port)
    with address, interruptible(lambda: "Nothing was kept."):
        if guard is None:
            from gramwatch.deploy.live.demo import demo_page

            examiner, shown = demo_page(voice.say, progress=not quiet)
        else:
            opened = opened_guard(guard, network, chosen_device(device), given)
            examiner, shown = _page_of(guard, opened, files, voice)
        examiner.warm_up()
        app = create_page(examiner, shown)
        run_page(app, address, lambda url: voice.say(f"open {url} in a browser. Ctrl-C ends it"))


def _page_of(guard: Path, opened: Opened, files: "Files | None", voice: Voice) -> "tuple[Examiner, Shown]":
    from gramwatch.deploy.live import Examiner, Shown
    from gramwatch.deploy.live.shown import examples_of, made_up
    from gramwatch.files import artifact

    differences = list(opened.differences())
    voice.note(*differences)
    classes = opened.classes or opened.model.classes
    about_it = " ".join([_known(classes), ABOUT, *(f"Note: {text}." for text in differences)]).strip()
    examples = [*([] if files is None else examples_of(files)), *made_up(opened.preprocessing)]
    facts = named_facts(artifact.read(guard))
    return Examiner(opened.detector, opened.preprocessing, classes), Shown(
        guard.stem, about_it, facts, examples
    )


def _known(classes: "Sequence[str]") -> str:
    """The classes of the network in a sentence."""
    if not classes:
        return ""
    rest = f" and {len(classes) - MOST_NAMES:,} more" if len(classes) > MOST_NAMES else ""
    return f"The network knows {', '.join(classes[:MOST_NAMES])}{rest}."
