"""ReAct, ASH, SCALE and DICE: against the papers' loops in float64, and against pytorch-ood."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gramwatch.errors import GramwatchWarning, InputError, NotFittedError, TapError
from gramwatch.evaluation.evaluate import fit_together
from gramwatch.files import artifact
from gramwatch.methods import ASH, DICE, METHODS, SCALE, Energy, Method, ReAct
from gramwatch.methods.shaping import WIDE, PercentileShaping, kept
from gramwatch.observe.observation import Head, Observation

CASES: list[tuple[type[Method], dict[str, Any]]] = [
    (ReAct, {}),
    (ReAct, {"percentile": 60}),
    (ASH, {}),
    (ASH, {"percentile": 90}),
    (ASH, {"variant": "p", "percentile": 65}),
    (ASH, {"variant": "b", "percentile": 65}),
    (SCALE, {}),
    (SCALE, {"percentile": 85}),
    (DICE, {}),
    (DICE, {"sparsity": 0.5}),
]
NAMES = [f"{method.name}-{'-'.join(map(str, choices.values())) or 'default'}" for method, choices in CASES]


class Net(nn.Module):
    """Images of 6 x 6, 12 features that are nowhere negative, 4 classes."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 12, 3), nn.Linear(12, 4, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x).relu().mean((2, 3)))

    def pooled(self, x: Tensor) -> Tensor:
        return self.conv(x).relu().mean((2, 3))


@pytest.fixture
def net() -> Net:
    return Net().eval()


