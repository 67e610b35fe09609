"""The numbers of images, and their kernel for the CPU, against the definition in float64."""

import pytest
import torch

from gramwatch.inputs import image_numbers
from gramwatch.inputs.image_numbers import (
    columns,
    fast_sums_of,
    large_enough,
    look,
    numbers,
    numbers_from,
    sums_of,
)
from gramwatch.numerics import kernels

SIZES = [(8, 8), (9, 13), (17, 16), (32, 32), (33, 70), (224, 224)]


def picture(count, channels, height, width, seed=0):
    """Smooth shapes with a little noise, from 0 to 1. Channels go together as those of photographs do."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, channels, 4, 4, generator=generator)
    coarse = 0.7 * coarse.mean(1, keepdim=True) + 0.3 * coarse
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear", align_corners=True)
    return (smooth + 0.02 * torch.randn(smooth.shape, generator=generator)).clamp(0, 1)


def defined(x):
    """The numbers by the definition, in the precision of `x`."""
    return numbers_from(sums_of(large_enough(x)))


UNIT = (
    "mean",
    "largest value",
    "smallest value",
    "mean of the darkest region",
    "mean of the brightest region",
)
"""These numbers have the unit of the image. All others are logarithms and ratios of moderate size."""


def assert_as_defined(x):
    """Compare with the definition in float64: within 1e-4, of the largest value if numbers have its unit."""
    got, expected = look(x), defined(x.double())
    meanings = image_numbers.meaning(got.shape[1])
    with_unit = torch.tensor([number.what in UNIT for number in meanings])
    peak = x.double().abs().amax((1, 2, 3)).clamp_min(1e-12).unsqueeze(1)
    off = ((got - expected).abs() / torch.where(with_unit, peak, 1.0)).amax(0)
    assert (off <= 1e-4).all(), (meanings[int(off.argmax())], float(off.max()))


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_kernel_gives_what_the_definition_gives(size, channels):
    """Not farther from 0 than 20: float32 is too coarse there to tell whether a pixel is just clipped."""
    x = picture(2, channels, *size)
    for scaled in (x, (x - 0.45) / 0.22, (x * 255).round(), 1e-3 * x, 20 + x):
        assert fast_sums_of(large_enough(scaled)) is not None
        assert_as_defined(scaled)


@pytest.mark.parametrize("size", SIZES[:4], ids=str)
def test_float32_is_enough_for_the_definition(size):
    """On other devices than the CPU, and in a graph, sums are kept in float32."""
    x = picture(4, 3, *size)
    for scaled in (x, (x - 0.45) / 0.22, (x * 255).round()):
        torch.testing.assert_close(defined(scaled).double(), defined(scaled.double()), rtol=1e-3, atol=1e-3)


def test_flat_images_have_finite_numbers():
    flat = torch.tensor([0.0, 0.5, -3.0, 255.0]).view(4, 1, 1, 1).expand(4, 3, 20, 24)
    assert look(flat).isfinite().all()
    assert_as_defined(flat)
    one_channel = picture(2, 3, 20, 24)
    one_channel[:, 1:] = 0.25
    assert_as_defined(one_channel)


@pytest.mark.parametrize("highest", range(200, 256))
def test_rounding_does_not_decide_which_pixels_are_clipped(highest):
    """Images of 8 bits with any distance from the smallest to the largest value, normalised."""
    x = torch.arange(256).clamp_max(highest).view(1, 1, 16, 16).float()
    for scaled in (x, x / 255, (x / 255 - 0.485) / 0.229):
        torch.testing.assert_close(sums_of(scaled).clipped.double(), sums_of(x.double()).clipped)
        torch.testing.assert_close(fast_sums_of(scaled).clipped, sums_of(x.double()).clipped)


def test_the_pixels_of_small_images_are_repeated():
    x = picture(2, 3, 9, 20)
    larger = large_enough(x)
    assert larger.shape == (2, 3, 18, 40)
    for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
        assert torch.equal(larger[:, :, row::2, column::2], x)
    assert torch.equal(look(x), look(larger))
    assert large_enough(larger) is larger


def test_every_size_and_number_of_channels_has_numbers_with_meanings():
    for channels in (1, 2, 3, 4, 16):
        for side in (8, 15, 16, 40):
            x = picture(2, channels, side, side + 3)
            assert look(x).isfinite().all()
            assert len(numbers(channels)) == look(x).shape[1]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_an_image_that_is_not_finite_leaves_the_others_alone(value):
    x = picture(5, 3, 21, 32)
    expected = look(x)
    x[1, 2, 4, 31] = value
    x[3] = value
    got = look(x)
    assert torch.equal(got[::2], expected[::2])
    assert not got[1].isfinite().all()


def test_the_layout_in_memory_does_not_matter():
    x = picture(3, 3, 30, 41)
    expected = look(x)
    wide = torch.zeros(3, 3, 60, 50)
    wide[:, :, ::2, 4:45] = x
    for laid in (x.to(memory_format=torch.channels_last), x.mT.contiguous().mT, wide[:, :, ::2, 4:45]):
        assert not laid.is_contiguous()
        assert torch.equal(look(laid), expected)
    assert torch.equal(look(x[:0]), expected[:0])
    assert torch.equal(torch.cat([look(x[i : i + 1]) for i in range(3)]), expected)


@pytest.mark.parametrize(("dtype", "step"), [(torch.float16, 2**-11), (torch.bfloat16, 2**-8)])
def test_low_precision_is_looked_at_in_float32(dtype, step):
    """The numbers are those of the rounded image: it is rounded to steps of one in 2,048 or in 256."""
    x = picture(3, 3, 32, 32)
    assert torch.equal(look(x.to(dtype)), look(x.to(dtype).float()))
    assert look(x.to(dtype)).dtype == torch.float32
    means = columns(look(x).shape[1], "colour").start
    off = (look(x.to(dtype)) - look(x))[:, means : means + 3].abs()
    assert off.max() <= step


def test_a_graph_holds_the_definition_and_not_the_numbers_of_its_example():
    class Looking(torch.nn.Module):
        def forward(self, x):
            return look(x)

    x, other = picture(2, 3, 32, 33), picture(2, 3, 32, 33, seed=1)
    program = torch.export.export(Looking(), (x,), strict=False)
    torch.testing.assert_close(program.module()(other), look(other), rtol=1e-3, atol=1e-3)


def test_gradients_flow_through_the_definition():
    x = picture(1, 3, 16, 16).requires_grad_()
    look(x).sum().backward()
    assert x.grad is not None


def test_without_a_kernel_the_definition_is_used(monkeypatch):
    x = picture(2, 3, 24, 24)
    expected = look(x)
    monkeypatch.setattr(kernels, "_given_up", {("cpu",)})
    torch.testing.assert_close(look(x), expected, rtol=1e-3, atol=1e-3)


def test_several_threads_give_what_one_gives():
    x, before = picture(9, 3, 40, 40), torch.get_num_threads()
    expected = look(x)
    try:
        torch.set_num_threads(3)
        assert torch.equal(look(x), expected)
    finally:
        torch.set_num_threads(before)
