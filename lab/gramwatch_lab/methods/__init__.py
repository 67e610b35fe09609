"""The methods for networks that are trained for them. `gramwatch_lab.training` trains such networks."""

from gramwatch.methods.base import Method
from gramwatch_lab.methods.outlier_exposure import OutlierExposureScore
from gramwatch_lab.methods.prior_network import PriorNetworkScore
from gramwatch_lab.methods.semantic import SemanticScore
from gramwatch_lab.methods.variational_dirichlet import VariationalDirichletScore

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (OutlierExposureScore, PriorNetworkScore, VariationalDirichletScore, SemanticScore)
}
"""What this package offers to `gramwatch.methods.TRAINED`."""
