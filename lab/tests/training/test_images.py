"""Images as a network is trained on them."""

import torch
import torch.nn.functional as F

from gramwatch_lab.training.images import PADDING, Images
from lab.tests.training.small import whole

CPU = torch.device("cpu")


def test_images_are_normalised_and_come_once_each():
    images = whole((10, 3, 5, 4))
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.4, 0.3)
    expected = (images.double() / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    data = Images(images, mean, std, CPU)
    assert torch.allclose(torch.cat(list(data.in_order(3))).double(), expected, atol=1e-5)
    batches = list(data.shuffled(3, 3))
    assert [len(batch) for batch, _ in batches] == [3, 3, 3]
    chosen = torch.cat([part for _, part in batches])
    assert len(chosen.unique()) == 9
    assert torch.allclose(torch.cat([batch for batch, _ in batches]).double(), expected[chosen], atol=1e-5)
    twice = torch.cat([part for _, part in data.shuffled(5, 4)])
    assert twice.bincount().tolist() == [2] * 10


def test_augmented_images_are_shifted_and_mirrored_copies():
    images = whole((6, 3, 9, 8))
    data = Images(images, (0, 0, 0), (1 / 255,) * 3, CPU, augment=True)
    assert torch.allclose(torch.cat(list(data.in_order(4))), images.float())
    padded = F.pad(images.float(), (PADDING,) * 4)
    seen = set()
    for batch, chosen in data.shuffled(60, 6):
        assert batch.shape == (6, 3, 9, 8)
        for image, number in zip(batch, chosen, strict=True):
            result = [
                (row, column, mirrored)
                for row in range(2 * PADDING + 1)
                for column in range(2 * PADDING + 1)
                for mirrored in (False, True)
                for cut in [padded[number, :, row : row + 9, column : column + 8]]
                if torch.equal(image.round(), cut.flip(2) if mirrored else cut)
            ]
            assert len(result) == 1
            seen |= set(result)
    assert {row for row, _, _ in seen} == {column for _, column, _ in seen} == set(range(9))
    assert {mirrored for _, _, mirrored in seen} == {False, True}
    assert len(seen) > 100  # of 162
