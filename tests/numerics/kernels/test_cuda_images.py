"""The CUDA kernels for the numbers of images, against the definition in float64.

The tests run on a GPU, and on the CPU by Triton's interpreter (`make test-triton`), which is slow: there,
images are small and few.
"""

import importlib
import os
import subprocess
import sys
import warnings

import pytest
import torch

from gramwatch import GramwatchWarning
from gramwatch.inputs import image_numbers
from gramwatch.inputs.image_numbers import large_enough, look, numbers
from gramwatch.numerics import kernels
from tests.inputs.test_image_numbers import SIZES, UNIT, defined, picture

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

pytestmark = [
    pytest.mark.skipif(
        not (torch.cuda.is_available() or INTERPRETED),
        reason="no CUDA device, and TRITON_INTERPRET is not set (make test-triton)",
    ),
    # Places that nothing has written are read together with others, and not used: NumPy sees them.
    pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning"),
]
on_a_gpu = pytest.mark.skipif(INTERPRETED, reason="only a GPU shows it, or it takes too long without one")


def read(x):
    """The numbers by the kernels."""
    got = importlib.import_module("gramwatch.numerics.kernels.cuda_images").image_numbers(
        large_enough(x.to(DEVICE))
    )
    assert got is not None
    assert got.dtype == torch.float32
    return got.cpu()


def assert_as_defined(x, within=1e-4):
    """Compare with the definition in float64, as for the kernel of the CPU."""
    got, expected = read(x), defined(x.double())
    meanings = image_numbers.meaning(got.shape[1])
    with_unit = torch.tensor([number.what in UNIT for number in meanings])
    peak = x.double().abs().amax((1, 2, 3)).clamp_min(1e-12).unsqueeze(1)
    off = ((got - expected).abs() / torch.where(with_unit, peak, 1.0)).amax(0)
    assert (off <= within).all(), (meanings[int(off.argmax())], float(off.max()))


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 16])
def test_agrees_with_the_definition_for_any_number_of_channels(channels):
    assert_as_defined(picture(1, channels, 16, 16), within=1e-5)


@pytest.mark.parametrize("size", [(17, 16), (18, 19), (33, 70), (64, 64)], ids=str)
def test_agrees_with_the_definition_at_sizes(size):
    assert_as_defined(picture(1, 3, *size))


@pytest.mark.parametrize("size", [(260, 17), (19, 300)], ids=str)
def test_what_takes_several_parts_and_several_turns_of_loops(size):
    assert_as_defined(picture(1, 1, *size))


@on_a_gpu
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [*SIZES, (225, 223), (1024, 768)], ids=str)
def test_agrees_with_the_definition_at_large_sizes(size, channels):
    x = picture(2, channels, *size)
    for scaled in (x, (x - 0.45) / 0.22, (x * 255).round(), 1e-3 * x, 20 + x):
        assert_as_defined(scaled)


@pytest.mark.parametrize("scale", ["normalised", "8 bits", "small", "huge", "far from 0"])
def test_agrees_with_the_definition_whatever_the_scale(scale):
    """Not farther from 0 than 20: see the tests of the CPU kernel."""
    x = picture(1, 3, 16, 21)
    scaled = {
        "normalised": (x - 0.45) / 0.22,
        "8 bits": (x * 255).round(),
        "small": 1e-3 * x,
        "huge": 1e9 * x,
        "far from 0": 20 + x,
    }
    assert_as_defined(scaled[scale])


def test_flat_and_grey_images_have_the_defined_numbers():
    """The correlation of channels is 1 there, and its distance from 1 is what counts."""
    flat = torch.tensor([0.0, -3.0]).view(2, 1, 1, 1).expand(2, 3, 16, 20)
    assert read(flat).isfinite().all()
    assert_as_defined(flat)
    assert_as_defined(picture(1, 1, 16, 20).expand(1, 3, 16, 20))
    tinted = picture(1, 1, 16, 20) * torch.tensor([0.9, 0.5, 0.3]).view(1, 3, 1, 1)
    # 1 - correlation^2 is 0 here. Its floor is 1e-4, so an error of 1e-7, as float32 sums have, counts 1e-3.
    # The kernel of the CPU is off by 2e-4.
    assert_as_defined(tinted, within=1e-3)


