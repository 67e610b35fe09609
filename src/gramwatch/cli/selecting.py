"""`gramwatch score --fdr`: a set of outliers, selected when all images are scored."""

import math
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gramwatch.errors import GramwatchWarning

if TYPE_CHECKING:
    from gramwatch.detect.detector import Detector
    from gramwatch.stream.select import Selection


def check_fdr(fdr: float | None, output: Path) -> None:
    """Make sure that the rate is one, and that the rows go to a file: a pipe cannot be read again."""
    if fdr is None:
        return
    if not 0 < fdr < 1:
        raise typer.BadParameter(f"{fdr} does not lie between 0 and 1", param_hint="--fdr")
    if str(output) == "-":
        raise typer.BadParameter(
            "images are selected when all of them are scored: give -o FILE", param_hint="--fdr"
        )


def selected(p_values: Iterable[float], fdr: float) -> "Selection":
    """The selection among all images. `too_few` says what the warning of `select` says."""
    import torch

    from gramwatch.stream.select import select

    values = torch.tensor(list(p_values), dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GramwatchWarning)
        return select(values, fdr)


def is_selected(p_value: float | None, selection: "Selection") -> bool | None:
    """The cell of an image in the column `selected`. None if the image could not be read."""
    return None if p_value is None else p_value <= selection.threshold


def told(selection: "Selection") -> str:
    """The number of selected images in words."""
    said = f"{len(selection):,} of {len(selection.is_selected):,} images selected"
    if not len(selection):
        return f"{said} at a false-discovery rate of {selection.fdr:g}"
    return f"{said}. On average at most {selection.fdr:.0%} of the selected are like those of the fit"


def too_few(selection: "Selection", detector: "Detector") -> Iterator[str]:
    """Say if a single image cannot be selected, because too few calibration images rank."""
    ranking, count = int(detector.calibration().ranks.sizes.min()), len(selection.is_selected)
    least, needed = (_ceil(count / (selection.fdr * images)) for images in (ranking + 1, 1))
    if least > 1:
        chance = f"either none or at least {least:,} of {count:,} images are selected"
        yield (
            f"{ranking:,} calibration images rank. With so few, "
            f"{chance if least <= count else f'nothing can be selected among {count:,} images'}. To select a "
            f"single outlier, {needed - 1:,} must rank (half of the calibration images do)"
        )


def _ceil(number: float) -> int:
    """The next whole number. Rounding must not add one."""
    return math.ceil(number * (1 - 1e-12))


def as_json(selection: "Selection") -> dict[str, Any]:
    """The entries of the summary."""
    return {"fdr": selection.fdr, "selected": len(selection), "largest_p_value_selected": selection.threshold}
