"""Random crops of photographs."""

import math

import torch

from gramwatch_lab.training import crops
from gramwatch_lab.training.crops import Crops

CPU = torch.device("cpu")


def test_boxes_lie_inside_and_have_the_areas_and_ratios_they_may_have() -> None:
    width, height, left, top = crops.boxes(20_000, CPU).unbind(1)
    mirrored = width < 0
    assert 0.48 < mirrored.float().mean() < 0.52
    width = width.abs()
    for length, middle in ((width, left), (height, top)):
        assert float((middle.abs() + length).max()) <= 1 + 1e-6
        assert float((middle + length).max()) > 0.99
        assert float((middle - length).min()) < -0.99
    area = width * height
    assert crops.SMALLEST * 0.99 < float(area.min()) < crops.SMALLEST * 1.05
    assert float(area.max()) > 0.95
    ratio = (width / height).log().abs()
    assert math.log(4 / 3) - 0.01 < float(ratio.max()) <= math.log(4 / 3) + 1e-5


def test_the_whole_box_is_the_image_and_a_negative_width_mirrors_it() -> None:
    pixels = torch.randint(0, 256, (2, 8, 6, 3), dtype=torch.uint8)
    whole = torch.tensor([[1.0, 1.0, 0.0, 0.0], [-1.0, 1.0, 0.0, 0.0]])
    result = crops.cropped(pixels, whole)
    torch.testing.assert_close(result[0], pixels[0].float(), atol=1e-3, rtol=0)
    torch.testing.assert_close(result[1], pixels[1].flip(1).float(), atol=1e-3, rtol=0)


def test_a_quarter_is_enlarged_to_the_whole() -> None:
    pixels = torch.zeros(1, 8, 8, 1, dtype=torch.uint8)
    pixels[:, :4, 4:] = 200  # above, on the right
    corner = torch.tensor([[0.5, 0.5, 0.5, -0.5]])
    result = crops.cropped(pixels, corner)
    assert result.shape == pixels.shape
    assert torch.all(result[:, :7, 1:] == 200)
    assert torch.all(crops.cropped(pixels, -corner.abs() * torch.tensor([-1, -1, 1, -1]))[:, 1:, :7] == 0)


def test_crops_come_once_each_normalised_and_the_whole_images_in_order() -> None:
    images = torch.arange(1, 11, dtype=torch.uint8).reshape(10, 1, 1, 1).expand(10, 3, 4, 4).contiguous()
    crops_of_images = Crops(images, (0.0,) * 3, (1 / 255,) * 3, CPU)
    result = list(crops_of_images.shuffled(2, 5))
    assert sorted(torch.cat([part for _, part in result]).tolist()) == list(range(10))
    for batch, part in result:
        torch.testing.assert_close(batch, (part + 1.0)[:, None, None, None].expand_as(batch))
    torch.testing.assert_close(torch.cat(list(crops_of_images.in_order(3))), images.float())
