"""`reader` of the CUDA kernels: statistics and channel means of a sample of pixels, read where they lie.

The tests run on a GPU, and on the CPU by Triton's interpreter (`make test-triton`).
"""

import importlib
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramwatch.numerics.samples import WHOLE, Sample
from tests.numerics.test_statistics import (
    assert_as_exact_as_promised,
    assert_exact_down_to_denormals,
    mixed_map,
    tiny,
    tiny_map,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
ORDERS = (1, 2, 4, 8)
LAYOUTS = ("channels first", "channels last", "tokens")

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED),
    reason="no CUDA device, and TRITON_INTERPRET is not set (make test-triton)",
)


def laid(x, layout):
    """Maps `(N, C, H, W)` on the device in a layout, and their channel axis."""
    x = x.to(DEVICE)
    if layout == "channels last":
        return x.contiguous(memory_format=torch.channels_last), 1
    return (x.flatten(2).mT.contiguous(), 2) if layout == "tokens" else (x, 1)


def read(x, axis, sample=WHOLE, orders=ORDERS, with_means=True):
    """Statistics, written into a piece of a larger tensor, and channel means."""
    kernels = importlib.import_module("gramwatch.numerics.kernels.cuda")
    examples, channels = len(x), sample.count(x.shape[axis])
    wide = torch.full((examples, 3 + len(orders) * channels + 2), 7.0, device=DEVICE)
    out = wide[:, 3:-2].unflatten(1, (len(orders), channels))
    means = torch.full((examples, channels), 7.0, device=DEVICE)
    reading = kernels.reader(x, axis, sample, orders, out.stride(0), sample if with_means else None)
    if reading is None:
        return None
    scratch = reading(x, out, means if with_means else None, None)
    found = out.clone(), means.clone()
    out.fill_(7), means.fill_(7)
    scratch = scratch if scratch is None else scratch.fill_(torch.nan)  # what it held does not matter
    assert reading(x, out, means if with_means else None, scratch) is scratch
    torch.testing.assert_close((out, means), found, rtol=0, atol=0, equal_nan=True)
    assert (wide[:, :3] == 7).all()
    assert (wide[:, -2:] == 7).all()
    return out.cpu(), means.cpu()


def chosen(x, axis, sample):
    """The part that counts as `(N, C, pixels, 1)`, on the CPU."""
    return sample.of(x.shape, axis).maps(x).unsqueeze(3).cpu()


def assert_means(means, part):
    part = part.double()
    assert ((means - part.mean((2, 3))).abs() <= 1e-6 * part.abs().amax((2, 3))).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sample", [Sample(1), Sample(9), Sample(20, 32), WHOLE])
def test_agrees_with_the_paper_over_eight_decades(dtype, layout, sample):
    x, axis = laid(mixed_map(3, 70, 8, 7, 0.3, seed=1).to(dtype), layout)
    found, means = read(x, axis, sample)
    part = chosen(x, axis, sample)
    assert_as_exact_as_promised(found, part, ORDERS, "row_sums")
    assert_means(means, part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sample", [WHOLE, Sample(None, 32), Sample(500, 48)])
def test_means_alone(dtype, layout, sample):
    x, axis = laid(mixed_map(3, 70, 40, 37, 0.3, seed=2).to(dtype), layout)
    kernels = importlib.import_module("gramwatch.numerics.kernels.cuda")
    means = torch.full((3, sample.count(70)), 7.0, device=DEVICE)
    kernels.reader(x, axis, sample, (), 0, sample)(x, None, means, None)
    assert_means(means.cpu(), chosen(x, axis, sample))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("sample", "averaged"),
    [(Sample(20, 32), WHOLE), (Sample(20, 32), Sample(40, 48)), (WHOLE, Sample(9)), (Sample(9), Sample(9))],
)
def test_statistics_of_one_part_and_means_of_another(dtype, layout, sample, averaged):
    x, axis = laid(mixed_map(2, 70, 9, 8, 0.3, seed=3).to(dtype), layout)
    kernels = importlib.import_module("gramwatch.numerics.kernels.cuda")
    out = torch.full((2, len(ORDERS), sample.count(70)), 7.0, device=DEVICE)
    means = torch.full((2, averaged.count(70)), 7.0, device=DEVICE)
    kernels.reader(x, axis, sample, ORDERS, out.stride(0), averaged)(x, out, means, None)
    assert_as_exact_as_promised(out.cpu(), chosen(x, axis, sample), ORDERS, "row_sums")
    assert_means(means.cpu(), chosen(x, axis, averaged))


