"""Other methods, on equal terms: one file each, one line in the registry below."""

from gramwatch.rivals.ash import ASH
from gramwatch.rivals.base import Record, Rival, fit_together, shared_observer
from gramwatch.rivals.dice import DICE
from gramwatch.rivals.energy import Energy
from gramwatch.rivals.fgsm import fgsm
from gramwatch.rivals.gen import GEN
from gramwatch.rivals.mahalanobis import Mahalanobis
from gramwatch.rivals.max_logit import MaxLogit
from gramwatch.rivals.msp import MSP
from gramwatch.rivals.odin import ODIN
from gramwatch.rivals.react import ReAct
from gramwatch.rivals.scale import SCALE

RIVALS: dict[str, type[Rival]] = {
    method.name: method
    for method in (
        MSP,
        MaxLogit,
        Energy,
        GEN,
        ReAct,
        ASH,
        SCALE,
        DICE,
        ODIN,
        Mahalanobis,
    )
}
"""Every method, by the name users ask for it."""

__all__ = [
    "RIVALS",
    "Record",
    "Rival",
    "fgsm",
    "fit_together",
    "shared_observer",
    *sorted(m.__name__ for m in RIVALS.values()),
]