def images(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def fitted(method: type[Method], net: nn.Module, **choices: Any) -> Method:
    return method(net, **choices).fit(images(60).split(16), progress=False)


def energy_by_hand(logits: list[float]) -> float:
    return -math.log(sum(math.exp(z) for z in logits))


def logits_by_hand(weight: np.ndarray, bias: np.ndarray, features: list[float]) -> list[float]:
    return [
        sum(weight[c][d] * features[d] for d in range(len(features))) + bias[c] for c in range(len(weight))
    ]


def percentile(detector: Method, width: int) -> float:
    assert isinstance(detector, PercentileShaping)
    return detector.percentile_of(width)


def by_hand(detector: Method, training: np.ndarray, features: np.ndarray, head: nn.Linear) -> list[float]:
    """Each method as its paper has it, one number at a time."""
    weight, bias = head.weight.detach().double().numpy(), head.bias.detach().double().numpy()
    width = features.shape[1]
    scores = []
    for row in features:
        h = [float(v) for v in row]
        masked = weight
        if isinstance(detector, ReAct):
            clip = float(np.percentile([v for r in training for v in r], percentile(detector, width)))
            h = [min(v, clip) for v in h]
        elif isinstance(detector, ASH | SCALE):
            count = width - round(width * percentile(detector, width) / 100)
            top = sorted(range(width), key=lambda d, h=h: -h[d])[:count]
            before, after = sum(h), sum(h[d] for d in top)
            if isinstance(detector, SCALE):
                h = [v * math.exp(before / after) for v in h]
            else:
                by = {"p": lambda v: v, "b": lambda _, s=before, k=count: s / k}
                by["s"] = lambda v, s=before, t=after: v * math.exp(s / t)
                h = [by[detector.variant](h[d]) if d in top else 0.0 for d in range(width)]
        elif isinstance(detector, DICE):
            mean = [sum(float(r[d]) for r in training) / len(training) for d in range(width)]
            value = [[weight[c][d] * mean[d] for d in range(width)] for c in range(len(weight))]
            least = float(np.percentile(value, 100 * detector.sparsity))
            masked = np.array(
                [
                    [weight[c][d] if value[c][d] > least else 0.0 for d in range(width)]
                    for c in range(len(weight))
                ]
            )
        scores.append(energy_by_hand(logits_by_hand(masked, bias, h)))
    return scores


@pytest.mark.parametrize(("method", "choices"), CASES, ids=NAMES)
def test_as_in_the_paper(method: type[Method], choices: dict[str, Any], net: Net) -> None:
    detector, test = fitted(method, net, **choices), images(200, seed=2)
    logits, scores = detector.score_inputs(test)
    with torch.no_grad():
        training, features = (net.pooled(x).double().numpy() for x in (images(60), test))
        assert torch.allclose(logits, net(test), atol=1e-6)
    expected = torch.tensor(by_hand(detector, training, features, net.fc), dtype=torch.float64)
    assert scores.dtype == torch.float64
    assert torch.allclose(scores, expected, atol=1e-5)
    assert not torch.allclose(scores, Energy(net).score_inputs(test)[1], rtol=0, atol=1e-6)


def test_numbers_that_one_can_check() -> None:
    """Two features, two classes, everything known."""
    head = Head(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([0.5, -0.5]))
    seen = Observation(torch.zeros(1, 2), torch.tensor([[3.0, 1.0]]), head)

    def energy(*z: float) -> float:
        return -math.log(sum(math.exp(v) for v in z))

    net = Net()
    react = ReAct(net, percentile=50)
    react.take(Observation(torch.zeros(2, 2), torch.tensor([[0.0, 1.0], [2.0, 4.0]]), head))
    react.finish()  # the median of 0 1 2 4 is 1.5
    assert float(react.judged(seen)) == pytest.approx(energy(1.5 + 0.5, 2 - 0.5))
    sharp = math.exp(4 / 3)
    assert float(ASH(net, percentile=50).judged(seen)) == pytest.approx(energy(3 * sharp + 0.5, -0.5))
    assert float(ASH(net, variant="p", percentile=50).judged(seen)) == pytest.approx(energy(3.5, -0.5))
    assert float(ASH(net, variant="b", percentile=50).judged(seen)) == pytest.approx(energy(4.5, -0.5))
    assert float(SCALE(net, percentile=50).judged(seen)) == pytest.approx(
        energy(3 * sharp + 0.5, 2 * sharp - 0.5)
    )
    dice = DICE(net, sparsity=0.7)  # contributions 1 0 0 4: only the last is above their 70th percentile
    dice.take(Observation(torch.zeros(2, 2), torch.tensor([[0.0, 1.0], [2.0, 3.0]]), head))
    dice.finish()
    assert dice.mask_ is not None
    assert dice.mask_.tolist() == [[False, False], [False, True]]
    assert float(dice.judged(seen)) == pytest.approx(energy(0.5, 1.5))
    kept_all = DICE(net, sparsity=0.0)
    kept_all.take(Observation(torch.zeros(2, 2), torch.tensor([[0.0, 1.0], [2.0, 3.0]]), head))
    kept_all.finish()
    assert kept_all.mask_ is not None
    assert kept_all.mask_.all()
    assert float(kept_all.judged(seen)) == pytest.approx(energy(3.5, 1.5))


def test_the_default_percentile_is_the_one_published_for_the_width(net: Net) -> None:
    published = {ASH: (65, 90), SCALE: (65, 85), ReAct: (99, 90)}
    for method, (narrow, wide) in published.items():
        detector = method(net)
        assert [detector.percentile_of(width) for width in (64, WIDE - 1)] == [narrow, narrow]
        assert [detector.percentile_of(width) for width in (WIDE, 2048)] == [wide, wide]
        assert method(net, percentile=75).percentile_of(64) == 75
    assert ASH(net).variant == "s"
    assert DICE(net).sparsity == 0.7


def test_kept() -> None:
    assert kept(342, 90) == 34
    assert kept(3, 99) == 1


# --- against pytorch-ood ------------------------------------------------------------------------------


def test_as_in_pytorch_ood(net: Net) -> None:
    others = pytest.importorskip("pytorch_ood.detector")
    test, labels = images(16, seed=3), torch.zeros(60, dtype=torch.long)
    with torch.no_grad():
        training, features = net.pooled(images(60)), net.pooled(test)
    maps, training_maps = features[:, :, None, None], training[:, :, None, None]

    def head(x: Tensor) -> Tensor:
        return net.fc(x.flatten(1))

    def same(ours: Method, theirs: Tensor) -> None:
        assert torch.allclose(ours.score_inputs(test)[1].float(), theirs.float(), rtol=1e-4, atol=1e-5)

    # Given the pooled features, and not maps as its examples do, its ReAct agrees.
    react = others.ReAct(None, head, percentile=0.9).fit_feature_maps(training_maps, labels)
    same(fitted(ReAct, net, percentile=90), react.predict_feature_maps(maps))
    for variant in "spb":
        ash = others.ASH(None, head, variant=f"ash-{variant}", percentile=0.9)
        same(ASH(net, variant=variant, percentile=90), ash.predict_feature_maps(maps.clone()))
    scale = others.SCALE(None, head, percentile=0.85)
    same(SCALE(net, percentile=85), scale.predict_feature_maps(maps))
    dice = others.DICE(None, net.fc.weight, net.fc.bias, p=0.9).fit_features(training, labels)
    same(fitted(DICE, net, sparsity=0.9), dice.predict_features(features))


def test_clipping_before_and_after_pooling_differ(net: Net) -> None:
    """The fault of clipping maps: their 90th percentile says nothing of pooled features."""
    others = pytest.importorskip("pytorch_ood.detector")
    test, labels = images(16, seed=3), torch.zeros(60, dtype=torch.long)
    with torch.no_grad():
        training, maps = net.conv(images(60)).relu(), net.conv(test).relu()

    def head(x: Tensor) -> Tensor:
        return net.fc(x.mean((2, 3)))

    theirs = others.ReAct(None, head, percentile=0.9).fit_feature_maps(training, labels)
    ours = fitted(ReAct, net, percentile=90)
    assert isinstance(ours, ReAct)
    assert ours.clip_ is not None
    assert theirs.threshold > float(ours.clip_)
    scores = ours.score_inputs(test)[1].float()
    assert not torch.allclose(scores, theirs.predict_feature_maps(maps).float(), atol=1e-3)


# --- what they share ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "choices"), CASES, ids=NAMES)
def test_saved_and_loaded(method: type[Method], choices: dict[str, Any], net: Net, tmp_path: Path) -> None:
    detector = fitted(method, net, **choices).calibrate(images(40, seed=5).split(16), progress=False)
    detector.save(tmp_path / "detector.safetensors")
    saved = artifact.read(tmp_path / "detector.safetensors")
    assert saved.header["detector"] == method.name
    again = METHODS[method.name].from_artifact(saved, net)
    test = images(9, seed=2)
    assert torch.equal(again.score_inputs(test)[1], detector.score_inputs(test)[1])
    assert again.threshold_ == detector.threshold_
    for name in method.settings:
        assert getattr(again, name) == getattr(detector, name)
    assert not again.tuned_on_outliers
    assert not again.gradients


@pytest.mark.parametrize(("method", "choices"), CASES, ids=NAMES)
def test_nothing_of_the_model_changes(method: type[Method], choices: dict[str, Any]) -> None:
    net = Net().train()
    net.conv.eval()
    net.fc.weight.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    test = images(4)
    given = test.clone()
    fitted(method, net, **choices).score_inputs(test)
    assert (net.training, net.conv.training, net.fc.training) == (True, False, True)
    assert [p.requires_grad for p in net.parameters()] == [True, True, False, True]
    assert all(p.grad is None for p in net.parameters())
    assert all(torch.equal(before[name], p) for name, p in net.named_parameters())
    assert torch.equal(test, given)


@pytest.mark.parametrize("method", [ReAct, ASH, SCALE, DICE])
def test_without_the_last_layer(method: type[Method]) -> None:
    detector = method(Net(), features="conv")
    with pytest.raises(TapError, match=f"{method.name} needs the weights of the linear layer"):
        detector.fit([images(8)], progress=False).score_inputs(images(2))


@pytest.mark.parametrize("method", [ReAct, DICE])
def test_a_missing_last_layer_is_said_at_the_first_batch(method: type[Method]) -> None:
    def batches() -> Iterator[Tensor]:
        yield images(8)
        yield images(8)
        raise AssertionError("the fit went on")

    with pytest.raises(TapError, match=f"{method.name} needs the weights of the linear layer"):
        method(Net(), features="conv").fit(batches(), progress=False)


@pytest.mark.parametrize("method", [ReAct, ASH, SCALE, DICE])
def test_a_last_layer_without_bias(method: type[Method]) -> None:
    net = Net(bias=False).eval()
    scores = fitted(method, net).score_inputs(images(3))[1]
    assert scores.isfinite().all()


@pytest.mark.parametrize("method", [ASH, SCALE])
@pytest.mark.parametrize("variant", ["s", "p", "b"])
def test_features_that_are_all_zero_are_judged_by_the_bias(method: type[Method], variant: str) -> None:
    detector = method(Net(), **({"variant": variant} if method is ASH else {}))
    head = Head(torch.ones(2, 20), torch.tensor([1.0, 2.0]))
    seen = Observation(torch.zeros(1, 2), torch.zeros(1, 20), head)
    assert float(detector.judged(seen)) == pytest.approx(-math.log(math.e + math.e**2))


def test_broken_inputs_score_infinity(net: Net) -> None:
    broken = images(4)
    broken[1] = math.nan
    for method in (ReAct, ASH, SCALE, DICE):
        scores = fitted(method, net).score_inputs(broken)[1]
        assert scores.isinf().tolist() == [False, True, False, False]


def test_fitted_together_as_alone(net: Net) -> None:
    together: dict[str, Method] = {m.name: m(net) for m in (ReAct, ASH, SCALE, DICE)}
    fit_together(together, images(60).split(16), progress=False)
    for detector in together.values():
        alone = fitted(type(detector), net)
        assert torch.equal(detector.score_inputs(images(5))[1], alone.score_inputs(images(5))[1])


def test_other_features_than_fitted_on(net: Net) -> None:
    react = fitted(ReAct, net)
    with pytest.raises(InputError, match="12 features, 5 were given"):
        react.judged(Observation(torch.zeros(1, 4), torch.zeros(1, 5), Head(torch.ones(4, 5), torch.ones(4))))


def test_errors(net: Net) -> None:
    for method in (ReAct, ASH, SCALE):
        for wrong in (-1, 100, 250):
            with pytest.raises(ValueError, match="percentile must lie in"):
                method(net, percentile=wrong)
    with pytest.raises(ValueError, match="variant must be 's', 'p' or 'b'"):
        ASH(net, variant="x")
    for wrong in (-0.1, 1.0):
        with pytest.raises(ValueError, match="sparsity must lie in"):
            DICE(net, sparsity=wrong)
    for method in (ReAct, DICE):
        with pytest.raises(NotFittedError):
            method(net).score_inputs(images(2))
        with pytest.raises(InputError, match="no example: there is nothing to fit"):
            method(net).fit([], progress=False)
        with (
            pytest.warns(GramwatchWarning, match=r"2 training example\(s\) with NaN"),
            pytest.raises(InputError, match="no finite training example"),
        ):
            method(net).fit([images(2) * math.nan], progress=False)
