"""All methods: one file for each, one line in the registry below.

The file of a method is imported when the method is first asked for.
"""

# ruff: noqa: F401

import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from gramwatch._moved import old_names
from gramwatch.inputs.offered import Offered
from gramwatch.methods.base import Method, Record

if TYPE_CHECKING:
    from gramwatch.methods.ash import ASH
    from gramwatch.methods.cadref import CADRef
    from gramwatch.methods.class_ratio import ClassRatio
    from gramwatch.methods.dice import DICE
    from gramwatch.methods.early_mahalanobis import EarlyMahalanobis
    from gramwatch.methods.energy import Energy
    from gramwatch.methods.fdbd import FDBD
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
    from gramwatch.methods.perturb import fgsm
    from gramwatch.methods.profile import Profile
    from gramwatch.methods.react import ReAct
    from gramwatch.methods.relative_mahalanobis import RelativeMahalanobis
    from gramwatch.methods.relative_mahalanobis_pp import RelativeMahalanobisPP
    from gramwatch.methods.scale import SCALE
    from gramwatch.methods.unit_mahalanobis import UnitMahalanobis
    from gramwatch.methods.vim import ViM

_M = TypeVar("_M", bound=type[Method])


class Registry(MutableMapping[str, type[Method]]):
    """Methods by their names.

    Args:
        own: the names of classes of this package. A method and its file have one name.
        others: the methods of other packages.

    """

    def __init__(
        self, own: Mapping[str, str], others: Mapping[str, type[Method]] = MappingProxyType({})
    ) -> None:
        self._own, self._others = own, others

    @cached_property
    def _classes(self) -> dict[str, str | type[Method]]:
        return {**self._own, **self._others}

    def __getitem__(self, name: str) -> type[Method]:
        method = self._classes[name]
        if isinstance(method, str):
            method = getattr(importlib.import_module(f"gramwatch.methods.{name}"), method)
            self._classes[name] = method
        return method

    def __setitem__(self, name: str, method: type[Method]) -> None:
        self._classes[name] = method

    def __delitem__(self, name: str) -> None:
        del self._classes[name]

    def __contains__(self, name: object) -> bool:
        return name in self._classes

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)

    def __or__(self, others: Mapping[str, type[Method]]) -> dict[str, type[Method]]:
        return {**self, **others}


METHODS: Registry = Registry(
    {
        "msp": "MSP",
        "max_logit": "MaxLogit",
        "energy": "Energy",
        "gen": "GEN",
        "knn": "KNN",
        "nnguide": "NNGuide",
        "vim": "ViM",
        "fdbd": "FDBD",
        "nci": "NCI",
        "cadref": "CADRef",
        "relative_mahalanobis": "RelativeMahalanobis",
        "mahalanobis_pp": "MahalanobisPP",
        "relative_mahalanobis_pp": "RelativeMahalanobisPP",
        "react": "ReAct",
        "ash": "ASH",
        "scale": "SCALE",
        "dice": "DICE",
        "odin": "ODIN",
        "mahalanobis": "Mahalanobis",
        "unit_mahalanobis": "UnitMahalanobis",
        "early_mahalanobis": "EarlyMahalanobis",
        "class_ratio": "ClassRatio",
        "profile": "Profile",
        "image": "Image",
    }
)
"""The methods for any network, by their names."""

TRAINED: Registry = Registry({}, Offered("gramwatch.methods"))
"""The methods for networks trained for them, by their names: those of `gramwatch-lab`, if it is installed."""

OF_THE_LAB = ("outlier_exposure", "prior_network", "variational_dirichlet", "semantic")
"""The methods whose files need `gramwatch-lab`."""

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
    name = method.name
    before = METHODS.get(name) or TRAINED.get(name)
    if not name.isidentifier() or name in _RESERVED:
        raise ValueError(f"a method cannot be called {name!r}: choose a name like 'logit_gap'")
    if before is not None and before.__qualname__ != method.__qualname__:
        raise ValueError(f"'{name}' is the name of {before.__qualname__}: choose another")
    (TRAINED if method.record.retraining else METHODS)[name] = method
    return method


_NAMES = {title: name for name, title in METHODS._own.items()}
"""The methods of this package: their names, by those of their classes."""
_PLACES = _NAMES | {"fgsm": "perturb"}
"""The modules of this package, by the names that are imported from them when they are asked for."""

__all__ = ["METHODS", "TRAINED", "Record", "Method", "fgsm", "register", *sorted(_NAMES)]

_old = old_names(__name__)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _PLACES:
            return getattr(importlib.import_module(f"gramwatch.methods.{_PLACES[name]}"), name)
        return _old(name)
