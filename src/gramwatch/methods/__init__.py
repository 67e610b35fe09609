"""All methods except Gram: one file for each method, one line in the registry below."""

from typing import TYPE_CHECKING, TypeVar

from gramwatch._moved import old_names
from gramwatch.methods.ash import ASH
from gramwatch.methods.base import Method, Record
from gramwatch.methods.cadref import CADRef
from gramwatch.methods.class_ratio import ClassRatio
from gramwatch.methods.dice import DICE
from gramwatch.methods.early_mahalanobis import EarlyMahalanobis
from gramwatch.methods.energy import Energy
from gramwatch.methods.fdbd import FDBD
from gramwatch.methods.fgsm import fgsm
from gramwatch.methods.gen import GEN
from gramwatch.methods.image import Image
from gramwatch.methods.knn import KNN
from gramwatch.methods.mahalanobis import Mahalanobis
from gramwatch.methods.mahalanobis_pp import MahalanobisPP
from gramwatch.methods.max_logit import MaxLogit
from gramwatch.methods.msp import MSP
from gramwatch.methods.nci import NCI
from gramwatch.methods.nnguide import NNGuide
from gramwatch.methods.odin import ODIN
from gramwatch.methods.outlier_exposure import OutlierExposureScore
from gramwatch.methods.prior_network import PriorNetworkScore
from gramwatch.methods.profile import Profile
from gramwatch.methods.react import ReAct
from gramwatch.methods.relative_mahalanobis import RelativeMahalanobis
from gramwatch.methods.relative_mahalanobis_pp import RelativeMahalanobisPP
from gramwatch.methods.scale import SCALE
from gramwatch.methods.semantic import SemanticScore
from gramwatch.methods.unit_mahalanobis import UnitMahalanobis
from gramwatch.methods.variational_dirichlet import VariationalDirichletScore
from gramwatch.methods.vim import ViM

_M = TypeVar("_M", bound=type[Method])

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        MSP,
        MaxLogit,
        Energy,
        GEN,
        KNN,
        NNGuide,
        ViM,
        FDBD,
        NCI,
        CADRef,
        RelativeMahalanobis,
        MahalanobisPP,
        RelativeMahalanobisPP,
        ReAct,
        ASH,
        SCALE,
        DICE,
        ODIN,
        Mahalanobis,
        UnitMahalanobis,
        EarlyMahalanobis,
        ClassRatio,
        Profile,
        Image,
    )
}
"""The methods for any network, by their names."""

TRAINED: dict[str, type[Method]] = {
    method.name: method
    for method in (OutlierExposureScore, PriorNetworkScore, VariationalDirichletScore, SemanticScore)
}
"""The methods for networks trained for them, by their names. `gramwatch_lab.training` has the same names."""

_RESERVED = ("gram", "guard")
"""Names of detectors that are not methods."""


def register(method: _M) -> _M:
    """Add a method of your own to the registry.

    Then `Guard(members=[...])`, `gramwatch.load` and `gramwatch evaluate --methods all` find it by its name.
    `register` can be used as a decorator. If a class is defined again, as in a notebook, the new class
    replaces the old one.

    Example:
        >>> gramwatch.methods.register(LogitGap)
        >>> guard = gramwatch.Guard(model, members=["gram", "logit_gap"])

    Args:
        method: a subclass of `Method`, with a `name` and a `record`.

    """
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise TypeError(f"{method!r} is no subclass of gramwatch.methods.Method")
    for attribute, kind in (("name", str), ("record", Record)):
        if not isinstance(getattr(method, attribute, None), kind):
            raise TypeError(f"{method.__name__} needs a class attribute '{attribute}', a {kind.__name__}")
    name, before = method.name, (METHODS | TRAINED).get(method.name)
    if not name.isidentifier() or name in _RESERVED:
        raise ValueError(f"a method cannot be called {name!r}: choose a name like 'logit_gap'")
    if before is not None and before.__qualname__ != method.__qualname__:
        raise ValueError(f"'{name}' is the name of {before.__qualname__}: choose another")
    (TRAINED if method.record.retraining else METHODS)[name] = method
    return method


def methods_table() -> str:
    """The paper's Table 1, extended: what each method needs, in Markdown."""
    rows = [
        "| method | name | training data | outliers | gradients | retraining | cost beside the pass |",
        "| --- | --- | :---: | :---: | :---: | :---: | --- |",
        "| [**Guard**](../guard.md) | `guard` | yes | no | no | no | that of Gram and a little more |",
        "| **Gram** | `gram` | yes | no | no | no | a few passes over each watched tensor |",
    ]
    for name, method in (METHODS | TRAINED).items():
        record = method.record
        outliers = ("in training" if record.retraining else "to be tuned") if record.outliers else "no"
        fitted, gradients, retraining = (
            "yes" if needed else "no" for needed in (record.fitted, record.gradients, record.retraining)
        )
        cells = (
            f"[{record.title}]({name}.md)",
            f"`{name}`",
            fitted,
            outliers,
            gradients,
            retraining,
            record.cost,
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


__all__ = [
    "METHODS",
    "TRAINED",
    "Record",
    "Method",
    "fgsm",
    "methods_table",
    "register",
    *sorted(m.__name__ for m in (METHODS | TRAINED).values()),
]

if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
