"""`gramwatch fit`: a guard for a network of one's own, from a folder of images."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gramwatch.cli.checks import about, between, existing_file, guard_file, interruptible
from gramwatch.cli.common import ImageSet, chosen_taps, image_set, shown_errors
from gramwatch.cli.enough import CALIBRATION_IMAGES, few_to_calibrate, few_to_fit
from gramwatch.cli.launch import first, share
from gramwatch.cli.options import (
    NetworkName,
    PreprocessingOptions,
    Processes,
    Voice,
    WatchedTaps,
    Weights,
    WorkOptions,
)
from gramwatch.errors import CalibrationError, DataError, InputError

LEAST = 0.2
"""Cohen's kappa below which predictions hardly agree with folders."""

if TYPE_CHECKING:
    from gramwatch.detect.detector import Detector
    from gramwatch.detect.distributed import Shard
    from gramwatch.inputs.models import Model
    from gramwatch.inputs.preprocessing import Preprocessing
    from gramwatch.inputs.readers import Tally


def fit(
    model: NetworkName,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="Training images: a folder (with or without class folders), a CSV with a column 'path', or "
            "a named set.",
            show_default=False,
        ),
    ],
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file for the guard. Its name ends in .safetensors.")
    ],
    weights: Weights = None,
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="Let timm or torchvision load the weights they publish.")
    ] = False,
    calibrate: Annotated[
        str | None, typer.Option(help="Images to calibrate on: not in DATA, of the same kind.")
    ] = None,
    hold_out: Annotated[
        float,
        typer.Option(min=0, max=0.9, help="The share of DATA to calibrate on. 0: do not calibrate."),
    ] = 0.2,
    level: Annotated[
        float,
        typer.Option(help="The share of images like DATA that is not flagged.", callback=between("--level")),
    ] = 0.95,
    members: Annotated[
        str | None, typer.Option(help="The methods to join, with commas between them. By default Guard's.")
    ] = None,
    rehearse: Annotated[
        bool,
        typer.Option(
            help="Learn how much each member counts on this network, from outliers made of calibration "
            "images: up to 2,400 further passes. Without, all count the same.",
        ),
    ] = True,
    taps: WatchedTaps = None,
    given: PreprocessingOptions,
    seed: Annotated[int, typer.Option(help="The seed of the draw that holds images out.")] = 0,
    work: WorkOptions,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A file for progress. The same command goes on from it.")
    ] = None,
    nproc: Processes = 1,
    voice: Voice,
) -> None:
    """Fit a guard on images of the kind that the network was trained on. A part of them calibrates it.

    The file records the network, the preprocessing with its resize filter, and the names of the classes.

    Examples:
    gramwatch fit timm:resnet18 photos/train --weights net.safetensors -o guard.safetensors

    gramwatch fit torchvision:resnet50 train --pretrained --calibrate validation -o guard.safetensors

    gramwatch fit timm:resnet18 photos/train --weights net.safetensors --nproc 4 -o guard.safetensors

    gramwatch fit mypackage.nets:build train.csv --size 64 --resize bilinear --mean 0.5,0.5,0.5 --std
    0.5,0.5,0.5 -o guard.safetensors

    """
    from gramwatch.inputs.models import resolve

    if weights is not None:
        existing_file(weights, "--weights")
    guard_file(output, reads=(weights,))
    share(nproc)
    place = work.place
    with about("MODEL"):
        resolved = resolve(model, weights, pretrained=pretrained, size=given.size)
        preprocessing = given.applied(resolved.preprocessing, model)
    voice.say(f"network: {model}; images: {preprocessing}")
    fitting, calibrating = parts_of(data, calibrate, hold_out, seed)
    voice.say(f"fit: {fitting.about}")
    if calibrating is not None:
        check_enough_images(calibrating.count or 0, level)
        if calibrate is None:
            voice.note(
                f"{calibrating.count:,} images are held out to calibrate. If the network was trained on "
                "them, more new images are flagged than stated: then give --calibrate, images it has not seen"
            )
    resolved.network.to(place)
    detector = _detector(resolved, level, members, taps, rehearse)
    job = Job(detector, preprocessing, work, voice)
    with interruptible(lambda: _kept(checkpoint)):
        fitted = job.fit(fitting, checkpoint)
        calibrated = None if calibrating is None else job.calibrate(calibrating, seed)
        if calibrated and (few := few_to_fit(fitted.read, detector.calibration().how["classes"])):
            voice.note(few)
        names, agreed = list(resolved.classes), None
        if calibrating is not None and calibrated is not None:
            shown = calibrating.without(calibrated.unreadable)
            agreed = agreement(detector, shown.labels, fitting.labels, names, seed)
        if agreed is not None:
            agreed.tell(voice, names_known=bool(names))
            names = names or (agreed.folders if agreed.holds else [])
        detector.metadata |= {
            "model": _origin(model, weights, output, pretrained, given.size),
            "preprocessing": preprocessing.to_json() | {"given": given.names},
            "images": {"data": data, "count": fitted.read, "resizing": dict(fitted.changes)},
        } | ({"classes": names} if names else {})
        if first():
            detector.save(output)
    voice.say(f"written: {output}")
    voice.summary(
        {
            "output": str(output),
            "fitted": fitted.read,
            "calibrated": 0 if calibrated is None else calibrated.read,
            "unreadable": fitted.failed + (0 if calibrated is None else calibrated.failed),
            "level": level,
            "classes": names,
            "agreement": None if agreed is None else round(agreed.share, 4),
            "preprocessing": preprocessing.to_json(),
        }
    )


