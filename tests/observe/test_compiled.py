"""Compiled networks: one graph, the user's options, the scores of the uncompiled network, and fallbacks."""

import copy
import shutil
import threading
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from gramwatch import GramDetector, GramwatchWarning, Guard, mark
from gramwatch.methods import ODIN, Energy
from gramwatch.numerics.statistics import STATISTICS
from gramwatch.observe.compiled import channel_means, options_of, statistics
from gramwatch_lab.networks.cifar_resnet import CifarResNet
from tests.observe.asking import asks_for_values
from tests.watch.test_operations import FUNCTIONS
from tests.watch.watching import Head, Net, after

timm = pytest.importorskip("timm")

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="PyTorch's default backend needs g++")
WAYS = ["torch.compile", "module.compile"]


@pytest.fixture(autouse=True)
def _nothing_is_compiled_yet():
    torch._dynamo.reset()
    counters.clear()


def counting_backend():
    """A backend of torch.compile that runs the graph as it is, and a list that grows with each graph."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    return backend, graphs


def compiled(net, way="torch.compile", **options):
    """A copy of a network, compiled."""
    net = copy.deepcopy(net)
    if way == "torch.compile":
        return torch.compile(net, **options)
    net.compile(**options)
    return net


def small(between=lambda x: x):
    torch.manual_seed(1)
    modules = {"conv": nn.Conv2d(3, 4, 3), "act": nn.GELU(), "more": nn.Conv2d(4, 8, 3), "head": Head(8)}
    net = Net(lambda net, x: net.head(net.more(between(net.act(net.conv(x)))).relu()), **modules)
    with torch.no_grad():
        net.head.fc.weight *= 20
        net.head.fc.bias -= net(images(200, 9)).mean(0)  # so that all classes are predicted
    return net.eval()


def images(count, seed, size=8):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def fitted(detector, size=8):
    """Fitted and calibrated on batches whose last is smaller."""
    detector.fit(images(420, 0, size).split(200), progress=False)
    return detector.calibrate(images(90, 1, size).split(50), progress=False)


def fitted_by_fifty(detector):
    """Fitted and calibrated on batches of one size, which take one graph."""
    detector.fit(images(400, 0).split(50), progress=False)
    return detector.calibrate(images(100, 1).split(50), progress=False)


def compared(detector, other, sizes=(7, 50), **tolerance):
    """Batches of several sizes get the same verdict from both."""
    for count in sizes:
        detection, expected = detector(images(count, count)), other(images(count, count))
        torch.testing.assert_close(detection.logits, expected.logits, **tolerance)
        torch.testing.assert_close(detection.score, expected.score, **tolerance)
        torch.testing.assert_close(detection.deviations, expected.deviations, **tolerance)


def is_compiled(detector):
    return detector._plan._in_graph is not None


# --- the operators -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "axis"), [((3, 4, 5, 6), 1), ((3, 5, 4), 2), ((3, 4), 1)])
@pytest.mark.parametrize(("statistic", "features"), [("row_sums", 4), ("triangle", 10)])
def test_the_operators_are_the_readable_definitions(shape, axis, statistic, features):
    x = torch.randn(shape)
    maps = x.movedim(axis, 1).reshape(3, 4, -1)
    expected = STATISTICS[statistic](maps, (1, 3), 1)
    for with_means in (False, True):
        found, means = statistics(x, axis, None, None, statistic, [1, 3], features, with_means, None, None)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(means, maps.mean(2) if with_means else torch.empty(3, 0))
    torch.testing.assert_close(channel_means(x, axis, None, None), maps.mean(2))


def test_the_operators_read_a_sample_of_pixels():
    x = torch.randn(3, 4, 8, 6)
    found, means = statistics(x, 1, 12, None, "row_sums", [1, 2], 4, True, 12, None)
    sample = x[:, :, ::2, ::2].flatten(2)
    torch.testing.assert_close(found, STATISTICS["row_sums"](sample, (1, 2), 1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(means, sample.mean(2))
    torch.testing.assert_close(channel_means(x, 1, 12, None), sample.mean(2))
    found, means = statistics(
        x, 1, 12, None, "row_sums", [1, 2], 4, True, None, None
    )  # means of another part
    torch.testing.assert_close(found, STATISTICS["row_sums"](sample, (1, 2), 1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(means, x.mean((2, 3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operators_keep_to_the_rules_of_torch_compile(dtype):
    x = torch.randn(3, 4, 5, 6).to(dtype)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for y in (x, x.to(memory_format=torch.channels_last)):
        torch.library.opcheck(
            statistics, (y, 1, 12, 16, "row_sums", [1, 2], 4, True, 9, None), test_utils=tests
        )
        without = (y, 1, None, None, "row_sums", [1, 2], 4, False, None, None)
        torch.library.opcheck(statistics, without, test_utils=tests)
        torch.library.opcheck(channel_means, (y, 1, 12, 16), test_utils=tests)


# --- one graph ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet18", {"layers": (1, 1, 1, 1)}),
        ("vit_tiny_patch16_224", {"img_size": 64, "depth": 2}),
        ("convnext_atto", {"depths": (1, 1, 1, 1)}),
        ("swin_tiny_patch4_window7_224", {"img_size": 64, "window_size": 4, "depths": (1, 2)}),
    ],  # the blocks of a stage are alike: one is enough, or two of swin, of which the second is shifted
)
def test_a_network_of_timm_is_watched_in_one_graph(name, options):
    net = timm.create_model(name, num_classes=5, **options).eval()
    nn.init.normal_(net.get_classifier().weight)
    x, again = images(3, 0, 64), images(2, 1, 64)
    backend, graphs = counting_backend()
    guard, plain = Guard(torch.compile(net, backend=backend, fullgraph=True)), Guard(net)
    for batch in (x, again):  # the second batch has another size: the graph for it is dynamic
        pairs = zip(guard.planned(x)(batch), plain.planned(x)(batch), strict=True)
        for found, expected in pairs:  # the backend calls the same functions, so that all bits are equal
            assert torch.equal(found.logits, expected.logits)
            assert (found.statistics is None) == (expected.statistics is None)
            if found.statistics is not None:
                assert torch.equal(found.statistics, expected.statistics)
            for mean, mean_expected in zip(found.averages, expected.averages, strict=True):
                assert torch.equal(mean, mean_expected)
    assert is_compiled(guard)
    assert not counters["graph_break"]
    assert len(graphs) == 2
    ours = torch.ops.gramwatch.statistics, torch.ops.gramwatch.statistics.default
    for graph in graphs:
        assert sum(node.target in ours for node in graph.graph.nodes) == len(plain.members["gram"].taps)


def test_no_size_takes_another_graph_than_in_the_plain_network():
    sizes = [8, 4, 5, 20, 1, 50, 20]
    backend, plain = counting_backend()
    net = compiled(small(), backend=backend)
    with torch.no_grad():
        for size in sizes:
            net(images(size, size))
    backend, graphs = counting_backend()
    detector = GramDetector(compiled(small(), backend=backend))
    for size in sizes:
        detector.planned(images(2, 0))(images(size, size))
    assert len(graphs) == len(plain) > 2
    assert is_compiled(detector)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("detector", [Guard, GramDetector])
def test_scores_are_those_of_the_uncompiled_network(detector, way):
    backend, graphs = counting_backend()
    mine = fitted(detector(compiled(small(), way, backend=backend)))
    sizes = (7, 50, 3, 1)  # a batch of one takes a graph of its own
    # The same functions are called: no rounding.
    compared(mine, fitted(detector(small())), sizes, rtol=0, atol=0)
    assert is_compiled(mine)
    assert graphs
    assert not counters["graph_break"]


@needs_compiler
def test_scores_of_the_default_backend_differ_by_rounding_only():
    mine = fitted(Guard(compiled(small(), dynamic=True)))
    # The compiler adds in another order. The longest sum here has 36 terms. Two orders of 36 float32 terms
    # differ by up to 36 x 1.2e-7 = 4e-6 of the sum of their magnitudes, in each of three layers. A deviation
    # is a difference of statistics over a bound, so that the error of a statistic adds to it as it is.
    # (Batches below 16 take another convolution, which is another graph to build.)
    compared(mine, fitted(Guard(small())), (50, 20), rtol=1e-4, atol=1e-4)
    assert is_compiled(mine)


def test_inputs_and_outputs_of_any_nesting():
    def forward(net, first, second):
        hidden = net.hidden(first + second).relu()
        return {"hidden": hidden, "logits": net.fc(hidden)}

    net = Net(forward, hidden=nn.Linear(4, 6), fc=nn.Linear(6, 3)).eval()
    batch = {"first": torch.randn(5, 4), "second": torch.randn(5, 4)}
    detectors = [GramDetector(compiled(net, backend="eager")), GramDetector(net)]
    (mine,), (expected,) = (detector.planned(batch)(batch) for detector in detectors)
    assert is_compiled(detectors[0])
    assert torch.equal(mine.logits, expected.logits)
    assert torch.equal(mine.statistics, expected.statistics)


@pytest.mark.parametrize("taps", ["all", "paper", ["*.sum", "*.shortcut", "conv1"]])
def test_marked_tensors_are_watched(taps):
    net, x = CifarResNet(8).eval(), images(3, 0, 32)
    detectors = [GramDetector(compiled(net, backend="eager"), taps=taps), GramDetector(net, taps=taps)]
    (mine,), (expected,) = (detector.planned(x)(x) for detector in detectors)
    assert is_compiled(detectors[0])
    assert torch.equal(mine.statistics, expected.statistics)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_form_of_a_watched_function_is_seen(name):
    function, operation = FUNCTIONS[name]
    net = after(Net(lambda net, x: function(net.conv(x)), conv=nn.Conv2d(3, 4, 1)), 4)
    x = images(2, 0)
    detectors = [GramDetector(compiled(net, backend="eager")), GramDetector(net)]
    (mine,), (expected,) = (detector.planned(x)(x) for detector in detectors)
    assert is_compiled(detectors[0])
    assert [tap.operation for tap in detectors[0]._plan.taps] == ["conv2d", operation]
    assert torch.equal(mine.statistics, expected.statistics)


def test_a_mark_leaves_no_trace_in_the_plain_network():
    from torch._dynamo.backends.common import aot_autograd

    detector, kept = GramDetector(compiled(CifarResNet(8), backend="eager")), []
    detector.planned(images(2, 0, 32))(images(2, 0, 32))  # from now on torch.compile knows of marks

    def compiler(graph, _):
        kept.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    net, x = small(lambda x: mark(2 * x, "twice")), images(3, 0)
    with torch.no_grad():
        found = compiled(net, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)(x)
        torch.testing.assert_close(found, net(x))
    assert any("convolution" in target for target in kept)
    assert not any("gramwatch" in target for target in kept)


def test_a_network_with_nothing_to_watch_stays_compiled():
    backend, graphs = counting_backend()
    mine, plain = Energy(compiled(small(), backend=backend)), Energy(small())
    x = images(5, 0)
    assert torch.equal(mine.score_inputs(x)[1], plain.score_inputs(x)[1])
    assert len(graphs) == 1


@pytest.mark.parametrize("outermost", ["compiled", "parallel"])
def test_wrappers_around_a_compiled_network(outermost):
    backend, graphs = counting_backend()
    net = small()
    if outermost == "compiled":
        wrapped = torch.compile(nn.DataParallel(net), backend=backend)
    else:
        wrapped = nn.DataParallel(torch.compile(net, backend=backend))
    mine, plain = (fitted_by_fifty(GramDetector(network)) for network in (wrapped, small()))
    compared(mine, plain, (50,), rtol=0, atol=0)
    assert graphs


def test_the_network_is_left_in_its_mode():
    net = small().train()
    mine = fitted_by_fifty(GramDetector(torch.compile(net, backend="eager")))
    assert is_compiled(mine)
    assert all(module.training for module in net.modules())
    compared(mine, fitted_by_fifty(GramDetector(small())), (50,), rtol=0, atol=0)


# --- the user's options ------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_the_users_options_are_used(way):
    backend, graphs = counting_backend()
    net = compiled(small(), way, backend=backend, dynamic=True)
    assert options_of(net)["dynamic"] is True
    detector = GramDetector(net)
    for size in (5, 6, 7):
        detector.planned(images(2, 0))(images(size, 0))
    assert len(graphs) == 1  # dynamic from the beginning

    net = compiled(small(), way, options={"epilogue_fusion": False}, dynamic=False)
    assert options_of(net)["backend"].config == {"epilogue_fusion": False}
    assert options_of(net)["dynamic"] is False
    assert options_of(compiled(small(), way, mode="max-autotune"))["backend"].config["max_autotune"] is True


def test_options_that_pytorch_does_not_show_are_the_default_ones():
    class Wrapper(nn.Module):
        def __init__(self, net):
            super().__init__()
            self._orig_mod = net

    with pytest.warns(GramwatchWarning, match="does not show the options that Net was compiled with"):
        assert options_of(Wrapper(small())) == {}


def test_detectors_do_not_share_their_recompilations():
    net = compiled(small(), backend="eager")
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(4):
            detector = GramDetector(net)
            for size in (4, 6):
                detector.planned(images(2, 0))(images(size, 0))
            assert is_compiled(detector)


def test_the_recompilations_of_a_detector_are_limited():
    backend, graphs = counting_backend()
    detector = GramDetector(compiled(small(), backend=backend, dynamic=False))
    plain = GramDetector(small())

    def check(size):
        (mine,), (expected,) = (d.planned(images(2, 0))(images(size, 0)) for d in (detector, plain))
        assert torch.equal(mine.statistics, expected.statistics)

    with torch._dynamo.config.patch(recompile_limit=2):
        check(3)
        check(4)
        with pytest.warns(GramwatchWarning, match=r"uncompiled: .*FailOnRecompileLimitHit"):
            check(5)
        check(6)  # said once
        detector._plan._read_eagerly = None  # sizes that are compiled stay so
        check(3)
    assert len(graphs) == 2


# --- what cannot be compiled -------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("detector", [Guard, GramDetector])
def test_a_network_that_is_no_single_graph_is_run_uncompiled(detector, way):
    def between(x):
        torch._dynamo.graph_break()
        return x

    net = compiled(small(between), way, backend="eager")
    with pytest.warns(GramwatchWarning) as told:
        mine = fitted(detector(net))
    (warning,) = [str(w.message) for w in told if "uncompiled" in str(w.message)]
    assert warning.startswith("Net is compiled, but detectors run it uncompiled: torch.compile cannot watch")
    assert "graph_break()" in warning
    compared(mine, fitted(detector(small())), rtol=0, atol=0)
    assert not is_compiled(mine)


def test_an_error_of_the_network_is_its_own():
    detector = fitted_by_fifty(GramDetector(compiled(small(), backend="eager")))
    with pytest.raises(RuntimeError, match=r"expected input.* to have 3 channels"):
        detector._plan(torch.randn(2, 5, 8, 8))
    assert is_compiled(detector)
    compared(detector, fitted_by_fifty(GramDetector(small())), (50,), rtol=0, atol=0)


def test_gradients_are_taken_uncompiled():
    net = compiled(small(), backend="eager")
    odin = ODIN(net)
    with pytest.warns(GramwatchWarning, match="run it uncompiled: a method needs gradients"):
        found = odin.score_inputs(images(3, 0))
    for one, expected in zip(found, ODIN(small()).score_inputs(images(3, 0)), strict=True):
        assert torch.equal(one, expected)


def test_a_compiled_part_is_run_uncompiled():
    net = small()
    net.more = torch.compile(net.more, backend="eager")
    with pytest.warns(GramwatchWarning, match="a part of it is compiled.*Compile the whole network instead"):
        mine = fitted_by_fifty(GramDetector(net))
    compared(mine, fitted_by_fifty(GramDetector(small())), rtol=0, atol=0)
    whole = fitted_by_fifty(GramDetector(torch.compile(net, backend="eager")))
    assert is_compiled(whole)
    compared(whole, mine, (50,), rtol=0, atol=0)


# --- copies, threads, modes --------------------------------------------------------------------------


def test_a_copy_watches_its_own_network():
    mine = fitted_by_fifty(GramDetector(compiled(small(), backend="eager")))
    plain = fitted_by_fifty(GramDetector(small()))
    other = copy.deepcopy(mine)
    with torch.no_grad():
        other.model._orig_mod.conv.weight.zero_()
    assert not torch.equal(other(images(50, 0)).deviations, plain(images(50, 0)).deviations)
    compared(mine, plain, (50,), rtol=0, atol=0)
    assert is_compiled(other)


def test_threads_with_compiled_and_uncompiled_networks():
    mine = fitted(GramDetector(compiled(small(), backend="eager")))
    plain = fitted(GramDetector(small()))
    expected, failures = plain(images(4, 0)).score, []

    def work(detector):
        try:
            for _ in range(10):
                assert torch.equal(detector(images(4, 0)).score, expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(detector,)) for detector in (mine, plain, mine, plain)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert is_compiled(mine)


def test_compiled_code_is_looked_at_for_recording_as_it_is():
    x = images(4, 0)
    backend, graphs = counting_backend()
    detector = GramDetector(compiled(small(), backend=backend))
    plan = detector.planned(x)
    plan(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not asks_for_values(lambda: plan(x), "cpu")
    assert is_compiled(detector)
    assert len(graphs) == 1
