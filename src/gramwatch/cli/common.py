"""Shared code of the commands for a person's own network: options, images, and opening a guard."""

import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gramwatch.cli.checks import about, printable
from gramwatch.cli.launch import cores, first, processes
from gramwatch.errors import ArtifactError, GramwatchWarning, InputError, NotFittedError

if TYPE_CHECKING:
    from gramwatch.detect.detector import Detector
    from gramwatch.files.artifact import Saved
    from gramwatch.inputs.files import Files
    from gramwatch.inputs.models import Model
    from gramwatch.inputs.preprocessing import Preprocessing
    from gramwatch.inputs.readers import Images, Opener

Network = typer.Argument(
    metavar="MODEL",
    help="The network: timm:NAME, torchvision:NAME, hf:FOLDER_OR_NAME, or package.module:function, a "
    "function of yours that returns it.",
    show_default=False,
)
GuardFile = typer.Argument(metavar="GUARD", help="A file that 'gramwatch fit' wrote.", show_default=False)
OtherNetwork = typer.Option(help="The network, if the guard's file does not name it.")
Weights = typer.Option(
    help="The weights: a safetensors file, or a PyTorch checkpoint of parameters.", show_default=False
)
Pretrained = typer.Option("--pretrained", help="Let timm or torchvision load the weights they publish.")
Size = typer.Option(min=1, help="Resize the shorter side of images to this, and cut out the middle square.")
Resize = typer.Option(help="The filter for resizing: bilinear, bicubic, nearest, ...")
Mean = typer.Option(
    help="The mean of each channel, from 0 to 1: 0.485,0.456,0.406. One number: images are made grey."
)
Std = typer.Option(
    help="The standard deviation of each channel, from 0 to 1: 0.229,0.224,0.225. As many numbers as --mean."
)
OtherLevel = typer.Option(
    "--level",
    help="The share of images like those of the fit that is not flagged. By default the guard's own.",
    show_default=False,
)
WatchedTaps = typer.Option(
    "--taps",
    help="The tensors Gram watches: spread (at most 24, from the first to the last), ends, all, paper, or "
    "globs with commas between them: 'layer1.*,layer4.*'. By default those of Guard: spread. "
    "'gramwatch taps' lists them.",
    show_default=False,
)
Device = typer.Option(help="Where to compute. By default a GPU if there is one, else the CPU.")
BatchSize = typer.Option(min=1, help="The number of images in one pass.")
Workers = typer.Option(
    min=0, help="Processes that decode images. By default as many as there are cores, at most 8."
)


def _silenced(quiet: bool) -> bool:
    """With --quiet, the library's warnings are not shown either."""
    if quiet:
        warnings.simplefilter("ignore", GramwatchWarning)
    return quiet


Quiet = typer.Option("--quiet", "-q", callback=_silenced, help="Print no messages: only errors, and results.")
Json = typer.Option("--json", help="Print a summary as one JSON object on standard output.")


def numbers(text: str | None, option: str) -> tuple[float, ...] | None:
    """The numbers of an option, with commas between them."""
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"'{text}' is not a list of numbers: write 0.485,0.456,0.406", param_hint=option
        ) from None


def _check_scale(values: tuple[float, ...], option: str) -> None:
    """Make sure that means and deviations belong to pixels from 0 to 1."""
    for value in values:
        if not 0 <= value <= 1:  # NaN, too
            hint = f". On a scale to 255, {value:g} is {value / 255:.3g} here" if 1 < value <= 255 else ""
            raise typer.BadParameter(
                f"{value:g} does not lie between 0 and 1, as pixels do before they are normalised{hint}",
                param_hint=option,
            )
    if option == "--std" and min(values) == 0:
        raise typer.BadParameter("a standard deviation of 0 cannot divide", param_hint=option)


