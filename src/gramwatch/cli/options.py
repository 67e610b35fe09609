"""The options that several commands share, each declared once. Options that belong together are a group.

A parameter of a command whose type is a group stands for all options of the group: see `with_groups`.
"""

import inspect
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gramwatch.cli.checks import about, between, chosen_device, existing, known, printable
from gramwatch.cli.launch import device_of_rank, first
from gramwatch.errors import GramwatchWarning, InputError

if TYPE_CHECKING:
    from gramwatch.inputs.preprocessing import Preprocessing

NetworkName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="The network: timm:NAME, torchvision:NAME, hf:FOLDER_OR_NAME, or package.module:function, a "
        "function of yours that returns it.",
        show_default=False,
    ),
]
_GUARD = typer.Argument(
    metavar="GUARD",
    help="A file that 'gramwatch fit' wrote.",
    show_default=False,
    callback=existing("GUARD"),
)
GuardFile = Annotated[Path, _GUARD]
GuardOrNone = Annotated[Path | None, _GUARD]
Weights = Annotated[
    Path | None,
    typer.Option(
        help="The weights: a safetensors file, or a PyTorch checkpoint of parameters.", show_default=False
    ),
]
Size = Annotated[
    int | None,
    typer.Option(min=1, help="Resize the shorter side of images to this, and cut out the middle square."),
]
OtherLevel = Annotated[
    float | None,
    typer.Option(
        "--level",
        help="The share of images like those of the fit that is not flagged. By default the guard's own.",
        show_default=False,
        callback=between("--level"),
    ),
]
WatchedTaps = Annotated[
    str | None,
    typer.Option(
        "--taps",
        help="The tensors Gram watches: spread (at most 24, from the first to the last), ends, all, paper, "
        "or globs with commas between them: 'layer1.*,layer4.*'. By default those of Guard: spread. "
        "'gramwatch taps' lists them.",
        show_default=False,
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, help="The number of images in one pass.")]
Workers = Annotated[
    int | None,
    typer.Option(
        min=0, help="Processes that decode images. By default as many as there are cores, at most 8."
    ),
]
Device = Annotated[
    str | None, typer.Option(help="Where to compute. By default a GPU if there is one, else the CPU.")
]
Processes = Annotated[
    int, typer.Option(min=1, help="The number of processes on this machine that share the work.")
]


def _silenced(quiet: bool) -> bool:
    """With --quiet, the library's warnings are not shown either."""
    if quiet:
        warnings.simplefilter("ignore", GramwatchWarning)
    return quiet


Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", callback=_silenced, help="Print no messages: only errors, and results."),
]
Json = Annotated[bool, typer.Option("--json", help="Print a summary as one JSON object on standard output.")]


def show_facts(facts: dict[str, Any], as_json: bool, text: Callable[[Any], str] = str) -> None:
    """Print facts by name: as one JSON object, or as two columns."""
    if as_json:
        typer.echo(json.dumps(facts))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        typer.echo(printable(f"{name.replace('_', ' ').ljust(width)}  {text(value)}"))


# --- groups ------------------------------------------------------------------------------------------


def with_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command as typer reads it: the options of a group stand in the place of the group."""
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        group = parameter.annotation
        if isinstance(group, type) and is_dataclass(group):
            groups[parameter.name] = group
            parameters += inspect.signature(group).parameters.values()
        else:
            parameters.append(parameter)

    @wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    by_name = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    run.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@dataclass(frozen=True)
class NetworkOptions:
    """The network of a guard, if it is another than the guard's file names."""

    model: Annotated[str | None, typer.Option(help="The network, if the guard's file does not name it.")] = (
        None
    )
    weights: Weights = None