def _kept(checkpoint: Path | None) -> str:
    from gramwatch.detect.distributed import files_of_ranks, rank_and_size

    files = [] if checkpoint is None else files_of_ranks(checkpoint, rank_and_size()[1])
    if any(map(os.path.exists, files)):
        return f"Progress is in {checkpoint}: the same command goes on from there."
    remedy = "" if checkpoint else " With --checkpoint FILE a fit can go on after an interruption."
    return f"Nothing was written.{remedy}"


def parts_of(data: str, calibrate: str | None, share: float, seed: int) -> tuple[ImageSet, ImageSet | None]:
    """The images to fit on, and those to calibrate on."""
    from gramwatch.inputs.readers import held_out

    whole = image_set(data, "train")
    if calibrate is not None:
        return whole, image_set(calibrate, "test")
    if share == 0:
        return whole, None
    fitting, calibrating = held_out(whole.count or 0, share, seed)
    if not fitting or not calibrating:
        raise CalibrationError(
            f"{data} has {whole.count} image(s), too few to hold some out: give --calibrate"
        )
    return whole.chosen(fitting), whole.chosen(calibrating)


def check_enough_images(count: int, level: float) -> None:
    """Raise an error, before anything is computed, if there are too few images to calibrate."""
    from gramwatch.detect.measurement import calibration_needs

    needed = calibration_needs(level, split=True)
    if count < needed:
        better = f", {CALIBRATION_IMAGES:,} are recommended" if needed < CALIBRATION_IMAGES else ""
        raise CalibrationError(
            f"{count:,} images to calibrate on are too few for level {level:g}: at least {needed:,} are "
            f"needed{better}. Hold out more (--hold-out 0.5), give more by --calibrate, or lower --level"
        )


def _detector(
    resolved: "Model", level: float, members: str | None, taps: str | None, rehearse: bool
) -> "Detector":
    from gramwatch.guard.guard import Guard

    names = None if members is None else [name.strip() for name in members.split(",")]
    with about("--members"):
        return Guard(resolved.network, level=level, members=names, taps=chosen_taps(taps), rehearse=rehearse)


def _origin(
    name: str, weights: Path | None, output: Path, pretrained: bool, size: int | None
) -> dict[str, Any]:
    from gramwatch.inputs.models import Origin

    near = None if weights is None else os.path.relpath(weights.absolute(), output.absolute().parent)
    return Origin(name, near, pretrained, size).to_json()


@dataclass(frozen=True)
class Job:
    """Reading images and showing them to a detector."""

    detector: "Detector"
    preprocessing: "Preprocessing"
    work: WorkOptions
    voice: Voice

    def fit(self, images: ImageSet, checkpoint: Path | None) -> "Tally":
        """Fit on all readable images."""
        return self._shown(
            images, lambda inputs: self.detector.fit(inputs, checkpoint=checkpoint, progress=self.voice.heard)
        )

    def calibrate(self, images: ImageSet, seed: int) -> "Tally":
        """Calibrate on all readable images, and say how reliable the threshold is."""
        tally = self._shown(
            images, lambda inputs: self.detector.calibrate(inputs, seed=seed, progress=self.voice.heard)
        )
        self.voice.say(worth(tally.read, self.detector))
        if learnt := rehearsal_of(self.detector):
            self.voice.say(learnt)
        if few := few_to_calibrate(tally.read):
            self.voice.note(few)
        return tally

    def _shown(self, images: ImageSet, show: "Callable[[Shard], object]") -> "Tally":
        """Call `show` with the images of this process. Name the images that could not be read by any."""
        from gramwatch.detect.distributed import Shard, rank_and_size, together
        from gramwatch.inputs.readers import Tally

        tally, part = Tally(), images.part(*rank_and_size(), self.work.batch_size)
        read = part.read(self.preprocessing, self.work)
        try:
            show(Shard(read.inputs(tally)))
        except InputError as error:
            if tally.failed and not tally.read:
                raise DataError(f"no image could be read. {tally.errors[0]}") from None
            if not self.preprocessing.grey:
                raise
            mean, std = (f"{values[0]:g}" for values in (self.preprocessing.mean, self.preprocessing.std))
            raise InputError(
                f"{error}. Images were made grey, because the mean has one number. If the network takes "
                f"colour images, give three: --mean {mean},{mean},{mean} --std {std},{std},{std}"
            ) from error
        with together(self.detector.model, "counting images") as group:
            tally = Tally.of_all(group.gather(tally))
        if tally.failed:
            self.voice.note(f"{tally.failed:,} image(s) could not be read and are left out:")
            for line in shown_errors(tally.errors, tally.failed):
                self.voice.say(f"  {line}")
        return tally