@dataclass(frozen=True)
class Given:
    """The options about preprocessing."""

    size: int | None
    resize: str | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    @staticmethod
    def of(size: int | None, resize: str | None, mean: str | None, std: str | None) -> "Given":
        """The checked options."""
        from gramwatch.cli.checks import known
        from gramwatch.inputs.preprocessing import FILTERS

        if resize is not None:
            known(resize, FILTERS, "filter", "--resize")
        means, stds = numbers(mean, "--mean"), numbers(std, "--std")
        for values, option in ((means, "--mean"), (stds, "--std")):
            if values is not None:
                _check_scale(values, option)
        if means is not None and stds is not None and len(means) != len(stds):
            raise typer.BadParameter(
                f"--mean has {len(means)} number(s), --std has {len(stds)}: give both one for each channel",
                param_hint="--mean",
            )
        return Given(size, resize, means, stds)

    @property
    def names(self) -> list[str]:
        """The names of the options that were given."""
        return [name for name, value in vars(self).items() if value is not None]

    def applied(self, preprocessing: "Preprocessing | None", name: str) -> "Preprocessing":
        """The given preprocessing with the values of the options."""
        from gramwatch.inputs.preprocessing import Preprocessing

        if preprocessing is not None:
            with about("--size, --resize, --mean, --std"):
                return preprocessing.changed(self.size, self.resize, self.mean, self.std)
        missing = [f"--{key}" for key, value in vars(self).items() if value is None]
        if missing or self.size is None or self.resize is None or self.mean is None or self.std is None:
            raise InputError(
                f"how images become inputs of {name} is not known: give {', '.join(missing)} "
                "as in the network's training"
            )
        with about("--size, --resize, --mean, --std"):
            return Preprocessing((self.size, self.size), self.size, self.resize, self.mean, self.std)


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
class Pictures:
    """The images of DATA: their keys, how to open them, and the names of their classes if known."""

    keys: "Sequence[str] | Iterable[str]"
    opener: "Opener | None" = None
    labels: list[str] | None = None
    about: str = ""

    @property
    def count(self) -> int | None:
        """The number of images, None if it is not known yet."""
        return len(self.keys) if isinstance(self.keys, Sequence) else None

    def chosen(self, which: Iterable[int]) -> "Pictures":
        """The images of the given keys."""
        assert isinstance(self.keys, Sequence)
        numbers = list(which)
        labels = None if self.labels is None else [self.labels[i] for i in numbers]
        return Pictures([self.keys[i] for i in numbers], self.opener, labels, self.about)

    def part(self, rank: int, size: int, batch_size: int) -> "Pictures":
        """The images of one of several processes: of every `size` batches one."""
        return self.chosen(i for i in range(self.count or 0) if i // batch_size % size == rank)

    def without(self, keys: "set[str]") -> "Pictures":
        """The images without those of these keys."""
        return self.chosen(i for i, key in enumerate(self.keys) if key not in keys)

    def read(self, preprocessing: "Preprocessing", batch_size: int, workers: int | None) -> "Images":
        """The images as batches."""
        from gramwatch.inputs.readers import Images

        count = default_workers(processes()) if workers is None else workers
        return Images(self.keys, preprocessing, opener=self.opener, batch_size=batch_size, workers=count)


def pictures(data: str, split: str) -> Pictures:
    """The images of a folder, a CSV, one file, or a named set."""
    from gramwatch.inputs.files import files_of
    from gramwatch.inputs.sets import CATALOGUE, NamedSet

    if data in CATALOGUE and not Path(data).exists():
        named = NamedSet.load(data, split)
        return Pictures(named.keys, named.open, None, f"{data}, {len(named.keys):,} images")
    files = files_of(Path(data))
    return Pictures(files.paths, None, files.labels, _told(data, files))


def _told(data: str, files: "Files") -> str:
    classes = f" in {len(files.classes)} classes" if files.labels else ""
    others = f"; {files.others:,} other file(s) are left out" if files.others else ""
    return f"{data}, {len(files):,} images{classes}{others}"


# --- a guard and its network -------------------------------------------------------------------------


@dataclass(frozen=True)
class Opened:
    """A guard with its network."""

    detector: "Detector"
    model: "Model"
    recorded: "Preprocessing | None"
    """The preprocessing of the fit, if the file has it."""

    @property
    def classes(self) -> list[str]:
        """The names of the classes; empty if they are not known."""
        names = self.detector.metadata.get("classes")
        return [str(name) for name in names] if isinstance(names, list) else []


def opened_guard(
    guard: Path,
    model: str | None,
    weights: Path | None,
    device: str,
    built: "dict[tuple[Any, ...], Model] | None" = None,
    *,
    calibrated: bool = True,
    level: float | None = None,
) -> Opened:
    """The guard of a file, with the network that the file or the options name, at its level or another.

    Guards that are opened with the same `built` share a network if they name the same one. If the guard must
    be `calibrated` and is not, an error says how to get one that is.
    """
    from gramwatch.guard import loading
    from gramwatch.inputs.models import resolve

    saved = read_guard(guard, level)
    name, origin = network_name(saved, model)
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
    return Opened(detector, resolved, recorded_preprocessing(saved))


def read_guard(guard: Path, level: float | None = None) -> "Saved":
    """The file of a guard, with another level than its own if one is given.

    Scores and p-values do not depend on the level. The verdicts do.
    """
    from gramwatch.files import artifact

    saved = artifact.read(guard)
    if level is None:
        return saved
    check_level(level)
    if (scores := saved.file.layout.get("calibration.scores")) is not None:
        check_ranks(scores.shape[0], level)
    return replace(
        saved, header=saved.header | {"settings": {**saved.header.get("settings", {}), "level": level}}
    )


def check_level(level: float) -> None:
    """Make sure that a level lies between 0 and 1."""
    if not 0 < level < 1:
        raise typer.BadParameter(f"{level} does not lie between 0 and 1", param_hint="--level")


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


# --- what is printed ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Voice:
    """Where messages go: to standard error, or nowhere. A summary goes to standard output."""

    quiet: bool
    as_json: bool = False

    def say(self, text: str) -> None:
        """A message."""
        if not self.quiet:
            typer.echo(printable(text), err=True)

    def note(self, text: str) -> None:
        """A message about a possible mistake."""
        self.say(f"note: {text}")

    def warn(self, text: str) -> None:
        """A message about a probable mistake. It is shown with --quiet, too."""
        if first():
            typer.secho(f"\nWARNING: {text}\n", err=True, bold=True, fg=typer.colors.RED)

    def summary(self, values: dict[str, Any]) -> None:
        """The summary, if it was asked for."""
        if self.as_json:
            typer.echo(json.dumps(values))

    def progress(self, total: int | None, done: int, doing: str) -> Any:
        """A bar with rate and time left, on a terminal only. Its `update` counts images."""
        from tqdm.auto import tqdm

        hidden = True if self.quiet else None
        return tqdm(total=total, initial=done, desc=doing, unit=" images", disable=hidden, leave=False)


def shown_errors(errors: Iterable[str], failed: int) -> Iterator[str]:
    """The first errors, and the number of further ones."""
    shown = list(errors)
    yield from shown
    if failed > len(shown):
        yield f"... and {failed - len(shown):,} more"
