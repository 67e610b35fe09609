"""`gramwatch evaluate`: how well methods tell sets of images apart, for a guard or on the demo's networks."""

import json
import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gramwatch.cli.checks import about, existing, interruptible, known, writable_folder
from gramwatch.cli.common import ImageSet, Opened, image_set, opened_guard, shown_errors
from gramwatch.cli.options import (
    GuardOrNone,
    NetworkOptions,
    OtherLevel,
    PreprocessingOptions,
    Voice,
    WorkOptions,
)
from gramwatch.errors import NotFittedError

if TYPE_CHECKING:
    from gramwatch.detect.detector import Detector
    from gramwatch.evaluation.evaluate import Evaluation, Judgement
    from gramwatch.inputs.readers import Images

FOLDER = Path("gramwatch-evaluation")
"""Where the tables of the demo's networks go, unless another folder is named."""


def evaluate(
    guard: GuardOrNone = None,
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
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help=f"The folder for tables and pictures. For the demo's networks: {FOLDER}",
            show_default=False,
        ),
    ] = None,
    protocol: Annotated[
        bool,
        typer.Option(
            "--protocol",
            help="Also follow the paper's protocol: TNR at TPR 95 % and others, after calibrating anew on a "
            "tenth of TEST, ten times.",
        ),
    ] = False,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Compare methods by the paper's protocol: names with commas between them, or 'all'. The "
            "methods that need it are fitted on --train. Without GUARD, on the demo's networks: all.",
            show_default=False,
        ),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(help="Training images for --methods: those of the guard's fit.", show_default=False),
    ] = None,
    networks: Annotated[
        str | None,
        typer.Option(
            help="Without GUARD, the demo's networks: convnet, mlp, or both with a comma between them.",
            show_default=False,
        ),
    ] = None,
    own: Annotated[
        Path | None,
        typer.Option(
            help="A Python file of your own that registers methods. It is executed.",
            callback=existing("--own"),
        ),
    ] = None,
    level: OtherLevel = None,
    network: NetworkOptions,
    given: PreprocessingOptions,
    work: WorkOptions,
    voice: Voice,
) -> None:
    """Show what a guard flags, as it is, and how well it tells other images from those of its fit: AUROC.

    Its members and the softmax baseline stand beside it. --protocol adds the paper's protocol. --methods
    compares it with other methods on the same network and images. Without a guard, methods are compared on
    the two small networks of 'gramwatch demo'. For the paper's networks: gramwatch paper.

    Examples:
    gramwatch evaluate guard.safetensors photos/test photos/other photos/blurred

    gramwatch evaluate guard.safetensors photos/test photos/other --methods all --train photos/train

    gramwatch evaluate --methods guard,gram,msp --networks mlp

    """
    from gramwatch.evaluation.compare import method_names, overviews

    if own is not None:
        runpy.run_path(str(own))
    with about("--methods"):
        names = [] if methods is None and guard is not None else method_names(methods or "all")
    if guard is None:
        if train is not None:
            raise typer.BadParameter("training images belong to a guard: name its file", param_hint="--train")
        _on_the_demo(names, networks or "convnet,mlp", output or FOLDER)
        return
    if networks is not None:
        raise typer.BadParameter("these are the demo's networks: leave GUARD out", param_hint="--networks")
    if test is None or not outliers:
        raise typer.BadParameter(
            "give images like those of the fit, then one set of other images or several", param_hint="TEST"
        )
    if output is not None:
        writable_folder(output)
    sets = {name: image_set(name, "test") for name in dict.fromkeys((test, *outliers))}
    training = None if train is None else image_set(train, "train")
    opened = opened_guard(guard, network, work.place, given, calibrated=level is not None, level=level)
    if training is None:
        _check_training(opened, names)
    voice.note(*opened.differences())
    reading = Reading(lambda images: images.read(opened.preprocessing, work), sets, training, voice)
    with interruptible(lambda: "Nothing was written."):
        judgement, evaluation = reading.results(opened.detector, names, protocol)
    printed: list[str] = []
    if judgement is not None:
        printed.append(str(judgement))
        if output is not None:
            judgement.to_csv(output / "verdicts.csv")
    if evaluation is not None:
        printed.append(overviews(opened.model.name, evaluation) if names else f"\n{evaluation}")
        if output is not None:
            evaluation.to_csv(output / "evaluation.csv")
            evaluation.to_markdown(output / "evaluation.md")
    if output is not None:
        voice.say(f"written: the tables in {output}")
    if voice.as_json:
        parts = {"verdicts": judgement, "protocol": evaluation}
        voice.summary({key: part and json.loads(part.to_json()) for key, part in parts.items()})
    else:
        typer.echo("\n".join(printed))