@dataclass(frozen=True)
class PreprocessingOptions:
    """How images become inputs, as far as it is given."""

    size: Size = None
    resize: Annotated[
        str | None, typer.Option(help="The filter for resizing: bilinear, bicubic, nearest, ...")
    ] = None
    mean: Annotated[
        str | None,
        typer.Option(
            help="The mean of each channel, from 0 to 1: 0.485,0.456,0.406. One number: images are made grey."
        ),
    ] = None
    std: Annotated[
        str | None,
        typer.Option(
            help="The standard deviation of each channel, from 0 to 1: 0.229,0.224,0.225. As many numbers "
            "as --mean."
        ),
    ] = None

    def __post_init__(self) -> None:
        """Check the values."""
        if self.resize is not None:
            from gramwatch.inputs.preprocessing import FILTERS

            known(self.resize, FILTERS, "filter", "--resize")
        means, stds = _channels(self.mean, "--mean"), _channels(self.std, "--std")
        if means is not None and stds is not None and len(means) != len(stds):
            raise typer.BadParameter(
                f"--mean has {len(means)} number(s), --std has {len(stds)}: give both one for each channel",
                param_hint="--mean",
            )

    @property
    def names(self) -> list[str]:
        """The names of the options that were given."""
        return [name for name, value in vars(self).items() if value is not None]

    def applied(self, preprocessing: "Preprocessing | None", name: str) -> "Preprocessing":
        """The given preprocessing with the values of the options."""
        from gramwatch.inputs.preprocessing import Preprocessing

        mean, std = _channels(self.mean, "--mean"), _channels(self.std, "--std")
        if preprocessing is not None:
            with about("--size, --resize, --mean, --std"):
                return preprocessing.changed(self.size, self.resize, mean, std)
        if self.size is None or self.resize is None or mean is None or std is None:
            missing = [f"--{key}" for key in vars(self) if key not in self.names]
            raise InputError(
                f"how images become inputs of {name} is not known: give {', '.join(missing)} "
                "as in the network's training"
            )
        with about("--size, --resize, --mean, --std"):
            return Preprocessing((self.size, self.size), self.size, self.resize, mean, std)


def _channels(text: str | None, option: str) -> tuple[float, ...] | None:
    """The means or deviations of an option. They belong to pixels from 0 to 1."""
    if text is None:
        return None
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"'{text}' is not a list of numbers: write 0.485,0.456,0.406", param_hint=option
        ) from None
    for value in values:
        if not 0 <= value <= 1:  # NaN, too
            hint = f". On a scale to 255, {value:g} is {value / 255:.3g} here" if 1 < value <= 255 else ""
            raise typer.BadParameter(
                f"{value:g} does not lie between 0 and 1, as pixels do before they are normalised{hint}",
                param_hint=option,
            )
    if option == "--std" and min(values) == 0:
        raise typer.BadParameter("a standard deviation of 0 cannot divide", param_hint=option)
    return values


@dataclass(frozen=True)
class WorkOptions:
    """How images are read and where they are judged."""

    batch_size: BatchSize = 64
    workers: Workers = None
    device: Device = None

    @property
    def place(self) -> str:
        """The device of this process."""
        return device_of_rank(chosen_device(self.device))


@dataclass(frozen=True)
class Voice:
    """Where messages go: to standard error, or nowhere. A summary goes to standard output.

    Of several processes, only the first one speaks.
    """

    quiet: Quiet = False
    as_json: Json = False

    @property
    def heard(self) -> bool:
        """Whether messages and progress are shown."""
        return first() and not self.quiet

    def say(self, text: str) -> None:
        """A message."""
        if self.heard:
            typer.echo(printable(text), err=True)

    def note(self, *texts: str) -> None:
        """Messages about possible mistakes."""
        for text in texts:
            self.say(f"note: {text}")

    def warn(self, text: str) -> None:
        """A message about a probable mistake. It is shown with --quiet, too."""
        if first():
            typer.secho(f"\nWARNING: {text}\n", err=True, bold=True, fg=typer.colors.RED)

    def summary(self, values: Any) -> None:
        """The summary, if it was asked for."""
        if self.as_json and first():
            typer.echo(json.dumps(values))

    def progress(self, total: int | None, done: int, doing: str) -> Any:
        """A bar with rate and time left, on a terminal only. Its `update` counts images."""
        from tqdm.auto import tqdm

        hidden = None if self.heard else True
        return tqdm(total=total, initial=done, desc=doing, unit=" images", disable=hidden, leave=False)
