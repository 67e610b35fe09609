"""The fast forms against the float64 transcription and against their readable counterparts.

The same tests run for the CPU kernels, for the CUDA kernels on a GPU, and for these on the CPU by Triton's
interpreter (`make test-triton`).
"""

import importlib
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gramwatch import GramwatchWarning
from gramwatch.numerics import kernels, statistics
from gramwatch.numerics.deviation import outside_range
from gramwatch.numerics.kernels import FAST, Reading, Scratch
from gramwatch.numerics.samples import WHOLE
from gramwatch.numerics.statistics import STATISTICS
from tests import oracle
from tests.numerics.test_statistics import (
    assert_as_exact_as_promised,
    assert_exact_down_to_denormals,
    mixed_map,
    tiny,
    tiny_map,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=["cpu", "cuda"], scope="module")
def backend(request):
    """A module of kernels, and the device of the tensors it takes."""
    if request.param == "cuda" and not (torch.cuda.is_available() or INTERPRETED):
        pytest.skip("no CUDA device, and TRITON_INTERPRET is not set (make test-triton)")
    module = importlib.import_module(f"gramwatch.numerics.kernels.{request.param}")
    return module, "cpu" if INTERPRETED or request.param == "cpu" else "cuda"


def computed(backend, name, maps, orders):
    """The statistic by a kernel, written into a piece of a larger tensor as the detector does."""
    module, device = backend
    examples, channels = maps.shape[:2]
    wide = torch.full((examples, 3 + len(orders) * channels + 2), 7.0, device=device)
    out = wide[:, 3:-2].unflatten(1, (len(orders), channels))
    module.compute(name, maps.to(device), orders, out)
    assert (wide[:, :3] == 7).all()
    assert (wide[:, -2:] == 7).all()
    return out.cpu()


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["channels first", "channels last"])
def test_agrees_with_the_paper_over_eight_decades(backend, name, dtype, layout):
    orders = (1, 2, 3, 4, 10, 19, 20)
    x = mixed_map(3, 9, 5, 4, 0.3, seed=1).to(dtype)
    maps = x.flatten(2)
    if layout == "channels last":
        maps = maps.transpose(1, 2).contiguous().transpose(1, 2)
    assert_as_exact_as_promised(computed(backend, name, maps, orders), x, orders, name)


shapes = st.tuples(
    st.integers(1, 3),
    st.one_of(st.integers(1, 9), st.sampled_from([33, 130])),
    st.one_of(st.integers(1, 9), st.sampled_from([40, 129])),
    st.just(1),
    st.sampled_from([0.0, 0.5, 0.95]),
)
some_orders = st.lists(st.integers(1, 20), min_size=1, max_size=4, unique=True).map(tuple)


@given(shapes, st.integers(0, 2**31), st.sampled_from(FAST), some_orders, st.booleans(), st.booleans())
@settings(max_examples=25 if INTERPRETED else 120, deadline=None)
def test_agrees_with_the_paper_on_any_shape_stride_and_orders(
    backend, shape, seed, name, orders, channels_last, every_other
):
    x = mixed_map(*shape, seed=seed)
    maps = x.flatten(2)
    if channels_last:
        maps = maps.transpose(1, 2).contiguous().transpose(1, 2)
    if every_other:  # neither axis dense
        maps = maps.repeat_interleave(2, 2)[:, :, ::2]
    assert_as_exact_as_promised(computed(backend, name, maps, orders), x, orders, name)


some_shapes = st.tuples(
    st.integers(1, 3),
    st.one_of(st.integers(1, 9), st.just(33)),
    st.one_of(st.integers(1, 9), st.just(40)),
    st.just(1),
    st.sampled_from([0.0, 0.5, 0.95]),
)