def _fitted_methods(detector: "Detector") -> "dict[str, Detector]":
    """The fitted methods in the file of a guard, by the names of methods."""
    from gramwatch.evaluation.compare import GRAM, GUARD
    from gramwatch.guard.guard import Guard
    from gramwatch.methods.gram import GramDetector

    if isinstance(detector, Guard):
        return {GUARD: detector, **detector.members}
    return {GRAM if isinstance(detector, GramDetector) else detector.name: detector}


def _check_training(opened: Opened, names: list[str]) -> None:
    """Make sure that no method needs training images, when there are none."""
    from gramwatch.evaluation.compare import learning

    needy = learning(name for name in names if name not in _fitted_methods(opened.detector))
    if needy:
        recorded = opened.detector.metadata.get("images")
        data = recorded.get("data") if isinstance(recorded, dict) else None
        raise typer.BadParameter(
            f"{', '.join(needy)} must be fitted on training images: give --train"
            + (f", such as --train {data}, which the guard was fitted on" if data else " FOLDER"),
            param_hint="--methods",
        )


@dataclass(frozen=True)
class Reading:
    """The sets of images of one evaluation, and how they are read."""

    read: "Callable[[ImageSet], Images]"
    sets: Mapping[str, ImageSet]
    """The first one is in-distribution."""
    training: ImageSet | None
    voice: Voice

    def results(
        self, detector: "Detector", names: list[str], protocol: bool
    ) -> "tuple[Judgement | None, Evaluation | None]":
        """The verdicts of a calibrated detector, and the figures of the methods by the paper's protocol."""
        from gramwatch.evaluation.evaluate import beside, evaluate_sets, judge_measured, measured_sets
        from gramwatch.inputs.readers import Tally

        shown = beside(detector)
        compared = self._compared(detector, names) if names else shown
        tallies = {name: Tally() for name in self.sets}
        first, *others = inputs = {
            name: self.read(images).inputs(tallies[name]) for name, images in self.sets.items()
        }
        try:
            inside, outside = measured_sets(
                shown | compared, inputs[first], {name: inputs[name] for name in others}, self.voice.heard
            )
        finally:
            for tally in tallies.values():
                self.voice.note(*shown_errors(tally.errors, tally.failed))
        judgement = None
        try:
            judgement = judge_measured(detector, inside, outside, first)
        except NotFittedError:
            self.voice.note(
                "the guard is not calibrated, so it has no threshold: the paper's protocol follows"
            )
        follow = protocol or names or judgement is None
        return judgement, evaluate_sets(compared, inside, outside) if follow else None

    def _compared(self, detector: "Detector", names: list[str]) -> "dict[str, Detector]":
        """The guard and the chosen methods. Those that the guard's file lacks are fitted."""
        from gramwatch.evaluation.compare import fitted
        from gramwatch.inputs.readers import Tally

        own, tally = _fitted_methods(detector), Tally()
        ready = {own[name].title: own[name] for name in names if name in own}
        images = self.training or next(iter(self.sets.values()))
        others = fitted(
            detector.network,
            self.read(images).inputs(tally),
            [name for name in names if name not in own],
            self.voice.note,
            progress=self.voice.heard,
        )
        self.voice.note(*shown_errors(dict.fromkeys(tally.errors), tally.failed))
        return {detector.title: detector} | ready | others


def _on_the_demo(methods: list[str], networks: str, output: Path) -> None:
    from gramwatch.evaluation.compare import NETWORKS, run

    chosen = [name.strip() for name in networks.split(",")]
    for name in chosen:
        known(name, list(NETWORKS), "network", "--networks")
    writable_folder(output)
    with interruptible(lambda: f"Finished tables and pictures are in {output}."):
        run(methods, chosen, output, typer.echo)
