"""Made-up images: what their descriptions say."""

import numpy as np
import pytest
import torch

from gramwatch.inputs import networks, synthetic
from gramwatch.inputs.demo import photograph_patches
from gramwatch_lab.datasets import load


def test_outliers_are_what_their_description_says():
    shape = (3, 16, 16)
    noise = synthetic.gaussian(50, shape)
    assert noise.shape == (50, *shape)
    assert noise.min() == 0
    assert noise.max() == 1
    assert noise.mean().item() == pytest.approx(0.5, abs=0.01)
    assert synthetic.rademacher(50, shape).unique().tolist() == [-1, 1]
    assert synthetic.bernoulli(50, shape).unique().tolist() == [0, 1]
    blobs = synthetic.blobs(50, shape)
    assert ((blobs == 0) | (blobs >= 0.75)).all()
    assert 0.05 < (blobs > 0).double().mean() < 0.5
    for make in (synthetic.gaussian, synthetic.rademacher, synthetic.bernoulli, synthetic.blobs):
        assert torch.equal(make(3, shape, seed=4), make(3, shape, seed=4))
        assert not torch.equal(make(3, shape, seed=4), make(3, shape, seed=5))
    patches = photograph_patches(20)
    assert patches.shape == (20, 1, 8, 8)
    assert 0 <= patches.min() < patches.max() <= 1


def test_made_up_images_have_the_published_parameters():
    gaussian = load("gaussian", count=200).images / 255
    assert gaussian.shape == (200, 3, 32, 32)
    # A normal of mean and deviation 0.5 loses 15.9 % at each end to clipping.
    assert (gaussian == 0).double().mean() == pytest.approx(0.1587 + 0.0016, abs=0.003)
    assert (gaussian == 1).double().mean() == pytest.approx(0.1587 + 0.0016, abs=0.003)
    # 125.3, 123.0 and 113.9 less and plus 63.0, 62.1 and 66.7.
    dark, light = load("rademacher", count=50).images.unique().view(2, 3).tolist()
    assert (dark, light) == ([47, 61, 62], [181, 185, 188])
    assert load("bernoulli", count=50).images.unique().tolist() == [0, 255]
    assert load("bernoulli", count=200).images.eq(255).double().mean() == pytest.approx(0.5, abs=0.005)
    blobs = load("blobs", count=50).images
    assert set(blobs.unique().tolist()) <= {0, *range(191, 256)}
    assert 0.05 < blobs.eq(0).double().mean() < 0.95
    # The blur goes across channels: shapes are white but for their edges.
    assert np.corrcoef(blobs[:, 0].flatten(), blobs[:, 1].flatten())[0, 1] > 0.5
    assert load("gaussian", count=3, size=28, grey=True).images.shape == (3, 1, 28, 28)
    for name in synthetic.MAKERS:
        image_set = load(name, count=4, seed=3)
        assert torch.equal(image_set.images, load(name, count=4, seed=3).images)
        assert not torch.equal(image_set.images, load(name, count=4, seed=4).images)
        assert "space" in image_set.description


def test_normalised_values_reach_the_wide_resnet_but_for_rounding():
    prepare = networks.load("wrn40_2").prepare
    coins = synthetic.rademacher(20, (3, 32, 32))
    torch.testing.assert_close(prepare(load("rademacher", count=20).images), coins, atol=0.009, rtol=0)
    values = synthetic.gaussian_normalised(20, (3, 32, 32))
    assert values.abs().max() == 1
    assert values.std() == pytest.approx(0.48, abs=0.02)
    torch.testing.assert_close(
        prepare(load("gaussian_normalised", count=20).images), values, atol=0.009, rtol=0
    )