def worth(images: int, detector: "Detector") -> str:
    """The reliability of a calibration with so many images, in words."""
    from gramwatch.detect.threshold import range_of_rates

    level = detector.level
    low, high = range_of_rates(len(detector.calibration_scores_), level)
    return (
        f"calibrated on {images:,} images: enough for level {level:g}. The rate of false alarms on images of "
        f"this kind is at most {1 - level:.2%} on average, and from {low:.2%} to {high:.2%} in nine of ten "
        "calibrations of this size"
    )


def rehearsal_of(detector: "Detector") -> str:
    """The weight of each member of a guard on its network, the largest first. Empty without rehearsal."""
    from gramwatch.guard.guard import Guard

    if not isinstance(detector, Guard) or detector.calibration().rule.weights is None:
        return ""
    weights = sorted(detector.weights_.items(), key=lambda item: -item[1])
    return "on this network: " + ", ".join(f"{name} {weight:.2f}" for name, weight in weights)


@dataclass(frozen=True)
class Agreement:
    """How often the predicted class of a calibration image is that of its folder."""

    folders: list[str]
    """The names of the folders, sorted."""
    share: float
    by_chance: float
    """The share if predictions and folders had nothing to do with each other."""
    reordered: float
    """The share in the best order of the network's classes. Half of the images choose the order, the others
    give the share."""

    @property
    def holds(self) -> bool:
        """Whether at least half of the predictions agree, and not by chance."""
        return self.share >= 0.5 and self._beyond_chance(self.share) >= LEAST

    @property
    def holds_reordered(self) -> bool:
        """Whether the folders are the network's classes in another order."""
        return self._beyond_chance(self.reordered) >= 0.5

    @property
    def is_chance(self) -> bool:
        """Whether predictions agree hardly better than by chance, whatever the order of the classes."""
        return self._beyond_chance(self.share) < LEAST and not self.holds_reordered

    def _beyond_chance(self, share: float) -> float:
        """How far a share lies on the way from chance, 0, to certainty, 1 (Cohen's kappa)."""
        return 1.0 if share > 1 - 1e-9 else (share - self.by_chance) / (1 - self.by_chance)

    def tell(self, voice: Voice, names_known: bool) -> None:
        """Say it. A network that does not know images of its own kind is worth a warning."""
        share = (
            f"the network's classes agree with the class folders on {self.share:.0%} of the calibration "
            "images"
        )
        if self.is_chance:
            voice.warn(
                f"{share}; by chance they would on {self.by_chance:.0%}. Does the network have its trained "
                "weights (--weights)? Are images prepared as in its training (--size, --resize, --mean, "
                "--std)? If not, this guard is of no use. If the folders are not the classes of the network, "
                "ignore this"
            )
        elif names_known:
            return
        elif self.holds:
            voice.say(f"classes: named by their folders, right on {self.share:.1%} of the calibration images")
        else:
            order = f", in another order on {self.reordered:.0%}" if self.holds_reordered else ""
            voice.note(f"{share}{order}. So the names of the folders are not recorded as names of classes")


def agreement(
    detector: "Detector", labels: list[str] | None, others: list[str] | None, known: list[str], seed: int
) -> Agreement | None:
    """How well predictions agree with class folders; None if there are not as many folders as classes.

    Args:
        detector: a calibrated detector.
        labels: the folders of the calibration images that were read.
        others: the folders of the images of the fit, if they have any.
        known: the names of the network's classes; empty if they are not known.
        seed: the seed of the calibration.

    """
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    from gramwatch.detect.split import halves

    calibration = detector.calibration()
    predicted, how = calibration.predicted, calibration.how
    folders = sorted({*(labels or ()), *(others or ())})
    if (
        predicted is None
        or labels is None
        or how["classes"] != len(folders)
        or how["examples"] != len(labels)
    ):
        return None
    order = known if sorted(known) == folders else folders
    _, ranking = halves(len(labels), seed)
    folder_classes = np.array([order.index(labels[int(i)]) for i in ranking])
    predicted_classes, classes = predicted.numpy(), range(len(order))
    counts = np.zeros((len(order), len(order)))
    np.add.at(counts, (predicted_classes[::2], folder_classes[::2]), 1)
    _, best = linear_sum_assignment(counts, maximize=True)
    return Agreement(
        folders,
        float((predicted_classes == folder_classes).mean()),
        sum(float((predicted_classes == i).mean() * (folder_classes == i).mean()) for i in classes),
        float((best[predicted_classes[1::2]] == folder_classes[1::2]).mean()),
    )
