"""Running a network: wrappers, inputs and outputs, and that it is left as found."""

import threading
from collections import OrderedDict, UserDict
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramwatch
from gramwatch import GramDetector, GramwatchWarning, InputError, TapError, find_taps
from gramwatch.inputs.batches import count_examples
from gramwatch.watch import Network, Taps, observe, unwrap
from tests.watch.watching import CLASSES, Head, Net, axes, check_alone, small, watch, watched

# --- wrappers ----------------------------------------------------------------------------------------


def check_small(wrapped, net, x):
    taps, seen, logits = watched(wrapped, x)
    assert taps == find_taps(net, x)
    assert taps.names == ["conv", "act", "more"]
    torch.testing.assert_close(seen["conv"], net.conv(x).flatten(2), rtol=0, atol=0)
    torch.testing.assert_close(seen["more"], net.more(net.conv(x).relu()).flatten(2), rtol=0, atol=0)
    torch.testing.assert_close(logits, net(x), rtol=0, atol=0)


def test_data_parallel():
    net = small()
    check_small(nn.DataParallel(net), net, torch.randn(3, 3, 6, 6))
    assert unwrap(nn.DataParallel(nn.DataParallel(net))) is net


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch is built without distributed")
def test_distributed_data_parallel(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    try:
        net = small()
        wrapped = nn.parallel.DistributedDataParallel(net)
        check_small(wrapped, net, torch.randn(3, 3, 6, 6))
        assert unwrap(wrapped) is net
    finally:
        torch.distributed.destroy_process_group()


def counting_backend():
    """A backend of torch.compile that runs the graph as it is, and a list that grows with each graph."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    return backend, graphs


def test_a_compiled_network():
    net, x = small(), torch.randn(3, 3, 6, 6)
    backend, graphs = counting_backend()
    compiled = torch.compile(net, backend=backend)
    with pytest.warns(GramwatchWarning, match="run it uncompiled: `observe` hands over tensors"):
        check_small(compiled, net, x)
    assert unwrap(nn.DataParallel(compiled)) is net
    check_small(torch.compile(net, backend="eager"), net, x)
    assert graphs == []


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="needs PyTorch 2.6")
@pytest.mark.parametrize("how", ["torch.compile", "module.compile", "function", "fullgraph"])
def test_a_compiled_part_is_watched_as_written_and_stays_compiled(how):
    torch._dynamo.reset()
    backend, graphs = counting_backend()
    part = Net(lambda net, x: net.act(net.conv(x)), conv=nn.Conv2d(3, 4, 3), act=nn.ReLU())
    if how in ("torch.compile", "fullgraph"):
        wrapped = torch.compile(part, backend=backend, fullgraph=how == "fullgraph")
        net = Net(lambda net, x: net.head(net.part(x)), part=wrapped, head=Head(4))
    elif how == "module.compile":
        net = Net(lambda net, x: net.head(net.part(x)), part=part, head=Head(4))
        part.compile(backend=backend)
    else:
        run = torch.compile(lambda part, x: part(x), backend=backend)
        net = Net(lambda net, x: net.head(run(net.part, x)), part=part, head=Head(4))
    net.eval()
    x = torch.randn(3, 3, 6, 6)
    told = pytest.warns(GramwatchWarning, match="Net is compiled, but detectors run it uncompiled")
    with nullcontext() if how == "function" else told:  # who calls a compiled function is not known
        taps, seen, _ = watched(net, x)
    assert taps.names == ["part.conv", "part.act"]
    conv = F.conv2d(x, part.conv.weight, part.conv.bias)
    torch.testing.assert_close(seen["part.conv"], conv.flatten(2), rtol=0, atol=0)
    torch.testing.assert_close(seen["part.act"], conv.relu().flatten(2), rtol=0, atol=0)
    assert graphs == []
    net(x)
    assert len(graphs) == 1
    again, _ = watch(net, taps, torch.cat([x, x]))
    torch.testing.assert_close(again["part.act"][:3], seen["part.act"], rtol=1e-5, atol=1e-6)
    assert len(graphs) == 1
    with pytest.raises(RuntimeError):
        watch(net, taps, torch.randn(2, 8, 6, 6))
    net(torch.randn(3, 3, 7, 7))
    assert len(graphs) == 2  # compiling goes on, after an exception too


@pytest.mark.parametrize("first", ["outside", "inside"])
def test_taps_are_watched_inside_a_compiled_function(first):
    torch._dynamo.reset()
    backend, graphs = counting_backend()
    net, x = small(), torch.randn(3, 3, 6, 6)
    taps = find_taps(net, x) if first == "outside" else None
    found = []

    def function(x):
        found.append(taps or find_taps(net, 2 * x))
        seen, logits = watch(net, found[-1], 2 * x)
        found.append(seen)
        return logits + 1

    logits = torch.compile(function, backend=backend)(x)
    assert found[0].names == list(found[1]) == ["conv", "act", "more"]
    torch.testing.assert_close(found[1]["act"], net.conv(2 * x).relu().flatten(2), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits, net(2 * x) + 1, rtol=1e-5, atol=1e-6)
    assert graphs  # the function itself was compiled, in parts


def test_a_compiled_leaf_keeps_its_name():
    net = nn.Sequential(OrderedDict(conv=torch.compile(nn.Conv2d(3, 4, 1), backend="eager"), head=Head(4)))
    assert find_taps(net, torch.randn(1, 3, 4, 4)).names == ["conv"]


def test_that_a_network_is_run_uncompiled_is_said_once_for_each_network():
    net, x = small(), torch.randn(3, 3, 6, 6)
    compiled = torch.compile(net, backend="eager")
    taps = find_taps(compiled, x)  # finding taps is no reason for a warning, which would be an error
    with pytest.warns(GramwatchWarning, match="is compiled"):
        observe(compiled, taps, x, lambda *_: None)
    observe(compiled, taps, x, lambda *_: None)
    observe(torch.compile(net, backend="eager"), taps, x, lambda *_: None)
    with pytest.warns(GramwatchWarning, match="is compiled"):
        observe(torch.compile(small(), backend="eager"), taps, x, lambda *_: None)


# --- outputs and inputs ------------------------------------------------------------------------------


@dataclass
class Output:
    logits: Tensor
    hidden_states: Tensor


@pytest.mark.parametrize(
    "wrap",
    [
        lambda logits, hidden: Output(logits, hidden),
        lambda logits, hidden: {"hidden": hidden, "logits": logits},
        lambda logits, hidden: OrderedDict(loss=None, logits=logits, hidden=hidden),
        lambda logits, hidden: UserDict(hidden=hidden, logits=logits),
        lambda logits, hidden: (logits, hidden),
        lambda logits, hidden: (hidden, logits),
        lambda logits, hidden: {"features": hidden, "scores": logits},
        lambda logits, hidden: [logits],
    ],
)
def test_the_logits_in_an_output(wrap):
    def forward(net, x):
        hidden = net.hidden(x)
        return wrap(net.fc(hidden), hidden)

    net = Net(forward, hidden=nn.Linear(4, 6), fc=nn.Linear(6, CLASSES))
    x = torch.randn(3, 4)
    taps, _, logits = watched(net, x)
    assert taps.names == ["hidden"]
    torch.testing.assert_close(logits, net.fc(net.hidden(x)), rtol=0, atol=0)


def test_an_output_without_logits_is_refused():
    net = Net(lambda net, x: net.fc(x), fc=nn.Linear(4, 5))
    for output in (None, "text", {"scores": torch.ones(2, 3, 4)}, (), 3.0):
        with pytest.raises(InputError, match=r"the network returned .*: no logits were found.*logits='NAME'"):
            Network.of(net).logits_of(output)
    net = Net(lambda net, x: {"map": net.fc(F.relu(x))[..., None]}, fc=nn.Linear(4, 5))
    with pytest.raises(InputError, match=r"a mapping of 'map': a float32 tensor of shape \(2, 5, 1\)"):
        find_taps(net, torch.randn(2, 4))


@pytest.mark.parametrize("shape", [(2,), (2, 5, 3), (2, 5, 1, 1), (2, 1)])
def test_logits_that_are_not_examples_by_classes_are_refused(shape):
    net = Net(lambda net, x: F.relu(net.fc(x)).new_zeros(len(x), *shape[1:]), fc=nn.Linear(4, 3))
    with pytest.raises(
        InputError, match=r"the logits have shape \(2.*expected those of a classifier, \(examples, classes\)"
    ):
        find_taps(net, torch.randn(2, 4))
    with pytest.raises(InputError, match="the logits have shape"):
        observe(net, Taps([], ["linear", "relu"]), torch.randn(2, 4), lambda *_: None)


class TwoInputs(nn.Module):
    """An image and numbers beside it; a table that belongs to no example."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2)
        self.mlp = nn.Linear(6, 4)
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, image, numbers, scale=None):
        out = self.conv(image).relu().mean((2, 3)) + torch.tanh(self.mlp(numbers))
        return self.fc(out if scale is None else out * scale)


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "UserDict"])
def test_several_inputs(kind):
    net = TwoInputs()
    image, numbers, scale = torch.randn(3, 3, 5, 5), torch.randn(3, 6), torch.rand(4)
    inputs = {"image": image, "numbers": numbers, "scale": scale}
    if kind in ("tuple", "list"):
        inputs = (tuple if kind == "tuple" else list)(inputs.values())
    elif kind == "UserDict":
        inputs = UserDict(inputs)
    assert count_examples(inputs) == 3
    taps, seen, logits = watched(net, inputs)
    assert taps.names == ["conv", "relu", "mlp", "tanh"]
    torch.testing.assert_close(seen["conv"], net.conv(image).flatten(2), rtol=0, atol=0)
    torch.testing.assert_close(seen["tanh"], net.mlp(numbers).tanh()[..., None], rtol=0, atol=0)
    torch.testing.assert_close(logits, net(image, numbers, scale), rtol=0, atol=0)


