"""Adversarial examples by FGSM."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from gramwatch.errors import InputError
from gramwatch.methods import fgsm
from tests.methods.tapped import Net, images, labelled, made, mahalanobis


@pytest.fixture
def net() -> Net:
    return made()


def test_fgsm_by_hand(net: Net) -> None:
    test, labels = images(5), torch.tensor([0, 1, 2, 0, 1])
    made = fgsm(net, test, labels, eps=0.1, scale=(0.2, 0.5, 2.0))
    for i, image in enumerate(test):
        leaf = image[None].clone().requires_grad_()
        (found,) = torch.autograd.grad(cross_entropy(net(leaf), labels[i : i + 1]), leaf)
        expected = image + 0.1 * found[0].sign() / torch.tensor([0.2, 0.5, 2.0]).view(-1, 1, 1)
        assert torch.allclose(made[i], expected)
    assert not made.requires_grad
    with torch.no_grad():
        before, after = (
            cross_entropy(net(x), labels, reduction="none") for x in (test, fgsm(net, test, labels, 0.01))
        )
    assert (after > before).all()


def test_fgsm_labels_default_to_predictions(net: Net) -> None:
    test = images(5)
    with torch.no_grad():
        predicted = net(test).argmax(1)
    assert torch.equal(fgsm(net, test), fgsm(net, test, predicted))
    assert torch.equal(fgsm(net, test, eps=0), test)


def test_fgsm_gives_something_to_tune_on(net: Net) -> None:
    detector = mahalanobis(net)
    made = [fgsm(net, x, y, eps=1.0) for x, y in labelled(60, seed=8)]
    detector.tune(labelled(60, seed=9), made, steps=[0.0], progress=False)
    assert detector.tuned_on_outliers


def test_fgsm_errors(net: Net) -> None:
    with pytest.raises(InputError, match="one floating-point tensor"):
        fgsm(net, torch.zeros(2, 3, 6, 6, dtype=torch.uint8))
    with pytest.raises(InputError, match="expected 2 whole numbers"):
        fgsm(net, images(2), torch.zeros(3, dtype=torch.long))
    with pytest.raises(InputError, match="expected 2 whole numbers"):
        fgsm(net, images(2), torch.zeros(2))
    with pytest.raises(ValueError, match="eps must be"):
        fgsm(net, images(2), eps=-1)