def test_energy_in_the_last_line_alone_is_no_gradient():
    """The last row and column have no gradient. Their energy does not leak into regions."""
    x = torch.zeros(1, 1, 18, 18)
    x[..., -1, :-1:2] = 1.0
    assert_as_defined(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_read_as_they_are(dtype):
    assert_as_defined(picture(1, 3, 16, 18).to(dtype))


def test_the_layout_in_memory_does_not_matter():
    x = picture(2, 2, 16, 17).to(DEVICE)
    expected = read(x)
    wide = torch.zeros(2, 2, 32, 30, device=DEVICE)
    wide[:, :, ::2, 4:21] = x
    packed = x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
    last = x.to(memory_format=torch.channels_last)
    for laid in (last, x.mT.contiguous().mT, wide[:, :, ::2, 4:21], packed):
        assert not laid.is_contiguous()
        torch.testing.assert_close(read(laid), expected, rtol=1e-6, atol=1e-6)
    grey = x[:, :1].expand(-1, 2, -1, -1)
    torch.testing.assert_close(read(grey), read(grey.contiguous()), rtol=1e-6, atol=1e-6)


def test_an_image_alone_and_among_others_has_the_same_bits():
    x = picture(2, 3, 16, 16)
    expected = read(x)
    assert torch.equal(read(x), expected)
    assert torch.equal(read(x[1:]), expected[1:])
    assert read(x[:0]).shape == (0, len(numbers(3)))


def test_the_pixels_of_small_images_are_repeated():
    assert_as_defined(picture(1, 1, 8, 13))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_an_image_that_is_not_finite_leaves_the_others_alone(value):
    x = picture(4, 1, 17, 16)
    expected = read(x)
    x[1, 0, 16, 15] = value
    x[2] = value
    got = read(x)
    assert torch.equal(got[::3], expected[::3])
    assert not got[1].isfinite().all()
    if value != 3e38:  # such a flat image has numbers
        assert not got[2].isfinite().all()


@pytest.mark.parametrize("highest", [201, 255] if INTERPRETED else range(200, 256))
def test_rounding_does_not_decide_which_pixels_are_clipped(highest):
    x = torch.arange(256).clamp_max(highest).view(1, 1, 16, 16).float()
    for scaled in (x / 255, (x / 255 - 0.485) / 0.229):
        assert_as_defined(scaled)


def test_without_a_working_kernel_one_warning_says_so(monkeypatch):
    monkeypatch.setattr(kernels, "_given_up", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # PyTorch may lack CUDA
    module = importlib.import_module("gramwatch.numerics.kernels.cuda_images")

    def fail(images):
        raise RuntimeError("no such GPU")

    x = picture(1, 3, 16, 16).to(DEVICE)
    monkeypatch.setattr(module, "image_numbers", fail)
    signature = ("cuda", "image_numbers", x.dtype, 3)
    with pytest.warns(GramwatchWarning, match="image_numbers.*no such GPU"):
        assert kernels.attempt(signature, x) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.attempt(signature, x) is None
        assert look(x).isfinite().all()


COMPILE = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gramwatch.numerics.kernels.cuda_images import _Plan
kind, channels, capability = sys.argv[1], *map(int, sys.argv[2:])
images = torch.empty(2, channels, 30, 48).contiguous(memory_format=torch.channels_last)
plan = _Plan(images.shape, images.stride())
for launch in [*plan.first, plan.last]:
    arguments = zip(launch.kernel.params, [kind, "*fp32", "*fp64", *launch.rest], strict=True)
    constants, signature = {}, {}
    for place, (parameter, argument) in enumerate(arguments):
        constant = parameter.is_constexpr or argument == 1
        signature[parameter.name] = "constexpr" if constant else "i32" if place > 2 else argument
        if constant:
            constants[place,] = argument
    source = ASTSource(launch.kernel, signature, constants)
    compiled = triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": launch.warps})
    assert compiled.asm["cubin"]
    print(launch.kernel.__name__)
"""


@pytest.mark.parametrize("form", ["*bf16 3 90", "*fp32 1 80", "*fp16 4 75"])
def test_the_programs_compile_without_a_gpu(form, tmp_path):
    """The interpreter takes more than the compiler does."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", COMPILE, *form.split()]
    got = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert got.stdout.split() == ["halve", "read_parts", "add_parts", "write_numbers"], got.stderr


@on_a_gpu
def test_look_takes_four_launches():
    x = picture(4, 3, 64, 64).to("cuda", torch.bfloat16)
    assert torch.equal(look(x).cpu(), read(x))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        look(x)
        torch.cuda.synchronize()
    on_gpu = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    launched = [name for name in on_gpu if "Sync" not in name]
    assert launched == ["halve", "read_parts", "add_parts", "write_numbers"]


@on_a_gpu
def test_a_recording_computes_the_numbers_of_other_images():
    x, other = picture(4, 3, 64, 64).cuda(), picture(4, 3, 64, 64, seed=1).cuda()
    expected = look(other)
    look(x)
    place, graph = x.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = look(place)
    place.copy_(other)
    graph.replay()
    assert torch.equal(got, expected)


@on_a_gpu
def test_with_gradients_the_definition_is_used():
    x = picture(1, 3, 16, 16).cuda().requires_grad_()
    look(x).sum().backward()
    assert x.grad is not None