def test_nested_inputs_and_what_is_no_tensor():
    def forward(net, pair, *, factor, flag):
        assert flag is None
        first, second = pair
        return net.fc(F.relu(net.hidden(first) + net.hidden(second)) * factor)

    net = Net(forward, hidden=nn.Linear(4, 6), fc=nn.Linear(6, CLASSES))
    inputs = {"pair": (torch.randn(3, 4), torch.randn(3, 4)), "factor": 2.0, "flag": None}
    taps, seen, _ = watched(net, inputs)
    assert taps.names == ["hidden", "hidden#2", "relu"]
    torch.testing.assert_close(seen["hidden#2"][..., 0], net.hidden(inputs["pair"][1]), rtol=0, atol=0)


def test_token_ids_as_input():
    net = Net(
        lambda net, input_ids, attention_mask: Output(
            net.fc((F.relu(net.embed(input_ids)) * attention_mask[..., None]).mean(1)), input_ids
        ),
        embed=nn.Embedding(30, 8),
        fc=nn.Linear(8, CLASSES),
    )
    ids = torch.randint(30, (3, 6))
    mask = torch.ones(3, 6, dtype=torch.int64)
    taps, seen, _ = watched(net, {"input_ids": ids, "attention_mask": mask})
    assert [(tap.name, tap.channel_axis, tap.shape) for tap in taps] == [("relu", 2, (1, 6, 8))]
    torch.testing.assert_close(seen["relu"], net.embed(ids).relu().transpose(1, 2), rtol=0, atol=0)


