"""Images and labels as a source has them."""

import torch

from gramwatch.inputs.source import Raw


def test_classes_of_numbers_in_memory_are_chosen_too() -> None:
    raw = Raw(torch.arange(5).reshape(5, 1, 1, 1), torch.tensor([2, 0, 1, 2, 0]))
    chosen = raw.of_classes([2, 0])
    assert isinstance(chosen.images, torch.Tensor)
    assert chosen.images.flatten().tolist() == [0, 3, 1, 4]
    assert chosen.labels is not None
    assert chosen.labels.tolist() == [0, 0, 1, 1]
