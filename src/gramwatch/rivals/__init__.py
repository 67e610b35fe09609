"""Other methods, on equal terms: one file each, one line in the registry below."""

from gramwatch.rivals.ash import ASH
from gramwatch.rivals.base import Record, Rival
from gramwatch.rivals.class_ratio import ClassRatio
from gramwatch.rivals.dice import DICE
from gramwatch.rivals.early_mahalanobis import EarlyMahalanobis
from gramwatch.rivals.energy import Energy
from gramwatch.rivals.fdbd import FDBD
from gramwatch.rivals.fgsm import fgsm
from gramwatch.rivals.gen import GEN
from gramwatch.rivals.knn import KNN
from gramwatch.rivals.mahalanobis import Mahalanobis
from gramwatch.rivals.max_logit import MaxLogit
from gramwatch.rivals.msp import MSP
from gramwatch.rivals.nci import NCI
from gramwatch.rivals.nnguide import NNGuide
from gramwatch.rivals.odin import ODIN
from gramwatch.rivals.outlier_exposure import OutlierExposure
from gramwatch.rivals.prior_network import PriorNetwork
from gramwatch.rivals.react import ReAct
from gramwatch.rivals.relative_mahalanobis import RelativeMahalanobis
from gramwatch.rivals.scale import SCALE
from gramwatch.rivals.semantic import Semantic
from gramwatch.rivals.unit_mahalanobis import UnitMahalanobis
from gramwatch.rivals.variational_dirichlet import VariationalDirichlet
from gramwatch.rivals.vim import ViM

RIVALS: dict[str, type[Rival]] = {
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
        RelativeMahalanobis,
        ReAct,
        ASH,
        SCALE,
        DICE,
        ODIN,
        Mahalanobis,
        UnitMahalanobis,
        EarlyMahalanobis,
        ClassRatio,
    )
}
"""Every method that can be used on any network, by the name users ask for it."""

TRAINED: dict[str, type[Rival]] = {
    method.name: method for method in (OutlierExposure, PriorNetwork, VariationalDirichlet, Semantic)
}
"""The scores that make sense only on a network trained for them: see `gramwatch.training`, same names."""


def methods_table() -> str:
    """The paper's Table 1, extended: what each method needs, in Markdown."""
    rows = [
        "| method | name | training data | outliers | gradients | retraining | cost beside the pass |",
        "| --- | --- | :---: | :---: | :---: | :---: | --- |",
        "| [**Guard**](../guard.md) | `guard` | yes | no | no | no | that of Gram and a little more |",
        "| **Gram** | `gram` | yes | no | no | no | a few passes over each watched tensor |",
    ]
    for name, method in (RIVALS | TRAINED).items():
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
    "RIVALS",
    "TRAINED",
    "Record",
    "Rival",
    "fgsm",
    "methods_table",
    *sorted(m.__name__ for m in (RIVALS | TRAINED).values()),
]
