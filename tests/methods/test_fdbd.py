"""fDBD: classes that cannot be told apart, and the head that it follows."""

import numpy as np
import pytest
import torch

from gramwatch.errors import InputError
from gramwatch.methods import FDBD
from gramwatch.observe.observation import Head, Observation
from tests.methods.observed import WIDTH, Net, double, fitted


def test_fdbd_classes_of_the_same_weights(net: Net, training: Observation, new: Observation) -> None:
    """A class twice: no boundary in between, and the others count as before."""
    assert training.head is not None
    weight = torch.cat((training.head.weight, training.head.weight[:1]))
    bias = torch.cat((training.head.bias, training.head.bias[:1]))
    twice = Head(weight, bias)

    def again(seen: Observation) -> Observation:
        assert seen.features is not None
        return Observation(twice(seen.features), seen.features, twice)

    scores = fitted(FDBD, net, again(training)).judged(again(new))
    assert scores.isfinite().all()
    wanted = []
    for seen in (again(new)[i : i + 1] for i in range(len(new))):
        z, h = double(seen.logits)[0], double(seen.features)[0]
        y, w = int(z.argmax()), double(weight)
        others = [c for c in range(6) if np.linalg.norm(w[y] - w[c]) > 0]
        mean = np.mean([abs(z[y] - z[c]) / np.linalg.norm(w[y] - w[c]) for c in others])
        wanted.append(-mean / np.linalg.norm(h - double(training.features).mean(0)))
    np.testing.assert_allclose(double(scores), wanted, rtol=1e-6)


def test_fdbd_needs_two_classes(net: Net) -> None:
    head = Head(torch.ones(1, WIDTH), torch.zeros(1))
    with pytest.raises(InputError, match="one class has none"):
        fitted(FDBD, net, Observation(torch.ones(3, 1), torch.ones(3, WIDTH), head))


def test_fdbd_follows_the_head(net: Net, training: Observation, new: Observation, head: Head) -> None:
    """The distances between weights are those of the head at hand, not of one seen before."""
    detector = fitted(FDBD, net, training)
    before = detector.judged(new)
    other = Head(2 * head.weight, head.bias)
    changed = Observation(new.logits, new.features, other)
    torch.testing.assert_close(detector.judged(changed), before / 2)
    torch.testing.assert_close(detector.judged(new), before)
