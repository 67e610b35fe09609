"""Relative Mahalanobis: rare classes, labels, covariances that are singular."""

import numpy as np
import pytest
import torch

from gramwatch.errors import GramwatchWarning, InputError
from gramwatch.methods import RelativeMahalanobis
from gramwatch.observe.observation import Head, Observation
from tests.methods.observed import WIDTH, Net, double, fitted, oracle_relative


def test_class_of_one_and_class_of_none(
    net: Net, training: Observation, new: Observation, head: Head
) -> None:
    assert training.labels is not None
    labels = torch.where(training.labels == 4, 0, training.labels)
    labels[0] = 9
    few = Observation(training.logits, training.features, head, labels=labels)
    detector = fitted(RelativeMahalanobis, net, few)
    assert isinstance(detector, RelativeMahalanobis)
    assert detector.centres_ is not None
    assert detector.centres_.shape == (5, WIDTH)  # 0, 1, 2, 3 and 9
    np.testing.assert_allclose(double(detector.judged(new)), oracle_relative(few, new), rtol=1e-6)


def test_predicted_classes_stand_in(net: Net, training: Observation, new: Observation) -> None:
    without = Observation(training.logits, training.features, training.head)
    named = Observation(training.logits, training.features, training.head, labels=training.predicted)
    scores = fitted(RelativeMahalanobis, net, without).judged(new)
    assert torch.equal(scores, fitted(RelativeMahalanobis, net, named).judged(new))


@pytest.mark.parametrize("why", ["dead feature", "few examples"])
def test_singular_covariance(why: str, net: Net, training: Observation, new: Observation) -> None:
    assert training.features is not None
    if why == "dead feature":
        features = training.features.clone()
        features[:, 3] = 0
        bad = Observation(training.logits, features, training.head, labels=training.labels)
    else:
        bad = training[:11]
    with pytest.warns(GramwatchWarning, match="singular: it was shrunk") as warnings:
        detector = fitted(RelativeMahalanobis, net, bad)
    assert len(warnings) == 1
    np.testing.assert_allclose(double(detector.judged(new)), oracle_relative(bad, new, 1e-3), rtol=1e-6)


def test_no_variation_within_classes(net: Net, training: Observation) -> None:
    with pytest.raises(InputError, match="do not vary within any class"):
        fitted(RelativeMahalanobis, net, training[:5])
    for shrinkage in (0.0, 1.5):
        with pytest.raises(ValueError, match="between 0 and 1"):
            RelativeMahalanobis(net, shrinkage=shrinkage)