shapes = st.tuples(
    st.integers(1, 3),
    st.one_of(st.integers(1, 9), st.sampled_from([33, 130, 300])),
    st.integers(1, 20),
    st.integers(1, 20),
    st.sampled_from([0.0, 0.5, 0.95]),
)
some_orders = st.lists(st.sampled_from(ORDERS), min_size=1, max_size=4, unique=True).map(tuple)


samples = st.builds(Sample, st.integers(1, 400), st.one_of(st.none(), st.integers(16, 200)))


@given(shapes, st.integers(0, 2**31), some_orders, st.sampled_from(LAYOUTS), samples)
@settings(max_examples=25 if INTERPRETED else 120, deadline=None)
def test_agrees_with_the_paper_on_any_shape_layout_and_orders(shape, seed, orders, layout, sample):
    x, axis = laid(mixed_map(*shape, seed=seed), layout)
    found, means = read(x, axis, sample, orders, with_means=False)
    assert_as_exact_as_promised(found, chosen(x, axis, sample), orders, "row_sums")
    assert (means == 7).all()


some_shapes = st.tuples(
    st.integers(1, 3),
    st.one_of(st.integers(1, 9), st.just(33)),
    st.one_of(st.integers(1, 9), st.just(40)),
    st.just(1),
    st.sampled_from([0.0, 0.5, 0.95]),
)


@given(some_shapes, st.integers(0, 2**31), some_orders, st.sampled_from(LAYOUTS), tiny)
@settings(max_examples=40 if INTERPRETED else 300, deadline=None)
def test_agrees_with_the_paper_down_to_denormals(shape, seed, orders, layout, tiny):
    maps = tiny_map(shape, seed, *tiny)
    found, _ = read(*laid(maps, layout), orders=orders)
    assert_exact_down_to_denormals(found, maps, orders, "row_sums")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_not_finite_shows_in_every_channel_of_its_example(bad, layout):
    maps = torch.rand(3, 40, 5, 5)
    maps[1, 7, 2, 2] = bad
    found, means = read(*laid(maps, layout))
    assert not found[1].isfinite().any()
    assert not means[1, 7].isfinite()
    assert found[[0, 2]].isfinite().all()
    assert means[[0, 2]].isfinite().all()


def test_tensors_without_such_a_kernel_are_left_to_the_others():
    maps = torch.rand(2, 4, 8, 8, device=DEVICE)
    assert read(maps, 1, orders=(1, 3)) is None
    assert read(maps.double(), 1) is None
    assert read(maps.flatten(1), 1) is None
    assert read(maps.reshape(2, 4, 4, 4, 4), 1) is None
    assert read(torch.rand(2, 1, 40, 40, device=DEVICE), 1) is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(40, 3, 3), (128, 14, 14), (70, 16, 20), (300, 9, 11), (33, 30, 31)])
def test_parts_that_a_program_holds_and_parts_that_it_does_not(shape, layout):
    """Whatever fits into registers is read once. What does not fit is read in tiles."""
    x, axis = laid(mixed_map(2, *shape, 0.3, seed=4), layout)
    averaged = Sample(50, 32)
    kernels = importlib.import_module("gramwatch.numerics.kernels.cuda")
    out = torch.full((2, len(ORDERS), shape[0]), 7.0, device=DEVICE)
    means = torch.full((2, averaged.count(shape[0])), 7.0, device=DEVICE)
    scratch = kernels.reader(x, axis, WHOLE, ORDERS, out.stride(0), averaged)(x, out, means, None)
    fits = shape[0] <= 128 and shape[1] * shape[2] <= 256
    assert (scratch is None) == (fits and layout != "channels first")
    assert_as_exact_as_promised(out.cpu(), chosen(x, axis, WHOLE), ORDERS, "row_sums")
    assert_means(means.cpu(), chosen(x, axis, averaged))
