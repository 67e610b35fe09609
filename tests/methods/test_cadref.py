"""CADRef: classes that were never predicted, and energies that are not positive."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from gramwatch.errors import GramwatchWarning
from gramwatch.methods import CADRef
from gramwatch.observe.observation import Head, Observation
from tests.methods.observed import CLASSES, WIDTH, Net, double, fitted


def moved(observation: Observation, by: float) -> Observation:
    """The same with a constant added to all logits."""
    return Observation(observation.logits + by, observation.features, observation.head)


def test_a_class_that_was_never_predicted_has_the_mean_of_all_examples(
    net: Net, training: Observation, head: Head
) -> None:
    seen = training[training.predicted != 4]
    features: Tensor = torch.rand(1, WIDTH) + 0.1
    new = Observation(torch.eye(CLASSES)[4:] * 20, features, head)
    assert int(new.predicted) == 4
    deviation = double(features)[0] - double(seen.features).mean(0)
    ahead = np.clip(deviation * np.sign(double(head.weight)[4]), 0, None).sum()
    behind = np.clip(-deviation * np.sign(double(head.weight)[4]), 0, None).sum()
    mean = double(seen.logits.double().logsumexp(1)).mean()
    expected = (ahead / double(new.logits.double().logsumexp(1))[0] + behind / mean) / np.abs(
        double(features)
    ).sum()
    np.testing.assert_allclose(double(fitted(CADRef, net, seen).judged(new)), [expected], rtol=1e-6)


def test_less_confidence_never_scores_lower(net: Net, training: Observation, new: Observation) -> None:
    """The published quotient would turn its sign where the energy does."""
    detector = fitted(CADRef, net, training)
    scores = [detector.judged(moved(new, by)) for by in (0.0, -5.0, -10.0, -20.0, -80.0)]
    for more, less in pairwise(scores):
        assert (less >= more).all()
        assert less.isfinite().all()
    assert (scores[-1] > scores[0]).double().mean() > 0.9


def test_logits_whose_energy_is_negative_leave_the_confidence_out_with_a_warning(
    net: Net, training: Observation, new: Observation
) -> None:
    with pytest.warns(GramwatchWarning, match="log sum exp of the logits is -.* on average"):
        detector = fitted(CADRef, net, moved(training, -100.0))
    assert torch.equal(detector.judged(moved(new, -100.0)), detector.judged(moved(new, -120.0)))
    assert (detector.judged(moved(new, -100.0)) > 0).all()
