"""Cross-entropy with mixup and label smoothing."""

import pytest
import torch
from torch import nn

from gramwatch import TrainingError
from gramwatch_lab import training


def test_mixup_weighs_the_losses_of_both_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = torch.randn(8, 3), torch.arange(8) % 3
    order = torch.tensor([1, 2, 3, 4, 5, 6, 7, 0])
    monkeypatch.setattr(torch, "randperm", lambda *_, **__: order)
    monkeypatch.setattr("gramwatch_lab.training.cross_entropy.Beta.sample", lambda self: torch.tensor(0.75))
    loss, logits = training.CrossEntropy(mixup=0.4).loss(lambda x: x, images, labels, None)
    mixed = 0.75 * images + 0.25 * images[order]
    torch.testing.assert_close(logits, mixed)
    log = mixed.log_softmax(1)
    one_hot = 0.75 * nn.functional.one_hot(labels, 3) + 0.25 * nn.functional.one_hot(labels[order], 3)
    torch.testing.assert_close(loss, -(one_hot * log).sum(1).mean())


def test_smoothing_spreads_the_label() -> None:
    images, labels = torch.randn(8, 4), torch.arange(8) % 4
    loss, _ = training.CrossEntropy(smoothing=0.2).loss(lambda x: x, images, labels, None)
    target = 0.8 * nn.functional.one_hot(labels, 4) + 0.2 / 4
    torch.testing.assert_close(loss, -(target * images.log_softmax(1)).sum(1).mean())
    with pytest.raises(TrainingError, match="below 1"):
        training.CrossEntropy(smoothing=1.0)