@given(some_shapes, st.integers(0, 2**31), st.sampled_from(FAST), some_orders, st.booleans(), tiny)
@example((1, 33, 2, 1, 0.0), 0, "row_sums", (1,), False, ("channel", 136))  # a peak over a denormal product
@settings(max_examples=40 if INTERPRETED else 300, deadline=None)
def test_agrees_with_the_paper_down_to_denormals(backend, shape, seed, name, orders, channels_last, tiny):
    x = tiny_map(shape, seed, *tiny)
    maps = x.flatten(2)
    if channels_last:
        maps = maps.transpose(1, 2).contiguous().transpose(1, 2)
    assert_exact_down_to_denormals(computed(backend, name, maps, orders), x, orders, name)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("shape", [(2, 6, 50), (2, 50, 6), (2, 40, 40)])
def test_denormals_beside_ordinary_values_give_what_the_definition_gives(backend, name, shape):
    maps = torch.rand(shape) + 0.1
    maps[0, 3] *= 1e-40  # a channel
    maps[1, :, 5] *= 1e-40  # a pixel
    for laid in (maps, maps.transpose(1, 2).contiguous().transpose(1, 2)):
        got, expected = computed(backend, name, laid, (1, 2, 10)), STATISTICS[name](maps, (1, 2, 10), 1)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-37)


@pytest.mark.parametrize("name", ["row_sums", "off_diagonal"])
@pytest.mark.parametrize("shape", [(1, 6, 50), (1, 50, 6), (1, 40, 40)])
def test_a_tiny_channel_that_is_zero_where_others_are_large(backend, name, shape):
    """One over its products, times the others' peak, is beyond float32."""
    maps = torch.rand(shape) + 0.1
    maps[0, 2] = 2e-36
    maps[0, 2, 0], maps[0, 1, 0] = 0, 1e4
    for laid in (maps, maps.transpose(1, 2).contiguous().transpose(1, 2)):
        for p, got in zip((1, 2, 10), computed(backend, name, laid, (1, 2, 10))[0], strict=True):
            q, t, _ = oracle.scaled(maps[0].numpy(), p, name)
            np.testing.assert_allclose(got.numpy(), q * oracle.signed_root(t, p), rtol=1e-4)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-40, 1e-20])
def test_a_non_finite_activation_shows_among_denormals(backend, name, bad, size):
    for shape in ((2, 6, 50), (2, 50, 6), (2, 40, 40)):
        maps = torch.full(shape, size)
        maps[1, 2, 3] = bad
        for laid in (maps, maps.transpose(1, 2).contiguous().transpose(1, 2)):
            got = computed(backend, name, laid, (1, 2))
            assert got[0].isfinite().all()
            assert not got[1].isfinite().all()


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_activation_shows(backend, name, bad):
    maps = torch.rand(3, 6, 25) + 0.1
    maps[1, 2, 7] = bad
    got = computed(backend, name, maps, (1, 2))
    assert got[[0, 2]].isfinite().all()
    assert not got[1].isfinite().all()


@pytest.mark.parametrize("name", FAST)
def test_zero_maps_give_zero(backend, name):
    assert (computed(backend, name, torch.zeros(2, 3, 16), (1, 2, 10)) == 0).all()


@pytest.mark.parametrize("name", FAST)
def test_many_channels_and_many_pixels(backend, name):
    for shape in ((1, 4096, 3), (1, 3, 12544)):
        maps = torch.randn(shape).relu()
        expected = STATISTICS[name](maps, (1, 2, 10), 1)
        torch.testing.assert_close(computed(backend, name, maps, (1, 2, 10)), expected, rtol=2e-5, atol=1e-12)


