"""What one forward pass shows: features, the layer that makes the logits, channel means."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gramwatch import GramDetector, InputError, TapError
from gramwatch.detect.passes import plan_for
from gramwatch.methods import METHODS
from gramwatch.observe.needs import Needs
from gramwatch.observe.observation import Observation
from gramwatch.observe.plan import Plan
from gramwatch.watch import Look, Network, find_head
from gramwatch_lab.networks import densenet_bc_100_12, resnet34, wide_resnet_40_2


def planned(net: nn.Module, needs: Needs, x: torch.Tensor) -> Plan:
    return Plan.of(Network.of(net), [needs], x)


def observe(net: nn.Module, needs: Needs, x: torch.Tensor) -> Observation:
    return planned(net, needs, x)(x)[0]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 6, 3), nn.Linear(6, 4)

    def features(self, x):
        return F.relu(self.conv(x)).mean((2, 3))

    def forward(self, x):
        return self.head(self.features(x))


class Convolutional(Plain):
    """The logits are made by a convolution over a map of one pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(6, 4, 1, bias=False)

    def forward(self, x):
        return self.head(self.features(x)[:, :, None, None]).flatten(1)


class Averaged(Plain):
    """The logits are averaged after their layer: they are not linear in one vector that could be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(6, 4, 1)

    def forward(self, x):
        return self.head(F.relu(self.conv(x))).relu().mean((2, 3))


class Cosine(Plain):
    def forward(self, x):
        return F.normalize(self.features(x)) @ F.normalize(self.head.weight).T


class Named(Plain):
    def forward(self, x):
        return F.linear(bias=self.head.bias, weight=self.head.weight, input=self.features(x))


@pytest.mark.parametrize("make", [Plain, Convolutional, Named])
def test_features_are_the_input_of_the_layer_that_makes_the_logits(make):
    net, x = make().eval(), torch.randn(5, 1, 8, 8)
    seen = observe(net, Needs(features=True), x)
    with torch.no_grad():
        assert torch.equal(seen.features, net.features(x))
        assert torch.equal(seen.logits, net(x))
    assert seen.head.weight.shape == (4, 6)
    assert torch.allclose(seen.head(seen.features), seen.logits, atol=1e-6)
    assert seen.finite.all()


@pytest.mark.parametrize("make", [Averaged, Cosine])
def test_a_network_whose_logits_no_linear_layer_makes_is_refused(make):
    net, x = make().eval(), torch.randn(5, 1, 8, 8)
    assert find_head(net, x) is None
    with pytest.raises(TapError, match=f"logits of {make.__name__} are not made by one linear layer"):
        planned(net, Needs(features=True), x)
    assert observe(net, Needs(), x).features is None


def test_features_can_be_named():
    net, x = Averaged().eval(), torch.randn(5, 1, 8, 8)
    seen = observe(net, Needs(features=True, features_at="conv"), x)
    with torch.no_grad():
        assert torch.allclose(seen.features, net.conv(x).mean((2, 3)), atol=1e-6)
    assert seen.head is None
    with pytest.raises(TapError, match="no tap matches 'nothing'"):
        planned(net, Needs(features=True, features_at="nothing"), x)
    with pytest.raises(TapError, match="names 4 taps"):
        planned(net, Needs(features=True, features_at="*"), x)


def test_a_layer_may_have_the_name_of_a_selection():
    net, x = Plain().eval(), torch.randn(5, 1, 8, 8)
    net.all = net.conv
    del net.conv
    net.features = lambda x: F.relu(net.all(x)).mean((2, 3))
    seen = observe(net, Needs(features=True, features_at="all", means="all"), x)
    assert len(seen.channel_means) == 2
    assert torch.equal(seen.features, seen.channel_means[0])


def test_channel_means_are_those_of_each_tap():
    net, x = Plain().eval(), torch.randn(5, 1, 8, 8)
    plan = planned(net, Needs(means="all"), x)
    (seen,) = plan(x)
    assert plan.taps.names == ["conv", "relu"]
    with torch.no_grad():
        conv = net.conv(x)
    assert torch.allclose(seen.channel_means[0], conv.mean((2, 3)), atol=1e-6)
    assert torch.allclose(seen.channel_means[1], conv.relu().mean((2, 3)), atol=1e-6)


@pytest.mark.parametrize(
    ("make", "width"),
    [(resnet34, 512), (densenet_bc_100_12, 342), (wide_resnet_40_2, 128)],
)
def test_the_papers_networks_show_their_features(make, width):
    seen = observe(make().eval(), Needs(features=True), torch.randn(2, 3, 32, 32))
    assert seen.features.shape == (2, width)
    assert torch.allclose(seen.head(seen.features), seen.logits, atol=1e-4)


def test_what_is_not_finite_is_marked():
    net, x = Plain().eval(), torch.randn(4, 1, 8, 8)
    x[1, 0, 3, 3] = torch.nan
    x[2] = 1e38
    net.conv.weight.data *= 100
    assert observe(net, Needs(features=True), x).finite.tolist() == [True, False, False, True]


def test_an_unknown_need_and_an_empty_batch_are_refused():
    class Curious(METHODS["msp"]):
        looks_at = frozenset({"gradients"})

    with pytest.raises(ValueError, match=r"cannot look at \['gradients'\]"):
        Curious(Plain())
    plan = planned(Plain(), Needs(), torch.randn(2, 1, 8, 8))
    with pytest.raises(InputError, match="empty"):
        plan(torch.empty(0, 1, 8, 8))
    with pytest.raises(InputError, match="empty"):
        planned(Plain(), Needs(features=True), torch.empty(0, 1, 8, 8))


def test_observations_are_joined_and_taken_apart():
    net = Plain().eval()
    x, labels = torch.randn(6, 1, 8, 8), torch.arange(6)
    plan = planned(net, Needs(features=True, means="all"), x)
    (whole,), (first,), (rest,) = plan(x, labels), plan(x[:2], labels[:2]), plan(x[2:], labels[2:])
    joined = Observation.joined([first, rest])
    assert torch.allclose(joined.features, whole.features, atol=1e-6)
    assert torch.equal(joined.labels, labels)
    assert torch.equal(joined.classes, labels)
    assert torch.equal(plan(x)[0].classes, whole.predicted)
    some = joined[torch.tensor([4, 1])]
    assert len(some) == 2
    assert some.labels.tolist() == [4, 1]
    assert torch.equal(some.channel_means[1], joined.channel_means[1][[4, 1]])


@pytest.mark.filterwarnings("ignore:.*fewer than 20:gramwatch.GramwatchWarning")
@pytest.mark.parametrize("name", ["msp", "knn", "fdbd", "mahalanobis"])
def test_a_gram_detector_shares_a_pass_with_a_method(name):
    net, x = Plain().eval(), torch.randn(40, 1, 8, 8)
    net.head.bias.data -= net(x).mean(0)
    gram = GramDetector(net, taps=["relu"]).fit([x], progress=False)
    y = torch.randn(7, 1, 8, 8)
    runs = []
    net.register_forward_hook(lambda *_: runs.append(1))
    method = METHODS[name](net)
    plan = plan_for([gram, method], Look(gram.network, y))
    runs.clear()
    mine, other = plan(y)
    assert len(runs) == 1
    found, alone = gram.measured(mine), gram.measure(y)
    (apart,) = plan_for([method], Look(method.network, y))(y)
    for a, b in ((other.features, apart.features), (other.logits, apart.logits)):
        assert (a is None and b is None) or torch.equal(a, b)
    for a, b in zip(other.channel_means, apart.channel_means, strict=True):
        assert torch.equal(a, b)
    assert other.statistics is None
    assert torch.equal(found.deviations, alone.deviations)
    assert torch.equal(found.logits, alone.logits)


# --- watching modules instead of all calls -----------------------------------------------------------


class Modules(nn.Module):
    """Every watched call is that of a module of its own. One module is called twice."""

    def __init__(self, functional: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2, self.relu = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 8, 3), nn.ReLU(inplace=True)
        self.head, self.functional = nn.Linear(8, 4), functional

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = F.relu(self.conv2(x)) if self.functional else self.relu(self.conv2(x))
        return self.head(x.mean((2, 3)))


def read_both_ways(net: nn.Module) -> tuple[Plan, Observation, Observation]:
    """The plan, what it reads by watching modules, and what it reads by watching all calls."""
    torch.manual_seed(1)
    plan, x = planned(net, Needs(means="all"), torch.randn(2, 1, 8, 8)), torch.randn(5, 1, 8, 8)
    by_modules = plan(x)[0]
    kept, plan._makers = plan._makers, ()
    by_calls = plan(x)[0]
    plan._makers = kept
    return plan, by_modules, by_calls


def test_modules_are_watched_if_they_make_all_calls():
    net = Modules().eval()
    plan, by_modules, by_calls = read_both_ways(net)
    assert plan._makers == ((0, net.conv1), (1, net.relu), (2, net.conv2), (3, net.relu))  # not the head
    assert [tap.name for tap in plan.taps] == ["conv1", "relu", "conv2", "relu#2"]
    for one, other in zip(by_modules.channel_means, by_calls.channel_means, strict=True):
        assert torch.equal(one, other)
    assert not any(module._forward_hooks for module in net.modules())


class Scaled(nn.Linear):
    """The input of the module is not that of its linear layer."""

    def forward(self, x):
        return F.linear(2 * x, self.weight, self.bias)


def test_the_head_is_watched_as_a_module_too():
    net, x = Modules().eval(), torch.randn(5, 1, 8, 8)
    plan = planned(net, Needs(features=True, means=("conv1",)), x)
    layers = (net.conv1, net.relu, net.conv2, net.relu, net.head)
    assert plan._makers == tuple(enumerate(layers))  # another path is refused
    by_modules, plan._makers = plan(x)[0], ()
    by_calls = plan(x)[0]
    assert torch.equal(by_modules.features, by_calls.features)
    torch.testing.assert_close(plan.head(by_modules.features), by_modules.logits)
    net.head = Scaled(8, 4)
    scaled = planned(net, Needs(features=True), x)
    assert scaled._makers == ()
    torch.testing.assert_close(scaled.head(scaled(x)[0].features), scaled(x)[0].logits)


def test_a_head_with_an_input_by_keyword_is_watched_by_its_calls():
    class Named(Modules):
        def forward(self, x):
            return self.head(input=self.relu(self.conv1(x))[:, :, 0].mean(2).repeat(1, 2)[:, :8])

    plan = planned(Named().eval(), Needs(features=True), x := torch.randn(5, 1, 8, 8))
    assert plan._makers == ()
    seen = plan(x)[0]
    torch.testing.assert_close(plan.head(seen.features), seen.logits)


def test_a_head_with_a_parametrisation_is_watched_by_its_module():
    net, x = Modules().eval(), torch.randn(5, 1, 8, 8)
    nn.utils.parametrizations.weight_norm(net.head)
    plan = planned(net, Needs(features=True, means=("conv1",)), x)
    by_modules, plan._makers = plan(x)[0], ()
    assert torch.equal(by_modules.features, plan(x)[0].features)


def test_modules_that_make_no_tap_have_no_hook():
    net, x = Modules().eval(), torch.randn(5, 1, 8, 8)
    everything = planned(net, Needs(means="all"), x)(x)[0].channel_means
    hooked = []
    net.register_forward_pre_hook(
        lambda *_: hooked.append([name for name, module in net.named_modules() if module._forward_hooks])
    )
    plan = planned(net, Needs(means=("relu#2",)), x)
    hooked.clear()
    (last,) = plan(x)[0].channel_means
    assert plan._makers == ((1, net.relu), (3, net.relu))  # it is called twice, and the second time counts
    assert hooked == [["relu"]]
    assert torch.equal(last, everything[3])


def test_all_calls_are_watched_if_a_function_makes_one():
    assert read_both_ways(Modules(functional=True).eval())[0]._makers == ()


def test_hooks_of_others_come_after_ours_and_stay():
    """A tap is what the network computes, not what a hook makes of it."""
    net = Modules().eval()
    plan = planned(net, Needs(means="all"), torch.randn(2, 1, 8, 8))
    x = torch.randn(5, 1, 8, 8)
    before = plan(x)[0].channel_means[0]
    handle = net.conv1.register_forward_hook(lambda module, args, result: 100 + result)
    assert torch.equal(plan(x)[0].channel_means[0], before)
    assert plan._makers
    assert list(net.conv1._forward_hooks) == [handle.id]


def test_a_module_that_was_replaced_is_watched_by_its_calls():
    net = Modules().eval()
    plan, expected, _ = read_both_ways(net)
    torch.manual_seed(1)
    torch.randn(2, 1, 8, 8)
    x = torch.randn(5, 1, 8, 8)
    new = nn.Conv2d(6, 8, 3)
    new.load_state_dict(net.conv2.state_dict())
    net.conv2 = new
    found = plan(x)[0]
    assert plan._makers == ()
    for one, other in zip(found.channel_means, expected.channel_means, strict=True):
        assert torch.equal(one, other)


def test_another_path_is_refused_in_the_same_words_and_leaves_no_hook():
    net = Modules().eval()
    plan = planned(net, Needs(means="all"), torch.randn(2, 1, 8, 8))
    net.relu.forward = lambda x: net.conv1(x[:, :1])  # a module that calls another one
    with pytest.raises(TapError, match="calls 'conv2d' where 'relu' was expected"):
        plan(torch.randn(5, 1, 8, 8))
    assert not any(module._forward_hooks for module in net.modules())


def test_threads_that_share_modules_see_their_own_tensors():
    net = Modules().eval()
    plan = planned(net, Needs(means="all"), torch.randn(2, 1, 8, 8))
    batches = [torch.randn(3, 1, 8, 8) for _ in range(8)]
    expected = [plan(x)[0].channel_means for x in batches]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: [plan(x)[0].channel_means for _ in range(10)], batches))
    for each, means in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for again in each for a, b in zip(again, means, strict=True))
    assert plan._makers
    assert not any(module._forward_hooks for module in net.modules())


def test_batches_with_and_without_labels_are_joined_without_labels():
    """Labels of some examples would belong to others."""
    logits = torch.randn(4, 3)
    with_labels = Observation(logits, labels=torch.arange(4) % 3)
    joined = Observation.joined([with_labels, Observation(logits)])
    assert len(joined) == 8
    assert joined.labels is None
    assert Observation.joined([with_labels, with_labels]).labels.tolist() == [0, 1, 2, 0] * 2
