"""Shared code of the commands for a person's own network: images, and opening a guard."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gramwatch.cli.launch import cores, processes
from gramwatch.cli.options import NetworkOptions, PreprocessingOptions, WorkOptions
from gramwatch.errors import ArtifactError, InputError, NotFittedError

if TYPE_CHECKING:
    from gramwatch.detect.detector import Detector
    from gramwatch.files.artifact import Saved
    from gramwatch.inputs.files import Files
    from gramwatch.inputs.models import Model
    from gramwatch.inputs.preprocessing import Preprocessing
    from gramwatch.inputs.readers import Images, Opener


def chosen_taps(text: str | None) -> str | list[str] | None:
    """The taps of an option: a word such as `all`, one name, or globs with commas between them.

    None if the option was not given: then `Guard` chooses.
    """
    if text is None:
        return None
    return text.split(",") if "," in text or "*" in text else text


def default_workers(processes: int = 1) -> int:
    """The number of cores that each of the processes may use, at least 1 and at most 8.

    With one less, decoding large photographs would hold the network up (`python -m lab.benchmarks.stream`).
    """
    return max(1, min(8, cores() // processes))


# --- images ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageSet:
    """The images of DATA: their keys, how to open them, and the names of their classes if known."""

    keys: "Sequence[str] | Iterable[str]"
    opener: "Opener | None" = None
    labels: list[str] | None = None
    about: str = ""

    @property
    def count(self) -> int | None:
        """The number of images, None if it is not known yet."""
        return len(self.keys) if isinstance(self.keys, Sequence) else None

    def chosen(self, which: Iterable[int]) -> "ImageSet":
        """The images of the given keys."""
        assert isinstance(self.keys, Sequence)
        numbers = list(which)
        labels = None if self.labels is None else [self.labels[i] for i in numbers]
        return ImageSet([self.keys[i] for i in numbers], self.opener, labels, self.about)

    def part(self, rank: int, size: int, batch_size: int) -> "ImageSet":
        """The images of one of several processes: of every `size` batches one."""
        return self.chosen(i for i in range(self.count or 0) if i // batch_size % size == rank)

    def without(self, keys: "set[str]") -> "ImageSet":
        """The images without those of these keys."""
        return self.chosen(i for i, key in enumerate(self.keys) if key not in keys)

    def read(self, preprocessing: "Preprocessing", work: WorkOptions) -> "Images":
        """The images as batches."""
        from gramwatch.inputs.readers import Images

        workers = default_workers(processes()) if work.workers is None else work.workers
        return Images(
            self.keys, preprocessing, opener=self.opener, batch_size=work.batch_size, workers=workers
        )


def image_set(data: str, split: str) -> ImageSet:
    """The images of a folder, a CSV, one file, or a named set."""
    from gramwatch.inputs.files import files_of
    from gramwatch.inputs.sets import CATALOGUE, NamedSet

    if data in CATALOGUE and not Path(data).exists():
        named = NamedSet.load(data, split)
        return ImageSet(named.keys, named.open, None, f"{data}, {len(named.keys):,} images")
    files = files_of(Path(data))
    return ImageSet(files.paths, None, files.labels, _described(data, files))


def _described(data: str, files: "Files") -> str:
    classes = f" in {len(files.classes)} classes" if files.labels else ""
    others = f"; {files.others:,} other file(s) are left out" if files.others else ""
    return f"{data}, {len(files):,} images{classes}{others}"


# --- a guard and its network -------------------------------------------------------------------------


@dataclass(frozen=True)
class Opened:
    """A guard with its network, and how images become its inputs."""

    detector: "Detector"
    model: "Model"
    recorded: "Preprocessing | None"
    """The preprocessing of the fit, if the file has it."""
    given: PreprocessingOptions

    @property
    def classes(self) -> list[str]:
        """The names of the classes; empty if they are not known."""
        names = self.detector.metadata.get("classes")
        return [str(name) for name in names] if isinstance(names, list) else []

    @cached_property
    def preprocessing(self) -> "Preprocessing":
        """The preprocessing of the fit or of the network, with the values of the options."""
        return self.given.applied(self.recorded or self.model.preprocessing, self.model.name)

    def differences(self) -> Iterator[str]:
        """Differences between this preprocessing and the one used for fitting."""
        if self.recorded is None:
            yield (
                "the guard's file does not say how its images were prepared. If it was otherwise than now "
                f"({self.preprocessing}), the verdicts are not valid"
            )
            return
        yield from prepared_otherwise(self.preprocessing, self.recorded)
        own, given = self.model.preprocessing, self.detector.metadata["preprocessing"].get("given")
        if own is not None and not given and self.preprocessing == self.recorded:
            for text in own.differences(self.recorded):
                yield f"the network's own preprocessing is now {text} in the fit. That of the fit is used"


def prepared_otherwise(now: "Preprocessing", fit: "Preprocessing") -> Iterator[str]:
    """Differences between this preprocessing and the one used for fitting, and their consequence."""
    for text in now.differences(fit):
        yield f"images are prepared otherwise than in the fit. {text}. The false-alarm rate does not hold"


def opened_guard(
    guard: Path,
    network: NetworkOptions,
    device: str,
    given: PreprocessingOptions = PreprocessingOptions(),  # noqa: B008
    *,
    built: "dict[tuple[Any, ...], Model] | None" = None,
    calibrated: bool = True,
    level: float | None = None,
) -> Opened:
    """The guard of a file, with the network that the file or the options name, at its level or another.

    Guards that are opened with the same `built` share a network if they name the same one. If the guard must
    be `calibrated` and is not, an error says how to get one that is.
    """
    from gramwatch.guard import loading
    from gramwatch.inputs.models import resolve

    saved, weights = read_guard(guard, level), network.weights
    name, origin = network_name(saved, network.model)
    same = origin is not None and origin.name == name
    if weights is None and same and origin is not None and origin.weights:
        weights = guard.parent / origin.weights
        if not weights.is_file():
            raise ArtifactError(
                f"{guard} was fitted with the weights {weights}, which are not there: give --weights"
            )
    pretrained, size = (origin.pretrained, origin.size) if same and origin else (False, None)
    built, key = {} if built is None else built, (name, weights, pretrained, size)
    if key not in built:
        built[key] = resolve(name, weights, pretrained=pretrained and weights is None, size=size)
    resolved = built[key]
    resolved.network.to(device)
    detector = loading.restored(saved, resolved.network)
    if calibrated:
        _check_calibrated(guard, detector)
    if level is not None:
        fewest = int(detector.calibration().ranks.sizes.min())
        check_ranks(fewest, level, " in a group of classes" if detector.per_class else "")
    return Opened(detector, resolved, recorded_preprocessing(saved), given)


def read_guard(guard: Path, level: float | None = None) -> "Saved":
    """The file of a guard, with another level than its own if one is given.

    Scores and p-values do not depend on the level. The verdicts do.
    """
    from gramwatch.files import artifact

    saved = artifact.read(guard)
    if level is None:
        return saved
    if (scores := saved.file.layout.get("calibration.scores")) is not None:
        check_ranks(scores.shape[0], level)
    return replace(
        saved, header=saved.header | {"settings": {**saved.header.get("settings", {}), "level": level}}
    )


def check_ranks(ranking: int, level: float, among: str = "") -> None:
    """Make sure that the number of ranking calibration images is enough for the level."""
    from gramwatch.detect.threshold import examples_needed

    if ranking < (needed := examples_needed(level)):
        raise typer.BadParameter(
            f"{ranking:,} calibration images rank{among}, and level {level:g} needs {needed:,}: calibrate on "
            "more images, or choose a lower level",
            param_hint="--level",
        )


def _check_calibrated(guard: Path, detector: "Detector") -> None:
    try:
        detector.calibration()
    except NotFittedError:
        raise ArtifactError(
            f"{guard} is not calibrated, so it cannot judge: fit it with --calibrate FOLDER or "
            "--hold-out 0.2, or merge guards with --calibrate FOLDER"
        ) from None


def network_name(saved: "Saved", given: str | None) -> tuple[str, Any]:
    """The name of the network, given or recorded, and the record."""
    from gramwatch.inputs.models import Origin, runs_code

    origin = Origin.of(metadata_of(saved))
    if given is not None:
        return given, origin
    if origin is None:
        raise InputError(f"{saved.path} does not say which network it was fitted on: give --model")
    if runs_code(origin.name):
        raise InputError(
            f"{saved.path} names {origin.name} as its network, which is code or may run some. No "
            f"code is run because a file says so: name it yourself, --model {origin.name}"
        )
    return origin.name, origin


def metadata_of(saved: "Saved") -> dict[str, Any]:
    """The metadata of a guard's file."""
    metadata = saved.header.get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def recorded_preprocessing(saved: "Saved") -> "Preprocessing | None":
    """The preprocessing in a guard's file, if there is one."""
    from gramwatch.files import artifact
    from gramwatch.inputs.preprocessing import Preprocessing

    recorded = metadata_of(saved).get("preprocessing")
    if recorded is None:
        return None
    with artifact.reading(saved.path):
        return Preprocessing.from_json(recorded)


def shown_errors(errors: Iterable[str], failed: int) -> Iterator[str]:
    """The first errors, and the number of further ones."""
    shown = list(errors)
    yield from shown
    if failed > len(shown):
        yield f"... and {failed - len(shown):,} more"