def test_deviations_equal_the_readable_ones(backend):
    module, device = backend
    examples, features, classes = 12, 2500, 4
    minimum = -torch.rand(classes, features)
    maximum = torch.rand(classes, features)
    minimum[0, :5] = maximum[0, :5] = 0
    statistics = 2 * torch.randn(examples, features)
    predicted = torch.arange(examples) % classes
    starts = torch.tensor([0, 10, 10, 1500, 2500])
    weights = torch.randint(1, 6, (features,)).float()
    each = outside_range(statistics, minimum[predicted], maximum[predicted]) * weights
    expected = torch.stack([part.sum(1) for part in each.tensor_split([10, 10, 1500], 1)], 1)
    arguments = (statistics, predicted, minimum, maximum, starts, weights)
    got = module.deviations(*(t.to(device) for t in arguments))
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)
    assert (got[:, 1] == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_statistic_is_never_taken_for_no_deviation(backend, bad):
    module, device = backend
    statistics = torch.zeros(2, 6)
    statistics[1, 4] = bad
    bounds = -torch.ones(1, 6), torch.ones(1, 6)
    arguments = (
        statistics,
        torch.zeros(2, dtype=torch.long),
        *bounds,
        torch.tensor([0, 3, 6]),
        torch.ones(6),
    )
    got = module.deviations(*(t.to(device) for t in arguments)).cpu()
    assert (got[0] == 0).all()
    assert got[1, 0] == 0
    assert not got[1, 1].isfinite()


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 2**31))
@settings(max_examples=10 if INTERPRETED else 40, deadline=None)
def test_widening_keeps_the_smallest_and_the_largest(backend, examples, classes, seed):
    module, device = backend
    generator = torch.Generator().manual_seed(seed)
    features = 1300
    statistics = torch.randn(examples, features, generator=generator)
    predicted = torch.randint(-1, classes, (examples,), generator=generator)
    minimum = torch.full((classes, features), torch.inf, device=device)
    maximum = -minimum
    for part in range(0, examples, 7):  # several batches
        chosen = slice(part, part + 7)
        module.widen(statistics[chosen].to(device), predicted[chosen].to(device), minimum, maximum)
    for cls in range(classes):
        own = statistics[predicted == cls]
        low = own.amin(0) if len(own) else torch.full((features,), torch.inf)
        high = own.amax(0) if len(own) else torch.full((features,), -torch.inf)
        assert torch.equal(minimum[cls].cpu(), low)
        assert torch.equal(maximum[cls].cpu(), high)


# --- choosing between them ---------------------------------------------------------------------------


def small_detector():
    from gramwatch import GramDetector
    from gramwatch.inputs.demo import small_convnet

    torch.manual_seed(0)
    images = torch.rand(300, 1, 8, 8)
    net = small_convnet(3).eval()
    with torch.no_grad():
        net[-1].bias -= net(images).mean(0)
    detector = GramDetector(net).fit(images.split(100))
    return detector, detector.measure(3 * torch.rand(50, 1, 8, 8)).deviations


def test_scores_are_the_same_without_kernels(monkeypatch):
    _, with_kernels = small_detector()
    monkeypatch.setattr(kernels, "_given_up", {("cpu",), ("cuda",)})
    _, without = small_detector()
    assert (without > 0).any()
    torch.testing.assert_close(with_kernels, without, rtol=1e-3, atol=1e-4)


def test_a_denormal_channel_does_not_cost_the_examples():
    from gramwatch import GramDetector
    from gramwatch.inputs.demo import small_convnet

    net, images = small_convnet(3).eval(), torch.rand(300, 1, 8, 8)
    first = next(layer for layer in net if isinstance(layer, torch.nn.Conv2d))
    with torch.no_grad():
        first.weight[3] *= 1e-40
        first.bias[3] = 0
        net[-1].bias -= net(images).mean(0)
    detector = GramDetector(net).fit(images.split(100))
    assert detector.measure(images).deviations.isfinite().all()


