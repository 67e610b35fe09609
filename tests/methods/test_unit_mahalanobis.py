"""Distances to classes at the ends of stages, against their formulas in float64."""

import numpy as np
import pytest
import torch

from gramwatch.methods import METHODS
from tests.guarded import Net, class_ratio, distances, early_mahalanobis, fitted_classes, images, made


@pytest.fixture
def net() -> Net:
    return made()


def unit_mahalanobis(net: Net, classes: list, x: torch.Tensor) -> np.ndarray:
    widths = [len(covariance) for _, covariance in classes]
    return np.array(
        [
            np.mean([d[:-1].min() / np.sqrt(width) for d, width in zip(each, widths, strict=True)])
            for each in distances(net, classes, x)
        ]
    )


@pytest.mark.parametrize("formula", [unit_mahalanobis, early_mahalanobis, class_ratio])
def test_distances_to_classes_equal_their_formula(net, formula):
    train, test = images(300, 0), images(40, 2, scale=1.3)
    found = METHODS[formula.__name__](net).fit(train.split(64), progress=False).score_inputs(test)[1]
    expected = formula(net, fitted_classes(net, train), test)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4)
