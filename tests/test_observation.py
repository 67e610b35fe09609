"""What one forward pass shows: features, the layer that makes the logits, channel means."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gramwatch import GramDetector, InputError, TapError, networks
from gramwatch.observation import Observation, Observer
from gramwatch.taps import find_head


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
    observer = Observer(net, ["features", "head"])
    seen = observer(x)
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
        Observer(net, ["features"])(x)
    assert Observer(net)(x).features is None


def test_features_can_be_named():
    net, x = Averaged().eval(), torch.randn(5, 1, 8, 8)
    seen = Observer(net, ["features"], features="conv")(x)
    with torch.no_grad():
        assert torch.allclose(seen.features, net.conv(x).mean((2, 3)), atol=1e-6)
    assert seen.head is None
    with pytest.raises(TapError, match="no tap matches 'nothing'"):
        Observer(net, ["features"], features="nothing")(x)
    with pytest.raises(TapError, match="names 4 taps"):
        Observer(net, ["features"], features="*")(x)


def test_channel_means_are_those_of_each_tap():
    net, x = Plain().eval(), torch.randn(5, 1, 8, 8)
    observer = Observer(net, ["channel_means"], taps="all")
    seen = observer(x)
    assert observer.taps.names == ["conv", "relu"]
    with torch.no_grad():
        conv = net.conv(x)
    assert torch.allclose(seen.channel_means[0], conv.mean((2, 3)), atol=1e-6)
    assert torch.allclose(seen.channel_means[1], conv.relu().mean((2, 3)), atol=1e-6)


@pytest.mark.parametrize(
    ("make", "width"),
    [(networks.resnet34, 512), (networks.densenet_bc_100_12, 342), (networks.wide_resnet_40_2, 128)],
)
def test_the_papers_networks_show_their_features(make, width):
    seen = Observer(make().eval(), ["features", "head"])(torch.randn(2, 3, 32, 32))
    assert seen.features.shape == (2, width)
    assert torch.allclose(seen.head(seen.features), seen.logits, atol=1e-4)


def test_what_is_not_finite_is_marked():
    net, x = Plain().eval(), torch.randn(4, 1, 8, 8)
    x[1, 0, 3, 3] = torch.nan
    x[2] = 1e38
    net.conv.weight.data *= 100
    assert Observer(net, ["features"])(x).finite.tolist() == [True, False, False, True]


def test_an_unknown_need_and_an_empty_batch_are_refused():
    with pytest.raises(ValueError, match="an observation has no"):
        Observer(Plain(), ["gradients"])
    with pytest.raises(InputError, match="empty"):
        Observer(Plain())(torch.empty(0, 1, 8, 8))


def test_observations_are_joined_and_taken_apart():
    net = Plain().eval()
    observer = Observer(net, ["features", "channel_means"])
    x, labels = torch.randn(6, 1, 8, 8), torch.arange(6)
    whole = observer(x, labels)
    joined = Observation.joined([observer(x[:2], labels[:2]), observer(x[2:], labels[2:])])
    assert torch.allclose(joined.features, whole.features, atol=1e-6)
    assert torch.equal(joined.labels, labels)
    assert torch.equal(joined.classes, labels)
    assert torch.equal(observer(x).classes, whole.predicted)
    some = joined[torch.tensor([4, 1])]
    assert len(some) == 2
    assert some.labels.tolist() == [4, 1]
    assert torch.equal(some.channel_means[1], joined.channel_means[1][[4, 1]])


@pytest.mark.filterwarnings("ignore:.*fewer than 20:gramwatch.GramwatchWarning")
@pytest.mark.parametrize("needs", [[], ["features"], ["features", "head", "channel_means"]])
def test_a_gram_detector_can_watch_the_same_pass(needs):
    net, x = Plain().eval(), torch.randn(40, 1, 8, 8)
    net.head.bias.data -= net(x).mean(0)
    gram = GramDetector(net, taps=["relu"]).fit([x], progress=False)
    y = torch.randn(7, 1, 8, 8)
    runs = []
    net.register_forward_hook(lambda *_: runs.append(1))
    observer = Observer(net, needs)
    observer(y)
    runs.clear()
    collector = gram.collector(y)
    seen = observer(y, beside=[collector])
    assert len(runs) == 1
    found = gram.measured(y, seen.logits, collector.statistics)
    alone = gram.measure(y)
    assert torch.equal(found.deviations, alone.deviations)
    assert torch.equal(found.logits, alone.logits)
