"""Selection: which images of a set are outliers, with a bound on the share of mistakes among them.

Benjamini and Hochberg (1995): sort the m p-values. Select the k smallest, for the largest k with
`p_(k) <= fdr k / (m pi)`. With `pi = 1` the expected share of ordinary images among those selected, the
false-discovery rate, is at most `fdr`. This holds for p-values against one calibration set too: they depend
on each other positively (Bates, Candes, Lei, Romano and Sesia, 2023).

Storey (2002) estimates the share of ordinary images, `pi = (1 + #{p >= 1/2}) / (m / 2)`, and selects p-values
below 1/2 only. It finds more where outliers are many.

Conditions: calibration examples and the ordinary images among the m are exchangeable, and p-values are those
of a calibration with `split=True`.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from gramwatch.detect.measurement import Detection
from gramwatch.errors import InputError, warn

Procedure = Literal["bh", "storey"]
HALF = 0.5
"""Storey's lambda: p-values from here on are taken for those of ordinary images."""


@dataclass(frozen=True)
class Selection:
    """The images that were selected."""

    is_selected: Tensor
    """Whether an image is selected, `(m,)`."""
    threshold: float
    """The largest p-value that is selected; 0 if none is."""
    fdr: float
    """The false-discovery rate that was asked for."""
    ordinary: float
    """The share of ordinary images that was assumed. It is 1, or Storey's estimate if that is less."""
    needed: int | None = None
    """The number of ranking calibration images from which on the images with the smallest p-value could be
    selected, if these rank above all of them. None if something was selected."""

    @property
    def indices(self) -> Tensor:
        """The numbers of the selected images, the order as given."""
        return self.is_selected.nonzero().flatten()

    def __len__(self) -> int:
        return int(self.is_selected.sum())

    def __repr__(self) -> str:
        text = f"{len(self)} of {len(self.is_selected)} at a false-discovery rate of {self.fdr:g}"
        needed = "" if self.needed is None else f"; {self.needed:,} calibration images would have to rank"
        return f"Selection({text}{needed})"


def select(
    p_values: Tensor | Detection, fdr: float = 0.1, procedure: Procedure = "bh", *, ranking: int | None = None
) -> Selection:
    """Select outliers so that the expected share of ordinary images among them is at most `fdr`.

    p-values against n calibration images are at least `1 / (n + 1)`. If that is too much to select anything,
    a warning says how many ranking images it would take. (Half of the calibration images rank.)

    Args:
        p_values: `detection.p_value` of all images, `(m,)`, or the detection itself.
        fdr: the false-discovery rate.
        procedure: `"bh"` (Benjamini-Hochberg) or `"storey"`.
        ranking: the number of calibration images that rank, `len(guard.calibration_scores_)`. If it is not
            given, the smallest p-value is taken for the smallest possible one if it is `1 / (n + 1)` for
            any n.

    """
    p = _checked(p_values.p_value if isinstance(p_values, Detection) else p_values)
    if not 0 < fdr < 1:
        raise ValueError(f"fdr must lie between 0 and 1, got {fdr}")
    if procedure not in get_args(Procedure):
        raise ValueError(f"procedure must be 'bh' or 'storey', got {procedure!r}")
    count, storey = len(p), procedure == "storey"
    if not count:
        return Selection(p > 1, 0.0, fdr, 1.0)
    ordinary = min(1.0, (1 + int((p >= HALF).sum())) / (count * (1 - HALF))) if storey else 1.0
    limits = fdr * torch.arange(1, count + 1, dtype=torch.float64, device=p.device) / (count * ordinary)
    if storey:
        limits = limits.clamp_max(HALF - 1e-12)
    ascending = p.sort().values
    below = (ascending <= limits * (1 + 1e-12)).nonzero()  # rounding must not cost a selection
    if len(below):
        threshold = float(ascending[below[-1]])
        return Selection(p <= threshold, threshold, fdr, ordinary)
    needed = _needed(p, fdr, ordinary)
    smallest = float(ascending[0])
    if _is_smallest_possible(smallest, ranking):
        warn(
            f"nothing can be selected: p-values cannot be below {smallest:.2g} with so few calibration "
            f"images. {int((p == smallest).sum())} of {count:,} images have that p-value. To select them, "
            f"at least {needed:,} calibration images must rank"
        )
    return Selection(p > 1, 0.0, fdr, ordinary, needed)


def _is_smallest_possible(p: float, ranking: int | None) -> bool:
    """Whether p is `1 / (n + 1)`. If n is unknown: whether p can be that for some n."""
    images = 1 / p if ranking is None else ranking + 1
    return abs(p * round(images) - 1) < 1e-6


def _needed(p: Tensor, fdr: float, ordinary: float) -> int:
    """The smallest n with `1 / (n + 1) <= fdr k / (m pi)`, for the k images with the smallest p-value."""
    smallest = int((p == p.min()).sum())
    return math.ceil(len(p) * ordinary / (fdr * smallest) * (1 - 1e-12)) - 1


def _checked(p_values: Tensor) -> Tensor:
    p = torch.as_tensor(p_values).double()
    if p.ndim != 1 or not bool(((p > 0) & (p <= 1)).all()):
        raise InputError(
            f"p-values must be one axis of numbers above 0 and at most 1, got shape {tuple(p.shape)}"
            + (f" with values from {float(p.min()):.3g} to {float(p.max()):.3g}" if p.numel() else "")
        )
    return p