def test_an_empty_batch_is_refused():
    with pytest.raises(InputError, match="the batch is empty"):
        find_taps(small(), torch.randn(0, 3, 6, 6))
    with pytest.raises(InputError, match="forward accepts none of the keys of a dict"):
        find_taps(small(), {})


@pytest.mark.parametrize("examples", [1, 2, 3, 7])
def test_the_batch_the_taps_were_found_with_does_not_matter(examples):
    net, x = small(), torch.randn(7, 3, 6, 6)
    taps = find_taps(net, x[:examples])
    assert taps == find_taps(net, x)
    check_alone(net, taps, x)


# --- the network is left as found --------------------------------------------------------------------


class Mixed(nn.Module):
    """Parts in training and parts in evaluation mode; dropout and batch normalisation."""

    def __init__(self, fail=False):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.frozen = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.drop = nn.Dropout(0.5)
        self.head = Head(4)
        self.fail = fail
        self.train()
        self.frozen.eval()
        self.frozen[2].train()
        self.head.training = False

    def forward(self, x):
        x = self.drop(self.frozen(self.bn(self.conv(x)).relu_()))
        if self.fail:
            raise KeyError("in the network")
        return self.head(x)


def state(net):
    """All there is to a network that can be seen from outside."""
    hooks = [
        [dict(getattr(m, name)) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")]
        for m in net.modules()
    ]
    flags = [m.training for m in net.modules()]
    tensors = [(n, t.clone(), t.requires_grad, t.grad) for n, t in net.state_dict(keep_vars=True).items()]
    attributes = [sorted(vars(m)) for m in net.modules()]
    return hooks, flags, attributes, tensors


def assert_untouched(before, after):
    assert before[:3] == after[:3]
    for (name, value, needs, grad), (name2, value2, needs2, grad2) in zip(before[3], after[3], strict=True):
        assert (name, needs, grad) == (name2, needs2, grad2)
        assert value.equal(value2), name


def test_the_network_is_left_as_found():
    net, x = Mixed(), torch.randn(3, 3, 6, 6)
    net.conv.register_forward_hook(lambda *_: None)
    net.bn.register_forward_pre_hook(lambda *_: None)
    before, random = state(net), torch.get_rng_state()
    taps = find_taps(net, x)
    assert_untouched(before, state(net))
    flags = []
    seen = {}

    def receive(number, maps):
        flags.append([m.training for m in net.modules()])
        seen[taps[number].name] = maps.clone()

    logits = observe(net, taps, x, receive)
    assert len(flags) == len(taps)
    assert not any(any(each) for each in flags)
    assert_untouched(before, state(net))
    assert torch.get_rng_state().equal(random)
    assert torch.is_grad_enabled()
    net.eval()
    torch.testing.assert_close(logits, net(x), rtol=0, atol=0)
    hidden = net.bn(net.conv(x)).relu()
    torch.testing.assert_close(seen["relu"], hidden.flatten(2), rtol=0, atol=0)


def test_the_network_is_left_as_found_after_an_exception():
    net, x = Mixed(), torch.randn(3, 3, 6, 6)
    taps = find_taps(net, x)
    before = state(net)

    def break_off(number, maps):
        raise KeyError("in the caller")

    with pytest.raises(KeyError, match="in the caller"):
        observe(net, taps, x, break_off)
    assert_untouched(before, state(net))
    net.fail = True
    for call in (lambda: find_taps(net, x), lambda: observe(net, taps, x, lambda *_: None)):
        with pytest.raises(KeyError, match="in the network"):
            call()
        assert_untouched(before, state(net))
    net.fail = False
    with pytest.raises(TapError, match="no tap matches"):
        find_taps(net, x, "nothing")
    wider = Taps([replace(taps[0], shape=(1, 5, 4, 4)), *taps[1:]], taps.operations)
    with pytest.raises(TapError, match="has shape"):
        observe(net, wider, x, lambda *_: None)
    assert_untouched(before, state(net))
    assert find_taps(net, x) == taps  # and works again


def test_an_exception_inside_that_the_network_catches():
    class Fails(nn.Module):
        def forward(self, x):
            raise ArithmeticError

    def forward(net, x):
        try:
            x = net.fails(x)
        except ArithmeticError:
            x = net.conv(x)
        return net.head(F.relu(x))

    net = Net(forward, fails=Fails(), conv=nn.Conv2d(3, 4, 1), head=Head(4))
    assert find_taps(net, torch.randn(2, 3, 4, 4)).names == ["conv", "relu"]


def test_what_a_network_keeps_is_of_use_in_training():
    """A table computed at the first call must not be an inference tensor, whoever calls first."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2, self.table = nn.Linear(4, 6), nn.Linear(6, CLASSES), None

        def forward(self, x):
            if self.table is None:
                self.table = torch.linspace(0, 1, 6).cos()
            return self.fc2(torch.relu(self.fc1(x)) * self.table)

    for first in ("find_taps", "observe", "fit"):
        net, x = Keeps(), torch.randn(40, 4)
        if first == "find_taps":
            with torch.inference_mode():
                find_taps(net, x)
        elif first == "observe":
            taps = find_taps(net, x)
            net.table = None
            with torch.inference_mode():
                observe(net, taps, x, lambda *_: None)
        else:
            with pytest.warns(gramwatch.GramwatchWarning):
                GramDetector(net, orders=[1]).fit([x], progress=False)
        assert net.table is not None
        net(x).sum().backward()
        assert net.fc1.weight.grad is not None


def test_what_a_network_keeps_while_evaluating_is_forgotten():
    """As LeViT does: a bias is looked up once in evaluation mode, and forgotten when training begins."""

    class Caches(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias, self.cache = nn.Parameter(torch.zeros(6)), None

        def train(self, mode=True):
            super().train(mode)
            if mode:
                self.cache = None

        def forward(self, x):
            if self.training:
                return x + self.bias
            if self.cache is None:
                self.cache = self.bias.detach().clone()
            return x + self.cache

    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), Caches(), nn.Linear(6, CLASSES)).train()
    net[3].training = False
    x = torch.randn(3, 4)
    taps = find_taps(net, x)
    observe(net, taps, x, lambda *_: None)
    assert [m.training for m in net] == [True, True, True, False]
    with torch.no_grad():
        net[2].bias += 1
    net.eval()
    torch.testing.assert_close(net(x), net[3](net[0](x).relu() + 1))


def test_a_module_that_prepares_for_evaluation():
    class Prepares(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.fused = nn.Parameter(torch.randn(6, 4)), None

        def train(self, mode=True):
            self.fused = None if mode else 2 * self.weight.detach()
            return super().train(mode)

        def forward(self, x):
            return F.linear(x, 2 * self.weight if self.training else self.fused)

    net = nn.Sequential(Prepares(), nn.ReLU(), nn.Linear(6, CLASSES)).train()
    taps, seen, _ = watched(net, x := torch.randn(3, 4))
    assert taps.names == ["0", "1"]
    torch.testing.assert_close(seen["0"][..., 0], x @ (2 * net[0].weight).t())
    assert net[0].fused is None
    assert net[0].training


def test_a_train_method_that_will_not_have_evaluation():
    class Stubborn(nn.Sequential):
        def train(self, mode=True):
            return super().train(True)

    net = Stubborn(nn.Linear(4, 40), nn.ReLU(), nn.Dropout(0.5), nn.Linear(40, CLASSES))
    x = torch.randn(3, 4)
    taps, _, logits = watched(net, x)
    torch.testing.assert_close(logits, net[3](net[0](x).relu()), rtol=0, atol=0)
    assert all(m.training for m in net.modules())
    assert taps.names == ["0", "1"]


def test_a_network_that_writes_into_its_input():
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, CLASSES))
    x = torch.randn(3, 4)
    with torch.inference_mode():
        taps = find_taps(net, x.clone())
        seen, _ = watch(net, taps, x.clone())
    torch.testing.assert_close(seen["0"][..., 0], x.relu(), rtol=0, atol=0)


def test_gradients_are_not_computed_and_the_callers_mode_is_kept():
    net, x = small(), torch.randn(2, 3, 6, 6)
    with torch.enable_grad():
        taps, seen, logits = watched(net, x.requires_grad_())
        assert torch.is_grad_enabled()
    assert not logits.requires_grad
    assert not any(maps.requires_grad for maps in seen.values())
    with torch.inference_mode():
        watch(net, taps, x)
        assert torch.is_inference_mode_enabled()


def test_a_call_that_writes_is_made_once():
    net = Net(
        lambda net, x: (net.total.add_((y := net.hidden(x)).sum(0)), net.fc(F.relu(y) + net.total.sum(0)))[1],
        hidden=nn.Linear(4, 6),
        fc=nn.Linear(6, CLASSES),
    )
    net.register_buffer("total", torch.zeros(2, 6))
    x = torch.randn(3, 4)
    assert find_taps(net, x).names == ["hidden", "relu"]
    # Run on two, then on three copies of the first example.
    torch.testing.assert_close(net.total, 5 * net.hidden(x[:1]).expand(2, 6))


def test_lazy_modules_are_made_on_the_way():
    net = nn.Sequential(
        nn.LazyConv2d(4, 1), nn.ReLU(), nn.Flatten(), nn.LazyLinear(6), nn.LazyLinear(CLASSES)
    )
    taps, _, _ = watched(net, torch.randn(2, 3, 4, 4))
    assert axes(taps) == {"0": (1, 4), "1": (1, 4), "3": (1, 6)}


def test_half_precision_and_autocast():
    net, x = small().bfloat16(), torch.randn(2, 3, 6, 6).bfloat16()
    taps, seen, _ = watched(net, x)
    assert taps == find_taps(small(), x.float())
    assert seen["conv"].dtype == torch.bfloat16
    net, x = small(), torch.randn(2, 3, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        again, seen, _ = watched(net, x)
    assert again == taps
    assert seen["conv"].dtype == torch.bfloat16


# --- threads -----------------------------------------------------------------------------------------


def test_a_thread_that_finishes_does_not_disturb_one_that_runs():
    net, x = Mixed(), torch.randn(3, 3, 6, 6)
    taps = find_taps(net, x)
    before = state(net)
    expected, expected_logits = watch(net, taps, x)
    began, other_done = threading.Event(), threading.Event()
    results = {}

    def slow():
        seen = {}

        def receive(number, maps):
            seen[taps[number].name] = maps.clone()
            if number == 0:
                began.set()
                assert other_done.wait(30)

        results["logits"] = observe(net, taps, x, receive)
        results["seen"] = seen

    thread = threading.Thread(target=slow)
    thread.start()
    assert began.wait(30)
    assert not net.training  # the other is in the middle
    seen, logits = watch(net, taps, x)
    find_taps(net, x)
    assert not net.training  # and still is
    other_done.set()
    thread.join(30)
    assert_untouched(before, state(net))
    for found, found_logits in ((seen, logits), (results["seen"], results["logits"])):
        torch.testing.assert_close(found_logits, expected_logits, rtol=1e-5, atol=1e-6)
        assert list(found) == list(expected)
        for name in found:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


def test_many_threads_at_once_on_a_network_in_training_mode():
    net = Mixed()
    xs = [torch.randn(n + 1, 3, 6, 6) for n in range(4)]
    taps = find_taps(net, xs[0])
    before = state(net)
    expected = [watch(net, taps, x) for x in xs]
    barrier, failures, done = threading.Barrier(len(xs)), [], []

    def work(number):
        try:
            barrier.wait(30)
            for _ in range(15):
                seen, logits = watch(net, taps, xs[number])
                torch.testing.assert_close(logits, expected[number][1], rtol=1e-5, atol=1e-6)
                for name in taps.names:
                    torch.testing.assert_close(seen[name], expected[number][0][name], rtol=1e-5, atol=1e-6)
                assert find_taps(net, xs[number]) == taps
            done.append(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert sorted(done) == [0, 1, 2, 3]
    assert_untouched(before, state(net))


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="needs PyTorch 2.6")
def test_threads_leave_compiling_as_found():
    backend, graphs = counting_backend()
    part = nn.Conv2d(3, 3, 1)
    net = nn.Sequential(torch.compile(part, backend=backend), nn.ReLU(), Head(3)).eval()
    x = torch.randn(2, 3, 4, 4)
    taps = find_taps(net, x)
    began, go = threading.Event(), threading.Event()

    def slow():
        def receive(number, _):
            began.set()
            assert go.wait(30)

        observe(net, taps, x, receive)

    with pytest.warns(GramwatchWarning, match="is compiled"):
        observe(net, taps, x, lambda *_: None)
    thread = threading.Thread(target=slow)
    thread.start()  # begins first and ends first, in the middle of ours
    assert began.wait(30)

    def receive(number, _):
        go.set()
        thread.join(30)

    observe(net, taps, x, receive)
    assert not thread.is_alive()
    assert graphs == []
    net(x)
    assert len(graphs) == 1