def test_another_default_dtype_changes_nothing():
    _, expected = small_detector()
    torch.set_default_dtype(torch.float64)
    try:
        from gramwatch import GramDetector

        net, images = torch.nn.Conv2d(1, 4, 3).eval(), torch.rand(60, 1, 8, 8)
        model = torch.nn.Sequential(net, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GramwatchWarning)
            GramDetector(model).fit([images])
        maps, out = torch.rand(2, 3, 4, dtype=torch.float32), torch.empty(2, 2, 3, dtype=torch.float32)
        kernels.compute("row_sums", maps, (1, 2), out)
    finally:
        torch.set_default_dtype(torch.float32)
    assert not kernels._given_up
    torch.testing.assert_close(out, STATISTICS["row_sums"](maps, (1, 2), 1), rtol=1e-5, atol=1e-6)
    assert torch.equal(small_detector()[1], expected)


def no_range(statistics):
    """The arguments of `widen`: the range of one class is a point."""
    return statistics, torch.zeros(2, dtype=torch.long), torch.zeros(1, 3), torch.zeros(1, 3)


def test_a_kernel_that_cannot_be_built_is_done_without_and_said_once(monkeypatch):
    monkeypatch.setattr(kernels, "_given_up", set())
    module = importlib.import_module("gramwatch.numerics.kernels.cpu")
    calls = []

    def broken(statistic, maps, orders, out):
        calls.append(orders)
        if statistic == "row_sums" and orders == (1, 2):
            raise RuntimeError("no compiler")
        out.fill_(7)

    monkeypatch.setattr(module, "compute", broken)
    maps = torch.rand(2, 3, 4)
    out = torch.empty(2, 2, 3)
    message = r"kernel compute, row_sums, torch.float32, \(1, 2\) for cpu cannot be used.*no compiler"
    with pytest.warns(GramwatchWarning, match=message) as caught:
        kernels.compute("row_sums", maps, (1, 2), out)
    assert caught[0].filename == __file__
    assert torch.equal(out, STATISTICS["row_sums"](maps, (1, 2), 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels.compute("row_sums", maps, (1, 2), out)
        assert len(calls) == 1
        # What did not fail keeps its kernel: other orders, other statistics, other types, other functions.
        for statistic, given, orders in (
            ("row_sums", maps, (1, 3)),
            ("diagonal", maps, (1, 2)),
            ("off_diagonal", maps, (1, 2)),
        ):
            kernels.compute(statistic, given, orders, out)
            assert (out == 7).all()
        assert kernels.attempt(("cpu", "widen"), *no_range(out[0]))


def test_a_module_that_cannot_be_imported_is_given_up_as_a_whole(monkeypatch):
    monkeypatch.setattr(kernels, "_given_up", set())
    monkeypatch.setattr(kernels, "_MODULES", {"cpu": "gramwatch.numerics.kernels.nowhere"})
    maps, out = torch.rand(2, 3, 4), torch.empty(2, 2, 3)
    with pytest.warns(GramwatchWarning, match="kernels for cpu cannot be used.*nowhere") as caught:
        kernels.compute("row_sums", maps, (1, 2), out)
    assert caught[0].filename == __file__
    assert torch.equal(out, STATISTICS["row_sums"](maps, (1, 2), 1))
    assert kernels._given_up == {("cpu",)}
    assert not kernels.attempt(("cpu", "widen"), *no_range(out[0]))


def test_float64_maps_are_exact_and_that_they_are_slow_is_said_once(monkeypatch):
    kernels._say_float64.cache_clear()
    maps, out = torch.rand(2, 3, 4, dtype=torch.float64), torch.empty(2, 2, 3)
    with pytest.warns(GramwatchWarning, match=r"float64.*model\.float\(\)") as caught:
        kernels.compute("row_sums", maps, (1, 2), out)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert torch.equal(out, STATISTICS["row_sums"](maps, (1, 2), 1))
    kernels.compute("row_sums", maps, (1, 2), out)  # silent: a warning would be an error here


def test_running_out_of_memory_is_not_taken_for_a_broken_kernel(monkeypatch):
    monkeypatch.setattr(kernels, "_given_up", set())
    module = importlib.import_module("gramwatch.numerics.kernels.cpu")

    def exhausted(*_):
        raise MemoryError

    monkeypatch.setattr(module, "compute", exhausted)
    with pytest.raises(MemoryError):
        kernels.compute("row_sums", torch.rand(2, 3, 4), (1, 2), torch.empty(2, 2, 3))
    assert not kernels._given_up


@pytest.mark.parametrize("name", list(STATISTICS))
def test_every_statistic_is_computed_with_kernels_or_without(name):
    maps = torch.rand(4, 5, 6)
    expected = STATISTICS[name](maps, (1, 2, 3), 1)
    out = torch.empty_like(expected)
    kernels.compute(name, maps, (1, 2, 3), out)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GramwatchWarning)  # that float64 is slow
        kernels.compute(name, maps.double(), (1, 2, 3), out)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-7)


