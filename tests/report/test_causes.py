"""Plain causes: statistics of images, and words for what is odd about them."""

import pytest
import torch
from torch import Tensor

from gramwatch.report.causes import FEWEST, TAILS, Ordinary, statistics
from gramwatch_lab.datasets.faults import FAULTS


def photographs(count: int, seed: int = 0, side: int = 48) -> Tensor:
    """Made-up photographs: sums of waves, whose colours and brightness vary, `(N, 3, side, side)`, uint8."""
    generator = torch.Generator().manual_seed(seed)
    at = torch.arange(side) / side
    images = torch.zeros(count, 1, side, side)
    for wave in range(1, 17):
        turns = torch.randint(-wave, wave + 1, (2, count, 1, 1, 1), generator=generator)
        phase = 6.3 * torch.rand(count, 1, 1, 1, generator=generator)
        images += torch.cos(6.3 * (turns[0] * at[:, None] + turns[1] * at) + phase) / wave
    colours = 1 + 0.5 * torch.rand(count, 3, 1, 1, generator=generator) * torch.rand(
        count, 1, 1, 1, generator=generator
    )
    level = 0.45 + 0.1 * torch.rand(count, 1, 1, 1, generator=generator)
    return (255 * (level + 0.12 * images * colours).clamp(0.03, 0.97)).byte()


def named(images: Tensor) -> list[str]:
    """The first cause of each image, beside ordinary photographs."""
    ordinary = Ordinary.of(statistics(photographs(100) / 255))
    assert ordinary is not None
    return [causes[0].name if causes else "" for causes in ordinary.causes(statistics(images / 255))]


DAMAGED = {
    "Blurred or smooth": ("blur", 3.0),
    "Noisy": ("sensor_noise", 20.0),
    "Darker": ("underexposed", 3.0),
    "Large white areas": ("overexposed", 2.0),
    "Large black areas": ("occlusion", 0.25),
}


@pytest.mark.parametrize("cause", DAMAGED)
def test_a_damaged_photograph_is_named_by_its_damage(cause):
    fault, strength = DAMAGED[cause]
    names = named(FAULTS[fault].apply(photographs(60, seed=1), strength, 0))
    assert names.count(cause) >= 48


def test_ordinary_photographs_have_no_cause():
    names = named(photographs(200, seed=2))
    assert names.count("") >= 190


def test_what_lies_outside_is_named_by_its_side_and_causes_stand_before_effects():
    ordinary = Ordinary(dict.fromkeys(TAILS, (0.0, 1.0)))
    for name, tails in TAILS.items():
        for tail, value in zip(tails, (-1.0, 2.0), strict=True):
            assert ordinary.causes({name: torch.tensor([value, 0.5])}) == [[] if tail is None else [tail], []]
    both = ordinary.causes({"contrast": torch.tensor([-1.0]), "brightness": torch.tensor([-1.0])})
    assert [cause.name for cause in both[0]] == ["Darker", "Low in contrast"]
    assert ordinary.causes({"something else": torch.tensor([9.0])}) == [[]]


@pytest.mark.parametrize("shape", [(2, 1, 1, 1), (2, 3, 1, 9), (2, 1, 2, 2), (1, 3, 5, 4)])
def test_images_of_any_size_have_finite_statistics(shape):
    for values in (torch.zeros(shape), torch.ones(shape), torch.rand(shape)):
        result = statistics(values)
        assert result.keys() == TAILS.keys()
        assert all(len(column) == shape[0] and column.isfinite().all() for column in result.values())


def test_a_few_ordinary_images_are_no_measure():
    assert Ordinary.of(statistics(torch.rand(FEWEST - 1, 3, 8, 8))) is None
    assert Ordinary.of({}) is None
    assert Ordinary.of(statistics(torch.rand(FEWEST, 3, 8, 8))) is not None
