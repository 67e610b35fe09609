"""Faults of the camera and the pipeline: each does what it says, by as much as it says."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from gramwatch.inputs.networks import Loaded
from gramwatch_lab.datasets import faults
from tests.inputs.files import smooth


def grey(value: int = 128, count: int = 4, side: int = 64) -> torch.Tensor:
    return torch.full((count, 3, side, side), value, dtype=torch.uint8)


EACH = [(name, strength) for name, fault in faults.FAULTS.items() for strength in fault.strengths]


@pytest.mark.parametrize(("name", "strength"), EACH)
def test_a_fault_returns_images_like_those_it_was_given_and_leaves_these_alone(
    name: str, strength: float
) -> None:
    images = smooth(side=128)
    before = images.clone()
    result = faults.FAULTS[name].apply(images, strength, 0)
    assert result.dtype == torch.uint8
    assert result.shape == images.shape
    assert torch.equal(images, before)
    assert not torch.equal(result, images)
    assert torch.equal(result, faults.FAULTS[name].apply(images, strength, 0))


@pytest.mark.parametrize("name", ["sensor_noise", "motion_blur", "dead_rows", "occlusion"])
def test_the_seed_decides_what_is_random(name: str) -> None:
    images, fault = smooth(), faults.FAULTS[name]
    assert not torch.equal(
        fault.apply(images, fault.strengths[0], 0), fault.apply(images, fault.strengths[0], 1)
    )


@pytest.mark.parametrize("name", [name for name, fault in faults.FAULTS.items() if len(fault.strengths) > 1])
def test_stronger_faults_change_images_more(name: str) -> None:
    images, fault = smooth(side=128), faults.FAULTS[name]
    assert len(fault.strengths) == 3
    changes = [
        (fault.apply(images, strength, 0).float() - images.float()).square().mean()
        for strength in fault.strengths
    ]
    assert changes == sorted(changes)
    titles = {fault.title.format(strength) for strength in fault.strengths}
    assert len(titles) == 3


@pytest.mark.parametrize("sigma", [10, 20])
def test_noise_has_the_stated_sigma_and_mean_zero(sigma: int) -> None:
    result = faults.sensor_noise(grey(), sigma).double() - 128
    assert abs(float(result.std()) - sigma) < 0.02 * sigma
    assert abs(float(result.mean())) < 0.2
    channels = result.transpose(0, 1).flatten(1)
    assert float(torch.corrcoef(channels).fill_diagonal_(0).abs().max()) < 0.05


def test_noise_is_clipped_and_not_wrapped() -> None:
    assert float(faults.sensor_noise(grey(250), 40).float().mean()) > 220
    assert float(faults.sensor_noise(grey(5), 40).float().mean()) < 35


@pytest.mark.parametrize("sigma", [1, 2, 4])
def test_blur_keeps_the_mean_and_spreads_a_point_by_sigma(sigma: int) -> None:
    images = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8)
    result = faults.blur(images, sigma)
    torch.testing.assert_close(result.double().mean((2, 3)), images.double().mean((2, 3)), atol=0.05, rtol=0)
    edge = grey(0, 1)
    edge[:, :, 32:] = 255
    profile = faults.blur(edge, sigma)[0, 0, :, 32].double().diff()
    place = torch.arange(63).double()
    middle = (profile * place).sum() / 255
    variance = (profile * (place - middle).square()).sum() / 255
    assert abs(float(variance) - sigma**2) < 0.1 * sigma**2
    assert not torch.equal(faults.blur(images[:1], sigma), faults.blur(images[1:2], sigma))


def test_channels_do_not_mix_in_a_blur() -> None:
    red = grey(0, 1)
    red[:, 0] = 200
    for result in (faults.blur(red, 4), faults.motion_blur(red, 17)):
        assert torch.equal(result, red)


@pytest.mark.parametrize("length", [5, 9, 17])
def test_motion_blurs_along_one_line(length: int) -> None:
    points = grey(0, 20)
    points[:, :, 32, 32] = 255
    result = faults.motion_blur(points, length).double()[:, 0]
    assert float((result.sum((1, 2)) - 255).abs().max()) < 0.12 * 255  # rounded, pixel by pixel
    place = torch.stack(torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")).double() - 32
    shares = result / result.sum((1, 2), keepdim=True)
    covariance = torch.einsum("nhw,ahw,bhw->nab", shares, place, place)
    across, along = torch.linalg.eigvalsh(covariance).T
    expected = (length**2 - 1) / 12  # of a uniform distribution over so many pixels
    assert torch.all((along - expected).abs() < 0.25 * expected)
    assert torch.all(across < 0.3)
    vectors = torch.linalg.eigh(covariance).eigenvectors[:, :, 1]
    angles = torch.atan2(vectors[:, 0], vectors[:, 1]) % torch.pi
    assert float(angles.std()) > 0.3  # each image has its own direction


def test_jpeg_is_pillows() -> None:
    images = smooth(2)
    result = faults.jpeg(images, 15)
    for image, expected in zip(images, result, strict=True):
        file = io.BytesIO()
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=15)
        read = torch.from_numpy(np.asarray(Image.open(file)).copy()).permute(2, 0, 1)
        assert torch.equal(read, expected)


def test_exposure_doubles_light_and_clips() -> None:
    result = faults.overexposed(grey(100), 1)
    light = (float(result[0, 0, 0, 0]) / 100) ** faults.GAMMA
    assert abs(light - 2) < 0.03
    assert int(faults.overexposed(grey(250), 1).max()) == 255
    assert int(faults.underexposed(grey(100), 2)[0, 0, 0, 0]) == round(100 * 2 ** (-2 / 2.2))


@pytest.mark.parametrize(("share", "rows"), [(1 / 64, 2), (1 / 16, 8), (1 / 4, 32)])
def test_so_many_rows_are_dead(share: float, rows: int) -> None:
    result = faults.dead_rows(grey(128, 3, 128), share)
    dead = (result == 0).all(3).all(1)
    assert dead.sum(1).tolist() == [rows] * 3
    assert torch.all(result[~dead[:, None, :, None].expand_as(result)] == 128)
    assert not torch.equal(dead[0], dead[1])


@pytest.mark.parametrize("share", [1 / 16, 1 / 8, 1 / 4])
def test_a_square_of_the_stated_share_is_covered(share: float) -> None:
    result = faults.occlusion(grey(128, 30, 128), share)
    covered = (result == 0).all(1)
    assert torch.all((covered.float().mean((1, 2)) - share).abs() < 0.002)
    sides = torch.stack([covered.any(1).sum(1), covered.any(2).sum(1)])
    assert torch.all(sides == sides[0, 0])
    assert len({tuple(image.nonzero()[0].tolist()) for image in covered}) > 20


def test_channels_are_swapped_and_inverted() -> None:
    images = smooth(1)
    assert torch.equal(faults.channels_swapped(images)[:, 0], images[:, 2])
    assert torch.equal(faults.channels_swapped(images)[:, 1], images[:, 1])
    assert torch.equal(faults.inverted(images) + images, grey(255, 1))


def test_nearest_takes_single_pixels() -> None:
    images = torch.randint(0, 256, (2, 3, 128, 128), dtype=torch.uint8)
    result = faults.resized_by_nearest(images, 64)
    assert torch.equal(result[:, :, ::2, ::2], result[:, :, 1::2, 1::2])
    assert torch.equal(result[:, :, ::2, ::2], images[:, :, 1::2, 1::2])  # as Pillow's nearest chooses


def test_normalisation_left_out_or_done_twice_is_another_normalisation() -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    images = smooth(2)
    once = Loaded("n", nn.Identity(), mean, std)
    m, s = (torch.tensor(channels)[:, None, None] for channels in (mean, std))
    twice = Loaded("n", nn.Identity(), *faults.normalisation_done_twice(mean, std))
    torch.testing.assert_close(twice.prepare(images), (once.prepare(images) - m) / s, atol=1e-4, rtol=1e-4)
    never = Loaded("n", nn.Identity(), *faults.normalisation_left_out(mean, std))
    torch.testing.assert_close(never.prepare(images), images / 255)
    assert set(faults.NORMALISATIONS) == {"normalisation_left_out", "normalisation_done_twice"}