def test_an_empty_batch_is_no_trouble():
    out = torch.empty(0, 2, 3)
    kernels.compute("row_sums", torch.empty(0, 3, 4), (1, 2), out)
    assert out.shape == (0, 2, 3)


def test_importing_the_library_does_not_import_numba():
    code = "import sys, gramwatch; print('numba' in sys.modules, 'triton' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split()[0] == "False"


def test_shapes_do_not_compile_anew(backend):
    module, _ = backend
    if module.__name__.endswith("cuda"):
        pytest.skip("Triton compiles for tile sizes, of which there are few")
    computed(backend, "row_sums", torch.rand(2, 3, 4), (1, 2))
    programs = importlib.import_module("gramwatch.numerics.kernels.cpu_programs")
    compiled = len(programs._row_sums_in_range.signatures)
    for shape in ((1, 3, 5), (4, 7, 9), (2, 64, 16)):
        computed(backend, "row_sums", torch.rand(shape), (1, 2))
    assert len(programs._row_sums_in_range.signatures) == compiled


@pytest.mark.parametrize("shape", [(5, 7, 9), (3, 6, 1)])
def test_statistics_of_pairs_share_their_gram_matrices(shape, monkeypatch):
    maps, orders = mixed_map(*shape[:2], shape[2], 1, zeros=0.2, seed=1).flatten(2), (3, 1, 2)
    wanted = ["row_sums", "row_sums_of_roots", "triangle", "diagonal", "row_sums_of_roots"]
    sizes = [shape[1] * (shape[1] + 1) // 2 if name == "triangle" else shape[1] for name in wanted]
    wide = [torch.full((shape[0], 2 + len(orders) * size + 1), 7.0) for size in sizes]
    outs = [each[:, 2:-1].unflatten(1, (len(orders), size)) for each, size in zip(wide, sizes, strict=True)]
    called = []

    def counted(*args, **given):
        called.append(sorted(given))
        statistics.write_pairs(*args, **given)

    monkeypatch.setattr(kernels, "write_pairs", counted)
    asked = [(name, orders, out) for name, out in zip(wanted, outs, strict=True)]
    Reading(maps, 1, WHOLE, asked, None)(maps, outs, Scratch())
    assert called == [["pairs", "sums"], ["sums"]]  # the second sums of the same orders are of another table
    for name, out, each in zip(wanted, outs, wide, strict=True):
        torch.testing.assert_close(out, STATISTICS[name](maps, orders, 1), rtol=1e-5, atol=1e-6)
        assert (each[:, :2] == 7).all()
        assert (each[:, -1] == 7).all()


def test_pairs_of_other_orders_are_computed_apart():
    maps = mixed_map(4, 5, 3, 2, zeros=0, seed=2).flatten(2)
    sums, pairs = torch.empty(4, 2, 5), torch.empty(4, 1, 15)
    wanted = [("row_sums_of_roots", (1, 2), sums), ("triangle", (2,), pairs)]
    Reading(maps, 1, WHOLE, wanted, None)(maps, [sums, pairs], Scratch())
    assert sums.equal(statistics.row_sums_of_roots(maps, (1, 2)))
    assert pairs.equal(statistics.triangle(maps, (2,)))
